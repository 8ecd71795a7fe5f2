"""`rft lineage`: what a policy or table was made of, back to the source file, from the manifests' inputs.

Edges lead from what was made to what it was made of: policy -> updates -> advantages -> rewards -> rollouts ->
prompts -> source, and rollouts -> the policy that sampled them. A phase's first policy leads to the one of an earlier
phase that it starts from, and rewards to the one that gave them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.text import Text
from rich.tree import Tree

from data_contracts.refs import TableRef
from data_contracts.schemas import RECORDS
from data_contracts.store import Store
from flows.inspect.run import RunView, list_run_names, near, open_run
from rft_core.errors import SettingsError

POLICY, SOURCE = "policy", "source"
# Record -> the settings of its stage that may name a model of an earlier phase, besides the policy itself.
BEHIND = {"rewards": ("reward.",), "updates": ("critic.", "teacher."), "token_scores": ("critic.", "teacher.")}
MIN_PREFIX = 4
TREE_OPENED = 3  # so many policies, and so many other tables, are opened in the terminal; the JSON has all


@dataclass
class Graph:
    """Nodes in the order they were reached, and edges from derived to input."""

    store: Store
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    edges: list[tuple[str, str]] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    max_policies: int | None = None  # follow only so many policies; the others stay leaves

    def to_json(self) -> dict[str, Any]:
        return {
            "nodes": list(self.nodes.values()),
            "edges": [{"from": derived, "to": source} for derived, source in self.edges],
        }

    def add(self, name: str, record: str, key: str, digest: str, rows: int | None, **more: Any) -> str:
        if name not in self.nodes:
            self.nodes[name] = {"ref": name, "record": record, "key": key, "digest": digest, "rows": rows, **more}
            self.waiting.append(name)
        return name

    def add_table(self, ref: TableRef) -> str:
        tombstone = self.store.tombstone(ref.record, ref.key)
        deleted = {"deleted": tombstone.to_json()} if tombstone else {}
        return self.add(ref.name, ref.record, ref.key, ref.digest, ref.rows, **deleted)

    def add_policy(self, policy_id: str) -> str:
        """A policy's id is the key of the updates table that made it; a root policy's is its model folder's digest."""
        return self.add(f"{POLICY}/{policy_id}", POLICY, policy_id, policy_id, None)

    def link(self, derived: str, source: str) -> None:
        if (derived, source) not in self._known_edges:
            self._known_edges.add((derived, source))
            self.edges.append((derived, source))

    def __post_init__(self) -> None:
        self._known_edges: set[tuple[str, str]] = set()
        self._followed = 0

    def walk(self) -> None:
        """Follow everything that was added to where it came from."""
        while self.waiting:
            node = self.nodes[self.waiting.pop(0)]
            if node["record"] == POLICY:
                self._follow_policy(node)
            elif node["record"] != SOURCE:
                self._follow_table(node)

    def _follow_policy(self, node: dict[str, Any]) -> None:
        ref = self.store.find("updates", node["key"])
        node["version"] = 0
        if ref is None:
            return
        node["version"] = self.store.read(ref, ["policy_version"])["policy_version"][0].as_py()
        self._followed += 1
        if self.max_policies is None or self._followed <= self.max_policies:
            self.link(node["ref"], self.add_table(ref))

    def _follow_table(self, node: dict[str, Any]) -> None:
        ref = TableRef(node["record"], node["key"], node["digest"], node["rows"])
        provenance = self.store.manifest(ref)["provenance"]
        for value in provenance.get("inputs", []):
            self.link(node["ref"], self.add_table(TableRef.from_json(value)))
        identity = provenance.get("identity", {})
        for policy_id in self._policies_behind(ref, provenance):
            self.link(node["ref"], self.add_policy(policy_id))
            if policy_id == identity.get("policy") and "model.path" in identity:
                self.link(self.add_policy(policy_id), self.add_policy(identity["model.path"]))
        for setting, policy_id in identity.items():
            if setting.startswith(BEHIND.get(ref.record, ())):
                self.link(node["ref"], self.add_policy(policy_id))
        # Of experts a data set has an input: what the prompts hold out. Tables of a step have no source of their own.
        is_dataset = "source_identity" in provenance or not provenance.get("inputs")
        if ref.record in ("prompts", "examples", "quarantine") and is_dataset:
            self._add_sources(node["ref"], ref, provenance)

    def _policies_behind(self, ref: TableRef, provenance: dict[str, Any]) -> list[str]:
        if ref.record == "updates":
            parent = provenance.get("parent_policy")
            return [parent] if parent else []
        if ref.record not in ("rollouts", "evaluations"):
            return []
        tombstone = self.store.tombstone(ref.record, ref.key)
        return list(tombstone.facts.get("policies", [])) if tombstone else policies_in(self.store, ref)

    def _add_sources(self, derived: str, ref: TableRef, provenance: dict[str, Any]) -> None:
        names = self.store.read(ref, ["source"])["source"].value_counts().to_pylist()
        digest = provenance.get("identity", {}).get(provenance.get("source_identity", "source"), "")
        for count in names:
            name = count["values"]
            self.link(derived, self.add(f"{SOURCE}/{name}", SOURCE, name, digest, count["counts"]))


