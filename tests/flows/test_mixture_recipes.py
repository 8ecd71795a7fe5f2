"""The shipped recipes that learn from experts beside own completions, or from the best of these, on a tiny model: which
rows train, the first loss by the Hugging Face model itself, and what runs, reruns and prunings make of such rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from data_contracts.ledger import EXPERTS, Ledger
from data_contracts.store import Store
from flows.cli import app
from flows.evaluate import evaluation_recipe
from flows.inspect.lineage import lineage_of
from flows.inspect.metrics import metrics_of
from flows.inspect.run import open_run
from flows.rerun import rerun
from flows.train import train
from rft_core.errors import SettingsError
from rft_core.recipes import find_recipe, load_recipe
from tests.flows.small_runs import SAMPLED, Row, logprobs, moved, weights_digest
from tests.tiny import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_server")]
SMALL = [*SAMPLED, "steps=2"]
# Half of the digits: a tiny random model writes one in some completions, and in none of others.
DIGIT = """
def digit(rows):
    return [float(any(letter in "2468" for letter in row.completion_text)) for row in rows]
"""
EXPERT_FILE = find_recipe("mix").with_name("sums_pairs.jsonl")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def settings(root: Path, model: Path, *overrides: str) -> list[str]:
    root.mkdir(exist_ok=True)
    (root / "digit.py").write_text(DIGIT)
    reward = f"reward.functions.0={{name: custom, path: {root}/digit.py:digit}}"
    return [*SMALL, f"model.path={model}", reward, *overrides]


def run(root: Path, model: Path, recipe: str, *overrides: str, name: str = "x") -> None:
    given = ["experts.per_step=6"] if recipe != "raft" else []
    train(recipe=load_recipe(recipe, settings(root, model, *given, *overrides)), run=name, root=str(root))


def table(root: Path, step: int, stage: str, record: str | None = None, round_: int = 0, name: str = "x") -> list[Row]:
    entry = Ledger(root / "runs" / name).get("main", step, stage, round_)
    return Store(str(root)).read(entry.refs[record or stage]).to_pylist()


def rows(root: Path, step: int, name: str = "x") -> list[Row]:
    """Train rollouts of all rounds with their rewards and credit."""
    merged: dict[str, Row] = {}
    for stage in ("rollouts", "rewards", "advantages"):
        for entry in Ledger(root / "runs" / name).entries(stage):
            if entry.step == step:
                for row in Store(str(root)).read(entry.refs[stage]).to_pylist():
                    merged.setdefault(row["rollout_id"], {}).update(row)
    return list(merged.values())


def update_of(root: Path, step: int, name: str = "x") -> Row:
    (update,) = table(root, step, "update", "updates", name=name)
    return update


@pytest.mark.parametrize("recipe", ["mix", "chord"])
def test_own_and_expert_rows_make_one_step(tmp_path, model, recipe):
    share = [] if recipe == "mix" else ["algorithm={name: chord, expert_coefficient: 0.2, expert_peak: 0.6, "
                                        "expert_warmup_steps: 2, expert_decay_steps: 4}"]  # fmt: skip
    run(tmp_path, model, recipe, *share)
    made = rows(tmp_path, 1)
    own, given = ([row for row in made if row["term"] == term] for term in ("own", "expert"))
    assert len(own) == 16 and len(given) == 6 and all(row["is_trained"] for row in made)
    assert {row["origin"] for row in given} == {"dataset"} and {row["round"] for row in given} == {EXPERTS}
    assert {row["reward"] for row in given} == {row["advantage"] for row in given} == {1.0}
    for row in own:  # an expert's reward is in no group's mean
        group = torch.tensor([other["reward"] for other in own if other["group_id"] == row["group_id"]])
        credit = (row["reward"] - group.mean()) / (group.std() + 1e-6)
        assert row["advantage"] == pytest.approx(float(credit), abs=1e-5)
    module = AutoModelForCausalLM.from_pretrained(model)
    tokens = torch.cat([logprobs(module, row) for row in given])
    weights = (tokens.exp() * (1 - tokens.exp())) if recipe == "chord" else torch.ones_like(tokens)
    expert_loss = -float((weights * tokens).mean())
    own_loss = -sum(row["advantage"] for row in own) / 16  # ratio 1: each row's token mean is -A
    mu = {"mix": 0.1, "chord": 0.3}[recipe]  # 0.6 x 1 / 2
    update = update_of(tmp_path, 1)
    assert update["expert_loss"] == pytest.approx(expert_loss, rel=1e-5)
    assert update["own_loss"] == pytest.approx(own_loss, abs=1e-6)
    assert update["expert_coefficient"] == pytest.approx(mu)
    assert update["loss"] == pytest.approx((1 - mu) * own_loss + mu * expert_loss, rel=1e-5)
    assert (update["expert_rows"], update["trained_rows"]) == (6, 22)
    assert update["trained_tokens"] == len(tokens) + sum(sum(row["completion_mask"]) for row in own)
    assert update["ratio_max"] == 1.0
    assert update_of(tmp_path, 2)["expert_coefficient"] == pytest.approx({"mix": 0.1, "chord": 0.6}[recipe])
    assert moved(tmp_path, model) > 1e-3
    assert len((tmp_path / "runs/x/generated.jsonl").read_text().splitlines()) == 2  # a block of each step: none given


def test_raft_learns_the_best_completions_that_pass(tmp_path, model):
    run(tmp_path, model, "raft")
    made = rows(tmp_path, 1)
    best = {}
    for row in sorted(made, key=lambda row: row["rollout_index"]):
        if row["reward"] >= 1.0:
            best.setdefault(row["group_id"], row["rollout_id"])
    trained = [row for row in made if row["is_trained"]]
    assert {row["rollout_id"] for row in trained} == set(best.values()) and 0 < len(best) < len(made)
    assert {row["term"] for row in made} == {"selected"} and {row["advantage"] for row in trained} == {1.0}
    assert {row["drop_reason"] for row in made if not row["is_trained"]} == {"filtered"}
    module = AutoModelForCausalLM.from_pretrained(model)
    tokens = torch.cat([logprobs(module, row) for row in trained])
    assert update_of(tmp_path, 1)["loss"] == pytest.approx(-float(tokens.mean()), rel=1e-5)
    assert moved(tmp_path, model) > 1e-3
    rerun("x", "advantages", "y", ["algorithm.select=passing"], root=str(tmp_path))
    passing = {row["rollout_id"] for row in made if row["reward"] >= 1.0}
    assert {row["rollout_id"] for row in table(tmp_path, 1, "advantages", name="y") if row["is_trained"]} == passing


@pytest.fixture(scope="module")
def mixed(model, tmp_path_factory) -> Path:
    """Root of a run of mix, of three steps."""
    root = tmp_path_factory.mktemp("mixed")
    run(root, model, "mix", "steps=3")
    return root


def test_another_weight_trains_on_the_same_rows(mixed):
    before = (mixed / "runs/x/generated.jsonl").read_text()
    rerun("x", "advantages", "y", ["algorithm.expert_coefficient=0.6"], root=str(mixed))
    first, second = update_of(mixed, 1), update_of(mixed, 1, "y")
    for column in ("own_loss", "expert_loss", "trained_tokens", "expert_rows"):
        assert second[column] == first[column]
    assert second["loss"] == pytest.approx(0.4 * first["own_loss"] + 0.6 * first["expert_loss"], rel=1e-6)
    assert weights_digest(mixed, "y") != weights_digest(mixed)
    assert not (mixed / "runs/y/generated.jsonl").exists() and (mixed / "runs/x/generated.jsonl").read_text() == before
    rerun("x", "update", "z", [], root=str(mixed))
    assert weights_digest(mixed, "z") == weights_digest(mixed)


def test_weights_by_source_are_a_column_of_credit(mixed, tmp_path):
    name = "sums_pairs.jsonl"
    rerun("x", "advantages", "w", [f"experts.source_weights={{{name}: 2}}"], root=str(mixed))
    weights = {(row["term"], row["weight"]) for row in table(mixed, 1, "advantages", name="w")}
    assert weights == {("own", 1.0), ("expert", 2.0)}
    assert update_of(mixed, 1, "w")["loss"] == pytest.approx(update_of(mixed, 1)["loss"], rel=1e-9)  # one source alone
    with pytest.raises(SettingsError, match=r"experts\.per_step has no effect: the rollouts are those of run 'x'"):
        rerun("x", "advantages", "v", ["experts.per_step=2"], root=str(mixed))


def test_a_run_becomes_a_mixture_without_sampling_and_back(mixed, model):
    alone = ["algorithm={name: grpo}", "experts=null"]
    rerun("x", "advantages", "own", alone, root=str(mixed))
    assert {row["term"] for row in table(mixed, 1, "advantages", name="own")} == {"own"}
    assert Ledger(mixed / "runs/own").get("main", 1, "rollouts", EXPERTS) is None
    assert update_of(mixed, 1, "own")["loss"] == pytest.approx(update_of(mixed, 1)["own_loss"], abs=1e-9)
    experts = json.dumps(load_recipe("mix").experts.model_dump(mode="json"))
    rerun(
        "own",
        "advantages",
        "again",
        ["algorithm={name: mix, expert_coefficient: 0.1}", f"experts={experts}", "experts.per_step=6"],
        root=str(mixed),
    )
    assert weights_digest(mixed, "again") == weights_digest(mixed)
    with pytest.raises(SettingsError, match="experts has no effect: the advantages are those of run 'x'"):
        rerun("x", "update", "v", alone, root=str(mixed))


def test_readers_tell_experts_from_own_rows(mixed):
    view = open_run(str(mixed), "x")
    metrics = {row["step"]: row for row in metrics_of(view).to_pylist()}
    for step in (1, 2, 3):
        found = metrics[step]
        own = [row["reward"] for row in rows(mixed, step) if row["term"] == "own"]
        assert found["reward"] == pytest.approx(sum(own) / 16)
        assert (found["expert_rows"], found["expert_coefficient"]) == (6.0, 0.1)
        assert found["loss"] == pytest.approx(0.9 * found["own_loss"] + 0.1 * found["expert_loss"])
        assert "rewards/given/mean" not in found
    cli = CliRunner()
    shown = cli.invoke(app, ["show", "x", "rollouts", "--where", "origin = 'dataset'", "--format", "jsonl",
                             "--limit", "99", "--root", str(mixed)])  # fmt: skip
    assert len(shown.output.splitlines()) == 18
    assert "x" in cli.invoke(app, ["status", "x", "--root", str(mixed)]).output
    page = cli.invoke(app, ["report", "x", "--out", str(mixed / "x.html"), "--root", str(mixed)])
    assert page.exit_code == 0 and "Own and expert loss" in (mixed / "x.html").read_text()
    evaluated, name = evaluation_recipe(
        mixed, "x", None, ["evaluation={every: 1, prompts: 2, samples: 1, pass_at: [1]}"]
    )
    train(recipe=evaluated, run=name, root=str(mixed))
    assert [entry.round for entry in Ledger(mixed / "runs" / name).entries("data")] == [0]  # no expert is asked
    scored = cli.invoke(app, ["rescore", "x", "--set", "reward.functions.0.weight=2", "--json", "--root", str(mixed)])
    assert scored.exit_code == 0, scored.output
    assert {function["rows"] for function in json.loads(scored.output)["functions"]} == {48}  # own rollouts alone


def test_lineage_goes_down_to_the_lines_of_the_experts(mixed):
    lineage = lineage_of(str(mixed), "x")
    sources = {node["key"]: node for node in lineage["nodes"] if node["record"] == "source"}
    assert sources.keys() == {"sums_pairs.jsonl", "reasoning_gym:chain_sum"}
    identity = json.loads((mixed / "runs/x/run.json").read_text())["identity"]
    assert sources["sums_pairs.jsonl"]["digest"] == identity["experts"] != identity["source"]
    behind = {}
    for edge in lineage["edges"]:
        behind.setdefault(edge["from"], set()).add(edge["to"])
    below, waiting = set(), [lineage["nodes"][0]["ref"]]
    while waiting:
        below.add(waiting.pop())
        waiting = [ref for name in below for ref in behind.get(name, ()) if ref not in below]
    assert {node["ref"] for node in sources.values()} <= below
    lines = {json.loads(line)["prompt"]: number for number, line in enumerate(EXPERT_FILE.read_text().splitlines(), 1)}
    for example in table(mixed, 1, "prompts", "examples", EXPERTS):
        (said,) = json.loads(example["messages"])["prompt"]
        assert (example["source"], example["source_row"]) == ("sums_pairs.jsonl", lines[said["content"]])


def test_a_pruned_run_goes_on_with_its_experts(tmp_path, model):
    run(tmp_path, model, "mix", "steps=5")
    done = CliRunner().invoke(app, ["prune", "x", "--yes", "--root", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert open_run(str(tmp_path), "x").deleted("rewards", "rewards")
    metrics = {row["step"]: row for row in metrics_of(open_run(str(tmp_path), "x")).to_pylist()}
    assert metrics[1]["reward"] < 1.0  # kept of own rollouts, not of the experts'
    run(tmp_path, model, "mix", "steps=6")
    run(tmp_path / "straight", model, "mix", "steps=6")
    assert weights_digest(tmp_path) == weights_digest(tmp_path / "straight")


def test_an_experts_answer_to_a_held_out_prompt_is_dropped(tmp_path, model):
    """The experts answer the very questions of the data: those that it holds out are in quarantine, with the reason."""
    parameters = "{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}"
    same = f"{{source: 'reasoning_gym:chain_sum', parameters: {parameters}, size: 60, fields: {{completion: answer}}, "
    same += 'suffix: "\\nReply with only the number.", per_step: 6, max_rejected_fraction: 1}'
    run(tmp_path, model, "mix", "data.heldout_fraction=0.3", f"experts={same}", "steps=1")
    prompts = table(tmp_path, 0, "data", "prompts")
    asked = {split: {row["messages"] for row in prompts if row["split"] == split} for split in ("train", "heldout")}
    examples = table(tmp_path, 0, "data", "examples", EXPERTS)
    said = {json.dumps(json.loads(row["messages"])["prompt"]) for row in examples}
    held, train_ = ({json.dumps(json.loads(text)) for text in asked[split]} for split in ("heldout", "train"))
    assert held and not said & held and said == train_
    dropped = [row for row in table(tmp_path, 0, "data", "quarantine", EXPERTS) if row["reason"] == "overlaps_heldout"]
    assert len(dropped) >= len(held) and {row["action"] for row in dropped} == {"rejected"}
    assert "held out for evaluations" in dropped[0]["detail"]


def test_dynamic_sampling_and_ahead_go_on_beside_experts(tmp_path, model):
    settings_ = ["algorithm={name: mix, dynamic_sampling: true, duplicate_to_fill: true}", "rollout.ahead=1", "steps=3"]
    run(tmp_path, model, "mix", *settings_)
    for step in (1, 2, 3):
        made = rows(tmp_path, step)
        given = [row for row in made if row["term"] == "expert"]
        assert len(given) == 6 and all(row["is_trained"] for row in given)
        trained = {row["group_id"]: row["weight"] for row in made if row["is_trained"] and row["term"] == "own"}
        assert sum(trained.values()) == 4.0
    run(tmp_path / "again", model, "mix", *settings_)
    assert weights_digest(tmp_path) == weights_digest(tmp_path / "again")


def test_a_run_that_goes_on_gives_the_weights_of_one_that_never_stopped(tmp_path, model):
    run(tmp_path, model, "chord", "steps=3")
    run(tmp_path, model, "chord", "steps=5")  # from a checkpoint of step 2, and a replay
    run(tmp_path / "straight", model, "chord", "steps=5")
    assert weights_digest(tmp_path) == weights_digest(tmp_path / "straight")
