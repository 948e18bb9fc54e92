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

MethodOptions = Mapping[str, Any]


@dataclass(frozen=True)
class EncodingCost:
    """What an encoding has, and what it makes autograd keep."""

    count_parameters: Callable[[ModelOptions, MethodOptions], int] = lambda model, options: 0
    supports_sdpa: bool = False
    """Nothing is added to the scores, so that PyTorch's fused attention can do it."""
    has_bias: bool = False
    """A bias is added to the scores."""
    rotates_qk: bool = False
    """Queries and keys are copied."""
    only_adds_embeddings: bool = False
    """It adds to the token embeddings, and does nothing else: the first pipeline stage alone holds it."""
    num_saved_tables: int = 0
    """float32 tables [H, N] over the distances that are kept for the backward pass, per layer."""
    has_weight: bool = False
    """The scores are multiplied by a matrix [H, R, C], which are both kept in the compute type."""
    saved_bytes_per_head_score: int = 0
    """Further bytes kept per score of each sequence and head (CoPE's places among the visible keys)."""
    num_saved_maps: int = 0
    """Further maps in the compute type that are kept per sequence and head."""
    saved_bytes_per_score: Callable[[MethodOptions], int] = lambda options: 0
    """Further bytes kept per score, once for all sequences and heads."""
    count_products: Callable[[MethodOptions, float], float] = lambda options, scores: 0.0
    """Further products of d numbers per token and head in the forward pass, of a token that sees `scores` keys."""


def _parameters_per_head(num_parameters: int) -> Callable[[ModelOptions, MethodOptions], int]:
    return lambda model, options: num_parameters * model.num_attention_heads


def _fire_parameters(model: ModelOptions, options: MethodOptions) -> int:
    width = options.get("width", 32)
    return 2 + 2 * width + (width + 1) * model.num_attention_heads  # c, multiplier, and the two layers


def _fire_bytes_per_score(options: MethodOptions) -> int:
    # Hidden values of the network in float32 (a smooth activation keeps its input too), and four maps of its input.
    return 4 * options.get("width", 32) * (1 if options.get("activation", "relu") == "relu" else 2) + 16


def _cope_num_positions(options: MethodOptions) -> int:
    return int(options.get("positions", 64))


def _cope_parameters(model: ModelOptions, options: MethodOptions) -> int:
    return _cope_num_positions(options) * model.hidden_size // model.num_attention_heads


def _t5_parameters(model: ModelOptions, options: MethodOptions) -> int:
    return int(options.get("num_buckets", 32)) * model.num_attention_heads


def _learned_parameters(model: ModelOptions, options: MethodOptions) -> int:
    return (model.max_position_embeddings or model.seq_length) * model.hidden_size


def _transformer_xl_parameters(model: ModelOptions, options: MethodOptions) -> int:
    return model.hidden_size**2 + 2 * model.hidden_size


_BIAS_ONLY = EncodingCost(has_bias=True)
ENCODING_COSTS: dict[str, EncodingCost] = {
    "none": EncodingCost(supports_sdpa=True),
    "rotary": EncodingCost(supports_sdpa=True, rotates_qk=True),
    "learned": EncodingCost(_learned_parameters, supports_sdpa=True, only_adds_embeddings=True),
    "sinusoidal": EncodingCost(supports_sdpa=True, only_adds_embeddings=True),
    **dict.fromkeys(("alibi", "inverse", "inverse_nlogn", "sandwich", "type1", "type2"), _BIAS_ONLY),
    "t5": EncodingCost(_t5_parameters, has_bias=True),
    "kerple_log": EncodingCost(_parameters_per_head(2), has_bias=True, num_saved_tables=2),
    "kerple_log3": EncodingCost(_parameters_per_head(3), has_bias=True, num_saved_tables=4),
    "kerple_power": EncodingCost(_parameters_per_head(2), has_bias=True, num_saved_tables=2),
    "gaussian_bias2": EncodingCost(_parameters_per_head(2), has_bias=True, num_saved_tables=1),
    "gaussian_bias3": EncodingCost(_parameters_per_head(3), has_bias=True, num_saved_tables=3),
    "gaussian_weight1": EncodingCost(_parameters_per_head(1), has_weight=True, num_saved_tables=1),
    "gaussian_weight2": EncodingCost(_parameters_per_head(2), has_weight=True, num_saved_tables=3),
    "kerple_bias_weight": EncodingCost(_parameters_per_head(4), has_bias=True, has_weight=True, num_saved_tables=5),
    "fire": EncodingCost(_fire_parameters, has_bias=True, saved_bytes_per_score=_fire_bytes_per_score),
    "cope": EncodingCost(
        _cope_parameters,
        saved_bytes_per_head_score=32,
        count_products=lambda options, scores: _cope_num_positions(options),
    ),
    "transformer_xl": EncodingCost(
        _transformer_xl_parameters,
        num_saved_maps=1,
        saved_bytes_per_score=lambda options: 8,
        count_products=lambda options, scores: scores,
    ),
}


@dataclass(frozen=True)
class ProcessorCost:
    """A processor of two convolutions along the keys (dape's have size 1)."""

    width: int
    kernel_size: int

    @property
    def kernel_radius(self) -> int:
        """Columns on either side that a convolution reads."""
        return self.kernel_size // 2

    def flops_per_score(self, num_heads: int) -> float:
        """Of its two convolutions in the forward pass, per score of all heads; those of a bias are shared by all
        sequences and not counted."""
        return 4.0 * self.kernel_size * num_heads * self.width

    def count_parameters(self, num_heads: int, *, has_bias: bool) -> int:
        """Of one layer; a bias doubles the first convolution's inputs."""
        hidden = self.width * num_heads * (2 if has_bias else 1) * self.kernel_size + self.width
        return hidden + num_heads * self.width * self.kernel_size + num_heads


DEFAULT_KERNEL_SIZES = {"cdape": 3, "dape": 1}
"""The kernel size of each processor, where no option says another."""


def get_encoding_cost(position: PositionOptions) -> EncodingCost:
    """The encoding's row of the table.

    Raises:
        UserError: it has none.
    """
    if position.pos_emb not in ENCODING_COSTS:
        raise UserError(f"the memory of pos_emb {position.pos_emb} is not known: megatron/planning/position_costs.py")
    return ENCODING_COSTS[position.pos_emb]


def get_processor_cost(position: PositionOptions) -> ProcessorCost | None:
    """The processor, if there is one.

    Raises:
        UserError: nothing is known of it.
    """
    name, options = position.score_processor, position.score_processor_options
    if name == "none":
        return None
    if name not in DEFAULT_KERNEL_SIZES:
        raise UserError(f"the memory of score_processor {name} is not known: megatron/planning/position_costs.py")
    return ProcessorCost(options.get("width", 32), options.get("kernel_size", DEFAULT_KERNEL_SIZES[name]))


def count_encoding_parameters(model: ModelOptions, position: PositionOptions) -> int:
    """Parameters of one encoding, which all layers share or every layer has."""
    return get_encoding_cost(position).count_parameters(model, position.pos_emb_options)


def count_processor_parameters(model: ModelOptions, position: PositionOptions) -> int:
    """Parameters of one layer's processor."""
    processor_cost = get_processor_cost(position)
    return (
        0
        if processor_cost is None
        else processor_cost.count_parameters(model.num_attention_heads, has_bias=get_encoding_cost(position).has_bias)
    )
