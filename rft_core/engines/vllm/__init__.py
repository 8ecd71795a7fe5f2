"""The engine `vllm`: rollouts by vLLM servers over HTTP, our own or given ones. vllm itself is never imported.

A server outlives stages: after each update the policy's weights are published to a folder and loaded in place, and the
server's logprobs of fixed tokens must then be the policy's (weights.py). Rows are requests of their own, each with its
seed; servers take the next row when they are done with one.

What is reproduced: a seed decides a row's draws, but vLLM batches rows as they come, and logits differ in the last bits
with the batch around a row. Two calls may so differ in some rows. What is committed is never made again.

A server that gives no answer after all retries is dropped, and the others go on with its rows. When none is left, ours
is started again, or those given are tried again, once a stage; then the stage fails and is retried as a whole.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from rft_core.config import ModelSettings
from rft_core.engines import Completion, Progress, Request, Sampling
from rft_core.engines.vllm.connection import Connection, ServerGone
from rft_core.engines.vllm.managed import ManagedServer, check_interpreter
from rft_core.engines.vllm.rows import Job, Note, complete
from rft_core.engines.vllm.server import Server
from rft_core.engines.vllm.weights import Fingerprint, Publisher, ServedPolicy
from rft_core.errors import EngineUnavailable, SettingsError, WrongWeights
from rft_core.rewards.event_loop import wait_for
from rft_core.settings import secret
from rft_core.vllm_settings import VllmSettings

RESTARTS = 1  # in a stage

__all__ = ["VllmEngine", "check_interpreter"]


class VllmEngine:
    """`folder` holds our server's log; weights are published below it, or in a folder of the name `run` below
    settings.weights_folder. `serve` comes before `generate`; an engine that was closed serves no more.

    Rows fail alone with empty_prompt, token_out_of_vocabulary, context_exceeded, and, after all retries, with
    server_refused, server_timeout, server_error or unreadable_reply.
    """

    def __init__(self, settings: VllmSettings, model: ModelSettings, folder: Path, run: str, note: Note) -> None:
        if settings.while_training == "sleep" and model.device == "cpu" and not settings.urls:
            raise SettingsError("rollout.vllm.while_training sleep needs a GPU: vLLM has no sleep on a CPU; take stop")
        self.note = note
        is_merged = model.lora_rank > 0 and settings.lora == "merged"
        weights = Path(settings.weights_folder) / run if settings.weights_folder else folder / "weights"
        self.publisher = Publisher(weights, merged=is_merged, untied=model.device == "cpu" and not settings.urls)
        if settings.urls:
            key = secret(settings.api_key_env, "rollout.vllm.api_key_env")
            connections = [Connection(url, key, settings) for url in settings.urls]
            self.servers = [Server(settings, model, connection=connection) for connection in connections]
        else:
            managed = ManagedServer(settings, model, folder / "server.log")
            self.servers = [Server(settings, model, managed=managed)]
        self._policy: ServedPolicy | None = None
        self._fingerprint: Fingerprint | None = None
        self._published = Path()
        self.stop_token_ids: list[int] = []
        self._restarts = 0

    def serve(self, policy: ServedPolicy, policy_id: str) -> None:
        """Have every server that answers hold this policy. Raises EngineUnavailable when none does, WrongWeights."""
        if self._fingerprint is None or self._fingerprint.policy_id != policy_id:
            self._fingerprint = Fingerprint.of(policy, policy_id)
        self._policy, self.stop_token_ids = policy, _stop_token_ids(policy)
        self._published = self.publisher.publish(policy, policy_id)
        self._restarts = 0
        self._prepare()
        self.publisher.keep_only(self._published)

    def generate(
        self, requests: list[Request], sampling: Sampling, progress: Progress | None = None
    ) -> list[Completion]:
        policy, fingerprint = self._policy, self._fingerprint
        assert policy is not None and fingerprint is not None, "serve comes first"
        made = {
            index: reason for index, request in enumerate(requests) if (reason := refusal(policy, request, sampling))
        }
        waiting = deque((index, request) for index, request in enumerate(requests) if index not in made)
        job = Job(waiting, sampling, self.stop_token_ids, fingerprint.policy_id)

        def report(done: int) -> None:
            if progress is not None:
                progress(len(made) + done, len(requests), "vllm")

        while job.waiting:
            ready = {server.at: server.model for server in self.servers if server.holds == fingerprint.policy_id}
            if ready:
                wait_for(complete(job, ready, self.note, report))
                self._drop(job)
                self._take_back(job, requests)
            else:
                self._restart(job)
        made |= job.made
        return [made[index] for index in range(len(requests))]

    def rest(self) -> None:
        """Training begins: free what it needs. The next `serve` undoes it."""
        for server in self.servers:
            try:
                server.rest()
            except ServerGone as gone:
                self.note(f"vllm: {gone}")
                server.lost()

    def close(self) -> None:
        for server in self.servers:
            server.lost()
        self.publisher.clear()

    @property
    def provenance(self) -> dict[str, Any]:
        """Of rollouts that it makes, beside settings and policy."""
        versions = sorted({server.version for server in self.servers if server.version})
        return {"engine": "vllm", "vllm": versions, "servers": len(self.servers)}

    def _prepare(self) -> None:
        policy, fingerprint = self._policy, self._fingerprint
        assert policy is not None and fingerprint is not None
        reasons = []
        for server in self.servers:
            is_update = server.holds != fingerprint.policy_id
            try:
                gap = server.prepare(policy, self._published, fingerprint)
            except ServerGone as gone:
                server.lost()
                reasons.append(str(gone))
                continue
            if is_update:
                self.note(f"{server.name} holds policy {fingerprint.policy_id[:12]}, within {gap:.2g} nats")
        if len(reasons) == len(self.servers):
            raise EngineUnavailable(f"a vLLM server must answer: {'; '.join(reasons)}")
        for reason in reasons:
            self.note(f"vllm: goes on without {reason}")

    def _drop(self, job: Job) -> None:
        for server in self.servers:
            reason = job.gone.pop(server.connection, None) if server.connection is not None else None
            if reason is not None:
                self.note(f"vllm: {reason}")
                server.lost()

    def _take_back(self, job: Job, requests: list[Request]) -> None:
        """Rows of a server that others use too, unless it still holds the policy afterwards."""
        fingerprint = self._fingerprint
        assert fingerprint is not None
        for server in self.servers:
            rows = [index for index, maker in job.maker.items() if maker is server.connection]
            if server.managed is not None or not rows:
                continue
            try:
                server.prove(fingerprint)
            except (ServerGone, WrongWeights) as error:
                self.note(f"vllm: {len(rows)} rows are made again: {error}")
                server.lost()
                for index in rows:
                    del job.made[index], job.maker[index]
                    job.waiting.append((index, requests[index]))

    def _restart(self, job: Job) -> None:
        """Raises EngineUnavailable when that was done before in this stage."""
        if self._restarts >= RESTARTS:
            raise EngineUnavailable(
                f"a vLLM server must answer: {len(job.waiting)} rows are left, and the servers gave no answer again "
                f"after they were started or tried anew. {self._log()}"
            )
        self._restarts += 1
        self.note("vllm: no server answers; trying them anew")
        self._prepare()

    def _log(self) -> str:
        logs = [str(server.managed.log) for server in self.servers if server.managed is not None]
        return f"The server's log: {logs[0]}" if logs else ""


def refusal(policy: ServedPolicy, request: Request, sampling: Sampling) -> Completion | None:
    """What becomes of a row that cannot be run, as in the engine transformers."""
    prompt = request.prompt_token_ids
    if not prompt:
        return Completion.failed("empty_prompt")
    if min(prompt) < 0 or max(prompt) >= policy.module.get_input_embeddings().weight.shape[0]:
        return Completion.failed("token_out_of_vocabulary")
    context = policy.module.config.get_text_config().to_dict().get("max_position_embeddings")
    if context is not None and len(prompt) + sampling.max_completion_tokens > context:
        return Completion.failed("context_exceeded")
    return None


def _stop_token_ids(policy: ServedPolicy) -> list[int]:
    from rft_core.engines.transformers import find_stop_token_ids

    return sorted(find_stop_token_ids(policy))
