"""Attention in chunks of query rows: launches the kernels of each chunk.

B batch, H heads, R query rows, C key columns, d head dimension, N distances, D processor width, k kernel size, p =
k//2. A chunk's maps contain the columns that any of its rows attends to. They are freed with the chunk, so memory is
linear in R and C.

The kernels take flat arguments, unlike those of `biased_attention`. They need `do_not_specialize` to avoid recompiling
for each decoding step, and it accepts only names of arguments, not of fields of a NamedTuple.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.kernels.cdape_attention import logit_gradient, mixer, mixer_forward
from megatron.kernels.cdape_attention.backward import _processor_bwd_dw_kernel, _processor_bwd_kernel
from megatron.kernels.cdape_attention.bias_product import BiasProduct, add_sum
from megatron.kernels.cdape_attention.configs import (
    build_attend_constants,
    build_heads_constants,
    build_processor_constants,
    build_product_constants,
    build_transposed_product_constants,
    choose_attend_tile,
    choose_heads_tile,
    choose_processor_tile,
    choose_product_tile,
    choose_splits,
)
from megatron.kernels.cdape_attention.forward import _processor_fwd_kernel
from megatron.kernels.cdape_attention.gate_terms import GateOperands
from megatron.kernels.cdape_attention.geometry import (
    HEADS,
    WIDTH,
    KernelFamily,
    KernelForm,
    MixerKernel,
    choose_kernel,
    pad_sizes,
)
from megatron.kernels.cdape_attention.mixer_operands import (
    MixerOperands,
    unpack_tables,
    unpack_weights,
)
from megatron.kernels.cdape_attention.products import _multiply_map_kernel, _multiply_transposed_kernel
from megatron.kernels.cdape_attention.scores import _scores_kernel, count_padded_channels
from megatron.kernels.cdape_attention.softmax import _attend_bwd_kernel, _attend_fwd_kernel, _attend_sums_kernel
from megatron.kernels.cdape_attention.weights import PackedWeights, WeightShape
from megatron.kernels.cuda.launch import launch_kernel
from megatron.kernels.launcher import launch
from megatron.kernels.runtime import Tile, cdiv, get_arch, get_device_properties

BACKWARD_KERNELS = (logit_gradient.KERNELS, mixer.SCORE_GRADIENT_KERNELS, mixer.WEIGHT_GRADIENT_KERNELS)
NO_WINDOW_INT32 = 1 << 30
"""Window of calls without one. Kernels take it in 32 bits, with room for sums with positions."""
ALIGNED = 16
"""Maps begin at a multiple of this many columns. If they also end at one, kernels read four logits at a time."""


@dataclass(frozen=True)
class CdapeProblem:
    """Inputs that are the same for all chunks."""

    bias_contributions: Tensor
    """float32 [p + N + R·p, D], from `bias_product.BiasProduct`."""
    bias_table: Tensor
    """Bias added to the logits, float32 [H, N], or [H, 0] without one."""
    weights: PackedWeights
    shape: WeightShape
    rows: int
    offset: int
    window: int
    dtype: torch.dtype
    document_starts: Tensor | None = None
    """int32 [B, R], positions at which the rows' documents begin. E then starts at position 0."""
    sinks: Tensor | None = None
    """Sinks, float32 [H], contiguous."""
    uses_mixer: bool = False
    """True if both passes use the CUDA kernels (`mixer.py`) for the shapes that they support."""
    operands: MixerOperands | None = None
    """Operands of these kernels for several layers."""
    layer: int = 0
    """Index of the layer in the operands."""

    @property
    def heads(self) -> int:
        return self.shape.heads

    @property
    def padding(self) -> int:
        """Number of columns that a tap reaches to either side, p."""
        return self.shape.padding

    @property
    def has_bias(self) -> bool:
        return self.bias_table.shape[1] > 0

    def tile(self, kernel: str, rows: int) -> Tile:
        """Return the tile of a processor kernel for a chunk with this number of rows."""
        return choose_processor_tile(kernel, self.heads, self.shape.width, self.shape.kernel_size, rows, self.dtype)

    def constants(self, kernel: str, tile: Tile) -> dict[str, Any]:
        """Return the constants of a processor kernel."""
        width, size = self.shape.width, self.shape.kernel_size
        return build_processor_constants(kernel, self.heads, width, size, self.dtype, tile, has_bias=self.has_bias)


