"""Rows over HTTP: what is asked, what becomes of answers that are none, and servers that share the work."""

from __future__ import annotations

import json
import math

import pytest

from rft_core.engines import Completion, Request, Sampling
from rft_core.errors import EngineUnavailable, SettingsError
from tests.rft_core.engines.vllm.conftest import end
from tests.rft_core.engines.vllm.fake_server import DROP, HANG, STOP, VOCABULARY

ROWS = "/v1/completions"
POLICY = "a" * 64
SAMPLING = Sampling(0.7, 0.9, 5, 4)
REQUESTS = [Request((1, 50 + index // 4, 60), 1000 + index, str(index // 4)) for index in range(12)]
GREEDY = Sampling(0.0, 1.0, 0, 4)


@pytest.fixture
def served(serving, engine_at, blank):
    """(server, engine) with the policy served."""
    server = serving("base")
    engine = engine_at(server)
    engine.serve(blank, POLICY)
    return server, engine


def test_rows_carry_their_seed_and_nothing_of_the_servers_defaults(served):
    server, engine = served
    made = engine.generate(REQUESTS[:1], SAMPLING)
    assert server.rows() == [
        {
            "model": "served",
            "prompt": [1, 50, 60],
            "max_tokens": 4,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": 1000,
            "stop_token_ids": [STOP],
            "logprobs": 0,
            "return_token_ids": True,
            "add_special_tokens": False,
            "cache_salt": POLICY,
        }
    ]
    assert made[0].logprobs == [-math.log(VOCABULARY)] * len(made[0].token_ids)


def test_greedy_rows_are_not_truncated(served):
    server, engine = served
    engine.generate(REQUESTS[:1], GREEDY)
    (body,) = server.rows()
    assert body["temperature"] == 0.0 and not {"top_p", "top_k"} & body.keys()


def test_completions_are_in_the_order_of_requests_whatever_the_order_of_answers(served):
    _, engine = served
    counts: list[tuple[int, int]] = []
    made = engine.generate(REQUESTS, SAMPLING, lambda done, total, _: counts.append((done, total)))
    again = engine.generate(REQUESTS[::-1], SAMPLING)
    assert made == again[::-1] and len({tuple(row.token_ids) for row in made}) == len(REQUESTS)
    assert counts == [(done, 12) for done in range(1, 13)]
    for row in made:  # as our own engine has it: the stop token is part of the completion
        assert row.finish_reason == ("stop" if row.token_ids[-1] == STOP else "length")
        assert (len(row.token_ids) == 4) == (row.finish_reason == "length")
    assert {row.finish_reason for row in made} == {"stop", "length"}


def test_what_cannot_be_run_is_not_asked_for(served):
    server, engine = served
    requests = [Request((), 0, "a"), Request((1, VOCABULARY), 0, "b"), Request((1,) * 2045, 0, "c"), REQUESTS[0]]
    made = engine.generate(requests, SAMPLING)
    reasons = [row.error_reason for row in made]
    assert reasons == ["empty_prompt", "token_out_of_vocabulary", "context_exceeded", None]
    assert len(server.rows()) == 1


@pytest.mark.parametrize("fault", [(503, "starting"), (429, "slow down"), (500, "?"), DROP, (200, '{"choices": [')])
def test_what_may_pass_is_tried_again(served, fault):
    server, engine = served
    server.faults[ROWS] = [fault, fault]
    made = engine.generate(REQUESTS[:1], SAMPLING)
    assert made[0].finish_reason != "error" and len(server.rows()) == 3


def answer(**changes):
    choice = {"token_ids": [5, 6], "logprobs": {"token_logprobs": [-1.0, -2.0]}, "finish_reason": "length"}
    return 200, json.dumps({"choices": [{**choice, **changes}]})


@pytest.mark.parametrize(
    ("fault", "reason", "detail"),
    [
        ((400, '{"error": {"message": "too long"}}'), "server_refused", "status 400, too long"),
        ((503, "busy"), "server_error", "status 503, busy"),
        ((200, "<html>"), "unreadable_reply", "no JSON"),
        ((200, "{}"), "unreadable_reply", "no completion"),
        (answer(finish_reason="abort"), "unreadable_reply", "'abort'"),
        (answer(logprobs={"token_logprobs": [-1.0]}), "unreadable_reply", "got 1 for 2"),
        (answer(logprobs=None), "unreadable_reply", "no completion"),
    ],
)
def test_a_row_that_fails_for_good_is_a_row_with_its_reason(served, notes, fault, reason, detail):
    server, engine = served
    server.faults[ROWS] = [fault] * (1 if reason == "server_refused" else 3)  # as many as there are tries
    notes.clear()
    assert engine.generate(REQUESTS[:1], SAMPLING) == [Completion.failed(reason)]
    (note,) = notes
    assert reason in note and detail in note
    assert engine.generate(REQUESTS[1:2], SAMPLING)[0].finish_reason != "error"


def test_a_row_that_takes_too_long_fails_alone(serving, engine_at, blank):
    server = serving("base")
    engine = engine_at(server, timeout_seconds=0.5, retries=0)
    engine.serve(blank, POLICY)
    server.faults[ROWS] = [HANG]
    made = engine.generate(REQUESTS[:4], SAMPLING)
    assert sorted(row.error_reason or "" for row in made) == ["", "", "", "server_timeout"]


def test_a_missing_logprob_is_told_as_none(served):
    """roll_out makes a row of it that failed with non_finite_logprobs."""
    server, engine = served
    server.faults[ROWS] = [answer(logprobs={"token_logprobs": [-1.0, None]})]
    assert math.isnan(engine.generate(REQUESTS[:1], SAMPLING)[0].logprobs[1])


def test_a_server_without_token_ids_is_refused(served):
    server, engine = served
    server.faults[ROWS] = [answer(token_ids=None)]
    with pytest.raises(SettingsError, match="return_token_ids"):
        engine.generate(REQUESTS[:1], SAMPLING)


def test_servers_share_the_work(serving, engine_at, blank):
    servers = [serving("base"), serving("base")]
    for server in servers:
        server.delay_seconds = 0.05
    engine = engine_at(*servers, concurrency=2)
    engine.serve(blank, POLICY)
    made = engine.generate(REQUESTS, SAMPLING)
    assert all(row.finish_reason != "error" for row in made)
    assert all(len(server.rows()) >= 3 for server in servers)
    assert sum(len(server.rows()) for server in servers) == len(REQUESTS)


def test_the_others_go_on_where_one_is_gone(serving, engine_at, blank, notes):
    """Also with the rows that it had begun."""
    lost, kept = serving("base"), serving("base")
    engine = engine_at(lost, kept, concurrency=2)
    engine.serve(blank, POLICY)
    expected = engine.generate(REQUESTS, SAMPLING)
    end(lost)
    assert engine.generate(REQUESTS, SAMPLING) == expected
    assert any(lost.url in note and "no answer" in note for note in notes)
    engine.serve(blank, POLICY)  # goes on without it
    assert any("goes on without" in note for note in notes)


def test_a_stage_fails_when_no_server_is_left_after_one_more_try(serving, engine_at, blank, notes):
    server = serving("base")
    engine = engine_at(server)
    engine.serve(blank, POLICY)
    end(server)
    with pytest.raises(EngineUnavailable, match="a vLLM server must answer: "):
        engine.generate(REQUESTS, SAMPLING)
    assert any("trying them anew" in note for note in notes)


def test_a_server_that_comes_back_is_given_the_weights_again(serving, engine_at, blank):
    """It drops each row until it is asked for its health, as one that is restarted by others."""
    server = serving("base")
    engine = engine_at(server)
    engine.serve(blank, POLICY)
    server.faults[ROWS], server.faults["/health"] = [DROP] * 36, [DROP] * 12
    before = len([path for path in server.paths() if path == "/collective_rpc"])
    made = engine.generate(REQUESTS, SAMPLING)
    assert all(row.finish_reason != "error" for row in made)
    assert len([path for path in server.paths() if path == "/collective_rpc"]) == before + 1


def test_a_key_is_sent_and_never_told(serving, engine_at, blank, notes, monkeypatch):
    monkeypatch.setenv("MY_KEY", "open-sesame")
    server = serving("base", key="open-sesame")
    engine = engine_at(server, api_key_env="MY_KEY")
    engine.serve(blank, POLICY)
    assert engine.generate(REQUESTS[:1], SAMPLING)[0].finish_reason != "error"
    server.key = "another"
    with pytest.raises(SettingsError, match=r"status 401, wrong key.*api_key_env") as raised:
        engine.generate(REQUESTS[:1], SAMPLING)
    assert not any("sesame" in text for text in (*notes, str(raised.value)))


def test_a_key_that_is_not_set_is_refused(serving, engine_at, monkeypatch):
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(SettingsError, match="environment variable MY_KEY"):
        engine_at(serving("base"), api_key_env="MY_KEY")
