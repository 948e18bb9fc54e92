"""Picks the attention backend when the model is built."""

import logging

import torch
from torch import Tensor

from megatron.errors import UserError
from megatron.model.backends.backend import Backend
from megatron.model.backends.chunked import Chunked
from megatron.model.backends.eager import Eager
from megatron.model.backends.kept import KEPT_ROWS, KEPT_UP_TO
from megatron.model.backends.native import Native
from megatron.model.backends.sdpa import Sdpa
from megatron.model.backends.triton import Triton
from megatron.position.encoding import Encoding
from megatron.position.processor import Processor
from megatron.position.rows import Rows

logger = logging.getLogger(__name__)


class RowBlocks:
    """Blocks of rows over their causal columns, their maps kept for short training sequences, else recomputed."""

    def __init__(self, block: int) -> None:
        self.recomputed, self.processed = Chunked(block), Chunked(block, recompute=False)
        self.plain = Chunked(max(block, KEPT_ROWS), recompute=False)

    def refuses(self, encoding: Encoding, processor: Processor | None) -> str | None:
        return None

    def __call__(self, rows: Rows) -> Tensor:
        if torch.is_grad_enabled() and rows.key.length <= KEPT_UP_TO:
            return self.plain(rows) if rows.processor is None else self.processed(rows)
        return self.recomputed(rows)


def why_row_blocks(name: str, encoding: Encoding, processor: Processor | None) -> str | None:
    """That `auto` computes attention in row blocks, and why; None where it fuses, and where a backend was named."""
    refusal = Sdpa().refuses(encoding, processor) if name == "auto" else None
    if refusal is None:
        return None
    return f"row blocks, kept up to {KEPT_UP_TO:,} keys in training: sdpa {refusal.removeprefix('it ')}"


def choose_backend(name: str, chunk_rows: int, encoding: Encoding, processor: Processor | None) -> Backend:
    """The backend called `name`; `auto` is the fastest that can do the combination.

    Raises:
        UserError: the named backend cannot do it, with the reason and the ones that can.
    """
    plain = RowBlocks(chunk_rows)
    backends: dict[str, Backend] = {
        "sdpa": Sdpa(), "triton": Triton(plain), "native": Native(plain, named=True), "eager": Eager(),
        "chunked": Chunked(chunk_rows),
    }  # fmt: skip
    if name not in ("auto", *backends):
        raise UserError(f"attention_backend {name!r}: choose from auto, {', '.join(backends)}")
    if name == "auto":
        # Not triton: its kernels have not run on a GPU yet (docs/log.md), so they are for those who ask for them.
        reason = why_row_blocks(name, encoding, processor)
        logger.info("attention backend: %s", reason or "sdpa")
        if reason is None:
            return backends["sdpa"]
        return plain if Native.cannot(encoding, processor) else Native(plain, named=False)
    refusal = backends[name].refuses(encoding, processor)
    if refusal is not None:
        able = [other for other, backend in backends.items() if backend.refuses(encoding, processor) is None]
        raise UserError(f"attention_backend {name!r}: {refusal}; choose from auto, {', '.join(able)}")
    return backends[name]
