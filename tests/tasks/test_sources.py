"""From files to committed tables: the whole way of the data stage, without a run."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_contracts.store import Store
from rft_core.data import row_workers
from rft_core.data.row_pipeline import RowSettings
from rft_core.data.settings import DataSettings
from rft_core.errors import RowsRejected
from rft_core.rewards import math_equivalence
from rft_core.rewards.maths.answers import gold_answer
from rft_core.rewards.rows import RewardRow
from rft_core.rewards.settings import RewardSettings
from tasks.sources import build_dataset, dataset_digest, dataset_record
from tests.house.sources import REPOSITORY
from tests.tiny import make_tiny_model

NUMERIC = RewardSettings(functions=[{"name": "numeric_answer"}])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def build(tmp_path, model):
    """Build from a file, or rows as JSON lines; gives the table, quarantine as (row, reason, action), the data set."""

    def call(source, reward=None, tokenizer=True, heldout=None, **settings):
        if isinstance(source, list):
            path = tmp_path / "rows.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in source))
            source = path
        source = source if source is None else str(source)
        data = DataSettings(**{"source": source, "heldout_fraction": 0, "max_rejected_fraction": 1, **settings})
        store = Store(str(tmp_path / "root"))
        record = dataset_record(data)
        keys = dict.fromkeys((record, "quarantine"), f"{record}-{len(store.keys(record))}")
        row_settings = RowSettings(data, reward, model if tokenizer else None, None)
        refs, dataset = build_dataset(store, keys, {name: {} for name in keys}, row_settings, heldout=heldout)
        table, quarantine = store.read(refs[record]), store.read(refs["quarantine"])
        found = [(row["source_row"], row["reason"], row["action"]) for row in quarantine.to_pylist()]
        return table, found, dataset

    return call


def test_case_ds_01_answers_become_one_text_column_whatever_the_order_of_rows(build):
    rows = [
        {"id": "q1", "prompt": "What is 2+3?", "answer": "5"},
        {"id": "q2", "prompt": "What is 6*7?", "answer": 42},
        {"id": "q3", "prompt": "Which flat is on floor 12?", "answer": "12b"},
        {"id": "q4", "prompt": "Half of 7?", "answer": 3.5},
    ]
    table, found, dataset = build(rows)
    assert table["answer"].to_pylist() == ["5", "42", "12b", "3.5"]
    assert found == [(2, "answer_not_text", "repaired"), (4, "answer_not_text", "repaired")]
    assert "2 answers that were not text became their JSON text: rows 2, 4" in dataset.notes
    turned, _, _ = build(rows[::-1])
    assert sorted(turned["answer"].to_pylist()) == sorted(table["answer"].to_pylist())


def test_case_ds_03_bad_lines_are_named_and_the_good_ones_used(build, tmp_path):
    raw = (
        b'\xef\xbb\xbf{"id":"a","prompt":"1+1?","answer":"2"}\r\n\r\n{"id":"b","prompt":"2+2?","answer":"4"}\r\n'
        b'{"id":"c","prompt":"3+3?","answer":"6",}\r\n["not","an","object"]\r\n{"id":"d","prompt":"4+4?","answer":"8"'
    )
    (tmp_path / "messy.jsonl").write_bytes(raw)
    table, found, _ = build(tmp_path / "messy.jsonl")
    assert table.select(["prompt_id", "answer"]).to_pylist() == [
        {"prompt_id": "a", "answer": "2"},
        {"prompt_id": "b", "answer": "4"},
    ]
    assert found == [(4, "trailing_comma", "rejected"), (5, "not_an_object", "rejected"), (6, "not_json", "rejected")]
    tally = r"found 3 of 5: not_an_object 1, not_json 1, trailing_comma 1\n  messy.jsonl row 4"
    with pytest.raises(RowsRejected, match=tally):
        build(tmp_path / "messy.jsonl", max_rejected_fraction=0)
    mended, _, _ = build(tmp_path / "messy.jsonl", policies={"trailing_comma": "repair"})
    assert mended["prompt_id"].to_pylist() == ["a", "b", "c"]


def test_case_ds_09_ids(build):
    rows = [
        {"id": 1, "prompt": "2+2?", "answer": "4"},
        {"id": "1", "prompt": "2+3?", "answer": "5"},
        {"id": "k", "prompt": "9-1?", "answer": "8"},
        {"id": "k", "prompt": "9-1?", "answer": "8"},
        {"id": None, "prompt": "7-1?", "answer": "6"},
    ]
    table, found, _ = build(rows)
    assert table["prompt_text"].to_pylist()[0] != table["prompt_text"].to_pylist()[1]
    *given, made = table["prompt_id"].to_pylist()
    assert given == ["1", "k"]
    assert found == [(2, "duplicate_id", "rejected"), (4, "duplicate_prompt", "rejected")]
    alone, _, _ = build(rows[-1:])
    assert alone["prompt_id"].to_pylist() == [made]  # an id from the content, wherever the row stands


def test_case_ds_11_degenerate_and_contradicting_pairs(build):
    rows = [
        {"id": "d1", "prompt": "Greet me.", "chosen": "Hello!", "rejected": "Hello!"},
        {"id": "d2", "prompt": "Greet me.", "chosen": "Hello!", "rejected": "Hello! "},
        {"id": "d3", "prompt": "Greet me.", "chosen": "Hello!", "rejected": "Go away."},
        {"id": "d4", "prompt": "Greet me.", "chosen": "Hello!", "rejected": None},
        {"id": "d5", "prompt": "Greet me.", "chosen": "Go away.", "rejected": "Hello!"},
    ]
    table, found, _ = build(rows, record="preferences")
    assert table["example_id"].to_pylist() == ["d3", "d5"]
    assert [(row, reason) for row, reason, action in found if action == "rejected"] == [
        (1, "identical_sides"),
        (2, "identical_sides"),
        (4, "empty_completion"),
    ]
    assert (5, "swapped_sides", "flagged") in found
    with pytest.raises(RowsRejected, match="found 3 of 5"):
        build(rows, record="preferences", max_rejected_fraction=0.5)


# Case ds-13: an answer that the reward cannot read never becomes a reward.
def test_case_ds_13_answers_that_the_reward_cannot_read_are_named(build):
    rows = [
        {"id": "g1", "prompt": "6*7?", "answer": "42"},
        {"id": "g2", "prompt": "Prove it.", "answer": "The claim follows by induction."},
        {"id": "g3", "prompt": "9/3?", "answer": ""},
    ]
    table, found, _ = build(rows, NUMERIC)
    assert table["prompt_id"].to_pylist() == ["g1"]
    assert found == [(2, "unreadable_answer", "rejected"), (3, "unreadable_answer", "rejected")]
    kept, found, _ = build(rows, NUMERIC, policies={"unreadable_answer": "keep"})
    assert kept.num_rows == 3 and {action for _, _, action in found} == {"flagged"}


def test_rows_are_validated_where_the_models_that_score_are_not(build):
    model = {"name": "reward_model", "reward_model": {"path": "elsewhere"}, "only_if": "numeric_answer > 0"}
    settings = RewardSettings(functions=[{"name": "numeric_answer"}, model])
    _, found, _ = build([{"prompt": "1+1?", "answer": "2"}, {"prompt": "2+2?", "answer": "none"}], settings)
    assert [row for row, _, _ in found] == [2]


def test_case_ds_13_answers_within_their_solution_are_read(build):
    rows = [
        {"id": "g1", "prompt": "6*7?", "answer": "42"},
        {"id": "g2", "prompt": "Prove it.", "answer": "The claim follows by induction."},
        {"id": "g3", "prompt": "9/3?", "answer": ""},
        {"id": "g4", "prompt": "Trip length?", "answer": "Work: 240-12. Therefore, the answer is: 228."},
        {"id": "g5", "prompt": "Interval?", "answer": "[3,9)"},
    ]
    settings = RewardSettings(functions=[{"name": "math_equivalence"}])
    table, found, _ = build(rows, settings)
    assert table["prompt_id"].to_pylist() == ["g1", "g4", "g5"]
    assert found == [(2, "unreadable_answer", "rejected"), (3, "unreadable_answer", "rejected")]
    assert gold_answer(rows[3]["answer"]) == "228"
    scorer = math_equivalence.build(settings.functions[0], None)
    scores = scorer.score(
        [RewardRow(row["id"], row["id"], [], row["answer"], row["answer"], {}, "given") for row in rows]
    )
    assert [scored.value for scored in scores] == [1.0, None, None, 1.0, 1.0]


def test_an_answer_in_its_prompt_is_flagged(build):
    rows = [
        {"prompt": "What is 6*7? The answer is 42.", "answer": "42"},
        {"prompt": "What is 42-0?", "answer": "42"},
    ]
    _, found, _ = build(rows)
    assert found == [(1, "answer_in_prompt", "flagged")]


def test_a_round_trip_through_parquet_changes_nothing(build, tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": "é?"}], "answer": "1", "tags": [], "level": 2, "note": None},
        {"prompt": [{"role": "user", "content": "b"}], "answer": "2", "tags": ["x"], "level": 3, "note": "n"},
    ]
    first, _, _ = build(rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    again, _, _ = build(tmp_path / "rows.parquet")
    besides = ["source", "dataset"]
    assert again.drop_columns(besides).equals(first.drop_columns(besides))


def test_fields_are_recognised_in_each_file_of_a_glob(build, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    (tmp_path / "b.csv").write_text("problem,solution\n2+2?,4\n")
    for name in ("a.jsonl", "b.csv"):
        table, _, dataset = build(tmp_path / name)
        assert table.num_rows == 1 and any(note.startswith(f"{name}: prompt <- ") for note in dataset.notes)
    table, _, _ = build(tmp_path / "b.csv", fields={"prompt": "solution", "answer": "problem"})
    assert table["answer"].to_pylist() == ["2+2?"]


def test_mixture_and_held_out_source(build, tmp_path):
    for name, numbers in (("a", range(5)), ("b", range(10, 13)), ("held", range(4, 6))):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"prompt": "{n}?", "answer": "{n}"}}\n' for n in numbers))
    parts = [{"source": f"{tmp_path}/{name}.jsonl", "label": name.upper()} for name in "ab"]
    table, found, dataset = build(None, mixture=parts, heldout_source=f"{tmp_path}/held.jsonl")
    assert table["dataset"].to_pylist() == ["held.jsonl"] * 2 + ["A"] * 4 + ["B"] * 3
    assert table["split"].to_pylist() == ["heldout"] * 2 + ["train"] * 7
    assert found == [(5, "overlaps_heldout", "rejected")]
    without = dataset.settings.model_copy(update={"heldout_source": None})
    assert dataset_digest(dataset.settings) != dataset_digest(without)


@pytest.mark.slow
def test_the_number_of_workers_changes_nothing(build, monkeypatch):
    monkeypatch.setattr(row_workers, "ALONE_ROWS", 10)
    rows = [{"prompt": f"{number % 5000}?", "answer": str(number)} for number in range(9000)]
    alone, found, _ = build(rows, workers=1)
    together, found_too, _ = build(rows, workers=2)
    assert alone.num_rows == 5000
    assert together.equals(alone) and found_too == found


RUN = """
if __name__ == "__main__":
    import sys
    from pathlib import Path
    from data_contracts.store import Store
    from rft_core.data import row_workers
    from rft_core.data.row_pipeline import RowSettings
    from rft_core.data.settings import DataSettings
    from tasks.sources import build_dataset
    row_workers.ALONE_ROWS = 10
    keys = {"prompts": "k", "quarantine": "k"}
    settings = RowSettings(DataSettings(source=sys.argv[1], workers=2), None, Path(sys.argv[3]), None)
    build_dataset(Store(sys.argv[2]), keys, {name: {} for name in keys}, settings)
