"""Division of a multiprocessor's memory between shared memory and the L1 cache, for the CUDA kernels of CDAPE."""

import pytest
import torch

from megatron.kernels.cdape_attention.attention_kernel import ATTENTION_KERNELS
from megatron.kernels.cdape_attention.geometry import KernelFamily, KernelForm, choose_kernel
from megatron.kernels.cdape_attention.logit_kernels import LOGIT_GRADIENT_KERNELS, LOGIT_KERNELS
from megatron.kernels.cdape_attention.mixer import SCORE_GRADIENT_KERNELS, WEIGHT_GRADIENT_KERNELS
from megatron.kernels.cuda.compile import choose_carveout

CAPACITIES = {80: (0, 8, 16, 32, 64, 100, 132, 164), 90: (0, 8, 16, 32, 64, 100, 132, 164, 196, 228)}
"""Sizes of shared memory in KiB (tuning guides of CUDA for Ampere and Hopper)."""
FAMILIES = (
    ATTENTION_KERNELS,
    LOGIT_KERNELS,
    LOGIT_GRADIENT_KERNELS,
    SCORE_GRADIENT_KERNELS,
    WEIGHT_GRADIENT_KERNELS,
)


@pytest.mark.parametrize("arch", CAPACITIES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dim", [16, 48, 64, 80, 128])
def test_the_cache_gets_all_memory_but_that_of_the_resident_blocks(family: KernelFamily, dim: int, arch: int) -> None:
    kernel = choose_kernel(family, KernelForm(3, dim, torch.bfloat16), arch)
    assert kernel is not None
    largest = CAPACITIES[arch][-1]
    percent = choose_carveout(kernel.code, 255, largest * 1024)
    chosen = next(size for size in CAPACITIES[arch] if 100 * size >= percent * largest)
    needed = kernel.resident_blocks * (kernel.code.shared_bytes + 1024)
    assert chosen == next(size for size in CAPACITIES[arch] if size * 1024 >= needed)


def test_registers_limit_the_blocks_as_well() -> None:
    kernel = choose_kernel(ATTENTION_KERNELS, KernelForm(3, 16, torch.bfloat16), 90)
    assert kernel is not None
    assert choose_carveout(kernel.code, 255, 228 * 1024) < 50 < choose_carveout(kernel.code, 128, 228 * 1024)
