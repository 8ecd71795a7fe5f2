import json

import pytest

from data_contracts.checkpoints import (
    checkpoint_damage,
    checkpoint_manifest,
    commit_checkpoint,
    delete_checkpoint,
    is_complete,
    is_half_deleted,
    num_bytes,
)
from data_contracts.refs import PolicyRef
from data_contracts.tombstones import Tombstone

TOMBSTONE = Tombstone(rule="keep_last 2", run="demo")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "a.safetensors").write_bytes(b"adapter")
    (tmp_path / "state.json").write_bytes(b"{}")
    commit_checkpoint(tmp_path, PolicyRef("p", 3), "digest")
    return tmp_path


def test_a_committed_folder_is_complete_until_a_file_is_missing_or_short(folder):
    assert is_complete(folder)
    assert num_bytes(folder) == 9
    assert checkpoint_manifest(folder)["policy"] == {"policy_id": "p", "version": 3}
    assert checkpoint_damage(folder) is None
    (folder / "state.json").write_bytes(b"{")
    assert not is_complete(folder)


def test_altered_bytes_of_the_right_size_are_found_by_digest(folder):
    (folder / "state.json").write_bytes(b"[]")
    assert is_complete(folder)
    assert "state.json must have SHA-256" in checkpoint_damage(folder)


def test_a_deleted_checkpoint_keeps_what_its_manifest_says(folder):
    before = checkpoint_manifest(folder)
    delete_checkpoint(folder, TOMBSTONE)
    assert [path.name for path in folder.iterdir()] == ["manifest.json"]
    after = checkpoint_manifest(folder)
    assert not is_complete(folder)
    assert not is_half_deleted(folder)
    assert {name: after[name] for name in before} == {**before, "deleted": True}
    found = Tombstone.of(after)
    assert (found.rule, found.run, found.is_swept) == ("keep_last 2", "demo", True)


def test_a_crash_behind_the_tombstone_is_finished_under_the_first_rule(folder):
    manifest = checkpoint_manifest(folder)
    (folder / "manifest.json").write_text(json.dumps(TOMBSTONE.put_on(manifest)))
    (folder / "state.json").unlink()
    assert is_half_deleted(folder)
    assert not is_complete(folder)
    delete_checkpoint(folder, Tombstone(rule="another", run="other"))
    assert [path.name for path in folder.iterdir()] == ["manifest.json"]
    assert Tombstone.of(checkpoint_manifest(folder)).rule == "keep_last 2"


def test_a_folder_without_a_readable_manifest_is_let_be(tmp_path):
    (tmp_path / "state.json").write_bytes(b"{}")
    delete_checkpoint(tmp_path, TOMBSTONE)
    (tmp_path / "manifest.json").write_text("{")
    delete_checkpoint(tmp_path, TOMBSTONE)
    assert (tmp_path / "state.json").exists()
    assert not is_half_deleted(tmp_path)


def test_a_tombstone_of_an_earlier_release_says_what_it_can():
    assert Tombstone.of({"deleted": False}) is None
    assert Tombstone.of({"deleted": True}).sentence("it") == "it was deleted by the rule an unknown rule"
    assert (
        Tombstone("r", "a")
        .mend("/my data")
        .startswith("rft run '/my data/runs/a/recipe.yaml' --name a --root '/my data'")
    )
    dated = Tombstone("keep_last 2", "demo", at="2026-01-31T12:00:59+00:00")
    assert dated.sentence("it") == "it was deleted on 2026-01-31 12:00 UTC by the rule keep_last 2 of run demo"
