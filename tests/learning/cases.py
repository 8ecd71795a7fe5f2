"""What must learn, by how much, and its control. Seeds and margins stand here before a case is run.

A case is a recipe of the task and settings over it. Its control has the same settings, but for what tells right from
wrong. Both are measured on held-out prompts, at the start and at the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SEEDS = (0, 1, 2)
LEAST_ERRORS = 2.0  # a mean gain exceeds so many of its standard errors; a control's does not
CONTROL_SHARE = 1 / 3  # nor does it reach this share of the case's gain
LN2 = math.log(2)


@dataclass(frozen=True)
class Case:
    """One algorithm on the task. A gain is a change of `metric` for the better, counted from `chance` where the metric
    starts below: preference_accuracy starts at 0, all pairs being ties, and knowing nothing gives half of them.

    `margin` is what the mean gain over the seeds must reach, `least` what each seed's last value must; `start` is each
    seed's first value and `first_loss` the loss of its first update, both exactly.
    """

    name: str
    recipe: str
    metric: str
    margin: float
    sets: tuple[str, ...]
    control: tuple[str, ...]
    falls: bool = False  # less is better
    least: float | None = None
    start: float | None = None
    first_loss: float | None = None
    chance: float | None = None


def sampled(name: str, *sets: str, margin: float = 0.3) -> Case:
    """Held-out mean reward of sampled completions, from about .23: a constant answer gets .1, the best 1."""
    control = ("reward.functions.0.path={task}/rewards.py:matches_dealt_out",)
    return Case(name, "sampled", "mean_reward", margin, (f"algorithm.name={name}", *sets), control)


def imitated(name: str, margin: float) -> Case:
    """Held-out loss of right answers in nats a token, from about 1.1. The control learns answers of other prompts."""
    control = ("data.source={task}/answers-control.jsonl",)
    return Case(name, "given", "loss", margin, (f"algorithm.name={name}",), control, falls=True)


def preferred(
    name: str,
    *sets: str,
    record: str = "preferences",
    metric: str = "margin",
    margin: float = 1.0,
    least: float | None = None,
    first_loss: float | None = None,
    chance: float | None = None,
) -> Case:
    """Held-out margin in nats, from 0, of right answers over those of other prompts. The control compares two answers
    of other prompts: with flipped pairs, whose one side is right, likelihood of either side would teach the task."""
    files = ("data.source={task}/pairs-train.jsonl", "data.heldout_source={task}/pairs-heldout.jsonl")
    own = (f"algorithm.name={name}", f"data.record={record}", *files, *sets)
    control = ("data.source={task}/pairs-control.jsonl",)
    return Case(name, "given", metric, margin, own, control, False, least, 0.0, first_loss, chance)


TWO_STEPS = "training.mini_batches=2"  # the second optimizer step of a batch meets ratios other than 1
CRITIC = "critic.learning_rate=2e-3"  # that of the policy
STALE = "rollout.ahead=1"  # completions of the policy one step back

CASES = {
    case.name: case
    for case in (
        imitated("sft", margin=0.5),
        imitated("dft", margin=0.25),
        preferred("dpo", first_loss=LN2),
        preferred("ipo", first_loss=25.0),  # (0 - 1 / 0.2)^2
        preferred("orpo"),
        preferred("simpo"),
        preferred("kto", "data.unpair=true", record="labelled", first_loss=0.5),
        preferred(
            "reward_model",
            "steps=60",
            "rollout.prompts_per_step=64",
            metric="preference_accuracy",
            margin=0.4,
            least=0.9,
            first_loss=LN2,
            chance=0.5,
        ),
        sampled("grpo", TWO_STEPS),
        sampled("dapo", TWO_STEPS),
        sampled("cispo", TWO_STEPS),
        sampled("gspo"),
        sampled("rloo"),
        sampled("reinforce_plus_plus", TWO_STEPS),
        sampled("ppo", TWO_STEPS, CRITIC),
        sampled("online_dpo", margin=0.2),
        sampled("topr", STALE, "algorithm.advantage=group_mean"),
        sampled("m2po", STALE),
        sampled("opmd", STALE),
        sampled("remax"),
        sampled("dr_grpo", TWO_STEPS),
        sampled("reinforce_plus_plus_baseline", TWO_STEPS),
        sampled("gdpo", TWO_STEPS),
        sampled("gmpo", TWO_STEPS),
        sampled("sapo", TWO_STEPS),
        sampled("vespo", STALE),
        sampled("dppo_tv", STALE, TWO_STEPS),
    )
}
