"""A reward model: one score of the whole conversation by a sequence classifier, e.g. a Bradley-Terry model's logit.

Statistics of `normalise: stored` are a file of the model's folder, reward_statistics.json: {"mean": 0.1, "std": 2.3,
"count": 8000}, of the score that `read` gives.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rft_core.errors import SettingsError
from rft_core.model_reading import SCORE_AT, STOP_TOKEN
from rft_core.rewards.model_rows import Finding, Reading, score_rows
from rft_core.rewards.model_settings import RewardModelSettings
from rft_core.rewards.rows import RewardRow, Scored, Scorer
from rft_core.rewards.scoring_models import (
    check_architecture,
    folder_of,
    identity_of,
    label_index,
    labels_of,
    template_of,
)
from rft_core.rewards.settings import RewardFunction

if TYPE_CHECKING:
    from torch import Tensor

    from rft_core.rewards.model_logits import ModelLogits
    from rft_core.rewards.model_text import ModelText

SEMANTICS = 1
STATISTICS = "reward_statistics.json"


def build(settings: RewardFunction, folder: Path | None) -> Scorer:
    """Checks the settings against the model's folder; the model is loaded with the first score."""
    model_folder = folder_of(settings, folder)
    section = settings.reward_model
    config = check_architecture(settings, model_folder, "sequence_labels")
    read = _reader(section, labels_of(config))
    mean, std = read_statistics(model_folder) if section.normalise == "stored" else (0.0, 1.0)
    template = template_of(settings, section, folder)
    to_stop = config.get(SCORE_AT) == STOP_TOKEN
    model = _RewardModel(section, model_folder, template, lambda logits_C: (read(logits_C) - mean) / std, to_stop)
    return Scorer(model.score, identity_of(SEMANTICS, template), model_folder=model_folder)


def read_statistics(folder: Path) -> tuple[float, float]:
    """(mean, std). Raises SettingsError where they are missing or of no use."""
    path = folder / STATISTICS
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise SettingsError(
            f"reward_model.normalise is stored, but there is no {path}: write the mean, std and count of the model's "
            "scores over its training data there as JSON, or set normalise to none"
        ) from None
    except ValueError as error:
        raise SettingsError(f"{path} must be JSON, found: {error}") from error
    values = [content.get(name) if isinstance(content, dict) else None for name in ("mean", "std")]
    is_number = [isinstance(value, int | float) and math.isfinite(value) for value in values]
    if not all(is_number) or values[1] <= 0:
        raise SettingsError(f"{path} must hold a finite mean and a std above 0, found {content}")
    return float(values[0]), float(values[1])


@dataclass
class _RewardModel:
    """Loaded when it is first asked; goes with the grader that holds it."""

    settings: RewardModelSettings
    folder: Path
    template: str | None
    value: Callable[[Tensor], float]
    to_stop_token: bool
    _loaded: tuple[ModelText, ModelLogits] | None = None

    def score(self, rows: list[RewardRow]) -> list[Scored]:
        text, logits = self._load()
        limit = text.limit(logits.module.config)

        def reading_of(row: RewardRow) -> Reading:
            ids, note = text.conversation(row.messages, self.settings.append_eos, self.to_stop_token)
            ids, cut = text.fit(ids, limit)
            return Reading(tuple(ids), (len(ids) - 1,), note, cut)

        return score_rows(
            rows, self.settings, reading_of, logits.at, lambda logits_1C: Finding(self.value(logits_1C[0]))
        )

    def _load(self) -> tuple[ModelText, ModelLogits]:
        if self._loaded is None:
            from rft_core.rewards.model_logits import ModelLogits
            from rft_core.rewards.model_text import ModelText

            text = ModelText(self.folder, self.settings, self.template, "reward_model")
            self._loaded = text, ModelLogits(self.folder, self.settings, "sequence_labels", text.pad_token_id)
        return self._loaded


def _reader(section: RewardModelSettings, labels: list[str]) -> Callable[[Tensor], float]:
    """From logits_C to the score before normalising. Raises SettingsError for labels that the model does not have."""
    if section.read == "expected":
        worth = section.label_values or [float(index) for index in range(len(labels))]
        if len(worth) != len(labels) or len(labels) < 2:
            raise SettingsError(f"reward_model.label_values must name one value for each of {labels}, got {worth}")
        return lambda logits_C: float(logits_C.double().softmax(0) @ logits_C.new_tensor(worth).double())
    if section.label is None and len(labels) > 1:
        raise SettingsError(
            f"the reward model has {len(labels)} labels, {labels}: set reward_model.label to one, or read to expected"
        )
    index = label_index(section.label if section.label is not None else 0, labels, "reward_model.label")
    if section.read == "logit":
        return lambda logits_C: float(logits_C[index])
    if len(labels) == 1:
        return lambda logits_C: float(logits_C[0].double().sigmoid())
    return lambda logits_C: float(logits_C.double().softmax(0)[index])
