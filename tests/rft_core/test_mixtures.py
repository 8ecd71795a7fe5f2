"""Rows of ALGORITHMS with experts beside own completions, or with a selection of these: loss, schedule, refusals."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from rft_core.algorithm_settings import AlgorithmSettings
from rft_core.algorithms import ALGORITHMS
from rft_core.config import Recipe, TrainingSettings
from rft_core.data.settings import ExpertSettings
from rft_core.errors import SettingsError
from rft_core.losses import denominators_of
from rft_core.mixed_algorithms import MIXED_ALGORITHMS
from rft_core.mixtures import ExpertShare
from rft_core.objective import finish_metrics
from rft_core.resolve import check, resolve_algorithm
from rft_core.terms import Algorithm, Term
from tests.oracle import mixtures as oracle
from tests.oracle.steps import Row, example_step, initial_weights, logprobs_of
from tests.rft_core.loss_batches import assert_any_split_agrees, assert_close, hand_batch, ours

SITUATIONS = {
    "on_policy": {"off_policy": False, "several_steps": False},
    "several_steps": {"off_policy": False, "several_steps": True},
    "off_policy_several_steps": {"off_policy": True, "several_steps": True},
}
# Advantage, then surrogate and aggregation by kind of rows (spec, section 3).
ROWS_OF_THE_SPEC = {
    "mix": ("group_zscore", {"own": ("clipped", "sequence_mean"), "expert": ("logprob", "token_mean")}),
    "chord": ("group_zscore", {"own": ("clipped", "sequence_mean"), "expert": ("uncertainty_weighted", "token_mean")}),
    "raft": ("selected", {"selected": ("logprob", "token_mean")}),
}
GIVEN = (2, 3, 9)  # rows of the example step that experts wrote, one of them of weight 2


def resolve(**settings) -> Algorithm:
    return resolve_algorithm(AlgorithmSettings(**settings))


def rows_for(name: str, **situation) -> list[Row]:
    """In a mixture a few rows are an expert's: of reward 1, sampled by no known policy, in the groups of own rows."""
    rows = example_step(**situation)
    if name == "raft":
        return [replace(row, term="selected", advantage=float(row.advantage > 0)) for row in rows]
    unknown = [np.full(len(row.mask), np.nan) for row in rows]
    return [
        replace(row, term="expert", advantage=1.0, behaviour=unknown[number], is_off_policy=True)
        if number in GIVEN
        else row
        for number, row in enumerate(rows)
    ]


def expected(name: str, rows: list[Row], share: float):
    weights = initial_weights()
    scored = [logprobs_of(row, weights) for row in rows]
    loss = oracle.loss(name, rows, [pair[0].float().double() for pair in scored], [pair[1] for pair in scored], share)
    loss.backward()
    return loss.item(), weights.grad


@pytest.mark.parametrize("name", MIXED_ALGORITHMS)
def test_rows_are_those_of_the_spec(name):
    advantage, terms = ROWS_OF_THE_SPEC[name]
    row = ALGORITHMS[name]
    assert {term.rows: (term.surrogate, term.aggregation) for term in row.terms} == terms
    assert (row.advantage, row.takes_experts, row.selects) == (advantage, name != "raft", name == "raft")
    assert row.expert_share == (None if name == "raft" else ExpertShare(0.1, 0.1, 0, 0))
    assert row.samples and row.correction.kind == "truncate" and row.kl.coefficient == 0


def test_every_row_has_an_oracle():
    assert set(MIXED_ALGORITHMS) == set(oracle.ALGORITHMS) == set(ROWS_OF_THE_SPEC)


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("name", MIXED_ALGORITHMS)
def test_value_and_gradient_equal_the_oracle(name, situation):
    rows = rows_for(name, **SITUATIONS[situation])
    loss, gradient, metrics = ours(ALGORITHMS[name], rows)
    assert_close(loss, gradient, *expected(name, rows, 0.1))
    if name != "raft":
        assert loss == pytest.approx(0.9 * metrics["own_loss"] + 0.1 * metrics["expert_loss"], rel=1e-6)
    else:
        assert metrics["own_loss"] is metrics["expert_loss"] is None


