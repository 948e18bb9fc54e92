#!/usr/bin/env python3
"""Count the instructions of kernels, an estimate of their speed that needs no GPU.

    python tools/bench/instructions.py OP [--arch 80 90] [--json FILE]

A streaming multiprocessor has four schedulers, each of which issues at most one warp instruction per clock. A kernel
that is bound by neither memory nor latency therefore takes at least (instructions × warps / 4) clocks for the scores
that a program computes in them. A score is a pair of a row and a column, with all heads. For a kernel that loops over
rows or columns, only the body of the most frequent loop is counted, without the code before and after it. If tiles at
the edges have separate code, the code of the other tiles is counted, which are the majority in a long sequence. For a
kernel whose programs compute several products, the loops of all are counted.

Two other units are counted next to the issue of instructions, in the same clocks. The load/store unit passes 128 bytes
per clock; equal addresses in a warp are counted separately, and bank conflicts are not counted. A transpose of 8 × 8
numbers in registers counts as 128 bytes. The tensor cores do 2,048 (sm_80) or, in products of warp groups, 4,096
(sm_90) half-precision operations per clock (NVIDIA A100 and H100 whitepapers). Products of single warps are slower on
sm_90: ptxas leaves six clocks between two products of 16 × 8 × 16, and four if the depth is 8.

`kernels/OP/aot_configs.py` lists the kernels of a step (`list_passes(arch) -> dict[str, list[PassKernel]]`: the op's
forward and backward pass, by what it computes). CUDA C++ kernels need NVRTC, which torch's CUDA wheels include.
"""

import argparse
import importlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import triton  # noqa: E402

from megatron.kernels.compile import SHARED_LIMIT, PassKernel, compile_kernel, disassemble  # noqa: E402
from megatron.kernels.cuda.compile import CudaKernel  # noqa: E402
from megatron.kernels.cuda.compile import compile_kernel as compile_cuda_kernel  # noqa: E402

GLOBAL_LOAD = re.compile(r"\bLDG(?:STS)?\.E(?:\.(?!U?\d+\b)\w+)*(?:\.U?(\d+))?")
SPILL = re.compile(r"\b(?:LDL|STL)\b")
SCHEDULERS = 4
"""Warp schedulers of a streaming multiprocessor (NVIDIA A100 and H100 whitepapers)."""
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);")
LABEL = re.compile(r"^\s*(\.L_[\w.]+):")
MATRIX_PRODUCT = re.compile(r"\bH?G?MMA\b")
"""Matrix products: HMMA on sm_80, HGMMA on sm_90."""
WARP_PRODUCT = re.compile(r"\bHMMA\.(\d+)\b")
WARP_PRODUCT_CLOCKS = {80: {"16816": 8, "1688": 4}, 90: {"16816": 6, "1688": 4}}
"""Clocks of a scheduler's tensor core for a product of 16 × 8 × 16 or 16 × 8 × 8, by architecture.

They are the smallest distances between two such products in the control codes that ptxas writes.
"""
GROUP_PRODUCT = re.compile(r"\bHGMMA\.(\d+)x(\d+)x(\d+)")
"""Rows, columns and depth of a warp group's product, as in HGMMA.64x64x16."""
GROUP_OPERATIONS = 1024
"""Half-precision operations per clock of a scheduler's tensor core in a warp group's product on sm_90."""
MEMORY_ACCESS = re.compile(r"^(?:@!?U?P\w+ )?(LDS|STS|LDG|STG|LDGSTS|LDL|STL|LDSM|STSM|MOVM|ATOM\w*|RED)\b(\S*)")
BARRIER = re.compile(r"\bBAR\.")
BRANCH = re.compile(r"\bBRA\b.*`\((\.L_[\w.]+)\)")


@dataclass(frozen=True)
class Instruction:
    """Machine instruction other than NOP. Addresses are bytes from the program's start."""

    address: int
    text: str
    target: int | None
    """Target address of a branch."""

    @property
    def is_product(self) -> bool:
        return MATRIX_PRODUCT.search(self.text) is not None

    @property
    def always_leaves(self) -> bool:
        """True if the instruction only continues at its target, or ends the program."""
        return self.text.startswith(("BRA `", "EXIT", "RET"))

    @property
    def may_end(self) -> bool:
        return self.text.startswith(("EXIT", "RET"))


