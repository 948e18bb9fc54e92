"""A plan: what a configuration needs on so many GPUs, whether it fits, and the layouts that do."""

from dataclasses import asdict, dataclass
from typing import Any

from megatron.config.schema import Config
from megatron.planning.memory_estimate import MemoryEstimate, estimate_memory
from megatron.planning.model_costs import count_parameters, estimate_forward_flops, plan_encoding
from megatron.planning.parallel_layouts import (
    ParallelLayout,
    build_configured_layout,
    find_fastest_layouts,
    find_smallest_layout,
    fit_config_to_cluster,
)
from megatron.planning.step_time import Cluster
from megatron.utils.errors import UserError

SECONDS_PER_DAY = 86400


@dataclass(frozen=True)
class Plan:
    """Everything that is told."""

    config: Config
    cluster: Cluster
    vocab_size: int
    configured_layout: ParallelLayout | None
    """The layout of the configuration; None if it is refused."""
    config_error: str | None
    """Why it is refused."""
    fitting_layouts: list[ParallelLayout]
    """The layouts that fit, the best first."""
    smallest_layout: ParallelLayout | None
    """Where none fits: the one that needs least."""

    @property
    def detailed_layout(self) -> ParallelLayout | None:
        """The layout whose memory is told by part: the configuration's own, or the best, or the smallest."""
        return self.configured_layout or (self.fitting_layouts[0] if self.fitting_layouts else self.smallest_layout)

    @property
    def num_parameters(self) -> int:
        """Of the model, each counted once."""
        return count_parameters(self.config, self.vocab_size)

    @property
    def flops_per_token(self) -> float:
        """Forward and backward."""
        return estimate_forward_flops(self.config, self.vocab_size).training_flops_per_token

    def estimate_backend_memory(self) -> dict[str, MemoryEstimate]:
        """The detailed layout's memory with each attention backend that can compute the configuration's method."""
        layout = self.detailed_layout
        if layout is None:
            return {}
        position = layout.config.position
        supports_sdpa = plan_encoding(position).supports_sdpa and position.score_processor == "none"
        names = ("auto", "chunked", "eager", *(["sdpa"] if supports_sdpa else []))
        return {name: estimate_memory(layout.config, layout.sizes, self.vocab_size, backend=name) for name in names}

    def fits_gpu(self, layout: ParallelLayout) -> bool:
        """Does a layout leave a tenth of the GPU's memory?"""
        return layout.memory.fits(self.cluster.gpu.gib)

    def estimate_days(self, layout: ParallelLayout) -> float:
        """Of all steps, without validation, saving and starting."""
        return layout.step_time.total * self.config.training.train_iters / SECONDS_PER_DAY

    def to_dict(self, max_layouts: int) -> dict[str, Any]:
        """The plan as plain values: bytes, seconds, FLOPs.

        Args:
            max_layouts: layouts that are listed.
        """
        cluster = self.cluster
        return {
            "gpus": cluster.num_gpus,
            "gpu_gib": cluster.gpu.gib,
            "peak_tflops": self.config.logging.peak_tflops
            or cluster.gpu.get_peak_tflops(self.config.training.compute_dtype),
            "gpus_per_node": cluster.gpus_per_node,
            "network_gb_per_second": cluster.network_gb_per_s,
            "mfu": cluster.mfu,
            "vocabulary": self.vocab_size,
            "parameters": self.num_parameters,
            "flops_per_token": self.flops_per_token,
            "as_configured": {"refused": self.config_error}
            if self.configured_layout is None
            else self._layout_to_dict(self.configured_layout),
            "memory_by_backend": {
                name: asdict(estimate) | {"total": estimate.total}
                for name, estimate in self.estimate_backend_memory().items()
            },
            "layouts": [self._layout_to_dict(layout) for layout in self.fitting_layouts[:max_layouts]],
            "smallest": None if self.smallest_layout is None else self._layout_to_dict(self.smallest_layout),
        }

    def _layout_to_dict(self, layout: ParallelLayout) -> dict[str, Any]:
        return {
            "keys": layout.config_keys,
            "ranks": asdict(layout.sizes),
            "fits": self.fits_gpu(layout),
            "memory": _memory_to_dict(layout.memory),
            "seconds": asdict(layout.step_time) | {"total": layout.step_time.total},
            "days": self.estimate_days(layout),
        }


def _memory_to_dict(estimate: MemoryEstimate) -> dict[str, int]:
    return asdict(estimate) | {"total": estimate.total}


def make_plan(config: Config, vocab_size: int, cluster: Cluster) -> Plan:
    """Make the plan of a configuration.

    Args:
        config: of any layout; its batch, length, steps and precision are kept.
        vocab_size: tokens of the tokenizer.
        cluster: where it shall run.

    Raises:
        UserError: nothing is known of its position encoding or score processor, it says no batch, or the GPUs are no
            whole nodes.
    """
    plan_encoding(config.position)  # unknown: an error of the whole plan, and no refusal of one layout
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
    return Plan(config, cluster, vocab_size, configured_layout, config_error, fitting_layouts, smallest_layout)
