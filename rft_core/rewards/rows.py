"""What a reward function gets (RewardRow) and gives (Scored), and how rows are read from tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from rft_core.errors import ContractError


class RewardRow:
    """One rollout as a reward function sees it; messages and metadata are this row's own copies.

    RewardRow("step-00001/gsm-7/00", "gsm-7", [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content":
    "4"}], "4", "4", {"level": 1}, "stop")
    """

    __slots__ = (
        "_messages",
        "_metadata",
        "_tokens",
        "answer",
        "completion_text",
        "dataset",
        "earlier",
        "finish_reason",
        "group_id",
        "prompt_id",
        "rollout_id",
        "source",
        "step_ends",
    )

    def __init__(
        self,
        rollout_id: str,
        prompt_id: str,
        messages: list[dict[str, Any]] | str,  # or their JSON, read when it is asked for
        completion_text: str,  # what the policy wrote, never the prompt; may be empty
        answer: str | None,  # ground truth; null where the source gives none
        metadata: dict[str, Any] | str,  # every other field of the source row
        finish_reason: str,  # stop | length | given
        group_id: str = "",
        source: str = "",
        dataset: str | None = None,
        step_ends: tuple[int, ...] = (),  # where each reasoning step ends in the text; empty when it is not split
        tokens: tuple[pa.Array, pa.Array, int] | None = None,  # columns of ids and masks, its place in them
    ) -> None:
        self.rollout_id = rollout_id
        self.prompt_id = prompt_id
        self.completion_text = completion_text
        self.answer = answer
        self.finish_reason = finish_reason
        self.group_id = group_id
        self.source = source
        self.dataset = dataset
        self.step_ends = step_ends
        self.earlier: dict[str, float | None] = {}  # scores of the components before this function's
        self._messages = messages
        self._metadata = metadata
        self._tokens = tokens

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The whole conversation: the prompt, then what followed."""
        if isinstance(self._messages, str):
            self._messages = json.loads(self._messages)
        return self._messages

    @property
    def metadata(self) -> dict[str, Any]:
        if isinstance(self._metadata, str):
            self._metadata = json.loads(self._metadata)
        return self._metadata

    @property
    def prompt_messages(self) -> list[dict[str, Any]]:
        """The conversation up to the completion."""
        return self.messages[:-1] if self.messages and self.messages[-1]["role"] == "assistant" else self.messages

    @property
    def token_ids(self) -> list[int] | None:
        """The tokens that the policy wrote; null for text that came without any."""
        if self._tokens is None:
            return None
        ids, masks, index = self._tokens
        written = masks[index].values.to_numpy(zero_copy_only=False)
        return ids[index].values.to_numpy()[written].tolist()

    @property
    def num_tokens(self) -> int | None:
        token_ids = self.token_ids
        return None if token_ids is None else len(token_ids)

    @property
    def steps(self) -> list[str]:
        """The completion's text, step by step."""
        starts = (0, *self.step_ends)[: len(self.step_ends)]
        return [self.completion_text[start:end] for start, end in zip(starts, self.step_ends, strict=True)]

    def __repr__(self) -> str:
        return f"RewardRow({self.rollout_id!r}, {shortened(self.completion_text, 60)!r})"


@dataclass(frozen=True, slots=True)
class Scored:
    """A score, or null with the reason why there is none. 0.0 is a score; `reason` beside it says why it is low.

    `metrics` are further numbers of this row, kept in the table as components named function/metric. `steps` are scores
    of its reasoning steps, one per RewardRow.step_ends. `absence` marks a row that the function was not asked about.
    """

    value: float | None
    reason: str | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    steps: tuple[float, ...] | None = None
    absence: Literal["not_applicable", "gated"] | None = None


def valid_text(text: str) -> str:
    """Half surrogate pairs, which no table and no request can hold, as their escapes.

    >>> valid_text("a\\ud800")
    'a\\\\ud800'
    """
    return text.encode(errors="backslashreplace").decode()


def shortened(text: str, limit: int = 300) -> str:
    """Valid text of at most `limit` characters, for a message: users' code may say anything at any length."""
    return valid_text(text if len(text) <= limit else f"{text[: limit - 3]}...")


def never_unreadable(answer: str | None, metadata: dict[str, Any]) -> str | None:
    """For functions that can judge every prompt."""
    return None


@dataclass(frozen=True)
class Scorer:
    """A reward function made ready by its settings.

    `identity` is what decides its scores besides the settings (version of the rules, the user's code). `unreadable`
    says why a prompt's (answer, metadata) can't be judged, or null; it needs no completion: data validation can ask.
    `needs_earlier` asks for RewardRow.earlier. The content of `model_folder` decides scores too; it is read when the
    grader's digest is asked for. `check` raises what only trying shows, before anything expensive. `probe` scores rows
    as `score` does, but raises where that would leave all of them unscored. `close` ends what it has running, also when
    another thread waits for it; it is not asked again.
    """

    score: Callable[[list[RewardRow]], list[Scored]]
    identity: dict[str, Any]
    unreadable: Callable[[str | None, dict[str, Any]], str | None] = never_unreadable
    is_custom: bool = False
    needs_earlier: bool = False
    model_folder: Path | None = None
    check: Callable[[], None] | None = None
    probe: Callable[[list[RewardRow]], list[Scored]] | None = None
    close: Callable[[], None] | None = None


