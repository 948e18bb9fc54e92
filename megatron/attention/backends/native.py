"""C code for convolutional score processors on a CPU: memory linear in T, several times as fast as row blocks.

Unsupported cases (other types and devices, padding, sampled positions, divided heads) fall back to PyTorch's row
blocks.
"""

import logging
from functools import cache

import torch
from torch import Tensor

from megatron.attention.backends.backend import AttentionBackend, find_unsupported_combination
from megatron.attention.backends.fused_processor import (
    describe_processor_fallback,
    describe_unsupported_processor,
    run_processor_kernel,
)
from megatron.attention.inputs import AttentionInputs, pad_values
from megatron.attention.reference import compute_table
from megatron.kernels.cdape_attention import cpu
from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.processor import Processor

logger = logging.getLogger(__name__)


class NativeBackend:
    """The C code of `megatron/kernels/cdape_attention` as a backend.

    Args:
        fallback: backend for unsupported calls.
        is_requested: True if the user named this backend and should be warned about fallbacks.
    """

    supports_document_starts = True

    def __init__(self, fallback: AttentionBackend, *, is_requested: bool) -> None:
        self.fallback, self.is_requested = fallback, is_requested

    def describe_unsupported(
        self,
        encoding: Encoding,
        processor: Processor | None,
        softcap: float | None = None,
        softmax_type: str = "vanilla",
    ) -> str | None:
        reason = self.describe_unsupported_combination(encoding, processor, softcap, softmax_type)
        return reason or cpu.unavailable_reason()

    @staticmethod
    def describe_unsupported_combination(
        encoding: Encoding,
        processor: Processor | None,
        softcap: float | None = None,
        softmax_type: str = "vanilla",
    ) -> str | None:
        """Explain why the combination is not supported on any machine; None if it is."""
        reason = find_unsupported_combination("native", encoding, processor, softcap, softmax_type)
        if reason is not None or processor is None:
            return reason
        return describe_unsupported_processor(processor, max_kernel_size=cpu.MAX_KERNEL_SIZE)

    @pad_values
    def __call__(self, inputs: AttentionInputs) -> Tensor:
        reason = _describe_fallback(inputs)
        if reason is not None:
            if self.is_requested:
                _warn_fallback(reason)
            return self.fallback(inputs)
        if cpu.unavailable_reason() is not None:
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
def _warn_fallback(reason: str) -> None:
    """Warn once per reason, not once per layer and step."""
    logger.warning("attention_backend native: %s is left to PyTorch's row blocks", reason)


@cache
def _warn_unavailable() -> None:
    logger.warning(
        "score processors run several times slower on this CPU without their C code: %s", cpu.unavailable_reason()
    )
