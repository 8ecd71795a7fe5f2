import json
import multiprocessing
import os
import signal

import pytest

from data_contracts.errors import DamagedTable, FatalError, LeaseLost, RunBusy
from data_contracts.ledger import (
    Entry,
    Lease,
    Ledger,
    held_still,
    is_held,
    process_start,
    read_entry,
    read_lease,
)
from data_contracts.refs import PolicyRef, TableRef

REF = TableRef("rewards", "ab" * 16, "cd" * 32, 8)


def entry(step=1, stage="rewards", ref=REF, **more):
    return Entry("main", step, stage, 0, {ref.record: ref}, **more)


def held_in_another_process(folder):
    """A process that takes the lease, says so, and waits to be killed."""
    parent, child = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_hold, args=(folder, child))
    process.start()
    assert parent.recv() == "held"
    return process


def _hold(folder, pipe):
    Lease.acquire(folder)
    pipe.send("held")
    signal.pause()


def test_entries_come_back_in_the_order_of_the_pipeline(tmp_path):
    ledger = Ledger(tmp_path, Lease.acquire(tmp_path))
    ledger.commit(entry(2, "prompts"))
    ledger.commit(entry(1, "update", policy=PolicyRef("p1", 1)))
    ledger.commit(entry(1, "rollouts"))
    again = Ledger(tmp_path)
    assert [(e.step, e.stage) for e in again.entries()] == [(1, "rollouts"), (1, "update"), (2, "prompts")]
    assert again.get("main", 1, "update").policy == PolicyRef("p1", 1)
    assert again.get("main", 1, "rollouts").refs == {"rewards": REF}
    assert again.get("main", 3, "update") is None


def test_committing_the_same_again_is_harmless_and_something_else_is_refused(tmp_path):
    ledger = Ledger(tmp_path, Lease.acquire(tmp_path))
    first = ledger.commit(entry())
    assert ledger.commit(entry()) == first
    other = TableRef("rewards", "ab" * 16, "ee" * 32, 8)
    with pytest.raises(FatalError, match="did not reproduce"):
        ledger.commit(entry(ref=other))


def test_a_ledger_without_lease_is_for_reading(tmp_path):
    with pytest.raises(FatalError, match="for reading"):
        Ledger(tmp_path).commit(entry())


def test_a_second_writer_is_told_who_holds_the_run(tmp_path):
    holder = held_in_another_process(tmp_path)
    try:
        assert is_held(tmp_path)
        with pytest.raises(RunBusy, match=f"process {holder.pid} "):
            Lease.acquire(tmp_path)
    finally:
        holder.kill()
        holder.join()
    assert not is_held(tmp_path)


def test_the_lease_of_a_killed_process_is_taken_over_under_the_next_epoch(tmp_path):
    holder = held_in_another_process(tmp_path)
    holder.kill()
    holder.join()
    orphans = []
    lease = Lease.acquire(tmp_path, orphans.append)
    assert [orphan["pid"] for orphan in orphans] == [holder.pid]
    assert lease.epoch == 2


def test_a_run_that_is_held_still_has_no_writer_and_keeps_its_record(tmp_path):
    Lease.acquire(tmp_path).release()
    record = (tmp_path / "lease.json").read_bytes()
    with held_still(tmp_path):
        with pytest.raises(RunBusy, match="is being pruned: wait for"):
            Lease.acquire(tmp_path)
        with pytest.raises(RunBusy), held_still(tmp_path):
            pass
    assert (tmp_path / "lease.json").read_bytes() == record
    lease = Lease.acquire(tmp_path)
    with pytest.raises(RunBusy, match=f"process {os.getpid()} "), held_still(tmp_path):
        pass
    lease.release()


def test_one_entry_is_read_without_the_others(tmp_path):
    ledger = Ledger(tmp_path, Lease.acquire(tmp_path))
    ledger.commit(entry(1, "update", policy=PolicyRef("p1", 1)))
    ledger.commit(entry(2, "update", policy=PolicyRef("p2", 2)))
    (tmp_path / "ledger" / "main.00001.update.0.json").write_text("{")
    assert read_entry(tmp_path, "main", 2, "update").policy == PolicyRef("p2", 2)
    assert read_entry(tmp_path, "main", 3, "update") is None
    with pytest.raises(DamagedTable, match=r"main.00001.update"):
        read_entry(tmp_path, "main", 1, "update")


def test_a_released_lease_leaves_no_orphan(tmp_path):
    Lease.acquire(tmp_path).release()
    orphans = []
    Lease.acquire(tmp_path, orphans.append).release()
    assert orphans == []
    assert read_lease(tmp_path)["released"] is True


def test_an_acquisition_that_fails_half_way_leaves_the_run_free(tmp_path):
    holder = held_in_another_process(tmp_path)
    holder.kill()
    holder.join()

    def no_server(orphan):
        raise ConnectionError("no server")

    with pytest.raises(ConnectionError):
        Lease.acquire(tmp_path, no_server)
    assert not is_held(tmp_path)
    assert Lease.acquire(tmp_path).epoch == 2


def test_a_writer_whose_epoch_passed_stops_before_its_next_entry(tmp_path):
    ledger = Ledger(tmp_path, Lease.acquire(tmp_path))
    lease = json.loads((tmp_path / "lease.json").read_text())
    (tmp_path / "lease.json").write_text(json.dumps({**lease, "epoch": 7}))
    with pytest.raises(LeaseLost, match="epoch 1, found epoch 7"):
        ledger.commit(entry())
    assert Ledger(tmp_path).entries() == []


def test_a_broken_entry_is_named(tmp_path):
    ledger = Ledger(tmp_path, Lease.acquire(tmp_path))
    ledger.commit(entry())
    path = tmp_path / "ledger" / "main.00001.rewards.0.json"
    path.write_text("{")
    with pytest.raises(DamagedTable, match="rewards"):
        Ledger(tmp_path)


def test_a_process_start_tells_a_reused_pid_apart():
    assert process_start(os.getpid()) is not None
    assert process_start(2**22 + 1) is None


@pytest.mark.parametrize("name", ["main.00001.rewards.0.json", "notes.json"])
def test_a_damaged_or_foreign_entry_is_named_with_its_mend(tmp_path, name):
    Ledger(tmp_path, Lease.acquire(tmp_path)).commit(entry())
    (tmp_path / "ledger" / name).write_bytes(b"\xff{")
    with pytest.raises(DamagedTable, match=f"{name} must be a ledger entry.*delete it and run the same command"):
        Ledger(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", '{"epoch": 1}'])
def test_a_damaged_lease_is_named_with_its_mend(tmp_path, content):
    Lease.acquire(tmp_path).release()
    (tmp_path / "lease.json").write_text(content)
    with pytest.raises(DamagedTable, match=r"lease.json must be a JSON object with epoch, released.*delete it when"):
        Lease.acquire(tmp_path)
    (tmp_path / "lease.json").unlink()
    Lease.acquire(tmp_path).release()
