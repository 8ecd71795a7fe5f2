"""Log-probability and entropy of chosen tokens straight from hidden states: logits are made in pieces and never kept.

Shapes: T tokens, D hidden size, V vocabulary, C a piece of it. With x = logits / temperature and p = softmax(x):

    logits  = cap(hidden weight^T + bias) scale       cap(z) = softcap tanh(z / softcap), or z where there is none
    logprob = x[target] - logsumexp(x)                d logprob / d x = onehot(target) - p
    entropy = logsumexp(x) - sum(p x)                 d entropy / d x = -p (log p + entropy)

Logits, their float32 form and their gradient outweigh a small model: 8,192 tokens of a vocabulary of 49,152 are 1.6 GB
each. Here both passes go over the vocabulary piece by piece, for all tokens at once; the gradient of a piece of the
weight is then one matrix product, whose sum over tokens is in float32 inside. Many tokens go in blocks, whose gradients
of the weight add up in float32.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rft_core.kernels.implementation import implementation

PIECE_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 26}  # 8 MiB in float32 stay near the caches of a CPU
LEAST_PIECE = 256  # of the vocabulary: narrower matrix products are slow
MAX_BLOCK = {"cpu": 1 << 13, "cuda": 1 << 15}  # tokens at once


@dataclass(frozen=True)
class HeadForm:
    """What a model does to hidden states x head to have its logits."""

    softcap: float = 0.0  # 0: none
    scale: float = 1.0

    def applied_to(self, logits_TV: Tensor) -> Tensor:
        if self.softcap:
            logits_TV = self.softcap * torch.tanh(logits_TV / self.softcap)
        return logits_TV if self.scale == 1 else logits_TV * self.scale


PLAIN = HeadForm()


def linear_logprob_reference(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    temperature: float = 1.0,
    *,
    bias_V: Tensor | None = None,
    form: HeadForm = PLAIN,
) -> tuple[Tensor, Tensor]:
    """(logprob_T, entropy_T) by torch's own operations: what `linear_logprob` must match."""
    logits_TV = form.applied_to(torch.nn.functional.linear(hidden_TD, weight_VD, bias_V).float())
    log_p_TV = torch.log_softmax(logits_TV / temperature, dim=-1)
    logprob_T = log_p_TV.gather(-1, targets_T[:, None]).squeeze(-1)
    return logprob_T, -(log_p_TV.exp() * log_p_TV).sum(-1)


def linear_logprob(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    temperature: float = 1.0,
    *,
    bias_V: Tensor | None = None,
    form: HeadForm = PLAIN,
    entropy_gradient: bool = False,
    kept_logits: int = 0,
) -> tuple[Tensor, Tensor]:
    """(logprob_T, entropy_T) in nats, float32. The entropy is differentiable only with `entropy_gradient`. Up to
    `kept_logits` of the logits, if not float32, are kept for the backward pass instead of computed again.

    Matrix products are in the type of hidden states and weights, their logits rounded to it; all else is in float32.
    A weight that is tied to the embedding gets its part of the gradient as from any other head.
    """
    fits = hidden_TD.ndim == 2 and weight_VD.ndim == 2 and hidden_TD.shape[1] == weight_VD.shape[1]
    if not fits or targets_T.shape != hidden_TD.shape[:1]:
        raise ValueError(
            f"hidden states [T, D], weight [V, D] and targets [T] must fit, got {tuple(hidden_TD.shape)}, "
            f"{tuple(weight_VD.shape)} and {tuple(targets_T.shape)}"
        )
    options = (float(temperature), form, entropy_gradient, kept_logits)
    return _LinearLogprob.apply(hidden_TD, weight_VD, bias_V, targets_T, *options)


@dataclass
class Running:
    """Over the pieces seen so far: top x, sums of exp(x - top) and of exp(x - top) (x - top), the target's x."""

    top_T: Tensor
    total_T: Tensor
    mean_T: Tensor
    chosen_T: Tensor

    @classmethod
    def start(cls, like: Tensor, num_tokens: int) -> "Running":
        total_T, mean_T, chosen_T = like.new_zeros((3, num_tokens), dtype=torch.float32)
        return cls(torch.full_like(total_T, -torch.inf), total_T, mean_T, chosen_T)


@dataclass
class Piece:
    """What the matrix product gave for tokens `rows` and tokens of the vocabulary from `start`; `x_TC` is float32 to
    work in. `factor` is scale / temperature. Targets outside the piece are below 0 or beyond it."""

    rows: slice
    start: int
    logits_TC: Tensor
    x_TC: Tensor
    bias_C: Tensor | None
    place_T: Tensor  # of each token's target in this piece
    softcap: float
    factor: float

    @property
    def columns(self) -> slice:
        return slice(self.start, self.start + self.logits_TC.shape[1])

    @property
    def is_here_T(self) -> Tensor:
        return (self.place_T >= 0) & (self.place_T < self.logits_TC.shape[1])


