"""From an algorithm's row and a micro-batch to a loss and the sums behind its metrics. Knows no algorithm by name.

Shapes: T completion tokens of a micro-batch, R its rows. Sums add over micro-batches and ranks, except those whose name
ends in `_max` or `_min`. Metrics come from unclamped float64 values.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rft_core.errors import ContractError
from rft_core.gates import GATES, REGULARIZER_GATES, STEP_GATES, StepTokens
from rft_core.losses import (
    AGGREGATIONS,
    CORRECTIONS,
    KL_ESTIMATORS,
    LEVELS,
    MAX_LOG_RATIO,
    ROW_KINDS,
    SELECTING_CORRECTIONS,
    Counts,
    Denominators,
    LossBatch,
    LossParts,
    Rows,
    ratio_of,
)
from rft_core.preference_step import preference_metrics
from rft_core.surrogates import LIKELIHOOD_SURROGATES, REGULARIZERS, SURROGATES, Tokens
from rft_core.value_loss import value_metrics

if TYPE_CHECKING:
    from rft_core.terms import Algorithm, Correction, Term

MAX_EXPONENT = 700.0  # exp of it is the last power of ten that float64 holds: a metric stays a number


@dataclass(frozen=True)
class CleanBatch:
    """A LossBatch without anything that could poison a sum: masked and missing values are finite constants.

    `where` on a result alone would still let NaN into the gradient, since 0 x NaN is NaN on the way back.
    """

    batch: LossBatch
    rows: Rows
    logprobs_T: Tensor
    old_T: Tensor
    advantages_T: Tensor
    behaviour_T: Tensor  # old where it is not known
    is_known_T: Tensor  # trained tokens with a behaviour logprob
    off_policy_T: Tensor  # trained tokens of off-policy rows
    weight_T: Tensor


def loss_parts(algorithm: Algorithm, batch: LossBatch, denominators: Denominators, step: int) -> LossParts:
    """See `Algorithm.loss`. Raises ContractError when a term's anchor or the KL term lacks its logprobs."""
    clean = clean_batch(batch)
    sums = [{"tokens": batch.mask_T.sum()}, _sampling_sums(clean)]
    policy_loss = clean.logprobs_T.sum().double() * 0.0  # a graph even when no row belongs to any term
    for term in algorithm.terms:
        term_loss, term_sums = _policy_loss(term, algorithm.correction, clean, denominators)
        policy_loss = policy_loss + algorithm.coefficient_of(term, step) * term_loss
        sums.append(term_sums)
        if algorithm.takes_experts:
            sums.append({f"{term.rows}_loss": term_loss.detach()})
    loss = policy_loss
    if batch.reference_logprobs_T is not None and algorithm.terms:
        kl_loss, kl_sums = _kl_loss(algorithm, clean, denominators)
        sums.append(kl_sums)
        loss = loss + algorithm.kl.coefficient * kl_loss
    elif algorithm.kl.coefficient > 0:
        raise ContractError("a KL term needs reference_logprobs_T, got none")
    if batch.entropy_T is not None:
        # In a mixture over what the policy wrote, as the KL.
        mask_T = _rows_of_term("own", clean).mask_T if algorithm.takes_experts else batch.mask_T
        num_tokens = denominators.tokens_of("own") if algorithm.takes_experts else denominators.tokens
        entropy_T = torch.where(mask_T, batch.entropy_T, torch.zeros_like(batch.entropy_T)).double()
        sums.append({"entropy": entropy_T.detach().sum(), "entropy_tokens": mask_T.sum()})
        if algorithm.needs_entropy_gradient:
            bonus = (entropy_T * clean.weight_T).sum() / max(num_tokens, 1.0)
            loss = loss - algorithm.entropy_coefficient * bonus
    elif algorithm.needs_entropy_gradient:
        raise ContractError("an entropy bonus needs entropy_T, got none")
    if algorithm.distillation.coefficient:
        distance = _distance(clean, denominators)
        sums.append({"distillation": distance.detach()})
        loss = loss + algorithm.distillation.coefficient * distance
    sums.append({"loss": loss.detach(), "policy_loss": policy_loss.detach()})
    return LossParts(loss, _to_floats(merge_sums(sums)))


