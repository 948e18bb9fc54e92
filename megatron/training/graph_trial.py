"""On-device trial that decides whether micro-batches run as CUDA graphs (`cuda_graph`), like the check of backends.

The first step of a process runs eagerly. Before the second step, its first micro-batch is computed several more times
without side effects: no batch is consumed, no random number is drawn, and no gradient is accumulated.

    eager, several times  finds operations that wait for the device or copy from the host, which graphs cannot repeat;
                          measures time, and the difference of two results of the same micro-batch
    captured              from other tokens of the same shape
    replayed              compares with eager results; measures time, and memory that the graphs keep

`auto` uses graphs that are correct, faster, and leave the memory that the run has needed so far. One line reports the
result. All ranks use graphs only if every rank can.
"""

import gc
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.config.execution import find_backend_obstacle, find_graph_obstacle
from megatron.config.schema import Config
from megatron.data.torch_data import Batch
from megatron.distributed.process_groups import ProcessGroups
from megatron.model.graphed_model import CudaCapture, GraphedModel, TrainingPasses
from megatron.model.layer import has_hooks
from megatron.utils.errors import RunError, UserError, describe_error, is_out_of_memory
from megatron.utils.formatting import format_bytes
from megatron.utils.project import find_own_path
from megatron.utils.rounding import SAFETY_FACTOR

TIMED_PASSES = 3
MIN_GAIN = 0.03
"""Minimum fraction of a micro-batch's time that graphs must save, because they keep memory."""
SYNC_ERROR = "called a synchronizing CUDA operation"
"""Text of PyTorch's error for operations that make the host wait for the device."""


@dataclass(frozen=True)
class GraphTrial:
    """Result of one rank's trial of CUDA graphs on its micro-batch."""

    refusal: str | None = None
    """Reason why this rank cannot capture graphs, or None if it can."""
    eager_seconds: float = 0.0
    """Time of the forward and backward passes of a micro-batch, launched eagerly, in seconds."""
    graph_seconds: float = 0.0
    is_exact: bool = False
    """True if the losses and all gradients are equal bit for bit."""
    pool_bytes: int = 0
    """Memory that the graphs keep, in bytes."""
    is_memory_short: bool = False
    """True if the graphs leave less memory than the run has needed so far."""
    is_device_lost: bool = False
    """True if the trial made the device unusable for this process."""


def plan_graph_trial(config: Config, device: torch.device) -> tuple[bool, str | None]:
    """Return whether a run tries graphs, and a line if its configuration rules them out on a GPU."""
    if device.type != "cuda" or config.training.cuda_graph == "off":
        return False, None
    obstacle = find_graph_obstacle(config)
    return obstacle is None, None if obstacle is None else f"CUDA graphs: off; {obstacle}"


def build_graphs(
    config: Config, model: nn.Module, batch: Batch, groups: ProcessGroups, loss_scale: float = 1.0
) -> tuple[GraphedModel | None, str]:
    """Try graphs on a micro-batch. Return them, or None if they are not used, and a line with the reason.

    All ranks must call this.

    Raises:
        UserError: if `cuda_graph` is on and some rank cannot use graphs.
        RunError: if the trial made a device unusable.
    """
    names = ("tokens", "labels", "loss_mask")
    tokens, labels, mask = (batch[name].to(groups.device) for name in names)
    graphed, trial = None, GraphTrial()
    try:
        with torch.random.fork_rng(devices=[groups.device] if groups.device.type == "cuda" else []):
            graphed, trial = try_graphs(
                model,
                tokens,
                labels,
                mask * (loss_scale / mask.sum().clamp(min=1)),
                with_log_z=config.training.z_loss > 0,
                requires_exactness=config.training.deterministic,
            )
    except RuntimeError:
        if not trial.is_device_lost:  # an unusable device cannot restore its random state
            raise
    is_taken, line = choose_graphs(config.training.cuda_graph, groups.gather_objects(trial))
    if not is_taken:
        graphed = None
    gc.collect()
    if groups.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(groups.device)  # reports cover only steps
    return graphed, line


