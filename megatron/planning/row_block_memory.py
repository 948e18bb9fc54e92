"""Memory of attention in plain PyTorch: the full score matrix, or row blocks, saved or recomputed."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.attention.backends.backend import MAX_KEYS_SAVED, MIN_ROWS_SAVED
from megatron.planning.model_costs import (
    PlannedEncoding,
    PlannedProcessor,
)

SOFTMAX_BACKWARD_BYTES = 12
"""Bytes per score in addition to its probability: the gradients of both in float32 and, on CUDA devices only, their
product (`softmax_backward_cuda_out` in PyTorch)."""

STICK_BREAKING_BYTES = 4
"""Additional bytes per score in the backward pass of stick-breaking: reversed cumulative sums along the keys."""


@dataclass(frozen=True)
class AttentionShape:
    """Attention of one layer and one micro-batch on one rank."""

    batch_size: int
    segments: tuple[tuple[int, int], ...]
    """(first row, number of rows) of the query rows: a rank's chunks of a sequence."""
    num_heads: int
    """Heads whose scores are computed: all heads of the model if a processor mixes them."""
    head_dim: int
    bytes_per_element: int
    encoding: PlannedEncoding
    processor: PlannedProcessor | None
    has_shared_tables: bool
    """True if all layers share the encoding's tables."""
    window: int | None
    block_rows: int
    """Rows of a block in the configuration."""
    has_dropout: bool
    gpu_bytes: int
    """Device memory."""
    has_softcap: bool = False
    """True if the scores are soft-capped."""
    softmax_type: str = "vanilla"
    """Function that turns scores into weights (`attention/softmax.py`)."""
    has_documents: bool = False
    """True if documents in a row are masked from each other."""
    is_compiled: bool = False
    """True if the regions around attention are compiled (`model/layer_config.py`)."""

    @property
    def num_rows(self) -> int:
        """Query rows of a sequence."""
        return sum(length for _, length in self.segments)

    @property
    def num_distances(self) -> int:
        """Distances of all segments, each with its own tables."""
        return sum(start + length for start, length in self.segments)

    @property
    def num_columns(self) -> int:
        """Keys of the longest segment."""
        return max(start + length for start, length in self.segments)

    @property
    def rotates_in_compiled_region(self) -> bool:
        """True if a compiled region rotates queries and keys (`get_rotation` in `model/attention.py`)."""
        can_rotate = self.encoding.cost.has_cos_sin(self.encoding.options)
        return can_rotate and self.is_compiled and len(self.segments) == 1 and not self.has_documents

    @property
    def rotated_dim(self) -> int:
        """Length of a rotated query or key. Kernels pad values and outputs to it (`with_padded_values`)."""
        return self.head_dim * self.encoding.count_qk_numbers()

    @property
    def query_bytes(self) -> int:
        """Bytes of the queries, or of a kernel's output, [B, H, R, e]."""
        return self.batch_size * self.num_rows * self.num_heads * self.rotated_dim * self.bytes_per_element

    @property
    def key_bytes(self) -> int:
        """Bytes of the keys, or of a kernel's values, [B, H, C, e]."""
        return self.batch_size * self.num_columns * self.num_heads * self.rotated_dim * self.bytes_per_element


@dataclass(frozen=True)
class AttentionMemory:
    """Attention memory of one layer in bytes, without queries, keys, values and the output."""

    saved_bytes: int = 0
    """Tensors saved for the backward pass, without score matrices."""
    saved_map_bytes: int = 0
    """Score matrices saved for the backward pass."""
    workspace_bytes: int = 0
    """Peak of the backward pass, without the saved score matrices."""
    workspace_map_bytes: int = 0
    """Part of `workspace_bytes`: score matrices and their gradients at the peak, without the saved ones."""
    shared_bytes: int = 0
    """Tensors saved for the backward pass that all layers share."""
    copies_query: bool = False
    """True if a (scaled) copy of the queries is saved that would otherwise be a view."""
    copies_keys: bool = False
    """True if contiguous copies of each segment's keys and values are saved instead of the originals."""
    pads_values: bool = False
    """True if values are padded to the length of rotated queries (`with_padded_values`)."""
    recomputed_fraction: float = 0.0
    """Fraction of the forward pass's score products that the backward pass recomputes."""


