"""What the device can do and how much memory was used: for MFU and the reports."""

import resource
import sys
import time

import torch

from megatron.distributed.hardware import find_gpu_spec
from megatron.model.device_dtype import get_torch_dtype


def find_peak_tflops(device: torch.device, precision: str, configured: float | None) -> float | None:
    """The device's peak TFLOP/s in a precision (fp32, bf16, fp16): `configured`, or known by its name, or None."""
    if configured is not None:
        return configured
    if device.type != "cuda":
        return None
    found = find_gpu_spec(torch.cuda.get_device_name(device))
    return None if found is None else found.get_peak_tflops(precision)


def measure_matmul_tflops(device: torch.device, precision: str, *, rows: int, inner: int, columns: int) -> float:
    """FLOP/s of a product [rows, inner] · [inner, columns] here and now, measured in a few hundredths of a second.

    Rows beyond what fills the device are left out: they would only take longer.
    """
    dtype = get_torch_dtype(precision)
    rows = min(rows, 512 if device.type == "cpu" else 8192)
    left = torch.ones(rows, inner, dtype=dtype, device=device)
    right = torch.ones(inner, columns, dtype=dtype, device=device)

    def seconds(repeats: int) -> float:
        begun = time.perf_counter()
        for _ in range(repeats):
            product = left @ right
        product[0, 0].item()  # waits for the device
        return time.perf_counter() - begun

    first = min(seconds(1), seconds(1))  # the first one of all finds caches and libraries cold
    repeats = max(1, min(100, int(0.03 / max(first, 1e-6))))
    return 2.0 * rows * inner * columns * repeats / max(seconds(repeats), 1e-9)


def get_peak_memory(device: torch.device) -> float:
    """The most memory used so far, in GiB: allocated on the GPU, or resident of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / (2**30 if sys.platform == "darwin" else 2**20)  # macOS counts bytes, Linux KiB
