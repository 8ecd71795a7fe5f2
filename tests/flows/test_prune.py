"""`rft prune` and `rft pin`, and what everybody says about data that is gone."""

from __future__ import annotations

import io
import json
import shutil

import pytest
import yaml
from rich.console import Console

from data_contracts.errors import DamagedTable, DeletedTable
from data_contracts.ledger import Lease
from flows.evaluate import evaluation_recipe
from flows.inspect import learned, lineage_of, lineage_tree, metrics_of, open_run, show, status_of
from flows.inspect.deleted import spans
from flows.inspect.show import left_out
from flows.prune import print_prune, prune, set_pin
from flows.report import build_report
from rft_core.errors import SettingsError
from tests.faults.harness import flip_a_byte
from tests.flows.sample_run import build_sample_run


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Six steps, a checkpoint after every second one, evaluations at 0, 2, 4 and 6."""
    return build_sample_run(tmp_path_factory.mktemp("built"), steps=6, checkpoint_every=2, has_kl=True)


@pytest.fixture
def root(built, tmp_path):
    return shutil.copytree(built.root, tmp_path / "root")


@pytest.fixture(scope="module")
def pruned(built, tmp_path_factory):
    """The run after pruning to its last checkpoint: steps 1 to 5 are gone."""
    root = shutil.copytree(built.root, tmp_path_factory.mktemp("pruned") / "root")
    prune(root, ["sample"], keep_last=1, is_dry=False)
    return root


def files(root):
    return sorted(
        path.relative_to(root) for path in root.rglob("*") if path.is_file() and path.name != "retention.lock"
    )


def test_a_dry_run_touches_nothing_and_says_what_would_go(root):
    before = files(root)
    result = prune(root, ["sample"], keep_last=1)
    assert files(root) == before
    going = [item for item in result["items"] if item["goes"]]
    # 4 training tables of each of 5 steps, 2 rounds x 2 evaluation tables at steps 2 and 4, checkpoints 2 and 4.
    assert len(going) == 4 * 5 + 4 + 2 * 2 * 2 + 2
    assert (result["dry_run"], result["deleted"], result["freed_bytes"]) == (True, 0, 0)
    assert {item["rule"] for item in going} == {"keep_last 1"}
    assert all(item["stays_because"] for item in result["items"] if not item["goes"])
    json.dumps(result)


def test_what_was_shown_is_what_is_deleted(root):
    shown = prune(root, ["sample"], keep_last=1)
    done = prune(root, ["sample"], keep_last=1, is_dry=False)
    going = {item["ref"]: item["bytes"] for item in shown["items"] if item["goes"]}
    assert {item["ref"] for item in done["items"] if item["goes"]} == going.keys()
    assert (done["deleted"], done["freed_bytes"]) == (len(going), sum(going.values()))
    for ref in going:
        kind, _, key = ref.partition("/")
        folder = root / ("checkpoints" if kind == "checkpoint" else f"store/{kind}") / key
        assert [path.name for path in folder.iterdir()] == ["manifest.json"]
    again = prune(root, ["sample"], keep_last=1, is_dry=False)
    assert (again["deleted"], [item for item in again["items"] if item["goes"]]) == (0, [])


def test_without_names_only_checkpoints_go_by_each_runs_own_settings(root):
    build_sample_run(root, "other", steps=4, checkpoint_every=1, prompts=3)
    for name, retention in (("sample", {"keep_last": 1}), ("other", {"keep_last": 1, "keep_every": 3})):
        path = root / "runs" / name / "recipe.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "retention": retention}))
    result = prune(root, [])
    going = {(item["run"], item["what"], item["step"]) for item in result["items"] if item["goes"]}
    assert going == {("sample", "checkpoint", step) for step in (2, 4)} | {
        ("other", "checkpoint", step) for step in (1, 2)
    }


def test_the_table_says_the_size_of_what_goes_and_why_the_rest_stays(root):
    stream = io.StringIO()
    print_prune(prune(root, ["sample"], keep_last=1), Console(file=stream))
    lines = [line.split("\t") for line in stream.getvalue().splitlines()]
    by_place = {(line[1], line[2]): line for line in lines if len(line) == 6}
    assert by_place["rollouts", "1-5"][3] == "5"
    assert by_place["rollouts", "1-5"][5] == "goes by keep_last 1"
    assert by_place["checkpoint", "2, 4"][4:] == ["14 B", "goes by keep_last 1"]
    assert by_place["checkpoint", "6"][5] == "stays: keep_last 1"
    assert lines[-1][0].startswith("would delete 34, ")
    assert lines[-1][0].endswith("nothing is deleted without --yes")


def test_a_live_run_is_skipped(root):
    lease = Lease.acquire(root / "runs" / "sample")
    for is_dry in (True, False):
        result = prune(root, ["sample"], keep_last=1, is_dry=is_dry)
        assert result["deleted"] == 0
        assert {item["stays_because"] for item in result["items"] if item["what"] == "rollouts"} == {
            "run sample is live"
        }
    lease.release()
    assert prune(root, ["sample"], keep_last=1, is_dry=False)["deleted"] == 34


def test_a_folder_with_a_ledger_and_no_head_still_holds_what_it_names(root):
    shutil.copytree(root / "runs" / "sample", root / "runs" / "headless")
    (root / "runs" / "headless" / "run.json").unlink()
    result = prune(root, ["sample"], keep_last=1)
    assert {item["stays_because"] for item in result["items"] if item["what"] == "rewards" and item["step"] < 6} == {
        "run headless names it"
    }


def test_a_ledger_that_cannot_be_read_stops_everything(root):
    shutil.copytree(root / "runs" / "sample", root / "runs" / "broken")
    (root / "runs" / "broken" / "ledger" / "main.00001.rewards.0.json").write_text("{")
    before = files(root)
    with pytest.raises(DamagedTable, match=r"broken/ledger/main.00001.rewards.0.json must be a ledger entry"):
        prune(root, ["sample"], keep_last=1, is_dry=False)
    assert files(root) == before


def test_a_table_found_damaged_is_left_and_said(root, built):
    ref = built.refs[3, "rewards", 0]
    path = root / "store" / "rewards" / ref.key / "part-00000.parquet"
    path.write_bytes(b"x" * path.stat().st_size)
    result = prune(root, ["sample"], keep_last=1, is_dry=False)
    (item,) = (item for item in result["items"] if item["ref"] == ref.name)
    assert (item["goes"], item["stays_because"]) == (False, "damaged, or taken up meanwhile")
    assert result["deleted"] == 33
    assert path.exists()


def test_an_altered_checkpoint_is_not_relied_on(root, built):
    """The bytes of what stays are read before anything goes: policy 6 must be had from checkpoint 4."""
    flip_a_byte(root / "checkpoints" / built.policies[6].policy_id / "model.safetensors")
    result = prune(root, ["sample"], keep_last=1, is_dry=False)
    stays = {(item["what"], item["step"]): item["stays_because"] for item in result["items"]}
    assert stays["checkpoint", 6] == "damaged: its files are not those of its manifest"
    assert stays["checkpoint", 4] == "keep_last 1"
    assert stays["advantages", 5] == "policy 6 is replayed through it"
    assert stays["checkpoint", 2] is None


def test_pins_are_set_shown_and_taken_off(root):
    assert set_pin(root, "sample", 3, is_removed=False).names() == ["step 3"]
    assert set_pin(root, "sample", None, is_removed=False).names() == ["the whole run", "step 3"]
    assert status_of(str(root), "sample")["pins"] == ["the whole run", "step 3"]
    assert not any(item["goes"] for item in prune(root, ["sample"], keep_last=1)["items"])
    assert set_pin(root, "sample", None, is_removed=True).names() == ["step 3"]
    going = {(item["what"], item["step"]) for item in prune(root, ["sample"], keep_last=1)["items"] if item["goes"]}
    # Policy 3 is replayed from checkpoint 2.
    assert {("checkpoint", 2), ("rewards", 3)} & going == set()
    assert ("checkpoint", 4) in going
    with pytest.raises(SettingsError, match=r"pinned whole, it has step 3"):
        set_pin(root, "sample", None, is_removed=True)
    with pytest.raises(SettingsError, match="from 1 to 6"):
        set_pin(root, "sample", 7, is_removed=False)


def test_counts_curves_and_reward_are_what_they_were(built, pruned):
    before, after = status_of(built.root, "sample"), status_of(str(pruned), "sample")
    assert after["counts"] == before["counts"]
    assert after["weights_digest"] == before["weights_digest"]
    assert after["evaluations"] == before["evaluations"]
    assert metrics_of(open_run(str(pruned), "sample")).equals(metrics_of(open_run(built.root, "sample")))
    assert learned(str(pruned), "sample")["reward"] == learned(built.root, "sample")["reward"]
    # First and last evaluation have their rows, so their difference is still paired.
    assert learned(str(pruned), "sample")["metrics"] == learned(built.root, "sample")["metrics"]


def test_an_evaluation_without_its_rows_is_compared_unpaired(root):
    prune(root, ["sample"], keep_last=1, is_dry=False)
    for stage in ("rollouts", "rewards"):  # as if the last evaluation had been pruned
        for entry, ref in open_run(str(root), "sample").refs(f"evaluation-{stage}", stage):
            if entry.step == 6:
                tombstone = open_run(str(root), "sample").deleted("rewards", "rewards")[0][1]
                open_run(str(root), "sample").store.delete(ref, tombstone.__class__("keep_last 1", "sample"))
    change = learned(str(root), "sample")["metrics"][0]
    assert change["low"] is None
    assert change["difference"] > 0


def test_status_says_what_was_deleted_when_and_by_which_rule(pruned):
    deleted = {deletion["what"]: deletion for deletion in status_of(str(pruned), "sample")["deleted"]}
    assert deleted["rollouts"]["steps"] == [1, 2, 3, 4, 5]
    assert deleted["checkpoints"]["steps"] == [2, 4]
    assert deleted["evaluation-rewards"]["steps"] == [2, 4]
    assert (deleted["rewards"]["rule"], deleted["rewards"]["run"]) == ("keep_last 1", "sample")
    assert deleted["rewards"]["sentence"].startswith("rewards of steps 1-5 were deleted on 20")


def test_show_gives_what_is_left_and_says_what_is_not(pruned):
    table = show(str(pruned), "sample", "rewards", limit=None)
    assert set(table["at_step"].to_pylist()) == {6}
    (sentence,) = left_out(str(pruned), "sample", "rewards")
    assert sentence.startswith("rewards of steps 1-5 were deleted on ")
    with pytest.raises(
        DeletedTable, match=r"rewards of step 2 were deleted .*; to make them again: rft run .* --remake"
    ):
        show(str(pruned), "sample", "rewards", step=2)
    with pytest.raises(DeletedTable, match="prompts of step 2 were deleted"):
        show(str(pruned), "sample", "prompts", step=2)
    assert show(str(pruned), "sample", "prompts", limit=None).num_rows == 4  # the data set stays
    assert left_out(str(pruned), "sample", "prompts") == left_out(str(pruned), "sample", "updates") == []


def test_lineage_is_what_it_was_and_marks_what_is_gone(built, pruned):
    for reference in ("sample", built.refs[2, "rewards", 0].name, built.refs[3, "rollouts", 0].key):
        before, after = lineage_of(built.root, reference), lineage_of(str(pruned), reference)
        assert after["edges"] == before["edges"]
        plain = [{key: value for key, value in node.items() if key != "deleted"} for node in after["nodes"]]
        assert plain == before["nodes"]
    (node,) = (node for node in after["nodes"] if node["ref"] == built.refs[3, "rollouts", 0].name)
    assert (node["deleted"]["rule"], node["deleted"]["run"]) == ("keep_last 1", "sample")
    stream = io.StringIO()
    Console(file=stream, width=200).print(lineage_tree(after))
    assert f"deleted {node['deleted']['at'][:10]} by keep_last 1" in stream.getvalue()
    assert "rft run RECIPE --name RUN --remake" in stream.getvalue()


def test_the_report_says_it_too(pruned):
    html = build_report(str(pruned), "sample", pruned / "report.html").read_text()
    assert "rollouts of steps 1-5 were deleted on " in html
    assert f"rft run {pruned}/runs/sample/recipe.yaml --name sample --root {pruned} --remake" in html
    assert "Step 6, best" in html
    assert "Step 1, best" not in html


def test_evaluating_a_deleted_checkpoint_says_so(built, pruned):
    folder = pruned / "checkpoints" / built.policies[2].policy_id
    with pytest.raises(SettingsError, match=r"checkpoint .* was deleted on .*keep_last 1.*; to make it again: pin its"):
        evaluation_recipe(pruned, str(folder), None, [])


def test_spans():
    assert spans([]) == ""
    assert spans([3, 1, 2, 7, 7, 9, 10]) == "1-3, 7, 9-10"