@dataclass(frozen=True)
class Chunk:
    """Rows first … last − 1 of the queries, and the columns that any of them attends to."""

    first: int
    last: int
    left: int
    right: int
    position: int
    """Position of the first row."""
    edge_start: int
    """Index of the left edge's values in the bias contributions."""
    document_starts: Tensor | None = None
    """First keys of the chunk's rows."""

    @property
    def rows(self) -> int:
        return self.last - self.first

    def slice_rows(self, x: Tensor) -> Tensor:
        return x[:, :, self.first : self.last]

    def slice_columns(self, x: Tensor) -> Tensor:
        return x[:, :, self.left : self.right]

    @property
    def extent(self) -> tuple[int, int, int, int]:
        """R, C, and the positions of the maps' first row and column, which determine visibility in all kernels."""
        return self.rows, self.right - self.left, self.position, self.left

    @property
    def processor_extent(self) -> tuple[int, ...]:
        """Extent for the processor kernels, including the chunk's index into the left edge's values."""
        return (*self.extent, self.edge_start, self.first if self.document_starts is None else 0)


def iter_chunks(problem: CdapeProblem, chunk_rows: int) -> Iterator[Chunk]:
    for first in range(0, problem.rows, chunk_rows):
        last = min(first + chunk_rows, problem.rows)
        position = problem.offset + first
        left = max(position - problem.window + 1, 0) // ALIGNED * ALIGNED
        edge_start = problem.offset + problem.rows + problem.padding
        document_starts = (
            None if problem.document_starts is None else problem.document_starts[:, first:last].contiguous()
        )
        yield Chunk(first, last, left, problem.offset + last, position, edge_start, document_starts)


@dataclass(frozen=True)
class ChunkMaps:
    """Maps of one chunk.

    Maps for the processor have their heads last, [B, R, C, channels] (`scores.py`). Maps for matrix products and the
    softmax have them first, [B, H, R, C]. The forward pass uses scores and logits. The backward pass fills, in this
    order: `scores`; `logits`; with one kernel `probabilities` and `dlogits`; then `dscores`, over the probabilities.
    Kernels discard all entries in masked columns.
    """

    scores: Tensor
    """S = scale · q·k, compute type, heads last."""
    logits: Tensor
    """L, float32; undefined if masked."""
    probabilities: Tensor
    """P, compute type; undefined if masked."""
    dlogits: Tensor
    """dL, compute type, heads last; undefined if masked."""

    @property
    def dscores(self) -> Tensor:
        """dS, in the memory of `probabilities`."""
        return self.probabilities


def compute_scores(problem: CdapeProblem, chunk: Chunk, scaled: Tensor, k: Tensor) -> Tensor:
    """Return S of a chunk, heads last, in the compute type; fully masked tiles are undefined."""
    batch, heads, columns, dim = k.shape
    tile = choose_heads_tile(chunk.rows, problem.dtype)
    width = chunk.right - chunk.left
    scores = torch.empty(batch, chunk.rows, width, count_padded_channels(heads), dtype=k.dtype, device=k.device)
    tensors = (chunk.slice_rows(scaled), chunk.slice_columns(k), scores)
    launch(
        _scores_kernel,
        compute_head_tile_grid(chunk, tile, batch),
        (*tensors, chunk.document_starts, *chunk.extent, problem.window, problem.rows, columns),
        build_heads_constants(heads, dim, tile, problem.dtype, True),
        tile.options,
    )
    return scores


def compute_head_tile_grid(chunk: Chunk, tile: Tile, batch: int) -> tuple[int, int, int]:
    """Return the grid of a kernel whose programs process a tile of all heads."""
    return cdiv(chunk.right - chunk.left, tile.block_n), cdiv(chunk.rows, tile.block_m), batch


