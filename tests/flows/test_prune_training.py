"""After pruning under any rules, what is kept can be had bit for bit, and runs go on as if nothing had been deleted."""

import json
import random
import shutil

import pytest

from data_contracts.errors import DeletedTable, FatalError
from data_contracts.ledger import Ledger
from data_contracts.pins import pin
from data_contracts.refs import PolicyRef
from data_contracts.store import Store
from flows.prune import prune
from flows.rerun import rerun
from flows.train import train
from rft_core.checkpoint import weights_digest
from rft_core.recipes import load_recipe
from tasks.resuming import read_recipe
from tasks.runs import close_run, open_run
from tests.faults.harness import all_digests, generated_blocks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_server")]
STEPS, BRANCHED_AT = 6, 3
# checkpoint_every is 3, so that replays go through steps that nothing else keeps. The branch makes its own.
SAVED = {"x": [3, 6], "branch": [3, 6]}
EVERY_RUN = ["x", "branch", "offline"]


@pytest.fixture(scope="module")
def grown(on_server, recipe_file, tmp_path_factory):
    """A root with the run x, a branch of it and an offline rerun; nothing was deleted."""
    root = tmp_path_factory.mktemp("grown")
    train(recipe=load_recipe(recipe_file), run="x", root=str(root))
    rerun("x", "rollouts", "branch", ["rollout.temperature=0.7"], at=BRANCHED_AT, root=str(root))
    rerun("x", "advantages", "offline", ["algorithm.name=dr_grpo"], root=str(root))
    return root


@pytest.fixture(scope="module")
def policies(grown):
    """Weights of every policy of x and of the branch, by version."""
    return {run: weights(grown, run, range(STEPS + 1)) for run in SAVED}


@pytest.fixture(scope="module")
def continued(grown, tmp_path_factory):
    """What x and the branch become with one more step where nothing was deleted."""
    root = tmp_path_factory.mktemp("continued") / "root"
    shutil.copytree(grown, root)
    return {run: go_on(root, run) for run in SAVED}


@pytest.fixture
def copy(grown, tmp_path):
    return shutil.copytree(grown, tmp_path / "root")


def weights(root, run, versions):
    """Version -> digest of the weights, each materialised from what is on disk."""
    context = open_run(root, run, read_recipe(root / "runs" / run))
    try:
        found = {}
        for version in versions:
            context.policies._resident = None  # nothing may come from the policy before
            found[version] = weights_digest(context.policies.materialise(context.policy(version)))
        return found
    finally:
        close_run(context)


def go_on(root, run):
    """Digests of everything after one more step. A branch goes on under its own recipe."""
    recipe = read_recipe(root / "runs" / run).model_copy(update={"steps": STEPS + 1})
    train(recipe=recipe, run=run, root=str(root))
    return all_digests(root, run)


def kept_versions(saved, keep_last, keep_every, pinned):
    """The rule in other words: newest, the last few saved, every k-th saved, pinned."""
    every = [version for version in saved if keep_every and version % keep_every == 0]
    return {STEPS, *saved[-keep_last:], *every, *pinned}


# Among what these choose: a run left out, steps pinned that were not saved, both runs pinned, every rule.
@pytest.mark.parametrize("seed", [0, 2, 3, 8])
def test_every_kept_policy_has_its_weights_and_runs_go_on(copy, policies, continued, seed):
    choose = random.Random(seed)
    keep_last, keep_every = choose.randint(1, 2), choose.choice([None, 2, 3])
    # Where a run is left out, what it names stays for all; so mostly none is.
    names = choose.choice([EVERY_RUN, EVERY_RUN, choose.sample(EVERY_RUN, 2)])
    pinned = {run: choose.sample(range(1, STEPS), choose.randint(0, 2)) for run in SAVED}
    for run, steps in pinned.items():
        for step in steps:
            pin(copy / "runs" / run, step)
    result = prune(copy, names, keep_last, keep_every, is_dry=False)
    assert result["deleted"] == sum(item["goes"] for item in result["items"])
    for run, saved in SAVED.items():
        versions = list(range(STEPS + 1))
        if run in names:
            versions = sorted(kept_versions(saved, keep_last, keep_every, pinned[run]))
        choose.shuffle(versions)
        assert weights(copy, run, versions) == {version: policies[run][version] for version in versions}
    run = choose.choice(list(SAVED))
    assert go_on(copy, run) == continued[run]


def test_what_a_run_that_is_not_pruned_names_stays(copy, grown):
    before = all_digests(copy, "x")
    result = prune(copy, ["x"], keep_last=1, is_dry=False)
    gone = {(item["what"], item["step"]) for item in result["items"] if item["goes"]}
    # The branch names steps 1 and 2, the offline rerun all prompts, rollouts and rewards; step 6 is the newest.
    evaluation = {("evaluation-rollouts", 4), ("evaluation-rewards", 4)}
    assert gone == {("checkpoint", 3), *evaluation, *(("advantages", step) for step in (3, 4, 5))}
    assert all_digests(copy, "x") == before
    assert weights(copy, "branch", [2]) == weights(grown, "x", [2])


