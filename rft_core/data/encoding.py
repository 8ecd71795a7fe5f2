"""Texts -> token ids, whole or grown piece by piece, such that the ids are those of the whole text.

Added tokens cut a text before anything else is done to it, so what lies between two of them depends on nothing else. A
growing text is therefore never tokenised again from its beginning, which keeps long conversations linear in their
length; and the parts that a template puts into every text are tokenised once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rft_core.data.faults import Faults, Rejected

# What tokenizers take in or put in around special tokens. Other white space is as good as a letter.
_SPACES = re.compile(r"[ \t\r\n]+")
MAX_KNOWN_PIECES = 1024


@dataclass
class Tokens:
    """A text and its ids, of which the first `num_added` (a BOS) are not in the text.

    `is_whole`: the ids are what tokenising the whole text gives, not those of pieces that would have merged.
    """

    text: str
    ids: list[int]
    num_added: int = 0
    is_whole: bool = True


class Encoder:
    """`added` maps the ids of added tokens to their texts. `bos_id` is null where the tokenizer adds none to a text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.bos_token, self.eos_token = tokenizer.bos_token, tokenizer.eos_token
        self.bos_id = _expected_bos(tokenizer)
        self._backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        tokens = tokenizer.added_tokens_decoder
        self.added = {token_id: token.content for token_id, token in tokens.items()}
        # A token that takes in what is before it, or waits for the normalizer, does not cut a text where it stands.
        self._cuts = {
            token_id: token.content
            for token_id, token in tokens.items()
            if not (token.lstrip or token.single_word or token.normalized)
        }
        self._anchor = next((text for token_id, text in self._cuts.items() if not tokens[token_id].rstrip), "")
        # Where each added token cuts by itself alone, texts are tokenised in pieces between them.
        is_plain = self._backend is not None and bool(self._anchor) and len(self._cuts) == len(tokens)
        is_plain = is_plain and not any(token.rstrip for token in tokens.values())
        divider = pattern_of(set(self._cuts.values())) if is_plain else None
        self._divider = re.compile(f"({divider.pattern})") if divider is not None else None
        self._ids_of_cuts = {text: token_id for token_id, text in self._cuts.items()}
        self._known_pieces: dict[str, list[int]] = {}
        special = {token.content for token in tokens.values() if token.special}
        special |= set(tokenizer.all_special_tokens)
        self.special = pattern_of(special)
        self._begins = {text[0] for text in special if text}  # most texts hold none of these characters

    def check(self, value: Any, faults: Faults) -> None:
        """No text within a JSON value may spell a special token, or hold what no tokenizer takes.

        Raises Rejected: special_token_in_text, lone_surrogate.
        """
        for text in texts_in(value):
            may_spell = self.special is not None and any(character in text for character in self._begins)
            if may_spell and (found := self.special.search(text)):
                faults.meet(
                    "special_token_in_text",
                    f"text must not spell a special token of the model, found {found.group()!r}",
                )
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise Rejected("lone_surrogate", f"text must be valid Unicode: {error.reason}") from None

    def settle_bos(self, text: str, faults: Faults, is_expected: bool) -> str:
        """The text without a second BOS at its beginning. `is_expected`: the text is to have one, if the tokenizer
        begins with one; `begin` adds it.
        """
        bos = self.bos_token
        if bos and text.startswith(bos + bos):
            faults.meet("doubled_bos", f"a text must begin with one {bos}, found it begins {text[: 3 * len(bos)]!r}")
            return self.with_one_bos(text)
        if is_expected and self.bos_id is not None and not text.startswith(bos):
            faults.meet("missing_bos", f"a text must begin with {bos}, found it begins {text[:20]!r}")
        return text

    def with_one_bos(self, text: str) -> str:
        """The text with one BOS where it begins with several."""
        while self.bos_token and text.startswith(self.bos_token + self.bos_token):
            text = text[len(self.bos_token) :]
        return text

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """Ids without special tokens around them; special tokens spelt in a text are special tokens."""
        if self._backend is None:
            return self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        if self._backend.truncation is not None:  # the setting of someone's last call
            self._backend.no_truncation()
        if self._backend.padding is not None:
            self._backend.no_padding()
        if self._divider is not None and len(texts) > 1:
            return self._encode_pieces([self._divider.split(text) for text in texts])
        return self._encode_whole(texts)

    def _encode_whole(self, texts: list[str]) -> list[list[int]]:
        assert self._backend is not None
        return [found.ids for found in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _encode_pieces(self, divided: list[list[str]]) -> list[list[int]]:
        """Of texts as [piece, added token, piece, added token, ...]. What occurs more than once is remembered."""
        counts = Counter(piece for parts in divided for piece in parts[2::2])
        missing = [piece for piece in counts if piece and piece not in self._known_pieces]
        found = self._encode_whole([self._anchor + piece for piece in missing])
        ids_of = {piece: ids[1:] for piece, ids in zip(missing, found, strict=True)}
        for piece, ids in ids_of.items():
            if counts[piece] > 1 and len(self._known_pieces) < MAX_KNOWN_PIECES:
                self._known_pieces[piece] = ids
        ids_of |= {"": [], **self._known_pieces}
        beginnings = [parts[0] for parts in divided if parts[0]]
        begun = iter(self._encode_whole(beginnings) if beginnings else [])
        encoded = []
        for parts in divided:
            ids = list(next(begun)) if parts[0] else []
            for token, piece in zip(parts[1::2], parts[2::2], strict=True):
                ids.append(self._ids_of_cuts[token])
                ids += ids_of[piece]
            encoded.append(ids)
        return encoded

    def encode(self, text: str) -> list[int]:
        return self.encode_all([text])[0] if text else []

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        if self._backend is None:
            return self.tokenizer.decode(ids, skip_special_tokens, clean_up_tokenization_spaces=False)
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def begin(self, text: str, ids: list[int] | None = None) -> Tokens:
        """The tokens of a text that begins a sequence: with a BOS where the tokenizer has one and the text has none.
        `ids` are the text's where they are known.
        """
        ids = self.encode(text) if ids is None else ids
        if self.bos_id is None or ids[:1] == [self.bos_id]:
            return Tokens(text, ids)
        return Tokens(text, [self.bos_id, *ids], num_added=1)

    def shown(self, tokens: Tokens) -> str:
        """The text with the BOS that was added."""
        return self.bos_token + tokens.text if tokens.num_added else tokens.text

    def last(self, text: str, ids: list[int], count: int) -> tuple[str, list[int]]:
        """At most the last `count` ids, their BOS among them, and what they say."""
        if len(ids) <= count:
            return text, ids
        kept = ids[len(ids) - count :]
        if self.bos_id is not None and ids[0] == self.bos_id:
            kept = [self.bos_id, *kept[1:]]
        return self.decode(kept), kept

    def continuation(self, tokens: Tokens, addition: str) -> list[int] | None:
        """The ids that follow `tokens` when `addition` follows its text; null where they would change earlier ones."""
        start, offset = self._last_cut(tokens)
        known = tokens.ids[start:]
        whole = self.encode(tokens.text[offset:] + addition)
        return whole[len(known) :] if whole[: len(known)] == known else None

    def grow(self, tokens: Tokens, addition: str) -> list[int]:
        """Adds a text and gives its ids, of the whole text where that leaves the earlier ids alone, else its own.

        Raises Rejected (mask_not_exact) when its own ids would not give the text back at this place.
        """
        ids = self.continuation(tokens, addition)
        if ids is None:
            start, offset = self._last_cut(tokens)
            ids = self._apart(addition)
            whole = self.encode(tokens.text[offset:] + addition)
            if self.decode(tokens.ids[start:] + ids) != self.decode(whole):
                raise Rejected(
                    "mask_not_exact",
                    f"a turn must begin between tokens, found {tokens.text[-20:]!r} + {addition[:20]!r} in one",
                )
            tokens.is_whole = False
        tokens.text += addition
        tokens.ids = tokens.ids + ids
        return ids

    def gives_back(self, ids: list[int], text: str) -> bool:
        """Whether ids decode to a text, spaces and the tokenizer's own normal form apart."""
        decoded = self.decode(ids)
        return decoded == text or self._normal(decoded) == self._normal(text)

    def _last_cut(self, tokens: Tokens) -> tuple[int, int]:
        """Index in the ids and offset in the text of the last added token, or of the beginning."""
        for index in range(len(tokens.ids) - 1, tokens.num_added - 1, -1):
            if (content := self._cuts.get(tokens.ids[index])) is not None:
                offset = tokens.text.rfind(content)
                return (index, offset) if offset >= 0 else (tokens.num_added, 0)
        return tokens.num_added, 0

    def _apart(self, text: str) -> list[int]:
        """Ids of a text as it stands behind an added token: some tokenizers put a space before a whole text."""
        return self.encode(self._anchor + text)[1 if self._anchor else 0 :]

    def _normal(self, text: str) -> str:
        text = _SPACES.sub("", text)
        normalizer = self._backend.normalizer if self._backend is not None else None
        return normalizer.normalize_str(text) if normalizer is not None else text


def pattern_of(texts: set[str]) -> re.Pattern[str] | None:
    """Matches any of the texts, longer ones first; null where there is none."""
    ordered = sorted(texts - {""}, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def squeezed(text: str) -> str:
    """
    >>> squeezed(" 2 +\\n2 ")
    '2+2'
    """
    return "".join(text.split())


def texts_in(value: Any) -> Iterator[str]:
    """Every text within a JSON value, names of fields too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from texts_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts_in(item)


def _expected_bos(tokenizer: Any) -> int | None:
    bos = tokenizer.bos_token_id
    begun = tokenizer("a", add_special_tokens=True)["input_ids"]
    return bos if bos is not None and begun[:1] == [bos] else None
