#!/usr/bin/env python3
"""What `attention_backend: auto` would take on this device, and why: the check that a run makes when it is built, for
some methods and shapes, always anew.

    python tools/gpu/self_check.py --methods cdape kerple_log --lengths 512 --json self_check.json

Needs torch and triton alone. The exit code is 1 if our kernels are refused where they should serve.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from megatron.attention.backends.registry import find_fallback_reason, list_candidates  # noqa: E402
from megatron.attention.check.evidence import Trial  # noqa: E402
from megatron.attention.check.problem import build_problem  # noqa: E402
from megatron.attention.check.trials import try_backends  # noqa: E402
from megatron.position.encoding import Encoding  # noqa: E402
from megatron.position.facts import AttentionDims  # noqa: E402
from megatron.position.processor import Processor  # noqa: E402
from megatron.position.registry import build_encoding, build_processor  # noqa: E402
from megatron.position.token_range import ALL_HEADS, TokenRange  # noqa: E402
from tools.arguments import (  # noqa: E402
    ToolParser,
    int_at_least,
    parse_device,
    parse_output_path,
    print_interrupts_in_one_line,
)
from tools.records import collect_provenance, write_record  # noqa: E402

METHODS: dict[str, tuple[str, str | None]] = {
    "cdape": ("kerple_log", "cdape"),
    "kerple_log": ("kerple_log", None),
    "fire": ("fire", None),
    "rotary": ("rotary", None),
}
"""Encoding and processor; one of each kind of kernel."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CHUNK_ROWS = 128
"""`attention_chunk_rows` as it is by default."""


def parse_arguments() -> argparse.Namespace:
    parser = ToolParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=parse_device, default=default, help="cpu or cuda")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="all if absent")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bf16"], help="types of q, k, v")
    parser.add_argument("--lengths", nargs="+", type=int_at_least(1), default=[512], help="T")
    parser.add_argument("--batch", type=int_at_least(1), default=8, help="sequences")
    parser.add_argument("--heads", type=int_at_least(1), default=16, help="heads")
    parser.add_argument("--dim", type=int_at_least(2), default=64, help="of a head")
    parser.add_argument("--width", type=int_at_least(1), default=32, help="of the processor")
    parser.add_argument("--json", type=parse_output_path, help="where records go")
    arguments = parser.parse_args()
    arguments.device = torch.device(arguments.device).type
    return arguments


def build_method(name: str, arguments: argparse.Namespace, length: int) -> tuple[Encoding, Processor | None]:
    """The encoding and processor of a method, with fresh parameters."""
    size = arguments.heads * arguments.dim
    dims = AttentionDims(arguments.heads, arguments.dim, size, length, length)
    torch.manual_seed(0)
    encoding_name, processor_name = METHODS[name]
    encoding = build_encoding(encoding_name, dims)
    if processor_name is None:
        return encoding, None
    options = {"width": arguments.width}
    return encoding, build_processor(processor_name, dims, options, has_bias=encoding.adds_bias)


def check_method(name: str, dtype: str, length: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The record of one method at one length in one type."""
    encoding, processor = build_method(name, arguments, length)
    problem = build_problem(
        encoding,
        processor,
        (TokenRange(0, length),),
        batch=arguments.batch,
        window=None,
        heads=ALL_HEADS,
        dtype=DTYPES[dtype],
        device=torch.device(arguments.device),
    )
    candidates = list_candidates(CHUNK_ROWS, problem.encoding, problem.processor)
    (inputs,) = problem.list_inputs()
    left = {name: find_fallback_reason(backend, inputs) for name, backend in candidates.items()}
    trials = [Trial(name, f"leaves {why} to row blocks") for name, why in left.items() if why is not None]
    trials += try_backends(problem, {name: candidates[name] for name, why in left.items() if why is None})
    right = sorted((t for t in trials if t.milliseconds is not None), key=lambda t: t.milliseconds or 0.0)
    record: dict[str, Any] = {
        "op": "self_check",
        "method": name,
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
                "excess": trial.largest_excess if trial.excess else None,
                "memory_mb": trial.memory_mb,
                "first_seconds": trial.first_seconds,
                "refusal": trial.refusal,
            }
            for trial in trials
        ],
    }
    ours = next((trial for trial in trials if trial.backend == "triton"), None)
    if ours is None:
        return record | {"peer": "triton", "refusal": "it is not here"}
    return record if ours.refusal is None else record | {"peer": "triton", "refusal": ours.refusal}


def format_record(record: dict[str, Any]) -> str:
    """A line for the console."""
    told = [
        f"{trial['backend']} {trial['refusal']}"
        if trial["refusal"] is not None
        else f"{trial['backend']} {trial['ms']:.3g} ms, "
        + ("not compared" if trial["excess"] is None else f"{trial['excess']:.2g} × rounding")
        for trial in record["trials"]
    ]
    shape = f"{record['method']} {record['dtype']} T = {record['T']} B = {record['B']}"
    return f"{shape}: {record['taken'] or 'nothing is right'}; {'; '.join(told)}"


def main() -> None:
    arguments = parse_arguments()
    result: dict[str, Any] = {**collect_provenance(__file__, arguments.device), "records": []}
    for name in arguments.methods:
        for dtype in arguments.dtype:
            for length in arguments.lengths:
                record = check_method(name, dtype, length, arguments)
                print(format_record(record), flush=True)
                result["records"].append(record)
                if arguments.json:
                    write_record(arguments.json, result)
    sys.exit(1 if any("refusal" in record for record in result["records"]) else 0)


if __name__ == "__main__":
    print_interrupts_in_one_line()
    main()
