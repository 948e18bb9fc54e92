"""What each way of computing attention keeps for the backward pass and has in it besides: the facts of the backends
(`megatron/attention/backends/`), one function each, in `ATTENTION_MEMORY`.

Queries, keys, values and the output that the next layer reads are the layer's (`activations.py`). B sequences, S scores
(row, column) of a block, h heads of a rank, H of the model, d head dimension, W width of a processor, N distances, b
bytes of the compute type:

| computed by                  | keeps                                        | in the backward pass                |
|------------------------------|----------------------------------------------|-------------------------------------|
| eager, row blocks that are   | B·h·S·(4 + b): probabilities in float32 and  | a block's maps and their gradients  |
| kept                         | a half type; processor: B·(H + W)·S·b more   |                                     |
| row blocks, recomputed       | tables                                       | one block's maps and gradients      |
| sdpa                         | 4 bytes a row and head; its output, if q is  | nothing that counts                 |
|                              | rotated                                      |                                     |
| kernels/biased_attention     | its output, 4 bytes a row and head           | dq, dk, dv, sums of table gradients |
| kernels/cdape_attention      | q, k and v, contiguous; 8 bytes a row and    | a chunk's maps, sums of dk and dv   |
|                              | head; tables, 4·N·(k·H + W) bytes; for its   |                                     |
|                              | CUDA kernels the output in two numbers       |                                     |
| a matrix of biases (FIRE)    | nothing                                      | matrices [h, 256, N], 2 + B of them |

What a backend takes by itself (`auto`) depends on a check on the card; without one it takes what PyTorch has.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from megatron.attention.backends.backend import MAX_KEYS_KEPT, MIN_ROWS_KEPT
from megatron.attention.backends.capabilities import find_unsupported_method
from megatron.config.schema import Config
from megatron.options.model import head_dim
from megatron.planning.model_costs import (
    PlannedEncoding,
    PlannedProcessor,
    count_layer_kinds,
    plan_encoding,
    plan_processor,
)

MASKED_ROWS = 512
"""Rows of a block that PyTorch's fused attention computes with a mask (`attention/backends/pytorch.py`)."""
MAX_PACKED_HEAD_DIM = 256
"""Of flash attention on documents (`attention/backends/pytorch.py`)."""
MATRIX_ROWS = 256
"""Rows of a block for which the kernels make a matrix of biases (`attention/backends/triton.py`)."""

SOFTMAX_BACKWARD_BYTES = 12
"""Of a score beside its probability: the gradients of both in float32 and, on CUDA devices alone, their product
(`softmax_backward_cuda_out` in PyTorch)."""

STICK_BREAKING_BYTES = 4
"""What the backward pass of stick-breaking has more: sums along the keys, turned round, beside what they sum."""

MAX_HEAD_DIM, MAX_PROCESSOR_WIDTH = 128, 64
"""Of the kernels (`kernels/head_dim.py`, `kernels/cdape_attention/op.py`)."""

MAPS_FRACTION, MIN_CHUNK_ROWS, CHUNK_ROWS = 1 / 12, 16, 1024
"""Of a card's memory, what a chunk's maps take at most in kernels/cdape_attention; the rows of its chunks."""

PARTIAL_SUMS = 1024
"""Programs that share the sums of a table's gradient (`kernels/biased_attention/configs.py`)."""


@dataclass(frozen=True)
class AttentionShape:
    """The attention of one layer and one micro-batch on one rank."""

    batch_size: int
    segments: tuple[tuple[int, int], ...]
    """(first, number) of the query rows: a rank's chunks of a sequence."""
    num_heads: int
    """Whose scores are computed: all of the model's, where a processor mixes them."""
    head_dim: int
    bytes_per_element: int
    encoding: PlannedEncoding
    processor: PlannedProcessor | None
    has_shared_tables: bool
    """Are the encoding's tables those of all layers?"""
    window: int | None
    block_rows: int
    """Of the configuration's blocks of rows."""
    has_dropout: bool
    gpu_bytes: int
    """Memory of the card."""
    has_softcap: bool = False
    """Are the scores soft-capped?"""
    softmax_type: str = "vanilla"
    """What makes weights of the logits (`attention/softmax.py`)."""
    has_documents: bool = False
    """Are documents of a row kept apart?"""

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
    def rotated_dim(self) -> int:
        """Numbers of a rotated query or key; kernels have values and outputs of that length too (`pad_values`)."""
        return self.head_dim * self.encoding.count_qk_numbers()

    @property
    def query_bytes(self) -> int:
        """Of the queries, or of a kernel's output, [B, H, R, e]."""
        return self.batch_size * self.num_rows * self.num_heads * self.rotated_dim * self.bytes_per_element

    @property
    def key_bytes(self) -> int:
        """Of the keys, or of a kernel's values, [B, H, C, e]."""
        return self.batch_size * self.num_columns * self.num_heads * self.rotated_dim * self.bytes_per_element


