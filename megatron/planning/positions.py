"""What each position encoding and score processor adds to a model's memory.

A table and no question to the methods themselves, because those import torch. A test builds every method that there is
and compares it with its row, so that a new one cannot be forgotten.

H heads, D hidden size, d head dimension.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.errors import UserError
from megatron.options.model import ModelOptions, PositionOptions

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Encoding:
    """What an encoding has, and what it makes autograd keep."""

    parameters: Callable[[ModelOptions, Options], int] = lambda model, options: 0
    fused: bool = False
    """Nothing is added to the scores, so that PyTorch's fused attention can do it."""
    bias: bool = False
    """A bias is added to the scores."""
    rotates: bool = False
    """Queries and keys are copied."""
    embeds: bool = False
    """It adds to the token embeddings, and does nothing else: the first pipeline stage alone holds it."""
    tables: int = 0
    """float32 tables [H, N] over the distances that are kept for the backward pass, per layer."""
    weight: bool = False
    """The scores are multiplied by a matrix [H, R, C], which are both kept in the compute type."""
    per_head: int = 0
    """Further bytes kept per score of each sequence and head (CoPE's places among the visible keys)."""
    copies: int = 0
    """Further maps in the compute type that are kept per sequence and head."""
    per_score: Callable[[Options], int] = lambda options: 0
    """Further bytes kept per score, once for all sequences and heads."""
    products: Callable[[Options, float], float] = lambda options, scores: 0.0
    """Further products of d numbers per token and head in the forward pass, of a token that sees `scores` keys."""


def _of_heads(count: int) -> Callable[[ModelOptions, Options], int]:
    return lambda model, options: count * model.num_attention_heads


def _fire(model: ModelOptions, options: Options) -> int:
    width = options.get("width", 32)
    return 2 + 2 * width + (width + 1) * model.num_attention_heads  # c, multiplier, and the two layers


def _fire_bytes(options: Options) -> int:
    # Hidden values of the network in float32 (a smooth activation keeps its input too), and four maps of its input.
    return 4 * options.get("width", 32) * (1 if options.get("activation", "relu") == "relu" else 2) + 16


def _cope_positions(options: Options) -> int:
    return int(options.get("positions", 64))


def _cope(model: ModelOptions, options: Options) -> int:
    return _cope_positions(options) * model.hidden_size // model.num_attention_heads


def _t5(model: ModelOptions, options: Options) -> int:
    return int(options.get("num_buckets", 32)) * model.num_attention_heads


def _learned(model: ModelOptions, options: Options) -> int:
    return (model.max_position_embeddings or model.seq_length) * model.hidden_size


def _transformer_xl(model: ModelOptions, options: Options) -> int:
    return model.hidden_size**2 + 2 * model.hidden_size


_TABLE = Encoding(bias=True)
ENCODINGS: dict[str, Encoding] = {
    "none": Encoding(fused=True),
    "rotary": Encoding(fused=True, rotates=True),
    "learned": Encoding(_learned, fused=True, embeds=True),
    "sinusoidal": Encoding(fused=True, embeds=True),
    **dict.fromkeys(("alibi", "inverse", "inverse_nlogn", "sandwich", "type1", "type2"), _TABLE),
    "t5": Encoding(_t5, bias=True),
    "kerple_log": Encoding(_of_heads(2), bias=True, tables=2),
    "kerple_log3": Encoding(_of_heads(3), bias=True, tables=4),
    "kerple_power": Encoding(_of_heads(2), bias=True, tables=2),
    "gaussian_bias2": Encoding(_of_heads(2), bias=True, tables=1),
    "gaussian_bias3": Encoding(_of_heads(3), bias=True, tables=3),
    "gaussian_weight1": Encoding(_of_heads(1), weight=True, tables=1),
    "gaussian_weight2": Encoding(_of_heads(2), weight=True, tables=3),
    "kerple_bias_weight": Encoding(_of_heads(4), bias=True, weight=True, tables=5),
    "fire": Encoding(_fire, bias=True, per_score=_fire_bytes),
    "cope": Encoding(_cope, per_head=32, products=lambda options, scores: _cope_positions(options)),
    "transformer_xl": Encoding(
        _transformer_xl, copies=1, per_score=lambda options: 8, products=lambda options, scores: scores
    ),
}


@dataclass(frozen=True)
class Processor:
    """A processor of two convolutions along the keys (dape's have size 1)."""

    width: int
    kernel_size: int

    @property
    def reach(self) -> int:
        """Columns on either side that a convolution reads."""
        return self.kernel_size // 2

    def flops(self, heads: int) -> float:
        """Of its two convolutions in the forward pass, per score of all heads; those of a bias are shared by all
        sequences and not counted."""
        return 4.0 * self.kernel_size * heads * self.width

    def parameters(self, heads: int, *, bias: bool) -> int:
        """Of one layer; a bias doubles the first convolution's inputs."""
        hidden = self.width * heads * (2 if bias else 1) * self.kernel_size + self.width
        return hidden + heads * self.width * self.kernel_size + heads


KERNELS = {"cdape": 3, "dape": 1}
"""The kernel size of each processor, where no option says another."""


def encoding(position: PositionOptions) -> Encoding:
    """The encoding's row of the table.

    Raises:
        UserError: it has none.
    """
    if position.pos_emb not in ENCODINGS:
        raise UserError(f"the memory of pos_emb {position.pos_emb} is not known: megatron/planning/positions.py")
    return ENCODINGS[position.pos_emb]


def processor(position: PositionOptions) -> Processor | None:
    """The processor, if there is one.

    Raises:
        UserError: nothing is known of it.
    """
    name, options = position.score_processor, position.score_processor_options
    if name == "none":
        return None
    if name not in KERNELS:
        raise UserError(f"the memory of score_processor {name} is not known: megatron/planning/positions.py")
    return Processor(options.get("width", 32), options.get("kernel_size", KERNELS[name]))


def encoding_parameters(model: ModelOptions, position: PositionOptions) -> int:
    """Parameters of one encoding, which all layers share or every layer has."""
    return encoding(position).parameters(model, position.pos_emb_options)


def processor_parameters(model: ModelOptions, position: PositionOptions) -> int:
    """Parameters of one layer's processor."""
    found = processor(position)
    return 0 if found is None else found.parameters(model.num_attention_heads, bias=encoding(position).bias)
