"""Recipes with phases: what a phase takes from the run's sections, where its model comes from, and what is refused."""

import pytest
import yaml
from pydantic import ValidationError

from rft_core.algorithms import ALGORITHMS
from rft_core.config import Recipe
from rft_core.errors import SettingsError
from rft_core.model_folder import resolve_model_path
from rft_core.phases import (
    SECTIONS,
    phase_recipes,
    phases_named,
    trained_head,
    with_models,
    with_recipes,
    without_phases,
)
from rft_core.recipe_paths import refuse_relative_paths
from rft_core.recipes import difference, load_recipe, recipe_digest, recipe_of, resolved_yaml, with_overrides

REWARD = {"functions": [{"name": "exact_match"}]}
SFT = {
    "name": "sft",
    "steps": 2,
    "data": {"record": "demonstrations", "source": "/sums.jsonl"},
    "algorithm": {"name": "sft"},
}
JUDGE = {
    "name": "judge",
    "steps": 4,
    "data": {"record": "preferences", "source": "/pairs.jsonl"},
    "algorithm": {"name": "reward_model"},
}
GRPO = {"name": "grpo", "steps": 3, "reward": REWARD}


def values(*phases, **more):
    return {
        "model": {"path": "tiny", "lora_rank": 4},
        "data": {"source": "/prompts.jsonl", "suffix": "!"},
        "training": {"learning_rate": 1e-5, "micro_batch_tokens": 512},
        "phases": list(phases),
        **more,
    }


def recipe(*phases, **more):
    return recipe_of(values(*phases, **more), "r.yaml")


def error_of(*phases, **more):
    with pytest.raises(SettingsError) as error:
        recipe(*phases, **more)
    return str(error.value)


def test_a_phase_lays_its_settings_over_those_of_the_run():
    sft, grpo = phase_recipes(recipe(SFT, {**GRPO, "training": {"learning_rate": 0.5}})).values()
    assert (grpo.training.learning_rate, grpo.training.micro_batch_tokens, grpo.steps) == (0.5, 512, 3)
    assert sft.training.learning_rate == 1e-5
    assert (grpo.model.lora_rank, sft.model.lora_rank) == (4, 4)
    # Data with a source of its own stand alone; without one they are laid over the run's.
    assert (sft.data.source, sft.data.suffix) == ("/sums.jsonl", "")
    (changed,) = phase_recipes(recipe({**GRPO, "data": {"heldout_fraction": 0.5}})).values()
    assert (changed.data.source, changed.data.suffix, changed.data.heldout_fraction) == ("/prompts.jsonl", "!", 0.5)


def test_sections_within_sections_are_laid_over_too():
    shared = {"steps": {"split": "tags", "tag": "thought"}, "missing": "unscored"}
    (own,) = phase_recipes(recipe({**GRPO, "reward": {**REWARD, "steps": {"tag": "idea"}}}, reward=shared)).values()
    assert (own.reward.steps.split, own.reward.steps.tag, own.reward.missing) == ("tags", "idea", "unscored")


def test_experts_may_be_left_out_of_a_phase():
    experts = {"source": "/demonstrations.jsonl", "per_step": 4}
    mix = {**GRPO, "name": "mix", "algorithm": {"name": "mix"}}
    made = recipe(mix, {**GRPO, "experts": None}, {**mix, "name": "more", "experts": {"per_step": 2}}, experts=experts)
    found = [own.experts and own.experts.per_step for own in phase_recipes(recipe_of(made.model_dump())).values()]
    assert found == [4, None, 2]
    assert resolved_yaml(recipe_of(yaml.safe_load(resolved_yaml(made)))) == resolved_yaml(made)


def test_a_recipe_without_phases_is_its_own():
    plain = recipe_of({**values(), "steps": 1, "reward": REWARD})
    assert phase_recipes(plain) == {"main": plain} and with_recipes(plain, {"main": plain}) is plain
    assert "phases" not in plain.content()


