"""Model whose training passes are two CUDA graphs, forward and backward, replayed inside autograd.

The host limits an eager micro-batch of a small model: each of its thousand launches takes the host 10 µs. A graph
stores the launches with their arguments, and one call repeats them. A captured micro-batch therefore depends on the
shapes, addresses and host decisions at capture. Everything around it is unchanged, because autograd sees one function
of the parameters: masks and loss scales, gradient accumulation, DeepSpeed's hooks, reduction and clipping.

    replay forward     tokens, labels → static tensors; losses are written to a static tensor
    replay backward    gradient of the losses → a static tensor; gradients of parameters are written to static tensors

The graphs share one memory pool, so each replay, including the forward one, may overwrite the last gradients. Gradients
that are still accumulating in parameters are therefore copied out of the pool first. If nothing was accumulated yet,
autograd uses a static tensor as the parameter's gradient without a copy.

The graphs are captured over aliases of the parameters: other autograd leaves with the same memory. DeepSpeed's hooks
are on the parameters themselves, whose autograd nodes remember the stream on which they were created.
"""

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.attention.check.trials import is_device_usable
from megatron.position.numerics import collect_captured_tensors

STEP_OPTIONS = frozenset({"labels", "position_seed", "with_log_z"})
"""Keyword arguments of a forward pass that a graph can repeat. A position seed only matters to models that are never
captured (`megatron/config/execution.py`).
"""

MAX_MEMORY_FRACTION = 0.97
"""Maximum fraction of the memory available to the process that it should rely on."""

Replay = Callable[[], Any]


class CudaCapture:
    """Capture of functions as CUDA graphs that share one memory pool, in the order of their replay."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], Sequence[Tensor]]) -> tuple[Replay, Sequence[Tensor]]:
        """Return a function that repeats a function's launches, and the tensors that each replay overwrites."""
        graph = torch.cuda.CUDAGraph()
        # Other threads (data loaders that pin memory, NCCL's watchdog, a save) continue to use the device.
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = function()
        except BaseException:
            # If the end of a capture fails, PyTorch's allocator would keep waiting for it.
            with suppress(RuntimeError, AttributeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            raise
        return graph.replay, outputs

    @contextmanager
    def use_side_stream(self) -> Iterator[None]:
        """Run the enclosed work on a separate stream, as PyTorch requires for passes before a capture."""
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            current.wait_stream(stream)

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    def is_device_usable(self) -> bool:
        """Return True if the device still works. An illegal address makes it unusable for the whole process."""
        return is_device_usable(torch.device("cuda"))

    @contextmanager
    def forbid_synchronization(self) -> Iterator[None]:
        """Make operations in the context that wait for the device raise RuntimeError."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def measure_peak_bytes(self) -> int:
        """Return the bytes that the allocator has reserved: the peak of the process so far."""
        return torch.cuda.memory_reserved()

    def measure_reserved(self) -> int:
        """Return the bytes that the allocator still reserves after it released unused memory."""
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def is_memory_short(self, needed: int) -> bool:
        """Return True if the device has too little memory for `needed` bytes of this process, with a margin."""
        free, _ = torch.cuda.mem_get_info()
        return needed > MAX_MEMORY_FRACTION * (free + torch.cuda.memory_reserved())


class _BareModel(nn.Module):
    """Model without its hooks, for `functional_call`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, **options: Any) -> Tensor:
        losses: Tensor = type(self.model).forward(self.model, tokens, **options)
        return losses


