"""Held-out loss and margins of given completions: values by hand, intervals by an independent formulation."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

from data_contracts.errors import ContractError
from data_contracts.refs import PolicyRef
from data_contracts.schemas import RECORDS
from data_contracts.validation import check_table
from rft_core.batching import micro_batches
from rft_core.config import ModelSettings
from rft_core.given_evaluation import evaluate_given
from rft_core.policy import Policy
from tests.rft_core.rewards.tables import rollouts_table
from tests.tiny import make_tiny_model

MADE = PolicyRef("p1", 5)


class Numbers:
    """A scorer whose logprob of token t is -t / 10, or of another table."""

    def __init__(self, scale: float = -0.1, special: dict[int, float] | None = None):
        self.scale, self.special = scale, special or {}

    def micro_batches(self, rows, token_budget):
        return micro_batches(rows, token_budget, shared_prefix=False)

    def token_logprobs(self, batch, temperature):
        assert temperature == 1.0
        values = [self.special.get(token, self.scale * token) for token in batch.target_T.tolist()]
        return torch.tensor(values), torch.zeros(len(values))


def tables(*rows) -> tuple[pa.Table, pa.Table]:
    """(rollouts, rewards) from (example, index, tokens, reward), with further columns of rollouts_table."""
    rollouts = rollouts_table(
        *(
            {"prompt_id": name, "index": index, "token_ids": tokens, **(more[0] if more else {})}
            for name, index, tokens, _, *more in rows
        )
    )
    rewards, seen = [], set()
    for rollout, (_, _, _, reward, *_) in zip(rollouts.to_pylist(), rows, strict=True):
        if rollout["rollout_id"] not in seen:
            rewards.append(
                {
                    "rollout_id": rollout["rollout_id"],
                    "group_id": rollout["group_id"],
                    "reward": reward,
                    "components": [],
                    "component_status": [],
                    "status": "unscored" if reward is None else "scored",
                    "grader_digest": "given",
                }
            )
        seen.add(rollout["rollout_id"])
    return rollouts, pa.Table.from_pylist(rewards, RECORDS["rewards"].schema)


def evaluated(given, policy, reference=None, seed=0, token_budget=100) -> dict[str, dict]:
    table = evaluate_given(*given, policy, reference, MADE, 7, token_budget, seed)
    assert table.schema.equals(RECORDS["evaluations"].schema, check_metadata=True)
    check_table(table, "evaluations")
    for row in table.to_pylist():
        assert (row["policy_id"], row["policy_version"], row["step"], row["suite"]) == ("p1", 5, 7, "heldout")
        assert row["low"] <= row["value"] <= row["high"]
    return {row["metric"]: row for row in table.to_pylist()}


def test_loss_is_per_token_of_what_is_good():
    # NLL: a 1 + 2 over 2 tokens, b 4 over 1, c (its masked token left out) .5; d has reward 0: not imitated.
    given = tables(
        ("a", 0, [10, 20], 1.0),
        ("b", 0, [40], 0.5),
        ("c", 0, [5, 70], 2.0, {"mask": [True, False]}),
        ("d", 0, [90], 0.0),
    )
    found = evaluated(given, Numbers())
    assert list(found) == ["loss"]
    assert found["loss"]["value"] == pytest.approx((3.0 + 4.0 + 0.5) / 4)
    assert (found["loss"]["num_prompts"], found["loss"]["num_samples"]) == (3, 3)


def test_margins_of_pairs_by_hand():
    # log-ratios policy - reference: tokens 1 -> .5, 2 -> -.25, 3 -> 0.
    policy, reference = Numbers(special={1: -0.5, 2: -1.25, 3: -2.0}), Numbers(special={1: -1.0, 2: -1.0, 3: -2.0})
    given = tables(
        ("a", 0, [1, 1], 1.0),  # 1
        ("a", 1, [2], 0.0),  # -.25: margin 1.25
        ("b", 0, [2, 3], 1.0),  # -.25
        ("b", 1, [1], 0.0),  # .5: margin -.75
        ("c", 0, [3], 1.0),  # 0
        ("c", 1, [3], 0.0),  # 0: a tie is wrong
    )
    found = evaluated(given, policy, reference)
    assert list(found) == ["loss", "margin", "preference_accuracy", "preference_ties"]
    assert found["loss"]["value"] == pytest.approx((1.0 + 3.25 + 2.0) / 5)
    assert found["margin"]["value"] == pytest.approx((1.25 - 0.75) / 3)
    assert found["preference_accuracy"]["value"] == found["preference_ties"]["value"] == pytest.approx(1 / 3)
    assert (found["margin"]["num_prompts"], found["margin"]["num_samples"]) == (3, 6)


def test_margin_of_labels_is_between_their_means():
    policy, reference = Numbers(special={1: -0.5, 2: -1.25}), Numbers(special={1: -1.0, 2: -1.0})
    given = tables(("a", 0, [1, 1], 1.0), ("b", 0, [2], 1.0), ("c", 0, [2], 0.0), ("d", 0, [1, 2], 0.0))
    found = evaluated(given, policy, reference)
    assert list(found) == ["loss", "margin"]  # nothing is paired: no accuracy
    assert found["margin"]["value"] == pytest.approx((1.0 - 0.25) / 2 - (-0.25 + 0.25) / 2)
    assert (found["margin"]["num_prompts"], found["margin"]["num_samples"]) == (4, 4)
    one_sided = tables(("a", 0, [1], 1.0), ("b", 0, [2], 1.0))
    assert list(evaluated(one_sided, policy, reference)) == ["loss"]


def test_intervals_are_those_of_resampled_examples():
    generator = np.random.default_rng(0)
    tokens = [generator.integers(1, 60, int(generator.integers(1, 9))).tolist() for _ in range(300)]
    found = evaluated(tables(*((f"e{n:03d}", 0, each, 1.0) for n, each in enumerate(tokens))), Numbers())["loss"]
    sums, counts = np.array([sum(each) / 10 for each in tokens]), np.array([len(each) for each in tokens])
    mean = sums.sum() / counts.sum()
    # The delta method: a ratio's standard error is that of its residuals over the mean weight.
    half = 1.96 * (sums - mean * counts).std() / counts.mean() / np.sqrt(300)
    assert found["value"] == pytest.approx(mean)
    assert found["low"] == pytest.approx(mean - half, abs=0.15 * half)
    assert found["high"] == pytest.approx(mean + half, abs=0.15 * half)


def test_one_example_has_no_spread():
    found = evaluated(tables(("a", 0, [10, 20], 1.0)), Numbers())["loss"]
    assert found["low"] == found["value"] == found["high"] == pytest.approx(1.5)


def test_order_of_rows_and_the_split_change_nothing():
    given = tables(
        ("a", 0, [1, 30], 1.0), ("a", 1, [2], 0.0), ("b", 0, [9], 1.0), ("b", 1, [7], 0.0), ("c", 0, [4], 1.0),
        ("c", 1, [5, 6], 0.0),
    )  # fmt: skip
    first = evaluated(given, Numbers(), Numbers(-0.3))
    order = [4, 1, 5, 0, 3, 2]
    assert evaluated((given[0].take(order), given[1].take(order[::-1])), Numbers(), Numbers(-0.3)) == first
    assert evaluated(given, Numbers(), Numbers(-0.3), token_budget=1) == first
    assert evaluated(given, Numbers(), Numbers(-0.3), seed=1)["margin"]["value"] == first["margin"]["value"]


def test_segments_are_one_completion():
    whole = tables(("a", 0, [10, 20], 1.0), ("a", 1, [5, 6], 0.0))
    parts = tables(
        ("a", 0, [10], 1.0), ("a", 0, [20], 1.0, {"segment": 1}),
        ("a", 1, [5], 0.0), ("a", 1, [6], 0.0, {"segment": 1}),
    )  # fmt: skip
    assert evaluated(parts, Numbers(), Numbers(-0.3)) == evaluated(whole, Numbers(), Numbers(-0.3))


def test_nothing_good_or_nothing_at_all_has_no_loss():
    assert evaluated(tables(("a", 0, [1], 0.0)), Numbers()) == {}
    assert evaluated(tables(), Numbers(), Numbers()) == {}


def test_a_completion_without_reward_is_refused():
    rollouts, rewards = tables(("a", 0, [1], 1.0), ("b", 0, [2], 1.0))
    with pytest.raises(ContractError, match="do not belong together"):
        evaluated((rollouts, rewards.slice(1)), Numbers())
    with pytest.raises(ContractError, match="needs a reward"):
        evaluated(tables(("a", 0, [1], None)), Numbers())


def test_progress_counts_every_pass():
    seen = []
    given = tables(("a", 0, [1], 1.0), ("b", 0, [2, 3], 1.0))
    evaluate_given(*given, Numbers(), Numbers(), MADE, 0, 1, 0, progress=lambda *told: seen.append(told[:2]))
    assert seen == [(1, 2), (2, 2)] * 2


@pytest.mark.parametrize("model", [{"dtype": "float32"}, {"dtype": "bfloat16"}])
def test_a_policy_that_is_its_reference_has_margin_0(tmp_path, model):
    folder = make_tiny_model(tmp_path)
    settings = ModelSettings(path=str(folder), device="cpu", **model)
    policy = Policy.load(settings, folder, seed=0)
    reference = Policy.load(settings, folder, seed=0, trainable=False)
    given = tables(("a", 0, [9, 8, 7], 1.0), ("a", 1, [5, 6], 0.0), ("b", 0, [40], 1.0), ("b", 1, [50, 60], 0.0))
    found = evaluated(given, policy, reference, token_budget=8)
    assert [found[name][part] for name in ("margin", "preference_accuracy") for part in ("value", "low", "high")] == [
        0.0
    ] * 6
    assert found["preference_ties"]["value"] == 1.0
    # The loss by a plain forward pass.
    nll, tokens = 0.0, 0
    for completion in ([9, 8, 7], [40]):
        with torch.no_grad():
            logits = policy.module(torch.tensor([[1, 2, *completion]])).logits[0, 1:-1].float()
        nll -= float(torch.log_softmax(logits, -1)[range(len(completion)), completion].sum())
        tokens += len(completion)
    assert found["loss"]["value"] == pytest.approx(nll / tokens, rel=1e-5 if model["dtype"] == "float32" else 1e-2)


def test_an_example_whose_steps_were_all_cut_off_is_in_no_share():
    """Token t scores t - 10: a's step ends at token 12 (good, right) and 7 (good, wrong); b kept no step's end."""
    rollouts, rewards = tables(("a", 0, [12, 7], 1.0), ("b", 0, [11, 11], 0.5))
    steps = {"step_ends": [[0, 1], []], "step_rewards": [[1.0, 1.0], []]}
    rollouts = _with_column(rollouts, "step_ends", steps["step_ends"])
    rewards = _with_column(rewards, "step_rewards", steps["step_rewards"])
    policy = Numbers(special={12: 2.0, 7: -3.0})
    (row,) = evaluate_given(rollouts, rewards, policy, None, MADE, 7, 100, 0, "steps").to_pylist()
    assert (row["value"], row["low"], row["high"]) == (0.5, 0.5, 0.5)
    assert (row["num_prompts"], row["num_samples"]) == (1, 1)


def _with_column(table: pa.Table, name: str, values: list) -> pa.Table:
    index = table.schema.get_field_index(name)
    return table.set_column(index, name, pa.array(values, table.schema.field(name).type))
