"""What happens to each row of a source by itself: read, clean, check, render. Runs in worker processes on chunks.

What needs the other rows (duplicates, the split, held-out overlap) comes after, in `dataset`.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from data_contracts.refs import SourceRow
from data_contracts.schemas import EXAMPLES, PROMPTS, QUARANTINE
from rft_core.data.cleaning import clean, content_text, row_operators, users_code
from rft_core.data.examples import Content, canonical_text, read_contents
from rft_core.data.faults import Fault, Faults, Rejected
from rft_core.data.fields import Recognised, map_fields
from rft_core.data.near_duplicates import signature
from rft_core.data.prompts import Renderer, load_stop_ids, load_tokenizer
from rft_core.data.settings import DataSettings
from rft_core.rewards.settings import RewardSettings

# An answer of this length within its prompt is no coincidence; a shorter one must be called the answer there.
MIN_LEAK_CHARACTERS = 12
CALLED_SO = ("answer", "solution", "result")
ANSWER_WORDS = r"\b(?:answer|solution|result)\b\s*(?:is|are|:|=|->)*\s*[\"'$*(\[]*"


class Chunk(Protocol):
    """A picklable run of rows of one source, whose base name is `source`."""

    source: str

    def rows(self) -> Iterable[SourceRow]: ...


@dataclass(frozen=True)
class RowSettings:
    """All that decides what becomes of a row, picklable. Without a model folder nothing is tokenised.

    `folder` is where relative paths of users' functions start.
    """

    data: DataSettings
    reward: RewardSettings | None
    model_folder: Path | None
    chat_template: str | None
    folder: Path | None = None


@dataclass(frozen=True)
class _Read:
    row: SourceRow
    content: Content
    faults: Faults


@dataclass(frozen=True)
class _Draft:
    """A row that is good by itself."""

    row: SourceRow
    content: Content
    prompt_text: str
    prompt_token_ids: list[int] | None
    faults: tuple[Fault, ...]


@dataclass(frozen=True)
class _RejectedRow:
    row: SourceRow
    faults: tuple[Fault, ...]


@dataclass(frozen=True)
class Processed:
    """A chunk's rows in their order; N of them are good by themselves.

    `table` holds those N in the record's columns, with an empty `split`. Digests are SHA-256: of the prompt, of all
    that the row says, and of a pair (as it is, with its sides swapped). `quarantine` holds the rejected rows and, with
    their actions, the repaired and flagged ones.
    """

    num_rows: int
    table: pa.Table
    raw: pa.Array
    prompt_digests: list[bytes]
    content_digests: list[bytes]
    pair_digests: list[tuple[bytes, bytes]] | None
    signatures: list[Any] | None
    quarantine: pa.Table
    operations: Counter[str]
    seconds: Counter[str]


@contextmanager
def timed(seconds: Counter[str], what: str) -> Iterator[None]:
    """Add the processor time that the block takes in this process, which other work on the machine does not change."""
    began = time.process_time()
    try:
        yield
    finally:
        seconds[what] += time.process_time() - began


class RowPipeline:
    """Rows -> drafts. One per process: it holds the tokenizer and the users' functions."""

    def __init__(self, settings: RowSettings) -> None:
        self.settings = settings
        data = settings.data
        tokenizer, stop_ids = None, None
        if settings.model_folder is not None:
            tokenizer = load_tokenizer(settings.model_folder, settings.chat_template)
            stop_ids = load_stop_ids(settings.model_folder)
        self.renderer = Renderer(tokenizer, data, stop_ids)
        self.operations: Counter[str] = Counter()
        self.operators = row_operators(data, settings.folder, self.operations)
        self.readers = _answer_readers(settings)
        self.is_prompts = data.record == "prompts"
        near = [operator for operator in data.cleaning if operator.name == "near_duplicates"]
        self.near_on = near[0].on if near else None

    def process(self, chunk: Chunk, recognised: Recognised, dataset: str) -> Processed:
        """Each row by itself; `seconds` tells parse, check, render and table apart."""
        self.operations.clear()
        seconds: Counter[str] = Counter()
        with timed(seconds, "parse"):
            parsed = list(chunk.rows())
        with timed(seconds, "check"), users_code(self.settings.data):
            read = [item for row in parsed for item in self._read(row, recognised)]
        with timed(seconds, "render"):
            rows = self._rendered(read)
        with timed(seconds, "table"):
            return self._processed(rows, dataset, seconds)

    def _rendered(self, read: list[_Read | _RejectedRow]) -> list[_Draft | _RejectedRow]:
        good = [item for item in read if not isinstance(item, _RejectedRow)]
        rendered = self._rendered_prompts(good) if self.is_prompts else map(self._rendered_example, good)
        return [item if isinstance(item, _RejectedRow) else next(rendered) for item in read]

    def _processed(self, rows: list[_Draft | _RejectedRow], dataset: str, seconds: Counter[str]) -> Processed:
        drafts = [row for row in rows if isinstance(row, _Draft)]
        contents = [draft.content for draft in drafts]
        columns = _prompt_columns(drafts) if self.is_prompts else _example_columns(contents)
        columns |= _source_columns(drafts, dataset)
        prompt_digests = [_prompt_digest(draft) for draft in drafts]
        is_paired = self.settings.data.record == "preferences"
        return Processed(
            num_rows=len(rows),
            table=pa.Table.from_pydict(columns, (PROMPTS if self.is_prompts else EXAMPLES).schema),
            raw=pa.array([draft.row.raw for draft in drafts], pa.large_binary()),
            prompt_digests=prompt_digests,
            content_digests=prompt_digests if self.is_prompts else [_digest(_said(content)) for content in contents],
            pair_digests=[_pair_digests(content) for content in contents] if is_paired else None,
            signatures=self._signatures(contents),
            quarantine=_quarantine(rows),
            operations=Counter(self.operations),
            seconds=seconds,
        )

    def _signatures(self, contents: list[Content]) -> list[Any] | None:
        if self.near_on is None:
            return None
        return [signature(content_text(content, self.near_on)) for content in contents]

    def _read(self, row: SourceRow, recognised: Recognised) -> list[_Read | _RejectedRow]:
        data = self.settings.data
        faults = Faults(data.policies)
        try:
            value = row.value
            if value is None:
                reason = row.reason or "not_json"
                value = row.mended if faults.meet(reason, row.detail or "") == "repair" else None
                if value is None:
                    raise Rejected(reason, f"{row.detail}; it could not be repaired")
            mapped = clean(self.operators, map_fields(value, recognised), row)
            contents = read_contents(mapped, row, data.record, data, faults)
            for content in contents:
                self._check_answer(content, faults)
        except Rejected as rejected:
            return [_rejected(row, faults, rejected)]
        return [_Read(row, content, faults) for content in contents]

    def _check_answer(self, content: Content, faults: Faults) -> None:
        answer = content.answer
        if answer is not None and "prompt" in content.parts and _gives_away(content.parts["prompt"], answer):
            faults.meet("answer_in_prompt", f"the prompt must not spell its answer, found {answer[:80]!r} in it")
        if not self.readers:
            return
        metadata = json.loads(content.metadata)
        for component, unreadable in self.readers:
            if (why := unreadable(answer, metadata)) is not None:
                faults.meet("unreadable_answer", f"{component} must be able to read the answer: {why}")

    def _rendered_prompts(self, good: list[_Read]) -> Iterator[_Draft | _RejectedRow]:
        prompts = self.renderer.render_prompts([item.content for item in good], [item.faults for item in good])
        for item, prompt in zip(good, prompts, strict=True):
            if isinstance(prompt, Rejected):
                yield _rejected(item.row, item.faults, prompt)
            else:
                yield _Draft(item.row, prompt.content, prompt.text, prompt.token_ids, tuple(item.faults.found))

    def _rendered_example(self, item: _Read) -> _Draft | _RejectedRow:
        """An example is checked as it will be rendered; its tokens are made when it is trained on."""
        try:
            rendered = self.renderer.render_example(item.content, item.faults)
        except Rejected as rejected:
            return _rejected(item.row, item.faults, rejected)
        content = rendered[0].content if rendered else item.content
        return _Draft(item.row, content, "", None, tuple(item.faults.found))


