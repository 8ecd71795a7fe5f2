"""A run killed at the boundary of its phases, and within a later one, ends with the bits of one that was not."""

import json

import pytest

from data_contracts.ledger import Ledger
from tests.faults.harness import all_digests, assert_same, generated_blocks, write_recipe
from tests.tiny import make_tiny_model

pytestmark = [pytest.mark.faults, pytest.mark.slow]
PAIRS = [{"prompt": f"word {number}", "completion": f"{number} letters"} for number in range(30)]


def recipe_in(folder, **changes):
    """Supervision, then reinforcement, each of three steps with a checkpoint of its second and last."""
    model = make_tiny_model(folder / "model")
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    warm_up = {
        "name": "warm-up",
        "steps": 3,
        "data": {"record": "demonstrations", "source": "pairs.jsonl", "heldout_fraction": 0.2},
        "algorithm": {"name": "sft"},
        "reward": {"functions": []},
    }
    reinforce = {
        "name": "reinforce",
        "steps": 3,
        "algorithm": {"kl_coefficient": 0.1},
        "rollout": {"group_size": 4, "max_completion_tokens": 6, "block_groups": 2},
        "evaluation": {"every": 3, "prompts": 3, "samples": 2, "pass_at": [2]},
    }
    return write_recipe(
        folder,
        model,
        steps=6,
        phases=[warm_up, reinforce],
        training__checkpoint_every=2,
        rollout={"prompts_per_step": 6},
        evaluation={"every": 0},
        **changes,
    )


def entry(root, name):
    return root / "runs/x/ledger" / f"{name}.0.json"


@pytest.mark.parametrize("changes", [{}, {"model__lora_rank": 2}], ids=["all weights", "adapters"])
def test_killed_at_the_boundary_and_beyond(runs, tmp_path, changes):
    recipe = recipe_in(tmp_path, **changes)
    calm, root = tmp_path / "calm", tmp_path / "killed"
    runs.finish("run", recipe, "--name", "x", root=calm)
    moments = [
        lambda: entry(root, "warm-up.00002.update").exists(),
        lambda: entry(root, "warm-up.00003.update").exists(),  # perhaps before its checkpoint
        lambda: entry(root, "warm-up.00003.checkpoint").exists(),  # the phase is finished, the next not begun
        lambda: "reinforce" in json.loads((root / "runs/x/run.json").read_text())["phases"],
        lambda: list(root.glob("store/rollouts/*/part-00001.json")),  # within generation
        lambda: entry(root, "reinforce.00001.update").exists(),
        lambda: entry(root, "reinforce.00003.rewards").exists(),  # update 3 goes on from the checkpoint of update 2
    ]
    kills = sum(runs.kill_when(moment, "run", recipe, "--name", "x", root=root) for moment in moments)
    assert kills >= len(moments) - 2
    before = {path.name: path.stat().st_mtime_ns for path in (root / "runs/x/ledger").glob("warm-up.*.json")}
    runs.finish("run", recipe, "--name", "x", root=root)
    assert_same(root, (all_digests(calm, "x"), generated_blocks(calm, "x")), kills)
    after = {path.name: path.stat().st_mtime_ns for path in (root / "runs/x/ledger").glob("warm-up.*.json")}
    assert before == after
    assert {entry.phase for entry in Ledger(root / "runs/x").entries()} == {"warm-up", "reinforce"}


def test_a_phase_replays_its_own_updates_from_where_it_began(runs, tmp_path):
    """Checkpoints of ends of phases alone: a resume within the second replays it on what the first left."""
    recipe = recipe_in(tmp_path)
    often = ("--set", "phases.0.training.checkpoint_every=100", "--set", "phases.1.training.checkpoint_every=100")
    calm, root = tmp_path / "calm", tmp_path / "killed"
    runs.finish("run", recipe, "--name", "x", *often, root=calm)
    second = entry(root, "reinforce.00002.update")
    assert runs.kill_when(second.exists, "run", recipe, "--name", "x", *often, root=root)
    said = len(runs.log.read_text())
    runs.finish("run", recipe, "--name", "x", *often, root=root)
    assert all_digests(root, "x") == all_digests(calm, "x")
    assert runs.log.read_text()[said:].count("replayed in") == 2
