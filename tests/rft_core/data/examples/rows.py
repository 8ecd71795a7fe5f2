"""Raw values -> contents, the way that the data stage takes: recognise, map, read."""

from __future__ import annotations

from typing import Any

import pytest

from data_contracts.refs import SourceRow
from rft_core.data.examples import Content, read_contents
from rft_core.data.faults import Faults, Rejected
from rft_core.data.fields import map_fields, recognise
from rft_core.data.settings import DataSettings


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **rest: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **rest}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def tool(text: str, **rest: Any) -> dict[str, Any]:
    return {"role": "tool", "content": text, **rest}


def read_all(
    value: dict[str, Any],
    record: str,
    *,
    source: str = "rows.jsonl",
    row: int = 1,
    like: dict[str, Any] | None = None,
    faults: Faults | None = None,
    **settings: Any,
) -> list[Content]:
    """The contents of a row whose file has rows like itself, or like `like`."""
    chosen = DataSettings(source=source, record=record, **settings)
    recognised = recognise([like or value], record, chosen.fields)
    faults = faults or Faults(chosen.policies)
    return read_contents(map_fields(value, recognised), SourceRow(source, row, value, b""), record, chosen, faults)


def read(value: dict[str, Any], record: str, **rest: Any) -> Content:
    [content] = read_all(value, record, **rest)
    return content


def rejection(value: dict[str, Any], record: str, **rest: Any) -> tuple[str, str]:
    """Reason code and detail of a row that is refused."""
    with pytest.raises(Rejected) as caught:
        read_all(value, record, **rest)
    return caught.value.reason, str(caught.value)
