"""Generalised Jensen-Shannon divergence of two next-token distributions, in float32, without copies of whole logits.

Shapes: T tokens, V vocabulary, C classes: the vocabulary, or the teacher's K likeliest tokens and one class for the
rest. With s the policy's distribution over the classes, t the teacher's and m = b t + (1 - b) s (GKD, arXiv 2306.13649,
eq. 1, with the two ends replaced by their own limits):

    b = 0     KL(t | s)                             h = s - t
    0 < b < 1 b KL(t | m) + (1 - b) KL(s | m)       h = (1 - b) s (log(s / m) - KL(s | m))
    b = 1     KL(s | t)                             h = s (log(s / t) - KL(s | t))

h is the gradient by the logit of a class; within the class of the rest it is shared out by the tokens' probabilities.
With d = log s - log t, log(m / t) = log1p((1 - b) expm1(d)) and log(m / s) = log1p(b expm1(-d)): equal distributions
give exactly 0, value and gradient. The backward pass computes the distributions again, a few rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rft_core.kernels.token_logprob import BUFFER_ELEMENTS, LOWEST

# Where probabilities differ by a factor beyond e^80, what the smaller one adds is lost in float32 anyway.
MAX_DIFFERENCE = 80.0
NUM_BUFFERS = 8  # [rows, V] tensors at work at once


def token_divergence(
    logits_TV: Tensor, teacher_logits_TV: Tensor, temperature: float, beta: float, top_k: int | None = None
) -> Tensor:
    """divergence_T in nats, float32, of softmax(logits / temperature) to the teacher's, which carries no gradient.

    Logits of the teacher beyond the policy's vocabulary are left out, as if those tokens did not exist. Raises
    ValueError for a teacher with fewer.
    """
    if logits_TV.ndim != 2 or teacher_logits_TV.shape[0] != logits_TV.shape[0]:
        raise ValueError(f"logits must fit row by row, got {logits_TV.shape} and {teacher_logits_TV.shape}")
    vocabulary = logits_TV.shape[1]
    if teacher_logits_TV.shape[1] < vocabulary:
        raise ValueError(f"the teacher must have at least {vocabulary} logits, got {teacher_logits_TV.shape[1]}")
    classes = None if top_k is None or top_k >= vocabulary else top_k
    teacher_logits_TV = teacher_logits_TV.detach()[:, :vocabulary]
    return _Divergence.apply(logits_TV, teacher_logits_TV, float(temperature), float(beta), classes)


def token_divergence_reference(
    logits_TV: Tensor, teacher_logits_TV: Tensor, temperature: float, beta: float, top_k: int | None = None
) -> Tensor:
    """The same by torch's own operations, from the definition: what `token_divergence` must match."""
    vocabulary = logits_TV.shape[1]
    s_TC = torch.softmax(logits_TV.float() / temperature, -1)
    t_TC = torch.softmax(teacher_logits_TV[:, :vocabulary].float() / temperature, -1)
    if top_k is not None and top_k < vocabulary:
        ids_TK = t_TC.topk(top_k, -1).indices
        s_TC, t_TC = (_with_rest(p_TV, ids_TK) for p_TV in (s_TC, t_TC))
    m_TC = beta * t_TC + (1 - beta) * s_TC
    if beta == 0:
        return _kl(t_TC, s_TC)
    if beta == 1:
        return _kl(s_TC, t_TC)
    return beta * _kl(t_TC, m_TC) + (1 - beta) * _kl(s_TC, m_TC)


def _with_rest(p_TV: Tensor, ids_TK: Tensor) -> Tensor:
    kept_TK = p_TV.gather(-1, ids_TK)
    return torch.cat([kept_TK, p_TV.scatter(-1, ids_TK, 0.0).sum(-1, keepdim=True)], -1)


