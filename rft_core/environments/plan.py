"""What is to be rolled out, how a step's prompts are cut into blocks, and each row's identity."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pyarrow as pa

from data_contracts.errors import ContractError
from data_contracts.refs import PolicyRef
from data_contracts.schemas import canonical_json
from rft_core.engines import Sampling
from rft_core.seeds import derive


@dataclass(frozen=True)
class RolloutPlan:
    """One pass of rollouts over prompts. `id_prefix` is `step-00012` in training and `eval-00012-<round>` otherwise.
    `engine` is named where it computes the policy by other code than the trainer (engines.COMPUTES_APART).

    >>> plan = RolloutPlan(
    ...     step=12, round=0, purpose="train", group_size=8, sampling=Sampling(1.0, 1.0, 0, 16), run_seed=0,
    ...     policy=PolicyRef("ab" * 16, 11), id_prefix="step-00012",
    ... )
    >>> plan.rollout_id("gsm-00731", 3)
    'step-00012/gsm-00731/03'
    """

    step: int
    round: int
    purpose: str
    group_size: int
    sampling: Sampling
    run_seed: int
    policy: PolicyRef
    id_prefix: str
    engine: str | None = None

    @property
    def sampling_json(self) -> str:
        """What the rows say of how they were sampled."""
        return canonical_json({**self.sampling.to_json(), **({"engine": self.engine} if self.engine else {})})

    def group_id(self, prompt_id: str) -> str:
        return f"{self.id_prefix}/{prompt_id}"

    def rollout_id(self, prompt_id: str, index: int) -> str:
        return f"{self.id_prefix}/{prompt_id}/{index:02d}"

    def seed(self, prompt_id: str, index: int) -> int:
        """Of one row's random stream. Evaluations leave out the step: before and after training draw alike."""
        if self.purpose == "evaluation":
            return derive(self.run_seed, "evaluation", self.round, prompt_id, index)
        return derive(self.run_seed, "rollout", self.step, self.round, prompt_id, index)


def plan_blocks(prompts: pa.Table, block_groups: int, key: str = "prompt_id") -> list[pa.Table]:
    """The prompts in their order, `block_groups` at a time; the last block may be smaller.

    A block is the unit of generation, of commit and of loss by a crash. Blocks are cut by row alone, so equal prompts
    and settings give equal blocks in every process. A prompt that comes twice raises ContractError: groups are formed
    by id.
    """
    for prompt_id, count in Counter(prompts.column(key).to_pylist()).items():
        if count > 1:
            raise ContractError(f"a step must have distinct {key}, got {prompt_id!r} {count} times")
    return [prompts.slice(start, block_groups) for start in range(0, prompts.num_rows, block_groups)]
