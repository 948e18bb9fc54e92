"""Instruction counts of a loop's body, or of the whole program."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench.instructions import (
    Instruction,
    count_loads,
    count_memory_clocks,
    count_spills,
    count_tensor_clocks,
    select_instructions,
)

ROOT = Path(__file__).parents[2]
DISASSEMBLY = """
.text.kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   FADD R2, R2, R3 ;
.L_x_0:
        /*0020*/                   HMMA.16816.F32 R4, R8, R10, R4 ;
        /*0030*/              @!P0 BRA `(.L_x_0) ;
        /*0040*/                   IADD3 R5, R5, 0x1, RZ ;
        /*0050*/               @P1 BRA `(.L_x_1) ;
.L_x_3:
        /*0060*/               @P1 BRA `(.L_x_3) ;
        /*0070*/                   EXIT ;
.L_x_2:
        /*0080*/                   BRA `(.L_x_2);
        /*0090*/                   NOP;
"""


def _count(disassembly: str, *, has_loop: bool) -> int:
    return len(select_instructions(disassembly, has_loop=has_loop))


def test_the_shortest_loop_with_products_is_counted() -> None:
    assert _count(DISASSEMBLY, has_loop=True) == 2
    assert _count(DISASSEMBLY.replace("(.L_x_0)", "(.L_x_4)"), has_loop=True) == 5
    assert _count(DISASSEMBLY, has_loop=False) == 8


TWO_PRODUCTS = """
.L_x_0:
        /*0000*/                   FADD R2, R2, R3 ;
.L_x_1:
        /*0010*/                   HMMA.16816.F32 R4, R8, R10, R4 ;
        /*0020*/              @!P0 BRA `(.L_x_1) ;
        /*0030*/               @P1 BRA `(.L_x_0) ;
.L_x_2:
        /*0040*/                   HMMA.16816.F32 R4, R8, R10, R4 ;
        /*0050*/                   FADD R2, R2, R3 ;
        /*0060*/              @!P0 BRA `(.L_x_2) ;
.L_x_3:
        /*0070*/                   HMMA.16816.F32 R4, R8, R10, R4 ;
        /*0080*/                   FSEL R2, R2, R3, P2 ;
        /*0090*/                   FSEL R2, R2, R3, P2 ;
        /*00a0*/                   FSEL R2, R2, R3, P2 ;
        /*00b0*/              @!P0 BRA `(.L_x_3) ;