def _kl(p_TC: Tensor, q_TC: Tensor) -> Tensor:
    return torch.where(p_TC > 0, p_TC * (p_TC.log() - q_TC.log()), torch.zeros_like(p_TC)).sum(-1)


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, teacher_TV: Tensor, temperature: float, beta: float, top_k: int | None
    ) -> Tensor:
        divergence_T = logits_TV.new_empty(len(logits_TV), dtype=torch.float32)
        for rows in _chunks(logits_TV):
            log_s_PC, log_t_PC, _, _ = _classes(logits_TV[rows], teacher_TV[rows], temperature, top_k)
            divergence_T[rows] = _value(log_s_PC, log_t_PC, beta)
        ctx.save_for_backward(logits_TV, teacher_TV)
        ctx.settings = (temperature, beta, top_k)
        return divergence_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits_TV, teacher_TV = ctx.saved_tensors
        temperature, beta, top_k = ctx.settings
        grad_TV = torch.empty_like(logits_TV)
        for rows in _chunks(logits_TV):
            log_s_PC, log_t_PC, log_s_PV, ids_PK = _classes(logits_TV[rows], teacher_TV[rows], temperature, top_k)
            h_PC = _gradient(log_s_PC, log_t_PC, beta) * (grad_T[rows, None] / temperature)
            if ids_PK is not None:
                rest_P1 = log_s_PC[:, -1:]
                shared_PV = (log_s_PV - rest_P1).clamp_(max=0.0).exp_().mul_(h_PC[:, -1:])
                h_PC = shared_PV.scatter_(-1, ids_PK, h_PC[:, :-1])
            grad_TV[rows] = h_PC
        return grad_TV, None, None, None, None


def _classes(
    logits_PV: Tensor, teacher_PV: Tensor, temperature: float, top_k: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Log probabilities of the classes by policy and teacher, the policy's of all tokens; the teacher's best ids."""
    log_s_PV, log_t_PV = (_log_softmax(logits, temperature) for logits in (logits_PV, teacher_PV))
    if top_k is None:
        return log_s_PV, log_t_PV, log_s_PV, None
    ids_PK = log_t_PV.topk(top_k, -1).indices

    def with_rest(log_p_PV: Tensor) -> Tensor:
        rest_P1 = log_p_PV.scatter(-1, ids_PK, LOWEST).logsumexp(-1, keepdim=True)
        return torch.cat([log_p_PV.gather(-1, ids_PK), rest_P1.clamp_min(LOWEST)], -1)

    return with_rest(log_s_PV), with_rest(log_t_PV), log_s_PV, ids_PK


def _log_softmax(logits_PV: Tensor, temperature: float) -> Tensor:
    """Finite also where a logit is -inf: 0 x -inf would be NaN."""
    return torch.log_softmax(logits_PV.float() / temperature, -1).clamp_min_(LOWEST)


def _value(log_s_PC: Tensor, log_t_PC: Tensor, beta: float) -> Tensor:
    d_PC = log_s_PC - log_t_PC
    if beta == 0:
        return -(log_t_PC.exp() * d_PC).sum(-1)
    if beta == 1:
        return (log_s_PC.exp() * d_PC).sum(-1)
    d_PC.clamp_(-MAX_DIFFERENCE, MAX_DIFFERENCE)
    of_teacher_P = (log_t_PC.exp() * torch.log1p((1 - beta) * torch.expm1(d_PC))).sum(-1)
    of_policy_P = (log_s_PC.exp() * torch.log1p(beta * torch.expm1(-d_PC))).sum(-1)
    return -beta * of_teacher_P - (1 - beta) * of_policy_P


def _gradient(log_s_PC: Tensor, log_t_PC: Tensor, beta: float) -> Tensor:
    """By the logit of each class."""
    s_PC = log_s_PC.exp()
    if beta == 0:
        return s_PC - log_t_PC.exp()
    d_PC = log_s_PC - log_t_PC
    if beta < 1:
        d_PC = -torch.log1p(beta * torch.expm1(-d_PC.clamp_(-MAX_DIFFERENCE, MAX_DIFFERENCE)))
    scale = 1 - beta if beta < 1 else 1.0
    return scale * s_PC * (d_PC - (s_PC * d_PC).sum(-1, keepdim=True))


def _chunks(logits_TV: Tensor) -> Iterator[slice]:
    num_tokens, vocabulary = logits_TV.shape
    elements = BUFFER_ELEMENTS.get(logits_TV.device.type, BUFFER_ELEMENTS["cuda"])
    size = max(1, math.floor(elements / (NUM_BUFFERS * max(1, vocabulary))))
    for start in range(0, num_tokens, size):
        yield slice(start, min(start + size, num_tokens))
