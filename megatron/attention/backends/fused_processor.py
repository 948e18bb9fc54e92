"""Score processors with two convolutions, computed by kernels that fuse them with attention.

`triton.py` runs them on a GPU. The backend of this module is C code on a CPU: memory linear in T, several times as fast
as row blocks. Unsupported cases (other types and devices, padding, sampled positions, divided heads, a cache that has
dropped keys) fall back to PyTorch's row blocks.
"""

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from megatron.attention.backends.backend import (
    AttentionBackend,
    AttentionFormula,
    find_unsupported_feature,
    warn_fallback,
)
from megatron.attention.inputs import AttentionInputs, with_padded_values
from megatron.attention.reference import compute_table
from megatron.kernels.cdape_attention import cpu
from megatron.kernels.cdape_attention.args import MIN_MAPPED_ROWS, CdapeArgs
from megatron.position.base import ConvolutionParameters, KernelParameters
from megatron.position.encoding import ScoreTerms
from megatron.position.processor import Processor

logger = logging.getLogger(__name__)


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
    """Explain why no kernel supports a call of a supported formula; None if one does."""
    if inputs.query.sampled is not None:
        return "randomized positions"
    if inputs.key_mask is not None:
        return "padding"
    if inputs.dropout:
        return "attention_dropout with a score processor"
    if inputs.v.shape[1] != inputs.q.shape[1]:
        return "a score processor whose heads are divided among ranks"
    if inputs.key.start > 0:
        return "a cache that has dropped keys"
    if inputs.query.length < MIN_MAPPED_ROWS and inputs.processor is not None:
        convolutions = inputs.processor.kernel_parameters()
        if isinstance(convolutions, ConvolutionParameters) and convolutions.head_map is not None:
            return "decoding with a map of the attention weights"
    return None


def run_processor_kernel(kernel: Callable[..., Tensor], inputs: AttentionInputs, bias: Tensor | None) -> Tensor:
    """Run a kernel on a supported call.

    Args:
        kernel: `cdape_attention` of a device.
        bias: the encoding's table, float32 [H, N], or None.
    """
    args = collect_kernel_args(inputs, bias)
    terms = inputs.processor_terms
    if terms is not None and terms.fits(args.q, args.offset, args.window):
        return kernel(args, terms=terms)
    assert inputs.processor is not None
    return kernel(args._replace(bias=map_bias(inputs.processor.kernel_parameters(), bias)))


def map_bias(parameters: KernelParameters | None, bias: Tensor | None) -> Tensor | None:
    """Return a table, float32 [H, N], mapped between the heads if the processor has such a map."""
    assert isinstance(parameters, ConvolutionParameters)
    return bias if bias is None or parameters.bias_map is None else torch.addmm(bias, parameters.bias_map.float(), bias)


def describe_gated_processor_fallback(inputs: AttentionInputs, args: CdapeArgs, table: ScoreTerms) -> str | None:
    """Explain why no kernel supports a call of a processor with gates; None if one does.

    Args:
        inputs: inputs for which `describe_processor_fallback` returns None.
        args: the kernels' arguments for these rows.
        table: the encoding's table over their distances; empty if it has none.
    """
    from megatron.kernels.cdape_attention.gated_op import describe_unsupported, describe_unsupported_device

    if table.bias is not None or table.weight is not None:
        return "a gate's bias together with a table before a processor"
    if args.is_linear or args.head_map is not None:
        return "a gate's bias before this processor"
    heads, _, dim = inputs.q.shape[1:]
    sizes = (heads, dim, args.w1.shape[0], args.w1.shape[3], args.offset + inputs.q.shape[2])
    return describe_unsupported(inputs.q.dtype, *sizes, args.offset) or describe_unsupported_device(
        inputs.q, dim, args.w1.shape[3]
    )


def run_gated_processor_kernel(inputs: AttentionInputs, args: CdapeArgs) -> Tensor:
    """Run the kernels of a processor with gates on a supported call."""
    from megatron.kernels.cdape_attention.gated_op import attend_with_gates

    assert inputs.row_bias is not None
    assert inputs.key_bias is not None
    return attend_with_gates(args, inputs.row_bias, inputs.key_bias)


def collect_kernel_args(inputs: AttentionInputs, bias: Tensor | None) -> CdapeArgs:
    """Return the kernels' arguments for a processor with two convolutions; weights sharded by ZeRO 3 are gathered."""
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
        is_linear=convolutions.is_linear,
        head_map=None if convolutions.head_map is None else convolutions.head_map.float(),
    )


class NativeBackend:
    """The C code of `megatron/kernels/cdape_attention` as a backend.

    Args:
        fallback: backend for unsupported calls.
        is_requested: True if the user named this backend and should be warned about fallbacks.
    """

    supports_document_starts = True

    def __init__(self, fallback: AttentionBackend, *, is_requested: bool) -> None:
        self.fallback, self.is_requested = fallback, is_requested

    def describe_unsupported(self, formula: AttentionFormula) -> str | None:
        return self.describe_unsupported_formula(formula) or cpu.describe_unavailable()

    @staticmethod
    def describe_unsupported_formula(formula: AttentionFormula) -> str | None:
        """Explain why the formula is not supported on any machine; None if it is."""
        reason = find_unsupported_feature("native", formula.features)
        if reason is not None or formula.processor is None:
            return reason
        return describe_unsupported_processor(formula.processor, max_kernel_size=cpu.MAX_KERNEL_SIZE)

    @with_padded_values
    def __call__(self, inputs: AttentionInputs) -> Tensor:
        reason = _describe_fallback(inputs)
        if reason is not None:
            if self.is_requested:
                warn_fallback("native", reason)
            return self.fallback(inputs)
        if cpu.describe_unavailable() is not None:
            _warn_unavailable()
            return self.fallback(inputs)
        table = compute_table(inputs.encoding, inputs.query, inputs.key, inputs.q.device) or ScoreTerms()
        return run_processor_kernel(cpu.cdape_attention, inputs, table.bias)


def _describe_fallback(inputs: AttentionInputs) -> str | None:
    if inputs.q.device.type != "cpu":
        return "a model on a GPU"
    if inputs.q.dtype != torch.float32:
        return str(inputs.q.dtype)
    return describe_processor_fallback(inputs)


@cache
def _warn_unavailable() -> None:
    logger.warning(
        "score processors run several times slower on this CPU without their C code: %s", cpu.describe_unavailable()
    )
