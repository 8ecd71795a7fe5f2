"""What of a run with phases may be another when it goes on."""

import pytest

from rft_core.errors import ContentChanged
from rft_core.recipes import difference, recipe_of, with_overrides
from tasks.resuming import identities_of, refuse_changed_content

GRPO = {"reward": {"functions": [{"name": "exact_match"}]}}
RECIPE = recipe_of(
    {
        "model": {"path": "tiny"},
        "data": {"source": "/prompts.jsonl"},
        "phases": [{"name": name, "steps": 3, **GRPO} for name in ("one", "two", "three")],
    }
)
IDENTITY = {"source": "a" * 64, "grader": "b" * 64}
BEGUN = {"one": IDENTITY, "two": IDENTITY}  # the second is under way


def refused(*overrides: str, identity: dict[str, str] = IDENTITY) -> str | None:
    changed = with_overrides(RECIPE, list(overrides))
    try:
        refuse_changed_content("x", difference(RECIPE, changed), changed, BEGUN, "two", identity)
    except ContentChanged as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "override",
    [
        "phases.2.training.epochs=1",
        "phases.2.algorithm.name=gspo",
        "phases.2.name=third",  # it has not begun
        "phases.2.steps=9",
        "phases.3={name: four, steps: 1, reward: {functions: [{name: exact_match}]}}",
        "phases.1.steps=4",  # the newest
        "phases.0.data.workers=3",  # execution
        "retention.keep_last=3",
    ],
)
def test_what_may_change(override):
    assert refused(override) is None


@pytest.mark.parametrize(
    ("override", "rerun"),
    [
        ("phases.0.steps=4", "rft rerun x --from update --phase one --set steps=4"),
        ("phases.1.steps=2", "rft rerun x --from update --phase two --set steps=2"),
        ("phases.1.training.epochs=2", "rft rerun x --from update --phase two --set training.epochs=2"),
        ("phases.0.rollout.top_k=2", "rft rerun x --from rollouts --phase one --set rollout.top_k=2"),
        ("seed=3", "rft rerun x --from data --phase one --set seed=3"),
        ("phases.0.name=first", "rft run RECIPE --name NEW"),
    ],
)
def test_what_may_not_change_and_the_rerun_that_does_it(override, rerun):
    said = refused(override)
    assert said is not None and said.endswith(rerun) and override.split("=")[0] in said


def test_the_earliest_phase_and_stage_are_named():
    said = refused("phases.1.rollout.top_k=2", "phases.0.training.epochs=2")
    assert said is not None
    assert said.endswith("rft rerun x --from update --phase one --set training.epochs=2 --set phases.1.rollout.top_k=2")


def test_more_steps_are_refused_where_the_schedule_counts_them():
    falling = with_overrides(RECIPE, ["phases.1.training.schedule=linear"])
    longer = with_overrides(falling, ["phases.1.steps=4"])
    with pytest.raises(ContentChanged, match=r"phases\.1\.steps: 3 -> 4"):
        refuse_changed_content("x", difference(falling, longer), longer, BEGUN, "two", IDENTITY)


def test_other_content_of_the_phase_under_way_is_named():
    said = refused(identity={**IDENTITY, "grader": "c" * 64})
    assert said is not None and f"content of the grader: {'b' * 12} -> {'c' * 12}" in said
    assert said.endswith("rft rerun x --from rewards --phase two")


def test_identities_of_a_run_without_phases_are_those_of_main():
    assert identities_of({"identity": IDENTITY}) == {"main": IDENTITY}
    assert identities_of({"identity": IDENTITY, "phases": BEGUN}) == BEGUN
    assert identities_of(None) == {}
