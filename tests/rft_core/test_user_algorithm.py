"""A user's own advantage, surrogate and row: what they may do, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from rft_core.config import AlgorithmSettings, Recipe
from rft_core.credit import compute_advantages
from rft_core.errors import AlgorithmFunctionError, SettingsError
from rft_core.recipe_paths import refuse_relative_paths
from rft_core.recipes import load_recipe
from rft_core.resolve import resolve_algorithm
from rft_core.user_algorithm import algorithm_code
from tests.rft_core import update_tables
from tests.rft_core.credit_tables import tables
from tests.rft_core.trainer import Trainer, gradient
from tests.tiny import make_tiny_model

CODE = """
import numpy as np
import torch

def half(credits, settings):
    result = np.full(len(credits.reward_N), np.nan)  # rows that are not counted may hold anything
    for members in credits.groups():
        rewards = credits.reward_N[members]
        result[members] = (rewards - rewards.mean()) / 2
    credits.reward_N[:] = -1e9  # a copy: nothing else sees it
    return result

half.compares_groups = True

def clipped(tokens, term):
    bounded = tokens.ratio_T.clamp(1 - term.clip_low, 1 + term.clip_high)
    return torch.maximum(-tokens.advantages_T * tokens.ratio_T, -tokens.advantages_T * bounded)

def likelihood(tokens, term):
    return -tokens.advantages_T * tokens.logprobs_T

likelihood.is_likelihood = True

def row():
    from rft_core.terms import Algorithm, Term

    terms = (Term(surrogate=clipped, clip_high=0.3, aggregation="sequence_mean"),)
    return Algorithm(name="mine", source="my notes", advantage=half, terms=terms)