def compute_logits(
    problem: CdapeProblem, chunk: Chunk, scaled: Tensor, k: Tensor, scores: Tensor | None = None
) -> Tensor:
    """Return the logits of a chunk, float32 [B, H, R, C]; undefined if masked.

    Args:
        scores: result of `compute_scores`, if available.
    """
    kernels = _choose_kernels(problem, chunk, k, (mixer_forward.KERNELS,))
    if kernels is not None:
        return mixer_forward.compute_logits(build_logit_inputs(problem, chunk, scaled, k), kernels[0], launch_kernel)
    return _process_scores(problem, chunk, compute_scores(problem, chunk, scaled, k) if scores is None else scores)


def build_logit_inputs(
    problem: CdapeProblem, chunk: Chunk, scaled: Tensor, k: Tensor, gates: GateOperands | None = None
) -> mixer_forward.LogitInputs:
    """Build the inputs from which the CUDA kernels compute a chunk's logits.

    Args:
        gates: bias of gates, which replaces the problem's tables, or None.
    """
    assert problem.operands is not None
    return mixer_forward.LogitInputs(
        queries=chunk.slice_rows(scaled),
        keys=chunk.slice_columns(k),
        operands=problem.operands,
        layer=problem.layer,
        first_row=chunk.first if chunk.document_starts is None else 0,
        position=chunk.position - chunk.left,
        spans=_find_spans(problem, chunk),
        gates=gates,
    )


def _find_spans(problem: CdapeProblem, chunk: Chunk) -> mixer.ColumnSpans | None:
    """Return the columns that the chunk's rows see, or None if each row sees all columns from position 0."""
    if chunk.document_starts is None and chunk.right <= problem.window:
        return None
    return mixer.ColumnSpans(problem.window, chunk.left, chunk.document_starts)


def _process_scores(problem: CdapeProblem, chunk: Chunk, scores: Tensor) -> Tensor:
    batch, rows, columns, _ = scores.shape
    logits = torch.empty(batch, problem.heads, rows, columns, dtype=torch.float32, device=scores.device)
    tile = problem.tile("mix_fwd", chunk.rows)
    kept_distances = tile.block_n - 2 * problem.padding
    reach = min(chunk.right, problem.window)
    weights = problem.weights
    tensors = (scores, logits, problem.bias_contributions, problem.bias_table, weights.w1, weights.w2, weights.b2)
    launch(
        _processor_fwd_kernel,
        (cdiv(reach, kept_distances), cdiv(chunk.rows, tile.block_m), batch),
        (*tensors, chunk.document_starts, *chunk.processor_extent, problem.bias_table.shape[1], problem.window),
        problem.constants("mix_fwd", tile),
        tile.options,
    )
    return logits


def launch_softmax(
    kernel: Any, name: str, problem: CdapeProblem, chunk: Chunk, v: Tensor, tensors: tuple[Tensor | None, ...]
) -> None:
    """Launch an attend kernel, attend_fwd or attend_sums by name.

    Args:
        tensors: its first arguments: logits, values, and the output or its gradient.
    """
    batch, heads, columns, dim = v.shape
    tile = choose_attend_tile(name, chunk.rows, problem.dtype)
    launch(
        kernel,
        (cdiv(chunk.rows, tile.block_m) * batch * heads, 1, 1),
        (
            *tensors,
            chunk.document_starts,
            *chunk.extent,
            problem.window,
            problem.rows,
            columns,
            *_get_strides(tensors[2]),
        ),
        build_attend_constants(dim, tile, heads),
        tile.options,
    )


def _get_strides(x: Tensor | None) -> tuple[int, ...]:
    """Return the strides of [B, H, R, d] but the last."""
    assert x is not None
    return x.stride()[:3]


class AttentionOutput(NamedTuple):
    """Results of the forward pass, which the backward pass reads."""

    output: Tensor
    """[B, H, R, d], laid out as activations [R, B, H, d]."""
    stats: Tensor
    """Maximum and sum of exponentials of the softmax, float32 [2, B, H, R]."""
    residue: Tensor | None
    """Rounding error of the output, in its type, shape and layout, or None if the backward pass does not read the
    output."""


