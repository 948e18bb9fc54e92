"""Cross-compile Triton kernels for GPUs that this machine lacks, and report their resource usage.

    python -m megatron.kernels.compile [OP …] [--arch 80 90] [--sample] [--json FILE]

This compiles the configurations of `kernels/OP/aot_configs.py` (`list_configurations() -> Iterator[KernelConfig]`) and
prints a table, with --json also to a file. Without OP it compiles every folder that has an aot_configs.py. Speed cannot
be measured without a GPU. The following problems can be detected:

- a kernel does not compile any more
- a kernel needs more shared memory than the chip has, which Triton notices only at launch
- a kernel spills more registers than its budget, which is 0 unless its op gives a reason
- a kernel is miscompiled in the one known way: it reads uninitialized uniform registers (`find_uninitialized_reads`)

These are limits, not a record: registers and spills vary within them with every version of Triton and ptxas.
"""

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from megatron.kernels.cuda.compile import CudaKernel
from megatron.kernels.runtime import is_interpreted, list_compiled_kernels

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
"""Maximum shared memory of one block, in bytes (CUDA C++ Programming Guide, table of compute capabilities)."""
FIRST_WITH_WARP_GROUPS = 90
"""Lowest compute capability whose matrix products use warp groups."""
SPILL_BUDGET = 0
"""Maximum spills of a thread, in bytes written or read, unless the op's aot_configs.py sets more and gives a reason.

Tiles that are too large for the registers spill far more: 4 to 10 KB (docs/log.md).
"""
BUDGETED_TRITON = "3.7.1"
"""Version of Triton for which the spills were counted: the pinned one."""
OTHER_TRITON_ALLOWANCE = 64
"""Bytes by which spills may exceed a budget with another version of Triton.

With Triton 3.9, CDAPE's mix_bwd spills 28 to 64 bytes on sm_90 with 16 heads and five taps or with 32 heads; with 3.7.1
it spills none there. Both versions of ptxas give the same counts, so Triton's code differs. With 16 heads, one row or
eight warps avoid the spills, but took 1.4 and 2.5 times as long on an H200 (docs/results/gpu_tiles.json, three taps).
"""
SPILL_BUDGET_FLOAT32 = 2048
"""Spill budget for float32 products, whose operands need twice the registers, and for the widest processors.

These spills stay in the L1 cache.
"""
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*([^;]*);", re.MULTILINE)
_REGISTER = re.compile(r"\bUR(\d+)\b")
_UNIFORM_RESULTS = ("U", "R2UR", "S2UR", "CS2UR", "VOTEU", "REDUX")
"""Prefixes of instructions whose first uniform register is their result."""
_OTHER_RESULTS = ("UISETP", "UPLOP3", "UR2UP", "UBLK", "UTMA")
"""Prefixes of those among them whose result is a predicate or in memory."""
_DESCRIPTOR = re.compile(r"\b(g?)desc\[UR(\d+)\]")
_CONSTANT = re.compile(r"\bc\[[^\]]*\]\[[^\]]*\]")
_LEFT_IN_REGISTERS = re.compile(r"\bR\w+(?:\.reuse)?, R\w+(?:\.reuse)?, gdesc")
"""Product whose left factor is in registers: its descriptor covers only the right factor, the last two registers of
four.
"""


@dataclass(frozen=True)
class KernelResources:
    """Resource usage of one compiled kernel.

    Shared memory is in bytes per block. Registers are per thread; all other values are bytes per thread.
    """

    shared: int
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    uninitialized_reads: int = 0
    """Number of instructions that read an uninitialized uniform register (`find_uninitialized_reads`)."""


