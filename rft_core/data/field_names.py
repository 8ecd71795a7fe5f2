"""Names that files in use give to what our records need, and which of them a record needs. Data, no logic.

Those of TRL, OpenRLHF, verl, SkyRL, Trinity-RFT, LLaMA-Factory (Alpaca, ShareGPT), OpenAI's fine-tuning files, and
much-used sets (GSM8K, MATH, OpenR1, DAPO, UltraFeedback, OpenOrca, Dolly, Tulu 3). `fields` says how a name is read.
"""

from __future__ import annotations

from rft_core.data.settings import FieldName, RecordName

_CONVERSATION = ("messages", "conversations", "conversation", "message", "chat", "dialogue")
_PROMPT = (
    "prompt", "question", "problem", "history + instruction + input", "instruction + input", "instruction + context",
    "instruction", "query", "input.messages", "input",
)  # fmt: skip
_COMPLETION = (
    "completion", "response", "output", "generation", "generated_solution", "solution", "answer", "target",
)  # fmt: skip
_ANSWER = (
    "answer", "ground_truth", "reward_model.ground_truth", "reward_spec.ground_truth", "final_answer",
    "expected_answer", "reference_answer", "gold_answer", "gold",
)  # fmt: skip
_IDS = ("id", "example_id", "uid", "uuid", "unique_id", "sample_id")
_SYSTEM = ("system", "system_prompt", "system_message")
_TOOLS = ("tools", "functions")
_CHOSEN = ("chosen", "chosen_response", "preferred_output", "preferred", "accepted")
_REJECTED = ("rejected", "rejected_response", "non_preferred_output", "dispreferred", "reject")
_SHARED: dict[FieldName, tuple[str, ...]] = {"system": _SYSTEM, "tools": _TOOLS, "answer": _ANSWER, "id": _IDS}

# Per record and field of ours: names in use, those of higher priority first.
FIELDS: dict[RecordName, dict[FieldName, tuple[str, ...]]] = {
    "prompts": {
        "prompt": (*_PROMPT, *_CONVERSATION, "context_messages", "text"),
        **_SHARED,
        "answer": (*_ANSWER, "solution", "target", "response", "label"),
        "id": (*_IDS, "prompt_id", "question_id", "problem_id", "task_id"),
    },
    "demonstrations": {
        "messages": _CONVERSATION,
        "prompt": _PROMPT,
        "completion": _COMPLETION,
        "text": ("text", "content"),
        **_SHARED,
    },
    "preferences": {
        "chosen": _CHOSEN,
        "rejected": _REJECTED,
        "prompt": (*_PROMPT, *_CONVERSATION),
        "margin": (
            "margin", "score_chosen - score_rejected", "chosen_score - rejected_score",
            "chosen_rating - rejected_rating", "rating_chosen - rating_rejected", "chosen_reward - rejected_reward",
            "reward_chosen - reward_rejected",
        ),
        **_SHARED,
    },
    "labelled": {
        "prompt": (*_PROMPT, *_CONVERSATION),
        "completion": _COMPLETION,
        "label": (
            "label", "kto_tag", "desirable", "is_desirable", "is_correct", "correct", "thumbs_up", "feedback", "score",
        ),
        "messages": _CONVERSATION,
        "chosen": _CHOSEN,
        "rejected": _REJECTED,
        **_SHARED,
    },
    "trajectories": {
        "messages": (*_CONVERSATION, "trajectory"),
        "turn_rewards": ("turn_rewards", "per_turn_rewards", "step_rewards", "rewards", "reward"),
        "reward": ("reward", "rewards", "total_reward", "final_reward", "episode_reward", "return", "score"),
        "prompt": _PROMPT,
        "completion": _COMPLETION,
        **_SHARED,
    },
    "stepwise": {
        "prompt": (*_PROMPT, *_CONVERSATION),
        "steps": ("steps", "completions"),
        "step_labels": ("step_labels", "labels", "label", "ratings"),
        **_SHARED,
    },
}  # fmt: skip
# What a record needs, in the order in which it is looked for: all of the first tuple; the second where it is there.
SHAPES: dict[RecordName, tuple[tuple[tuple[FieldName, ...], tuple[FieldName, ...]], ...]] = {
    "prompts": ((("prompt",), ()),),
    "demonstrations": ((("messages",), ()), (("prompt", "completion"), ()), (("text",), ())),
    "preferences": ((("chosen", "rejected"), ("prompt", "margin")),),
    "labelled": (
        (("prompt", "completion", "label"), ()),
        (("messages", "label"), ()),
        (("chosen", "rejected"), ("prompt",)),
    ),
    "trajectories": (
        (("messages", "turn_rewards"), ("reward",)),
        (("messages", "reward"), ()),
        (("prompt", "completion", "turn_rewards"), ("reward",)),
        (("prompt", "completion", "reward"), ()),
    ),
    "stepwise": ((("prompt", "steps", "step_labels"), ()),),
}
ALWAYS_OPTIONAL: tuple[FieldName, ...] = ("system", "tools", "answer", "id")