@dataclass(frozen=True)
class AttentionMemory:
    """Bytes of one layer, beside queries, keys, values and the output."""

    saved_bytes: int = 0
    """Between the passes, without maps."""
    saved_map_bytes: int = 0
    """Of score maps, between the passes."""
    workspace_bytes: int = 0
    """The most at one time in the backward pass, kept maps not counted again."""
    workspace_map_bytes: int = 0
    """The maps and their gradients among these, with kept ones."""
    shared_bytes: int = 0
    """Between the passes, for all layers together."""
    copies_query: bool = False
    """Is a copy of the queries kept (scaled) where they would else be a view?"""
    copies_keys: bool = False
    """Are contiguous copies of each segment's keys and values kept, and not what they were made of?"""
    pads_values: bool = False
    """Are values as long as rotated queries (`pad_values`)?"""
    recomputed_fraction: float = 0.0
    """Of the forward pass's score products, what the backward pass computes again."""


@dataclass(frozen=True)
class RowBlocks:
    """Blocks of as many query rows each, computed one after the other; the columns that they see grow evenly."""

    num_rows: int
    """Of a block."""
    num_columns: int
    """Of the last block, which sees most."""
    is_saved: bool
    """Their maps stay for the backward pass."""
    count: int = 1
    first_columns: int | None = None
    """Of the first block; as the last if absent."""

    @property
    def num_scores(self) -> int:
        """Of the last block."""
        return self.num_rows * self.num_columns

    @property
    def total_scores(self) -> int:
        """Of all of them."""
        first = self.num_columns if self.first_columns is None else self.first_columns
        return self.num_rows * self.count * (first + self.num_columns) // 2

    @property
    def num_scores_before(self) -> int:
        """Of the block before the last; 0 if there is none."""
        if self.count == 1:
            return 0
        first = self.num_columns if self.first_columns is None else self.first_columns
        return self.num_rows * (self.num_columns - (self.num_columns - first) // (self.count - 1))


def _iter_row_blocks(shape: AttentionShape, max_keys_kept: int) -> Iterator[RowBlocks]:
    """The blocks of all segments, a million of which are as few groups as two: a plan of any length is quick."""
    for start, length in shape.segments:
        stop, size = start + length, shape.block_rows
        is_saved = stop <= max_keys_kept
        if is_saved and shape.processor is None:
            size = max(size, MIN_ROWS_KEPT)
        count, rest = divmod(length, size)
        above = 0 if shape.processor is None else shape.processor.rows_above  # computed with each block
        if shape.window is None:
            reach, num_growing = stop, count
        else:
            # Columns before a block's first row that it sees, at most.
            reach = shape.window - 1
            if shape.processor is not None:
                reach += shape.processor.left_context + shape.processor.rows_above
            num_growing = min(count, max(0, (reach - start) // size + 1))
        if num_growing:
            yield RowBlocks(size + above, start + num_growing * size, is_saved, num_growing, start + size)
        if num_growing < count:
            yield RowBlocks(size + above, size + reach, is_saved, count - num_growing)
        if rest:
            yield RowBlocks(rest + above, rest + min(stop - rest, reach), is_saved)


def estimate_eager(shape: AttentionShape) -> AttentionMemory:
    """All rows at once."""
    blocks = [RowBlocks(length, start + length, True) for start, length in shape.segments]
    return _estimate_blocks(shape, blocks, is_eager=True)


def estimate_chunked(shape: AttentionShape) -> AttentionMemory:
    """Row blocks that are recomputed."""
    return _estimate_blocks(shape, list(_iter_row_blocks(shape, 0)))


def estimate_row_blocks(shape: AttentionShape) -> AttentionMemory:
    """Row blocks, kept for short sequences."""
    return _estimate_blocks(shape, list(_iter_row_blocks(shape, MAX_KEYS_KEPT)))


def _estimate_blocks(shape: AttentionShape, blocks: list[RowBlocks], *, is_eager: bool = False) -> AttentionMemory:
    map_bytes = _score_map_bytes(shape, is_eager=is_eager)
    work_bytes = _score_workspace_bytes(shape, is_eager=is_eager)
    recomputed = sum(block.total_scores for block in blocks if not block.is_saved)
    # The gradients of keys and values, which each block but the last, the first to be differentiated, finds there.
    added_to = shape.key_bytes + shape.key_bytes * shape.head_dim // shape.rotated_dim
    workspace = []
    for index, block in enumerate(blocks):
        per_score = work_bytes - (map_bytes if block.is_saved else 0)
        workspace.append(block.num_scores * per_score + (added_to if index < len(blocks) - 1 else 0))
        workspace.append(block.num_scores_before * per_score + (added_to if block.count > 1 else 0))
    return AttentionMemory(
        saved_bytes=_table_bytes(shape, blocks, is_eager=is_eager),
        saved_map_bytes=sum(block.total_scores * map_bytes for block in blocks if block.is_saved),
        workspace_bytes=max(workspace),
        workspace_map_bytes=max(block.num_scores * work_bytes for block in blocks),
        copies_query=all(block.is_saved for block in blocks),
        recomputed_fraction=recomputed / sum(block.total_scores for block in blocks),
    )


def _table_bytes(shape: AttentionShape, blocks: list[RowBlocks], *, is_eager: bool) -> int:
    """Per distance, whatever the batch: what the encoding keeps, and what a processor makes of the bias alone."""
    num_distances, num_tables = shape.num_distances, shape.encoding.cost.num_saved_tables
    if "table" in shape.encoding.facts.hooks and not all(block.is_saved for block in blocks):
        num_tables += shape.encoding.facts.adds_bias + shape.encoding.facts.multiplies_scores  # handed to each block
    size = 4 * num_tables * shape.num_heads * num_distances
    processor = shape.processor
    if processor is not None and shape.encoding.facts.adds_bias and shape.window is None and not is_eager:
        width, radius = processor.width, processor.left_context
        size += num_distances * (4 * width * (1 + radius) + 4 * shape.num_heads * (1 + 2 * radius))
    return size


def _score_map_bytes(shape: AttentionShape, *, is_eager: bool) -> int:
    """What a block keeps of each score, where it is kept."""
    b, encoding, heads = shape.bytes_per_element, shape.encoding, shape.num_heads
    half_copy_bytes = b if b < 4 else 0
    per_sequence = heads * (
        4 + half_copy_bytes + encoding.cost.saved_bytes_per_head_score + b * encoding.cost.num_saved_maps
    )
    shared_bytes = encoding.cost.saved_bytes_per_score(encoding.options)
    if shape.has_softcap:
        per_sequence += b * heads  # the hyperbolic tangents
    if shape.softmax_type.startswith("stick-breaking"):
        per_sequence += 4 * heads  # the logits, which a softmax's backward pass needs not
    if encoding.facts.multiplies_scores:
        per_sequence += b * heads
        shared_bytes += b * heads
    if shape.has_dropout:
        per_sequence += heads * (1 if half_copy_bytes else 5)
    if shape.processor is not None:
        per_sequence += 4 * heads * shape.processor.num_head_maps
        # In float32, and of which scores they are made; blocks keep besides what they are handed by those before.
        per_sequence += shape.processor.num_sequence_maps * ((4 if is_eager else 8) + 2)
        if shape.processor.changes_weights:
            per_sequence += b * heads - half_copy_bytes * heads
        if shape.processor.width:
            per_sequence += b * (heads + shape.processor.width)
            if "gate" in encoding.facts.hooks:  # the bias is each sequence's own, and convolved with the scores
                per_sequence += b * heads
        seen_bytes = 2  # who sees what, as truth values, twice
        if encoding.facts.adds_bias and is_eager and shape.processor.width:
            seen_bytes += b * heads + 1
        if shape.has_documents:  # each sequence has its own; and hidden values without those before a document
            per_sequence += seen_bytes + (b * shape.processor.width + 1 if shape.processor.left_context else 0)
        else:
            shared_bytes += seen_bytes
    return shape.batch_size * per_sequence + shared_bytes


def _score_workspace_bytes(shape: AttentionShape, *, is_eager: bool) -> int:
    """A block's maps and their gradients at the worst moment, for each score."""
    b, heads = shape.bytes_per_element, shape.num_heads
    # Its gradient, and the same padded to be summed along diagonals.
    bias_bytes = 8 * heads if shape.encoding.facts.adds_bias else 0
    if "gate" in shape.encoding.facts.hooks:
        bias_bytes = 12 * heads * shape.batch_size  # the gradient in float64, too
    # Probabilities and what their softmax's backward pass has, when the copy in a half type has gone; or the logits'
    # gradient and the bias's.
    half_copy_bytes, num_maps = b if b < 4 else 0, shape.batch_size * heads
    of_weights = SOFTMAX_BACKWARD_BYTES + (
        STICK_BREAKING_BYTES if shape.softmax_type.startswith("stick-breaking") else 0
    )
    # A processor that changes weights reads them in float32: its gradient is there before the copy's is gone.
    freed_bytes = 0 if shape.processor is not None and shape.processor.changes_weights else half_copy_bytes
    maps = _score_map_bytes(shape, is_eager=is_eager) + max(
        (of_weights - freed_bytes) * num_maps, 4 * num_maps + bias_bytes
    )
    if shape.processor is None:
        return maps
    if shape.processor.rows_above:  # a convolution over rows pads what it reads, and the gradient
        maps += 4 * num_maps
    # Hidden values, their gradient through the activation and out of the second convolution. With a bias also the
    # hidden values before and after its own share joins them, that share in float32 and in the type of the scores;
    # and the share's gradient in both, and sheared to be summed along diagonals.
    width, batch = shape.processor.width, shape.batch_size
    candidates = [batch * b * (3 * width + heads)]
    # Computed again, before any gradient: scores, padded scores and what is added to them, their sum in float32, and
    # hidden values; with a bias it and its share, in float32.
    share = 4 * (width + heads) if shape.encoding.facts.adds_bias else 0
    candidates.append(batch * (heads * (3 * b + 4) + b * width) + share)
    if shape.encoding.facts.adds_bias:
        candidates.append(batch * b * 2 * (width + heads) + (4 + half_copy_bytes) * width)
        candidates.append(4 * 2 * (width + heads) + half_copy_bytes * width)
    return max(maps, *candidates)


def estimate_sdpa(shape: AttentionShape) -> AttentionMemory:
    """PyTorch's fused attention."""
    size = 4 * shape.batch_size * shape.num_rows * shape.num_heads  # the logarithm of each row's sum
    if shape.encoding.facts.rotates_qk and len(shape.segments) == 1:
        size += shape.query_bytes  # in the layout of the rotated queries, which the next layer cannot read
    # PyTorch's plain causal attention is for whole sequences of one document, and flash attention takes whole rows of
    # several; else masks in the compute type are kept, those of documents once for all layers.
    is_half = shape.bytes_per_element == 2 and shape.rotated_dim % 8 == 0 and shape.rotated_dim <= MAX_PACKED_HEAD_DIM
    if shape.has_documents and is_half and len(shape.segments) == 1 and not shape.has_dropout:
        copies = shape.batch_size > 1  # of several rows, one after another
        size += shape.query_bytes if copies else 0
        return AttentionMemory(
            saved_bytes=size, copies_query=copies, copies_keys=copies, pads_values=True, recomputed_fraction=0.5
        )
    if shape.has_documents:
        blocks = [
            (min(first + MASKED_ROWS, start + length) - first, min(first + MASKED_ROWS, start + length))
            for start, length in shape.segments
            for first in range(start, start + length, MASKED_ROWS)
        ]
        masks = shape.batch_size * shape.bytes_per_element * sum(rows * columns for rows, columns in blocks)
        return AttentionMemory(
            saved_bytes=size + shape.query_bytes, shared_bytes=masks, pads_values=True, recomputed_fraction=0.5
        )
    if len(shape.segments) > 1:
        masked = [(start, length) for start, length in shape.segments if start]
        size += shape.query_bytes + shape.bytes_per_element * sum(length * (start + length) for start, length in masked)
    return AttentionMemory(saved_bytes=size, pads_values=True, recomputed_fraction=0.5)


def estimate_biased_attention(shape: AttentionShape) -> AttentionMemory:
    """kernels/biased_attention: no maps."""
    rows, facts = shape.batch_size * shape.num_rows * shape.num_heads, shape.encoding.facts
    tables = facts.adds_bias + facts.multiplies_scores if "table" in facts.hooks else 0
    pairs = shape.batch_size * shape.num_heads
    groups = max(1, min(-(-shape.num_rows // 64), -(-PARTIAL_SUMS // pairs)))
    sums_bytes = 4 * tables * pairs * groups * shape.num_columns
    saved = shape.query_bytes + 4 * rows
    if not shape.has_shared_tables:
        saved += 4 * (tables + shape.encoding.cost.num_saved_tables) * shape.num_heads * shape.num_distances
    return AttentionMemory(
        saved_bytes=saved,
        workspace_bytes=shape.query_bytes + 2 * shape.key_bytes + sums_bytes,
        pads_values=True,
        recomputed_fraction=0.5,
    )


def estimate_flex(shape: AttentionShape) -> AttentionMemory:
    """PyTorch's FlexAttention: as our kernel, but for the sums of table gradients, which are atomic."""
    saved = shape.query_bytes + 4 * shape.batch_size * shape.num_rows * shape.num_heads
    workspace = shape.query_bytes + 2 * shape.key_bytes
    return AttentionMemory(saved_bytes=saved, workspace_bytes=workspace, pads_values=True, recomputed_fraction=0.5)


def estimate_cdape_attention(shape: AttentionShape) -> AttentionMemory:
    """kernels/cdape_attention: the maps of one chunk of rows, which adapt to the card."""
    processor = shape.processor
    assert processor is not None
    columns, batch, heads = shape.num_columns, shape.batch_size, shape.num_heads
    chunk_rows = min(choose_chunk_rows(shape), max(length for _, length in shape.segments))
    maps = batch * chunk_rows * columns * kernel_map_bytes(heads, shape.bytes_per_element)
    keys = batch * columns * heads * shape.rotated_dim
    is_one_chunk = chunk_rows >= shape.num_rows
    # Sums of dk and dv, in float32 where chunks add to them; then a chunk's part, in the compute type.
    sums = keys * (2 * shape.bytes_per_element if is_one_chunk else 2 * 4 + shape.bytes_per_element)
    table_entries = processor.kernel_size * heads + processor.width
    edge_entries = processor.left_context * processor.width
    tables = 4 * (shape.num_distances * table_entries + shape.num_rows * edge_entries)
    outputs = 2 * shape.query_bytes if has_cuda_kernels(shape) else 0
    return AttentionMemory(
        saved_bytes=8 * batch * shape.num_rows * heads + tables + outputs,
        workspace_bytes=maps + sums + 2 * shape.query_bytes,
        workspace_map_bytes=maps,
        copies_query=True,
        copies_keys=True,
        pads_values=True,
        recomputed_fraction=1.0,
    )


def has_cuda_kernels(shape: AttentionShape) -> bool:
    """True if kernels/cdape_attention has CUDA kernels for the shape, as `mixer.is_supported` there (a test compares).

    They run on compute capability 9.0 alone, and where a chunk fills the card: elsewhere this is an upper bound.
    """
    processor = shape.processor
    return (
        processor is not None
        and shape.bytes_per_element == 2
        and shape.rotated_dim == 64
        and 8 < shape.num_heads <= 16
        and 16 < processor.width <= 32
        and processor.kernel_size == 3
        and shape.window is None
        and not shape.has_documents
        and shape.num_columns % 8 == 0
    )


def kernel_map_bytes(num_heads: int, bytes_per_element: int) -> int:
    """Of all maps of a chunk of kernels/cdape_attention, for each row and column of a sequence."""
    channels = -(-num_heads // 8) * 8  # heads lie in groups
    return 2 * channels * bytes_per_element + num_heads * (bytes_per_element + 4)


def choose_chunk_rows(shape: AttentionShape) -> int:
    """Query rows of a chunk in kernels/cdape_attention, as `configs.choose_chunk_rows` there has them on a card with
    more multiprocessors than it needs (a test compares them)."""
    channels = -(-shape.num_heads // 8) * 8
    room = int(shape.gpu_bytes * MAPS_FRACTION) // (
        shape.batch_size * shape.num_columns * kernel_map_bytes(shape.num_heads, shape.bytes_per_element)
    )
    rows = CHUNK_ROWS
    while rows > MIN_CHUNK_ROWS and rows > min(room, ((1 << 31) - 1) // (channels * shape.num_columns)):
        rows //= 2
    return rows


def estimate_bias_matrix(shape: AttentionShape) -> AttentionMemory:
    """kernels/bias, and PyTorch's fused attention in recomputed blocks of rows: the matrix, its gradient, and what
    PyTorch gives as its gradient, for each sequence."""
    matrix = shape.num_heads * min(MATRIX_ROWS, shape.num_rows) * shape.num_columns * shape.bytes_per_element
    workspace = matrix * (2 + shape.batch_size)
    return AttentionMemory(workspace_bytes=workspace, workspace_map_bytes=workspace, recomputed_fraction=1.5)


def estimate_triton(shape: AttentionShape) -> AttentionMemory:
    """By the kernel that a call takes (`select_kernel` in `attention/backends/triton.py`)."""
    facts = shape.encoding.facts
    has_sink = shape.softmax_type != "vanilla"
    if has_sink and (shape.has_dropout or ("dense" in facts.hooks and shape.processor is None)):
        return estimate_row_blocks(shape)
    if shape.processor is not None:
        is_fused = "dense" not in facts.hooks and not shape.has_dropout
        return estimate_cdape_attention(shape) if is_fused else estimate_row_blocks(shape)
    if "dense" in facts.hooks or (shape.has_dropout and facts.adds_bias and not facts.multiplies_scores):
        return estimate_bias_matrix(shape)
    return estimate_row_blocks(shape) if shape.has_dropout else estimate_biased_attention(shape)


def estimate_auto(shape: AttentionShape) -> AttentionMemory:
    """What `auto` takes until a check on the card has found something faster."""
    can_fuse = supports_sdpa(
        shape.encoding, shape.processor, has_softcap=shape.has_softcap, softmax_type=shape.softmax_type
    )
    return estimate_sdpa(shape) if can_fuse else estimate_row_blocks(shape)


ATTENTION_MEMORY: Mapping[str, Callable[[AttentionShape], AttentionMemory]] = {
    "auto": estimate_auto,
    "triton": estimate_triton,
    "flex": estimate_flex,
    "chunked": estimate_chunked,
    "eager": estimate_eager,
    "sdpa": estimate_sdpa,
    "native": estimate_auto,  # of the CPU: elsewhere it is left to row blocks
}
"""By the values of `attention_backend`."""


def supports_sdpa(
    encoding: PlannedEncoding,
    processor: PlannedProcessor | None,
    *,
    has_softcap: bool = False,
    softmax_type: str = "vanilla",
) -> bool:
    """Can PyTorch's fused attention compute a method?"""
    return _can_compute("sdpa", encoding, processor, has_softcap=has_softcap, softmax_type=softmax_type)


def supports_triton(
    encoding: PlannedEncoding,
    processor: PlannedProcessor | None,
    head_dim: int,
    *,
    has_softcap: bool = False,
    softmax_type: str = "vanilla",
) -> bool:
    """Can the kernels compute a method, or a part of it?"""
    fits = head_dim * encoding.count_qk_numbers() <= MAX_HEAD_DIM and (
        processor is None or processor.width <= MAX_PROCESSOR_WIDTH
    )
    return fits and _can_compute("triton", encoding, processor, has_softcap=has_softcap, softmax_type=softmax_type)


def _can_compute(
    backend: str, encoding: PlannedEncoding, processor: PlannedProcessor | None, *, has_softcap: bool, softmax_type: str
) -> bool:
    processor_facts = None if processor is None else processor.facts
    reason = find_unsupported_method(
        backend,
        encoding.facts,
        processor_facts=processor_facts,
        has_softcap=has_softcap,
        softmax_type=softmax_type,
        options=encoding.options,
    )
    return reason is None


def list_backends(
    encoding: PlannedEncoding,
    processor: PlannedProcessor | None,
    head_dim: int,
    *,
    has_softcap: bool = False,
    softmax_type: str = "vanilla",
) -> list[str]:
    """The backends that can compute a method on a GPU, `auto` first."""
    names = ["auto"]
    if supports_triton(encoding, processor, head_dim, has_softcap=has_softcap, softmax_type=softmax_type):
        names.append("triton")
    if _can_compute("flex", encoding, processor, has_softcap=has_softcap, softmax_type=softmax_type):
        names.append("flex")
    names += ["chunked", "eager"]
    return (
        [*names, "sdpa"]
        if supports_sdpa(encoding, processor, has_softcap=has_softcap, softmax_type=softmax_type)
        else names
    )


def list_common_backends(config: Config) -> list[str]:
    """The backends that can compute every layer of a configuration on a GPU, `auto` first."""
    of_kinds = [
        list_backends(
            plan_encoding(own.position),
            plan_processor(own.position),
            head_dim(own.model),
            has_softcap=own.model.attn_logit_softcapping is not None,
            softmax_type=own.position.softmax,
        )
        for own, _ in count_layer_kinds(config)
    ]
    return [name for name in of_kinds[0] if all(name in others for others in of_kinds)]
