"""ZeRO 1 and 2 with few operations per step: DeepSpeed's optimizer with batched instead of per-parameter work.

DeepSpeed loops over all parameters in Python several times per step. It copies each gradient into a bucket and out of
it, checks each for infinities, computes each norm over a float64 copy, and synchronizes with the device for each group.
The step of a small model is then bound by the host. Here the same values come from operations on lists of tensors
(torch's `_foreach` functions, a few launches for hundreds of tensors) and on the flat partition of each group:

    backward     gradients stay in `.grad` until the end (ZeRO 1), or until a bucket is full (ZeRO 2)
    reduce       gradients → one bucket → its mean over the data-parallel ranks → this rank's slices → the partition
    step         norms of all slices at once, read once by the host; AdamW on the partitions of all groups at once

Buckets, their order, and the order of every sum are DeepSpeed's, so losses and checkpoints are bitwise identical. An
exception is a parameter larger than a bucket: it is summed over more than two ranks at once instead of in several
chunks. A float64 sum of squares is finite exactly if all gradients are (the square of float32's largest number is
1e77), so the check for infinities needs no separate pass.

Unsupported settings use DeepSpeed's own optimizer (`can_flatten`): offloading, and reduction on a separate stream.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from megatron.distributed.process_groups import ProcessGroups
from megatron.distributed.sharding import all_reduce_sum_, is_owned_by_rank

CAST_ELEMENTS = 1 << 25
"""Minimum number of gradient elements cast together, for sums of another data type or for sending (128 MiB in float32).
"""


def can_flatten(optimizer: Any) -> bool:
    """Return True if this class supports the engine's optimizer."""
    return (
        type(optimizer) is DeepSpeedZeroOptimizer
        and optimizer.contiguous_gradients
        and not optimizer.cpu_offload
        and not optimizer.overlap_comm
        and not optimizer.use_grad_accum_attribute
        and optimizer.communication_data_type == optimizer.dtype
    )


@dataclass(frozen=True)
class _Slice:
    """Elements of a parameter's gradient that this rank updates.

    The `size` elements from `start` on are a part of the partition of `group`.
    """

    number: int
    """Index among all slices of this rank."""
    group: int
    start: int
    size: int
    is_counted: bool
    """True if the norm counts the slice on this rank; a replicated parameter counts on one model-parallel rank."""


