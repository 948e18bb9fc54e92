"""Triton kernels: memory linear in T, for biases, multiplicative weights and convolutional processors.

| encoding             | processor     | implementation                                                         |
|----------------------|---------------|------------------------------------------------------------------------|
| Toeplitz or none     | none          | `kernels/biased_attention`; with dropout `kernels/bias` and PyTorch's  |
| a gate, Toeplitz     | none          | `kernels/biased_attention`, only the terms of keys                     |
| Toeplitz or none     | convolutional | `kernels/cdape_attention`                                              |
| Toeplitz or none     | talking heads | the same, then its softmax with a map between the heads                |
| a gate               | convolutional | its CUDA kernels, for the sizes that `gated_op.py` states              |
| a network (FIRE)     | none          | `kernels/bias` and PyTorch's fused attention                           |
| a network (FIRE)     | any, or sinks | `kernels/bias` and PyTorch's row blocks                                |

Some calls fall back to PyTorch's row blocks with a single warning: calls with padding or sampled positions, with more
than 65,535 heads in all sequences together, of a model moved to the CPU, with dropout and a processor, or of a
processor whose heads are divided over ranks that cannot exchange heads for rows.

h requested heads, R query rows, C key columns.
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from megatron.attention.backends.backend import (
    AttentionBackend,
    AttentionFormula,
    find_unsupported_feature,
    warn_fallback,
)
from megatron.attention.backends.fused_processor import (
    collect_kernel_args,
    describe_gated_processor_fallback,
    describe_processor_fallback,
    describe_unsupported_processor,
    map_bias,
    run_gated_processor_kernel,
    run_processor_kernel,
)
from megatron.attention.inputs import AttentionInputs, iter_row_blocks, with_padded_values
from megatron.attention.reference import compute_table, compute_visible_mask, sum_gates
from megatron.kernels.cdape_attention.args import CdapeArgs
from megatron.position.base import ConvolutionParameters, FireParameters
from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.numerics import has_parameters_sharded_by_zero3
from megatron.position.processor import Processor
from megatron.position.token_range import TokenRange, select_heads

ROWS_PER_CALL = 256
"""Query rows per call of PyTorch's attention."""

# Triton is imported only inside functions: the import takes a second and should not fail on machines without a GPU.


def is_triton_available() -> bool:
    """Return True if there is a GPU, or Triton's interpreter (tests)."""
    from megatron.kernels.runtime import is_interpreted

    return torch.cuda.is_available() or is_interpreted()


