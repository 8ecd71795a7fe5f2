"""Which data stays, worked out by hand on sample runs of 6 steps with checkpoints and evaluations at even ones."""

import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from data_contracts.checkpoints import checkpoint_folder, delete_checkpoint
from data_contracts.ledger import Ledger
from data_contracts.pins import Pins
from data_contracts.retention import (
    RetainedRun,
    committing,
    delete,
    deleting,
    held,
    is_done,
    kept_by_rule,
    plan,
    rule_text,
    saved_checkpoints,
)
from data_contracts.store import Store
from data_contracts.tombstones import Tombstone
from tests.flows.sample_run import build_sample_run

TRAINING = ("prompts", "rollouts", "rewards", "advantages")


def rules(keep_last=1, keep_every=None):
    return SimpleNamespace(keep_last=keep_last, keep_every=keep_every)


def pins(*steps):
    return Pins(steps=frozenset(steps))


@pytest.mark.parametrize(
    ("newest", "saved", "rule", "pinned", "checkpoints", "replayed"),
    [
        (6, [2, 4, 6], rules(2), pins(), {4, 6}, set()),
        (6, [2, 4, 6], rules(5), pins(), {2, 4, 6}, set()),
        (9, [2, 4, 6, 8, 9], rules(1, 4), pins(), {4, 8, 9}, set()),
        # The newest policy, two updates after the last checkpoint; none at all: from the model folder.
        (8, [2, 4, 6], rules(1), pins(), {6}, {7, 8}),
        (3, [], rules(1), pins(), set(), {1, 2, 3}),
        # Step 5 was not saved: it comes from 4 through update 5; 1 from the model folder; 2 was saved.
        (6, [2, 4, 6], rules(1), pins(5), {4, 6}, {5}),
        (6, [2, 4, 6], rules(1), pins(1), {6}, {1}),
        (6, [2, 4, 6], rules(1), pins(2), {2, 6}, set()),
        # A step that is still to come pins nothing yet.
        (6, [2, 4, 6], rules(1), pins(9), {6}, set()),
        (0, [], rules(1), pins(), set(), set()),
    ],
)
def test_kept_versions(newest, saved, rule, pinned, checkpoints, replayed):
    kept = kept_by_rule(newest, saved, rule, pinned)
    assert (set(kept.checkpoints), set(kept.replayed)) == (checkpoints, replayed)


def test_tables_stay_with_their_steps_policy_but_not_with_one_that_is_only_replayed_from():
    kept = kept_by_rule(7, [2, 4, 6], rules(1), pins(5))
    assert set(kept.steps) == {0, 5, 6, 7}
    assert kept.checkpoints == {6: "keep_last 1", 4: "policy 5 is replayed from it"}


def test_rollouts_ahead_keep_the_policies_that_they_come_from():
    # ahead 2 after 6 updates: the next rollouts come from versions 4, 5 and 6.
    kept = kept_by_rule(6, [2, 4, 6], rules(1), pins(), ahead=2)
    assert (set(kept.checkpoints), set(kept.replayed), set(kept.steps)) == ({4, 6}, {5}, {0, 6})


def test_the_rule_in_words():
    assert rule_text(rules(2)) == "keep_last 2"
    assert rule_text(rules(2, 10)) == "keep_last 2, keep_every 10"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    root = tmp_path_factory.mktemp("built")
    build_sample_run(root, "one", steps=6, checkpoint_every=2)
    build_sample_run(root, "two", steps=6, checkpoint_every=2)
    return root


@pytest.fixture
def root(built, tmp_path):
    """Two runs of one recipe, which share every table."""
    return shutil.copytree(built, tmp_path / "root")


def run(root, name, keep_last=1, **more):
    ledger = Ledger(root / "runs" / name)
    values = {"pins": Pins(), "saved": saved_checkpoints(root, ledger), **more}
    return RetainedRun(name, ledger, rules(keep_last), **values)


