"""The embedded engine: decodes with the policy's own Hugging Face module, in this process.

A call sorts its rows by (prompt length, prompt, seed) and decodes them in batches of at most `batch_tokens` positions
of cache. Equal prompts of a batch are run once, left-padded to the longest, and held once where the model allows it
(see shared_prompts); else their cache is repeated. A row that is done leaves the batch, and what is drawn for it
depends on its own seed only; in bfloat16 the logits still differ in the last bits with the batch around them, which is
why a call (a block of groups) is the unit that is reproduced.

R rows of the batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from rft_core.engines import Completion, Progress, Request, Sampling
from rft_core.engines.cached_forward import CachedForward
from rft_core.engines.prepared_linears import PreparedLinears
from rft_core.engines.sampling import draw
from rft_core.engines.shared_prompts import SharedPrompts, Sharing, attention_of, find_sharing
from rft_core.seeds import uniforms

# Dropping rows copies the cache, which a layer's append does at each step anyway. Below this share it is not worth it.
DROP_FINISHED_SHARE = 1 / 8
# Found once for a module: what it computes with may change, what it computes does not.
_SHARING: WeakKeyDictionary[Any, Sharing] = WeakKeyDictionary()


class GeneratingPolicy(Protocol):
    """What the engine needs of a policy. `module` is read at each call, so that an update is seen at once."""

    module: Any  # a Hugging Face causal LM in its compute type
    tokenizer: Any
    device: torch.device | str


@dataclass
class Row:
    """A completion in the making."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None

    def completion(self) -> Completion:
        if self.finish_reason == "error":
            return Completion.failed("non_finite_logits")
        return Completion(self.token_ids, self.logprobs, self.finish_reason or "length")


class TransformersEngine:
    """See the module. Rows that cannot be run fail with one of these reasons, and nothing else happens to the others:
    empty_prompt, token_out_of_vocabulary, context_exceeded (prompt + max_completion_tokens), non_finite_logits.

    `notes` say what the model does not allow, once for a module.
    """

    def __init__(self, policy: GeneratingPolicy, batch_tokens: int) -> None:
        self.policy = policy
        self.batch_tokens = batch_tokens
        self.notes: list[str] = []
        self._linears = PreparedLinears()

    def generate(
        self, requests: list[Request], sampling: Sampling, progress: Progress | None = None
    ) -> list[Completion]:
        completions: list[Completion | None] = [self._refusal(request, sampling) for request in requests]
        order = sorted(
            (index for index, refusal in enumerate(completions) if refusal is None),
            key=lambda index: _place(requests[index]),
        )
        stop_token_ids = find_stop_token_ids(self.policy)
        done = len(requests) - len(order)
        with _inference(self.policy.module):
            sharing = self._sharing()
            for is_shared, batch in cut([requests[i] for i in order], sampling, self.batch_tokens, sharing):
                report = _report_from(progress, done, len(requests))
                rows = [Row(request) for request in batch]
                with self._linears.used_by(self.policy.module):
                    _decode(self.policy, rows, sampling, stop_token_ids, is_shared, report)
                for row in rows:
                    completions[order[done - len(requests)]] = row.completion()
                    done += 1
        return [completion for completion in completions if completion is not None]

    def _sharing(self) -> Sharing:
        module = self.policy.module
        if module not in _SHARING:
            _SHARING[module] = find_sharing(module, self.policy.device)
            if _SHARING[module].refusal:
                self.notes.append(
                    f"{type(module).__name__} cannot hold a prompt once for all rows of its group "
                    f"({_SHARING[module].refusal}): each row keeps a copy, which is slower and takes more memory"
                )
        return _SHARING[module]

    def _refusal(self, request: Request, sampling: Sampling) -> Completion | None:
        prompt = request.prompt_token_ids
        if not prompt:
            return Completion.failed("empty_prompt")
        vocabulary = self.policy.module.get_input_embeddings().weight.shape[0]
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            return Completion.failed("token_out_of_vocabulary")
        context = _text_config(self.policy.module).to_dict().get("max_position_embeddings")
        if context is not None and len(prompt) + sampling.max_completion_tokens > context:
            return Completion.failed("context_exceeded")
        return None


def cut(
    requests: list[Request], sampling: Sampling, batch_tokens: int, sharing: Sharing
) -> Iterator[tuple[bool, list[Request]]]:
    """Batches of sorted requests, each with whether its prompts are held once. A batch of several rows takes at most
    `batch_tokens` positions of cache, padding counted."""
    num_tokens = sampling.max_completion_tokens
    batch: list[Request] = []
    num_prompts, was_shared = 0, False
    for request in requests:
        prompt = request.prompt_token_ids
        is_shared = sharing.serves(len(prompt) + num_tokens)
        is_new = not is_shared or not batch or batch[-1].prompt_token_ids != prompt
        needed = (num_prompts + is_new) * len(prompt) + (len(batch) + 1) * num_tokens
        if batch and (needed > batch_tokens or is_shared != was_shared):
            yield was_shared, batch
            batch, num_prompts, is_new = [], 0, True
        batch.append(request)
        num_prompts, was_shared = num_prompts + is_new, is_shared
    if batch:
        yield was_shared, batch