class TrainingPasses:
    """Forward and backward passes of a model over aliases of its parameters. No hook runs and no gradient accumulates.

    Args:
        model: model that maps tokens and labels [B, T] to losses.
        with_log_z: True to request log Z from the model.
    """

    def __init__(self, model: nn.Module, *, with_log_z: bool) -> None:
        self.model, self.with_log_z = model, with_log_z
        self._bare = _BareModel(model)
        self.parameters = {name: p for name, p in self._bare.named_parameters() if p.requires_grad}
        self._aliases = {name: p.detach().requires_grad_() for name, p in self.parameters.items()}

    def compute_losses(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the losses, with the autograd graph that `compute_gradients` needs."""
        options = {"labels": labels, "with_log_z": self.with_log_z}
        losses: Tensor = torch.func.functional_call(self._bare, self._aliases, (tokens,), options)
        return losses

    def compute_gradients(self, losses: Tensor, upstream: Tensor) -> list[Tensor | None]:
        """Return the gradients in the order of `parameters`; None for parameters that do not affect the losses."""
        return list(torch.autograd.grad(losses, list(self._aliases.values()), upstream, allow_unused=True))


class GraphedModel:
    """Training passes of a model as CUDA graphs, for micro-batches of one shape.

    Args:
        passes: passes of the model. They must have run before, so that compilation and caching are not captured.
        tokens, labels: tensors of the shape; their values do not matter.
        capture: capture of functions.

    Raises:
        RuntimeError: if the device cannot capture an operation.
    """

    def __init__(self, passes: TrainingPasses, tokens: Tensor, labels: Tensor, capture: CudaCapture) -> None:
        self.model, self.with_log_z = passes.model, passes.with_log_z
        self._tokens, self._labels = tokens.clone(), labels.clone()
        attached: Tensor | None = None

        def run_forward() -> list[Tensor]:
            nonlocal attached
            attached = passes.compute_losses(self._tokens, self._labels)
            return [attached]

        with collect_captured_tensors() as self._cached:
            self._replay_forward, (losses,) = capture.capture(run_forward)
        self._losses = losses.detach()
        self._upstream = torch.empty_like(self._losses)
        names: list[str] = []

        def run_backward() -> list[Tensor]:
            assert attached is not None
            found = passes.compute_gradients(attached, self._upstream)
            names[:] = [name for name, gradient in zip(passes.parameters, found, strict=True) if gradient is not None]
            return [gradient for gradient in found if gradient is not None]

        with collect_captured_tensors() as cached:  # recomputation may also cache tensors
            self._replay_backward, gradients = capture.capture(run_backward)
        self._cached += cached
        self._gradients = list(gradients)
        self.used = [passes.parameters[name] for name in names]
        """Parameters that have a gradient, in the order of `_gradients`."""
        self._addresses = [parameter.data_ptr() for parameter in self.used]

    def install(self) -> None:
        """Make the model replay the graphs for training calls that fit them; other calls are unchanged."""
        self.model.forward = self.forward

    def remove(self) -> None:
        """Undo `install`."""
        self.model.__dict__.pop("forward", None)

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        """Return the model's losses, from the graphs if the call fits them."""
        if not self.fits(inputs, options):
            losses: Tensor = type(self.model).forward(self.model, *inputs, **options)
            return losses
        replayed: Tensor = _Replay.apply(self, inputs[0], options["labels"], *self.used)
        return replayed

    def fits(self, inputs: Sequence[Any], options: Mapping[str, Any]) -> bool:
        """Return True if the graphs compute the result of a call of the model."""
        return (
            self.model.training
            and torch.is_grad_enabled()
            and len(inputs) == 1
            and options.keys() <= STEP_OPTIONS
            and options.get("labels") is not None
            and inputs[0].shape == options["labels"].shape == self._tokens.shape
            and options.get("with_log_z", False) == self.with_log_z
        )

    def compute_losses(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Replay the forward pass and return the losses, which the next replay overwrites."""
        self._check_addresses()
        self._keep_gradients()
        self._tokens.copy_(tokens)
        self._labels.copy_(labels)
        self._replay_forward()
        return self._losses.detach()

    def compute_gradients(self, upstream: Tensor) -> list[Tensor]:
        """Replay the backward pass and return the gradients of `used`, valid until the next forward pass."""
        self._upstream.copy_(upstream)
        self._replay_backward()
        return [gradient.detach() for gradient in self._gradients]

    def _check_addresses(self) -> None:
        """Raise RuntimeError if the address of a parameter has changed since the capture."""
        if any(parameter.data_ptr() != address for parameter, address in zip(self.used, self._addresses, strict=True)):
            raise RuntimeError("a parameter has moved since its CUDA graph was captured")

    @torch.no_grad()
    def _keep_gradients(self) -> None:
        """Copy gradients that are still accumulating in parameters out of the graphs' memory."""
        held = [
            (parameter, parameter.grad)
            for parameter, static in zip(self.used, self._gradients, strict=True)
            if parameter.grad is not None and parameter.grad.data_ptr() == static.data_ptr()
        ]
        if not held:
            return
        gradients = [gradient for _, gradient in held]
        copies = [torch.empty_like(gradient) for gradient in gradients]
        torch._foreach_copy_(copies, gradients)
        for (parameter, _), copy in zip(held, copies, strict=True):
            parameter.grad = copy


class _Replay(torch.autograd.Function):
    """Autograd function of the parameters that replays the graphs."""

    @staticmethod
    def forward(ctx: Any, graphed: GraphedModel, tokens: Tensor, labels: Tensor, *parameters: Tensor) -> Tensor:
        ctx.graphed = graphed
        return graphed.compute_losses(tokens, labels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, None, *ctx.graphed.compute_gradients(upstream))
