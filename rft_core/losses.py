"""Losses of a policy update: pure torch functions, and the tables that name them.

Shapes: T completion tokens of a micro-batch, flat, row after row; R its rows; N rows and G prompt groups of a whole
optimizer step. Functions of a table share one signature, so that a caller never asks which of them it has.
Formulas: arXiv ids and equations at each function. Surrogates are in `surrogates`, gates in `gates`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rft_core.terms import Correction

# exp(20) = 4.9e8 is far beyond every bound in use, and its products stay finite in float32. Beyond it there is no pull.
MAX_LOG_RATIO = 20.0

ROW_KINDS = ("own", "expert", "selected")


@dataclass
class LossBatch:
    """One micro-batch. It holds whole rows only; values where mask_T is False may be anything, NaN too."""

    logprobs_T: Tensor  # float32, carries the gradient
    advantages_T: Tensor  # float32
    mask_T: Tensor  # bool: completion_mask of rows with is_trained
    row_T: Tensor  # int64: row of the micro-batch, ascending from 0
    off_policy_R: Tensor  # bool: sampled by another policy than the one updated, or by other code than the trainer's
    weight_R: Tensor  # float32: `weight` of the advantages table
    group_R: Tensor  # int64: group of the optimizer step, the number that denominators_of was given
    old_logprobs_T: Tensor | None = None  # None: one optimizer step per batch, so old is logprobs_T detached
    behaviour_logprobs_T: Tensor | None = None  # NaN where the table holds null
    reference_logprobs_T: Tensor | None = None
    entropy_T: Tensor | None = None  # float32; carries the gradient when there is an entropy bonus
    divergence_T: Tensor | None = None  # float32, of the whole distribution to a teacher's; carries the gradient
    term_R: Tensor | None = None  # int64 index into ROW_KINDS; None: all rows are own
    step_kept_T: Tensor | None = None  # bool: what a gate that looks at the whole optimizer step keeps


@dataclass(frozen=True)
class Counts:
    """What one kind of rows adds up to over a whole optimizer step, each row counted `weight` times."""

    tokens: float = 0.0
    rows: float = 0.0
    prompts: float = 0.0
    group_tokens: tuple[float, ...] = ()  # [G]


@dataclass(frozen=True)
class Denominators:
    """Denominators of one optimizer step: over all its micro-batches and ranks, never of a micro-batch."""

    max_completion_tokens: int
    counts: dict[str, Counts] = field(default_factory=dict)  # by ROW_KINDS; a kind without rows is left out

    def tokens_of(self, kind: str) -> float:
        """Of one of ROW_KINDS."""
        return self.counts.get(kind, Counts()).tokens

    @property
    def tokens(self) -> float:
        return sum(counts.tokens for counts in self.counts.values())

    @property
    def rows(self) -> float:
        return sum(counts.rows for counts in self.counts.values())


@dataclass
class LossParts:
    """`loss` is divided by the denominators of the optimizer step already: backward it as it is; the sum over
    micro-batches is the loss of the optimizer step. `sums` go to `finish_metrics`."""

    loss: Tensor
    sums: dict[str, float]


@dataclass(frozen=True)
class Rows:
    """How the T tokens of a micro-batch make up R rows, and which of them are trained."""

    mask_T: Tensor
    row_T: Tensor
    group_R: Tensor
    length_R: Tensor  # trained tokens of each row, float32

    @classmethod
    def of(cls, mask_T: Tensor, row_T: Tensor, group_R: Tensor) -> Rows:
        length_R = torch.zeros(len(group_R), device=row_T.device).index_add(0, row_T, mask_T.float())
        return cls(mask_T, row_T, group_R, length_R)

    def sum_R(self, values_T: Tensor) -> Tensor:
        """Sum over a row's trained tokens; values elsewhere must be finite."""
        kept_T = torch.where(self.mask_T, values_T, torch.zeros_like(values_T))
        return torch.zeros_like(self.length_R, dtype=values_T.dtype).index_add(0, self.row_T, kept_T)

    def mean_R(self, values_T: Tensor) -> Tensor:
        """Mean over a row's trained tokens; 0 for a row without any."""
        return self.sum_R(values_T) / self.length_R.clamp(min=1)


