"""A process reward model: the probability that each reasoning step is good, read where the step ends.

The steps are those of reward.steps. Prompt, steps and separators are tokenised one by one and their ids joined, so that
no token spans a step's end; a step is judged at the last token of the separator after it. A completion without steps is
as bad as can be: 0 with a reason, since unscored it would be better off than a wrong one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rft_core.errors import SettingsError
from rft_core.rewards.model_rows import TAKEN_APART, Finding, NotScorable, Reading, score_rows
from rft_core.rewards.model_settings import ProcessModelSettings
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
HEADS_OF = {"token_labels": "token_labels", "next_token": "causal"}


def build(settings: RewardFunction, folder: Path | None) -> Scorer:
    """Checks the settings against the model's folder; the model is loaded with the first score."""
    model_folder = folder_of(settings, folder)
    section = settings.process_reward_model
    config = check_architecture(settings, model_folder, HEADS_OF[section.kind])
    good, num_columns = 0, 2
    if section.kind == "token_labels":
        labels = labels_of(config)
        num_columns = len(labels)
        good = 0 if num_columns == 1 else label_index(section.good_label, labels, "process_reward_model.good_label")
    template = template_of(settings, section, folder)
    model = _ProcessModel(section, model_folder, template, good, num_columns)
    return Scorer(model.score, identity_of(SEMANTICS, template), model_folder=model_folder)


@dataclass
class _ProcessModel:
    """Loaded when it is first asked; goes with the grader that holds it."""

    settings: ProcessModelSettings
    folder: Path
    template: str | None
    good: int  # column of the good label, or of the good token
    num_columns: int
    _loaded: tuple[ModelText, ModelLogits] | None = None

    def score(self, rows: list[RewardRow]) -> list[Scored]:
        text, logits = self._load()
        limit = text.limit(logits.module.config)

        def reading_of(row: RewardRow) -> Reading | Scored:
            return self._reading(row, text, limit) if row.step_ends else Scored(0.0, NO_STEPS, steps=())

        return score_rows(rows, self.settings, reading_of, logits.at, self._finding)

    def _finding(self, logits_NC: Tensor) -> Finding:
        scaled_NC = logits_NC.double()
        good_N = scaled_NC.sigmoid()[:, 0] if self.num_columns == 1 else scaled_NC.softmax(-1)[:, self.good]
        steps = tuple(good_N.tolist())
        return Finding(AGGREGATES[self.settings.aggregate](steps), steps)

    def _reading(self, row: RewardRow, text: ModelText, limit: int | None) -> Reading:
        """Where the steps end in the ids of prompt and steps. Raises NotScorable."""
        ids, note = text.prompt(row.prompt_messages, self.settings.add_bos)
        separator = text.encoder.encode(self.settings.separator)
        places = []
        for step in row.steps:
            step = step if self.settings.keep_spaces else step.strip()
            safe = text.harmless(step)
            note = TAKEN_APART if safe != step else note
            ids += [*text.encoder.encode(safe), *separator]
            places.append(len(ids) - 1)
        ids, cut = text.fit(ids, limit)
        if cut and places[0] <= cut:  # a BOS may stand in the place of the first id that is left
            raise NotScorable(f"{cut} tokens would have to be cut, and the first step ends before")
        return Reading(tuple(ids), tuple(place - cut for place in places), note, cut)

    def _load(self) -> tuple[ModelText, ModelLogits]:
        if self._loaded is None:
            from rft_core.rewards.model_logits import ModelLogits
            from rft_core.rewards.model_text import ModelText

            own, section = self.settings, "process_reward_model"
            text = ModelText(self.folder, own, self.template, section, own.separator)
            columns = None
            if own.kind == "next_token":
                columns = [_token_id(getattr(own, name), text, f"{section}.{name}") for name in TOKENS]
            self._loaded = text, ModelLogits(self.folder, own, HEADS_OF[own.kind], text.pad_token_id, columns)
        return self._loaded


def _token_id(token: str, text: ModelText, setting: str) -> int:
    ids = text.encoder.encode(token)
    if len(ids) != 1:
        raise SettingsError(f"{setting} must be one token of the model, {token!r} is {len(ids)}: {ids}")
    return ids[0]


NO_STEPS = "the completion has no steps"
TOKENS = ("good_token", "bad_token")
AGGREGATES: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "product": math.prod,
    "last": lambda steps: steps[-1],
    "mean": lambda steps: math.fsum(steps) / len(steps),
}
