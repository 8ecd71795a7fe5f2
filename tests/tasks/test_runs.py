"""What a run decides once, at its start."""

from pathlib import Path

import pytest

from data_contracts.errors import DamagedTable, SettingsError
from rft_core.config import Recipe
from rft_core.engines.batch_budget import MOST_BATCH_TOKENS
from tasks.resolving import resolved
from tasks.resuming import read_recipe, read_run
from tasks.runs import open_run

ROOT = Path("unused")
SETTINGS = {
    "steps": 1,
    "model": {"path": str(Path(__file__).parent), "device": "cpu"},
    "data": {"source": "reasoning_gym:chain_sum"},
    "reward": {"functions": [{"name": "numeric_answer"}]},
}


def recipe(**sections):
    changed = {name: {**SETTINGS.get(name, {}), **values} for name, values in sections.items()}
    return Recipe.model_validate({**SETTINGS, **changed})


def test_nothing_is_left_to_the_machine():
    found = resolved(recipe(), ROOT)
    assert found.model.dtype in ("float32", "bfloat16")
    assert found.training.checkpoint_every == 10
    assert found.rollout.batch_tokens == MOST_BATCH_TOKENS  # of a model whose cache nobody knows
    assert found.execution.threads >= 1


def test_a_resumed_run_keeps_what_its_first_machine_chose():
    first = recipe(
        model={"dtype": "bfloat16"},
        rollout={"batch_tokens": 4096},
        training={"checkpoint_every": 7},
        execution={"threads": 63},
    )
    found = resolved(recipe(), ROOT, first)
    assert (found.model.dtype, found.training.checkpoint_every, found.execution.threads) == ("bfloat16", 7, 63)
    assert found.rollout.batch_tokens == 4096


def test_what_the_recipe_says_is_not_overruled():
    first = recipe(model={"dtype": "bfloat16"}, execution={"threads": 63})
    found = resolved(recipe(model={"dtype": "float32"}, execution={"threads": 2}), ROOT, first)
    assert (found.model.dtype, found.execution.threads) == ("float32", 2)


def test_a_relative_path_is_refused_wherever_it_would_lead(tmp_path, monkeypatch):
    """What arrives through the API: the file is there, but only in the folder where this process happens to be."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "1"}')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=r"data.source must be an absolute path"):
        open_run(tmp_path / "root", "x", recipe(data={"source": "rows.jsonl"}))
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.json", "{"),
        ("run.json", '{"run": "x"}'),
        ("recipe.yaml", None),
        ("recipe.yaml", ""),
        ("recipe.yaml", "a\0"),
        ("recipe.yaml", "steps: 1"),
    ],
)
def test_damage_of_what_a_run_began_with_is_named(tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DamagedTable, match=rf"{name} must be (?s:.*)delete (it|run.json)|Delete it"):
        read_run(tmp_path) if name == "run.json" else read_recipe(tmp_path)


def test_compile_is_chosen_once_by_the_number_of_steps(monkeypatch):
    def chosen(steps: int, began_with: Recipe | None = None, **training):
        asked = Recipe.model_validate({**SETTINGS, "steps": steps, "training": training})
        return resolved(asked, ROOT, began_with)

    monkeypatch.setattr("tasks.resolving.has_compiler", lambda device: True)
    monkeypatch.setattr("tasks.resolving.has_matrix_unit", lambda: False)
    assert chosen(50).training.compile is False
    monkeypatch.setattr("tasks.resolving.has_matrix_unit", lambda: True)
    assert [chosen(steps).training.compile for steps in (49, 50)] == [False, True]
    # A run that goes on for longer keeps what it began with.
    assert chosen(80, chosen(2)).training.compile is False
    assert chosen(2, compile=True).training.compile is True
    monkeypatch.setattr("tasks.resolving.has_compiler", lambda device: False)
    assert chosen(50).training.compile is False
    with pytest.raises(SettingsError, match="compiler"):
        chosen(50, compile=True)
