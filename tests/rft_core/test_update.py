import math

import numpy as np
import pyarrow as pa
import pytest
import torch

from data_contracts.refs import PolicyRef
from rft_core.checkpoint import weights_digest
from rft_core.config import ModelSettings
from rft_core.errors import ContractError, TrainingDiverged
from rft_core.policy import Policy
from tests.rft_core.trainer import Trainer, gradient
from tests.rft_core.update_tables import ROOT, replaced, tables
from tests.tiny import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def expected_loss_and_gradient(folder, rollouts, advantages, name: str) -> tuple[float, torch.Tensor]:
    """On-policy GRPO or Dr. GRPO in float64, row by row with a plain forward: ratio 1, so the loss is -sum A lp with
    lp's own value taken out: per row the mean over its trained tokens and then over rows, or the sum over rows x 12."""
    policy = Policy.load(ModelSettings(path=str(folder), device="cpu", dtype="float32"), folder, seed=0)
    module = policy.module.double()
    credit = {row["rollout_id"]: row for row in advantages.to_pylist()}
    rows = [row for row in rollouts.to_pylist() if credit[row["rollout_id"]]["is_trained"]]
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        ids = torch.tensor([row["prompt_token_ids"] + row["completion_token_ids"]])
        start = len(row["prompt_token_ids"])
        logprobs = torch.log_softmax(module(ids).logits[0, start - 1 : -1] / 0.9, -1)
        chosen = logprobs.gather(-1, ids[0, start:, None])[:, 0]
        kept = chosen[torch.tensor(row["completion_mask"])]
        divisor = len(kept) if name == "grpo" else 12
        total = total - credit[row["rollout_id"]]["advantage"] * (kept - kept.detach() + 1).sum() / divisor / len(rows)
    total.backward()
    weights = dict(module.named_parameters())
    return float(total.detach()), torch.cat([weights[name].grad.flatten() for name in policy.names])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_loss_and_gradient_equal_an_independent_formulation(folder, name):
    rollouts, advantages = tables()
    loss, wanted = expected_loss_and_gradient(folder, rollouts, advantages, name)
    found, (row,) = gradient(Trainer(folder, {"name": name}, max_grad_norm=1e9), rollouts, advantages)
    assert row["loss"] == pytest.approx(loss, abs=1e-6)
    assert row["grad_norm"] == pytest.approx(float(wanted.norm()), rel=1e-5)
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert row["ratio_max"] == 1.0
    assert (row["trained_rows"], row["forward_rows"]) == (11, 10)  # 12; one not trained, one with advantage 0


@pytest.mark.parametrize("is_off_policy", [False, True])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_gradient_does_not_depend_on_the_split(folder, name, is_off_policy):
    given = tables(policy_id="other" if is_off_policy else "root", behaviour=-5.0)
    algorithm = {"name": name, "kl_coefficient": 0.1, "entropy_coefficient": 0.01}
    whole, (row,) = gradient(Trainer(folder, algorithm, micro_batch_tokens=10_000), *given)
    assert row["off_policy_rows"] == (11 if is_off_policy else 0)
    for budget, shared in ((10_000, False), (64, True), (40, False), (1, True)):
        model = {"shared_prefix": shared}
        part, (other,) = gradient(Trainer(folder, algorithm, model, micro_batch_tokens=budget), *given)
        assert (whole - part).abs().max() <= 1e-6 * whole.abs().max()
        for column in ("loss", "kl", "entropy", "grad_norm", "sampling_logp_difference_mean", "effective_sample_size"):
            expected = row[column] if row[column] is None else pytest.approx(row[column], rel=1e-5, abs=1e-6)
            assert other[column] == expected, column


def test_one_update_is_a_function_of_its_inputs(folder):
    rollouts, advantages = tables()
    order = np.random.default_rng(3).permutation(rollouts.num_rows)
    results = []
    for given in ((rollouts, advantages), (rollouts, advantages), (rollouts.take(order), advantages.take(order[::-1]))):
        trainer = Trainer(folder, mini_batches=2, epochs=2)
        torch.manual_seed(len(results))  # nothing draws from the global stream
        results.append((trainer.update(*given), weights_digest(trainer.state)))
    assert results[0] == results[1] == results[2]


