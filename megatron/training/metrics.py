"""Measurements of a training run: its intervals, the speed of the device, the memory used.

Values of single steps stay on the device until an interval ends, so that reporting makes no step wait.
"""

import resource
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.distributed.hardware import find_gpu_spec
from megatron.distributed.mesh import Mesh
from megatron.distributed.process_groups import ProcessGroups
from megatron.model.device_dtype import get_torch_dtype
from megatron.training.metrics_log import TrainRecord, compute_perplexity
from megatron.training.rank_times import ForwardTimer, RankTimes, compare_ranks, exchange_times


def sum_over_batch(groups: ProcessGroups, value: float) -> float:
    """Return the sum of a value over the ranks that divide the batch. All ranks must call this."""
    return groups.all_reduce_sum(groups.mesh.count_on_one_rank(value))[0]


class IntervalMetrics:
    """Accumulator of steps until they are reported (`Stateful`). `pause` and `resume` exclude time spent on other work.

    Args:
        groups: process groups of the run.
        peak_tflops: peak of the device in TFLOP/s, if known.
        forward: timer of this rank's forward passes.
        micro_batches: micro-batches per step.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        peak_tflops: float | None = None,
        forward: ForwardTimer | None = None,
        micro_batches: int = 1,
    ) -> None:
        self._groups, self._peak_tflops = groups, peak_tflops
        self._forward, self._micro_batches = forward, micro_batches
        self.last_loss: float | None = None
        """Mean loss of the last reported interval that had one."""
        self._reset()

    def _reset(self, loss: float = 0.0, counted: int = 0) -> None:
        """Start a new interval. `loss` is the sum over `counted` steps that an earlier session took in it."""
        self.steps = self.tokens = 0
        self.flops = 0.0
        self.counted = counted
        self._losses: Tensor = torch.tensor(loss, dtype=torch.float64, device=self._groups.device)
        self._z_losses: Tensor | None = None
        self._grad_norm: Tensor | float | None = None
        self._seconds = self._cpu_seconds = 0.0
        self._start_times: tuple[float, float] | None = _read_clocks()
        self.data_wait = self.checkpoint_wait = 0.0
        """Seconds that this rank waited for its batches, and for checkpoints."""
        if self._forward is not None:
            self._forward.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the steps not reported yet. All ranks must call this; waits for the device."""
        loss = sum_over_batch(self._groups, float(self._losses))
        z_loss = None if self._z_losses is None else sum_over_batch(self._groups, float(self._z_losses))
        return {"interval_loss": loss, "interval_steps": self.counted, "interval_z_loss": z_loss}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Start with the unreported steps of an earlier session."""
        # Shares are added over the ranks of the batch, so only one rank carries the loss.
        carries = self._groups.mesh.dp_cp.index == 0
        self._reset(state_dict["interval_loss"] if carries else 0.0, state_dict["interval_steps"])
        if (z_loss := state_dict["interval_z_loss"]) is not None:
            self._z_losses = torch.full_like(self._losses, z_loss if carries else 0.0)

    def add(
        self,
        loss: Tensor,
        tokens: int,
        flops: float,
        grad_norm: Tensor | float,
        skipped: bool,
        z_loss: Tensor | None = None,
    ) -> None:
        """Add one step.

        Args:
            loss: this rank's share of its loss, a scalar on the device.
            tokens: tokens read by all ranks together.
            flops: FLOPs of these tokens.
            grad_norm: gradient norm of the step.
            skipped: True if the optimizer skipped the step.
            z_loss: this rank's share of its z-loss, if there is one.
        """
        self.steps += 1
        self.tokens += tokens
        self.flops += flops
        if not skipped:
            self.counted += 1
            self._losses += loss
            if z_loss is not None:
                self._z_losses = z_loss if self._z_losses is None else self._z_losses + z_loss
            self._grad_norm = grad_norm

    def pause(self) -> None:
        """Stop the clock before work that is not training."""
        self._seconds, self._cpu_seconds = self._read_times()
        self._start_times = None

    def resume(self) -> None:
        """Start the clock again."""
        if self._start_times is None:
            self._start_times = _read_clocks()

    def _read_times(self) -> tuple[float, float]:
        """Return the wall time and the CPU time of this process in the interval so far, in seconds."""
        if self._start_times is None:
            return self._seconds, self._cpu_seconds
        (start, cpu_start), (now, cpu_now) = self._start_times, _read_clocks()
        return self._seconds + now - start, self._cpu_seconds + cpu_now - cpu_start

    def read(self) -> tuple[float | None, float | None, float]:
        """Return the mean loss, the gradient norm, and the seconds. All ranks must call this; waits for the device."""
        share = float(self._losses) / self.counted if self.counted else None
        norm = None if self._grad_norm is None else float(self._grad_norm)
        mean_loss = None if share is None else sum_over_batch(self._groups, share)
        return mean_loss, norm, self._read_times()[0]

    def report(
        self,
        *,
        step: int,
        train_iters: int,
        tokens: int,
        learning_rate: float,
        loss_scale: float,
        skipped_steps: int,
    ) -> TrainRecord:
        """Return the record of the interval and start a new one. All ranks must call this.

        Args:
            step: last step, counted from 1.
            train_iters: steps of the run.
            tokens: tokens consumed since step 0.
            learning_rate, loss_scale: values of the last step.
            skipped_steps: steps skipped since step 0.
        """
        loss, norm, seconds = self.read()
        cpu_seconds = self._read_times()[1]
        z_share = None if self._z_losses is None or not self.counted else float(self._z_losses) / self.counted
        z_loss = None if z_share is None else sum_over_batch(self._groups, z_share)
        self.last_loss = loss if loss is not None else self.last_loss
        times, memory = exchange_times(self._groups, self._measure_times(), get_peak_memory_gib(self._groups.device))
        sizes = self._groups.mesh.sizes
        stages = [Mesh(rank, sizes).pipeline.index for rank in range(self._groups.world_size)]
        ranks = compare_ranks(times, stages, self._micro_batches)
        tflops = self.flops / seconds / self._groups.world_size / 1e12
        record = TrainRecord(
            step=step,
            loss=loss,
            perplexity=None if loss is None else compute_perplexity(loss),
            learning_rate=learning_rate,
            grad_norm=norm,
            tokens_per_second=self.tokens / seconds,
            ms_per_step=1e3 * seconds / self.steps,
            cpu_ms_per_step=1e3 * cpu_seconds / self.steps,
            tflops=tflops,
            mfu=None if self._peak_tflops is None else tflops / self._peak_tflops,
            loss_scale=loss_scale,
            skipped_steps=skipped_steps,
            memory_gib=memory,
            tokens=tokens,
            seconds_left=seconds / self.steps * (train_iters - step),
            z_loss=z_loss,
            data_wait=ranks.data_wait / seconds,
            data_wait_rank=ranks.data_wait_rank if self._groups.world_size > 1 else None,
            checkpoint_wait=ranks.checkpoint_wait / (seconds + ranks.checkpoint_wait),
            slowest_rank=ranks.slowest_rank,
            slowdown=ranks.slowdown,
            slowest_rank_wait=min(1.0, ranks.wait_per_step * self.steps / seconds),
        )
        self._reset()
        return record

    def _measure_times(self) -> RankTimes:
        times = RankTimes(data_wait=self.data_wait, checkpoint_wait=self.checkpoint_wait)
        if self._forward is not None:
            self._forward.read()
            times.forward = self._forward.seconds / max(1, self._forward.count)
        return times


def _read_clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def find_peak_tflops(device: torch.device, precision: str, configured: float | None) -> float | None:
    """Return the configured or known peak TFLOP/s of a device in a precision (fp32, bf16, fp16), or None."""
    if configured is not None:
        return configured
    if device.type != "cuda":
        return None
    spec = find_gpu_spec(torch.cuda.get_device_name(device))
    return None if spec is None else spec.get_peak_tflops(precision)


def measure_matmul_flops_per_second(
    device: torch.device, precision: str, *, rows: int, inner: int, columns: int
) -> float:
    """Measure the FLOP/s of a product [rows, inner] · [inner, columns], in a few hundredths of a second.

    Rows beyond those that fill the device are skipped, because they would only take longer.
    """
    dtype = get_torch_dtype(precision)
    rows = min(rows, 512 if device.type == "cpu" else 8192)
    left = torch.ones(rows, inner, dtype=dtype, device=device)
    right = torch.ones(inner, columns, dtype=dtype, device=device)

    def measure_seconds(repeats: int) -> float:
        start_time = time.perf_counter()
        for _ in range(repeats):
            product = left @ right
        product[0, 0].item()  # waits for the device
        return time.perf_counter() - start_time

    first = min(measure_seconds(1), measure_seconds(1))  # the very first one finds caches and libraries cold
    repeats = max(1, min(100, int(0.03 / max(first, 1e-6))))
    return 2.0 * rows * inner * columns * repeats / max(measure_seconds(repeats), 1e-9)


def get_peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory so far, in GiB: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / (2**30 if sys.platform == "darwin" else 2**20)  # macOS counts bytes, Linux KiB
