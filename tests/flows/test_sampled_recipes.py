"""The shipped recipes of policy gradients, two steps of each: which rows train, credit and the first loss by hand or by
the Hugging Face model itself, and that the weights moved."""

from __future__ import annotations

import itertools
import math
import statistics
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from data_contracts.ledger import Ledger
from flows.train import train
from rft_core.recipes import load_recipe
from tests.faults.harness import REWARD
from tests.flows.small_runs import SMALL, Row, logprobs, rows, table
from tests.tiny import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_server")]
FEW = ["data.size=60", "rollout.prompts_per_step=4", "rollout.max_completion_tokens=6"]
KEPT = ["training.checkpoint_every=1", "evaluation.every=0"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def run(root: Path, model: Path, recipe: str, *overrides: str) -> None:
    (root / "rewards.py").write_text(REWARD)
    reward = f"reward.functions.0={{name: custom, path: {root}/rewards.py:low_letters, label: numeric_answer}}"
    train(
        recipe=load_recipe(recipe, [*SMALL, *FEW, *KEPT, f"model.path={model}", reward, *overrides]),
        run="x",
        root=str(root),
    )


def groups(made: list[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in made:
        found.setdefault(row["group_id"], []).append(row)
    return found


def folder_of(root: Path, step: int) -> Path:
    policy = {entry.step: entry.policy for entry in Ledger(root / "runs/x").entries("checkpoint")}[step]
    return root / "checkpoints" / policy.policy_id


def assert_trained(root: Path, model: Path, made: list[Row], num_rows: int) -> None:
    """Every row of a group with a spread is trained and no other; and the weights moved."""
    assert len(made) == num_rows
    for group in groups(made).values():
        rewards = [row["reward"] for row in group]
        has_signal = len(group) == 1 or max(rewards) > min(rewards)
        assert {row["drop_reason"] for row in group} == {"none" if has_signal else "zero_variance"}
    assert_moved(root, model)


def assert_moved(root: Path, model: Path) -> None:
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    after = AutoModelForCausalLM.from_pretrained(folder_of(root, 2)).state_dict()
    assert max((after[name] - before[name]).abs().max().item() for name in before) > 1e-3


def zscores(made: list[Row]) -> dict[str, float]:
    """(R - mean) / (deviation with n - 1 + 1e-6) in each group."""
    found = {}
    for group in groups(made).values():
        rewards = [row["reward"] for row in group]
        mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
        spreads = max(rewards) > min(rewards)
        found.update({r["rollout_id"]: (r["reward"] - mean) / (deviation + 1e-6) if spreads else 0.0 for r in group})
    return found


def assert_credit(made: list[Row], expected: dict[str, float]) -> None:
    assert {row["rollout_id"]: row["advantage"] for row in made} == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_rloo_weighs_likelihood_by_the_lead_over_the_others(tmp_path, model):
    run(tmp_path, model, "rloo")
    made = rows(tmp_path)
    assert_trained(tmp_path, model, made, 32)
    lead = {}
    for group in groups(made).values():
        for row in group:  # the mean of the seven others; the first policy is its reference, so there is no KL yet
            others = [other["reward"] for other in group if other is not row]
            lead[row["rollout_id"]] = row["reward"] - statistics.mean(others)
    assert_credit(made, lead)
    module = AutoModelForCausalLM.from_pretrained(model)
    by_hand = [-lead[row["rollout_id"]] * float(logprobs(module, row).sum()) for row in made]
    (update,) = table(tmp_path, 1, "update", "updates")
    assert update["loss"] == pytest.approx(statistics.mean(by_hand), rel=1e-4)


def test_reinforce_plus_plus_standardises_over_the_step(tmp_path, model):
    run(tmp_path, model, "reinforce_plus_plus", "rollout.prompts_per_step=16")
    made = rows(tmp_path)
    assert_trained(tmp_path, model, made, 16)
    # Undiscounted and without KL yet, the return of each of a row's tokens is its reward.
    returns = [row["reward"] for row in made for _ in row["completion_token_ids"]]
    mean, deviation = statistics.mean(returns), math.sqrt(statistics.variance(returns) + 1e-8)
    for row in made:
        expected = [(row["reward"] - mean) / deviation] * len(row["completion_token_ids"])
        assert row["token_advantages"] == pytest.approx(expected, abs=1e-5)
    first, second = table(tmp_path, 1, "update", "updates")
    # Half of the rows each; every ratio of the first is 1, so its loss is its mean advantage with the sign turned.
    assert first["trained_rows"] == second["trained_rows"] == 8
    assert first["ratio_max"] == 1.0 != second["ratio_max"]
    tokens = [first["trained_tokens"], second["trained_tokens"]]
    assert sum(tokens) == len(returns)
    # Which half went first was drawn: one of that many tokens has this loss, and it is not that of the whole, 0.
    credit = [((row["reward"] - mean) / deviation, len(row["completion_token_ids"])) for row in made]
    halves = [half for half in itertools.combinations(credit, 8) if sum(length for _, length in half) == tokens[0]]
    by_hand = {-sum(value * length for value, length in half) / tokens[0] for half in halves}
    assert min(abs(first["loss"] - loss) for loss in by_hand) < 1e-5 < 1e-3 < abs(first["loss"])


def test_gspo_has_one_ratio_for_a_completion(tmp_path, model):
    run(tmp_path, model, "gspo")
    made = rows(tmp_path)
    assert_trained(tmp_path, model, made, 32)
    assert_credit(made, zscores(made))
    first, second = table(tmp_path, 1, "update", "updates")
    assert first["loss"] == pytest.approx(0.0, abs=1e-6)  # ratios of 1, and advantages of whole groups sum to 0
    assert first["ratio_max"] == 1.0 and first["trained_rows"] == second["trained_rows"] == 16
    assert second["ratio_max"] != 1.0 and second["clip_ratio_region"] > 0


def test_cispo_weighs_every_token(tmp_path, model):
    run(tmp_path, model, "cispo", "training.mini_batches=1")
    made = rows(tmp_path)
    assert_trained(tmp_path, model, made, 32)
    credit = zscores(made)
    assert_credit(made, credit)
    module = AutoModelForCausalLM.from_pretrained(model)
    num_tokens = sum(len(row["completion_token_ids"]) for row in made)
    by_hand = sum(-credit[row["rollout_id"]] * float(logprobs(module, row).sum()) for row in made) / num_tokens
    (update,) = table(tmp_path, 1, "update", "updates")
    assert update["loss"] == pytest.approx(by_hand, rel=1e-4)
    assert update["trained_tokens"] == num_tokens


def test_completions_of_an_older_policy_are_weighed_by_their_ratio_to_it(tmp_path, model):
    run(tmp_path, model, "off_policy")
    for step in (1, 2):  # one step ahead: both steps are the first policy's
        made = rows(tmp_path, step)
        assert {row["policy_version"] for row in made} == {0}
        assert_trained(tmp_path, model, made, 32)
        written_by = AutoModelForCausalLM.from_pretrained(model)
        trained = AutoModelForCausalLM.from_pretrained(model if step == 1 else folder_of(tmp_path, 1))
        means = {name: statistics.mean(r["reward"] for r in group) for name, group in groups(made).items()}
        losses, weights = [], []
        for row in made:
            advantage = row["reward"] - means[row["group_id"]]
            assert row["advantage"] == pytest.approx(advantage, abs=1e-12)
            now = float(logprobs(trained, row).sum())
            weight = 1.0 if advantage > 0 else min(1.0, math.exp(now - float(logprobs(written_by, row).sum())))
            weights.append(weight)
            losses.append(-advantage * weight * now)
        (update,) = table(tmp_path, step, "update", "updates")
        assert update["loss"] == pytest.approx(statistics.mean(losses), rel=1e-3)
        assert update["off_policy_rows"] == (0 if step == 1 else 32)
        assert (min(weights) < 0.999) == (step == 2)


def test_online_dpo_sets_the_best_of_a_group_against_its_worst(tmp_path, model):
    run(tmp_path, model, "online_dpo")
    made = rows(tmp_path)
    assert len(made) == 16
    num_pairs = 0
    for group in groups(made).values():
        paired = {row["pair_role"]: row["reward"] for row in group if row["is_trained"]}
        rewards = [row["reward"] for row in group]
        if max(rewards) == min(rewards):
            assert paired == {}
            continue
        assert paired == {"chosen": max(rewards), "rejected": min(rewards)}
        assert sum(row["is_trained"] for row in group) == 2
        num_pairs += 1
    assert num_pairs
    (update,) = table(tmp_path, 1, "update", "updates")
    assert update["trained_rows"] == 2 * num_pairs
    assert update["loss"] == pytest.approx(math.log(2), abs=1e-12)  # the policy is its reference
    assert table(tmp_path, 2, "update", "updates")[0]["loss"] != pytest.approx(math.log(2), abs=1e-6)
    assert_moved(tmp_path, model)
