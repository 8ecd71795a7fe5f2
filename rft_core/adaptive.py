"""Coefficients that follow what they bring about: each update leaves those of the next one in the training state."""

from __future__ import annotations

from dataclasses import replace

from rft_core.batching import TrainRow
from rft_core.entropy_options import adapted_entropy_coefficient
from rft_core.kl_controller import adapted_coefficient
from rft_core.terms import Algorithm, Kl
from rft_core.train_state import TrainState


def with_adapted(algorithm: Algorithm, state: TrainState) -> Algorithm:
    """The row with the coefficients that the last update left."""
    if algorithm.kl.target is not None and state.kl_coefficient is not None:
        algorithm = replace(algorithm, kl=replace(algorithm.kl, coefficient=state.kl_coefficient))
    if algorithm.adaptive_entropy is not None and state.entropy_coefficient is not None:
        algorithm = replace(algorithm, entropy_coefficient=state.entropy_coefficient)
    return algorithm


def adapt(state: TrainState, algorithm: Algorithm, sums: dict[str, float], rows: list[TrainRow]) -> None:
    """The coefficients of the next update, from the sums of all passes of this one."""
    if algorithm.kl.target is not None:
        num_rollouts = len({row.rollout_id for row in rows if row.num_trained_tokens})
        state.kl_coefficient = _next_kl_coefficient(algorithm.kl, sums, num_rollouts)
    if algorithm.adaptive_entropy is not None:
        mean = sums["entropy"] / sums["entropy_tokens"] if sums.get("entropy_tokens") else None
        state.entropy_coefficient = adapted_entropy_coefficient(
            algorithm.entropy_coefficient, mean, algorithm.adaptive_entropy
        )


def _next_kl_coefficient(kl: Kl, sums: dict[str, float], num_rollouts: int) -> float:
    """From the mean over rows of their token mean, over all passes of the update."""
    assert kl.target is not None, "only an adaptive coefficient has a next one"
    mean = sums["kl_row_means"] / sums["kl_rows"] if sums.get("kl_rows") else None
    return adapted_coefficient(kl.coefficient, mean, num_rollouts, kl.target, kl.horizon)
