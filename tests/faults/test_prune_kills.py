"""A pruning that is killed anywhere leaves every table whole or deleted, never something in between."""

import json

import pytest

from data_contracts.ledger import Ledger
from data_contracts.store import Store
from tests.faults.harness import finish, kill_when, rft
from tests.flows.sample_run import build_sample_run

pytestmark = [pytest.mark.faults, pytest.mark.slow]
STEPS, KILLS = 20, 3


def tombstones(root):
    """Folders whose manifest says deleted, and of those the ones with files left."""
    manifests = [*root.glob("store/*/*/manifest.json"), *root.glob("checkpoints/*/manifest.json")]
    dead = [path.parent for path in manifests if '"deleted": true' in path.read_text()]
    return dead, [folder for folder in dead if len(list(folder.iterdir())) > 1]


def test_killed_at_its_next_tombstone_until_it_is_done(tmp_path):
    build_sample_run(tmp_path, "x", steps=STEPS, checkpoint_every=1)
    command = ("prune", "x", "--keep-last", "1", "--yes")
    for _ in range(KILLS):
        seen = len(tombstones(tmp_path)[0])
        assert kill_when(rft(*command, root=tmp_path), lambda seen=seen: len(tombstones(tmp_path)[0]) > seen)
        store = Store(str(tmp_path))
        for entry in Ledger(tmp_path / "runs" / "x").entries():
            for ref in entry.refs.values():
                is_deleted = store.tombstone(ref.record, ref.key) is not None
                assert (store.find(ref.record, ref.key) is None) == is_deleted
                if not is_deleted:
                    assert store.read(ref).num_rows == ref.rows
    finish(rft(*command, root=tmp_path))
    dead, half = tombstones(tmp_path)
    # 4 training tables and a checkpoint of 19 steps, statistics of prompts at all but the first, 4 evaluation tables
    # at the 9 even ones.
    assert len(dead) == 19 * 5 + 18 + 9 * 4
    assert half == []
    assert "nothing to delete" in finish(rft("prune", "x", "--keep-last", "1", root=tmp_path))
    assert json.loads(finish(rft("status", "x", "--json", root=tmp_path)))["state"] == "completed"