def policies_in(store: Store, ref: TableRef) -> list[str]:
    """The policies that a table's rows are of: kept when the table is deleted."""
    return sorted(set(store.read(ref, ["policy_id"])["policy_id"].to_pylist()))


def lineage_of(root: str, reference: str) -> dict[str, Any]:
    """Nodes and edges behind a reference: `record/key` or a prefix of it, a run, a policy id, a checkpoint's folder.

    A policy's and a source's `digest` identifies its content; a policy has no `rows`, a source's are those that reached
    the table. Raises SettingsError naming near ones when nothing, or more than one thing, has that name.
    """
    return graph_of(root, reference).to_json()


def graph_of(root: str, reference: str) -> Graph:
    graph = Graph(Store(root))
    if reference in list_run_names(root):
        _add_run(graph, open_run(root, reference))
    else:
        _add_reference(graph, root, reference)
    graph.walk()
    return graph


def lineage_tree(lineage: dict[str, Any], max_opened: int = TREE_OPENED) -> Tree:
    """The lineage for a terminal: each node once, below what was made of it; policies side by side, newest first."""
    nodes = {node["ref"]: node for node in lineage["nodes"]}
    inputs: dict[str, list[str]] = {}
    for edge in lineage["edges"]:
        inputs.setdefault(edge["from"], []).append(edge["to"])
    tree = Tree(Text("lineage", style="bold"), guide_style="dim")
    seen: set[str] = set()
    hidden = _grow_all(tree, list(nodes)[:1], nodes, inputs, seen, max_opened)
    if hidden:
        tree.add(Text(f"... {hidden} earlier policies with their tables (--json has all)", style="dim"))
    behind = _reachable(list(nodes)[:1], inputs)
    below = {edge["to"] for edge in lineage["edges"]}
    others = [ref for ref in nodes if ref not in below and ref not in behind]
    for ref in others[:max_opened]:
        _grow(tree, ref, nodes, inputs, seen)
    if any("deleted" in node for node in nodes.values()):
        tree.add(Text("deleted tables are made again by: rft run RECIPE --name RUN --remake", style="dim"))
    if others[max_opened:]:
        tree.add(Text(f"... {len(others) - max_opened} more tables of the run (--json has all)", style="dim"))
    return tree


def _grow_all(
    tree: Tree, starts: list[str], nodes: dict[str, Any], inputs: dict[str, list[str]], seen: set[str], max_opened: int
) -> int:
    """Grow the starts and the policies behind them, newest first; gives how many policies were left closed."""
    queue, opened, hidden = list(starts), 0, 0
    while queue:
        ref = queue.pop(0)
        if ref in seen:
            continue
        opened += nodes[ref]["record"] == POLICY
        if opened > max_opened:
            hidden += 1
            seen.add(ref)
            queue.extend(_policies_of(ref, inputs, nodes))
        else:
            queue.extend(_grow(tree, ref, nodes, inputs, seen))
    return hidden


def _reachable(starts: list[str], inputs: dict[str, list[str]]) -> set[str]:
    found, queue = set(starts), list(starts)
    while queue:
        for source in inputs.get(queue.pop(), []):
            if source not in found:
                found.add(source)
                queue.append(source)
    return found


