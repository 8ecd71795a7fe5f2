"""What goes wrong between the judge and its endpoint: no reply is lost or invented, and counts are right."""

from __future__ import annotations

import email.utils
import json
import re
import time
from typing import Any

import pytest

from rft_core.errors import GraderUnavailable, SettingsError, StorageUnavailable
from rft_core.rewards.judge import build
from rft_core.rewards.judge.client import retry_after
from rft_core.rewards.rows import RewardRow, Scored
from rft_core.rewards.settings import RewardFunction
from tests.rft_core.rewards.judge.endpoint import Act, Request, ScriptedEndpoint, refusal, said, score

FAST = {"model": "m", "timeout_seconds": 1.5, "backoff_seconds": 0.01, "retries": 2}


def row(text: str, index: int = 0) -> RewardRow:
    messages = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": text}]
    return RewardRow(f"r{index}", "p", messages, text, "4", {}, "stop", "g")


def function(endpoint: ScriptedEndpoint, **settings: Any) -> RewardFunction:
    return RewardFunction(name="judge", judge={**FAST, "url": endpoint.url, **settings})


def judged(endpoint: ScriptedEndpoint, texts: list[str], replies: Any = None, **settings: Any) -> list[Scored]:
    scorer = build(function(endpoint, **settings), None, replies)
    return scorer.score([row(text, index) for index, text in enumerate(texts)])


class Kept(dict):
    """Replies in memory, as the protocol wants them."""

    def put(self, key: str, text: str) -> None:
        self[key] = text


def first(*acts: Act):
    """A script: the first time a question comes the first act, and so on; the last from then on."""
    return lambda request: acts[min(request.attempt, len(acts) - 1)]


def test_a_score_with_its_counts_and_cost():
    with ScriptedEndpoint(lambda request: score(0.25, tokens=(120, 30))) as endpoint:
        (scored,) = judged(endpoint, ["four"], prices=[2.0, 10.0])
    assert (scored.value, scored.reason) == (0.25, "so it is")
    assert scored.metrics == {
        "prompt_tokens": 120,
        "completion_tokens": 30,
        "cost": pytest.approx((120 * 2 + 30 * 10) / 1e6),
    }
    (request,) = endpoint.requests
    assert request.candidates == ["four"]
    assert {name: request.body[name] for name in ("model", "temperature", "max_tokens")} == {
        "model": "m",
        "temperature": 0.0,
        "max_tokens": 1024,
    }
    assert request.body["response_format"]["json_schema"]["schema"]["required"] == ["reason", "score"]


@pytest.mark.parametrize(
    "fault",
    [
        refusal(429, headers={"Retry-After": "0.05"}),
        refusal(500),
        refusal(503, headers={"Retry-After": "soon"}),
        refusal(408),
        score(1.0, cut=True),  # half a reply, then a closed connection
        Act({"error": "x" * 50}, 500, cut=True),
        score(1.0, hang_seconds=5),
        Act("<html>busy</html>"),
        Act('{"choices": [{"message": {"con'),
        Act([]),
        Act({"error": {"message": "overloaded"}}),
        Act({"choices": None}),
    ],
    ids=["429", "500", "503", "408", "half", "half-error", "hang", "html", "cut-json", "list", "error-in-200", "null"],
)
def test_what_may_pass_is_tried_again(fault):
    with ScriptedEndpoint(first(fault, score(0.75))) as endpoint:
        (scored,) = judged(endpoint, ["four"])
    assert scored.value == 0.75
    assert scored.metrics["prompt_tokens"] == 100  # of the reply that came
    assert len(endpoint.requests) == 2


def test_a_connection_that_is_lost_again_and_again_leaves_the_row_unscored():
    with ScriptedEndpoint(lambda request: score(1.0, cut=True)) as endpoint:
        (scored,) = judged(endpoint, ["four"])
    assert scored.value is None
    assert re.match(r"the judge gave no answer in 3 attempts: the connection failed \(\w+: ", scored.reason)
    assert len(endpoint.requests) == 3
    assert scored.metrics == {"prompt_tokens": 0, "completion_tokens": 0}


def test_a_judge_that_hangs_ends_in_time():
    began = time.monotonic()
    with ScriptedEndpoint(lambda request: score(1.0, hang_seconds=30)) as endpoint:
        (scored,) = judged(endpoint, ["four"], retries=1, timeout_seconds=0.2)
    assert scored.reason == "the judge gave no answer in 2 attempts: no reply within 0.2 s"
    assert time.monotonic() - began < 5


