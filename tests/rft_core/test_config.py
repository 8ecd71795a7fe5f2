import pytest
from pydantic import ValidationError

from rft_core.config import (
    AlgorithmSettings,
    EvaluationSettings,
    ExecutionSettings,
    Recipe,
    RetentionSettings,
    RolloutSettings,
    Settings,
)
from rft_core.rewards.settings import RewardFunction, RewardSettings
from rft_core.setting_errors import fields_of

SMALLEST = {
    "steps": 1,
    "model": {"path": "m"},
    "data": {"source": "a.jsonl"},
    "reward": {"functions": [{"name": "exact_match"}]},
}


def test_defaults_fill_all_but_the_required():
    recipe = Recipe.model_validate(SMALLEST)
    assert (recipe.seed, recipe.algorithm.name, recipe.rollout.group_size) == (0, "grpo", 8)


@pytest.mark.parametrize("section", ["steps", "model", "data"])
def test_required_sections_are_required(section):
    rest = {name: value for name, value in SMALLEST.items() if name != section}
    with pytest.raises(ValidationError, match="Field required"):
        Recipe.model_validate(rest)


def test_settings_are_frozen():
    recipe = Recipe.model_validate(SMALLEST)
    with pytest.raises(ValidationError, match="frozen"):
        recipe.steps = 2


def test_content_leaves_execution_out():
    # Where data and model lie, and how work is done, must not enter a key; what comes out of them does elsewhere.
    content = Recipe.model_validate(SMALLEST).content()
    assert "execution" not in content
    assert "path" not in content["model"]
    assert "source" not in content["data"]
    assert "retention" not in content
    assert content["training"]["learning_rate"] == 1e-6


def test_content_reaches_into_lists():
    settings = RewardSettings(functions=[RewardFunction(name="custom", path="a.b", depends_on=["f.json"], weight=2.0)])
    function = settings.content()["functions"][0]
    assert function["weight"] == 2.0
    assert "path" not in function
    assert "depends_on" not in function


def test_every_execution_setting_is_execution():
    assert ExecutionSettings().content() == RetentionSettings().content() == {}


def test_every_leaf_says_what_it_means():
    missing = [
        path
        for path, setting in fields_of().items()
        if not setting.description
        and not (isinstance(setting.annotation, type) and issubclass(setting.annotation, Settings))
    ]
    assert missing == []


def test_sections_come_in_the_order_of_the_form():
    positions = [(field.json_schema_extra or {}).get("position") for field in Recipe.model_fields.values()]
    assert positions == list(range(len(positions)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RewardFunction(name="custom"), "custom needs path"),
        (lambda: RewardFunction(name="exact_match", path="a.b"), "path goes with name: custom"),
        (lambda: RewardFunction(name="answer_format"), "needs one of pattern"),
        (
            lambda: RewardSettings(functions=[RewardFunction(name="exact_match"), RewardFunction(name="exact_match")]),
            "'exact_match' twice",
        ),
        (
            lambda: Recipe.model_validate(SMALLEST | {"evaluation": {"samples": 2, "pass_at": [1, 3]}}),
            r"at most samples \(2\), got 3",
        ),
        (lambda: EvaluationSettings(pass_at=[0]), "greater than or equal to 1"),
        (lambda: EvaluationSettings(pass_at=[1, 1]), "must differ"),
        (lambda: EvaluationSettings(samples=0, greedy=False), "samples above 0 or greedy"),
        (lambda: EvaluationSettings(temperature=1e-4), "greater than or equal to 0.001"),
        (lambda: RolloutSettings(temperature=0), "greater than or equal to 0.001"),
        (lambda: AlgorithmSettings(kl_coefficient=float("nan")), "finite"),
        (lambda: AlgorithmSettings(kl_estimator="k1"), "k2"),
    ],
)
def test_parts_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValidationError, match=message):
        make()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"evaluation": {"correct_component": "numeric_answer"}}, "must be one of"),
        ({"data": {"source": "a.jsonl", "heldout_fraction": 0}}, "evaluation.every needs held-out prompts"),
        ({"algorithm": {"overlong_buffer_tokens": 300}}, "at most rollout.max_completion_tokens"),
        ({"algorithm": {"min_group_size": 9}}, "no group could train"),
        ({"rollout": {"group_size": 1}}, "no group could train"),
        ({"training": {"mini_batches": 9}}, r"mini_batches \(9\) must be at most rollout.prompts_per_step \(8\)"),
        (
            {
                "algorithm": {"name": "mix"},
                "experts": {"source": "b.jsonl", "per_step": 2},
                "training": {"mini_batches": 4},
            },
            r"mini_batches \(4\) must be at most experts.per_step \(2\)",
        ),
        (
            {
                "algorithm": {"name": "gdpo"},
                "reward": {"functions": [{"name": "exact_match", "clip": [0.0, 1.0]}]},
            },
            "clip of exact_match has no effect",
        ),
    ],
)
def test_sections_that_contradict_each_other_are_refused(change, message):
    with pytest.raises(ValidationError, match=message):
        Recipe.model_validate({**SMALLEST, **change})


def test_one_completion_per_prompt_is_enough_where_nobody_is_compared():
    recipe = Recipe.model_validate({**SMALLEST, "algorithm": {"name": "reinforce"}, "rollout": {"group_size": 1}})
    assert recipe.rollout.group_size == 1


def test_component_weights_take_the_sign_of_a_scale():
    functions = [{"name": "exact_match", "weight": 0.5, "scale": -3.0}, {"name": "repetition", "label": "r"}]
    recipe = Recipe.model_validate({**SMALLEST, "reward": {"functions": functions}})
    assert recipe.component_weights == {"exact_match": -0.5, "r": 1.0}