def test_steps_are_the_sum_and_data_may_be_left_to_the_phases():
    assert recipe(SFT, JUDGE).steps == 6
    assert "steps must be left out, or be the sum of the phases' (6), got 5" in error_of(SFT, JUDGE, steps=5)
    given = values(SFT, JUDGE)
    del given["data"]
    assert recipe_of(given).steps == 6
    given["phases"].append(GRPO)
    with pytest.raises(SettingsError, match="data is required"):
        recipe_of(given)


def test_seeds_go_by_the_name_of_the_phase():
    def seeds(*phases):
        return {name: own.seed for name, own in phase_recipes(recipe(*phases)).items()}

    assert seeds(SFT, GRPO)["grpo"] == seeds(JUDGE, GRPO)["grpo"] != seeds(SFT, GRPO)["sft"]


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ((SFT, GRPO), ["tiny", "phase:sft"]),
        ((JUDGE, GRPO), ["tiny", "tiny"]),  # a reward model is no language model to go on with
        ((SFT, JUDGE, GRPO), ["tiny", "phase:sft", "phase:sft"]),
        ((SFT, {**GRPO, "model": {"path": "tiny"}}), ["tiny", "tiny"]),
        ((SFT, {**GRPO, "model": {"lora_rank": 0}}), ["tiny", "phase:sft"]),
        ((GRPO, {**GRPO, "name": "more"}, {**GRPO, "name": "last"}), ["tiny", "phase:grpo", "phase:more"]),
    ],
)
def test_a_phase_starts_from_the_last_language_model(phases, expected):
    assert [own.model.path for own in phase_recipes(recipe(*phases)).values()] == expected


def judged_by(phase, name="reward_model", **more):
    function = {"name": name, name: {"path": f"phase:{phase}"}, **more}
    return {**GRPO, "reward": {"functions": [function], "steps": {"split": "lines"}}}


def test_models_of_rewards_may_be_those_of_phases():
    own = phase_recipes(recipe(SFT, JUDGE, judged_by("judge")))["grpo"]
    assert phases_named(own) == {"model.path": "sft", "reward.functions.0.reward_model.path": "judge"}
    found = with_models(own, lambda phase: f"/models/{phase}")
    assert found.reward.functions[0].reward_model.path == "/models/judge" and found.model.path == "/models/sft"
    assert phases_named(found) == {}
    refuse_relative_paths(recipe(SFT, JUDGE, judged_by("judge")))


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        (
            (JUDGE, judged_by("juge")),
            r"phases.1.reward.functions.0.reward_model.path must name an earlier phase (judge)",
        ),
        ((judged_by("judge"), JUDGE), "must name an earlier phase (there is none), got phase:judge"),
        (({**SFT, "model": {"path": "phase:sft"}},), "phases.0.model.path must name an earlier phase (there is none)"),
        ((SFT, judged_by("sft")), "must be a reward model, got phase sft, which trains a language model"),
        ((JUDGE, {**GRPO, "model": {"path": "phase:judge"}}), "must be a language model, got phase judge"),
        ((JUDGE, judged_by("judge", "process_reward_model")), "must be a process reward model, got phase judge"),
        ((SFT, SFT), "names of phases must differ, got ['sft', 'sft']"),
        (({**SFT, "name": "main"},), "a phase must not be called main"),
        (({**SFT, "name": "a.b"},), "phases.0.name must be a name of at most 32 lower-case letters"),
        (({**SFT, "steps": 0},), "phases.0.steps must be at least 1, found 0"),
        (({**SFT, "lr": 0},), "unknown setting phases.0.lr; phases.0 has: name, steps, model"),
        (({**SFT, "training": {"lerning_rate": 1}},), "did you mean phases.0.training.learning_rate?"),
        (
            ({**GRPO, "training": {"epochs": "2"}},),
            "phases.0.training.epochs must be a whole number, found the text '2'",
        ),
        (({**SFT, "reward": REWARD},), "phases.0: reward.functions must be empty for algorithm sft"),
        (({**GRPO, "algorithm": {"name": "grp"}},), "did you mean grpo?"),
    ],
)
def test_what_makes_no_recipe_is_named(phases, message):
    assert message in error_of(*phases)


