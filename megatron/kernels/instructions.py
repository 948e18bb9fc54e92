"""Count the instructions of kernels, an estimate of their speed that needs no GPU.

    python -m megatron.kernels.instructions OP [--arch 80 90] [--json FILE]

A streaming multiprocessor has four schedulers, each of which issues at most one warp instruction per clock. A kernel
that is bound by neither memory nor latency therefore takes at least (instructions × warps / 4) clocks for the scores
that a program computes in them. A score is a pair of a row and a column, with all heads. For a kernel that loops over
rows or columns, only the body of the most frequent loop is counted, without the code before and after it. If tiles at
the edges have separate code, the code of the other tiles is counted, which are the majority in a long sequence.

`kernels/OP/aot_configs.py` lists the kernels of a step (`list_passes(arch) -> dict[str, list[PassKernel]]`: the op's
forward and backward pass, by what it computes).
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

import triton

from megatron.kernels.compile import SHARED_LIMIT, KernelConfig, compile_kernel, disassemble

GLOBAL_LOAD = re.compile(r"\bLDG(?:STS)?\.E(?:\.(?!U?\d+\b)\w+)*(?:\.U?(\d+))?")
SPILL = re.compile(r"\b(?:LDL|STL)\b")
SCHEDULERS = 4
"""Warp schedulers of a streaming multiprocessor (NVIDIA A100 and H100 whitepapers)."""
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);")
LABEL = re.compile(r"^\s*(\.L_[\w.]+):")
MATRIX_PRODUCT = re.compile(r"\bH?G?MMA\b")
"""Matrix products: HMMA on sm_80, HGMMA on sm_90."""
BRANCH = re.compile(r"\bBRA\b.*`\((\.L_[\w.]+)\)")


@dataclass(frozen=True)
class PassKernel:
    """Kernel of a forward and backward pass."""

    config: KernelConfig
    scores: float
    """Scores that a program computes: per loop iteration if `has_loop`, otherwise in total."""
    has_loop: bool
    launches: int = 1
    """Number of launches per pass."""


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


def select_instructions(disassembly: str, *, has_loop: bool) -> list[Instruction]:
    """Return the instructions of the most frequent loop, or of a program without loops, without NOPs.

    That loop is the shortest one with matrix products: other loops contain it, or also mask the ends of a row. Among
    the paths through a program, the shortest of those with the most products is selected.

    Raises:
        ValueError: if there is no loop.
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
    return min(bodies, key=len)


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


@dataclass(frozen=True)
class KernelCounts:
    """Counts for the code selected by `select_instructions`, in one launch."""

    clocks: float
    """Minimum clocks of a streaming multiprocessor per score."""
    spills: int
    loads: dict[int, int]


def count_kernel(kernel: PassKernel, arch: int) -> KernelCounts:
    """Compile a kernel and count its instructions."""
    chosen = select_instructions(disassemble(compile_kernel(kernel.config, arch)), has_loop=kernel.has_loop)
    clocks = len(chosen) * kernel.config.options["num_warps"] / SCHEDULERS / kernel.scores
    return KernelCounts(clocks, count_spills(chosen), count_loads(chosen))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m megatron.kernels.instructions", description="Count instructions.")
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
            total, rows = 0.0, {}
            for kernel in kernels:
                counts, name = count_kernel(kernel, arch), kernel.config.name
                times = "" if kernel.launches == 1 else f", {kernel.launches} times"
                loads = ", ".join(f"{count} of {width} bytes" for width, count in counts.loads.items())
                print(
                    f"sm_{arch} {name}: {counts.clocks:.2f}{times}; {counts.spills} spills; loads: {loads}", flush=True
                )
                total += kernel.launches * counts.clocks
                rows[name] = {
                    "times": kernel.launches,
                    "clocks": round(counts.clocks, 2),
                    "spills": counts.spills,
                    "loads by bytes": counts.loads,
                }
            print(f"sm_{arch} {pass_name}, forward and backward: {total:.1f}", flush=True)
            record[f"sm_{arch}"][pass_name] = rows
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
