"""The reward stage's blocks: scored once each, and scored again only where the grader had no score."""

from collections import Counter
from pathlib import Path

import pytest

from data_contracts.ledger import Lease, Ledger
from data_contracts.refs import TableRef
from data_contracts.store import Store
from rft_core.config import Recipe
from rft_core.errors import GraderUnavailable
from tasks.context import RunContext, register, unregister
from tasks.rewards import score_rollouts
from tasks.stage import Slot
from tests.rft_core.rewards.tables import prompts_table, rollouts_table

# Writes down what it is asked, and has no score for prompt `c` until a file says that the grader is well again.
REWARD = """
from pathlib import Path
here = Path(__file__).parent
def length(rows):
    with open(here / "calls.log", "a") as file:
        file.writelines(f"{row.prompt_id}\\n" for row in rows)
    is_well = (here / "well").exists()
    return [float(len(row.completion_text)) if is_well or row.prompt_id != "c" else None for row in rows]
"""
BLOCKS = ("ab", "cd", "ef")  # prompts of the three blocks; two rollouts each


@pytest.fixture
def run(tmp_path):
    """An open run with three blocks of rollouts; gives the context and both tables."""
    (tmp_path / "mine.py").write_text(REWARD)
    recipe = Recipe.model_validate(
        {
            "steps": 1,
            "model": {"path": "unused"},
            "data": {"source": "unused.jsonl"},
            "reward": {
                "functions": [{"name": "custom", "label": "length", "path": f"{tmp_path}/mine.py:length"}],
                "max_unscored_fraction": 0.1,
            },
        }
    )
    store, folder = Store(str(tmp_path)), tmp_path / "runs/x"
    lease = Lease.acquire(folder)
    (folder / "ledger").mkdir()
    context = RunContext(tmp_path, "x", recipe, store, Ledger(folder, lease), {"grader": "g"}, Path("unused"), {})
    writer = store.writer("rollouts", "r", {})
    for index, prompts in enumerate(BLOCKS):
        rows = [{"prompt_id": prompt, "index": i, "text": "x" * i} for prompt in prompts for i in range(2)]
        writer.commit(index, rollouts_table(*rows))
    prompts = store.write("prompts", "p", prompts_table(*({"prompt_id": name} for name in "abcdef")), {})
    register(context)
    yield context, writer.close(), prompts
    unregister("x")
    lease.release()


def score(rollouts: TableRef, prompts: TableRef) -> None:
    score_rollouts.fn("x", Slot(1, "rewards"), rollouts, prompts)


def calls(context: RunContext) -> Counter[str]:
    return Counter((context.root / "calls.log").read_text().splitlines())


def test_rewards_lie_in_the_blocks_of_the_rollouts(run):
    context, rollouts, prompts = run
    (context.root / "well").touch()
    score(rollouts, prompts)
    blocks = list(context.store.read_blocks(context.ledger.get("main", 1, "rewards").refs["rewards"]))
    expected = [[f"step-00001/{prompt}/{i:02d}" for prompt in names for i in range(2)] for names in BLOCKS]
    assert [block["rollout_id"].to_pylist() for block in blocks] == expected
    assert [block["reward"].to_pylist() for block in blocks] == [[0, 1, 0, 1]] * 3
    assert calls(context) == dict.fromkeys("abcdef", 2)


def test_a_retry_scores_only_the_blocks_that_lack_scores(run):
    context, rollouts, prompts = run
    # 2 of 12 rollouts of the step: within one block it would be half.
    with pytest.raises(GraderUnavailable, match=r"at most 10% .* 2 of 12 are: 2 x length: the function gave None"):
        score(rollouts, prompts)
    assert context.ledger.get("main", 1, "rewards") is None
    (context.root / "well").touch()
    score(rollouts, prompts)
    assert calls(context) == {**dict.fromkeys("abef", 2), **dict.fromkeys("cd", 4)}
    rewards = context.store.read(context.ledger.get("main", 1, "rewards").refs["rewards"])
    assert rewards["status"].to_pylist() == ["scored"] * 12