def last_segments(rollouts: pa.Table) -> pa.Table:
    """One row per rollout_id, in order of first appearance: the last segment, whose text ends the rollout."""
    ids = rollouts.column("rollout_id")
    if pc.count_distinct(ids).as_py() == rollouts.num_rows:
        return rollouts
    last: dict[str, tuple[int, int]] = {}
    for index, (rollout_id, segment) in enumerate(
        zip(ids.to_pylist(), rollouts.column("segment").to_pylist(), strict=True)
    ):
        if rollout_id not in last or segment > last[rollout_id][0]:
            last[rollout_id] = (segment, index)  # a dict keeps the place of the first insertion
    return rollouts.take(pa.array([index for _, index in last.values()], pa.int64()))


def reward_rows(
    rollouts: pa.Table, prompts: pa.Table, step_ends: Callable[[str], tuple[int, ...]] | None = None
) -> list[RewardRow]:
    """Rows of `rollouts` joined to their prompts by id. Fresh messages and metadata at every call.

    Raises ContractError when a prompt is missing or occurs twice.
    """
    prompt_ids = prompts.column("prompt_id").to_pylist()
    found = dict(zip(prompt_ids, zip(*_columns(prompts, PROMPT_COLUMNS), strict=True), strict=True))
    if len(found) < len(prompt_ids):
        twice = next(prompt_id for prompt_id, count in Counter(prompt_ids).items() if count > 1)
        raise ContractError(f"prompts: prompt_id must be unique, got {twice!r} twice")
    tokens = None
    if "completion_token_ids" in rollouts.column_names:
        tokens = [rollouts.column(name).combine_chunks() for name in ("completion_token_ids", "completion_mask")]
    rows = []
    for index, (rollout_id, prompt_id, group_id, messages, text, finish_reason) in enumerate(
        zip(*_columns(rollouts, ROLLOUT_COLUMNS), strict=True)
    ):
        if prompt_id not in found:
            raise ContractError(f"rollouts: prompt {prompt_id!r} of rollout {rollout_id!r} is not in the prompts table")
        answer, metadata, source, dataset = found[prompt_id]
        ends = step_ends(text) if step_ends is not None else ()
        rows.append(
            RewardRow(
                *(rollout_id, prompt_id, messages, text, answer, metadata, finish_reason, group_id),
                *(source, dataset, ends, (*tokens, index) if tokens else None),
            )
        )
    return rows


def packed_rows(rows: list[RewardRow]) -> pa.Buffer:
    """Rows as an Arrow stream, for another process. Those of one block share their columns of tokens."""
    names = list(dict.fromkeys(name for row in rows for name in row.earlier))
    columns = {name: pa.array([getattr(row, name) for row in rows], pa.large_string()) for name in TEXT_FIELDS}
    columns["messages"] = pa.array([_json_of(row._messages) for row in rows], pa.large_string())
    columns["metadata"] = pa.array([_json_of(row._metadata) for row in rows], pa.large_string())
    if any(row.step_ends for row in rows):
        columns["step_ends"] = pa.array([row.step_ends for row in rows], pa.large_list(pa.int64()))
    if rows[0]._tokens is not None:
        ids, masks, _ = rows[0]._tokens
        places = pa.array([row._tokens[2] for row in rows if row._tokens is not None], pa.int64())
        columns |= {"token_ids": ids.take(places), "token_masks": masks.take(places)}
    for name in names:
        columns[f"{EARLIER}{name}"] = pa.array([row.earlier.get(name) for row in rows], pa.float64())
    table = pa.table(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue()


def unpacked_rows(buffer: pa.Buffer | bytes) -> list[RewardRow]:
    """What packed_rows packed."""
    table = pa.ipc.open_stream(buffer).read_all()
    size = table.num_rows
    texts = {name: table.column(name).to_pylist() for name in (*TEXT_FIELDS, "messages", "metadata")}
    ends = table.column("step_ends").to_pylist() if "step_ends" in table.column_names else [()] * size
    tokens = None
    if "token_ids" in table.column_names:
        tokens = [table.column(name).combine_chunks() for name in ("token_ids", "token_masks")]
    rows = [
        RewardRow(*fields, step_ends=tuple(of_row), tokens=(*tokens, index) if tokens else None)
        for index, (*fields, of_row) in enumerate(zip(*(texts[name] for name in ARGUMENTS), ends, strict=True))
    ]
    names = [name for name in table.column_names if name.startswith(EARLIER)]
    for row, *scores in zip(rows, *(table.column(name).to_pylist() for name in names), strict=True):
        row.earlier = {name.removeprefix(EARLIER): score for name, score in zip(names, scores, strict=True)}
    return rows


def _json_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _columns(table: pa.Table, names: tuple[str, ...]) -> list[list[Any]]:
    return [table.column(name).to_pylist() for name in names]


PROMPT_COLUMNS = ("answer", "metadata", "source", "dataset")
ROLLOUT_COLUMNS = ("rollout_id", "prompt_id", "group_id", "messages", "completion_text", "finish_reason")
# How RewardRow takes its fields, in order, and which of them are texts as they are.
ARGUMENTS = (
    *("rollout_id", "prompt_id", "messages", "completion_text", "answer", "metadata", "finish_reason"),
    *("group_id", "source", "dataset"),
)
TEXT_FIELDS = tuple(name for name in ARGUMENTS if name not in ("messages", "metadata"))
EARLIER = "earlier/"  # begins the columns of RewardRow.earlier
