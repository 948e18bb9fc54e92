"""How many instructions kernels issue: what can be told of their speed without a GPU.

    python -m kernels.instructions OP [--arch 80 90] [--json FILE]

A processor of a GPU issues at most one instruction of a warp per clock in each of its four parts, so a kernel that is
bound by neither memory nor latency takes at least (instructions × warps / 4) clocks for the scores that a program
computes in them. A score here is a pair of a row and a column, with all heads. Of a kernel that loops over rows or
columns the body of the loop that runs most is counted, and not what comes once before and after it.

`kernels/OP/compiled.py` says which kernels a step launches (`passes(arch) -> dict[str, list[Launch]]`: the op's forward
and backward pass, by what it computes).
"""

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from kernels.compile import SHARED_LIMIT, Configuration, compiled

PARTS = 4
"""Of a processor, each with a scheduler of its own (NVIDIA A100 and H100 whitepapers)."""
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);")
LABEL = re.compile(r"^\s*(\.L_[\w.]+):")
PRODUCT = re.compile(r"\bH?G?MMA\b")
"""Of matrices: HMMA on sm_80, HGMMA on sm_90."""
BRANCH = re.compile(r"\bBRA\b.*`\((\.L_[\w.]+)\)")


@dataclass(frozen=True)
class Launch:
    """A kernel of a forward and backward pass."""

    configuration: Configuration
    scores: float
    """That a program computes: in a turn of its loop if `looped`, else in all."""
    looped: bool
    times: int = 1
    """In the pass."""


def count(disassembly: str, *, looped: bool) -> int:
    """Instructions of the loop that runs most, or of the whole program; NOPs are not counted.

    Of the loops that multiply matrices that is the shortest: others contain it, or mask the ends of a row besides.

    Raises:
        ValueError: there is no loop.
    """
    places: list[int] = []
    products: list[int] = []
    labels: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    waiting: list[str] = []
    for line in disassembly.splitlines():
        if (label := LABEL.match(line)) is not None:
            waiting.append(label[1])
        elif (found := INSTRUCTION.match(line)) is not None:
            place = int(found[1], 16)
            labels |= dict.fromkeys(waiting, place)
            waiting = []
            if not found[2].startswith("NOP"):
                places.append(place)
            if PRODUCT.search(found[2]) is not None:
                products.append(place)
            if (branch := BRANCH.search(found[2])) is not None:
                branches.append((place, branch[1]))
    if not looped:
        return len(places)
    # Code ends in a branch to itself, which is no loop.
    loops = [(labels[label], place) for place, label in branches if labels.get(label, place) < place]
    loops = [(first, last) for first, last in loops if any(first <= place <= last for place in products)]
    if not loops:
        raise ValueError("there is no loop with matrix products in it")
    return min(sum(first <= place <= last for place in places) for first, last in loops)


def disassembled(code: Any) -> str:
    """What Triton compiled, as the processor's instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def clocks(launch: Launch, arch: int) -> float:
    """The least clocks of a processor for a score, in one launch."""
    one = launch.configuration
    code = compiled(one.kernel, one.signature, one.constexprs, arch=arch, options=one.options)
    return count(disassembled(code), looped=launch.looped) * one.options["num_warps"] / PARTS / launch.scores


def table(launches: Iterable[Launch], arch: int) -> Iterator[tuple[str, int, float]]:
    """Name, how often it runs, and clocks of each kernel of a pass."""
    for launch in launches:
        yield launch.configuration.name, launch.times, clocks(launch, arch)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.instructions", description="Count kernels' instructions.")
    parser.add_argument("op", choices=["biased_attention", "cdape_attention"])
    parser.add_argument("--arch", nargs="+", type=int, default=[80, 90], choices=sorted(SHARED_LIMIT))
    parser.add_argument("--json", type=Path, help="write the table to this file")
    options = parser.parse_args(arguments)
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: its folder does not exist")
    record: dict[str, Any] = {"triton": triton.__version__, "unit": "clocks of a processor for a score, at least"}
    for arch in options.arch:
        record[f"sm_{arch}"] = {}
        for name, launches in importlib.import_module(f"kernels.{options.op}.compiled").list_passes(arch).items():
            rows = list(table(launches, arch))
            for kernel, times, least in rows:
                print(f"sm_{arch} {kernel}: {least:.2f}{'' if times == 1 else f', {times} times'}", flush=True)
            total = sum(times * least for _, times, least in rows)
            print(f"sm_{arch} {name}, forward and backward: {total:.1f}", flush=True)
            counted = {kernel: {"times": times, "clocks": round(least, 2)} for kernel, times, least in rows}
            record[f"sm_{arch}"][name] = counted
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
