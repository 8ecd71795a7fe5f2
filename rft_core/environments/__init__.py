"""Environments: how prompts become conversations. The engine writes, the environment answers and keeps the record.

`single_turn` is the trivial case: one completion, no answer. Others call the engine once a turn for all rows that
still run, append their own tokens with completion_mask False, and fill turns, environment_reward and step_ends.

Each is a function of (engine, prompts_block, plan, tokenizer, progress) to a table of record `rollouts`, and keeps:

- a pure function of the block, the plan and the engine: nothing is remembered from block to block;
- exactly prompts x group_size rollouts, ordered by prompt and index, ids and seeds from the plan;
- the tokens that the engine returned, never tokenised again; completion_mask True for those alone;
- a rollout that fails is a row with status `error`, an error_reason and an empty completion. Only what concerns all
  rows raises (a dead engine, a wrong setting).
"""

from __future__ import annotations

from rft_core.environments.given import given_rollouts
from rft_core.environments.plan import RolloutPlan, plan_blocks
from rft_core.environments.single_turn import roll_out

__all__ = ["RolloutPlan", "given_rollouts", "plan_blocks", "roll_out"]
