"""ZeRO 1 and 2 with few operations a step: DeepSpeed's optimizer, whose work per parameter is done on many at once.

DeepSpeed walks through all parameters in Python several times a step: it copies each gradient into a bucket and out of
it, looks for infinities in each, takes each norm over a copy in float64, and asks the device for the outcome of each
group. The step of a small model is then the host's. Here the same numbers come from operations on lists of tensors
(torch's `_foreach` functions, a few launches for hundreds of tensors) and on the flat partition of each group:

    backward     gradients stay where autograd leaves them (ZeRO 1), or until a bucket is full (ZeRO 2)
    reduce       gradients → one bucket → its mean over the data-parallel ranks → this rank's slices → the partition
    step         norms of all slices at once; the host reads them, once; AdamW on the partitions of all groups at once

Buckets, their order, and the order of every sum are DeepSpeed's, so losses and checkpoints are the same bit for bit
(but where a parameter is larger than a bucket: it is summed over more than two ranks in one piece, not in several).
A sum of squares in float64 is finite exactly if all gradients are (the square of float32's largest number is 1e77), so
looking for infinities needs no pass of its own.

What has other needs stays DeepSpeed's own (`can_flatten`): offloading, and reduction on a stream of its own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from megatron.distributed.collectives import all_reduce_sum_
from megatron.distributed.process_groups import ProcessGroups
from megatron.distributed.sharding import is_counted_here

CAST_ELEMENTS = 1 << 25
"""Of gradients that are cast together, to be added to sums in another type (128 MiB in float32), or sent, at least."""


def can_flatten(optimizer: Any) -> bool:
    """Is an engine's optimizer one whose work can be done here?"""
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
    """The part of a parameter's gradient that this rank steps: `size` elements from `start` on, which are those of the
    partition of `group` from `offset` on."""

    group: int
    start: int
    offset: int
    size: int
    is_counted: bool
    """In the norm; a parameter that several model-parallel ranks hold counts on one of them."""


class FlatZeroOptimizer(DeepSpeedZeroOptimizer):
    """DeepSpeed's optimizer for ZeRO 1 and 2, made of one by `flatten_optimizer`."""

    _grad_acc_hooks: list[Any]
    _slices: dict[nn.Parameter, _Slice]
    _bucket: list[nn.Parameter]
    _bucket_numel: int
    _partitions: list[Tensor] | None
    _num_norms: int

    def _prepare(self, groups: ProcessGroups) -> None:
        """What there is to know before the first step."""
        self._groups, self._world_size = groups, groups.mesh.dp_cp.size
        self._slices = {}
        for group, parameters in enumerate(self.params_in_partition):
            rank = groups.mesh.dp_cp.index
            for parameter in parameters:
                number = self.get_param_id(parameter)
                start = int(self.grad_start_offset[group][rank][number])
                offset = int(self.grad_partition_insertion_offset[group][rank][number])
                size = min(parameter.numel() - start, int(self.partition_size[group]) - offset)
                self._slices[parameter] = _Slice(group, start, offset, size, is_counted_here(parameter, groups.mesh))
        self._bucket, self._bucket_numel = [], 0
        self._partitions = None
        # Of groups. Pipeline stages may have different ones: only the last has a last norm.
        self._num_norms = len(self.params_in_partition)
        if groups.mesh.pipeline.size > 1:
            self._num_norms = int(groups.all_reduce_max(self._num_norms))
        # Between micro-batches ZeRO 2 keeps sums in the type that it is told; else masters want float32 at once.
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
        """ZeRO 1: reduce the gradients of the whole step."""
        for group in self.bit16_groups:
            for parameter in group:
                if parameter.grad is not None:
                    self._add_to_bucket(parameter)
        self.overlapping_partition_gradients_reduce_epilogue()

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        """Reduce what is left when a backward pass is over."""
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
        """The mean over ranks of the bucket's gradients, of which this rank's slices go to the partitions."""
        if self._partitions is None:
            self._partitions = [
                torch.zeros(int(size), dtype=self._partition_dtype, device=self.device) for size in self.partition_size
            ]
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
            # DeepSpeed's order of the two, which rounds differently.
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
                targets.append(self._partitions[part.group].narrow(0, part.offset, part.size))
        if not sources:
            return
        if self._is_summed:
            _add_all(targets, sources)
        else:
            torch._foreach_copy_(targets, sources)

    # --------------------------------------------------------------------------------------------------------- step

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Clip, step the masters, and bring the weights of all ranks up to date; nothing of it if a gradient is not
        finite (`overflow`). Waits for the device once."""
        assert self._partitions is not None, "a step comes after a backward pass"
        partitions, self._partitions = [part.to(torch.float32) for part in self._partitions], None
        norm = self._compute_norm(partitions)
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

    def _compute_norm(self, partitions: list[Tensor]) -> Tensor:
        """The norm of all gradients, loss scale included: float32, on the host."""
        pieces: list[Tensor] = []
        numbers = [0] * len(partitions)
        for part in self._slices.values():
            if part.is_counted:
                pieces.append(partitions[part.group].narrow(0, part.offset, part.size))
                numbers[part.group] += 1
        squares = torch.zeros(self._num_norms, dtype=torch.float32, device=self.device)
        if pieces:
            norms = torch.stack(torch._foreach_norm(pieces, 2, dtype=torch.float64)).pow(2)
            sums = [group.sum() for group in norms.split(numbers)]
            if len(sums) < self._num_norms:  # another pipeline stage has more groups
                sums += [torch.zeros_like(sums[0])] * (self._num_norms - len(sums))
            squares = torch.stack(sums).float()
        all_reduce_sum_(squares, self._groups, "context", "data")
        all_reduce_sum_(squares, self._groups, "tensor", "pipeline")
        return torch.linalg.vector_norm(torch.tensor(squares.tolist(), dtype=torch.float32).pow(0.5))

    def _compute_factor(self, norm: Tensor, scale: float) -> float:
        """What the gradients are multiplied by: the loss scale is taken out, and what is too long is clipped."""
        if self.clip_grad == 0.0:
            return 1.0 / scale
        clip = torch.clamp((norm / scale + 1e-6) / self.clip_grad, min=1.0)
        return float(1.0 / (clip * scale))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        self._bucket, self._bucket_numel, self._partitions = [], 0, None
        for group in self.bit16_groups:
            for parameter in group:
                parameter.grad = None


def _add_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Add to each target its source, which has as many elements and may have another type, in few launches.

    `torch._foreach_add_` of two types would be a launch for each tensor. So the sources are cast first, together as
    many of them as have `CAST_ELEMENTS`: a cast of all would take twice what a half type's gradients do.
    """
    dtype = targets[0].dtype
    if sources[0].dtype == dtype:
        torch._foreach_add_(targets, sources)
        return
    buckets = zip(_list_buckets(targets, CAST_ELEMENTS), _list_buckets(sources, CAST_ELEMENTS), strict=True)
    for sums, added in buckets:
        torch._foreach_add_(sums, _copy_all(added, dtype)[1])


