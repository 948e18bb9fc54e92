"""Muon: the layers' matrices move by their orthogonalised momentum, everything else by AdamW.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon), with the rate of Liu et al. 2025 (2502.16982, section 2.2). For
a matrix W of m rows and n columns with the gradient G:

    B ← μ·B + (1 − μ)·G
    U = μ·B + (1 − μ)·G                          Nesterov's look ahead
    O = NS(U)                                    nearly U's polar factor: its singular vectors, all values about 1
    W ← W − lr·λ·W − lr·0.2·√max(m, n)·O

All entries of O together have the root mean square 1/√max(m, n) where its rank is full, and AdamW's updates have about
0.2 in practice: with that factor both take steps of one size, and a learning rate and weight decay chosen for AdamW
serve. NS is the Newton-Schulz iteration, X ← a·X + (b·XXᵀ + c·(XXᵀ)²)·X from X = U/‖U‖, in the type that the model
computes in.

Which matrices
--------------
`megatron.model.parameter_groups.list_hidden_matrices` says. What lies in one weight but is several matrices (queries,
keys and values; the two halves of a gated layer) is orthogonalised one by one: otherwise the scale of each would depend
on the others', which no layer of the model does. Megatron-core's `muon_split_qkv` does the same.

Whole matrices under ZeRO and tensor parallelism
------------------------------------------------
NS of a part is no part of NS of the whole. The momentum is elementwise and stays where the gradient is; then a rank
needs the whole U of each matrix that it steps some elements of:

    ZeRO 1, 2       a rank steps consecutive elements of all matrices laid end to end. Most matrices are its own; of
                    those that are cut, each rank writes its elements into a buffer of zeros, and the sum of the buffers
                    is the whole. Each rank then orthogonalises the matrices that it steps, and takes its elements.
    tensor          what the ranks hold of the matrices is gathered; each orthogonalises some of the matrices, and their
                    sum with the others' zeros is what all go on with.

Sums of one number and zeros are exact, so layouts differ by the rounding of gradients alone; in bfloat16 also by that
of what is exchanged, which is rounded before it is normalised instead of after.
torch.optim.Muon computes the same for matrices that a process holds whole. DeepSpeed's Muon orthogonalises what a
tensor-parallel rank holds by itself, and queries, keys and values as one; megatron-core's needs its own engine and
another package.

ZeRO 3 and offloading are refused (`megatron.config.validation`): there the masters' elements come and go in pieces.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.distributed.collectives import all_gather, all_reduce_sum_
from megatron.distributed.mesh import Axis
from megatron.distributed.process_groups import ProcessGroups
from megatron.distributed.sharding import ShardSpec, get_shard_spec, shard_tensor, unshard_tensors
from megatron.model.parameter_groups import HiddenMatrix
from megatron.planning.memory_estimate import MUON_MATRICES_AT_ONCE
from megatron.training.projected_optimizers import ProjectedAdamW

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Jordan's a, b, c: the steepest polynomial at 0 that keeps singular values near 1; they end in about [0.7, 1.2]."""
MIN_NORM = 1e-7
"""A matrix of a smaller norm is not blown up to full size."""
MATCHED_RMS = 0.2
"""Of AdamW's updates (2502.16982, section 2.2)."""


