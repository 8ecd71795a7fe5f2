"""Every record that stages hand each other: its columns, key and version, defined once.

A record never holds a time, duration, host, path or run name, so that equal work has equal digests; those live in
manifests and ledgers. Free-form values (messages, tools, metadata, sampling) are canonical JSON strings. Each column
carries `doc` and `unit` metadata, and a nullable column says in `null` what its null means.

>>> RECORDS["rewards"].key
('rollout_id',)
>>> column_doc(RECORDS["rewards"], "reward")["null"]
'unscored: see reason'
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

TOKENS = pa.large_list(pa.int32())
FLOATS = pa.large_list(pa.float32())
BOOLS = pa.large_list(pa.bool_())
TEXT = pa.large_string()


@dataclass(frozen=True)
class Record:
    """A kind of table. `version` rises when columns change meaning; readers refuse other versions."""

    name: str
    version: int
    key: tuple[str, ...]
    schema: pa.Schema


def canonical_json(value: Any) -> str:
    """The one JSON text of a value: sorted keys, no spaces, no NaN. Equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def to_plain(value: Any) -> Any:
    """A value as plain JSON that `from_plain` turns back into an equal one: tuples and dicts with keys that are not
    texts are tagged, because verifiers compare them (a grid of tuples is not equal to a grid of lists).

    >>> to_plain({"grid": ((0, 1),), "colour": {1: "red"}})
    {'grid': {'__tuple__': [{'__tuple__': [0, 1]}]}, 'colour': {'__items__': [[1, 'red']]}}
    """
    if isinstance(value, tuple):
        return {"__tuple__": [to_plain(item) for item in value]}
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: to_plain(item) for key, item in value.items()}
        return {"__items__": [[to_plain(key), to_plain(item)] for key, item in value.items()]}
    return value


def from_plain(value: Any) -> Any:
    """The inverse of `to_plain`.

    >>> from_plain({"grid": {"__tuple__": [{"__tuple__": [0, 1]}]}, "colour": {"__items__": [[1, "red"]]}})
    {'grid': ((0, 1),), 'colour': {1: 'red'}}
    """
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"__tuple__"}:
            return tuple(from_plain(item) for item in value["__tuple__"])
        if value.keys() == {"__items__"}:
            return {from_plain(key): from_plain(item) for key, item in value["__items__"]}
        return {key: from_plain(item) for key, item in value.items()}
    return value


def column_doc(record: Record, column: str) -> dict[str, str]:
    """The `doc`, `unit` and (for nullable columns) `null` texts of a column."""
    metadata = record.schema.field(column).metadata
    return {key.decode(): value.decode() for key, value in metadata.items()}


def _column(name: str, kind: pa.DataType, doc: str, unit: str = "", null: str | None = None) -> pa.Field:
    metadata = {"doc": doc, "unit": unit}
    if null is not None:
        metadata["null"] = null
    return pa.field(name, kind, nullable=null is not None, metadata=metadata)


def _record(name: str, version: int, key: tuple[str, ...], columns: list[pa.Field]) -> Record:
    schema = pa.schema(columns, metadata={"record": name, "version": str(version)})
    return Record(name, version, key, schema)


_SOURCE = [
    _column("source", TEXT, "Where the row came from: a file name or a generator's name."),
    _column("source_row", pa.int64(), "Row in the source: the physical line of a file, counted from 1.", "row"),
]
_DATASET = _column("dataset", TEXT, "Label of the source in a mixture; the source's name where there is one.")
_SPLIT = _column("split", TEXT, "train or heldout; by content hash, so that both never share a rendered prompt.")

PROMPTS = _record(
    "prompts",
    2,
    ("prompt_id",),
    [
        _column("prompt_id", TEXT, "Readable id, unique in the data set."),
        _column("messages", TEXT, "Chat messages as canonical JSON: [{role, content}].", "json"),
        _column("prompt_text", TEXT, "The rendered template, up to and with the generation prompt."),
        _column(
            "prompt_token_ids",
            TOKENS,
            "Tokens of prompt_text; nothing downstream tokenises again.",
            "token",
            null="checked without a tokenizer",
        ),
        _column("tools", TEXT, "Tool definitions.", "json", null="no tools"),
        _column("answer", TEXT, "Ground truth that rewards read.", null="the source gives none"),
        _column("metadata", TEXT, "Every other field of the source row.", "json"),
        _column("media", TEXT, "References to images or audio.", "json", null="text only"),
        *_SOURCE,
        _DATASET,
        _SPLIT,
    ],
)

