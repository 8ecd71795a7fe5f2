"""What a run learned: its first evaluation against its last, on the same prompts, and where things are."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from data_contracts.ledger import EXPERTS
from data_contracts.refs import MAIN
from flows.inspect.run import AT_STEP, RunView, open_run
from flows.inspect.status import evaluations_of
from rft_core.evaluation import Interval, PromptScores, paired_difference, prompt_scores

EDGE_STEPS = 5  # so many steps at either end are averaged, since one step's reward is noisy
ORDER = ("sampled_accuracy", "greedy_accuracy", "mean_reward")  # then pass@k


@dataclass(frozen=True)
class Change:
    """A metric at the first and last evaluation. `low`..`high` is the 95 % interval of the paired difference; null when
    the two cannot be paired.
    """

    metric: str
    first: dict[str, Any]  # rows of the status object's evaluations
    last: dict[str, Any]
    difference: float
    low: float | None = None
    high: float | None = None
    num_prompts: int = 0


def learned(root: str, run: str) -> dict[str, Any]:
    """First and last evaluation, reward of the first and last steps, and where the checkpoint is.

    `metrics` is empty when fewer than two policies were evaluated; `checkpoint` is null before the first. Of a run with
    phases, `metrics` and `reward` are those of the newest, and `phases` holds those of all.
    """
    view = open_run(root, run)
    kept = [checkpoint for checkpoint in view.checkpoints() if checkpoint.is_there]
    phases = [
        {
            "phase": part.phase,
            "metrics": [asdict(change) for change in changes_of(part)],
            "reward": reward_change(part),
        }
        for part in view.by_phase()
    ]
    return {
        "run": run,
        "state": view.state,
        "step": view.last_step,
        "phases": phases,
        "metrics": phases[-1]["metrics"],
        "reward": phases[-1]["reward"],
        "checkpoint": str(kept[-1].folder) if kept else None,
        "export": f"rft export {run} --to {run}-model",
        "report": f"rft report {run}",
    }


def learned_lines(summary: dict[str, Any]) -> list[str]:
    """The summary as the last lines of `rft run`."""
    lines = [line for phase in summary["phases"] for line in _phase_lines(phase)]
    lines.append(f"checkpoint: {summary['checkpoint'] or 'none yet'}")
    lines.append(f"model folder: {summary['export']}")
    lines.append(f"report: {summary['report']}")
    return lines


def _phase_lines(phase: dict[str, Any]) -> list[str]:
    lines = []
    for change in phase["metrics"]:
        line = f"{change['metric']}: {_measured(change['first'])} -> {_measured(change['last'])}"
        if change["low"] is not None:
            interval = f"[{change['low']:+.3f}, {change['high']:+.3f}]"
            line += f", paired difference {change['difference']:+.3f} {interval}"
        lines.append(f"{line} over {change['last']['num_prompts']} held-out prompts")
    reward = phase["reward"]
    if reward is not None:
        count = reward["steps"]
        lines.append(f"reward: {reward['first']:.3f} (first {count} steps) -> {reward['last']:.3f} (last {count})")
    return lines if phase["phase"] == MAIN else [f"{phase['phase']}: {line}" for line in lines]


def _measured(evaluation: dict[str, Any]) -> str:
    return f"{evaluation['value']:.3f} [{evaluation['low']:.3f}, {evaluation['high']:.3f}]"


def changes_of(view: RunView) -> list[Change]:
    """Every metric that the first and the last evaluation share, with its paired difference."""
    rows = evaluations_of(view)
    if not rows or rows[0]["step"] == rows[-1]["step"]:
        return []
    start, end = rows[0]["step"], rows[-1]["step"]
    firsts = {(row["suite"], row["metric"]): row for row in rows if row["step"] == start}
    changes = []
    for row in rows:
        first = firsts.get((row["suite"], row["metric"]))
        if row["step"] != end or first is None:
            continue
        paired = paired_change(view, start, view, end, row["metric"])
        changes.append(
            Change(row["metric"], first, row, row["value"] - first["value"])
            if paired is None
            else Change(row["metric"], first, row, paired.value, paired.low, paired.high, paired.num_prompts)
        )
    return sorted(changes, key=lambda c: (ORDER.index(c.metric) if c.metric in ORDER else len(ORDER), c.metric))


def reward_change(view: RunView) -> dict[str, Any] | None:
    """Mean training reward over the first and last steps; null before the first reward."""
    rows = view.table("rewards", "rewards", ["reward"], without=EXPERTS)
    grouped = rows.group_by(AT_STEP).aggregate([("reward", "mean")])
    means = dict(zip(grouped[AT_STEP].to_pylist(), grouped["reward_mean"].to_pylist(), strict=True))
    for entry, tombstone in view.deleted("rewards", "rewards", without=EXPERTS):
        means[entry.step] = tombstone.facts.get("metrics", {}).get("reward")
    values = np.array([means[step] for step in sorted(means) if means[step] is not None])
    if not len(values):
        return None
    count = min(EDGE_STEPS, max(1, len(values) // 2))
    return {"first": float(values[:count].mean()), "last": float(values[-count:].mean()), "steps": count}


def paired_change(view: RunView, step: int, other: RunView, later: int, metric: str) -> Interval | None:
    """The change from one run's evaluation to another's, or a later one, over the prompts that both asked; null when
    other graders or components judged them, when no prompt is asked in both, or when retention deleted rows of either.
    """
    ends = ((view, step), (other, later))
    stages = {"evaluation-rollouts": "rollouts", "evaluation-rewards": "rewards"}
    if any(e.step == at for run, at in ends for stage, record in stages.items() for e, _ in run.deleted(stage, record)):
        return None
    tables = [_evaluated(run, at) for run, at in ends]
    components = {_correct_component(run, at) for run, at in ends}
    graders = {name for _, rewards in tables for name in rewards["grader_digest"].unique().to_pylist()}
    component = components.pop()
    if len(graders) != 1 or components or component is None:
        return None
    before, after = (prompt_scores(rollouts, rewards, metric, component) for rollouts, rewards in tables)
    if other is not view:
        asked = _questions(view).items() & _questions(other).items()
        before, after = (_over(scores, {name for name, _ in asked}) for scores in (before, after))
    return paired_difference(before, after, int(view.recipe.get("seed", 0)))


def _questions(view: RunView) -> dict[str, str]:
    """What each prompt asks, by its id: in another run the same id may be of another prompt."""
    rows = view.table("data", "prompts", ["prompt_id", "messages"])
    return dict(zip(rows["prompt_id"].to_pylist(), rows["messages"].to_pylist(), strict=True))


def _over(scores: PromptScores, prompt_ids: set[str]) -> PromptScores:
    kept = np.array([name in prompt_ids for name in scores.prompt_ids], bool)
    ids = tuple(name for name in scores.prompt_ids if name in prompt_ids)
    return replace(scores, prompt_ids=ids, values_P=scores.values_P[kept])


def _evaluated(view: RunView, step: int) -> tuple[pa.Table, pa.Table]:
    """Held-out rollouts of a step, sampled and greedy, and their rewards."""
    columns = ["rollout_id", "reward", "components", "component_status", "grader_digest"]
    return (
        view.table("evaluation-rollouts", "rollouts", ["rollout_id", "prompt_id", "sampling"], step=step),
        view.table("evaluation-rewards", "rewards", columns, step=step),
    )


def _correct_component(view: RunView, step: int) -> str | None:
    """The reward component that said correct in the evaluation of a step; null where its table does not name it."""
    for entry, ref in view.refs("evaluation", "evaluations"):
        if entry.step == step:
            return view.store.manifest(ref)["provenance"].get("settings", {}).get("correct_component")
    return None
