"""Detection of reads of uninitialized uniform registers, a miscompilation by ptxas 12.8.

A warp's uniform registers hold, among others, the shared memory descriptors of Hopper's warp-group products, up to four
registers per product. There are 63 of them. If a loop's descriptors did not fit, ptxas 12.8 (part of Triton 3.6 and
3.7) left out the instruction that starts a chain of them. On an H200 a product then read the wrong shared memory, or
memory that does not exist. Neither Triton nor ptxas reports this, and the interpreter cannot. ptxas without
optimization, and ptxas of CUDA 13.0, compile the same program correctly. The compiled program shows the error without a
GPU.

An empty result proves nothing: instructions are read in text order, so a register that had another value before the
missing instruction is not detected. Only a run on a GPU shows whether a kernel is correct.
"""

import re

INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*([^;]*);", re.MULTILINE)
REGISTER = re.compile(r"\bUR(\d+)\b")
UNIFORM_RESULTS = ("U", "R2UR", "S2UR", "CS2UR", "VOTEU", "REDUX")
"""Prefixes of instructions whose first uniform register is their result."""
OTHER_RESULTS = ("UISETP", "UPLOP3", "UR2UP", "UBLK", "UTMA")
"""Prefixes of those among them whose result is a predicate or in memory."""
DESCRIPTOR = re.compile(r"\b(g?)desc\[UR(\d+)\]")
CONSTANT = re.compile(r"\bc\[[^\]]*\]\[[^\]]*\]")
LEFT_IN_REGISTERS = re.compile(r"\bR\w+(?:\.reuse)?, R\w+(?:\.reuse)?, gdesc")
"""Product whose left factor is in registers: its descriptor covers only the right factor, the last two registers of
four.
"""


def find_uninitialized_reads(disassembly: str) -> list[str]:
    """List the instructions of a program that read a uniform register before any instruction writes it.

    Args:
        disassembly: output of nvdisasm.

    Returns:
        Each such instruction once, as disassembled, in order.
    """
    written: set[int] = set()
    found = []
    for name, text in INSTRUCTION.findall(disassembly):
        result = _find_result(name, text)
        if not _list_sources(name, text, result) <= written:
            found.append(f"{name} {text.strip()}")
        if result is not None:
            written |= set(range(result, result + _count_registers(name)))
    return list(dict.fromkeys(found))


def _find_result(name: str, text: str) -> int | None:
    """Return the first uniform register that an instruction writes, or None. Loads, for example, only read them."""
    first = REGISTER.search(text)
    has_result = name.startswith(UNIFORM_RESULTS) and not name.startswith(OTHER_RESULTS)
    return int(first[1]) if first is not None and has_result else None


def _count_registers(name: str) -> int:
    """Return the number of registers of a result or a source of a uniform instruction."""
    return 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1


def _list_sources(name: str, text: str, result: int | None) -> set[int]:
    """Return all uniform registers that an instruction reads."""
    if result is not None:
        indices = {int(number) for constant in CONSTANT.findall(text) for number in REGISTER.findall(constant)}
        sources = [int(number) for number in REGISTER.findall(CONSTANT.sub("", text))][1:]
        # In a .WIDE product only the third source, the addend, is a pair.
        widths = [2 if ".64" in name or (".WIDE" in name and place == 2) else 1 for place in range(len(sources))]
        pairs = zip(sources, widths, strict=True)
        return indices | {register for source, width in pairs for register in range(source, source + width)}
    found: set[int] = set()
    for of_product, number in DESCRIPTOR.findall(text):
        first, count = int(number), 4 if of_product else 2
        skipped = 2 if of_product and LEFT_IN_REGISTERS.search(text) else 0
        found |= set(range(first + skipped, first + count))
    return found | {int(number) for number in REGISTER.findall(DESCRIPTOR.sub("", text))}