def clean_batch(batch: LossBatch) -> CleanBatch:
    zeros_T = torch.zeros_like(batch.logprobs_T)
    logprobs_T = torch.where(batch.mask_T, batch.logprobs_T, zeros_T)
    old_T = logprobs_T.detach()
    if batch.old_logprobs_T is not None:
        old_T = torch.where(batch.mask_T, batch.old_logprobs_T.detach().to(zeros_T.dtype), zeros_T)
    behaviour_T, is_known_T = old_T, torch.zeros_like(batch.mask_T)
    if batch.behaviour_logprobs_T is not None:
        is_known_T = batch.mask_T & ~batch.behaviour_logprobs_T.isnan()
        behaviour_T = torch.where(is_known_T, batch.behaviour_logprobs_T.to(zeros_T.dtype), old_T)
    return CleanBatch(
        batch=batch,
        rows=Rows.of(batch.mask_T, batch.row_T, batch.group_R),
        logprobs_T=logprobs_T,
        old_T=old_T,
        advantages_T=torch.where(batch.mask_T, batch.advantages_T, torch.zeros_like(batch.advantages_T)),
        behaviour_T=behaviour_T,
        is_known_T=is_known_T,
        off_policy_T=batch.mask_T & batch.off_policy_R[batch.row_T],
        weight_T=batch.weight_R[batch.row_T],
    )


def _rows_of_term(rows_kind: str, clean: CleanBatch) -> Rows:
    batch = clean.batch
    if batch.term_R is None:
        return clean.rows if rows_kind == "own" else Rows.of(batch.mask_T & False, batch.row_T, batch.group_R)
    mask_T = batch.mask_T & (batch.term_R == ROW_KINDS.index(rows_kind))[batch.row_T]
    return Rows.of(mask_T, batch.row_T, batch.group_R)


def _aggregate(name: str, loss_T: Tensor, rows: Rows, clean: CleanBatch, kind: str, over: Denominators) -> Tensor:
    weighted_T = loss_T.double() * clean.weight_T
    masked_T = torch.where(rows.mask_T, weighted_T, torch.zeros_like(weighted_T))
    return AGGREGATIONS[name](masked_T, rows, over.counts.get(kind, Counts()), over.max_completion_tokens)


def _policy_loss(
    term: Term, correction: Correction, clean: CleanBatch, denominators: Denominators
) -> tuple[Tensor, dict[str, Tensor]]:
    rows = _rows_of_term(term.rows, clean)
    anchor_T = _anchor(term, rows, clean)
    token_log_ratio_T = clean.logprobs_T - anchor_T
    log_ratio_T = LEVELS[term.level](token_log_ratio_T, rows, clean.advantages_T, term.log_ratio_bound)
    tokens = Tokens(clean.logprobs_T, anchor_T, ratio_of(log_ratio_T), clean.advantages_T, clean.behaviour_T)
    surrogate = term.surrogate if callable(term.surrogate) else SURROGATES[term.surrogate]
    loss_T = surrogate(tokens, term)
    sums = _ratio_sums(term, rows, log_ratio_T.detach(), token_log_ratio_T.detach(), clean.advantages_T, denominators)
    if term.gate != "none":
        is_kept_T = _kept(term, tokens, rows, clean)
        loss_T = torch.where(is_kept_T, loss_T, torch.zeros_like(loss_T))
        sums |= {"gate_kept": (is_kept_T & rows.mask_T).sum(), "gate_tokens": rows.mask_T.sum()}
    # Given rows were sampled by no policy that is known: there is nothing to correct.
    if correction.kind != "none" and term.anchor != "behaviour" and term.rows != "expert":
        from_current = term.surrogate in LIKELIHOOD_SURROGATES or getattr(term.surrogate, "is_likelihood", False)
        weight_T, weight_sums = _correction(correction, clean, rows, from_current)
        loss_T = loss_T * weight_T
        sums |= weight_sums
    if term.regularizer != "none":
        added_T = REGULARIZERS[term.regularizer](tokens)
        if term.regularizer_gate != "none":
            is_held_T = _of_step(term, clean)
            added_T = torch.where(is_held_T, added_T, torch.zeros_like(added_T))
        loss_T = loss_T + term.regularizer_coefficient * added_T
    return _aggregate(term.aggregation, loss_T, rows, clean, term.rows, denominators), sums


