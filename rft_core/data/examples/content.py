"""What a row says, by kind of record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["prompt", "demonstration", "pair", "labelled", "trajectory", "stepwise"]


@dataclass(frozen=True)
class Content:
    """The checked content of a row.

    `parts` maps prompt, completion, chosen, rejected to lists of messages, `steps` to a list of texts, `text` to a
    text, as the column `messages` of examples holds them; of a prompt, {"prompt": [...]}. `metadata` is canonical JSON.

    Content("gsm-3fa9c1d2e4b5", "prompt", {"prompt": [{"role": "user", "content": "2+2?"}]}, answer="4")
    """

    row_id: str
    kind: Kind
    parts: dict[str, Any]
    tools: list[dict[str, Any]] | None = None
    answer: str | None = None
    label: bool | None = None
    margin: float | None = None
    reward: float | None = None
    turn_rewards: list[float] | None = None
    step_labels: list[float] | None = None
    metadata: str = "{}"
