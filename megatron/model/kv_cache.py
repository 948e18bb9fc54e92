"""What decoding keeps of the tokens that it has read: keys, values and gates of every layer.

B batch, H heads, T tokens at hand, d head dimension.
"""

from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor

from megatron.position.numerics import promote_to_float32
from megatron.position.token_range import SampledPositions
from megatron.utils.errors import UserError

MIN_CAPACITY = 2048
"""Tokens that a cache has room for at once, if that many may come."""

WINDOW_SLACK = 256
"""Tokens for which a layer with a window has room beside those that later rows see: it moves these once in so many."""


class KVCache:
    """Keys, values and gates of the tokens of a batch read so far, in every layer: decoding computes each of them once.
    Use it without gradients. Of gates not their sums are kept, which may begin anew wherever keys are dropped.

        cache = gpt.new_kv_cache(length)          room for `length` tokens
        gpt(prompt, kv_cache=cache)               all its tokens at once, or in chunks
        gpt(token, kv_cache=cache)                one token at a time

    A step is the same code as a full forward pass: query rows that begin at a later index. Keys are stored rotated by
    their own positions, which never change.

    A layer with a window keeps the keys that later rows can see, and no others.

    Where a processor reads rows above, a layer keeps the last queries, or a number for each key that sums up the rows.

    Args:
        capacity: tokens that fit.
        kept: by the layers' numbers, how many of the keys before a row it may depend on; None for all.
        sampled: positions of all of them, where they are randomized.
    """

    def __init__(self, capacity: int, kept: Mapping[int, int | None], sampled: SampledPositions | None = None) -> None:
        self.capacity, self.sampled = capacity, sampled
        self.length = 0
        """Tokens read so far."""
        self.tokens: Tensor | None = None
        """These themselves, int64 [B, tokens] on the CPU, if the model finds documents in them."""
        self._layers = {layer: LayerCache(capacity, number) for layer, number in kept.items()}
        self._queries: dict[int, Tensor] = {}
        self._row_sums: dict[int, Tensor] = {}

    def check_capacity(self, tokens: int) -> None:
        """Refuse tokens for which there is no room, and use with gradients, which writing in place would spoil."""
        if self.length + tokens > self.capacity:
            raise UserError(
                f"the cache has room for {self.capacity} tokens; {self.length} are in it and {tokens} more were given"
            )
        if torch.is_grad_enabled():
            raise RuntimeError("a cache is for inference: use it under torch.no_grad() or torch.inference_mode()")

    def extend(self, layer_index: int, *new: Tensor | None) -> tuple[tuple[Any, ...], int]:
        """Store a layer's keys, values [B, H, T, d] and gates [B, H, T] of the tokens at hand; see
        `LayerCache.extend`."""
        return self._layers[layer_index].extend(new, self.length)

    def extend_queries(self, layer_index: int, q: Tensor, rows_above: int) -> Tensor:
        """Queries [B, H, T, d] of the tokens at hand with those of the last `rows_above` tokens before them, which are
        what is stored."""
        stored = self._queries.get(layer_index)
        q = q if stored is None else torch.cat([stored, q], dim=2)
        self._queries[layer_index] = q[:, :, max(q.shape[2] - rows_above, 0) :].clone()
        return q

    def extend_row_sums(self, layer_index: int, q: Tensor, num_keys: int) -> Tensor:
        """For each of the last `num_keys` of all tokens so far the sum over the rows read before those of q
        [B, H, T, d]: float32 [B, num_keys]. It is what is stored: whoever computes the rows at hand adds to it."""
        sums, num_old = promote_to_float32(q.new_zeros(len(q), num_keys)), num_keys - q.shape[2]
        if num_old:
            stored = self._row_sums[layer_index]
            sums[:, :num_old] = stored[:, stored.shape[1] - num_old :]
        self._row_sums[layer_index] = sums
        return sums

    def repeat(self, count: int) -> "KVCache":
        """A cache of as many sequences that all begin with the one that this has read; this one stays as it is."""
        repeated = KVCache(self.capacity, {layer: own.kept for layer, own in self._layers.items()}, self.sampled)
        repeated.length = self.length
        repeated.tokens = None if self.tokens is None else self.tokens.expand(count, -1)
        for layer, own in self._layers.items():
            repeated._layers[layer] = own.repeat(count)
        repeated._queries = {layer: q.repeat(count, 1, 1, 1) for layer, q in self._queries.items()}
        repeated._row_sums = {layer: sums.repeat(count, 1) for layer, sums in self._row_sums.items()}
        return repeated

    def count_bytes(self) -> int:
        """Of all that is held, room for more among it."""
        others = (*self._queries.values(), *self._row_sums.values())
        return sum(layer.count_bytes() for layer in self._layers.values()) + sum(
            x.numel() * x.element_size() for x in others
        )


