"""The sections of the report, each from the collected data to markup."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from data_contracts.reasons import REASONS
from data_contracts.refs import MAIN
from data_contracts.tombstones import remake_command
from flows.inspect.learned import Change
from flows.inspect.lineage import deleted_label
from flows.report.charts import draw, format_value
from flows.report.collect import PhaseReport, ReportData, Sample
from flows.report.markup import Markup, join, tag
from flows.report.plots import charts_of

TEXT_SHOWN = 4000


def header(data: ReportData) -> Markup:
    """Name, state, and in one line what was trained on what by what."""
    status = data.status
    recipes = [data.view.of_phase(phase).recipe for phase in data.view.phases]
    named = [
        [str(recipe.get("model", {}).get("path", "")).rstrip("/").rpartition("/")[2] for recipe in recipes[:1]],
        [recipe.get("algorithm", {}).get("name") for recipe in recipes],
        [str(recipe.get("data", {}).get("source", "")).rpartition("/")[2] for recipe in recipes],
    ]
    facts = [
        *(", ".join(dict.fromkeys(name for name in names if name)) for names in named),
        f"step {status['step']} of {status['steps']}",
        data.view.head.get("created_at", "")[:16].replace("T", " "),
    ]
    return tag(
        "header",
        tag("h1", data.view.name, " ", tag("span", status["state"], class_=f"badge {status['state']}")),
        tag("p", " · ".join(str(fact) for fact in facts if fact), class_="facts"),
        tag("p", status["error"], class_="error") if status.get("error") else None,
        _navigation(),
    )


def _navigation() -> Markup:
    return tag("nav", *(tag("a", title, href=f"#{name}") for name, (title, _) in SECTIONS.items()))


def by_phase(draw_phase: Callable[[ReportData, PhaseReport], Markup]) -> Callable[[ReportData], Markup]:
    """A section that shows each phase under its name; a run of one phase needs none."""

    def drawn(data: ReportData) -> Markup:
        parts = [draw_phase(data, phase) for phase in data.phases]
        if data.phases[0].phase == MAIN:
            return parts[0]
        return join([join([tag("h3", phase.phase), part]) for phase, part in zip(data.phases, parts, strict=True)])

    return drawn


def learned(_: ReportData, data: PhaseReport) -> Markup:
    """Cards: each metric first -> last with the paired difference; a sentence that says it in words."""
    cards = [_change_card(change) for change in data.changes]
    if data.reward is not None:
        reward = data.reward
        note = f"training reward, mean of the first and last {reward['steps']} steps"
        cards.append(_card("reward", reward["first"], reward["last"], None, note))
    return join([tag("p", verdict(data.changes), class_="verdict"), tag("div", *cards, class_="cards")])


def verdict(changes: Sequence[Change]) -> str:
    """One sentence on the first accuracy: up, down or not measurably different."""
    if not changes:
        return "Fewer than two policies were evaluated on held-out prompts, so nothing can be said about learning yet."
    main = changes[0]
    name = main.metric.replace("_", " ")
    move = f"from {main.first['value']:.3f} to {main.last['value']:.3f}"
    if main.low is None or main.high is None:
        return f"Held-out {name} went {move}."
    interval = f"{main.difference:+.3f}, 95 % interval {main.low:+.3f} to {main.high:+.3f}, {main.num_prompts} prompts"
    if main.low <= 0 <= main.high:
        return f"Held-out {name} went {move}: no measurable difference ({interval}, paired)."
    return f"Held-out {name} {'rose' if main.low > 0 else 'fell'} {move} ({interval}, paired)."


def _change_card(change: Change) -> Markup:
    first, last = change.first, change.last
    before, after = (f"[{at['low']:.3f}, {at['high']:.3f}]" for at in (first, last))
    note = f"95 % before {before}, after {after}"
    paired = None
    if change.low is not None and change.high is not None:
        paired = f"{change.difference:+.3f} [{change.low:+.3f}, {change.high:+.3f}]"
    return _card(change.metric, first["value"], last["value"], paired, note)


LOWER_IS_BETTER = frozenset({"loss", "preference_ties"})


def _card(name: str, first: float, last: float, paired: str | None, note: str) -> Markup:
    better = first - last if name in LOWER_IS_BETTER else last - first
    sign = "up" if better > 0 else "down" if better < 0 else "same"  # green or red
    return tag(
        "div",
        tag("div", tag("code", name), class_="card-name"),
        tag("div", tag("span", f"{first:.3f}", class_="was"), " → ", tag("b", f"{last:.3f}"), class_="card-value"),
        tag("div", paired or f"{last - first:+.3f}", class_=f"delta {sign}"),
        tag("div", note, class_="note"),
        class_="card",
    )


def plots(_: ReportData, data: PhaseReport) -> Markup:
    drawn = [draw(chart) for chart in charts_of(data.metrics, data.evaluations)]
    if not drawn:
        return tag("p", "No step has finished yet.", class_="note")
    return tag("div", *drawn, class_="charts")


def rows(data: ReportData) -> Markup:
    """What became of every row: nothing leaves the pipeline without a reason."""
    counts = data.status["counts"]
    main = [(name.replace("_", " "), f"{value:,}") for name, value in counts.items() if not _is_reason(name)]
    reasons = [
        (name.removeprefix(prefix).replace("_", " "), f"{value:,}", _meaning(name, meaning))
        for prefix, meaning in PREFIXES.items()
        for name, value in counts.items()
        if name.startswith(prefix)
    ]
    left_out = table(["reason", "rows", "what it means"], reasons, numbers=(1,))
    both = tag("div", tag("div", table(["rows", "count"], main, numbers=(1,))), tag("div", left_out), class_="columns")
    deleted = [tag("p", f"{deletion['sentence']}.", class_="note") for deletion in data.status["deleted"]]
    if deleted:
        command = tag("code", remake_command(data.view.root, data.view.name))
        deleted.append(tag("p", "Counts and curves hold deleted rows too. To make the tables again: ", command))
    return join([both, *deleted])


def samples(report: ReportData, data: PhaseReport) -> Markup:
    if not data.samples:
        gone = [(deletion["what"], deletion["phase"]) for deletion in report.status["deleted"]]
        is_deleted = ("rewards", data.phase) in gone
        return tag("p", "All were deleted." if is_deleted else "No rollout has a reward yet.", class_="note")
    return tag("div", *(_sample_card(sample) for sample in data.samples), class_="samples")


def _sample_card(sample: Sample) -> Markup:
    facts = [
        f"reward {_number(sample.reward)}" if sample.reason is None else f"unscored: {sample.reason}",
        f"advantage {_number(sample.advantage)}",
        *(f"{name} {_number(value)}" for name, value in sample.components.items()),
        f"{sample.finish_reason}, {sample.num_tokens} tokens",
        sample.drop_reason.replace("_", " ") if sample.drop_reason not in (None, "none") else None,
        f"error: {sample.error_reason}" if sample.error_reason else None,
    ]
    return tag(
        "article",
        tag("h3", f"Step {sample.step}, {sample.why} ", tag("code", sample.rollout_id)),
        tag("div", *(tag("span", fact, class_="chip") for fact in facts if fact), class_="chips"),
        tag("h4", "Prompt"),
        tag("pre", _cut(sample.prompt)),
        tag("h4", "Completion"),
        tag("pre", _cut(sample.completion) or "(empty)", class_="completion"),
        tag("p", "Answer: ", tag("code", _cut(sample.answer)), class_="note") if sample.answer is not None else None,
    )


def data_report(_: ReportData, data: PhaseReport) -> Markup:
    """Rows by split and source, rejects by reason with examples, checks of the contract."""
    found = data.data
    if found is None:
        return tag("p", "The data stage has not finished yet.", class_="note")
    kept = [(split, f"{count:,}") for split, count in found.splits.items()]
    kept += [(f"from {source}", f"{count:,}") for source, count in list(found.sources.items())[:20]]
    rejects = [(reason, f"{count:,}") for reason, count in found.rejects.items()]
    examples = [
        (f"{row['source']}:{row['source_row']}", row["reason"], _cut(row["detail"], 300)) for row in found.examples
    ]
    checks = [
        (
            check.get("name"),
            check.get("column"),
            "ok" if check.get("ok") else f"failed ({check.get('unexpected_count')})",
        )
        for check in found.checks
    ]
    none = tag("p", "No row was rejected.", class_="note")
    return join(
        [
            tag(
                "div",
                tag("div", tag("h3", "Prompts"), table(["split or source", "rows"], kept, numbers=(1,))),
                tag(
                    "div", tag("h3", "Rejected"), table(["reason", "rows"], rejects, numbers=(1,)) if rejects else none
                ),
                class_="columns",
            ),
            fold("Examples of rejected rows", table(["where", "reason", "detail"], examples)) if examples else None,
            fold(f"Contract checks ({len(checks)})", table(["check", "column", "result"], checks)) if checks else None,
        ]
    )


def places(data: ReportData) -> Markup:
    """Where the checkpoint and the tables are, and the commands that open them."""
    name, status = data.view.name, data.status
    facts = [
        ("run folder", data.view.folder),
        ("tables", f"{data.view.root}/store"),
        ("last checkpoint", status["last_checkpoint"] or "none yet"),
        ("weights digest", status["weights_digest"]),
        ("recipe digest", status["recipe_digest"]),
    ]
    commands = [
        (f"rft export {name} --to {name}-model", "a Hugging Face model folder"),
        (f"rft show {name} rollouts --where \"finish_reason = 'length'\"", "rows of a table"),
        (f"rft lineage {name}", "what everything was made of"),
        (f"rft rerun {name} --from rewards --set ...", "other rewards on the same rollouts, nothing generated"),
    ]
    return join([_facts(facts), table(["command", "gives"], [(tag("code", text), what) for text, what in commands])])


def lineage(data: ReportData) -> Markup:
    nodes = {node["ref"]: node for node in data.lineage["nodes"]}
    if not nodes:
        return tag("p", "No policy has been made yet.", class_="note")
    inputs: dict[str, list[str]] = {}
    for edge in data.lineage["edges"]:
        inputs.setdefault(edge["from"], []).append(edge["to"])
    intro = tag("p", "The newest policy, and below each thing what it was made of.", class_="note")
    return join([intro, tag("ul", _branch(next(iter(nodes)), nodes, inputs, set()), class_="tree")])


def _branch(ref: str, nodes: dict[str, Any], inputs: dict[str, list[str]], seen: set[str]) -> Markup:
    node = nodes[ref]
    rows = f" {node['rows']:,} rows" if node["rows"] is not None else f" {node.get('version', '')}"
    if node["record"] == "source":
        label = join([tag("b", "source"), f" {node['key']}{rows} ", tag("code", node["digest"][:12])])
    else:
        label = join([tag("b", node["record"]), rows, " ", tag("code", node["key"][:12])])
    if "deleted" in node:
        label = join([label, tag("span", f" {deleted_label(node)}", class_="note")])
    if ref in seen:
        return tag("li", label, tag("span", " (above)", class_="note"))
    seen.add(ref)
    children = [_branch(source, nodes, inputs, seen) for source in inputs.get(ref, [])]
    return tag("li", label, tag("ul", *children) if children else None)


def recipe(data: ReportData) -> Markup:
    return fold("The resolved recipe, all defaults filled in", tag("pre", data.view.recipe_text))


def surroundings(data: ReportData) -> Markup:
    """Under which fingerprint the bits repeat, and what the run was begun from."""
    head = data.view.head
    facts = [(name, value) for name, value in head.get("fingerprint", {}).items()]
    facts += [(f"{name} digest", value) for name, value in head.get("identity", {}).items()]
    facts += [(name, value) for name, value in data.provenance.get("versions", {}).items() if name not in dict(facts)]
    parent = head.get("parent")
    if parent:
        facts.insert(0, ("rerun of", f"{parent.get('run')} from {parent.get('stage')}"))
    facts += [("resumed", resumed.get("at")) for resumed in head.get("resumed", [])]
    return _facts(facts)


def table(columns: Sequence[str], values: Iterable[Sequence[object]], numbers: Sequence[int] = ()) -> Markup:
    lines = [
        tag("tr", *(tag("td", cell, class_="number" if i in numbers else None) for i, cell in enumerate(row)))
        for row in values
    ]
    head = tag("tr", *(tag("th", name, class_="number" if i in numbers else None) for i, name in enumerate(columns)))
    return tag("div", tag("table", tag("thead", head), tag("tbody", *lines)), class_="scroll") if lines else Markup("")


def fold(title: str, body: Markup) -> Markup:
    return tag("details", tag("summary", title), body)


def _facts(pairs: Iterable[tuple[str, object]]) -> Markup:
    return tag("dl", *(join([tag("dt", name), tag("dd", value)]) for name, value in pairs if value not in (None, "")))


def _number(value: float | None) -> str:
    return "none" if value is None else format_value(value)


def _cut(text: str, limit: int = TEXT_SHOWN) -> str:
    return text if len(text) <= limit else f"{text[:limit]}\n... {len(text) - limit} more characters"


def _meaning(name: str, otherwise: str) -> str:
    reason = REASONS.get(name.removeprefix("quarantined_"))
    return f"the source row {reason.meaning}" if reason else DROP_REASONS.get(name, otherwise)


def _is_reason(name: str) -> bool:
    return name.startswith(tuple(PREFIXES))


PREFIXES = {"dropped_": "not trained", "quarantined_": "source row rejected before training"}

DROP_REASONS = {
    "dropped_zero_variance": "all rewards of the group are equal: kept in the loss with advantage 0",
    "dropped_unscored": "no reward could be computed; the reason is in the rewards table",
    "dropped_truncated": "completion was cut, and algorithm.truncated leaves such rows out",
    "dropped_group_too_small": "fewer scored members than algorithm.min_group_size",
    "dropped_stale": "sampled more policy versions ago than algorithm.max_staleness",
    "dropped_filtered": "left out by a filter",
}

# Name in the address -> title and what draws it, in the page's order.
SECTIONS = {
    "learned": ("What was learned", by_phase(learned)),
    "plots": ("Training", by_phase(plots)),
    "samples": ("Sample rollouts", by_phase(samples)),
    "rows": ("Rows through the pipeline", rows),
    "data": ("Data", by_phase(data_report)),
    "places": ("Where things are", places),
    "lineage": ("Lineage", lineage),
    "recipe": ("Recipe", recipe),
    "environment": ("Environment", surroundings),
}