def planned(root, runs, pruned):
    """(what goes, why the rest stays) by (stage, step)."""
    store = Store(str(root))
    stays = held(store, runs, pruned, with_tables=True)
    items = plan(root, store, [one for one in runs if one.name in pruned], stays, with_tables=True)
    going = {(item.stage, item.step) for item in items if item.stays is None}
    return going, {(item.stage, item.step): item.stays for item in items if item.stays is not None}


def everything_up_to(last):
    tables = {(stage, step) for stage in TRAINING for step in range(1, last + 1)}
    evaluations = {(f"evaluation-{record}", step) for record in TRAINING[1:3] for step in range(2, last + 1, 2)}
    return tables | evaluations | {("checkpoint", step) for step in range(2, last + 1, 2)}


def test_both_runs_let_go_of_what_neither_keeps(root):
    going, staying = planned(root, [run(root, "one"), run(root, "two")], {"one", "two"})
    assert going == everything_up_to(5)
    assert staying["checkpoint", 6] == "keep_last 1"
    assert staying["rollouts", 6] == "the newest policy"
    assert staying["evaluation-rewards", 0] == "the start of the run"
    assert {staying[place] for place in (("update", 1), ("data", 0), ("evaluation", 2))} == {"metrics and sources stay"}


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({}, "run two names it"),
        ({"is_live": True}, "run two is live"),
        ({"pins": Pins(is_whole_run=True)}, "run two is pinned"),
    ],
)
def test_what_another_run_holds_stays(root, other, why):
    pruned = {"one", "two"} if other else {"one"}
    going, staying = planned(root, [run(root, "one"), run(root, "two", **other)], pruned)
    assert going == set()
    assert {staying[place] for place in everything_up_to(5)} == {why}


def test_a_live_or_pinned_run_is_not_pruned_itself(tmp_path):
    build_sample_run(tmp_path, "one", steps=4, checkpoint_every=2)
    for holding in ({"is_live": True}, {"pins": Pins(is_whole_run=True)}):
        assert planned(tmp_path, [run(tmp_path, "one", **holding)], {"one"})[0] == set()


def test_another_run_keeps_more_by_its_own_rules(root):
    going, staying = planned(root, [run(root, "one"), run(root, "two", keep_last=2)], {"one", "two"})
    assert going == everything_up_to(5) - {(stage, 4) for stage, _ in everything_up_to(5)}
    assert staying["rewards", 4] == "keep_last 2"


def test_a_pinned_step_keeps_its_tables_and_what_its_policy_is_replayed_from(root):
    going, staying = planned(root, [run(root, "one", pins=pins(5)), run(root, "two")], {"one", "two"})
    stays = {("checkpoint", 4)} | {(stage, 5) for stage in TRAINING}
    assert going == everything_up_to(5) - stays
    assert staying["rewards", 5] == "step 5 is pinned"
    assert staying["checkpoint", 4] == "policy 5 is replayed from it"


def test_an_interrupted_run_keeps_what_it_needs_to_go_on(root):
    """Both were killed in step 6 before its update, and in the evaluation of step 4."""
    for name in ("one", "two"):
        ledger = root / "runs" / name / "ledger"
        for entry in ("00006.update", "00006.checkpoint", "00006.evaluation", "00004.evaluation"):
            (ledger / f"main.{entry}.0.json").unlink()
    going, staying = planned(root, [run(root, "one"), run(root, "two")], {"one", "two"})
    # The newest policy is 5, replayed from checkpoint 4 through rollouts and advantages 5.
    assert ("checkpoint", 4) not in going
    assert {(stage, 5) for stage in TRAINING} & going == set()
    assert staying["rollouts", 6] == staying["evaluation-rollouts", 6] == "the run needs it to go on"
    assert going >= everything_up_to(3)
    assert going & {("evaluation-rewards", 4), ("evaluation-rollouts", 4)} == set()


