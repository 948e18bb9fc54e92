"""What a configuration's model costs: its parameters, its floating-point operations, and what of both the position
encoding and the score processor add.

What a method adds its file declares (`megatron/position/facts.py`), and it is read without importing it. A test builds
every method that there is and compares. FLOPs are those that a run reports as TFLOP/s and MFU
(`GPT.flops_per_token`; a test compares the two): a product of matrices counts 2 per multiply-add, the backward pass
twice the forward pass, and scores only where a token may see another. What is computed again in the backward pass is no
part of it, because it brings a run no further.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from megatron.config.schema import Config
from megatron.distributed.mesh import Axis, ParallelSizes, pipeline_layer_range
from megatron.model.position_modules import build_attention_dims, list_layer_positions
from megatron.options.model import (
    GATED_ACTIVATIONS,
    ModelOptions,
    ffn_hidden_size,
    has_qkv_bias,
    head_dim,
    kv_hidden_size,
    list_norm_parts,
    output_gate_size,
    padded_vocab_size,
    q_hidden_size,
    qk_norm,
)
from megatron.options.position import PositionOptions
from megatron.position.catalog import (
    MethodFacts,
    MethodFileError,
    format_path,
    list_encodings,
    list_processors,
    list_temperatures,
    read_encoding_facts,
    read_processor_facts,
    read_temperature_facts,
)
from megatron.position.facts import AttentionDims, EncodingCost, MethodOptions, ProcessorCost, TemperatureCost
from megatron.utils.errors import UserError


@dataclass(frozen=True)
class PlannedEncoding:
    """An encoding with its options, as far as planning knows it."""

    facts: MethodFacts
    cost: EncodingCost
    options: MethodOptions

    def count_qk_numbers(self) -> int:
        """Numbers of a rotated query or key for each of the head's dimensions."""
        return self.cost.count_qk_numbers(self.options)


@dataclass(frozen=True)
class PlannedProcessor:
    """A processor with its options, as far as planning knows it."""

    facts: MethodFacts
    cost: ProcessorCost
    options: MethodOptions

    @property
    def width(self) -> int:
        """Channels between two convolutions."""
        return self.cost.width(self.options)

    @property
    def left_context(self) -> int:
        """Columns left of a row's first visible one that it reads."""
        return self.cost.left_context(self.options)

    @property
    def kernel_size(self) -> int:
        """Of two convolutions along the keys."""
        return 2 * self.left_context + 1

    @property
    def rows_above(self) -> int:
        """Rows above a row that it reads."""
        return self.cost.rows_above(self.options)

    @property
    def num_head_maps(self) -> int:
        """float32 maps that are kept for each head."""
        return self.cost.num_head_maps(self.options)

    @property
    def num_sequence_maps(self) -> int:
        """float32 maps that are kept for all heads together."""
        return self.cost.num_sequence_maps(self.options)

    @property
    def changes_weights(self) -> bool:
        """Are the weights others than those of the softmax?"""
        return self.cost.changes_weights(self.options)

    def flops_per_score(self, dims: AttentionDims) -> float:
        """In the forward pass, per score of all heads; those of a bias are shared by all sequences and not counted."""
        return 2.0 * self.cost.num_products(dims, self.options)

    def count_parameters(self, dims: AttentionDims, *, has_bias: bool) -> int:
        """Of one layer."""
        return self.cost.num_parameters(dims, self.options, has_bias)


def count_layer_kinds(config: Config, pipeline_stage: Axis | None = None) -> list[tuple[Config, int]]:
    """The different layers of a model, or of a pipeline stage, in the order of their first ones: of each the
    configuration of a model all of whose layers are like it, and how many there are.

    Without patterns it is `config` itself. Of a million layers no more are looked at than until the patterns repeat.
    """
    position, num_layers = config.position, config.model.num_layers
    layers = range(num_layers) if pipeline_stage is None else pipeline_layer_range(num_layers, pipeline_stage)
    if not position.list_patterns():
        return [(config, len(layers))]
    period = min(position.period, num_layers)
    positions = list_layer_positions(position, period)
    counts: dict[int, int] = {}
    for layer in layers[:period]:
        key = id(positions[layer % period])
        counts[key] = counts.get(key, 0) + len(range(layer, layers.stop, period))
    kinds = {id(own): own for own in positions}
    return [(config.model_copy(update={"position": kinds[key]}), count) for key, count in counts.items()]


def list_distinct_pipeline_stages(config: Config, num_stages: int) -> list[int]:
    """The numbers of the pipeline stages that a maximum over all stages has to look at: the first, the last, and of
    those in between that have the same layers only the earliest. The later ones need no more memory or time, because
    they have at most as many micro-batches in flight."""
    period = config.position.period
    earliest: dict[tuple[Any, ...], int] = {}
    for stage in range(num_stages):
        layers = pipeline_layer_range(config.model.num_layers, Axis(stage, num_stages))
        earliest.setdefault((stage == 0, stage == num_stages - 1, layers.start % period, len(layers)), stage)
    return list(earliest.values())