.L_x_4:
        /*00c0*/                   HMMA.16816.F32 R4, R8, R10, R4 ;
        /*00d0*/                   FMUL R2, R2, R3 ;
        /*00e0*/                   FMUL R2, R2, R3 ;
        /*00f0*/              @!P0 BRA `(.L_x_4) ;
        /*0100*/                   EXIT ;
"""


def test_a_loop_of_each_product_is_counted() -> None:
    """The shortest of four innermost loops belongs to the first product, and the fourth to the second."""
    found = [x.address for x in select_instructions(TWO_PRODUCTS, has_loop=True, num_loops=2)]
    assert found == [0x10, 0x20, 0xC0, 0xD0, 0xE0, 0xF0]
    with pytest.raises(ValueError, match="4 loops"):
        select_instructions(TWO_PRODUCTS, has_loop=True, num_loops=3)


EARLY_END = """
        /*0000*/               @P0 EXIT ;
        /*0010*/              @!P1 BRA `(.L_x_0) ;
        /*0020*/                   HMMA.16816.F32 R4, R8, R10, R4 ;
        /*0030*/                   FADD R2, R2, R3 ;
        /*0040*/                   BRA `(.L_x_1) ;
.L_x_0:
        /*0050*/                   FSEL R2, R2, R3, P2 ;
        /*0060*/                   FSEL R3, R2, R3, P2 ;
        /*0070*/                   FSEL R4, R2, R3, P2 ;
        /*0080*/                   HMMA.16816.F32 R4, R8, R10, R4 ;
.L_x_1:
        /*0090*/                   STG.E [R6], R4 ;
        /*00a0*/                   EXIT ;
"""


def test_of_two_ways_through_a_program_the_shorter_with_all_products_is_counted() -> None:
    assert _count(EARLY_END, has_loop=False) == 7
    assert _count(EARLY_END.replace("FSEL R4", "HMMA R4"), has_loop=False) == 8


def test_loads_are_counted_by_width_and_spills_separately() -> None:
    texts = ["@P0 LDG.E R1, [R2]", "LDG.E.128 R4, [R2]", "LDG.E.U16.CONSTANT R4, [R2]", "LDG.E.64 R4, [R2]"]
    texts += ["LDGSTS.E.BYPASS.128 [R1], [R2]", "LDGSTS.E [R1], [R2]", "LDS.64 R4, [R2]", "STG.E.128 [R2], R4"]
    instructions = [Instruction(16 * index, text, None) for index, text in enumerate(texts)]
    assert count_loads(instructions) == {16: 2, 8: 1, 4: 2, 2: 1}
    assert count_spills(instructions) == 0
    spilled = [Instruction(0, "@!P0 STL.64 [R1+0x8], R2", None), Instruction(16, "LDL R2, [R1]", None)]
    assert count_spills(spilled) == 2


def test_load_store_and_tensor_clocks_follow_from_widths_and_sizes() -> None:
    texts = ["LDS R1, [R2]", "@!P0 LDS.64 R2, [R4]", "STS.128 [R1], R4", "LDSM.16.MT88.4 R4, [R2]"]
    texts += ["LDSM.16.M88 R4, [R2]", "LDG.E.128 R4, [R2]", "@P1 STG.E R4, [R2]", "@!PT LDS RZ, [RZ]"]
    texts += ["FADD R1, R1, R2", "MOVM.16.MT88 R4, R5"]
    instructions = [Instruction(16 * index, text, None) for index, text in enumerate(texts)]
    assert count_memory_clocks(instructions) == 1 + 2 + 4 + 4 + 1 + 4 + 1 + 1
    single = [Instruction(0, f"HMMA.{size}.F32.BF16 R4, R8, R10, R4", None) for size in ("16816", "1688", "16816")]
    assert (count_tensor_clocks(single, 80), count_tensor_clocks(single, 90)) == (8 + 4 + 8, 6 + 4 + 6)
    group = [Instruction(16, "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24", None)]
    assert count_tensor_clocks(group, 90) == 2 * 64 * 128 * 16 / 4096  # on all four tensor cores
    with pytest.raises(KeyError):
        count_tensor_clocks([Instruction(0, "HMMA.16832.F32 R4, R8, R10, R4", None)], 90)


def test_a_kernel_without_a_loop_is_rejected() -> None:
    with pytest.raises(ValueError, match="no loop"):
        _count("\n".join(line for line in DISASSEMBLY.splitlines() if "P" not in line), has_loop=True)


def test_the_kernels_of_a_step_are_counted() -> None:
    """All launches of a step are listed; one is compiled and disassembled."""
    script = (
        "from tools.bench.instructions import count_kernel\n"
        "from megatron.kernels.cdape_attention.aot_configs import list_passes\n"
        "kernels, *launched = list_passes(80).values()\n"
        "print(*(kernel.config.name.split()[0].split('<')[0] for kernel in [*kernels, *launched[0]]))\n"
        "counts = count_kernel(kernels[0], 80)\n"
        "assert 0 < counts.clocks < 100 and counts.spills == 0 and set(counts.loads) == {16}\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        *("scores", "mix_fwd", "attend_fwd", "attend_sums"),
        *("attend_bwd", "mix_bwd_dw", "mix_bwd", "differentiate_qkv"),
        *("Attention", "LogitGradient", "MixerBackward", "MixerBackward", "differentiate_qkv"),
    ]