EXAMPLES = _record(
    "examples",
    2,
    ("example_id",),
    [
        _column("example_id", TEXT, "Readable id, unique in the data set."),
        _column("kind", TEXT, "demonstration | pair | labelled | trajectory | stepwise."),
        _column(
            "messages",
            TEXT,
            "{prompt, completion}, each a list of messages. A pair holds {prompt, chosen, rejected}, a stepwise "
            "example {prompt, steps} with one text per step, plain text {text}.",
            "json",
        ),
        _column("tools", TEXT, "Tool definitions.", "json", null="no tools"),
        _column("answer", TEXT, "Ground truth that rewards read.", null="the source gives none"),
        _column("label", pa.bool_(), "Desirable or not.", null="the kind has no label"),
        _column("margin", pa.float64(), "By how much chosen beats rejected.", null="the source gives none"),
        _column("reward", pa.float64(), "Reward of the whole completion.", null="the source gives none"),
        _column(
            "turn_rewards",
            pa.large_list(pa.float64()),
            "One reward per assistant turn of the completion.",
            null="the source gives none",
        ),
        _column("step_labels", pa.large_list(pa.float64()), "One label per step.", null="not stepwise"),
        _column("metadata", TEXT, "Every other field of the source row.", "json"),
        *_SOURCE,
        _DATASET,
        _SPLIT,
    ],
)