@dataclass(frozen=True)
class KernelConfig:
    """Kernel with its launch configuration for one shape."""

    name: str
    """Unique name within its op, for example "forward H=12 d=64 bf16"."""
    kernel: Any
    """Function decorated with `triton.jit`, in a process without TRITON_INTERPRET."""
    signature: dict[str, Any]
    """Type of each argument that is not a constexpr: "*fp16", "*fp32", "fp32", "i32" …; "i32:16" is an integer
    divisible by 16. Pointers count as aligned to 16 bytes, as PyTorch's tensors are. A tuple has one type per
    field, None for an absent one.
    """
    constexprs: dict[str, Any]
    """Values of the constexpr arguments; None for an absent pointer."""
    options: dict[str, Any]
    """Compiler options of the launch: `Tile.options`."""
    arches: tuple[int, ...] = field(default=(80, 90))
    spill_budget: int = SPILL_BUDGET

    def describe_exceeded_limit(self, used: KernelResources, arch: int) -> str | None:
        """Describe the first limit of compute capability `arch` that the usage exceeds, or return None."""
        if used.shared > SHARED_LIMIT[arch]:
            return f"needs {used.shared} bytes of shared memory; the chip has {SHARED_LIMIT[arch]}"
        if used.uninitialized_reads:
            return f"is miscompiled: {used.uninitialized_reads} instructions read uninitialized uniform registers"
        budget = self.spill_budget + (0 if triton.__version__ == BUDGETED_TRITON else OTHER_TRITON_ALLOWANCE)
        if max(used.spill_stores, used.spill_loads) > budget:
            spilled = f"{used.spill_stores} bytes written and {used.spill_loads} read"
            return f"spills registers: {spilled} per thread; the budget is {budget}"
        return None


@dataclass(frozen=True)
class PassKernel:
    """Kernel of a forward and backward pass, in Triton or in CUDA C++."""

    config: KernelConfig | CudaKernel
    scores: float
    """Scores that a program computes: per loop iteration if `has_loop`, otherwise in total."""
    has_loop: bool
    launches: int = 1
    """Number of launches per pass."""
    loops: int = 1
    """Number of products that different programs of the kernel compute, each with loops of its own."""


FLOAT_ARGUMENTS = ("scale", "above", "largest")
"""Arguments that are float32 numbers."""
INTEGER_POINTERS = ("document_starts_ptr",)
FLOAT64_POINTERS = ("key_bias_ptr",)


def build_signature(
    kernel: Any,
    constexprs: Collection[str],
    dtype_name: str,
    float32: Collection[str],
    aligned: Collection[str] = (),
    tuples: Mapping[str, Any] = MappingProxyType({}),
    absent: Collection[str] = (),
) -> dict[str, Any]:
    """Build the signature of a kernel from the names of its arguments.

    Names that end in `ptr` are pointers, strides are integers divisible by 16, and all others are integers except
    FLOAT_ARGUMENTS, INTEGER_POINTERS and FLOAT64_POINTERS.

    Args:
        constexprs: names of constexpr arguments, which have no type.
        dtype_name: compute type: bf16, fp16 or fp32.
        float32: pointers to float32, whatever the compute type.
        aligned: integers divisible by 16, in addition to strides.
        tuples: NamedTuple class of each argument that is one, by name. Its fields are named like arguments.
        absent: fields that are None.
    """

    def type_of(name: str) -> str:
        if name in INTEGER_POINTERS:
            return "*i32"
        if name in FLOAT64_POINTERS:
            return "*fp64"
        if name.endswith("ptr"):
            return "*fp32" if name in float32 else f"*{dtype_name}"
        if name in FLOAT_ARGUMENTS:
            return "fp32"
        return "i32:16" if name.startswith("stride_") or name in aligned else "i32"

    signature: dict[str, Any] = {}
    for name in kernel.arg_names:
        if name in tuples:
            fields = tuples[name]._fields
            signature[name] = tuples[name](*(type_of(field) if field not in absent else None for field in fields))
        elif name not in constexprs:
            signature[name] = type_of(name)
    return signature


def measure_resources(config: KernelConfig, arch: int) -> KernelResources:
    """Compile a kernel with `compile_kernel` and return its resource usage."""
    code = compile_kernel(config, arch)
    reads = len(find_uninitialized_reads(disassemble(code.asm["cubin"])))
    return KernelResources(code.metadata.shared, **_assemble_ptx(code.asm["ptx"], arch), uninitialized_reads=reads)


