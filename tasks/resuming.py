"""What a run began with, and what may be another when it is resumed. No torch.

Of a phase that has not begun anything may change, since nothing of it is done; of the others only what decides how work
is done, and more steps of the newest one.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from data_contracts.errors import DamagedTable
from data_contracts.files import read_json
from data_contracts.refs import MAIN
from rft_core.config import Recipe
from rft_core.errors import ContentChanged, SettingsError
from rft_core.phases import phase_recipes
from rft_core.recipes import Change, recipe_of
from rft_core.yaml_text import parse_yaml

# The earliest stage whose work a change invalidates: what `rft rerun --from` should name.
STAGE_OF_SETTING = {
    "seed": "data",
    "model": "data",
    "data": "data",
    "experts": "data",
    "rollout": "rollouts",
    "reward": "rewards",
    "algorithm": "advantages",
    "critic": "advantages",
    "teacher": "advantages",
    "training": "update",
    "evaluation": "update",
    "steps": "update",
}
STAGE_OF_IDENTITY = {
    "source": "data",
    "experts": "data",
    "tokenizer": "data",
    "model": "data",
    "script": "rollouts",
    "grader": "rewards",
    "algorithm": "advantages",
    "critic": "advantages",
    "teacher": "advantages",
    "reference": "update",
}
STAGE_ORDER = ("data", "rollouts", "rewards", "advantages", "update")


def refuse_changed_content(
    name: str,
    changes: list[Change],
    recipe: Recipe,
    begun: dict[str, dict[str, str]],
    phase: str,
    identity: dict[str, str],
) -> None:
    """Raise ContentChanged, with the rerun that would do it. `begun` are the identities of phases by which the run is
    held, `identity` is what `phase` has now.
    """
    refused = [change for change in changes if change.is_content and not _is_harmless(change, recipe, list(begun))]
    sentences = [change.sentence for change in refused]
    places = [_place(change, recipe) for change in refused]
    for what, stage in STAGE_OF_IDENTITY.items():
        is_said = (phase, stage) in [(at, of) for at, of, _ in places]
        if phase in begun and begun[phase].get(what) != identity.get(what) and not is_said:
            sentences.append(f"content of the {what}: {short(begun[phase].get(what))} -> {short(identity.get(what))}")
            places.append((phase, stage, ""))
    if not sentences:
        return
    raise ContentChanged(
        f"run {name} must go on with what it began with, found other content:\n  "
        + "\n  ".join(sentences)
        + f"\nStart another run{_mend(name, refused, places, list(phase_recipes(recipe)))}"
    )


def _mend(name: str, refused: list[Change], places: list[tuple[str, str, str]], phases: list[str]) -> str:
    """The command for a rerun from the earliest phase and stage; none where the phases themselves are others."""
    if any(change.path.endswith(".name") and change.path.count(".") == 2 for change in refused):
        return ": rft run RECIPE --name NEW"
    first = min((at for at, _, _ in places), key=phases.index)
    stage = min((stage for at, stage, _ in places if at == first), key=STAGE_ORDER.index)
    options = [f"--from {stage}", *([] if phases == [MAIN] else [f"--phase {first}"])]
    for change, (at, _, setting) in zip(refused, places, strict=False):
        options.append(f"--set {setting if at == first else change.path}={_shell(change.new)}")
    return f" from its tables: rft rerun {name} {' '.join(options)}"


def _place(change: Change, recipe: Recipe) -> tuple[str, str, str]:
    """Phase, stage and setting within the phase. What all phases share concerns the first."""
    phases, parts = list(phase_recipes(recipe)), change.path.split(".")
    if parts[0] != "phases":
        return phases[0], STAGE_OF_SETTING[parts[0]], change.path
    at = phases[min(int(parts[1]), len(phases) - 1)]
    return at, STAGE_OF_SETTING.get(parts[2], "data"), ".".join(parts[2:])


def _is_harmless(change: Change, recipe: Recipe, begun: list[str]) -> bool:
    """More steps continue the newest phase, unless its learning rate's schedule depends on their number."""
    phases, parts = list(phase_recipes(recipe).items()), change.path.split(".")
    index, setting = (int(parts[1]), parts[2]) if parts[0] == "phases" else (0, change.path)
    if parts[0] == "phases" and index >= len(begun):
        return True
    if setting != "steps" or index < len(begun) - 1:
        return False
    return bool(change.new > change.old) and phases[index][1].training.schedule == "constant"


def identities_of(description: dict[str, Any] | None) -> dict[str, dict[str, str]]:
    """From run.json: digests of what each phase that began is made from, in order."""
    if description is None:
        return {}
    return description.get("phases") or {MAIN: description["identity"]}


def read_run(folder: Path) -> dict[str, Any] | None:
    """run.json; None when there is no such run."""
    needs = ("identity", "semantics", "fingerprint", "resumed")
    return read_json(folder / "run.json", needs, "delete it and run the same command again, which writes it anew")


def read_recipe(folder: Path) -> Recipe:
    """The resolved recipe that a run was begun with. Raises DamagedTable."""
    path = folder / "recipe.yaml"
    try:
        return recipe_of(parse_yaml(path.read_text(encoding="utf-8"), str(path)) or {}, str(path))
    except (FileNotFoundError, UnicodeDecodeError, SettingsError) as error:
        raise DamagedTable(
            f"{path} must be the recipe that the run began with: {error}\nDelete it and run.json beside it, and run "
            "the same command again, which writes both anew"
        ) from error


def short(digest: str | None) -> str:
    return (digest or "none")[:12]


def _shell(value: Any) -> str:
    text = json.dumps(value)
    return text if re.fullmatch(r"[\w.\"+-]+", text) else f"'{text}'"
