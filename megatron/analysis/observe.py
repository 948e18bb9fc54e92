"""Looking on while a model reads: every layer's queries and keys, as its attention is given them.

A backend is handed everything that attention is computed from as one value, `AttentionInputs`. So one that shows it to
somebody and then computes as before sees each layer of the real forward pass, and nothing of that pass is written a
second time. What is to be known of the maps is computed from `AttentionInputs` in blocks of rows, so no map is ever
whole in memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from megatron.attention.backends.backend import AttentionBackend
from megatron.attention.inputs import AttentionInputs
from megatron.model.attention import PositionedAttention
from megatron.model.gpt import GPT
from megatron.position.encoding import Encoding
from megatron.position.processor import Processor

AttentionHook = Callable[[int, AttentionInputs], None]
"""Is told a layer's number, from 0, and what its attention is computed from."""

ELEMENTS = 1 << 20
"""Numbers of a block's score maps, over all heads."""


class CapturingBackend:
    """A backend that shows what it is given, and computes as another."""

    def __init__(self, backend: AttentionBackend, layer: int, see: AttentionHook) -> None:
        self.backend, self.layer, self.see = backend, layer, see

    def unsupported_reason(self, encoding: Encoding, processor: Processor | None) -> str | None:
        return self.backend.unsupported_reason(encoding, processor)

    def __call__(self, inputs: AttentionInputs) -> torch.Tensor:
        self.see(self.layer, inputs)
        return self.backend(inputs)


def list_attention_layers(model: GPT) -> list[PositionedAttention]:
    """The attention of each layer."""
    return [layer.self_attention.core_attention for layer in model.local_layers]


@contextmanager
def capture_attention(model: GPT, see: AttentionHook) -> Iterator[None]:
    """Inside, `see` is told of each layer of every forward pass."""
    kept = [(attention, attention.backend) for attention in list_attention_layers(model)]
    for attention, backend in kept:
        attention.backend = CapturingBackend(backend, attention.layer_index, see)
    try:
        yield
    finally:
        for attention, backend in kept:
            attention.backend = backend


@torch.no_grad()
def run_forward(model: GPT, tokens: np.ndarray, see: AttentionHook) -> None:
    """Let the model read one window of tokens [L], and show its attention."""
    device = next(model.parameters()).device
    with capture_attention(model, see):
        model.hidden_states(torch.from_numpy(tokens.astype(np.int64))[None].to(device))


def slice_from_row(rows: AttentionInputs, first: int) -> AttentionInputs:
    """The rows from the query at place `first` on."""
    skipped = min(max(first - rows.query.start, 0), rows.query.length)
    query = replace(rows.query, start=rows.query.start + skipped, length=rows.query.length - skipped)
    mask = rows.key_mask
    if mask is not None and mask.dim() == 3:
        mask = mask[:, skipped:]
    return replace(rows, q=rows.q[:, :, skipped:], query=query, key_mask=mask)


def choose_block_size(rows: AttentionInputs) -> int:
    """Rows of a block whose score maps are bounded."""
    return max(1, ELEMENTS // (rows.q.shape[0] * rows.q.shape[1] * rows.key.length))
