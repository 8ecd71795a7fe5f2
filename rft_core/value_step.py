"""What a critic does in an optimizer step, beside the policy or alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from rft_core.batching import MicroBatch, TrainRow
from rft_core.critic import Critic
from rft_core.critic_settings import CriticSettings
from rft_core.errors import ContractError
from rft_core.losses import LossParts
from rft_core.mini_batches import MiniBatch
from rft_core.step_batches import Scores, value_batch
from rft_core.terms import Algorithm, ValueTerm
from rft_core.value_loss import value_loss


def with_value_term(algorithm: Algorithm, critic: Critic | None, settings: CriticSettings) -> Algorithm:
    """The row with the loss of values, where its credit reads any. Raises ValueError without a critic to train."""
    if not algorithm.needs_critic:
        return algorithm
    if critic is None:
        raise ValueError(f"algorithm {algorithm.name} needs a critic in the state that it trains, found none")
    return replace(algorithm, value=settings.term())


def refuse_without_returns(rows: Sequence[TrainRow], algorithm: Algorithm) -> None:
    """Raises ContractError for credit that was assigned without a critic."""
    if algorithm.value is None:
        return
    for row in rows:
        if row.num_trained_tokens and row.returns is None:
            raise ContractError(
                f"advantages must hold the returns that a critic is trained on, rollout {row.rollout_id} has none: "
                "assign credit anew by advantage gae (`rft rerun RUN --from advantages`)"
            )


def for_critic(
    critic: Critic | None, mini_batch: MiniBatch, algorithm: Algorithm, token_budget: int
) -> MiniBatch | None:
    """The same rows in the layout that the critic's model allows; null where none is trained."""
    if critic is None or algorithm.value is None:
        return None
    return replace(mini_batch, micro_batches=critic.model.micro_batches(mini_batch.forward_rows, token_budget))


def value_parts(
    term: ValueTerm | None, mini_batch: MiniBatch, batch: MicroBatch, scores: Scores, values_T: Tensor
) -> LossParts:
    assert term is not None, "values have a loss where the algorithm has its term"
    return value_loss(term, value_batch(mini_batch, batch, scores, values_T), mini_batch.denominators)


def accumulate_values(
    critic: Critic,
    term: ValueTerm | None,
    mini_batch: MiniBatch,
    scores: Scores,
    advance: Callable[[str], None],
    sums: list[dict[str, float]],
) -> float:
    """Forward and backward of the loss of values alone, up to the first that is not finite; adds to `sums`."""
    total = 0.0
    for batch in mini_batch.micro_batches:
        values_T, _ = critic.model.token_logprobs(batch, 1.0)
        parts = value_parts(term, mini_batch, batch, scores, values_T)
        sums.append(parts.sums)
        total += float(parts.loss.detach())
        if not math.isfinite(total):
            break
        parts.loss.backward()
        advance("forward and backward of the critic")
    return total
