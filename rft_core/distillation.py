"""Distances to a teacher's whole distributions, computed inside the update: they would fit no table.

Shapes: T completion tokens of a micro-batch, flat, row after row; V vocabulary; P some of the T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rft_core.batching import MicroBatch
from rft_core.errors import ContractError, SettingsError
from rft_core.kernels.divergence import token_divergence
from rft_core.kernels.token_logprob import token_logprob
from rft_core.policy import Policy
from rft_core.terms import Algorithm


def score_batch(
    policy: Policy,
    teacher: Policy | None,
    batch: MicroBatch,
    temperature: float,
    algorithm: Algorithm,
    has_trunk: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(logprob_T, entropy_T, divergence_T, hidden_TD), float32, by one forward pass of the policy and one of the
    teacher; divergences are None where the loss reads none, hidden states where no other head reads them (`has_trunk`).
    Logits of both exist a few rows at a time, and again in the backward pass.

    Raises ContractError when a divergence is wanted and there is no teacher.
    """
    entropy_gradient = algorithm.needs_entropy_gradient
    distillation = algorithm.distillation
    if not distillation.coefficient and has_trunk:
        logprobs_T, entropy_T, hidden_TD = policy.logprobs_and_hidden(
            batch, temperature, entropy_gradient=entropy_gradient
        )
        return logprobs_T, entropy_T, None, hidden_TD
    if not distillation.coefficient:
        return *policy.token_logprobs(batch, temperature, entropy_gradient=entropy_gradient), None, None
    if teacher is None:
        raise ContractError(f"algorithm {algorithm.name} needs a teacher in its update, got none")
    with torch.no_grad():
        teacher_TX, teacher_head = teacher.features(batch)
    features_TX, head = policy.features(batch)

    def piece(features: Tensor, teacher_features: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        logits_PV = head(features)
        with torch.no_grad():
            teacher_logits_PV = teacher_head(teacher_features)
        divergence_P = token_divergence(
            logits_PV, teacher_logits_PV, temperature, distillation.beta, distillation.top_k
        )
        return *token_logprob(logits_PV, targets, temperature, entropy_gradient=entropy_gradient), divergence_P

    targets_T = batch.target_T.to(policy.device)
    logprobs_T, entropy_T, divergence_T = policy.in_pieces(piece, features_TX, teacher_TX, targets_T)
    return logprobs_T, entropy_T, divergence_T, features_TX if has_trunk else None


def refuse_other_layout(policy: Policy, teacher: Policy) -> None:
    """Raises SettingsError where the teacher cannot compute the policy's micro-batches."""
    if policy.is_packed:
        fits = teacher.window is None or (policy.window is not None and teacher.window >= policy.window)
        if not (teacher.is_packed and fits):
            raise SettingsError(
                "the teacher's attention must be computed on packed rows as the policy's is, without a shorter window; "
                f"{teacher.folder} does not allow it: take a teacher of the policy's family"
            )
        return
    if teacher.max_shared_tokens < policy.max_shared_tokens:
        raise SettingsError(
            f"model.shared_prefix must be false with this teacher: the policy lets completions share a prompt up to "
            f"{policy.max_shared_tokens} tokens, {teacher.folder} up to {teacher.max_shared_tokens}"
        )
