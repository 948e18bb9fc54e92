"""Optimizers that keep bounded parameters within their bounds: AdamW, Lion and Muon.

Projection
----------
The kernels of KERPLE are only defined for parameters in an interval (r1 > 0, 0 < exponent ≤ 2). Published code clamps
the model's own parameters after a step. That has no effect in half precision or under ZeRO: the optimizer updates
float32 master copies and overwrites the model's parameters with them. The base optimizer has the masters under every
ZeRO stage and precision (as flat partitions, one per parameter group), so the projection belongs here:

    g ← 0  where θ = low and g > 0, or θ = high and g < 0        the step would leave the interval
    θ ← clip(step(θ, g), low, high)                              for each group that has the keys `low` and `high`

`megatron.model.parameter_groups.build_parameter_groups` builds one group per pair of bounds. Without the first line
Adam's moments would accumulate the gradients against a bound, and keep the parameter there long after its gradient has
changed sign.

Muon
----
Muon updates the layers' matrices with their orthogonalized momentum, and everything else with AdamW, after
Jordan et al. 2024 (kellerjordan.github.io/posts/muon), with the learning rate of Liu et al. 2025 (2502.16982, section
2.2). For a matrix W of m rows and n columns with the gradient G:

    B ← μ·B + (1 − μ)·G
    U = μ·B + (1 − μ)·G                          Nesterov momentum
    O = NS(U)                                    nearly U's polar factor: its singular vectors, all values about 1
    W ← W − lr·λ·W − lr·0.2·√max(m, n)·O

At full rank the entries of O have the root mean square 1/√max(m, n), and AdamW's updates have about 0.2 in practice.
The factor makes both take steps of one size, so that a learning rate and weight decay chosen for AdamW apply. NS is the
Newton-Schulz iteration, X ← a·X + (b·XXᵀ + c·(XXᵀ)²)·X from X = U/‖U‖, in the data type of the model.

Which matrices
--------------
`megatron.model.parameter_groups.list_hidden_matrices` lists them. If one weight contains several matrices (queries,
keys and values; the two halves of a gated layer), each is orthogonalized separately. Otherwise the scale of each would
depend on the others, which is not the case in any layer of the model. Megatron-core's `muon_split_qkv` does the same.

Whole matrices under ZeRO and tensor parallelism
------------------------------------------------
NS of a shard is not a shard of NS of the matrix. The momentum is elementwise and stays with the gradient. A rank then
needs the whole U of each matrix of which it updates elements:

    ZeRO 1, 2       A rank updates consecutive elements of all matrices, concatenated. Most matrices are its own. For
                    each matrix that is split, every rank writes its elements into a buffer of zeros, and the sum of
                    the buffers is the matrix. Each rank then orthogonalizes its matrices and takes its elements.
    tensor          The shards of the matrices are gathered. Each rank orthogonalizes some of the matrices and
                    contributes zeros for the others; the sum gives every rank all results.

Sums of one number and zeros are exact, so layouts differ only by the rounding of gradients. In bfloat16 they also
differ by the rounding of exchanged values, which are rounded before instead of after normalization. torch.optim.Muon
computes the same for matrices that are not sharded. DeepSpeed's Muon orthogonalizes each tensor-parallel shard
separately, and queries, keys and values as one matrix. Megatron-core's needs its own engine and another package.

ZeRO 3 and offloading raise an error (`megatron.config.validation`): they load and store the master weights in chunks.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.distributed.mesh import Axis
from megatron.distributed.process_groups import ProcessGroups
from megatron.distributed.sharding import (
    ShardSpec,
    all_gather,
    all_reduce_sum_,
    get_shard_spec,
    shard_tensor,
    unshard_tensors,
)
from megatron.model.parameter_groups import HiddenMatrix
from megatron.planning.memory_estimate import MUON_MATRICES_AT_ONCE


class ProjectedOptimizer(torch.optim.Optimizer):
    """Base class of optimizers whose groups may have inclusive bounds `low` and `high`."""

    @torch.no_grad()
    def clamp_masters(self) -> None:
        """Move every bounded parameter to the nearest value within its bounds."""
        for parameter, low, high in self._iter_bounded():
            parameter.clamp_(low, high)

    @torch.no_grad()
    def mask_outward_gradients(self) -> None:
        """Set the gradient to 0 where a parameter is at its bound and the step would move it beyond."""
        for parameter, low, high in self._iter_bounded():
            if (gradient := parameter.grad) is not None:
                outward = ((parameter <= low) & (gradient > 0)) | ((parameter >= high) & (gradient < 0))
                gradient.masked_fill_(outward, 0.0)

    def _iter_bounded(self) -> Iterator[tuple[torch.Tensor, float, float]]:
        """Yield every bounded parameter with its bounds."""
        for group in self.param_groups:
            low, high = group.get("low", -math.inf), group.get("high", math.inf)
            if not (math.isinf(low) and math.isinf(high)):
                yield from ((parameter, low, high) for parameter in group["params"])

    def reset_steps(self) -> None:
        """Reset every parameter's step count to 0.

        DeepSpeed makes some optimizers take a step with zero gradients to allocate their states (the half-precision
        ones without ZeRO). The moments stay zero, but Adam's bias correction would start at step 2.
        """
        for state in self.state.values():
            if "step" in state:
                state["step"].zero_()


class ProjectedAdamW(ProjectedOptimizer, torch.optim.AdamW):
    """AdamW (Loshchilov & Hutter 2019) with bounds."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one AdamW step without updates beyond a bound, then project onto each group's bounds."""
        self.mask_outward_gradients()
        loss = super().step(closure)
        self.clamp_masters()
        return loss


