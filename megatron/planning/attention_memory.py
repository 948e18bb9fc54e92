"""Memory of each attention backend: tensors saved for the backward pass, and workspace of the backward pass.

`ATTENTION_MEMORY` has one function for each backend of `megatron/attention/backends/`. `activations.py` counts queries,
keys, values and the output. Symbols: B sequences, S scores (row, column) of a block, h heads of a rank, H of the model,
d head dimension, W width of a processor, N distances, b bytes of the compute type.

| computed by                  | saves                                        | workspace of the backward pass      |
|------------------------------|----------------------------------------------|-------------------------------------|
| eager, saved row blocks      | B·h·S·(4 + b): probabilities in float32 and  | score matrices of one block with    |
|                              | a half type; processor: B·(H + W)·S·b more   | their gradients                     |
| recomputed row blocks        | tables                                       | the same                            |
| sdpa                         | 4 bytes per row and head; its output if q is | negligible                          |
|                              | rotated; masks if there is a window          |                                     |
| kernels/biased_attention     | its output, 4 bytes per row and head, tables | dq, dk, dv, sums of table gradients |
| kernels/cdape_attention      | contiguous q, k and v; 8 bytes per row and   | score matrices of one chunk, sums   |
|                              | head; tables, 4·N·(k·H + W) bytes; two       | of dk and dv                        |
|                              | outputs for its CUDA kernels                 |                                     |
| a matrix of biases (FIRE)    | nothing                                      | matrices [h, 256, N], 2 + B of them |

An output is not saved twice if a compiled region reads it: it is the region's own input, which `activations.py` counts.
The backend that `auto` selects depends on a self-check on the GPU; without one it uses PyTorch's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from megatron.attention.backends.backend import find_unsupported_feature, list_method_features
from megatron.options.model import get_head_dim
from megatron.planning.model_costs import PlannedEncoding, PlannedModel, PlannedProcessor
from megatron.planning.row_block_memory import (
    AttentionMemory,
    AttentionShape,
    estimate_chunked,
    estimate_eager,
    estimate_row_blocks,
)

MASKED_ROWS = 512
"""Rows of a block that PyTorch's fused attention computes with a mask (`attention/backends/pytorch.py`)."""
MAX_PACKED_HEAD_DIM = 256
"""Largest head dimension for which flash attention masks documents (`attention/backends/pytorch.py`)."""
MATRIX_ROWS = 256
"""Rows of a block for which the kernels build a matrix of biases (`attention/backends/triton.py`)."""


MAX_HEAD_DIM, MAX_PROCESSOR_WIDTH = 128, 64
"""Limits of the kernels (`megatron/kernels/head_dim.py`, `megatron/kernels/cdape_attention/op.py`)."""

MAPS_FRACTION, MIN_CHUNK_ROWS, CHUNK_ROWS, MAX_CHUNK_ROWS = 1 / 12, 16, 1024, 4096
"""Largest fraction of device memory for the score matrices of a chunk in kernels/cdape_attention; fewest, usual and
most rows of a chunk."""
BLOCK_ROWS, SOFTMAX_ROWS, MULTIPROCESSORS = 32, 64, 132
"""Rows of a block of the CUDA kernels there, rows of a program of the softmax, and multiprocessors of an H100 and H200.
The 108 of an A100 make some chunks half as large with 4, 7 or 8 heads in the batch, and the same otherwise."""

PARTIAL_SUMS = 1024
"""Programs that share the sums of a table's gradient (`megatron/kernels/biased_attention/configs.py`)."""

TABLE_MARGINS = 1024
"""Entries before and after an arranged table, of four numbers each (`kernels/biased_attention/tables.py`)."""


