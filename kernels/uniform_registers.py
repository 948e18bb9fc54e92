"""Uniform registers that a compiled kernel reads though nothing wrote them: what ptxas 12.8 made of a kernel.

A warp's uniform registers hold, among others, the descriptors of shared memory that Hopper's warp-group products take,
up to four registers for a product. There are 63 of them. Where a loop's descriptors did not fit, ptxas 12.8 (Triton 3.6
and 3.7 bring it) left out the instruction that begins a chain of them: on an H200 a product read other shared memory
than its own, or memory that is not there. Neither Triton nor ptxas says so, the interpreter cannot, and ptxas without
optimisation, or of CUDA 13.0, compiles the same program rightly. What has been compiled shows it, without a GPU.

That nothing is found proves nothing: instructions are read in the order of the text, and a register that held
something else before the missing instruction is not seen. Whether a kernel is right, a card says.
"""

import re

INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*([^;]*);", re.MULTILINE)
REGISTER = re.compile(r"\bUR(\d+)\b")
UNIFORM_RESULTS = ("U", "R2UR", "S2UR", "CS2UR", "VOTEU", "REDUX")
"""How instructions begin whose first uniform register is their result."""
OTHER_RESULTS = ("UISETP", "UPLOP3", "UR2UP", "UBLK", "UTMA")
"""How those of them begin whose result is a predicate, or in memory."""
DESCRIPTOR = re.compile(r"\b(g?)desc\[UR(\d+)\]")
CONSTANT = re.compile(r"\bc\[[^\]]*\]\[[^\]]*\]")
LEFT_IN_REGISTERS = re.compile(r"\bR\w+(?:\.reuse)?, R\w+(?:\.reuse)?, gdesc")
"""A product whose left factor is in registers: its descriptor is of the right one alone, the last two of four."""


def find_uninitialized_reads(disassembly: str) -> list[str]:
    """The instructions of a program that read a uniform register which no instruction before them writes.

    Args:
        disassembly: of nvdisasm.

    Returns:
        each such instruction once, as it was disassembled, in their order.
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
    """The first uniform register that an instruction writes. Others, such as loads, read those that they name."""
    first = REGISTER.search(text)
    has_result = name.startswith(UNIFORM_RESULTS) and not name.startswith(OTHER_RESULTS)
    return int(first[1]) if first is not None and has_result else None


def _count_registers(name: str) -> int:
    """That a result or a source of a uniform instruction takes."""
    return 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1


def _list_sources(name: str, text: str, result: int | None) -> set[int]:
    """All uniform registers that an instruction reads."""
    if result is not None:
        indices = {int(number) for constant in CONSTANT.findall(text) for number in REGISTER.findall(constant)}
        sources = [int(number) for number in REGISTER.findall(CONSTANT.sub("", text))][1:]
        # Of a .WIDE product only what it adds to, the third, is a pair.
        widths = [2 if ".64" in name or (".WIDE" in name and place == 2) else 1 for place in range(len(sources))]
        pairs = zip(sources, widths, strict=True)
        return indices | {register for source, width in pairs for register in range(source, source + width)}
    found: set[int] = set()
    for of_product, number in DESCRIPTOR.findall(text):
        first, count = int(number), 4 if of_product else 2
        skipped = 2 if of_product and LEFT_IN_REGISTERS.search(text) else 0
        found |= set(range(first + skipped, first + count))
    return found | {int(number) for number in REGISTER.findall(DESCRIPTOR.sub("", text))}
