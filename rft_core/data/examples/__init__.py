"""Rows under our names -> what they say: checked messages, answers, labels, rewards, ids. No model, no template.

`read_contents` gives the contents of a row, one or, of an unpaired pair, two; whatever is wrong with a row raises
Rejected with a reason code or, where the recipe says so, is mended or kept and noted in `faults`.

What a row may hold, per record (text fields may be texts or messages, also mixed; JSON texts of messages are messages):

    prompts         prompt
    demonstrations  messages, or prompt and completion, or text (as it is: no system message, no suffix)
    preferences     chosen and rejected, with a prompt or without (see `pairs`); margin
    labelled        prompt, completion, label; messages and label (of the last turn); with data.unpair a pair
    trajectories    messages, or prompt and completion; reward or turn_rewards or both
    stepwise        prompt, steps, step_labels

With each of them: system, tools, answer, id. All else is metadata.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from data_contracts.refs import SourceRow
from rft_core.data.examples.content import Content, Kind
from rft_core.data.examples.identity import canonical_text, row_id
from rft_core.data.examples.pairs import read_pair
from rft_core.data.examples.reading import Reading
from rft_core.data.examples.turns import (
    Spoken,
    checked_prompt,
    conversation,
    prompt_and_completion,
    raw_prompt,
)
from rft_core.data.faults import Faults, Rejected
from rft_core.data.messages import Message, refuse_broken_messages, shown
from rft_core.data.settings import DataSettings, RecordName

__all__ = ["Content", "Kind", "Message", "canonical_text", "read_contents"]


def read_contents(
    mapped: dict[str, Any], row: SourceRow, record: RecordName, settings: DataSettings, faults: Faults
) -> list[Content]:
    """What a row of `fields.map_fields` says, checked: one content, or two of a pair that is unpaired.

    Ids of rows without one hash what the row says (all but id and metadata) before system message and suffix are put
    to it. Raises Rejected.
    """
    reading = Reading(mapped, row, settings, faults)
    try:
        metadata = _json_text(mapped["metadata"])
        said = _json_text({name: value for name, value in mapped.items() if name != "metadata" and name != "id"})
        name = row_id(mapped.get("id"), row, said)
        parts = READERS[record](reading)
        tools, answer = reading.tools(), reading.answer()
        return [
            Content(name + suffix, **part, tools=tools, answer=answer, metadata=metadata)
            for suffix, part in parts.items()
        ]
    except RecursionError:
        raise Rejected("fields_not_json", "the row's lists and objects must not be nested a thousand deep") from None


def _json_text(fields: dict[str, Any]) -> str:
    """The canonical JSON of fields. Raises Rejected for the first that has none."""
    try:
        return canonical_text(fields)
    except (ValueError, TypeError):
        for name, value in fields.items():
            _refuse_unwritable(name, {name: value})
        raise


def _refuse_unwritable(name: str, value: dict[str, Any]) -> None:
    try:
        canonical_text(value)
    except UnicodeEncodeError as error:
        found = f"{error.object[error.start : error.end]!r}"
        raise Rejected("lone_surrogate", f"{name} must be valid Unicode, found half of a pair: {found}") from None
    except (ValueError, TypeError) as error:
        raise Rejected("fields_not_json", f"{name} must be a JSON value, found {shown(value[name])}: {error}") from None


# What a reader gives: the suffix of each content's id -> what its kind holds.
Parts = dict[str, dict[str, Any]]


def _prompt(reading: Reading) -> Parts:
    return {"": {"kind": "prompt", "parts": {"prompt": checked_prompt(reading, raw_prompt(reading))}}}


def _demonstration(reading: Reading) -> Parts:
    spoken: Spoken = "last" if reading.settings.train_on == "last_turn" else "all"
    parts = {"text": _text(reading)} if "text" in reading.mapped else _said(reading, spoken, "messages or text")
    return {"": {"kind": "demonstration", "parts": parts}}


def _said(reading: Reading, spoken: Spoken, else_what: str, *, is_last_turn_alone: bool = False) -> dict[str, Any]:
    """{prompt, completion} of a row of messages, or of both fields."""
    if "messages" in reading.mapped:
        return conversation(reading, spoken, is_last_turn_alone=is_last_turn_alone)
    if reading.mapped.keys().isdisjoint(("prompt", "completion")):
        raise reading.missing(f"prompt and completion, or {else_what}")
    return prompt_and_completion(reading, spoken)


def _text(reading: Reading) -> str:
    text = reading.needed("text")
    if text is None or (isinstance(text, str) and not text.strip()):
        raise Rejected("empty_completion", f"text must hold more than white space, found {shown(text)}")
    if not isinstance(text, str):
        raise Rejected("completion_not_text", f"text must be a text, found {shown(text)}")
    refuse_broken_messages(text, "text", "completion_not_text")
    return text


def _preference(reading: Reading) -> Parts:
    return {"": {"kind": "pair", "parts": read_pair(reading), "margin": reading.number("margin", "bad_margin")}}


def _labelled(reading: Reading) -> Parts:
    if "chosen" in reading.mapped or "rejected" in reading.mapped:
        if not reading.settings.unpair:
            raise Rejected(
                "missing_field", "a labelled row must have completion and label, found a pair; data.unpair reads pairs"
            )
        pair = read_pair(reading)
        return {
            f"-{side}": {
                "kind": "labelled",
                "parts": {"prompt": pair["prompt"], "completion": pair[side]},
                "label": side == "chosen",
            }
            for side in ("chosen", "rejected")
        }
    parts = _said(reading, "all", "messages", is_last_turn_alone=True)
    return {"": {"kind": "labelled", "parts": parts, "label": reading.label()}}


def _trajectory(reading: Reading) -> Parts:
    parts = _said(reading, "any", "messages")
    reward, turn_rewards = reading.number("reward", "bad_reward"), reading.mapped.get("turn_rewards")
    if turn_rewards == "" and reading.has_texts_alone:
        turn_rewards = None
    if reward is None and turn_rewards is None:
        raise reading.missing("a reward or turn_rewards that is not null")
    if turn_rewards is not None:
        turns = sum(message["role"] == "assistant" for message in parts["completion"])
        turn_rewards = _numbers(reading, "turn_rewards", turns, "turns of the assistant", "bad_reward")
    return {"": {"kind": "trajectory", "parts": parts, "reward": reward, "turn_rewards": turn_rewards}}


def _stepwise(reading: Reading) -> Parts:
    prompt = checked_prompt(reading, raw_prompt(reading))
    steps = reading.needed("steps")
    if steps is None or steps == [] or steps == "":
        raise Rejected("empty_completion", f"steps must hold at least one text, found {shown(steps)}")
    if not isinstance(steps, list):
        raise Rejected("completion_not_text", f"steps must be a list of texts, found {shown(steps)}")
    for index, step in enumerate(steps):
        if step is None or (isinstance(step, str) and not step.strip()):
            raise Rejected("empty_completion", f"steps[{index}] must hold more than white space, found {shown(step)}")
        if not isinstance(step, str):
            raise Rejected("completion_not_text", f"steps[{index}] must be a text, found {shown(step)}")
    reading.needed("step_labels")
    labels = _numbers(reading, "step_labels", len(steps), "steps", "bad_step_labels", are_booleans=True)
    return {"": {"kind": "stepwise", "parts": {"prompt": prompt, "steps": list(steps)}, "step_labels": labels}}


def _numbers(
    reading: Reading, name: str, count: int, of_what: str, reason: str, *, are_booleans: bool = False
) -> list[float]:
    """A list of `count` finite numbers, with `are_booleans` true and false as 1 and 0. Raises Rejected(reason)."""
    values = reading.mapped[name]
    if not isinstance(values, list) or len(values) != count:
        found = f"a list of {len(values)}" if isinstance(values, list) else shown(values)
        raise Rejected(reason, f"{name} must be a list with one value for each of the {count} {of_what}, found {found}")
    return [
        float(value)
        if are_booleans and isinstance(value, bool)
        else reading.as_number(value, f"{name}[{index}]", reason)
        for index, value in enumerate(values)
    ]


READERS: dict[RecordName, Callable[[Reading], Parts]] = {
    "prompts": _prompt,
    "demonstrations": _demonstration,
    "preferences": _preference,
    "labelled": _labelled,
    "trajectories": _trajectory,
    "stepwise": _stepwise,
}
