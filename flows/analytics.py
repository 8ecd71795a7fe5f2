"""Usage analytics of every dependency are off, unless the environment asks for them."""

from __future__ import annotations

import os


def switch_analytics_off() -> None:
    """Sets what the dependencies read. Call it before importing any of them; values already set stay."""
    for name, value in ANALYTICS_OFF.items():
        os.environ.setdefault(name, value)


def analytics_left_on() -> list[str]:
    """`NAME=value` of variables that let a dependency report usage; what is unset, a run switches off."""
    found = [(name, os.environ.get(name, value), value) for name, value in ANALYTICS_OFF.items()]
    return [f"{name}={given}" for name, given, value in found if given.lower() not in _same_as(value)]


def _same_as(value: str) -> set[str]:
    return {"0", "false", "no", "off"} if value in ("0", "false") else {"1", "true", "yes", "on"}


ANALYTICS_OFF = {
    "DO_NOT_TRACK": "1",  # Prefect's client, and whoever else follows the convention
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
    "GX_ANALYTICS_ENABLED": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
