"""Logits of a classifier or causal model at chosen places of token sequences.

Suffixes: B rows of a batch, L tokens of its longest row, N places, C labels (or the asked tokens of a vocabulary).

On a CPU each row is computed alone and without padding, so that its scores are the same bits whatever else is scored
with it; batches would save little there. On a GPU rows of like length share a batch under a token budget, and scores
differ between batchings by rounding. Equal rows are computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft_core.errors import SettingsError
from rft_core.hardware import resolve_device, resolve_dtype
from rft_core.model_reading import read_module
from rft_core.rewards.model_rows import Reading
from rft_core.rewards.model_settings import ScoringModelSettings

# What a head applied at one place may differ from the model's own logits by: rounding, or another rule altogether.
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


class ModelLogits:
    """A model with a head of model_reading.HEADS. Raises ModelUnreadable, SettingsError (no such device).

    `columns` are the tokens of the vocabulary, or the labels, whose logits are wanted; null takes all.
    """

    def __init__(
        self,
        folder: Path,
        settings: ScoringModelSettings,
        head: str,
        pad_token_id: int | None,
        columns: list[int] | None = None,
    ) -> None:
        self.device = torch.device(resolve_device(settings.device))
        dtype = getattr(torch, resolve_dtype(settings.dtype, self.device.type))
        module = read_module(folder, dtype, None, head).to(self.device).eval().requires_grad_(False)
        module.config.use_cache = False
        self.module = module
        self._columns = columns
        self._pad = pad_token_id
        self.budget = 0 if self.device.type == "cpu" else settings.batch_tokens
        self._read = READERS[head]
        if head == "sequence_labels" and not _is_read_at_last_token(module, self.device, PROBE_TOLERANCE[dtype]):
            self._read = of_sequence
            if pad_token_id is None:
                self.budget = 0

    def at(self, readings: Sequence[Reading]) -> list[Tensor]:
        """logits_NC of each reading in float32 on the CPU, in order."""
        distinct = list(dict.fromkeys(readings))
        found: dict[Reading, Tensor] = {}
        for batch in batches([len(reading.ids) for reading in distinct], self.budget):
            chosen = [distinct[index] for index in batch]
            found.update(zip(chosen, self._logits(chosen), strict=True))
        return [found[reading] for reading in readings]

    def _logits(self, readings: list[Reading]) -> Sequence[Tensor]:
        longest = max(len(reading.ids) for reading in readings)
        pad = self._pad if self._pad is not None else 0
        ids_BL = torch.tensor([[*reading.ids, *[pad] * (longest - len(reading.ids))] for reading in readings])
        lengths_B = torch.tensor([len(reading.ids) for reading in readings])
        inputs = {
            "input_ids": ids_BL.to(self.device),
            "attention_mask": (torch.arange(longest) < lengths_B[:, None]).long().to(self.device),
        }
        counts = [len(reading.places) for reading in readings]
        row_N = torch.repeat_interleave(torch.arange(len(readings)), torch.tensor(counts)).to(self.device)
        place_N = torch.tensor([place for reading in readings for place in reading.places]).to(self.device)
        try:
            with torch.inference_mode():
                logits_NC = self._read(self.module, inputs, row_N, place_N)
                logits_NC = (logits_NC if self._columns is None else logits_NC[:, self._columns]).float()
        except torch.OutOfMemoryError as error:
            raise SettingsError(
                f"the model that scores ran out of memory with {ids_BL.numel()} tokens at once: lower its batch_tokens "
                f"or max_tokens ({error})"
            ) from error
        return logits_NC.cpu().split(counts)


def at_places(module: Any, inputs: dict[str, Tensor], row_N: Tensor, place_N: Tensor) -> Tensor:
    return module(**inputs).logits[row_N, place_N]


def of_last_token(module: Any, inputs: dict[str, Tensor], row_N: Tensor, place_N: Tensor) -> Tensor:
    """The last token by length. The library looks for the pad token, and takes the one before it where a text ends with
    the pad token, as with pad = eos.
    """
    base = getattr(module, module.base_model_prefix)
    return module.score(base(**inputs).last_hidden_state[row_N, place_N])


def of_sequence(module: Any, inputs: dict[str, Tensor], row_N: Tensor, place_N: Tensor) -> Tensor:
    """By the model's own rule, e.g. an encoder's first token."""
    return module(**inputs).logits


def _is_read_at_last_token(module: Any, device: torch.device, tolerance: float) -> bool:
    """Whether the model is of the kind whose head `score` reads the last token."""
    if not hasattr(module, "score"):
        return False
    vocabulary = module.get_input_embeddings().weight.shape[0]
    pad = module.config.get_text_config().pad_token_id
    ids_BL = torch.tensor([[token for token in range(min(vocabulary, 8)) if token != pad]], device=device)
    inputs = {"input_ids": ids_BL, "attention_mask": torch.ones_like(ids_BL)}
    place = torch.zeros(1, dtype=torch.long, device=device), torch.tensor([ids_BL.shape[1] - 1], device=device)
    with torch.inference_mode():
        gap = of_sequence(module, inputs, *place).float() - of_last_token(module, inputs, *place).float()
    return bool(gap.abs().max() <= tolerance)


def batches(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Indices of rows, longest first, such that rows x longest of a batch is at most `budget`; a longer row is alone.

    >>> list(batches([2, 9, 3, 4], 8))
    [[1], [3, 2], [0]]
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > budget:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


READERS: dict[str, Callable[[Any, dict[str, Tensor], Tensor, Tensor], Tensor]] = {
    "sequence_labels": of_last_token,
    "token_labels": at_places,
    "causal": at_places,
}
