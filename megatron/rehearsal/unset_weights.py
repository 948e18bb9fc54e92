"""Weights without values, which use neither host memory nor time: the null device ignores their values.

A run initializes its weights on the host in float32, so that every device starts with the same values, and moves them
to its device. For 2.7 billion parameters this would waste 11 GB and a minute. Here the tensors exist with their shapes
and types, in pages that are never touched. The report states the host memory that the run really needs (`report.py`).
"""

import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron.checkpoint.sharded_state import PinnedStagingBuffers

MIN_ELEMENTS = 1 << 16
"""Elements below which tensors keep their values: those of encodings and processors, norms, batches."""


@contextmanager
def without_weight_values() -> Iterator[None]:
    """Build models without initializing weights.

    Large floating-point tensors are converted or moved without their contents.
    """
    from megatron.model.core_modules import ColumnParallelLinear

    layers = sys.modules[ColumnParallelLinear.__module__]  # which initializes sharded layers

    def mark_divided(
        weight: Tensor, output_size: int, input_size: int, per_partition_size: int, partition_dim: int,
        init_method: Any, stride: int = 1, *_: Any, skip_set_tensor_parallel_attributes: bool = False, **__: Any,
    ) -> None:  # fmt: skip
        if not skip_set_tensor_parallel_attributes:
            layers.set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=partition_dim, stride=stride)

    with (
        mock.patch.object(layers, "_initialize_affine_weight_cpu", mark_divided),
        mock.patch.object(Tensor, "to", _without_values(Tensor.to)),
        mock.patch.object(Tensor, "bfloat16", _without_values(Tensor.bfloat16)),
        mock.patch.object(Tensor, "half", _without_values(Tensor.half)),
    ):
        yield


class ZeroStagingBuffers(PinnedStagingBuffers):
    """Staging buffers that provide zeros instead of copies of a rank's states."""

    def copy_to_host(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return zeros with the size of each tensor."""
        sizes = [tensor.numel() for tensor in tensors.values()]
        return dict(zip(tensors, _reserve_zeros(sum(sizes)).split(sizes), strict=True))


def _reserve_zeros(size: int) -> Tensor:
    """Allocate unpinned float32 zeros. Pages that are only read use no memory."""
    if size == 0:
        return torch.empty(0)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return torch.frombuffer(mmap.mmap(-1, 4 * size, flags=flags), dtype=torch.float32)


def _without_values(convert: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a conversion that drops the contents of large floating-point tensors of the host."""

    def convert_shape(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        is_large = tensor.numel() >= MIN_ELEMENTS and tensor.device.type == "cpu" and tensor.is_floating_point()
        if not is_large or (torch.is_grad_enabled() and tensor.requires_grad):
            return convert(tensor, *arguments, **options)
        target = convert(tensor.new_empty(0), *arguments, **options)
        if (target.device, target.dtype) == (tensor.device, tensor.dtype):
            return convert(tensor, *arguments, **options)
        return torch.empty(tensor.shape, dtype=target.dtype, device=target.device)

    return convert_shape
