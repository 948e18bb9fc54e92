#!/usr/bin/env python3
"""Run the self-check of `attention_backend: auto` on this device, and report the choice of backend with its reasons.

    python tools/gpu/self_check.py --methods cdape kerple_log --lengths 512 --json self_check.json
    python tools/gpu/self_check.py --methods all --dtype bf16 fp32 --json docs/results/gpu_methods.json

The check is the one that a run performs when it builds a model, repeated here without stored results and without its
time limit. A method is an entry of METHODS, which need only torch and triton, or the name of a file in
configs/position; each of its layer types is checked separately. `all` checks every file, including those whose names
are in METHODS. A page is written next to the JSON file. The exit code is 1 if a kernel is rejected where it should be
used.
"""

import argparse
import gc
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from megatron.attention.backends.backend import AttentionFormula  # noqa: E402
from megatron.attention.backends.registry import describe_fallback, list_candidates  # noqa: E402
from megatron.attention.check.check_result import BackendTrial  # noqa: E402
from megatron.attention.check.problem import build_problem  # noqa: E402
from megatron.attention.check.trials import try_backends  # noqa: E402
from megatron.position.encoding import Encoding  # noqa: E402
from megatron.position.facts import AttentionDims  # noqa: E402
from megatron.position.processor import Processor  # noqa: E402
from megatron.position.registry import build_encoding, build_processor  # noqa: E402
from megatron.position.token_range import ALL_HEADS, TokenRange, sample_positions  # noqa: E402
from tools.arguments import (  # noqa: E402
    ToolParser,
    int_at_least,
    parse_device,
    parse_record_path,
    print_interrupts_in_one_line,
)
from tools.bench.attention_tables import render_markdown_table  # noqa: E402
from tools.bench.error_gate import disable_tf32  # noqa: E402
from tools.gpu.goals import SELF_CHECK_HEADERS, format_self_check_rows  # noqa: E402
from tools.gpu.parts import MODEL_MODULES, list_missing  # noqa: E402
from tools.records import collect_provenance, format_provenance, write_record  # noqa: E402

METHODS: dict[str, tuple[str, str | None]] = {
    "cdape": ("kerple_log", "cdape"),
    "kerple_log": ("kerple_log", None),
    "fire": ("fire", None),
    "rotary": ("rotary", None),
    "cdape_fox": ("fox", "cdape"),
}
"""Encoding and processor of each method, one method per kind of kernel."""
DEFAULT_METHODS = ["cdape", "kerple_log", "fire", "rotary"]
OVERLAYS = sorted(path.stem for path in (ROOT / "configs/position").glob("*.yml"))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MODEL_LAYERS = 12
"""Number of layers, enough for every layer pattern in configs/position."""
CHUNK_ROWS = 128
"""Default of `attention_chunk_rows`."""


def parse_arguments() -> argparse.Namespace:
    parser = ToolParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=parse_device, default=default, help="cpu or cuda")
    names = list(dict.fromkeys((*METHODS, *OVERLAYS, "all")))
    parser.add_argument(
        "--methods", nargs="+", choices=names, metavar="METHOD", default=DEFAULT_METHODS,
        help=f"by default {', '.join(DEFAULT_METHODS)}; also {', '.join(METHODS)} and files of configs/position; all",
    )  # fmt: skip
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bf16"], help="data types of q, k, v")
    parser.add_argument("--lengths", nargs="+", type=int_at_least(1), default=[512], help="sequence lengths")
    parser.add_argument("--batch", type=int_at_least(1), default=8, help="number of sequences")
    parser.add_argument("--heads", type=int_at_least(1), default=16, help="number of heads")
    parser.add_argument("--dim", type=int_at_least(2), default=64, help="head dimension")
    parser.add_argument("--width", type=int_at_least(1), help="width of the cdape processor; by default 32")
    parser.add_argument(
        "--json", type=parse_record_path, help="output file of the records; the page is written next to it"
    )
    arguments = parser.parse_args()
    if arguments.width is not None and not set(arguments.methods) <= set(METHODS):
        parser.error("argument --width: files of configs/position have their own")
    arguments.width = arguments.width or 32
    arguments.files = OVERLAYS if "all" in arguments.methods else [x for x in arguments.methods if x not in METHODS]
    arguments.methods = OVERLAYS if "all" in arguments.methods else list(dict.fromkeys(arguments.methods))
    if arguments.files and (lacking := list_missing((*MODEL_MODULES, "ruamel.yaml"))):
        parser.error(f"files of configs/position need {', '.join(lacking)}: pip install {' '.join(lacking)}")
    arguments.device = torch.device(arguments.device).type
    return arguments


