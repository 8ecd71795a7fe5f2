"""Full state of training in a folder, and models for others to use. Safetensors and JSON only.

config.json, generation_config.json, model.safetensors, tokenizer files     weights in float32, Hugging Face layout
adapter/                                                                    instead of the weights, under LoRA
optimizer.safetensors                                                       AdamW's moments
critic/weights.safetensors, optimizer.safetensors                           of a critic, in float32; a head alone where
                                                                            it shares the policy's trunk
ema.safetensors                                                             moving averages of the trained weights
state.json                                                                  counters
"""

from __future__ import annotations

import hashlib
import json
from copy import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rft_core.critic import Critic
from rft_core.errors import ModelUnreadable
from rft_core.model_reading import no_progress_bars
from rft_core.optimizer import Optimizer, Weights
from rft_core.policy import ATTENTION, Policy
from rft_core.preference_step import RunningShift, ScoreStatistics
from rft_core.train_state import TrainState

FORMAT = 2  # of state.json and the names in optimizer.safetensors
STATISTICS = "reward_statistics.json"
EMA = "ema.safetensors"  # where a moving average is kept
ADAPTER = "adapter"
CRITIC = "critic"
CRITIC_WEIGHTS = "weights.safetensors"
MOMENTS_FILE = "optimizer.safetensors"
ADAPTER_WEIGHTS = "adapter_model.safetensors"  # the name that peft reads
PEFT_PREFIX = "base_model.model."  # before the module's names in that file
PEFT_TASKS = {"sequence_labels": "SEQ_CLS", "token_labels": "TOKEN_CLS"}  # by a scoring policy's head


