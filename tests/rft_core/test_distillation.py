"""What is learnt from a teacher: credit by its logprobs, and the divergence of whole distributions in the update."""

from __future__ import annotations

import json

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from rft_core import policy as policy_module
from rft_core.algorithm_settings import AlgorithmSettings
from rft_core.config import ModelSettings, Recipe
from rft_core.credit import compute_advantages
from rft_core.distillation import refuse_other_layout
from rft_core.errors import ContractError, SettingsError
from rft_core.policy import Policy
from rft_core.resolve import resolve_algorithm
from rft_core.vocabulary import refuse_other_vocabulary
from tests.rft_core.credit_tables import tables as credit_tables
from tests.rft_core.test_token_credit import row, scores
from tests.rft_core.trainer import SPLITS, Trainer, gradient
from tests.rft_core.update_tables import replaced, tables
from tests.tiny import make_tiny_model

GKD = {"name": "gkd"}
REWARD = {"functions": [{"name": "exact_match"}]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return make_tiny_model(folder / "policy"), make_tiny_model(folder / "teacher", seed=5)


def teacher_of(folder, **settings) -> Policy:
    return Policy.load(
        ModelSettings(path=str(folder), device="cpu", dtype="float32", **settings), folder, 0, trainable=False
    )


# Credit


def taught(rows, gaps, **settings):
    """Old is -1 everywhere, the teacher -1 + gap."""
    by_teacher = scores({name: [-value for value in gap] for name, gap in gaps.items()})
    names = ["teacher" if name == "reference" else name for name in by_teacher["scorer"].to_pylist()]
    table, metrics = compute_advantages(
        *credit_tables(*rows), AlgorithmSettings(**settings), 10, 0, token_scores=replaced(by_teacher, "scorer", names)
    )
    return table.to_pylist(), metrics


OPD = {"name": "on_policy_distillation"}
GAPS = {"a": [0.5, -0.25, 1.0], "b": [0.25, 0.0, -0.5]}


def test_the_gap_is_all_the_credit_and_rewards_are_optional():
    rows = [row("a", None, [True, False, True]), row("b", 1.0, [True, True, True])]
    (a, b), metrics = taught(rows, GAPS, **OPD, distillation={"teacher_gap": 2.0})
    assert a["token_advantages"] == [1.0, 0.0, 2.0] and a["advantage"] == 1.5  # 2 x gap, where the policy wrote
    assert b["token_advantages"] == [0.5, 0.0, -1.0] and b["advantage"] == pytest.approx(-1 / 6)
    assert (a["drop_reason"], a["is_trained"], b["is_trained"]) == ("none", True, True)
    assert metrics["share/unscored"] == 0.0 and metrics["reward"] == 1.0


def test_without_any_reward_there_is_no_metric_of_it():
    rows = [row("a", None, [True] * 3), row("b", None, [True] * 3, "h")]
    found, metrics = taught(rows, GAPS, **OPD)
    assert [one["token_advantages"] for one in found] == [GAPS["a"], GAPS["b"]]
    assert "reward" not in metrics and metrics["rows_trained"] == 2


def test_the_gap_is_added_to_the_credit_of_rewards():
    # Group mean: 1 - .5 and 0 - .5. A flat group has no credit by rewards, but its gap: no reason to say it has none.
    rows = [
        row("a", 1.0, [True] * 3),
        row("b", 0.0, [True] * 3),
        row("c", 1.0, [True], "h"),
        row("d", 1.0, [True], "h"),
    ]
    gaps = {**GAPS, "c": [1.0], "d": [-1.0]}
    algorithm = {"name": "dr_grpo", "distillation": {"teacher_gap": 0.1}}
    found, _ = taught(rows, gaps, **algorithm)
    assert found[0]["token_advantages"] == pytest.approx([0.55, 0.475, 0.6])
    assert found[1]["token_advantages"] == pytest.approx([-0.475, -0.5, -0.55])
    assert [one["token_advantages"] for one in found[2:]] == [pytest.approx([0.1]), pytest.approx([-0.1])]
    assert {one["drop_reason"] for one in found} == {"none"}
    dropped, _ = taught(
        [*rows, row("e", None, [True])], {**gaps, "e": [1.0]}, name="dr_grpo", distillation={"teacher_gap": 0.1}
    )
    assert (dropped[-1]["drop_reason"], dropped[-1]["token_advantages"]) == ("unscored", None)


def test_masked_errors_and_missing_scores():
    failed = row("a", None, [True] * 3) | {"status": "error", "error_reason": "x"}
    cut = row("b", None, [True] * 3) | {"finish_reason": "length"}
    found, _ = taught([failed, cut], GAPS, **OPD, truncated="mask")
    assert [one["drop_reason"] for one in found] == ["unscored", "truncated"]
    assert [one["token_advantages"] for one in found] == [None, None]
    arguments = (*credit_tables(row("a", 1.0, [True])), AlgorithmSettings(**OPD), 10, 0)
    with pytest.raises(ContractError, match=r"must hold old and teacher of \('a', 0\), found \['old', 'reference'\]"):
        compute_advantages(*arguments, token_scores=scores({"a": [1.0]}))
    with pytest.raises(ContractError, match="must be aligned"):
        taught([row("a", 1.0, [True] * 4)], {"a": [1.0]}, **OPD)
    with pytest.raises(ContractError, match="a teacher's credit needs token_scores, got none"):
        compute_advantages(*arguments)


def test_credit_asks_the_scorers_that_it_needs():
    def scorers(**settings):
        return resolve_algorithm(AlgorithmSettings(**settings)).credit_scorers

    assert scorers(**OPD) == ("old", "teacher")
    assert scorers(name="rloo", distillation={"teacher_gap": 1.0}) == ("old", "reference", "teacher")
    assert scorers(**GKD) == scorers(name="grpo") == ()


# The divergence, inside the update


def by_models(trainer, teacher, rollouts, advantages, beta):
    """(loss, gradient) by transformers' own logits, in float64, a row at a time."""
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64) for folder in (trainer, teacher)]
    weights = {one["rollout_id"]: one for one in advantages.to_pylist()}
    total, count = 0.0, 0.0
    for rollout in rollouts.to_pylist():
        credit = weights[rollout["rollout_id"]]
        if not credit["is_trained"]:
            continue
        ids = torch.tensor([[*rollout["prompt_token_ids"], *rollout["completion_token_ids"]]])
        start, mask = len(rollout["prompt_token_ids"]) - 1, torch.tensor(rollout["completion_mask"])
        s, t = (torch.softmax(model(ids).logits[0, start:-1] / 0.9, -1)[mask] for model in models)
        t = t.detach()
        m = beta * t + (1 - beta) * s
        if beta == 0:
            parts = (t * (t / s).log()).sum()
        elif beta == 1:
            parts = (s * (s / t).log()).sum()
        else:
            parts = beta * (t * (t / m).log()).sum() + (1 - beta) * (s * (s / m).log()).sum()
        total = total + credit["weight"] * parts
        count += credit["weight"] * len(s)
    loss = total / count
    loss.backward()
    grads = {name: weight.grad for name, weight in models[0].named_parameters()}
    return loss.item(), grads


