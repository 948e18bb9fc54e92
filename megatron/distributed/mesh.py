"""Mesh of ranks (tensor, context, data and pipeline parallelism), and the layers and tokens of each rank.

This is arithmetic, without torch and without any process. Ranks are numbered in megatron-core's order, tensor fastest
and pipeline slowest:

    rank = tensor + T · (context + C · (data + D · pipeline)),    T, C, D, P ranks along each, T·C·D·P in all

Tensor parallelism divides each layer, context the tokens of a sequence, data the sequences of a batch, and pipeline the
stack of layers. So ranks that differ only in tensor or pipeline process the same tokens, and a sum over tokens goes
over data × context. Ranks that differ only in context or data have the same weights.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal, TypeVar

Dimension = Literal["tensor", "context", "data", "pipeline"]
DIMENSION_ORDER: tuple[Dimension, ...] = ("tensor", "context", "data", "pipeline")
"""Dimensions in rank order, fastest first."""

NumberT = TypeVar("NumberT", int, float)


@dataclass(frozen=True)
class ParallelSizes:
    """Number of ranks along each dimension."""

    tensor: int = 1
    context: int = 1
    data: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} is {getattr(self, field.name)}; it must be at least 1")

    @staticmethod
    def from_world_size(world_size: int, *, tensor: int = 1, context: int = 1, pipeline: int = 1) -> "ParallelSizes":
        """Build the mesh of `world_size` ranks: the remaining ranks are data parallel.

        Raises:
            ValueError: the number of ranks is not divisible by the other dimensions.
        """
        model_size = tensor * context * pipeline
        if world_size % model_size:
            raise ValueError(
                f"{world_size} ranks are not divisible by tensor {tensor} × context {context} × pipeline {pipeline} = "
                f"{model_size}"
            )
        return ParallelSizes(tensor, context, world_size // model_size, pipeline)

    def __str__(self) -> str:
        return " × ".join(f"{name} {getattr(self, name)}" for name in ("tensor", "pipeline", "context", "data"))

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.tensor * self.context * self.data * self.pipeline

    def get_coordinates(self, rank: int) -> dict[Dimension, int]:
        """Return the coordinate of a rank along each dimension."""
        coordinates: dict[Dimension, int] = {}
        for dimension in DIMENSION_ORDER:
            rank, coordinates[dimension] = divmod(rank, getattr(self, dimension))
        return coordinates

    def find_first_rank_of_data(self, data: int) -> int | None:
        """Return the lowest rank with a data-parallel index, or None if no rank has this index."""
        return self.tensor * self.context * data if data < self.data else None

    def list_groups(self, *dimensions: Dimension) -> list[tuple[int, ...]]:
        """Return all ranks in groups whose members differ only in these dimensions, in rank order."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            coordinates = self.get_coordinates(rank)
            groups.setdefault(tuple(coordinates[d] for d in DIMENSION_ORDER if d not in dimensions), []).append(rank)
        return [tuple(group) for group in groups.values()]


@dataclass(frozen=True)
class Axis:
    """One dimension, or several combined, from the view of one rank."""

    index: int = 0
    """Coordinate of this rank along the axis, from 0."""
    size: int = 1
    """Number of ranks along the axis."""

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.size:
            raise ValueError(f"index {self.index} of {self.size}")


@dataclass(frozen=True)
class Mesh:
    """The mesh from the view of one rank."""

    rank: int = 0
    sizes: ParallelSizes = ParallelSizes()

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.sizes.world_size:
            raise ValueError(f"rank {self.rank} of {self.sizes.world_size}")

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.sizes.world_size

    @cached_property
    def tensor(self) -> Axis:
        """Axis of ranks that share each layer."""
        return self.get_axis("tensor")

    @cached_property
    def context(self) -> Axis:
        """Axis of ranks that share each sequence."""
        return self.get_axis("context")

    @cached_property
    def data(self) -> Axis:
        """Axis of ranks that read different sequences. Its index determines batches and seeds."""
        return self.get_axis("data")

    @cached_property
    def pipeline(self) -> Axis:
        """Axis of ranks that compute different layers."""
        return self.get_axis("pipeline")

    @cached_property
    def dp_cp(self) -> Axis:
        """Axis data × context of ranks that divide the tokens of a batch."""
        return self.get_axis("context", "data")

    def get_axis(self, *dimensions: Dimension) -> Axis:
        """Return the axis of these dimensions combined, the faster one first."""
        coordinates, index, size = self.sizes.get_coordinates(self.rank), 0, 1
        for dimension in (d for d in DIMENSION_ORDER if d in dimensions):
            index += size * coordinates[dimension]
            size *= getattr(self.sizes, dimension)
        return Axis(index, size)

    def list_members(self, *dimensions: Dimension) -> tuple[int, ...]:
        """Return the ranks that differ from this one only in these dimensions, itself included, in rank order."""
        return next(group for group in self.sizes.list_groups(*dimensions) if self.rank in group)

    def count_on_one_rank(self, value: NumberT) -> NumberT:
        """Return `value` on one of the ranks that process the same tokens and 0 on the others.

        A sum over all ranks then counts each token once. The counting rank is the one with the losses: in the last
        stage, the first rank that shares its layers.
        """
        return value if self.tensor.index == 0 and self.pipeline.index == self.pipeline.size - 1 else type(value)(0)


def list_context_chunks(length: int, context: Axis) -> tuple[tuple[int, int], ...]:
    """Return the chunks of a sequence on a context-parallel rank, in order: (first index, number of tokens) of each.

    A causal row sees all tokens before it, so dividing a sequence into C equal parts would give unequal work: rows of
    the last rank see about twice as many keys as the mean. Instead the sequence is cut into 2C chunks. Rank r processes
    chunks r and 2C − 1 − r, one from either end. Every rank then has the same number of scores:

        C = 2:   chunk    0  1  2  3
                 rank     0  1  1  0

    Raises:
        ValueError: the sequence is not divisible into chunks.
    """
    if context.size == 1:
        return ((0, length),)
    if length % (2 * context.size):
        raise ValueError(f"a sequence of {length} tokens is not divisible into {2 * context.size} chunks (2 per rank)")
    size = length // (2 * context.size)
    return tuple((size * chunk, size) for chunk in (context.index, 2 * context.size - 1 - context.index))


def list_chunk_owners(size: int) -> tuple[tuple[int, int], ...]:
    """Return the owners of the chunks of a sequence, in token order: (rank, index among the rank's chunks) of each."""
    if size == 1:
        return ((0, 0),)
    return (*((rank, 0) for rank in range(size)), *((rank, 1) for rank in reversed(range(size))))


def get_pipeline_layer_range(num_layers: int, stage: Axis) -> range:
    """Return the layers of a pipeline stage.

    If the layers do not divide evenly, the first stages have one more, because the last stage also computes the logits.
    """
    base_count, num_larger = divmod(num_layers, stage.size)
    first = base_count * stage.index + min(stage.index, num_larger)
    return range(first, first + base_count + (stage.index < num_larger))