def test_a_table_is_done_with_when_its_last_reader_is_committed(root):
    (root / "runs" / "one" / "ledger" / "main.00006.update.0.json").unlink()
    (root / "runs" / "one" / "ledger" / "main.00004.evaluation.0.json").unlink()
    ledger = Ledger(root / "runs" / "one")
    done = {(entry.stage, entry.step) for entry in ledger.entries() if is_done(ledger, entry)}
    # Prompts are read by rewards, rewards by advantages; rollouts and advantages by the update, which is missing.
    assert done == everything_up_to(6) - {
        *(("checkpoint", step) for step in (2, 4, 6)),
        *((stage, 6) for stage in ("rollouts", "advantages")),
        *((f"evaluation-{record}", 4) for record in ("rollouts", "rewards")),
    } | {(f"evaluation-{record}", 0) for record in ("rollouts", "rewards")}


def test_without_tables_only_checkpoints_go(root):
    runs, store = [run(root, "one"), run(root, "two")], Store(str(root))
    items = plan(root, store, runs, held(store, runs, {"one", "two"}, with_tables=False), with_tables=False)
    assert {(item.stage, item.step) for item in items if item.stays is None} == {("checkpoint", 2), ("checkpoint", 4)}
    assert {item.stage for item in items} == {"checkpoint"}


def test_what_is_deleted_already_is_not_planned_and_half_of_it_is_finished(root):
    ledger, store = Ledger(root / "runs" / "one"), Store(str(root))
    saved = saved_checkpoints(root, ledger)
    delete_checkpoint(checkpoint_folder(root, saved[2]), Tombstone("keep_last 1", "one"))
    store.delete(ledger.get("main", 1, "rewards").refs["rewards"], Tombstone("keep_last 1", "one"))
    going, _ = planned(root, [run(root, "one"), run(root, "two")], {"one", "two"})
    assert everything_up_to(5) - going == {("checkpoint", 2), ("rewards", 1)}
    folder = checkpoint_folder(root, saved[2])
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"is_swept": true', '"is_swept": false'))
    (folder / "model.safetensors").write_bytes(b"left")
    # However pinned it may be by now: it is deleted already.
    held_by_all = [run(root, "one", pins=pins(2)), run(root, "two", pins=pins(2))]
    going, _ = planned(root, held_by_all, {"one", "two"})
    assert ("checkpoint", 2) in going


def test_a_damaged_checkpoint_or_table_is_left_as_it_is(root):
    ledger = Ledger(root / "runs" / "one")
    (checkpoint_folder(root, saved_checkpoints(root, ledger)[4]) / "model.safetensors").unlink()
    ref = ledger.get("main", 3, "rollouts").refs["rollouts"]
    (root / "store/rollouts" / ref.key / "manifest.json").write_text("{")
    going, staying = planned(root, [run(root, "one"), run(root, "two")], {"one", "two"})
    assert {("checkpoint", 4), ("rollouts", 3)} & going == set()
    assert staying["checkpoint", 4].startswith("damaged: ")
    assert "manifest.json must be a JSON object" in staying["rollouts", 3]


def test_deletion_looks_again_at_who_holds_what(root):
    """A run that took something over between plan and deletion keeps it."""
    runs, store = [run(root, "one"), run(root, "two")], Store(str(root))
    stays = held(store, runs, {"one", "two"}, with_tables=True)
    items = plan(root, store, runs, stays, with_tables=True)
    taken = next(item for item in items if (item.stage, item.step) == ("rewards", 2))
    gone = delete(root, store, items, lambda: {**stays, taken.name: "run three names it"}, lambda item: {})
    assert {item.name for item in gone} == {item.name for item in items if item.stays is None} - {taken.name}
    store.check(taken.what)
    for item in gone:
        assert not any(Path(root).glob(f"*/{item.name}/part-*"))


def test_commits_and_deletions_exclude_each_other(tmp_path):
    order = []

    def commit():
        with committing(tmp_path):
            order.append("committed")

    with deleting(tmp_path):
        committer = threading.Thread(target=commit)
        committer.start()
        time.sleep(0.2)
        order.append("deleted")
    committer.join()
    assert order == ["deleted", "committed"]
    with committing(tmp_path), committing(tmp_path):  # commits of several runs do not wait for each other
        pass
