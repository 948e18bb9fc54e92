"""Registers that ptxas left unwritten are found in a disassembly, without false positives."""

import pytest

from megatron.kernels.compile import find_uninitialized_reads


def disassemble(*instructions: str) -> str:
    """Format instructions like nvdisasm."""
    return "".join(f"        /*{16 * i:04x}*/                   {text} ;\n" for i, text in enumerate(instructions))


@pytest.mark.parametrize(
    ("instructions", "found"),
    [
        (("UMOV UR4, 0x400", "UIADD3 UR5, UR4, 0x40, URZ"), []),
        (("UMOV UR4, 0x400", "UIADD3 UR42, UP0, UR42, 0x40, URZ"), ["UIADD3 UR42, UP0, UR42, 0x40, URZ"]),
        (("ULDC.64 UR4, c[0x0][0x210]", "LDG.E R2, desc[UR4][R2.64]"), []),
        (("ULDC UR4, c[0x0][0x210]", "LDG.E R2, desc[UR4][R2.64]"), ["LDG.E R2, desc[UR4][R2.64]"]),
        (("R2UR UR4, R1", "STS.64 [R10+UR4], R20"), []),
        (("STS.64 [R10+UR4], R20",), ["STS.64 [R10+UR4], R20"]),
        (("@P0 R2UR UR4, R1", "@!UP1 UIADD3 UR4, UR4, 0x2, URZ"), []),
        (("UISETP.GE.AND UP0, UPT, UR4, UR5, UPT",), ["UISETP.GE.AND UP0, UPT, UR4, UR5, UPT"]),
        (("UIMAD.WIDE UR8, UR63, 0x4, URZ", "UMOV UR10, UR9"), ["UIMAD.WIDE UR8, UR63, 0x4, URZ"]),
        (("UMOV UR4, 0x1", "UMOV UR8, 0x1", "UIMAD.WIDE UR6, UR4, UR4, UR8"), ["UIMAD.WIDE UR6, UR4, UR4, UR8"]),
        (("UMOV UR4, 0x1", "ULDC.64 UR8, c[0x0][UR4]", "UMOV UR10, UR9"), []),
        (("UBLKCP [UR4], [UR4], UR4",), ["UBLKCP [UR4], [UR4], UR4"]),
        (("UR2UP UPR, UR4", "UMOV UR5, UR4"), ["UR2UP UPR, UR4", "UMOV UR5, UR4"]),
    ],
)
def test_register_widths_match_instructions(instructions: tuple[str, ...], found: list[str]) -> None:
    assert find_uninitialized_reads(disassemble(*instructions)) == found


def test_a_product_reads_the_descriptors_of_its_factors_in_shared_memory() -> None:
    right = ("UMOV UR6, UR2", "UMOV UR7, 0x80000020")
    left = ("UMOV UR4, 0x400", "UMOV UR5, 0x40000040")
    both = "HGMMA.64x32x16.F32.BF16 R40, gdesc[UR4].tnspB, R40"
    begin = ("UMOV UR2, 0x600",)
    assert find_uninitialized_reads(disassemble(*begin, *left, *right, both)) == []
    assert find_uninitialized_reads(disassemble(*begin, *right, both)) == [both]
    for factor in ("R28", "R28.reuse", "RZ"):
        of_registers = f"HGMMA.64x32x16.F32.BF16 R88, {factor}, gdesc[UR4].tnspB, R88"
        assert find_uninitialized_reads(disassemble(*begin, *right, of_registers)) == []
        assert find_uninitialized_reads(disassemble(*left, of_registers)) == [of_registers]


def test_a_register_that_held_something_else_before_is_not_seen() -> None:
    """The check cannot find a register that held another value before; a run on a GPU is needed."""
    assert find_uninitialized_reads(disassemble("UMOV UR42, 0x1", "UIADD3 UR42, UP0, UR42, 0x40, URZ")) == []
