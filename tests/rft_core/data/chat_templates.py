"""Chat templates of different styles, and small tokenizers to go with them, made for the tests.

Each style is what some family of public models does; only what matters for rendering and masks is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n"
    "' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen3: the reasoning of turns before the last question is gone from the history.
STRIPS_REASONING = (
    "{% set ns = namespace(last=0) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% set content = message.content %}"
    "{% if message.role == 'assistant' and loop.index0 < ns.last and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As DeepSeek-R1: reasoning is gone from every turn, and the generation prompt begins it.
BEGINS_REASONING = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{{ '<|user|>' + message.content }}"
    "{% elif message.role == 'system' %}{{ message.content }}"
    "{% else %}{{ '<|assistant|>' + message.content.split('</think>')[-1] + '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
# As Gemma: a BOS, no system role, roles of its own, texts trimmed, an end token that is not the EOS.
NO_SYSTEM = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<|turn|>' + ('model' if message.role == 'assistant' else message.role) + '\n' "
    "+ message.content | trim + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>model\n' }}{% endif %}"
)
DROPS_SYSTEM = (
    "{% for message in messages %}{% if message.role != 'system' %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Llama 2: the system text within the first user message, no header before a turn, spaces around it.
INST = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}"
    "{% set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
    "{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}"
    "{% for message in rest %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message.role == 'user' %}{{ bos_token + '[INST] ' + (system if loop.first else '') "
    "+ message.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + message.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# As Qwen2.5: tools in the system message, calls as JSON in tags, results as user turns.
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content + '\n' }}"
    "{% endif %}{{ '<tools>' }}{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}"
    "{{ '\n</tools><|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% elif message.role == 'assistant' and message.tool_calls %}{{ '<|im_start|>assistant' }}"
    "{% if message.content %}{{ '\n' + message.content }}{% endif %}{% for call in message.tool_calls %}"
    "{{ '\n<tool_call>\n' }}{{ call.function | tojson }}{{ '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% elif not (tools and message.role == 'system' and loop.first) %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# No token ends a turn.
NO_END = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
# The generation prompt ends with a space, which merges with the first word of the turn once that is known.
SPACE_AT_THE_END = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PIECES = ("<unk>", "<s>", "</s>")
# Pairs that a byte-level tokenizer merges, in order; Ġ is a space and Ċ a newline there.
MERGES = (
    ("Ċ", "Ċ"),
    ("Ġ", "Ġ"),
    ("Ġ", "a"),
    ("Ġa", "n"),
    ("Ġan", "s"),
    ("a", "n"),
    ("an", "s"),
    (":", "Ċ"),
    (".", "Ċ"),
)


def byte_tokenizer(
    template: str | None,
    special: tuple[str, ...] = CHATML,
    added: tuple[str, ...] = (),
    begins_with_bos: bool = False,
    merges: tuple[tuple[str, str], ...] = MERGES,
    **names: Any,
) -> PreTrainedTokenizerFast:
    """Byte-level as GPT-2's: any text round-trips. `special` then `added` tokens come first in the vocabulary."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    vocabulary = {token: index for index, token in enumerate([*special, *added, *alphabet])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(special))
    inner.add_tokens([AddedToken(text, normalized=False) for text in added])
    names = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", **names}
    if begins_with_bos:
        bos = names["bos_token"]
        inner.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
        )
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=template, **names)


def piece_tokenizer(template: str | None, is_legacy: bool = True, **names: Any) -> PreTrainedTokenizerFast:
    """As Llama 2's: spaces are ▁, one is put before a text (legacy: also behind each special token), unknown characters
    become bytes.
    """
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = ["▁", *map(chr, range(33, 127))]
    merges = [("▁", "y"), ("▁y", "e"), ("▁ye", "s"), ("y", "e"), ("ye", "s"), ("▁", "["), ("▁", "▁")]
    tokens = [*PIECES, *bytes_, *letters, *dict.fromkeys("".join(pair) for pair in merges)]
    inner = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    if is_legacy:
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens([AddedToken(token, normalized=False) for token in PIECES])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>", **names}
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=template, **names)


def gemma_like() -> PreTrainedTokenizerFast:
    special = ("<pad>", "<eos>", "<bos>", "<|turn|>", "<|end|>")
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    return byte_tokenizer(NO_SYSTEM, special, begins_with_bos=True, **names)


def deepseek_like() -> PreTrainedTokenizerFast:
    special = ("<s>", "</s>", "<|user|>", "<|assistant|>")
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    return byte_tokenizer(BEGINS_REASONING, special, ("<think>", "</think>"), begins_with_bos=True, **names)


STYLES: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "smollm2": lambda: byte_tokenizer(SMOLLM2),
    "strips_reasoning": lambda: byte_tokenizer(STRIPS_REASONING, added=("<think>", "</think>")),
    "begins_reasoning": deepseek_like,
    "no_system": gemma_like,
    "drops_system": lambda: byte_tokenizer(DROPS_SYSTEM),
    "inst": lambda: piece_tokenizer(INST),
    "inst_first_space": lambda: piece_tokenizer(INST, is_legacy=False),
    "tools": lambda: byte_tokenizer(TOOLS, added=("<tool_call>", "</tool_call>")),
    "marked": lambda: byte_tokenizer(MARKED),
    "space_at_the_end": lambda: byte_tokenizer(SPACE_AT_THE_END),
    "no_end": lambda: byte_tokenizer(NO_END),
}