def test_retry_after_is_waited_for_by_all():
    with ScriptedEndpoint(first(refusal(429, headers={"Retry-After": "0.5"}), score(1.0))) as endpoint:
        began = time.monotonic()
        (scored,) = judged(endpoint, ["four"])
        assert time.monotonic() - began >= 0.5
    assert scored.value == 1.0
    with ScriptedEndpoint(lambda request: refusal(429, "slow down", headers={"Retry-After": "3600"})) as endpoint:
        (scored,) = judged(endpoint, ["four"])
    assert scored.reason == "the judge gave no answer in 1 attempt: status 429, slow down"
    assert len(endpoint.requests) == 1


def test_retry_after_as_a_date():
    later, before = (email.utils.formatdate(time.time() + seconds, usegmt=True) for seconds in (30, -30))
    assert retry_after({"retry-after": later}) == pytest.approx(30, abs=2)
    assert retry_after({"retry-after": before}) == 0
    assert retry_after({"retry-after-ms": "250", "retry-after": "9"}) == 0.25
    assert retry_after({"retry-after": "nan"}) is None
    assert retry_after({}) is None


UNREADABLE = [
    said("An excellent answer, ten out of ten!"),
    said('{"score": 85}'),
    said('{"verdict": 1}'),
    said(""),
    said(None),
    said(7),
    Act({"choices": []}),
    Act({"choices": [{}]}),
]


@pytest.mark.parametrize("bad", UNREADABLE, ids=lambda act: json.dumps(act.body)[:60])
def test_one_repair_is_asked_for(bad):
    with ScriptedEndpoint(lambda request: score(0.5) if request.is_repair else bad) as endpoint:
        (scored,) = judged(endpoint, ["four"])
    assert scored.value == 0.5
    told, shown = endpoint.requests
    assert shown.body["messages"][:2] == told.body["messages"]
    assert [message["role"] for message in shown.body["messages"][2:]] == ["assistant", "user"]
    assert shown.body["messages"][3]["content"].startswith("That reply can't be used: it ")


@pytest.mark.parametrize("bad", UNREADABLE, ids=lambda act: json.dumps(act.body)[:60])
def test_what_stays_unreadable_is_unscored_with_the_text(bad):
    kept = Kept()
    with ScriptedEndpoint(lambda request: bad) as endpoint:
        (scored,) = judged(endpoint, ["four"], kept)
        assert len(endpoint.requests) == 2
        (unrepaired,) = judged(endpoint, ["four"], kept, repair=False)
        assert len(endpoint.requests) == 3
    assert scored.value is None and unrepaired.value is None
    assert scored.reason.startswith("the judge's reply ")
    content = bad.body["choices"][0].get("message", {}).get("content") if bad.body["choices"] else None
    assert repr(content if isinstance(content, str) else "") in scored.reason
    assert kept == {}
    counts = (200, 20) if "usage" in bad.body else (None, None)  # both requests; unknown where it is not said
    assert (scored.metrics["prompt_tokens"], scored.metrics["completion_tokens"]) == counts


def test_a_cut_reply_says_so():
    cut = said('{"reason": "because')
    cut.body["choices"][0]["finish_reason"] = "length"
    with ScriptedEndpoint(lambda request: cut) as endpoint:
        (scored,) = judged(endpoint, ["four"])
    assert "(finish_reason length)" in scored.reason


def test_equal_rows_are_asked_once_and_order_stays():
    values = {"a": 0.1, "b": 0.2, "c": 0.3}
    with ScriptedEndpoint(lambda request: score(values[request.candidates[0]])) as endpoint:
        scored = judged(endpoint, ["a", "b", "a", "c", "a"], concurrency=2)
    assert [one.value for one in scored] == [0.1, 0.2, 0.1, 0.3, 0.1]
    assert [one.metrics["prompt_tokens"] for one in scored] == [100, 100, 0, 100, 0]
    assert len(endpoint.requests) == 3


def test_concurrency_is_bounded_and_used():
    with ScriptedEndpoint(lambda request: score(1.0, hang_seconds=0.05)) as endpoint:
        scored = judged(endpoint, [f"text {n}" for n in range(24)], concurrency=6)
    assert all(one.value == 1.0 for one in scored)
    assert 3 <= endpoint.most_at_once <= 6


def test_kept_replies_make_no_request():
    kept = Kept()
    with ScriptedEndpoint(lambda request: score(0.5)) as endpoint:
        first = judged(endpoint, ["a", "b"], kept)
        assert len(endpoint.requests) == len(kept) == 2
    assert judged(endpoint, ["b", "a"], kept) == first[::-1]  # nobody listens any more


@pytest.mark.parametrize(
    ("change", "num_requests"),
    [
        ({}, 1),
        ({"model": "other"}, 2),
        ({"temperature": 0.5}, 2),
        ({"max_tokens": 9}, 2),
        ({"instruction": "Be brief."}, 2),
        ({"extra_body": {"top_p": 0.9}}, 2),
        ({"reply_schema": "none"}, 2),
        ({"show_answer": False}, 2),
        ({"concurrency": 1, "retries": 0, "timeout_seconds": 9.0}, 1),
    ],
)
def test_replies_are_kept_by_all_that_decides_them(change, num_requests):
    kept = Kept()
    with ScriptedEndpoint(lambda request: score(0.5)) as endpoint:
        judged(endpoint, ["a"], kept)
        judged(endpoint, ["a"], kept, **change)
    assert len(endpoint.requests) == num_requests


