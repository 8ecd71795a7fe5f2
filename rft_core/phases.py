"""Phases of a recipe, one after the other in one run: SFT, then a reward model, then reinforcement with both. No torch.

Each phase is a recipe of its own: the run's sections with those of the phase laid over them, setting by setting. Lists
are replaced whole; so is `data` where the phase names a source, since settings of one source mean nothing for another.

A model's path may be `phase:NAME`: what that earlier phase trained. A phase that gives no `model.path` starts from the
last phase before it that trained a language model, or, where there is none, from the run's `model.path`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError
from pydantic_core import InitErrorDetails

from data_contracts.refs import MAIN
from rft_core.settings import Settings

if TYPE_CHECKING:
    from rft_core.config import Recipe

NAMES_PHASE = "phase:"  # begins the path of a model that an earlier phase trained
PHASE_NAME = r"^[a-z][a-z0-9_-]{0,31}$"
DATA_SECTIONS = ("data", "experts")
CAUSAL = "causal"  # the head of a language model, by the names of model_reading.HEADS
# Section and setting -> what a model must have been trained as; `model.path` also takes the head that the phase trains.
HEADS_FOR = {
    "reward_model.path": ("sequence_labels",),
    "process_reward_model.path": ("token_labels", CAUSAL),
    "model.path": (CAUSAL,),
    "critic.path": ("sequence_labels", CAUSAL),
    "teacher.path": (CAUSAL,),
    "evaluation.reference": (CAUSAL,),
}
TRAINED_AS = {CAUSAL: "language model", "sequence_labels": "reward model", "token_labels": "process reward model"}


def _section(name: str) -> Any:
    description = f"Settings of this phase over the recipe's `{name}`."
    if name == "model":
        description += " path: phase:NAME is what an earlier phase trained; without it, the last language model."
    if name in DATA_SECTIONS:
        description += " With a source or a mixture of its own nothing of the recipe's is taken."
    if name == "experts":
        description += " null: none in this phase."
    return Field(default_factory=dict, description=description)


class PhaseSettings(Settings):
    """One phase. Its sections hold whatever of a recipe's sections is another than the run's."""

    name: str = Field(pattern=PHASE_NAME, description="Of the phase, in the ledger and in ids of rollouts; not main.")
    steps: int = Field(ge=1, description="Passes rollouts -> update of this phase.")
    model: dict[str, Any] = _section("model")
    data: dict[str, Any] = _section("data")
    rollout: dict[str, Any] = _section("rollout")
    reward: dict[str, Any] = _section("reward")
    algorithm: dict[str, Any] = _section("algorithm")
    training: dict[str, Any] = _section("training")
    critic: dict[str, Any] = _section("critic")
    teacher: dict[str, Any] = _section("teacher")
    experts: dict[str, Any] | None = _section("experts")
    evaluation: dict[str, Any] = _section("evaluation")


SECTIONS = tuple(name for name in PhaseSettings.model_fields if name not in ("name", "steps"))


def filled_from_phases(values: Any) -> Any:
    """A recipe's values with the sum of its phases' steps, and with the first phase's data where each has its own."""
    phases = values.get("phases") if isinstance(values, dict) else None
    if not isinstance(phases, list) or not phases or not all(isinstance(phase, dict) for phase in phases):
        return values
    filled = dict(values)
    steps = [phase.get("steps") for phase in phases]
    if "steps" not in filled and all(isinstance(number, int) for number in steps):
        filled["steps"] = sum(steps)
    if "data" not in filled and all(_names_source(phase.get("data")) for phase in phases):
        filled["data"] = phases[0]["data"]
    return filled


def phase_recipes(recipe: Recipe) -> dict[str, Recipe]:
    """Name -> the whole recipe of each phase, in order; a recipe without phases is its own, under the name `main`.

    Seeds differ by the phase's name. Raises ValidationError, placed at `phases.N`, for what makes no recipe.
    """
    if not recipe.phases:
        return {MAIN: recipe}
    made: dict[str, Recipe] = {}
    for index, phase in enumerate(recipe.phases):
        try:
            made[phase.name] = type(recipe).model_validate(_values_of(recipe, phase, made), strict=True)
        except ValidationError as error:
            raise _placed(error, index) from error
    return made


def check_phases(recipe: Recipe) -> None:
    """Raises ValidationError, or ValueError for what concerns several phases."""
    names = [phase.name for phase in recipe.phases]
    if len(set(names)) < len(names):
        raise ValueError(f"names of phases must differ, got {names}")
    if MAIN in names:
        raise ValueError(f"a phase must not be called {MAIN}: that is the phase of a recipe without phases")
    total = sum(phase.steps for phase in recipe.phases)
    if recipe.steps != total:
        raise ValueError(f"steps must be left out, or be the sum of the phases' ({total}), got {recipe.steps}")
    made = phase_recipes(recipe)
    for index, (name, own) in enumerate(made.items()):
        for path, named in phases_named(own).items():
            _check_reference(f"phases.{index}.{path}", path, named, names[:index], made, trained_head(made[name]))