class Taught(Trainer):
    def __init__(self, folder, teacher, algorithm=None, **training):
        super().__init__(folder, {**GKD, **(algorithm or {})}, **training)
        self.teacher = teacher_of(teacher)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_loss_and_gradient_are_those_of_the_two_models(folders, beta):
    rollouts, advantages = tables()
    weights = [1.0 + index % 2 for index in range(advantages.num_rows)]
    advantages = replaced(advantages, "weight", weights)
    trainer = Taught(*folders, {"distillation": {"beta": beta}})
    wanted, grads = by_models(*folders, rollouts, advantages, beta)
    found, (made,) = gradient(trainer, rollouts, advantages)
    assert made["loss"] == made["distillation_loss"] == pytest.approx(wanted, rel=1e-5)
    assert made["policy_loss"] == 0.0 and made["skipped"] is None and made["forward_rows"] == made["trained_rows"]
    flat = torch.cat([grads[name].flatten() for name in trainer.state.policy.names])
    flat = flat * min(1.0, 1.0 / flat.norm())  # as the optimizer scales it
    assert (found - flat).abs().max() <= 1e-5 * flat.abs().max()


@pytest.mark.parametrize("top_k", [None, 4])
def test_neither_split_nor_pieces_matter(folders, top_k, monkeypatch):
    algorithm = {"distillation": {"top_k": top_k}}
    found = []
    for budget, shared in SPLITS[:3]:
        trainer = Taught(*folders, algorithm, micro_batch_tokens=budget)
        trainer.state.policy.shared_prefix = shared
        found.append(gradient(trainer, *tables()))
    monkeypatch.setattr(policy_module, "MAX_LOGITS", 259 * 16)  # 16 rows at once
    found.append(gradient(Taught(*folders, algorithm), *tables()))
    (first, (made,)), *others = found
    for other, (again,) in others:
        assert again["loss"] == pytest.approx(made["loss"], rel=1e-6)
        assert (other - first).abs().max() <= 1e-6 * first.abs().max()


