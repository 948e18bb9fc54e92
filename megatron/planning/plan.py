"""Plan of a configuration: its needs on a number of GPUs, whether it fits, and the layouts that fit.

Reading and writing a processor's feature maps takes longer than computing them. `step_time.py` counts FLOPs and
therefore underestimates its cost. The factor of `MEASURED_OVERHEADS` is the ratio of a processor's measured overhead to
its planned overhead:

| processor | model, tokens     | step / step without | plan  | factor | source                                        |
|-----------|-------------------|---------------------|-------|--------|-----------------------------------------------|
| cdape     | 350M, 32 × 512    | 1.574               | 1.052 | 11.0   | H200, docs/results/gpu_visit.md               |
| cdape     | 350M, 32 × 512    | 1.465               | 1.052 | 8.9    | the same, both steps as CUDA graphs           |
| cdape     | 350M, 1 × 512     | 1.331               | 1.052 | 6.4    | authors' module, DAPE V2 (2410.04798) Table 7 |
| cdape     | 2.7B, 1 × 512     | 1.219               | 1.019 | 11.7   | the same                                      |
| cdape     | 6.7B, 1 × 512     | 1.121               | 1.008 | 16.2   | the same                                      |
| dape      | 350M, 1 × 512     | 1.181               | 1.017 | 10.5   | the same                                      |
| dape      | 2.7B, 1 × 512     | 1.141               | 1.006 | 22.5   | the same                                      |
| dape      | 6.7B, 1 × 512     | 1.085               | 1.003 | 34.0   | the same                                      |
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron.config.execution import resolve_config
from megatron.config.schema import Config
from megatron.config.stages import Stage, list_stage_configs
from megatron.distributed.mesh import ParallelSizes
from megatron.planning.activations import DEFAULT_GPU_BYTES
from megatron.planning.attention_memory import ATTENTION_MEMORY, list_common_backends
from megatron.planning.memory_estimate import MemoryEstimate, estimate_memory
from megatron.planning.model_costs import PlannedModel, count_parameters, estimate_forward_flops, plan_model
from megatron.planning.parallel_layouts import (
    ParallelLayout,
    build_configured_layout,
    find_fastest_layouts,
    find_smallest_layout,
    fit_config_to_cluster,
)
from megatron.planning.step_time import Cluster, StepTime, estimate_step_time
from megatron.utils.errors import UserError


@dataclass(frozen=True)
class MeasuredOverhead:
    """Range of a processor's measured overhead, as a multiple of the planned overhead."""

    low: float
    high: float
    source: str


_PAPER = "DAPE V2 Table 7, 350M to 6.7B"
MEASURED_OVERHEADS = {
    "cdape": MeasuredOverhead(6.4, 16.2, f"350M on an H200, docs/results/gpu_visit.md, and {_PAPER}"),
    "dape": MeasuredOverhead(10.5, 34.0, _PAPER),
}
"""Overheads by name of the score processor. The other processors have no measured steps."""


@dataclass(frozen=True)
class StepTimeRange:
    """Range of step times, in seconds, from the smallest to the largest measured overhead of a processor."""

    low: float
    high: float
    planned_ratio: float
    """Planned step time over the planned step time without the processor."""
    low_ratio: float
    high_ratio: float
    """Step times with the smallest and the largest overhead, over the planned step time without the processor."""
    processor: str
    source: str


def estimate_measured_range(
    planned: PlannedModel, sizes: ParallelSizes, vocab_size: int, cluster: Cluster, *, backend: str | None = None
) -> StepTimeRange | None:
    """Return the range of step times by measured overheads, or None if the processor has no measured steps.

    Args: the same as `estimate_step_time`.
    """
    config = planned.config
    processors = [name for name in config.position.processors if name != "none"]
    if len(processors) != 1 or (overhead := MEASURED_OVERHEADS.get(processors[0])) is None:
        return None
    with_processor = estimate_step_time(planned, sizes, vocab_size, cluster, backend=backend).total
    own = config.position.score_processor
    plain = ["none"] * len(own) if isinstance(own, list) else "none"
    without = config.replace(score_processor=plain, score_processor_options={})
    base = estimate_step_time(plan_model(without), sizes, vocab_size, cluster, backend=backend).total
    extra = max(0.0, with_processor - base)
    low, high = base + overhead.low * extra, base + overhead.high * extra
    return StepTimeRange(low, high, with_processor / base, low / base, high / base, processors[0], overhead.source)