class ProjectedLion(ProjectedOptimizer):
    """Lion (Chen et al. 2023, 2302.06675, algorithm 2) with bounds.

    The update is the sign of an interpolated momentum, with one moment.

    θ ← θ − lr·λ·θ − lr·sign(β1·m + (1 − β1)·g)
    m ← β2·m + (1 − β2)·g
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step without updates beyond a bound, then project onto each group's bounds."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.mask_outward_gradients()
        for group in self.param_groups:
            masters = [master for master in group["params"] if master.grad is not None]
            if not masters:
                continue
            gradients: list[torch.Tensor] = [master.grad for master in masters]
            for master in masters:
                if not self.state[master]:
                    self.state[master]["exp_avg"] = torch.zeros_like(master)
            moments = [self.state[master]["exp_avg"] for master in masters]
            lr, (look_ahead, decay) = group["lr"], group["betas"]
            directions = torch._foreach_lerp(moments, gradients, 1 - look_ahead)
            torch._foreach_sign_(directions)
            torch._foreach_mul_(masters, 1 - lr * group["weight_decay"])
            torch._foreach_add_(masters, directions, alpha=-lr)
            torch._foreach_lerp_(moments, gradients, 1 - decay)
        self.clamp_masters()
        return loss


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Jordan's a, b, c: the polynomial that is steepest at 0 and keeps singular values near 1, in about [0.7, 1.2]."""
MIN_NORM = 1e-7
"""Norm below which a matrix is not scaled up to full size."""
MATCHED_RMS = 0.2
"""Root mean square of AdamW's updates (2502.16982, section 2.2)."""