def _kept(term: Term, tokens: Tokens, rows: Rows, clean: CleanBatch) -> Tensor:
    return GATES[term.gate](tokens, rows, term) if term.gate in GATES else _of_step(term, clean)


def _of_step(term: Term, clean: CleanBatch) -> Tensor:
    if clean.batch.step_kept_T is None:
        raise ContractError(f"gate {term.step_gate} needs step_kept_T, from a pass over the whole step, got none")
    return clean.batch.step_kept_T


def step_kept(algorithm: Algorithm, batches: Sequence[LossBatch], draws: Sequence[Tensor]) -> list[Tensor]:
    """What the gate over a whole optimizer step keeps, bool[T] of each of its micro-batches (`step_kept_T`).

    `batches` are all micro-batches of the step, scored without gradients by the weights of now; `draws` holds a seeded
    number in [0, 1) of each of their tokens. Raises ContractError when the term's anchor or entropies are missing.
    """
    term = algorithm.step_gate
    if term is None or term.step_gate is None:
        raise ValueError(f"algorithm {algorithm.name} has no gate over the whole optimizer step")
    parts = [_step_tokens(term, clean_batch(batch), draw_T) for batch, draw_T in zip(batches, draws, strict=True)]
    tokens = StepTokens(*(torch.cat(values) for values in zip(*parts, strict=True)))
    kept_T = (STEP_GATES | REGULARIZER_GATES)[term.step_gate](tokens, term)
    return list(kept_T.split([len(batch.mask_T) for batch in batches]))


def _step_tokens(term: Term, clean: CleanBatch, draw_T: Tensor) -> StepTokens:
    rows, entropy_T = _rows_of_term(term.rows, clean), clean.batch.entropy_T
    if entropy_T is None:
        raise ContractError("a gate over the whole optimizer step needs entropy_T, got none")
    log_ratio_T = (clean.logprobs_T - _anchor(term, rows, clean)).detach()
    entropy_T = torch.where(rows.mask_T, entropy_T.detach(), torch.zeros_like(entropy_T))
    return StepTokens(log_ratio_T, clean.logprobs_T.detach(), clean.advantages_T, entropy_T, rows.mask_T, draw_T)


def _anchor(term: Term, rows: Rows, clean: CleanBatch) -> Tensor:
    if term.anchor != "behaviour":
        return clean.old_T
    if bool((rows.mask_T & ~clean.is_known_T).any()):
        raise ContractError("a term anchored at the behaviour policy needs behaviour_logprobs on each of its rows")
    return clean.behaviour_T