PUBLISHED_TIME_RATIOS = (0.89, 1.56)
"""Range of published over estimated step times: the inverse of Pythia's ratios in docs/planning.md, 1.12 to 0.64."""


def estimate_step_time_range(
    planned: PlannedModel, sizes: ParallelSizes, vocab_size: int, cluster: Cluster, *, backend: str | None = None
) -> tuple[float, float]:
    """Return the expected range of step times, in seconds.

    The range is that of measured overheads if the score processor has any, and else that of published trainings.

    Args: the same as `estimate_step_time`.
    """
    measured = estimate_measured_range(planned, sizes, vocab_size, cluster, backend=backend)
    if measured is not None:
        return measured.low, measured.high
    total = estimate_step_time(planned, sizes, vocab_size, cluster, backend=backend).total
    low, high = PUBLISHED_TIME_RATIOS
    return low * total, high * total


SECONDS_PER_DAY = 86400
CHECK_RECORD = "attention_check.json"
"""File in the run folder with the result of its backend self-check (`megatron/attention/check/check_result.py`)."""


@dataclass(frozen=True)
class BackendEstimate:
    """Memory and step time of a layout with one attention backend."""

    memory: MemoryEstimate
    step_time: StepTime
    measured: StepTimeRange | None
    """Range of step times by measured overheads of the score processor."""


@dataclass(frozen=True)
class PlannedStage:
    """One stage of a staged run, in the configured layout."""

    description: str
    gpu_bytes: int
    """Peak memory of one GPU, in bytes."""
    step_seconds: float
    days: float
    """Duration of all its steps, in days."""


