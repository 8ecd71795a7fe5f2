"""Where models that score lie, and what of them is chosen once."""

from __future__ import annotations

from pathlib import Path

import pytest

from rft_core.errors import SettingsError
from rft_core.rewards.scoring_models import resolve_scoring_models
from rft_core.rewards.settings import RewardSettings
from tests.tiny import make_tiny_classifier


def settings(path: str, **section) -> RewardSettings:
    functions = [{"name": "exact_match"}, {"name": "reward_model", "reward_model": {"path": path, **section}}]
    return RewardSettings(functions=functions)


def section_of(found: RewardSettings):
    return found.functions[1].reward_model


def test_a_fetched_name_becomes_a_folder_and_auto_a_choice(tmp_path: Path):
    folder = make_tiny_classifier(tmp_path / "models" / "judge")
    given = settings("judge")
    found = resolve_scoring_models(given, tmp_path)
    section = section_of(found)
    assert section.path == str(folder) and section.device != "auto" and section.dtype != "auto"
    assert found.functions[0] == given.functions[0]
    assert resolve_scoring_models(found, tmp_path) == found


def test_a_resumed_run_keeps_what_it_began_with(tmp_path: Path):
    make_tiny_classifier(tmp_path / "models" / "judge")
    began_with = resolve_scoring_models(settings("judge", dtype="bfloat16", device="cpu"), tmp_path)
    assert section_of(resolve_scoring_models(settings("judge"), tmp_path, began_with)).dtype == "bfloat16"
    given = settings("judge", dtype="float32", device="cpu")
    assert section_of(resolve_scoring_models(given, tmp_path, began_with)).dtype == "float32"


def test_a_model_that_is_not_there_is_named_by_its_setting(tmp_path: Path):
    with pytest.raises(SettingsError, match=r"reward_model.path of reward_model must be an absolute model folder"):
        resolve_scoring_models(settings("judge"), tmp_path)
