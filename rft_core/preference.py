"""Preference objectives: losses of given or chosen completions as functions of their summed logprobs.

Shapes: P pairs; C desirable and J undesirable completions (P each where they are paired). All tensors float64. A `Side`
is one completion of every pair, or all completions of one label. Log-ratios c and j are sums of policy - reference over
trained tokens. Formulas: arXiv id at each function; where a paper and its code differ, the paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

if TYPE_CHECKING:
    from rft_core.preference_options import Preference

DISCOPOP_TEMPERATURE = 0.05
LARGEST_AVERAGE = -1e-10  # of a logprob: at 0 the odds p / (1 - p) have no logarithm
MAX_EXPONENT = 20.0  # of a log-ratio or average: beyond it there is no pull, as everywhere in `losses`


@dataclass(frozen=True)
class Side:
    """Sums over the trained tokens of each completion. `policy` carries the gradient; `reference` is 0 where the loss
    takes none."""

    policy: Tensor
    reference: Tensor
    length: Tensor  # trained tokens, each counted by its weight in the sums
    margin: Tensor | float = 0.0  # by how much chosen must win, as the data say

    @property
    def log_ratio(self) -> Tensor:
        return self.policy - self.reference

    @property
    def average(self) -> Tensor:
        return self.policy / self.length


@dataclass(frozen=True)
class StepStatistics:
    """What some losses take from the whole optimizer step, as numbers without gradient."""

    kl: float = 0.0  # kto: mean log-ratio of completions under other prompts, at least 0
    shift: float = 0.0  # bco: running mean of the rewards


PairLoss = Callable[[Side, Side, "Preference", StepStatistics], Tensor]


def _delta(chosen: Side, rejected: Side) -> Tensor:
    return chosen.log_ratio - rejected.log_ratio


def _score(log_ratio: Tensor, settings: Preference) -> Tensor:
    """The derivative of f at the ratio, up to a constant (f-DPO, arXiv 2309.16240)."""
    if settings.divergence == "forward_kl":
        return -_exp(-log_ratio)
    if settings.divergence == "js":
        return logsigmoid(log_ratio)
    if settings.divergence == "alpha":
        return -_exp(-settings.divergence_alpha * log_ratio) / settings.divergence_alpha
    return log_ratio


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()


def _smoothed(logits: Tensor, settings: Preference) -> Tensor:
    """-(1 - eps) logsig(x) - eps logsig(-x): the label is wrong with chance eps."""
    eps = settings.label_smoothing
    return -(1 - eps) * logsigmoid(logits) - eps * logsigmoid(-logits)


def dpo(chosen: Side, rejected: Side, settings: Preference, step: StepStatistics) -> Tensor:
    """-logsig(beta (c - j)) (arXiv 2305.18290, eq. 7), with label smoothing and other divergences."""
    difference = _score(chosen.log_ratio, settings) - _score(rejected.log_ratio, settings)
    return _smoothed(settings.beta * difference, settings)


def dpo_norm(chosen: Side, rejected: Side, settings: Preference, step: StepStatistics) -> Tensor:
    """dpo on averages over tokens instead of sums."""
    difference = chosen.log_ratio / chosen.length - rejected.log_ratio / rejected.length
    return _smoothed(settings.beta * difference, settings)


def ipo(chosen: Side, rejected: Side, settings: Preference, step: StepStatistics) -> Tensor:
    """(c - j - 1 / (2 beta))^2 (arXiv 2310.12036, eq. 17), on averages over tokens unless told otherwise."""
    difference = _delta(chosen, rejected)
    if settings.length_normalised:
        difference = chosen.log_ratio / chosen.length - rejected.log_ratio / rejected.length
    return (difference - 1 / (2 * settings.beta)) ** 2


def hinge(chosen: Side, rejected: Side, settings: Preference, step: StepStatistics) -> Tensor:
    """max(0, 1 - beta (c - j)) (SLiC, arXiv 2305.10425, on log-ratios)."""
    return torch.relu(1 - settings.beta * _delta(chosen, rejected))


def robust(chosen: Side, rejected: Side, settings: Preference, step: StepStatistics) -> Tensor:
    """Unbiased under labels that are wrong with chance eps < 0.5 (arXiv 2403.00409)."""
    logits, eps = settings.beta * _delta(chosen, rejected), settings.label_smoothing
    return (-(1 - eps) * logsigmoid(logits) + eps * logsigmoid(-logits)) / (1 - 2 * eps)


def exo(chosen: Side, rejected: Side, settings: Preference, step: StepStatistics) -> Tensor:
    """KL of the pair's preference under the policy to the smoothed label (arXiv 2402.00856); eps must be above 0."""
    logits, eps = settings.beta * _delta(chosen, rejected), settings.label_smoothing
    kept = logits.sigmoid() * (logsigmoid(logits) - math.log1p(-eps))
    return kept + (-logits).sigmoid() * (logsigmoid(-logits) - math.log(eps))