@dataclass(frozen=True)
class Plan:
    """Plan of a configuration; for a staged run, of the stage with the highest memory."""

    planned: PlannedModel
    cluster: Cluster
    vocab_size: int
    configured_layout: ParallelLayout | None
    """Layout of the configuration; None if it is invalid."""
    config_error: str | None
    """Reason why it is invalid."""
    fitting_layouts: list[ParallelLayout]
    """Layouts that fit, the best first."""
    smallest_layout: ParallelLayout | None
    """Layout with the lowest memory, if none fits."""
    checked_backend: str | None = None
    """Backend that the self-check on the run's GPU chose for `auto`; None without a self-check."""
    stages: tuple[PlannedStage, ...] = ()
    """All stages of a staged run."""
    largest_stage: str | None = None
    """Description of the planned stage."""
    arguments: str = "CONFIG…"
    """Configuration as words of a shell command."""

    @property
    def config(self) -> Config:
        """Configuration as requested."""
        return self.planned.config

    @property
    def detailed_layout(self) -> ParallelLayout | None:
        """Layout of the memory table: the configured one, or the best, or the smallest."""
        return self.configured_layout or (self.fitting_layouts[0] if self.fitting_layouts else self.smallest_layout)

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the model, each counted once."""
        return count_parameters(self.planned, self.vocab_size)

    @property
    def flops_per_token(self) -> float:
        """FLOPs of forward and backward pass, per token."""
        return estimate_forward_flops(self.planned, self.vocab_size).training_flops_per_token

    @property
    def supports_sdpa(self) -> bool:
        """True if PyTorch's fused attention supports the configuration's method."""
        return "sdpa" in list_common_backends(self.planned)

    @property
    def rehearse_command(self) -> str:
        """Command that runs the detailed layout on null devices."""
        words = ["./deepy.py rehearse", self.arguments]
        if self.configured_layout is None and self.detailed_layout is not None:
            words.append(self.detailed_layout.overrides)  # the configuration alone raises config_error
        return " ".join([*words, f"--gpus {self.cluster.num_gpus}", self.cluster.gpu_options]).rstrip()

    def estimate_backends(self) -> dict[str, BackendEstimate]:
        """Estimate memory and time of the detailed layout for each attention backend that supports the method.

        The column `auto` shows its choice without a self-check on the GPU.
        """
        layout = self.detailed_layout
        if layout is None:
            return {}
        return {
            name: BackendEstimate(
                estimate_memory(
                    layout.planned, layout.sizes, self.vocab_size, backend=name, gpu_bytes=self.cluster.gpu_bytes
                ),
                estimate_step_time(layout.planned, layout.sizes, self.vocab_size, self.cluster, backend=name),
                estimate_measured_range(layout.planned, layout.sizes, self.vocab_size, self.cluster, backend=name),
            )
            for name in list_common_backends(layout.planned)
        }

    def estimate_measured(self, layout: ParallelLayout) -> StepTimeRange | None:
        """Return the range of a layout's step times by measured overheads of its score processor."""
        return estimate_measured_range(layout.planned, layout.sizes, self.vocab_size, self.cluster)

    def fits_gpu(self, layout: ParallelLayout) -> bool:
        """Return True if a layout leaves a tenth of the GPU's memory free."""
        return layout.memory.fits(self.cluster.gpu.gib)

    def estimate_days(self, layout: ParallelLayout) -> float:
        """Return the duration of all steps in days, without validation, saving and startup."""
        return layout.step_time.total * self.config.training.train_iters / SECONDS_PER_DAY

    @property
    def uncounted_keys(self) -> tuple[str, ...]:
        """Keys whose evaluations during training take memory that the estimate does not include."""
        training = self.config.training
        has_lengths = bool(training.eval_interval and training.eval_lengths)
        has_tasks = bool(self.config.logging.harness.tasks)
        return ("eval_lengths",) * has_lengths + ("harness.tasks",) * has_tasks

    def to_dict(self, max_layouts: int) -> dict[str, Any]:
        """Return the plan as plain values: bytes, seconds, FLOPs.

        Args:
            max_layouts: largest number of layouts to include.
        """
        cluster, backends = self.cluster, self.estimate_backends()
        return {
            "gpus": cluster.num_gpus,
            "gpu_gib": cluster.gpu.gib,
            "peak_tflops": self.config.logging.peak_tflops
            or cluster.gpu.get_peak_tflops(self.config.training.compute_dtype),
            "gpus_per_node": cluster.gpus_per_node,
            "network_gb_per_second": cluster.network_gb_per_s,
            "mfu": cluster.mfu,
            "vocabulary": self.vocab_size,
            "stages": [asdict(stage) for stage in self.stages],
            "parameters": self.num_parameters,
            "flops_per_token": self.flops_per_token,
            "as_configured": {"refused": self.config_error}
            if self.configured_layout is None
            else self._layout_to_dict(self.configured_layout),
            "checked_backend": self.checked_backend,
            "memory_by_backend": {name: estimate.memory.to_dict() for name, estimate in backends.items()},
            "seconds_by_backend": {
                name: asdict(estimate.step_time) | {"total": estimate.step_time.total}
                for name, estimate in backends.items()
            },
            "uncounted_keys": self.uncounted_keys,
            "rehearse": self.rehearse_command,
            "layouts": [self._layout_to_dict(layout) for layout in self.fitting_layouts[:max_layouts]],
            "smallest": None if self.smallest_layout is None else self._layout_to_dict(self.smallest_layout),
        }

    def _layout_to_dict(self, layout: ParallelLayout) -> dict[str, Any]:
        return {
            "keys": layout.config_keys,
            "ranks": asdict(layout.sizes),
            "fits": self.fits_gpu(layout),
            "memory": layout.memory.to_dict(),
            "seconds": asdict(layout.step_time) | {"total": layout.step_time.total},
            "seconds_as_measured": None
            if (step_range := self.estimate_measured(layout)) is None
            else asdict(step_range),
            "days": self.estimate_days(layout),
        }


