"""The train flow: for each phase: validate -> for each step: prompts -> rollouts -> rewards -> advantages -> update ->
evaluate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast
from uuid import UUID

from prefect import flow
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Completed

from data_contracts.errors import RunBusy
from data_contracts.ledger import BASELINE, EXPERTS
from data_contracts.refs import MAIN, PolicyRef, TableRef
from flows.orphans import crash_flow_run
from flows.root import flow_root
from rft_core.config import Recipe
from tasks.advantages import assign_credit
from tasks.context import RunContext, opened
from tasks.data import validate_data
from tasks.evaluation import measure_policy
from tasks.given import measure_likelihood, read_rewards, render_rollouts
from tasks.phases import is_evaluated
from tasks.progress import Watcher
from tasks.prompts import choose_prompts, history_of
from tasks.rewards import probe_rewards, score_rollouts
from tasks.rollouts import GREEDY, SAMPLED, generate_rollouts
from tasks.rounds import wants_another
from tasks.runs import close_run, open_run
from tasks.stage import Slot, artifact_key, run_stage
from tasks.token_scores import score_tokens, tables_of
from tasks.update import update_policy

DATE = "{date}"
WATCHERS: dict[str, Watcher] = {}  # who watches a run of this process, by the run's name


@flow(name="train", flow_run_name="{run}", persist_result=False)
def train(
    recipe: Recipe,
    run: str = "train",
    root: str | None = None,
    accept_new_code: bool = False,
    if_busy: Literal["fail", "skip"] = "fail",
    remake: bool = False,
) -> dict[str, Any] | State[Any]:
    """Train a model, or resume the run of that name exactly where it stopped.

    `{date}` in the name becomes the time that the flow run was scheduled for, so that each run of a schedule has its
    own name. With `if_busy: skip` a flow run that finds the run held by a live process ends at once and says by whom.
    `remake` makes again what `rft prune` deleted of the run's past.
    """
    name = run.replace(DATE, (flow_run.scheduled_start_time or datetime.now(UTC)).strftime("%Y%m%d-%H%M"))
    try:
        options = {"accept_new_code": accept_new_code, "remake": remake}
        with opened_run(flow_root(root), name, recipe, **options) as context:
            return train_phases(context)
    except RunBusy as busy:
        if if_busy == "fail":
            raise
        return Completed(name="Skipped", message=str(busy))


def train_phases(context: RunContext) -> dict[str, Any]:
    """The phase at which a run was opened, and those after it. Each lets go of its policy before the next loads its
    own; finished ones before it are left alone."""
    train_steps(context)
    while context.next_phase is not None:
        context = context.next_phase()
        context.watcher.noted(f"phase {context.phase} begins")
        train_steps(context)
    return publish(context)


def train_steps(context: RunContext) -> None:
    """All steps of a phase; what is committed already is reused."""
    recipe = context.recipe
    dataset: TableRef = run_stage(context, validate_data, Slot(0, "data"))
    if context.algorithm.samples:
        probe_rewards(context, dataset)
    experts = validate_experts(context, dataset)
    progress = _StepProgress(context)
    if is_evaluated(recipe, context.algorithm, 0):
        evaluate_policy(context, dataset, 0)
    rounds: dict[int, list[Round]] = {}
    for step in range(1, recipe.steps + 1):
        # With `ahead`, rollouts are made before the updates in between: the schedule is static, whatever ends first.
        for early in range(step, min(step + recipe.rollout.ahead, recipe.steps) + 1):
            if early not in rounds:
                rounds[early] = make_rounds(context, dataset, early, experts)
        made = rounds.pop(step)
        rewards = [round_.rewards or score_round(context, step, round_) for round_ in made]
        rollouts = [round_.rollouts for round_ in made]
        trained = [round_.rollouts for round_ in made if round_.number != BASELINE]
        scores = scores_for_credit(context, step, [r.rollouts for r in made if r.number not in (BASELINE, EXPERTS)])
        weighed = experts if recipe.experts is not None and recipe.experts.source_weights else None
        credit = rollouts, rewards, scores, weighed
        advantages: TableRef = run_stage(context, assign_credit, Slot(step, "advantages"), *credit)
        run_stage(context, update_policy, Slot(step, "update"), trained, advantages)
        if is_evaluated(recipe, context.algorithm, step):
            evaluate_policy(context, dataset, step)
        progress.advance(step, recipe.steps)


def validate_experts(context: RunContext, dataset: TableRef) -> TableRef | None:
    """The data set of expert examples, clear of what `dataset` holds out; null where none are trained on."""
    if not context.algorithm.takes_experts or not context.recipe.steps:
        return None
    experts: TableRef = run_stage(context, validate_data, Slot(0, "data", EXPERTS), dataset)
    return experts


@dataclass(frozen=True)
class Round:
    """One pass of a step over prompts. Its rewards are null until they are needed."""

    number: int
    prompts: TableRef
    rollouts: TableRef
    rewards: TableRef | None = None


def make_rounds(context: RunContext, dataset: TableRef, step: int, experts: TableRef | None = None) -> list[Round]:
    """The step's prompts and their rollouts, by the policy that the schedule names: one round, and where the algorithm
    asks for it fresh prompts until the step is full, greedy baselines, and completions of `experts`."""
    prompts: TableRef = run_stage(context, choose_prompts, Slot(step, "prompts"), dataset, history_of(context, step))
    if not context.algorithm.samples:
        return [Round(0, prompts, run_stage(context, render_rollouts, Slot(step, "rollouts"), prompts))]
    rounds = [generate_round(context, step, 0, prompts)]
    if context.algorithm.has_baselines:
        rounds.append(generate_round(context, step, BASELINE, prompts))
    if context.algorithm.dynamic_sampling:
        rounds = fill_up(context, dataset, step, rounds)
    if experts is not None:
        examples: TableRef = run_stage(context, choose_prompts, Slot(step, "prompts", EXPERTS), experts)
        given: TableRef = run_stage(context, render_rollouts, Slot(step, "rollouts", EXPERTS), examples)
        rounds.append(Round(EXPERTS, examples, given))
    return rounds


def generate_round(context: RunContext, step: int, number: int, prompts: TableRef) -> Round:
    behaviour = context.policy(max(0, step - 1 - context.recipe.rollout.ahead))
    made: TableRef = run_stage(context, generate_rollouts, Slot(step, "rollouts", number), prompts, behaviour)
    return Round(number, prompts, made)


def score_round(context: RunContext, step: int, round_: Round) -> TableRef:
    score = score_rollouts if context.algorithm.samples and round_.number != EXPERTS else read_rewards
    slot = Slot(step, "rewards", round_.number)
    rewards: TableRef = run_stage(context, score, slot, round_.rollouts, round_.prompts)
    return rewards


def scores_for_credit(context: RunContext, step: int, rollouts: list[TableRef]) -> list[TableRef]:
    """Values of tokens that the algorithm's credit needs; none where it needs none, or the credit is there already."""
    if context.ledger.get(context.phase, step, "advantages") is not None:
        return []
    return [
        run_stage(context, score_tokens, Slot(step, "token-scores", number), rollouts, scorers)
        for number, scorers in enumerate(tables_of(context.algorithm.credit_scorers))
    ]


