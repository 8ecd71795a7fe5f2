"""Credit per token, and KL in the reward: values by hand and by plain numpy."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from data_contracts.schemas import TOKEN_SCORES
from rft_core.algorithm_settings import AlgorithmSettings
from rft_core.credit import compute_advantages
from rft_core.errors import ContractError
from rft_core.token_credit import RowTokens, batch_whiten, reference_gaps, returns_of
from tests.rft_core.credit_tables import tables

NAMES = ("rollout_id", "segment", "scorer", "model_id", "values")


def scores(gaps: dict[str, list[float]]) -> pa.Table:
    """Old is -1 everywhere, the reference -1 - gap."""
    rows = [
        row
        for rollout_id, gap in gaps.items()
        for row in (
            (rollout_id, 0, "old", "p", [-1.0] * len(gap)),
            (rollout_id, 0, "reference", "r", [-1.0 - value for value in gap]),
        )
    ]
    return pa.table([list(column) for column in zip(*rows, strict=True)], schema=TOKEN_SCORES.schema)


def credit(rows, gaps, **settings):
    rollouts, rewards = tables(*rows)
    table, metrics = compute_advantages(
        rollouts, rewards, AlgorithmSettings(**settings), 10, 0, token_scores=scores(gaps) if gaps else None
    )
    return table.to_pylist(), metrics


def row(name: str, reward: float | None, mask: list[bool], group: str = "g") -> dict:
    return {"id": name, "group": group, "reward": reward, "mask": mask}


def test_returns_are_discounted_by_policy_tokens():
    assert returns_of(np.array([1.0, 0.0, 2.0]), 1.0).tolist() == [3.0, 2.0, 2.0]
    assert returns_of(np.array([0.0, 0.0, 2.0]), 0.5).tolist() == [0.5, 1.0, 2.0]
    assert returns_of(np.zeros(0), 0.5).tolist() == []


def test_tokens_of_all_rows_are_whitened_together():
    """reinforcepp of the handed cases: returns .997 .998 .998 and -1.0015 -1.001, mean .1981, variance .95896044."""
    rows = [RowTokens("g", np.array([-0.001, 0.0, 0.998])), RowTokens("g", np.array([-0.0005, -1.001]))]
    found = batch_whiten(rows, AlgorithmSettings(name="reinforce_plus_plus", whiten_ddof=0)).advantages
    assert found[0].tolist() == pytest.approx([0.815815731, 0.8168369048, 0.8168369048], abs=1e-6)
    assert found[1].tolist() == pytest.approx([-1.225000064, -1.224489477], abs=1e-6)
    assert batch_whiten([], AlgorithmSettings(name="reinforce_plus_plus")).advantages == []


def test_reinforce_plus_plus_takes_the_kl_of_each_token():
    rows = [row("a", 1.0, [True, True, True]), row("b", -1.0, [True, False, True, False], "h")]
    gaps = {"a": [0.1, 0.0, 0.2], "b": [0.05, 9.0, 0.1, 9.0]}
    made, _ = credit(rows, gaps, name="reinforce_plus_plus", whiten_ddof=0)
    a, b = (np.array(row["token_advantages"]) for row in made)
    assert a.tolist() == pytest.approx([0.815815731, 0.8168369048, 0.8168369048], abs=1e-6)
    assert b.tolist() == pytest.approx([-1.225000064, 0.0, -1.224489477, 0.0], abs=1e-6)  # tokens of others get none
    assert made[1]["advantage"] == pytest.approx((-1.225000064 - 1.224489477) / 2, abs=1e-6)


def test_untrained_rows_are_in_no_statistic():
    rows = [row("a", 1.0, [True, True]), row("b", None, [True]), row("c", 0.0, [True, True], "h")]
    made, _ = credit(rows, {"a": [0, 0], "b": [0], "c": [0, 0]}, name="reinforce_plus_plus", reward_kl_coefficient=0.0)
    assert made[1]["token_advantages"] is None and made[1]["advantage"] == 0.0
    # 1 1 0 0: mean .5, variance 1/3
    assert made[0]["token_advantages"] == pytest.approx([0.8660254] * 2, abs=1e-6)
    assert made[2]["token_advantages"] == pytest.approx([-0.8660254] * 2, abs=1e-6)


def test_rloo_takes_the_kl_of_the_whole_completion_after_the_clip():
    """rloo_trl of the handed cases: clip at +-.5, then .05 x KL, then the mean of the others."""
    gaps = {"a": [0.1, 0.2], "b": [-0.1], "c": [0.05, 0.15], "d": [0.0]}
    rows = [row(name, reward, [True] * len(gaps[name])) for name, reward in zip("abcd", [1.0, 0, 0, 1.0], strict=True)]
    made, _ = credit(rows, gaps, name="rloo", reward_kl_coefficient=0.05, reward_clip_low=-0.5, reward_clip_high=0.5)
    assert [row["advantage"] for row in made] == pytest.approx([0.32, -0.32, -0.34, 0.34], abs=1e-7)


def test_masked_tokens_pay_no_kl():
    rows = [row("a", 1.0, [True, False]), row("b", 0.0, [True, True])]
    made, _ = credit(rows, {"a": [0.0, 50.0], "b": [0.0, 0.0]}, name="rloo")
    assert [row["advantage"] for row in made] == [1.0, -1.0]


def test_the_kl_needs_scores_of_every_token():
    rows = [row("a", 1.0, [True, True]), row("b", 0.0, [True, True])]
    with pytest.raises(ContractError, match="rloo takes the KL from the reward and needs token_scores, got none"):
        credit(rows, {}, name="rloo")
    with pytest.raises(ContractError, match=r"aligned with the completion of \('b', 0\)"):
        credit(rows, {"a": [0.0, 0.0], "b": [0.0]}, name="rloo")
    table = scores({"a": [0.0]}).slice(0, 1)
    with pytest.raises(ContractError, match=r"must hold old and reference of \('a', 0\), found \['old'\]"):
        reference_gaps(table)