def parse_instructions(disassembly: str) -> list[Instruction]:
    """Parse a disassembly into instructions, in order."""
    found: list[tuple[int, str]] = []
    labels: dict[str, int] = {}
    pending_labels: list[str] = []
    for line in disassembly.splitlines():
        if (label := LABEL.match(line)) is not None:
            pending_labels.append(label[1])
        elif (instruction := INSTRUCTION.match(line)) is not None:
            address, text = int(instruction[1], 16), instruction[2]
            labels |= dict.fromkeys(pending_labels, address)
            pending_labels = []
            if not text.startswith("NOP"):
                found.append((address, text))
    branches = {address: branch[1] for address, text in found if (branch := BRANCH.search(text)) is not None}
    return [Instruction(address, text, labels.get(branches.get(address, ""))) for address, text in found]


def select_instructions(disassembly: str, *, has_loop: bool, num_loops: int = 1) -> list[Instruction]:
    """Return the instructions of the most frequent loop, or of a program without loops, without NOPs.

    That loop is the shortest one with matrix products: other loops contain it, or also mask the ends of a row. Among
    the paths through a program, the shortest of those with the most products is selected.

    Args:
        num_loops: number of loops to select. The innermost loops are divided evenly in the order of the code, and the
            shortest of each share is selected.

    Raises:
        ValueError: if there is no loop, or if the loops cannot be divided evenly.
    """
    instructions = parse_instructions(disassembly)
    if not has_loop:
        return _find_shortest_way(instructions)
    # Programs end in a branch to itself, which is not a loop.
    ends = [(x.target, x.address) for x in instructions if x.target is not None and x.target < x.address]
    bodies = [[x for x in instructions if first <= x.address <= last] for first, last in ends]
    bodies = [body for body in bodies if any(x.is_product for x in body)]
    if not bodies:
        raise ValueError("there is no loop with matrix products in it")
    if num_loops == 1:
        return min(bodies, key=len)
    spans = [(body[0].address, body[-1].address) for body in bodies]
    inner = [
        body
        for body, (first, last) in sorted(zip(bodies, spans, strict=True), key=lambda pair: pair[1])
        if not any((first, last) != own and first <= own[0] and own[1] <= last for own in spans)
    ]
    share, rest = divmod(len(inner), num_loops)
    if rest or not share:
        raise ValueError(f"{len(inner)} loops with matrix products cannot be divided among {num_loops} products")
    return [x for i in range(num_loops) for x in min(inner[i * share : (i + 1) * share], key=len)]


def _find_shortest_way(instructions: list[Instruction]) -> list[Instruction]:
    """Return the path from a program's start to an end, without backward branches."""
    end: _Way = (0, 0, None)
    from_address: dict[int, _Way] = {}
    following = end
    for x in reversed(instructions):
        ways = [] if x.always_leaves else [following]
        if x.may_end:
            ways.append(end)
        elif x.target is not None and x.target > x.address:
            ways.append(from_address.get(x.target, end))  # a label may precede NOPs at a program's end
        products, below, _ = way = max(ways, key=lambda way: way[:2], default=end)
        following = from_address[x.address] = (products + x.is_product, below - 1, (x, way))
    chosen, step = [], following[2]
    while step is not None:
        chosen.append(step[0])
        step = step[1][2]
    return chosen


_Way = tuple[int, int, "tuple[Instruction, _Way] | None"]
"""Number of products, negative number of instructions, and the first instruction with the path after it."""


