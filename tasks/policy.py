"""Materialise a policy: the resident one, or the nearest checkpoint with its later updates replayed from the tables.

Rollouts are the write-ahead log of training. A replayed update must reproduce its stored loss and gradient norm to
the bit on the same CPU; elsewhere a difference is noted and the rollouts of that policy count as off-policy.
"""

from __future__ import annotations

import errno
import gc
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from safetensors import SafetensorError

from data_contracts.checkpoints import checkpoint_damage, checkpoint_folder, commit_checkpoint, is_complete
from data_contracts.errors import DeletedTable, FatalError
from data_contracts.files import LocalFiles, storage_error, sync_folder
from data_contracts.ledger import Entry
from data_contracts.refs import PolicyRef, TableRef, content_key
from data_contracts.retention import committing, replay_inputs
from rft_core.config import AlgorithmSettings, RolloutSettings
from rft_core.critic_settings import CriticSettings
from rft_core.errors import ReplayMismatch, SettingsError
from tasks.context import RunContext
from tasks.rounds import read_all
from tasks.semantics import SEMANTICS
from tasks.teacher import load_teacher, teacher_identity

if TYPE_CHECKING:
    from rft_core.critic import Critic
    from rft_core.policy import Policy
    from rft_core.train_state import TrainState

EXACT_COLUMNS = ("loss", "grad_norm", "value_loss", "value_grad_norm")


