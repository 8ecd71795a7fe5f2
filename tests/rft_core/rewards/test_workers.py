"""The pool of killable workers, with a module of its own that stalls, dies, prints and fills its memory."""

from __future__ import annotations

import threading
import time

import psutil
import pytest

from rft_core.errors import GraderUnavailable
from rft_core.rewards.workers import Died, TimedOut, WorkerPool

MODULE = """
import os, sys, time
from rft_core.rewards.workers import serve, start_clock

def prepare():
    def work(job):
        kind = job["do"]
        if kind == "stall":
            9 ** 9 ** 9
        if kind == "sleep":
            time.sleep(job["seconds"])
        if kind == "prepare":
            time.sleep(job["seconds"])
            start_clock()
        if kind == "die":
            os._exit(7)
        if kind == "print":
            print("no reply", flush=True)
        if kind == "fill":
            try:
                return {"size": len(bytearray(1 << 32))}
            except MemoryError:
                return {"size": None}
        return {"did": job, "pid": os.getpid(), "secrets": "SECRET" in os.environ}
    if os.environ.get("PYTHONPATH", "").endswith("/broken"):
        raise ImportError("it is broken")
    return work

serve(prepare)
"""


@pytest.fixture
def pool_of(tmp_path, monkeypatch):
    (tmp_path / "stalling.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SECRET", "canary")
    made = []

    def make(count=2, seconds=1.0, module="stalling", **more):
        made.append(WorkerPool(module, count, seconds, 1 << 30, **more))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def test_replies_come_in_order_from_all_workers(pool_of):
    pool = pool_of()
    jobs = [{"do": "sleep", "seconds": 0.01, "number": number} for number in range(60)]
    replies = pool.run(jobs)
    assert [reply["did"] for reply in replies] == jobs
    assert {reply["pid"] for reply in replies} == set(pool.process_ids) and len(pool.process_ids) == 2
    assert pool.run([]) == []


def test_one_job_starts_one_worker_without_our_environment(pool_of):
    pool = pool_of(count=4)
    (reply,) = pool.run([{"do": "print"}])
    assert not reply["secrets"]
    assert pool.process_ids == [reply["pid"]]


def test_what_stalls_or_dies_costs_its_own_job_only(pool_of):
    pool = pool_of()
    kinds = ["stall", "ok", "die", "ok", "ok", "stall", "print", "fill", "ok"]
    began = time.perf_counter()
    replies = pool.run([{"do": kind} for kind in kinds])
    assert time.perf_counter() - began < 20
    assert [reply if isinstance(reply, TimedOut | Died) else None for reply in replies] == [
        *(TimedOut(1.0), None, Died(7), None, None, TimedOut(1.0), None, None, None)
    ]
    assert replies[7] == {"size": None}


def test_the_limit_counts_from_the_start_of_the_work(pool_of):
    pool = pool_of(count=1, seconds=1.0)
    replies = pool.run([{"do": "sleep", "seconds": 0.3}] * 8)  # the last waits for longer than its limit
    assert not any(isinstance(reply, TimedOut) for reply in replies)


def test_preparing_has_time_of_its_own(pool_of):
    pool = pool_of(count=1, seconds=0.5, prepare_seconds=5.0)
    prepared, slept = pool.run([{"do": "prepare", "seconds": 1.0}, {"do": "prepare", "seconds": 0.1}])
    assert prepared["did"]["seconds"] == 1.0 and slept["did"]["seconds"] == 0.1


def test_large_jobs_pass(pool_of):
    jobs = [{"do": "ok", "text": "x" * 300_000, "number": number} for number in range(10)]
    assert [reply["did"]["number"] for reply in pool_of().run(jobs)] == list(range(10))


def test_close_ends_the_workers_and_the_next_call_starts_others(pool_of):
    pool = pool_of()
    first = pool.run([{"do": "ok"}])[0]["pid"]
    pool.close()
    assert not psutil.pid_exists(first)
    assert pool.run([{"do": "ok"}])[0]["pid"] != first


def test_an_interrupt_from_another_thread_ends_a_call_and_the_next_one_works(pool_of):
    pool = pool_of(seconds=60.0)
    timer = threading.Timer(1.5, pool.interrupt)
    timer.start()
    began = time.monotonic()
    with pytest.raises(GraderUnavailable, match="stalling was interrupted"):
        pool.run([{"do": "sleep", "seconds": 60}] * 4)
    assert time.monotonic() - began < 20
    timer.join()
    assert pool.process_ids == []
    assert pool.run([{"do": "ok"}])[0]["did"] == {"do": "ok"}


@pytest.mark.usefixtures("pool_of")  # for the module that it makes
def test_a_pool_that_is_forgotten_leaves_no_worker():
    pool = WorkerPool("stalling", 1, 1.0, 1 << 30)
    (reply,) = pool.run([{"do": "ok"}])
    del pool
    assert not psutil.pid_exists(reply["pid"])


def test_a_worker_that_cannot_start_makes_the_grader_unavailable(pool_of, tmp_path, monkeypatch):
    with pytest.raises(GraderUnavailable, match=r"no_such_module must start, its process ended with status 1"):
        pool_of(module="no_such_module").run([{"do": "ok"}])
    (tmp_path / "broken").mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{tmp_path}/broken")
    with pytest.raises(GraderUnavailable, match="stalling must start: ImportError: it is broken"):
        pool_of().run([{"do": "ok"}])