def denominators_of(
    trained_tokens_N: Sequence[int],
    group_N: Sequence[int],
    max_completion_tokens: int,
    weight_N: Sequence[float] | None = None,
    term_N: Sequence[str] | None = None,
) -> Denominators:
    """Denominators over the N rows of one optimizer step (rows that need no forward pass included).

    `trained_tokens_N` is the sum of a row's completion_mask, 0 where is_trained is False; `group_N` numbers the groups
    from 0. A row without a trained token counts nowhere; a row of weight 2 counts like two equal rows.

    >>> denominators_of([2, 0, 3], [0, 0, 1], 16).counts["own"]
    Counts(tokens=5.0, rows=2.0, prompts=2.0, group_tokens=(2.0, 3.0))
    """
    weights = [1.0] * len(trained_tokens_N) if weight_N is None else weight_N
    terms = ["own"] * len(trained_tokens_N) if term_N is None else term_N
    num_groups = max(group_N, default=-1) + 1
    counts = {}
    for kind in sorted(set(terms), key=ROW_KINDS.index):
        chosen = [row for row, term in enumerate(terms) if term == kind and trained_tokens_N[row] > 0]
        group_tokens = [0.0] * num_groups
        for row in chosen:
            group_tokens[group_N[row]] += weights[row] * trained_tokens_N[row]
        counts[kind] = Counts(
            tokens=float(sum(group_tokens)),
            rows=float(sum(weights[row] for row in chosen)),
            prompts=float(sum(tokens > 0 for tokens in group_tokens)),
            group_tokens=tuple(group_tokens),
        )
    return Denominators(max_completion_tokens, counts)


# Levels: log ratios of tokens -> log ratio that a token's loss uses, in float64 where many are added. `bound` is the
# term's log_ratio_bound.


def token(log_ratio_T: Tensor, rows: Rows, advantages_T: Tensor, bound: float) -> Tensor:
    return log_ratio_T


def sequence_geometric(log_ratio_T: Tensor, rows: Rows, advantages_T: Tensor, bound: float) -> Tensor:
    """Mean over the row's trained tokens, the same for all of them (GSPO, arXiv 2507.18071, eq. 7)."""
    return rows.mean_R(log_ratio_T.double())[rows.row_T]


def sequence_product(log_ratio_T: Tensor, rows: Rows, advantages_T: Tensor, bound: float) -> Tensor:
    """Sum over the row's trained tokens: the log ratio of the whole completion."""
    return rows.sum_R(log_ratio_T.double())[rows.row_T]


def sequence_geometric_clipped(log_ratio_T: Tensor, rows: Rows, advantages_T: Tensor, bound: float) -> Tensor:
    """Mean of log ratios that are first clipped on the side where the update pushes: at `bound` where A > 0, at -bound
    where A < 0 (GMPO, arXiv 2507.20673)."""
    raised_T = log_ratio_T.clamp(max=bound)
    lowered_T = log_ratio_T.clamp(min=-bound)
    clipped_T = torch.where(advantages_T > 0, raised_T, torch.where(advantages_T < 0, lowered_T, log_ratio_T))
    return rows.mean_R(clipped_T.double())[rows.row_T]


def ratio_of(log_ratio_T: Tensor) -> Tensor:
    return log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


# Aggregations: masked token losses of a micro-batch -> its share of the optimizer step's loss. An empty step gives 0.


def token_mean(loss_T: Tensor, rows: Rows, counts: Counts, max_completion_tokens: int) -> Tensor:
    """Every trained token of the step weighs the same (DAPO, arXiv 2503.14476, eq. 8)."""
    return loss_T.sum() / max(counts.tokens, 1.0)


def sequence_mean(loss_T: Tensor, rows: Rows, counts: Counts, max_completion_tokens: int) -> Tensor:
    """Every row with a trained token weighs the same (GRPO, arXiv 2402.03300, eq. 3)."""
    return (rows.sum_R(loss_T) / rows.length_R.clamp(min=1)).sum() / max(counts.rows, 1.0)


def sequence_sum(loss_T: Tensor, rows: Rows, counts: Counts, max_completion_tokens: int) -> Tensor:
    return loss_T.sum() / max(counts.rows, 1.0)