def test_optimizer_steps_are_numbered_and_groups_stay_whole(folder):
    trainer = Trainer(folder, mini_batches=2, epochs=2)
    rows = trainer.update(*tables())
    assert [(row["policy_version"], row["optimizer_step"]) for row in rows] == [(1, 1), (1, 2), (1, 3), (1, 4)]
    # Groups hold 4, 3 and 4 trained rows; one epoch sees each of them once.
    for epoch in (rows[:2], rows[2:]):
        assert sum(row["trained_rows"] for row in epoch) == 11
        assert {row["trained_rows"] for row in epoch} in ({7, 4}, {8, 3})
    assert rows[0]["ratio_max"] == 1.0  # old logprobs come from the same micro-batches
    assert rows[3]["ratio_max"] != 1.0
    more = trainer.update(*tables(seed=1), before=PolicyRef("next", 1))
    assert [(row["policy_version"], row["optimizer_step"]) for row in more] == [(2, 5), (2, 6), (2, 7), (2, 8)]


def test_bfloat16_on_policy_ratio_is_one(folder):
    trainer = Trainer(folder, model={"dtype": "bfloat16"}, mini_batches=2, micro_batch_tokens=40)
    assert trainer.update(*tables())[0]["ratio_max"] == 1.0


def test_progress_counts_every_micro_batch_of_every_pass(folder):
    trainer = Trainer(folder, {"kl_coefficient": 0.1}, mini_batches=2, micro_batch_tokens=30)
    trainer.update(*tables())
    totals = {total for _, total, _ in trainer.seen}
    assert [done for done, _, _ in trainer.seen] == list(range(1, totals.pop() + 1)) and not totals
    assert {note for _, _, note in trainer.seen} == {"old logprobs", "reference logprobs", "forward and backward"}


def test_kl_needs_the_reference_and_starts_at_zero(folder):
    trainer = Trainer(folder, {"kl_coefficient": 0.1})
    (row,) = trainer.update(*tables())
    assert row["kl"] == pytest.approx(0.0, abs=1e-9)
    assert row["forward_rows"] == 11  # the KL term reads the row with advantage 0 too
    (row,) = trainer.update(*tables(policy_id="next"), before=PolicyRef("next", 1))
    assert row["kl"] > 1e-4
    (row,) = Trainer(folder).update(*tables())
    assert row["kl"] is None


def test_behaviour_logprobs_are_compared_on_policy_too(folder):
    (row,) = Trainer(folder).update(*tables(behaviour=-5.0))
    assert row["sampling_logp_difference_mean"] > 0.1 and row["effective_sample_size"] is None
    (row,) = Trainer(folder).update(*tables(policy_id="other", behaviour=-5.0))
    assert 0 < row["effective_sample_size"] <= 1
    (row,) = Trainer(folder).update(*tables())
    assert row["sampling_logp_difference_mean"] is None


@pytest.mark.parametrize(
    ("is_trained", "reason", "trained_rows"), [(False, "no_trained_tokens", 0), (True, "no_signal", 12)]
)
def test_nothing_to_learn_leaves_no_trace(folder, is_trained, reason, trained_rows):
    rollouts, advantages = tables()
    advantages = replaced(advantages, "advantage", [0.0] * 12)
    advantages = replaced(advantages, "is_trained", [is_trained] * 12)
    trainer = Trainer(folder, weight_decay=0.1)
    before = weights_digest(trainer.state)
    (row,) = trainer.update(rollouts, advantages)
    assert (row["skipped"], row["loss"], row["grad_norm"]) == (reason, 0.0, 0.0)
    assert (row["trained_rows"], row["forward_rows"]) == (trained_rows, 0)
    assert weights_digest(trainer.state) == before and trainer.state.optimizer.num_steps == 0


def test_fewer_groups_than_mini_batches_leave_empty_ones(folder):
    rows = Trainer(folder, mini_batches=5).update(*tables())
    assert [row["skipped"] for row in rows].count("no_trained_tokens") == 2 and len(rows) == 5