def nca(chosen: Side, rejected: Side, settings: Preference, step: StepStatistics) -> Tensor:
    """Raises the chosen likelihood instead of the margin alone (arXiv 2402.05369)."""
    c, j = settings.beta * chosen.log_ratio, settings.beta * rejected.log_ratio
    return -logsigmoid(c) - logsigmoid(-c) / 2 - logsigmoid(-j) / 2


def bco_pair(chosen: Side, rejected: Side, settings: Preference, step: StepStatistics) -> Tensor:
    """A classifier of chosen against rejected, each by itself (arXiv 2404.04656), both of a pair summed."""
    c, j = settings.beta * chosen.log_ratio, settings.beta * rejected.log_ratio
    return -logsigmoid(c - step.shift) - logsigmoid(-(j - step.shift))


def sppo(chosen: Side, rejected: Side, settings: Preference, step: StepStatistics) -> Tensor:
    """Self-play preference optimisation with hard labels (arXiv 2405.00675)."""
    target = 1 / (2 * settings.beta)
    return (chosen.log_ratio - target) ** 2 + (rejected.log_ratio + target) ** 2


def apo_zero(chosen: Side, rejected: Side, settings: Preference, step: StepStatistics) -> Tensor:
    """Raises chosen, lowers rejected, each by itself (arXiv 2408.06266)."""
    return 1 - torch.sigmoid(settings.beta * chosen.log_ratio) + torch.sigmoid(settings.beta * rejected.log_ratio)


def apo_down(chosen: Side, rejected: Side, settings: Preference, step: StepStatistics) -> Tensor:
    """Lowers chosen, and rejected more (arXiv 2408.06266): for a policy that is better than the chosen completions."""
    down = torch.sigmoid(settings.beta * chosen.log_ratio)
    return down + 1 - torch.sigmoid(settings.beta * _delta(chosen, rejected))


def aot(chosen: Side, rejected: Side, settings: Preference, step: StepStatistics) -> Tensor:
    """dpo on the sorted margins of policy and reference: a whole distribution above the other (arXiv 2406.05882)."""
    policy, _ = torch.sort(chosen.policy - rejected.policy)
    reference, _ = torch.sort(chosen.reference - rejected.reference)
    return _smoothed(settings.beta * (policy - reference), settings)


def aot_unpaired(chosen: Side, rejected: Side, settings: Preference, step: StepStatistics) -> Tensor:
    """dpo on sorted chosen against sorted rejected log-ratios, whichever pair they came from (arXiv 2406.05882)."""
    c, _ = torch.sort(chosen.log_ratio)
    j, _ = torch.sort(rejected.log_ratio)
    return _smoothed(settings.beta * (c - j), settings)


def discopop(chosen: Side, rejected: Side, settings: Preference, step: StepStatistics) -> Tensor:
    """Logistic and exponential loss, blended by the margin (arXiv 2406.08414)."""
    logits = settings.beta * _delta(chosen, rejected)
    blend = torch.sigmoid(logits / DISCOPOP_TEMPERATURE)
    return -(1 - blend) * logsigmoid(logits) + blend * _exp(-logits)


def orpo(chosen: Side, rejected: Side, settings: Preference, step: StepStatistics) -> Tensor:
    """NLL of chosen - beta logsig(log odds ratio) (arXiv 2403.07691), both of averages over tokens. No reference."""
    return -chosen.average - settings.beta * logsigmoid(_log_odds(chosen.average) - _log_odds(rejected.average))


def _log_odds(average: Tensor) -> Tensor:
    """log p - log(1 - p) for log p = average; log(1 - e^a) by the form that keeps its digits (Maechler)."""
    a = average.clamp(max=LARGEST_AVERAGE)
    is_near_0 = a > -math.log(2)
    # Each branch sees only what it can bear, so that neither puts NaN into the gradient of the other.
    near = torch.log(-torch.expm1(torch.where(is_near_0, a, -torch.ones_like(a))))
    far = torch.log1p(-torch.exp(torch.where(is_near_0, -torch.ones_like(a), a)))
    return a - torch.where(is_near_0, near, far)