def constant_length(loss_T: Tensor, rows: Rows, counts: Counts, max_completion_tokens: int) -> Tensor:
    """Divides by the row budget, a constant, so that a row's length has no say (Dr. GRPO, arXiv 2503.20783)."""
    return loss_T.sum() / (max(counts.rows, 1.0) * max_completion_tokens)


def prompt_mean(loss_T: Tensor, rows: Rows, counts: Counts, max_completion_tokens: int) -> Tensor:
    """Every prompt weighs the same: token mean within a group, then mean over groups (ScaleRL, arXiv 2510.13786)."""
    group_tokens_G = torch.tensor(counts.group_tokens, dtype=loss_T.dtype, device=loss_T.device)
    return (rows.sum_R(loss_T) / group_tokens_G[rows.group_R].clamp(min=1)).sum() / max(counts.prompts, 1.0)


def token_sum(loss_T: Tensor, rows: Rows, counts: Counts, max_completion_tokens: int) -> Tensor:
    return loss_T.sum()


# KL estimators from samples of the policy; d = lp - ref, clamped (http://joschu.net/blog/kl-approx.html).


def k1(difference_T: Tensor) -> Tensor:
    """d: unbiased as a number, but its expected gradient on-policy is 0. For reports only."""
    return difference_T


def k2(difference_T: Tensor) -> Tensor:
    """d^2 / 2: its expected gradient on-policy is that of KL(policy | reference)."""
    return difference_T.square() / 2


def k3(difference_T: Tensor) -> Tensor:
    """e^-d - 1 + d: never negative; its expected gradient on-policy is that of KL(reference | policy)."""
    return torch.expm1(-difference_T) + difference_T


def absolute(difference_T: Tensor) -> Tensor:
    return difference_T.abs()


def k2_gradient(difference_T: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2."""
    k2_T = k2(difference_T)
    return k3(difference_T).detach() + k2_T - k2_T.detach()


# Corrections: ratio old / behaviour at the chosen level -> weight of the policy loss. Never differentiated.


def uncorrected(ratio_T: Tensor, rows: Rows, correction: Correction) -> Tensor:
    return torch.ones_like(ratio_T)


def truncate(ratio_T: Tensor, rows: Rows, correction: Correction) -> Tensor:
    """Truncated importance sampling."""
    return ratio_T.clamp(max=correction.cap)


def mask(ratio_T: Tensor, rows: Rows, correction: Correction) -> Tensor:
    """The ratio inside low .. high, 0 outside: selected, never multiplied by 0 (IcePop)."""
    return torch.where(_is_inside(ratio_T, correction), ratio_T, torch.zeros_like(ratio_T))


def reject(ratio_T: Tensor, rows: Rows, correction: Correction) -> Tensor:
    """1 inside low .. high, 0 outside: what is kept counts as if it were on-policy."""
    return _is_inside(ratio_T, correction).to(ratio_T.dtype)


def veto(ratio_T: Tensor, rows: Rows, correction: Correction) -> Tensor:
    """0 on the whole row when one of its trained tokens is outside low .. high, else 1."""
    num_outside_R = rows.sum_R((~_is_inside(ratio_T, correction)).to(ratio_T.dtype))
    return (num_outside_R[rows.row_T] == 0).to(ratio_T.dtype)


def _is_inside(ratio_T: Tensor, correction: Correction) -> Tensor:
    return (ratio_T >= correction.low) & (ratio_T <= correction.high)


LEVELS = {
    "token": token,
    "sequence_geometric": sequence_geometric,
    "sequence_product": sequence_product,
    "sequence_geometric_clipped": sequence_geometric_clipped,
}

AGGREGATIONS = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "constant_length": constant_length,
    "prompt_mean": prompt_mean,
    "token_sum": token_sum,
}

KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute, "k2_gradient": k2_gradient}

CORRECTIONS = {"none": uncorrected, "truncate": truncate, "mask": mask, "reject": reject, "veto": veto}

# They keep or drop and weigh nothing: whoever is kept has weight 1, whatever its ratio.
SELECTING_CORRECTIONS = frozenset({"none", "reject", "veto"})
