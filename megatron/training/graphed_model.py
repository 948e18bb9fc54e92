"""A model whose training passes are two CUDA graphs, forward and backward, replayed inside autograd.

An eager micro-batch of a small model is the host's: each of its thousand launches takes the host 10 µs. A graph holds
the launches with their arguments, and one call repeats them. So a captured micro-batch is bound to what it saw: shapes,
addresses and whatever the host decided. Everything around it stays as it is, since autograd sees one function of the
parameters: masks and loss scales, gradient accumulation, DeepSpeed's hooks, reduction and clipping.

    replay forward     tokens, labels → static tensors; losses come out in a static tensor
    replay backward    gradient of the losses → a static tensor; gradients of all parameters come out in static tensors

The graphs share one memory pool. So each replay, the forward one too, may overwrite the gradients of the last: before
it, gradients that parameters still hold (accumulation) are copied out of the pool. Autograd takes a static tensor as
the parameter's gradient without a copy where nothing was accumulated yet.

The graphs are captured over aliases of the parameters: other leaves of autograd with the same memory. DeepSpeed's hooks
sit on the parameters themselves, and autograd's nodes of these remember the stream that they were made on.
"""

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.position.numerics import collect_captured_tensors

STEP_OPTIONS = frozenset({"labels", "position_seed", "with_log_z"})
"""Keyword arguments of a forward pass that a graph can repeat. A position seed matters to models alone that no graph is
made of (`megatron/config/cuda_graph.py`)."""

MAX_SHARE = 0.97
"""Largest share of the memory that a process can have which it should count on."""

Replay = Callable[[], Any]


class CudaCapture:
    """Captures functions as CUDA graphs that share one memory pool, in the order in which they will be replayed."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], Sequence[Tensor]]) -> tuple[Replay, Sequence[Tensor]]:
        """Return what repeats a function's launches, and the tensors that each repetition writes anew."""
        graph = torch.cuda.CUDAGraph()
        # Other threads (loaders that pin memory, NCCL's watchdog, a save) go on to use the device.
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = function()
        except BaseException:
            # Where the end of a capture fails, PyTorch's allocator would go on to wait for it.
            with suppress(RuntimeError, AttributeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            raise
        return graph.replay, outputs

    @contextmanager
    def work_aside(self) -> Iterator[None]:
        """Run the work inside on a stream of its own, as PyTorch wants it of passes before a capture."""
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

    @contextmanager
    def find_waits(self) -> Iterator[None]:
        """Have an operation inside that waits for the device raise RuntimeError."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def measure_needed(self) -> int:
        """Return the bytes that the allocator holds: the most that the process needed so far."""
        return torch.cuda.memory_reserved()

    def measure_reserved(self) -> int:
        """Return the bytes that the allocator holds after it gave back what is not in use."""
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def is_short(self, needed: int) -> bool:
        """True if this process cannot have as many bytes of the device, with some to spare."""
        free, _ = torch.cuda.mem_get_info()
        return needed > MAX_SHARE * (free + torch.cuda.memory_reserved())


class _BareModel(nn.Module):
    """A model without the hooks on it, for `functional_call`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, **options: Any) -> Tensor:
        losses: Tensor = type(self.model).forward(self.model, tokens, **options)
        return losses


class TrainingPasses:
    """Forward and backward of a model over aliases of its parameters: no hook runs and no gradient is accumulated.

    Args:
        model: takes tokens and labels [B, T] and returns losses.
        with_log_z: asked of the model.
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
        """Return the gradients by the order of `parameters`; None of one that has no part in the losses."""
        return list(torch.autograd.grad(losses, list(self._aliases.values()), upstream, allow_unused=True))


class GraphedModel:
    """A model's training passes as graphs, for micro-batches of one shape.

    Args:
        passes: of the model. They must have run before: whatever is compiled or cached at first is no part of a graph.
        tokens, labels: of the shape; their values do not matter.
        capture: captures functions.

    Raises:
        RuntimeError: the device refuses to capture something.
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

        with collect_captured_tensors() as cached:  # recomputation
            self._replay_backward, gradients = capture.capture(run_backward)
        self._cached += cached
        self._gradients = list(gradients)
        self.used = [passes.parameters[name] for name in names]
        """The parameters that have a gradient, in the order of `_gradients`."""
        self._addresses = [parameter.data_ptr() for parameter in self.used]

    def install(self) -> None:
        """Have the model replay the graphs in training, where a call fits them; other calls stay as they were."""
        self.model.forward = self.forward

    def remove(self) -> None:
        """Undo `install`."""
        self.model.__dict__.pop("forward", None)

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        """Return the losses as the model does, from the graphs if the call fits them."""
        if not self.fits(inputs, options):
            losses: Tensor = type(self.model).forward(self.model, *inputs, **options)
            return losses
        replayed: Tensor = _Replay.apply(self, inputs[0], options["labels"], *self.used)
        return replayed

    def fits(self, inputs: Sequence[Any], options: Mapping[str, Any]) -> bool:
        """True if the graphs compute what a call of the model asks for."""
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
        """Replay the forward pass. The next one overwrites what is returned."""
        self._check_addresses()
        self._keep_gradients()
        self._tokens.copy_(tokens)
        self._labels.copy_(labels)
        self._replay_forward()
        return self._losses.detach()

    def compute_gradients(self, upstream: Tensor) -> list[Tensor]:
        """Replay the backward pass: gradients of `used`, until the next forward pass."""
        self._upstream.copy_(upstream)
        self._replay_backward()
        return [gradient.detach() for gradient in self._gradients]

    def _check_addresses(self) -> None:
        """Raise RuntimeError if a parameter is no longer where the graphs read it."""
        if any(parameter.data_ptr() != address for parameter, address in zip(self.used, self._addresses, strict=True)):
            raise RuntimeError("a parameter has moved since its CUDA graph was captured")

    @torch.no_grad()
    def _keep_gradients(self) -> None:
        """Copy the gradients that parameters still hold out of the graphs' memory."""
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
    """The graphs as one function of the parameters."""

    @staticmethod
    def forward(ctx: Any, graphed: GraphedModel, tokens: Tensor, labels: Tensor, *parameters: Tensor) -> Tensor:
        ctx.graphed = graphed
        return graphed.compute_losses(tokens, labels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, None, *ctx.graphed.compute_gradients(upstream))