def _grow(tree: Tree, ref: str, nodes: dict[str, Any], inputs: dict[str, list[str]], seen: set[str]) -> list[str]:
    """Add a node and what it is made of. Policies met on the way are left for the top level."""
    seen.add(ref)
    branch = tree.add(_label(nodes[ref]))
    later = []
    for source in inputs.get(ref, []):
        if nodes[source]["record"] == POLICY:
            later.append(source)
            branch.add(Text(f"by {_label(nodes[source]).plain}", style="dim"))
        elif source in seen:
            branch.add(Text(f"{_label(nodes[source]).plain} (above)", style="dim"))
        else:
            later.extend(_grow(branch, source, nodes, inputs, seen))
    return later


def _policies_of(ref: str, inputs: dict[str, list[str]], nodes: dict[str, Any]) -> list[str]:
    """The parent policies behind a policy that is not opened: through its update, or that of an earlier phase."""
    above = inputs.get(ref, [])
    reached = [
        *above,
        *(source for table in above if nodes[table]["record"] != POLICY for source in inputs.get(table, [])),
    ]
    return [source for source in reached if nodes[source]["record"] == POLICY]


def _label(node: dict[str, Any]) -> Text:
    if node["record"] == SOURCE:
        return Text(f"source {node['key']}  {node['rows']} rows  {node['digest'][:12]}", style="green")
    if node["record"] == POLICY:
        return Text(f"policy {node['version']}  {node['key'][:12]}", style="bold")
    label = Text(f"{node['record']}/{node['key'][:12]}  {node['rows']} rows  {node['digest'][:12]}")
    return label.append(f"  {deleted_label(node)}", style="yellow") if "deleted" in node else label


def deleted_label(node: dict[str, Any]) -> str:
    return f"deleted {node['deleted']['at'][:10]} by {node['deleted']['rule']}"


def _add_run(graph: Graph, view: RunView) -> None:
    """The run's newest policy first, then everything else that its ledger names, newest first."""
    newest = view.last_policy()
    if newest is not None:
        graph.add_policy(newest.policy_id)
    for entry in reversed(view.entries()):
        for ref in entry.refs.values():
            graph.add_table(ref)


def _add_reference(graph: Graph, root: str, reference: str) -> None:
    """One table or policy named by `record/key`, by a unique prefix of a key, or by a checkpoint's folder."""
    is_folder = (Path(reference) / "manifest.json").is_file()  # a checkpoint's or a table's
    text = Path(reference).resolve().name if is_folder else reference.strip("/")
    record, slash, prefix = text.rpartition("/")
    known = _known(graph.store, root)
    records = {record} if slash else set(known)
    found = [
        (kind, key)
        for kind in sorted(records & set(known))
        for key in known[kind]
        if key == prefix or (len(prefix) >= MIN_PREFIX and key.startswith(prefix))
    ]
    if {key for kind, key in found if kind != POLICY} == {key for kind, key in found if kind == POLICY}:
        found = [(kind, key) for kind, key in found if kind == POLICY]  # an updates key is its policy's id
    if len(found) > 1:
        some = ", ".join(f"{kind}/{key[:12]}" for kind, key in found[:5])
        raise SettingsError(f"{reference!r} must name one table or policy, found {len(found)}: {some}")
    if not found:
        names = [*list_run_names(root), *(f"{kind}/{key[:12]}" for kind in known for key in known[kind])]
        raise SettingsError(f"no table, policy or run {reference!r} under {root}: {near(reference[:24], names)}")
    kind, key = found[0]
    if kind == POLICY:
        graph.add_policy(key)
        return
    table = graph.store.named(kind, key)
    if table is not None:
        graph.add_table(table)


def _known(store: Store, root: str) -> dict[str, list[str]]:
    """Keys by record, and policy ids: those that updates made, and the root policies of all runs."""
    keys = {record: store.keys(record) for record in RECORDS}
    roots = _root_policies(open_run(root, name) for name in list_run_names(root))
    return {**keys, POLICY: sorted({*keys["updates"], *roots})}


def _root_policies(views: Iterable[RunView]) -> set[str]:
    """Policies of version 0: the parents of first updates."""
    found = set()
    for view in (part for run in views for part in run.by_phase()):
        for _, ref in view.refs("update", "updates")[:1]:
            parent = view.store.manifest(ref)["provenance"].get("parent_policy")
            if parent:
                found.add(parent)
    return found