class FlatZeroOptimizer(DeepSpeedZeroOptimizer):
    """DeepSpeed's optimizer for ZeRO 1 and 2, converted by `flatten_optimizer`."""

    _grad_acc_hooks: list[Any]
    _slices: dict[nn.Parameter, _Slice]
    _bucket: list[nn.Parameter]
    _bucket_numel: int
    _partitions: list[Tensor] | None
    _views: list[Tensor]
    """Views of the partitions' slices, by number."""
    _split_sizes: list[list[int]]
    """Sizes of the slices of each group, and the size of its padding."""
    _counted: list[_Slice]
    _num_counted: list[int]
    _num_norms: int

    def _prepare(self, groups: ProcessGroups) -> None:
        """Compute the slices and set the hooks before the first step."""
        self._groups, self._world_size = groups, groups.mesh.dp_cp.size
        self._slices, self._split_sizes = {}, []
        for group, parameters in enumerate(self.params_in_partition):
            rank, filled = groups.mesh.dp_cp.index, 0
            sizes: list[int] = []
            for parameter in parameters:
                number = self.get_param_id(parameter)
                start = int(self.grad_start_offset[group][rank][number])
                offset = int(self.grad_partition_insertion_offset[group][rank][number])
                size = min(parameter.numel() - start, int(self.partition_size[group]) - offset)
                is_counted = is_owned_by_rank(parameter, groups.mesh)
                self._slices[parameter] = _Slice(len(self._slices), group, start, size, is_counted)
                assert offset == filled, "slices follow each other"
                filled += size
                sizes.append(size)
            self._split_sizes.append([*sizes, int(self.partition_size[group]) - filled])
        self._counted = [part for part in self._slices.values() if part.is_counted]
        self._num_counted = [0] * len(self.params_in_partition)
        for part in self._counted:
            self._num_counted[part.group] += 1
        self._bucket, self._bucket_numel = [], 0
        self._partitions = None
        # Number of groups. Pipeline stages may differ: only the last one has a final norm.
        self._num_norms = len(self.params_in_partition)
        if groups.mesh.pipeline.size > 1:
            self._num_norms = int(groups.all_reduce_max(self._num_norms))
        # Between micro-batches ZeRO 2 keeps sums in the configured data type; otherwise masters need float32
        # immediately.
        is_summing = self.partition_gradients and self.gradient_accumulation_steps > 1
        self._partition_dtype = self.gradient_accumulation_dtype if is_summing else torch.float32
        for hook in self._grad_acc_hooks:
            hook.remove()
        self._grad_acc_hooks = []
        if self.partition_gradients:
            parameters = [parameter for group in self.bit16_groups for parameter in group]
            self._grad_acc_hooks = [p.register_post_accumulate_grad_hook(self._add_to_bucket) for p in parameters]

    # ------------------------------------------------------------------------------------------------------- reduce

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Reduce the gradients of the whole step (ZeRO 1)."""
        for group in self.bit16_groups:
            for parameter in group:
                if parameter.grad is not None:
                    self._add_to_bucket(parameter)
        self.overlapping_partition_gradients_reduce_epilogue()

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        """Reduce the remaining gradients at the end of a backward pass."""
        self._reduce_bucket()
        self._is_summed = True
        self._epilogue_ran_this_backward = True

    def _add_to_bucket(self, parameter: nn.Parameter) -> None:
        numel = parameter.numel()
        if self._bucket and self._bucket_numel + numel > self.reduce_bucket_size:
            self._reduce_bucket()
        self._bucket.append(parameter)
        self._bucket_numel += numel

    @torch.no_grad()
    def _reduce_bucket(self) -> None:
        """Average the bucket's gradients over the ranks and store this rank's slices in the partitions."""
        if self._partitions is None:
            self._partitions = [
                torch.zeros(int(size), dtype=self._partition_dtype, device=self.device) for size in self.partition_size
            ]
            self._views = self._view_slices(self._partitions)
            self._is_summed = False
        if not self._bucket:
            return
        parameters = self._bucket
        self._bucket, self._bucket_numel = [], 0
        gradients: list[Tensor] = [parameter.grad.view(-1) for parameter in parameters]  # type: ignore[union-attr]
        if self._world_size > 1:
            bucket, gradients = _copy_all(gradients, gradients[0].dtype)
        for parameter in parameters:
            parameter.grad = None
        if self._world_size > 1:
            # Same order as DeepSpeed, because the rounding depends on it.
            if self.reduce_scatter:
                bucket.div_(self._world_size)
            all_reduce_sum_(bucket, self._groups, "context", "data")
            if not self.reduce_scatter:
                bucket.mul_(1 / self._world_size)
        sources, targets = [], []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            part = self._slices.get(parameter)
            if part is not None and part.size:
                whole = part.size == gradient.numel()
                sources.append(gradient if whole else gradient.narrow(0, part.start, part.size))
                targets.append(self._views[part.number])
        if not sources:
            return
        if self._is_summed:
            _add_all(targets, sources)
        else:
            torch._foreach_copy_(targets, sources)

    # --------------------------------------------------------------------------------------------------------- step

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Clip, update the masters, and update the weights of all ranks. Waits for the device once.

        If a gradient is not finite, only set `overflow`.
        """
        assert self._partitions is not None, "a step comes after a backward pass"
        is_float32 = self._partition_dtype == torch.float32
        partitions = self._partitions if is_float32 else [part.to(torch.float32) for part in self._partitions]
        views = self._views if is_float32 else self._view_slices(partitions)
        self._partitions, self._views = None, []
        norm = self._compute_norm(views)
        self.overflow = not math.isfinite(norm)
        scale = self.loss_scale
        self._update_scale(self.overflow)
        if self.overflow:
            self._global_grad_norm = float("inf")
            self.zero_grad()
            return
        self._global_grad_norm = float(norm / scale)
        factor = self._compute_factor(norm, scale)
        if factor != 1.0:
            torch._foreach_mul_(partitions, factor)
        for master, partition in zip(self.single_partition_of_fp32_groups, partitions, strict=True):
            master.grad = partition
        self.optimizer.step()
        self._lazy_init_hp_params_optimizer_state()
        for master in self.single_partition_of_fp32_groups:
            master.grad = None
        self.update_lp_params()

    def _view_slices(self, partitions: list[Tensor]) -> list[Tensor]:
        """Return views of all slices of the partitions, by number.

        One `split` of a partition takes the host less time than a `narrow` for each slice.
        """
        pieces = [part.split(sizes) for part, sizes in zip(partitions, self._split_sizes, strict=True)]
        return [view for of_group in pieces for view in of_group[:-1]]

    def _compute_norm(self, views: list[Tensor]) -> Tensor:
        """Return the norm of all gradients, including the loss scale: float32, on the host.

        Args:
            views: views of all slices.
        """
        pieces = [views[part.number] for part in self._counted]
        squares = torch.zeros(self._num_norms, dtype=torch.float32, device=self.device)
        if pieces:
            norms = torch.stack(torch._foreach_norm(pieces, 2, dtype=torch.float64)).pow(2)
            sums = [group.sum() for group in norms.split(self._num_counted)]
            if len(sums) < self._num_norms:  # another pipeline stage has more groups
                sums += [torch.zeros_like(sums[0])] * (self._num_norms - len(sums))
            squares = torch.stack(sums).float()
        all_reduce_sum_(squares, self._groups, "context", "data")
        all_reduce_sum_(squares, self._groups, "tensor", "pipeline")
        return torch.linalg.vector_norm(torch.tensor(squares.tolist(), dtype=torch.float32).pow(0.5))

    def _compute_factor(self, norm: Tensor, scale: float) -> float:
        """Return the factor for the gradients that removes the loss scale and clips the norm."""
        if self.clip_grad == 0.0:
            return 1.0 / scale
        clip = torch.clamp((norm / scale + 1e-6) / self.clip_grad, min=1.0)
        return float(1.0 / (clip * scale))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        self._bucket, self._bucket_numel, self._partitions, self._views = [], 0, None, []
        for group in self.bit16_groups:
            for parameter in group:
                parameter.grad = None


