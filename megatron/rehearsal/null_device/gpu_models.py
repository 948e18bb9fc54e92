"""GPUs that the null device can emulate, with the limits of their launches and allocations.

Sizes of shared memory come from NVIDIA's CUDA C++ Programming Guide, "Technical Specifications per Compute Capability";
multiprocessors and L2 caches from the data sheets; device memory from `distributed/hardware.py`.
"""

from dataclasses import dataclass

from megatron.distributed.hardware import get_gpu_spec, resolve_gpu_name
from megatron.utils.errors import UserError
from megatron.utils.formatting import format_choices

GIB = 2**30


@dataclass(frozen=True)
class GpuModel:
    """Emulated GPU."""

    name: str
    """Name accepted by `--gpu`."""
    device_name: str
    """Name reported by the driver."""
    capability: tuple[int, int]
    processors: int
    block_shared: int
    """Maximum shared memory of a block, in bytes."""
    shared: int
    """Shared memory of a multiprocessor, in bytes."""
    l2: int
    """Size of the L2 cache, in bytes."""
    memory: int
    """Device memory visible to PyTorch, in bytes."""

    @property
    def architecture(self) -> str:
        """Architecture name for compilers, for example sm_80."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


def _ampere(name: str, device_name: str) -> GpuModel:
    memory = int(get_gpu_spec(name).gib * GIB)
    return GpuModel(name, device_name, (8, 0), 108, 163 * 1024, 164 * 1024, 40 * 2**20, memory)


def _hopper(name: str, device_name: str, processors: int = 132) -> GpuModel:
    memory = int(get_gpu_spec(name).gib * GIB)
    return GpuModel(name, device_name, (9, 0), processors, 227 * 1024, 228 * 1024, 50 * 2**20, memory)


GPU_MODELS = (
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
"""Emulated GPUs: those known by name (`distributed/hardware.py`) for which the kernels are compiled and tested (compute
capability 8.0 and 9.0)."""


def get_gpu_model(text: str) -> GpuModel:
    """Return the GPU for a name given by the user, as `resolve_gpu_name` reads it: a100-80, A100_80GB, h100.

    Raises:
        UserError: if the name is unknown, or the GPU is only supported for planning. The message lists the valid names.
    """
    names = [card.name for card in GPU_MODELS]
    try:
        name = resolve_gpu_name(text)
    except UserError:
        raise UserError(f"--gpu {text}: unknown GPU; {format_choices(text.lower(), names)}") from None
    if name not in names:
        raise UserError(
            f"--gpu {text}: supported by plan but not by rehearse, which needs compute capability 8.0 or "
            f"9.0: {', '.join(names)}"
        )
    return GPU_MODELS[names.index(name)]
