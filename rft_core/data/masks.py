"""Given conversations -> token ids and the mask of what the policy is to learn, without generation markers.

A turn of the assistant is what the template adds to the generation prompt of its history, up to and with the first
stop token. So each trained turn stands behind exactly the ids that `Renderer.render_prompts` gives for that history.
Where it would not (a template that strips reasoning from earlier turns, a join that changes tokens), the conversation
goes on in a new segment, and each turn is still trained once. The ids of each turn are decoded and must give its text.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Literal, get_args

from rft_core.data.encoding import Encoder, Tokens
from rft_core.data.examples import Content, Message
from rft_core.data.faults import Faults, Rejected
from rft_core.data.settings import DataSettings
from rft_core.data.templates import Admission
from rft_core.data.turns import Conversation, StopTokens

Part = Literal["completion", "chosen", "rejected", "steps", "text"]
STEP_SEPARATOR = "\n"


@dataclass(frozen=True)
class Turn:
    """Who wrote completion_token_ids[start:end]. What lies between two trained turns is one turn, of its last role.

    `reward` is null where the data gives none for the turn.
    """

    role: str
    start: int
    end: int
    reward: float | None = None


@dataclass(frozen=True)
class RenderedExample:
    """What becomes one row of `rollouts` with origin dataset: C completion tokens behind P prompt tokens.

    prompt_token_ids int[P], P >= 1: those of the prompt at generation time. completion_token_ids int[C] end with the
    stop token of the last trained turn, unless `is_truncated`. completion_mask bool[C] is true on what the policy is to
    learn: trained turns, each with its stop token. `turns` are spans that cover the completion in order. `step_ends`
    int[S]: the last token of each step, null where the completion has no steps. `segment` counts the parts into which a
    template that rewrites history cuts a conversation. `text` is the completion decoded without special tokens.
    `content` is what was rendered: the row's own, or what repairs made of it.

    RenderedExample("text", 0, content, "2+2?", [5, 6], [7, 2], [True, True], (Turn("assistant", 0, 2),), "4")
    """

    part: Part
    segment: int
    content: Content
    prompt_text: str
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    completion_mask: list[bool]
    turns: tuple[Turn, ...]
    text: str
    step_ends: list[int] | None = None
    is_truncated: bool = False


@dataclass
class _Segment:
    """A segment on its way: the first `num_prompt` of `tokens` are the prompt's, the others the completion's."""

    prompt_text: str
    tokens: Tokens
    num_prompt: int
    turns: list[Turn] = field(default_factory=list)
    step_ends: list[int] | None = None

    def add(self, role: str, ids: list[int], reward: float | None = None) -> None:
        """Notes that the last tokens are a turn."""
        end = len(self.tokens.ids) - self.num_prompt
        self.turns.append(Turn(role, end - len(ids), end, reward))


class ExampleRenderer:
    """Contents that someone completed -> rendered examples. One serves all rows."""

    def __init__(
        self, admission: Admission, encoder: Encoder, settings: DataSettings, given_stop_ids: frozenset[int]
    ) -> None:
        self.admission, self.encoder, self.settings = admission, encoder, settings
        self.stops = StopTokens(encoder, admission.template, given_stop_ids)

    def render(self, content: Content, faults: Faults) -> list[RenderedExample]:
        """Raises Rejected with a reason code."""
        parts = dict(content.parts)
        examples: list[RenderedExample] = []
        for part in get_args(Part):
            if part in parts:
                segments, mended = self._segments(part, content, faults)
                examples += self._finished(part, segments, content, faults)
                parts |= mended
        if faults.found and parts != content.parts:
            examples = [replace(example, content=replace(content, parts=parts)) for example in examples]
        if content.kind == "pair" and _ids_of("chosen", examples) == _ids_of("rejected", examples):
            faults.meet("identical_after_truncation", "chosen and rejected must differ, found the same tokens in both")
        return examples

    def _segments(self, part: Part, content: Content, faults: Faults) -> tuple[list[_Segment], dict[str, Any]]:
        """The segments of a part, and the parts of the content as repairs left them."""
        if part == "text":
            return self._text(content.parts["text"], faults)
        if part == "steps":
            return self._steps(content, faults)
        return self._turns(content, part, faults)

    def _turns(self, content: Content, part: Part, faults: Faults) -> tuple[list[_Segment], dict[str, Any]]:
        given: list[Message] = content.parts[part]
        conversation = self._conversation([*content.parts["prompt"], *given], content, faults)
        messages = conversation.messages
        first = len(messages) - len(given)
        trained = [index for index in range(first, len(messages)) if messages[index]["role"] == "assistant"]
        rewards = dict(zip(trained, content.turn_rewards or [], strict=False))
        if not trained:
            faults.meet("no_assistant_turn", "a completion must hold a message of the assistant to learn from")
        if self.settings.train_on == "last_turn":
            trained = trained[-1:]
        segments: list[_Segment] = []
        for index in trained:
            prompt = conversation.prompt(index)
            text = conversation.turn(index, prompt)
            if not segments or not self._goes_on(segments[-1], prompt, messages[index - 1]["role"]):
                segments.append(self._begun(prompt))
            self._add_turn(segments[-1], [text], rewards.get(index))
        return segments, {"prompt": messages[:first], part: messages[first:]}

    def _steps(self, content: Content, faults: Faults) -> tuple[list[_Segment], dict[str, Any]]:
        """The steps are one turn, each on lines of its own; a step's last token is that of its separator."""
        steps: list[str] = content.parts["steps"]
        pieces = [step if step[-1:].isspace() else step + STEP_SEPARATOR for step in steps[:-1]]
        before = "".join(pieces)
        given = [*content.parts["prompt"], {"role": "assistant", "content": before + steps[-1]}]
        conversation = self._conversation(given, content, faults)
        *history, last = conversation.messages
        prompt = conversation.prompt(len(history))
        text = conversation.turn(len(history), prompt)
        body, _ = self.stops.split(steps[-1])
        cuts = [0, *_ends_within(text, [*pieces, body]), len(text)]
        segment = self._begun(prompt)
        lengths = self._add_turn(segment, [text[start:stop] for start, stop in pairwise(cuts)], None)
        segment.step_ends = [end - 1 for end in accumulate(lengths[:-1])]
        return [segment], {"prompt": history, "steps": [*steps[:-1], last["content"][len(before) :]]}

    def _text(self, text: str, faults: Faults) -> tuple[list[_Segment], dict[str, Any]]:
        """A text is trained but for its first token, a BOS where the tokenizer has one: nothing precedes that."""
        body, spelled = self.stops.split(text)
        self.encoder.check(body, faults)
        if not body.strip():
            faults.meet("no_trained_token", "a text must hold more than its stop token")
        if len(spelled) > 1:
            faults.meet("doubled_eos", f"a text must end with one stop token, found {len(spelled)}")
        if not spelled and self.encoder.eos_token is None:
            raise Rejected("missing_eos", "a text must end with a stop token, and the tokenizer has no EOS token")
        body = self.encoder.settle_bos(body, faults, is_expected=False)
        tokens = self.encoder.begin(body + (spelled[0] if spelled else self.encoder.eos_token))
        self._prove(tokens.ids[tokens.num_added :], tokens.text)
        segment = _Segment("", tokens, 1)
        segment.add("assistant", tokens.ids[1:])
        return [segment], {"text": body + "".join(spelled[:1])}

    def _conversation(self, messages: list[Message], content: Content, faults: Faults) -> Conversation:
        """Messages checked and admitted; those of the assistant end with no stop token but the template's."""
        num_allowed = int(self.settings.render == "plain" or not self.stops.is_written)
        settled, doubled = [], 0
        for message in messages:
            body, spelled = message.get("content") or "", []
            if message["role"] == "assistant":
                body, spelled = self.stops.split(body)
            doubled += len(spelled) > num_allowed
            self.encoder.check({**message, "content": body} if spelled else message, faults)
            kept = "" if self.stops.is_written else spelled[0] if spelled else ""
            settled.append({**message, "content": body + kept} if spelled else message)
        if doubled:
            faults.meet("doubled_eos", f"a turn must end with one stop token, found more after {doubled} turns")
        self.encoder.check(content.tools, faults)
        admitted, whole = self.admission.admit(settled, content.tools, faults, with_generation_prompt=False)
        whole = self.encoder.settle_bos(whole, faults, is_expected=self.settings.render == "chat")
        template, may_be_silent = self.admission.template, content.kind == "trajectory"
        return Conversation(template, self.encoder, self.stops, admitted, content.tools, faults, whole, may_be_silent)

    def _begun(self, prompt: str) -> _Segment:
        tokens = self.encoder.begin(prompt)
        return _Segment(self.encoder.shown(tokens), tokens, len(tokens.ids))

    def _goes_on(self, segment: _Segment, prompt: str, role: str) -> bool:
        """Adds what follows the segment up to the next prompt, if the segment then holds the ids of that prompt."""
        tokens = segment.tokens
        if not tokens.is_whole or not prompt.startswith(tokens.text):
            return False
        ids = self.encoder.continuation(tokens, prompt[len(tokens.text) :])
        if ids is None:
            return False
        segment.tokens = replace(tokens, text=prompt, ids=tokens.ids + ids)
        if ids:
            segment.add(role, ids)
        return True

    def _add_turn(self, segment: _Segment, pieces: list[str], reward: float | None) -> list[int]:
        """Grows a trained turn by its pieces; gives the number of tokens of each."""
        grown = [self.encoder.grow(segment.tokens, piece) for piece in pieces]
        ids = [token_id for piece in grown for token_id in piece]
        self._prove(ids, "".join(pieces))
        segment.add("assistant", ids, reward)
        return [len(piece) for piece in grown]

    def _prove(self, ids: list[int], text: str) -> None:
        if ids[-1] not in self.stops.texts or not self.encoder.gives_back(ids, text):
            found = self.encoder.decode(ids)
            raise Rejected("mask_not_exact", f"the tokens of a turn must decode to it, found {found!r} for {text!r}")

    def _finished(
        self, part: Part, segments: list[_Segment], content: Content, faults: Faults
    ) -> list[RenderedExample]:
        rendered = [self._example(part, segment, content, faults) for segment in segments]
        # Of steps the ends are trained: where all were cut off, nothing is.
        trained = [example for example in rendered if any(example.completion_mask) and example.step_ends != []]
        if not trained:
            what = "the end of a step" if part == "steps" else "a trained token"
            faults.meet("no_trained_token", f"an example must keep {what} within data.max_tokens, found none")
        return [replace(example, segment=number) for number, example in enumerate(trained)]

    def _example(self, part: Part, segment: _Segment, content: Content, faults: Faults) -> RenderedExample:
        ids, num_prompt = segment.tokens.ids, max(segment.num_prompt, 1)
        shift = num_prompt - segment.num_prompt  # 1 where nothing precedes the completion: its first token does then
        prompt, completion, prompt_text = ids[:num_prompt], ids[num_prompt:], segment.prompt_text
        limit = self.settings.max_tokens
        if limit is not None and len(ids) > limit:
            detail = f"a rendered example has at most {limit} tokens, found {len(ids)}"
            faults.meet("too_long", detail)
            prompt_text, prompt = self.encoder.last(prompt_text, prompt, self.settings.max_prompt_tokens)
            if len(prompt) >= limit:
                raise Rejected("too_long", f"{detail}, of which the prompt has {len(prompt)}")
            completion = completion[: limit - len(prompt)]
        size = len(completion)
        step_ends = segment.step_ends and [end - shift for end in segment.step_ends if end - shift < size]
        turns = [
            Turn(turn.role, max(turn.start - shift, 0), min(turn.end - shift, size), turn.reward)
            for turn in segment.turns
            if turn.start - shift < size
        ]
        return RenderedExample(
            part=part,
            segment=0,
            content=content,
            prompt_text=prompt_text,
            prompt_token_ids=prompt,
            completion_token_ids=completion,
            completion_mask=[flag for turn in turns for flag in [turn.role == "assistant"] * (turn.end - turn.start)],
            turns=tuple(turns),
            text=self.encoder.decode(completion, skip_special_tokens=True),
            step_ends=step_ends,
            is_truncated=size < len(ids) - num_prompt,
        )


def _ends_within(text: str, pieces: list[str]) -> list[int]:
    """Where each piece ends in a text that holds them one behind the other, perhaps without the white space around.

    >>> _ends_within("[yes\\nno]", [" yes\\n", "no "])
    [5, 7]
    """
    joined = "".join(pieces)
    shown = joined if joined in text else joined.strip()
    if shown not in text:
        raise Rejected("mask_not_exact", "the chat template must show the steps as they are")
    start = text.find(shown)
    offset = start - joined.find(shown)
    return [min(max(offset + end, start), start + len(shown)) for end in accumulate(map(len, pieces))]


def _ids_of(part: Part, examples: list[RenderedExample]) -> list[tuple[list[int], list[int]]]:
    chosen = [example for example in examples if example.part == part]
    return [(example.prompt_token_ids, example.completion_token_ids) for example in chosen]