def _add_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Add each source to its target, of the same size but maybe another data type, in few launches.

    `torch._foreach_add_` with two data types would need one launch per tensor. Sources are therefore cast first, in
    batches of at most `CAST_ELEMENTS`: casting all at once would double the memory of half-precision gradients.
    """
    dtype = targets[0].dtype
    if sources[0].dtype == dtype:
        torch._foreach_add_(targets, sources)
        return
    buckets = zip(_list_buckets(targets, CAST_ELEMENTS), _list_buckets(sources, CAST_ELEMENTS), strict=True)
    for sums, added in buckets:
        torch._foreach_add_(sums, _copy_all(added, dtype)[1])


def _list_buckets(tensors: Sequence[Tensor], max_elements: int) -> list[list[Tensor]]:
    """Return flat views of contiguous tensors, in order, in lists of at most `max_elements` elements each."""
    buckets: list[list[Tensor]] = []
    room = 0
    for piece in (piece for tensor in tensors for piece in tensor.view(-1).split(max_elements)):
        if piece.numel() > room:
            buckets.append([])
            room = max_elements
        buckets[-1].append(piece)
        room -= piece.numel()
    return buckets


def _copy_all(tensors: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Copy tensors to a data type in few launches. Return the copy as one tensor and as its parts."""
    buffer = torch.empty(sum(t.numel() for t in tensors), dtype=dtype, device=tensors[0].device)
    copies = list(buffer.split([t.numel() for t in tensors]))
    torch._foreach_copy_(copies, tensors)
    return buffer, copies


@torch.no_grad()
def average_gradients(
    gradients: Sequence[Tensor],
    dp_group: Any = None,
    numel_per_bucket: int = 500_000_000,
    dp_world_size: float | None = None,
    *,
    groups: ProcessGroups,
    dtype: torch.dtype,
    max_elements: int,
) -> None:
    """Average gradients over the data-parallel ranks, in place.

    This replaces `DeepSpeedEngine.allreduce_no_retain` without ZeRO, and with ZeRO 1 if it sums in float32. It uses
    `groups` instead of the process group and its size. DeepSpeed copies whole tensors until a bucket is full, once in
    their data type and once in the data type that is sent. Those float32 sums are two tensors. Here a bucket never has
    more elements than the limit, or `CAST_ELEMENTS`.

    Args:
        gradients: contiguous gradients of one data type.
        numel_per_bucket: maximum number of elements sent at a time.
        dtype: data type in which they are sent.
        max_elements: the same limit as `numel_per_bucket`, from the configuration.
    """
    size, is_cast = groups.mesh.dp_cp.size, gradients[0].dtype != dtype
    if size == 1 and not is_cast:
        return
    # One rank rounds like several ranks to the data type of the exchange, but sends nothing: small buckets are enough.
    limit = max(min(numel_per_bucket, max_elements), CAST_ELEMENTS) if size > 1 else CAST_ELEMENTS
    for bucket in _list_buckets(gradients, limit):
        sent, copies = _copy_all(bucket, dtype) if is_cast or len(bucket) > 1 else (bucket[0], [])
        all_reduce_sum_(sent, groups, "context", "data")
        if size > 1:
            sent.mul_(1 / size)
        if copies:
            torch._foreach_copy_(bucket, copies)


def flatten_optimizer(optimizer: DeepSpeedZeroOptimizer, groups: ProcessGroups) -> FlatZeroOptimizer:
    """Convert DeepSpeed's optimizer to this class, before its first step; see `can_flatten`."""
    optimizer.__class__ = FlatZeroOptimizer
    assert isinstance(optimizer, FlatZeroOptimizer)
    optimizer._prepare(groups)
    return optimizer
