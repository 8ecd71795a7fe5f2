"""What a run deletes after each of its checkpoints, and what keeps a deletion and a commit apart."""

import json
import shutil
import time

import pytest

from data_contracts.checkpoints import checkpoint_manifest
from data_contracts.errors import DeletedTable, StorageUnavailable
from data_contracts.ledger import Lease, Ledger
from data_contracts.pins import pin, unpin
from data_contracts.store import Store
from data_contracts.tombstones import Tombstone
from rft_core.config import RetentionSettings
from tasks.context import RunContext
from tasks.resuming import read_recipe
from tasks.retention import is_kept_for_good, prune_checkpoints
from tasks.stage import Slot, commit, reuse
from tests.flows.sample_run import ROOT_POLICY, build_sample_run

STEPS = 6


class Notes:
    """A watcher that keeps what it was told."""

    def __init__(self):
        self.lines = []

    def noted(self, line):
        self.lines.append(line)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build_sample_run(tmp_path_factory.mktemp("built"), "one", steps=STEPS, checkpoint_every=1)


@pytest.fixture
def made(built, tmp_path):
    shutil.copytree(built.root, tmp_path, dirs_exist_ok=True)
    return built


@pytest.fixture
def context(made, tmp_path):
    """The run, opened as its own process would, with checkpoints of all six steps."""
    folder = tmp_path / "runs" / "one"
    lease = Lease.acquire(folder)
    recipe = read_recipe(folder)
    identity = {"policy": ROOT_POLICY}
    yield RunContext(
        tmp_path, "one", recipe, Store(str(tmp_path)), Ledger(folder, lease), identity, tmp_path, {}, Notes()
    )
    lease.release()


def under(context, **settings):
    recipe = context.recipe.model_copy(update={"retention": RetentionSettings(**settings)})
    context.recipe = recipe
    return context


def left(made, root):
    """Versions whose checkpoint is there."""
    folders = {policy.version: root / "checkpoints" / policy.policy_id for policy in made.policies[1:]}
    return [version for version, folder in folders.items() if not checkpoint_manifest(folder)["deleted"]]


@pytest.mark.parametrize(
    ("settings", "pinned", "expected"),
    [
        ({}, [], [5, 6]),
        ({"keep_last": 3}, [], [4, 5, 6]),
        ({"keep_last": 1, "keep_every": 2}, [], [2, 4, 6]),
        ({"keep_last": 1}, [2], [2, 6]),
        ({"keep_last": 1}, [None], [1, 2, 3, 4, 5, 6]),
    ],
)
def test_rules_and_pins_decide_which_checkpoints_stay(context, made, tmp_path, settings, pinned, expected):
    for step in pinned:
        pin(context.folder, step)
    pruned = prune_checkpoints(under(context, **settings))
    assert left(made, tmp_path) == expected
    assert len(pruned) == STEPS - len(expected)
    assert prune_checkpoints(context) == []


def test_a_checkpoint_that_another_run_names_stays_and_no_ledger_is_read_for_it(context, made, tmp_path):
    """Of the other run only the updates of the very steps are read: every other file of its ledger is broken here."""
    build_sample_run(tmp_path, "two", steps=STEPS)
    for path in (tmp_path / "runs" / "two" / "ledger").iterdir():
        if ".update." not in path.name:
            path.write_text("{")
    (tmp_path / "runs" / "two" / "ledger" / "main.00003.update.0.json").unlink()
    prune_checkpoints(under(context, keep_last=1))
    assert left(made, tmp_path) == [1, 2, 4, 5, 6]


def test_what_a_damaged_ledger_names_is_not_known_so_nothing_of_that_step_goes(context, made, tmp_path):
    build_sample_run(tmp_path, "two", steps=1)
    (tmp_path / "runs" / "two" / "ledger" / "main.00001.update.0.json").write_text("{")
    prune_checkpoints(under(context, keep_last=1))
    assert left(made, tmp_path) == [1, 6]
    assert any(
        "checkpoint 1 is not deleted: " in line and "main.00001.update" in line for line in context.watcher.lines
    )


def test_many_runs_cost_a_file_each_and_not_their_ledgers(context, tmp_path):
    for number in range(200):
        folder = tmp_path / "runs" / f"other-{number}" / "ledger"
        folder.mkdir(parents=True)
        for step in range(1, STEPS + 1):
            (folder / f"main.{step:05d}.rewards.0.json").write_text("{")
    under(context, keep_last=1)
    began = time.process_time()
    assert len(prune_checkpoints(context)) == 5
    assert time.process_time() - began < 1


def test_whether_a_checkpoint_of_a_step_stays_however_many_follow(context):
    assert not is_kept_for_good(context, 4)
    assert is_kept_for_good(under(context, keep_every=2), 4)
    assert not is_kept_for_good(context, 5)
    pin(context.folder, 5)
    assert is_kept_for_good(context, 5)
    unpin(context.folder, 5)
    pin(context.folder)
    assert is_kept_for_good(context, 3)


def test_a_table_that_was_deleted_while_it_was_taken_up_is_not_named_by_a_ledger(context, made):
    """Another run's prune let go of it before this ledger named it: a retry makes it again."""
    ref = made.refs[2, "rewards", 0]
    context.store.delete(ref, Tombstone("keep_last 1", "two"))
    with pytest.raises(StorageUnavailable, match="while it was taken up; trying again makes it"):
        commit(context, Slot(STEPS + 1, "rewards"), {"rewards": ref}, began=0.0)
    assert context.ledger.get("main", STEPS + 1, "rewards") is None


def test_a_deleted_table_is_made_again_unless_it_is_another_runs_work(context, made):
    ref = made.refs[2, "rewards", 0]
    slot = Slot(2, "rewards")
    assert reuse(context, slot, {"rewards": ref.key}) == {"rewards": ref}
    context.store.delete(ref, Tombstone("keep_last 1", "two"))
    assert reuse(context, slot, {"rewards": ref.key}) is None
    assert context.watcher.lines == [
        f"made again: {context.store.tombstone('rewards', ref.key).sentence(f'rewards/{ref.key[:12]}')}"
    ]
    path = context.folder / "ledger" / "main.00002.rewards.0.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pinned_from": "two"}))
    context.ledger = Ledger(context.folder, context.ledger.lease)
    with pytest.raises(DeletedTable, match="--name two"):
        reuse(context, slot, {"rewards": ref.key})