def test_non_finite_updates_are_skipped_and_fail_in_the_end(folder):
    trainer = Trainer(folder, max_skipped_updates=2)
    trainer.update(*tables())
    before, moments = weights_digest(trainer.state), trainer.state.optimizer.moments()
    kept = {name: tensor.clone() for name, tensor in moments.items()}
    spoilt = trainer.state.policy.compute[0].data[258].clone()
    rollouts, advantages = tables()
    trainer.state.policy.compute[0].data[258] = math.inf  # float32: the compute weights are the masters
    (row,) = trainer.update(rollouts, advantages, PolicyRef("next", 1))
    assert row["skipped"] == "non_finite_loss" and not math.isfinite(row["loss"])
    assert all(torch.equal(kept[name], tensor) for name, tensor in trainer.state.optimizer.moments().items())
    with pytest.raises(TrainingDiverged, match="learning_rate"):
        trainer.update(rollouts, advantages, PolicyRef("next", 1))
    trainer.state.policy.compute[0].data[258] = spoilt
    assert weights_digest(trainer.state) == before
    trainer.update(rollouts, advantages, PolicyRef("next", 1))
    assert trainer.state.skipped_in_a_row == 0


def test_a_non_finite_gradient_is_skipped(folder):
    trainer = Trainer(folder)
    before = weights_digest(trainer.state)
    handle = trainer.state.policy.compute[3].register_hook(lambda gradient: gradient * math.inf)
    (row,) = trainer.update(*tables())
    handle.remove()
    assert row["skipped"] == "non_finite_gradient" and math.isfinite(row["loss"])
    assert weights_digest(trainer.state) == before and trainer.state.skipped_in_a_row == 1


def test_token_advantages_take_the_place_of_the_rows(folder):
    rollouts, advantages = tables()
    lengths = [len(tokens) for tokens in rollouts["completion_token_ids"].to_pylist()]
    per_token = [[value] * n for value, n in zip(advantages["advantage"].to_pylist(), lengths, strict=True)]
    zero = replaced(replaced(advantages, "token_advantages", per_token), "advantage", [0.0] * 12)
    first, second = Trainer(folder), Trainer(folder)
    assert first.update(rollouts, advantages) == second.update(rollouts, zero)


def test_baseline_rollouts_are_left_out(folder):
    rollouts, advantages = tables()
    purposes = ["baseline", *["train"] * 11]
    (row,) = Trainer(folder).update(replaced(rollouts, "purpose", purposes), advantages.slice(1))
    assert row["trained_rows"] == 10


def test_tables_that_do_not_pair_up_are_refused(folder):
    rollouts, advantages = tables()
    trainer = Trainer(folder)
    cases = {
        "p0/00": (rollouts.slice(1), advantages),
        "p2/03": (rollouts, advantages.slice(0, 11)),
        "twice": (pa.concat_tables([rollouts, rollouts.slice(0, 1)]), advantages),
        "completion_mask must be aligned": (replaced(rollouts, "completion_mask", [[True]] * 12), advantages),
        "token_advantages must be aligned": (rollouts, replaced(advantages, "token_advantages", [[1.0]] * 12)),
        "finite": (rollouts, replaced(advantages, "advantage", [math.nan] * 12)),
    }
    before = weights_digest(trainer.state)
    for message, given in cases.items():
        with pytest.raises(ContractError, match=message):
            trainer.update(*given)
    assert weights_digest(trainer.state) == before and trainer.state.optimizer_step == 0


@pytest.mark.parametrize("model", [{}, {"dtype": "bfloat16"}, {"lora_rank": 4}, {"lora_rank": 4, "dtype": "bfloat16"}])
def test_rewarded_completions_become_likelier(folder, model):
    """Ten updates on fixed rollouts: the gap in logprob between rows of A > 0 and A < 0 must grow by far."""
    rollouts, advantages = tables()
    trainer = Trainer(folder, {"correction": "none"}, model, learning_rate=5e-3)

    def gap() -> float:
        from rft_core.train_rows import train_rows

        rows = [row for row in train_rows(rollouts, advantages, ROOT) if row.num_trained_tokens]
        found = 0.0
        with torch.no_grad():
            for batch in trainer.state.policy.micro_batches(rows, 1000):
                parts = trainer.state.policy.token_logprobs(batch, 1.0)[0].split(batch.lengths)
                signs = [np.sign(rows[index].advantages[0]) for index in batch.row_indices]
                found += sum(float(sign * part.mean()) for sign, part in zip(signs, parts, strict=True))
        return found

    before = gap()
    for _ in range(10):
        trainer.update(rollouts, advantages)
    assert gap() - before > 5.0
