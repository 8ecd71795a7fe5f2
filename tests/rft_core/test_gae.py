"""Advantages by a critic's values, from tables to tables: against the oracle, by hand, and what is refused."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from data_contracts.schemas import TOKEN_SCORES
from rft_core.algorithm_settings import AlgorithmSettings
from rft_core.credit import compute_advantages
from rft_core.errors import ContractError
from tests.oracle.gae import gae
from tests.rft_core.credit_tables import tables

SETTINGS = [
    {},
    {"gae_lambda": 0.7, "gamma": 0.9},
    {"gae_lambda": 1.0, "whiten_ddof": 0},
    {"gae_lambda": 0.0, "bootstrap_truncated": True},
    {"bootstrap_truncated": True, "gamma": 0.95},
]


def example(seed: int = 0) -> tuple[list[dict], dict[str, list[float]], dict[str, list[float]]]:
    """(rows, values of each token, values behind it): ragged rows with gaps, a cut one, a cut one that ends in a gap,
    one unscored, one without a token of the policy, one of a single token. What stands in a gap is large."""
    generator = np.random.default_rng(seed)
    rows, values, behind = [], {}, {}
    for number, (length, reward) in enumerate(
        [(5, 1.0), (3, 0.0), (8, 0.5), (4, None), (3, 1.0), (1, 0.25), (6, -1.0)]
    ):
        mask = generator.random(length) < 0.7
        mask[0] = True
        mask[-1] = number != 6
        mask[:] &= number != 4
        name = f"r{number}"
        finish = {"finish_reason": "length", "status": "truncated"} if number in (2, 6) else {}
        rows.append({"id": name, "group": f"g{number % 2}", "reward": reward, "mask": mask.tolist(), **finish})
        written = generator.normal(size=length).astype(np.float32)
        values[name] = np.where(mask, written, 1e6).astype(np.float64).tolist()
        behind[name] = generator.normal(size=length).astype(np.float32).astype(np.float64).tolist()
    return rows, values, behind


def scores(values: dict[str, list[float]], behind: dict[str, list[float]] | None = None) -> pa.Table:
    rows = [(name, 0, "critic", "p", row) for name, row in values.items()]
    rows += [(name, 0, "critic_after", "p", row) for name, row in (behind or {}).items()]
    return pa.table([list(column) for column in zip(*rows, strict=True)], schema=TOKEN_SCORES.schema)


def credit(rows, token_scores, value_lambda=None, **settings) -> list[dict]:
    rollouts, rewards = tables(*rows)
    settings = AlgorithmSettings(**{"name": "ppo", **settings})
    table, _ = compute_advantages(
        rollouts, rewards, settings, 16, 0, token_scores=token_scores, value_lambda=value_lambda
    )
    return table.to_pylist()


@pytest.mark.parametrize("value_lambda", [None, 1.0, 0.3])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tables_equal_the_oracle(settings, value_lambda):
    rows, values, behind = example()
    bootstraps = settings.get("bootstrap_truncated", False)
    made = credit(rows, scores(values, {name: behind[name] for name in ("r2", "r6")}), value_lambda, **settings)
    gamma, lam = settings.get("gamma", 1.0), settings.get("gae_lambda", 0.95)
    advantages, returns = {}, {}
    for row in rows:
        mask, name = row["mask"], row["id"]
        if row["reward"] is None or not any(mask):
            continue
        rewards = np.zeros(len(mask))
        rewards[np.flatnonzero(mask)[-1]] = row["reward"]
        after = behind[name][-1] if bootstraps and name in ("r2", "r6") else 0.0
        advantages[name] = gae(rewards, values[name], mask, after, gamma, lam)
        of_critic = gae(rewards, values[name], mask, after, gamma, lam if value_lambda is None else value_lambda)
        returns[name] = np.where(mask, of_critic + values[name], 0.0)
    flat = np.concatenate([advantages[row["id"]][row["mask"]] for row in rows if row["id"] in advantages])
    deviation = np.sqrt(np.var(flat, ddof=settings.get("whiten_ddof", 1)) + 1e-8)
    for row, found in zip(rows, made, strict=True):
        if row["id"] not in advantages:
            assert found["token_advantages"] is None and found["returns"] is None and not found["is_trained"]
            continue
        wanted = np.where(row["mask"], (advantages[row["id"]] - flat.mean()) / deviation, 0.0)
        assert found["token_advantages"] == pytest.approx(wanted.tolist(), abs=2e-6)
        assert found["returns"] == pytest.approx(returns[row["id"]].tolist(), abs=2e-6)
        assert found["advantage"] == pytest.approx(wanted[row["mask"]].mean(), abs=2e-6)


def test_what_stands_in_a_gap_changes_nothing():
    """Returns by the definition A + V = gamma V' + gamma lam A', and so r at the last token."""
    mask = [True, True, True, False, False, True, True]
    rows = [{"id": "a", "group": "g", "reward": 1.0, "mask": mask}]
    settings = {"gamma": 0.9, "gae_lambda": 0.8}
    first, second = (credit(rows, scores({"a": [4, 5, 6, *gap, 7, 9]}), **settings) for gap in ((-77, 0.9), (0.5, 88)))
    assert first == second
    # Values 4 5 6 7 9, reward 1 at the end: 1, then .9 x 9 + .72 (1 - 9) = 2.34, and so on.
    returns = [1.0]
    for following in (9, 7, 6, 5):
        returns.append(0.9 * following + 0.72 * (returns[-1] - following))
    assert first[0]["returns"] == pytest.approx([*returns[:1:-1], 0.0, 0.0, *returns[1::-1]], abs=1e-6)


def test_the_kl_is_taken_from_the_reward_of_each_token():
    # Values 0, lambda 1, gamma 1: the return of a token is the reward that follows, 1 - .5 x (KL from there on).
    rows = [{"id": "a", "group": "g", "reward": 1.0, "mask": [True, True, True]}]
    old = [("a", 0, "old", "p", [-1.0] * 3), ("a", 0, "reference", "r", [-1.2, -1.0, -1.4])]
    table = pa.table([list(part) for part in zip(*old, strict=True)], schema=TOKEN_SCORES.schema)
    both = pa.concat_tables([scores({"a": [0.0] * 3}), table])
    (row,) = credit(rows, both, gae_lambda=1.0, reward_kl_coefficient=0.5)
    assert row["returns"] == pytest.approx([0.7, 0.8, 0.8], abs=1e-6)


def test_a_rollout_of_two_segments_is_one_row_of_tokens():
    """A return goes on from one segment into the next: with lambda 1 all tokens expect the reward of the last."""
    rows = [{"id": "a", "group": "g", "reward": 2.0, "mask": [True, True]}]
    rollouts, rewards = tables(*rows)
    more = rollouts.set_column(1, rollouts.schema.field("segment"), pa.array([1], pa.int64()))
    both = pa.concat_tables([rollouts, more])
    rows = [("a", segment, "critic", "p", [0.1, 0.2]) for segment in (0, 1)]
    table = pa.table([list(part) for part in zip(*rows, strict=True)], schema=TOKEN_SCORES.schema)
    settings = AlgorithmSettings(name="ppo", gae_lambda=1.0)
    made = compute_advantages(both, rewards, settings, 16, 0, token_scores=table)[0].to_pylist()
    assert [row["returns"] for row in made] == [[2.0, 2.0]] * 2
    # A 1.9 1.8 1.9 1.8: mean 1.85, deviation .057735
    assert made[0]["token_advantages"] == made[1]["token_advantages"] == pytest.approx([0.866012, -0.866012], abs=1e-3)


def test_values_must_be_there_for_every_token():
    rows, values, behind = example()
    with pytest.raises(ContractError, match="ppo reads a critic's values and needs token_scores, got none"):
        credit(rows, None)
    with pytest.raises(ContractError, match=r"aligned with the completion of \('r2', 0\)"):
        credit(rows, scores({name: row[:-1] if name == "r2" else row for name, row in values.items()}))
    with pytest.raises(ContractError, match=r"critic_after of \('r6', 0\), which was cut, found none"):
        credit(rows, scores(values, {"r2": behind["r2"]}), bootstrap_truncated=True)
