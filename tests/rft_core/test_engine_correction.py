"""Rows of an engine with code of its own: of the policy that is updated, with logprobs that are not the policy's."""

from __future__ import annotations

import math

import pytest
import torch

from data_contracts.refs import PolicyRef
from data_contracts.schemas import canonical_json
from rft_core.config import AlgorithmSettings
from rft_core.errors import SettingsError
from rft_core.resolve import resolve_algorithm
from rft_core.train_rows import train_rows
from tests.rft_core.trainer import Trainer, gradient
from tests.rft_core.update_tables import replaced, tables
from tests.tiny import make_tiny_model

APART = canonical_json({"engine": "vllm", "temperature": 0.9})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def sampled_apart(trainer: Trainer, weight: float):
    """(rollouts, advantages): the engine found each token less likely than the policy does, by log(weight)."""
    rollouts, advantages = tables()
    rows = []
    for rollout in rollouts.to_pylist():
        prompt, completion = rollout["prompt_token_ids"], rollout["completion_token_ids"]
        with torch.no_grad():
            logits = trainer.state.policy.module(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits.double() / 0.9, -1)
        rows.append([logprobs[place, token].item() - math.log(weight) for place, token in enumerate(completion)])
    rollouts = replaced(rollouts, "behaviour_logprobs", rows)
    return replaced(rollouts, "sampling", [APART] * rollouts.num_rows), advantages


@pytest.mark.parametrize(
    ("sampling", "correct", "policy_id", "expected"),
    [
        (APART, True, "root", (False, True)),
        (APART, False, "root", (False, False)),
        ("{}", True, "root", (False, False)),
        ("{}", False, "other", (True, True)),
    ],
)
def test_a_row_says_who_sampled_it(sampling, correct, policy_id, expected):
    rollouts, advantages = tables(policy_id=policy_id)
    rollouts = replaced(rollouts, "sampling", [sampling] * rollouts.num_rows)
    rows = train_rows(rollouts, advantages, PolicyRef("root", 0), correct_engine=correct)
    assert {(row.is_off_policy, row.is_corrected) for row in rows} == {expected}


@pytest.mark.parametrize(("weight", "factor"), [(0.5, 0.5), (1.5, 1.5), (4.0, 2.0)])
def test_every_token_is_weighed_by_the_truncated_ratio(folder, weight, factor):
    """The ratio policy / engine is `weight` everywhere, and at most 2 counts: a factor of loss and gradient."""
    plain, _ = gradient(Trainer(folder, max_grad_norm=1e9), *tables())
    trainer = Trainer(folder, max_grad_norm=1e9)
    found, (row,) = gradient(trainer, *sampled_apart(trainer, weight))
    assert (found - factor * plain).abs().max() <= 1e-5 * plain.abs().max()
    assert row["effective_sample_size"] == pytest.approx(1.0)
    assert row["off_policy_rows"] == 0 and row["ratio_max"] == 1.0
    assert row["sampling_logp_difference_mean"] == pytest.approx(abs(math.log(weight)), rel=1e-4)
    assert not any(note == "old logprobs" for _, _, note in trainer.seen)  # they are those of the same pass


@pytest.mark.parametrize("settings", [{"correct_engine": False}, {"correction": "none"}])
def test_without_the_correction_the_ratio_changes_nothing(folder, settings):
    plain, _ = gradient(Trainer(folder, max_grad_norm=1e9), *tables())
    trainer = Trainer(folder, settings, max_grad_norm=1e9)
    found, (row,) = gradient(trainer, *sampled_apart(trainer, 4.0))
    assert torch.equal(found, plain) and row["effective_sample_size"] is None


def test_the_setting_is_refused_where_nothing_is_corrected():
    with pytest.raises(SettingsError, match="correct_engine has no effect with correction none"):
        resolve_algorithm(AlgorithmSettings(correction="none", correct_engine=False))
    with pytest.raises(SettingsError, match="correct_engine has no effect: sft"):
        resolve_algorithm(AlgorithmSettings(name="sft", correct_engine=False))
