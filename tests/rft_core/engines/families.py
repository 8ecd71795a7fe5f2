"""Small random models of many families: what decoding can get wrong differs between them."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 259
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
GEMMA = {**SIZES, "head_dim": 8}
OLD = {"vocab_size": VOCABULARY, "initializer_range": 0.3}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2}
LOCAL = {"attention_types": [[["global", "local"], 1]], "window_size": 64}
RECURRENT = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 4,
    "shared_expert_intermediate_size": 16,
}

# Rotary and learned positions, biases, norms of queries and keys, fused weights, windows that hold a test's rows.
SHARING = {
    "llama": ("Llama", SIZES),
    "qwen2": ("Qwen2", SIZES),
    "qwen3": ("Qwen3", GEMMA),
    "gemma": ("Gemma", GEMMA),
    "gemma3": ("Gemma3", {**GEMMA, "sliding_window": 64}),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 64}),
    "phi3": ("Phi3", SIZES),
    "gpt2": ("GPT2", {**OLD, "n_embd": 32, "n_layer": 2, "n_head": 4}),
}
# With a word of the reason why a prompt cannot be held once.
REFUSING = {
    "mistral_window": ("Mistral", {**SIZES, "sliding_window": 5}, "fewer than 9 tokens"),
    "gemma2_window": ("Gemma2", {**GEMMA, "sliding_window": 5, "query_pre_attn_scalar": 8}, "fewer than 9 tokens"),
    "gemma2": ("Gemma2", {**GEMMA, "sliding_window": 64, "query_pre_attn_scalar": 8}, "softcap"),
    "gpt_oss": ("GptOss", {**GEMMA, **EXPERTS, "sliding_window": 64}, "s_aux"),
    "qwen3_next": ("Qwen3Next", {**GEMMA, **EXPERTS, **RECURRENT}, "LinearAttentionLayer"),
    "deepseek_v3": ("DeepseekV3", {**SIZES, **LATENT, **ROUTED, "num_key_value_heads": 4}, "heads"),
    "bloom": ("Bloom", {**OLD, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "positions"),
    "gpt_neo": ("GPTNeo", {**OLD, "hidden_size": 32, "num_layers": 2, "num_heads": 4, **LOCAL}, "chosen"),
}
FAMILIES = [*SHARING, *REFUSING]


def make_family(name: str) -> Any:
    """A model in eval mode without an end token, of weights that do not depend on other tests."""
    family, sizes, *_ = {**SHARING, **REFUSING}[name]
    config_name = {"Gemma3": "Gemma3Text"}.get(family, family)
    model_name = {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")
    config = getattr(transformers, f"{config_name}Config")(
        **{**sizes, "eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module = getattr(transformers, model_name)(config).eval()
    module.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return module
