"""What must hold for the rows of each record, beyond its schema. `validation` adds the key's uniqueness."""

from __future__ import annotations

from data_contracts.expectations import (
    Rule,
    aligned,
    at_least,
    filled,
    finite,
    given_when,
    implies,
    json_text,
    logprobs_where_written,
    matches,
    one_of,
    same_keys,
    spans_within,
    unique,
    within,
)
from data_contracts.reasons import ACTIONS
from data_contracts.schemas import RECORDS

TEXT_ID = r"^[^\s\x00-\x1f]+$"
REASON_CODE = r"^[a-z][a-z0-9_]*$"

_SOURCE = (
    filled("source"),
    matches("source", r"^[^/\\]+$", "be a base name, not a path"),
    at_least("source_row", 1),
)
_SPLIT = one_of("split", "train", "heldout")
_ROLLOUT_ID = matches("rollout_id", TEXT_ID, "hold no spaces")

METRIC = r"^((sampled|greedy|preference|step)_accuracy|preference_ties|mean_reward|pass@[0-9]+|loss|margin)$"

_ROWS: dict[str, tuple[Rule, ...]] = {
    "prompts": (
        matches("prompt_id", r"^[^\s/\x00-\x1f]+$", "hold no spaces or slashes"),
        filled("prompt_text"),
        unique("prompt_text"),
        filled("prompt_token_ids"),
        json_text("messages", list),
        json_text("tools", list),
        json_text("metadata", dict),
        *_SOURCE,
        filled("dataset"),
        _SPLIT,
    ),
    "examples": (
        matches("example_id", TEXT_ID, "hold no spaces"),
        one_of("kind", "demonstration", "pair", "labelled", "trajectory", "stepwise"),
        given_when("label", "kind", "labelled"),
        given_when("step_labels", "kind", "stepwise"),
        finite("margin"),
        finite("step_labels"),
        finite("reward"),
        finite("turn_rewards"),
        json_text("messages", dict),
        json_text("tools", list),
        json_text("metadata", dict),
        *_SOURCE,
        filled("dataset"),
        _SPLIT,
    ),
    "rollouts": (
        _ROLLOUT_ID,
        at_least("segment", 0),
        at_least("rollout_index", 0),
        at_least("step", 0),
        at_least("round", 0),
        at_least("policy_version", 0),
        at_least("seed", 0),
        one_of("purpose", "train", "baseline", "evaluation"),
        one_of("origin", "policy", "dataset"),
        one_of("finish_reason", "stop", "length", "error", "given"),
        one_of("status", "completed", "truncated", "error"),
        given_when("error_reason", "status", "error"),
        implies("finish_reason", "error", "status", "error"),
        implies("finish_reason", "length", "status", "truncated", "error"),
        implies("origin", "policy", "finish_reason", "stop", "length", "error"),
        filled("prompt_token_ids"),
        aligned("completion_mask", "completion_token_ids"),
        aligned("behaviour_logprobs", "completion_token_ids"),
        logprobs_where_written("behaviour_logprobs", "completion_mask"),
        spans_within("turns", "completion_token_ids"),
        finite("environment_reward"),
        json_text("messages", list),
        json_text("sampling", dict),
    ),
    "rewards": (
        _ROLLOUT_ID,
        one_of("status", "scored", "unscored"),
        given_when("reward", "status", "scored"),
        given_when("reason", "status", "unscored"),
        finite("reward"),
        finite("components"),
        same_keys("components", "component_status"),
        finite("turn_rewards"),
        finite("step_rewards"),
        aligned("step_rewards", "step_ends"),
        filled("grader_digest"),
    ),
    "token_scores": (
        _ROLLOUT_ID,
        at_least("segment", 0),
        one_of("scorer", "old", "reference", "teacher", "critic", "critic_after"),
        finite("values"),
    ),
    "advantages": (
        _ROLLOUT_ID,
        at_least("segment", 0),
        finite("advantage"),
        finite("token_advantages"),
        finite("returns"),
        finite("weight"),
        at_least("weight", 0),
        one_of("drop_reason", "none", "zero_variance", "unscored", "truncated", "group_too_small", "stale", "filtered"),
        implies("drop_reason", "none", "is_trained", True),
        implies("is_trained", True, "drop_reason", "none", "zero_variance"),
        implies("is_trained", False, "advantage", 0.0),
        given_when("pair_role", "pair_id"),
        one_of("pair_role", "chosen", "rejected"),
        finite("pair_margin"),
        one_of("term", "own", "expert", "selected"),
    ),
    "updates": (
        at_least("policy_version", 1),
        at_least("optimizer_step", 1),
        finite("loss", unless="skipped"),
        finite("policy_loss", unless="skipped"),
        finite("grad_norm", unless="skipped"),
        finite("value_loss", unless="skipped"),
        finite("value_grad_norm", unless="skipped"),
        finite("learning_rate"),
        at_least("learning_rate", 0),
        at_least("trained_rows", 0),
        at_least("trained_tokens", 0),
        at_least("off_policy_rows", 0),
        at_least("forward_rows", 0),
    ),
    "evaluations": (
        matches("metric", METRIC, "be a known metric"),
        at_least("step", 0),
        at_least("policy_version", 0),
        finite("value"),
        finite("low"),
        finite("high"),
        within("low", "high"),
        at_least("num_prompts", 1),
        at_least("num_samples", 1),
    ),
    "quarantine": (
        *_SOURCE,
        matches("reason", REASON_CODE, "be a reason code"),
        one_of("action", *ACTIONS.values()),
    ),
    "prompt_stats": (
        at_least("attempts", 0),
        at_least("passes", 0),
        within("passes", "attempts"),
        at_least("draws", 1),
        at_least("last_step", 1),
    ),
}

SUITES: dict[str, tuple[Rule, ...]] = {name: (unique(*RECORDS[name].key), *rules) for name, rules in _ROWS.items()}
