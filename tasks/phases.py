"""What the finished phases of a run left behind: their last policies, and the folders that later phases load.

    checkpoints/<policy id>/   where all weights were trained: the checkpoint is a model folder
    merged/<policy id>/        under LoRA: adapter and model in one, made from the checkpoint when a phase asks for it

A folder that was damaged or deleted is made again, which a checkpoint's tables allow.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_contracts.checkpoints import checkpoint_damage, checkpoint_folder, commit_checkpoint, is_complete
from data_contracts.errors import FatalError
from data_contracts.files import LocalFiles, storage_error, sync_folder
from data_contracts.ledger import Ledger
from data_contracts.refs import PolicyRef
from data_contracts.store import Store
from rft_core.config import Recipe
from rft_core.phases import phase_recipes, phases_named, with_models
from rft_core.resolve import resolve_algorithm
from rft_core.terms import Algorithm
from tasks.context import RunContext, run_folder
from tasks.progress import LogWatcher, Watcher
from tasks.resuming import identities_of, read_recipe, read_run

MERGED = "merged"


@dataclass(frozen=True)
class PhaseModels:
    """`recipes` are the run's, by phase and resolved; `identities` those of the phases that began; `past` is the ledger
    of the run whose phases were taken over, read where the run's own has no entry yet.
    """

    root: Path
    run: str
    recipes: dict[str, Recipe]
    ledger: Ledger
    identities: dict[str, dict[str, str]]
    past: Ledger | None = None
    watcher: Watcher = field(default_factory=LogWatcher)

    def recipe(self, phase: str) -> Recipe:
        """The phase's, with the folders of the models that earlier phases trained."""
        return with_models(self.recipes[phase], self.folder)

    def origins(self, phase: str) -> dict[str, str]:
        """Setting -> id of the policy that an earlier phase left for it."""
        return {path: self.policy(named).policy_id for path, named in phases_named(self.recipes[phase]).items()}

    def policy(self, phase: str) -> PolicyRef:
        """The phase's last policy. Raises FatalError before it is made."""
        policy = self._last_update(self.ledger, phase) or (self._last_update(self.past, phase) if self.past else None)
        if policy is None:
            raise FatalError(f"phase {phase} of run {self.run} must be finished, found no update {self._steps(phase)}")
        return policy

    def folder(self, phase: str) -> Path:
        """A model folder of the phase's last policy."""
        policy, recipe = self.policy(phase), self.recipes[phase]
        if recipe.model.lora_rank:
            return self._merged(phase, policy)
        return self._checkpoint(phase, policy)

    def _checkpoint(self, phase: str, policy: PolicyRef) -> Path:
        """Replayed where it is gone; one whose bytes were altered is set aside by `Policies`."""
        folder = checkpoint_folder(self.root, policy)
        if is_complete(folder) and checkpoint_damage(folder) is None:
            return folder
        self.watcher.noted(f"the checkpoint of phase {phase} is made again")
        self._set_aside(folder)
        context = self._context(phase)
        context.policies.save(policy)
        context.policies.release()
        return folder

    def _merged(self, phase: str, policy: PolicyRef) -> Path:
        from rft_core.checkpoint import export_model, load_checkpoint, weights_digest
        from rft_core.score_policy import POLICIES
        from rft_core.train_state import TrainState

        folder = self.root / MERGED / policy.policy_id
        if is_complete(folder) and checkpoint_damage(folder) is None:
            return folder
        checkpoint, recipe = self._checkpoint(phase, policy), self.recipe(phase)
        trained = POLICIES[resolve_algorithm(recipe.algorithm).head]
        state = TrainState.start(trained.load(recipe.model, Path(recipe.model.path), recipe.seed))
        load_checkpoint(state, checkpoint)
        temporary = folder.with_name(f".{folder.name}.{self.run}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            export_model(state, temporary, merged=True)
            commit_checkpoint(temporary, policy, weights_digest(state))
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise storage_error(error, temporary, "write") from error
        self._set_aside(folder)
        try:
            temporary.rename(folder)
        except OSError:
            if not is_complete(folder):  # else another run was faster
                raise
            shutil.rmtree(temporary)
        sync_folder(folder.parent)
        return folder

    def _set_aside(self, folder: Path) -> None:
        """What is in the way: a damaged folder, or what a crash left of a deleted one."""
        if folder.is_dir() and not (is_complete(folder) and checkpoint_damage(folder) is None):
            LocalFiles(self.root).set_aside(folder.relative_to(self.root).as_posix(), "damaged")

    def _context(self, phase: str) -> RunContext:
        """As much of the phase as a replay needs."""
        recipe = self.recipe(phase)
        has_own = self._last_update(self.ledger, phase) is not None
        ledger = self.ledger if has_own or self.past is None else self.past
        return RunContext(
            self.root,
            self.run,
            recipe,
            Store(str(self.root)),
            ledger,
            self.identities[phase],
            Path(recipe.model.path),
            provenance={},
            watcher=self.watcher,
            phase=phase,
        )

    def _last_update(self, ledger: Ledger, phase: str) -> PolicyRef | None:
        entry = ledger.get(phase, self._steps(phase), "update")
        return entry.policy if entry is not None else None

    def _steps(self, phase: str) -> int:
        return self.recipes[phase].steps


def models_of(root: Path, run: str) -> PhaseModels:
    """Of a run that is there, for readers."""
    folder = run_folder(root, run)
    recipes = phase_recipes(read_recipe(folder))
    return PhaseModels(root, run, recipes, Ledger(folder), identities_of(read_run(folder)))


def is_finished(ledger: Ledger, phase: str, recipe: Recipe) -> bool:
    """Whether all that the phase was to do is committed, and nobody need look at it again."""
    stages = ["update", "checkpoint"]
    if is_evaluated(recipe, resolve_algorithm(recipe.algorithm), recipe.steps):
        stages.append("evaluation")
    return all(ledger.get(phase, recipe.steps, stage) is not None for stage in stages)


def is_evaluated(recipe: Recipe, algorithm: Algorithm, step: int) -> bool:
    """At the start, every k steps and at the end; never in a run that may not generate."""
    every = recipe.evaluation.every
    if every == 0 or (algorithm.samples and recipe.rollout.engine == "none"):
        return False
    return step % every == 0 or step == recipe.steps


def phase_at(ledger: Ledger, recipes: dict[str, Recipe], taken: dict[str, Any]) -> str:
    """The first phase that is not finished, nor taken over from another run; the last one where all are."""
    rest = [name for name in recipes if name not in taken]
    return next((name for name in rest if not is_finished(ledger, name, recipes[name])), rest[-1])
