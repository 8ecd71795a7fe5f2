"""Rows of record `examples` from what they say, as the data stage writes them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from data_contracts.schemas import EXAMPLES, canonical_json
from tests.rft_core.data.given_conversations import assistant, user


def example(example_id: str, kind: str, parts: dict[str, Any], tools: list | None = None, **columns) -> dict[str, Any]:
    return {
        "example_id": example_id,
        "kind": kind,
        "messages": canonical_json(parts),
        "tools": None if tools is None else canonical_json(tools),
        "metadata": "{}",
        "source": "given.jsonl",
        "source_row": 1,
        "dataset": "given",
        "split": "train",
        **columns,
    }


def demonstration(example_id: str, question: str = "2+2?", answer: str = "4", **columns) -> dict[str, Any]:
    parts = {"prompt": [user(question)], "completion": [assistant(answer)]}
    return example(example_id, "demonstration", parts, **columns)


def pair(example_id: str, question: str = "2+2?", chosen: str = "4", rejected: str = "five", **columns) -> dict:
    parts = {"prompt": [user(question)], "chosen": [assistant(chosen)], "rejected": [assistant(rejected)]}
    return example(example_id, "pair", parts, **columns)


def labelled(example_id: str, label: bool, question: str = "2+2?", answer: str = "4", **columns) -> dict:
    parts = {"prompt": [user(question)], "completion": [assistant(answer)]}
    return example(example_id, "labelled", parts, label=label, **columns)


def trajectory(example_id: str, *answers: str, **columns) -> dict:
    """The user says 1, 2, ... before each answer."""
    said = [message for number, answer in enumerate(answers) for message in (user(str(number + 1)), assistant(answer))]
    return example(example_id, "trajectory", {"prompt": said[:1], "completion": said[1:]}, **columns)


def stepwise(example_id: str, labels: list[float], *steps: str, **columns) -> dict:
    return example(
        example_id, "stepwise", {"prompt": [user("2+2?")], "steps": list(steps)}, step_labels=labels, **columns
    )


def text(example_id: str, said: str, **columns) -> dict:
    return example(example_id, "demonstration", {"text": said}, **columns)


def table_of(*rows: dict) -> pa.Table:
    return pa.Table.from_pylist(list(rows), EXAMPLES.schema)
