"""Picks the attention backend when the model is built."""

import logging

import torch
from torch import Tensor

from megatron.errors import UserError
from megatron.model.backends.backend import Backend, Rows
from megatron.model.backends.chunked import Chunked
from megatron.model.backends.eager import Eager
from megatron.model.backends.sdpa import Sdpa
from megatron.model.backends.triton import Triton
from megatron.position.encoding import Encoding
from megatron.position.processor import Processor

logger = logging.getLogger(__name__)

EAGER_UP_TO = 1024
"""`auto` materialises training's score maps up to this many keys: faster than recomputing while they are small."""


class EagerThenChunked:
    """Eager for short training sequences, row blocks for the rest; the two agree to rounding.

    Without gradients nothing is recomputed, and blocks over their causal columns do half the work and stay in caches.
    """

    def __init__(self, block: int) -> None:
        self.eager, self.chunked = Eager(), Chunked(block)

    def refuses(self, encoding: Encoding, processor: Processor | None) -> str | None:
        return None

    def __call__(self, rows: Rows) -> Tensor:
        whole = torch.is_grad_enabled() and rows.key.length <= EAGER_UP_TO
        return self.eager(rows) if whole else self.chunked(rows)


def choose_backend(name: str, chunk_rows: int, encoding: Encoding, processor: Processor | None) -> Backend:
    """The backend called `name`; `auto` is the fastest that can do the combination.

    Raises:
        UserError: the named backend cannot do it, with the reason and the ones that can.
    """
    plain = EagerThenChunked(chunk_rows)
    backends: dict[str, Backend] = {
        "sdpa": Sdpa(), "triton": Triton(plain), "eager": Eager(), "chunked": Chunked(chunk_rows)
    }  # fmt: skip
    if name not in ("auto", *backends):
        raise UserError(f"attention_backend {name!r}: choose from auto, {', '.join(backends)}")
    if name == "auto":
        # Not triton: its kernels have not run on a GPU yet (docs/log.md), so they are for those who ask for them.
        refusal = backends["sdpa"].refuses(encoding, processor)
        if refusal is None:
            logger.info("attention backend: sdpa")
            return backends["sdpa"]
        logger.info("attention backend: eager up to %d keys in training, else chunked (sdpa: %s)", EAGER_UP_TO, refusal)
        return plain
    refusal = backends[name].refuses(encoding, processor)
    if refusal is not None:
        able = [other for other, backend in backends.items() if backend.refuses(encoding, processor) is None]
        raise UserError(f"attention_backend {name!r}: {refusal}; choose from auto, {', '.join(able)}")
    return backends[name]