def allocate_output(scaled: Tensor, *, needs_residue: bool) -> AttentionOutput:
    """Allocate the results for queries [B, H, R, d]."""
    batch, heads, rows, dim = scaled.shape
    stats = torch.empty(2, batch, heads, rows, dtype=torch.float32, device=scaled.device)
    output = scaled.new_empty(rows, batch, heads, dim).permute(1, 2, 0, 3)
    return AttentionOutput(output, stats, torch.empty_like(output) if needs_residue else None)


def forward(
    scaled: Tensor, k: Tensor, v: Tensor, problem: CdapeProblem, chunk_rows: int, *, needs_gradients: bool
) -> AttentionOutput:
    """Attend in chunks of rows.

    Args:
        scaled: scale · q; like k and v contiguous.
        needs_gradients: True if a backward pass may follow, for which a residue may be kept.
    """
    chunks = list(iter_chunks(problem, chunk_rows))
    needs_residue = needs_gradients and any(_choose_kernels(problem, chunk, k, BACKWARD_KERNELS) for chunk in chunks)
    attended = allocate_output(scaled, needs_residue=needs_residue)

    def attend(chunk: Chunk) -> None:
        """Process a chunk. A separate function, so that its maps are freed before the next ones."""
        average_values(problem, chunk, compute_logits(problem, chunk, scaled, k), v, attended)

    for chunk in chunks:
        attend(chunk)
    return attended


def average_values(
    problem: CdapeProblem,
    chunk: Chunk,
    logits: Tensor,
    v: Tensor,
    attended: AttentionOutput,
    offsets: Tensor | None = None,
) -> None:
    """Write a chunk's output and softmax statistics, from its logits [B, H, R, C].

    Args:
        offsets: row terms that the logits omit, float32 [B, H, all rows], or None without sinks.
    """
    residue = None if attended.residue is None else chunk.slice_rows(attended.residue)
    outputs = (chunk.slice_rows(attended.output), residue, attended.stats[..., chunk.first :])
    tensors = (
        logits,
        chunk.slice_columns(v),
        *outputs,
        problem.sinks,
        None if offsets is None else offsets[..., chunk.first :],
    )
    launch_softmax(_attend_fwd_kernel, "attend_fwd", problem, chunk, v, tensors)


class MixerSums(NamedTuple):
    """Sums of the CUDA kernels, in the kernels' layouts."""

    tables: Tensor
    """float32 [L, distances + p, 48], see `mixer_operands.unpack_tables`."""
    weights: Tensor
    """float32 [L, n], see `mixer_operands.unpack_weights`."""
    has_bias: bool
    """True if the bias is added to the logits."""
    shared: mixer.SharedTables
    """Tables of partial sums for calls of one chunk."""


class TermSums(NamedTuple):
    """Gradients of the table and weight terms of layers, to which chunks add. Within a call, L is absent."""

    bias_product: Tensor
    """float32 [L, 2p + N, D·(1 + p)], from `BiasProduct.allocate_gradient`."""
    bias_table: Tensor
    """float32 [L, N, H]; [L, 0, H] without a bias."""
    patches: Tensor
    """Gradients of both weights, float32 [L, 2, KC, DP]."""
    mixer: MixerSums | None = None
    """Sums that the CUDA kernels add to all three, or None if they do not run."""

    def select_layer(self, layer: int) -> "TermSums":
        mixer = self.mixer
        if mixer is not None:
            mixer = mixer._replace(tables=mixer.tables[layer], weights=mixer.weights[layer])
        return TermSums(self.bias_product[layer], self.bias_table[layer], self.patches[layer], mixer)


def allocate_term_sums(layers: int, product: BiasProduct, num_distances: int, device: torch.device) -> TermSums:
    """Allocate sums, initially zero, so that a layer without a backward pass has zero gradients.

    Args:
        num_distances: number of distances of the bias; 0 without one.
    """
    shape = product.shape
    bias_table = torch.zeros(layers, num_distances, shape.heads, dtype=torch.float32, device=device)
    patches = torch.zeros(layers, 2, *shape.packed[2], dtype=torch.float32, device=device)
    return TermSums(product.allocate_gradient(layers, device), bias_table, patches)


