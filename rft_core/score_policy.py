"""A model that is trained to score: the body of a language model under a head that gives numbers instead of tokens.

It stands where a policy stands: what `token_logprobs` gives for a token is the model's score after reading it. So
reward models and process reward models train through the update of every other model. A head that the folder does not
have starts at 0: all scores are 0 then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rft_core.batching import MicroBatch, TrainRow, micro_batches
from rft_core.errors import SettingsError
from rft_core.model_reading import NEW_HEAD, SCORE_AT, STOP_TOKEN, read_module
from rft_core.policy import PROBE_TOLERANCE, Policy

ANY_TOKEN = 0  # stands behind a completion, so that its last token is read too; nothing attends to it


@dataclass
class ScorePolicy(Policy):
    """One number per token: the logit of a sequence head, whose last token counts."""

    head: ClassVar[str] = "sequence_labels"
    labels: ClassVar[tuple[str, ...]] = ("score",)
    new_head: ClassVar[str | None] = NEW_HEAD

    @classmethod
    def read(cls, folder: Path, dtype: torch.dtype, attention: str, tokenizer: Any) -> Any:
        """Raises SettingsError for an architecture whose head is not known."""
        module = read_module(folder, dtype, attention, cls.head, new_labels=len(cls.labels))
        if not isinstance(getattr(module, NEW_HEAD, None), torch.nn.Linear):
            raise SettingsError(
                f"a model that is trained to score must be a decoder whose head transformers calls {NEW_HEAD}, found "
                f"{type(module).__name__} in {folder}"
            )
        config = module.config
        config.id2label, config.label2id = dict(enumerate(cls.labels)), {name: i for i, name in enumerate(cls.labels)}
        if cls.head == "sequence_labels":
            setattr(config, SCORE_AT, STOP_TOKEN)
        if config.pad_token_id is None:  # without one the library's classifiers take no batch
            pad = tokenizer.pad_token_id
            config.pad_token_id = tokenizer.eos_token_id if pad is None else pad
        return module

    def token_logprobs(
        self, batch: MicroBatch, temperature: float, *, entropy_gradient: bool = False
    ) -> tuple[Tensor, None]:
        """(score_T, None): float32, the score after each completion token. There is no distribution."""
        return self._score(getattr(self.module, NEW_HEAD)(self.hidden_states(batch)).float()), None

    def _score(self, logits_TC: Tensor) -> Tensor:
        return logits_TC[:, 0]

    def micro_batches(self, rows: list[TrainRow], token_budget: int) -> list[MicroBatch]:
        return [after_reading(batch) for batch in super().micro_batches(with_a_token_more(rows), token_budget)]

    def _probe(self, wants_shared: bool) -> None:
        """Whether completions may share a prompt, told by hidden states: a new head gives 0 for any."""
        rows = self._probe_rows()
        (plain,) = micro_batches(rows, 1000, False)
        with torch.no_grad():
            hidden_TD = self.hidden_states(plain)
            expected = dict(zip(plain.row_indices, hidden_TD.split(plain.lengths), strict=True))
            self._choose_layout(rows, wants_shared, expected)

    def _agrees(self, batch: MicroBatch, expected: dict[int, Tensor]) -> bool:
        try:
            found = self.hidden_states(batch).split(batch.lengths)
        except torch.OutOfMemoryError:  # says nothing of the model
            raise
        except (TypeError, ValueError, RuntimeError, AttributeError):  # a family that takes no such mask or positions
            return False
        pairs = [(found[index], expected[row]) for index, row in enumerate(batch.row_indices)]
        largest = max(float(hidden.abs().max()) for _, hidden in pairs)
        return all(float((a - b).abs().max()) <= PROBE_TOLERANCE[self.dtype] * max(1.0, largest) for a, b in pairs)


@dataclass
class StepScorePolicy(ScorePolicy):
    """The log odds that a step is good: good against bad of a token head."""

    head: ClassVar[str] = "token_labels"
    labels: ClassVar[tuple[str, ...]] = ("bad", "good")

    def _score(self, logits_TC: Tensor) -> Tensor:
        return logits_TC[:, 1] - logits_TC[:, 0]


def with_a_token_more(rows: list[TrainRow]) -> list[TrainRow]:
    """Rows whose last token is read by the model, since one stands behind it."""
    return [replace(row, completion_token_ids=np.append(row.completion_token_ids, ANY_TOKEN)) for row in rows]


def after_reading(batch: MicroBatch) -> MicroBatch:
    """From positions that predict a token to those that have read it: each row without its first entry."""
    keep = torch.cat([torch.arange(length) > 0 for length in batch.lengths])
    return replace(
        batch,
        lengths=tuple(length - 1 for length in batch.lengths),
        predicting_T=batch.predicting_T[keep],
        target_T=batch.target_T[keep],
    )


# What an algorithm trains: Algorithm.head.
POLICIES: dict[str, type[Policy]] = {"causal": Policy, "sequence_labels": ScorePolicy, "token_labels": StepScorePolicy}
