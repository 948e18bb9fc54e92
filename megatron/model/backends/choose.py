"""Picks the attention backend when the model is built."""

import logging

import torch
from torch import Tensor

from megatron.errors import UserError
from megatron.model.backends.backend import AttentionBackend
from megatron.model.backends.chunked import ChunkedBackend
from megatron.model.backends.eager import EagerBackend
from megatron.model.backends.kept import MAX_KEYS_KEPT, MIN_ROWS_KEPT
from megatron.model.backends.native import NativeBackend
from megatron.model.backends.sdpa import SdpaBackend
from megatron.model.backends.triton import TritonBackend
from megatron.position.encoding import Encoding
from megatron.position.processor import Processor
from megatron.position.rows import AttentionInputs

logger = logging.getLogger(__name__)


class RowBlockBackend:
    """Blocks of rows over their causal columns, their maps kept for short training sequences, else recomputed."""

    def __init__(self, block: int) -> None:
        self.recomputed, self.processed = ChunkedBackend(block), ChunkedBackend(block, recompute=False)
        self.plain = ChunkedBackend(max(block, MIN_ROWS_KEPT), recompute=False)

    def unsupported_reason(self, encoding: Encoding, processor: Processor | None) -> str | None:
        return None

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        if torch.is_grad_enabled() and inputs.key.length <= MAX_KEYS_KEPT:
            return self.plain(inputs) if inputs.processor is None else self.processed(inputs)
        return self.recomputed(inputs)


def row_blocks_reason(name: str, encoding: Encoding, processor: Processor | None) -> str | None:
    """That `auto` computes attention in row blocks, and why; None where it fuses, and where a backend was named."""
    reason = SdpaBackend().unsupported_reason(encoding, processor) if name == "auto" else None
    if reason is None:
        return None
    return f"row blocks, kept up to {MAX_KEYS_KEPT:,} keys in training: sdpa {reason.removeprefix('it ')}"


def select_backend(name: str, chunk_rows: int, encoding: Encoding, processor: Processor | None) -> AttentionBackend:
    """The backend called `name`; `auto` is the fastest that can do the combination.

    Raises:
        UserError: the named backend cannot do it, with the reason and the ones that can.
    """
    row_blocks = RowBlockBackend(chunk_rows)
    backends: dict[str, AttentionBackend] = {
        "sdpa": SdpaBackend(), "triton": TritonBackend(row_blocks), "native": NativeBackend(row_blocks,
        is_requested=True), "eager": EagerBackend(), "chunked": ChunkedBackend(chunk_rows),
    }  # fmt: skip
    if name not in ("auto", *backends):
        raise UserError(f"attention_backend {name!r}: choose from auto, {', '.join(backends)}")
    if name == "auto":
        # Not triton: its kernels have not run on a GPU yet (docs/log.md), so they are for those who ask for them.
        reason = row_blocks_reason(name, encoding, processor)
        logger.info("attention backend: %s", reason or "sdpa")
        if reason is None:
            return backends["sdpa"]
        return (
            row_blocks
            if NativeBackend.unsupported_combination_reason(encoding, processor)
            else NativeBackend(row_blocks, is_requested=False)
        )
    reason = backends[name].unsupported_reason(encoding, processor)
    if reason is not None:
        supported = [
            other for other, backend in backends.items() if backend.unsupported_reason(encoding, processor) is None
        ]
        raise UserError(f"attention_backend {name!r}: {reason}; choose from auto, {', '.join(supported)}")
    return backends[name]