def cpo(chosen: Side, rejected: Side, settings: Preference, step: StepStatistics) -> Tensor:
    """-logsig(beta (chosen - rejected)) + alpha NLL(chosen), on sums (arXiv 2401.08417). No reference."""
    return _smoothed(settings.beta * (chosen.policy - rejected.policy), settings) - settings.alpha * chosen.policy


def simpo(chosen: Side, rejected: Side, settings: Preference, step: StepStatistics) -> Tensor:
    """-logsig(beta (a_c - a_j) - gamma) on averages (arXiv 2405.14734, eq. 6). No reference. With `alpha_reward` the
    reward of AlphaPO, (1 - p^-alpha) / alpha, takes the place of log p (arXiv 2501.03884)."""
    c, j = chosen.average, rejected.average
    if settings.alpha_reward:
        exponents = ((-settings.alpha_reward * side).clamp(max=MAX_EXPONENT) for side in (c, j))
        c, j = (-torch.expm1(exponent) / settings.alpha_reward for exponent in exponents)
    return _smoothed(settings.beta * (c - j) - settings.gamma, settings)


def nll(chosen: Side, rejected: Side, settings: Preference, step: StepStatistics) -> Tensor:
    """Mean NLL over the tokens of chosen: the term that RPO and MPO add (arXiv 2404.19733, 2411.10442)."""
    return -chosen.average


def bradley_terry(chosen: Side, rejected: Side, settings: Preference, step: StepStatistics) -> Tensor:
    """-logsig(s_c - s_j - margin) + centring (s_c + s_j)^2: `policy` holds the scores of a reward model."""
    loss = -logsigmoid(chosen.policy - rejected.policy - chosen.margin)
    return loss + settings.centring * (chosen.policy + rejected.policy) ** 2


def kto(desirable: Side, undesirable: Side, settings: Preference, step: StepStatistics) -> Tensor:
    """[C + J]: w_d (1 - sig(beta (c - kl))) and w_u (1 - sig(beta (kl - j))) (arXiv 2402.01306, eq. 8)."""
    good = settings.desirable_weight * (1 - torch.sigmoid(settings.beta * (desirable.log_ratio - step.kl)))
    bad = settings.undesirable_weight * (1 - torch.sigmoid(settings.beta * (step.kl - undesirable.log_ratio)))
    return torch.cat([good, bad])


def apo_zero_unpaired(desirable: Side, undesirable: Side, settings: Preference, step: StepStatistics) -> Tensor:
    """[C + J]: apo_zero of completions that have no partner."""
    good = settings.desirable_weight * (1 - torch.sigmoid(settings.beta * desirable.log_ratio))
    bad = settings.undesirable_weight * torch.sigmoid(settings.beta * undesirable.log_ratio)
    return torch.cat([good, bad])


def bco(desirable: Side, undesirable: Side, settings: Preference, step: StepStatistics) -> Tensor:
    """[C + J]: bco_pair of completions that have no partner."""
    good = -settings.desirable_weight * logsigmoid(settings.beta * desirable.log_ratio - step.shift)
    bad = -settings.undesirable_weight * logsigmoid(-(settings.beta * undesirable.log_ratio - step.shift))
    return torch.cat([good, bad])


# One value per pair: chosen and rejected are aligned.
PAIR_LOSSES: dict[str, PairLoss] = {
    "dpo": dpo,
    "dpo_norm": dpo_norm,
    "ipo": ipo,
    "hinge": hinge,
    "robust": robust,
    "exo": exo,
    "nca": nca,
    "bco_pair": bco_pair,
    "sppo": sppo,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "aot": aot,
    "aot_unpaired": aot_unpaired,
    "discopop": discopop,
    "orpo": orpo,
    "cpo": cpo,
    "simpo": simpo,
    "nll": nll,
    "bradley_terry": bradley_terry,
}

# One value per completion, the desirable first.
LABEL_LOSSES: dict[str, PairLoss] = {"kto": kto, "apo_zero_unpaired": apo_zero_unpaired, "bco": bco}

PREFERENCE_LOSSES = PAIR_LOSSES | LABEL_LOSSES
