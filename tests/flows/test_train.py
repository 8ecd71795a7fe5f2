"""The train and rerun flows on a tiny model, against a real Prefect server."""

import json

import pytest
import torch
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey, FlowRunFilter, FlowRunFilterName

from data_contracts.ledger import Lease, Ledger
from data_contracts.store import Store
from flows.inspect.lineage import lineage_of
from flows.rerun import rerun
from flows.rescore import rescore
from flows.train import train
from rft_core.errors import ContentChanged, GraderUnavailable, RewardFunctionError, RunBusy, SettingsError
from rft_core.recipes import load_recipe
from tests.faults.harness import all_digests, write_recipe
from tests.tiny import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_server")]
STEPS = 3
STAGES = ("prompts", "rollouts", "rewards", "advantages", "update")


@pytest.fixture(scope="module")
def finished(on_server, recipe_file, tmp_path_factory):
    """A root with the complete run `first`."""
    root = tmp_path_factory.mktemp("root")
    torch.set_num_threads(2)  # not the recipe's number, which the run must set
    train(recipe=load_recipe(recipe_file), run="first", root=str(root))
    return root


def task_runs(name):
    """(task run name, state name) of the newest flow run of that name, as the server tells."""
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[name])))
        newest = max(runs, key=lambda run: run.created)
        tasks = client.read_task_runs(flow_run_filter=FlowRunFilter(id={"any_": [newest.id]}))
    return {task.name: task.state_name for task in tasks}


def await_task_runs(name, expected):
    """The server records task runs a moment after they end."""
    import time

    for _ in range(100):
        found = task_runs(name)
        if set(expected) <= set(found) and set(found.values()) <= {"Completed", "Cached"}:
            return found
        time.sleep(0.1)
    return found


def test_five_named_tasks_per_step_in_one_flow_run(finished):
    expected = {f"{stage}-{step:05d}" for stage in STAGES for step in (1, 2, 3)}
    found = await_task_runs("first", expected)
    assert expected <= set(found)
    assert {name for name in found if name.startswith(STAGES)} == expected
    assert set(found.values()) == {"Completed"}


def test_a_manifest_holds_the_seconds_of_the_work_behind_its_table(finished):
    ledger, store = Ledger(finished / "runs/first"), Store(str(finished))
    for entry in ledger.entries():
        for record, ref in entry.refs.items():
            seconds = store.manifest(ref)["seconds"]
            assert 0 <= seconds <= entry.seconds + 0.01  # the ledger's count goes on until the commit
            assert record != "updates" or seconds > entry.seconds / 10


def test_every_stage_left_a_report_artifact(finished):
    with get_client(sync_client=True) as client:
        artifacts = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(like_="first-")))
    keys = {artifact.key for artifact in artifacts}
    assert {f"first-{stage}" for stage in (*STAGES, "data", "evaluation", "progress", "result")} <= keys


def test_resuming_a_complete_run_does_nothing_and_shows_cached(finished, recipe_file):
    before = all_digests(finished, "first")
    train(recipe=load_recipe(recipe_file), run="first", root=str(finished))
    found = await_task_runs("first", {"update-00003"})
    assert set(found.values()) == {"Cached"}
    assert all_digests(finished, "first") == before


def test_another_run_of_the_same_recipe_reuses_every_table(finished, recipe_file):
    train(recipe=load_recipe(recipe_file), run="second", root=str(finished))
    assert set(await_task_runs("second", {"update-00003"}).values()) == {"Cached"}
    assert all_digests(finished, "second") == all_digests(finished, "first")
    assert not (finished / "runs" / "second" / "generated.jsonl").exists()