@dataclass
class Slopes:
    """What the backward pass knows of each token of a piece; entropy's is None where it has no gradient."""

    logsumexp_T: Tensor
    entropy_T: Tensor
    grad_logprob_T: Tensor
    grad_entropy_T: Tensor | None


class Pointwise(Protocol):
    """What is done to a piece beside matrix products. `differentiate` gives the gradient of the logits before bias, cap
    and scale, in the logits' type; it may take their place."""

    def accumulate(self, piece: Piece, running: Running) -> None: ...
    def differentiate(self, piece: Piece, slopes: Slopes) -> Tensor: ...


class TorchPointwise:
    def accumulate(self, piece: Piece, running: Running) -> None:
        rows, x_TC = piece.rows, _x_of(piece)
        is_here_T = piece.is_here_T
        at_target_T = x_TC.gather(-1, torch.where(is_here_T, piece.place_T, 0)[:, None]).squeeze(-1)
        running.chosen_T[rows] += torch.where(is_here_T, at_target_T, 0.0)
        before_T = running.top_T[rows]
        top_T = torch.maximum(before_T, x_TC.amax(-1))
        # A top that is raised by d turns exp(x - top) into fade of it, and (x - top) into (x - top) - d.
        fade_T, raised_T = torch.exp(before_T - top_T), torch.where(before_T > -torch.inf, top_T - before_T, 0.0)
        x_TC -= top_T[:, None]
        p_TC = torch.exp(x_TC)
        mean_T = fade_T * (running.mean_T[rows] - raised_T * running.total_T[rows])
        running.total_T[rows] = fade_T * running.total_T[rows] + p_TC.sum(-1)
        running.mean_T[rows] = mean_T + p_TC.mul_(x_TC).sum(-1)
        running.top_T[rows] = top_T

    def differentiate(self, piece: Piece, slopes: Slopes) -> Tensor:
        x_TC = _x_of(piece)
        slope: Tensor | float = piece.factor
        if piece.softcap:  # d cap(z) / d z = 1 - (cap(z) / softcap)^2
            slope = (1 - (x_TC / (piece.factor * piece.softcap)).square_()).mul_(piece.factor)
        x_TC -= slopes.logsumexp_T[:, None]
        scale_T1 = -slopes.grad_logprob_T[:, None]
        if slopes.grad_entropy_T is None:
            grad_TC = x_TC.exp_().mul_(scale_T1)
        else:
            weight_TC = (x_TC + slopes.entropy_T[:, None]).mul_(-slopes.grad_entropy_T[:, None]).add_(scale_T1)
            grad_TC = x_TC.exp_().mul_(weight_TC)
        is_here_T = piece.is_here_T
        added_T = torch.where(is_here_T, slopes.grad_logprob_T, 0.0)
        grad_TC.scatter_add_(-1, torch.where(is_here_T, piece.place_T, 0)[:, None], added_T[:, None])
        if not isinstance(slope, float) or slope != 1:
            grad_TC *= slope
        return grad_TC if grad_TC.dtype == piece.logits_TC.dtype else piece.logits_TC.copy_(grad_TC)


def _x_of(piece: Piece) -> Tensor:
    """Logits / temperature in float32, in the piece's own memory."""
    x_TC = piece.x_TC
    if x_TC is not piece.logits_TC:
        x_TC.copy_(piece.logits_TC)
    if piece.bias_C is not None:
        x_TC += piece.bias_C
    if piece.softcap:
        x_TC.div_(piece.softcap).tanh_().mul_(piece.softcap)
    if piece.factor != 1:
        x_TC *= piece.factor
    return x_TC


def _pointwise(device: torch.device) -> Pointwise:
    if implementation(device) == "torch":
        return TorchPointwise()
    from rft_core.kernels.linear_logprob_triton import TritonPointwise

    return TritonPointwise()


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        temperature: float,
        form: HeadForm,
        entropy_gradient: bool,
        kept_logits: int,
    ) -> tuple[Tensor, Tensor]:
        pointwise = _pointwise(hidden_TD.device)
        running = Running.start(hidden_TD, len(targets_T))
        room = 0 if hidden_TD.dtype == torch.float32 or not any(ctx.needs_input_grad) else kept_logits
        ctx.kept = []  # of the first pieces
        for piece in _pieces(hidden_TD, weight_VD, bias_V, targets_T, temperature, form):
            room -= piece.logits_TC.numel()
            if room >= 0:
                ctx.kept.append(piece.logits_TC.clone())
            pointwise.accumulate(piece, running)
        log_total_T = running.total_T.log()
        logsumexp_T = running.top_T + log_total_T
        entropy_T = log_total_T - running.mean_T / running.total_T
        ctx.save_for_backward(hidden_TD, weight_VD, bias_V, targets_T, logsumexp_T, entropy_T)
        ctx.temperature, ctx.form, ctx.entropy_gradient = temperature, form, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_T)
        return running.chosen_T - logsumexp_T, entropy_T

    @staticmethod
    def backward(ctx: Any, grad_logprob_T: Tensor, grad_entropy_T: Tensor) -> tuple[Any, ...]:
        hidden_TD, weight_VD, bias_V, targets_T, logsumexp_T, entropy_T = ctx.saved_tensors
        pointwise = _pointwise(hidden_TD.device)
        gradients = _Gradients.of(hidden_TD, weight_VD, bias_V, ctx.needs_input_grad)
        for piece in _pieces(hidden_TD, weight_VD, bias_V, targets_T, ctx.temperature, ctx.form, ctx.kept):
            rows = piece.rows
            of_entropy = grad_entropy_T[rows] if ctx.entropy_gradient else None
            slopes = Slopes(logsumexp_T[rows], entropy_T[rows], grad_logprob_T[rows], of_entropy)
            gradients.add(piece, pointwise.differentiate(piece, slopes))
        return *gradients.made(), None, None, None, None, None


