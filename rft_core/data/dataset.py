"""Sources -> blocks of prompts or examples, and of quarantine: what needs more than one row, in the order of the rows.

Every row read ends in exactly one of two places: the data set, or quarantine with a reason code. Rows that were
repaired or flagged are in both. Memory holds one block and a digest per row, whatever the size of the source.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from data_contracts.reasons import ACTIONS, EXPECTED_LOSSES, REASONS
from data_contracts.schemas import EXAMPLES, PROMPTS, QUARANTINE
from rft_core.data.faults import Fault
from rft_core.data.near_duplicates import NearDuplicates
from rft_core.data.row_pipeline import Processed, asked_digests, quarantine_entry, timed
from rft_core.data.settings import DataSettings
from rft_core.errors import RowsRejected

BLOCK_ROWS = 65_536  # rows held back until they are handed on as one block
NUM_SHOWN_ROWS = 5
DIGEST_BYTES = 16  # of a SHA-256: collisions are out of reach, and a million rows take little memory


@dataclass(frozen=True)
class Block:
    """Rows that are ready to be committed: record prompts or examples, and record quarantine."""

    table: pa.Table
    quarantine: pa.Table


@dataclass
class Dataset:
    """Takes processed chunks in order, gives blocks. `counts` and `notes` are complete after `close`.

    counts: rows = used + rejected + dropped; train + heldout = used; converted, repaired and flagged rows are used.
    Each reason code is counted under its own name. Rows that were dropped (EXPECTED_LOSSES: duplicates, what cleaning
    takes out) are no faults.
    """

    settings: DataSettings
    counts: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    seconds: Counter[str] = field(default_factory=Counter)  # by kind of work, summed over processes
    _seen: dict[bytes, tuple[int, bytes]] = field(default_factory=dict)
    _asked_elsewhere: dict[bytes, int] = field(default_factory=dict)
    _contents: dict[bytes, int] = field(default_factory=dict)
    _ids: dict[str, int] = field(default_factory=dict)
    _pairs: dict[bytes, int] = field(default_factory=dict)
    _labels: Counter[bool] = field(default_factory=Counter)
    _tables: list[pa.Table] = field(default_factory=list)
    _quarantines: list[pa.Table] = field(default_factory=list)
    _converted: list[int] = field(default_factory=list)
    _conflicting: list[int] = field(default_factory=list)
    _faults: Counter[str] = field(default_factory=Counter)  # reasons of rejected rows
    _first_faults: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        near = [operator for operator in self.settings.cleaning if operator.name == "near_duplicates"]
        self._near = NearDuplicates(near[0].threshold) if near else None
        copies = [operator for operator in self.settings.cleaning if operator.name == "exact_duplicates"]
        self._drops_same_prompt = bool(copies) and copies[0].on == "prompt"
        self._is_prompts = self.settings.record == "prompts"
        self._id_column = "prompt_id" if self._is_prompts else "example_id"

    def keep_clear_of(self, prompts: pa.Table) -> None:
        """Drop rows of these prompts (record prompts), which another data set holds out."""
        for row, digest in zip(prompts["source_row"].to_pylist(), asked_digests(prompts), strict=True):
            self._asked_elsewhere[digest[:DIGEST_BYTES]] = row

    def add(self, processed: Processed, is_heldout: bool = False) -> Iterator[Block]:
        """Take a chunk. `is_heldout`: it comes from the held-out source, which must be read first."""
        self.counts["rows"] += processed.num_rows
        self.operations += processed.operations
        self.seconds += processed.seconds
        with timed(self.seconds, "compare"):
            kept, splits, entries = self._judged(processed, is_heldout)
        table = processed.table.take(pa.array(kept, pa.int64()))
        column = table.schema.get_field_index("split")
        self._tables.append(table.set_column(column, table.schema.field(column), pa.array(splits, pa.large_string())))
        self.counts["used"] += len(kept)
        self.counts.update(splits)
        if not self._is_prompts:
            self._labels.update(table["label"].drop_null().to_pylist())
        self._add_quarantine(processed.quarantine)
        self._add_quarantine(pa.Table.from_pylist(entries, QUARANTINE.schema))
        if sum(table.num_rows for table in self._tables) >= BLOCK_ROWS:
            yield self._block()

    def close(self) -> Iterator[Block]:
        """The rest. Raises RowsRejected (a ContractError) when no row is good, or too many are rejected."""
        self.counts["rejected"] = self.counts["rows"] - self.counts["used"] - self.counts["dropped"]
        self.notes += self._closing_notes()
        block = self._block()
        if problem := self._one_sided() or self._too_many_rejected():
            raise RowsRejected(problem, block.quarantine, self.summary())
        yield block

    def _judged(self, processed: Processed, is_heldout: bool) -> tuple[list[int], list[str], list[dict[str, Any]]]:
        """Rows that stay, their splits, and quarantine entries of the others."""
        table = processed.table
        rows = table["source_row"].to_pylist()
        ids = table[self._id_column].to_pylist()
        answers = table["answer"].to_pylist()
        sources = table["source"].to_pylist()
        kept, splits, entries = [], [], []
        for index, (row, name) in enumerate(zip(rows, ids, strict=True)):
            prompt = processed.prompt_digests[index]
            faults = self._met(processed, index, row, name, answers[index], is_heldout)
            entries += [quarantine_entry(sources[index], row, processed.raw[index].as_py(), fault) for fault in faults]
            if any(fault.action == "rejected" for fault in faults):
                continue
            self._remember(processed, index, row, name, answers[index], is_heldout)
            kept.append(index)
            splits.append("heldout" if is_heldout or self._is_held_out(prompt) else "train")
        return kept, splits, entries

    def _met(
        self, processed: Processed, index: int, row: int, name: str, answer: str | None, is_heldout: bool
    ) -> list[Fault]:
        """What is wrong with a row among the others; the first fault that rejects it ends the search."""
        faults: list[Fault] = []
        for reason, detail in self._findings(processed, index, row, name, answer, is_heldout):
            action = ACTIONS[self.settings.policies.get(reason, REASONS[reason].policy)]
            faults.append(Fault(reason, detail, action))
            if action == "rejected":
                break
        return faults

    def _findings(
        self, processed: Processed, index: int, row: int, name: str, answer: str | None, is_heldout: bool
    ) -> Iterator[tuple[str, str]]:
        prompt = processed.prompt_digests[index][:DIGEST_BYTES]
        before = self._seen.get(prompt)
        if before is not None and before[0] < 0 and not is_heldout:
            yield "overlaps_heldout", f"the same prompt as row {-before[0]} of the held-out source"
        if prompt in self._asked_elsewhere:
            yield (
                "overlaps_heldout",
                f"the same prompt as row {self._asked_elsewhere[prompt]}, held out for evaluations",
            )
        if self._is_prompts and before is not None:
            yield "duplicate_prompt", self._copy_detail(row, answer, before)
        content = processed.content_digests[index][:DIGEST_BYTES]
        if not self._is_prompts and self._drops_same_prompt and before is not None:
            yield "duplicate_content", f"the same prompt as row {abs(before[0])}"
        if not self._is_prompts and content in self._contents:
            yield "duplicate_content", f"the same content as row {self._contents[content]}"
        if name in self._ids:
            yield "duplicate_id", f"ids must differ, found {name!r}, also the id of row {self._ids[name]}"
        if processed.pair_digests is not None:
            swapped = processed.pair_digests[index][1][:DIGEST_BYTES]
            if swapped in self._pairs:
                yield "swapped_sides", f"row {self._pairs[swapped]} prefers the other side"
        if self._near is not None and processed.signatures is not None:
            first = self._near.seen(processed.signatures[index], row)
            if first is not None:
                yield "near_duplicate", f"nearly the same as row {first}"

    def _copy_detail(self, row: int, answer: str | None, before: tuple[int, bytes]) -> str:
        if before[1] == _answer_digest(answer):
            return f"the same prompt as row {abs(before[0])}"
        self._conflicting.append(row)
        return f"the same prompt as row {abs(before[0])}, with another answer: {answer!r}"

    def _remember(
        self, processed: Processed, index: int, row: int, name: str, answer: str | None, is_heldout: bool
    ) -> None:
        """A row is remembered as seen only when it is used; held-out rows as negative numbers."""
        self._ids[name] = row
        prompt = processed.prompt_digests[index][:DIGEST_BYTES]
        if self._is_prompts or is_heldout or self._drops_same_prompt:
            self._seen[prompt] = (-row if is_heldout else row, _answer_digest(answer))
        if not self._is_prompts:
            self._contents[processed.content_digests[index][:DIGEST_BYTES]] = row
        if processed.pair_digests is not None:
            self._pairs[processed.pair_digests[index][0][:DIGEST_BYTES]] = row

    def _is_held_out(self, prompt_digest: bytes) -> bool:
        """By the prompt alone, so that the same prompt is always on the same side."""
        if self.settings.heldout_source is not None:
            return False
        return int.from_bytes(prompt_digest[:8], "big") < self.settings.heldout_fraction * 2**64

    def _add_quarantine(self, quarantine: pa.Table) -> None:
        if not quarantine.num_rows:
            return
        self._quarantines.append(quarantine)
        self.counts.update(_tally(quarantine["reason"]))
        is_rejected = pc.equal(quarantine["action"], "rejected")
        is_loss = pc.is_in(quarantine["reason"], pa.array(sorted(EXPECTED_LOSSES), pa.large_string()))
        self.counts["dropped"] += _count(pc.and_(is_rejected, is_loss))
        for action in ("repaired", "flagged"):
            self.counts[action] += _count(pc.equal(quarantine["action"], action))
        is_conversion = pc.and_(pc.equal(quarantine["reason"], "answer_not_text"), pc.invert(is_rejected))
        self._converted += quarantine.filter(is_conversion)["source_row"].to_pylist()
        faults = quarantine.filter(pc.and_(is_rejected, pc.invert(is_loss)))
        self._faults.update(_tally(faults["reason"]))
        if len(self._first_faults) < NUM_SHOWN_ROWS:
            self._first_faults += faults.slice(0, NUM_SHOWN_ROWS - len(self._first_faults)).to_pylist()

    def _block(self) -> Block:
        schema = (PROMPTS if self._is_prompts else EXAMPLES).schema
        block = Block(
            pa.concat_tables([schema.empty_table(), *self._tables]).combine_chunks(),
            pa.concat_tables([QUARANTINE.schema.empty_table(), *self._quarantines]).combine_chunks(),
        )
        self._tables, self._quarantines = [], []
        return block

    def _one_sided(self) -> str | None:
        """Labels of one kind are noted, or a problem where the policy is reject."""
        if self.settings.record != "labelled" or len(self._labels) != 1:
            return None
        [(label, number)] = self._labels.items()
        found = f"labels must be of both kinds, found {str(label).lower()} in all {number} rows"
        self.counts["one_sided_labels"] = number
        if self.settings.policies.get("one_sided_labels") == "reject":
            return found
        self.notes.append(found)
        return None

    def _closing_notes(self) -> Iterator[str]:
        if self._converted:
            rows = _some(self._converted)
            yield f"{len(self._converted)} answers that were not text became their JSON text: rows {rows}"
        if self._conflicting:
            rows = _some(self._conflicting)
            yield f"{len(self._conflicting)} duplicates have another answer than the prompt kept: rows {rows}"
        if (self.settings.heldout_fraction or self.settings.heldout_source) and not self.counts["heldout"]:
            yield "no prompt is held out: the data is small for data.heldout_fraction"
        yield from (f"cleaning: {what} {number}" for what, number in sorted(self.operations.items()))

    def summary(self) -> dict[str, int]:
        """Totals first, then each reason code by name."""
        totals = ("rows", "used", "train", "heldout", "rejected", "dropped", "repaired", "flagged")
        reasons = {name: number for name, number in sorted(self.counts.items()) if name not in totals}
        return {name: self.counts[name] for name in totals} | reasons

    def _too_many_rejected(self) -> str | None:
        counts, settings = self.counts, self.settings
        rows, rejected = counts["rows"], counts["rejected"]
        if counts["train"] and rejected <= settings.max_rejected_fraction * rows:
            return None
        if not counts["used"]:
            found = f"data must hold at least one good row, found none in {rows} rows"
        elif not counts["train"] and settings.heldout_source is not None:
            found = f"data must hold rows that data.heldout_source does not ask, found none in {rows} rows of both"
        elif not counts["train"]:
            found = (
                f"data must hold train rows, found all {counts['used']} held out: a hash of the prompt decides, so few "
                "rows may all be; lower data.heldout_fraction or give more rows"
            )
        else:
            allowed = f"{settings.max_rejected_fraction:.1%} (data.max_rejected_fraction)"
            found = f"at most {allowed} of the rows may be rejected, found {rejected} of {rows}"
        lost = {} if counts["train"] else {reason: counts[reason] for reason in EXPECTED_LOSSES if counts[reason]}
        tally = sorted({**lost, **self._faults}.items(), key=lambda item: (-item[1], item[0]))
        lines = [found + (": " + ", ".join(f"{reason} {number}" for reason, number in tally) if tally else "")]
        for fault in self._first_faults:
            detail = fault["detail"] if len(fault["detail"]) <= 160 else fault["detail"][:157] + "..."
            lines.append(f"  {fault['source']} row {fault['source_row']}: {fault['reason']}: {detail}")
        if rejected > len(self._first_faults):
            lines.append(f"  and {rejected - len(self._first_faults)} more")
        return "\n".join(lines)


def _tally(column: pa.ChunkedArray) -> dict[str, int]:
    return {pair["values"]: pair["counts"] for pair in pc.value_counts(column).to_pylist()}


def _count(mask: pa.ChunkedArray) -> int:
    return pc.sum(mask).as_py() or 0


def _answer_digest(answer: str | None) -> bytes:
    return hashlib.sha256(repr(answer).encode()).digest()[:8]


def _some(rows: list[int]) -> str:
    return ", ".join(map(str, rows[:10])) + (", ..." if len(rows) > 10 else "")
