"""Score processors with two convolutions, computed by kernels that fuse them with attention, on a GPU or a CPU."""

from collections.abc import Callable

from torch import Tensor

from megatron.attention.inputs import AttentionInputs
from megatron.kernels.cdape_attention.args import CdapeArgs
from megatron.position.base import ConvolutionParameters
from megatron.position.encoding import ScoreTerms
from megatron.position.processor import Processor


def describe_unsupported_processor(
    processor: Processor, *, max_width: int | None = None, max_kernel_size: int | None = None
) -> str | None:
    """Explain why no kernel supports the processor; None if one does.

    Args:
        processor: the processor.
        max_width, max_kernel_size: largest width and convolution size that the kernel supports, if it has such limits.
    """
    convolutions = processor.kernel_parameters()
    if not isinstance(convolutions, ConvolutionParameters):
        return "it cannot compute this processor"
    width, *_, kernel_size = convolutions.weight1.shape
    if max_width is not None and width > max_width:
        return f"its processors have a width of at most {max_width}, not {width}"
    if max_kernel_size is not None and kernel_size > max_kernel_size:
        return f"its kernels have a size of at most {max_kernel_size}, not {kernel_size}"
    return None


def describe_processor_fallback(inputs: AttentionInputs) -> str | None:
    """Explain why no kernel supports these rows of a supported combination; None if one does."""
    if inputs.query.sampled is not None:
        return "randomized positions"
    if inputs.key_mask is not None:
        return "padding"
    if inputs.dropout:
        return "attention_dropout with a score processor"
    if inputs.v.shape[1] != inputs.q.shape[1] or inputs.key.start > 0:
        return "a score processor over divided heads"
    return None


def run_processor_kernel(kernel: Callable[..., Tensor], inputs: AttentionInputs, bias: Tensor | None) -> Tensor:
    """Run a kernel on supported rows.

    Args:
        kernel: `cdape_attention` of a device.
        bias: the encoding's table, float32 [H, N], or None.
    """
    args = _collect_args(inputs, bias)
    terms = inputs.processor_terms
    if terms is not None and terms.fits(args.q, args.offset, args.window):
        return kernel(args, terms=terms)
    return kernel(args)


def describe_gated_processor_fallback(inputs: AttentionInputs, table: ScoreTerms) -> str | None:
    """Explain why no kernel supports these rows of a processor on gates; None if one does.

    Args:
        inputs: rows that `describe_processor_fallback` takes.
        table: the encoding's table over their distances; empty if it has none.
    """
    from megatron.kernels.cdape_attention.gated_op import describe_unfit_device, describe_unsupported

    if inputs.sinks is not None:  # the kernels do not have the term of the row
        return "a gate's bias with a sink"
    if table.bias is not None or table.weight is not None:
        return "a gate's bias and a table before a processor"
    args, (heads, _, dim) = _collect_args(inputs, None), inputs.q.shape[1:]
    sizes = (heads, dim, args.w1.shape[0], args.w1.shape[3], args.offset + inputs.q.shape[2])
    return describe_unsupported(inputs.q.dtype, *sizes, args.window, args.offset) or describe_unfit_device(
        inputs.q, dim
    )


def run_gated_processor_kernel(inputs: AttentionInputs) -> Tensor:
    """Run the kernels of a processor on gates, on supported rows."""
    from megatron.kernels.cdape_attention.gated_op import attend_with_gates

    assert inputs.row_bias is not None
    assert inputs.key_bias is not None
    return attend_with_gates(_collect_args(inputs, None)._replace(window=None), inputs.row_bias, inputs.key_bias)


def _collect_args(inputs: AttentionInputs, bias: Tensor | None) -> CdapeArgs:
    assert inputs.processor is not None
    convolutions = inputs.processor.kernel_parameters()
    assert isinstance(convolutions, ConvolutionParameters)
    return CdapeArgs(
        inputs.q,
        inputs.k,
        inputs.v,
        bias,
        convolutions.weight1,
        convolutions.bias1,
        convolutions.weight2,
        convolutions.bias2,
        offset=inputs.query.start - inputs.key.start,
        window=inputs.window,
        document_starts=inputs.first_columns,
        residual_bias=convolutions.residual_bias,
        sinks=inputs.head_sinks,
    )