def estimate_sdpa(shape: AttentionShape) -> AttentionMemory:
    """Estimate the memory of PyTorch's fused attention."""
    size = 4 * shape.batch_size * shape.num_rows * shape.num_heads  # log-sum-exp of each row
    saves_output = shape.encoding.facts.rotates_qk and len(shape.segments) == 1 and not shape.rotates_in_compiled_region
    if saves_output:
        size += shape.query_bytes  # in the layout of the rotated queries, which the next layer cannot read
    # PyTorch's causal attention needs whole sequences of one document without a window, and flash attention supports
    # several documents in whole rows. Otherwise masks in the compute type are saved; all layers share document masks.
    is_half = shape.bytes_per_element == 2 and shape.rotated_dim % 8 == 0 and shape.rotated_dim <= MAX_PACKED_HEAD_DIM
    if shape.has_documents and is_half and len(shape.segments) == 1 and not shape.has_dropout:
        copies = shape.batch_size > 1  # packs several rows into one
        size += shape.query_bytes if copies else 0
        return AttentionMemory(
            saved_bytes=size, copies_query=copies, copies_keys=copies, pads_values=True, recomputed_fraction=0.5
        )
    if shape.has_documents:
        masks = shape.batch_size * shape.bytes_per_element * _count_masked_scores(shape, shape.segments)
        return AttentionMemory(
            saved_bytes=size + shape.query_bytes, shared_bytes=masks, pads_values=True, recomputed_fraction=0.5
        )
    if masked := [(start, length) for start, length in shape.segments if start or (shape.window or length) < length]:
        size += shape.bytes_per_element * _count_masked_scores(shape, masked)
        size += 0 if saves_output else shape.query_bytes  # the outputs of blocks, which are concatenated
    return AttentionMemory(saved_bytes=size, pads_values=True, recomputed_fraction=0.5)


def _count_masked_scores(shape: AttentionShape, segments: Sequence[tuple[int, int]]) -> int:
    """Return the number of entries in the masks of segments (first row, number of rows), over all blocks of rows."""
    blocks = [
        (first, min(MASKED_ROWS, start + length - first))
        for start, length in segments
        for first in range(start, start + length, MASKED_ROWS)
    ]
    reach = shape.num_columns if shape.window is None else shape.window - 1
    return sum(rows * (rows + min(first, reach)) for first, rows in blocks)