def plan_encoding(position: PositionOptions) -> PlannedEncoding:
    """The encoding of a layer. Raises UserError if its file does not declare what it costs."""
    facts = _read_facts("pos_emb", position.encoding, list_encodings, read_encoding_facts, EncodingCost)
    assert isinstance(facts.cost, EncodingCost)
    return PlannedEncoding(facts, facts.cost, facts.fill_options(position.pos_emb_options))


def plan_processor(position: PositionOptions) -> PlannedProcessor | None:
    """The processor of a layer, None if it has none. Raises UserError as `plan_encoding`."""
    if position.processor == "none":
        return None
    facts = _read_facts("score_processor", position.processor, list_processors, read_processor_facts, ProcessorCost)
    assert isinstance(facts.cost, ProcessorCost)
    options = facts.fill_options(position.score_processor_options)
    return PlannedProcessor(facts, facts.cost, options)


def _read_facts(
    key: str,
    name: str,
    list_methods: Callable[[], list[str]],
    read_facts: Callable[[str], MethodFacts],
    cost_type: type,
) -> MethodFacts:
    """What the file of a method declares, its cost among it."""
    try:
        facts = read_facts(name)
    except MethodFileError as error:
        if name not in list_methods():
            kind = {"pos_emb": "encoding", "score_processor": "processor"}.get(key, "temperature")
            raise UserError(f"the memory of {key} {name} is not known: no such {kind}") from error
        raise UserError(f"{key}: {error}", key) from error
    if not isinstance(facts.cost, cost_type) or facts.defaults is None:
        raise UserError(f"the memory of {key} {name} is not known: {format_path(facts.path)} declares no cost")
    return facts


def count_encoding_parameters(model: ModelOptions, position: PositionOptions) -> int:
    """Parameters of one encoding, which all layers share or every layer has."""
    encoding = plan_encoding(position)
    return encoding.cost.num_parameters(build_attention_dims(model), encoding.options)


def count_processor_parameters(model: ModelOptions, position: PositionOptions) -> int:
    """Parameters of one layer's processor."""
    processor = plan_processor(position)
    if processor is None:
        return 0
    return processor.count_parameters(build_attention_dims(model), has_bias=plan_encoding(position).facts.adds_bias)


def count_temperature_parameters(model: ModelOptions, position: PositionOptions) -> int:
    """Parameters of one layer's temperature. Raises UserError as `plan_encoding`."""
    key, name = "attention_temperature", position.temperature
    if name == "none":
        return 0
    facts = _read_facts(key, name, list_temperatures, read_temperature_facts, TemperatureCost)
    assert isinstance(facts.cost, TemperatureCost)
    options = facts.fill_options(position.attention_temperature_options)
    return facts.cost.num_parameters(build_attention_dims(model), options)


Shapes = tuple[tuple[int, int], ...]
"""[rows, columns] of matrices."""


def list_layer_weights(model: ModelOptions) -> tuple[Shapes, ...]:
    """The matrices in each weight of one layer, in the order of its parameters: attention's output; queries, keys and
    values; gates of attention's output, if it has them; the feed-forward layer's first, of which a gated one has two;
    its second."""
    size, q_size, kv_size = model.hidden_size, q_hidden_size(model), kv_hidden_size(model)
    inner = ffn_hidden_size(model)
    num_inner = 2 if model.activation in GATED_ACTIVATIONS else 1
    gates = output_gate_size(model)
    return (
        ((size, q_size),),
        ((q_size, size), (kv_size, size), (kv_size, size)),
        *((((gates, size),),) if gates else ()),
        ((inner, size),) * num_inner,
        ((size, inner),),
    )


def list_layer_matrices(model: ModelOptions) -> tuple[int, ...]:
    """Elements of each of these weights."""
    return tuple(sum(rows * columns for rows, columns in shapes) for shapes in list_layer_weights(model))


def count_layer_norms(model: ModelOptions) -> int:
    """Of a layer, those of queries and keys not counted."""
    if model.gpt_j_residual and model.gpt_j_tied:
        return 1
    return 4 if model.norm_placement == "sandwich" else 2


def count_layer_parameters(config: Config, tensor_parallel_size: int) -> int:
    """Parameters of one layer on one rank of a tensor-parallel group: matrices are divided, and what is added after
    their sum is not.

    config: all of whose layers are alike (`count_layer_kinds`).
    """
    model, position = config.model, config.position
    hidden_size, ffn_size = model.hidden_size, ffn_hidden_size(model)
    fc1_size = ffn_size * (2 if model.activation in GATED_ACTIVATIONS else 1)
    norm_parameters = hidden_size * len(list_norm_parts(model, model.norm))
    total_norm_parameters = norm_parameters * count_layer_norms(model)
    qkv_size = q_hidden_size(model) + 2 * kv_hidden_size(model)
    matrices = sum(list_layer_matrices(model))
    sharded_biases = (qkv_size if has_qkv_bias(model) else 0) + (fc1_size if model.use_bias_in_mlp else 0)
    qk_norm_vectors = len(list_norm_parts(model, qk_norm(model)))
    if model.qk_layernorm_over_heads:
        sharded_biases += qk_norm_vectors * (q_hidden_size(model) + kv_hidden_size(model))
    else:
        total_norm_parameters += qk_norm_vectors * 2 * head_dim(model)
    replicated_biases = (hidden_size if model.use_bias_in_attn_linear else 0) + (
        hidden_size if model.use_bias_in_mlp else 0
    )
    own_encoding_parameters = count_encoding_parameters(model, position) if position.pos_emb_per_layer else 0
    return (
        (matrices + sharded_biases) // tensor_parallel_size
        + replicated_biases
        + total_norm_parameters
        + own_encoding_parameters
        + count_processor_parameters(model, position)
        + count_temperature_parameters(model, position)
        + (model.num_attention_heads if position.softmax == "learnable" else 0)
    )


