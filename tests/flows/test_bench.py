"""What `rft bench generate` compares, on a tiny model and on draws that are given. No speed is tested."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from flows.bench import generate
from flows.bench.generate import Case, Timed, compare, make_prompts
from rft_core.errors import SettingsError
from tests.tiny import END_TOKEN_ID, make_tiny_model, make_tiny_tokenizer


def test_both_sides_draw_what_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_model(tmp_path / "models" / generate.MODEL)
    monkeypatch.setattr(generate, "SHAPES", ((2, 6),))
    monkeypatch.setattr(generate, "REPEATS", 2)
    rows = generate.run(tmp_path)
    assert [(row["name"], row["metric"]) for row in rows] == [
        (f"16 completions of 6 tokens, {ends}", metric)
        for ends in ("full length", "own ends")
        for metric in ("speed", "time", "lengths 1-2", "lengths 3-4", "lengths 5-6")
    ]
    for row in rows:
        assert set(row) == {"name", "metric", "ours", "peer", "ratio", "unit"}
    full = [(row["ours"], row["peer"]) for row in rows[:5] if row["metric"].startswith("lengths")]
    assert full == [(0, 0), (0, 0), (32, 32)]  # 16 completions in each of 2 repeats
    for side in ("ours", "peer"):
        assert sum(row[side] for row in rows[5:] if row["metric"].startswith("lengths")) == 32


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="smollm2-135m"):
        generate.run(tmp_path)


def test_the_peer_gets_its_faster_batch_and_medians_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    seconds = {"ours": 2, "slow": 9, "fast": 4}
    called: list[str] = []

    def draw(name: str) -> generate.Draw:
        def lengths(seed: int) -> list[int]:
            called.append(name)
            for _ in range(seconds[name] - 1 + 100 * (seed == 3)):  # one repeat that something else held up
                next(clock)
            return [8, 4] if name == "ours" else [8, 8]

        return lengths

    monkeypatch.setattr(generate.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(generate, "REPEATS", 3)
    rows = compare(Case([(1,)], 8, (2,), 2), draw("ours"), [draw("slow"), draw("fast")])
    assert called == ["ours", "slow", "fast", "slow", "fast", *["ours", "fast"] * 3]
    # 12 tokens in 2 s against 16 in 4 s
    speed, time, *lengths = rows
    assert (speed["ours"], speed["peer"], speed["ratio"]) == (6.0, 4.0, 1.5)
    assert (time["ours"], time["peer"], time["ratio"]) == (2.0, 4.0, 0.5)
    assert [(row["metric"], row["ours"], row["peer"]) for row in lengths] == [
        ("lengths 1-2", 0, 0),
        ("lengths 3-4", 3, 0),
        ("lengths 5-6", 0, 0),
        ("lengths 7-8", 3, 6),
    ]


def test_speed_is_the_median_of_repeats() -> None:
    assert Timed([1.0, 2.0, 4.0], [[4], [4], [4]]).speed == 2.0


def test_prompts_differ_in_length() -> None:
    prompts = make_prompts(make_tiny_tokenizer(), 6)
    assert len(set(prompts)) == 6
    assert len({len(prompt) for prompt in prompts}) > 1


def test_an_end_counts_as_a_token() -> None:
    assert generate._length([5, END_TOKEN_ID, 6], (END_TOKEN_ID,)) == 2
    assert generate._length([5, 6], (END_TOKEN_ID,)) == 2
    assert generate._length([5, END_TOKEN_ID], ()) == 2