@dataclass(frozen=True)
class RowBlocks:
    """Group of equally large blocks of query rows, computed one after another. Their numbers of columns grow evenly."""

    num_rows: int
    """Rows of one block."""
    num_columns: int
    """Columns of the last block, which has the most."""
    is_saved: bool
    """True if their score matrices are saved for the backward pass."""
    count: int = 1
    first_columns: int | None = None
    """Columns of the first block; None if it has as many as the last."""

    @property
    def num_scores(self) -> int:
        """Scores of the last block."""
        return self.num_rows * self.num_columns

    @property
    def total_scores(self) -> int:
        """Scores of all blocks."""
        first = self.num_columns if self.first_columns is None else self.first_columns
        return self.num_rows * self.count * (first + self.num_columns) // 2

    @property
    def num_scores_before(self) -> int:
        """Scores of the second-to-last block; 0 if there is only one."""
        if self.count == 1:
            return 0
        first = self.num_columns if self.first_columns is None else self.first_columns
        return self.num_rows * (self.num_columns - (self.num_columns - first) // (self.count - 1))


def _iter_row_blocks(shape: AttentionShape, max_keys_saved: int) -> Iterator[RowBlocks]:
    """Yield the blocks of all segments in a few groups, so that planning any length is fast."""
    for start, length in shape.segments:
        stop, size = start + length, shape.block_rows
        is_saved = stop <= max_keys_saved
        if is_saved and shape.processor is None:
            size = max(size, MIN_ROWS_SAVED)
        count, rest = divmod(length, size)
        above = 0 if shape.processor is None else shape.processor.preceding_rows  # recomputed with each block
        if shape.window is None:
            reach, num_growing = stop, count
        else:
            # Most columns that a block sees before its first row.
            reach = shape.window - 1
            if shape.processor is not None:
                reach += shape.processor.left_context + shape.processor.preceding_rows
            num_growing = min(count, max(0, (reach - start) // size + 1))
        if num_growing:
            yield RowBlocks(size + above, start + num_growing * size, is_saved, num_growing, start + size)
        if num_growing < count:
            yield RowBlocks(size + above, size + reach, is_saved, count - num_growing)
        if rest:
            yield RowBlocks(rest + above, rest + min(stop - rest, reach), is_saved)


def estimate_eager(shape: AttentionShape) -> AttentionMemory:
    """Estimate the memory of eager attention, which computes all rows at once."""
    blocks = [RowBlocks(length, start + length, True) for start, length in shape.segments]
    return _estimate_blocks(shape, blocks, is_eager=True)


def estimate_chunked(shape: AttentionShape) -> AttentionMemory:
    """Estimate the memory of row blocks that are recomputed in the backward pass."""
    return _estimate_blocks(shape, list(_iter_row_blocks(shape, 0)))


def estimate_row_blocks(shape: AttentionShape) -> AttentionMemory:
    """Estimate the memory of row blocks. Those of short sequences are saved, others recomputed."""
    return _estimate_blocks(shape, list(_iter_row_blocks(shape, MAX_KEYS_SAVED)))


def _estimate_blocks(shape: AttentionShape, blocks: list[RowBlocks], *, is_eager: bool = False) -> AttentionMemory:
    map_bytes = _score_map_bytes(shape, is_eager=is_eager)
    work_bytes = _score_workspace_bytes(shape, is_eager=is_eager)
    recomputed = sum(block.total_scores for block in blocks if not block.is_saved)
    # Every block but the first in the backward pass adds to existing gradients of keys and values.
    added_to = shape.key_bytes + shape.key_bytes * shape.head_dim // shape.rotated_dim
    saved = [block for block in blocks if block.is_saved]
    key_copies = 0
    if shape.encoding.cost.promotes_keys and shape.bytes_per_element < 4:
        num_columns = sum(block.total_scores // block.num_rows for block in saved)
        key_copies = 4 * shape.batch_size * num_columns * shape.num_heads * shape.head_dim
    workspace, workspace_maps = [], []
    for index, block in enumerate(blocks):
        per_score = work_bytes - (map_bytes if block.is_saved else 0)
        workspace_maps.append(block.num_scores * per_score)
        workspace.append(block.num_scores * per_score + (added_to if index < len(blocks) - 1 else 0))
        workspace.append(block.num_scores_before * per_score + (added_to if block.count > 1 else 0))
    return AttentionMemory(
        saved_bytes=_count_table_bytes(shape, blocks, is_eager=is_eager) + key_copies,
        saved_map_bytes=sum(block.total_scores * map_bytes for block in saved),
        workspace_bytes=max(workspace),
        workspace_map_bytes=max(workspace_maps),
        copies_query=all(block.is_saved for block in blocks),
        recomputed_fraction=recomputed / sum(block.total_scores for block in blocks),
    )


def _count_table_bytes(shape: AttentionShape, blocks: list[RowBlocks], *, is_eager: bool) -> int:
    """Return the bytes per distance, independent of the batch.

    These are the encoding's tables and the processor's share of the bias.
    """
    num_distances, num_tables = shape.num_distances, shape.encoding.cost.num_saved_tables
    if "table" in shape.encoding.facts.hooks and not all(block.is_saved for block in blocks):
        num_tables += shape.encoding.facts.adds_bias + shape.encoding.facts.multiplies_scores  # passed to each block
    size = 4 * num_tables * shape.num_heads * num_distances
    processor = shape.processor
    if processor is not None and shape.encoding.facts.adds_bias and shape.window is None and not is_eager:
        width, radius = processor.width, processor.left_context
        size += num_distances * (4 * width * (1 + radius) + 4 * shape.num_heads * (1 + 2 * radius))
    return size


def _score_map_bytes(shape: AttentionShape, *, is_eager: bool) -> int:
    """Return the bytes per score that a saved block takes."""
    b, encoding, heads = shape.bytes_per_element, shape.encoding, shape.num_heads
    half_copy_bytes = b if b < 4 else 0
    per_sequence = heads * (
        4 + half_copy_bytes + encoding.cost.saved_bytes_per_head_score + b * encoding.cost.num_saved_maps
    )
    shared_bytes = encoding.cost.saved_bytes_per_score(encoding.options)
    if shape.has_softcap:
        per_sequence += b * heads  # the hyperbolic tangents
    changes_weights = shape.processor is not None and shape.processor.changes_weights
    if shape.softmax_type.startswith("stick-breaking"):
        per_sequence += 4 * heads  # the logits, which the backward pass of a softmax does not need
    if shape.softmax_type == "stick-breaking-remainder":
        # The mask of the rows' own keys, and the weights with the remainder unless only their half copy is read.
        per_sequence += heads * (1 + (0 if half_copy_bytes and not changes_weights else 4))
    if changes_weights and shape.softmax_type in ("off-by-one", "learnable"):
        per_sequence += 4 * heads  # a contiguous copy of the weights without the sinks' column
    if encoding.facts.multiplies_scores:
        per_sequence += b * heads
        shared_bytes += b * heads
    if shape.has_dropout:
        per_sequence += heads * (1 if half_copy_bytes else 5)
    if shape.processor is not None:
        per_sequence += 4 * heads * (shape.processor.num_head_maps + shape.processor.num_weight_maps)
        # In float32, with the scores they are computed from; blocks also save their inputs from earlier blocks.
        per_sequence += shape.processor.num_sequence_maps * ((4 if is_eager else 8) + 2)
        if changes_weights:
            per_sequence += b * heads - half_copy_bytes * heads
        if shape.processor.width:
            per_sequence += b * (heads + shape.processor.width)
            if "gate" in encoding.facts.hooks:  # each sequence has its own bias, which is convolved with the scores
                per_sequence += b * heads
        seen_bytes = 2  # the boolean mask, twice
        if encoding.facts.adds_bias and is_eager and shape.processor.width:
            seen_bytes += b * heads + 1
        if shape.has_documents:  # each sequence has its own mask; hidden values are masked at document starts
            per_sequence += seen_bytes + (b * shape.processor.width + 1 if shape.processor.left_context else 0)
        else:
            shared_bytes += seen_bytes
    return shape.batch_size * per_sequence + shared_bytes


def _score_workspace_bytes(shape: AttentionShape, *, is_eager: bool) -> int:
    """Return the bytes per score of a block's matrices and their gradients, at the peak of the backward pass."""
    b, heads = shape.bytes_per_element, shape.num_heads
    # Gradient of the bias, and a padded copy for the sums along diagonals.
    bias_bytes = 8 * heads if shape.encoding.facts.adds_bias else 0
    if "gate" in shape.encoding.facts.hooks:
        bias_bytes = 12 * heads * shape.batch_size  # also a float64 gradient
    # Probabilities and the workspace of the softmax's backward pass, after the half-precision copy is freed; or the
    # gradients of the logits and of the bias.
    half_copy_bytes, num_maps = b if b < 4 else 0, shape.batch_size * heads
    of_weights = SOFTMAX_BACKWARD_BYTES + (
        STICK_BREAKING_BYTES if shape.softmax_type.startswith("stick-breaking") else 0
    )
    # A processor that changes weights reads them in float32; their gradient exists before the copy's is freed.
    estimate_freed_bytes = 0 if shape.processor is not None and shape.processor.changes_weights else half_copy_bytes
    maps = _score_map_bytes(shape, is_eager=is_eager) + max(
        (of_weights - estimate_freed_bytes) * num_maps, 4 * num_maps + bias_bytes
    )
    if shape.processor is None:
        return maps
    if shape.processor.preceding_rows:  # a convolution over rows pads its input and the gradient
        maps += 4 * num_maps
    maps -= 4 * num_maps * shape.processor.num_weight_maps  # freed before the softmax's backward pass
    # Hidden values, and their gradients after the activation and after the second convolution. With a bias also: the
    # hidden values before and after adding its share, the share in float32 and in the type of the scores, and the
    # gradient of the share in both types and in a sheared copy for the sums along diagonals.
    width, batch = shape.processor.width, shape.batch_size
    candidates = [batch * b * (3 * width + heads)]
    # Recomputation, before any gradient: scores, padded scores, the summand of the scores, their float32 sum, and
    # hidden values; with a bias also the bias and its share, in float32.
    share = 4 * (width + heads) if shape.encoding.facts.adds_bias else 0
    candidates.append(batch * (heads * (3 * b + 4) + b * width) + share)
    if shape.encoding.facts.adds_bias:
        candidates.append(batch * b * 2 * (width + heads) + (4 + half_copy_bytes) * width)
        candidates.append(4 * 2 * (width + heads) + half_copy_bytes * width)
    return max(maps, *candidates)
