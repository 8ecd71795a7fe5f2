"""What the report shows, read from the run's tables."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from data_contracts.ledger import EXPERTS
from flows.inspect.learned import Change, changes_of, reward_change
from flows.inspect.lineage import Graph
from flows.inspect.metrics import metrics_of
from flows.inspect.run import RunView, open_run
from flows.inspect.status import evaluations_of, status_of
from rft_core.seeds import derive

QUARANTINE_SHOWN = 20


@dataclass(frozen=True)
class Sample:
    """One training rollout with what became of it. `why` says why it was chosen."""

    why: str
    step: int
    rollout_id: str
    prompt: str
    answer: str | None
    completion: str
    num_tokens: int
    finish_reason: str
    error_reason: str | None
    reward: float | None
    components: dict[str, float | None]
    reason: str | None
    advantage: float | None
    drop_reason: str | None


@dataclass(frozen=True)
class DataReport:
    """The data stage: rows by split, rejects by reason, examples of them, and the checks of the prompts table."""

    splits: dict[str, int]
    sources: dict[str, int]
    rejects: dict[str, int]
    examples: list[dict[str, Any]]
    checks: list[dict[str, Any]]
    counts: dict[str, int]


@dataclass(frozen=True)
class PhaseReport:
    """What one phase learned, of what data, and by which curves."""

    phase: str
    metrics: dict[str, list[Any]]
    evaluations: list[dict[str, Any]]
    changes: list[Change]
    reward: dict[str, Any] | None
    samples: list[Sample]
    data: DataReport | None


@dataclass(frozen=True)
class ReportData:
    """Everything on the page."""

    view: RunView
    status: dict[str, Any]
    phases: list[PhaseReport]
    lineage: dict[str, Any]
    provenance: dict[str, Any]


def collect(root: str, run: str) -> ReportData:
    """Raises SettingsError for an unknown run and DamagedTable for a table that is not what was committed."""
    view = open_run(root, run)
    return ReportData(
        view=view,
        status=status_of(root, run),
        phases=[_phase_report(part) for part in view.by_phase()],
        lineage=_lineage(view),
        provenance=_provenance(view),
    )


def _phase_report(view: RunView) -> PhaseReport:
    return PhaseReport(
        phase=view.phases[0] if view.phase is None else view.phase,
        metrics=metrics_of(view).to_pydict(),
        evaluations=evaluations_of(view),
        changes=changes_of(view),
        reward=reward_change(view),
        samples=_samples(view),
        data=_data_report(view),
    )


def _samples(view: RunView) -> list[Sample]:
    """The best, the worst and a random rollout of the first and of the last step that still has rewards."""
    gone = {entry.step for record in ("rollouts", "rewards") for entry, _ in view.deleted(record, record)}
    steps = sorted({entry.step for entry, _ in view.refs("rewards", "rewards")} - gone)
    found = []
    for step in dict.fromkeys(steps[:1] + steps[-1:]):
        columns = ["rollout_id", "reward", "components", "reason"]
        rewards = view.table("rewards", "rewards", columns, step=step, without=EXPERTS)
        rows = rewards.to_pylist(maps_as_pydicts="strict")
        if rows:
            found.extend(_describe(view, step, _choose(view, step, rows)))
    return found


def _choose(view: RunView, step: int, rows: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Three different rollouts where there are three; unscored ones can only be met by chance."""
    scored = sorted(
        (row for row in rows if row["reward"] is not None), key=lambda row: (-row["reward"], row["rollout_id"])
    )
    chosen = [("best", scored[0])] if scored else []
    if len(scored) > 1:
        chosen.append(("worst", scored[-1]))
    taken = {row["rollout_id"] for _, row in chosen}
    rest = [row for row in rows if row["rollout_id"] not in taken]
    if rest:
        generator = np.random.default_rng(derive(int(view.recipe.get("seed", 0)), "report", step))
        chosen.append(("random", rest[int(generator.integers(len(rest)))]))
    return chosen