class LayerCache:
    """Keys, values and gates of one layer, in the order of their tokens.

    With a window there is room for `kept` of them and some more: when that is full, the last `kept` move to its front.

    Args:
        capacity: tokens of the longest sequence.
        kept: see `KVCache`.
    """

    def __init__(self, capacity: int, kept: int | None) -> None:
        room = capacity if kept is None else kept + WINDOW_SLACK
        self.kept = None if room >= capacity else kept
        self.capacity = min(capacity, room)
        self.first = 0
        """The token whose key is the first."""
        self._stored: tuple[Tensor, ...] | None = None

    def extend(self, new: tuple[Tensor | None, ...], past: int) -> tuple[tuple[Any, ...], int]:
        """Store what there is of tokens past, past + 1, …, each [B, H, T] or [B, H, T, d].

        Returns:
            The same of all tokens so far on which these rows may depend, and the number of tokens before them.
        """
        given = tuple(x for x in new if x is not None)
        found, first = self._extend(given, past)
        remaining = iter(found)
        return tuple(None if x is None else next(remaining) for x in new), first

    def _extend(self, new: tuple[Tensor, ...], past: int) -> tuple[tuple[Tensor, ...], int]:
        length = new[0].shape[2]
        if self.kept is not None and past + length - self.first > self.capacity:
            return self._drop_and_extend(new, past)
        stop = past + length - self.first
        if self._stored is None or self._stored[0].shape[2] < stop:
            self._stored = self._grow(new, past - self.first, stop)
        for buffer, x in zip(self._stored, new, strict=True):
            buffer[:, :, past - self.first : stop] = x
        return tuple(buffer[:, :, :stop] for buffer in self._stored), self.first

    def _drop_and_extend(self, new: tuple[Tensor, ...], past: int) -> tuple[tuple[Tensor, ...], int]:
        """The same without the tokens that no row from `past` on sees."""
        assert self.kept is not None
        first = max(past - self.kept, self.first)
        if self._stored is not None:
            new = tuple(
                torch.cat([old[:, :, first - self.first : past - self.first], x], dim=2)
                for old, x in zip(self._stored, new, strict=True)
            )
        self.first = max(first + new[0].shape[2] - self.kept, first)
        if self._stored is None or self._stored[0].shape[2] < self.capacity:
            self._stored = self._allocate(new, self.capacity)
        for buffer, x in zip(self._stored, new, strict=True):
            last = x[:, :, self.first - first :]
            buffer[:, :, : last.shape[2]] = last
        return new, first

    def _grow(self, new: tuple[Tensor, ...], length: int, needed: int) -> tuple[Tensor, ...]:
        """Room for what is needed and as much again, and never for more than `capacity`: a text may end sooner."""
        larger = self._allocate(new, min(self.capacity, max(2 * needed, MIN_CAPACITY)))
        if self._stored is not None:
            for buffer, old in zip(larger, self._stored, strict=True):
                buffer[:, :, :length] = old[:, :, :length]
        return larger

    @staticmethod
    def _allocate(new: tuple[Tensor, ...], size: int) -> tuple[Tensor, ...]:
        return tuple(x.new_zeros(*x.shape[:2], size, *x.shape[3:]) for x in new)

    def repeat(self, count: int) -> "LayerCache":
        """The same of as many sequences, with room for all that fits."""
        repeated = copy(self)
        if self._stored is not None:
            repeated._stored = tuple(x.new_zeros(count, x.shape[1], self.capacity, *x.shape[3:]) for x in self._stored)
            for buffer, x in zip(repeated._stored, self._stored, strict=True):
                buffer[:, :, : x.shape[2]] = x
        return repeated

    def count_bytes(self) -> int:
        """Of all buffers."""
        return sum(x.numel() * x.element_size() for x in self._stored or ())
