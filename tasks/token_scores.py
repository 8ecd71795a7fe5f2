"""The token-score stage: what credit needs beforehand of the policy and its reference, computed once and kept."""

from __future__ import annotations

import time

from prefect.client.schemas.objects import State

from data_contracts.refs import TableRef, content_key
from tasks.context import opened
from tasks.rounds import read_all
from tasks.semantics import SEMANTICS
from tasks.stage import Slot, commit, report, reuse, stage_task, write


@stage_task("token-scores")
def score_tokens(run: str, slot: Slot, rollouts: list[TableRef]) -> State[TableRef]:
    """Values of a step's train rollouts by the scorers that the algorithm's credit needs."""
    from rft_core import token_scores

    context = opened(run)
    began = time.monotonic()
    recipe = context.recipe
    before = context.policy(slot.step - 1)
    settings = {
        "temperature": recipe.rollout.temperature,
        "micro_batch_tokens": recipe.training.micro_batch_tokens,
        "model": recipe.model.content(),
    }
    ids = {"old": before.policy_id, "reference": context.root_policy.policy_id}
    models = {name: ids[name] for name in context.algorithm.credit_scorers}
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
        policy = context.policies.materialise(before).policy
        scorer = {"old": lambda: policy, "reference": context.policies.reference}
        table = token_scores.score_tokens(
            read_all(context, rollouts),
            policy,
            [token_scores.NamedScorer(name, model_id, scorer[name]()) for name, model_id in models.items()],
            recipe.rollout.temperature,
            recipe.training.micro_batch_tokens,
            context.progress(slot.name),
        )
        refs = {"token_scores": write(context, "token_scores", key, table, rollouts, settings)}
    commit(context, slot, refs, began=began, reused=reused)
    return report(context, slot, {"rows": refs["token_scores"].rows}, refs["token_scores"], reused)
