"""A tiny policy in training, for the tests of updates."""

from __future__ import annotations

import torch

from data_contracts.schemas import UPDATES
from rft_core.config import AlgorithmSettings, ModelSettings, RolloutSettings, TrainingSettings
from rft_core.critic import SharedTrunk, start_critic
from rft_core.critic_settings import CriticSettings
from rft_core.policy import Policy, load_reference
from rft_core.resolve import resolve_algorithm
from rft_core.train_state import TrainState
from rft_core.update import update_policy
from tests.rft_core.update_tables import ROOT, with_returns

SPLITS = ((10_000, False), (64, True), (40, False), (1, True))  # token budget, shared prefix


class Trainer:
    """A tiny policy and its settings; `update` gives the rows of the updates table."""

    def __init__(self, folder, algorithm=None, model=None, critic=None, **training):
        self.model = ModelSettings(path=str(folder), **{"device": "cpu", "dtype": "float32", **(model or {})})
        self.training = TrainingSettings(**{"learning_rate": 1e-2, **training})
        self.algorithm = AlgorithmSettings(**(algorithm or {}))
        self.critic = CriticSettings(**(critic or {}))
        policy = Policy.load(self.model, folder, seed=0)
        self.has_critic = resolve_algorithm(self.algorithm).needs_critic
        started = start_critic(self.critic, self.model, folder, policy, seed=0) if self.has_critic else None
        self.state = TrainState.start(policy, started)
        self.reference = (
            load_reference(self.model, folder, self.state.policy)
            if resolve_algorithm(self.algorithm).needs_reference
            else None
        )
        self.teacher = None
        self.rollout = RolloutSettings(max_completion_tokens=12, temperature=0.9)
        self.seen = []

    def update(self, rollouts, advantages, before=ROOT):
        """Where a critic is trained and the credit has no returns, made-up ones."""
        if self.has_critic and advantages["returns"].null_count == advantages.num_rows:
            advantages = with_returns(rollouts, advantages)
        table = update_policy(
            self.state,
            rollouts,
            advantages,
            algorithm=self.algorithm,
            training=self.training,
            rollout=self.rollout,
            before=before,
            reference=self.reference,
            critic=self.critic,
            teacher=self.teacher,
            seed=7,
            total_steps=0,
            progress=lambda done, total, note: self.seen.append((done, total, note)),
        )
        assert table.schema == UPDATES.schema
        return table.to_pylist()

    @property
    def weights(self) -> list[torch.Tensor]:
        return [master.detach().clone() for master in self.state.policy.master]


def gradient(trainer: Trainer, rollouts, advantages) -> tuple[torch.Tensor, list[dict]]:
    """The flat gradient that the optimizer was given: caught between accumulation and step."""
    optimizer, caught = trainer.state.optimizer, []
    kept = optimizer.adamw.step
    optimizer.adamw.step = lambda: caught.append(torch.cat([w.grad.flatten() for w in trainer.state.policy.master]))
    rows = trainer.update(rollouts, advantages)
    optimizer.adamw.step = kept
    return caught[0], rows


def in_float64(trainer: Trainer) -> Trainer:
    """The same with float64 weights, forward pass and logprobs; the reference, if there is one, stays as it is."""
    policy = trainer.state.policy
    policy.module.double()
    policy.dtype = torch.float64

    def token_logprobs(batch, temperature, *, entropy_gradient=False):
        logits_SLV = policy.module(
            input_ids=batch.input_ids_SL,
            position_ids=batch.position_ids_SL,
            attention_mask=batch.attention_mask(torch.float64, policy.device),
            use_cache=False,
        ).logits
        logprobs_TV = torch.log_softmax(logits_SLV.flatten(0, 1)[batch.predicting_T] / temperature, -1)
        entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
        chosen_T = logprobs_TV.gather(-1, batch.target_T[:, None])[:, 0]
        return chosen_T, entropy_T if entropy_gradient else entropy_T.detach()

    policy.token_logprobs = token_logprobs
    if trainer.state.critic is not None:
        _values_in_float64(trainer, token_logprobs)
    return trainer


def _values_in_float64(trainer: Trainer, token_logprobs) -> None:
    policy, model = trainer.state.policy, trainer.state.critic.model

    def hidden_of(body, batch):
        states_SLD = body(
            input_ids=batch.input_ids_SL,
            position_ids=batch.position_ids_SL,
            attention_mask=batch.attention_mask(torch.float64, policy.device),
            use_cache=False,
        ).last_hidden_state
        return states_SLD.flatten(0, 1)[batch.predicting_T]

    if isinstance(model, SharedTrunk):
        model.head.data = model.head.data.double()
        model.values_of = lambda hidden_TD: hidden_TD @ model.head[0]
        policy.hidden_states = lambda batch: hidden_of(policy.module.base_model, batch)
        policy.logprobs_and_hidden = lambda batch, temperature, *, entropy_gradient=False: (
            *token_logprobs(batch, temperature, entropy_gradient=entropy_gradient),
            policy.hidden_states(batch),
        )
        return
    model.module.double()
    model.dtype = torch.float64
    model.token_logprobs = lambda batch, temperature: (
        hidden_of(model.module.base_model, batch) @ model.module.score.weight[0],
        None,
    )