@dataclass(frozen=True)
class LayerMethod:
    """Components of the attention of one layer type."""

    name: str
    """Name of the method, followed by the encoding if its layers have several."""
    encoding: Encoding
    processor: Processor | None
    window: int | None = None
    softmax: str = "vanilla"
    sampled: torch.Tensor | None = None
    """Randomized positions, if any."""
    has_kernels: bool = True
    """True if a Triton kernel computes the method."""


def build_layer_methods(name: str, arguments: argparse.Namespace, length: int) -> list[LayerMethod]:
    """Build each layer type of a method, with new parameters."""
    size = arguments.heads * arguments.dim
    dims = AttentionDims(arguments.heads, arguments.dim, size, length, length)
    torch.manual_seed(0)
    if name in arguments.files:
        return _build_overlay(name, dims, length)
    encoding_name, processor_name = METHODS[name]
    encoding = build_encoding(encoding_name, dims)
    if processor_name is None:
        return [LayerMethod(name, encoding, None)]
    options = {"width": arguments.width}
    processor = build_processor(processor_name, dims, options, has_bias=encoding.adds_bias)
    # The kernels of a processor on gates are CUDA C++, which no interpreter runs.
    has_kernels = arguments.device != "cpu" or not type(encoding).overrides_hook("gate")
    return [LayerMethod(name, encoding, processor, has_kernels=has_kernels)]


def _build_overlay(name: str, dims: AttentionDims, length: int) -> list[LayerMethod]:
    """Build the layers of a file in configs/position. Imports are local because METHODS do not need them."""
    from megatron.config.load import load_config
    from megatron.model.position_modules import (
        build_encoding_from_options,
        build_processor_from_options,
        list_layer_types,
    )
    from tools.gpu.null_device_cases import Case, find_expected_fallback, find_expected_rejection

    case = Case(name, name, {"attention_backend": "triton"})
    has_kernels = find_expected_rejection(case) is None and find_expected_fallback(case) is None
    position = load_config(["125M", name]).config.position
    layers, kinds = [], list_layer_types(position, MODEL_LAYERS)
    for own in kinds:
        encoding = build_encoding_from_options(own, dims)
        processor = build_processor_from_options(own, dims, encoding)
        label = name if len(kinds) == 1 else f"{name}: {own.encoding}" + f", window {own.window}" * bool(own.window)
        sampled = None
        if (limit := own.randomized_positions) is not None:
            sampled = sample_positions(length, limit, length, continuous=own.continuous_positions)
        layers.append(LayerMethod(label, encoding, processor, own.window, own.softmax, sampled, has_kernels))
    return layers