def count_rank_parameters(config: Config, sizes: ParallelSizes, vocab_size: int, pipeline_stage: int = 0) -> int:
    """Parameters that a rank of a pipeline stage holds, before ZeRO divides them further.

    A tied embedding is held by the first stage and the last, and an encoding that all layers share by all stages,
    unless it only adds to the embeddings.
    """
    model, position = config.model, config.position
    is_first, is_last = pipeline_stage == 0, pipeline_stage == sizes.pipeline - 1
    embedding_parameters = padded_vocab_size(model, vocab_size) * model.hidden_size // sizes.tensor
    stage = Axis(pipeline_stage, sizes.pipeline)
    count = sum(
        num_layers * count_layer_parameters(own, sizes.tensor) for own, num_layers in count_layer_kinds(config, stage)
    )
    # Every stage has all encodings that layers share, those of other stages' layers too.
    shared = {} if position.pos_emb_per_layer else {own.position.encoding: own for own, _ in count_layer_kinds(config)}
    for own in shared.values():
        if is_first or not plan_encoding(own.position).facts.only_adds_embeddings:
            count += count_encoding_parameters(model, own.position)
    if is_last:
        count += model.hidden_size * len(list_norm_parts(model, model.norm))
    is_tied = not model.no_weight_tying
    return count + embedding_parameters * ((is_first or (is_last and is_tied)) + (is_last and not is_tied))


def count_parameters(config: Config, vocab_size: int) -> int:
    """Parameters of the model, each counted once."""
    return count_rank_parameters(config, ParallelSizes(), vocab_size)


TRAINING_TO_FORWARD_RATIO = 3
"""Forward and backward pass, in forward passes."""


@dataclass(frozen=True)
class ForwardFlops:
    """Of the forward pass, per token."""

    linear: float
    """The linear layers of one layer."""
    attention: float
    """One layer's products of queries and keys, and of probabilities and values, with the encoding's own; the mean of
    layers that differ."""
    processor: float
    """One layer's processor; the mean of layers that differ."""
    output: float
    """The output layer, once."""
    num_layers: int

    @property
    def training_flops_per_token(self) -> float:
        """Forward and backward."""
        return TRAINING_TO_FORWARD_RATIO * (
            self.num_layers * (self.linear + self.attention + self.processor) + self.output
        )


def estimate_forward_flops(config: Config, vocab_size: int, pipeline_stage: Axis | None = None) -> ForwardFlops:
    """The FLOPs of a configuration's forward pass at its training length.

    pipeline_stage: whose layers are meant; all if None.
    """
    kinds = count_layer_kinds(config, pipeline_stage)
    each = [(_estimate_layer_flops(own, vocab_size), count) for own, count in kinds]
    (first, _), num_layers = each[0], sum(count for _, count in each)
    if len(each) == 1:
        return first
    return replace(
        first,
        attention=sum(count * flops.attention for flops, count in each) / num_layers,
        processor=sum(count * flops.processor for flops, count in each) / num_layers,
    )


def _estimate_layer_flops(config: Config, vocab_size: int) -> ForwardFlops:
    """The same of a model all of whose layers are alike."""
    model, position = config.model, config.position
    hidden_size, ffn_size, seq_length = model.hidden_size, ffn_hidden_size(model), model.seq_length
    fc1_size = ffn_size * (2 if model.activation in GATED_ACTIVATIONS else 1)
    max_keys = min(position.window or seq_length, seq_length)
    keys_per_token = (
        max_keys - max_keys * (max_keys - 1) / 2 / seq_length
    )  # keys that a token sees: the mean of min(i + 1, window)
    encoding, processor_cost = plan_encoding(position), plan_processor(position)
    return ForwardFlops(
        linear=2.0
        * hidden_size
        * (2 * q_hidden_size(model) + 2 * kv_hidden_size(model) + output_gate_size(model) + fc1_size + ffn_size),
        attention=q_hidden_size(model)
        * (
            2.0 * (1 + encoding.count_qk_numbers()) * keys_per_token
            + 2.0 * encoding.cost.num_products(encoding.options, keys_per_token)
        )
        + 2.0 * encoding.cost.num_input_products(build_attention_dims(model), encoding.options),
        processor=0.0
        if processor_cost is None
        else processor_cost.flops_per_score(build_attention_dims(model)) * keys_per_token,
        output=2.0 * padded_vocab_size(model, vocab_size) * hidden_size,
        num_layers=model.num_layers,
    )