def test_a_resume_passes_deleted_tables_by_and_generates_nothing(copy, recipe_file):
    prune(copy, EVERY_RUN, keep_last=1, is_dry=False)
    generated = generated_blocks(copy, "x")
    train(recipe=load_recipe(recipe_file, ["retention.keep_last=1"]), run="x", root=str(copy))
    assert generated_blocks(copy, "x") == generated


def test_remake_makes_equal_tables_again(copy, grown, recipe_file):
    prune(copy, EVERY_RUN, keep_last=1, is_dry=False)
    store, entries = Store(str(copy)), Ledger(copy / "runs/x").entries()
    gone = [ref for entry in entries for ref in entry.refs.values() if store.tombstone(ref.record, ref.key)]
    assert gone
    train(recipe=load_recipe(recipe_file), run="x", root=str(copy), remake=True)
    whole = Store(str(grown))
    for ref in gone:
        assert store.read(ref).equals(whole.read(ref))
        assert store.manifest(ref)["digest"] == whole.manifest(ref)["digest"]
    assert all_digests(copy, "x") == all_digests(grown, "x")
    # Reruns pass by what is not their own work, and make the rest again.
    for run in ("branch", "offline"):
        train(recipe=read_recipe(copy / "runs" / run), run=run, root=str(copy), remake=True)
        for entry in Ledger(copy / "runs" / run).entries():
            for ref in entry.refs.values():
                assert store.read(ref).equals(whole.read(ref))


def test_another_run_of_the_recipe_makes_deleted_tables_again(copy, recipe_file):
    prune(copy, EVERY_RUN, keep_last=1, is_dry=False)
    train(recipe=load_recipe(recipe_file), run="again", root=str(copy))
    assert all_digests(copy, "again") == all_digests(copy, "x")
    store = Store(str(copy))
    for entry in Ledger(copy / "runs/again").entries():
        for ref in entry.refs.values():
            store.check(ref)


def test_a_table_that_cannot_be_made_as_it_was_is_refused_before_it_is_written(copy, recipe_file):
    """As on another machine: here a tombstone is made to remember other bytes."""
    prune(copy, EVERY_RUN, keep_last=1, is_dry=False)
    ref = Ledger(copy / "runs/x").get("main", 1, "rollouts").refs["rollouts"]
    folder = copy / "store/rollouts" / ref.key
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["parts"][0]["sha256"] = "0" * 64
    manifest["provenance"]["fingerprint"]["torch"] = "1.0"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(FatalError, match=r"block 0 of rollouts/.*SHA-256 0{12}, found .*torch 1.0 -> "):
        train(recipe=load_recipe(recipe_file), run="x", root=str(copy), remake=True)
    assert [path.name for path in folder.iterdir()] == ["manifest.json"]


def test_reruns_of_deleted_tables_say_what_is_missing(copy):
    prune(copy, EVERY_RUN, keep_last=1, is_dry=False)
    command = f"rft run {copy}/runs/x/recipe.yaml --name x --root {copy} --remake"
    with pytest.raises(DeletedTable, match=r"rollouts of steps 1-5 were deleted on .* keep_last 1 of run x") as error:
        rerun("x", "advantages", "y", [], root=str(copy))
    assert command in str(error.value)
    with pytest.raises(DeletedTable, match="rollouts of steps 1-2 were deleted"):
        rerun("x", "rollouts", "y", [], at=3, root=str(copy))
    assert not (copy / "runs/y").exists()
    # From the newest policy a branch goes on.
    rerun("x", "rollouts", "y", ["steps=7"], at=7, root=str(copy))
    assert len(Ledger(copy / "runs/y").entries("update")) == 7


def test_a_policy_behind_deleted_tables_is_not_replayed_wrongly(copy):
    prune(copy, EVERY_RUN, keep_last=1, is_dry=False)
    with pytest.raises(DeletedTable, match=r"policy 5 must have a checkpoint, or tables .* was deleted on"):
        weights(copy, "x", [5])


def test_a_pinned_checkpoint_comes_back_with_remake(copy, grown, recipe_file):
    prune(copy, EVERY_RUN, keep_last=1, is_dry=False)
    policy: PolicyRef = Ledger(copy / "runs/x").get("main", 3, "update").policy
    manifest = copy / "checkpoints" / policy.policy_id / "manifest.json"
    assert json.loads(manifest.read_text())["deleted"]
    pin(copy / "runs/x", 3)
    train(recipe=load_recipe(recipe_file, ["retention.keep_last=1"]), run="x", root=str(copy), remake=True)
    assert not json.loads(manifest.read_text())["deleted"]
    assert weights(copy, "x", [3]) == weights(grown, "x", [3])


def test_rollouts_ahead_find_the_policies_that_they_come_from(recipe_file, tmp_path):
    """With ahead 1 the rollouts of the next step come from the policy before the newest."""
    recipe = load_recipe(recipe_file, ["rollout.ahead=1", "steps=2", "evaluation.every=0"])
    calm, root = tmp_path / "calm", tmp_path / "root"
    train(recipe=recipe, run="x", root=str(calm))
    shutil.copytree(calm, root)
    prune(root, ["x"], keep_last=1, is_dry=False)
    assert weights(root, "x", [1, 2]) == weights(calm, "x", [1, 2])
    more = recipe.model_copy(update={"steps": 3})
    for folder in (calm, root):
        train(recipe=more, run="x", root=str(folder))
    assert all_digests(root, "x") == all_digests(calm, "x")