def add_mixer_sums(sums: TermSums, problem: CdapeProblem) -> TermSums:
    """Return the sums of layers together with zero-initialized sums for the CUDA kernels."""
    assert problem.operands is not None
    layers, device = len(sums.patches), sums.patches.device
    count = problem.operands.distances + problem.padding
    tables = torch.zeros(layers, count, WIDTH + HEADS, dtype=torch.float32, device=device)
    weights = torch.zeros(layers, 2 * problem.operands.fragments.w1.shape[1], dtype=torch.float32, device=device)
    return sums._replace(mixer=MixerSums(tables, weights, problem.has_bias, mixer.SharedTables()))


def unpack_mixer_sums(sums: TermSums, product: BiasProduct) -> None:
    """Add the CUDA kernels' sums of all layers to the others, if there are any."""
    if sums.mixer is None:
        return
    tables, weights, has_bias, _ = sums.mixer
    contributions, bias_table = unpack_tables(tables, product.shape)
    covered = product.shape.padding + product.count
    sums.bias_product[:, :covered, : product.shape.width].add_(contributions[:, :covered])
    if has_bias:
        covered = min(bias_table.shape[1], sums.bias_table.shape[1])
        sums.bias_table[:, :covered].add_(bias_table[:, :covered])
    sums.patches.add_(unpack_weights(weights, product.shape))


class GradientSums(NamedTuple):
    """Gradients to which chunks add."""

    k: Tensor
    """[B·H, C, d]; of k's type with one chunk, otherwise float32."""
    v: Tensor
    terms: TermSums