@pytest.mark.parametrize("step", [1, 2, 3, 5, 7, 8, 99])
def test_the_share_follows_its_schedule(step):
    settings = {"expert_coefficient": 0.05, "expert_peak": 0.8, "expert_warmup_steps": 3, "expert_decay_steps": 5}
    rows = rows_for("chord", **SITUATIONS["on_policy"])
    share = oracle.mu(step, 0.05, 0.8, 3, 5)
    loss, gradient, _ = ours(resolve(name="chord", **settings), rows, step=step)
    assert_close(loss, gradient, *expected("chord", rows, share))


def test_shares_by_hand():
    # Up to .6 in two steps: .3, .6; then half a cosine to .2 in four: .2 + .4 x (1 + cos(pi / 4)) / 2 = .5414, .4, ...
    share = ExpertShare(valley=0.2, peak=0.6, warmup_steps=2, decay_steps=4)
    found = [share.at(step) for step in (1, 2, 3, 4, 5, 6, 50)]
    assert found == pytest.approx([0.3, 0.6, 0.5414214, 0.4, 0.2585786, 0.2, 0.2])
    assert ExpertShare().at(1) == 0.1
    assert ExpertShare(peak=0.6, valley=0.2, warmup_steps=2).at(2) == 0.2  # no decay: the peak is passed


@pytest.mark.parametrize("name", MIXED_ALGORITHMS)
def test_any_split_into_micro_batches_gives_the_same_step(name):
    rows = rows_for(name, off_policy=True, several_steps=True)
    algorithm = resolve(name=name, entropy_coefficient=0.2, kl_coefficient=0.3)
    assert_any_split_agrees(algorithm, rows)


@pytest.mark.parametrize("kind", ["own", "expert"])
def test_a_step_of_one_kind_of_rows_is_that_loss_alone(kind):
    rows = [row for row in rows_for("mix", **SITUATIONS["several_steps"]) if row.term == kind]
    loss, gradient, metrics = ours(ALGORITHMS["mix"], rows)
    assert_close(loss, gradient, *expected("mix", rows, 0.1))
    other = {"own": "expert", "expert": "own"}[kind]
    assert metrics[f"{other}_loss"] == 0.0 and metrics[f"{kind}_loss"] != 0.0


def test_a_mixture_by_hand():
    # Own: A 1 and -1 at ratio 1, sequence means -1 and 1: their mean 0, and the experts' mean of 2, 1 and 3 is 2.
    # Gradients: own rows -1 / 2 x .9 and +1 / (2 x 2) x .9 a token; experts -1 / 3 x .1 a token.
    batch = hand_batch(
        [-1.0, -2.0, -3.0, -2.0, -1.0, -3.0],
        [1.0, -1.0, -1.0, 1.0, 1.0, 1.0],
        rows=[0, 1, 1, 2, 2, 3],
        groups=[0, 0, 1, 2],
        term_R=[0, 0, 1, 1],
    )
    over = denominators_of([1, 2, 2, 1], [0, 0, 1, 2], 8, None, ["own", "own", "expert", "expert"])
    parts = ALGORITHMS["mix"].loss(batch, over, step=1)
    assert parts.loss.item() == pytest.approx(0.2)
    parts.loss.backward()
    assert batch.logprobs_T.grad.tolist() == pytest.approx([-0.45, 0.225, 0.225, *[-0.1 / 3] * 3])
    # CHORD: p (1 - p) of e^-2, e^-1, e^-3 is .117020, .232544, .047308: (.234040 + .232544 + .141924) / 3 = .202836
    assert ALGORITHMS["chord"].loss(batch, over, step=1).loss.item() == pytest.approx(0.0202836, rel=1e-5)


