"""A policy: a model folder's weights, ready to compute token logprobs and to be trained.

`module` computes in the compute type; `master` holds the trainable weights in float32, which are the very same tensors
when the compute type is float32. Gradients always add up in float32, in `master[i].grad`.

Shapes: T completion tokens of a micro-batch, flat; D hidden size; V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.utils.checkpoint import checkpoint

from rft_core.attending import attending
from rft_core.batching import SHARED_SEQUENCE_TOKENS, MicroBatch, TrainRow, micro_batches
from rft_core.config import ModelSettings
from rft_core.data.prompts import load_tokenizer
from rft_core.errors import SettingsError
from rft_core.hardware import resolve_device, resolve_dtype
from rft_core.kernels.linear_logprob import PLAIN, HeadForm, linear_logprob
from rft_core.kernels.token_logprob import token_logprob
from rft_core.layers import Layers
from rft_core.model_reading import read_module
from rft_core.packing import packed_micro_batches, warm_up_rows
from rft_core.seeds import derive

# On a CPU the backward pass of torch's fused attention is several times slower than matrix products and a softmax.
ATTENTION = {"cpu": "eager", "cuda": "sdpa"}
# Elsewhere fused attention takes a mask of shared prompts and stores no scores.
PACKED_DEVICES = ("cpu",)
# More logits than this (128 MiB in bfloat16) are computed once more in the backward pass.
MAX_LOGITS = 1 << 26
# What two layouts of the same tokens may differ by at the probe, in nats: rounding, or another function altogether.
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}


class Scorer(Protocol):
    """What computes logprobs of given tokens: a policy, or one seen without its adapter."""

    def token_logprobs(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor | None]: ...


@dataclass
class Policy:
    """`notes` say in sentences what this model family does not allow. Built by `load`."""

    module: Any  # a Hugging Face causal LM in eval mode; LoRA layers are put into it in place
    tokenizer: Any
    folder: Path
    device: torch.device
    dtype: torch.dtype
    names: list[str]  # of the trainable parameters, in the module's order; tied weights once
    compute: list[nn.Parameter]
    master: list[Tensor]
    adapter: Any = None  # the PeftModel around `module`
    has_plain_head: bool = True  # logits are hidden states x head in its `head_form`
    head_form: HeadForm = PLAIN
    shared_prefix: bool = True
    is_packed: bool = True
    notes: list[str] = field(default_factory=list)
    layers: Layers = field(init=False)
    _can_compile: bool | None = field(init=False, default=None)  # None: not tried
    head: ClassVar[str] = "causal"  # a key of model_reading.HEADS
    new_head: ClassVar[str | None] = None  # name of a head that the folder's model may lack; its weights always train

    def __post_init__(self) -> None:
        self.layers = Layers.of(self.module)

    @classmethod
    def load(cls, settings: ModelSettings, folder: Path, seed: int, *, trainable: bool = True) -> Self:
        """The policy of a model folder. `seed` decides the first weights of LoRA adapters and nothing else.

        Raises ModelUnreadable when the folder cannot be read, SettingsError when LoRA targets name no module.
        """
        folder = Path(folder)
        device = torch.device(resolve_device(settings.device))
        dtype = getattr(torch, resolve_dtype(settings.dtype, device.type))
        has_adapter = trainable and settings.lora_rank > 0
        tokenizer = load_tokenizer(folder, settings.chat_template)
        # All weights train: read in float32, which become the masters. Else straight in the type they compute in.
        read_dtype = torch.float32 if trainable and not has_adapter else dtype
        module = cls.read(folder, read_dtype, ATTENTION[device.type], tokenizer).to(device).eval()
        adapter = _add_adapter(module, settings, seed, cls.new_head) if has_adapter else None
        if not trainable:
            module.requires_grad_(False)
        named = [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]
        names, compute = [name for name, _ in named], [weight for _, weight in named]
        policy = cls(module, tokenizer, folder, device, read_dtype, names, compute, [], adapter)
        policy._probe(settings.shared_prefix)
        policy._split_masters(dtype)
        return policy

    @classmethod
    def read(cls, folder: Path, dtype: torch.dtype, attention: str, tokenizer: Any) -> Any:
        """The module of a folder, with the head that this kind of policy has."""
        return read_module(folder, dtype, attention)

    def token_logprobs(
        self, batch: MicroBatch, temperature: float, *, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(logprob_T, entropy_T) of the completion tokens in float32, at `temperature`, row after row."""
        if self.has_plain_head:
            return self.logprobs_and_hidden(batch, temperature, entropy_gradient=entropy_gradient)[:2]
        logits_TV, _ = self.features(batch)
        target_T = batch.target_T.to(self.device)
        return token_logprob(logits_TV, target_T, temperature, entropy_gradient=entropy_gradient)

    def logprobs_and_hidden(
        self, batch: MicroBatch, temperature: float, *, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(logprob_T, entropy_T, hidden_TD) of one pass, for a model whose logits are hidden states x head."""
        hidden_TD = self.hidden_states(batch)
        target_T = batch.target_T.to(self.device)
        return *self._head_logprobs(hidden_TD, target_T, temperature, entropy_gradient), hidden_TD

    def features(self, batch: MicroBatch) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """What predicts each completion token, [T, D], and the head that makes logits [P, V] of any P rows of it. Where
        logits are more than hidden states x head they are the features."""
        if self.has_plain_head:
            head, form = self.module.get_output_embeddings(), self.head_form
            return self.hidden_states(batch), lambda hidden: form.applied_to(head(hidden))
        with attending(self.module, batch, self.dtype, self.device) as inputs, self.layers.running():
            logits_SLV = self.module(**inputs).logits
        return logits_SLV.flatten(0, 1).index_select(0, batch.predicting_T.to(self.device)), lambda logits: logits

    def in_pieces(self, piece: Callable[..., tuple[Tensor, ...]], *aligned: Tensor) -> tuple[Tensor, ...]:
        """What `piece` makes of rows of the aligned tensors [T, ...], by few enough rows that their logits fit."""
        num_tokens = len(aligned[0])
        size = max(1, MAX_LOGITS // self.vocabulary) if self.has_plain_head else num_tokens
        if num_tokens <= size:
            return piece(*aligned)
        made = [
            checkpoint(piece, *parts, use_reentrant=False, preserve_rng_state=False)
            for parts in zip(*(tensor.split(size) for tensor in aligned), strict=True)
        ]
        return tuple(torch.cat(values) for values in zip(*made, strict=True))

    @property
    def vocabulary(self) -> int:
        """How many tokens its logits tell apart: at least those of the tokenizer."""
        head = self.module.get_output_embeddings()
        weights = self.module.get_input_embeddings() if head is None else head
        return int(weights.weight.shape[0])

    @property
    def window(self) -> int | None:
        """The longest row in which every token sees all before it; None where no layer has a window."""
        return _attention_window(self.module.config)

    @property
    def max_shared_tokens(self) -> int:
        """The longest padded sequence that completions may share; 0 where they may share none."""
        limit = SHARED_SEQUENCE_TOKENS[self.device.type]
        return min(limit, self.window or limit) if self.shared_prefix else 0

    def micro_batches(self, rows: list[TrainRow], token_budget: int) -> list[MicroBatch]:
        """Rows -> micro-batches in the layout that this model allows."""
        if not self.is_packed:
            return micro_batches(rows, token_budget, self.shared_prefix, self.max_shared_tokens)
        return packed_micro_batches(rows, token_budget, self.shared_prefix, self.window)

    def hidden_states(self, batch: MicroBatch) -> Tensor:
        """[T, D], where each of the batch's tokens is predicted."""
        # Compiled code differs with and without a gradient. Scores are by that which trains: ratios are 1 at first.
        needs_gradient = torch.is_grad_enabled() or self.layers.is_compiled
        with (
            torch.set_grad_enabled(needs_gradient),
            attending(self.module, batch, self.dtype, self.device) as inputs,
            self.layers.running(),
        ):
            hidden_SLD = self.module.base_model(**inputs).last_hidden_state
        if not torch.is_grad_enabled():
            hidden_SLD = hidden_SLD.detach()
        return hidden_SLD.flatten(0, 1).index_select(0, batch.predicting_T.to(self.device))

    @contextmanager
    def training(self, is_compiled: bool, is_checkpointed: bool) -> Iterator[None]:
        """How the layers run in an update; everything else that the policy computes takes them as they are."""
        if is_compiled and self._can_compile is None:
            self._can_compile = self._compile()
        self.layers.is_compiled, self.layers.is_checkpointed = is_compiled and bool(self._can_compile), is_checkpointed
        try:
            yield
        finally:
            self.layers.is_compiled = self.layers.is_checkpointed = False

    def _compile(self) -> bool:
        """Compile the layers from a micro-batch that is always the same; False, with a note, where that cannot be."""
        rows = warm_up_rows(self.module.get_input_embeddings().weight.shape[0])
        # Longer than some windows: what is computed does not matter, how it is laid out does.
        batches = packed_micro_batches(rows, 100_000, True) if self.is_packed else self.micro_batches(rows, 100_000)

        def warm_up() -> None:
            self.hidden_states(batches[0]).float().sum().backward()

        try:
            self.layers.compile(warm_up)
        except TorchDynamoException as error:
            self.notes.append(f"layers of this model cannot be compiled, they run as they are: {type(error).__name__}")
            return False
        finally:
            for weight in (*self.master, *self.compute):
                weight.grad = None
        return True

    def write_compute(self) -> None:
        """Masters -> compute weights, after an optimizer step or a load."""
        pairs = [pair for pair in zip(self.compute, self.master, strict=True) if pair[0] is not pair[1]]
        if pairs:
            with torch.no_grad():
                torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        with self.adapter.disable_adapter():
            yield

    def _head_logprobs(
        self, hidden_TD: Tensor, target_T: Tensor, temperature: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        head, form = self.module.get_output_embeddings(), self.head_form
        if type(head) is nn.Linear:  # an adapter around it computes more than its weight does
            return linear_logprob(
                hidden_TD,
                head.weight,
                target_T,
                temperature,
                bias_V=head.bias,
                form=form,
                entropy_gradient=entropy_gradient,
                kept_logits=MAX_LOGITS,
            )

        def piece(hidden: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
            logits_TV = form.applied_to(head(hidden))
            return token_logprob(logits_TV, targets, temperature, entropy_gradient=entropy_gradient)

        logprobs_T, entropy_T = self.in_pieces(piece, hidden_TD, target_T)
        return logprobs_T, entropy_T

    def _split_masters(self, dtype: torch.dtype) -> None:
        """Trainable weights become float32 masters, the module's turn into `dtype`; gradients add up in the masters."""
        self.dtype = dtype
        kept = tuple(getattr(self.module, "_keep_in_fp32_modules", None) or ())
        for name, weight in zip(self.names, self.compute, strict=True):
            stays = dtype == torch.float32 or self.adapter is not None or any(part in name for part in kept)
            if stays and weight.dtype == torch.float32:
                self.master.append(weight)
                continue
            master = weight.detach().float()
            weight.data = master.to(dtype)
            weight.register_post_accumulate_grad_hook(_adds_to(master))
            self.master.append(master)

    def _probe(self, wants_shared: bool) -> None:
        """Find out on a few tokens whether hidden states x head are this model's logits, and whether completions may
        share a prompt. Families that scale or cap logits, or whose layers ignore a mask, differ by far."""
        rows = self._probe_rows()
        (plain,) = micro_batches(rows, 1000, False)
        self.has_plain_head = False
        self.head_form = _head_form(self.module.config)
        with torch.no_grad():
            logprobs_T, _ = self.token_logprobs(plain, 1.0)
            expected = dict(zip(plain.row_indices, logprobs_T.split(plain.lengths), strict=True))
            self.has_plain_head = self.module.get_output_embeddings() is not None
            self.has_plain_head = self.has_plain_head and self._agrees(plain, expected)
            self._choose_layout(rows, wants_shared, expected)
        if not self.has_plain_head:
            self.notes.append("logits of this model are more than hidden states x head: computed at all positions")

    def _choose_layout(self, rows: list[TrainRow], wants_shared: bool, expected: dict[int, Tensor]) -> None:
        """Packed where rows may be packed, else padded, with shared prompts where those agree."""
        self.is_packed = self.device.type in PACKED_DEVICES and self._agrees(
            packed_micro_batches(rows, 1000, True)[0], expected
        )
        self.shared_prefix = wants_shared and (
            self.is_packed or self._agrees(micro_batches(rows, 1000, True)[0], expected)
        )
        if self.device.type in PACKED_DEVICES and not self.is_packed:
            self.notes.append("attention of this model cannot be computed on packed rows: they are padded")
        if wants_shared and not self.shared_prefix:
            self.notes.append("this model does not let completions share a prompt: each row is computed on its own")

    def _probe_rows(self) -> list[TrainRow]:
        vocabulary = self.module.get_input_embeddings().weight.shape[0]
        ids = (torch.arange(16) * 7919 + 13).remainder(vocabulary).numpy()
        prompt, completions = ids[:6], (ids[6:9], ids[9:14], ids[14:16])
        return [TrainRow(str(i), "", prompt, ids, ids > 0) for i, ids in enumerate(completions)]

    def _agrees(self, batch: MicroBatch, expected: dict[int, Tensor]) -> bool:
        try:
            found = self.token_logprobs(batch, 1.0)[0].split(batch.lengths)
        except torch.OutOfMemoryError:  # says nothing of the model
            raise
        except (TypeError, ValueError, RuntimeError, AttributeError):  # a family that takes no such mask or positions
            return False
        gaps = [(found[i] - expected[row]).abs().max() for i, row in enumerate(batch.row_indices)]
        return bool(max(gaps) <= PROBE_TOLERANCE[self.dtype])


@dataclass(frozen=True)
class AdapterOff:
    """The model that an adapter was put on, seen through the policy that carries it."""

    policy: Policy

    def token_logprobs(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor | None]:
        with self.policy.without_adapter():
            return self.policy.token_logprobs(batch, temperature)


def load_reference(settings: ModelSettings, folder: Path, resident: Policy | None) -> Scorer:
    """The frozen policy of a model folder: the resident one without its adapter when it stands on that folder."""
    if resident is not None and resident.adapter is not None and resident.folder == Path(folder):
        return AdapterOff(resident)
    return Policy.load(settings, folder, seed=0, trainable=False)


def _add_adapter(module: Any, settings: ModelSettings, seed: int, new_head: str | None) -> Any:
    """LoRA layers in float32, in place. B is 0, so the policy starts as the model; A comes from seed and name.

    A new head is no layer to adapt: all its weights are trained, as peft's modules_to_save are.
    """
    from peft import LoraConfig, get_peft_model

    targets = settings.lora_targets
    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        exclude_modules=[new_head] if new_head else None,
        task_type=None if new_head else "CAUSAL_LM",
    )
    try:
        # peft draws first weights from the global stream: they are replaced below, and the stream is put back.
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            # peft 0.21 asks transformers 5 for a property by its old name.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
            adapter = get_peft_model(module, config)
    except ValueError as error:
        raise SettingsError(f"model.lora_targets must name linear modules of the model: {error}") from error
    for name, weight in module.named_parameters():
        if ".lora_A." in name:
            generator = torch.Generator().manual_seed(derive(seed, "lora", name))
            first = torch.empty(weight.shape)
            nn.init.kaiming_uniform_(first, a=5**0.5, generator=generator)
            weight.data.copy_(first)
    if new_head:
        getattr(module, new_head).requires_grad_(True)
    return adapter.eval()


def _adds_to(master: Tensor) -> Any:
    """A hook that moves a compute weight's gradient, once complete, into its master's float32 gradient."""

    def move(weight: Tensor) -> None:
        if master.grad is None:
            master.grad = weight.grad.float()
        else:
            master.grad += weight.grad
        weight.grad = None

    return move


def _head_form(config: Any) -> HeadForm:
    """What families do to logits, by the names they have for it; the probe finds out whether that is all."""
    config = config.get_text_config()
    return HeadForm(
        softcap=float(getattr(config, "final_logit_softcapping", None) or 0),
        scale=float(getattr(config, "logit_scale", None) or 1) / float(getattr(config, "logits_scaling", None) or 1),
    )


def _attention_window(config: Any) -> int | None:
    """The longest sequence in which every token sees all before it; None where no layer has a window."""
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return min((window for window in windows if window), default=None)
