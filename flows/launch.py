"""Start a flow from the command line: a server, the live display, the flow, and what was learned."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from flows.inspect.learned import learned, learned_lines
from flows.inspect.run import open_run
from flows.live import LiveWatcher
from flows.orphans import mend_orphans
from flows.server import prefect_server
from rft_core.config import Recipe
from rft_core.phases import phase_recipes
from rft_core.recipes import absolute_overrides
from tasks.model_paths import with_folders
from tasks.runs import check_run_name

Stage = Literal["data", "rollouts", "rewards", "advantages", "update"]


def launch_train(
    root: Path, recipe: Recipe, name: str, accept_new_code: bool, quietly: bool = False, remake: bool = False
) -> None:
    """Run or resume the train flow under its name; ends with what was learned."""
    check_run_name(name)  # what is wrong is said before a server is started
    for own in phase_recipes(recipe).values():
        with_folders(own, root)
    _find_modules_here()
    with prefect_server(root):
        from flows.train import train

        mend_orphans(root)
        with LiveWatcher(name, steps_of(recipe), quietly) as watcher, _watching(name, watcher):
            train(recipe=recipe, run=name, root=str(root), accept_new_code=accept_new_code, remake=remake)
    if not quietly:
        print_learned(root, name)


def launch_rerun(
    root: Path,
    run: str,
    stage: Stage,
    at: int | None,
    new: str,
    overrides: list[str],
    accept_new_code: bool,
    phase: str | None = None,
) -> None:
    """Run or resume the rerun flow; ends with what was learned."""
    open_run(str(root), run).of_phase(phase)  # what is wrong is said before a server is started
    check_run_name(new)
    overrides = absolute_overrides(overrides, Path.cwd())
    _find_modules_here()
    with prefect_server(root):
        from flows.rerun import rerun, rerun_recipe

        mend_orphans(root)
        recipe = rerun_recipe(root, run, stage, overrides, at, phase)
        with LiveWatcher(new, steps_of(recipe)) as watcher, _watching(new, watcher):
            rerun(
                run=run,
                stage=stage,
                new=new,
                overrides=overrides,
                at=at,
                root=str(root),
                accept_new_code=accept_new_code,
                phase=phase,
            )
    print_learned(root, new)


@contextmanager
def _watching(run: str, watcher: LiveWatcher) -> Iterator[None]:
    """Nobody else's run of that name, later in this process, is watched by it."""
    from flows.train import WATCHERS

    WATCHERS[run] = watcher
    try:
        yield
    finally:
        del WATCHERS[run]


def steps_of(recipe: Recipe) -> dict[str, int]:
    """By phase."""
    return {name: own.steps for name, own in phase_recipes(recipe).items()}


def _find_modules_here() -> None:
    """A reward function given as module.function may lie in the user's folder; libraries go before it."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def print_learned(root: Path, name: str) -> None:
    for line in learned_lines(learned(str(root), name)):
        print(line)
