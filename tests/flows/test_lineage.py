"""Lineage from a policy back to the source, and how references are found."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from data_contracts.checkpoints import checkpoint_folder
from flows.inspect import lineage_of, lineage_tree
from rft_core.errors import SettingsError
from tests.flows.sample_run import ROOT_POLICY, build_sample_run


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return build_sample_run(tmp_path_factory.mktemp("lineage"))


def _path(lineage, *records):
    """Follow the records from the first node; gives the refs on the way."""
    nodes = {node["ref"]: node for node in lineage["nodes"]}
    at = next(iter(nodes))
    way = [at]
    for record in records:
        inputs = [edge["to"] for edge in lineage["edges"] if edge["from"] == at]
        at = next(ref for ref in inputs if nodes[ref]["record"] == record)
        way.append(at)
    return way


def test_policy_leads_to_the_source(made):
    lineage = lineage_of(made.root, made.policies[-1].policy_id)
    way = _path(lineage, "updates", "advantages", "rewards", "rollouts", "prompts", "prompts", "source")
    assert way[0] == f"policy/{made.policies[-1].policy_id}"
    assert way[1] == made.refs[4, "update", 0].name
    assert way[4] == made.refs[4, "rollouts", 0].name
    assert way[-2] == made.refs[0, "data", 0].name
    nodes = {node["ref"]: node for node in lineage["nodes"]}
    assert nodes[way[-1]] == {
        "ref": "source/sums.jsonl",
        "record": "source",
        "key": "sums.jsonl",
        "digest": "5" * 64,
        "rows": 4,
    }
    assert nodes[way[4]]["rows"] == 8
    assert nodes[way[4]]["digest"] == made.refs[4, "rollouts", 0].digest


def test_rollouts_name_the_policy_that_sampled_them(made):
    lineage = lineage_of(made.root, made.refs[3, "rollouts", 0].name)
    way = _path(lineage, "policy", "updates", "rollouts", "policy", "updates", "rollouts", "policy")
    assert way[1] == f"policy/{made.policies[2].policy_id}"
    assert way[-1] == f"policy/{ROOT_POLICY}"


def test_run_holds_every_table_of_its_ledger_once(made):
    lineage = lineage_of(made.root, made.name)
    refs = [node["ref"] for node in lineage["nodes"]]
    assert len(refs) == len(set(refs))
    assert {ref.name for ref in made.refs.values()} <= set(refs)
    known = set(refs)
    assert all(edge["from"] in known and edge["to"] in known for edge in lineage["edges"])
    assert len({(edge["from"], edge["to"]) for edge in lineage["edges"]}) == len(lineage["edges"])


def test_prefix_record_key_and_checkpoint_folder_name_the_same(made, tmp_path):
    policy = made.policies[-1].policy_id
    whole = lineage_of(made.root, policy)
    assert lineage_of(made.root, policy[:10]) == whole
    assert lineage_of(made.root, f"policy/{policy}") == whole
    folder = checkpoint_folder(type(tmp_path)(made.root), made.policies[-1])
    assert lineage_of(made.root, str(folder)) == whole
    assert lineage_of(made.root, f"updates/{policy[:8]}")["nodes"][0]["ref"] == f"updates/{policy}"
    rewards = made.refs[2, "rewards", 0]
    assert lineage_of(made.root, rewards.key[:12])["nodes"][0]["ref"] == rewards.name
    assert lineage_of(made.root, ROOT_POLICY)["edges"] == []


def test_unknown_and_ambiguous_references_are_refused(made):
    with pytest.raises(SettingsError, match="did you mean sample"):
        lineage_of(made.root, "sampl")
    key = made.refs[2, "rewards", 0].key
    wrong = key[:10] + ("0" if key[10] != "0" else "1")
    with pytest.raises(SettingsError, match=f"did you mean .*rewards/{key[:12]}"):
        lineage_of(made.root, f"rewards/{wrong}")
    with pytest.raises(SettingsError, match="no table, policy or run 'rollouts/'"):
        lineage_of(made.root, "rollouts/")


def test_tree_shows_each_node_once_and_says_what_it_hides(made):
    stream = io.StringIO()
    Console(file=stream, width=200).print(lineage_tree(lineage_of(made.root, made.name), max_opened=1))
    text = stream.getvalue()
    assert f"policy 4  {made.policies[4].policy_id[:12]}" in text
    assert "source sums.jsonl  4 rows" in text
    assert "... 4 earlier policies with their tables" in text
    rollouts = made.refs[4, "rollouts", 0].key[:12]
    whole = [line for line in text.splitlines() if rollouts in line and "(above)" not in line]
    assert len(whole) == 1