def test_rerun_from_rewards_shares_the_rollouts_and_is_off_policy(finished):
    reward = 'reward.functions=[{"name": "answer_format", "pattern": ".*[a-f].*"}]'
    rerun("first", "rewards", "rescored", [reward], root=str(finished))
    old, new = Ledger(finished / "runs/first"), Ledger(finished / "runs/rescored")
    for step in (1, 2, 3):
        assert new.get("main", step, "rollouts").refs == old.get("main", step, "rollouts").refs
        assert new.get("main", step, "rewards").refs != old.get("main", step, "rewards").refs
    assert not (finished / "runs/rescored/generated.jsonl").exists()
    store = Store(str(finished))
    first, last = (store.read(new.get("main", step, "update").refs["updates"]).to_pylist()[0] for step in (1, 3))
    assert first["off_policy_rows"] == 0
    assert last["off_policy_rows"] == 24
    assert 0 < last["effective_sample_size"] <= 1
    nodes = {node["ref"] for node in lineage_of(str(finished), "rescored")["nodes"]}
    assert {old.get("main", step, "rollouts").refs["rollouts"].name for step in (1, 2, 3)} <= nodes


def test_rescoring_shows_flips_and_a_rerun_takes_its_tables(finished):
    reward = 'reward.functions=[{"name": "answer_format", "pattern": ".*[g-k].*"}]'
    before = all_digests(finished, "first")
    result = rescore(finished, "first", [reward])
    old, store = Ledger(finished / "runs/first"), Store(str(finished))
    texts = [
        text
        for step in (1, 2, 3)
        for text in store.read(old.get("main", step, "rollouts").refs["rollouts"])["completion_text"].to_pylist()
    ]
    total = result["functions"][0]
    assert total["new_mean"] == sum(any(c in text for c in "ghijk") for text in texts) / len(texts)
    assert (result["generated_tokens"], total["rows"], len(result["tables"])) == (0, len(texts), 3)
    assert all_digests(finished, "first") == before
    assert json.loads(next((finished / "runs/first/rescores").iterdir()).read_text()) == result
    assert rescore(finished, "first", [reward]) == result  # found in the store
    rerun("first", "rewards", "rescored-too", [reward], root=str(finished))
    new = Ledger(finished / "runs/rescored-too")
    assert [new.get("main", step, "rewards").refs["rewards"].name for step in (1, 2, 3)] == [
        table["new"] for table in result["tables"]
    ]
    assert all(new.get("main", step, "rewards").reused for step in (1, 2, 3))


def test_rescoring_changes_rewards_alone(finished):
    with pytest.raises(SettingsError, match=r"rescoring changes reward\.\* alone, got seed: use rft rerun"):
        rescore(finished, "first", ["seed=5"])
    with pytest.raises(SettingsError, match=r"when of .* names the field knd, which none of the prompts has"):
        rescore(finished, "first", ["reward.functions.0.when=knd = 'x'"])
    with pytest.raises(SettingsError, match="no rewards of step 9 yet"):
        rescore(finished, "first", [], step=9)


def test_rerun_from_advantages_with_another_algorithm(finished):
    rerun("first", "advantages", "dr", ["algorithm.name=dr_grpo"], root=str(finished))
    old, new = Ledger(finished / "runs/first"), Ledger(finished / "runs/dr")
    assert new.get("main", 2, "rewards").refs == old.get("main", 2, "rewards").refs
    # The same first batch from the same policy, another loss: another policy.
    assert new.get("main", 1, "update").policy != old.get("main", 1, "update").policy


def test_a_branch_goes_on_online_from_the_old_policy(finished):
    rerun("first", "rollouts", "branch", ["rollout.temperature=0.7"], at=3, root=str(finished))
    old, new = Ledger(finished / "runs/first"), Ledger(finished / "runs/branch")
    assert new.get("main", 2, "update").policy == old.get("main", 2, "update").policy
    assert new.get("main", 3, "rollouts").refs != old.get("main", 3, "rollouts").refs
    rollouts = Store(str(finished)).read(new.get("main", 3, "rollouts").refs["rollouts"])
    assert set(rollouts["policy_id"].to_pylist()) == {old.get("main", 2, "update").policy.policy_id}


def test_a_rerun_that_would_have_nothing_to_stand_on_is_refused(finished):
    with pytest.raises(SettingsError, match=r"there are: .*first"):
        rerun("firts", "rewards", "x", [], root=str(finished))
    with pytest.raises(SettingsError, match="a name of its own"):
        rerun("first", "rewards", "first", [], root=str(finished))
    with pytest.raises(SettingsError, match="--at must be a step from 1 to 4"):
        rerun("first", "rollouts", "x", [], at=9, root=str(finished))


