"""Preference losses from the formulas of the papers, in numbers of 30 digits, so that they need no stable form.

Derivatives are numerical, which so many digits make exact. Imports nothing of ours. LOSSES must hold the names of the
table it checks: each takes the completions of both sides, the settings and the step's kl and shift, and gives one value
per pair, or per completion with the desirable first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpmath.ctx_mp import MPContext

mp = MPContext()  # of its own: the digits of the shared one are others' business
mp.dps = 30
mpf = mp.mpf

CLAMP = 20  # of an exponent that is a log-ratio
LARGEST_AVERAGE = mpf("-1e-10")


@dataclass(frozen=True)
class Completion:
    """Sums over its tokens."""

    policy: mpf
    reference: mpf
    length: int
    margin: float = 0.0

    @property
    def ratio(self):
        return self.policy - self.reference

    @property
    def average(self):
        return self.policy / self.length


def sig(x):
    return 1 / (1 + mp.exp(-x))


def logsig(x):
    return -mp.log(1 + mp.exp(-x))


def exp_clamped(x):
    return mp.exp(min(max(x, -CLAMP), CLAMP))


def cross_entropy(logits, smoothing):
    """The label is 1 with probability 1 - smoothing."""
    return -(1 - mpf(smoothing)) * logsig(logits) - mpf(smoothing) * logsig(-logits)


DIVERGENCES = {
    "reverse_kl": lambda ratio, alpha: ratio,
    "forward_kl": lambda ratio, alpha: -exp_clamped(-ratio),
    "js": lambda ratio, alpha: mp.log(2 * mp.exp(ratio) / (1 + mp.exp(ratio))),
    "alpha": lambda ratio, alpha: (1 - exp_clamped(-alpha * ratio)) / alpha,
}


def dpo(c, j, s, step):
    score = DIVERGENCES[s["divergence"]]
    return cross_entropy(
        s["beta"] * (score(c.ratio, mpf(s["divergence_alpha"])) - score(j.ratio, mpf(s["divergence_alpha"]))),
        s["label_smoothing"],
    )


def dpo_norm(c, j, s, step):
    return cross_entropy(s["beta"] * (c.ratio / c.length - j.ratio / j.length), s["label_smoothing"])


def ipo(c, j, s, step):
    left, right = (c.ratio / c.length, j.ratio / j.length) if s["length_normalised"] else (c.ratio, j.ratio)
    return (left - right - 1 / (2 * mpf(s["beta"]))) ** 2


def robust(c, j, s, step):
    x, eps = s["beta"] * (c.ratio - j.ratio), mpf(s["label_smoothing"])
    return ((1 - eps) * -logsig(x) - eps * -logsig(-x)) / (1 - 2 * eps)


def exo(c, j, s, step):
    """KL of (sig x, sig -x) to (1 - eps, eps)."""
    x, eps = s["beta"] * (c.ratio - j.ratio), mpf(s["label_smoothing"])
    return sig(x) * mp.log(sig(x) / (1 - eps)) + sig(-x) * mp.log(sig(-x) / eps)


def nca(c, j, s, step):
    c, j = s["beta"] * c.ratio, s["beta"] * j.ratio
    return -logsig(c) - logsig(-c) / 2 - logsig(-j) / 2


def bco_pair(c, j, s, step):
    return -logsig(s["beta"] * c.ratio - step["shift"]) - logsig(step["shift"] - s["beta"] * j.ratio)


def sppo(c, j, s, step):
    target = 1 / (2 * mpf(s["beta"]))
    return (c.ratio - target) ** 2 + (j.ratio + target) ** 2


def discopop(c, j, s, step):
    x = s["beta"] * (c.ratio - j.ratio)
    blend = sig(x / mpf("0.05"))
    return (1 - blend) * -logsig(x) + blend * mp.exp(-x)


def odds(average):
    p = mp.exp(min(average, LARGEST_AVERAGE))
    return p / (1 - p)


def orpo(c, j, s, step):
    return -c.average - s["beta"] * logsig(mp.log(odds(c.average) / odds(j.average)))


def cpo(c, j, s, step):
    return cross_entropy(s["beta"] * (c.policy - j.policy), s["label_smoothing"]) - s["alpha"] * c.policy


def simpo(c, j, s, step):
    alpha = mpf(s["alpha_reward"])

    def reward(completion):
        return (1 - mp.exp(min(-alpha * completion.average, CLAMP))) / alpha if alpha else completion.average

    return cross_entropy(s["beta"] * (reward(c) - reward(j)) - s["gamma"], s["label_smoothing"])


def bradley_terry(c, j, s, step):
    return -logsig(c.policy - j.policy - c.margin) + s["centring"] * (c.policy + j.policy) ** 2


def each(loss):
    return lambda chosen, rejected, s, step: [loss(c, j, s, step) for c, j in zip(chosen, rejected, strict=True)]


def aot(chosen, rejected, s, step):
    policy = sorted(c.policy - j.policy for c, j in zip(chosen, rejected, strict=True))
    reference = sorted(c.reference - j.reference for c, j in zip(chosen, rejected, strict=True))
    return [cross_entropy(s["beta"] * (p - r), s["label_smoothing"]) for p, r in zip(policy, reference, strict=True)]


def aot_unpaired(chosen, rejected, s, step):
    sides = sorted(c.ratio for c in chosen), sorted(j.ratio for j in rejected)
    return [cross_entropy(s["beta"] * (c - j), s["label_smoothing"]) for c, j in zip(*sides, strict=True)]


def labelled(good, bad):
    return lambda chosen, rejected, s, step: [
        *(s["desirable_weight"] * good(s["beta"], c.ratio, step) for c in chosen),
        *(s["undesirable_weight"] * bad(s["beta"], j.ratio, step) for j in rejected),
    ]


LOSSES = {
    "dpo": each(dpo),
    "dpo_norm": each(dpo_norm),
    "ipo": each(ipo),
    "hinge": each(lambda c, j, s, step: max(mpf(0), 1 - s["beta"] * (c.ratio - j.ratio))),
    "robust": each(robust),
    "exo": each(exo),
    "nca": each(nca),
    "bco_pair": each(bco_pair),
    "sppo": each(sppo),
    "apo_zero": each(lambda c, j, s, step: 1 - sig(s["beta"] * c.ratio) + sig(s["beta"] * j.ratio)),
    "apo_down": each(lambda c, j, s, step: sig(s["beta"] * c.ratio) + 1 - sig(s["beta"] * (c.ratio - j.ratio))),
    "aot": aot,
    "aot_unpaired": aot_unpaired,
    "discopop": each(discopop),
    "orpo": each(orpo),
    "cpo": each(cpo),
    "simpo": each(simpo),
    "nll": each(lambda c, j, s, step: -c.average),
    "bradley_terry": each(bradley_terry),
    "kto": labelled(
        lambda beta, ratio, step: 1 - sig(beta * (ratio - step["kl"])),
        lambda beta, ratio, step: 1 - sig(beta * (step["kl"] - ratio)),
    ),
    "apo_zero_unpaired": labelled(
        lambda beta, ratio, step: 1 - sig(beta * ratio), lambda beta, ratio, step: sig(beta * ratio)
    ),
    "bco": labelled(
        lambda beta, ratio, step: -logsig(beta * ratio - step["shift"]),
        lambda beta, ratio, step: -logsig(step["shift"] - beta * ratio),
    ),
}

SETTINGS = {
    "beta": 0.1,
    "label_smoothing": 0.0,
    "length_normalised": True,
    "divergence": "reverse_kl",
    "divergence_alpha": 0.5,
    "gamma": 0.0,
    "alpha": 1.0,
    "alpha_reward": 0.0,
    "desirable_weight": 1.0,
    "undesirable_weight": 1.0,
    "centring": 0.0,
}


def values(name, chosen, rejected, settings, step):
    return [float(value) for value in LOSSES[name](chosen, rejected, SETTINGS | settings, step)]


def gradients(name, chosen, rejected, settings, step):
    """(by each chosen, by each rejected policy sum) of the sum of the values."""
    sides = (list(chosen), list(rejected))

    def by(side, place):
        def total(policy):
            moved = [list(completions) for completions in sides]
            moved[side][place] = replace(moved[side][place], policy=policy)
            return mp.fsum(LOSSES[name](*moved, SETTINGS | settings, step))

        return float(mp.diff(total, sides[side][place].policy))

    return tuple([by(side, place) for place in range(len(sides[side]))] for side in (0, 1))
