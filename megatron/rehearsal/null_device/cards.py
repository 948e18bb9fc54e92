"""The cards that the null device can play: what a launch and an allocation may ask of them.

Sizes of shared memory are those of NVIDIA's CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability"; multiprocessors and L2 caches those of the data sheets. Memory is `distributed/hardware.py`'s.
"""

from dataclasses import dataclass

from megatron.distributed.hardware import get_gpu_spec
from megatron.utils.errors import UserError
from megatron.utils.suggestions import format_choices

GIB = 2**30


@dataclass(frozen=True)
class Card:
    """One card."""

    name: str
    """As `--gpu` takes it."""
    device_name: str
    """As its driver gives it."""
    capability: tuple[int, int]
    processors: int
    block_shared: int
    """Bytes of shared memory that a block may ask for."""
    shared: int
    """Bytes of shared memory of a multiprocessor."""
    l2: int
    """Bytes of the L2 cache."""
    memory: int
    """Bytes that PyTorch finds."""

    @property
    def architecture(self) -> str:
        """As compilers call it: sm_80."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


def _ampere(name: str, device_name: str) -> Card:
    memory = int(get_gpu_spec(name).gib * GIB)
    return Card(name, device_name, (8, 0), 108, 163 * 1024, 164 * 1024, 40 * 2**20, memory)


def _hopper(name: str, device_name: str, processors: int = 132) -> Card:
    memory = int(get_gpu_spec(name).gib * GIB)
    return Card(name, device_name, (9, 0), processors, 227 * 1024, 228 * 1024, 50 * 2**20, memory)


CARDS = (
    _ampere("a100-40gb", "NVIDIA A100-SXM4-40GB"),
    _ampere("a100-80gb", "NVIDIA A100-SXM4-80GB"),
    _ampere("a800", "NVIDIA A800-SXM4-80GB"),
    _hopper("h100", "NVIDIA H100 80GB HBM3"),
    _hopper("h100-pcie", "NVIDIA H100 PCIe", 114),
    _hopper("h200", "NVIDIA H200"),
)


def get_card(text: str) -> Card:
    """The card of a name that a person wrote: a100-80, A100_80GB, h100.

    Raises:
        UserError: it is not known; names those that are.
    """
    wanted = _normalize(text)
    for card in CARDS:
        if wanted in (_normalize(card.name), _normalize(card.name).removesuffix("gb")):
            return card
    if alike := [card.name for card in CARDS if _normalize(card.name).startswith(wanted)]:
        raise UserError(f"--gpu {text} may be {' or '.join(alike)}")
    choices = format_choices(text.lower(), [card.name for card in CARDS])
    raise UserError(f"--gpu {text} cannot be rehearsed on; {choices}")


def _normalize(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