def choose_graphs(mode: str, trials: Sequence[GraphTrial]) -> tuple[bool, str]:
    """Return whether graphs are used, and a line with the reason, from the trials of all ranks.

    Raises:
        UserError: if the mode is `on` and some rank cannot use graphs.
        RunError: if the trial made a device unusable.
    """
    for rank, trial in sorted(enumerate(trials), key=lambda each: not each[1].is_device_lost):
        if trial.refusal is not None:
            reason = trial.refusal + (f" (rank {rank})" if rank else "")
            if trial.is_device_lost:
                raise RunError(f"CUDA graphs: {reason}, and the device is unusable; set cuda_graph=off")
            if mode == "on":
                raise UserError(f"cuda_graph on: {reason}; use auto or off", "cuda_graph")
            return False, f"CUDA graphs: off; {reason}"
    eager = max(trial.eager_seconds for trial in trials)
    graph = max(trial.graph_seconds for trial in trials)
    kept = format_bytes(max(trial.pool_bytes for trial in trials))
    times = f"{1e3 * graph:.3g} ms for forward and backward of a micro-batch instead of {1e3 * eager:.3g}"
    if mode == "auto" and graph > (1 - MIN_GAIN) * eager:
        return False, f"CUDA graphs: off; not faster ({times})"
    if mode == "auto" and any(trial.is_memory_short for trial in trials):
        return False, f"CUDA graphs: off; the {kept} that they keep would leave too little memory ({times})"
    how = "bit for bit" if all(trial.is_exact for trial in trials) else "within rounding"
    return True, f"CUDA graphs: on; {times}, gradients equal {how}, {kept} of memory kept"


def try_graphs(
    model: nn.Module,
    tokens: Tensor,
    labels: Tensor,
    upstream: Tensor,
    *,
    with_log_z: bool = False,
    requires_exactness: bool = False,
    build_capture: Callable[[], CudaCapture] = CudaCapture,
) -> tuple[GraphedModel | None, GraphTrial]:
    """Compute a micro-batch eagerly and with graphs, and compare the results.

    Args:
        model: model in training mode.
        tokens, labels: int64 [B, T] on its device.
        upstream: gradient of the losses [B, T].
        with_log_z: True to request log Z from the model; its gradient is then that of the losses.
        requires_exactness: True to reject differences from rounding.
        build_capture: function that builds the capture of graphs.

    Returns:
        The graphs, not installed, or None if they cannot be used, and the result of the trial.
    """
    capture = build_capture()
    try:
        return _try_graphs(model, tokens, labels, upstream, with_log_z, requires_exactness, capture)
    except (RuntimeError, MemoryError) as error:
        return None, GraphTrial(_describe_failure(error), is_device_lost=not capture.is_device_usable())


def _describe_failure(error: BaseException) -> str:
    """Describe in one line, from the error of a trial, why passes cannot be captured."""
    while error.__context__ is not None:  # the end of a capture raises another error after the original one
        error = error.__context__
    if is_out_of_memory(error):
        return "too little memory to capture them"
    if SYNC_ERROR not in str(error):
        return f"capture failed: {describe_error(error)}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename and frame.filename != __file__
    ]
    name = find_own_path(frames[-1].filename) or frames[-1].filename
    where = "the backward pass" if frames[-1].name == "compute_gradients" else f"{name}:{frames[-1].lineno}"
    return f"{where} waits for the device, which no graph can repeat"