def orthogonalize(matrix: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Newton-Schulz: nearly the polar factor of a matrix [m, n], in `dtype`."""
    a, b, c = COEFFICIENTS
    x = (matrix.float() / torch.linalg.vector_norm(matrix, dtype=torch.float32).clamp(min=MIN_NORM)).to(dtype)
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class MuonWithAdamW(ProjectedAdamW):
    """Muon for the groups whose `algorithm` is Muon and which name their `matrices`; `ProjectedAdamW` for the others.

    Args:
        groups: of parameters, as `parameter_groups` makes them.
        ranks: those that share the model and divide its batch.
        momentum: μ.
        ns_steps: of the Newton-Schulz iteration.
        dtype: in which it is computed.
        others: AdamW's own arguments.
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
        # float16 has too small a range for what is not normalised yet.
        self._exchange_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        super().__init__(groups, **others)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both."""
        muon = [group for group in self.param_groups if group["algorithm"] == "Muon"]
        gradients = [[master.grad for master in group["params"]] for group in muon]
        for group in muon:
            for master in group["params"]:
                master.grad = None  # AdamW passes over what has none
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
        """Make updates, in place, √max(m, n)·NS(update). They are the matrices that this rank holds, or one flat
        tensor: its part of them, laid end to end (ZeRO)."""
        mesh = self._ranks.mesh
        for batch in batch_by_size(list_pieces(matrices, updates, mesh.dp_cp), mesh.tensor.size):
            held = [
                (piece, whole) for piece, whole in zip(batch, self._complete(batch), strict=True) if whole is not None
            ]
            if not held:
                continue
            results = self._orthogonalize_held([(piece.matrix, whole) for piece, whole in held])
            for (piece, _), result in zip(held, results, strict=True):
                assert piece.values is not None
                piece.values.copy_(result.reshape(-1).narrow(0, piece.start, piece.values.numel()))

    def _complete(self, pieces: Sequence["_Piece"]) -> list[Tensor | None]:
        """What this tensor-parallel rank holds of the matrices that it steps some elements of; None of the others."""
        cut = [piece for piece in pieces if piece.is_cut]
        wholes = {}
        if cut:
            numels = [piece.matrix.parameter.numel() for piece in cut]
            buffer = torch.zeros(sum(numels), dtype=self._exchange_dtype, device=self._ranks.device)
            for piece, whole in zip(cut, buffer.split(numels), strict=True):
                wholes[id(piece)] = whole
                if piece.values is not None:
                    whole.narrow(0, piece.start, piece.values.numel()).copy_(piece.values)
            all_reduce_sum_(buffer, self._ranks, "context", "data")
        return [
            None if piece.values is None else wholes.get(id(piece), piece.values).view(piece.matrix.parameter.shape)
            for piece in pieces
        ]

    def _orthogonalize_held(self, held: Sequence[tuple[HiddenMatrix, Tensor]]) -> list[Tensor]:
        """√max(m, n)·NS of matrices, of which each tensor-parallel rank has its part and gets its part."""
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
class _Piece:
    """The elements of a matrix that this rank steps, of what its tensor-parallel rank holds."""

    matrix: HiddenMatrix
    is_cut: bool
    """Do several ranks step it?"""
    start: int
    """The first of its elements here."""
    values: Tensor | None
    """Flat: a view of the update. None if this rank has none of it."""


def list_pieces(matrices: Sequence[HiddenMatrix], updates: Sequence[Tensor], axis: Axis) -> list[_Piece]:
    """What this rank steps of each matrix; see `MuonWithAdamW._orthogonalize_group`.

    axis: the ranks that ZeRO divides optimizer states among.
    """
    if updates[0].dim() == 2:
        pairs = zip(matrices, updates, strict=True)
        return [_Piece(matrix, False, 0, update.view(-1)) for matrix, update in pairs]
    (flat,) = updates
    size, position, pieces = flat.numel(), 0, []
    first = axis.index * size
    for matrix in matrices:
        stop = position + matrix.parameter.numel()
        low, high = max(position, first), min(stop, first + size)
        values = flat.narrow(0, low - first, high - low) if high > low else None
        pieces.append(_Piece(matrix, position // size != (stop - 1) // size, low - position, values))
        position = stop
    return pieces


def batch_by_size(pieces: Sequence[_Piece], tensor_ranks: int) -> Iterator[list[_Piece]]:
    """Pieces of matrices of at most `MUON_MATRICES_AT_ONCE` elements together, the same ones on every rank."""
    batch: list[_Piece] = []
    elements = 0
    for piece in pieces:
        numel = piece.matrix.parameter.numel() * tensor_ranks
        if batch and elements + numel > MUON_MATRICES_AT_ONCE:
            yield batch
            batch, elements = [], 0
        batch.append(piece)
        elements += numel
    yield batch


def _get_spec(matrix: HiddenMatrix) -> ShardSpec:
    spec = get_shard_spec(matrix.parameter)
    assert spec is not None, "tensor-parallel ranks divide every matrix of a layer"
    return spec
