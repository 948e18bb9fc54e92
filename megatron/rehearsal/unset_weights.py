"""Weights that take no memory on the host and no time: neither drawn nor moved, since on the null device they have no
values.

A run draws its weights on the host, in float32, so that every device starts alike, and moves them to its device. For
2.7 billion parameters that is 11 GB and a minute for nothing. Here the tensors are there, with their shapes and types,
in pages that nobody touches. What a run really needs of the host's memory is in the report (`report.py`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

MIN_ELEMENTS = 1 << 16
"""Smaller tensors keep their values: those of encodings and processors, norms, batches."""


@contextmanager
def without_weight_values() -> Iterator[None]:
    """Inside it, models are built without drawing their weights, and large floating-point tensors of the host come to
    the device, or to another type, without what is in them; copies of states to the host (checkpoints) have zeros."""
    from megatron.checkpoint.sharded_state import PinnedStagingBuffers
    from megatron.model import build

    def transformer_config(*arguments: Any, **options: Any) -> Any:
        config = real_config(*arguments, **options)
        config.perform_initialization = False
        return config

    def copy_to_host(self: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        size = sum(tensor.numel() for tensor in tensors.values())
        if self._memory.numel() != size:
            self._memory = torch.zeros(size)  # not pinned: pages that are only read take no memory
        parts = self._memory.split([tensor.numel() for tensor in tensors.values()])
        return dict(zip(tensors, parts, strict=True))

    real_config = build.transformer_config
    with (
        mock.patch.object(build, "transformer_config", transformer_config),
        mock.patch.object(PinnedStagingBuffers, "copy_to_host", copy_to_host),
        mock.patch.object(Tensor, "to", _without_values(Tensor.to)),
        mock.patch.object(Tensor, "bfloat16", _without_values(Tensor.bfloat16)),
        mock.patch.object(Tensor, "half", _without_values(Tensor.half)),
    ):
        yield


def _without_values(convert: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A conversion that leaves behind what is in large floating-point tensors of the host."""

    def convert_shape(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        is_large = tensor.numel() >= MIN_ELEMENTS and tensor.device.type == "cpu" and tensor.is_floating_point()
        if not is_large or (torch.is_grad_enabled() and tensor.requires_grad):
            return convert(tensor, *arguments, **options)
        target = convert(tensor.new_empty(0), *arguments, **options)
        if (target.device, target.dtype) == (tensor.device, tensor.dtype):
            return convert(tensor, *arguments, **options)
        return torch.empty(tensor.shape, dtype=target.dtype, device=target.device)

    return convert_shape