def _try_graphs(
    model: nn.Module,
    tokens: Tensor,
    labels: Tensor,
    upstream: Tensor,
    with_log_z: bool,
    requires_exactness: bool,
    capture: CudaCapture,
) -> tuple[GraphedModel | None, GraphTrial]:
    if hooked := next((name for name, module in model.named_modules() if name and has_hooks(module)), None):
        return None, GraphTrial(f"a hook on {hooked} must see every pass")
    names = getattr(getattr(model, "backend_choice", None), "name", None) or ""
    if (obstacle := find_backend_obstacle(names)) is not None:
        return None, GraphTrial(obstacle)
    needed = capture.measure_peak_bytes()
    passes = TrainingPasses(model, with_log_z=with_log_z)
    upstream = upstream.expand(2, *upstream.shape) if with_log_z else upstream

    def compute_eagerly() -> list[Tensor]:
        losses = passes.compute_losses(tokens, labels)
        gradients = passes.compute_gradients(losses, upstream)
        return [losses.detach(), *(gradient for gradient in gradients if gradient is not None)]

    with capture.use_side_stream():
        compute_eagerly()  # compiles code and fills caches
        with ExitStack() as stack:
            stack.enter_context(capture.forbid_synchronization())
            copies = stack.enter_context(_HostCopies())
            compute_eagerly()
        if copies.found:
            return None, GraphTrial(f"the host copies to or from the device during a pass ({copies.found[0]})")
        expected = compute_eagerly()
        noise = _measure_differences(compute_eagerly(), expected)
        eager_seconds = _measure_seconds(compute_eagerly, capture)
    reserved = capture.measure_reserved()
    graphed = GraphedModel(passes, tokens.flip(1), labels.flip(1), capture)
    kept = capture.measure_reserved() - reserved

    def replay() -> list[Tensor]:
        return [graphed.compute_losses(tokens, labels), *graphed.compute_gradients(upstream)]

    differences = _measure_differences(replay(), expected)
    sizes = torch.stack([torch.linalg.vector_norm(tensor.float()) for tensor in expected]).tolist()
    epsilon = torch.finfo(expected[-1].dtype).eps
    for number, (difference, own, size) in enumerate(zip(differences, noise, sizes, strict=True)):
        # Tolerance of attention's check: a multiple of the data type's rounding, or of the difference of two eager
        # results.
        allowed = 0.0 if requires_exactness else SAFETY_FACTOR * max(own, epsilon * size)
        if not difference <= allowed:
            name = "the losses" if number == 0 else "the gradient of " + _get_name(graphed, number - 1)
            return None, GraphTrial(f"{name} differs from the eager result by {difference:.2g} of {size:.2g}")
    del expected
    graph_seconds = _measure_seconds(replay, capture)
    is_memory_short = capture.is_memory_short(needed + kept)
    is_exact = not any(differences)
    return graphed, GraphTrial(None, eager_seconds, graph_seconds, is_exact, kept, is_memory_short)


def _get_name(graphed: GraphedModel, number: int) -> str:
    parameter = graphed.used[number]
    return next(name for name, each in graphed.model.named_parameters() if each is parameter)


def _measure_differences(results: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """Return the norm of each tensor's difference; equal infinities do not differ. Waits for the device once."""
    norms = []
    for result, other in zip(results, expected, strict=True):
        is_same = (result == other) | (result.isnan() & other.isnan())
        difference = torch.where(is_same, 0.0, result.float() - other.float())
        norms.append(torch.linalg.vector_norm(difference))
    values: list[float] = torch.stack(norms).tolist()
    return values


def _measure_seconds(function: Callable[[], Any], capture: CudaCapture) -> float:
    seconds = []
    for _ in range(TIMED_PASSES):
        capture.synchronize()
        start_time = time.perf_counter()
        function()
        capture.synchronize()
        seconds.append(time.perf_counter() - start_time)
    return median(seconds)


class _HostCopies(TorchDispatchMode):
    """Recorder of copies between host and device. A graph would repeat them with addresses that are reused by then."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and func.overloadpacket in COPIES:
            sources = [value for value in args if isinstance(value, Tensor)]
            if any(source.device.type != result.device.type for source in sources):
                self.found.append(f"{func.overloadpacket} of {list(result.shape)}")
        return result


COPIES = (torch.ops.aten._to_copy, torch.ops.aten.copy_)
