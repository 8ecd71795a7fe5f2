"""The embedded engine on small random models, against `generate` and against one teacher-forced row at a time."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import DynamicCache, GenerationConfig

from rft_core.config import RolloutSettings
from rft_core.engines import ENGINES, Completion, Request, Sampling
from rft_core.engines import transformers as transformers_engine
from rft_core.engines.shared_prompts import Sharing
from rft_core.engines.transformers import TransformersEngine, find_stop_token_ids
from rft_core.errors import SettingsError
from tests.rft_core.engines.families import FAMILIES, make_family
from tests.tiny import END_TOKEN_ID, make_tiny_model

VOCABULARY = 259
BUDGET = 10_000  # one batch
SEVERAL_BATCHES = 100  # three or four rows each


@dataclass
class StubPolicy:
    module: Any
    tokenizer: Any
    device: str = "cpu"


@dataclass
class NoEnd:
    eos_token_id: None = None


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> StubPolicy:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    return StubPolicy(
        transformers.AutoModelForCausalLM.from_pretrained(folder).eval(),
        transformers.AutoTokenizer.from_pretrained(folder),
    )


def endless(policy: StubPolicy) -> StubPolicy:
    """The same weights without any stop token."""
    module = type(policy.module)(replace_end(policy.module.config)).eval()
    module.load_state_dict(policy.module.state_dict())
    module.generation_config = GenerationConfig(pad_token_id=0)
    return StubPolicy(module, NoEnd())


def replace_end(config: Any) -> Any:
    return type(config).from_dict({**config.to_dict(), "eos_token_id": None})


def make_requests(lengths: tuple[int, ...], group_size: int, seed: int = 0) -> list[Request]:
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(3, VOCABULARY) for _ in range(length)) for length in lengths]
    return [
        Request(prompt, 100 * group + index, str(group))
        for group, prompt in enumerate(prompts)
        for index in range(group_size)
    ]


def sampling(temperature: float = 1.0, tokens: int = 12, top_p: float = 1.0, top_k: int = 0) -> Sampling:
    return Sampling(temperature, top_p, top_k, tokens)


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


LENGTHS = (9, 3, 14, 3, 1)


def test_greedy_equals_generate(policy: StubPolicy) -> None:
    requests = make_requests(LENGTHS, 2)
    completions = TransformersEngine(policy, 150).generate(requests, sampling(0.0, 40))
    for request, completion in zip(requests, completions, strict=True):
        assert completion.token_ids == generated(policy.module, request.prompt_token_ids, 40)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate_in_other_families(family: str) -> None:
    module = make_family(family)
    requests = make_requests(LENGTHS, 2)
    completions = TransformersEngine(StubPolicy(module, NoEnd()), BUDGET).generate(requests, sampling(0.0, 16))
    expected = [generated(module, request.prompt_token_ids, 16) for request in requests]
    assert tokens_of(completions) == expected
    assert len({token for row in expected for token in row}) > 3  # not one token for ever


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logprobs_equal_a_teacher_forced_pass_in_other_families(family: str) -> None:
    module = make_family(family)
    requests = make_requests(LENGTHS, 3)
    completions = TransformersEngine(StubPolicy(module, NoEnd()), BUDGET).generate(requests, sampling(1.0, 10))
    # A recurrent layer computes a whole text in chunks, and one token by another formula.
    tolerance = 1e-4 if family == "qwen3_next" else 1e-5
    for request, completion in zip(requests, completions, strict=True):
        expected = teacher_forced(module, request, completion, sampling())
        np.testing.assert_allclose(completion.logprobs, expected, atol=tolerance)


def generated(module: Any, prompt: tuple[int, ...], tokens: int) -> list[int]:
    """One row alone, without padding."""
    ids = torch.tensor([prompt])
    output = module.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("how", [sampling(), sampling(0.7), sampling(0.0), sampling(1.2, 12, 0.8, 30)])
def test_logprobs_equal_a_teacher_forced_pass(policy: StubPolicy, how: Sampling) -> None:
    requests = make_requests(LENGTHS, 3)
    for request, completion in zip(requests, TransformersEngine(policy, BUDGET).generate(requests, how), strict=True):
        expected = teacher_forced(policy.module, request, completion, how)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)
        assert all(np.float32(value) == value for value in completion.logprobs or [])


def teacher_forced(module: Any, request: Request, completion: Completion, how: Sampling) -> np.ndarray:
    """Logprobs of the completion in one pass over the whole text, of the distribution that `how` leaves."""
    prompt, made = list(request.prompt_token_ids), completion.token_ids
    with torch.no_grad():
        logits = module(torch.tensor([prompt + made])).logits[0, len(prompt) - 1 : -1].double()
    scores = logits / (how.temperature or 1.0)
    if how.top_k:
        scores = transformers.TopKLogitsWarper(how.top_k)(None, scores)
    if how.top_p < 1:
        scores = transformers.TopPLogitsWarper(how.top_p)(None, scores)
    return scores.log_softmax(dim=-1)[torch.arange(len(made)), torch.tensor(made)].numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_order_of_requests_changes_nothing(policy: StubPolicy, dtype: torch.dtype) -> None:
    module = endless(policy).module.to(dtype)
    engine = TransformersEngine(StubPolicy(module, NoEnd()), SEVERAL_BATCHES)
    requests = make_requests(LENGTHS, 3)
    order = random.Random(5).sample(range(len(requests)), len(requests))
    shuffled = engine.generate([requests[index] for index in order], sampling())
    straight = engine.generate(requests, sampling())
    assert shuffled == [straight[index] for index in order]
    assert straight == engine.generate(requests, sampling())


def test_batch_around_a_row_changes_nothing_in_float32(policy: StubPolicy) -> None:
    requests = make_requests(LENGTHS, 3)
    together = TransformersEngine(policy, BUDGET).generate(requests, sampling())
    apart = TransformersEngine(policy, 1).generate(requests, sampling())
    alone = [TransformersEngine(policy, BUDGET).generate([request], sampling())[0] for request in requests]
    assert tokens_of(together) == tokens_of(apart) == tokens_of(alone)
    for first, second in zip(together, alone, strict=True):
        np.testing.assert_allclose(first.logprobs, second.logprobs, atol=1e-4)


def test_rows_stop_by_themselves_and_leave_the_others_alone(policy: StubPolicy) -> None:
    """With stop tokens each row is the row without them, cut after its first one."""
    free = endless(policy)
    requests = make_requests(LENGTHS, 6)
    whole = TransformersEngine(free, BUDGET).generate(requests, sampling(1.0, 24))
    assert {completion.finish_reason for completion in whole} == {"length"}
    stops = {token for completion in whole[::4] for token in completion.token_ids[2:20:6]}
    free.module.generation_config.eos_token_id = sorted(stops)
    cut = TransformersEngine(free, BUDGET).generate(requests, sampling(1.0, 24))
    lengths = set()
    for before, after in zip(whole, cut, strict=True):
        ends = [index for index, token in enumerate(before.token_ids) if token in stops]
        kept = ends[0] + 1 if ends else 24
        assert after.token_ids == before.token_ids[:kept]
        assert after.finish_reason == ("stop" if ends else "length")
        np.testing.assert_allclose(after.logprobs, (before.logprobs or [])[:kept], atol=1e-4)
        lengths.add(kept)
    assert len(lengths) > 5  # rows did leave at different times


def test_a_stop_token_in_the_last_place_is_a_stop(policy: StubPolicy) -> None:
    free = endless(policy)
    request = make_requests((5,), 1)
    last = TransformersEngine(free, BUDGET).generate(request, sampling(0.0, 3))[0].token_ids[2]
    free.module.config.eos_token_id = last
    completion = TransformersEngine(free, BUDGET).generate(request, sampling(0.0, 3))[0]
    assert completion.token_ids[-1] == last
    assert completion.finish_reason == "stop"


def test_every_stop_token_counts(policy: StubPolicy) -> None:
    free = endless(policy)
    assert find_stop_token_ids(free) == frozenset()
    free.module.generation_config.eos_token_id = [5, 7]
    free.module.config.eos_token_id = 6
    assert find_stop_token_ids(free) == {5, 6, 7}
    assert find_stop_token_ids(policy) == {END_TOKEN_ID}


def test_first_tokens_follow_the_model(policy: StubPolicy) -> None:
    """Chi-square over 6000 seeds, of tokens expected more than five times and the rest together."""
    prompt = make_requests((6,), 1)[0].prompt_token_ids
    requests = [Request(prompt, seed, "g") for seed in range(6000)]
    made = TransformersEngine(policy, BUDGET).generate(requests, sampling(1.0, 1))
    with torch.no_grad():
        probability = policy.module(torch.tensor([prompt])).logits[0, -1].double().softmax(dim=-1).numpy()
    expected = probability * len(requests)
    observed = np.bincount([completion.token_ids[0] for completion in made], minlength=VOCABULARY)
    often = expected > 5
    expected, observed = (np.append(values[often], values[~often].sum()) for values in (expected, observed))
    freedom = len(expected) - 1
    assert freedom > 30
    assert abs(((observed - expected) ** 2 / expected).sum() - freedom) < 4 * np.sqrt(2 * freedom)


def test_seeds_decide(policy: StubPolicy) -> None:
    prompt = make_requests((6,), 1)[0].prompt_token_ids
    seeds = [1, 1, 2, 3, 4]
    rows = TransformersEngine(policy, BUDGET).generate([Request(prompt, seed, "g") for seed in seeds], sampling())
    assert rows[0] == rows[1]
    assert len({tuple(row.token_ids) for row in rows}) == 4


def test_a_shorter_budget_gives_a_prefix(policy: StubPolicy) -> None:
    free, requests = endless(policy), make_requests(LENGTHS, 2)
    longer = TransformersEngine(free, BUDGET).generate(requests, sampling(1.0, 12))
    shorter = TransformersEngine(free, BUDGET).generate(requests, sampling(1.0, 5))
    assert tokens_of(shorter) == [row.token_ids[:5] for row in longer]


def test_rows_that_cannot_be_run_fail_alone(policy: StubPolicy) -> None:
    sound = make_requests((4, 8), 1)
    context = policy.module.config.max_position_embeddings
    fits = Request((5,) * (context - 3), 0, "fits")
    requests = [
        Request((), 0, "empty"),
        sound[0],
        Request((5, VOCABULARY), 0, "unknown"),
        Request((-1, 5), 0, "negative"),
        sound[1],
        Request((5,) * (context - 2), 0, "long"),
        fits,
    ]
    completions = TransformersEngine(policy, BUDGET).generate(requests, sampling(1.0, 3))
    assert [completion.error_reason for completion in completions] == [
        "empty_prompt",
        None,
        "token_out_of_vocabulary",
        "token_out_of_vocabulary",
        None,
        "context_exceeded",
        None,
    ]
    assert completions[0] == Completion([], [], "error", "empty_prompt")
    assert tokens_of(completions[1:5:3]) == tokens_of(
        TransformersEngine(policy, BUDGET).generate(sound, sampling(1.0, 3))
    )
    only_bad = TransformersEngine(policy, BUDGET).generate(requests[:1], sampling())
    assert [completion.finish_reason for completion in only_bad] == ["error"]
    assert TransformersEngine(policy, BUDGET).generate([], sampling()) == []


def test_non_finite_logits_fail_their_own_row(policy: StubPolicy) -> None:
    module = make_family("llama")
    engine = TransformersEngine(StubPolicy(module, NoEnd()), BUDGET)
    requests = make_requests(LENGTHS, 2)
    before = engine.generate(requests, sampling())
    poison = requests[4].prompt_token_ids[7]  # a token of the third prompt, whose embedding becomes NaN
    with torch.no_grad():
        module.get_input_embeddings().weight[poison] = torch.nan
    after = engine.generate(requests, sampling())
    failed = 0
    for request, old, new in zip(requests, before, after, strict=True):
        if poison in request.prompt_token_ids or poison in old.token_ids[:-1]:
            assert (new.finish_reason, new.error_reason, new.token_ids) == ("error", "non_finite_logits", [])
            failed += 1
        else:
            assert new.token_ids == old.token_ids
    assert 2 <= failed < len(requests)


def test_a_prompt_is_run_once_for_its_group(policy: StubPolicy) -> None:
    shapes: list[tuple[int, ...]] = []
    handle = policy.module.register_forward_pre_hook(
        lambda _, arguments, named: shapes.append(tuple(named["input_ids"].shape)), with_kwargs=True
    )
    TransformersEngine(policy, BUDGET).generate(make_requests((9, 4), 8), sampling(1.0, 2))
    handle.remove()
    assert shapes == [(2, 9), (16, 1)]


class RigidCache(DynamicCache):
    """Of a model whose rows can neither be repeated nor dropped."""

    reorder_cache = None


def test_a_cache_that_cannot_be_repeated(policy: StubPolicy) -> None:
    free = endless(policy)
    requests = make_requests(LENGTHS, 3)
    free.module.generation_config.eos_token_id = list(range(60))
    expected = TransformersEngine(free, BUDGET).generate(requests, sampling())
    assert len({len(row.token_ids) for row in expected}) > 2

    def with_rigid_cache(_: Any, arguments: Any, named: dict[str, Any]) -> Any:
        return arguments, {"cache": RigidCache(config=free.module.config), **named}

    free.module.register_forward_pre_hook(with_rigid_cache, with_kwargs=True)
    transformers_engine._SHARING[free.module] = Sharing("its rows can't be told apart")
    found = TransformersEngine(free, BUDGET).generate(requests, sampling())
    assert tokens_of(found) == tokens_of(expected)


def test_a_model_without_cache_is_refused(policy: StubPolicy) -> None:
    free = endless(policy)
    free.module.register_forward_hook(
        lambda _, arguments, output: transformers.modeling_outputs.CausalLMOutputWithPast(logits=output.logits)
    )
    with pytest.raises(SettingsError, match="key-value cache"):
        TransformersEngine(free, BUDGET).generate(make_requests((4,), 1), sampling())


def test_the_module_is_left_as_it_was(policy: StubPolicy) -> None:
    free = endless(policy)
    module = free.module
    requests = make_requests(LENGTHS, 2)
    expected = TransformersEngine(free, BUDGET).generate(requests, sampling())
    module.set_attn_implementation("eager")
    module.train()
    assert tokens_of(TransformersEngine(free, BUDGET).generate(requests, sampling())) == tokens_of(expected)
    assert module.training
    assert module.config._attn_implementation == "eager"
    module(torch.tensor([[5, 6, 7]])).logits.sum().backward()  # still fit for training
    assert module.get_input_embeddings().weight.grad is not None


def test_an_update_of_the_weights_is_seen_at_once(policy: StubPolicy) -> None:
    free = endless(policy)
    engine = TransformersEngine(free, BUDGET)
    requests = make_requests((6,), 4)
    before = engine.generate(requests, sampling())
    with torch.no_grad():
        free.module.get_input_embeddings().weight.mul_(-1)
    assert tokens_of(engine.generate(requests, sampling())) != tokens_of(before)


def test_what_a_model_does_not_allow_is_noted_once() -> None:
    module = make_family("gemma2")
    engines = [TransformersEngine(StubPolicy(module, NoEnd()), BUDGET) for _ in range(2)]
    for engine in engines:
        engine.generate(make_requests((3,), 2), sampling(1.0, 2))
    assert len(engines[0].notes) == 1
    assert re.match(r"Gemma2ForCausalLM cannot hold a prompt once .*softcap", engines[0].notes[0])
    assert engines[1].notes == []


def test_progress_counts_finished_rows(policy: StubPolicy) -> None:
    seen: list[tuple[int, int, str]] = []
    requests = [Request((), 0, "empty"), *make_requests((4, 8), 3)]
    TransformersEngine(policy, 20).generate(requests, sampling(1.0, 3), lambda *call: seen.append(call))
    assert seen[0][1:] == (7, "token 1 of 3")
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)


def test_the_table_makes_this_engine(policy: StubPolicy, tmp_path: Path) -> None:
    engine = ENGINES["transformers"](policy, RolloutSettings(batch_tokens=40))
    requests = make_requests((4,), 2)
    assert engine.batch_tokens == 40
    assert engine.generate(requests, sampling()) == TransformersEngine(policy, 40).generate(requests, sampling())
    with pytest.raises(SettingsError, match="temperature"):
        replace(sampling(), temperature=-1.0)