def with_recipes(recipe: Recipe, recipes: dict[str, Recipe]) -> Recipe:
    """The recipe with these in the place of its phases, every setting written out."""
    if not recipe.phases:
        return recipes[MAIN]
    phases = [
        PhaseSettings(name=name, steps=own.steps, **own.model_dump(mode="json", include=set(SECTIONS)))
        for name, own in recipes.items()
    ]
    execution = next(iter(recipes.values())).execution
    return recipe.model_copy(
        update={"phases": phases, "steps": sum(phase.steps for phase in phases), "execution": execution}
    )


def phases_named(recipe: Recipe) -> dict[str, str]:
    """Setting -> the phase whose model it names.

    `{"model.path": "sft", "reward.functions.0.reward_model.path": "judge"}`
    """
    from rft_core.recipe_paths import is_model_path, texts

    return {
        path: text.removeprefix(NAMES_PHASE)
        for path, text in texts(recipe.model_dump(mode="json", exclude={"phases"}))
        if text.startswith(NAMES_PHASE) and is_model_path(path)
    }


def with_models(recipe: Recipe, folder_of: Callable[[str], Path]) -> Recipe:
    """A phase's recipe with the folder of each model that an earlier phase trained."""
    for path, phase in phases_named(recipe).items():
        recipe = _with_value(recipe, path.split("."), str(folder_of(phase)))
    return recipe


def without_phases(recipe: Recipe) -> Recipe:
    """A phase's recipe without the reward functions that are another phase's model: those read no answers."""
    named = {int(path.split(".")[2]) for path in phases_named(recipe) if path.startswith("reward.functions.")}
    functions = [function for index, function in enumerate(recipe.reward.functions) if index not in named]
    return recipe.model_copy(update={"reward": recipe.reward.model_copy(update={"functions": functions})})


def trained_head(recipe: Recipe) -> str:
    """What the recipe trains, a key of model_reading.HEADS. A user's own algorithm trains a language model."""
    from rft_core.algorithms import ALGORITHMS

    row = ALGORITHMS.get(recipe.algorithm.name)
    return row.head if row is not None else CAUSAL


def _values_of(recipe: Recipe, phase: PhaseSettings, before: dict[str, Recipe]) -> dict[str, Any]:
    from rft_core.seeds import derive

    values = recipe.model_dump(mode="json", exclude={"phases"})
    values |= {"steps": phase.steps, "seed": derive(recipe.seed, "phase", phase.name)}
    for section in SECTIONS:
        given = getattr(phase, section)
        is_alone = given is None or (section in DATA_SECTIONS and _names_source(given))
        if given != {}:
            values[section] = given if is_alone else _laid_over(values[section], given, section)
    language_models = [name for name, own in before.items() if trained_head(own) == CAUSAL]
    if "path" not in phase.model and language_models:
        values["model"]["path"] = NAMES_PHASE + language_models[-1]
    return values


def _names_source(data: Any) -> bool:
    return isinstance(data, dict) and bool(data.get("source") or data.get("mixture"))


def _laid_over(base: Any, given: dict[str, Any], path: str) -> dict[str, Any]:
    """Sections go into sections; whatever else is given takes the place of what was there."""
    from rft_core.setting_errors import is_section

    merged = dict(base or {})
    for name, value in given.items():
        inner = f"{path}.{name}"
        is_inner = isinstance(value, dict) and is_section(inner)
        merged[name] = _laid_over(merged.get(name), value, inner) if is_inner else value
    return merged


def _check_reference(
    setting: str, path: str, named: str, earlier: list[str], made: dict[str, Recipe], head: str
) -> None:
    if named not in earlier:
        known = ", ".join(earlier) or "there is none"
        raise ValueError(f"{setting} must name an earlier phase ({known}), got {NAMES_PHASE}{named}")
    fitting = HEADS_FOR.get(".".join(path.split(".")[-2:]))
    found = trained_head(made[named])
    if fitting is not None and found not in (*fitting, *([head] if path == "model.path" else [])):
        raise ValueError(
            f"{setting} must be a {TRAINED_AS[fitting[0]]}, got phase {named}, which trains a {TRAINED_AS[found]}"
        )


def _placed(error: ValidationError, index: int) -> ValidationError:
    """The same errors, at their places in the whole recipe."""
    return ValidationError.from_exception_data("Recipe", list(_details(error, index)))


def _details(error: ValidationError, index: int) -> Iterator[InitErrorDetails]:
    for detail in error.errors(include_url=False):
        yield InitErrorDetails(
            type=detail["type"],
            loc=("phases", index, *detail["loc"]),
            input=detail["input"],
            ctx=detail.get("ctx", {}),
        )


def _with_value(container: Any, parts: list[str], value: str) -> Any:
    if not parts:
        return value
    head, rest = parts[0], parts[1:]
    if isinstance(container, list):
        at = int(head)
        return [*container[:at], _with_value(container[at], rest, value), *container[at + 1 :]]
    return container.model_copy(update={head: _with_value(getattr(container, head), rest, value)})
