"""Generalised advantage estimation as one backward scan over rows, in float64 (arXiv 1506.02438, eq. 16).

Shapes: R rows, T tokens, padded anywhere. Over the tokens where mask_RT holds, from the last to the first,

    delta_t = reward_t + gamma V_next - V_t          V_next: value of the next such token, after_R behind the last one
    A_t = delta_t + gamma lam A_next

Tokens outside the mask are gaps: neither decay nor value passes through them, and whatever stands there is never read.
Both recurrences are linear, x_t = b_t + a_t x_next with a = 1 and b = 0 in a gap, so they can be scanned in parallel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rft_core.kernels.implementation import implementation


def gae_scan(
    rewards_RT: Tensor, values_RT: Tensor, mask_RT: Tensor, after_R: Tensor, gamma: float, lam: float
) -> Tensor:
    """float64[R, T]: A of each token of the mask, 0 elsewhere. On a CUDA device by the Triton kernel."""
    _check(rewards_RT, values_RT, mask_RT, after_R)
    if implementation(rewards_RT.device) == "triton":
        from rft_core.kernels import gae_scan_triton  # an extra that a CPU does without

        return gae_scan_triton.gae_scan(rewards_RT, values_RT, mask_RT, after_R, gamma, lam)
    return gae_scan_reference(rewards_RT, values_RT, mask_RT, after_R, gamma, lam)


def gae_scan_reference(
    rewards_RT: Tensor, values_RT: Tensor, mask_RT: Tensor, after_R: Tensor, gamma: float, lam: float
) -> Tensor:
    """The same by torch's own operations, a step of all rows at a time: the definition, and the path of a CPU."""
    zeros_RT = torch.zeros_like(rewards_RT, dtype=torch.float64)
    rewards_TR = torch.where(mask_RT, rewards_RT.double(), zeros_RT).T.contiguous()
    values_TR = torch.where(mask_RT, values_RT.double(), zeros_RT).T.contiguous()
    mask_TR, advantages_TR = mask_RT.T.contiguous(), torch.empty_like(rewards_TR)
    next_value_R, next_advantage_R = after_R.double(), torch.zeros_like(after_R, dtype=torch.float64)
    for t in range(len(rewards_TR) - 1, -1, -1):
        delta_R = rewards_TR[t] + gamma * next_value_R - values_TR[t]
        advantage_R = delta_R + gamma * lam * next_advantage_R
        next_value_R = torch.where(mask_TR[t], values_TR[t], next_value_R)
        next_advantage_R = torch.where(mask_TR[t], advantage_R, next_advantage_R)
        advantages_TR[t] = next_advantage_R
    return torch.where(mask_RT, advantages_TR.T, zeros_RT)


def _check(rewards_RT: Tensor, values_RT: Tensor, mask_RT: Tensor, after_R: Tensor) -> None:
    shapes = {tuple(tensor.shape) for tensor in (rewards_RT, values_RT, mask_RT)}
    if len(shapes) > 1 or rewards_RT.ndim != 2 or after_R.shape != rewards_RT.shape[:1]:
        raise ValueError(f"rewards, values and mask [R, T] and after [R] must fit, got {shapes} and {after_R.shape}")