@pytest.mark.parametrize(
    ("stage", "at", "override", "found"),
    [
        ("rollouts", None, "data.suffix=?", "data.suffix has no effect.*use --from data"),
        ("data", 2, "data.suffix=?", "data.suffix has no effect.*without --at"),
        ("rewards", None, "rollout.temperature=0.5", "rollout.temperature has no effect.*use --from rollouts"),
        ("advantages", None, "reward.functions.0.weight=2.0", "weight has no effect.*use --from rewards"),
        ("update", None, "algorithm.std_ddof=0", "algorithm.std_ddof has no effect.*use --from advantages"),
        ("update", None, "steps=9", "steps must be at most 3"),
        ("rollouts", 3, "model.lora_rank=2", "the policy must be that of the run"),
        ("update", None, "model.chat_template='{{ messages[0].content }}'", "the tokenizer must be that of the run"),
    ],
)
def test_an_override_that_a_rerun_cannot_follow_is_refused(finished, stage, at, override, found):
    with pytest.raises(SettingsError, match=found):
        rerun("first", stage, "without-effect", [override], at=at, root=str(finished))
    assert not (finished / "runs" / "without-effect").exists()


def test_changed_content_on_resume_is_refused_with_the_rerun_that_would_do_it(finished, recipe_file):
    changed = load_recipe(recipe_file, ["algorithm.name=dr_grpo", "execution.retries=1"])
    with pytest.raises(ContentChanged) as error:
        train(recipe=changed, run="first", root=str(finished))
    assert 'algorithm.name: "grpo" -> "dr_grpo"' in str(error.value)
    assert 'rft rerun first --from advantages --set algorithm.name="dr_grpo"' in str(error.value)
    assert "retries" not in str(error.value)


def test_more_steps_go_on_and_fewer_are_refused(recipe_file, tmp_path):
    train(recipe=load_recipe(recipe_file, ["steps=1"]), run="x", root=str(tmp_path))
    first = all_digests(tmp_path, "x")["1.update.0"]
    train(recipe=load_recipe(recipe_file, ["steps=2"]), run="x", root=str(tmp_path))
    assert all_digests(tmp_path, "x")["1.update.0"] == first
    assert "2.update.0" in all_digests(tmp_path, "x")
    with pytest.raises(ContentChanged, match="steps: 2 -> 1"):
        train(recipe=load_recipe(recipe_file, ["steps=1"]), run="x", root=str(tmp_path))


def test_an_edited_data_set_on_resume_is_refused(tmp_path):
    recipe = write_recipe(tmp_path, make_tiny_model(tmp_path / "model"), steps=1, model__dtype="float32")
    train(recipe=load_recipe(recipe), run="x", root=str(tmp_path / "root"))
    with open(tmp_path / "prompts.jsonl", "a") as file:
        file.write(json.dumps({"prompt": "one more", "answer": "1"}) + "\n")
    with pytest.raises(ContentChanged, match=r"content of the source: .*\n.*--from data"):
        train(recipe=load_recipe(recipe), run="x", root=str(tmp_path / "root"))


def test_a_renamed_source_is_another_table_because_ids_hold_its_name(recipe_file, tmp_path):
    (tmp_path / "other.jsonl").write_bytes((recipe_file.parent / "prompts.jsonl").read_bytes())
    nothing = ["steps=0", "evaluation.every=0"]
    train(recipe=load_recipe(recipe_file, nothing), run="x", root=str(tmp_path))
    train(
        recipe=load_recipe(recipe_file, [*nothing, f"data.source={tmp_path / 'other.jsonl'}"]),
        run="y",
        root=str(tmp_path),
    )
    for run, name in (("x", "prompts.jsonl"), ("y", "other.jsonl")):
        ref = Ledger(tmp_path / "runs" / run).get("main", 0, "data").refs["prompts"]
        assert set(Store(str(tmp_path)).read(ref)["source"].to_pylist()) == {name}


