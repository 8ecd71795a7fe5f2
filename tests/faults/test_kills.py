"""A run that is killed and started again ends with the bits of one that was not."""

import json
import random
import time
from collections import Counter

import pytest

from data_contracts.ledger import Ledger
from tests.faults.harness import all_digests, assert_same, flip_a_byte, generated_blocks, write_recipe
from tests.tiny import make_tiny_model

pytestmark = [pytest.mark.faults, pytest.mark.slow]
RANDOM_KILLS = 10


def test_killed_at_random_moments(recipe, undisturbed, runs, tmp_path):
    moments = random.Random(7)
    kills = 0
    for _ in range(RANDOM_KILLS):
        end = time.monotonic() + moments.uniform(1, 5)
        kills += runs.kill_when(lambda end=end: time.monotonic() > end, "run", recipe, "--name", "x", root=tmp_path)
    runs.finish("run", recipe, "--name", "x", root=tmp_path)
    assert kills >= RANDOM_KILLS // 2
    assert_same(tmp_path, undisturbed, kills)


def test_killed_inside_replay(runs, tmp_path):
    """Checkpoints further apart than the run: every resume replays all updates, and is killed while it does."""
    recipe = write_recipe(
        tmp_path,
        make_tiny_model(tmp_path / "model"),
        steps=6,
        training__checkpoint_every=100,
        evaluation__every=0,
    )
    calm, root = tmp_path / "calm", tmp_path / "killed"
    runs.finish("run", recipe, "--name", "x", root=calm)
    fifth = root / "runs/x/ledger/main.00005.update.0.json"
    assert runs.kill_when(fifth.exists, "run", recipe, "--name", "x", root=root)
    for number in range(1, 4):
        replayed = runs.log.read_text().count("replayed in")

        def is_inside(count: int = replayed + number) -> bool:
            return runs.log.read_text().count("replayed in") >= count

        assert runs.kill_when(is_inside, "run", recipe, "--name", "x", root=root)
        assert not (root / "runs/x/ledger/main.00006.rollouts.0.json").exists()
    runs.finish("run", recipe, "--name", "x", root=root)
    assert all_digests(root, "x") == all_digests(calm, "x")


def test_killed_while_the_choice_of_prompts_goes_by_rewards(runs, tmp_path):
    """The memory of the order is in tables: a resume chooses what the uninterrupted run chose."""
    recipe = write_recipe(
        tmp_path,
        make_tiny_model(tmp_path / "model"),
        data__order="targeted",
        rollout__ahead=1,
        evaluation__every=0,
        reward={"functions": [{"name": "answer_format", "pattern": "(?s).*[a-m].*"}]},
    )
    calm, root = tmp_path / "calm", tmp_path / "killed"
    runs.finish("run", recipe, "--name", "x", root=calm)
    moments = [
        lambda: list(root.glob("store/prompt_stats/*/manifest.json")),  # statistics without the prompts beside them
        lambda: (root / "runs/x/ledger/main.00003.prompts.0.json").exists(),
        lambda: len(list(root.glob("store/prompt_stats/*/manifest.json"))) == 2,
        lambda: (root / "runs/x/ledger/main.00004.rollouts.0.json").exists(),
    ]
    for moment in moments:
        assert runs.kill_when(moment, "run", recipe, "--name", "x", root=root)
    runs.finish("run", recipe, "--name", "x", root=root)
    assert all_digests(root, "x") == all_digests(calm, "x")


def test_killed_with_a_critic(runs, tmp_path):
    """At the values, within the first update that moves both, and behind a replay of it."""
    recipe = write_recipe(
        tmp_path,
        make_tiny_model(tmp_path / "model"),
        algorithm={"name": "ppo", "reward_kl_coefficient": 0.01},
        critic={"learning_rate": 0.01, "warmup_steps": 1},
        evaluation__every=0,
    )
    calm, root = tmp_path / "calm", tmp_path / "killed"
    runs.finish("run", recipe, "--name", "x", root=calm)
    moments = [
        lambda: list(root.glob("store/token_scores/*/manifest.json")),
        lambda: (root / "runs/x/ledger/main.00002.advantages.0.json").exists(),
        lambda: (root / "runs/x/ledger/main.00003.token-scores.0.json").exists(),
        lambda: (root / "runs/x/ledger/main.00004.advantages.0.json").exists(),
    ]
    for moment in moments:
        assert runs.kill_when(moment, "run", recipe, "--name", "x", root=root)
    runs.finish("run", recipe, "--name", "x", root=root)
    assert all_digests(root, "x") == all_digests(calm, "x")
    last = sorted((root / "checkpoints").glob("*/critic/*"))
    assert [path.read_bytes() for path in last] == [
        (calm / path.relative_to(root)).read_bytes() for path in last if (calm / path.relative_to(root)).exists()
    ]