def count_loads(instructions: Iterable[Instruction]) -> dict[int, int]:
    """Count the loads from global memory by the bytes per thread and load."""
    widths = (int(load[1] or 32) // 8 for x in instructions if (load := GLOBAL_LOAD.search(x.text)) is not None)
    return dict(sorted(Counter(widths).items(), reverse=True))


def count_spills(instructions: Iterable[Instruction]) -> int:
    """Count the instructions that read or write spilled registers."""
    return sum(SPILL.search(x.text) is not None for x in instructions)


def count_memory_clocks(instructions: Iterable[Instruction]) -> int:
    """Count the clocks of the load/store unit for a warp: 32 threads times the bytes of each access, 128 per clock."""
    total = 0
    for x in instructions:
        if (access := MEMORY_ACCESS.search(x.text)) is None or " RZ, [RZ]" in x.text:
            continue
        kind, options = access.groups()
        parts = options.split(".")
        if kind in ("LDSM", "STSM"):  # matrices of 8 × 8 half-precision numbers, 128 bytes
            total += int(parts[-1]) if parts[-1].isdigit() else 1
        else:
            total += 4 if "128" in parts else 2 if "64" in parts else 1
    return total


def count_tensor_clocks(instructions: Iterable[Instruction], arch: int) -> float:
    """Count the clocks of a scheduler's tensor core for a warp's matrix products."""
    total = 0.0
    for x in instructions:
        if (product := WARP_PRODUCT.search(x.text)) is not None:
            total += WARP_PRODUCT_CLOCKS[arch][product[1]]
        elif (group := GROUP_PRODUCT.search(x.text)) is not None:
            rows, columns, depth = map(int, group.groups())
            total += 2 * rows // 4 * columns * depth / GROUP_OPERATIONS  # a warp has a quarter of the rows
    return total


@dataclass(frozen=True)
class KernelCounts:
    """Counts for the code selected by `select_instructions`, in one launch.

    Clocks are minimum clocks of a streaming multiprocessor per score.
    """

    clocks: float
    """Clocks to issue the instructions."""
    memory_clocks: float
    """Clocks of the load/store unit."""
    tensor_clocks: float
    """Clocks of the tensor cores."""
    barriers: int
    spills: int
    shared_bytes: int
    """Shared memory of a program."""
    loads: dict[int, int]

    def build_record(self) -> dict[str, Any]:
        return {
            "clocks": round(self.clocks, 2),
            "load/store clocks": round(self.memory_clocks, 2),
            "tensor clocks": round(self.tensor_clocks, 2),
            "barriers": self.barriers,
            "spills": self.spills,
            "shared bytes": self.shared_bytes,
            "loads by bytes": self.loads,
        }


def count_kernel(kernel: PassKernel, arch: int) -> KernelCounts:
    """Compile a kernel and count its instructions."""
    if isinstance(kernel.config, CudaKernel):
        cubin, _ = compile_cuda_kernel(kernel.config, arch)
        num_warps, shared_bytes = kernel.config.num_threads // 32, kernel.config.shared_bytes
    else:
        code = compile_kernel(kernel.config, arch)
        cubin, num_warps, shared_bytes = code.asm["cubin"], kernel.config.options["num_warps"], code.metadata.shared
    chosen = select_instructions(disassemble(cubin), has_loop=kernel.has_loop, num_loops=kernel.loops)
    per_score = num_warps / kernel.scores
    return KernelCounts(
        clocks=len(chosen) * per_score / SCHEDULERS,
        memory_clocks=count_memory_clocks(chosen) * per_score,
        tensor_clocks=count_tensor_clocks(chosen, arch) * per_score / SCHEDULERS,
        barriers=sum(BARRIER.search(x.text) is not None for x in chosen),
        spills=count_spills(chosen),
        shared_bytes=shared_bytes,
        loads=count_loads(chosen),
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Count instructions.")
    parser.add_argument("op", choices=["biased_attention", "cdape_attention"])
    parser.add_argument("--arch", nargs="+", type=int, default=[80, 90], choices=sorted(SHARED_LIMIT))
    parser.add_argument("--json", type=Path, help="write the table to this file")
    options = parser.parse_args(arguments)
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: its folder does not exist")
    record: dict[str, Any] = {"triton": triton.__version__, "unit": "clocks of a processor for a score, at least"}
    for arch in options.arch:
        record[f"sm_{arch}"] = {}
        for pass_name, kernels in (
            importlib.import_module(f"megatron.kernels.{options.op}.aot_configs").list_passes(arch).items()
        ):
            total, memory_total, rows = 0.0, 0.0, {}
            for kernel in kernels:
                counts, name = count_kernel(kernel, arch), kernel.config.name
                times = "" if kernel.launches == 1 else f", {kernel.launches} times"
                loads = ", ".join(f"{count} of {width} bytes" for width, count in counts.loads.items())
                print(
                    f"sm_{arch} {name}: {counts.clocks:.2f}{times}; load/store {counts.memory_clocks:.2f}, tensor "
                    f"{counts.tensor_clocks:.2f}; {counts.barriers} barriers, {counts.spills} spills; "
                    f"{counts.shared_bytes} bytes of shared memory; loads: {loads}",
                    flush=True,
                )
                total += kernel.launches * counts.clocks
                memory_total += kernel.launches * counts.memory_clocks
                rows[name] = {"times": kernel.launches, **counts.build_record()}
            print(
                f"sm_{arch} {pass_name}, forward and backward: {total:.2f}; load/store {memory_total:.2f}", flush=True
            )
            record[f"sm_{arch}"][pass_name] = rows
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
