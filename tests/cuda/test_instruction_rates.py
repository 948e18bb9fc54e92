"""Kernels that measure single instructions: what is compiled is what is measured."""

import re
import subprocess
from pathlib import Path

import pytest
import triton

from megatron.kernels.cuda.compile import compile_kernel
from tools.bench.instruction_rates import CHAINS, build_kernel

OPCODES = {
    "MATRIX_PRODUCT": "HMMA",
    "TRANSPOSE": "MOVM",
    "PACK": "F2FP",
    "EXPONENTIAL": "MUFU",
    "LOAD_4": "LDS",
    "LOAD_16": "LDS",
}
"""Opcodes that nothing else in the kernel has."""


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("instruction", OPCODES)
def test_a_kernel_issues_its_instruction_once_in_every_chain(instruction: str, arch: int, tmp_path: Path) -> None:
    code, _ = compile_kernel(build_kernel(instruction, 8), arch)
    (tmp_path / "kernel.cubin").write_bytes(code)
    tool = Path(triton.knobs.nvidia.cuobjdump.path).with_name("nvdisasm")
    found = subprocess.run([str(tool), "kernel.cubin"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert len(re.findall(rf"\s{OPCODES[instruction]}[. ]", found.stdout)) == CHAINS
