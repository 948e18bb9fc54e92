"""Keys and values of the tokens read so far, so that decoding computes each of them once.

    cache = gpt.new_kv_cache(length)          room for `length` tokens
    gpt(prompt, kv_cache=cache)               all its tokens at once, or in chunks
    gpt(token, kv_cache=cache)                one token at a time

A step is the same code as a full forward pass: query rows that begin at a later place. Keys are stored rotated by their
own positions, which never change. B batch, T tokens, H heads (of keys: fewer than of queries where these are grouped),
d head dimension.
"""

import torch
from torch import Tensor

from megatron.position.token_range import SampledPositions
from megatron.utils.errors import UserError

MIN_CAPACITY = 2048
"""Tokens that a cache has room for at once, if that many may come."""


class KVCache:
    """One sequence batch's keys and values in every layer. Use it without gradients.

    Args:
        num_layers: layers of the model.
        capacity: tokens that fit.
        sampled: positions of all of them, where they are randomized.
    """

    def __init__(self, num_layers: int, capacity: int, sampled: SampledPositions | None = None) -> None:
        self.capacity, self.sampled = capacity, sampled
        self.length = 0
        """Tokens read so far."""
        self._stored: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    def check_capacity(self, tokens: int) -> None:
        """Refuse tokens for which there is no room, and use with gradients, which writing in place would spoil."""
        if self.length + tokens > self.capacity:
            raise UserError(
                f"the cache has room for {self.capacity} tokens; {self.length} are in it and {tokens} more were given"
            )
        if torch.is_grad_enabled():
            raise RuntimeError("a cache is for inference: use it under torch.no_grad() or torch.inference_mode()")

    def extend(self, layer_index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's keys and values [B, H, T, d] of the tokens at hand; returns those of all tokens so far."""
        stop = self.length + k.shape[2]
        stored = self._stored[layer_index]
        if stored is None or stored[0].shape[2] < stop:
            stored = self._stored[layer_index] = self._grow(stored, k, v, stop)
        for buffer, new in zip(stored, (k, v), strict=True):
            buffer[:, :, self.length : stop] = new
        return stored[0][:, :, :stop], stored[1][:, :, :stop]

    def _grow(self, stored: tuple[Tensor, Tensor] | None, k: Tensor, v: Tensor, needed: int) -> tuple[Tensor, Tensor]:
        """Room for what is needed and as much again, and never for more than `room`: a text may end long before."""
        size = min(self.capacity, max(2 * needed, MIN_CAPACITY))
        larger = tuple(x.new_zeros(*x.shape[:2], size, x.shape[3]) for x in (k, v))
        if stored is not None:
            for new, old in zip(larger, stored, strict=True):
                new[:, :, : self.length] = old[:, :, : self.length]
        return larger[0], larger[1]