def test_a_selection_by_hand():
    # Two rows of A = 1: -(-1 - 2 - 3) / 3.
    batch = hand_batch([-1.0, -2.0, -3.0], [1.0] * 3, rows=[0, 1, 1], groups=[0, 1], term_R=[2, 2])
    over = denominators_of([1, 2], [0, 1], 8, None, ["selected"] * 2)
    assert ALGORITHMS["raft"].loss(batch, over, step=1).loss.item() == pytest.approx(2.0)


def test_metrics_of_ratio_and_entropy_are_of_own_rows():
    """An expert's token has no ratio to a policy; clip shares are of the tokens that have one."""
    optional = {"old_logprobs_T": [-1.0, -2.0, -9.0, -9.0], "entropy_T": [1.0, 2.0, 50.0, 50.0]}
    batch = hand_batch([-0.5, -2.0, -1.0, -1.0], [1.0] * 4, rows=[0, 1, 2, 2], groups=[0, 0, 1], **optional)
    batch.term_R = torch.tensor([0, 0, 1])
    over = denominators_of([1, 1, 2], [0, 0, 1], 8, None, ["own", "own", "expert"])
    algorithm = resolve(name="mix", entropy_coefficient=0.5)
    parts = algorithm.loss(batch, over, step=1)
    metrics = finish_metrics([parts.sums])
    assert metrics["ratio_max"] == pytest.approx(math.exp(0.5))
    assert (metrics["clip_ratio_high"], metrics["entropy"]) == (0.5, 1.5)
    # own -(1.2 + 1) / 2 = -1.1, experts 1, bonus .5 x 1.5
    assert parts.loss.item() == pytest.approx(0.9 * -1.1 + 0.1 * 1.0 - 0.75)


def test_overrides_change_own_terms_alone():
    changed = resolve(name="mix", clip_high=0.3, aggregation="token_mean", gate="two_side", expert_coefficient=0.25)
    own, expert = changed.terms
    assert (own.clip_high, own.aggregation, own.gate) == (0.3, "token_mean", "two_side")
    assert expert == ALGORITHMS["mix"].terms[1]
    assert [changed.coefficient_of(term, 5) for term in changed.terms] == [0.75, 0.25]
    bypass = resolve(name="chord", old_source="behaviour")
    assert [term.anchor for term in bypass.terms] == ["behaviour", "old"]
    assert resolve(name="raft", surrogate="clipped").terms[0].surrogate == "clipped"


NONSENSE = [
    ({"name": "grpo", "expert_coefficient": 0.2}, "expert_coefficient has no effect: grpo weighs no experts"),
    ({"name": "sft", "expert_decay_steps": 3}, "expert_decay_steps has no effect: sft weighs no experts"),
    ({"name": "mix", "expert_peak": 0.5}, "expert_peak has no effect without expert_warmup_steps or"),
    ({"name": "chord", "expert_decay_steps": 5}, r"expert_peak is expert_coefficient \(0.1\) already"),
    ({"name": "grpo", "advantage": "selected"}, "needs a loss over selected rows, grpo has none: use name raft"),
    ({"name": "mix", "advantage": "selected"}, "needs a loss over selected rows, mix has none"),
    ({"name": "grpo", "select": "passing"}, "select has no effect with advantage group_zscore; it is read by selected"),
    ({"name": "mix", "pass_threshold": 0.5}, "pass_threshold has no effect with advantage group_zscore"),
    ({"name": "raft", "advantage": "none", "select": "passing"}, "select has no effect with advantage none"),
    ({"name": "remax", "dynamic_sampling": True}, "dynamic_sampling must be false with advantage greedy_baseline"),
    ({"name": "grpo", "duplicate_to_fill": True}, "duplicate_to_fill has no effect without dynamic_sampling"),
    ({"name": "mix", "old_source": "behaviour", "correction": "mask"}, "is to the behaviour policy itself"),
]


@pytest.mark.parametrize(("settings", "reason"), NONSENSE)
def test_nonsense_is_refused_with_its_reason(settings, reason):
    with pytest.raises(SettingsError, match=reason):
        resolve(**settings)


