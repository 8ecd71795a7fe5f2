"""A Hugging Face causal LM run token by token: its forward pass, its cache, its masks and positions.

R rows of the batch, L left-padded prompt length, V vocabulary.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from rft_core.errors import SettingsError


class CachedForward:
    """Left-padded prompts, then one token a row and call. Between calls rows can be picked and repeated.

    Positions are explicit (0 at a row's first real token), so that padding shifts nothing.
    """

    def __init__(self, module: Any, device: torch.device | str, max_completion_tokens: int) -> None:
        self.module = module
        self.device = device
        self.max_completion_tokens = max_completion_tokens
        parameters = _forward_parameters(module)
        # transformers renamed past_key_values to cache; the old name goes with 5.40.
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"
        self.last_only: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self.takes_positions = "position_ids" in parameters
        self.cache: Any = None

    def prefill(self, prompts: list[tuple[int, ...]]) -> Tensor:
        """Runs the prompts; logits [R, V] of the token that follows each."""
        length = max(len(prompt) for prompt in prompts)
        token_RL = torch.zeros(len(prompts), length, dtype=torch.int64)  # 0 under the mask stands for nothing
        self.mask = torch.zeros(len(prompts), length + self.max_completion_tokens, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            token_RL[row, length - len(prompt) :] = torch.tensor(prompt, dtype=torch.int64)
            self.mask[row, length - len(prompt) :] = 1
        self.mask = self.mask.to(self.device)
        self.length = length
        self.next_position_R = self.mask[:, :length].sum(dim=-1)
        position_RL = (self.mask[:, :length].cumsum(dim=-1) - 1).clamp(min=0)
        return self._forward(token_RL.to(self.device), position_RL)

    def step(self, token_R: Tensor) -> Tensor:
        """Appends one token to every row; logits [R, V] of the next."""
        self.length += 1
        position_R1 = self.next_position_R[:, None]
        self.next_position_R = self.next_position_R + 1
        return self._forward(token_R[:, None], position_R1)

    def decoding(self) -> AbstractContextManager[None]:
        """What `step` needs around it: nothing."""
        return nullcontext()

    @property
    def can_pick(self) -> bool:
        """Whether this model's cache lets rows be repeated and dropped."""
        return callable(getattr(self.cache, "reorder_cache", None))

    def pick(self, rows: Tensor) -> None:
        """The batch becomes these rows of the present one: in this order, some more than once, some not at all."""
        self.cache.reorder_cache(rows)
        self.mask = self.mask.index_select(0, rows)
        self.next_position_R = self.next_position_R.index_select(0, rows)

    def _forward(self, token_RL: Tensor, position_RL: Tensor) -> Tensor:
        positions = {"position_ids": position_RL} if self.takes_positions else {}
        cache = {} if self.cache is None else {self.cache_name: self.cache}
        output = self.module(
            input_ids=token_RL,
            attention_mask=self.mask[:, : self.length],
            use_cache=True,
            **positions,
            **cache,
            **self.last_only,
        )
        self.cache = output.get(self.cache_name)
        if self.cache is None:
            raise SettingsError(
                f"engine transformers needs a model with a key-value cache, {type(self.module).__name__} returned none"
            )
        return output.logits[:, -1]


def _forward_parameters(module: Any) -> set[str]:
    """Names that the model's own forward takes, also behind a peft wrapper that passes everything on."""
    inner = module.get_base_model() if hasattr(module, "get_base_model") else module
    return set(inspect.signature(inner.forward).parameters)
