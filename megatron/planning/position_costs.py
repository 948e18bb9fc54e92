"""What a configuration's position encoding and score processor add to a model's parameters, memory and FLOPs.

Their files declare it (`megatron/position/facts.py`), and it is read without importing them. A test builds every method
that there is and compares.
"""

from dataclasses import dataclass

from megatron.model.position_modules import build_attention_dims
from megatron.options.model import ModelOptions, PositionOptions
from megatron.position.catalog import (
    MethodFacts,
    MethodFileError,
    format_path,
    list_encodings,
    list_processors,
    read_encoding_facts,
    read_processor_facts,
)
from megatron.position.facts import EncodingCost, MethodOptions, ProcessorCost
from megatron.utils.errors import UserError


@dataclass(frozen=True)
class PlannedEncoding:
    """An encoding with its options, as far as planning knows it."""

    facts: MethodFacts
    cost: EncodingCost
    options: MethodOptions

    @property
    def supports_sdpa(self) -> bool:
        """Nothing is added to the scores, so that PyTorch's fused attention can do it."""
        return not self.facts.changes_scores


@dataclass(frozen=True)
class PlannedProcessor:
    """A processor of two convolutions along the keys."""

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


def plan_encoding(position: PositionOptions) -> PlannedEncoding:
    """The encoding of a configuration.

    Raises:
        UserError: its file does not declare what it costs.
    """
    name = position.pos_emb
    try:
        facts = read_encoding_facts(name) if name in list_encodings() else None
    except MethodFileError as error:
        raise UserError(f"pos_emb: {error}", "pos_emb") from error
    if facts is None or not isinstance(facts.cost, EncodingCost) or facts.defaults is None:
        where = "no such encoding" if facts is None else f"{format_path(facts.path)} declares no cost"
        raise UserError(f"the memory of pos_emb {name} is not known: {where}")
    return PlannedEncoding(facts, facts.cost, facts.fill_options(position.pos_emb_options))


def plan_processor(position: PositionOptions) -> PlannedProcessor | None:
    """The processor of a configuration, if there is one.

    Raises:
        UserError: its file does not declare what it costs.
    """
    name = position.score_processor
    if name == "none":
        return None
    try:
        facts = read_processor_facts(name) if name in list_processors() else None
    except MethodFileError as error:
        raise UserError(f"score_processor: {error}", "score_processor") from error
    if facts is None or not isinstance(facts.cost, ProcessorCost) or facts.defaults is None:
        where = "no such processor" if facts is None else f"{format_path(facts.path)} declares no cost"
        raise UserError(f"the memory of score_processor {name} is not known: {where}")
    options = facts.fill_options(position.score_processor_options)
    return PlannedProcessor(facts.cost.width(options), facts.cost.kernel_size(options))


def count_encoding_parameters(model: ModelOptions, position: PositionOptions) -> int:
    """Parameters of one encoding, which all layers share or every layer has."""
    encoding = plan_encoding(position)
    return encoding.cost.num_parameters(build_attention_dims(model), encoding.options)


def count_processor_parameters(model: ModelOptions, position: PositionOptions) -> int:
    """Parameters of one layer's processor."""
    processor = plan_processor(position)
    if processor is None:
        return 0
    return processor.count_parameters(model.num_attention_heads, has_bias=plan_encoding(position).facts.adds_bias)
