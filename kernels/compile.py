"""Cross-compiles Triton kernels for GPUs that are not here and reports what they use.

    python -m kernels.compile [OP …] [--arch 80 90] [--json FILE] [--check FILE]

compiles the configurations that `kernels/OP/compiled.py` yields (`configurations() -> Iterator[Configuration]`) and
prints or records a table; without OP those of every folder that has a compiled.py. Speed cannot be told without a GPU,
but a kernel that no longer compiles, asks for more shared memory than the chip has (Triton notices only at launch) or
begins to spill registers can.
"""

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kernels.runtime import interpreted

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that one block may use (CUDA C++ Programming Guide, table of compute capabilities)."""


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel uses. Bytes of shared memory per block; registers, and bytes of the rest, per thread."""

    shared: int
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int


@dataclass(frozen=True)
class Configuration:
    """A kernel as it is launched for one shape."""

    name: str
    """Unique within its op, for example "forward H=12 d=64 bf16"."""
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    arches: tuple[int, ...] = field(default=(80, 90))


def resources(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    *,
    arch: int,
    num_warps: int = 4,
    num_stages: int = 2,
) -> Resources:
    """Compile `kernel` for compute capability `arch` (80 or 90) and read its resources. Needs no GPU.

    Args:
        kernel: a function decorated with `triton.jit`, in a process without TRITON_INTERPRET.
        signature: a type for each argument that is not a constexpr: "*fp16", "*fp32", "fp32", "i32" …; "i32:16" is an
            integer that is divisible by 16. Pointers are taken as aligned to 16 bytes, as PyTorch's tensors are.
        constexprs: the values of the constexpr arguments; None for a pointer that is absent.

    Raises:
        RuntimeError: the process runs the interpreter, so there is nothing to compile.
        ValueError: signature and constexprs do not name every argument exactly once.
    """
    if not isinstance(kernel, JITFunction):
        raise RuntimeError(f"{getattr(kernel, '__name__', kernel)} is interpreted; compile without TRITON_INTERPRET")
    given = [*signature, *constexprs]
    if sorted(given) != sorted(kernel.arg_names):
        wrong = sorted(set(given) ^ set(kernel.arg_names)) or sorted(set(signature) & set(constexprs))
        raise ValueError(f"{kernel.__name__}: arguments named in neither or wrongly: {', '.join(wrong)}")
    types = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, text in enumerate(types.values())
        if text.startswith("*") or text.endswith(":16")
    }
    types = {name: text.removesuffix(":16") for name, text in types.items()}
    compiled = triton.compile(
        ASTSource(kernel, types, constexprs=dict(constexprs), attrs=attributes),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True},
    )
    return Resources(shared=compiled.metadata.shared, **_assembled(compiled.asm["ptx"], arch))


def _assembled(ptx: str, arch: int) -> dict[str, int]:
    """Registers, stack and spills from `ptxas -v`, with the flags that Triton passes."""
    nvidia = triton.knobs.nvidia
    ptxas = (nvidia.ptxas if arch < 90 else nvidia.ptxas_blackwell).path
    target = re.search(r"^\.target (\S+?),?\s", ptx, re.MULTILINE)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [ptxas, "-v", "-lineinfo", "--regAllocOptLevel=2", f"--gpu-name={target[1]}", str(source)]
        log = subprocess.run([*command, "-o", str(source) + ".o"], capture_output=True, text=True, check=True).stderr
    patterns = {
        "registers": r"Used (\d+) registers",
        "stack": r"(\d+) bytes stack frame",
        "spill_stores": r"(\d+) bytes spill stores",
        "spill_loads": r"(\d+) bytes spill loads",
    }
    found = {name: [int(number) for number in re.findall(pattern, log)] for name, pattern in patterns.items()}
    assert all(found.values()), log
    return {name: max(numbers) for name, numbers in found.items()}