def find_stop_token_ids(policy: GeneratingPolicy) -> frozenset[int]:
    """Every end token that the generation config, the model's config or the tokenizer names; each may be a list."""
    named = [
        getattr(getattr(policy.module, "generation_config", None), "eos_token_id", None),
        getattr(policy.module.config, "eos_token_id", None),
        getattr(_text_config(policy.module), "eos_token_id", None),
        policy.tokenizer.eos_token_id,
    ]
    stop_token_ids: set[int] = set()
    for value in named:
        stop_token_ids.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return frozenset(stop_token_ids)


def _decode(
    policy: GeneratingPolicy,
    rows: list[Row],
    sampling: Sampling,
    stop_token_ids: frozenset[int],
    is_shared: bool,
    report: Any,
) -> None:
    """Fills the rows of one batch."""
    num_tokens = sampling.max_completion_tokens
    uniform = np.stack([uniforms(row.request.seed, num_tokens) for row in rows])
    uniform_RT = torch.from_numpy(uniform).to(policy.device)
    model, logits_RV = _prefill(policy, rows, num_tokens, is_shared)
    with model.decoding():
        cached = rows  # the rows that the cache holds, in its order
        for position in range(num_tokens):
            token_R, logprob_R, is_finite_R = draw(logits_RV, uniform_RT[:, position], sampling)
            drawn = zip(cached, token_R.tolist(), logprob_R.tolist(), is_finite_R.tolist(), strict=True)
            for row, token_id, logprob, is_finite in drawn:
                if row.finish_reason is None:
                    _append(row, token_id, logprob, is_finite, stop_token_ids)
            running = [index for index, row in enumerate(cached) if row.finish_reason is None]
            report(len(rows) - len(running), position + 1, num_tokens)
            if not running or position + 1 == num_tokens:
                break
            if model.can_pick and len(cached) - len(running) >= DROP_FINISHED_SHARE * len(cached):
                kept_R = torch.tensor(running, device=policy.device)
                model.pick(kept_R)
                token_R, uniform_RT = token_R.index_select(0, kept_R), uniform_RT.index_select(0, kept_R)
                cached = [cached[index] for index in running]
            logits_RV = model.step(token_R)


def _append(row: Row, token_id: int, logprob: float, is_finite: bool, stop_token_ids: frozenset[int]) -> None:
    if not is_finite:
        row.finish_reason = "error"
        return
    row.token_ids.append(token_id)
    row.logprobs.append(logprob)
    if token_id in stop_token_ids:
        row.finish_reason = "stop"


def _prefill(
    policy: GeneratingPolicy, rows: list[Row], num_tokens: int, is_shared: bool
) -> tuple[CachedForward | SharedPrompts, Tensor]:
    """Runs each distinct prompt once, and repeats its cache where it cannot be shared; every row's own where neither
    is possible."""
    prompts = [row.request.prompt_token_ids for row in rows]
    place = {prompt: index for index, prompt in enumerate(dict.fromkeys(prompts))}
    prompt_of_row = [place[prompt] for prompt in prompts]
    model = CachedForward(policy.module, policy.device, num_tokens)
    logits_RV = model.prefill(list(place))
    source_R = torch.tensor(prompt_of_row, device=policy.device)
    if is_shared:
        return SharedPrompts(model, prompt_of_row), logits_RV.index_select(0, source_R)
    if len(place) == len(prompts):
        return model, logits_RV
    if model.can_pick:
        model.pick(source_R)
        return model, logits_RV.index_select(0, source_R)
    model = CachedForward(policy.module, policy.device, num_tokens)
    return model, model.prefill(prompts)


def _place(request: Request) -> tuple[int, tuple[int, ...], int]:
    """Sorts requests without regard to the order they came in; rows with equal places are equal rows."""
    return len(request.prompt_token_ids), request.prompt_token_ids, request.seed


def _text_config(module: Any) -> Any:
    return module.config.get_text_config()


def _report_from(progress: Progress | None, done: int, total: int) -> Any:
    def report(finished: int, position: int, num_tokens: int) -> None:
        if progress:
            progress(done + finished, total, f"token {position} of {num_tokens}")

    return report


@contextmanager
def _inference(module: Any) -> Iterator[None]:
    """Evaluation mode, fused attention and no gradients; the module's own ways again afterwards.

    Not `inference_mode`: buffers that a forward pass makes anew (dynamic rope) would then be unfit for training.
    Eager attention, which trains faster on a CPU, repeats the whole cache for grouped heads: a sixth of a decode step.
    """
    was_training, attention = module.training, module.config._attn_implementation
    is_switched = attention == "eager" and module._supports_sdpa and module._can_set_attn_implementation()
    module.eval()
    try:
        with attention_of(module, "sdpa") if is_switched else nullcontext(), torch.no_grad():
            yield
    finally:
        module.train(was_training)
