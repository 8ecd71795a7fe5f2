"""Every reason for which a raw row is rejected, repaired or flagged, and what is done about it.

`policy` is what happens unless the recipe's `data.policies` says otherwise, `allowed` what it may say:

    reject   the row goes to quarantine
    repair   the row is mended as `mend` says and used; quarantine keeps the raw row with action `repaired`
    keep     the row is used as it is; quarantine keeps the raw row with action `flagged`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Policy = Literal["reject", "repair", "keep"]
# What a row of quarantine says became of its row.
ACTIONS: dict[Policy, str] = {"reject": "rejected", "repair": "repaired", "keep": "flagged"}


@dataclass(frozen=True)
class Reason:
    """`meaning` completes "the row ...". `mend` says what repair does; null where a row can't be repaired."""

    meaning: str
    policy: Policy = "reject"
    mend: str | None = None
    may_keep: bool = False

    @property
    def allowed(self) -> tuple[Policy, ...]:
        possible: dict[Policy, bool] = {"reject": True, "repair": self.mend is not None, "keep": self.may_keep}
        return tuple(policy for policy, is_possible in possible.items() if is_possible)


REASONS: dict[str, Reason] = {
    # The bytes of a row.
    "invalid_utf8": Reason("is not UTF-8"),
    "nul_byte": Reason("holds NUL bytes or characters", mend="they are removed"),
    "lone_surrogate": Reason("holds half of a surrogate pair", mend="it becomes U+FFFD"),
    "not_json": Reason("is not JSON"),
    "trailing_comma": Reason("has a comma before a closing bracket", mend="the comma is removed"),
    "repeated_key": Reason("names a key twice"),
    "not_an_object": Reason("is JSON but not an object"),
    "line_too_long": Reason("is longer than a line may be"),
    "not_csv": Reason("breaks the rules of CSV: a quote that is not closed or not doubled"),
    "wrong_field_count": Reason("has more or fewer fields than the header of its CSV file"),
    # Prompt, completion, messages.
    "missing_field": Reason("lacks a field that its record needs"),
    "empty_prompt": Reason("has no prompt, or one of white space"),
    "prompt_not_text": Reason("has a prompt that is neither text nor messages"),
    "empty_completion": Reason("has no completion, or one of white space"),
    "completion_not_text": Reason("has a completion that is neither text nor messages"),
    "bad_message": Reason("has a message that is not an object with role and content"),
    "unknown_role": Reason("has a message of an unknown role"),
    "wrong_role_order": Reason("has messages in an order that no chat has"),
    "last_not_user": Reason("has a prompt that does not end with the user's or a tool's message"),
    "no_assistant_turn": Reason("has no message of the assistant to learn from"),
    "content_not_text": Reason("has a message whose content is not text"),
    "bad_tools": Reason("has tools or tool calls that are not lists of objects"),
    "answer_not_text": Reason("has an answer that is not text", policy="repair", mend="it becomes its JSON text"),
    "bad_id": Reason("has an id that is neither text nor integer"),
    "fields_not_json": Reason("has fields that JSON can't hold"),
    # Kinds of examples.
    "identical_sides": Reason("has chosen and rejected sides that are equal after strip", may_keep=True),
    "identical_after_truncation": Reason("has sides that are equal within the token limit", may_keep=True),
    "no_common_prompt": Reason("has sides without a common prompt"),
    "swapped_sides": Reason("contradicts an earlier row, whose sides are swapped", policy="keep", may_keep=True),
    "label_not_boolean": Reason(
        "has a label that is not true or false", mend="0, 1, yes, no, 'true', 'false' are read"
    ),
    "bad_margin": Reason("has a margin that is not a finite number"),
    "bad_reward": Reason("has a reward that is not a finite number, or turn rewards that do not fit the turns"),
    "bad_step_labels": Reason("has step labels that are not one boolean or number for each completion"),
    # The rendered template.
    "template_refused": Reason("has messages that the chat template refuses or drops"),
    "system_refused": Reason(
        "has a system message, which the chat template refuses or drops", mend="it is put before the first user message"
    ),
    "left_out_by_template": Reason(
        "has tools, tool calls or reasoning that the chat template leaves out", may_keep=True
    ),
    "special_token_in_text": Reason("spells a special token of the model", may_keep=True),
    "too_long": Reason(
        "is longer than data.max_prompt_tokens or data.max_tokens when rendered",
        mend="a prompt keeps its last tokens, a completion its first",
    ),
    "missing_bos": Reason("is rendered without the BOS token that the tokenizer begins with", "repair", "it is added"),
    "doubled_bos": Reason("is rendered with two BOS tokens", "repair", "one is removed"),
    "missing_eos": Reason("has a trained turn without a stop token", policy="reject", mend="the EOS token is added"),
    "doubled_eos": Reason("ends a turn with two stop tokens", policy="repair", mend="one is removed"),
    "mask_not_exact": Reason(
        "has turns whose tokens can't be told apart from the rest of the rendered text, or do not give the turn back"
    ),
    "no_trained_token": Reason("has a trained turn without a token of its own, or none within data.max_tokens"),
    # The row among the others.
    "duplicate_id": Reason("has the id of another row with other content"),
    "duplicate_prompt": Reason("renders to the same prompt as an earlier row"),
    "duplicate_content": Reason("has the same content as an earlier row", may_keep=True),
    "near_duplicate": Reason("is nearly the same as an earlier row"),
    "overlaps_heldout": Reason("renders to a prompt of the held-out source"),
    "one_sided_labels": Reason("has the only label there is", policy="keep", may_keep=True),
    "unreadable_answer": Reason("has an answer that a reward function can't read", may_keep=True),
    "answer_in_prompt": Reason("spells its answer in the prompt", policy="keep", may_keep=True),
    # Cleaning operators.
    "too_short": Reason("is shorter than a length operator allows"),
    "too_many_characters": Reason("is longer than a length operator allows"),
    "wrong_language": Reason("is in another language than a language operator allows"),
    "dropped_by_function": Reason("was dropped by the recipe's own function"),
}
# Not faults: they do not count towards data.max_rejected_fraction.
EXPECTED_LOSSES = frozenset(
    {
        "duplicate_prompt",
        "duplicate_content",
        "near_duplicate",
        "overlaps_heldout",
        "too_short",
        "too_many_characters",
        "wrong_language",
        "dropped_by_function",
    }
)
