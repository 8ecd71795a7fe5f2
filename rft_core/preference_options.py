"""What a preference objective can be told: its losses and settings, and which of them go together. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rft_core.errors import SettingsError

if TYPE_CHECKING:
    from rft_core.algorithm_settings import PreferenceSettings

# Names of the tables in `preference`, told without torch.
PAIR_LOSSES = frozenset(
    [
        "dpo",
        "dpo_norm",
        "ipo",
        "hinge",
        "robust",
        "exo",
        "nca",
        "bco_pair",
        "sppo",
        "apo_zero",
        "apo_down",
        "aot",
        "aot_unpaired",
        "discopop",
        "orpo",
        "cpo",
        "simpo",
        "nll",
        "bradley_terry",
    ]
)
LABEL_LOSSES = frozenset({"kto", "apo_zero_unpaired", "bco"})

# Which losses read a setting.
_SMOOTHED = frozenset({"dpo", "dpo_norm", "aot", "aot_unpaired", "cpo", "simpo"})
USED_BY = {
    "beta": (PAIR_LOSSES | LABEL_LOSSES) - {"nll", "bradley_terry"},
    "label_smoothing": _SMOOTHED | {"robust", "exo"},
    "length_normalised": frozenset({"ipo"}),
    "divergence": frozenset({"dpo"}),
    "divergence_alpha": frozenset({"dpo"}),
    "tail_weight": PAIR_LOSSES - {"bradley_terry"},
    "centring": frozenset({"bradley_terry"}),
    "gamma": frozenset({"simpo"}),
    "alpha": frozenset({"cpo"}),
    "alpha_reward": frozenset({"simpo"}),
    "desirable_weight": LABEL_LOSSES,
    "undesirable_weight": LABEL_LOSSES,
    "running_shift": frozenset({"bco", "bco_pair"}),
    "likelihood_weights": frozenset({"dpo"}),
}
# They compare the pairs of a step by rank.
SORTED_LOSSES = ("aot", "aot_unpaired")
# They compare the policy with itself alone.
REFERENCE_FREE_LOSSES = frozenset({"orpo", "cpo", "simpo", "nll", "bradley_terry"})


@dataclass(frozen=True)
class Preference:
    """Losses of pairs (chosen against rejected), or of completions with a label, and their weights.

    Names are keys of the tables in `preference`; what each setting does is said there.
    """

    losses: tuple[tuple[str, float], ...]
    unit: str = "pairs"  # pairs | labels: a key of PAIRINGS
    beta: float = 0.1
    label_smoothing: float = 0.0
    length_normalised: bool = True
    divergence: str = "reverse_kl"
    divergence_alpha: float = 0.5
    tail_weight: float = 1.0
    gamma: float = 0.0
    alpha: float = 1.0
    alpha_reward: float = 0.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    running_shift: bool = True
    centring: float = 0.0
    likelihood_weights: bool = False

    @property
    def needs_reference(self) -> bool:
        return any(name not in REFERENCE_FREE_LOSSES for name, weight in self.losses if weight)

    def uses(self, *names: str) -> bool:
        return any(name in names for name, weight in self.losses if weight)


def resolve_preference(row: Preference | None, name: str, settings: PreferenceSettings) -> Preference | None:
    """The objective of the algorithm's row with the settings' overrides. Raises SettingsError where they don't fit."""
    given = {setting: value for setting, value in settings.model_dump().items() if value is not None}
    if row is None:
        if given:
            raise SettingsError(
                f"algorithm.preference.{next(iter(given))} has no effect: {name} compares nothing; set it to null"
            )
        return None
    if "losses" in given:
        given["losses"] = tuple(given["losses"].items())
    preference = replace(row, **given)
    known = PAIR_LOSSES if preference.unit == "pairs" else LABEL_LOSSES
    for loss, _ in preference.losses:
        if loss not in known:
            raise SettingsError(
                f"algorithm.preference.losses of {name} must be among {sorted(known)} (it trains on "
                f"{preference.unit}), got {loss!r}"
            )
    if not any(weight for _, weight in preference.losses):
        raise SettingsError("algorithm.preference.losses must give some loss a weight above 0")
    _refuse_preference(preference, given)
    return preference


def _refuse_preference(preference: Preference, given: dict[str, Any]) -> None:
    eps = preference.label_smoothing
    if preference.uses("exo") and not 0 < eps < 0.5:
        raise SettingsError(f"algorithm.preference.label_smoothing must be above 0 and below 0.5 for exo, got {eps:g}")
    if preference.uses("robust") and not eps < 0.5:
        raise SettingsError(f"algorithm.preference.label_smoothing must be below 0.5 for robust, got {eps:g}")
    if "divergence_alpha" in given and preference.divergence != "alpha":
        raise SettingsError(
            f"algorithm.preference.divergence_alpha has no effect: divergence is {preference.divergence}, not alpha"
        )
    for name in sorted(given.keys() - {"losses"}):
        if not preference.uses(*USED_BY[name]):
            used = ", ".join(loss for loss, weight in preference.losses if weight)
            raise SettingsError(
                f"algorithm.preference.{name} has no effect on {used}: it is read by "
                f"{', '.join(sorted(USED_BY[name]))}; set it to null"
            )