def _rejected(row: SourceRow, faults: Faults, rejected: Rejected) -> _RejectedRow:
    return _RejectedRow(row, (*faults.found, Fault(rejected.reason, str(rejected), "rejected")))


def _prompt_columns(drafts: list[_Draft]) -> dict[str, list[Any]]:
    return {
        "prompt_id": [draft.content.row_id for draft in drafts],
        "messages": [canonical_text(draft.content.parts["prompt"]) for draft in drafts],
        "prompt_text": [draft.prompt_text for draft in drafts],
        "prompt_token_ids": [draft.prompt_token_ids for draft in drafts],
        "media": [None] * len(drafts),
    }


def _example_columns(contents: list[Content]) -> dict[str, list[Any]]:
    direct = ("kind", "label", "margin", "reward", "turn_rewards", "step_labels")
    return {
        "example_id": [content.row_id for content in contents],
        "messages": [canonical_text(content.parts) for content in contents],
        **{name: [getattr(content, name) for content in contents] for name in direct},
    }


def _source_columns(drafts: list[_Draft], dataset: str) -> dict[str, list[Any]]:
    return {
        "tools": [canonical_text(draft.content.tools) if draft.content.tools else None for draft in drafts],
        "answer": [draft.content.answer for draft in drafts],
        "metadata": [draft.content.metadata for draft in drafts],
        "source": [draft.row.source for draft in drafts],
        "source_row": [draft.row.row for draft in drafts],
        "dataset": [dataset] * len(drafts),
        "split": [""] * len(drafts),
    }