def _describe(view: RunView, step: int, chosen: list[tuple[str, dict[str, Any]]]) -> list[Sample]:
    ids = [row["rollout_id"] for _, row in chosen]
    columns = ["rollout_id", "prompt_id", "completion_text", "completion_token_ids", "finish_reason", "error_reason"]
    rollouts = _by_id(view.table("rollouts", "rollouts", columns, step=step), ids)
    columns = ["rollout_id", "advantage", "drop_reason"]
    advantages = _by_id(view.table("advantages", "advantages", columns, step=step), ids)
    prompts = _prompts_of(view, {row["prompt_id"] for row in rollouts.values()})
    samples = []
    for why, row in chosen:
        rollout, credit = rollouts[row["rollout_id"]], advantages.get(row["rollout_id"], {})
        prompt = prompts.get(rollout["prompt_id"], {})
        samples.append(
            Sample(
                why=why,
                step=step,
                rollout_id=row["rollout_id"],
                prompt=prompt.get("prompt_text", ""),
                answer=prompt.get("answer"),
                completion=rollout["completion_text"],
                num_tokens=len(rollout["completion_token_ids"]),
                finish_reason=rollout["finish_reason"],
                error_reason=rollout["error_reason"],
                reward=row["reward"],
                components=row["components"],
                reason=row["reason"],
                advantage=credit.get("advantage"),
                drop_reason=credit.get("drop_reason"),
            )
        )
    return samples


def _by_id(table: pa.Table, ids: list[str]) -> dict[str, dict[str, Any]]:
    import pyarrow.compute as pc

    rows = table.filter(pc.is_in(table["rollout_id"], pa.array(ids, pa.large_string()))).to_pylist()
    return {row["rollout_id"]: row for row in rows}


def _prompts_of(view: RunView, ids: set[str]) -> dict[str, dict[str, Any]]:
    ref = view.dataset_ref()
    if ref is None:
        return {}
    if ref.record == "examples":
        rows = view.store.read(ref, ["example_id", "messages", "answer"]).to_pylist()
        return {
            row["example_id"]: {"prompt_text": _prompt_text(row["messages"]), "answer": row["answer"]}
            for row in rows
            if row["example_id"] in ids
        }
    rows = view.store.read(ref, ["prompt_id", "prompt_text", "answer"]).to_pylist()
    return {row["prompt_id"]: row for row in rows if row["prompt_id"] in ids}


def _prompt_text(messages: str) -> str:
    """What was said before the completion that the data gives; plain text has nothing before it."""
    said = json.loads(messages).get("prompt", [])
    return "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in said)


def _data_report(view: RunView) -> DataReport | None:
    ref = view.dataset_ref()
    if ref is None:
        return None
    prompts = view.store.read(ref, ["split", "source"])
    quarantine = view.table("data", "quarantine", ["source", "source_row", "reason", "detail"])
    provenance = view.store.manifest(ref)["provenance"]
    return DataReport(
        splits=_tally(prompts["split"]),
        sources=_tally(prompts["source"]),
        rejects=_tally(quarantine["reason"]),
        examples=quarantine.slice(0, QUARANTINE_SHOWN).to_pylist(),
        checks=(provenance.get("validation") or {}).get("checks", []),
        counts=provenance.get("counts", {}),
    )


def _lineage(view: RunView) -> dict[str, Any]:
    """The newest policy with the tables of its own update; the policies before it are leaves."""
    policy = view.last_policy()
    graph = Graph(view.store, max_policies=1)
    if policy is not None:
        graph.add_policy(policy.policy_id)
    graph.walk()
    return graph.to_json()


def _provenance(view: RunView) -> dict[str, Any]:
    """Versions and fingerprint that the newest table's manifest names; the run's own where there is none."""
    for entry in reversed(view.entries()):
        for ref in entry.refs.values():
            found = view.store.manifest(ref)["provenance"]
            if "versions" in found:
                return found
    return {}


def _tally(column: pa.ChunkedArray) -> dict[str, int]:
    pairs = column.value_counts().to_pylist()
    return {pair["values"]: pair["counts"] for pair in sorted(pairs, key=lambda pair: -pair["counts"])}