class TritonBackend:
    """Backend that runs the kernels of `megatron/kernels/`.

    Args:
        fallback: backend for unsupported calls, in plain PyTorch.
    """

    needs_heads_first_layout = True
    reads_whole_table = True
    supports_document_starts = True

    def __init__(self, fallback: AttentionBackend) -> None:
        self.fallback = fallback

    def describe_unsupported(self, formula: AttentionFormula) -> str | None:
        if not is_triton_available():
            return "it needs a CUDA device"
        from megatron.kernels.head_dim import MAX_HEAD_DIM

        encoding, processor = formula.encoding, formula.processor
        if encoding.qk_head_dim > MAX_HEAD_DIM:
            return f"its head dimension is at most {MAX_HEAD_DIM}, not {encoding.qk_head_dim}"
        if reason := find_unsupported_feature("triton", formula.features):
            return reason
        if type(encoding).overrides_hook("dense"):
            return _describe_unsupported_fire(encoding)
        if processor is None:
            return None
        from megatron.kernels.cdape_attention.op import MAX_PROCESSOR_WIDTH

        return describe_unsupported_processor(processor, max_width=MAX_PROCESSOR_WIDTH)

    def describe_fallback(self, inputs: AttentionInputs) -> str | None:
        """Explain why a call of a supported formula falls back to row blocks; None if it does not."""
        table = compute_table(inputs.encoding, inputs.query, inputs.key, inputs.q.device) or ScoreTerms()
        return select_kernel(inputs, table).reason or None

    @staticmethod
    def is_one_kernel(inputs: AttentionInputs) -> bool:
        """Return True if scores and biases are never stored."""
        table = compute_table(inputs.encoding, inputs.query, inputs.key, inputs.q.device) or ScoreTerms()
        return select_kernel(inputs, table).choice in ONE_KERNEL

    @staticmethod
    def share_table(table: ScoreTerms) -> ScoreTerms:
        """Return a table that several calls can read and that accumulates their gradients."""
        from megatron.kernels.biased_attention.tables import share_table

        return ScoreTerms(*(None if term is None else share_table(term) for term in table))

    @staticmethod
    def sum_gates(gates: Tensor | None, num_rows: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Compute the row and column terms of gates as `reference.sum_gates` does, on a GPU in one launch."""
        if gates is None or not gates.is_cuda or gates.dtype != torch.float32:
            return sum_gates(gates, num_rows)
        from megatron.kernels.bias import gate_sums

        return gate_sums.sum_gates(gates, num_rows)

    @staticmethod
    def compute_processor_terms(
        processors: Sequence[Processor],
        biases: Sequence[Tensor] | None,
        query: TokenRange,
        key: TokenRange,
        window: int | None,
        like: Tensor,
    ) -> Sequence[Any] | None:
        """Precompute the kernels' inputs from processors and tables for all layers at once (`kernels/cdape_attention`).

        Args:
            processors: processors of the layers, all with the same options.
            biases: bias of each layer, float32 [H, N], or None.
            query, key: rows and columns of a call.
            window: window of the layers.
            like: tensor with the type and device of the queries.

        Returns:
            `AttentionInputs.processor_terms` for each layer; None if each layer must compute its own.
        """
        from megatron.kernels.cdape_attention.layer_terms import compute_layer_terms

        convolutions = [processor.kernel_parameters() for processor in processors]
        are_convolutions = all(isinstance(each, ConvolutionParameters) for each in convolutions)
        if not are_convolutions or _describe_unsupported_tensor(like) is not None:
            return None
        weights = [(each.weight1, each.bias1, each.weight2, each.bias2) for each in convolutions]  # type: ignore[union-attr]
        if any(has_parameters_sharded_by_zero3(processor) for processor in processors):
            return None  # ZeRO-3 gathers the weights of one layer at a time
        if biases is not None:
            mapped = [map_bias(each, bias) for each, bias in zip(convolutions, biases, strict=True)]
            biases = [bias for bias in mapped if bias is not None]
        return compute_layer_terms(
            biases,
            weights,
            rows=query.length,
            offset=query.start - key.start,
            window=window,
            dtype=like.dtype,
            residual_bias=convolutions[0].residual_bias,  # type: ignore[union-attr]
            is_linear=convolutions[0].is_linear,  # type: ignore[union-attr]
        )

    @with_padded_values
    def __call__(self, inputs: AttentionInputs) -> Tensor:
        table = inputs.table or compute_table(inputs.encoding, inputs.query, inputs.key, inputs.q.device)
        table = table or ScoreTerms()
        selected = select_kernel(inputs, table)
        match selected.choice:
            case KernelChoice.FUSED_BIAS:
                return _attend_with_bias_kernel(inputs, table)
            case KernelChoice.FUSED_PROCESSOR:
                from megatron.kernels.cdape_attention.op import cdape_attention

                return run_processor_kernel(cdape_attention, inputs, table.bias)
            case KernelChoice.GATED_PROCESSOR:
                assert selected.args is not None
                return run_gated_processor_kernel(inputs, selected.args)
            case KernelChoice.MATRIX:
                return attend_with_bias_matrix(inputs, table.bias, _get_fire_parameters(inputs.encoding))
            case KernelChoice.PROCESSED_MATRIX:
                fire = _get_fire_parameters(inputs.encoding)
                assert fire is not None
                return self.fallback(use_fire_kernel(inputs, fire))
            case KernelChoice.PYTORCH:
                warn_fallback("triton", selected.reason)
                return self.fallback(inputs)


class KernelChoice(Enum):
    """Implementation of a call."""

    FUSED_BIAS = "kernels/biased_attention"
    FUSED_PROCESSOR = "kernels/cdape_attention"
    GATED_PROCESSOR = "kernels/cdape_attention, on gates"
    MATRIX = "kernels/bias, then PyTorch's fused attention"
    PROCESSED_MATRIX = "kernels/bias, then PyTorch's row blocks"
    PYTORCH = "PyTorch's row blocks"


ONE_KERNEL = (KernelChoice.FUSED_BIAS, KernelChoice.FUSED_PROCESSOR, KernelChoice.GATED_PROCESSOR)
"""Implementations that never store scores and biases."""


class SelectedKernel(NamedTuple):
    """Selected implementation of a call, with its arguments or the reason for a fallback."""

    choice: KernelChoice
    reason: str = ""
    """Reason why no kernel is used; empty if one is."""
    args: CdapeArgs | None = None
    """Arguments of the kernels for a processor with gates."""


def select_kernel(inputs: AttentionInputs, table: ScoreTerms) -> SelectedKernel:
    """Select the implementation of a supported call.

    Args:
        inputs: inputs of the call.
        table: the encoding's table over the distances of these rows; empty if it has none.
    """
    fire, reason = _get_fire_parameters(inputs.encoding), _describe_unsupported_tensor(inputs.q)
    if reason is not None:
        return SelectedKernel(KernelChoice.PYTORCH, reason)
    if inputs.query.sampled is not None:
        return SelectedKernel(KernelChoice.PYTORCH, "randomized positions")
    if inputs.key_mask is not None:
        return SelectedKernel(KernelChoice.PYTORCH, "padding")
    if inputs.q.shape[0] * inputs.q.shape[1] > (limit := _get_max_heads_in_batch()):  # many short sequences
        return SelectedKernel(KernelChoice.PYTORCH, f"more than {limit:,} heads in all sequences together")
    if inputs.processor is not None:
        if fire is not None:
            return SelectedKernel(KernelChoice.PROCESSED_MATRIX)
        reason = describe_processor_fallback(inputs)
        if reason is not None:
            return SelectedKernel(KernelChoice.PYTORCH, reason)
        if inputs.key_bias is None:
            return SelectedKernel(KernelChoice.FUSED_PROCESSOR)
        args = collect_kernel_args(inputs, None)
        reason = describe_gated_processor_fallback(inputs, args, table)
        if reason is not None:
            return SelectedKernel(KernelChoice.PYTORCH, reason)
        return SelectedKernel(KernelChoice.GATED_PROCESSOR, args=args)
    if inputs.key_bias is not None and (fire is not None or inputs.dropout):
        return SelectedKernel(KernelChoice.PYTORCH, "a gate's bias with a network's bias or with attention_dropout")
    if inputs.sinks is not None and fire is not None:  # PyTorch's fused attention does not support sinks
        return SelectedKernel(KernelChoice.PROCESSED_MATRIX)
    if inputs.sinks is not None and inputs.key_bias is not None:  # the kernels do not have the term of the row
        return SelectedKernel(KernelChoice.PYTORCH, "a gate's bias with a sink")
    if inputs.sinks is not None and inputs.dropout:
        return SelectedKernel(KernelChoice.PYTORCH, "attention_dropout with a sink")
    if fire is not None or (inputs.dropout and table.weight is None and table.bias is not None):
        return SelectedKernel(KernelChoice.MATRIX)
    if inputs.dropout:
        return SelectedKernel(KernelChoice.PYTORCH, "attention_dropout without a bias or with a weight")
    return SelectedKernel(KernelChoice.FUSED_BIAS)


def _describe_unsupported_tensor(x: Tensor) -> str | None:
    """Explain why no kernel supports a tensor's type and device; None if kernels do."""
    from megatron.kernels.runtime import DTYPES, is_interpreted

    if not (x.is_cuda or is_interpreted()):
        return "a model on the CPU"
    return None if x.dtype in DTYPES else str(x.dtype)


def _get_max_heads_in_batch() -> int:
    from megatron.kernels.runtime import MAX_HEADS_IN_BATCH

    return MAX_HEADS_IN_BATCH


def _get_fire_parameters(encoding: Encoding) -> FireParameters | None:
    parameters = encoding.kernel_parameters()
    return parameters if isinstance(parameters, FireParameters) else None


def _describe_unsupported_fire(encoding: Encoding) -> str | None:
    from megatron.kernels.bias.fire import MAX_HEADS, MAX_WIDTH

    fire = _get_fire_parameters(encoding)
    if fire is None:
        return "it cannot compute a bias that is not a function of the distance"
    heads, width = fire.weight2.shape
    if heads > MAX_HEADS or width > MAX_WIDTH:
        return f"its networks have at most {MAX_HEADS} heads and width {MAX_WIDTH}, not {heads} and {width}"
    return None


def _attend_with_bias_kernel(inputs: AttentionInputs, table: ScoreTerms) -> Tensor:
    from megatron.kernels.biased_attention.op import biased_attention
    from megatron.kernels.biased_attention.tables import select_table_heads

    bias, weight = (None if term is None else select_table_heads(term, inputs.heads) for term in table)
    return biased_attention(
        *(inputs.q, inputs.k, inputs.v, bias, weight, inputs.key_bias),
        offset=inputs.query.start - inputs.key.start,
        window=inputs.window,
        document_starts=inputs.first_columns,
        sinks=inputs.head_sinks,
    )


def attend_with_bias_matrix(inputs: AttentionInputs, bias: Tensor | None, fire: FireParameters | None) -> Tensor:
    """Compute PyTorch's fused attention in row blocks, with a bias matrix from a kernel.

    Supports no processor, weight or key mask. Blocks are recomputed in the backward pass, so memory is linear in T. The
    matrix is rounded to the type of q, as PyTorch requires.

    Args:
        bias: a Toeplitz table, float32 [H, N], or None.
        fire: FIRE's parameters, or None.
    """

    def compute(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, fire: FireParameters | None, block: AttentionInputs
    ) -> Tensor:
        matrix = _build_matrix(block, bias, fire)
        mask = matrix[None]
        if block.window is not None or block.document_starts is not None:
            mask = mask.masked_fill(~compute_visible_mask(block), float("-inf"))
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=block.dropout)

    outputs = []
    for block in iter_row_blocks(inputs, ROWS_PER_CALL):
        arguments = (block.q, block.k, block.v, bias, fire, block.drop_tensors())
        outputs.append(checkpoint(compute, *arguments, use_reentrant=False, preserve_rng_state=inputs.dropout > 0))
    return torch.cat(outputs, dim=2)