TURN = pa.struct(
    [
        pa.field("role", TEXT, nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("end", pa.int64(), nullable=False),
        pa.field("reward", pa.float64()),
        pa.field("state_digest", TEXT),
    ]
)

ROLLOUTS = _record(
    "rollouts",
    1,
    ("rollout_id", "segment"),
    [
        _column("rollout_id", TEXT, "step-00012/gsm-00731/03: step, prompt, index in the group."),
        _column("segment", pa.int64(), "Part of a rollout whose context was cut or rewritten; 0 alone is the rule."),
        _column("prompt_id", TEXT, "The prompt, in the prompts table."),
        _column("group_id", TEXT, "Rollouts whose rewards are compared. Formed by id, never by position or text."),
        _column("rollout_index", pa.int64(), "Index in the group, from 0."),
        _column("step", pa.int64(), "Training step that the rollout was made for.", "step"),
        _column("round", pa.int64(), "Round within the step (dynamic sampling, baselines, greedy evaluation)."),
        _column("purpose", TEXT, "train | baseline | evaluation."),
        _column("origin", TEXT, "policy: sampled by an engine. dataset: given by the data."),
        _column("policy_id", TEXT, "Identity of the policy that sampled it."),
        _column("policy_version", pa.int64(), "Number of updates behind that policy.", "update"),
        _column("prompt_token_ids", TOKENS, "The prompt as the engine saw it.", "token"),
        _column("completion_token_ids", TOKENS, "What followed, with the stop token if there was one.", "token"),
        _column("completion_mask", BOOLS, "True where the policy wrote the token; aligned with completion_token_ids."),
        _column(
            "behaviour_logprobs",
            FLOATS,
            "Log-probability of each token under the distribution that was really sampled.",
            "nat",
            null="the engine or data set gives none",
        ),
        _column("messages", TEXT, "The whole conversation.", "json"),
        _column("turns", pa.large_list(TURN), "Spans of completion_token_ids by role."),
        _column("step_ends", TOKENS, "Last token of each reasoning step.", "token", null="not split into steps"),
        _column("environment_reward", pa.float64(), "Reward from the environment.", null="the environment gives none"),
        _column("completion_text", TEXT, "Completion tokens decoded without special tokens."),
        _column("finish_reason", TEXT, "stop | length | error | given."),
        _column("status", TEXT, "completed | truncated | error."),
        _column("error_reason", TEXT, "Why the rollout failed.", null="it did not"),
        _column("sampling", TEXT, "temperature, top_p, top_k, max_completion_tokens; engine where apart.", "json"),
        _column("seed", pa.int64(), "Seed of this row's own random stream."),
    ],
)

REWARDS = _record(
    "rewards",
    2,
    ("rollout_id",),
    [
        _column("rollout_id", TEXT, "The rollout that was scored."),
        _column("group_id", TEXT, "Its group."),
        _column("reward", pa.float64(), "Weighted sum of the components.", null="unscored: see reason"),
        _column(
            "components",
            pa.map_(TEXT, pa.float64()),
            "Score of each reward function, before weights; null = unscored. Its metrics are function/metric.",
        ),
        _column(
            "component_status",
            pa.map_(TEXT, TEXT),
            "scored, `scored: NOTE`, or the reason why that function gave no score.",
        ),
        _column("status", TEXT, "scored | unscored."),
        _column("reason", TEXT, "Why there is no reward.", null="there is one"),
        _column("turn_rewards", pa.large_list(pa.float64()), "One reward per turn.", null="rewards are per rollout"),
        _column("step_ends", TOKENS, "Last token of each step.", "token", null="not split into steps"),
        _column("step_rewards", pa.large_list(pa.float64()), "Aligned with step_ends.", null="no process supervision"),
        _column("grader_digest", TEXT, "Identity of the grader: functions, settings, code."),
    ],
)

TOKEN_SCORES = _record(
    "token_scores",
    1,
    ("rollout_id", "segment", "scorer"),
    [
        _column("rollout_id", TEXT, "The rollout."),
        _column("segment", pa.int64(), "Its segment."),
        _column("scorer", TEXT, "old | reference | teacher | critic (before a token) | critic_after (behind it)."),
        _column("model_id", TEXT, "Identity of the model that scored; a critic is part of its policy's."),
        _column("values", FLOATS, "Aligned with completion_token_ids: logprobs, or a critic's values.", "nat"),
    ],
)

ADVANTAGES = _record(
    "advantages",
    2,
    ("rollout_id", "segment"),
    [
        _column("rollout_id", TEXT, "The rollout."),
        _column("segment", pa.int64(), "Its segment."),
        _column("group_id", TEXT, "Its group."),
        _column("advantage", pa.float64(), "Credit of the whole completion; 0 for rows that are not trained."),
        _column("token_advantages", FLOATS, "Credit per token.", null="one advantage for all tokens"),
        _column("returns", FLOATS, "Targets of the value function.", null="no critic"),
        _column("weight", pa.float64(), "Multiplies the row's loss; 2 stands for a row that counts twice."),
        _column("is_trained", pa.bool_(), "Whether the row enters the loss and its denominators."),
        _column(
            "drop_reason",
            TEXT,
            "none | zero_variance | unscored | truncated | group_too_small | stale | filtered. "
            "zero_variance alone leaves is_trained true.",
        ),
        _column(
            "pair_id",
            TEXT,
            "Pair of a preference objective; a labelled completion is a pair of its own.",
            null="not paired",
        ),
        _column("pair_role", TEXT, "chosen | rejected.", null="not paired"),
        _column("pair_margin", pa.float64(), "By how much chosen must win.", null="not paired, or the data gives none"),
        _column("term", TEXT, "own | expert | selected: the rows of a loss term that this row belongs to."),
    ],
)

UPDATES = _record(
    "updates",
    3,
    ("policy_version", "optimizer_step"),
    [
        _column("policy_version", pa.int64(), "Version that this update made.", "update"),
        _column("optimizer_step", pa.int64(), "Optimizer step within the run, from 1."),
        _column("loss", pa.float64(), "What was differentiated."),
        _column("policy_loss", pa.float64(), "The policy term alone."),
        _column("value_loss", pa.float64(), "Loss of the critic, before its coefficient.", null="no critic"),
        _column("value_clip_ratio", pa.float64(), "Share of trained tokens whose value is clipped.", null="no critic"),
        _column("explained_variance", pa.float64(), "1 - var(error) / var(return).", null="no critic or equal returns"),
        _column("value_grad_norm", pa.float64(), "Of the critic, before clipping.", null="no critic with own weights"),
        _column("value_learning_rate", pa.float64(), "Of the critic in this optimizer step.", null="no critic"),
        _column("own_loss", pa.float64(), "Loss over own rows, before its weight.", null="no mixture with experts"),
        _column("expert_loss", pa.float64(), "Loss over expert rows, before its weight.", null="no mixture"),
        _column("expert_coefficient", pa.float64(), "Weight of the loss over expert rows.", null="no mixture"),
        _column("distillation_loss", pa.float64(), "Mean divergence to the teacher.", "nat", null="not in the loss"),
        _column("kl", pa.float64(), "Mean k3 estimate of the KL to the reference.", "nat", null="no reference model"),
        _column("kl_k1", pa.float64(), "Mean k1 estimate: policy - reference.", "nat", null="no reference model"),
        _column("kl_coefficient", pa.float64(), "Weight of the KL term in this update.", null="no reference model"),
        _column("entropy", pa.float64(), "Mean entropy at the sampling temperature.", "nat", null="no token was run"),
        _column("entropy_coefficient", pa.float64(), "Weight of the entropy bonus.", null="not adaptive"),
        _column("clip_ratio_low", pa.float64(), "Share of trained tokens with A < 0 and a ratio below the clip."),
        _column("clip_ratio_high", pa.float64(), "Share of trained tokens with A > 0 and a ratio above the clip."),
        _column("clip_ratio_region", pa.float64(), "Share of trained tokens clipped either way."),
        _column("clip_ratio_dual", pa.float64(), "Share of trained tokens with A < 0 whose ratio exceeds dual_clip."),
        _column("gate_kept", pa.float64(), "Share of tokens that the gate kept.", null="no gate"),
        _column("ratio_max", pa.float64(), "Largest ratio to the anchor policy."),
        _column("sampling_ratio_mean", pa.float64(), "Mean correction weight old / behaviour.", null="not corrected"),
        _column("sampling_ratio_min", pa.float64(), "Smallest correction weight.", null="not corrected"),
        _column("sampling_ratio_max", pa.float64(), "Largest correction weight.", null="not corrected"),
        _column("correction_kept", pa.float64(), "Share of weights neither capped nor masked.", null="not corrected"),
        _column("uncorrected_tokens", pa.int64(), "Off-policy tokens without behaviour logprobs: weight 1.", "token"),
        _column("effective_sample_size", pa.float64(), "(sum w)^2 / (N sum w^2).", null="not corrected"),
        *(
            _column(f"sampling_logp_difference_{name}", pa.float64(), doc, "nat", null="no behaviour logprobs")
            for name, doc in (("mean", "Mean |old - behaviour|."), ("max", "Largest |old - behaviour|."))
        ),
        *(
            _column(f"{name}_{role}", pa.float64(), doc, unit, null="no preference objective, or none of that role")
            for name, doc, unit in (
                ("rewards", "Mean implicit reward beta (policy - reference), or score of a reward model.", ""),
                ("logps", "Mean summed logprob of completions.", "nat"),
            )
            for role in ("chosen", "rejected")
        ),
        _column("rewards_margin", pa.float64(), "Mean of chosen - rejected.", null="no preference objective"),
        _column("rewards_accuracy", pa.float64(), "Share of pairs with a margin above 0.", null="no pairs"),
        _column("grad_norm", pa.float64(), "Before clipping."),
        _column("learning_rate", pa.float64(), "Of this optimizer step."),
        _column("trained_rows", pa.int64(), "Rows in the denominator.", "row"),
        _column("trained_tokens", pa.int64(), "Tokens in the denominator.", "token"),
        _column("expert_rows", pa.int64(), "Rows among them that experts wrote.", "row", null="no mixture"),
        _column("off_policy_rows", pa.int64(), "Rows sampled by another policy than the one updated.", "row"),
        _column("forward_rows", pa.int64(), "Rows that needed a forward pass.", "row"),
        _column("skipped", TEXT, "Why the optimizer did not step.", null="it did"),
    ],
)

EVALUATIONS = _record(
    "evaluations",
    1,
    ("policy_id", "suite", "metric"),
    [
        _column("policy_id", TEXT, "The policy."),
        _column("suite", TEXT, "Set of prompts."),
        _column("metric", TEXT, "What is measured; suites.py names all metrics."),
        _column("step", pa.int64(), "Training step of the policy.", "step"),
        _column("policy_version", pa.int64(), "Number of updates behind the policy.", "update"),
        _column("value", pa.float64(), "Mean over prompts."),
        _column("low", pa.float64(), "2.5 % bound, bootstrapped over prompts."),
        _column("high", pa.float64(), "97.5 % bound, bootstrapped over prompts."),
        _column("num_prompts", pa.int64(), "Prompts behind the value."),
        _column("num_samples", pa.int64(), "Rollouts behind the value."),
    ],
)

PROMPT_STATS = _record(
    "prompt_stats",
    1,
    ("prompt_id",),
    [
        _column("prompt_id", TEXT, "A train prompt that was rolled out at least once."),
        _column("attempts", pa.float64(), "Scored rollouts so far; older ones fade by data.stats_decay.", "rollout"),
        _column("passes", pa.float64(), "Correct ones among them; faded alike.", "rollout"),
        _column("draws", pa.int64(), "Steps that took it, up to the newest counted.", "step"),
        _column("last_step", pa.int64(), "Step of its newest rollouts.", "step"),
    ],
)

QUARANTINE = _record(
    "quarantine",
    2,
    ("source", "source_row", "reason"),
    [
        *_SOURCE,
        _column("reason", TEXT, "Reason code; data_contracts/reasons.py says what each means."),
        _column("action", TEXT, "rejected | repaired | flagged: the latter two are in the data set as well."),
        _column("detail", TEXT, "What was found and what must hold."),
        _column("raw", pa.large_binary(), "The row as it was; it may not be valid text."),
    ],
)

RECORDS = {
    record.name: record
    for record in (
        PROMPTS,
        EXAMPLES,
        ROLLOUTS,
        REWARDS,
        TOKEN_SCORES,
        ADVANTAGES,
        UPDATES,
        EVALUATIONS,
        QUARANTINE,
        PROMPT_STATS,
    )
}