def estimate_biased_attention(shape: AttentionShape) -> AttentionMemory:
    """Estimate the memory of kernels/biased_attention, which saves no score matrices."""
    rows, facts = shape.batch_size * shape.num_rows * shape.num_heads, shape.encoding.facts
    tables = facts.adds_bias + facts.multiplies_scores if "table" in facts.hooks else 0
    pairs = shape.batch_size * shape.num_heads
    groups = max(1, min(-(-shape.num_rows // 64), -(-PARTIAL_SUMS // pairs)))
    sums_bytes = 4 * tables * pairs * groups * shape.num_columns
    saved = 4 * rows + _count_output_bytes(shape)
    if not shape.has_shared_tables:
        saved += 16 * tables * shape.num_heads * (shape.num_distances + TABLE_MARGINS)
        saved += 4 * shape.encoding.cost.num_saved_tables * shape.num_heads * shape.num_distances
    return AttentionMemory(
        saved_bytes=saved,
        workspace_bytes=shape.query_bytes + 2 * shape.key_bytes + sums_bytes,
        pads_values=True,
        recomputed_fraction=0.5,
    )


def _count_output_bytes(shape: AttentionShape) -> int:
    """Return the bytes of a kernel's output, unless it is what a compiled region saves as its own input."""
    return 0 if shape.is_compiled and len(shape.segments) == 1 else shape.query_bytes


def estimate_flex(shape: AttentionShape) -> AttentionMemory:
    """Estimate the memory of PyTorch's FlexAttention: as our kernel, but table gradients are summed atomically."""
    saved = _count_output_bytes(shape) + 4 * shape.batch_size * shape.num_rows * shape.num_heads
    workspace = shape.query_bytes + 2 * shape.key_bytes
    return AttentionMemory(saved_bytes=saved, workspace_bytes=workspace, pads_values=True, recomputed_fraction=0.5)


def estimate_cdape_attention(shape: AttentionShape) -> AttentionMemory:
    """Estimate the memory of kernels/cdape_attention.

    It stores score matrices of one chunk of rows, sized by the device memory.
    """
    processor = shape.processor
    assert processor is not None
    columns, batch, heads = shape.num_columns, shape.batch_size, shape.num_heads
    chunk_rows = min(choose_chunk_rows(shape), max(length for _, length in shape.segments))
    maps = batch * chunk_rows * columns * estimate_kernel_map_bytes(heads, shape.bytes_per_element)
    keys = batch * columns * heads * shape.rotated_dim
    is_one_chunk = chunk_rows >= shape.num_rows
    # Sums of dk and dv, in float32 if several chunks add to them; then one chunk's share in the compute type.
    sums = keys * (2 * shape.bytes_per_element if is_one_chunk else 2 * 4 + shape.bytes_per_element)
    width = processor.compute_kernel_width(heads)
    table_entries = processor.kernel_size * heads + width
    edge_entries = processor.left_context * width
    tables = 4 * (shape.num_distances * table_entries + shape.num_rows * edge_entries)
    has_gate = "gate" in shape.encoding.facts.hooks
    keeps_output = has_gate or (has_cuda_kernels(shape) and not processor.changes_weights)
    outputs = 2 * shape.query_bytes if keeps_output else 0
    gates = _count_gate_bytes(shape, chunk_rows) if has_gate else 0
    if processor.changes_weights:
        # The gradient of the weights, instead of the scores or beside them, and a contiguous one of the output.
        channels = 0 if has_cuda_kernels(shape) else -(-heads // 8) * 8
        maps += batch * chunk_rows * columns * channels * shape.bytes_per_element
        sums += shape.query_bytes
    return AttentionMemory(
        saved_bytes=8 * batch * shape.num_rows * heads + tables + outputs,
        workspace_bytes=maps + sums + 2 * shape.query_bytes + gates,
        workspace_map_bytes=maps,
        copies_query=True,
        copies_keys=True,
        pads_values=True,
        recomputed_fraction=1.0,
    )


def _count_gate_bytes(shape: AttentionShape, chunk_rows: int) -> int:
    """Return the bytes of Conv1's terms of a gate's bias (`gate_terms.GateOperands`) and of their gradients.

    They have 16 heads and widths in steps of 32, in float32. A row has its own term and 4p exceptions. Each block of 32
    rows has sums for all columns, and weights have partial sums in float64 for each 32 tokens.
    """
    processor = shape.processor
    assert processor is not None
    size, channels = processor.kernel_size, 32 + 16
    exceptions = 4 * (size // 2)
    of_row = 4 * (2 * 32 * (1 + exceptions) + channels) + 8 * (16 + size * 16)
    of_column = 4 * (2 + chunk_rows // 32) * channels + 8 * (16 + size * 16)
    return shape.batch_size * (shape.num_rows * of_row + shape.num_columns * of_column)


def has_cuda_kernels(shape: AttentionShape) -> bool:
    """Return True if kernels/cdape_attention has CUDA kernels for the shape, like `mixer.is_supported` (tested).

    They run only if a block fits in the GPU's shared memory and blocks occupy two thirds of the multiprocessors.
    Otherwise the estimate is an upper bound.
    """
    processor = shape.processor
    width = 0 if processor is None else processor.compute_kernel_width(shape.num_heads)
    return (
        processor is not None
        and shape.bytes_per_element == 2
        and shape.rotated_dim % 16 == 0
        and shape.rotated_dim <= 128
        and shape.num_heads <= 16
        and width <= 64
        and (shape.num_heads > 8 or 16 < width <= 32)
        and processor.kernel_size <= (7 if width <= 32 else 5)
        and shape.num_columns % 8 == 0
    )


def supports_gates(shape: AttentionShape) -> bool:
    """Return True if kernels/cdape_attention supports the shape with gates, like `gated_op.describe_unsupported`."""
    processor = shape.processor
    padded = replace(shape, num_heads=max(shape.num_heads, 16))  # fewer heads are padded
    is_convolution = processor is not None and not processor.cost.maps_heads and processor.width <= 32
    return is_convolution and has_cuda_kernels(padded)


def estimate_kernel_map_bytes(num_heads: int, bytes_per_element: int) -> int:
    """Return the bytes of a chunk's score matrices in kernels/cdape_attention, per row and column of a sequence."""
    channels = -(-num_heads // 8) * 8  # heads are padded to groups of 8
    return 2 * channels * bytes_per_element + num_heads * (bytes_per_element + 4)


def choose_chunk_rows(shape: AttentionShape) -> int:
    """Return the query rows of a chunk in kernels/cdape_attention.

    It equals `configs.choose_chunk_rows` there on an H100 or H200 (tested), or is more if chunks are made equal.
    """
    channels = -(-shape.num_heads // 8) * 8
    room = int(shape.gpu_bytes * MAPS_FRACTION) // (
        shape.batch_size * shape.num_columns * estimate_kernel_map_bytes(shape.num_heads, shape.bytes_per_element)
    )
    rows, batch = CHUNK_ROWS, shape.batch_size
    while rows < MAX_CHUNK_ROWS and (
        batch * shape.num_heads * rows < MULTIPROCESSORS * SOFTMAX_ROWS
        or (has_cuda_kernels(shape) and 3 * batch * rows < 2 * MULTIPROCESSORS * BLOCK_ROWS)
    ):
        rows *= 2
    while rows > MIN_CHUNK_ROWS and rows > min(room, ((1 << 31) - 1) // (channels * shape.num_columns)):
        rows //= 2
    return rows


def estimate_bias_matrix(shape: AttentionShape) -> AttentionMemory:
    """Estimate the memory of kernels/bias, and of PyTorch's fused attention in recomputed row blocks.

    They allocate the bias matrix, its gradient, and the gradient that PyTorch returns for each sequence.
    """
    matrix = shape.num_heads * min(MATRIX_ROWS, shape.num_rows) * shape.num_columns * shape.bytes_per_element
    workspace = matrix * (2 + shape.batch_size)
    return AttentionMemory(workspace_bytes=workspace, workspace_map_bytes=workspace, recomputed_fraction=1.5)


def estimate_triton(shape: AttentionShape) -> AttentionMemory:
    """Estimate the memory of the kernel that `select_kernel` (`attention/backends/triton.py`) chooses."""
    facts = shape.encoding.facts
    has_sink = shape.softmax_type != "vanilla"
    if has_sink and (shape.has_dropout or ("dense" in facts.hooks and shape.processor is None)):
        return estimate_row_blocks(shape)
    if shape.processor is not None:
        is_fused = "dense" not in facts.hooks and not shape.has_dropout
        if "gate" in facts.hooks:
            is_fused = is_fused and supports_gates(shape)
        return estimate_cdape_attention(shape) if is_fused else estimate_row_blocks(shape)
    if "dense" in facts.hooks or (shape.has_dropout and facts.adds_bias and not facts.multiplies_scores):
        return estimate_bias_matrix(shape)
    return estimate_row_blocks(shape) if shape.has_dropout else estimate_biased_attention(shape)


def estimate_auto(shape: AttentionShape) -> AttentionMemory:
    """Estimate the memory of the backend that `auto` uses before a self-check on the GPU finds a faster one."""
    features = list_planned_features(
        shape.encoding, shape.processor, has_softcap=shape.has_softcap, softmax_type=shape.softmax_type
    )
    can_fuse = find_unsupported_feature("sdpa", features) is None
    return estimate_sdpa(shape) if can_fuse else estimate_row_blocks(shape)


ATTENTION_MEMORY: Mapping[str, Callable[[AttentionShape], AttentionMemory]] = {
    "auto": estimate_auto,
    "triton": estimate_triton,
    "flex": estimate_flex,
    "chunked": estimate_chunked,
    "eager": estimate_eager,
    "sdpa": estimate_sdpa,
    "native": estimate_auto,  # for CPUs only; elsewhere row blocks are used
}
"""Memory estimators by the value of `attention_backend`."""


def list_planned_features(
    encoding: PlannedEncoding,
    processor: PlannedProcessor | None,
    *,
    has_softcap: bool = False,
    softmax_type: str = "vanilla",
) -> frozenset[str]:
    """List the features of a method's scores, which decide which backends support it."""
    return list_method_features(
        encoding.facts,
        processor_facts=None if processor is None else processor.facts,
        has_softcap=has_softcap,
        softmax_type=softmax_type,
        options=encoding.options,
    )


def list_backends(
    encoding: PlannedEncoding,
    processor: PlannedProcessor | None,
    head_dim: int,
    *,
    has_softcap: bool = False,
    softmax_type: str = "vanilla",
    num_heads: int = 1,
) -> list[str]:
    """List the backends that support a method on a GPU, at least in part, `auto` first."""
    features = list_planned_features(encoding, processor, has_softcap=has_softcap, softmax_type=softmax_type)
    fits_kernels = head_dim * encoding.count_qk_numbers() <= MAX_HEAD_DIM and (
        processor is None or processor.compute_kernel_width(num_heads) <= MAX_PROCESSOR_WIDTH
    )
    names = ("auto", "triton", "flex", "chunked", "eager", "sdpa")
    supported = [name for name in names if find_unsupported_feature(name, features) is None]
    return [name for name in supported if name != "triton" or fits_kernels]


def list_common_backends(planned: PlannedModel) -> list[str]:
    """List the backends that support every layer of a model on a GPU, `auto` first."""
    model = planned.config.model
    of_types = [
        list_backends(
            layer.encoding,
            layer.processor,
            get_head_dim(model),
            has_softcap=model.attn_logit_softcapping is not None,
            softmax_type=layer.config.position.softmax,
            num_heads=model.num_attention_heads,
        )
        for layer in planned.layer_types
    ]
    return [name for name in of_types[0] if all(name in others for others in of_types)]
