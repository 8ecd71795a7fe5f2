"""Per-step metrics under the field's own names, computed from the tables themselves whenever they are asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from data_contracts.ledger import EXPERTS
from data_contracts.refs import TableRef
from flows.inspect.run import AT_STEP, RunView

Columns = dict[str, dict[int, float | None]]  # metric -> step -> value
STEP_TOKENS = "step_tokens"  # summed up to num_tokens


def metrics_of(run: RunView) -> pa.Table:
    """One row per step: column `step`, then a float64 column per metric. Null: no rows to compute it from. Steps
    are those of one phase.

    A metric that the run has no use for (kl without a reference model, sampling/* on-policy) has no column. Metrics of
    deleted tables are those that their tombstones keep.
    """
    columns: Columns = defaultdict(dict)
    for record, (names, measure) in MEASURED.items():
        measure(run.table(record, record, names, without=EXPERTS), _ddof(run), columns)
        for entry, tombstone in run.deleted(record, record, without=EXPERTS):
            for name, value in tombstone.facts.get("metrics", {}).items():
                columns[name][entry.step] = value
    _count_tokens(columns)
    _update_metrics(run, columns)
    _timing_metrics(run, columns)
    steps = sorted({step for values in columns.values() for step in values})
    arrays: dict[str, pa.Array] = {"step": pa.array(steps, pa.int64())}
    for name in sorted(columns):
        values = [columns[name].get(step) for step in steps]
        if any(value is not None for value in values):
            arrays[name] = pa.array(values, pa.float64())
    return pa.table(arrays)


def metrics_in(run: RunView, ref: TableRef) -> dict[str, float | None]:
    """What one table of the run says of its step: kept when the table is deleted."""
    if ref.record not in MEASURED:
        return {}
    names, measure = MEASURED[ref.record]
    rows = run.store.read(ref, names)
    columns: Columns = defaultdict(dict)
    measure(rows.append_column(AT_STEP, pa.repeat(pa.scalar(0, pa.int64()), rows.num_rows)), _ddof(run), columns)
    return {name: values[0] for name, values in columns.items() if 0 in values}


def _completion_metrics(rows: pa.Table, _: int, columns: Columns) -> None:
    lengths = pc.cast(pc.list_value_length(rows["completion_token_ids"]), pa.int64())
    prompt_lengths = pc.cast(pc.list_value_length(rows["prompt_token_ids"]), pa.int64())
    is_clipped = pc.cast(pc.equal(rows["finish_reason"], "length"), pa.float64())
    is_error = pc.cast(pc.equal(rows["status"], "error"), pa.float64())
    flat = pa.table(
        {
            AT_STEP: rows[AT_STEP],
            "length": lengths,
            "clipped": is_clipped,
            "error": is_error,
            "tokens": pc.add(lengths, prompt_lengths),
            "terminated": pc.if_else(pc.equal(rows["finish_reason"], "stop"), lengths, pa.scalar(None, pa.int64())),
        }
    )
    grouped = flat.group_by(AT_STEP).aggregate(
        [
            ("length", "mean"),
            ("length", "min"),
            ("length", "max"),
            ("clipped", "mean"),
            ("error", "mean"),
            ("terminated", "mean"),
            ("tokens", "sum"),
        ]
    )
    names = {
        "length_mean": "completions/mean_length",
        "length_min": "completions/min_length",
        "length_max": "completions/max_length",
        "clipped_mean": "completions/clipped_ratio",
        "error_mean": "completions/error_ratio",
        "terminated_mean": "completions/mean_terminated_length",
        "tokens_sum": STEP_TOKENS,
    }
    _collect(grouped, names, columns)


def _count_tokens(columns: Columns) -> None:
    """Tokens of each step -> tokens so far."""
    seen = 0.0
    for step, tokens in sorted(columns.pop(STEP_TOKENS, {}).items()):
        seen += tokens or 0
        columns["num_tokens"][step] = seen


def _reward_metrics(rows: pa.Table, ddof: int, columns: Columns) -> None:
    _component_metrics(rows, ddof, columns)
    unscored = pc.cast(pc.equal(rows["status"], "unscored"), pa.float64())
    rows = rows.select([AT_STEP, "reward"]).append_column("unscored", unscored)
    spread = pc.VarianceOptions(ddof=ddof, min_count=2)
    grouped = rows.group_by(AT_STEP).aggregate(
        [("reward", "mean"), ("reward", "stddev", spread), ("reward", "min"), ("reward", "max"), ("unscored", "mean")]
    )
    names = {
        "reward_mean": "reward",
        "reward_stddev": "reward_std",
        "reward_min": "reward_min",
        "reward_max": "reward_max",
        "unscored_mean": "frac_unscored",
    }
    _collect(grouped, names, columns)


def _component_metrics(rows: pa.Table, ddof: int, columns: Columns) -> None:
    components = rows["components"].combine_chunks()
    parents = pc.list_parent_indices(components.cast(pa.list_(components.type.field(0).type)))
    flat = pa.table({AT_STEP: rows[AT_STEP].take(parents), "name": components.keys, "value": components.items})
    grouped = flat.group_by([AT_STEP, "name"]).aggregate(
        [("value", "mean"), ("value", "stddev", pc.VarianceOptions(ddof=ddof, min_count=2))]
    )
    for row in grouped.to_pylist():
        columns[f"rewards/{row['name']}/mean"][row[AT_STEP]] = row["value_mean"]
        columns[f"rewards/{row['name']}/std"][row[AT_STEP]] = row["value_stddev"]


def _advantage_metrics(rows: pa.Table, _: int, columns: Columns) -> None:
    is_own = pc.not_equal(rows["term"], "expert")
    if pc.any(is_own).as_py():
        rows = rows.filter(is_own)  # what experts wrote beside it has no group
    flat = pa.table(
        {
            AT_STEP: rows[AT_STEP],
            "group_id": rows["group_id"],
            "flat": pc.cast(pc.equal(rows["drop_reason"], "zero_variance"), pa.float64()),
            "trained": pc.cast(rows["is_trained"], pa.float64()),
            "size": pc.abs(rows["advantage"]),
        }
    )
    groups = flat.group_by([AT_STEP, "group_id"]).aggregate([("flat", "max")])
    _collect(
        groups.group_by(AT_STEP).aggregate([("flat_max", "mean")]), {"flat_max_mean": "frac_reward_zero_std"}, columns
    )
    by_step = flat.group_by(AT_STEP).aggregate([("trained", "mean"), ("size", "mean")])
    _collect(by_step, {"trained_mean": "frac_trained", "size_mean": "advantage_abs_mean"}, columns)


def _update_metrics(run: RunView, columns: Columns) -> None:
    names = list(dict.fromkeys(column for column, _, _ in UPDATE_METRICS))
    rows = run.table("update", "updates", [*names, "skipped"])
    skipped = pc.cast(pc.is_valid(rows["skipped"]), pa.float64())
    rows = rows.append_column("is_skipped", skipped)
    wanted = [(column, how) for column, how, _ in UPDATE_METRICS]
    grouped = rows.group_by(AT_STEP, use_threads=False).aggregate([*wanted, ("is_skipped", "sum")])
    _collect(grouped, {f"{column}_{how}": metric for column, how, metric in UPDATE_METRICS}, columns)
    _collect(grouped, {"is_skipped_sum": "skipped_updates"}, columns)


def _timing_metrics(run: RunView, columns: Columns) -> None:
    """Seconds of the work that this run did itself; what was reused or pinned took none."""
    for entry in run.entries():
        if entry.step < 1:
            continue
        own = 0.0 if entry.reused or entry.pinned_from else entry.seconds
        for name in (f"timing/{entry.stage}", "step_time"):
            columns[name][entry.step] = (columns[name].get(entry.step) or 0.0) + own


def _collect(grouped: pa.Table, names: dict[str, str], columns: Columns) -> None:
    steps = grouped[AT_STEP].to_pylist()
    for column, metric in names.items():
        columns[metric].update(zip(steps, grouped[column].to_pylist(), strict=True))


def _ddof(run: RunView) -> int:
    return int(run.recipe.get("algorithm", {}).get("std_ddof", 1))


# Of each record: the columns that its metrics come from, and the function from rows with `at_step` to metrics.
MEASURED: dict[str, tuple[list[str], Callable[[pa.Table, int, Columns], None]]] = {
    "rollouts": (["completion_token_ids", "prompt_token_ids", "finish_reason", "status"], _completion_metrics),
    "rewards": (["group_id", "reward", "components", "status"], _reward_metrics),
    "advantages": (["group_id", "advantage", "is_trained", "drop_reason", "term"], _advantage_metrics),
}

# Column of `updates`, how the optimizer steps of one step are put together, the field's name.
UPDATE_METRICS = (
    ("loss", "mean", "loss"),
    ("policy_loss", "mean", "policy_loss"),
    ("own_loss", "mean", "own_loss"),
    ("expert_loss", "mean", "expert_loss"),
    ("expert_coefficient", "last", "expert_coefficient"),
    ("value_loss", "mean", "value_loss"),
    ("value_clip_ratio", "mean", "value_clip_ratio"),
    ("explained_variance", "mean", "explained_variance"),
    ("value_grad_norm", "mean", "value_grad_norm"),
    ("distillation_loss", "mean", "distillation_loss"),
    ("kl", "mean", "kl"),
    ("kl_coefficient", "mean", "kl_coefficient"),
    ("entropy", "mean", "entropy"),
    ("entropy_coefficient", "mean", "entropy_coefficient"),
    ("clip_ratio_low", "mean", "clip_ratio/low_mean"),
    ("clip_ratio_high", "mean", "clip_ratio/high_mean"),
    ("clip_ratio_region", "mean", "clip_ratio/region_mean"),
    ("clip_ratio_dual", "mean", "clip_ratio/dual_mean"),
    ("gate_kept", "mean", "gate_kept"),
    ("ratio_max", "max", "ratio_max"),
    ("sampling_ratio_mean", "mean", "sampling/importance_sampling_ratio/mean"),
    ("correction_kept", "mean", "correction_kept"),
    ("effective_sample_size", "mean", "effective_sample_size"),
    ("sampling_logp_difference_mean", "mean", "sampling/sampling_logp_difference/mean"),
    ("sampling_logp_difference_max", "max", "sampling/sampling_logp_difference/max"),
    ("rewards_chosen", "mean", "rewards/chosen"),
    ("rewards_rejected", "mean", "rewards/rejected"),
    ("rewards_margin", "mean", "rewards/margins"),
    ("rewards_accuracy", "mean", "rewards/accuracies"),
    ("logps_chosen", "mean", "logps/chosen"),
    ("logps_rejected", "mean", "logps/rejected"),
    ("grad_norm", "mean", "grad_norm"),
    ("learning_rate", "last", "learning_rate"),
    ("trained_rows", "sum", "trained_rows"),
    ("trained_tokens", "sum", "trained_tokens"),
    ("expert_rows", "sum", "expert_rows"),
    ("off_policy_rows", "sum", "off_policy_rows"),
)