def all_ops() -> list[str]:
    """The ops whose kernels can be compiled here: the folders beside this file that have a compiled.py."""
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/compiled.py"))


def table(ops: Iterable[str], arches: Iterable[int] = (80, 90), sample: int = 1) -> dict[str, dict[str, int]]:
    """{"OP/NAME sm_80": resources} of every `sample`-th configuration of each op, printed as they are compiled.

    Raises:
        RuntimeError: a configuration asks for more shared memory than its chip has.
    """
    rows: dict[str, dict[str, int]] = {}
    sampled = [wanted for op in ops for wanted in _wanted(op, arches)[::sample]]
    for op, one, arch in sampled:
        used = resources(
            one.kernel,
            one.signature,
            one.constexprs,
            arch=arch,
            num_warps=one.num_warps,
            num_stages=one.num_stages,
        )
        key = f"{op}/{one.name} sm_{arch}"
        if used.shared > SHARED_LIMIT[arch]:
            raise RuntimeError(f"{key} needs {used.shared} bytes of shared memory; the chip has {SHARED_LIMIT[arch]}")
        if key in rows:
            raise RuntimeError(f"two configurations are called {key}")
        rows[key] = asdict(used)
        print(f"{key}: {', '.join(f'{name} {value}' for name, value in rows[key].items())}", flush=True)
    return rows


def _wanted(op: str, arches: Iterable[int]) -> list[tuple[str, Configuration, int]]:
    """Each configuration of an op with each of the architectures that it is for."""
    configurations = importlib.import_module(f"kernels.{op}.compiled").configurations()
    return [(op, one, arch) for one in configurations for arch in arches if arch in one.arches]


def _record(path: Path, ops: Iterable[str], rows: Mapping[str, Mapping[str, int]]) -> None:
    """Write the rows of `ops` in place of theirs in the file; rows of the other ops stay, if those still exist."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    others = set(all_ops()).difference(ops)
    rows = {name: row for name, row in kept.items() if name.split("/")[0] in others} | dict(rows)
    path.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse, before minutes of compiling, what could not be compiled, recorded or compared."""
    if unknown := [op for op in options.ops if op not in all_ops()]:
        parser.error(f"{unknown[0]} is no op; choose from {', '.join(all_ops())}")
    if options.sample < 1:
        parser.error(f"--sample is {options.sample}; it must be at least 1")
    if options.json and (options.sample > 1 or set(options.arch) != set(SHARED_LIMIT)):
        parser.error("--json records whole ops: leave --sample and --arch out")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: its folder does not exist")
    if options.check and not options.check.is_file():
        parser.error(f"--check {options.check}: no such file")
    if interpreted():
        parser.error("kernels are interpreted: unset TRITON_INTERPRET")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.compile", description="Compile kernels; report resources.")
    ops_help = "folders in kernels/, for example biased_attention; all that have a compiled.py if none is named"
    parser.add_argument("ops", nargs="*", metavar="OP", default=all_ops(), help=ops_help)
    parser.add_argument("--arch", nargs="+", type=int, default=[80, 90], choices=sorted(SHARED_LIMIT))
    parser.add_argument("--sample", type=int, default=1, help="every n-th configuration of each op only")
    parser.add_argument("--json", type=Path, help="record the table; rows of other ops in the file are kept")
    parser.add_argument("--check", type=Path, help="compare with a recorded table; exit 1 where they differ")
    options = parser.parse_args(arguments)
    _check(parser, options)
    rows = table(options.ops, options.arch, options.sample)
    if options.json:
        _record(options.json, options.ops, rows)
    if options.check:
        recorded = json.loads(options.check.read_text())
        different = [name for name, row in rows.items() if recorded.get(name) != row]
        for name in different:
            print(f"differs: {name}: recorded {recorded.get(name)}, compiled {rows[name]}", file=sys.stderr)
        return int(bool(different))
    return 0


if __name__ == "__main__":
    sys.exit(main())
