"""Report of a rehearsal.

It contains verdicts, memory compared with the plan, ledger, kernels, disk, time, and limits of the rehearsal.

Figures that a rehearsal cannot measure are marked. The memory of the CUDA context (0.3 to 0.5 GiB) and of NCCL's
buffers (about 0.5 GiB per communicator) are published measurements. Their sources are the documentation of PyTorch's
memory snapshots and estimators for Megatron. A rehearsal uses neither the driver nor NCCL.
"""

import math
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from megatron.distributed.hardware import get_gpu_spec
from megatron.distributed.mesh import DIMENSION_ORDER
from megatron.launch.slurm import build_training_job, render_batch_script
from megatron.planning.attention_memory import ATTENTION_MEMORY
from megatron.planning.memory_estimate import estimate_memory
from megatron.planning.model_costs import plan_model
from megatron.planning.parallel_layouts import build_configured_layout
from megatron.planning.plan import estimate_step_time_range
from megatron.planning.step_time import Cluster
from megatron.rehearsal.rehearse import RESUME, TRAIN, RankTrace, Rehearsal
from megatron.rehearsal.rehearsed_run import STEPS
from megatron.rehearsal.roles import find_varying_dimensions
from megatron.training.check_resources import (
    BYTES_PER_BUILT_PARAMETER,
    CheckpointSize,
    count_checkpoints,
    measure_free_bytes,
)
from megatron.utils.errors import FarfieldError

Verdict = Literal["fits", "tight", "out of memory", "failed"]
VERDICTS: tuple[Verdict, ...] = ("fits", "tight", "out of memory", "failed")
"""Verdicts from best to worst."""
TIGHT_FRACTION = 0.9
"""Fraction of device memory above which little is left for memory that a rehearsal cannot measure."""
CONTEXT_GIB = (0.3, 0.5)
NCCL_GIB = 0.5
"""Memory of one communicator, in GiB."""
GIB = 2**30
NOT_COVERED = (
    "numerical results: losses, norms, kernel outputs (make gpu-check on a GPU)",
    "NCCL itself: version, buffers, connections between machines",
    "speed of GPU, network and file system",
)


@dataclass(frozen=True)
class CollectiveSummary:
    """Calls of one kind."""

    along: str
    """Mesh dimensions along which the group's members differ."""
    ranks: int
    operation: str
    dtype: str
    calls: int
    bytes: int


