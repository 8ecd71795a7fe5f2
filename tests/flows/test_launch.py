"""From the command line to a flow: what the user's folder means is settled before the flow is called."""

import json

import pytest

from flows.launch import launch_rerun, launch_train
from flows.train import WATCHERS
from rft_core.recipes import load_recipe
from tests.faults.harness import REWARD, write_recipe
from tests.tiny import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_server")]
MODULE = "reward.functions=[{name: custom, path: rewards_here.low_letters}]"
FILE = "reward.functions=[{name: custom, path: 'rewards.py:low_letters', weight: 2.0}]"


def test_files_and_modules_of_the_users_folder_are_found(prefect_api, tmp_path, monkeypatch):
    write_recipe(tmp_path, make_tiny_model(tmp_path / "model"), steps=1, model__dtype="float32", evaluation__every=0)
    (tmp_path / "rewards_here.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "nothing"))  # puts sys.path back afterwards
    monkeypatch.setenv("PREFECT_API_URL", prefect_api["PREFECT_API_URL"])
    recipe = load_recipe("recipe.yaml", [MODULE, "model.path=model"])
    launch_train(tmp_path / "root", recipe, "x", accept_new_code=False)
    launch_rerun(tmp_path / "root", "x", "rewards", None, "doubled", [FILE], accept_new_code=False)
    assert WATCHERS == {}  # another run called x, later in this process, has a display of its own
    parent = json.loads((tmp_path / "root/runs/doubled/run.json").read_text())["parent"]
    assert f"{tmp_path}/rewards.py:low_letters" in parent["overrides"][0]
