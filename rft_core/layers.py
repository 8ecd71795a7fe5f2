"""How a module's decoder layers are run in an update: as they are, compiled, or computed again in the backward pass.

Compiled code depends on the first lengths that it sees. So it is made once, from a micro-batch that is the same in
every process, for lengths of any size; what would need other code later runs as it is. The bits of a micro-batch then
depend on nothing that was computed before it, and a replay in another process gives the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import checkpoint

from rft_core.errors import CompilerFailed

Forward = Callable[..., Any]


@dataclass
class Layers:
    """`is_compiled` and `is_checkpointed` say how layers run inside `running`."""

    module: Any
    layers: list[nn.Module]
    is_compiled: bool = False
    is_checkpointed: bool = False
    _compiled: list[Forward] = field(default_factory=list)

    @classmethod
    def of(cls, module: Any) -> Layers:
        names = set(getattr(module, "_no_split_modules", None) or ())
        return cls(module, [layer for layer in module.modules() if type(layer).__name__ in names])

    @contextmanager
    def running(self) -> Iterator[None]:
        """The layers' `forward` is replaced for so long; what the backward pass computes again is what ran here."""
        if not (self.is_compiled or self.is_checkpointed):
            yield
            return
        forwards = self._compiled if self.is_compiled else [layer.forward for layer in self.layers]
        if self.is_checkpointed:
            forwards = [partial(self._again, forward) for forward in forwards]
        with self._stance(self.is_compiled), self._replaced(forwards):
            yield

    def compile(self, warm_up: Callable[[], Any]) -> None:
        """`warm_up` computes forward and backward of the micro-batch from which the code is made.

        Raises TorchDynamoException where torch cannot compile the layers, CompilerFailed where the compiler failed:
        another process may succeed, and would compute other bits.
        """
        self._compiled = [torch.compile(layer.forward, dynamic=True, fullgraph=True) for layer in self.layers]
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), self._replaced(self._compiled):
            warnings.simplefilter("ignore")  # about dependencies of the compiler, and what it would do on other devices
            try:
                warm_up()
            except BackendCompilerFailed as error:
                raise CompilerFailed(
                    f"compiling the decoder layers must succeed, found {type(error).__name__}: {error}; try again with "
                    "more free memory and disk, or start a run with training.compile: false"
                ) from error

    @contextmanager
    def _replaced(self, forwards: list[Forward]) -> Iterator[None]:
        kept = [vars(layer).get("forward") for layer in self.layers]
        for layer, forward in zip(self.layers, forwards, strict=True):
            layer.forward = forward
        try:
            yield
        finally:
            for layer, forward in zip(self.layers, kept, strict=True):
                if forward is None:
                    del layer.forward  # its class has one
                else:
                    layer.forward = forward

    @staticmethod
    def _stance(is_compiled: bool) -> AbstractContextManager[Any]:
        """What has no code yet is not compiled any more: it runs as it is."""
        return torch.compiler.set_stance("eager_on_recompile") if is_compiled else nullcontext()

    def _again(self, run: Forward, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        config, is_compiled = self.module.config, self.is_compiled
        attention = config._attn_implementation

        def layer(*inputs: Tensor) -> Any:
            kept = config._attn_implementation
            config._attn_implementation = attention  # in the backward pass it is the module's own again
            try:
                with self._stance(is_compiled):
                    return run(*inputs, **kwargs)
            finally:
                config._attn_implementation = kept

        return checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=False)
