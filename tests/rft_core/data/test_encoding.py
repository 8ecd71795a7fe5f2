"""Growing a text token by token gives what tokenising it whole gives, or says that it does not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers
from transformers import ByT5Tokenizer

from rft_core.data.encoding import Encoder, texts_in
from rft_core.data.faults import Rejected
from tests.rft_core.data.chat_templates import NO_END, SMOLLM2, byte_tokenizer, piece_tokenizer
from tests.rft_core.data.given_conversations import check_prompts, conversation, rendered, trained_texts

ENCODERS = {
    "bytes": Encoder(byte_tokenizer(None)),
    "pieces": Encoder(piece_tokenizer(None)),
    "pieces_first": Encoder(piece_tokenizer(None, is_legacy=False)),
}
# Special tokens of either tokenizer, and what merges across a join.
PIECES = st.lists(
    st.sampled_from(["<|im_end|>", "</s>", "\n", " ", "ans", "yes", "é🎈", "[", "a:"]), min_size=1, max_size=8
)


@pytest.mark.parametrize("name", ENCODERS)
@given(pieces=PIECES)
@settings(max_examples=80, deadline=None)
def test_a_grown_text_has_the_ids_of_the_whole(name, pieces):
    encoder = ENCODERS[name]
    tokens = encoder.begin(pieces[0])
    begun = len(tokens.ids)
    try:
        grown = [encoder.grow(tokens, piece) for piece in pieces[1:]]
    except Rejected:
        return
    whole = encoder.begin("".join(pieces)).ids
    assert tokens.text == "".join(pieces) and tokens.ids[begun:] == [token for piece in grown for token in piece]
    assert not tokens.is_whole or tokens.ids == whole
    assert encoder.decode(tokens.ids) == encoder.decode(whole)


@pytest.mark.parametrize("name", ENCODERS)
@given(texts=st.lists(PIECES.map("".join), min_size=2, max_size=6))
@settings(max_examples=80, deadline=None)
def test_texts_tokenised_in_pieces_have_the_ids_of_the_whole(name, texts):
    encoder = ENCODERS[name]
    whole = encoder._encode_whole(texts)
    assert encoder.encode_all(texts) == whole
    assert encoder.encode_all([*texts, *texts]) == [*whole, *whole]  # by now some pieces are known


def test_tokens_that_do_not_cut_by_themselves_are_left_to_the_tokenizer():
    for side in ("lstrip", "rstrip", "single_word", "normalized"):
        tokenizer = byte_tokenizer(None)
        tokenizer.add_tokens([AddedToken("[side]", **{"normalized": False, side: True})])
        encoder = Encoder(tokenizer)
        assert encoder._divider is None
        texts = ["a [side] b<|im_end|>c", "[side]"]
        assert encoder.encode_all(texts) == encoder._encode_whole(texts)
    assert ENCODERS["bytes"]._divider is not None


def test_a_join_is_natural_where_nothing_merges():
    encoder = ENCODERS["bytes"]
    for before, after, is_whole in [("a<|im_end|>", "\nb", True), ("a:", " ans", True), ("a: ", "ans", False)]:
        tokens = encoder.begin(before)
        encoder.grow(tokens, after)
        assert tokens.is_whole == is_whole, (before, after)


def test_a_normal_form_of_the_tokenizer_is_no_fault():
    """As Qwen's: é of two characters becomes one, so the text does not come back as it was."""
    tokenizer = byte_tokenizer(SMOLLM2)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    examples, _ = rendered(tokenizer, conversation("e\u0301", "e\u0301 ans"))
    assert trained_texts(tokenizer, examples) == ["\u00e9 ans<|im_end|>"]


@pytest.mark.parametrize("side", ["lstrip", "rstrip"])
def test_special_tokens_that_take_in_white_space(side):
    """As Phi-3's, which swallow what follows them."""
    template = SMOLLM2.replace("'<|im_start|>' + message['role'] + '\n'", "'<|' + message['role'] + '|>\n'").replace(
        "<|im_start|>assistant", "<|assistant|>"
    )
    tokenizer = byte_tokenizer(template)
    names = ("<|user|>", "<|assistant|>", "<|end|>")
    tokenizer.add_special_tokens(
        {"extra_special_tokens": [AddedToken(name, special=True, normalized=False, **{side: True}) for name in names]}
    )
    for style in (template, template.replace("<|im_end|>", "<|end|>")):
        tokenizer.chat_template = style
        content = conversation("a", "ans.", "b ", " yes ", "c", "d\n")
        examples, _ = rendered(tokenizer, content)
        check_prompts(tokenizer, content, examples)
        end = "<|end|>" if "<|end|>" in style else "<|im_end|>"
        assert ["".join(text.split()) for text in trained_texts(tokenizer, examples)] == [
            text + end for text in ("ans.", "yes", "d")
        ]


def test_a_tokenizer_in_plain_python():
    tokenizer = ByT5Tokenizer(chat_template=NO_END.replace("message.content", "message.content + eos_token"))
    assert not tokenizer.is_fast
    content = conversation("a é", "yes 🎈", "b", "c")
    examples, _ = rendered(tokenizer, content)
    assert trained_texts(tokenizer, examples) == [" yes 🎈</s>", " c</s>"]
    check_prompts(tokenizer, content, examples)


def test_every_text_of_a_value_is_looked_at():
    assert list(texts_in({"a": ["b", {"c": "d"}, 3, None], "e": "f"})) == ["a", "b", "c", "d", "e", "f"]
