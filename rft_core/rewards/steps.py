"""Where the reasoning steps of a completion end, as characters of its text and as tokens."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rft_core.errors import GraderUnavailable
from rft_core.rewards.combine import contributions
from rft_core.rewards.rows import Scored
from rft_core.rewards.settings import RewardFunction, StepSettings
from rft_core.rewards.user_process import CallLost, UserCode

Splitter = Callable[[str], tuple[int, ...]]

SEMANTICS = 1
TEXT_COLUMNS = ("completion_text", "completion_token_ids", "completion_mask")


def line_ends(text: str, _settings: StepSettings) -> Iterator[int]:
    """Every line that is not blank is a step."""
    return (end for end in _lines(text) if end is not None)


def paragraph_ends(text: str, _settings: StepSettings) -> Iterator[int]:
    """Blank lines divide steps."""
    last = None
    for end in (*_lines(text), None):
        if end is None and last is not None:
            yield last
        last = end


def _lines(text: str) -> Iterator[int | None]:
    """Where each line ends, without the white space at its end; null for a blank one. Linear in the text."""
    start = 0
    for line in text.split("\n"):
        content = line.rstrip()
        yield start + len(content) if content else None
        start += len(line) + 1


def tag_ends(text: str, settings: StepSettings) -> Iterator[int]:
    """Each closing tag ends a step; text after the last one is a step too. Without a closing tag all is one step."""
    closing = f"</{settings.tag}>"
    ends = [match.end() for match in re.finditer(re.escape(closing), text)]
    size = len(text.rstrip())
    return iter([*ends, size] if size > (ends[-1] if ends else 0) else ends)


class UserSplitter:
    """A user's function in its process, from a text to its steps' texts, in order. It is asked about whole blocks."""

    def __init__(self, settings: StepSettings, folder: Path | None, code: UserCode) -> None:
        self._path = settings.path or ""
        self._code = code
        self._number, self.identity = code.load(self._path, folder, settings.depends_on)
        self._seconds = settings.call_seconds
        self._ends: dict[str, tuple[int, ...]] = {}

    def prepare(self, texts: Sequence[str]) -> None:
        """Divide the texts of a block. Raises RewardFunctionError, GraderUnavailable when there is no answer."""
        asked = list(dict.fromkeys(texts))
        request = {"do": "split", "name": self._path, "texts": asked}
        try:
            ends = self._code.ask(self._number, request, b"", self._seconds)["ends"]
        except CallLost as lost:
            raise GraderUnavailable(f"steps.path {self._path} must divide completions, but it {lost}") from lost
        self._ends = {text: tuple(of_text) for text, of_text in zip(asked, ends, strict=True)}

    def __call__(self, text: str) -> tuple[int, ...]:
        if text not in self._ends:
            self.prepare([text])
        return self._ends[text]


def build_splitter(settings: StepSettings, folder: Path | None, code: UserCode) -> tuple[Splitter, dict[str, Any]]:
    """(a text's step ends, increasing, without white space at a step's end; identity of the rule).

    Raises SettingsError, RewardFunctionError, GraderUnavailable.
    """
    identity = {"semantics": SEMANTICS, "settings": settings.content()}
    if settings.split != "custom":
        rule = SPLITS[settings.split]
        return lambda text: tuple(rule(text, settings)), identity
    splitter = UserSplitter(settings, folder, code)
    return splitter, {**identity, **splitter.identity}


def step_columns(
    functions: Sequence[RewardFunction],
    by_function: Sequence[Sequence[Scored]],
    rewards: Sequence[float | None],
    chosen: pa.Table,
    split: Splitter | None,
    tokenizer: Any,
) -> tuple[list[list[int] | None], list[list[float] | None]]:
    """(token of each step's end, weighted sum of the step scores) by rollout; nulls where no function gave any, and
    where the rollout is unscored. Without a tokenizer the ends are null."""
    ends: list[list[int] | None] = [None] * len(rewards)
    scores: list[list[float] | None] = [None] * len(rewards)
    if split is None:
        return ends, scores
    for index, (reward, *row) in enumerate(zip(rewards, *by_function, strict=True)):
        parts = [
            function.weight * contributions(function, np.array(scored.steps, float))
            for function, scored in zip(functions, row, strict=True)
            if scored.steps is not None
        ]
        if parts and reward is not None:
            scores[index] = np.sum(parts, axis=0).tolist()
            ends[index] = _written_ends(chosen, index, split, tokenizer) if tokenizer is not None else None
    return ends, scores


def _written_ends(chosen: pa.Table, index: int, split: Splitter, tokenizer: Any) -> list[int]:
    """Among all tokens of the completion, of which only those that the policy wrote hold its text."""
    text, token_ids, mask = (chosen.column(name)[index].as_py() for name in TEXT_COLUMNS)
    written = np.flatnonzero(mask)
    ends = token_ends(split(text), np.array(token_ids, np.int64)[written].tolist(), text, tokenizer)
    return written[ends].tolist() if ends else []


def token_ends(ends: Sequence[int], token_ids: list[int], text: str, tokenizer: Any) -> list[int]:
    """The token that holds each end's last character. `text` is `token_ids` decoded without special tokens.

    >>> class Letters:
    ...     def batch_decode(self, ids, **_): return ["ab"[part[0]] * 2 for part in ids]
    >>> token_ends([2, 4], [0, 1], "aabb", Letters())
    [0, 1]
    """
    if not ends or not token_ids:
        return []
    parts = tokenizer.batch_decode(
        [[token] for token in token_ids], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    if "".join(parts) == text:
        lengths: Sequence[int] = list(accumulate(map(len, parts)))
    else:  # tokens that hold parts of a character, or join with a space
        lengths = _PrefixLengths(token_ids, text, tokenizer)
    return [min(bisect_left(lengths, end), len(token_ids) - 1) for end in ends]


class _PrefixLengths(Sequence[int]):
    """Length of the text of the first n + 1 tokens, decoded when it is asked for. Half a character at its end does not
    count; U+FFFD that the text holds itself does.
    """

    def __init__(self, token_ids: list[int], text: str, tokenizer: Any) -> None:
        self._token_ids = token_ids
        self._text = text
        self._tokenizer = tokenizer
        self._known: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._token_ids)

    def __getitem__(self, index: Any) -> Any:
        if index not in self._known:
            prefix = self._tokenizer.decode(
                self._token_ids[: index + 1], skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            while prefix.endswith("\ufffd") and not self._text.startswith(prefix):
                prefix = prefix[:-1]
            self._known[index] = len(prefix)
        return self._known[index]


SPLITS: dict[str, Callable[[str, StepSettings], Iterator[int]]] = {
    "lines": line_ends,
    "paragraphs": paragraph_ends,
    "tags": tag_ends,
}
