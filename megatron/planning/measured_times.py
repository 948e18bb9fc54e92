"""Measured training steps with score processors, which are slower than their FLOPs suggest.

Reading and writing a processor's feature maps takes longer than computing them. `step_time.py` counts FLOPs and
therefore underestimates its cost. The factor below is the measured overhead of a processor over its planned overhead:

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

from dataclasses import dataclass

from megatron.config.schema import Config
from megatron.distributed.mesh import ParallelSizes
from megatron.planning.step_time import Cluster, estimate_step_time


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
class StepTimeBand:
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


def estimate_measured_band(
    config: Config, sizes: ParallelSizes, vocab_size: int, cluster: Cluster, *, backend: str | None = None
) -> StepTimeBand | None:
    """Return the range of step times by measured overheads, or None if the processor has no measured steps.

    Args: the same as `estimate_step_time`.
    """
    processors = [name for name in config.position.processors if name != "none"]
    if len(processors) != 1 or (overhead := MEASURED_OVERHEADS.get(processors[0])) is None:
        return None
    planned = estimate_step_time(config, sizes, vocab_size, cluster, backend=backend).total
    own = config.position.score_processor
    plain = ["none"] * len(own) if isinstance(own, list) else "none"
    without = config.replace(score_processor=plain, score_processor_options={})
    base = estimate_step_time(without, sizes, vocab_size, cluster, backend=backend).total
    extra = max(0.0, planned - base)
    low, high = base + overhead.low * extra, base + overhead.high * extra
    return StepTimeBand(low, high, planned / base, low / base, high / base, processors[0], overhead.source)
