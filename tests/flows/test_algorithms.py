"""Whole runs under other algorithms: a user's own code is part of a run's identity, and replays hold to it."""

import pytest

from data_contracts.ledger import Ledger
from data_contracts.store import Store
from flows.rerun import rerun
from flows.train import train
from rft_core.errors import ContentChanged, SettingsError
from rft_core.recipes import load_recipe

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_server")]
STEPS = 2
CODE = """
import torch

def clipped(tokens, term):
    bounded = tokens.ratio_T.clamp(1 - term.clip_low, 1 + term.clip_high)
    return torch.maximum(-tokens.advantages_T * tokens.ratio_T, -tokens.advantages_T * bounded)
"""


def updates(root, run, step):
    ref = Ledger(root / "runs" / run).get("main", step, "update").refs["updates"]
    return Store(str(root)).read(ref).to_pylist()[0]


def test_code_of_ones_own_decides_keys_and_replays(recipe_file, tmp_path):
    code = recipe_file.parent / "mine.py"
    code.write_text(CODE)
    own = ["algorithm.surrogate=custom", f"algorithm.surrogate_path={code}:clipped", "training.checkpoint_every=3"]
    root = str(tmp_path)
    train(recipe=load_recipe(recipe_file, own), run="own", root=root)
    train(recipe=load_recipe(recipe_file, ["training.checkpoint_every=3"]), run="grpo", root=root)
    for step in (1, 2):  # the same maths, under another key
        assert updates(tmp_path, "own", step)["loss"] == pytest.approx(
            updates(tmp_path, "grpo", step)["loss"], abs=1e-6
        )
    first, second = (Ledger(tmp_path / "runs" / run).get("main", 1, "update").refs for run in ("own", "grpo"))
    assert first["updates"].key != second["updates"].key
    # A branch at step 2 replays update 1, under the code of the old run even where the new one has none.
    changes = ["algorithm.surrogate=clipped", "algorithm.surrogate_path=null"]
    rerun("own", "update", "branch", changes, at=2, root=root)
    assert updates(tmp_path, "branch", 2)["loss"] == pytest.approx(updates(tmp_path, "own", 2)["loss"], abs=1e-6)
    code.write_text(CODE + "# another thought\n")
    with pytest.raises(ContentChanged, match="content of the algorithm"):
        train(recipe=load_recipe(recipe_file, own), run="own", root=root)
    with pytest.raises(SettingsError, match="it has changed since"):
        rerun("own", "update", "late", [*changes, "training.learning_rate=0.02"], at=2, root=root)


@pytest.mark.parametrize("name", ["gdpo", "m2po", "topr", "cispo"])
def test_a_run_trains(name, recipe_file, tmp_path):
    train(recipe=load_recipe(recipe_file, [f"algorithm.name={name}"]), run=name, root=str(tmp_path))
    for step in (1, 2):
        row = updates(tmp_path, name, step)
        assert row["skipped"] is None and row["grad_norm"] > 0
