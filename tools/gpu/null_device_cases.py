"""Training cases for the null CUDA device, and their expected results.

tests/cuda runs a sample of the cases, and `null_device_matrix.py` runs all. Each case trains two steps with one or few
layers, in shapes that exercise all kernels. Cases differ in methods, backends, data types, ZeRO stages, head
dimensions, lengths and layouts. `run_case` runs one in this process, which must be on the null device, and
`find_faults` lists its faults.
"""

import gc
import io
import logging
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.utils.project import SHIPPED_CONFIGS

OVERLAYS = sorted(path.stem for path in (SHIPPED_CONFIGS / "position").glob("*.yml"))
BACKENDS = ("auto", "triton")
REPRESENTATIVES = ("none", "rotary", "kerple_log", "gaussian_weight2", "fire", "dape", "cdape_kerple_log", "window")
"""Methods that together use every kernel and every code path of the backends."""
UNSUPPORTED_BY_TRITON = {
    **dict.fromkeys(("cope", "transformer_xl", "grape_a"), "contextual terms"),
    **dict.fromkeys(("mta", "selective", "ssmax_prior"), "this processor"),
}
"""Methods that the kernels reject when the model is built, with part of the message."""
LONGEST_XPOS = 67_000
"""Length in tokens whose factors fit in bfloat16 and float32."""
MAX_HEAD_DIM = 128
"""Largest head dimension of the kernels (`megatron/kernels/head_dim.py`)."""
HEADS = 2
BASE: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 64 * HEADS,
    "num_attention_heads": HEADS,
    "seq_length": 128,
    "max_position_embeddings": 128,
    "make_vocab_size_divisible_by": 64,
    "train_iters": 2,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"params": {"lr": 1e-3}},
    "precision": "bf16",
    "log_interval": 1,
    "eval_interval": 0,
    "eval_iters": 1,
    "compile_regions": False,  # so that all counted Triton kernels belong to attention
    "device": "cuda",
    "distributed_backend": "nccl",
    "num_gpus": 1,
    "nodes": 1,
    "use_tensorboard": False,
}
VOCABULARY = 320
MAX_LEFT = 2**30
"""Maximum device memory, in bytes, that a case may leave allocated for the next one."""

LONGEST = 131072
TWO_LENGTHS: dict[str, Any] = {"stages": [{"until": 1, "seq_length": 64}, {}], "checkpoint_factor": 1}
"""Two stages: the first step uses half the length, and the second resumes from its checkpoint."""
FEATURES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16": {"precision": "fp16"},
    "fp32": {"precision": "fp32"},
    "recomputation": {"checkpoint_activations": True},
    "selective_recomputation": {"checkpoint_activations": "selective"},
    "dropout": {"attention_dropout": 0.1, "hidden_dropout": 0.1},
    "windowed": {"attention_window": 64},
    "documents": {"attention_mask": "document"},
    "sinks_gates": {"softmax_type": "learnable", "attention_output_gate": True},
    "stick_breaking": {"softmax_type": "stick-breaking"},
    "gqa": {"num_attention_heads": 4, "num_kv_heads": 2, "hidden_size": 256},
    "norms_z_loss": {
        "use_qk_layernorm": True,
        "norm_placement": "sandwich",
        "final_logit_softcapping": 30.0,
        "z_loss": 1e-4,
    },
    "accumulation": {"gradient_accumulation_steps": 2},
    "two_lengths": TWO_LENGTHS,
    **{f"head_dim_{size}": {"hidden_size": size * HEADS} for size in (80, 96, 112, 128)},
    **{
        f"length_{length}": {
            "seq_length": length,
            "max_position_embeddings": length,
            "train_micro_batch_size_per_gpu": 1,
            "checkpoint_activations": True,
        }
        for length in (512, 2048, 8192, 32768, LONGEST)
    },
}
"""Features of a single device: configuration keys by name."""
OFFLOADS: dict[str, dict[str, Any]] = {
    "": {},
    "offload": {"offload_optimizer": {"device": "cpu"}},
    "offload_pinned": {"offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "offload_all": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor_2": {"model_parallel_size": 2},
    "tensor_4": {"model_parallel_size": 4},
    "context_2": {"context_parallel_size": 2},
    "context_4": {"context_parallel_size": 4},
    "pipeline_2": {"pipe_parallel_size": 2, "gradient_accumulation_steps": 4},
    "pipeline_4": {"pipe_parallel_size": 4, "gradient_accumulation_steps": 4},
    "tensor_2_context_2": {"model_parallel_size": 2, "context_parallel_size": 2},
    "tensor_2_pipeline_2": {"model_parallel_size": 2, "pipe_parallel_size": 2, "gradient_accumulation_steps": 2},
    "context_2_pipeline_2": {"context_parallel_size": 2, "pipe_parallel_size": 2, "gradient_accumulation_steps": 2},
    "tensor_2_context_2_pipeline_2": {
        "model_parallel_size": 2,
        "context_parallel_size": 2,
        "pipe_parallel_size": 2,
        "gradient_accumulation_steps": 2,
    },
}
STAGED_LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline_2_two_lengths": {"pipe_parallel_size": 2, "gradient_accumulation_steps": 2, **TWO_LENGTHS},
    "zero_3_two_lengths": {"zero_optimization": {"stage": 3}, **TWO_LENGTHS},
}
"""Layouts of jobs that write checkpoints, so all ranks must run."""


