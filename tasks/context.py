"""What every task of a run shares in this process: recipe, store, ledger, identities and the resident policy.

Tasks are called with small values (the run's name, a step, refs) and find the rest here, so that nothing live ever
travels through Prefect.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_contracts.files import LocalFiles, storage_error
from data_contracts.ledger import EXPERTS, Ledger
from data_contracts.refs import MAIN, PolicyRef, TableRef, digest_of
from data_contracts.replies import Replies
from data_contracts.store import Store
from rft_core.config import Recipe
from rft_core.data.settings import DataSettings
from tasks.progress import LogWatcher, Watcher

if TYPE_CHECKING:
    from rft_core.engines import Engine, Workplace
    from rft_core.rewards import Grader
    from rft_core.terms import Algorithm
    from tasks.beside import BesideGeneration
    from tasks.policy import Policies


@dataclass
class RunContext:
    """An opened run. `identity` holds the digests of source, tokenizer, model and grader."""

    root: Path
    name: str
    recipe: Recipe
    store: Store
    ledger: Ledger
    identity: dict[str, str]
    model_folder: Path
    provenance: dict[str, Any]
    watcher: Watcher = field(default_factory=LogWatcher)
    validated: set[str] = field(default_factory=set)  # records whose first table met the whole suite
    began: float | None = None  # when the stage at work looked for its tables, by the monotonic clock
    built_grader: Grader | None = None
    should_remake: bool = False  # make again what retention deleted of the run's past
    pruned: set[str] = field(default_factory=set)  # policies whose checkpoints are known to be deleted
    phase: str = MAIN  # recipe, identity, model and grader are those of this phase
    next_phase: Callable[[], RunContext] | None = None  # ends this phase and opens the one after it; null for the last

    @property
    def folder(self) -> Path:
        return run_folder(self.root, self.name)

    @property
    def prefix(self) -> str:
        """Stands before the names of steps and before ids of rollouts: two phases have the same steps."""
        return "" if self.phase == MAIN else f"{self.phase}/"

    @cached_property
    def tokenizer(self) -> Any:
        from rft_core.data.prompts import load_tokenizer

        return load_tokenizer(self.model_folder, self.recipe.model.chat_template)

    @cached_property
    def grader(self) -> Grader:
        from rft_core.rewards import build_grader

        return self.built_grader or build_grader(self.recipe.reward, replies=Replies(str(self.root)))

    @cached_property
    def beside(self) -> BesideGeneration | None:
        """Scores blocks of rollouts while others are generated; None where that would help nothing."""
        from tasks.beside import BesideGeneration

        is_wanted = self.recipe.execution.score_beside_generation and self.grader.works_apart
        return BesideGeneration() if is_wanted else None

    @cached_property
    def policies(self) -> Policies:
        from tasks.policy import Policies

        return Policies(self)

    @cached_property
    def algorithm(self) -> Algorithm:
        """The recipe's row of ALGORITHMS, or the user's own."""
        from rft_core.resolve import resolve_algorithm

        return resolve_algorithm(self.recipe.algorithm)

    def data_of(self, round_: int) -> DataSettings:
        """The data section behind a round: that of the experts, or of all others."""
        if round_ != EXPERTS:
            return self.recipe.data
        assert self.recipe.experts is not None, "the recipe was refused without"
        return self.recipe.experts

    @property
    def root_policy(self) -> PolicyRef:
        return PolicyRef(self.identity["policy"], 0)

    def policy(self, version: int) -> PolicyRef:
        """The policy after so many updates, from the ledger."""
        if version == 0:
            return self.root_policy
        entry = self.ledger.get(self.phase, version, "update")
        if entry is None or entry.policy is None:
            raise KeyError(f"run {self.name} has no update {version} of phase {self.phase} yet")
        return entry.policy

    def engine(self, policy: PolicyRef) -> Engine:
        """The rollout engine of the recipe, on that policy's weights where it needs any."""
        from rft_core.engines import ENGINES, NEEDS_WEIGHTS

        name = self.recipe.rollout.engine
        holder = self.policies.materialise(policy).policy if name in NEEDS_WEIGHTS else TokenizerOnly(self.tokenizer)
        self.workplace.policy_id = policy.policy_id
        return ENGINES[name](holder, self.recipe.rollout, self.workplace)

    @cached_property
    def workplace(self) -> Workplace:
        """Of an engine that outlives a stage."""
        from rft_core.engines import Workplace

        run = f"{self.name}-{digest_of(str(self.root))[:8]}"
        return Workplace(self.folder / "engine", run, self.recipe.model, self.watcher.noted)

    def progress(self, stage: str) -> Callable[[int, int, str], None]:
        """A callback that core functions report to."""
        return lambda done, total, note: self.watcher.advanced(stage, done, total, note)

    def source_provenance(self, inputs: list[TableRef], settings: dict[str, Any]) -> dict[str, Any]:
        """What a manifest says about how its table was made."""
        return {
            **self.provenance,
            "inputs": [ref.to_json() for ref in inputs],
            "settings": settings,
            "identity": self.identity,
            "seed": self.recipe.seed,
        }

    def count_generated(self, slot: str, block: int, rows: int, tokens: int) -> None:
        """Append to the count of what was really generated, before the block is committed."""
        line = json.dumps({"slot": slot, "block": block, "rows": rows, "tokens": tokens}) + "\n"
        path = self.folder / "generated.jsonl"
        size = path.stat().st_size if path.exists() else 0
        try:
            with open(path, "ab") as file:
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if path.exists():
                os.truncate(path, size)  # half a line would spoil the next one
            raise storage_error(error, path, "write") from error

    def write_state(self, state: str, **details: Any) -> None:
        """The run's state for `rft status`: running, completed, failed or interrupted."""
        LocalFiles(self.folder).write("state.json", json.dumps({"state": state, **details}, indent=1).encode())


@dataclass(frozen=True)
class TokenizerOnly:
    """Stands in for a policy where an engine needs no weights."""

    tokenizer: Any


_OPENED: dict[str, RunContext] = {}


def run_folder(root: Path, name: str) -> Path:
    return root / "runs" / name


def register(context: RunContext) -> None:
    _OPENED[context.name] = context


def unregister(name: str) -> None:
    _OPENED.pop(name, None)


def opened(name: str) -> RunContext:
    """The run that this process holds open under that name, at the phase where it is."""
    return _OPENED[name]
