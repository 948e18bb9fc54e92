"""The attention backends by name, and the choice of one when the model is built."""

import logging

from megatron.attention.backends.backend import MAX_KEYS_KEPT, AttentionBackend
from megatron.attention.backends.native import NativeBackend
from megatron.attention.backends.pytorch import ChunkedBackend, EagerBackend, RowBlockBackend, SdpaBackend
from megatron.attention.backends.triton import TritonBackend
from megatron.position.encoding import Encoding
from megatron.position.processor import Processor
from megatron.utils.errors import UserError

logger = logging.getLogger(__name__)


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
        "sdpa": SdpaBackend(),
        "triton": TritonBackend(row_blocks),
        "native": NativeBackend(row_blocks, is_requested=True),
        "eager": EagerBackend(),
        "chunked": ChunkedBackend(chunk_rows),
    }
    if name not in ("auto", *backends):
        raise UserError(f"attention_backend {name!r}: choose from auto, {', '.join(backends)}")
    if name == "auto":
        # Not triton: its kernels have not run on a GPU yet (docs/log.md), so they are for those who ask for them.
        reason = row_blocks_reason(name, encoding, processor)
        logger.info("attention backend: %s", reason or "sdpa")
        if reason is None:
            return backends["sdpa"]
        if NativeBackend.combination_unsupported_reason(encoding, processor) is not None:
            return row_blocks
        return NativeBackend(row_blocks, is_requested=False)
    reason = backends[name].unsupported_reason(encoding, processor)
    if reason is not None:
        supported = [
            other for other, backend in backends.items() if backend.unsupported_reason(encoding, processor) is None
        ]
        raise UserError(f"attention_backend {name!r}: {reason}; choose from auto, {', '.join(supported)}")
    return backends[name]