def _build_matrix(inputs: AttentionInputs, bias: Tensor | None, fire: FireParameters | None) -> Tensor:
    """Build the bias matrix [h, R, C] in the type of q, with −inf for keys in the future."""
    from megatron.kernels.bias.toeplitz import toeplitz_bias

    above = float("-inf")
    if bias is None:
        assert fire is not None
        return compute_fire_bias(fire, inputs.query, inputs.key, inputs.heads, inputs.q.dtype, above)
    offset = inputs.query.start - inputs.key.start
    table = select_heads(bias, inputs.heads)
    return toeplitz_bias(
        table, inputs.query.length, inputs.key.length, offset=offset, dtype=inputs.q.dtype, above=above
    )


def compute_fire_bias(
    fire: FireParameters, query: TokenRange, key: TokenRange, heads: slice, dtype: torch.dtype, above: float = 0.0
) -> Tensor:
    """Compute FIRE's bias [h, R, C] with its kernel, with `above` for keys in the future."""
    from megatron.kernels.bias.fire import fire_bias

    return fire_bias(
        fire.c,
        fire.multiplier,
        fire.weight1,
        fire.bias1,
        fire.weight2[heads],
        fire.bias2[heads],
        query.length,
        key.length,
        half_length=fire.half_length,
        offset=query.start - key.start,
        first_column=key.start,
        dtype=dtype,
        above=above,
    )


def use_fire_kernel(inputs: AttentionInputs, fire: FireParameters) -> AttentionInputs:
    """Return the inputs with FIRE's bias computed by the kernel, for attention in row blocks."""

    def dense(query: TokenRange, key: TokenRange, like: Tensor, heads: slice) -> ScoreTerms:
        return ScoreTerms(bias=compute_fire_bias(fire, query, key, heads, torch.float32))

    return replace(inputs, dense=dense)
