import json
import textwrap
from pathlib import Path

import pytest

from rft_core.config import Recipe
from rft_core.errors import SettingsError
from rft_core.recipes import (
    ABSENT,
    Change,
    difference,
    find_recipe,
    json_schema,
    load_recipe,
    recipe_digest,
    recipe_of,
    resolved_yaml,
    shipped_recipes,
    with_overrides,
)

SMALLEST = """
steps: 3
model: {path: tiny}
data: {source: rows.jsonl}
reward:
  functions:
    - name: exact_match
"""


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "folder" / "mine.yaml"
    path.parent.mkdir()
    path.write_text(SMALLEST)
    return path


def written(recipe_file: Path, text: str) -> Path:
    recipe_file.write_text(textwrap.dedent(text))
    return recipe_file


def error_of(call) -> str:
    with pytest.raises(SettingsError) as caught:
        call()
    return str(caught.value)


# --- finding and reading


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_every_shipped_recipe_loads_by_name(name):
    assert load_recipe(name) == load_recipe(shipped_recipes()[name])


def test_quickstart_is_among_them_and_short():
    assert len(shipped_recipes()["quickstart"].read_text().splitlines()) <= 40


def test_a_missing_recipe_says_where_it_looked_and_what_there_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = error_of(lambda: find_recipe("quikstart"))
    assert str(tmp_path / "quikstart") in message
    assert "shipped recipes: " in message
    assert "did you mean quickstart?" in message


def test_a_folder_is_no_recipe(tmp_path):
    assert "is a folder, not a file" in error_of(lambda: load_recipe(tmp_path))


def test_a_file_goes_before_a_shipped_name(recipe_file, monkeypatch):
    monkeypatch.chdir(recipe_file.parent)
    recipe_file.rename("quickstart")
    assert load_recipe("quickstart").steps == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "must hold a mapping of settings, found a list of 2"),
        ("", "must hold a mapping of settings, found null"),
        ("steps: 1\nsteps: 2\n", "line 2, column 1: key 'steps' occurs twice"),
        ("seed: 1\nsteps: [1\n", "line 3"),
        ("model: {path: a, path: b}\nsteps: 1", "line 1, column 18: key 'path' occurs twice"),
        ("1: a\n", "keys must be texts, found 1"),
        ("a: !!python/object/apply:os.system [ls]\n", "could not determine a constructor"),
        ("a: " + "[" * 2000, "nested too deeply"),
    ],
)
def test_what_is_no_recipe_is_named(recipe_file, text, message):
    recipe_file.write_text(text)
    found = error_of(lambda: load_recipe(recipe_file))
    assert str(recipe_file) in found
    assert message in found


def test_bytes_that_are_no_text_are_named(recipe_file):
    recipe_file.write_bytes(b"steps: \xff\xfe")
    assert "cannot read recipe" in error_of(lambda: load_recipe(recipe_file))


def test_numbers_and_words_mean_what_they_look_like(recipe_file):
    # YAML 1.1 would read a text, false, eight, ninety and a date.
    written(
        recipe_file,
        """
        steps: 010
        model: {path: no}
        data: {source: a.jsonl, parameters: {a: 1e-5, b: 1:30, c: 2024-01-01, d: on, e: 1_000, f: 0x1F}}
        reward: {functions: [{name: exact_match, label: off}]}
        training: {learning_rate: 1e-5}
        """,
    )
    recipe = load_recipe(recipe_file)
    assert (recipe.steps, recipe.model.path, recipe.training.learning_rate) == (10, "no", 1e-5)
    assert recipe.data.parameters == {"a": 1e-5, "b": "1:30", "c": "2024-01-01", "d": "on", "e": "1_000", "f": "0x1F"}
    assert recipe.reward.functions[0].label == "off"


