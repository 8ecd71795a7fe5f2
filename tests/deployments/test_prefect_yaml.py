"""The deployments for a work pool offer what `rft serve` offers."""

import importlib
from pathlib import Path

import pytest
import yaml

from flows.serve import WEEKLY
from rft_core.recipes import load_recipe, recipe_of

FILE = Path(__file__).parent.parent.parent / "deployments" / "prefect.yaml"
DEPLOYMENTS = {deployment["name"]: deployment for deployment in yaml.safe_load(FILE.read_text())["deployments"]}


def test_train_starts_from_the_quick_start_and_its_weekly_schedule_is_paused():
    train = DEPLOYMENTS["train"]
    assert recipe_of(train["parameters"]["recipe"]) == load_recipe("quickstart")
    assert [(schedule["cron"], schedule["active"]) for schedule in train["schedules"]] == [(WEEKLY, False)]


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_entry_points_are_flows_that_take_the_parameters(name):
    path, _, function = DEPLOYMENTS[name]["entrypoint"].partition(":")
    flow = getattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), function)
    assert flow.name == name
    assert set(DEPLOYMENTS[name]["parameters"]) <= set(flow.parameters.properties)