@dataclass(frozen=True)
class Case:
    """One training run."""

    name: str
    overlay: str
    """Name of an overlay in configs/position."""
    keys: dict[str, Any] = field(default_factory=dict)
    """Flat configuration keys, which override `BASE` and the overlay."""

    @property
    def backend(self) -> str:
        return str(self.keys.get("attention_backend", "auto"))


@dataclass(frozen=True)
class Outcome:
    """Outcome of a case."""

    name: str
    seconds: float
    error: str = ""
    """Type and message of the error; empty if training finished."""
    trace: str = ""
    """Traceback of an unexpected error."""
    warnings: tuple[str, ...] = ()
    """Python warnings from PyTorch, Triton and this project, and messages of PyTorch's C++ code."""
    fallbacks: tuple[str, ...] = ()
    """Fallbacks to PyTorch reported by the backends."""
    peak: int = 0
    """Peak memory of PyTorch's allocator, in bytes."""
    launches: int = 0
    """Number of launches of PyTorch's kernels."""
    triton: int = 0
    """Number of launches of Triton's kernels."""


def list_feature_cases(overlays: Sequence[str] = OVERLAYS, features: Sequence[str] = tuple(FEATURES)) -> list[Case]:
    """List the cases for every overlay × backend × feature."""
    return [
        Case(
            f"{overlay}-{backend}-{feature}",
            overlay,
            {"attention_backend": backend, **_get_feature_keys(overlay, feature)},
        )
        for overlay in overlays
        for backend in BACKENDS
        for feature in features
    ]


def _get_feature_keys(overlay: str, feature: str) -> dict[str, Any]:
    """Return a feature's keys. The range of randomized positions must cover the sequence length."""
    keys = FEATURES[feature]
    return (
        {**keys, "randomized_positions": 4 * LONGEST}
        if overlay == "rotary_randomized" and "seq_length" in keys
        else keys
    )


def list_zero_cases(overlays: Sequence[str] = ("kerple_log", "cdape_kerple_log")) -> list[Case]:
    """List the cases for every ZeRO stage × offload × precision, with a checkpoint after each step.

    Combinations that a stage does not support are omitted.
    """
    cases = []
    for overlay in overlays:
        for stage in range(4):
            for offload, options in OFFLOADS.items():
                if (offload and stage == 0) or (offload == "offload_all" and stage != 3):
                    continue
                for precision in ("fp16", "bf16", "fp32"):
                    keys = {"zero_optimization": {"stage": stage, **options}, "precision": precision}
                    name = f"{overlay}-zero_{stage}-{precision}" + f"-{offload}" * bool(offload)
                    keys |= {"attention_backend": "triton", "compile_regions": True, "checkpoint_factor": 1}
                    cases.append(Case(name, overlay, keys))
    return cases


