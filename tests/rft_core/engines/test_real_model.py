"""The embedded engine on a real model in float32, against `generate` and against a pass over the whole text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rft_core.engines import Request, Sampling
from rft_core.engines.transformers import TransformersEngine

pytestmark = pytest.mark.slow

QUESTIONS = [
    "What is 3 + 4?",
    "Which is the largest: 17, 5, 23?",
    "Name a colour.",
    "Reply with only the number: 9 - 2.",
]
TOKENS = 24
BUDGET = 10_000  # one batch


@dataclass
class LoadedPolicy:
    module: Any
    tokenizer: Any
    device: str = "cpu"


@pytest.fixture(scope="module")
def policy(smollm2: Path) -> LoadedPolicy:
    module = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    return LoadedPolicy(module, AutoTokenizer.from_pretrained(smollm2))


def make_requests(policy: LoadedPolicy, group_size: int) -> list[Request]:
    prompts = [
        policy.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    return [
        Request(tuple(prompt), 10 * group + index, str(group))
        for group, prompt in enumerate(prompts)
        for index in range(group_size)
    ]


def test_greedy_equals_generate(policy: LoadedPolicy) -> None:
    requests = make_requests(policy, 2)
    completions = TransformersEngine(policy, BUDGET).generate(requests, Sampling(0.0, 1.0, 0, TOKENS))
    for request, first, second in zip(requests[::2], completions[::2], completions[1::2], strict=True):
        ids = torch.tensor([request.prompt_token_ids])
        output = policy.module.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS
        )
        assert first.token_ids == second.token_ids == output[0, ids.shape[1] :].tolist()
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}


def test_logprobs_and_independence_of_the_batch(policy: LoadedPolicy) -> None:
    sampling = Sampling(0.9, 1.0, 0, TOKENS)
    requests = make_requests(policy, 3)
    completions = TransformersEngine(policy, BUDGET).generate(requests, sampling)
    alone = TransformersEngine(policy, 1).generate(requests[::-1], sampling)[::-1]
    assert [made.token_ids for made in completions] == [made.token_ids for made in alone]
    for request, completion in zip(requests, completions, strict=True):
        prompt = list(request.prompt_token_ids)
        with torch.no_grad():
            logits = policy.module(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
        expected = (logits.double() / 0.9).log_softmax(dim=-1).gather(1, torch.tensor(completion.token_ids)[:, None])
        np.testing.assert_allclose(completion.logprobs, expected[:, 0].numpy(), atol=1e-3)
