"""A critic: the value of the state in which each token is written, read where that token is predicted.

It stands where a policy stands: what `token_logprobs` gives for a token is a value. It has weights of its own, those of
a language model's body under a head of one number, or it is such a head on the policy's own hidden states. A new head
is 0, so that all values are 0 before the first update.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rft_core.batching import MicroBatch, TrainRow
from rft_core.config import ModelSettings
from rft_core.critic_settings import CriticSettings
from rft_core.errors import SettingsError
from rft_core.model_reading import NEW_HEAD
from rft_core.optimizer import Optimizer
from rft_core.policy import Policy
from rft_core.score_policy import ScorePolicy, after_reading, with_a_token_more


@dataclass
class ValueModel(ScorePolicy):
    """A critic with weights of its own."""

    labels: ClassVar[tuple[str, ...]] = ("value",)

    def token_logprobs(
        self, batch: MicroBatch, temperature: float, *, entropy_gradient: bool = False
    ) -> tuple[Tensor, None]:
        """(value_T, None): float32, before each completion token; the temperature has no say."""
        head = getattr(self.module, NEW_HEAD)
        bias = None if head.bias is None else head.bias.float()
        return nn.functional.linear(self.hidden_states(batch).float(), head.weight.float(), bias)[:, 0], None

    def micro_batches(self, rows: list[TrainRow], token_budget: int) -> list[MicroBatch]:
        return Policy.micro_batches(self, rows, token_budget)


@dataclass
class SharedTrunk:
    """A head of values on a policy's hidden states."""

    policy: Policy
    head: nn.Parameter  # float32[1, D]
    names: list[str] = field(default_factory=lambda: ["value_head.weight"])

    @property
    def compute(self) -> list[nn.Parameter]:
        return [self.head]

    @property
    def master(self) -> list[Tensor]:
        return [self.head]

    def values_of(self, hidden_TD: Tensor) -> Tensor:
        return nn.functional.linear(hidden_TD.float(), self.head)[:, 0]

    def token_logprobs(
        self, batch: MicroBatch, temperature: float, *, entropy_gradient: bool = False
    ) -> tuple[Tensor, None]:
        """(value_T, None), with a gradient to the head alone; a loss of both takes `values_of` its own pass."""
        with torch.no_grad():
            hidden_TD = self.policy.hidden_states(batch)
        return self.values_of(hidden_TD), None

    def micro_batches(self, rows: list[TrainRow], token_budget: int) -> list[MicroBatch]:
        return self.policy.micro_batches(rows, token_budget)

    def write_compute(self) -> None:
        """The head computes in float32, by the very weights that are trained."""


@dataclass(frozen=True)
class BehindTokens:
    """A critic's value of the state behind each token: what a completion that was cut goes on with."""

    model: ValueModel | SharedTrunk

    def token_logprobs(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, None]:
        return self.model.token_logprobs(batch, temperature)

    def micro_batches(self, rows: list[TrainRow], token_budget: int) -> list[MicroBatch]:
        return [after_reading(batch) for batch in self.model.micro_batches(with_a_token_more(rows), token_budget)]


@dataclass
class Critic:
    """A critic in training."""

    model: ValueModel | SharedTrunk
    optimizer: Optimizer

    @property
    def is_shared(self) -> bool:
        """Whether it trains the policy's own trunk, by one loss with it."""
        return isinstance(self.model, SharedTrunk)


def start_critic(settings: CriticSettings, model: ModelSettings, folder: Path, policy: Policy, seed: int) -> Critic:
    """The critic before the first update; `folder` is that of the policy's model.

    Raises SettingsError where the policy's model or the critic's folder does not fit, ModelUnreadable for a folder that
    cannot be read.
    """
    if settings.shared_trunk:
        if not policy.has_plain_head:
            raise SettingsError(
                "critic.shared_trunk needs a model whose logits are its hidden states x its head, "
                f"{policy.folder} has another: set shared_trunk false"
            )
        width = policy.module.get_output_embeddings().weight.shape[1]
        head = nn.Parameter(torch.zeros((1, width), device=policy.device))
        shared = SharedTrunk(policy, head)
        return Critic(shared, Optimizer.over(shared))
    values = ValueModel.load(model, Path(settings.path) if settings.path else folder, seed)
    _check_vocabulary(values.tokenizer, policy.tokenizer, values.folder)
    return Critic(values, Optimizer.over(values))


def _check_vocabulary(of_critic: Any, of_policy: Any, folder: Path) -> None:
    """Both read the same token ids, so each id must mean the same text."""
    critic, policy = of_critic.get_vocab(), of_policy.get_vocab()
    if critic == policy:
        return
    odd = min(token for token in critic.keys() | policy.keys() if critic.get(token) != policy.get(token))
    raise SettingsError(
        f"critic.path must be a model of the policy's vocabulary, found another in {folder}: {odd!r} is token "
        f"{critic.get(odd)} there and {policy.get(odd)} in the policy's"
    )
