"""Updates on given completions: loss and gradient against the Hugging Face model and a plain log-softmax."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import logsigmoid, softplus
from transformers import AutoModelForCausalLM

from rft_core.algorithms import ALGORITHMS
from rft_core.checkpoint import load_checkpoint, save_checkpoint, weights_digest
from rft_core.config import RolloutSettings
from rft_core.errors import ContractError
from rft_core.offline_algorithms import OFFLINE_ALGORITHMS
from rft_core.pairing import CHOSEN, REJECTED
from rft_core.policy import load_reference
from rft_core.preference_step import RunningShift
from tests.rft_core.given_tables import Given, labelled, pairs, tables_of, trajectories
from tests.rft_core.trainer import SPLITS, Trainer, gradient, in_float64
from tests.tiny import make_tiny_model

# By the record that they train on. Models with a head of scores, and pupils of a teacher, have their own tests.
CAUSAL = [
    name for name, row in OFFLINE_ALGORITHMS.items() if row.head == "causal" and not row.distillation.needs_teacher
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("other"), seed=1)


def rows_of(name: str) -> list[Given]:
    row = ALGORITHMS[name]
    if row.preference is None:
        return trajectories()
    made = labelled() if row.preference.unit == "labels" else pairs()
    return [replace(each, origin="policy") for each in made] if row.samples else made


def trainer_of(folder, name: str, model=None, reference=None, preference=None, **training) -> Trainer:
    algorithm = {"name": name} | ({"preference": preference} if preference else {})
    trainer = Trainer(folder, algorithm, model, **{"max_grad_norm": 1e9, **training})
    trainer.rollout = RolloutSettings(max_completion_tokens=12)
    if reference is not None and trainer.reference is not None:
        trainer.reference = load_reference(trainer.model, reference, None)
    return trainer


# The direct computation: one plain forward pass per row, in float64.


class Direct:
    """Rows with their summed logprobs under a policy, which carry the gradient, and under a reference."""

    def __init__(self, rows: list[Given], policy, reference):
        self.rows, self.policy, self.reference = rows, policy, reference
        self.sums = [self.logprobs(policy, row).sum() for row in rows]
        with torch.no_grad():
            self.references = [self.logprobs(reference, row).sum() for row in rows]
        self.lengths = [sum(row.mask) for row in rows]

    @staticmethod
    def logprobs(module, row: Given, prompt: list[int] | None = None) -> torch.Tensor:
        """Of the trained tokens."""
        prompt = prompt or row.prompt
        ids = torch.tensor([prompt + row.completion])
        predicted = torch.log_softmax(module(ids).logits[0, len(prompt) - 1 : -1], -1)
        return predicted.gather(-1, torch.tensor(row.completion)[:, None])[:, 0][torch.tensor(row.mask)]

    def side(self, role: str, values: list) -> torch.Tensor:
        return torch.stack(
            [torch.as_tensor(value) for row, value in zip(self.rows, values, strict=True) if row.role == role]
        )

    def ratios(self, role: str) -> torch.Tensor:
        return self.side(role, self.sums) - self.side(role, self.references)

    def averages(self, role: str) -> torch.Tensor:
        return self.side(role, self.sums) / self.side(role, self.lengths)

    def kl(self) -> float:
        """Each completion behind the prompt of the next row that has another one."""
        gaps = []
        with torch.no_grad():
            for number, row in enumerate(self.rows):
                others = [*self.rows[number:], *self.rows[:number]]
                prompt = next(other.prompt for other in others if other.prompt != row.prompt)
                gaps.append(
                    self.logprobs(self.policy, row, prompt).sum() - self.logprobs(self.reference, row, prompt).sum()
                )
        return max(0.0, float(sum(gaps)) / len(gaps))


def dpo(direct: Direct) -> torch.Tensor:
    return softplus(-0.1 * (direct.ratios(CHOSEN) - direct.ratios(REJECTED))).mean()


def mpo(direct: Direct) -> torch.Tensor:
    classifier = -logsigmoid(0.1 * direct.ratios(CHOSEN)) - logsigmoid(-0.1 * direct.ratios(REJECTED))
    return 0.8 * dpo(direct) + 0.2 * classifier.mean() - direct.averages(CHOSEN).mean()


def orpo(direct: Direct) -> torch.Tensor:
    chosen, rejected = direct.averages(CHOSEN), direct.averages(REJECTED)
    odds = [average - torch.log(1 - average.exp()) for average in (chosen, rejected)]
    return (-chosen - 0.1 * logsigmoid(odds[0] - odds[1])).mean()


def kto(direct: Direct) -> torch.Tensor:
    kl = direct.kl()
    good, bad = 0.1 * (direct.ratios(CHOSEN) - kl), 0.1 * (kl - direct.ratios(REJECTED))
    return torch.cat([1 - good.sigmoid(), 1 - bad.sigmoid()]).mean()


def bco(direct: Direct) -> torch.Tensor:
    good, bad = 0.1 * direct.ratios(CHOSEN), 0.1 * direct.ratios(REJECTED)
    shift = torch.cat([good, bad]).detach().mean()
    return torch.cat([-logsigmoid(good - shift), -logsigmoid(shift - bad)]).mean()


def sft(direct: Direct) -> torch.Tensor:
    nll = [-row.advantage * total for row, total in zip(direct.rows, direct.sums, strict=True)]
    return sum(nll) / sum(direct.lengths)


def dft(direct: Direct) -> torch.Tensor:
    total = 0.0
    for row in direct.rows:
        logprobs = direct.logprobs(direct.policy, row)
        total = total - row.advantage * (logprobs.detach().exp() * logprobs).sum()
    return total / sum(direct.lengths)


DIRECT = {"dpo": dpo, "mpo": mpo, "orpo": orpo, "kto": kto, "bco": bco, "sft": sft, "dft": dft, "online_dpo": dpo}


@pytest.mark.parametrize("name", DIRECT)
def test_loss_and_gradient_equal_a_direct_computation(folder, other_folder, name):
    rows = rows_of(name)
    module, other = (AutoModelForCausalLM.from_pretrained(path).double() for path in (folder, other_folder))
    direct = Direct(rows, module, other)
    loss = DIRECT[name](direct)
    loss.backward()
    weights = dict(module.named_parameters())
    trainer = trainer_of(folder, name, reference=other_folder)
    found, (row,) = gradient(trainer, *tables_of(rows))
    wanted = torch.cat([weights[name].grad.flatten() for name in trainer.state.policy.names])
    assert row["loss"] == row["policy_loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    assert row["grad_norm"] == pytest.approx(float(wanted.norm()), rel=1e-5)
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert row["skipped"] is None
    assert (row["kl"], row["ratio_max"], row["clip_ratio_region"]) == (None, 1.0, 0.0) or name in ("sft", "dft")


@pytest.mark.parametrize("name", ["dpo", "aot", "orpo", "mpo", "kto", "bco", "sft", "dft", "online_dpo"])
def test_gradient_does_not_depend_on_the_split(folder, other_folder, name):
    given = tables_of(rows_of(name))
    whole, (row,) = gradient(in_float64(trainer_of(folder, name, reference=other_folder)), *given)
    assert whole.abs().max() > 0
    for budget, shared in SPLITS:
        model = {"shared_prefix": shared}
        trainer = in_float64(trainer_of(folder, name, model, other_folder, micro_batch_tokens=budget))
        part, (again,) = gradient(trainer, *given)
        assert (whole - part).abs().max() <= 1e-6 * whole.abs().max()
        for column, value in row.items():
            assert again[column] == (pytest.approx(value, rel=1e-6, abs=1e-7) if isinstance(value, float) else value)


@pytest.mark.parametrize("name", ["dpo", "kto", "sft", "online_dpo"])
def test_mini_batches_and_epochs_see_every_row_once_each(folder, name):
    given = rows_of(name)
    trainer = trainer_of(folder, name, mini_batches=2, epochs=3, micro_batch_tokens=40, learning_rate=1e-12)
    rows = trainer.update(*tables_of(given))
    assert len(rows) == 6 and all(row["skipped"] is None for row in rows)
    for epoch in (rows[:2], rows[2:4], rows[4:]):
        assert sum(row["trained_rows"] for row in epoch) == len(given)
    totals = {total for _, total, _ in trainer.seen}
    assert [done for done, _, _ in trainer.seen] == list(range(1, totals.pop() + 1)) and not totals


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("dpo", math.log(2)),
        ("dpo_norm", math.log(2)),
        ("kto", 0.5),
        ("bco", math.log(2)),
        ("hinge", 1.0),
        ("ipo", 25.0),
    ],
)
def test_a_policy_that_is_its_reference_has_the_known_loss_in_every_mini_batch_of_every_epoch(folder, name, loss):
    # Rows of an epoch meet in other mini-batches than before: each must still find its own reference.
    trainer = trainer_of(folder, name, mini_batches=2, epochs=4, learning_rate=1e-12)
    for row in trainer.update(*tables_of(rows_of(name))):
        assert row["loss"] == pytest.approx(loss, abs=2e-5)
        assert row["rewards_margin"] == pytest.approx(0.0, abs=1e-5) or row["rewards_margin"] is None


@pytest.mark.parametrize("model", [{}, {"dtype": "bfloat16"}, {"lora_rank": 4}, {"lora_rank": 4, "dtype": "bfloat16"}])
@pytest.mark.parametrize("name", ["dpo", "online_dpo"])
def test_the_first_loss_of_dpo_is_ln_2_and_its_margin_0(folder, name, model):
    trainer = trainer_of(folder, name, model, micro_batch_tokens=40)
    (row,) = trainer.update(*tables_of(rows_of(name)))
    assert row["loss"] == pytest.approx(math.log(2), abs=1e-12)
    assert (row["rewards_margin"], row["rewards_chosen"], row["rewards_rejected"]) == (0.0, 0.0, 0.0)
    assert row["rewards_accuracy"] == 0.0
    (row,) = trainer.update(*tables_of(rows_of(name)))
    assert row["rewards_margin"] > 0 and row["loss"] < math.log(2)


def test_metrics_are_those_of_the_direct_computation(folder, other_folder):
    rows = pairs()
    module, other = (AutoModelForCausalLM.from_pretrained(path).double() for path in (folder, other_folder))
    direct = Direct(rows, module, other)
    (row,) = trainer_of(folder, "dpo", reference=other_folder).update(*tables_of(rows))
    margins = 0.1 * (direct.ratios(CHOSEN) - direct.ratios(REJECTED)).detach()
    wanted = {
        "rewards_chosen": 0.1 * direct.ratios(CHOSEN).mean(),
        "rewards_rejected": 0.1 * direct.ratios(REJECTED).mean(),
        "rewards_margin": margins.mean(),
        "rewards_accuracy": (margins > 0).double().mean(),
        "logps_chosen": direct.side(CHOSEN, direct.sums).mean(),
        "logps_rejected": direct.side(REJECTED, direct.sums).mean(),
    }
    assert {name: row[name] for name in wanted} == pytest.approx(
        {name: value.item() for name, value in wanted.items()}, abs=1e-4
    )
    assert (row["trained_rows"], row["forward_rows"]) == (8, 8)


@pytest.mark.parametrize("name", ["dpo", "orpo", "kto", "sft"])
def test_a_row_of_weight_2_counts_like_two_equal_rows(folder, other_folder, name):
    rows = rows_of(name)
    twins = [replace(row, group=f"{row.group}-twin") for row in rows if row.group.endswith("1")]
    weighted = tables_of(rows, {row.group: 2.0 for row in rows if row.group.endswith("1")})
    found, (one,) = gradient(in_float64(trainer_of(folder, name, reference=other_folder)), *weighted)
    wanted, (two,) = gradient(in_float64(trainer_of(folder, name, reference=other_folder)), *tables_of([*rows, *twins]))
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-6)
    assert (found - wanted).abs().max() <= 1e-6 * wanted.abs().max()


def test_rows_of_reward_0_need_no_pass_and_are_counted(folder):
    (row,) = trainer_of(folder, "sft").update(*tables_of(trajectories()))
    assert (row["trained_rows"], row["forward_rows"]) == (5, 4)
    assert {note for _, _, note in trainer_of(folder, "sft").seen} <= {"forward and backward"}


def test_a_preference_takes_one_pass_more_and_no_old_logprobs(folder):
    trainer = trainer_of(folder, "orpo", micro_batch_tokens=30)
    trainer.update(*tables_of(pairs()))
    notes = [note for _, _, note in trainer.seen]
    assert set(notes) == {"preference logprobs", "forward and backward"}
    assert notes.count("preference logprobs") == notes.count("forward and backward") > 1


def test_going_on_from_a_checkpoint_keeps_the_shift(folder, tmp_path):
    trainer, restored = trainer_of(folder, "bco"), trainer_of(folder, "bco")
    given = tables_of(labelled())
    for _ in range(2):
        trainer.update(*given)
    assert trainer.state.shift.count == 10.0 and trainer.state.shift.mean != 0.0
    save_checkpoint(trainer.state, tmp_path)
    load_checkpoint(restored.state, tmp_path)
    assert restored.state.shift == trainer.state.shift
    assert trainer.update(*given) == restored.update(*given)
    assert weights_digest(trainer.state) == weights_digest(restored.state)
    assert restored.state.shift == trainer.state.shift
    lost = trainer_of(folder, "bco")
    load_checkpoint(lost.state, tmp_path)
    lost.state.shift = RunningShift()
    assert lost.update(*given) != restored.update(*given)


@pytest.mark.parametrize("name", ["bco", "dpo", "kto", "orpo", "sft"])
def test_a_loss_that_is_not_finite_is_skipped_without_a_trace(folder, name):
    trainer = trainer_of(folder, name)
    given = tables_of(rows_of(name))
    trainer.update(*given)
    digest, shift, steps = weights_digest(trainer.state), trainer.state.shift, trainer.state.optimizer.num_steps
    spoilt = trainer.state.policy.compute[0].data[258].clone()
    trainer.state.policy.compute[0].data[258] = math.inf  # float32: the compute weights are the masters
    (row,) = trainer.update(*given)
    trainer.state.policy.compute[0].data[258] = spoilt
    assert row["skipped"] == "non_finite_loss" and not math.isfinite(row["loss"])
    assert weights_digest(trainer.state) == digest
    assert (trainer.state.shift, trainer.state.optimizer.num_steps) == (shift, steps)


def test_a_gradient_that_is_not_finite_leaves_the_shift(folder):
    trainer = trainer_of(folder, "bco")
    handle = trainer.state.policy.compute[3].register_hook(lambda gradient: gradient * math.inf)
    (row,) = trainer.update(*tables_of(labelled()))
    handle.remove()
    assert row["skipped"] == "non_finite_gradient" and trainer.state.shift == RunningShift()


def test_what_cannot_be_compared_is_refused(folder):
    rollouts, advantages = tables_of(pairs())
    with pytest.raises(ContractError, match="the first that is not: p0"):
        trainer_of(folder, "dpo").update(rollouts.slice(1), advantages.slice(1))
    one_prompt = [replace(row, prompt=[5, 6, 7]) for row in labelled()]
    with pytest.raises(ContractError, match="at least 2 different prompts"):
        trainer_of(folder, "kto").update(*tables_of(one_prompt))
    trainer_of(folder, "bco").update(*tables_of(one_prompt))


@pytest.mark.parametrize("name", CAUSAL)
def test_updates_move_the_policy_the_way_it_is_told(folder, name):
    rows = rows_of(name)
    trainer = trainer_of(folder, name, learning_rate=3e-3, max_grad_norm=1.0)

    def likes() -> float:
        """Credit times logprob: what every objective raises on its own rows."""
        with torch.no_grad():
            module = trainer.state.policy.module
            return float(sum(row.advantage * Direct.logprobs(module, row).sum() for row in rows))

    before = likes()
    made = [trainer.update(*tables_of(rows))[0] for _ in range(5)]
    assert all(row["skipped"] is None for row in made)
    assert likes() > before + 0.5
    if name not in ("dft", "discopop"):  # -p log p rises from p = 0 on; discopop has a hump above a margin of 0
        assert made[-1]["loss"] < made[0]["loss"]
    if ALGORITHMS[name].preference is not None:
        assert made[-1]["rewards_margin"] > made[0]["rewards_margin"]