def list_layout_cases(overlays: Sequence[str], layouts: Sequence[str] = tuple(LAYOUTS)) -> list[Case]:
    """List the cases for every overlay × backend × layout, with eight heads and four layers."""
    shape = {"num_layers": 4, "num_attention_heads": 8, "hidden_size": 512, "compile_regions": True}
    all_layouts = LAYOUTS | STAGED_LAYOUTS
    return [
        Case(f"{overlay}-{backend}-{layout}", overlay, {"attention_backend": backend, **shape, **all_layouts[layout]})
        for overlay in overlays
        for backend in BACKENDS
        for layout in layouts
    ]


def list_sharded_zero_cases() -> list[Case]:
    """List ZeRO stages over the ranks of a job, without checkpoints, because a single rank cannot write one."""
    return [Case(case.name, case.overlay, {**case.keys, "checkpoint_factor": None}) for case in list_zero_cases()]


def build_config(case: Case, corpus: Path, run: Path, world_size: int = 1) -> Any:
    """Build the configuration of a case on a corpus. Checkpoints, if any, are saved into `run`."""
    from megatron.config.load import load_config
    from megatron.config.schema import Config

    position = load_config(["125M", case.overlay]).config.position.model_dump()
    # A pattern of layers needs its own number of layers, or a multiple.
    layers = max((len(value) for value in position.values() if isinstance(value, list)), default=BASE["num_layers"])
    keys = {**BASE, "num_gpus": world_size, **position, "num_layers": layers}
    paths = {f"{split}_data_paths": [str(corpus / f"{split}_text_document")] for split in ("train", "valid", "test")}
    keys |= {**paths, "data_cache": str(corpus / "samples"), **case.keys}
    keys |= {"save": str(run) if case.keys.get("checkpoint_factor") else None}
    return Config.from_flat(keys)


def run_case(case: Case, corpus: Path, run: Path, world_size: int = 1) -> Outcome:
    """Train a case in this process on the null device; errors become part of the outcome.

    Args:
        corpus: corpus folder with a vocabulary of `VOCABULARY`.
        run: checkpoint folder, which must not exist.
        world_size: number of ranks of the job; torchrun's variables select this process's rank.
    """
    import torch
    from rich.console import Console

    from megatron.attention.backends import triton as triton_backend
    from megatron.rehearsal.null_device.recorder import read_counters
    from megatron.training.train import train
    from megatron.utils.errors import FarfieldError

    triton_backend.warn_fallback.cache_clear()  # each case must repeat messages that a run prints once
    if torch.cuda.memory_reserved() > MAX_LEFT:
        gc.collect()  # engines contain reference cycles
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, start_time, error, trace = read_counters(), time.perf_counter(), "", ""
    with _collect_messages() as recorder:
        try:
            train(build_config(case, corpus, run, world_size), Console(file=io.StringIO(), width=200))
        except FarfieldError as refusal:
            error = f"{type(refusal).__name__}: {refusal}"
        except Exception as failure:
            error, trace = f"{type(failure).__name__}: {failure}", traceback.format_exc()
    counted = read_counters() - before
    return Outcome(
        case.name,
        round(time.perf_counter() - start_time, 2),
        error,
        trace,
        tuple(dict.fromkeys(recorder.warnings)),
        tuple(dict.fromkeys(recorder.fallbacks)),
        torch.cuda.max_memory_allocated(),
        counted.launches,
        counted.triton,
    )


class _MessageRecorder(logging.Handler):
    """Messages recorded while a case ran."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings: list[str] = []
        self.fallbacks: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.name.startswith("megatron.core"):
            return
        (
            self.fallbacks
            if "falling back to PyTorch" in message or "runs without compilation" in message
            else self.warnings
        ).append(message)


CPLUSPLUS_LINE = re.compile(r"^(?:\[rank\d+\]:)?\[[WE]\d{4} .*")
"""Warning or error that PyTorch's C++ code writes to stderr."""
FOREIGN = re.compile(r"site-packages/(?!torch/|triton/)")
"""Files of packages whose own deprecation warnings are ignored, such as megatron-core and DeepSpeed."""