def test_a_second_writer_is_refused_or_skipped(recipe_file, tmp_path):
    lease = Lease.acquire(tmp_path / "runs" / "x")
    with pytest.raises(RunBusy, match="must have one writer"):
        train(recipe=load_recipe(recipe_file), run="x", root=str(tmp_path))
    state = train(recipe=load_recipe(recipe_file), run="x", root=str(tmp_path), if_busy="skip", return_state=True)
    assert state.name == "Skipped"
    lease.release()


@pytest.mark.parametrize("stage", ["rewards", "rollouts"])
def test_a_damaged_table_is_made_again_and_what_comes_before_is_reused(recipe_file, tmp_path, stage):
    recipe = load_recipe(recipe_file, ["steps=1", "evaluation.every=0"])
    train(recipe=recipe, run="x", root=str(tmp_path))
    digests = all_digests(tmp_path, "x")
    ref = Ledger(tmp_path / "runs/x").get("main", 1, stage).refs[stage]
    (tmp_path / "store" / stage / ref.key / "part-00000.parquet").write_bytes(b"PAR1")
    train(recipe=recipe, run="x", root=str(tmp_path))
    assert all_digests(tmp_path, "x") == digests
    assert list((tmp_path / "damaged").iterdir())


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("raise ValueError('no idea')", "no idea"),
        ("return [1.0]", "1 value"),
    ],
    ids=["raises", "wrong number"],
)
def test_a_broken_reward_fails_the_run_before_anything_is_generated(tmp_path, body, found):
    recipe = write_recipe(tmp_path, make_tiny_model(tmp_path / "model"), steps=1, model__dtype="float32")
    (tmp_path / "rewards.py").write_text(f"def low_letters(rows):\n    {body}\n")
    with pytest.raises(RewardFunctionError, match=found):
        train(recipe=load_recipe(recipe), run="x", root=str(tmp_path / "root"))
    assert not (tmp_path / "root/runs/x/generated.jsonl").exists()
    assert json.loads((tmp_path / "root/runs/x/state.json").read_text())["state"] == "failed"


def test_a_reward_that_gives_nan_is_unscored_and_stops_the_stage_as_transient(tmp_path):
    recipe = write_recipe(tmp_path, make_tiny_model(tmp_path / "model"), steps=1, model__dtype="float32")
    (tmp_path / "rewards.py").write_text("def low_letters(rows):\n    return [float('nan')] * len(rows)\n")
    with pytest.raises(GraderUnavailable, match="6 of 6 are: 6 x custom: the function gave nan"):
        train(recipe=load_recipe(recipe, ["execution.retries=0"]), run="x", root=str(tmp_path / "root"))
    # What was generated is kept: a mended grader scores it without a new rollout.
    assert Ledger(tmp_path / "root/runs/x").get("main", 0, "evaluation-rollouts") is not None


def test_the_resolved_recipe_says_what_auto_became(finished):
    resolved = yaml.safe_load((finished / "runs/first/recipe.yaml").read_text())
    assert resolved["model"]["device"] == "cpu"
    assert resolved["training"]["checkpoint_every"] == 3
    assert resolved["execution"]["threads"] == 1 == torch.get_num_threads()


def test_rollouts_ahead_come_from_the_scheduled_version(recipe_file, tmp_path):
    """ahead 1: version max(0, s - 2), so 0, 0, 1 for steps 1, 2, 3."""
    recipe = load_recipe(recipe_file, ["rollout.ahead=1", "evaluation.every=0"])
    train(recipe=recipe, run="x", root=str(tmp_path))
    ledger, store = Ledger(tmp_path / "runs/x"), Store(str(tmp_path))
    versions = [
        set(
            store.read(ledger.get("main", step, "rollouts").refs["rollouts"], ["policy_version"])[
                "policy_version"
            ].to_pylist()
        )
        for step in (1, 2, 3)
    ]
    assert versions == [{0}, {0}, {1}]
