"""A server as the engine sees it: which policy it holds, and the proof of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rft_core.config import ModelSettings
from rft_core.engines import Request, Sampling
from rft_core.engines.vllm.connection import Connection, Refused, ServerGone
from rft_core.engines.vllm.managed import ManagedServer
from rft_core.engines.vllm.rows import completion_of, row_body
from rft_core.engines.vllm.weights import (
    SAMPLED_TEMPERATURE,
    SAMPLED_TOKENS,
    TOLERANCE,
    Fingerprint,
    ServedPolicy,
    logprobs_of,
)
from rft_core.errors import SettingsError, WrongWeights
from rft_core.vllm_settings import VllmSettings

PROMPT_TOKENS = 8  # of the fixed ones, before tokens that the server samples
DEV_MODE = (
    "it must take the key of rollout.vllm.api_key_env, run with VLLM_SERVER_DEV_MODE=1 and "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment, under LoRA with --enable-lora, and see "
    "rollout.vllm.weights_folder under the same path"
)


@dataclass
class _Shown:
    """The proof of the weights that a server holds: what it told, and what the policy did."""

    fingerprint: Fingerprint
    told: np.ndarray


class Server:
    """Our own server, started when it is needed first, or one at a URL. Every call may raise ServerGone."""

    def __init__(
        self,
        settings: VllmSettings,
        model: ModelSettings,
        *,
        connection: Connection | None = None,
        managed: ManagedServer | None = None,
    ) -> None:
        self.settings = settings
        self.lora = "none" if not model.lora_rank else settings.lora
        self.managed = managed
        self.connection = connection
        self.tolerance = settings.probe_tolerance or TOLERANCE[model.dtype]
        self.model = ""  # the name of what it holds
        self.base = ""
        self.version: str | None = None
        self._holds: str | None = None  # a policy_id
        self._is_known = False
        self._shown: _Shown | None = None
        self._sleep_level = 0

    @property
    def name(self) -> str:
        return "our vLLM server" if self.managed is not None else f"the vLLM server at {self.at.url}"

    @property
    def at(self) -> Connection:
        if self.connection is None:
            raise ServerGone("our vLLM server is not running")
        return self.connection

    @property
    def holds(self) -> str | None:
        return self._holds

    def prepare(self, policy: ServedPolicy, published: Path, fingerprint: Fingerprint) -> float:
        """Have it serve the policy, and prove it; gives the mean difference of its logprobs from the policy's, in nats.

        Raises WrongWeights when it holds others even after a second try, SettingsError for a server that cannot do
        what is needed, EngineUnavailable when ours does not start.
        """
        try:
            return self._prepare(policy, published, fingerprint)
        except Refused as refused:
            raise SettingsError(f"{self.name} refused what it was asked for ({refused}): {DEV_MODE}") from refused

    def _prepare(self, policy: ServedPolicy, published: Path, fingerprint: Fingerprint) -> float:
        is_new = self._connect(policy, published, fingerprint)
        if self._holds != fingerprint.policy_id:
            self._load(published, fingerprint)
        try:
            gap = self.prove(fingerprint)
        except WrongWeights:
            self._load(published, fingerprint)
            gap = self.prove(fingerprint)
        if is_new:
            self._prove_sampling(policy, fingerprint)
            self._is_known = True
        return gap

    def prove(self, fingerprint: Fingerprint) -> float:
        """Raises WrongWeights."""
        try:
            told = np.array(self.at.prompt_logprobs(self.model, fingerprint.token_ids))
        except Refused as refused:
            self._holds = None
            raise WrongWeights(f"{self.name} must tell logprobs of given tokens, found {refused}") from refused
        gap, shown = fingerprint.gap(told), self._shown
        if not gap <= self.tolerance:
            self._holds = None
            raise WrongWeights(
                f"{self.name} must hold the weights of policy {fingerprint.policy_id[:12]}: its logprobs of fixed "
                f"tokens may differ from the policy's by {self.tolerance:g} nats on average "
                f"(rollout.vllm.probe_tolerance), found {gap:.3g}. Other weights, another model or precision"
            )
        is_same = shown is not None and np.array_equal(told, shown.told)
        if is_same and shown is not None and fingerprint.moved_from(shown.fingerprint):
            self._holds = None
            raise WrongWeights(
                f"{self.name} must hold the weights of policy {fingerprint.policy_id[:12]}, but its logprobs of fixed "
                f"tokens are still those of policy {shown.fingerprint.policy_id[:12]}, to the bit: it did not take "
                "the update over"
            )
        self._shown = _Shown(fingerprint, told)
        return gap

    def rest(self) -> None:
        """Free what training needs, as far as the settings wish."""
        wish = self.settings.while_training
        if wish == "stop":
            self.lost()
        elif wish == "sleep" or (self.managed is not None and self.managed.sleeps):
            self._sleep()

    def _sleep(self) -> None:
        if self.connection is None or self._sleep_level:
            return
        level = 1 if self.lora == "adapter" else 2  # what an adapter stands on is not loaded again
        try:
            self.connection.sleep(level)
        except Refused as refused:
            raise SettingsError(
                "rollout.vllm.while_training sleep needs a server with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1 "
                f"in its environment, {self.name} says: {refused}"
            ) from refused
        self._sleep_level = level

    def lost(self) -> None:
        """It gave no answer, or is not wanted: it may come back with other weights. Our own is ended."""
        self._holds, self._shown, self._is_known, self._sleep_level = None, None, False, 0
        if self.managed is not None:
            self.managed.stop()
            self.connection = None

    def _connect(self, policy: ServedPolicy, published: Path, fingerprint: Fingerprint) -> bool:
        """Whether it is met for the first time, or anew."""
        managed = self.managed
        if managed is not None and not managed.is_running:
            self.lost()
            is_base = self.lora == "adapter"
            self.connection = managed.start(policy.folder if is_base else published)
            self._holds = None if is_base else fingerprint.policy_id
        if self._is_known:
            self._wake(published, fingerprint)
            return False
        self.base = self.model = self.at.base_model()
        self.version = self.at.version()
        return True

    def _wake(self, published: Path, fingerprint: Fingerprint) -> None:
        level, self._sleep_level = self._sleep_level, 0
        if level == 1:
            self.at.wake()
        elif level == 2:
            self._holds = None
            self.at.wake("weights")
            self._load(published, fingerprint)
            self.at.wake("kv_cache")

    def _load(self, published: Path, fingerprint: Fingerprint) -> None:
        self._holds = None
        if self.lora == "adapter":
            self._load_adapter(published, f"policy-{fingerprint.policy_id[:16]}")
        else:
            self.at.load_weights(published)
        self._holds = fingerprint.policy_id

    def _load_adapter(self, published: Path, name: str) -> None:
        """Each policy has a name of its own, so a server that lacks it says so."""
        for old in {self.model, name} - {"", self.base}:
            self.at.unload_adapter(old)
        self.at.load_adapter(name, published)
        self.model = name

    def _prove_sampling(self, policy: ServedPolicy, fingerprint: Fingerprint) -> None:
        """That what it tells of tokens that it samples is of the distribution which they are sampled from."""
        prompt = fingerprint.token_ids[:PROMPT_TOKENS]
        sampling = Sampling(SAMPLED_TEMPERATURE, 1.0, 0, SAMPLED_TOKENS)
        body = {"model": self.model, **row_body(Request(tuple(prompt), 1, ""), sampling, [], fingerprint.policy_id)}
        try:
            made = completion_of(self.at.complete(body))
        except (ValueError, Refused) as error:
            raise SettingsError(f"{self.name} must complete token ids as vLLM 0.12 and newer do: {error}") from error
        expected = logprobs_of(policy, prompt, made.token_ids, SAMPLED_TEMPERATURE)
        gap = float(np.abs(np.array(made.logprobs) - expected).mean())
        # At a lower temperature logprobs differ the more, and so do their errors.
        if not gap <= self.tolerance / SAMPLED_TEMPERATURE:
            raise SettingsError(
                f"{self.name} must tell logprobs of the distribution that it samples from (start it with "
                f"--logprobs-mode processed_logprobs), found a mean difference of {gap:.3g} nats at temperature "
                f"{SAMPLED_TEMPERATURE:g}"
            )
