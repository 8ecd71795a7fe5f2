"""One mapped row as the readers of its kind see it, and its single values: numbers, labels, lists, texts."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from data_contracts.endings import COMPRESSIONS
from data_contracts.refs import SourceRow
from rft_core.data.examples.identity import canonical_text
from rft_core.data.faults import Faults, Rejected
from rft_core.data.messages import list_of_text, shown, without_nulls
from rft_core.data.settings import DataSettings

NUM_SHOWN_NAMES = 10
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*")
_TABLE_OF_TEXTS = (".csv", ".tsv")


@dataclass(frozen=True, slots=True)
class Reading:
    """A row under our names, with what decides how it is read."""

    mapped: dict[str, Any]
    row: SourceRow
    settings: DataSettings
    faults: Faults

    def needed(self, name: str) -> Any:
        """A field's value, null too. Raises Rejected(missing_field)."""
        if name not in self.mapped:
            raise self.missing(f"the field {name}")
        return self.mapped[name]

    def missing(self, what: str) -> Rejected:
        there = [*(field for field in self.mapped if field != "metadata"), *self.mapped.get("metadata", ())]
        return Rejected(
            "missing_field",
            f"the row must have {what}, found {', '.join(there[:NUM_SHOWN_NAMES]) or 'no field'}; data.fields says "
            "which field of the file is which",
        )

    def number(self, name: str, reason: str) -> float | None:
        """A finite number; null where there is none. Raises Rejected(reason)."""
        value = self.mapped.get(name)
        if value is None or (value == "" and self.has_texts_alone):
            return None
        return self.as_number(value, name, reason)

    def as_number(self, value: Any, place: str, reason: str) -> float:
        if isinstance(value, str) and self.has_texts_alone and _NUMBER.fullmatch(value):
            value = float(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
            if math.isfinite(number):
                return number
        raise Rejected(reason, f"{place} must be a finite number, found {shown(value)}")

    @property
    def has_texts_alone(self) -> bool:
        """Whether the source is a CSV file, where numbers and booleans are texts."""
        return _has_texts_alone(self.row.source)

    def label(self) -> bool:
        """True or false, mended where the recipe allows. Raises Rejected(label_not_boolean)."""
        value = self.needed("label")
        if isinstance(value, bool):
            return value
        folded = value.strip().lower() if isinstance(value, str) else value
        if self.has_texts_alone and folded in ("true", "false"):
            return folded == "true"
        is_scalar = isinstance(folded, str | int | float)
        if not is_scalar or folded not in LABELS:
            raise Rejected("label_not_boolean", f"label must be true or false, found {shown(value)}")
        meant = LABELS[folded]
        self.faults.meet(
            "label_not_boolean",
            f"label must be true or false, found {shown(value)}; "
            f"data.policies.label_not_boolean repair reads it as {str(meant).lower()}",
        )
        return meant

    def answer(self) -> str | None:
        """The answer as text, converted where the recipe allows. Raises Rejected(answer_not_text)."""
        value = self.mapped.get("answer")
        if value is None or isinstance(value, str):
            return value
        text = canonical_text(value)
        self.faults.meet("answer_not_text", f"answer must be a text, found {shown(value)}; as text it is {text[:80]!r}")
        return text

    def tools(self) -> list[dict[str, Any]] | None:
        """Tool definitions, given as a list or as its JSON; null where there are none. Raises Rejected(bad_tools)."""
        value = self.mapped.get("tools")
        if value is None or value == [] or value == "":
            return None
        tools = list_of_text(value) if isinstance(value, str) else value
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise Rejected("bad_tools", f"tools must be a list of objects, or its JSON text; found {shown(value)}")
        return without_nulls(tools) or None

    def system(self) -> str | None:
        """The row's own system message, else the recipe's. Raises Rejected(content_not_text)."""
        value = self.mapped.get("system")
        if value is not None and not isinstance(value, str):
            raise Rejected("content_not_text", f"system must be a text, found {shown(value)}")
        return value if value and value.strip() else self.settings.system


@lru_cache(maxsize=1024)
def _has_texts_alone(source: str) -> bool:
    name = source.lower()
    for ending in COMPRESSIONS:
        name = name.removesuffix(ending)
    return name.endswith(_TABLE_OF_TEXTS)


# What `repair` reads as a label; 1.0 and 0.0 are equal to 1 and 0.
LABELS: dict[str | int | float, bool] = {
    1: True,
    0: False,
    "1": True,
    "0": False,
    "yes": True,
    "no": False,
    "true": True,
    "false": False,
}