def save_checkpoint(state: TrainState, folder: Path) -> None:
    """Write everything that `load_checkpoint` needs to go on bit for bit. Not atomic: rename the folder afterwards."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    policy = state.policy
    if policy.adapter is None:
        _save_model(policy.module, _master_weights(policy), folder)
    else:
        _save_adapter(policy, folder / ADAPTER)
    policy.tokenizer.save_pretrained(folder)
    _save_statistics(state, folder)
    save_file(_stored(state.optimizer.moments()), folder / MOMENTS_FILE)
    if state.critic is not None:
        _save_critic(state.critic, folder / CRITIC)
    if state.ema is not None:
        save_file(_stored(dict(zip(policy.names, state.ema, strict=True))), folder / EMA)
    counters = {
        "format": FORMAT,
        "optimizer_step": state.optimizer_step,
        "skipped_in_a_row": state.skipped_in_a_row,
        "optimizer_num_steps": state.optimizer.num_steps,
        "kl_coefficient": state.kl_coefficient,
        "entropy_coefficient": state.entropy_coefficient,
        "lora": policy.adapter is not None,
        "critic_num_steps": None if state.critic is None else state.critic.optimizer.num_steps,
        "shift": [state.shift.mean, state.shift.count],
        "scores": [state.scores.mean, state.scores.square, state.scores.count],
    }
    (folder / "state.json").write_text(json.dumps(counters, indent=1, sort_keys=True) + "\n")


def load_checkpoint(state: TrainState, folder: Path) -> None:
    """Put a saved state into `state`, whose policy was loaded from the same model with the same settings.

    A critic is loaded where both have one. One that the checkpoint lacks stays as it was started: no update before it
    trained any. Raises ModelUnreadable when a file is missing or damaged, or the checkpoint is of another model.
    """
    folder = Path(folder)
    policy = state.policy
    try:
        counters = json.loads((folder / "state.json").read_text())
        if counters["format"] != FORMAT or counters["lora"] != (policy.adapter is not None):
            raise ModelUnreadable(
                f"{folder} must be a checkpoint of format {FORMAT}, lora {policy.adapter is not None}, "
                f"found format {counters['format']}, lora {counters['lora']}"
            )
        weights = _read_full(policy, folder) if policy.adapter is None else _read_adapter(policy, folder / ADAPTER)
        _restore(policy, weights, state.optimizer, folder / MOMENTS_FILE, counters["optimizer_num_steps"])
        state.ema = _read_ema(policy, folder)
        critic_num_steps = counters.get("critic_num_steps")  # absent before there were critics
        if state.critic is not None and critic_num_steps is not None:
            critic = state.critic
            weights = load_file(folder / CRITIC / CRITIC_WEIGHTS)
            _restore(critic.model, weights, critic.optimizer, folder / CRITIC / MOMENTS_FILE, critic_num_steps)
        state.optimizer_step = counters["optimizer_step"]
        state.skipped_in_a_row = counters["skipped_in_a_row"]
        state.shift = RunningShift(*counters["shift"])
        state.scores = ScoreStatistics(*counters["scores"])
        state.kl_coefficient = counters.get("kl_coefficient")  # absent before it could adapt
        state.entropy_coefficient = counters.get("entropy_coefficient")
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelUnreadable(f"{folder} must hold a checkpoint of this model; reading it failed: {error}") from error


def _save_critic(critic: Critic, folder: Path) -> None:
    folder.mkdir()
    named = dict(zip(critic.model.names, critic.model.master, strict=True))
    save_file(_stored(named), folder / CRITIC_WEIGHTS)
    save_file(_stored(critic.optimizer.moments()), folder / MOMENTS_FILE)


def _restore(trained: Weights, weights: dict[str, Tensor], optimizer: Optimizer, moments: Path, num_steps: int) -> None:
    """Raises KeyError for a weight or a moment that is missing, RuntimeError for another shape."""
    with torch.no_grad():
        for name, master in zip(trained.names, trained.master, strict=True):
            master.copy_(weights[name])
    trained.write_compute()
    optimizer.restore(load_file(moments), num_steps)


def _read_ema(policy: Policy, folder: Path) -> list[Tensor] | None:
    if not (folder / EMA).is_file():
        return None
    stored = load_file(folder / EMA)
    return [stored[name].to(master.device) for name, master in zip(policy.names, policy.master, strict=True)]


def weights_digest(state: TrainState) -> str:
    """SHA-256 over names and float32 bytes of the policy's trainable weights, sorted by name: what an export holds.
    Neither moments nor a critic are in it; the checkpoint's manifest has a digest of each of their files."""
    digest = hashlib.sha256()
    for name, master in sorted(zip(state.policy.names, state.policy.master, strict=True)):
        digest.update(f"{name}\0{list(master.shape)}\n".encode())
        digest.update(master.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def export_model(state: TrainState, folder: Path, merged: bool) -> None:
    """A folder for others: all weights in float32, or, under LoRA and not `merged`, the adapter in peft's layout. A
    critic stays behind: who uses the policy has no use for it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    policy = state.policy
    if policy.adapter is None:
        _save_model(policy.module, _master_weights(policy), folder)
    elif merged:
        _save_merged(policy, folder)
    else:
        _save_adapter(policy, folder)
    policy.tokenizer.save_pretrained(folder)
    _save_statistics(state, folder)


def publish_model(policy: Policy, folder: Path, merged: bool) -> None:
    """What a rollout engine loads: all weights in the type they compute in, or, under LoRA and not `merged`, the
    adapter in peft's layout. Not atomic."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if policy.adapter is not None and not merged:
        _save_adapter(policy, folder)
        return
    if policy.adapter is None:
        weights = {name: tensor.detach() for name, tensor in policy.module.state_dict().items()}
        _save_model(policy.module, weights, folder, str(policy.dtype).removeprefix("torch."))
    else:
        _save_merged(policy, folder)
    policy.tokenizer.save_pretrained(folder)


def _save_statistics(state: TrainState, folder: Path) -> None:
    """Mean and standard deviation of a reward model's scores, for `normalise: stored` of the reward `reward_model`."""
    scores = state.scores
    if scores.count:
        content = {"mean": scores.mean, "std": scores.std, "count": scores.count}
        (folder / STATISTICS).write_text(json.dumps(content) + "\n")


def _master_weights(policy: Policy) -> dict[str, Tensor]:
    """The module's state under its own names, in float32; tied names share a tensor as they do in the module."""
    by_storage = {weight.data_ptr(): master for weight, master in zip(policy.compute, policy.master, strict=True)}
    named = policy.module.state_dict()
    return {name: by_storage.get(tensor.data_ptr(), tensor).detach() for name, tensor in named.items()}


def _save_model(module: Any, weights: dict[str, Tensor], folder: Path, dtype: str = "float32") -> None:
    """Hugging Face layout. transformers writes the module's own type into config.json: `dtype` is what is stored."""
    kept = module.config.dtype
    with no_progress_bars():
        module.save_pretrained(folder, state_dict=weights)
    module.config.dtype = kept
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"dtype": dtype}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _save_adapter(policy: Policy, folder: Path) -> None:
    from peft import get_peft_model_state_dict

    folder.mkdir(parents=True, exist_ok=True)
    weights = get_peft_model_state_dict(policy.adapter, save_embedding_layers=False)
    weights |= {f"{PEFT_PREFIX}{name}": master for name, master in _head(policy).items()}
    save_file(_stored(weights), folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config = copy(policy.adapter.peft_config["default"])
    config.inference_mode = True  # what peft itself stores
    if policy.new_head is not None:
        config.task_type, config.modules_to_save = PEFT_TASKS[policy.head], [policy.new_head]
    config.save_pretrained(folder)


def _head(policy: Policy) -> dict[str, Tensor]:
    """The masters of a new head, which trains beside the adapter; by the module's names."""
    named = zip(policy.names, policy.master, strict=True)
    return {name: master for name, master in named if policy.new_head and name.startswith(f"{policy.new_head}.")}


def _save_merged(policy: Policy, folder: Path) -> None:
    """W + (alpha / rank) B A in float32, on weights read anew: merging in place would round a bfloat16 base."""
    module = policy.read(policy.folder, torch.float32, ATTENTION["cpu"], policy.tokenizer)
    layers = dict(policy.module.named_modules())
    with torch.no_grad():
        for name, layer in module.named_modules():
            adapted = layers[name]
            if hasattr(adapted, "get_delta_weight"):
                layer.weight += adapted.get_delta_weight("default").float().cpu()
        for name, master in _head(policy).items():
            module.get_parameter(name).copy_(master)
    _save_model(module, module.state_dict(), folder)


def _read_full(policy: Policy, folder: Path) -> dict[str, Tensor]:
    module = policy.read(folder, torch.float32, ATTENTION["cpu"], policy.tokenizer)
    return dict(module.named_parameters())


def _read_adapter(policy: Policy, folder: Path) -> dict[str, Tensor]:
    """By the module's names: peft's layout puts a prefix before them and leaves the adapter's name out."""
    stored = load_file(folder / ADAPTER_WEIGHTS)
    shown = {name: f"{PEFT_PREFIX}{name}".replace(".default.", ".") for name in policy.names}
    return {name: stored[shown[name]] for name in policy.names}


def _stored(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