def test_a_head_may_be_trained_on():
    again = {**JUDGE, "name": "again", "model": {"path": "phase:judge"}}
    assert phase_recipes(recipe(JUDGE, again))["again"].model.path == "phase:judge"


def test_a_recipe_without_phases_names_none(tmp_path):
    with pytest.raises(SettingsError, match="must not name a phase where the recipe has none, got phase:sft"):
        resolve_model_path("phase:sft", tmp_path)


def test_written_out_it_means_the_same():
    first = recipe(SFT, JUDGE, judged_by("judge"))
    text = resolved_yaml(first)
    again = recipe_of(yaml.safe_load(text))
    assert resolved_yaml(again) == text
    assert recipe_digest(again) == recipe_digest(first) and difference(first, again) == []
    assert again.phases[2].model["path"] == "phase:sft"


def test_differences_are_told_by_phase():
    old = recipe(SFT, GRPO)
    new = with_overrides(old, ["phases.1.training.epochs=2", "phases.0.steps=5", "phases.1.data.workers=2", "seed=4"])
    found = {change.path: (change.old, change.new, change.is_content) for change in difference(old, new)}
    assert found == {
        "seed": (0, 4, True),
        "phases.0.steps": (2, 5, True),
        "phases.1.training.epochs": (1, 2, True),
        "phases.1.data.workers": (None, 2, False),
    }
    assert new.steps == 8
    renamed = difference(old, recipe(SFT, {**GRPO, "name": "rl"}))
    assert [(change.path, change.new) for change in renamed] == [("phases.1.name", "rl")]
    assert [change.path for change in difference(old, recipe(SFT))] == ["phases.1.name"]
    # What phases share has no meaning of its own.
    assert difference(old, recipe(SFT, GRPO, evaluation={"every": 10})) == []


def test_content_is_that_of_the_phases():
    content = recipe(SFT, GRPO).content()
    assert [phase["name"] for phase in content["phases"]] == ["sft", "grpo"]
    assert content["phases"][1]["training"]["learning_rate"] == 1e-5 and "path" not in content["phases"][1]["model"]


def test_paths_of_phases_are_taken_from_the_recipes_folder(tmp_path):
    (tmp_path / "r.yaml").write_text(
        "model: {path: tiny}\nphases:\n- {name: sft, steps: 1, algorithm: {name: sft}, "
        "data: {record: demonstrations, source: rows.jsonl}}\n"
    )
    loaded = load_recipe(tmp_path / "r.yaml", ["phases.0.training.epochs=2"])
    (own,) = phase_recipes(loaded).values()
    assert own.data.source == str(tmp_path / "rows.jsonl") and own.training.epochs == 2
    with pytest.raises(SettingsError, match=r"phases\.0\.data\.source must be an absolute path"):
        refuse_relative_paths(recipe({**SFT, "data": {**SFT["data"], "source": "rows.jsonl"}}))


def test_a_phase_has_every_section_of_a_recipe():
    shared = {"seed", "steps", "retention", "execution", "phases"}
    assert set(SECTIONS) == set(Recipe.model_fields) - shared


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_what_an_algorithm_trains_is_known(name):
    plain = Recipe.model_construct(algorithm=Recipe.model_fields["algorithm"].get_default(call_default_factory=True))
    chosen = plain.model_copy(update={"algorithm": plain.algorithm.model_copy(update={"name": name})})
    assert trained_head(chosen) == ALGORITHMS[name].head


def test_errors_of_pydantic_are_placed():
    with pytest.raises(ValidationError) as error:
        Recipe.model_validate(values({**GRPO, "training": {"epochs": 0}}))
    assert error.value.errors()[0]["loc"] == ("phases", 0, "training", "epochs")


def test_rewards_by_a_phase_are_left_out_where_there_is_no_run():
    own = phase_recipes(recipe(JUDGE, judged_by("judge")))["grpo"]
    assert without_phases(own).reward.functions == [] and len(own.reward.functions) == 1
