"""Small instances of every method and processor in the registry, so that the laws also cover new ones."""

from dataclasses import replace
from itertools import cycle, product

import torch
from models import disturb

from megatron.attention.inputs import AttentionInputs
from megatron.attention.reference import compute_attention, sum_gates
from megatron.position import registry
from megatron.position.encoding import Encoding
from megatron.position.facts import AttentionDims
from megatron.position.processor import Processor
from megatron.position.token_range import ALL_HEADS, TokenRange

SHAPE = AttentionDims(num_heads=3, head_dim=8, hidden_size=24, train_length=16, max_length=16)
PROCESSED = ("none", "rotary", "kerple_log", "fire", "cope", "fox")
"""Encodings combined with every processor, one of each kind: no bias, rotation, table, matrix, contextual terms, and
gate. The others are combined only with CDAPE, which reads scores and bias like all processors."""
ALL = [
    (encoding, processor)
    for encoding, processor in product(registry.list_encodings(), ["none", *registry.list_processors()])
    if processor in ("none", "cdape") or encoding in PROCESSED
]
IN_TURN = list(zip(registry.list_encodings(), cycle(["none", *registry.list_processors()]), strict=False))
"""Every encoding once, with processors in rotation."""
COVERING = sorted(
    {
        *IN_TURN,
        *(pair for pair in ALL if pair[0] in ("kerple_log", "none")),
        *(("fox", "mta"), ("fox", "selective"), ("rotary", "mta")),
    }
)
"""Pairs for tests of whole models: also every processor with and without a bias, and gates and rotations with
processors that read earlier rows. The laws cover the results of each pair."""
RELATIVE = [pair for pair in ALL if registry.load_encoding_class(pair[0]).relative]
MAPPED = [pair for pair in ALL if not registry.load_encoding_class(pair[0]).overrides_hook("embed")]


def build(encoding: str, processor: str, shape: AttentionDims = SHAPE) -> tuple[Encoding, Processor | None]:
    """Build a new encoding and processor."""
    e = registry.build_encoding(encoding, shape)
    if processor == "none":
        return e, None
    p = registry.build_processor(processor, shape, has_bias=e.adds_bias)
    return e, disturb(p)


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
    """Compute attention of some rows directly from the contract.

    Args:
        q: queries of these rows, possibly with earlier rows, of which a processor gets those it reads.
    """
    gates = gate_of_keys(encoding, k, query)
    above = q.shape[2] - query.length
    more = TokenRange(query.start - above, q.shape[2], query.sampled)
    q, k = encoding.rotate(q, more), encoding.rotate_keys(k, key)
    rows = AttentionInputs(q, k, v, more, key, encoding, processor, window=window)
    own = replace(rows, q=q[:, :, above:], query=query, preceding_q=rows.select_preceding_rows(above), **gates)
    return compute_attention(own)


def reads_first_token(processor: str) -> bool:
    """Return True if a processor treats the first token of a sequence specially, so that absolute indices matter."""
    return processor != "none" and registry.load_processor_class(processor).overrides("row_terms")


def gate_of_keys(
    encoding: Encoding, k: torch.Tensor, query: TokenRange, heads: slice = ALL_HEADS
) -> dict[str, torch.Tensor]:
    """Return the bias of a gate computed from the keys [B, H, C, d] instead of the layer input, which has a similar
    size.

    It is empty for an encoding without a gate. Key columns end with the rows.
    """
    if not type(encoding).overrides_hook("gate"):
        return {}
    x = k.detach().transpose(1, 2).flatten(2)
    if x.shape[-1] != encoding.dims.hidden_size:
        x = torch.nn.functional.pad(x, (0, encoding.dims.hidden_size - x.shape[-1]))
    return dict(zip(("row_bias", "key_bias"), sum_gates(encoding.gate(x, heads), query.length), strict=True))


def inputs_of(q, k, v, query, key, encoding, processor=None, heads=ALL_HEADS, all_k=None, **options) -> AttentionInputs:
    """Return `AttentionInputs` with the bias of `gate_of_keys`; `all_k` are the keys of all heads if k is a rank's
    shard.
    """
    gates = gate_of_keys(encoding, k if all_k is None else all_k, query, ALL_HEADS if all_k is None else heads)
    return AttentionInputs(q, k, v, query, key, encoding, processor, heads=heads, **gates, **options)


def random_qkv(
    length: int, shape: AttentionDims = SHAPE, batch: int = 2, dtype=torch.float32
) -> tuple[torch.Tensor, ...]:
    """Return random queries, keys and values [B, H, T, d], with scores of order one."""
    size = (3, batch, shape.num_heads, length, shape.head_dim)
    return tuple(torch.randn(size).to(dtype))