def test_a_kept_reply_that_can_no_longer_be_read_is_asked_for_again():
    kept = Kept()
    with ScriptedEndpoint(lambda request: score(0.5)) as endpoint:
        judged(endpoint, ["a"], kept)
        kept.update(dict.fromkeys(kept, "garbage"))
        assert judged(endpoint, ["a"], kept)[0].value == 0.5
    assert len(endpoint.requests) == 2


def test_a_store_that_fails_ends_it():
    class Full(Kept):
        def put(self, key: str, text: str) -> None:
            raise StorageUnavailable("the disk is full")

    with ScriptedEndpoint(lambda request: score(0.5)) as endpoint, pytest.raises(StorageUnavailable, match="full"):
        judged(endpoint, ["a", "b"], Full())


def test_an_endpoint_without_schemas_is_asked_without():
    def script(request: Request) -> Act:
        return refusal(400, "unknown field response_format") if "response_format" in request.body else score(0.5)

    with ScriptedEndpoint(script) as endpoint:
        scorer = build(function(endpoint, concurrency=1), None)
        assert [one.value for one in scorer.score([row("a"), row("b")])] == [0.5, 0.5]
        assert [one.value for one in scorer.score([row("c")])] == [0.5]
        assert len(endpoint.requests) == 2 + 1 + 1  # the first is asked twice
        judged(endpoint, ["a"], reply_schema="none")
    assert len(endpoint.requests) == 5


def test_a_request_that_is_refused_is_not_tried_again():
    def script(request: Request) -> Act:
        return refusal(400, "too many tokens") if "long" in request.candidates[0] else score(0.5)

    with ScriptedEndpoint(script) as endpoint:
        long, short = judged(endpoint, ["long " * 50, "short"], concurrency=1)
    assert long.reason == "the judge refused the request: status 400, too many tokens"
    assert short.value == 0.5
    # The refused one once more without the schema, which was not to blame: the next has it again.
    assert ["response_format" in request.body for request in endpoint.requests] == [True, False, True]


def test_an_endpoint_that_is_down_is_not_asked_for_every_row():
    def script(request: Request) -> Act:
        return refusal(503, "down")

    with ScriptedEndpoint(script) as endpoint:
        scored = judged(endpoint, [f"text {n}" for n in range(40)], concurrency=4, retries=1)
    assert all(one.value is None for one in scored)
    assert len(endpoint.requests) <= (8 + 4) * 2
    assert scored[-1].reason == "not asked any more after 8: the judge gave no answer in 2 attempts: status 503, down"


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (refusal(401, "bad key"), "judge.api_key_env must name a variable with a key .*status 401, bad key"),
        (refusal(403), "must be allowed to use judge.model .*status 403"),
        (refusal(404, "no model m"), "judge.model must be a model of the endpoint.*'m'.*status 404, no model m"),
        (refusal(400, "who?", code="model_not_found"), "judge.model must be a model of the endpoint"),
        (refusal(400, "who?", param="model"), "judge.model must be a model of the endpoint"),
    ],
    ids=["401", "403", "404", "code", "param"],
)
def test_mistakes_in_settings_fail_at_once(answer, sentence):
    with ScriptedEndpoint(lambda request: answer) as endpoint:
        with pytest.raises(SettingsError, match=sentence):
            judged(endpoint, ["a"])
        assert len(endpoint.requests) == 1
        with pytest.raises(SettingsError, match=sentence):
            build(function(endpoint), None).check()


def test_the_check_names_what_is_wrong_before_any_row():
    wrong = pytest.raises(SettingsError, match=r"judge: the endpoint must take its requests: .*not supported")
    with ScriptedEndpoint(lambda request: refusal(400, "temperature is not supported")) as endpoint, wrong:
        build(function(endpoint), None).check()
    with pytest.raises(GraderUnavailable, match=r"judge.url must name a running endpoint"):
        build(function(endpoint), None).check()
    with ScriptedEndpoint(lambda request: said("I would rather not.")) as endpoint:
        build(function(endpoint), None).check()  # it talks; whether it can judge, rows will show
    kept = Kept()
    for mode in ("score", "pairwise", "ranking"):
        with ScriptedEndpoint(lambda request: said('{"winner": "A", "score": 1, "scores": {"C1": 1, "C2": 0}}')) as up:
            build(function(up, mode=mode), None, kept).check()
        build(function(up, mode=mode), None, kept).check()  # kept
        assert len(up.requests) == 1 and up.requests[0].is_example