def backward(
    dout: Tensor,
    scaled: Tensor,
    k: Tensor,
    v: Tensor,
    attended: AttentionOutput,
    problem: CdapeProblem,
    product: BiasProduct,
    terms: TermSums,
    scale: float,
    chunk_rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v (k and v as in `GradientSums`) and sinks, and add the layer's others to `terms`.

    The last chunk comes first. It has the most columns, so the other chunks reuse its memory. Sums that only it
    contributes to need no addition.

    Args:
        dout: gradient of the output. Its last dimension is contiguous; with a residue it has the output's strides. The
            other tensors are contiguous.
        attended: results of the forward pass; the output is read only if there is a residue.
        terms: sums of the layer, initially zero.
    """
    stats = attended.stats
    chunks = list(iter_chunks(problem, chunk_rows))[::-1]
    sums = GradientSums(*allocate_key_gradients(chunks, k), terms)
    dq = torch.empty_like(scaled)
    means = torch.empty(stats.shape[1:], dtype=torch.float32, device=v.device)  # each row's Σ P ∘ dP

    def differentiate_chunk(chunk: Chunk, *, is_first: bool) -> None:
        """Process a chunk. A separate function, so that its maps are freed before the next ones."""
        is_only = len(chunks) == 1
        kernels = _choose_kernels(problem, chunk, k, BACKWARD_KERNELS)
        if kernels is not None:
            inputs = build_logit_inputs(problem, chunk, scaled, k)
            maps = differentiate_softmax_of_chunk(inputs, chunk, v, dout, attended, means, kernels[0])
            dscores = maps.probabilities
            multiply_transposed(problem, chunk, maps.probabilities, dout, sums.v, is_only=is_only)
            of_mixer = kernels[1], kernels[2]
            _mixer_backward(problem, product, chunk, inputs, maps, sums, of_mixer, is_first=is_first)  # dS over P
        else:
            all_maps = _compute_maps(problem, chunk, scaled, k)
            dscores = all_maps.dscores
            softmax_backward(problem, chunk, all_maps, v, dout, stats, means)
            multiply_transposed(problem, chunk, all_maps.probabilities, dout, sums.v, is_only=is_only)
            _weights_backward(problem, chunk, all_maps, sums, is_first=is_first)
            _processor_backward(problem, product, chunk, all_maps, sums, is_first=is_first)  # dS over P
        multiply_map(problem, chunk, dscores, k, dq, scale)
        multiply_transposed(problem, chunk, dscores, scaled, sums.k, is_only=is_only)

    for index, chunk in enumerate(chunks):
        differentiate_chunk(chunk, is_first=index == 0)
    return dq, sums.k, sums.v, None if problem.sinks is None else differentiate_sinks(problem.sinks, stats, means)


def differentiate_sinks(sinks: Tensor, stats: Tensor, means: Tensor, offsets: Tensor | None = None) -> Tensor:
    """Return the gradient of the sinks, [H]: as for any key P ∘ (0 − Σ P ∘ dP), summed over all rows.

    Args:
        sinks, stats, means: the sinks [H], statistics of the softmax [2, B, H, R], and Σ P ∘ dP of each row [B, H, R].
        offsets: row terms that the logits omit, [B, H, R], or None.
    """
    maximum, total = stats
    logits = sinks[:, None] if offsets is None else sinks[:, None] - offsets
    probabilities = torch.exp2(logits / math.log(2) - maximum) / total
    return -(probabilities * means).sum((0, 2))


def allocate_key_gradients(chunks: list[Chunk], k: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the gradients of keys and values, as `GradientSums` describes them."""
    batch, heads, columns, dim = k.shape
    is_whole = len(chunks) == 1 and (chunks[0].left, chunks[0].right) == (0, columns)
    if is_whole:
        dk, dv = k.new_empty(2, batch * heads, columns, dim).unbind()  # one allocation saves host time
    else:
        dtype = k.dtype if len(chunks) == 1 else torch.float32
        dk, dv = k.new_zeros(2, batch * heads, columns, dim, dtype=dtype).unbind()
    return dk, dv


def multiply_map(problem: CdapeProblem, chunk: Chunk, factor: Tensor, x: Tensor, out: Tensor, scale: float) -> None:
    """Write scale · factor · x into the chunk's rows of `out`.

    Args:
        factor: map [B, H, R, C]; masked entries are not read.
        x: [B, H, columns, d], contiguous like the output.
        out: [B, H, rows, d].
    """
    batch, heads, rows, dim = out.shape
    tile = choose_product_tile(dim, problem.dtype)
    launch(
        _multiply_map_kernel,
        (cdiv(chunk.rows, tile.block_m), batch * heads, 1),
        (
            *(factor, chunk.slice_columns(x), chunk.slice_rows(out), chunk.document_starts, heads, *chunk.extent),
            *(problem.window, rows, x.shape[2], scale),
        ),
        build_product_constants(dim, tile),
        tile.options,
    )


def multiply_transposed(
    problem: CdapeProblem, chunk: Chunk, factor: Tensor, x: Tensor, total: Tensor, *, is_only: bool
) -> None:
    """Add factorᵀ · (the chunk's rows of x) to the chunk's columns of `total`, or overwrite them if `is_only`.

    Args:
        factor: map [B, H, R, C]; masked entries are not read.
        x: [B, H, rows, d]; the last dimension is contiguous.
        total: [B·H, columns, d].
    """
    batch, heads, _, dim = x.shape
    tile = choose_product_tile(dim, problem.dtype)
    launch(
        _multiply_transposed_kernel,
        (cdiv(chunk.right - chunk.left, tile.block_n), batch * heads, 1),
        (
            *(factor, chunk.slice_rows(x), total[:, chunk.left :], chunk.document_starts, heads, *chunk.extent),
            *(problem.window, total.shape[1], *_get_strides(x)),
        ),
        build_transposed_product_constants(dim, tile, add=not is_only),
        tile.options,
    )


def _compute_maps(problem: CdapeProblem, chunk: Chunk, scaled: Tensor, k: Tensor) -> ChunkMaps:
    """Compute scores and logits, and allocate the other maps."""
    scores = compute_scores(problem, chunk, scaled, k)
    logits = compute_logits(problem, chunk, scaled, k, scores)
    return ChunkMaps(scores, logits, torch.empty_like(logits, dtype=problem.dtype), torch.empty_like(scores))


def differentiate_softmax_of_chunk(
    inputs: mixer_forward.LogitInputs,
    chunk: Chunk,
    v: Tensor,
    dout: Tensor,
    attended: AttentionOutput,
    sums: Tensor,
    kernel: MixerKernel,
) -> logit_gradient.LogitGradients:
    """Compute P and dL without storing logits, and write the chunk's Σ P ∘ dP to `sums` [B, H, R]."""
    output, stats, residue = attended
    assert residue is not None
    of_rows = slice(chunk.first, chunk.last)
    of_chunk = logit_gradient.SoftmaxChunk(
        *(chunk.slice_columns(v), chunk.slice_rows(output), chunk.slice_rows(residue), chunk.slice_rows(dout)),
        stats[..., of_rows],
    )
    return logit_gradient.differentiate_softmax(inputs, of_chunk, sums[..., of_rows], kernel, launch_kernel)


def differentiate_mixer_of_chunk(
    inputs: mixer_forward.LogitInputs,
    maps: logit_gradient.LogitGradients,
    kernels: tuple[MixerKernel, MixerKernel],
    shared: mixer.SharedTables | None = None,
) -> mixer.MixerGradients:
    """Write visible dS over P, and return the chunk's gradients of tables and weights.

    Args:
        kernels, shared: as for `mixer.differentiate_mixer`.
    """
    of_mixer = mixer.MixerInputs(dlogits=maps.dlogits, **inputs._asdict())
    return mixer.differentiate_mixer(of_mixer, maps.probabilities, kernels, launch_kernel, shared)


def softmax_backward(
    problem: CdapeProblem, chunk: Chunk, maps: ChunkMaps, v: Tensor, dout: Tensor, stats: Tensor, sums: Tensor
) -> None:
    """Compute P and dL, and write the chunk's Σ P ∘ dP to `sums` [B, H, R]."""
    batch, heads, columns, dim = v.shape
    inputs = (
        maps.logits,
        chunk.slice_columns(v),
        chunk.slice_rows(dout),
        stats[..., chunk.first :],
        sums[..., chunk.first :],
    )
    launch_softmax(_attend_sums_kernel, "attend_sums", problem, chunk, v, inputs)
    aligned = (chunk.right - chunk.left) % ALIGNED == 0
    tile = choose_heads_tile(chunk.rows, problem.dtype)
    launch(
        _attend_bwd_kernel,
        compute_head_tile_grid(chunk, tile, batch),
        (
            *(*inputs, maps.probabilities, maps.dlogits, chunk.document_starts),
            *(*chunk.extent, problem.window, problem.rows, columns, *_get_strides(dout)),
        ),
        build_heads_constants(heads, dim, tile, problem.dtype, aligned),
        tile.options,
    )


def _choose_kernels(
    problem: CdapeProblem, chunk: Chunk, k: Tensor, families: tuple[KernelFamily, ...]
) -> tuple[MixerKernel, ...] | None:
    """Return the CUDA kernels for this chunk, or None if Triton's are faster or a kernel does not fit the GPU."""
    takes = (
        problem.uses_mixer
        and k.is_cuda
        and all(
            mixer.is_supported(problem.shape, problem.dtype, k.shape[3], chunk.right - chunk.left, family.limits)
            for family in families
        )
        and mixer.has_block_per_multiprocessor(chunk.rows, k.shape[0], get_device_properties(k))
        and mixer.has_compiler()
    )
    arch = get_arch(k) if takes else None
    if arch is None:
        return None
    is_local = _find_spans(problem, chunk) is not None
    sizes = pad_sizes(problem.heads, problem.shape.width)
    form = KernelForm(problem.shape.kernel_size, k.shape[3], problem.dtype, is_local, *sizes)
    kernels = [choose_kernel(family, form, arch) for family in families]
    found = tuple(kernel for kernel in kernels if kernel is not None)
    return found if len(found) == len(kernels) else None


def _mixer_backward(
    problem: CdapeProblem,
    product: BiasProduct,
    chunk: Chunk,
    inputs: mixer_forward.LogitInputs,
    maps: logit_gradient.LogitGradients,
    sums: GradientSums,
    kernels: tuple[MixerKernel, MixerKernel],
    *,
    is_first: bool,
) -> None:
    """Write visible dS over P, and add the chunk's gradients of tables and weights to `sums`."""
    terms = sums.terms
    assert terms.mixer is not None
    # Chunks of a call write different entries, and so may calls with documents.
    is_alike = chunk.rows == problem.rows and chunk.document_starts is None
    shared = terms.mixer.shared if is_alike else None
    tables, edge, weights, _ = differentiate_mixer_of_chunk(inputs, maps, kernels, shared)
    _store_edge_gradient(product, chunk, edge[..., : problem.shape.width], sums)
    add_sum(terms.mixer.tables[: tables.shape[1]], tables, is_first=is_first)
    add_sum(terms.mixer.weights, weights, is_first=is_first)


def _processor_backward(
    problem: CdapeProblem,
    product: BiasProduct,
    chunk: Chunk,
    maps: ChunkMaps,
    sums: GradientSums,
    *,
    is_first: bool,
) -> None:
    """Write visible dS over P, and add the chunk's gradients of the tables to `sums`."""
    padding, batch, has_bias = problem.padding, maps.scores.shape[0], problem.has_bias
    tile = problem.tile("mix_bwd", chunk.rows)
    kept_distances = tile.block_n - 2 * padding
    reach = min(chunk.right, problem.window + padding)  # hidden values just beyond the window affect columns in it
    blocks, row_blocks = cdiv(reach, kept_distances), cdiv(chunk.rows, tile.block_m)
    parts = choose_splits(blocks, batch, row_blocks)
    float32: dict[str, Any] = {"dtype": torch.float32, "device": maps.scores.device}
    width = problem.shape.width
    dbias_contributions = torch.empty(batch * parts, blocks * kept_distances + padding, width, **float32)
    dbias = torch.empty(batch * parts, blocks * kept_distances if has_bias else 0, problem.heads, **float32)
    dedge = torch.zeros(batch, chunk.rows, padding, width, **float32)
    inputs = (maps.scores, maps.dlogits, problem.bias_contributions, problem.weights.w1, problem.weights.w2)
    outputs = (maps.dscores, dbias_contributions, dbias, dedge)
    launch(
        _processor_bwd_kernel,
        (batch, parts, blocks),  # small distances have the most rows: longest programs first
        (*inputs, *outputs, chunk.document_starts, *chunk.processor_extent, problem.window, cdiv(row_blocks, parts)),
        problem.constants("mix_bwd", tile),
        tile.options,
    )
    product.add_gradient(sums.terms.bias_product, dbias_contributions, is_first=is_first)
    _store_edge_gradient(product, chunk, dedge, sums)
    if has_bias:
        covered = min(blocks * kept_distances, len(sums.terms.bias_table))
        add_sum(sums.terms.bias_table[:covered], dbias[:, :covered], is_first=is_first)


def _store_edge_gradient(product: BiasProduct, chunk: Chunk, dedge: Tensor, sums: GradientSums) -> None:
    if chunk.document_starts is None:
        product.set_edge_gradient(sums.terms.bias_product, dedge, chunk.first)
    else:
        product.add_edge_gradient(sums.terms.bias_product, dedge, chunk.position, chunk.document_starts)


def _weights_backward(
    problem: CdapeProblem, chunk: Chunk, maps: ChunkMaps, sums: GradientSums, *, is_first: bool
) -> None:
    """Add the chunk's gradients of the weights to `sums`."""
    padding, batch = problem.padding, maps.scores.shape[0]
    tile = problem.tile("mix_bwd_dw", chunk.rows)
    reach = min(chunk.right, problem.window + padding) + padding  # from −p on
    blocks, row_blocks = cdiv(reach, tile.block_n), cdiv(chunk.rows, tile.block_m)
    parts = choose_splits(blocks, batch, row_blocks)
    patches = sums.terms.patches
    partial = patches.new_empty(batch * parts * blocks, *patches.shape)
    weights = problem.weights
    tensors = (maps.scores, maps.dlogits, problem.bias_contributions, weights.patches1, weights.patches2, partial)
    launch(
        _processor_bwd_dw_kernel,
        (batch, parts, blocks),  # small distances have the most rows: longest programs first
        (*tensors, chunk.document_starts, *chunk.processor_extent, problem.window, cdiv(row_blocks, parts)),
        problem.constants("mix_bwd_dw", tile),
        tile.options,
    )
    add_sum(patches, partial, is_first=is_first)
