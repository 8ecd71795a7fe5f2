"""Tiny random models of several families: what they do beside Llama's layers is what an update must respect."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.tiny import make_tiny_tokenizer

SHAPE = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
    "pad_token_id": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Untied head; biases of queries, keys and values; norms of queries and keys; capped scores and logits, scaled
# embeddings, windows; two kinds of layers with rotary embeddings of their own; scaled scores and logits.
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": False}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.5, "sliding_window": 64},
    ),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {"sliding_window": 64}),
    "granite": (
        GraniteForCausalLM,
        GraniteConfig,
        {"logits_scaling": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5},
    ),
}


def make_family(folder: Path, name: str, **changes) -> Path:
    """Write a model of FAMILIES and the tiny tokenizer."""
    model, config, own = FAMILIES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = model(config(**{**SHAPE, **own, **changes}))
    with torch.no_grad():  # fresh models have biases of 0 and norms of 1, which hide mistakes
        for weight in module.parameters():
            if weight.ndim == 1:
                weight += torch.linspace(-0.2, 0.2, len(weight))
    module.save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return folder
