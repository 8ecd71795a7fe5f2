"""Every entry of every table of losses: value and gradient against the float64 oracle, and one number by hand."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from rft_core.algorithms import POLICY_GRADIENT_ALGORITHMS as ALGORITHMS
from rft_core.config import AlgorithmSettings
from rft_core.gates import GATES, STEP_GATES, StepTokens
from rft_core.losses import AGGREGATIONS, CORRECTIONS, KL_ESTIMATORS, LEVELS, Rows, denominators_of, ratio_of
from rft_core.objective import step_kept
from rft_core.surrogates import LIKELIHOOD_SURROGATES, REGULARIZERS, SURROGATES, Tokens
from rft_core.terms import STEP_GATES_READ_ALL, Correction, Term
from tests.oracle import losses as oracle
from tests.oracle.steps import example_step
from tests.rft_core.loss_batches import (
    EXTRAS,
    NEEDED,
    algorithm_of,
    assert_any_split_agrees,
    assert_close,
    expected,
    hand_batch,
    ours,
)

TABLES = {
    "level": (LEVELS, oracle.LEVELS),
    "gate": (GATES | STEP_GATES, oracle.GATES | oracle.STEP_GATES),
    "surrogate": (SURROGATES, oracle.SURROGATES),
    "regularizer": (REGULARIZERS, oracle.REGULARIZERS),
    "aggregation": (AGGREGATIONS, oracle.AGGREGATIONS),
    "kl_estimator": (KL_ESTIMATORS, oracle.KL_ESTIMATORS),
    "correction": (CORRECTIONS, oracle.CORRECTIONS),
}

SITUATIONS = {
    "on_policy": {"off_policy": False, "several_steps": False},
    "several_steps": {"off_policy": False, "several_steps": True},
    "off_policy": {"off_policy": True, "several_steps": False},
    "off_policy_several_steps": {"off_policy": True, "several_steps": True},
    "extreme": {"off_policy": True, "several_steps": True, "extreme": True},
}


def specs() -> dict[str, dict]:
    """One spec per entry of each table, so that a new entry is tested without touching this file."""
    entries = {
        f"{slot}={name}": {slot: name, **NEEDED.get(slot, {}), **NEEDED.get(f"{slot}={name}", {})}
        for slot, (table, _) in TABLES.items()
        for name in table
    }
    return entries | EXTRAS | {f"algorithm={name}": oracle.ALGORITHMS.get(name, {}) for name in ALGORITHMS}


def rows_for(spec: dict, **situation):
    """A term anchored at the behaviour policy needs its logprob of every token."""
    return example_step(**situation, has_nulls=spec.get("anchor") != "behaviour")


@pytest.mark.parametrize("slot", TABLES)
def test_table_oracle_and_settings_name_the_same_set(slot):
    table, oracle_table = TABLES[slot]
    assert set(table) == set(oracle_table) == set(BY_HAND[slot])
    annotation = AlgorithmSettings.model_fields[slot].annotation
    literals = {name for part in (get_args(annotation) or (annotation,)) for name in (get_args(part) or (part,))}
    names = {name for name in literals if isinstance(name, str)} - {"custom"}
    assert names == set(table) - NOT_FOR_RECIPES.get(slot, set())


# k1 has no gradient; the others are for completions that the data gives.
NOT_FOR_RECIPES = {"kl_estimator": {"k1"}, "surrogate": {"probability_weighted", "uncertainty_weighted", "logistic"}}


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("name", specs())
def test_value_and_gradient_equal_the_oracle(name, situation):
    spec = specs()[name]
    rows = rows_for(spec, **SITUATIONS[situation])
    algorithm = algorithm_of(spec)
    if name.startswith("algorithm="):
        algorithm = ALGORITHMS[name.removeprefix("algorithm=")]
    loss, gradient, _ = ours(algorithm, rows)
    assert_close(loss, gradient, *expected(spec, rows))


@pytest.mark.parametrize("name", specs())
def test_any_split_into_micro_batches_gives_the_same_step(name):
    rows = rows_for(specs()[name], off_policy=True, several_steps=True)
    algorithm = algorithm_of(specs()[name])
    assert_any_split_agrees(algorithm, rows)


# One number by hand per entry: (inputs, value).

ROWS = Rows.of(torch.tensor([True, True, False]), torch.tensor([0, 0, 1]), torch.tensor([0, 1]))
BOUNDS = Term(clip_low=0.2, clip_high=0.3, weight_cap=1.2)
LIMITS = Correction(cap=2.0, low=0.5, high=5.0)
BY_HAND = {
    # log ratios .2 and .4, the third token masked: mean .3, sum .6; with A > 0 cut at .3: .2 and .3, mean .25
    "level": {
        "token": [0.2, 0.4],
        "sequence_geometric": [0.3, 0.3],
        "sequence_product": [0.6, 0.6],
        "sequence_geometric_clipped": [0.25, 0.25],
    },
    # (ratio, A): (1.5, 1) (1.5, -1) (.1, 1) (.1, -1) (4, -1) (1.1, 1), each a row of its own
    "gate": {
        "none": [True] * 6,
        "one_side": [False, True, True, False, True, True],
        "two_side": [False, False, False, False, False, True],
        "ring": [False, False, True, False, True, True],
        # behaviour - lp = -ln ratio = 2.3 for the third and fourth, of which one has A < 0
        "off_policy_sequence": [True, True, True, False, True, True],
        # Probabilities .4 -> .6, .5 -> .05, .2 -> .8, .8 -> .88. Pushed away: tokens 1, 4 and 6. TV .2, .45, .08 with
        # limit .15; KL .4 ln(.4/.6) + .6 ln(.6/.4) = .081, .83, .8 ln(.8/.88) + .2 ln(.2/.12) = .026 with limit .05.
        "binary_tv": [False, True, True, False, True, True],
        "binary_kl": [False, True, True, False, True, True],
        # Six other tokens: STEP. Candidates' squares .01 .04 .09 .16, means .01 .025 .047: two are kept, of limit .04.
        "second_moment": [True, True, False, True, False, True],
        "entropy_quantile": [False, False, False, True, True, True],  # 1 2 3 4 5 6, median 3.5
        # mean A 1/3, mean lp -2.5: covariances 1, .33, -.33, -1, -2, 2; in .2 .. 1.5 the first two, of which the clip
        # holds the second already (ratio e^.2 = 1.22)
        "covariance_band": [False, True, True, True, True, True],
    },
    # ratio 1.5, lp -1, old -1.4, A = 2; soft gate 8 sigmoid(.5); weights 1.5, cap 1.2, 1, e^2, 1.5^2 e^-1.5
    "surrogate": {
        "clipped": -2.6,
        "unclipped": -3.0,
        "soft_gate": -4.9796746,
        "logprob": 2.0,
        "log_ratio": -0.8,
        "probability_weighted": 0.7357589,  # 2 e^-1
        "uncertainty_weighted": 0.4650883,  # 2 e^-1 (1 - e^-1)
        "logistic": 2.1269280,  # ln(1 + e^2)
        "ratio_logprob": 3.0,
        "capped": 2.4,
        "tapered": 2.0,
        "exp_advantage": 14.7781122,
        "gamma": 1.0040857,
    },
    "regularizer": {"none": 0.0, "log_likelihood": 1.0, "squared_log_ratio": 0.16, "absolute_log_ratio": 0.4},
    # losses 1 2 3 | 6 | 4 4 of rows in groups 0 0 1, budget 10. Tokens 6, rows 3, prompts 2, sum 20.
    # sequence means 2, 6, 4; prompt means 12 / 4 = 3 and 4.
    "aggregation": {
        "token_mean": 20 / 6,
        "sequence_mean": 4.0,
        "sequence_sum": 20 / 3,
        "constant_length": 20 / 30,
        "prompt_mean": 3.5,
        "token_sum": 20.0,
    },
    # d = ln 2: k3 = 1/2 - 1 + .6931
    "kl_estimator": {"k1": 0.6931472, "k2": 0.2402265, "k3": 0.1931472, "abs": 0.6931472, "k2_gradient": 0.1931472},
    # ratios .4 | .8 6 of two rows
    "correction": {
        "none": [1.0, 1.0, 1.0],
        "truncate": [0.4, 0.8, 2.0],
        "mask": [0.0, 0.8, 0.0],
        "reject": [0.0, 1.0, 0.0],
        "veto": [0.0, 0.0, 0.0],
    },
}
STEP = StepTokens(
    log_ratio_T=torch.tensor([0.1, 0.2, 0.3, -0.1, -0.4, 5.0]),
    logprobs_T=torch.tensor([-1.0, -2.0, -3.0, -4.0, -1.0, -4.0]),
    advantages_T=torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, -1.0]),
    entropy_T=torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
    mask_T=torch.ones(6, dtype=torch.bool),
    draw_T=torch.tensor([0.9, 0.1, 0.2, 0.3, 0.4, 0.5], dtype=torch.float64),
)
LIMITS_OF_GATES = {
    "binary_tv": Term(divergence_limit=0.15),
    "binary_kl": Term(divergence_limit=0.05),
    "entropy_quantile": Term(entropy_quantile=0.5),
    "covariance_band": Term(covariance_low=0.2, covariance_high=1.5),
}


def hand_value(slot: str, name: str):
    if slot == "level":
        return LEVELS[name](torch.tensor([0.2, 0.4, 9.0]), ROWS, torch.ones(3), 0.3)[:2]
    if slot == "gate" and name in STEP_GATES:
        return STEP_GATES[name](STEP, LIMITS_OF_GATES.get(name, Term()))
    if slot == "gate":
        ratios, advantages = torch.tensor([1.5, 1.5, 0.1, 0.1, 4.0, 1.1]), torch.tensor([1.0, -1, 1, -1, -1, 1])
        anchor = torch.tensor([0.4, 0.4, 0.5, 0.5, 0.2, 0.8]).log()
        tokens = Tokens(anchor + ratios.log(), anchor, ratios, advantages, anchor)
        rows = Rows.of(torch.ones(6, dtype=torch.bool), torch.arange(6), torch.zeros(6, dtype=torch.int64))
        return GATES[name](tokens, rows, LIMITS_OF_GATES.get(name, Term()))
    if slot in ("surrogate", "regularizer"):
        old = torch.tensor([-1.4])
        tokens = Tokens(torch.tensor([-1.0]), old, torch.tensor([1.5]), torch.tensor([2.0]), old)
        return SURROGATES[name](tokens, BOUNDS)[0] if slot == "surrogate" else REGULARIZERS[name](tokens)[0]
    if slot == "aggregation":
        row_T, group_R = torch.tensor([0, 0, 0, 1, 2, 2]), torch.tensor([0, 0, 1])
        rows = Rows.of(torch.ones(6, dtype=torch.bool), row_T, group_R)
        counts = denominators_of([3, 1, 2], [0, 0, 1], 10).counts["own"]
        return AGGREGATIONS[name](torch.tensor([1.0, 2, 3, 6, 4, 4]), rows, counts, 10)
    if slot == "kl_estimator":
        return KL_ESTIMATORS[name](torch.tensor(math.log(2.0)))
    two_rows = Rows.of(torch.ones(3, dtype=torch.bool), torch.tensor([0, 1, 1]), torch.tensor([0, 1]))
    return CORRECTIONS[name](torch.tensor([0.4, 0.8, 6.0]), two_rows, LIMITS)


@pytest.mark.parametrize(("slot", "name"), [(slot, name) for slot, (table, _) in TABLES.items() for name in table])
def test_numbers_by_hand(slot, name):
    assert torch.as_tensor(hand_value(slot, name)).tolist() == pytest.approx(BY_HAND[slot][name], rel=1e-5)


def test_ratio_is_clamped_and_the_pull_vanishes():
    log_ratios = torch.tensor([1000.0, -1000.0, 0.0], requires_grad=True)
    ratios = ratio_of(log_ratios)
    assert ratios.tolist() == pytest.approx([math.exp(20.0), math.exp(-20.0), 1.0])
    ratios.sum().backward()
    assert log_ratios.grad.tolist() == [0.0, 0.0, 1.0]


def test_groups_and_rows_without_a_trained_token_count_nowhere():
    # Rows of 2, 0, 0, 3 tokens in groups 0, 0, 1, 2; the last counts twice.
    counts = denominators_of([2, 0, 0, 3], [0, 0, 1, 2], 8, weight_N=[1.0, 1.0, 1.0, 2.0]).counts["own"]
    assert (counts.tokens, counts.rows, counts.prompts, counts.group_tokens) == (8.0, 3.0, 2.0, (2.0, 0.0, 6.0))
    assert denominators_of([], [], 8).tokens == 0.0


# Rows of one optimizer step: A = 1 with log ratios .1 and .5 (ratios 1.105, 1.649), A = -1 with -.3 (.741); lp is -1
# everywhere, behaviour = old, budget 4.
UP, FAR, DOWN = math.exp(0.1), math.exp(0.5), math.exp(-0.3)
LOSSES_BY_HAND = {
    "grpo": ((-UP - 1.2) / 2 + 0.8) / 2,  # clipped at 1.2 and .8
    "dr_grpo": (-UP - 1.2 + 0.8) / (2 * 4),
    "dapo": (-UP - 1.28 + 0.8) / 3,
    "gspo": (-1.0004 + 0.9997) / 2,  # row ratios e^.3 and e^-.3, both clipped
    "luspo": (2 * -1.0025 + 0.998) / 2,  # each row as often as it has tokens
    "gmpo": (-math.exp(0.25) + DOWN) / 2,  # .1 and .4, mean .25
    "cispo": (UP + FAR - DOWN) / 3,  # -A w lp, below the cap of 5
    "scale_rl": (UP + FAR - DOWN) / 3,
    # -A lp with lp = -1: 1 + 1 - 1, over 2 rows or 3 tokens
    "reinforce": 1 / 2,
    "rloo": 1 / 2,
    "reinforce_plus_plus": (-UP - 1.2 + 0.8) / 3,
    "ppo": (-UP - 1.2 + 0.8) / 3,  # beside it the value loss: test_value_loss.py
    "remax": 1 / 2,
    "maxrl": 1 / 2,
    "opo": 1 / 2,
    "gpg": 1 / 3,
    "reinforce_plus_plus_baseline": (-UP - 1.2 + 0.8) / 3 + 1e-5 * 0.125,  # lp - ref = .5: k2 .125
    "pass_at_k": (-UP - 1.2 + 0.8) / 3,
    "gdpo": ((-UP - 1.2) / 2 + 0.8) / 2,
    "opmd": 1 / 3 / 2,
    "asymre": 1 / 3,
    # 2 tokens of weight 1, and 1 of weight .741 from the ratio to the behaviour policy, over 2 rows
    "topr": (2 - DOWN) / 2,
    # .1 alone is inside: ratios up to 1.2 with A > 0, from .8 with A < 0
    "rec": 1 / 3,
    # Squares .01, .25, .09: means .01, .05 exceed .04 at the second, .09 being the smaller of the two
    "m2po": -UP / 3,
    # Row ratios e^.6 and e^-.3, weights rho^2 e^(3 (1 - rho)) and rho^3 e^(2 (1 - rho))
    "vespo": (2 * math.exp(1.2 + 3 - 3 * math.exp(0.6)) - math.exp(-0.9 + 2 - 2 * DOWN)) / 2,
    # Probabilities e^-1 = .368 from e^-1.1 = .333, e^-1.5 = .223 and e^-.7 = .497: none off by .2
    "dppo_tv": (-UP - FAR + DOWN) / 3,
    # KL of the second: .223 ln(.223 / .368) + .777 ln(.777 / .632) = .049; the third .034
    "dppo_kl": (-UP - FAR + DOWN) / 3,
    # -A (lp - old) of the first alone: .5 is above ln 1.3 = .262, -.3 below
    "s_ppo": -0.1 / 3,
    # Covariances with lp - mean lp = 0 are 0: nobody sits out
    "clip_cov": (-UP - 1.2 + 0.8) / 3,
    # unclipped; of equal covariances the first token's is held, .1 from its anchor
    "kl_cov": (-UP - FAR + DOWN + 0.1) / 3,
    "on_policy_distillation": (-UP - 1.2 + 0.8) / 3,
    # 4 sigmoid(rho - 1): 2.10507, 2.62689; 4 / 1.05 sigmoid(1.05 (rho - 1)): 1.64717
    "sapo": ((-2.1050741 - 2.6268890) / 2 + 1.6471680) / 2,
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_loss_of_each_algorithm_by_hand(name):
    old = [-1.1, -1.5, -0.7]
    given = {"rows": [0, 0, 1], "groups": [0, 0], "old_logprobs_T": old, "behaviour_logprobs_T": old}
    given |= {"reference_logprobs_T": [-1.5] * 3, "entropy_T": [1.0] * 3}
    batch = hand_batch([-1.0] * 3, [1.0, 1.0, -1.0], **given)
    if ALGORITHMS[name].step_gate is not None:
        (kept,) = step_kept(ALGORITHMS[name], [batch], [torch.zeros(3, dtype=torch.float64)])
        batch.step_kept_T = kept
    loss = ALGORITHMS[name].loss(batch, denominators_of([2, 1], [0, 0], 4), 1).loss.item()
    assert loss == pytest.approx(LOSSES_BY_HAND[name], rel=1e-5, abs=1e-6)


def test_kinds_of_parts_are_those_of_the_oracle():
    assert set(SURROGATES) - LIKELIHOOD_SURROGATES == set(oracle.RATIO_KIND)
    assert set(STEP_GATES_READ_ALL) == set(STEP_GATES)
    assert not set(GATES) & set(STEP_GATES)
