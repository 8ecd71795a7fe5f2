"""Which texts are paths, from where relative ones are taken, and that none of them reaches a flow."""

import pytest

from rft_core.config import Recipe
from rft_core.errors import SettingsError
from rft_core.recipe_paths import refuse_relative_paths, with_absolute_paths
from rft_core.recipes import absolute_overrides, load_recipe, with_overrides

CUSTOM = {"name": "custom", "path": "/code/mine.py:score"}


def recipe(**changes):
    values = {
        "steps": 1,
        "model": {"path": "tiny"},
        "data": {"source": "/data/rows.jsonl"},
        "reward": {"functions": [CUSTOM]},
    }
    return Recipe.model_validate({**values, **changes})


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"data": {"source": "rows.jsonl"}}, r"data.source must be an absolute path, or reasoning_gym:NAME, .*'rows"),
        ({"data": {"source": "~/rows.jsonl"}}, "data.source must be an absolute path"),
        ({"model": {"path": "./weights"}}, "model.path must be an absolute path, a name from `rft fetch-model`, or a"),
        ({"model": {"path": "../weights"}}, "model.path must be"),
        ({"model": {"path": "runs/a/weights"}}, "model.path must be"),
        ({"rollout": {"script": "lines.json"}}, "rollout.script must be an absolute path"),
        (
            {"reward": {"functions": [{**CUSTOM, "path": "mine.py:score"}]}},
            r"reward.functions.0.path must be .*FILE.py",
        ),
        ({"reward": {"functions": [{**CUSTOM, "depends_on": ["/a", "b"]}]}}, "functions.0.depends_on.1 must be"),
        (
            {"reward": {"functions": [{"name": "reward_model", "reward_model": {"path": "./rm"}}]}},
            r"functions.0.reward_model.path must be an absolute path, a name",
        ),
        (
            {
                "reward": {
                    "functions": [{"name": "reward_model", "reward_model": {"path": "rm", "chat_template": "t.jinja"}}]
                }
            },
            r"functions.0.reward_model.chat_template must be an absolute path",
        ),
    ],
)
def test_a_relative_path_has_no_meaning_in_a_flow(changes, found):
    with pytest.raises(SettingsError, match=found):
        refuse_relative_paths(recipe(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"data": {"source": "reasoning_gym:chain_sum"}},
        {"model": {"path": "owner/name"}},
        {"model": {"path": "/models/tiny"}},
        {"reward": {"functions": [{"name": "reward_model", "reward_model": {"path": "owner/name"}}]}},
        {"reward": {"functions": [{**CUSTOM, "path": "package.module.score"}]}},
        {"reward": {"functions": [{**CUSTOM, "path": "module:score"}]}},
    ],
)
def test_what_means_the_same_everywhere_passes(changes):
    refuse_relative_paths(recipe(**changes))


def test_a_shipped_recipe_passes():
    refuse_relative_paths(load_recipe("quickstart"))


def test_overrides_become_absolute_at_any_depth(tmp_path):
    (tmp_path / "weights").mkdir()
    given = [
        "steps=3",
        "model.path=weights",
        "data={source: rows.jsonl, size: 3}",
        "reward.functions.1.path=mine.py:score",
        "reward.functions=[{name: custom, path: 'mine.py:score', depends_on: [words.txt]}]",
        "reward.functions.0.label=mine.py:score",
        "data.source=reasoning_gym:chain_sum",
    ]
    assert absolute_overrides(given, tmp_path) == [
        "steps=3",
        f'model.path="{tmp_path}/weights"',
        f'data={{"source": "{tmp_path}/rows.jsonl", "size": 3}}',
        f'reward.functions.1.path="{tmp_path}/mine.py:score"',
        f'reward.functions=[{{"name": "custom", "path": "{tmp_path}/mine.py:score", '
        f'"depends_on": ["{tmp_path}/words.txt"]}}]',
        *given[5:],
    ]


def test_overrides_given_to_a_flow_are_not_taken_from_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changed = with_overrides(recipe(), ["data.source=rows.jsonl"])
    assert changed.data.source == "rows.jsonl"
    with pytest.raises(SettingsError, match=r"found the relative path 'rows.jsonl'"):
        refuse_relative_paths(changed)


def test_a_folder_here_does_not_stand_in_for_a_name_of_the_recipe(tmp_path, monkeypatch):
    (tmp_path / "here" / "tiny").mkdir(parents=True)
    (tmp_path / "mine.yaml").write_text(
        "steps: 1\nmodel: {path: tiny}\ndata: {source: a.jsonl}\nreward: {functions: [{name: exact_match}]}\n"
    )
    monkeypatch.chdir(tmp_path / "here")
    assert load_recipe(tmp_path / "mine.yaml", ["steps=2"]).model.path == "tiny"


@pytest.mark.parametrize("value", [3, None, "", "  ", ["a"], {"a": "b"}])
def test_what_is_no_path_is_left_to_validation(tmp_path, value):
    assert with_absolute_paths({"data": {"source": value}}, tmp_path) == {"data": {"source": value}}
