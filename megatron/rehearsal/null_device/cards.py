"""The cards that the null device can play: what a launch and an allocation may ask of them.

Sizes of shared memory are those of NVIDIA's CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability"; multiprocessors and L2 caches those of the data sheets. Memory is `distributed/hardware.py`'s.
"""

from dataclasses import dataclass

from megatron.distributed.hardware import get_gpu_spec, resolve_gpu_name
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
    _hopper("gh200", "NVIDIA GH200 480GB"),
    _hopper("h100", "NVIDIA H100 80GB HBM3"),
    _hopper("h100-nvl", "NVIDIA H100 NVL"),
    _hopper("h100-pcie", "NVIDIA H100 PCIe", 114),
    _hopper("h200", "NVIDIA H200"),
    _hopper("h800", "NVIDIA H800"),
)
"""Those of the GPUs that are known by name (`distributed/hardware.py`) for which the kernels are compiled and tested:
compute capability 8.0 and 9.0."""


def get_card(text: str) -> Card:
    """The card of a name that a person wrote, as `resolve_gpu_name` reads it: a100-80, A100_80GB, h100.

    Raises:
        UserError: it is not known, or it can be planned for and not be rehearsed on; names those that can.
    """
    names = [card.name for card in CARDS]
    try:
        name = resolve_gpu_name(text)
    except UserError:
        raise UserError(f"--gpu {text} is not known; {format_choices(text.lower(), names)}") from None
    if name not in names:
        raise UserError(
            f"--gpu {text} can be planned for but not rehearsed on, which takes cards of compute capability 8.0 or "
            f"9.0: {', '.join(names)}"
        )
    return CARDS[names.index(name)]