def check_method(name: str, dtype: str, length: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Check one method at one length and data type; return one record per layer type."""
    return [_check_layer(layer, dtype, length, arguments) for layer in build_layer_methods(name, arguments, length)]


def _check_layer(layer: LayerMethod, dtype: str, length: int, arguments: argparse.Namespace) -> dict[str, Any]:
    problem = build_problem(
        AttentionFormula(layer.encoding, layer.processor, softmax_type=layer.softmax),
        (TokenRange(0, length, layer.sampled),),
        batch=arguments.batch,
        window=layer.window,
        heads=ALL_HEADS,
        dtype=DTYPES[dtype],
        device=torch.device(arguments.device),
    )
    candidates = list_candidates(CHUNK_ROWS, problem.formula)
    (inputs,) = problem.list_inputs()
    left = {backend: describe_fallback(candidates[backend], inputs) for backend in candidates}
    trials = [
        BackendTrial(backend, f"falls back to row blocks for {why}") for backend, why in left.items() if why is not None
    ]
    tried = {backend: candidates[backend] for backend, why in left.items() if why is None}
    if len(candidates) == 1:  # as in a run with no alternatives
        trials = [BackendTrial(backend, "is the only supported backend, and not checked") for backend in candidates]
    else:
        trials += try_backends(problem, tried, seconds=math.inf)
    right = sorted((t for t in trials if t.milliseconds is not None), key=lambda t: t.milliseconds or 0.0)
    record: dict[str, Any] = {
        "op": "self_check",
        "method": layer.name,
        "device": arguments.device,
        "dtype": dtype,
        "B": problem.batch,
        "T": length,
        "heads": arguments.heads,
        "d": arguments.dim,
        "taken": right[0].backend if right else None,
        "trials": [
            {
                "backend": trial.backend,
                "ms": trial.milliseconds,
                "excess": trial.largest_error_ratio if trial.excess else None,
                "memory_mb": trial.memory_mb,
                "first_seconds": trial.first_seconds,
                "refusal": trial.refusal,
            }
            for trial in trials
        ],
    }
    ours = next((trial for trial in trials if trial.backend == "triton"), None)
    if not layer.has_kernels:
        return record
    if ours is None:
        return record | {"peer": "triton", "refusal": "it is not available"}
    return record if ours.refusal is None else record | {"peer": "triton", "refusal": ours.refusal}


def format_record(record: dict[str, Any]) -> str:
    reported = [
        f"{trial['backend']} {trial['refusal']}"
        if trial["refusal"] is not None
        else f"{trial['backend']} {trial['ms']:.3g} ms, "
        + ("not compared" if trial["excess"] is None else f"{trial['excess']:.2g} × rounding")
        for trial in record["trials"]
    ]
    shape = f"{record['method']} {record['dtype']} T = {record['T']} B = {record['B']}"
    nothing = "no backend is correct" if len(record["trials"]) > 1 else "no choice"
    return f"{shape}: {record['taken'] or nothing}; {'; '.join(reported)}"


def render_page(result: dict[str, Any]) -> str:
    """Render a table of all records, one row per backend."""
    cells = [row for record in result["records"] for row in format_self_check_rows(record)]
    return "\n\n".join([
        "# Backends on a GPU",
        "Self-check of `attention_backend: auto` for every backend that supports a method\n"
        "([how](../gpu.md#the-self-check)).\n"
        "Time is the forward and backward pass of one layer.\n"
        "The error is the largest of the output and all gradients, relative to rounding errors; up to 4 is correct.",
        *result.get("notes", ()),
        render_markdown_table(SELF_CHECK_HEADERS, cells),
        format_provenance(result),
    ]) + "\n"  # fmt: skip


def main() -> None:
    arguments = parse_arguments()
    result: dict[str, Any] = {**collect_provenance(__file__, arguments.device), "records": []}
    disable_tf32()
    gc.freeze()  # the check runs the garbage collector after each backend; skip imported objects
    for name in arguments.methods:
        for dtype in arguments.dtype:
            for length in arguments.lengths:
                for record in check_method(name, dtype, length, arguments):
                    print(format_record(record), flush=True)
                    result["records"].append(record)
                if arguments.json:
                    write_record(arguments.json, result, render_page(result))
    sys.exit(1 if any("refusal" in record for record in result["records"]) else 0)


if __name__ == "__main__":
    print_interrupts_in_one_line()
    main()
