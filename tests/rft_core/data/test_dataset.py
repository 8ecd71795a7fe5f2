"""What needs more than one row: duplicates, ids, the split, held-out overlap, contradictions, limits."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

from data_contracts.schemas import EXAMPLES, PROMPTS, QUARANTINE
from data_contracts.validation import check_table
from rft_core.data import dataset as dataset_module
from rft_core.data.dataset import Block, Dataset
from rft_core.data.row_pipeline import Processed
from rft_core.data.settings import DataSettings
from rft_core.errors import RowsRejected


def settings(**changes: Any) -> DataSettings:
    return DataSettings(**{"source": "sums.jsonl", "heldout_fraction": 0, "max_rejected_fraction": 1, **changes})


def sha(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def prompts(*rows: dict[str, Any], first_row: int = 1, faults: list[dict[str, Any]] | None = None) -> Processed:
    """Good rows from {text, id, answer}, and quarantine entries of others."""
    faults = faults or []
    filled = [
        {
            "prompt_id": row.get("id", row["text"]),
            "messages": "[]",
            "prompt_text": row["text"],
            "prompt_token_ids": [1],
            "tools": None,
            "answer": row.get("answer"),
            "metadata": "{}",
            "media": None,
            "source": "sums.jsonl",
            "source_row": first_row + number,
            "dataset": "sums.jsonl",
            "split": "",
        }
        for number, row in enumerate(rows)
    ]
    digests = [sha(row["text"]) for row in rows]
    num_rejected = sum(fault["action"] == "rejected" for fault in faults)
    return processed(pa.Table.from_pylist(filled, PROMPTS.schema), digests, digests, None, faults, num_rejected)


def pairs(*rows: tuple[str, str, str]) -> Processed:
    """Pairs from (prompt, chosen, rejected)."""
    filled = [
        {
            "example_id": f"pair-{number}",
            "kind": "pair",
            "messages": "{}",
            "metadata": "{}",
            "source": "pairs.jsonl",
            "source_row": number,
            "dataset": "pairs.jsonl",
            "split": "",
        }
        for number, _ in enumerate(rows, start=1)
    ]
    return processed(
        pa.Table.from_pylist(filled, EXAMPLES.schema),
        [sha(prompt) for prompt, _, _ in rows],
        [sha("|".join(row)) for row in rows],
        [(sha(f"{p}|{c}|{r}"), sha(f"{p}|{r}|{c}")) for p, c, r in rows],
    )


def processed(table, prompt_digests, content_digests, pair_digests, faults=(), num_rejected=0) -> Processed:
    return Processed(
        num_rows=table.num_rows + num_rejected,
        table=table,
        raw=pa.array([b"raw"] * table.num_rows, pa.large_binary()),
        prompt_digests=prompt_digests,
        content_digests=content_digests,
        pair_digests=pair_digests,
        signatures=None,
        quarantine=pa.Table.from_pylist(list(faults), QUARANTINE.schema),
        operations=Counter(),
        seconds=Counter(),
    )


def fault(row: int, reason: str, action: str = "rejected") -> dict[str, Any]:
    return {
        "source": "sums.jsonl",
        "source_row": row,
        "reason": reason,
        "action": action,
        "detail": "found it",
        "raw": b"raw",
    }


def finish(dataset: Dataset, *chunks: Processed | tuple[Processed, bool]) -> Block:
    """All blocks as one, checked against their contracts and the conservation of rows."""
    blocks: list[Block] = []
    for chunk in chunks:
        blocks += dataset.add(*(chunk if isinstance(chunk, tuple) else (chunk,)))
    blocks += dataset.close()
    whole = Block(
        pa.concat_tables([block.table for block in blocks]), pa.concat_tables([block.quarantine for block in blocks])
    )
    check_table(whole.table, "prompts" if dataset.settings.record == "prompts" else "examples")
    check_table(whole.quarantine, "quarantine")
    counts = dataset.summary()
    assert counts["rows"] == counts["used"] + counts["rejected"] + counts["dropped"]
    assert counts["used"] == counts["train"] + counts["heldout"] == whole.table.num_rows
    return whole


def reasons(block: Block) -> list[tuple[int, str, str]]:
    return [(row["source_row"], row["reason"], row["action"]) for row in block.quarantine.to_pylist()]


def test_later_copies_of_a_prompt_go_and_are_no_fault():
    dataset = Dataset(settings(max_rejected_fraction=0))
    block = finish(dataset, prompts({"text": "a"}, {"text": "b"}, {"text": "a", "id": "c"}))
    assert block.table["prompt_id"].to_pylist() == ["a", "b"]
    assert reasons(block) == [(3, "duplicate_prompt", "rejected")]
    assert block.quarantine["detail"].to_pylist() == ["the same prompt as row 1"]
    assert dataset.summary()["rejected"] == 0 and dataset.summary()["dropped"] == 1


def test_a_copy_with_another_answer_is_noted():
    dataset = Dataset(settings())
    block = finish(dataset, prompts({"text": "a", "answer": "1"}, {"text": "a", "id": "b", "answer": "2"}))
    assert block.quarantine["detail"].to_pylist() == ["the same prompt as row 1, with another answer: '2'"]
    assert dataset.notes == ["1 duplicates have another answer than the prompt kept: rows 2"]


# Case ds-09: nothing is overwritten in silence.
def test_an_id_names_one_row_and_the_later_one_is_a_fault():
    dataset = Dataset(settings())
    block = finish(dataset, prompts({"text": "2+2?", "id": "1"}, {"text": "2+3?", "id": "1"}))
    assert block.table["prompt_text"].to_pylist() == ["2+2?"]
    assert reasons(block) == [(2, "duplicate_id", "rejected")]
    with pytest.raises(RowsRejected, match=r"found 1 of 2: duplicate_id 1\n  sums.jsonl row 2: duplicate_id: ids must"):
        finish(
            Dataset(settings(max_rejected_fraction=0)),
            prompts({"text": "2+2?", "id": "1"}, {"text": "2+3?", "id": "1"}),
        )


def test_the_split_follows_the_prompt_alone():
    names = [{"text": str(number)} for number in range(400)]
    whole = finish(Dataset(settings(heldout_fraction=0.3)), prompts(*names))
    splits = dict(zip(whole.table["prompt_text"].to_pylist(), whole.table["split"].to_pylist(), strict=True))
    expected = {name: int.from_bytes(sha(name)[:8], "big") < 0.3 * 2**64 for name in splits}
    assert {name: split == "heldout" for name, split in splits.items()} == expected
    turned = finish(Dataset(settings(heldout_fraction=0.3)), prompts(*reversed(names)))
    assert dict(zip(turned.table["prompt_text"].to_pylist(), turned.table["split"].to_pylist(), strict=True)) == splits


def test_rows_of_the_held_out_source_are_dropped_from_training():
    dataset = Dataset(settings(heldout_source="held.jsonl", heldout_fraction=0.9))
    held, train = prompts({"text": "a"}), prompts({"text": "b"}, {"text": "a", "id": "other"}, first_row=7)
    block = finish(dataset, (held, True), (train, False))
    assert block.table["split"].to_pylist() == ["heldout", "train"]
    assert reasons(block) == [(8, "overlaps_heldout", "rejected")]


def test_a_pair_that_contradicts_an_earlier_one_is_flagged_or_rejected():
    rows = [("q", "x", "y"), ("q", "y", "x"), ("p", "y", "x")]
    kept = finish(Dataset(settings(record="preferences")), pairs(*rows))
    assert kept.table.num_rows == 3 and reasons(kept) == [(2, "swapped_sides", "flagged")]
    dataset = Dataset(settings(record="preferences", policies={"swapped_sides": "reject"}))
    assert finish(dataset, pairs(*rows)).table.num_rows == 2


def test_equal_examples_count_once_unless_the_recipe_keeps_them():
    rows = [("q", "x", "y"), ("q", "x", "y"), ("q", "x", "z")]
    assert finish(Dataset(settings(record="preferences")), pairs(*rows)).table.num_rows == 2
    dataset = Dataset(settings(record="preferences", policies={"duplicate_content": "keep"}))
    assert finish(dataset, pairs(*rows)).table.num_rows == 3 and dataset.summary()["flagged"] == 1
    cleaned = settings(record="preferences", cleaning=[{"name": "exact_duplicates", "on": "prompt"}])
    assert finish(Dataset(cleaned), pairs(*rows)).table.num_rows == 1


def test_faults_of_single_rows_are_counted_by_what_was_done():
    faults = [fault(2, "not_json"), fault(3, "answer_not_text", "repaired"), fault(3, "answer_in_prompt", "flagged")]
    dataset = Dataset(settings())
    finish(dataset, prompts({"text": "a"}, {"text": "b"}, faults=faults))
    counts = dataset.summary()
    assert {name: counts[name] for name in ("rows", "used", "rejected", "repaired", "flagged", "not_json")} == {
        "rows": 3,
        "used": 2,
        "rejected": 1,
        "repaired": 1,
        "flagged": 1,
        "not_json": 1,
    }
    assert dataset.notes == ["1 answers that were not text became their JSON text: rows 3"]


def test_too_many_bad_rows_say_why_in_one_screen():
    faults = [fault(row, "not_json" if row % 2 else "empty_prompt") for row in range(2, 12)]
    faults.append(fault(12, "answer_in_prompt", "flagged"))  # no reason to fail
    with pytest.raises(RowsRejected) as caught:
        finish(Dataset(settings(max_rejected_fraction=0.5)), prompts({"text": "a"}, faults=faults))
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "at most 50.0% (data.max_rejected_fraction) of the rows may be rejected, found 10 of 11: "
        "empty_prompt 5, not_json 5"
    )
    assert lines[1] == "  sums.jsonl row 2: empty_prompt: found it" and lines[-1] == "  and 5 more" and len(lines) == 7
    assert caught.value.quarantine.num_rows == 11 and caught.value.counts["used"] == 1


@pytest.mark.parametrize(
    ("chunk", "found"),
    [
        (prompts(faults=[fault(1, "not_json")]), "at least one good row, found none in 1 rows: not_json 1"),
        ((prompts({"text": "a"}), True), "must hold train rows, found all 1 held out"),
    ],
)
def test_nothing_to_train_on_is_an_error_whatever_is_allowed(chunk, found):
    with pytest.raises(RowsRejected, match=found):
        finish(Dataset(settings()), chunk)


def test_blocks_hold_all_rows_in_order(monkeypatch):
    monkeypatch.setattr(dataset_module, "BLOCK_ROWS", 3)
    dataset = Dataset(settings())
    chunks = [prompts(*({"text": f"{n}-{i}"} for i in range(2)), first_row=1 + 2 * n) for n in range(4)]
    blocks = [block for chunk in chunks for block in dataset.add(chunk)] + list(dataset.close())
    assert [block.table.num_rows for block in blocks] == [4, 4, 0]
    assert [row for block in blocks for row in block.table["source_row"].to_pylist()] == list(range(1, 9))