def _list_buckets(tensors: Sequence[Tensor], max_elements: int) -> list[list[Tensor]]:
    """Flat views of contiguous tensors, one after the other, in lists of at most so many elements together."""
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
    """The same numbers in a type, as one tensor and as its parts, in few launches."""
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
    """The mean of gradients over the data-parallel ranks, in place: with `groups` instead of the group and its size,
    what `DeepSpeedEngine.allreduce_no_retain` does without ZeRO, and where ZeRO 1 sums in float32.

    DeepSpeed's copies whole tensors until a bucket is full, once in their type and once in the type that is sent; and
    those float32 sums are two tensors. Here a bucket never has more elements than it is told, or `CAST_ELEMENTS`.

    Args:
        gradients: contiguous, of one type.
        numel_per_bucket: elements that are sent at a time, at most.
        dtype: what is sent.
        max_elements: the same as `numel_per_bucket`, of the configuration.
    """
    size, is_cast = groups.mesh.dp_cp.size, gradients[0].dtype != dtype
    if size == 1 and not is_cast:
        return
    # One rank rounds to the type that would be sent, as several do, but has nothing to send: small buckets do.
    limit = max(min(numel_per_bucket, max_elements), CAST_ELEMENTS) if size > 1 else CAST_ELEMENTS
    for bucket in _list_buckets(gradients, limit):
        sent, copies = _copy_all(bucket, dtype) if is_cast or len(bucket) > 1 else (bucket[0], [])
        all_reduce_sum_(sent, groups, "context", "data")
        if size > 1:
            sent.mul_(1 / size)
        if copies:
            torch._foreach_copy_(bucket, copies)


def flatten_optimizer(optimizer: DeepSpeedZeroOptimizer, groups: ProcessGroups) -> FlatZeroOptimizer:
    """Make DeepSpeed's optimizer, before its first step, one of these; see `can_flatten`."""
    optimizer.__class__ = FlatZeroOptimizer
    assert isinstance(optimizer, FlatZeroOptimizer)
    optimizer._prepare(groups)
    return optimizer
