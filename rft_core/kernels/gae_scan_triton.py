"""`gae_scan` as a Triton kernel: a program per row, whose tokens it scans in blocks from the last to the first.

Inside a block both recurrences are associative scans of (a, b) pairs; between blocks two numbers are carried. Sums are
taken in another order than by the reference: results agree to rounding in float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_TOKENS = 1024


@triton.jit
def _compose(later_a, later_b, earlier_a, earlier_b):
    """x = b + a x_next of the earlier token, applied to that of the later ones."""
    return earlier_a * later_a, earlier_b + earlier_a * later_b


@triton.jit
def _scan(rewards, values, mask, after, factors, advantages, num_tokens, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * num_tokens
    gamma = tl.load(factors)  # as numbers they would be passed in float32
    decay = tl.load(factors + 1)
    next_value = tl.load(after + tl.program_id(0))
    next_advantage = tl.zeros((), dtype=tl.float64)
    lane = tl.arange(0, BLOCK)
    for block in range(tl.cdiv(num_tokens, BLOCK)):
        # Lane 0 is the block's last token, so that a forward scan runs backwards in time.
        place = num_tokens - 1 - block * BLOCK - lane
        is_token = place >= 0
        # The value of the nearest kept token behind each one: a scan of what stands one place later.
        has_next = is_token & (place + 1 < num_tokens)
        is_next_kept = tl.load(mask + start + place + 1, mask=has_next, other=0) != 0
        following = tl.load(values + start + place + 1, mask=is_next_kept, other=0.0)
        passed, next_values = tl.associative_scan(
            (tl.where(is_next_kept, 0.0, 1.0).to(tl.float64), following), 0, _compose
        )
        next_values += passed * next_value
        is_kept = tl.load(mask + start + place, mask=is_token, other=0) != 0
        reward = tl.load(rewards + start + place, mask=is_kept, other=0.0)
        value = tl.load(values + start + place, mask=is_kept, other=0.0)
        delta = tl.where(is_kept, reward + gamma * next_values - value, 0.0)
        carried, advantage = tl.associative_scan((tl.where(is_kept, decay, 1.0), delta), 0, _compose)
        advantage += carried * next_advantage
        tl.store(advantages + start + place, tl.where(is_kept, advantage, 0.0), mask=is_token)
        next_value = tl.sum(tl.where(lane == BLOCK - 1, next_values, 0.0), 0)
        next_advantage = tl.sum(tl.where(lane == BLOCK - 1, advantage, 0.0), 0)


def gae_scan(
    rewards_RT: Tensor, values_RT: Tensor, mask_RT: Tensor, after_R: Tensor, gamma: float, lam: float
) -> Tensor:
    """See `rft_core.kernels.gae_scan.gae_scan`."""
    num_rows, num_tokens = rewards_RT.shape
    advantages_RT = torch.zeros((num_rows, num_tokens), dtype=torch.float64, device=rewards_RT.device)
    if not advantages_RT.numel():
        return advantages_RT
    read = [tensor.double().contiguous() for tensor in (rewards_RT, values_RT)]
    factors = torch.tensor([gamma, gamma * lam], dtype=torch.float64, device=rewards_RT.device)
    _scan[(num_rows,)](
        *read,
        mask_RT.to(torch.int8).contiguous(),
        after_R.double().contiguous(),
        factors,
        advantages_RT,
        num_tokens,
        BLOCK=min(BLOCK_TOKENS, triton.next_power_of_2(num_tokens)),
    )
    return advantages_RT