def _quarantine(rows: list[_Draft | _RejectedRow]) -> pa.Table:
    """One entry per row and reason; an unpaired row's faults were met once for both of its examples."""
    told: dict[tuple[str, int, str], tuple[SourceRow, Fault]] = {}
    for item in rows:
        for fault in item.faults:
            place = (item.row.source, item.row.row, fault.reason)
            before = told.get(place)
            if before is not None and fault.detail not in before[1].detail:
                fault = replace(fault, detail=f"{before[1].detail}; {fault.detail}")
            told[place] = (item.row, fault)
    entries = [quarantine_entry(row.source, row.row, row.raw, fault) for row, fault in told.values()]
    return pa.Table.from_pylist(entries, QUARANTINE.schema)


def quarantine_entry(source: str, source_row: int, raw: bytes, fault: Fault) -> dict[str, Any]:
    """A row of record quarantine."""
    return {
        "source": source,
        "source_row": source_row,
        "reason": fault.reason,
        "action": fault.action,
        "detail": fault.detail.encode(errors="backslashreplace").decode(),
        "raw": raw,
    }


def _said(content: Content) -> dict[str, Any]:
    """All that a row says. Two rows that differ in id, metadata or answer alone say the same."""
    return {
        "kind": content.kind,
        "parts": content.parts,
        "tools": content.tools,
        "label": content.label,
        "margin": content.margin,
        "reward": content.reward,
        "turn_rewards": content.turn_rewards,
        "step_labels": content.step_labels,
    }


def _pair_digests(content: Content) -> tuple[bytes, bytes]:
    parts = content.parts
    swapped = {**parts, "chosen": parts["rejected"], "rejected": parts["chosen"]}
    return _digest(parts), _digest(swapped)


def _prompt_digest(draft: _Draft) -> bytes:
    if draft.content.kind == "prompt":
        return hashlib.sha256(draft.prompt_text.encode()).digest()
    parts = draft.content.parts
    return _digest({"prompt": parts.get("prompt", parts.get("text")), "tools": draft.content.tools})


def asked_digests(prompts: pa.Table) -> list[bytes]:
    """Of record prompts, as the prompt of an example is digested: by its messages and tools."""
    rows = prompts.select(["messages", "tools"]).to_pylist()
    tools = [json.loads(row["tools"]) if row["tools"] is not None else None for row in rows]
    return [_digest({"prompt": json.loads(row["messages"]), "tools": t}) for row, t in zip(rows, tools, strict=True)]


def _digest(value: dict[str, Any]) -> bytes:
    return hashlib.sha256(canonical_text(value).encode()).digest()


def _answer_readers(settings: RowSettings) -> list[tuple[str, Callable[[str | None, dict[str, Any]], str | None]]]:
    """The reward functions that can't judge every prompt."""
    if settings.reward is None or settings.data.record != "prompts":
        return []
    from rft_core.rewards import build_grader
    from rft_core.rewards.settings import StepSettings

    # Models that score and users' functions judge every prompt; the folders of the former need not be here, and the
    # latter would start a process.
    functions = [
        function
        for function in settings.reward.functions
        if function.scoring_model is None and function.name != "custom"
    ]
    changes = {"functions": functions, "steps": StepSettings()}
    return build_grader(settings.reward.model_copy(update=changes), settings.folder).answer_readers


def _gives_away(messages: list[dict[str, Any]], answer: str) -> bool:
    """Whether the last message spells the answer: a long one anywhere, a short one where it is called the answer.

    >>> _gives_away([{"role": "user", "content": "What is 6*7? (answer: 42)"}], "42")
    True
    >>> _gives_away([{"role": "user", "content": "What is 42-0?"}], "42")
    False
    """
    text = messages[-1].get("content") if messages else None
    wanted = answer.strip()
    if not isinstance(text, str) or not wanted or wanted not in text:
        return False
    if len(wanted) >= MIN_LEAK_CHARACTERS:
        return True
    lowered = text.lower()
    if not any(word in lowered for word in CALLED_SO):
        return False
    return re.search(rf"{ANSWER_WORDS}{re.escape(wanted)}(?!\w)", text, re.IGNORECASE) is not None
