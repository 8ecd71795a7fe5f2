"""Rollouts and credit of given completions for the tests of updates: small, ragged, the same at every call."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from data_contracts.schemas import ADVANTAGES, ROLLOUTS
from rft_core.pairing import CHOSEN, REJECTED
from tests.rft_core.update_tables import ROOT

LABELS = (True, False, True, True, False)
REWARDS = (1.0, 0.5, 0.0, -0.25, 1.0)  # of trajectories


@dataclass(frozen=True)
class Given:
    """One completion, and what credit makes of it."""

    group: str
    index: int
    prompt: list[int]
    completion: list[int]
    mask: list[bool]
    advantage: float
    role: str | None = None
    origin: str = "dataset"

    @property
    def rollout_id(self) -> str:
        return f"{self.group}/{self.index:02d}"


def _completion(generator) -> tuple[list[int], list[bool]]:
    completion = generator.integers(3, 259, int(generator.integers(2, 9))).tolist()
    mask = generator.random(len(completion)) > 0.2
    mask[-1] = True
    return completion, mask.tolist()


def _prompt(generator, number: int) -> list[int]:
    return generator.integers(3, 259, 4 + 2 * number).tolist()


def pairs(num_pairs: int = 4, seed: int = 0) -> list[Given]:
    generator, made = np.random.default_rng(seed), []
    for number in range(num_pairs):
        prompt = _prompt(generator, number)
        for index, role in enumerate((CHOSEN, REJECTED)):
            made.append(Given(f"p{number}", index, prompt, *_completion(generator), 1.0 if index == 0 else -1.0, role))
    return made


def labelled(seed: int = 1) -> list[Given]:
    """The first two share their prompt."""
    generator, made = np.random.default_rng(seed), []
    first = _prompt(generator, 0)
    for number, label in enumerate(LABELS):
        prompt = first if number < 2 else _prompt(generator, number)
        role = CHOSEN if label else REJECTED
        made.append(Given(f"l{number}", 0, prompt, *_completion(generator), 1.0 if label else -1.0, role))
    return made


def trajectories(seed: int = 2) -> list[Given]:
    generator = np.random.default_rng(seed)
    return [
        Given(f"t{number}", 0, _prompt(generator, number), *_completion(generator), reward)
        for number, reward in enumerate(REWARDS)
    ]


def tables_of(rows: list[Given], weights: dict[str, float] | None = None) -> tuple[pa.Table, pa.Table]:
    """(rollouts, advantages). `weights` by group."""
    rollouts = [
        {
            "rollout_id": row.rollout_id,
            "segment": 0,
            "prompt_id": row.group,
            "group_id": row.group,
            "rollout_index": row.index,
            "step": 1,
            "round": 0,
            "purpose": "train",
            "origin": row.origin,
            "policy_id": row.origin if row.origin == "dataset" else ROOT.policy_id,
            "policy_version": 0,
            "prompt_token_ids": row.prompt,
            "completion_token_ids": row.completion,
            "completion_mask": row.mask,
            "messages": "[]",
            "turns": [],
            "completion_text": "",
            "finish_reason": "given",
            "status": "completed",
            "sampling": "{}",
            "seed": 0,
        }
        for row in rows
    ]
    credit = [
        {
            "rollout_id": row.rollout_id,
            "segment": 0,
            "group_id": row.group,
            "advantage": row.advantage,
            "weight": (weights or {}).get(row.group, 1.0),
            "is_trained": True,
            "drop_reason": "none",
            "pair_id": None if row.role is None else row.group,
            "pair_role": row.role,
            "term": "expert" if row.origin == "dataset" else "own",
        }
        for row in rows
    ]
    return pa.Table.from_pylist(rollouts, ROLLOUTS.schema), pa.Table.from_pylist(credit, ADVANTAGES.schema)
