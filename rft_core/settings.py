"""What every group of settings is built of. Importable without torch.

A setting is *content* (the default: it enters the keys of tables) or *execution* (URLs, paths, retries, log level: it
does not).
"""

from __future__ import annotations

import os
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rft_core.errors import SettingsError

NOT_BLANK = r"\S"  # pattern of texts that name something


def execution(default: Any, **rest: Any) -> Any:
    """A field that decides how work is done, not what comes out; it enters no key."""
    return Field(default, json_schema_extra={"execution": True}, **rest)


def secret(variable: str | None, setting: str) -> str | None:
    """What an environment variable holds, which `setting` names; None where it names none.

    Raises SettingsError where the variable is not set or empty.
    """
    if variable is None:
        return None
    value = os.environ.get(variable, "").strip()
    if not value:
        raise SettingsError(f"{setting} names the environment variable {variable}, which is not set or empty")
    return value


class Settings(BaseModel):
    """Frozen; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def content(self) -> dict[str, Any]:
        """The content settings as plain JSON values; execution fields left out, nested models too."""
        values: dict[str, Any] = {}
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra.get("execution"):
                continue
            values[name] = _content_value(getattr(self, name))
        return values


def _content_value(value: Any) -> Any:
    if isinstance(value, Settings):
        return value.content()
    if isinstance(value, list | tuple):
        return [_content_value(item) for item in value]
    return value