@pytest.mark.parametrize("name", ["mix", "chord"])
def test_experts_need_no_trust_region(name):
    several = TrainingSettings(epochs=2, mini_batches=2)
    check(ALGORITHMS[name], several)
    with pytest.raises(SettingsError, match="no trust region"):
        check(resolve(name=name, surrogate="logprob"), several)
    with pytest.raises(SettingsError, match="no trust region"):
        check(ALGORITHMS["raft"], several)
    check(resolve(name="raft", surrogate="clipped"), several)


# Whole recipes.

EXPERTS = {"source": "demonstrations.jsonl"}


def recipe(name: str, **sections) -> Recipe:
    parts = {"steps": 1, "model": {"path": "m"}, "data": {"source": "a.jsonl"}, "algorithm": {"name": name}}
    parts["reward"] = {"functions": [{"name": "exact_match"}]} if ALGORITHMS[name].samples else {}
    return Recipe.model_validate(parts | sections)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_experts_go_with_those_that_take_them(name):
    data = {"data": {"source": "a.jsonl", "record": ALGORITHMS[name].records[0]}}
    if ALGORITHMS[name].distillation.needs_teacher:
        data["teacher"] = {"path": "model"}
    if ALGORITHMS[name].takes_experts:
        assert recipe(name, experts=EXPERTS).experts.per_step == 8
        with pytest.raises(SettingsError, match=f"experts must say where the demonstrations are for algorithm {name}"):
            recipe(name, **data)
    else:
        assert recipe(name, **data).experts is None
        with pytest.raises(SettingsError, match=f"experts has no effect: {name} trains on"):
            recipe(name, **data, experts=EXPERTS)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"experts": EXPERTS, "rollout": {"temperature": 0.7}}, "temperature must be 1 for algorithm mix: .* got 0.7"),
        ({"experts": EXPERTS | {"record": "preferences"}}, "must be demonstrations or trajectories, got preferences"),
        ({"experts": EXPERTS | {"record": "prompts"}}, "must be demonstrations or trajectories, got prompts"),
        ({"experts": EXPERTS | {"heldout_fraction": 0.1}}, "evaluations ask the held-out prompts of data"),
        ({"experts": EXPERTS | {"heldout_source": "b.jsonl"}}, "evaluations ask the held-out prompts of data"),
        ({"experts": EXPERTS | {"order": "targeted"}}, "experts.order must be shuffled, sequential or difficulty"),
        ({"experts": EXPERTS | {"source_weights": {"b.jsonl": 2.0}}}, r"sources of experts \(demonstrations.jsonl\)"),
        ({"experts": EXPERTS | {"source_weights": {"demonstrations.jsonl": -1.0}}}, "greater than or equal to 0"),
        ({"experts": EXPERTS | {"per_step": 0}}, "greater than or equal to 1"),
    ],
)
def test_expert_sections_that_make_no_sense_are_refused(sections, message):
    with pytest.raises((SettingsError, ValidationError), match=message):
        recipe("mix", **sections)


def test_experts_have_no_returns_for_a_critic():
    with pytest.raises(SettingsError, match="must read no critic for algorithm mix, got gae: what experts wrote"):
        recipe("mix", experts=EXPERTS, algorithm={"name": "mix", "advantage": "gae"})


def test_experts_hold_nothing_out_by_themselves():
    assert ExpertSettings(**EXPERTS).heldout_fraction == 0.0
    assert ExpertSettings(**EXPERTS).record == "demonstrations"


def test_a_row_of_ones_own_may_take_experts():
    """Without a share the terms have the coefficients that they name."""
    terms = (Term(), Term(rows="expert", surrogate="logprob", coefficient=lambda step: 0.5 / step))
    own = replace(ALGORITHMS["mix"], terms=terms, expert_share=None)
    assert own.takes_experts and [own.coefficient_of(term, 2) for term in own.terms] == [1.0, 0.25]