class RehearsalReport:
    """Rehearsal with its verdicts.

    Args:
        rehearsal: findings of the rehearsal.
        network_gb_per_s, mfu: parameters of the planner's time estimate.
    """

    def __init__(self, rehearsal: Rehearsal, *, network_gb_per_s: float, mfu: float) -> None:
        self.rehearsal = rehearsal
        self._network, self._mfu = network_gb_per_s, mfu

    def judge_rank(self, rank: int) -> Verdict:
        """Return the verdict on a rank: whether its share of the run fits its GPU."""
        rehearsal = self.rehearsal
        results = [trace.result for trace in self._list_traces(rank)]
        kinds = {result.error.kind for result in results if result.error is not None}
        if "memory" in kinds:
            return "out of memory"
        if kinds:
            return "failed"
        reserved = max(result.peak_reserved for result in results)
        capacity = rehearsal.gpu.memory
        unmodeled = (CONTEXT_GIB[1] + NCCL_GIB * self.count_communicators(rank)) * GIB
        return "tight" if reserved > TIGHT_FRACTION * capacity or reserved + unmodeled > capacity else "fits"

    @cached_property
    def verdict(self) -> Verdict:
        """Worst verdict of all ranks."""
        return max((self.judge_rank(rank) for rank in self.rehearsal.train_traces), key=VERDICTS.index)

    @property
    def exit_code(self) -> int:
        """Exit code: 0 if the run would start, resume and fit, and its ranks agree; else 1.

        A miscompiled kernel also gives 1, unless the GPU's own self-check chooses the backend: the check detects and
        rejects the kernel.
        """
        if self.verdict in ("out of memory", "failed") or self.rehearsal.mismatches:
            return 1
        return int(bool(self.list_miscompiled_kernels()) and not self.chooses_attention)

    def count_communicators(self, rank: int) -> int:
        """Count the NCCL communicators of a rank."""
        calls = self.rehearsal.train_traces[rank].ledger.calls
        groups = {call.communicator for call in calls if not call.is_on_host}
        return sum(len(group.ranks) > 1 for group in groups)

    def find_peak(self, rank: int) -> tuple[int, int, str]:
        """Return a rank's peak memory and its phase: bytes of tensors, bytes reserved by the allocator, phase."""
        peaks: dict[str, tuple[int, int]] = {}
        for trace in self._list_traces(rank):
            for phase, peak in trace.result.peaks.items():
                before = peaks.get(phase, (0, 0))
                peaks[phase] = (max(before[0], peak[0]), max(before[1], peak[1]))
        if not peaks:
            return 0, 0, ""
        phase = max(peaks, key=lambda name: peaks[name][0])
        return peaks[phase][0], max(reserved for _, reserved in peaks.values()), phase

    def _list_traces(self, rank: int) -> list[RankTrace]:
        return [
            traces[rank] for traces in (self.rehearsal.train_traces, self.rehearsal.resume_traces) if rank in traces
        ]

    def estimate_planned_memory(self, rank: int) -> int | None:
        """Return the bytes that `plan` estimates for a rank's pipeline stage, or None if its method is unknown."""
        run = self.rehearsal.run
        stage = run.sizes.get_coordinates(rank)["pipeline"]
        try:
            return estimate_memory(
                plan_model(run.config),
                run.sizes,
                run.vocab_size,
                backend=_get_planned_backend(self.rehearsal.train_traces[rank].result.attention_backend),
                pipeline_stage=stage,
                gpu_bytes=self.rehearsal.gpu.memory,
            ).total
        except FarfieldError:
            return None

    @cached_property
    def step_seconds(self) -> tuple[float, float] | None:
        """Range of the step time that `plan` estimates for the rehearsed backend, in seconds; None if it is unknown."""
        run = self.rehearsal.run
        cluster = Cluster(
            get_gpu_spec(self.rehearsal.gpu.name), run.world_size, run.devices_per_node, self._network, self._mfu
        )
        try:
            layout = build_configured_layout(run.config, run.vocab_size, cluster)
        except FarfieldError:
            return None
        backend = _get_planned_backend(self.attention)
        return estimate_step_time_range(layout.planned, layout.sizes, run.vocab_size, cluster, backend=backend)

    def summarize_collectives(self, rank: int) -> list[CollectiveSummary]:
        """Summarize a rank's NCCL calls in training by group, operation and type.

        The largest number of bytes comes first.
        """
        sizes = self.rehearsal.run.sizes
        counts: dict[tuple[str, int, str, str], list[int]] = defaultdict(lambda: [0, 0])
        for call in self.rehearsal.train_traces[rank].ledger.calls:
            if not call.is_on_host:
                along = find_varying_dimensions(sizes, call.communicator.ranks)
                name = " × ".join(d for d in DIMENSION_ORDER if d in along) or "alone"
                entry = counts[name, len(call.communicator.ranks), call.operation, call.dtype]
                entry[0] += 1
                entry[1] += call.bytes
        rows = [CollectiveSummary(*key, *entry) for key, entry in counts.items()]
        return sorted(rows, key=lambda row: -row.bytes)

    def list_kernels(self) -> list[dict[str, Any]]:
        """List the loaded Triton kernels, one entry per compilation variant.

        An entry has name, registers per thread, stack bytes (spilled registers), shared memory bytes per block, and
        launches.
        """
        found: dict[tuple[Any, ...], int] = defaultdict(int)
        for trace in self.rehearsal.train_traces.values():
            for kernel in trace.summary.get("kernels", ()):
                found[kernel["name"], kernel["registers"], kernel["stack"], kernel["shared"]] += kernel["launches"]
        names = ("name", "registers", "stack", "shared", "launches")
        return [dict(zip(names, (*key, launches), strict=True)) for key, launches in sorted(found.items())]

    def list_miscompiled_kernels(self) -> list[str]:
        """List the names of kernels that ptxas miscompiles for the GPU."""
        results = [trace.result for trace in self.rehearsal.train_traces.values()]
        return list(dict.fromkeys(name for result in results for name in result.miscompiled_kernels))

    @property
    def chooses_attention(self) -> bool:
        """True if the GPU's own self-check chooses the backend."""
        model = self.rehearsal.run.config.model
        return model.attention_backend == "auto" and model.attention_check

    @property
    def attention(self) -> str | None:
        """Attention backend in use."""
        backends = (trace.result.attention_backend for trace in self.rehearsal.train_traces.values())
        return next(filter(None, backends), None)

    def list_fallbacks(self) -> list[str]:
        """List the calls that fall back from a kernel to PyTorch, with the reasons."""
        results = [trace.result for trace in self.rehearsal.train_traces.values()]
        reasons = [f"attention in {result.row_blocks_reason}" for result in results if result.row_blocks_reason]
        return list(dict.fromkeys([*reasons, *(line for result in results for line in result.warnings)]))

    @cached_property
    def disk(self) -> dict[str, Any] | None:
        """Sizes of checkpoints, in bytes, and free disk space.

        The sizes are those of a checkpoint, of all checkpoints kept by the run, and of the one being written.
        """
        if (checkpoint := self.rehearsal.checkpoint) is None:
            return None
        config = self.rehearsal.run.config
        size, at_once = CheckpointSize(**checkpoint), count_checkpoints(config).at_once
        needed = size.count_bytes(at_once)
        disk: dict[str, Any] = {"checkpoint": size.total, **checkpoint, "kept": at_once - 1, "needed": needed}
        save = config.checkpoint.save
        if save is not None and (free := measure_free_bytes(save)) is not None:
            disk |= {"folder": str(save), "free": free}
        return disk

    @cached_property
    def slurm(self) -> dict[str, Any] | None:
        """Batch script and time limit of a SLURM job; None for other launchers."""
        config = self.rehearsal.run.requested
        if config is None or config.launch.launcher != "slurm":
            return None
        job: dict[str, Any] = {"time": config.launch.slurm.time, "nodes": config.launch.nodes}
        try:
            script = render_batch_script(build_training_job(config)).splitlines()
            # Comments on the author and on resubmission apply only to a script that was written to disk.
            job["script"] = "\n".join(line for line in script if not line.startswith("# "))
        except FarfieldError as error:
            job["error"] = str(error)
        limit = config.launch.slurm.get_time_limit_seconds()
        if limit is not None and self.step_seconds is not None:
            usable = max(limit - config.launch.slurm.signal_seconds, 1)
            seconds = [config.training.train_iters * step for step in self.step_seconds]
            job["seconds"], job["starts"] = seconds, [math.ceil(total / usable) for total in seconds]
        return job

    @property
    def host_bytes(self) -> int | None:
        """Host memory that the ranks of a node use together to build the model, in bytes."""
        results = [trace.result for trace in self.rehearsal.train_traces.values()]
        sizes = [result.rank_parameters for result in results if result.rank_parameters is not None]
        return BYTES_PER_BUILT_PARAMETER * max(sizes) * self.rehearsal.run.devices_per_node if sizes else None

    def list_covered(self) -> list[str]:
        """List the phases that every rehearsed rank executed."""
        rehearsal = self.rehearsal
        results = [trace.result for trace in rehearsal.train_traces.values()]
        phases = set.intersection(*(set(result.peaks) for result in results))
        steps = "report" in phases and all(result.error is None for result in results)
        parts = [
            (True, f"{len(results)} of {rehearsal.world_size} ranks ran: parse, launch, groups"),
            ("data" in phases, "model, engine, data"),
            (steps, f"{STEPS} steps"),
            ("validate" in phases, "validation"),
            (rehearsal.checkpoint is not None, "a checkpoint"),
            (bool(rehearsal.resume_traces), "a resume from it"),
        ]
        return [text for is_reached, text in parts if is_reached]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, in bytes and seconds."""
        rehearsal, run = self.rehearsal, self.rehearsal.run
        return {
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "gpus": run.world_size,
            "gpus_per_node": run.devices_per_node,
            "mesh": asdict(run.sizes),
            "card": {"name": rehearsal.gpu.name, "memory": rehearsal.gpu.memory,
                     "architecture": rehearsal.gpu.architecture},
            "notes": list(run.notes),
            "roles": [self._role_to_dict(role.rank, role.represented_ranks) for role in rehearsal.roles],
            "not_modelled": {
                "cuda_context_gib": list(CONTEXT_GIB),
                "nccl_gib_per_communicator": NCCL_GIB,
                "source": "published figures, not measured",
            },
            "mismatches": [
                {"action": action, "kind": found.kind, "ranks": list(found.ranks),
                 "group": list(found.communicator.ranks), "call": found.index, "message": found.message}
                for action, found in rehearsal.mismatches
            ],
            "rehearsed": {
                "steps": STEPS, "micro_batches": run.micro_batches,
                "micro_batches_of_the_run": run.config.training.gradient_accumulation_steps,
            },
            "distinct_sequences": rehearsal.distinct_sequences,
            "unmatched_ranks": rehearsal.unmatched_ranks,
            "kernels": self.list_kernels(),
            "miscompiled_kernels": self.list_miscompiled_kernels(),
            "attention": self.attention,
            "fallbacks": self.list_fallbacks(),
            "disk": self.disk,
            "host_bytes_per_node": self.host_bytes,
            "slurm": self.slurm,
            "step_seconds_estimated": None if self.step_seconds is None else list(self.step_seconds),
            "covered": self.list_covered(),
            "not_known": list(NOT_COVERED),
            "seconds": rehearsal.seconds,
        }  # fmt: skip

    def _role_to_dict(self, rank: int, represented_ranks: tuple[int, ...]) -> dict[str, Any]:
        traces, rehearsal = self._list_traces(rank), self.rehearsal
        if not traces:
            return {"rank": rank, "stands_for": list(represented_ranks)}
        allocated, reserved, phase = self.find_peak(rank)
        errors = [
            {"action": name, **asdict(error)} for name, number, error in rehearsal.find_errors() if number == rank
        ]
        return {
            "rank": rank,
            "stands_for": list(represented_ranks),
            "coordinates": dict(rehearsal.run.sizes.get_coordinates(rank)),
            "verdict": self.judge_rank(rank),
            "peak_allocated": allocated,
            "peak_reserved": reserved,
            "peak_phase": phase,
            "peaks": {
                name: {phase: list(peak) for phase, peak in by_rank[rank].result.peaks.items()}
                for name, by_rank in ((TRAIN, rehearsal.train_traces), (RESUME, rehearsal.resume_traces))
                if rank in by_rank
            },
            "planned": self.estimate_planned_memory(rank),
            "errors": errors,
            "communicators": self.count_communicators(rank),
            "collectives": [asdict(row) for row in self.summarize_collectives(rank)],
            "counters": traces[0].summary.get("counters", {}),
            "stub_calls": traces[0].summary.get("stub_calls", {}),
            "cpu_seconds": sum(trace.result.seconds for trace in traces),
            "seconds": sum(trace.seconds for trace in traces),
        }


def _get_planned_backend(backend: str | None) -> str | None:
    """Return the planner's name of a backend that passed its self-check; None, the planner's `auto`, is row blocks."""
    return backend if backend in ATTENTION_MEMORY else None