def test_a_teacher_that_is_the_policy_teaches_exactly_nothing(folders):
    trainer = Taught(folders[0], folders[0])
    before = trainer.weights
    (made,) = trainer.update(*tables())
    assert (made["loss"], made["grad_norm"]) == (0.0, 0.0)
    assert all(torch.equal(one, other) for one, other in zip(before, trainer.weights, strict=True))


def test_updates_come_nearer_to_the_teacher(folders):
    trainer = Taught(*folders, mini_batches=2, epochs=2)
    made = [one["loss"] for _ in range(3) for one in trainer.update(*tables())]
    assert made[-1] < 0.8 * made[0]


def test_given_rows_are_distilled_too(folders):
    rollouts, advantages = tables()
    given = replaced(advantages, "term", ["expert"] * advantages.num_rows)
    own, expert = (Taught(*folders).update(rollouts, credit)[0]["loss"] for credit in (advantages, given))
    assert own == expert


def test_a_critic_on_the_policys_trunk_learns_beside_it(folders):
    """The three losses are summed, and each is what it is without the others."""
    shared = {"critic": {"shared_trunk": True}}
    (teaching,) = Taught(*folders, {"distillation": {"beta": 0.0}}).update(*tables())
    (valuing,) = Trainer(folders[0], {"name": "ppo"}, **shared).update(*tables())
    (both,) = Taught(*folders, {"name": "ppo", "distillation": {"coefficient": 0.5, "beta": 0.0}}, **shared).update(
        *tables()
    )
    assert both["value_loss"] == pytest.approx(valuing["value_loss"], rel=1e-6) and both["value_loss"] > 0
    assert both["distillation_loss"] == pytest.approx(teaching["distillation_loss"], rel=1e-6)  # before its coefficient
    assert both["loss"] == pytest.approx(valuing["loss"] + 0.5 * teaching["loss"], rel=1e-6)


def test_it_adds_to_a_policy_loss(folders):
    alone = Taught(*folders, {"distillation": {"beta": 0.0}}).update(*tables())[0]["loss"]
    policy = Trainer(folders[0], {"name": "dapo", "dynamic_sampling": False}).update(*tables())[0]["loss"]
    both = {"name": "dapo", "dynamic_sampling": False, "distillation": {"coefficient": 0.5, "beta": 0.0}}
    (made,) = Taught(*folders, both).update(*tables())
    assert made["loss"] == pytest.approx(policy + 0.5 * alone, rel=1e-6)
    assert (made["policy_loss"], made["distillation_loss"]) == (pytest.approx(policy), pytest.approx(alone, rel=1e-6))


def test_an_update_without_its_teacher_is_refused(folders):
    with pytest.raises(ContractError, match="algorithm gkd needs a teacher in its update, got none"):
        Trainer(folders[0], GKD).update(*tables())


# What does not fit