"""


@pytest.fixture(autouse=True)
def clean_imports():
    path = list(sys.path)
    yield
    sys.path[:] = path


@pytest.fixture
def code(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(CODE)
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def test_an_advantage_of_ones_own(code):
    rows = [{"group": "g", "reward": value} for value in (1.0, 0.0, None)] + [{"group": "h", "reward": 1.0}]
    settings = AlgorithmSettings(advantage="custom", advantage_path=f"{code}:half")
    table, metrics = compute_advantages(*tables(*rows), settings, 10, 0)
    assert table["advantage"].to_pylist() == [0.25, -0.25, 0.0, 0.0]
    assert table["drop_reason"].to_pylist() == ["none", "none", "unscored", "group_too_small"]
    assert metrics["reward"] == pytest.approx(2 / 3)


def test_a_surrogate_of_ones_own_trains_like_its_built_in_twin(code, folder):
    given = update_tables.tables(policy_id="other", behaviour=-5.0)
    wanted, (theirs,) = gradient(Trainer(folder, {"clip_high": 0.1}), *given)
    own = {"surrogate": "custom", "surrogate_path": f"{code}:clipped", "clip_high": 0.1}
    found, (ours,) = gradient(Trainer(folder, own), *given)
    assert torch.allclose(found, wanted, atol=1e-7)
    assert ours["forward_rows"] == theirs["forward_rows"] + 1  # it may say something of rows of advantage 0 too
    likelihood = {"surrogate": "custom", "surrogate_path": f"{code}:likelihood"}
    wanted, _ = gradient(Trainer(folder, {"surrogate": "logprob"}), *given)
    found, _ = gradient(Trainer(folder, likelihood), *given)
    assert torch.allclose(found, wanted, atol=1e-7)


def test_a_row_of_ones_own_takes_overrides(code):
    settings = AlgorithmSettings(name="custom", path=f"{code}:row", aggregation="token_mean", clip_low=0.1)
    algorithm = resolve_algorithm(settings)
    (term,) = algorithm.terms
    assert (algorithm.name, term.clip_low, term.clip_high, term.aggregation) == ("custom", 0.1, 0.3, "token_mean")
    assert algorithm.compares_groups and algorithm.needs_all_rows()
    rows = [{"group": "g", "reward": value} for value in (1.0, 0.0)]
    assert compute_advantages(*tables(*rows), settings, 10, 0)[0]["advantage"].to_pylist() == [0.25, -0.25]


def test_identity_is_that_of_the_code_not_of_its_place(code, tmp_path):
    def identity(file):
        return algorithm_code(AlgorithmSettings(surrogate="custom", surrogate_path=f"{file}:clipped"))

    first = identity(code)
    copy = tmp_path / "elsewhere" / "mine.py"
    copy.parent.mkdir()
    copy.write_text(CODE)
    assert identity(copy) == first and list(first) == ["surrogate_path"]
    copy.write_text(CODE + "# changed\n")
    assert identity(copy) != first
    assert algorithm_code(AlgorithmSettings()) == {}
    settings = AlgorithmSettings(surrogate="custom", surrogate_path=f"{code}:clipped")
    assert not any("path" in name for name in settings.content())


WRONG_ADVANTAGES = {
    "return np.zeros(3)": "must give 2 values, got shape",
    "return ['a', 'b']": "must give numbers",
    "return [np.nan, 1.0]": "must be finite, rollout 0 got nan",
    "raise KeyError('no')": "raised KeyError",
    "raise SystemExit(0)": "raised SystemExit",
}


@pytest.mark.parametrize("body", WRONG_ADVANTAGES)
def test_what_is_wrong_with_an_advantage_is_said(body, tmp_path):
    (tmp_path / "bad.py").write_text(f"import numpy as np\ndef mine(credits, settings):\n    {body}\n")
    settings = AlgorithmSettings(advantage="custom", advantage_path=f"{tmp_path}/bad.py:mine")
    rows = [{"group": "g", "reward": value} for value in (1.0, 0.0)]
    with pytest.raises(AlgorithmFunctionError, match=WRONG_ADVANTAGES[body]):
        compute_advantages(*tables(*rows), settings, 10, 0)


@pytest.mark.parametrize("body", ["return tokens.logprobs_T.sum()", "return 1.0", "return tokens.ratio_T > 1"])
def test_what_is_wrong_with_a_surrogate_is_said(body, tmp_path, folder):
    (tmp_path / "bad.py").write_text(f"def mine(tokens, term):\n    {body}\n")
    trainer = Trainer(folder, {"surrogate": "custom", "surrogate_path": f"{tmp_path}/bad.py:mine"})
    with pytest.raises(AlgorithmFunctionError, match="surrogate mine must give a floating tensor"):
        trainer.update(*update_tables.tables())


ROW = "from rft_core.terms import Algorithm, Term\ndef row():\n    return "
WRONG_ROWS = {
    ROW + "3": "gives an Algorithm, .* gave a int",
    ROW + "Algorithm('a', 's', 'group_mean', ())": "must have terms",
    ROW + "Algorithm('a', 's', 'group_median', (Term(),))": "advantage of the row .* must be one of .* 'group_median'",
    ROW + "Algorithm('a', 's', 'none', (Term(gate='half'),))": "gate of the row .* got 'half'",
    ROW + "Algorithm('a', 's', 'none', (Term(level='sequence_geometric'),))": "one number per row",
    "row = 3": "no function 'row'",
}


@pytest.mark.parametrize("text", WRONG_ROWS)
def test_what_is_wrong_with_a_row_is_said(text, tmp_path):
    (tmp_path / "bad.py").write_text(text + "\n")
    with pytest.raises(SettingsError, match=WRONG_ROWS[text]):
        resolve_algorithm(AlgorithmSettings(name="custom", path=f"{tmp_path}/bad.py:row"))


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "custom"},
        {"path": "a.py:b"},
        {"advantage": "custom"},
        {"surrogate_path": "a.b"},
        {"surrogate": "clipped", "surrogate_path": "a.b"},
    ],
)
def test_a_path_goes_with_custom(settings):
    with pytest.raises(ValidationError, match=r"goes with (name|advantage|surrogate): custom"):
        AlgorithmSettings(**settings)


def test_paths_are_taken_from_the_recipes_folder(tmp_path):
    (tmp_path / "mine.py").write_text("raise RuntimeError('a recipe is read without running code')")
    (tmp_path / "recipe.yaml").write_text(
        "steps: 1\nmodel: {path: m}\ndata: {source: a.jsonl}\nreward: {functions: [{name: exact_match}]}\n"
        "algorithm: {advantage: custom, advantage_path: mine.py:half}\n"
    )
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert recipe.algorithm.advantage_path == f"{tmp_path}/mine.py:half"
    refuse_relative_paths(recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": "/m"})}))
    relative = recipe.model_dump(mode="json")
    relative["algorithm"]["advantage_path"] = "mine.py:half"
    with pytest.raises(SettingsError, match=r"algorithm.advantage_path must be an absolute path"):
        refuse_relative_paths(Recipe.model_validate(relative))


def test_the_example_of_the_readme_works_and_is_short(tmp_path):
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    example = readme[readme.index("# mine.py\n") :]
    example = example[: example.index("```")]
    assert example.count("\n") <= 25
    (tmp_path / "mine.py").write_text(example)
    settings = AlgorithmSettings(name="custom", path=f"{tmp_path}/mine.py:row")
    rows = [{"group": "g", "reward": value} for value in (4.0, 1.0, 0.0)]
    assert compute_advantages(*tables(*rows), settings, 10, 0)[0]["advantage"].to_pylist() == [3.0, 0.0, -1.0]
    part = AlgorithmSettings(name="gspo", advantage="custom", advantage_path=f"{tmp_path}/mine.py:above_median")
    assert resolve_algorithm(part).terms == resolve_algorithm(AlgorithmSettings(name="gspo")).terms


def test_credits_of_a_user_are_copies(code):
    from rft_core.advantages import Credits
    from rft_core.user_algorithm import checked_advantage

    credits = Credits(np.array([1.0, 0.0]), np.zeros(2, int), np.ones(2, bool))

    def spoil(theirs, settings):
        theirs.is_counted_N[:] = False
        return theirs.reward_N

    assert checked_advantage(spoil)(credits, AlgorithmSettings()).tolist() == [1.0, 0.0]
    assert credits.is_counted_N.all()
