"""Capture the inputs of attention in every layer of a forward pass.

A backend receives everything needed to compute attention as one value, `AttentionInputs`. A wrapper that passes this
value to a hook, and then calls the real backend, observes each layer of the actual forward pass without reimplementing
it. Maps are computed from `AttentionInputs` in row blocks, so that no full map is ever in memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from megatron.attention.backends.backend import AttentionBackend
from megatron.attention.inputs import AttentionInputs
from megatron.attention.reference import compute_weights
from megatron.model.attention import PositionedAttention
from megatron.model.gpt import GPT
from megatron.position.encoding import Encoding
from megatron.position.processor import Processor

AttentionHook = Callable[[int, AttentionInputs], None]
"""Callback that receives a layer's index, from 0, and its attention inputs."""

MAX_BLOCK_ELEMENTS = 1 << 20
"""Maximum number of elements in a block of score matrices, over all heads."""


class CapturingBackend:
    """Backend that passes its inputs to a hook, and then calls another backend."""

    def __init__(self, backend: AttentionBackend, layer: int, hook: AttentionHook) -> None:
        self.backend, self.layer, self.hook = backend, layer, hook

    def describe_unsupported(
        self,
        encoding: Encoding,
        processor: Processor | None,
        softcap: float | None = None,
        softmax_type: str = "vanilla",
    ) -> str | None:
        return self.backend.describe_unsupported(encoding, processor, softcap, softmax_type)

    def __call__(self, inputs: AttentionInputs) -> torch.Tensor:
        self.hook(self.layer, inputs)
        return self.backend(inputs)


def list_attention_layers(model: GPT) -> list[PositionedAttention]:
    return [layer.self_attention.core_attention for layer in model.local_layers]


@contextmanager
def capture_attention(model: GPT, hook: AttentionHook) -> Iterator[None]:
    """Context manager in which a hook is called for each layer of every forward pass."""
    backends = [(attention, attention.backend) for attention in list_attention_layers(model)]
    for attention, backend in backends:
        attention.backend = CapturingBackend(backend, attention.layer_index, hook)
    try:
        yield
    finally:
        for attention, backend in backends:
            attention.backend = backend


@torch.no_grad()
def run_forward(model: GPT, tokens: np.ndarray, hook: AttentionHook) -> None:
    """Run a forward pass over one window of tokens [L], and call the hook for each layer."""
    device = next(model.parameters()).device
    with capture_attention(model, hook):
        model.compute_hidden_states(torch.from_numpy(tokens.astype(np.int64))[None].to(device))


def slice_from_row(inputs: AttentionInputs, first: int) -> AttentionInputs:
    """Return the attention inputs of the query rows from index `first` on."""
    num_skipped = min(max(first - inputs.query.start, 0), inputs.query.length)
    query = replace(inputs.query, start=inputs.query.start + num_skipped, length=inputs.query.length - num_skipped)
    mask = inputs.key_mask
    if mask is not None and mask.dim() == 3:
        mask = mask[:, num_skipped:]
    document_starts = None if inputs.document_starts is None else inputs.document_starts[:, num_skipped:]
    row_bias = None if inputs.row_bias is None else inputs.row_bias[:, :, num_skipped:]
    return replace(
        inputs,
        q=inputs.q[:, :, num_skipped:],
        query=query,
        key_mask=mask,
        document_starts=document_starts,
        row_bias=row_bias,
        preceding_q=inputs.select_preceding_rows(num_skipped),
    )


def compute_attention_weights(block: AttentionInputs) -> torch.Tensor:
    """Compute the attention weights of each query over all keys, [B, H, R, C], before dropout."""
    return compute_weights(block)


def choose_block_size(inputs: AttentionInputs) -> int:
    """Return the number of rows per block that bounds the size of score matrices."""
    return max(1, MAX_BLOCK_ELEMENTS // (inputs.q.shape[0] * inputs.q.shape[1] * inputs.key.length))