@contextmanager
def _collect_messages() -> Iterator[_MessageRecorder]:
    """Collect Python warnings, the project's log messages and C++ messages, and keep them off the terminal."""
    from megatron.model.layer_config import ignore_compiler_warnings

    recorder, logger = _MessageRecorder(), logging.getLogger("megatron")
    logger.addHandler(recorder)
    sys.stderr.flush()
    real = os.dup(2)
    with tempfile.TemporaryFile("w+") as written:
        os.dup2(written.fileno(), 2)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                ignore_compiler_warnings()  # a run prints it once, when it compiles
                yield recorder
        finally:
            sys.stderr.flush()
            os.dup2(real, 2)
            os.close(real)
            logger.removeHandler(recorder)
            written.seek(0)
            recorder.warnings += [line.strip() for line in written if CPLUSPLUS_LINE.match(line)]
    for warning in caught:
        if not FOREIGN.search(warning.filename):
            recorder.warnings.append(
                f"{Path(warning.filename).name}:{warning.lineno}: {warning.message}".splitlines()[0]
            )


def find_expected_rejection(case: Case) -> str | None:
    """Return part of the error message expected from a case; None if it must train."""
    keys = {**BASE, **case.keys}
    if case.overlay == "xpos" and keys["seq_length"] > LONGEST_XPOS:
        return "option xpos_scale_base of rotary"
    if case.backend != "triton":
        return None
    if case.overlay == "stick_breaking" or case.keys.get("softmax_type") == "stick-breaking":
        return "it computes a softmax and not stick-breaking"
    if case.overlay == "pope" and keys["hidden_size"] // keys["num_attention_heads"] > MAX_HEAD_DIM // 2:
        return "its head dimension is at most"
    return UNSUPPORTED_BY_TRITON.get(case.overlay)


def find_expected_fallback(case: Case) -> str | None:
    """Return part of the fallback message expected from a case with kernels; None if there must be none."""
    if case.backend != "triton":
        return None
    if case.overlay == "rotary_randomized":
        return "randomized positions"
    has_processor = "dape" in case.overlay
    if case.keys.get("attention_dropout") and case.overlay != "fire":
        biased = case.overlay in _BIASED
        return "attention_dropout" if has_processor or not biased else None
    return None


_BIASED = frozenset({
    "alibi", "bam", "gaussian_bias2", "gaussian_bias3", "inverse", "inverse_nlogn", "kerple_log", "kerple_log3",
    "kerple_power", "sandwich", "t5", "type1", "type2",
})  # fmt: skip
"""Methods with a distance bias and no weight, whose bias a kernel computes even with dropout."""


def find_faults(case: Case, outcome: Outcome) -> list[str]:
    """List the faults in the outcome of a case, one line each; empty if correct."""
    refusal, fallback = find_expected_rejection(case), find_expected_fallback(case)
    faults = [f"warned: {line}" for line in outcome.warnings]
    if refusal is not None:
        if refusal not in outcome.error or not outcome.error.startswith("UserError"):
            faults.append(f"was not rejected with {refusal!r}: {outcome.error or 'it trained'}")
        return faults
    if outcome.error:
        return [*faults, outcome.error]
    if outcome.launches == 0:
        faults.append("launched nothing")
    if fallback is None and outcome.fallbacks:
        faults.append(f"fell back: {outcome.fallbacks[0]}")
    if fallback is not None and not any(fallback in line for line in outcome.fallbacks):
        faults.append(f"did not report the fallback to PyTorch for {fallback}")
    if case.backend == "triton" and (outcome.triton == 0) != (fallback is not None):
        faults.append(f"launched {outcome.triton} Triton kernels, and reported {fallback or 'no fallback'}")
    return faults
