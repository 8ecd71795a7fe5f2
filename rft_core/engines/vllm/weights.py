"""A policy's weights on their way to servers, and how a server is held to have them.

Weights go through a folder that the servers see. Whether they arrived is not asked but measured: a server's logprobs of
fixed tokens are compared with the policy's own.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rft_core.batching import TrainRow

HEAD_FILE = "head.safetensors"
PROBE_TOKENS = 32
# Mean difference of a server's logprobs from the policy's, in nats. Other weights differ by far more, or (an update
# that was not taken over) by so little that it is told by the server's logprobs staying what they were, to the bit.
TOLERANCE = {"float32": 0.02, "bfloat16": 0.3}
# A policy whose own logprobs moved less on average may leave a server's unmoved: in bfloat16 a tiny update is rounded
# away in one of the two and not in the other.
STALE_CHANGE = {torch.float32: 1e-5, torch.bfloat16: 3e-3}
SAMPLED_TEMPERATURE = 0.5
SAMPLED_TOKENS = 4


class ServedPolicy(Protocol):
    """What the engine needs of a policy."""

    module: Any
    tokenizer: Any
    adapter: Any
    folder: Path
    device: torch.device
    dtype: torch.dtype

    def token_logprobs(self, batch: Any, temperature: float) -> tuple[torch.Tensor, torch.Tensor | None]: ...

    def micro_batches(self, rows: list[TrainRow], token_budget: int) -> list[Any]: ...


@dataclass(frozen=True)
class Fingerprint:
    """What a policy says of fixed tokens: the logprobs of all but the first, at temperature 1."""

    policy_id: str
    token_ids: list[int]
    logprobs: np.ndarray = field(repr=False)
    stale_change: float = 0.0

    @classmethod
    def of(cls, policy: ServedPolicy, policy_id: str) -> Fingerprint:
        vocabulary = policy.module.get_input_embeddings().weight.shape[0]
        token_ids = ((np.arange(PROBE_TOKENS) * 7919 + 13) % vocabulary).tolist()
        logprobs = logprobs_of(policy, token_ids[:1], token_ids[1:], 1.0)
        return cls(policy_id, token_ids, logprobs, STALE_CHANGE[policy.dtype])

    def gap(self, told: np.ndarray) -> float:
        """Mean absolute difference, in nats; infinite where a value is missing."""
        difference = np.abs(told - self.logprobs)
        return float(difference.mean()) if np.isfinite(difference).all() else float("inf")

    def moved_from(self, before: Fingerprint) -> bool:
        return bool(np.abs(self.logprobs - before.logprobs).mean() > self.stale_change)


def logprobs_of(
    policy: ServedPolicy, prompt: list[int], completion: list[int], temperature: float
) -> np.ndarray:  # float64[tokens of the completion]
    ids = np.array(completion, np.int64)
    row = TrainRow("probe", "probe", np.array(prompt, np.int64), ids, np.ones(len(ids), bool))
    with torch.no_grad():
        (batch,) = policy.micro_batches([row], 2 * (len(prompt) + len(ids)))
        logprobs_T, _ = policy.token_logprobs(batch, temperature)
    return logprobs_T.double().cpu().numpy()


class Publisher:
    """Folders of weights below `folder`, which is this run's alone: the policy's that is served, and no other's.

    With `untied` the head's weights are written on their own where they are the embedding's.
    """

    def __init__(self, folder: Path, *, merged: bool, untied: bool) -> None:
        self.folder = folder
        self.merged = merged
        self.untied = untied
        shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed

    def publish(self, policy: ServedPolicy, policy_id: str) -> Path:
        """A whole folder or none: written under another name first."""
        from rft_core.checkpoint import publish_model

        target = self.folder / policy_id
        if not target.is_dir():
            temporary = self.folder / f".{policy_id}.tmp"
            shutil.rmtree(temporary, ignore_errors=True)
            publish_model(policy, temporary, self.merged)  # type: ignore[arg-type]
            if self.untied:
                _untie(policy.module, temporary)
            temporary.rename(target)
        return target

    def keep_only(self, published: Path) -> None:
        for folder in self.folder.iterdir():
            if folder != published:
                shutil.rmtree(folder, ignore_errors=True)

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _untie(module: Any, folder: Path) -> None:
    """vLLM 0.32 on a CPU packs the head's weights for its kernels, and after a reload in place packs those of a tied
    head no more: it would go on with the old ones (vllm/model_executor/model_loader/reload, limitation 2)."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    parts = [part for part in (config, config.get("text_config") or {}) if part.get("tie_word_embeddings")]
    inputs, outputs = module.get_input_embeddings(), module.get_output_embeddings()
    if not parts or outputs is None or outputs.weight is not inputs.weight:
        return
    names = {id(layer): f"{name}.weight" for name, layer in module.named_modules() if layer in (inputs, outputs)}
    stored, head = names[id(inputs)], names[id(outputs)]
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text()) if index_path.is_file() else None
    with safe_open(folder / (index["weight_map"][stored] if index else "model.safetensors"), "pt") as file:
        save_file({head: file.get_tensor(stored)}, folder / HEAD_FILE, metadata={"format": "pt"})
    if index:
        index["weight_map"][head] = HEAD_FILE
        index_path.write_text(json.dumps(index, indent=2))
    for part in parts:
        part["tie_word_embeddings"] = False
    path.write_text(json.dumps(config, indent=2))