def orthogonalize(matrix: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Approximate the polar factor of a matrix [m, n] by the Newton-Schulz iteration, computed in `dtype`."""
    a, b, c = COEFFICIENTS
    x = (matrix.float() / torch.linalg.vector_norm(matrix, dtype=torch.float32).clamp(min=MIN_NORM)).to(dtype)
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class MuonWithAdamW(ProjectedAdamW):
    """Optimizer that applies Muon to groups with the `algorithm` Muon and their `matrices`, and AdamW to the others.

    Args:
        groups: parameter groups built by `parameter_groups`.
        ranks: process groups that share the model and divide its batch.
        momentum: momentum μ.
        ns_steps: number of Newton-Schulz iterations.
        dtype: data type of the Newton-Schulz iteration.
        others: arguments of AdamW.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        ranks: ProcessGroups,
        *,
        momentum: float,
        ns_steps: int,
        dtype: torch.dtype,
        **others: Any,
    ) -> None:
        self._ranks, self._momentum, self._ns_steps, self._dtype = ranks, momentum, ns_steps, dtype
        # float16's range is too small for updates that are not normalized yet.
        self._exchange_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        super().__init__(groups, **others)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step with both algorithms."""
        muon = [group for group in self.param_groups if group["algorithm"] == "Muon"]
        gradients = [[master.grad for master in group["params"]] for group in muon]
        for group in muon:
            for master in group["params"]:
                master.grad = None  # AdamW skips parameters without a gradient
        loss = super().step(closure)
        for group, group_gradients in zip(muon, gradients, strict=True):
            for master, gradient in zip(group["params"], group_gradients, strict=True):
                master.grad = gradient
            if all(gradient is not None for gradient in group_gradients):
                self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        masters, gradients, lr = group["params"], [master.grad for master in group["params"]], group["lr"]
        for master in masters:
            if not self.state[master]:
                self.state[master]["momentum_buffer"] = torch.zeros_like(master)
        buffers = [self.state[master]["momentum_buffer"] for master in masters]
        torch._foreach_lerp_(buffers, gradients, 1 - self._momentum)
        if lr == 0:
            return
        updates = torch._foreach_lerp(gradients, buffers, self._momentum)
        self._orthogonalize_group(group["matrices"], updates)
        torch._foreach_mul_(masters, 1 - lr * group["weight_decay"])
        torch._foreach_add_(masters, updates, alpha=-lr * MATCHED_RMS)

    def _orthogonalize_group(self, matrices: Sequence[HiddenMatrix], updates: Sequence[Tensor]) -> None:
        """Replace updates, in place, by √max(m, n)·NS(update).

        The updates are the matrices of this rank, or one flat tensor: its shard of their concatenation (ZeRO).
        """
        mesh = self._ranks.mesh
        for batch in batch_matrix_shards(list_matrix_shards(matrices, updates, mesh.dp_cp), mesh.tensor.size):
            held = [
                (shard, whole)
                for shard, whole in zip(batch, self._gather_shards(batch), strict=True)
                if whole is not None
            ]
            if not held:
                continue
            results = self._orthogonalize_local([(shard.matrix, whole) for shard, whole in held])
            for (shard, _), result in zip(held, results, strict=True):
                assert shard.values is not None
                shard.values.copy_(result.reshape(-1).narrow(0, shard.start, shard.values.numel()))

    def _gather_shards(self, shards: Sequence["_MatrixShard"]) -> list[Tensor | None]:
        """Return this tensor-parallel rank's whole shard of each matrix.

        Matrices of which it updates no elements are None.
        """
        cut = [shard for shard in shards if shard.is_cut]
        wholes = {}
        if cut:
            numels = [shard.matrix.parameter.numel() for shard in cut]
            buffer = torch.zeros(sum(numels), dtype=self._exchange_dtype, device=self._ranks.device)
            for shard, whole in zip(cut, buffer.split(numels), strict=True):
                wholes[id(shard)] = whole
                if shard.values is not None:
                    whole.narrow(0, shard.start, shard.values.numel()).copy_(shard.values)
            all_reduce_sum_(buffer, self._ranks, "context", "data")
        return [
            None if shard.values is None else wholes.get(id(shard), shard.values).view(shard.matrix.parameter.shape)
            for shard in shards
        ]

    def _orthogonalize_local(self, held: Sequence[tuple[HiddenMatrix, Tensor]]) -> list[Tensor]:
        """Return √max(m, n)·NS of matrices; each tensor-parallel rank passes and receives its shard."""
        tensor = self._ranks.mesh.tensor
        wholes = [update for _, update in held] if tensor.size == 1 else self._gather_over_tensor(held)
        parts = [part for (matrix, _), whole in zip(held, wholes, strict=True) for part in matrix.split(whole)]
        results = [
            orthogonalize(part, self._ns_steps, self._dtype)
            if index % tensor.size == tensor.index
            else torch.zeros_like(part, dtype=self._dtype)
            for index, part in enumerate(parts)
        ]
        if tensor.size > 1:
            buffer = torch.cat([result.reshape(-1) for result in results])
            all_reduce_sum_(buffer, self._ranks, "tensor")
            flat = buffer.split([result.numel() for result in results])
            results = [values.view(result.shape) for values, result in zip(flat, results, strict=True)]
        scaled = iter([result.float() * math.sqrt(max(result.shape)) for result in results])
        joined = []
        for matrix, _ in held:
            whole = matrix.join([next(scaled) for _ in matrix.sizes])
            joined.append(whole if tensor.size == 1 else shard_tensor(whole, _get_spec(matrix), tensor))
        return joined

    def _gather_over_tensor(self, held: Sequence[tuple[HiddenMatrix, Tensor]]) -> list[Tensor]:
        flat = torch.cat([update.reshape(-1).to(self._exchange_dtype) for _, update in held])
        gathered = all_gather(flat[None], 0, self._ranks, "tensor", reduce_grad=False)
        columns = gathered.split([update.numel() for _, update in held], dim=1)
        return [
            unshard_tensors([shard.view(update.shape) for shard in shards], _get_spec(matrix))
            for (matrix, update), shards in zip(held, columns, strict=True)
        ]


@dataclass(frozen=True)
class _MatrixShard:
    """Elements of one matrix that this rank updates, within its tensor-parallel shard."""

    matrix: HiddenMatrix
    is_cut: bool
    """True if several ranks update the matrix."""
    start: int
    """Index of the first of these elements in the shard."""
    values: Tensor | None
    """Flat view of the update, or None if this rank has no elements of it."""


def list_matrix_shards(matrices: Sequence[HiddenMatrix], updates: Sequence[Tensor], axis: Axis) -> list[_MatrixShard]:
    """List the elements of each matrix that this rank updates; see `MuonWithAdamW._orthogonalize_group`.

    `axis` is the axis of the ranks among which ZeRO divides optimizer states.
    """
    if updates[0].dim() == 2:
        pairs = zip(matrices, updates, strict=True)
        return [_MatrixShard(matrix, False, 0, update.view(-1)) for matrix, update in pairs]
    (flat,) = updates
    size, position, shards = flat.numel(), 0, []
    first = axis.index * size
    for matrix in matrices:
        stop = position + matrix.parameter.numel()
        low, high = max(position, first), min(stop, first + size)
        values = flat.narrow(0, low - first, high - low) if high > low else None
        shards.append(_MatrixShard(matrix, position // size != (stop - 1) // size, low - position, values))
        position = stop
    return shards


def batch_matrix_shards(shards: Sequence[_MatrixShard], tensor_ranks: int) -> Iterator[list[_MatrixShard]]:
    """Batch shards of matrices so that a batch has at most `MUON_MATRICES_AT_ONCE` elements.

    All ranks get the same batches.
    """
    batch: list[_MatrixShard] = []
    elements = 0
    for shard in shards:
        numel = shard.matrix.parameter.numel() * tensor_ranks
        if batch and elements + numel > MUON_MATRICES_AT_ONCE:
            yield batch
            batch, elements = [], 0
        batch.append(shard)
        elements += numel
    yield batch


def _get_spec(matrix: HiddenMatrix) -> ShardSpec:
    spec = get_shard_spec(matrix.parameter)
    assert spec is not None, "every matrix of a layer is sharded over tensor-parallel ranks"
    return spec
