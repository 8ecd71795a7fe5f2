"""A two-layer random model in Hugging Face layout: stands in for a real one wherever size does not matter.

Its tokenizer is byte-level (any text round-trips), has a ChatML template, and pads with its end token, as SmolLM2 does,
so that code which builds masks from the pad id fails here too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedTokenizerFast,
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_TOKEN_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Another than the policy's, which ends with the pad token.
REWARD_TEMPLATE = "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}<|im_end|>{% endfor %}"


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """259 tokens: the special ones, then the 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        bos_token="<|im_start|>",
        unk_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_tiny_model(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    """Write model, tokenizer and generation config to `folder`. Weights are a function of the seed and of `config`.

    The weights are wide (std 0.15), so that logprobs differ between tokens and
    gradients are far from zero.
    """
    tokenizer = make_tiny_tokenizer()
    module = _random(LlamaForCausalLM, _tiny_config(len(tokenizer), **config), seed)
    module.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=END_TOKEN_ID, pad_token_id=END_TOKEN_ID)
    module.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def make_tiny_classifier(
    folder: Path, kind: str = "sequence", labels: tuple[str, ...] = ("score",), seed: int = 0, template: str | None = ""
) -> Path:
    """A model of the same body with a head: one of CLASSIFIERS. An empty `template` stands for REWARD_TEMPLATE."""
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = REWARD_TEMPLATE if template == "" else template
    names = dict(enumerate(labels))
    named = {"id2label": names, "label2id": {name: index for index, name in names.items()}}
    if kind == "encoder":
        config = BertConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            initializer_range=0.15, pad_token_id=END_TOKEN_ID, **named
        )  # fmt: skip
    else:
        config = _tiny_config(len(tokenizer), **named)
    _random(CLASSIFIERS[kind], config, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def _random(kind: Any, config: Any, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(config)


def _tiny_config(vocabulary: int, **more: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.15,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=END_TOKEN_ID,
        pad_token_id=END_TOKEN_ID,
        **more,
    )


CLASSIFIERS = {
    "sequence": LlamaForSequenceClassification,
    "token": LlamaForTokenClassification,
    "encoder": BertForSequenceClassification,
}