def _pieces(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    temperature: float,
    form: HeadForm,
    kept: Sequence[Tensor] = (),
) -> Iterator[Piece]:
    """Blocks of tokens, and for each the vocabulary piece by piece. What a piece holds is overwritten by the next.
    `kept` are the logits of the first pieces."""
    kind = _kind(hidden_TD)
    num_tokens, vocabulary = len(hidden_TD), len(weight_VD)
    block = max(1, min(num_tokens, MAX_BLOCK[kind]))
    width = min(vocabulary, max(LEAST_PIECE, PIECE_ELEMENTS[kind] // block))
    room = hidden_TD.new_empty(block * width)
    room32 = room if hidden_TD.dtype == torch.float32 else room.new_empty(block * width, dtype=torch.float32)
    remembered = iter(kept)
    for first in range(0, num_tokens, block):
        hidden = hidden_TD[first : first + block]
        rows = slice(first, first + len(hidden))
        for start in range(0, vocabulary, width):
            columns = slice(start, min(start + width, vocabulary))
            shape = (len(hidden), columns.stop - start)
            logits_TC = room[: shape[0] * shape[1]].view(shape)
            known = next(remembered, None)
            if known is None:
                torch.mm(hidden, weight_VD[columns].t(), out=logits_TC)
            else:
                logits_TC.copy_(known)
            yield Piece(
                rows,
                start,
                logits_TC,
                logits_TC if room32 is room else room32[: shape[0] * shape[1]].view(shape),
                None if bias_V is None else bias_V[columns],
                targets_T[rows] - start,
                form.softcap,
                form.scale / temperature,
            )


def _kind(tensor: Tensor) -> str:
    return "cpu" if tensor.device.type == "cpu" else "cuda"


@dataclass
class _Gradients:
    """Of hidden states (in float32 while it adds up), weight and bias; each None where it is not wanted."""

    hidden_TD: Tensor
    weight_VD: Tensor
    grad_hidden_TD: Tensor | None
    grad_weight_VD: Tensor | None
    grad_bias_V: Tensor | None
    adds_blocks: bool

    @classmethod
    def of(cls, hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, wanted: tuple[bool, ...]) -> "_Gradients":
        # One block writes each piece of the weight's gradient once, so it needs no float32 to add up in.
        adds_blocks = len(hidden_TD) > MAX_BLOCK[_kind(hidden_TD)]
        weight_type = torch.float32 if adds_blocks else weight_VD.dtype
        return cls(
            hidden_TD,
            weight_VD,
            torch.zeros_like(hidden_TD, dtype=torch.float32) if wanted[0] else None,
            torch.zeros_like(weight_VD, dtype=weight_type) if wanted[1] else None,
            torch.zeros_like(bias_V, dtype=torch.float32) if bias_V is not None and wanted[2] else None,
            adds_blocks,
        )

    def add(self, piece: Piece, grad_TC: Tensor) -> None:
        rows, columns = piece.rows, piece.columns
        if self.grad_hidden_TD is not None:
            self.grad_hidden_TD[rows] += grad_TC @ self.weight_VD[columns]
        if self.grad_weight_VD is not None and self.adds_blocks:
            self.grad_weight_VD[columns] += grad_TC.t() @ self.hidden_TD[rows]
        elif self.grad_weight_VD is not None:
            torch.mm(grad_TC.t(), self.hidden_TD[rows], out=self.grad_weight_VD[columns])
        if self.grad_bias_V is not None:
            self.grad_bias_V[columns] += grad_TC.float().sum(0)

    def made(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        def typed(gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
            return None if gradient is None else gradient.to(dtype)

        return (
            typed(self.grad_hidden_TD, self.hidden_TD.dtype),
            typed(self.grad_weight_VD, self.weight_VD.dtype),
            typed(self.grad_bias_V, self.weight_VD.dtype),
        )
