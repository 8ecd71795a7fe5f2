"""Credit by the rewards of reasoning steps: by hand, against plain numpy, and what is refused."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from rft_core.algorithm_settings import AlgorithmSettings
from rft_core.config import Recipe
from rft_core.credit import compute_advantages
from rft_core.errors import ContractError
from tests.rft_core.credit_tables import tables


def credit(rows, steps: dict[str, tuple[list[int], list[float]] | None], **settings) -> list[dict]:
    rollouts, rewards = tables(*rows)
    made = []
    for row in rewards.to_pylist():
        ends, scores = steps.get(row["rollout_id"]) or (None, None)
        made.append({**row, "step_ends": ends, "step_rewards": scores})
    rewards = pa.Table.from_pylist(made, schema=rewards.schema)
    settings = AlgorithmSettings(advantage="per_step_group_zscore", **settings)
    return compute_advantages(rollouts, rewards, settings, 16, 0)[0].to_pylist()


def row(name: str, mask: list[bool], group: str = "g", reward: float | None = 0.0) -> dict:
    return {"id": name, "group": group, "reward": reward, "mask": mask}


def test_a_token_gets_the_steps_that_end_at_it_or_later():
    # Steps 1 0 | 1: mean 2/3, deviation .57735 (ddof 1), z .577350 -1.154701 .577350 (1e-6 added to the deviation).
    # a: steps end at 1 and 3, a token more behind them; b: one step of two tokens with a gap between.
    rows = [row("a", [True] * 5), row("b", [True, False, True])]
    a, b = credit(rows, {"a": ([1, 3], [1.0, 0.0]), "b": ([2], [1.0])})
    first, second, lone = 0.5773493, -1.1546985, 0.5773493
    assert a["token_advantages"] == pytest.approx([first + second] * 2 + [second] * 2 + [0.0], abs=1e-6)
    assert b["token_advantages"] == pytest.approx([lone, 0.0, lone], abs=1e-6)
    assert (a["drop_reason"], b["drop_reason"]) == ("none", "none")
    assert a["returns"] is None


@pytest.mark.parametrize("settings", [{}, {"std_ddof": 0}, {"std_epsilon": 1e-3}], ids=str)
def test_values_equal_plain_numpy(settings):
    generator = np.random.default_rng(4)
    rows, steps = [], {}
    for number, length in enumerate([7, 3, 9, 1, 6, 5]):
        mask = generator.random(length) < 0.8
        mask[0] = True
        rows.append(row(f"r{number}", mask.tolist(), f"g{number % 2}"))
        ends = sorted(generator.choice(length, size=generator.integers(1, min(length, 3) + 1), replace=False).tolist())
        steps[f"r{number}"] = (ends, generator.normal(size=len(ends)).tolist())
    made = credit(rows, steps, **settings)
    for group in ("g0", "g1"):
        members = [one for one in rows if one["group"] == group]
        pool = np.concatenate([steps[one["id"]][1] for one in members])
        deviation = np.std(pool, ddof=settings.get("std_ddof", 1)) + settings.get("std_epsilon", 1e-6)
        for one in members:
            ends, scores = steps[one["id"]]
            wanted = [
                sum((s - pool.mean()) / deviation for e, s in zip(ends, scores, strict=True) if e >= t)
                if is_written
                else 0
                for t, is_written in enumerate(one["mask"])
            ]
            (found,) = [line for line in made if line["rollout_id"] == one["id"]]
            assert found["token_advantages"] == pytest.approx(wanted, abs=1e-6)


def test_steps_without_spread_say_so_and_give_nothing():
    rows = [row("a", [True] * 2), row("b", [True]), row("c", [True] * 2, "h"), row("d", [True], "i", reward=None)]
    steps = {"a": ([0, 1], [0.3, 0.3]), "b": ([0], [0.1 + 0.2]), "c": ([0, 1], [1.0, 0.0]), "d": None}
    a, b, c, d = credit(rows, steps)
    assert [one["drop_reason"] for one in (a, b, c, d)] == ["zero_variance", "zero_variance", "none", "unscored"]
    assert a["is_trained"] and a["token_advantages"] == [0.0, 0.0] and a["advantage"] == 0.0
    assert c["token_advantages"] == pytest.approx([0.0, -0.70710578], abs=1e-6)  # +- .5 / .70710678
    assert not d["is_trained"] and d["token_advantages"] is None


def test_rewards_without_steps_are_refused():
    with pytest.raises(ContractError, match="rollout b must have step_ends and step_rewards, found none"):
        credit([row("a", [True]), row("b", [True])], {"a": ([0], [1.0])})
    parts = {"model": {"path": "m"}, "data": {"source": "d.jsonl"}, "reward": {"functions": [{"name": "exact_match"}]}}
    with pytest.raises(ValueError, match=r"reward\.steps\.split must say how completions are divided"):
        Recipe(steps=1, **parts, algorithm={"advantage": "per_step_group_zscore"}, evaluation={"every": 0})
