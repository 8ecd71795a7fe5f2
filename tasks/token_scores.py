"""The token-score stage: what credit needs beforehand of the policy, its reference and a teacher, computed once and
kept. A teacher's scores are a table of their own, which other runs on the same rollouts find again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from prefect.client.schemas.objects import State

from data_contracts.refs import PolicyRef, TableRef, content_key
from tasks.context import RunContext, opened
from tasks.policy import critic_identity
from tasks.rounds import read_all
from tasks.semantics import SEMANTICS
from tasks.stage import Slot, commit, report, reuse, stage_task, write
from tasks.teacher import load_teacher

if TYPE_CHECKING:
    from rft_core.token_scores import NamedScorer

TEACHER = "teacher"
FIXED = (TEACHER,)  # scorers that stay the same while the policy trains


def tables_of(scorers: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The scorers of each table: those that are tied to the policy of the step, and those that are not."""
    changing = tuple(name for name in scorers if name not in FIXED)
    return [part for part in (changing, tuple(name for name in scorers if name in FIXED)) if part]


@stage_task("token-scores")
def score_tokens(run: str, slot: Slot, rollouts: list[TableRef], scorers: tuple[str, ...]) -> State[TableRef]:
    """Values of a step's train rollouts by these scorers, which the algorithm's credit needs."""
    from rft_core import token_scores

    context = opened(run)
    began = time.monotonic()
    recipe = context.recipe
    before = context.policy(slot.step - 1)
    settings = {
        "temperature": recipe.rollout.temperature,
        "micro_batch_tokens": recipe.training.micro_batch_tokens,
        "model": recipe.model.content(),
        # Its weights are part of the policy's training state, but for those that the first policy began with.
        **critic_identity(context, {}),
    }
    if TEACHER in scorers:
        settings["teacher"] = recipe.teacher.content()
    others = {"reference": context.root_policy.policy_id, TEACHER: context.identity.get(TEACHER, "")}
    models = {name: others.get(name, before.policy_id) for name in scorers}
    key = content_key(
        "token_scores",
        inputs=rollouts,
        settings=settings,
        identity=models,
        seed=recipe.seed,
        semantics=SEMANTICS["token_scores"],
    )
    refs = reuse(context, slot, {"token_scores": key})
    reused = refs is not None
    if refs is None:
        named = [_scorer(context, before, name, model_id) for name, model_id in models.items()]
        table = token_scores.score_tokens(
            read_all(context, rollouts),
            context.policies.materialise(before).policy,
            named,
            recipe.rollout.temperature,
            recipe.training.micro_batch_tokens,
            context.progress(slot.name),
        )
        refs = {"token_scores": write(context, "token_scores", key, table, rollouts, settings)}
    commit(context, slot, refs, began=began, reused=reused)
    return report(context, slot, {"rows": refs["token_scores"].rows}, refs["token_scores"], reused)


def _scorer(context: RunContext, before: PolicyRef, name: str, model_id: str) -> NamedScorer:
    from rft_core.critic import BehindTokens
    from rft_core.token_scores import NamedScorer

    state, teacher = context.policies.materialise(before), context.recipe.teacher
    if name == "reference":
        return NamedScorer(name, model_id, context.policies.reference())
    if name == TEACHER:
        return NamedScorer(name, model_id, load_teacher(context, state.policy, teacher.dtype, str(teacher.path)))
    if name == "old":
        return NamedScorer(name, model_id, state.policy)
    assert state.critic is not None, f"{name} needs a critic, which is started with the policy"
    critic: Any = state.critic.model if name == "critic" else BehindTokens(state.critic.model)
    return NamedScorer(name, model_id, critic, critic, only_cut=name == "critic_after")