@pytest.mark.parametrize("damaged", [["optimizer.safetensors"], ["model.safetensors", "state.json"]])
def test_altered_checkpoints_are_set_aside_and_their_policies_replayed(runs, tmp_path, damaged):
    """Checkpoints of versions 2 and 4: with the newest altered the run goes on from 2, with both from the model."""
    recipe = write_recipe(
        tmp_path, make_tiny_model(tmp_path / "model"), steps=5, training__checkpoint_every=2, evaluation__every=0
    )
    calm, root = tmp_path / "calm", tmp_path / "killed"
    runs.finish("run", recipe, "--name", "x", root=calm)
    fifth = root / "runs/x/ledger/main.00005.rollouts.0.json"
    assert runs.kill_when(fifth.exists, "run", recipe, "--name", "x", root=root)
    policies = [entry.policy.policy_id for entry in Ledger(root / "runs/x").entries("checkpoint")]
    assert len(policies) == 2
    for policy, file in zip(reversed(policies), damaged, strict=False):
        flip_a_byte(root / "checkpoints" / policy / file)
    said = len(runs.log.read_text())
    runs.finish("run", recipe, "--name", "x", root=root)
    assert all_digests(root, "x") == all_digests(calm, "x")
    said = runs.log.read_text()[said:]
    assert said.count("is set aside") == len(damaged) == len(list((root / "damaged").iterdir()))
    assert said.count("replayed in") == 2 * len(damaged)


def test_the_real_model_killed_three_times(smollm2, runs, tmp_path):
    recipe = write_recipe(
        tmp_path / "recipe",
        smollm2,
        steps=2,
        model__dtype="auto",
        rollout__prompts_per_step=3,
        rollout__block_groups=1,
        rollout__group_size=2,
        training__learning_rate=1e-5,
        evaluation__every=0,
    )
    calm, root = tmp_path / "calm", tmp_path / "killed"
    runs.finish("run", recipe, "--name", "x", root=calm)
    moments = [  # within generation, at the first update, within the second step
        lambda: list(root.glob("store/rollouts/*/part-00001.json")),
        lambda: (root / "runs/x/ledger/main.00001.update.0.json").exists(),
        lambda: len(list(root.glob("store/rollouts/*/part-00000.json"))) == 2,
    ]
    for moment in moments:
        assert runs.kill_when(moment, "run", recipe, "--name", "x", root=root)
    runs.finish("run", recipe, "--name", "x", root=root)
    assert all_digests(root, "x") == all_digests(calm, "x")
    repeated = Counter(generated_blocks(root, "x")) - Counter(generated_blocks(calm, "x"))
    assert sum(repeated.values()) <= len(moments)


def test_killed_between_own_and_expert_rounds(runs, tmp_path):
    """Experts are rounds of a step like any other: whatever is committed of them is taken up again."""
    model = make_tiny_model(tmp_path / "model")
    demonstrations = [{"prompt": f"say {number}", "completion": str(number)} for number in range(12)]
    tmp_path.joinpath("experts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in demonstrations))
    recipe = write_recipe(
        tmp_path,
        model,
        evaluation__every=0,
        algorithm={"name": "chord", "expert_warmup_steps": 2, "expert_peak": 0.5},
        experts={"source": "experts.jsonl", "per_step": 3},
    )
    calm, root = tmp_path / "calm", tmp_path / "killed"
    runs.finish("run", recipe, "--name", "x", root=calm)
    ledger = root / "runs/x/ledger"
    moments = ["00000.data.200", "00001.prompts.200", "00002.rollouts.200", "00002.rewards.200", "00003.rollouts.0"]
    for moment in moments:
        assert runs.kill_when((ledger / f"main.{moment}.json").exists, "run", recipe, "--name", "x", root=root), moment
    runs.finish("run", recipe, "--name", "x", root=root)
    assert all_digests(root, "x") == all_digests(calm, "x")
