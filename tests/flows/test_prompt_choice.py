"""Orders of prompts that go by measured pass rates, through the flows: a tiny model against a real Prefect server."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from data_contracts.ledger import Ledger
from data_contracts.store import Store
from flows.inspect.lineage import lineage_of
from flows.rerun import rerun
from flows.train import train
from rft_core.config import Recipe
from rft_core.errors import SettingsError
from rft_core.recipes import load_recipe
from tests.faults.harness import all_digests, write_recipe
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.slow
# A random model writes one of these letters in about half of its completions.
REWARD = {"functions": [{"name": "answer_format", "pattern": "(?s).*[a-m].*"}]}


@pytest.fixture(scope="module", autouse=True)
def server(prefect_api):
    with temporary_settings({PREFECT_API_URL: prefect_api["PREFECT_API_URL"]}):
        yield


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    model = make_tiny_model(folder / "model")
    return write_recipe(
        folder, model, steps=4, model__dtype="float32", data__order="targeted", evaluation__every=0, reward=REWARD
    )


def recipe(recipe_file, *overrides: str) -> Recipe:
    return load_recipe(recipe_file, list(overrides))


@pytest.fixture(scope="module")
def finished(recipe_file, tmp_path_factory):
    """A root with the complete run `first`."""
    root = tmp_path_factory.mktemp("root")
    train(recipe=recipe(recipe_file), run="first", root=str(root))
    return root


def counted(root, run: str, steps: list[int]) -> dict[str, tuple[float, float, int]]:
    """{prompt: (attempts, passes, draws)} of those steps, from their rollouts and rewards."""
    store, ledger = Store(str(root)), Ledger(root / "runs" / run)
    attempts, passes, draws = Counter[str](), Counter[str](), Counter[str]()
    for step in steps:
        tables = {stage: store.read(ledger.get("main", step, stage).refs[stage]) for stage in ("rollouts", "rewards")}
        prompt_of = {row["rollout_id"]: row["prompt_id"] for row in tables["rollouts"].to_pylist()}
        draws.update(set(prompt_of.values()))
        for row in tables["rewards"].to_pylist():
            attempts[prompt_of[row["rollout_id"]]] += 1
            passes[prompt_of[row["rollout_id"]]] += dict(row["components"])["answer_format"] >= 1
    return {name: (float(attempts[name]), float(passes[name]), draws[name]) for name in attempts}


def stats_of(root, run: str, step: int) -> dict[str, tuple[float, float, int]] | None:
    ref = Ledger(root / "runs" / run).get("main", step, "prompts").refs.get("prompt_stats")
    if ref is None:
        return None
    rows = Store(str(root)).read(ref).to_pylist()
    return {row["prompt_id"]: (row["attempts"], row["passes"], row["draws"]) for row in rows}


def test_statistics_hold_every_step_before(finished):
    assert stats_of(finished, "first", 1) is None
    for step in (2, 3, 4):
        assert stats_of(finished, "first", step) == counted(finished, "first", list(range(1, step)))
    rates = {passes / attempts for attempts, passes, _ in stats_of(finished, "first", 4).values()}
    assert len(rates) > 2, "a reward that all or none reach would show nothing"


def test_a_choice_can_be_traced_to_the_rewards_that_led_to_it(finished):
    ledger = Ledger(finished / "runs/first")
    chosen = ledger.get("main", 3, "prompts").refs["prompts"]
    nodes = {node["ref"] for node in lineage_of(str(finished), chosen.name)["nodes"]}
    assert {ledger.get("main", step, "rewards").refs["rewards"].name for step in (1, 2)} <= nodes
    assert ledger.get("main", 3, "rewards").refs["rewards"].name not in nodes


def test_equal_runs_have_equal_digests_and_another_seed_chooses_otherwise(finished, recipe_file, tmp_path):
    train(recipe=recipe(recipe_file), run="first", root=str(tmp_path))
    assert all_digests(tmp_path, "first") == all_digests(finished, "first")
    train(recipe=recipe(recipe_file, "seed=1", "steps=1"), run="other", root=str(tmp_path))
    assert all_digests(tmp_path, "other")["1.prompts.0"] != all_digests(finished, "first")["1.prompts.0"]


def test_with_ahead_rewards_come_later(recipe_file, tmp_path):
    train(recipe=recipe(recipe_file, "rollout.ahead=1"), run="x", root=str(tmp_path))
    assert stats_of(tmp_path, "x", 1) is None and stats_of(tmp_path, "x", 2) is None
    for step in (3, 4):
        assert stats_of(tmp_path, "x", step) == counted(tmp_path, "x", list(range(1, step - 1)))


def test_easy_to_hard_goes_through_every_prompt_before_any_comes_again(recipe_file, tmp_path):
    overrides = ["data.order=easy_to_hard", "rollout.ahead=1", "rollout.prompts_per_step=12"]
    train(recipe=recipe(recipe_file, *overrides), run="x", root=str(tmp_path))
    store, ledger = Store(str(tmp_path)), Ledger(tmp_path / "runs/x")
    splits = store.read(ledger.get("main", 0, "data").refs["prompts"], ["split"])["split"].to_pylist()
    steps = [
        store.read(ledger.get("main", step, "prompts").refs["prompts"])["prompt_id"].to_pylist() for step in range(1, 5)
    ]
    taken = [name for step in steps for name in step]
    total = splits.count("train")
    assert 24 < total <= 36 and len(set(taken[:total])) == total
    # The fourth step lies in the second epoch and knows the first two steps; an unmeasured prompt stands at a half.
    measured = counted(tmp_path, "x", [1, 2])
    rates = [passes / attempts for attempts, passes, _ in (measured.get(name, (2, 1, 0)) for name in steps[3])]
    assert rates == sorted(rates, reverse=True) and len(set(rates)) > 1


def test_other_orders_know_nothing_of_it_and_a_branch_may_change_the_order(recipe_file, tmp_path):
    train(recipe=recipe(recipe_file, "data.order=shuffled", "steps=2"), run="x", root=str(tmp_path))
    entry = Ledger(tmp_path / "runs/x").get("main", 2, "prompts")
    assert list(entry.refs) == ["prompts"] and entry.notes == {}
    provenance = Store(str(tmp_path)).manifest(entry.refs["prompts"])["provenance"]
    assert provenance["settings"] == {"step": 2, "count": 6, "order": "shuffled"}
    assert [ref["record"] for ref in provenance["inputs"]] == ["prompts"]
    rerun("x", "rollouts", "y", ["data.order=targeted"], at=2, root=str(tmp_path))
    assert stats_of(tmp_path, "y", 2) == counted(tmp_path, "y", [1])
    with pytest.raises(SettingsError, match=r"data\.order has no effect: the rollouts are those of run 'x'"):
        rerun("x", "rewards", "z", ["data.order=targeted"], root=str(tmp_path))


def test_a_rerun_takes_choices_and_statistics_over(finished):
    reward = f"reward.functions={json.dumps([{'name': 'answer_format', 'pattern': '(?s).*[n-z].*'}])}"
    rerun("first", "rewards", "rescored", [reward], root=str(finished))
    old, new = Ledger(finished / "runs/first"), Ledger(finished / "runs/rescored")
    for step in (1, 2, 3, 4):
        assert new.get("main", step, "prompts").refs == old.get("main", step, "prompts").refs
    assert new.get("main", 2, "rewards").refs != old.get("main", 2, "rewards").refs


def test_a_branch_goes_on_from_the_old_statistics(finished):
    rerun("first", "rollouts", "branch", ["rollout.temperature=0.7"], at=3, root=str(finished))
    assert stats_of(finished, "branch", 3) == counted(finished, "branch", [1, 2])
    assert stats_of(finished, "branch", 4) == counted(finished, "branch", [1, 2, 3])


def test_a_branch_with_another_ahead_counts_no_step_twice(finished):
    rerun("first", "rollouts", "later", ["rollout.ahead=2", "steps=6"], at=3, root=str(finished))
    # The old run's statistics for step 2 hold step 1; what the branch adds comes as late as its `ahead` says.
    for step, through in ((3, 1), (4, 1), (5, 2), (6, 3)):
        assert stats_of(finished, "later", step) == counted(finished, "later", list(range(1, through + 1)))


def test_a_cleaned_mixture_gives_each_step_its_shares(recipe_file, tmp_path):
    folder = recipe_file.parent
    (folder / "tidy.py").write_text("def tidy(row):\n    return None if row['prompt'].endswith('3') else row\n")
    with open(folder / "colours.jsonl", "w") as file:
        for number in range(30):
            file.write(json.dumps({"prompt": f" colour {number} ", "answer": "", "level": 30 - number}) + "\n")
    with open(folder / "animals.jsonl", "w") as file:
        for number in range(30):
            file.write(json.dumps({"prompt": f"animal {number}", "answer": "", "level": number}) + "\n")
    values = recipe(recipe_file, "steps=2", "rollout.prompts_per_step=12").model_dump(mode="json")
    values["data"] |= {
        "source": None,
        "mixture": [
            {"source": str(folder / "colours.jsonl"), "weight": 3.0, "label": "colour"},
            {"source": str(folder / "animals.jsonl")},
        ],
        "order": "difficulty",
        "difficulty_field": "level",
        "cleaning": [{"name": "strip"}, {"name": "custom", "path": f"{folder / 'tidy.py'}:tidy"}],
    }
    train(recipe=Recipe.model_validate(values), run="mixed", root=str(tmp_path))
    store, ledger = Store(str(tmp_path)), Ledger(tmp_path / "runs/mixed")
    data = ledger.get("main", 0, "data").refs
    reasons = Counter(store.read(data["quarantine"])["reason"].to_pylist())
    assert reasons["dropped_by_function"] == 6  # 3, 13 and 23 of either file
    taken = [
        row for step in (1, 2) for row in store.read(ledger.get("main", step, "prompts").refs["prompts"]).to_pylist()
    ]
    shares = Counter(row["dataset"] for row in taken)
    assert set(shares) == {"colour", "animals.jsonl"} and shares["colour"] > shares["animals.jsonl"]
    for name in shares:
        levels = [json.loads(row["metadata"])["level"] for row in taken if row["dataset"] == name]
        assert levels == sorted(levels)
