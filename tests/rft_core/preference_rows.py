"""Train rows of preference objectives with the logprobs of their tokens, from literal numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from rft_core.batching import TrainRow
from rft_core.pairing import CHOSEN, REJECTED


@dataclass
class Step:
    """The rows of one optimizer step; logprobs by row key, as `preference_gradient` takes them."""

    rows: list[TrainRow] = field(default_factory=list)
    current: dict = field(default_factory=dict)
    reference: dict = field(default_factory=dict)

    def add(self, rollout_id, role, current, reference=None, *, mask=None, pair=None, **fields) -> TrainRow:
        """`pair` is the group's id and the pair's; a prompt of one token is made from it where none is given."""
        pair = pair if pair is not None else rollout_id
        fields.setdefault("prompt_token_ids", np.array([sum(map(ord, pair))], np.int64))
        row = TrainRow(
            rollout_id=rollout_id,
            group_id=pair,
            completion_token_ids=np.arange(len(current)) + 5,
            trained_mask=np.array(mask or [True] * len(current)),
            pair_id=pair,
            pair_role=role,
            **fields,
        )
        self.rows.append(row)
        # Masked positions may hold anything.
        for scores, values in ((self.current, current), (self.reference, reference or [0.0] * len(current))):
            tensor = torch.tensor(values, dtype=torch.float64)
            scores[row.key] = torch.where(torch.from_numpy(row.trained_mask), tensor, torch.nan)
        return row


def example_pairs(seed: int = 3, num_pairs: int = 5) -> Step:
    """Ragged pairs with masked gaps."""
    generator, step = np.random.default_rng(seed), Step()
    for pair in range(num_pairs):
        for role in (CHOSEN, REJECTED):
            _add_random(step, generator, f"{pair}/{role}", role, f"p{pair}")
    return step


def example_labels(seed: int = 4, roles: str = "cjccjcj") -> Step:
    generator, step = np.random.default_rng(seed), Step()
    for number, letter in enumerate(roles):
        _add_random(step, generator, f"l{number}", CHOSEN if letter == "c" else REJECTED, None)
    return step


def _add_random(step: Step, generator, rollout_id, role, pair) -> None:
    length = int(generator.integers(2, 9))
    current = -generator.uniform(0.1, 3, length)
    mask = generator.random(length) > 0.25
    mask[0] = True
    step.add(
        rollout_id, role, current.tolist(), (current + generator.normal(0, 1, length)).tolist(), mask=mask.tolist(),
        pair=pair,
    )  # fmt: skip
