"""Every method and processor of the registry, built small. A new one is covered by the laws without editing a test."""

from itertools import product

import torch

from megatron.attention.inputs import AttentionInputs
from megatron.attention.reference import compute_attention
from megatron.position import registry
from megatron.position.encoding import Encoding
from megatron.position.facts import AttentionDims
from megatron.position.processor import Processor
from megatron.position.token_range import TokenRange

SHAPE = AttentionDims(num_heads=3, head_dim=8, hidden_size=24, train_length=16, max_length=16)
ALL = list(product(registry.list_encodings(), ["none", *registry.list_processors()]))
RELATIVE = [pair for pair in ALL if registry.load_encoding_class(pair[0]).relative]
MAPPED = [pair for pair in ALL if not registry.load_encoding_class(pair[0]).overrides_hook("embed")]


def build(encoding: str, processor: str, shape: AttentionDims = SHAPE) -> tuple[Encoding, Processor | None]:
    """A fresh encoding and processor."""
    e = registry.build_encoding(encoding, shape)
    if processor == "none":
        return e, None
    return e, registry.build_processor(processor, shape, has_bias=e.adds_bias)


def output(
    q,
    k,
    v,
    query: TokenRange,
    key: TokenRange,
    encoding: Encoding,
    processor: Processor | None,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of some rows, straight from the contract."""
    q, k = encoding.rotate(q, query), encoding.rotate(k, key)
    return compute_attention(AttentionInputs(q, k, v, query, key, encoding, processor, window=window))


def random_qkv(
    length: int, shape: AttentionDims = SHAPE, batch: int = 2, dtype=torch.float32
) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values [B, H, T, d], scores of order one."""
    size = (3, batch, shape.num_heads, length, shape.head_dim)
    return tuple(torch.randn(size).to(dtype))
