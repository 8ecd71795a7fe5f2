"""Which charts the report draws, and what each metric means. A metric without values draws nothing."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from flows.report.charts import Chart, Series, Value

SHARE = (0.0, 1.0)
POSITIVE = (0.0, None)
Columns = dict[str, list[Any]]

EVALUATED = {
    "sampled_accuracy": "sampled",
    "greedy_accuracy": "greedy",
}


def charts_of(metrics: Columns, evaluations: list[dict[str, Any]]) -> list[Chart]:
    """Charts in the order in which one asks: did it learn, is it healthy, what did it cost."""
    charts = [accuracy_chart(evaluations), reward_chart(metrics), *(_simple(metrics, row) for row in CHARTS)]
    charts.append(timing_chart(metrics))
    return [chart for chart in charts if chart is not None and chart.has_values]


def accuracy_chart(evaluations: list[dict[str, Any]]) -> Chart | None:
    """Held-out accuracy of the evaluated policies, with the interval over prompts."""
    by_metric: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for row in evaluations:
        if row["metric"] in EVALUATED:
            by_metric[row["metric"]][row["step"]] = row
    steps = sorted({step for rows in by_metric.values() for step in rows})
    if not steps:
        return None
    series = [
        Series(
            name, *([rows[step][part] if step in rows else None for step in steps] for part in ("value", "low", "high"))
        )
        for metric, name in EVALUATED.items()
        if (rows := by_metric.get(metric))
    ]
    return Chart(
        "Held-out accuracy",
        "sampled_accuracy, greedy_accuracy",
        "Share of held-out prompts answered right; the band is the 95 % interval over prompts.",
        [float(step) for step in steps],
        series,
        limits=SHARE,
    )


def reward_chart(metrics: Columns) -> Chart | None:
    """Mean reward with one standard deviation either side, kept within the rewards that were given."""
    means, stds = metrics.get("reward"), metrics.get("reward_std")
    if means is None:
        return None
    stds = stds or [None] * len(means)
    low = _within(_shift(means, stds, -1.0), metrics["reward_min"], max)
    high = _within(_shift(means, stds, 1.0), metrics["reward_max"], min)
    return Chart(
        "Reward",
        "reward",
        "Mean over the step's scored completions; the band is one standard deviation (reward_std).",
        metrics["step"],
        [Series("reward", means, low, high)],
    )


def timing_chart(metrics: Columns) -> Chart | None:
    """Seconds per stage, stacked."""
    stages = [
        (name, [sum(values) for values in zip(*([v or 0.0 for v in metrics[c]] for c in columns), strict=True)])
        for name, wanted in STAGES.items()
        if (columns := [f"timing/{stage}" for stage in wanted if f"timing/{stage}" in metrics])
    ]
    shown = [Series(name, values) for name, values in stages if any(values)]
    if not shown:
        return None
    text = "Wall-clock seconds that this run spent; reused and pinned tables took none."
    return Chart("Time per step", "timing/*", text, metrics["step"], shown, unit="s", is_stacked=True)


def _simple(metrics: Columns, row: tuple[str, str, str, tuple[Value, Value], dict[str, str]]) -> Chart | None:
    title, unit, explanation, limits, lines = row
    series = [Series(name, metrics[metric]) for metric, name in lines.items() if metric in metrics]
    if not series:
        return None
    return Chart(
        title,
        _names([metric for metric in lines if metric in metrics]),
        explanation,
        metrics["step"],
        series,
        unit=unit,
        limits=limits,
    )


def _names(metrics: list[str]) -> str:
    """Metric names, a folder that they share written once.

    >>> _names(["clip_ratio/low_mean", "clip_ratio/high_mean"])
    'clip_ratio/low_mean, high_mean'
    """
    folder = metrics[0].rpartition("/")[0]
    return ", ".join([metrics[0], *(metric.removeprefix(f"{folder}/") for metric in metrics[1:])])


def _shift(means: list[Value], stds: list[Value], sign: float) -> list[Value]:
    return [None if mean is None or std is None else mean + sign * std for mean, std in zip(means, stds, strict=True)]


def _within(values: list[Value], edges: list[Value], bound: Any) -> list[Value]:
    return [
        None if value is None or edge is None else bound(value, edge) for value, edge in zip(values, edges, strict=True)
    ]


# Title, unit, explanation, hard limits of the axis, metric -> name in the legend.
CHARTS: tuple[tuple[str, str, str, tuple[Value, Value], dict[str, str]], ...] = (
    (
        "Completion length",
        "tokens",
        "Mean length; terminated counts only completions that ended by themselves.",
        POSITIVE,
        {"completions/mean_length": "all", "completions/mean_terminated_length": "terminated"},
    ),
    (
        "Clipped completions",
        "",
        "Share of completions cut at max_completion_tokens. A high share hides what the model would have said.",
        SHARE,
        {"completions/clipped_ratio": "clipped"},
    ),
    (
        "Groups without signal",
        "",
        "Share of groups whose rewards are all equal: their advantages are zero.",
        SHARE,
        {"frac_reward_zero_std": "zero spread"},
    ),
    (
        "Entropy",
        "nat",
        "Mean entropy per token at the sampling temperature. A fall to zero ends exploration.",
        POSITIVE,
        {"entropy": "entropy"},
    ),
    (
        "KL to the reference",
        "nat",
        "Mean k3 estimate per token: how far the policy has moved.",
        (None, None),
        {"kl": "kl"},
    ),
    ("Loss", "", "What was differentiated. Its level says little; jumps say much.", (None, None), {"loss": "loss"}),
    (
        "Value loss",
        "",
        "Half the mean squared error of the critic's values to the returns, before the update.",
        POSITIVE,
        {"value_loss": "value loss"},
    ),
    (
        "Explained variance",
        "",
        "Share of the returns' variance that the critic's values account for; 0 is a constant, below 0 worse than one.",
        (None, 1.0),
        {"explained_variance": "explained"},
    ),
    (
        "Own and expert loss",
        "",
        "Of a mixture: the loss over what the policy wrote and over what experts did, before their weights.",
        (None, None),
        {"own_loss": "own", "expert_loss": "expert"},
    ),
    (
        "Weight of the experts",
        "",
        "Of a mixture: what the loss over expert rows is multiplied by.",
        SHARE,
        {"expert_coefficient": "mu"},
    ),
    (
        "Preference margin",
        "",
        "Mean implicit reward of chosen and rejected completions, or score of a reward model.",
        (None, None),
        {"rewards/chosen": "chosen", "rewards/rejected": "rejected", "rewards/margins": "margin"},
    ),
    (
        "Preference accuracy",
        "",
        "Share of the step's pairs whose margin is above 0.",
        SHARE,
        {"rewards/accuracies": "accuracy"},
    ),
    ("Gradient norm", "", "Global norm before clipping.", POSITIVE, {"grad_norm": "grad norm"}),
    ("Learning rate", "", "Of the step's last optimizer step.", POSITIVE, {"learning_rate": "learning rate"}),
    (
        "Clipped ratios",
        "",
        "Share of trained tokens whose ratio was clipped: from below where A < 0, from above where A > 0.",
        SHARE,
        {"clip_ratio/low_mean": "low", "clip_ratio/high_mean": "high"},
    ),
    (
        "Effective sample size",
        "",
        "(sum w)^2 / (N sum w^2) of the off-policy weights; 1 is on-policy, near 0 few rows carry the update.",
        SHARE,
        {"effective_sample_size": "ESS"},
    ),
    (
        "Log-probability gap",
        "nat",
        "Mean |old - behaviour| per token: how far engine and trainer, or two policies, disagree.",
        POSITIVE,
        {"sampling/sampling_logp_difference/mean": "mean"},
    ),
    (
        "Unscored and failed",
        "",
        "Share of rollouts without a reward, and of rollouts that ended in an error.",
        SHARE,
        {"frac_unscored": "unscored", "completions/error_ratio": "error"},
    ),
)

# What the time chart stacks, and the ledger's stages behind each layer.
STAGES: dict[str, tuple[str, ...]] = {
    "rollouts": ("prompts", "rollouts"),
    "rewards": ("rewards",),
    "advantages": ("token-scores", "advantages"),
    "update": ("update",),
    "checkpoint": ("checkpoint",),
    "evaluation": ("evaluation-rollouts", "evaluation-rewards", "evaluation"),
}