class Policies:
    """The policies of a run. One is resident at a time, shared by engine and trainer."""

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self._state: TrainState | None = None
        self._resident: PolicyRef | None = None
        self._reference: Policy | None = None
        self.teacher: Policy | None = None  # see tasks/teacher.py
        self.is_exact = True  # False: a replay differed, so the resident weights are not quite the policy's

    def materialise(self, wanted: PolicyRef) -> TrainState:
        """The full training state of a policy: weights, optimizer, counters."""
        if self._state is not None and self._resident == wanted:
            return self._state
        start, entries = self._way_to(wanted)
        nearer = [entry.policy for entry in entries if entry.policy and (start is None or entry.step > start.version)]
        # A nearer checkpoint saves replays, and what lies before it may have been deleted.
        saved = self._newest_sound(nearer)
        if start is None or saved is not None:
            start = self._restore(saved)
        replayed = [entry for entry in entries if start.version < entry.step <= wanted.version]
        state = self._state
        if state is None:
            raise FatalError("a policy must be loaded before its updates are replayed")
        for entry in replayed:
            try:
                self._replay(state, entry)
            except DeletedTable as deleted:
                raise DeletedTable(
                    f"policy {wanted.version} must have a checkpoint, or tables to be replayed from: {deleted}"
                ) from deleted
        return state

    def reference(self, named: str | None = None) -> Policy:
        """The policy at the start of the phase, frozen: the model folder. Or that of the folder which is named."""
        from rft_core.policy import load_reference

        if named is not None:
            return load_reference(self.context.recipe.model, Path(named), None)
        if self._reference is None:
            resident = self._state.policy if self._state is not None else None
            self._reference = load_reference(self.context.recipe.model, self.context.model_folder, resident)
        return self._reference

    def release(self) -> None:
        """Let go of all weights: the phase is over."""
        self._resident = self._state = self._reference = self.teacher = None
        gc.collect()  # modules and their hooks refer to each other

    def begin_update(self) -> None:
        """Mark the resident policy dirty: until `end_update` a retry materialises anew."""
        self._resident = None

    def end_update(self, made: PolicyRef) -> None:
        self._resident = made

    def save(self, ref: PolicyRef) -> Path:
        """Checkpoint a policy unless that is done; its manifest is written last."""
        from rft_core.checkpoint import save_checkpoint, weights_digest

        context = self.context
        folder = checkpoint_folder(context.root, ref)
        if is_complete(folder):
            return folder
        state = self.materialise(ref)
        # Named by the run, which has one writer: two runs of one recipe make the same policy.
        temporary = folder.with_name(f".{folder.name}.{context.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            save_checkpoint(state, temporary)
            commit_checkpoint(temporary, ref, weights_digest(state))
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise storage_error(error, temporary, "write") from error
        except SafetensorError as error:  # which holds the operating system's number in its text alone
            shutil.rmtree(temporary, ignore_errors=True)
            number = errno.ENOSPC if f"os error {errno.ENOSPC}" in str(error) else None
            raise storage_error(OSError(number, str(error)), temporary, "write") from error
        with committing(context.root):
            if is_complete(folder):  # another run was faster
                shutil.rmtree(temporary)
                return folder
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
            sync_folder(folder.parent)
        return folder

    def _way_to(self, wanted: PolicyRef) -> tuple[PolicyRef | None, list[Entry]]:
        """Update entries 1..wanted, and the resident policy when it lies on the way."""
        context = self.context
        updates = context.ledger.entries("update", context.phase)
        entries = [entry for entry in updates if 1 <= entry.step <= wanted.version]
        if len(entries) != wanted.version or (entries and entries[-1].policy != wanted):
            raise FatalError(f"run {context.name} must have updates 1 to {wanted.version}, found {len(entries)}")
        on_the_way = [context.root_policy, *(entry.policy for entry in entries)]
        return (self._resident if self._resident in on_the_way else None), entries

    def _restore(self, saved: PolicyRef | None) -> PolicyRef:
        """Load a checkpoint, else the model folder itself."""
        from rft_core.checkpoint import load_checkpoint
        from rft_core.score_policy import POLICIES
        from rft_core.train_state import TrainState

        context = self.context
        trained = POLICIES[context.algorithm.head]
        self._resident = None
        # A state that was used before is dropped first: two sets of weights and moments would not fit everywhere.
        self._state, self.is_exact = None, True
        if context.recipe.model.lora_rank:
            self._reference = None  # it is the dropped state's model without its adapter
        policy = trained.load(context.recipe.model, context.model_folder, context.recipe.seed)
        self._state = TrainState.start(policy, self._started_critic(policy))
        if saved is not None:
            load_checkpoint(self._state, checkpoint_folder(context.root, saved))
            context.watcher.noted(f"policy {saved.version} restored from its checkpoint")
        self._resident = saved or context.root_policy
        return self._resident

    def _started_critic(self, policy: Policy) -> Critic | None:
        """Where the run trains one; a run that only evaluates has no use for it."""
        recipe = self.context.recipe
        if not self.context.algorithm.needs_critic or not recipe.steps:
            return None
        from rft_core.critic import start_critic

        return start_critic(recipe.critic, recipe.model, self.context.model_folder, policy, recipe.seed)

    def _newest_sound(self, policies: list[PolicyRef]) -> PolicyRef | None:
        """The last policy with a checkpoint whose bytes are those that were written; altered ones are set aside."""
        for policy in reversed(policies):
            folder = checkpoint_folder(self.context.root, policy)
            if not is_complete(folder):
                continue
            damage = checkpoint_damage(folder)
            if damage is None:
                return policy
            self.context.watcher.noted(f"checkpoint of policy {policy.version} is set aside: {damage}")
            LocalFiles(self.context.root).set_aside(folder.relative_to(self.context.root).as_posix(), "damaged")
        return None

    def _replay(self, state: TrainState, entry: Entry) -> None:
        """Do a stored update again and hold it against what is stored."""
        context = self.context
        began = time.monotonic()
        stored = context.store.read(entry.refs["updates"])
        provenance = context.store.manifest(entry.refs["updates"])["provenance"]
        *rollouts, advantages = replay_inputs(context.store, entry)
        before = PolicyRef(provenance["parent_policy"], entry.step - 1)
        self.begin_update()
        made = run_update(
            context,
            state,
            read_all(context, rollouts),
            context.store.read(advantages),
            before if provenance.get("parent_is_exact", True) else inexact(before),
            provenance["settings"],
            f"replay-{entry.step:05d}",
            provenance.get("algorithm_paths", {}),
            provenance.get("teacher_path"),
        )
        difference = _difference(stored, made)
        if difference and context.recipe.model.device == "cpu":
            raise ReplayMismatch(
                f"replaying update {entry.step} of run {context.name} must give its stored numbers, "
                f"found {difference}. It was made by another CPU, thread count or library version: "
                "continue from a checkpoint with `rft rerun --at`"
            )
        if difference:
            self.is_exact = False
            context.watcher.noted(f"update {entry.step} was replayed inexactly, rows are off-policy: {difference}")
        if entry.policy is not None:
            self.end_update(entry.policy)
        context.watcher.noted(f"update {entry.step} replayed in {time.monotonic() - began:.1f} s")


def run_update(
    context: RunContext,
    state: TrainState,
    rollouts: pa.Table,
    advantages: pa.Table,
    before: PolicyRef,
    settings: dict[str, Any],
    name: str,
    algorithm_paths: dict[str, str],
    teacher_path: str | None,
) -> pa.Table:
    """One update under stored settings: the same call serves the update stage and its replay.

    `algorithm_paths` and `teacher_path` say where a user's own code and the teacher are; what they were is in the
    settings. Raises SettingsError when they have changed since.
    """
    from rft_core.resolve import resolve_algorithm
    from rft_core.update import update_policy
    from rft_core.user_algorithm import algorithm_code

    algorithm = AlgorithmSettings(**settings["algorithm"], **algorithm_paths)
    if algorithm_paths and algorithm_code(algorithm) != settings["algorithm_code"]:
        raise SettingsError(
            f"the code of {', '.join(algorithm_paths.values())} must be what the update was made with, it has changed "
            "since: put it back, or start another run with `rft rerun --from advantages`"
        )
    needs_reference = resolve_algorithm(algorithm).needs_reference
    of_critic = dict(settings.get("critic", {}))
    if of_critic and of_critic.pop("identity") != context.identity.get("critic"):
        raise SettingsError(
            "the critic must be what the update was made with (critic.path, critic.shared_trunk, its model's content): "
            "put it back, or start another run from the policy's export"
        )
    teacher = None
    if "teacher" in settings and teacher_path is not None:
        teacher = load_teacher(context, state.policy, path=teacher_path, **settings["teacher"])
    return update_policy(
        state,
        rollouts,
        advantages,
        algorithm=algorithm,
        # What was stored is content; when to give up is this recipe's.
        training=context.recipe.training.model_copy(update=settings["training"]),
        rollout=RolloutSettings(**settings["rollout"]),
        before=before,
        reference=context.policies.reference() if needs_reference else None,
        critic=CriticSettings(**of_critic),
        teacher=teacher,
        seed=settings["seed"],
        total_steps=settings["total_steps"] or 0,
        progress=context.progress(name),
    )


def update_settings(context: RunContext) -> dict[str, Any]:
    """Everything that decides an update beside its inputs; kept in the updates table for replay."""
    recipe = context.recipe
    total = recipe.steps * recipe.training.mini_batches * recipe.training.epochs
    return {
        "algorithm": recipe.algorithm.content(),
        "training": recipe.training.content(),
        "rollout": {
            "temperature": recipe.rollout.temperature,
            "max_completion_tokens": recipe.rollout.max_completion_tokens,
        },
        "model": recipe.model.content(),
        **algorithm_identity(context),
        **critic_identity(context, recipe.critic.content()),
        **teacher_identity(context),
        "seed": recipe.seed,
        "total_steps": None if recipe.training.schedule == "constant" else total,
    }


def algorithm_identity(context: RunContext) -> dict[str, Any]:
    """Digests of a user's own algorithm code, read anew each time; nothing where the recipe names none."""
    from rft_core.user_algorithm import algorithm_code

    code = algorithm_code(context.recipe.algorithm)
    return {"algorithm_code": code} if code else {}


def critic_identity(context: RunContext, settings: dict[str, Any]) -> dict[str, Any]:
    """What a critic was started from, and those of its settings; nothing where the algorithm has none."""
    if not context.algorithm.needs_critic:
        return {}
    return {"critic": {**settings, "identity": context.identity["critic"]}}


def updated_policy_id(before: PolicyRef, inputs: list[TableRef], settings: dict[str, Any]) -> str:
    """The key of the updates table is the identity of the policy that it made."""
    return content_key(
        "updates",
        inputs=inputs,
        settings=settings,
        identity={"parent": before.policy_id},
        seed=settings["seed"],
        semantics=SEMANTICS["update"],
    )


def inexact(policy: PolicyRef) -> PolicyRef:
    """What stands in for a policy that a replay reproduced only nearly: no rollout is of it, all are off-policy."""
    return PolicyRef(f"{policy.policy_id}~", policy.version)


def _difference(stored: pa.Table, made: pa.Table) -> str | None:
    for column in EXACT_COLUMNS:
        old, new = stored[column].to_numpy(), made[column].to_numpy()
        if not np.array_equal(old, new, equal_nan=True):
            return f"{column} {new} instead of {old}"
    return None
