"""Cache for decoding: keys, values and gates of the tokens read so far, in every layer.

B batch, H heads, T new tokens, d head dimension.
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
"""Initial number of tokens that a cache allocates, unless its capacity is smaller."""

WINDOW_SLACK = 256
"""Number of tokens that a layer with a window allocates beyond the window. The layer moves its window once per this
many tokens.
"""


class KVCache:
    """Keys, values and gates of a batch's tokens in every layer, so that decoding computes each of them once.

    Use it without gradients. The gates themselves are stored instead of their sums, because sums restart when keys are
    dropped.

        cache = gpt.create_kv_cache(length)          room for `length` tokens
        gpt(prompt, kv_cache=cache)               all its tokens at once, or in chunks
        gpt(token, kv_cache=cache)                one token at a time

    A decoding step runs the same code as a full forward pass, with query rows that start at a later index. Keys are
    stored after rotation by their own positions, which never change. A layer with a window stores only the keys that
    later rows can see. If a processor reads rows above, a layer also stores the last queries, or for each key a sum
    over the rows.

    Args:
        capacity: maximum number of tokens.
        kept: number of preceding keys on which a row may depend, by layer index; None for all.
        sampled: positions of all tokens if they are randomized.
    """

    def __init__(self, capacity: int, kept: Mapping[int, int | None], sampled: SampledPositions | None = None) -> None:
        self.capacity, self.sampled = capacity, sampled
        self.length = 0
        """Number of tokens read so far."""
        self.tokens: Tensor | None = None
        """The tokens read so far, int64 [B, tokens] on the CPU, if the model detects documents in them."""
        self._layers = {layer: LayerCache(capacity, number) for layer, number in kept.items()}
        self._queries: dict[int, Tensor] = {}
        self._row_sums: dict[int, Tensor] = {}

    def check_capacity(self, tokens: int) -> None:
        """Check that new tokens fit and that gradients are off, because writes in place would corrupt them."""
        if self.length + tokens > self.capacity:
            raise UserError(
                f"the cache has room for {self.capacity} tokens; {self.length} are in it and {tokens} more do not fit"
            )
        if torch.is_grad_enabled():
            raise RuntimeError("a cache is for inference: use it under torch.no_grad() or torch.inference_mode()")

    def extend(self, layer_index: int, *new: Tensor | None) -> tuple[tuple[Any, ...], int]:
        """Store a layer's keys and values [B, H, T, d] and gates [B, H, T] of the new tokens (`LayerCache.extend`)."""
        return self._layers[layer_index].extend(new, self.length)

    def extend_queries(self, layer_index: int, q: Tensor, preceding_rows: int) -> Tensor:
        """Return the queries [B, H, T, d] of the new tokens, preceded by earlier ones, and store them.

        The earlier queries are those of the last `preceding_rows` tokens.
        """
        stored = self._queries.get(layer_index)
        q = q if stored is None else torch.cat([stored, q], dim=2)
        self._queries[layer_index] = q[:, :, max(q.shape[2] - preceding_rows, 0) :].clone()
        return q

    def extend_row_sums(self, layer_index: int, q: Tensor, num_keys: int) -> Tensor:
        """Return sums float32 [B, num_keys] over the rows before q [B, H, T, d].

        There is one sum for each of the last `num_keys` tokens.

        The result is the stored tensor itself: the caller adds the new rows to it.
        """
        sums, num_old = promote_to_float32(q.new_zeros(len(q), num_keys)), num_keys - q.shape[2]
        if num_old:
            stored = self._row_sums[layer_index]
            sums[:, :num_old] = stored[:, stored.shape[1] - num_old :]
        self._row_sums[layer_index] = sums
        return sums

    def repeat(self, count: int) -> "KVCache":
        """Return a cache of `count` sequences that all start with this cache's single sequence.

        This cache is unchanged.
        """
        repeated = KVCache(self.capacity, {layer: own.kept for layer, own in self._layers.items()}, self.sampled)
        repeated.length = self.length
        repeated.tokens = None if self.tokens is None else self.tokens.expand(count, -1)
        for layer, own in self._layers.items():
            repeated._layers[layer] = own.repeat(count)
        repeated._queries = {layer: q.repeat(count, 1, 1, 1) for layer, q in self._queries.items()}
        repeated._row_sums = {layer: sums.repeat(count, 1) for layer, sums in self._row_sums.items()}
        return repeated

    def count_bytes(self) -> int:
        """Return the bytes of all buffers, including unused capacity."""
        others = (*self._queries.values(), *self._row_sums.values())
        return sum(layer.count_bytes() for layer in self._layers.values()) + sum(
            x.numel() * x.element_size() for x in others
        )


class LayerCache:
    """Keys, values and gates of one layer, in the order of their tokens.

    With a window there is room for `kept` tokens and some more. When it is full, the last `kept` move to the front.

    Args:
        capacity: number of tokens of the longest sequence.
        kept: see `KVCache`.
    """

    def __init__(self, capacity: int, kept: int | None) -> None:
        room = capacity if kept is None else kept + WINDOW_SLACK
        self.kept = None if room >= capacity else kept
        self.capacity = min(capacity, room)
        self.first = 0
        """Index of the token whose key is stored first."""
        self._stored: tuple[Tensor, ...] | None = None

    def extend(self, new: tuple[Tensor | None, ...], past: int) -> tuple[tuple[Any, ...], int]:
        """Store tensors [B, H, T] or [B, H, T, d] of the tokens past, past + 1, …; None entries are skipped.

        Returns:
            The tensors of all tokens so far on which these rows may depend, and the number of tokens before them.
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
        """Extend the buffers, dropping the tokens that no row from `past` on sees."""
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
        """Allocate twice the needed size, at most `capacity`, because a text may end early. Copy the stored tokens."""
        larger = self._allocate(new, min(self.capacity, max(2 * needed, MIN_CAPACITY)))
        if self._stored is not None:
            for buffer, old in zip(larger, self._stored, strict=True):
                buffer[:, :, :length] = old[:, :, :length]
        return larger

    @staticmethod
    def _allocate(new: tuple[Tensor, ...], size: int) -> tuple[Tensor, ...]:
        return tuple(x.new_zeros(*x.shape[:2], size, *x.shape[3:]) for x in new)

    def repeat(self, count: int) -> "LayerCache":
        """Return a copy for `count` sequences, with full capacity."""
        repeated = copy(self)
        if self._stored is not None:
            repeated._stored = tuple(x.new_zeros(count, x.shape[1], self.capacity, *x.shape[3:]) for x in self._stored)
            for buffer, x in zip(repeated._stored, self._stored, strict=True):
                buffer[:, :, : x.shape[2]] = x
        return repeated

    def count_bytes(self) -> int:
        """Return the bytes of all buffers."""
        return sum(x.numel() * x.element_size() for x in self._stored or ())