# --- errors


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.lerning_rate=1", "unknown setting training.lerning_rate; did you mean training.learning_rate?"),
        ("learning_rate=1", "unknown setting learning_rate; did you mean training.learning_rate?"),
        ("lerning_rate=1", "unknown setting lerning_rate; did you mean training.learning_rate?"),
        ("rollout.group_sise=1", "did you mean rollout.group_size?"),
        ("reward.functions.0.wieght=1", "did you mean reward.functions.0.weight?"),
        ("execution.qqq=1", "execution has: threads, retries"),
        ("training.learning_rate=-1", "training.learning_rate must be greater than 0.0, found -1"),
        ("training.learning_rate=fast", "training.learning_rate must be a number, found the text 'fast'"),
        ("training.learning_rate=.inf", "must be a finite number"),
        ("steps=2.5", "steps must be a whole number, found 2.5"),
        ("steps=true", "steps must be a whole number, found true"),
        ("steps='3'", "steps must be a whole number, found the text '3'"),
        ("algorithm.name=grppo", "did you mean grpo?"),
        ("training=3", "training must be a mapping of settings, found 3"),
        (
            "reward.functions=[]",
            "reward.functions must name what is rewarded: grpo trains on completions that the policy samples",
        ),
        ("evaluation.pass_at=[9]", "pass_at must be at most samples (4), got 9"),
        (
            "model.path=",
            "model.path must be a text that is not blank, found the text '': A model folder, a name fetched",
        ),
        ("data.source=' '", "data.source must be a text that is not blank, found the text ' ': A file (.jsonl"),
        ("data.fields.foo=x", "keys of data.fields must be among 'id', 'prompt', 'system'"),
        ("data.difficulty_field=", "data.difficulty_field must be a text that is not blank"),
        ("model.chat_template=", "model.chat_template must be a text that is not blank"),
        ("model.lora_targets=[q_proj, '']", "model.lora_targets.1 must be a text that is not blank"),
        ("model.lora_targets=[]", "model.lora_targets must be a list of at least 1"),
        ("rollout.script=", "rollout.script must be a text that is not blank"),
        ("reward.functions.0={name: custom, path: ''}", "reward.functions.0.path must be a text that is not blank"),
        ("reward.functions.0.depends_on=['']", "reward.functions.0.depends_on.0 must be a text that is not blank"),
        ("reward.functions.0.score_key=", "reward.functions.0.score_key must be a text that is not blank"),
        (
            "reward.functions.0.label=a/b",
            "label must be a text without slashes that is not blank, found the text 'a/b'",
        ),
        ("reward.functions.0.name=", "reward.functions.0.name must be 'exact_match', "),
        ("reward.functions.0={name: answer_format, pattern: ''}", "pattern must be a text of length 1 or more"),
        ("evaluation.correct_component=", "evaluation.correct_component must be one of ['exact_match'], got ''"),
        ("model=null", "model must be a mapping of settings, found null"),
    ],
)
def test_a_wrong_setting_is_named_with_its_mend(recipe_file, override, message):
    assert message in error_of(lambda: load_recipe(recipe_file, [override]))


def test_the_error_says_whether_file_or_override_is_wrong(recipe_file):
    written(recipe_file, SMALLEST + "sed: 1\n")
    lines = error_of(lambda: load_recipe(recipe_file, ["steps=-1"])).splitlines()
    assert lines == [
        "--set: steps must be at least 0, found -1",
        f"{recipe_file}: unknown setting sed; did you mean seed?",
    ]


def test_a_missing_section_is_named_with_its_meaning(recipe_file):
    written(recipe_file, "steps: 1\nmodel: {path: a}\n")
    assert "data is required: Where prompts come from." in error_of(lambda: load_recipe(recipe_file))


# --- overrides


def test_overrides_reach_into_mappings_and_lists(recipe_file):
    recipe = load_recipe(
        recipe_file,
        [
            "training.learning_rate=1e-5",  # a section that the file does not have
            "reward.functions.0.weight=2",
            "reward.functions.1={name: numeric_answer}",  # appends
            "data.parameters.min_terms=3",
            "steps=7",
            "steps=8",  # the last one holds
        ],
    )
    assert recipe.training.learning_rate == 1e-5
    assert [(f.name, f.weight) for f in recipe.reward.functions] == [("exact_match", 2.0), ("numeric_answer", 1.0)]
    assert recipe.data.parameters == {"min_terms": 3}
    assert recipe.steps == 8


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        ("Reply: only the number", "Reply: only the number"),
        ("", ""),
        ("12", "12"),
        ("'a b'", "a b"),
        ("[x", "[x"),
        ("a=b", "a=b"),
    ],
)
def test_a_text_setting_takes_any_text(recipe_file, raw, value):
    assert load_recipe(recipe_file, [f"data.suffix={raw}"]).data.suffix == value


def test_an_optional_text_can_be_null(recipe_file):
    assert load_recipe(recipe_file, ["data.system=Be short.", "data.system=null"]).data.system is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "--set takes key=value"),
        ("=3", "--set takes key=value"),
        ("a..b=3", "--set takes key=value"),
        ("reward.functions.2.weight=1", "must be an index from 0 to 1"),
        ("reward.functions.first.weight=1", "must be an index from 0 to 1"),
        ("steps.x=1", "'x' cannot be set inside 3"),
        ("steps=[1", "--set steps:"),
    ],
)
def test_an_override_that_cannot_be_applied_is_named(recipe_file, override, message):
    assert message in error_of(lambda: load_recipe(recipe_file, [override]))


# --- paths