def fill_up(context: RunContext, dataset: TableRef, step: int, rounds: list[Round]) -> list[Round]:
    """The rounds scored, and more of fresh prompts while too few groups carry signal."""
    scored = [replace(round_, rewards=score_round(context, step, round_)) for round_ in rounds]
    while wants_another(context, step, [round_.rewards for round_ in scored if round_.rewards is not None]):
        number = len(scored)
        taken = [round_.prompts for round_ in scored]
        fresh: TableRef = run_stage(context, choose_prompts, Slot(step, "prompts", number), dataset, None, taken)
        if not fresh.rows:
            break
        made = generate_round(context, step, number, fresh)
        scored.append(replace(made, rewards=score_round(context, step, made)))
    return scored


def evaluate_policy(context: RunContext, dataset: TableRef, step: int) -> TableRef:
    """Held-out rollouts, sampled and greedy or given, through the same stages as training."""
    policy: PolicyRef = context.policy(step)
    if not context.algorithm.samples:
        given: TableRef = run_stage(context, render_rollouts, Slot(step, "evaluation-rollouts"), dataset)
        read: TableRef = run_stage(context, read_rewards, Slot(step, "evaluation-rewards"), given, dataset)
        return run_stage(context, measure_likelihood, Slot(step, "evaluation"), policy, given, read)
    evaluation = context.recipe.evaluation
    rounds = [SAMPLED] * (evaluation.samples > 0) + [GREEDY] * evaluation.greedy
    rollouts, rewards = [], []
    for round_ in rounds:
        made: TableRef = run_stage(
            context, generate_rollouts, Slot(step, "evaluation-rollouts", round_), dataset, policy
        )
        rollouts.append(made)
        rewards.append(run_stage(context, score_rollouts, Slot(step, "evaluation-rewards", round_), made, dataset))
    return run_stage(context, measure_policy, Slot(step, "evaluation"), policy, rollouts, rewards)


def publish(context: RunContext) -> dict[str, Any]:
    """The result of the last phase, which is the run's: small values that say where everything is."""
    steps = context.recipe.steps
    policy = context.policy(steps)
    result = {
        "run": context.name,
        **({} if context.phase == MAIN else {"phase": context.phase}),
        "steps": steps,
        "policy_id": policy.policy_id,
        "folder": str(context.folder),
        "checkpoint": str(context.root / "checkpoints" / policy.policy_id) if steps else None,
    }
    lines = "\n".join(f"- {name}: `{value}`" for name, value in result.items())
    create_markdown_artifact(f"# Run {context.name}\n\n{lines}\n", key=artifact_key(context.name, "result"))
    return result


@contextmanager
def opened_run(root: Path, run: str, recipe: Recipe, **options: Any) -> Iterator[RunContext]:
    """An opened run whose state file and lease follow what happens to it."""
    watcher = WATCHERS.get(run)
    context = open_run(root, run, recipe, on_orphan=crash_flow_run, watcher=watcher, **options)
    try:
        if context.ledger.lease is not None:
            context.ledger.lease.record(flow_run_id=flow_run.id)
        context.write_state("running")
        yield context
    except (KeyboardInterrupt, TerminationSignal):  # the latter is what Prefect makes of SIGTERM
        context.write_state("interrupted")
        raise
    except BaseException as error:
        context.write_state("failed", error=f"{type(error).__name__}: {error}")
        raise
    else:
        context.write_state("completed")
    finally:
        close_run(opened(context.name))


class _StepProgress:
    """A progress bar in the UI, one artifact updated in place."""

    def __init__(self, context: RunContext) -> None:
        key = artifact_key(context.name, "progress", context.phase)
        of_phase = "" if context.phase == MAIN else f", {context.phase}"
        made = create_progress_artifact(0.0, key=key, description=context.name + of_phase)
        self._artifact = cast(UUID, made)  # a coroutine only where it is awaited

    def advance(self, step: int, steps: int) -> None:
        update_progress_artifact(self._artifact, progress=100.0 * step / steps)