def compile_kernel(config: KernelConfig, arch: int) -> Any:
    """Compile a kernel for compute capability `arch` (80 or 90) and return Triton's compiled kernel. Needs no GPU.

    Raises:
        RuntimeError: if the process runs the interpreter, which has nothing to compile.
        ValueError: if signature and constexprs do not name every argument exactly once.
    """
    kernel, signature, constexprs = config.kernel, config.signature, config.constexprs
    if not isinstance(kernel, JITFunction):
        raise RuntimeError(f"{getattr(kernel, '__name__', kernel)} is interpreted; compile without TRITON_INTERPRET")
    named = [*signature, *constexprs]
    if sorted(named) != sorted(kernel.arg_names):
        wrong = sorted(set(named) ^ set(kernel.arg_names)) or sorted(set(signature) & set(constexprs))
        raise ValueError(f"{kernel.__name__}: arguments missing, unknown or duplicated: {', '.join(wrong)}")
    constants: dict[Any, Any] = dict(constexprs)
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}

    def build_type(text: Any, path: tuple[int, ...]) -> Any:
        if isinstance(text, tuple):
            fields = [build_type(field, (*path, position)) for position, field in enumerate(text)]
            return type(text)(*fields) if hasattr(text, "_fields") else tuple(fields)
        if text is None:
            constants[path] = None
            return "constexpr"
        if text.startswith("*") or text.endswith(":16"):
            attributes[path] = [["tt.divisibility", 16]]
        return text.removesuffix(":16")

    types: dict[str, Any] = {}
    for index, name in enumerate(kernel.arg_names):
        types[name] = build_type(signature.get(name, "constexpr"), (index,))
    return triton.compile(
        ASTSource(kernel, types, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", arch, 32),
        options=config.options,
    )


def _assemble_ptx(ptx: str, arch: int) -> dict[str, int]:
    """Return registers, stack and spills reported by `ptxas -v`, with the program and the flags that Triton uses."""
    ptxas = get_ptxas(arch).path
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
    counts = {name: [int(number) for number in re.findall(pattern, log)] for name, pattern in patterns.items()}
    assert all(counts.values()), log
    return {name: max(numbers) for name, numbers in counts.items()}


def disassemble(cubin: bytes) -> str:
    """Return the machine instructions of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def list_miscompiled_kernels() -> list[str]:
    """Return the names of launched kernels that ptxas miscompiled: they read uninitialized uniform registers.

    Only programs for Hopper can be affected.

    Raises:
        OSError: if Triton has no disassembler.
        subprocess.CalledProcessError: if the disassembler cannot read a program.
    """
    programs = [code for code in list_compiled_kernels() if code.metadata.target.arch >= FIRST_WITH_WARP_GROUPS]
    wrong = [code.metadata.name for code in programs if find_uninitialized_reads(disassemble(code.asm["cubin"]))]
    return list(dict.fromkeys(wrong))


def find_uninitialized_reads(disassembly: str) -> list[str]:
    """List the instructions of a program that read a uniform register before any instruction writes it.

    ptxas 12.8 (part of Triton 3.6 and 3.7) miscompiles some programs in this way. A warp's uniform registers hold,
    among others, the shared memory descriptors of Hopper's warp-group products, up to four registers per product. There
    are 63 of them. If a loop's descriptors did not fit, ptxas left out the instruction that starts a chain of them. On
    an H200 a product then read the wrong shared memory, or memory that does not exist. Neither Triton nor ptxas reports
    this, and the interpreter cannot. ptxas without optimization, and ptxas of CUDA 13.0, compile the same program
    correctly.

    An empty result proves nothing: instructions are read in text order, so a register that had another value before the
    missing instruction is not detected. Only a run on a GPU shows whether a kernel is correct.

    Args:
        disassembly: output of nvdisasm.

    Returns:
        Each such instruction once, as disassembled, in order.
    """
    written: set[int] = set()
    found = []
    for name, text in _INSTRUCTION.findall(disassembly):
        result = _find_result(name, text)
        if not _list_sources(name, text, result) <= written:
            found.append(f"{name} {text.strip()}")
        if result is not None:
            written |= set(range(result, result + _count_registers(name)))
    return list(dict.fromkeys(found))


def _find_result(name: str, text: str) -> int | None:
    """Return the first uniform register that an instruction writes, or None. Loads, for example, only read them."""
    first = _REGISTER.search(text)
    has_result = name.startswith(_UNIFORM_RESULTS) and not name.startswith(_OTHER_RESULTS)
    return int(first[1]) if first is not None and has_result else None


def _count_registers(name: str) -> int:
    """Return the number of registers of a result or a source of a uniform instruction."""
    return 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1


def _list_sources(name: str, text: str, result: int | None) -> set[int]:
    """Return all uniform registers that an instruction reads."""
    if result is not None:
        indices = {int(number) for constant in _CONSTANT.findall(text) for number in _REGISTER.findall(constant)}
        sources = [int(number) for number in _REGISTER.findall(_CONSTANT.sub("", text))][1:]
        # In a .WIDE product only the third source, the addend, is a pair.
        widths = [2 if ".64" in name or (".WIDE" in name and place == 2) else 1 for place in range(len(sources))]
        pairs = zip(sources, widths, strict=True)
        return indices | {register for source, width in pairs for register in range(source, source + width)}
    found: set[int] = set()
    for of_product, number in _DESCRIPTOR.findall(text):
        first, count = int(number), 4 if of_product else 2
        skipped = 2 if of_product and _LEFT_IN_REGISTERS.search(text) else 0
        found |= set(range(first + skipped, first + count))
    return found | {int(number) for number in _REGISTER.findall(_DESCRIPTOR.sub("", text))}


def list_ops() -> list[str]:
    """Return the ops that this module can compile: the folders next to this file with an aot_configs.py."""
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/aot_configs.py"))


def measure_ops(
    ops: Iterable[str], arches: Iterable[int] = (80, 90), sample: bool = False
) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Compile all configurations or a sample, and print their resources.

    Returns:
        The resources by "OP/NAME sm_80", and a line for each exceeded limit.

    Raises:
        RuntimeError: if two configurations have the same name.
    """
    rows: dict[str, dict[str, int]] = {}
    complaints = []
    targets = [_list_targets(op, arches) for op in ops]
    for op, config, arch in chain.from_iterable(map(_choose_sample, targets) if sample else targets):
        used = measure_resources(config, arch)
        key = f"{op}/{config.name} sm_{arch}"
        if key in rows:
            raise RuntimeError(f"two configurations have the name {key}")
        rows[key] = asdict(used)
        print(f"{key}: {', '.join(f'{name} {value}' for name, value in rows[key].items())}", flush=True)
        if (complaint := config.describe_exceeded_limit(used, arch)) is not None:
            complaints.append(f"{key} {complaint}")
    return rows, complaints


def _list_targets(op: str, arches: Iterable[int]) -> list[tuple[str, KernelConfig, int]]:
    """Return each configuration of an op with each of its architectures."""
    configurations = importlib.import_module(f"megatron.kernels.{op}.aot_configs").list_configurations()
    return [(op, config, arch) for config in configurations for arch in arches if arch in config.arches]


def _choose_sample(targets: list[tuple[str, KernelConfig, int]]) -> list[tuple[str, KernelConfig, int]]:
    """Select one configuration of middle size of each of an op's kernels, alternating between the architectures."""
    sample = []
    for number, name in enumerate(dict.fromkeys(config.kernel.__name__ for _, config, _ in targets)):
        own = [target for target in targets if target[1].kernel.__name__ == name]
        arches = list(dict.fromkeys(arch for *_, arch in own))
        own = [target for target in own if target[-1] == arches[number % len(arches)]]
        sample.append(own[len(own) // 2])
    return sample


def _check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Reject options that cannot be compiled or written, before minutes of compiling."""
    if unknown := [op for op in options.ops if op not in list_ops()]:
        parser.error(f"{unknown[0]} is not an op; choose from {', '.join(list_ops())}")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: its folder does not exist")
    if is_interpreted():
        parser.error("kernels are interpreted: unset TRITON_INTERPRET")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m megatron.kernels.compile", description="Compile kernels.")
    ops_help = "folders in kernels/, for example biased_attention; default: all with an aot_configs.py"
    parser.add_argument("ops", nargs="*", metavar="OP", default=list_ops(), help=ops_help)
    parser.add_argument("--arch", nargs="+", type=int, default=[80, 90], choices=sorted(SHARED_LIMIT))
    parser.add_argument("--sample", action="store_true", help="one configuration of each kernel only")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    options = parser.parse_args(arguments)
    _check_options(parser, options)
    rows, complaints = measure_ops(options.ops, options.arch, options.sample)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    for line in complaints:
        print(f"limit exceeded: {line}", file=sys.stderr)
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