def test_paths_are_taken_from_the_recipe_and_overrides_from_here(recipe_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(
        recipe_file,
        """
        steps: 1
        model: {path: ./weights}
        data: {source: rows.jsonl}
        rollout: {script: lines.json}
        reward: {functions: [{name: custom, path: "mine.py:score", depends_on: [words.txt]}]}
        """,
    )
    recipe = load_recipe(recipe_file)
    folder = recipe_file.parent
    assert recipe.data.source == str(folder / "rows.jsonl")
    assert recipe.model.path == str(folder / "weights")
    assert recipe.rollout.script == str(folder / "lines.json")
    assert recipe.reward.functions[0].path == f"{folder / 'mine.py'}:score"
    assert recipe.reward.functions[0].depends_on == [str(folder / "words.txt")]
    assert load_recipe(recipe_file, ["data.source=other.jsonl"]).data.source == str(tmp_path / "other.jsonl")


def test_paths_of_mixtures_and_cleaning_are_paths_too(recipe_file):
    written(
        recipe_file,
        """
        steps: 1
        model: {path: tiny}
        data:
          mixture: [{source: sums.jsonl, weight: 2.0}, {source: "reasoning_gym:gcd"}]
          heldout_source: held.jsonl
          cleaning: [{name: strip}, {name: custom, path: "mine.py:tidy"}, {name: custom, path: package.tidy}]
        reward: {functions: [{name: exact_match}]}
        """,
    )
    data, folder = load_recipe(recipe_file).data, recipe_file.parent
    assert [part.source for part in data.mixture] == [str(folder / "sums.jsonl"), "reasoning_gym:gcd"]
    assert data.heldout_source == str(folder / "held.jsonl")
    assert [operator.path for operator in data.cleaning] == [None, f"{folder / 'mine.py'}:tidy", "package.tidy"]


def test_what_is_no_path_stays(recipe_file):
    overrides = ["data.source=reasoning_gym:chain_sum", "model.path=owner/name"]
    custom = "reward.functions.0={name: custom, path: package.module.score}"
    recipe = load_recipe(recipe_file, [*overrides, custom])
    assert recipe.data.source == "reasoning_gym:chain_sum"
    assert recipe.model.path == "owner/name"
    assert recipe.reward.functions[0].path == "package.module.score"


def test_a_model_folder_beside_the_recipe_is_found(recipe_file):
    (recipe_file.parent / "tiny").mkdir()
    assert load_recipe(recipe_file).model.path == str(recipe_file.parent / "tiny")


# --- writing and comparing


def test_the_resolved_text_gives_the_same_recipe(recipe_file, tmp_path):
    recipe = load_recipe(
        recipe_file, ["data.suffix='\nOnly: the #number.'", "training.learning_rate=1e-5", "data.system=no"]
    )
    again = tmp_path / "resolved.yaml"
    again.write_text(resolved_yaml(recipe))
    assert load_recipe(again) == recipe
    assert list(json.loads(json.dumps(recipe.model_dump()))) == list(Recipe.model_fields)


def test_difference_names_content_and_execution(recipe_file):
    old = load_recipe(recipe_file)
    overrides = [
        "steps=4",
        "model.path=other",
        "execution.retries=1",
        "reward.functions.0.weight=2",
        "data.parameters={a: 1}",
    ]
    changes = difference(old, load_recipe(recipe_file, overrides))
    assert changes == [
        Change("steps", 3, 4, True),
        Change("model.path", "tiny", "other", False),
        Change("data.parameters.a", ABSENT, 1, True),
        Change("reward.functions.0.weight", 1.0, 2.0, True),
        Change("execution.retries", 3, 1, False),
    ]
    assert difference(old, old) == []


def test_a_reward_that_came_or_went_is_one_change(recipe_file):
    old = load_recipe(recipe_file)
    new = with_overrides(old, ["reward.functions.1={name: numeric_answer}"])
    assert [change.sentence for change in difference(old, new)] == [
        'reward.functions.1: (absent) -> {"name": "numeric_answer"}'
    ]
    assert [change.sentence for change in difference(new, old)] == [
        'reward.functions.1: {"name": "numeric_answer"} -> (absent)'
    ]


def test_the_digest_follows_content_only(recipe_file):
    old = load_recipe(recipe_file)
    assert recipe_digest(with_overrides(old, ["execution.retries=9", "model.path=elsewhere"])) == recipe_digest(old)
    assert recipe_digest(with_overrides(old, ["seed=1"])) != recipe_digest(old)


def test_values_from_a_form_are_checked_alike():
    assert "form: steps is required" in error_of(lambda: recipe_of({}, "form"))


def test_the_schema_describes_the_recipe():
    schema = json_schema()
    assert list(schema["properties"]) == list(Recipe.model_fields)
    assert schema["additionalProperties"] is False
