#!/usr/bin/env python3
"""Measure the clocks of a multiprocessor per instruction, to weight counted instructions.

    python tools/bench/instruction_rates.py --json rates.json

Each kernel (`cuda/instruction_rates.h`) issues one instruction from 4, 8 or 16 warps of every multiprocessor, in
sixteen independent chains. A record contains the clocks per warp instruction, as the median over multiprocessors.
For one instruction, the loop is also copied to the size of CDAPE's loops, which have 1,200 to 2,200 instructions. If
its clocks rise, those kernels wait for the instruction caches.
"""

import argparse
import ctypes
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.arguments import ToolParser, parse_device, parse_output_path, print_interrupts_in_one_line  # noqa: E402

if __name__ == "__main__":
    print_interrupts_in_one_line()

import torch  # noqa: E402

from megatron.kernels.cuda.compile import CudaKernel, launch_kernel  # noqa: E402
from tools.bench.error_gate import format_exception  # noqa: E402
from tools.records import collect_provenance, write_record  # noqa: E402

FOLDER = Path(__file__).parent / "cuda"
INSTRUCTIONS = {
    "MATRIX_PRODUCT": "mma m16n8k16, bfloat16",
    "TRANSPOSE": "movmatrix",
    "PACK": "cvt of two floats to bfloat16",
    "SHUFFLE": "shfl",
    "MULTIPLY_ADD": "fma, float32",
    "EXPONENTIAL": "ex2",
    "LOAD_4": "ld.shared, 4 bytes",
    "LOAD_16": "ld.shared, 16 bytes",
}
"""Instructions by name in the header."""
WARPS = (4, 8, 16)
COPIED, COPIES = "MULTIPLY_ADD", (16, 64, 128, 256)
"""Instruction whose loop is copied, and the numbers of copies: 256 to 4,096 instructions of 16 bytes."""
CDAPE_WARPS = 8
"""Warps of CDAPE's kernels on a multiprocessor."""
CHAINS, REPEATS, MEMORY_BYTES = 16, 256, 16384
"""Constants of the header instruction_rates.h: independent chains, repetitions, and bytes of shared memory."""


class RateArgs(ctypes.Structure):
    """Arguments of the kernels, as declared in the header."""

    _fields_ = (("clocks", ctypes.c_void_p), ("sums", ctypes.c_void_p))


def build_kernel(instruction: str, warps: int, copies: int = 1) -> CudaKernel:
    name = f"InstructionRate<{instruction}, {warps}, {copies}>"
    return CudaKernel(FOLDER, "instruction_rates.h", name, "RateArgs", 32 * warps, MEMORY_BYTES)


def measure_rate(instruction: str, warps: int, copies: int = 1) -> dict[str, Any]:
    """Return the record of an instruction, with its clocks or the reason why there are none."""
    size = f", loop of {copies * CHAINS:,}" if copies > 1 else ""
    record = {"op": "instruction_rate", "peer": INSTRUCTIONS[instruction] + size, "warps": warps}
    try:
        blocks = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        clocks = torch.zeros(blocks, dtype=torch.int64, device="cuda")
        sums = torch.zeros(blocks, dtype=torch.float32, device="cuda")
        for _ in range(2):  # the first launch loads the code
            arguments = RateArgs(clocks.data_ptr(), sums.data_ptr())
            launch_kernel(build_kernel(instruction, warps, copies), (1, blocks), arguments)
        taken = statistics.median(clocks.tolist())
    except Exception as failure:  # continue with the other instructions
        return {**record, "refusal": format_exception(failure)}
    return {**record, "clocks": round(taken / (CHAINS * REPEATS * warps), 3)}


def parse_arguments() -> argparse.Namespace:
    parser = ToolParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=parse_device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=parse_output_path, help="output file of the records")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    result: dict[str, Any] = {**collect_provenance(__file__, arguments.device), "records": []}

    def add(record: dict[str, Any]) -> None:
        result["records"].append(record)
        value = record.get("refusal") or f"{record['clocks']:.3f} clocks from {record['warps']} warps"
        print(f"{record['peer']:<32} {value}", flush=True)
        if arguments.json is not None:
            write_record(arguments.json, result)

    if arguments.device == "cpu":
        add({"op": "instruction_rate", "peer": "all", "refusal": "requires a CUDA device"})
        return
    for instruction in INSTRUCTIONS:
        for warps in WARPS:
            add(measure_rate(instruction, warps))
    for copies in COPIES:
        add(measure_rate(COPIED, CDAPE_WARPS, copies))
    sys.exit(any("refusal" in record for record in result["records"]))


if __name__ == "__main__":
    main()