"""


@pytest.mark.slow
@pytest.mark.faults
def test_workers_end_with_the_process_that_started_them(tmp_path, model):
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"What is {n}?", "answer": str(n)}) + "\n" for n in range(400_000)))
    (tmp_path / "run.py").write_text(RUN)
    command = [sys.executable, str(tmp_path / "run.py"), str(source), str(tmp_path / "root"), str(model)]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    deadline = time.monotonic() + 300
    while len(workers := psutil.Process(process.pid).children(recursive=True)) < 3:  # one watches shared resources
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert not alive


def test_examples_of_prompts_that_another_data_set_holds_out_are_dropped(build):
    """Whatever makes the prompts alike: a system message and a suffix of the recipe, or of the file."""
    asked = [{"prompt": f"What is {number} + 1?"} for number in range(3)]
    held, _, _ = build(asked, system="Be brief.", suffix=" Just the number.")
    rows = [
        {"prompt": "What is 1 + 1?", "completion": "2"},
        {"prompt": "What is 1 + 1?", "completion": "two"},
        {"prompt": "What is 5 + 1?", "completion": "6"},
    ]
    demonstrations = {"record": "demonstrations", "system": "Be brief."}
    table, found, dataset = build(rows, heldout=held, suffix=" Just the number.", **demonstrations)
    assert table["source_row"].to_pylist() == [3] and dataset.counts["dropped"] == 2
    assert found == [(1, "overlaps_heldout", "rejected"), (2, "overlaps_heldout", "rejected")]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2 + 1? Just the number."},
    ]
    bare = [messages[0], {"role": "user", "content": "What is 2 + 1?"}]  # without the suffix: another text
    spelt = [{"messages": [*asked, {"role": "assistant", "content": "3"}]} for asked in (messages, bare)]
    _, found, _ = build(spelt, heldout=held, **demonstrations)
    assert found == [(1, "overlaps_heldout", "rejected")]


def test_a_data_set_without_a_train_row_says_what_became_of_them(build):
    rows = [{"prompt": f"q{number}", "completion": "x"} for number in range(3)]
    held, _, _ = build([{"prompt": row["prompt"]} for row in rows], tokenizer=False)
    with pytest.raises(RowsRejected, match="found all 3 held out: a hash of the prompt decides") as caught:
        build(rows, tokenizer=False, record="demonstrations", heldout_fraction=0.99)
    assert "rejected rows" not in str(caught.value)  # there is none to look at
    with pytest.raises(RowsRejected, match="found none in 3 rows: overlaps_heldout 3"):
        build(rows, tokenizer=False, heldout=held, record="demonstrations")
