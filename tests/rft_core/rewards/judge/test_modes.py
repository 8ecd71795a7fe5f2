"""Scores of rubrics, pairs and rankings, by values worked out by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rft_core.rewards.judge import build
from rft_core.rewards.rows import RewardRow, Scored
from rft_core.rewards.settings import RewardFunction
from tests.rft_core.rewards.judge.endpoint import Act, Request, ScriptedEndpoint, said


def rows_of(*groups: list[str]) -> list[RewardRow]:
    rows = []
    for number, texts in enumerate(groups):
        for index, text in enumerate(texts):
            messages = [{"role": "user", "content": f"Question {number}"}, {"role": "assistant", "content": text}]
            made = RewardRow(f"g{number}/{index}", f"p{number}", messages, text, None, {}, "stop", f"g{number}")
            rows.append(made)
    return rows


def judged(script: Any, *groups: list[str], **settings: Any) -> tuple[list[Scored], ScriptedEndpoint]:
    with ScriptedEndpoint(script) as endpoint:
        fast = {"model": "m", "url": endpoint.url, "backoff_seconds": 0.0, "retries": 0}
        scorer = build(RewardFunction(name="judge", judge={**fast, **settings}), None)
        return scorer.score(rows_of(*groups)), endpoint


def values(scored: list[Scored]) -> list[float | None]:
    return [one.value for one in scored]


def longer(request: Request) -> Act:
    """The longer one wins."""
    a, b = map(len, request.candidates)
    return said(json.dumps({"winner": "A" if a > b else "B" if b > a else "tie"}))


def test_a_rubric_is_the_weighted_mean_of_places_in_their_ranges():
    criteria = [
        {"name": "clear", "description": "Clear?", "weight": 1.0},  # 0.5 of 0..1: half way
        {"name": "right", "description": "Right?", "weight": 3.0, "low": 1.0, "high": 5.0},  # 4 of 1..5: 3/4
    ]
    script = lambda request: said('{"reason": "fair", "scores": {"clear": 0.5, "right": 4}}')  # noqa: E731
    (scored,), _ = judged(script, ["x"], mode="rubric", criteria=criteria)
    assert scored.value == pytest.approx((1 * 0.5 + 3 * 0.75) / 4)
    assert (scored.metrics["criteria/clear"], scored.metrics["criteria/right"]) == (0.5, 4.0)
    (scored,), _ = judged(script, ["x"], mode="rubric", criteria=criteria, low=-1.0)
    assert scored.value == pytest.approx(-1 + 2 * (1 * 0.75 + 3 * 0.75) / 4)  # 0.5 of -1..1 is 3/4


def test_a_rubric_without_one_of_its_criteria_is_unscored():
    criteria = [{"name": "clear", "description": "Clear?"}, {"name": "right", "description": "Right?"}]
    (scored,), _ = judged(lambda request: said('{"scores": {"clear": 1}}'), ["x"], mode="rubric", criteria=criteria)
    assert scored.value is None
    assert "with the keys clear, right and no others" in scored.reason


def test_all_pairs_in_both_orders():
    scored, endpoint = judged(longer, ["a", "bb", "ccc"], ["dd", "e"], mode="pairwise")
    assert values(scored) == [0.0, 0.5, 1.0, 1.0, 0.0]
    orders = sorted(tuple(request.candidates) for request in endpoint.requests)
    trio = ["a", "bb", "ccc"]
    assert orders == sorted([(x, y) for x in trio for y in trio if x != y] + [("dd", "e"), ("e", "dd")])
    assert [one.metrics["comparisons"] for one in scored] == [2, 2, 2, 1, 1]
    assert [one.metrics["prompt_tokens"] for one in scored] == [200, 200, 200, 100, 100]  # who stands first pays


def test_a_judge_that_always_likes_the_first_gives_ties():
    scored, _ = judged(lambda request: said('{"winner": "A"}'), ["a", "bb", "ccc"], mode="pairwise")
    assert values(scored) == [0.5, 0.5, 0.5]


def test_wins_over_both_orders_are_averaged():
    """x against y: wins as A, ties as B: (1 + 0.5) / 2 for x."""

    def script(request: Request) -> Act:
        return said('{"winner": "A"}' if request.candidates == ["x", "y"] else '{"winner": "tie"}')

    scored, _ = judged(script, ["x", "y"], mode="pairwise", low=0.0, high=10.0)
    assert values(scored) == [7.5, 2.5]


def test_equal_completions_tie_unasked():
    scored, endpoint = judged(longer, ["a", "a", "bb"], mode="pairwise")
    assert values(scored) == [0.25, 0.25, 1.0]  # one tie and one loss each
    assert len(endpoint.requests) == 2
    assert [one.metrics["prompt_tokens"] for one in scored] == [100, 0, 100]
    scored, endpoint = judged(longer, ["a", "a"], mode="pairwise")
    assert (values(scored), len(endpoint.requests)) == ([0.5, 0.5], 0)


def test_against_the_anchor():
    scored, endpoint = judged(longer, ["bb", "a", "ccc", "dd"], mode="pairwise", opponents="anchor")
    assert values(scored) == [0.5, 0.0, 1.0, 0.5]
    assert len(endpoint.requests) == 6
    assert all("bb" in request.candidates for request in endpoint.requests)


def test_alone_in_a_group():
    scored, endpoint = judged(longer, ["a"], mode="pairwise")
    assert (scored[0].value, scored[0].reason) == (0.5, "alone in its group")
    assert endpoint.requests == []


def failing(*texts: str):
    """No verdict where one of the texts stands first."""
    return lambda request: said("hm") if request.candidates[0] in texts else longer(request)


def test_a_failed_comparison_leaves_unscored_who_has_no_other():
    scored, _ = judged(failing("ccc"), ["a", "bb", "ccc"], ["dd", "e"], mode="pairwise")
    # ccc's comparisons lack their verdict in one order; a and bb still have each other.
    assert values(scored) == [0.0, 1.0, None, 1.0, 0.0]
    assert "'hm'" in scored[2].reason
    assert scored[2].metrics["comparisons"] == 0
    scored, _ = judged(failing("dd"), ["a", "bb"], ["dd", "e"], mode="pairwise")
    assert values(scored) == [0.0, 1.0, None, None]


def test_a_tie_with_an_equal_completion_is_no_score_where_the_judge_failed():
    scored, _ = judged(lambda request: said("hm"), ["a", "a", "bb"], mode="pairwise")
    assert values(scored) == [None, None, None]
    scored, _ = judged(failing("ccc"), ["a", "a", "bb", "ccc"], mode="pairwise")
    assert values(scored) == [0.25, 0.25, 1.0, None]  # a: a tie and a loss against bb


def test_a_failed_comparison_with_the_anchor():
    scored, _ = judged(failing("a"), ["bb", "a", "ccc"], mode="pairwise", opponents="anchor")
    assert values(scored) == [0.5, None, 1.0]
    scored, _ = judged(failing("a", "ccc"), ["bb", "a", "ccc"], mode="pairwise", opponents="anchor")
    assert values(scored) == [None, None, None]


def by_number(request: Request) -> Act:
    """Each candidate is its own score."""
    return said(json.dumps({"scores": {f"C{n}": float(text) for n, text in enumerate(request.candidates, 1)}}))


def test_a_ranking_asks_once_for_a_group():
    scored, endpoint = judged(by_number, ["0.1", "0.9", "0.1", "0.4"], ["1", "0"], mode="ranking")
    assert values(scored) == [0.1, 0.9, 0.1, 0.4, 1.0, 0.0]
    assert sorted(sorted(request.candidates) for request in endpoint.requests) == [["0", "1"], ["0.1", "0.4", "0.9"]]
    assert [one.metrics["prompt_tokens"] for one in scored] == [100, 0, 0, 0, 100, 0]


def test_the_order_shown_does_not_follow_the_rows():
    texts = [str(n / 10) for n in range(8)]
    _, one = judged(by_number, texts, mode="ranking")
    _, other = judged(by_number, texts[::-1], mode="ranking")
    assert one.requests[0].body == other.requests[0].body
    assert one.requests[0].candidates not in (texts, texts[::-1])


@pytest.mark.parametrize(
    ("size", "at_once", "wanted"), [(8, 8, [8]), (9, 8, [4, 5]), (4, 3, [2, 2]), (7, 3, [2, 2, 3]), (1, 8, [1])]
)
def test_large_groups_are_divided_evenly(size, at_once, wanted):
    texts = [str(n / 10) for n in range(size)]
    scored, endpoint = judged(by_number, texts, mode="ranking", at_once=at_once)
    assert sorted(len(request.candidates) for request in endpoint.requests) == wanted
    assert values(scored) == [float(text) for text in texts]


def test_a_failed_part_of_a_ranking_leaves_only_its_rows_unscored():
    texts = [str(n / 10) for n in range(6)]
    script = lambda request: said("hm") if "0.2" in request.candidates else by_number(request)  # noqa: E731
    scored, endpoint = judged(script, texts, mode="ranking", at_once=3)
    (lost,) = {tuple(r.candidates) for r in endpoint.requests if "0.2" in r.candidates}
    assert len(lost) == 3
    assert values(scored) == [None if text in lost else float(text) for text in texts]


def test_no_score_of_a_ranking_is_made_up():
    script = lambda request: said('{"scores": {"C1": 1}}')  # noqa: E731
    scored, _ = judged(script, ["x", "y"], mode="ranking")
    assert values(scored) == [None, None]