def make_plan(config: Config, vocab_size: int, cluster: Cluster) -> Plan:
    """Make the plan of a configuration.

    Args:
        config: configuration in any layout; its batch, length, steps and precision are kept.
        vocab_size: vocabulary size of the tokenizer.
        cluster: cluster to run on.

    Raises:
        UserError: the position encoding or score processor declares no costs, no batch size is set, or the GPUs do not
            fill whole nodes.
    """
    if config.training.stages:
        return _plan_stages(config, vocab_size, cluster)
    checked_backend = read_checked_backend(config)
    requested = plan_model(config)  # an unknown cost is an error of the whole plan, not of one layout
    if checked_backend in ATTENTION_MEMORY:  # row blocks have no backend name; the planner's `auto` uses them
        config = config.replace(attention_backend=checked_backend)
    fit_config_to_cluster(cluster, config)
    configured_layout, config_error = None, None
    try:
        configured_layout = build_configured_layout(config, vocab_size, cluster)
    except UserError as error:
        config_error = str(error)
    fitting_layouts = find_fastest_layouts(config, vocab_size, cluster)
    smallest_layout = None
    if not fitting_layouts and configured_layout is None:
        smallest_layout = find_smallest_layout(config, vocab_size, cluster)
    return Plan(
        requested,
        cluster,
        vocab_size,
        configured_layout,
        config_error,
        fitting_layouts,
        smallest_layout,
        checked_backend,
    )


def _plan_stages(config: Config, vocab_size: int, cluster: Cluster) -> Plan:
    """Make the plan of the stage with the highest memory, with a row for each stage."""
    fitted = fit_config_to_cluster(cluster, config)
    try:
        resolved = resolve_config(fitted, cluster.num_gpus)
        stages, sizes = resolved.stages, resolved.sizes
        largest = find_largest_stage(stages, sizes, vocab_size, cluster.gpu_bytes)
        rows = []
        for stage in stages:
            layout = build_configured_layout(stage.config.replace(stages=[]), vocab_size, cluster)
            days = layout.step_time.total * (stage.end_step - stage.first_step) / SECONDS_PER_DAY
            rows.append(PlannedStage(stage.describe(len(stages)), layout.memory.total, layout.step_time.total, days))
    except UserError:
        # The configured layout is invalid on these GPUs: plan the longest stage in any layout; its plan gives the
        # reason.
        longest = max(list_stage_configs(config), key=lambda stage: stage.model.seq_length)
        plan = make_plan(longest.replace(stages=[]), vocab_size, cluster)
        return replace(plan, largest_stage="the longest stage")
    steps = largest.end_step - largest.first_step
    plan = make_plan(largest.config.replace(stages=[], train_iters=steps), vocab_size, cluster)
    name = f"stage {largest.index + 1} of {len(stages)}, which needs the most memory"
    return replace(plan, stages=tuple(rows), largest_stage=name)


def read_checked_backend(config: Config) -> str | None:
    """Return the choice of `auto` recorded by a self-check: "row blocks" or a value of `attention_backend`.

    None if the run folder has no record or a damaged one.
    """
    save = config.checkpoint.save
    if config.model.attention_backend != "auto" or not config.model.attention_check or save is None:
        return None
    try:
        backend = json.loads((Path(save) / CHECK_RECORD).read_text(encoding="utf-8"))["backend"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return backend if isinstance(backend, str) else None


def find_largest_stage(
    stages: Sequence[Stage], sizes: ParallelSizes, vocab_size: int, gpu_bytes: int = DEFAULT_GPU_BYTES
) -> Stage:
    """Return the stage of a run with the highest memory; among equal ones the last.

    Raises UserError as `plan_model`.
    """

    def count_bytes(stage: Stage) -> tuple[int, int]:
        return estimate_memory(plan_model(stage.config), sizes, vocab_size, gpu_bytes=gpu_bytes).total, stage.index

    return max(stages, key=count_bytes)
