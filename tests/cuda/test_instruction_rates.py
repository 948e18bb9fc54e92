"""Kernels that measure single instructions: what is compiled is what is measured."""

import re
import subprocess
from pathlib import Path

import pytest
import triton

from megatron.kernels.cuda.compile import compile_kernel
from tools.bench.instruction_rates import CHAINS, COPIED, COPIES, build_kernel

OPCODES = {
    "MATRIX_PRODUCT": "HMMA",
    "TRANSPOSE": "MOVM",
    "PACK": "F2FP",
    "EXPONENTIAL": "MUFU",
    "LOAD_4": "LDS",
    "LOAD_16": "LDS",
}
"""Opcodes that nothing else in the kernel has."""


def count_opcode(instruction: str, copies: int, arch: int, folder: Path) -> int:
    code, _ = compile_kernel(build_kernel(instruction, 8, copies), arch)
    (folder / "kernel.cubin").write_bytes(code)
    tool = Path(triton.knobs.nvidia.cuobjdump.path).with_name("nvdisasm")
    found = subprocess.run([str(tool), "kernel.cubin"], cwd=folder, capture_output=True, text=True, check=True)
    return len(re.findall(rf"\s{OPCODES.get(instruction, 'FFMA')}[. ]", found.stdout))


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("instruction", OPCODES)
def test_a_kernel_issues_its_instruction_once_in_every_chain(instruction: str, arch: int, tmp_path: Path) -> None:
    assert count_opcode(instruction, 1, arch, tmp_path) == CHAINS


@pytest.mark.parametrize("copies", COPIES)
def test_a_copied_loop_has_all_its_instructions(copies: int, tmp_path: Path) -> None:
    """The kernel adds a few multiply-adds of its own."""
    own = count_opcode(COPIED, 1, 90, tmp_path) - CHAINS
    assert count_opcode(COPIED, copies, 90, tmp_path) == own + copies * CHAINS
