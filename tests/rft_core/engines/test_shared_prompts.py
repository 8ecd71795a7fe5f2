"""Prompts held once, against a cache that holds them for every row."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from rft_core.engines.cached_forward import CachedForward
from rft_core.engines.shared_prompts import FIRST_CAPACITY, SharedPrompts, find_sharing
from tests.rft_core.engines.families import REFUSING, SHARING, VOCABULARY, make_family

WINDOWS = {"gemma3": 64, "mistral": 64}


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", SHARING)
def test_families_that_share(family: str, dtype: torch.dtype) -> None:
    module = make_family(family).to(dtype)
    before = module.config._attn_implementation
    sharing = find_sharing(module, "cpu")
    assert sharing.refusal is None
    assert sharing.longest == WINDOWS.get(family)
    assert module.config._attn_implementation == before
    window = WINDOWS.get(family, 1000)
    assert sharing.serves(window)
    assert sharing.serves(window + 1) == (family not in WINDOWS)


@pytest.mark.parametrize("family", REFUSING)
def test_families_that_do_not(family: str) -> None:
    module = make_family(family)
    before = module.config._attn_implementation
    sharing = find_sharing(module, "cpu")
    assert REFUSING[family][2] in (sharing.refusal or "")
    assert not sharing.serves(1)
    assert module.config._attn_implementation == before


def test_another_function_of_the_same_shape_shows() -> None:
    """A model that multiplies its scores once more where attention is its own."""
    module = make_family("llama")
    for layer in module.model.layers:
        layer.self_attn.register_forward_pre_hook(_rescaled, with_kwargs=True)
    assert "logprobs differ" in (find_sharing(module, "cpu").refusal or "")


def test_too_little_memory_says_nothing_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    module = make_family("llama")
    monkeypatch.setattr(SharedPrompts, "step", fails)
    with pytest.raises(torch.OutOfMemoryError):
        find_sharing(module, "cpu")


def _rescaled(attention: Any, arguments: Any, named: dict[str, Any]) -> None:
    is_shared = attention.config._attn_implementation == "rft_shared_prompts"
    attention.scaling = attention.head_dim**-0.5 * (1.5 if is_shared else 1.0)


@pytest.mark.parametrize("lengths", [(6, 6, 6), (3, 9, 5)])  # without padding and with
@pytest.mark.parametrize("family", SHARING)
def test_equals_rows_that_hold_their_own(family: str, lengths: tuple[int, ...]) -> None:
    """Logits of every step while rows leave: one of a group, a whole group, all but one."""
    module = make_family(family)
    rng = random.Random(1)
    prompts = [tuple(rng.randrange(3, VOCABULARY) for _ in range(length)) for length in lengths]
    prompt_of_row = [0, 0, 0, 1, 1, 1, 2, 2, 2]
    plain, prefilled = CachedForward(module, "cpu", 20), CachedForward(module, "cpu", 20)
    plain.prefill([prompts[prompt] for prompt in prompt_of_row])
    prefilled.prefill(prompts)
    shared = SharedPrompts(prefilled, prompt_of_row)
    picks = {3: [0, 1, 2, 4, 5, 6, 7, 8], 5: [0, 2, 5, 6, 7], 7: [0, 1, 3, 4], 9: [1]}
    num_rows = len(prompt_of_row)
    for step in range(11):
        if step in picks:
            kept = torch.tensor(picks[step])
            num_rows = len(kept)
            plain.pick(kept)
            shared.pick(kept)
        token_R = torch.tensor([rng.randrange(3, VOCABULARY) for _ in range(num_rows)])
        expected = plain.step(token_R)
        with shared.decoding():
            found = shared.step(token_R)
        np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=1e-4)
    # picks 5 ends row 4 (then 2 rows of the first prompt, 1 of the second, 2 of the third), 7 the second prompt, and
    # of the first's rows the last is left
    assert shared.layers[0].prompt_keys.shape[0] == 1
    assert shared.layers[0].keys.shape[0] == 1


def test_a_prompt_is_held_once_and_space_grows() -> None:
    module = make_family("qwen2")
    prefilled = CachedForward(module, "cpu", 150)
    prefilled.prefill([(5,) * 7, (6,) * 7])
    shared = SharedPrompts(prefilled, [0] * 5 + [1] * 3)
    plain = CachedForward(module, "cpu", 150)
    plain.prefill([(5,) * 7] * 5 + [(6,) * 7] * 3)
    rng = random.Random(2)
    with shared.decoding():
        for _ in range(FIRST_CAPACITY + 1):
            token_R = torch.tensor([rng.randrange(3, VOCABULARY) for _ in range(8)])
            found = shared.step(token_R)
    rng = random.Random(2)
    for _ in range(FIRST_CAPACITY + 1):
        expected = plain.step(torch.tensor([rng.randrange(3, VOCABULARY) for _ in range(8)]))
    np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=1e-4)
    for layer in shared.layers:
        assert layer.prompt_keys.shape == (2, 2, 7, 8)  # prompts, key-value heads, tokens, head size
        assert layer.keys.shape == (8, 2, 2 * FIRST_CAPACITY, 8)
        assert layer.get_seq_length() == 7 + FIRST_CAPACITY + 1