def test_another_vocabulary_is_refused_by_both_names(folders, tmp_path):
    policy, teacher = folders
    refuse_other_vocabulary(policy, teacher)
    other = make_tiny_model(tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(
        SettingsError, match=r"other has 259 tokens, .*policy has 259; .* differs is 'a', id 68 against 67"
    ):
        refuse_other_vocabulary(policy, other)


def test_a_teacher_with_fewer_logits_is_refused(folders, tmp_path):
    wider = make_tiny_model(tmp_path / "wider")
    config = json.loads((wider / "config.json").read_text())
    (wider / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    refuse_other_vocabulary(folders[0], wider)  # padded further: its last logits are left out
    with pytest.raises(SettingsError, match=r"is 259, of .*wider 300"):
        refuse_other_vocabulary(wider, folders[0])


def test_a_teacher_that_cannot_share_prompts_needs_a_policy_that_does_not(folders):
    policy, teacher = teacher_of(folders[0]), teacher_of(folders[1], shared_prefix=False)
    refuse_other_layout(policy, teacher)  # packed rows are for all who know how
    teacher.is_packed = False
    with pytest.raises(SettingsError, match="must be computed on packed rows as the policy's is"):
        refuse_other_layout(policy, teacher)
    policy.is_packed = False
    with pytest.raises(
        SettingsError, match=r"shared_prefix must be false with this teacher: .* up to 512 tokens, .* 0"
    ):
        refuse_other_layout(policy, teacher)
    refuse_other_layout(teacher, policy)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"name": "grpo", "distillation": {"beta": 0.1}}, "distillation.beta has no effect: its coefficient is 0"),
        ({**OPD, "distillation": {"top_k": 5}}, "distillation.top_k has no effect"),
        ({"name": "sft", "distillation": {"teacher_gap": 0.1}}, "teacher_gap has no effect: sft gives no credit"),
        ({"name": "dpo", "distillation": {"coefficient": 1.0}}, "must be null for dpo"),
        (
            {"name": "process_reward_model", "distillation": {"coefficient": 1.0}},
            "must be null for process_reward_model",
        ),
        ({"name": "grpo", "advantage": "teacher_gap"}, "teacher_gap must be above 0 with advantage teacher_gap"),
        ({**GKD, "distillation": {"coefficient": 0.0}}, "coefficient must be above 0 for gkd"),
        ({**GKD, "kl_coefficient": 0.1}, "kl_coefficient must be 0 for gkd, got 0.1"),
        ({**GKD, "advantage": "group_mean"}, "algorithm.advantage has no effect: gkd learns from a teacher"),
        ({**OPD, "reward_clip_low": 0.0}, "algorithm.reward_clip_low has no effect: on_policy_distillation learns"),
        ({**OPD, "dynamic_sampling": True}, "algorithm.dynamic_sampling has no effect"),
        ({**OPD, "reward_kl_coefficient": 0.1}, "algorithm.reward_kl_coefficient has no effect"),
        ({**GKD, "clip_low": 0.1}, "algorithm.clip_low has no effect: gkd takes no ratio"),
    ],
)
def test_senseless_combinations_are_refused(algorithm, message):
    with pytest.raises(SettingsError, match=message):
        resolve_algorithm(AlgorithmSettings(**algorithm))


def recipe(algorithm, **sections) -> Recipe:
    model = {"path": "m"}
    values = {"steps": 1, "model": model, "data": {"source": "p.jsonl"}, "evaluation": {"every": 0}}
    return Recipe(**values | {"algorithm": algorithm} | sections)


@pytest.mark.parametrize(
    ("algorithm", "sections", "message"),
    [
        (GKD, {}, "teacher.path must name a model for algorithm gkd, which learns from it"),
        (
            {"name": "grpo"},
            {"teacher": {"path": "t"}, "reward": REWARD},
            "teacher.path has no effect: algorithm grpo",
        ),
        ({"name": "grpo"}, {"teacher": {"dtype": "float32"}, "reward": REWARD}, "teacher.dtype has no effect"),
        (
            OPD,
            {"teacher": {"path": "t"}, "evaluation": {"every": 1}, "data": {"source": "p", "heldout_fraction": 0.1}},
            "evaluation.every needs reward.functions",
        ),
        (OPD, {"teacher": {"path": "t"}, "data": {"source": "p", "order": "targeted"}}, "data.order targeted needs"),
        ({"name": "grpo"}, {}, "reward.functions must name what is rewarded"),
    ],
)
def test_recipes_that_do_not_fit_are_refused(algorithm, sections, message):
    with pytest.raises((ValidationError, SettingsError), match=message):
        recipe(algorithm, **sections)


def test_a_recipe_may_have_a_teacher_and_no_rewards():
    for algorithm in (GKD, OPD):
        assert recipe(algorithm, teacher={"path": "t"}).reward.functions == []
    made = recipe({"name": "grpo", "distillation": {"teacher_gap": 0.1}}, teacher={"path": "t"}, reward=REWARD)
    assert resolve_algorithm(made.algorithm).reads_rewards
    with pytest.raises(SettingsError, match=r"reward.functions must name what says how good"):
        _ = recipe(GKD, teacher={"path": "t"}).correct_component