def _correction(
    correction: Correction, clean: CleanBatch, rows: Rows, from_current: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weights of off-policy tokens, 1 elsewhere, and what they did. One sample is a token, or a row when they share."""
    trainer_T = clean.logprobs_T.detach() if from_current else clean.old_T
    gap_T = torch.where(clean.is_known_T, trainer_T - clean.behaviour_T, torch.zeros_like(trainer_T))
    ratio_T = ratio_of(LEVELS[correction.level](gap_T, rows, clean.advantages_T, math.inf))
    weight_T = CORRECTIONS[correction.kind](ratio_T, rows, correction)
    is_kept_T = weight_T > 0 if correction.kind in SELECTING_CORRECTIONS else weight_T == ratio_T
    is_weighted_T = clean.off_policy_T & rows.mask_T
    has_known_R = rows.sum_R((clean.is_known_T & is_weighted_T).float()) > 0
    is_sample_T = is_weighted_T & has_known_R[rows.row_T]
    if correction.level != "token":
        is_first_T = rows.mask_T & (_rank_in_row(rows) == 0)
        is_sample_T = is_sample_T & is_first_T
    samples = weight_T[is_sample_T].double()
    sums = {
        "weight": samples.sum(),
        "weight_square": samples.square().sum(),
        "weight_count": is_sample_T.sum(),
        "weight_kept": is_kept_T[is_sample_T].sum(),
        "uncorrected_tokens": (is_weighted_T & ~clean.is_known_T).sum(),
    }
    if samples.numel():
        sums |= {"weight_min": samples.min(), "weight_max": samples.max()}
    return torch.where(is_weighted_T, weight_T, torch.ones_like(weight_T)), sums


def _rank_in_row(rows: Rows) -> Tensor:
    """int64[T]: how many trained tokens of the row come before this one."""
    before_T = rows.mask_T.cumsum(0) - rows.mask_T.long()
    start_R = rows.length_R.long().cumsum(0) - rows.length_R.long()
    return before_T - start_R[rows.row_T]


def _ratio_sums(
    term: Term,
    rows: Rows,
    log_ratio_T: Tensor,
    token_log_ratio_T: Tensor,
    advantages_T: Tensor,
    denominators: Denominators,
) -> dict[str, Tensor]:
    """Clip counts as shares of all trained tokens of the step that are of the term: rows of advantage 0 may be left out
    of the batch. Rows that the data gives have no ratio to a policy."""
    if term.rows == "expert":
        return {}
    log_T = torch.where(rows.mask_T, log_ratio_T, torch.zeros_like(log_ratio_T))
    sums = {}
    if log_T.numel():
        sums["log_ratio_max"] = torch.where(rows.mask_T, log_T, torch.full_like(log_T, -torch.inf)).max()
    ratio_T = log_T.double().clamp(max=MAX_EXPONENT).exp()
    if term.level == "sequence_geometric_clipped":
        low, high, clipped_T = -term.log_ratio_bound, term.log_ratio_bound, token_log_ratio_T
    elif term.surrogate == "clipped":
        low, high, clipped_T = 1 - term.clip_low, 1 + term.clip_high, ratio_T
    elif term.surrogate == "capped":
        low, high, clipped_T = term.weight_floor, term.weight_cap, ratio_T
    else:
        return sums
    is_low_T = rows.mask_T & (advantages_T < 0) & (clipped_T < low)
    is_high_T = rows.mask_T & (advantages_T > 0) & (clipped_T > high)
    total = max(denominators.tokens_of(term.rows), 1.0)
    sums |= {"clip_low": is_low_T.sum().double() / total, "clip_high": is_high_T.sum().double() / total}
    if term.surrogate == "clipped" and term.dual_clip is not None:
        is_dual_T = rows.mask_T & (advantages_T < 0) & (ratio_T > term.dual_clip)
        sums["clip_dual"] = is_dual_T.sum().double() / total
    return sums


def _kl_loss(algorithm: Algorithm, clean: CleanBatch, denominators: Denominators) -> tuple[Tensor, dict[str, Tensor]]:
    kl, first = algorithm.kl, algorithm.terms[0]
    rows = _rows_of_term(first.rows, clean)
    reference_T = torch.where(rows.mask_T, clean.batch.reference_logprobs_T, torch.zeros_like(clean.logprobs_T))
    difference_T = torch.where(rows.mask_T, clean.logprobs_T, torch.zeros_like(clean.logprobs_T)) - reference_T
    exact_T = difference_T.detach().double().clamp(min=-MAX_EXPONENT)
    sums = {
        "kl_k1": torch.where(rows.mask_T, exact_T, torch.zeros_like(exact_T)).sum(),
        "kl_k3": torch.where(rows.mask_T, KL_ESTIMATORS["k3"](exact_T), torch.zeros_like(exact_T)).sum(),
        "kl_tokens": rows.mask_T.sum(),
    }
    sums["kl_row_means"] = rows.mean_R(KL_ESTIMATORS["k3"](exact_T)).sum()
    sums["kl_rows"] = (rows.length_R > 0).sum()
    loss_T = KL_ESTIMATORS[kl.estimator](difference_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    if kl.value_clamp is not None:
        loss_T = loss_T.clamp(-kl.value_clamp, kl.value_clamp)
    if kl.importance:
        loss_T = loss_T * ratio_of(clean.logprobs_T - clean.old_T)
    return _aggregate(first.aggregation, loss_T, rows, clean, first.rows, denominators), sums


def _distance(clean: CleanBatch, denominators: Denominators) -> Tensor:
    """Token mean of the divergence to a teacher, over all trained rows, own and given alike."""
    divergence_T = clean.batch.divergence_T
    if divergence_T is None:
        raise ContractError("distillation needs divergence_T, got none")
    kept_T = torch.where(clean.batch.mask_T, divergence_T, torch.zeros_like(divergence_T)).double()
    return (kept_T * clean.weight_T).sum() / max(denominators.tokens, 1.0)


def _sampling_sums(clean: CleanBatch) -> dict[str, Tensor]:
    gap_T = (clean.old_T - clean.behaviour_T).double().abs()[clean.is_known_T]
    sums = {"logp_difference": gap_T.sum(), "logp_difference_count": clean.is_known_T.sum()}
    if gap_T.numel():
        sums["logp_difference_max"] = gap_T.max()
    return sums


def _to_floats(sums: dict[str, Tensor]) -> dict[str, float]:
    """One transfer from the device for all of them."""
    stacked = torch.stack([torch.as_tensor(value).double() for value in sums.values()])
    return dict(zip(sums, stacked.tolist(), strict=True))


def merge_sums(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Sums of several micro-batches, ranks or terms as one."""
    merged: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            merge = _MERGES.get(name.rsplit("_", 1)[-1], operator.add)
            merged[name] = merge(merged[name], value) if name in merged else value
    return merged


def finish_metrics(parts: Iterable[dict[str, float]]) -> dict[str, float | int | None]:
    """The columns of record `updates` that the loss knows, from the sums of an optimizer step's micro-batches.

    Means are over trained tokens of the rows that were run; clip shares over all trained tokens of the step.
    """
    sums = merge_sums(parts)

    def mean(name: str, count: str) -> float | None:
        return sums.get(name, 0.0) / sums[count] if sums.get(count) else None

    weight_square = sums.get("weight_square", 0.0)
    effective = sums["weight"] ** 2 / (sums["weight_count"] * weight_square) if weight_square else None
    if weight_square == 0.0 and sums.get("weight_count"):
        effective = 0.0  # every weight was masked
    low, high = sums.get("clip_low", 0.0), sums.get("clip_high", 0.0)
    return {
        "loss": sums.get("loss", 0.0),
        "policy_loss": sums.get("policy_loss", 0.0),
        "own_loss": sums.get("own_loss"),
        "expert_loss": sums.get("expert_loss"),
        "distillation_loss": sums.get("distillation"),
        "kl": mean("kl_k3", "kl_tokens"),
        "kl_k1": mean("kl_k1", "kl_tokens"),
        "entropy": mean("entropy", "entropy_tokens"),
        "clip_ratio_low": low,
        "clip_ratio_high": high,
        "clip_ratio_region": low + high,
        "clip_ratio_dual": sums.get("clip_dual", 0.0),
        "gate_kept": mean("gate_kept", "gate_tokens"),
        "ratio_max": math.exp(min(sums.get("log_ratio_max", 0.0), MAX_EXPONENT)) if sums.get("tokens") else 1.0,
        "sampling_ratio_mean": mean("weight", "weight_count"),
        "sampling_ratio_min": sums.get("weight_min"),
        "sampling_ratio_max": sums.get("weight_max"),
        "correction_kept": mean("weight_kept", "weight_count"),
        "uncorrected_tokens": int(sums.get("uncorrected_tokens", 0)),
        "effective_sample_size": effective,
        "sampling_logp_difference_mean": mean("logp_difference", "logp_difference_count"),
        "sampling_logp_difference_max": sums.get("logp_difference_max"),
        **preference_metrics(sums),
        **value_metrics(sums),
    }


_MERGES = {"max": max, "min": min}
