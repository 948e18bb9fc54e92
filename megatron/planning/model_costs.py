"""Costs of a model: parameters and floating-point operations, including the position encoding and score processor.

Each method declares its costs in its file (`megatron/position/facts.py`), which is read without importing it. A test
builds every method and compares. FLOPs are those that a run reports as TFLOP/s and MFU (a test compares them with
`GPT.count_flops_per_token`). A matrix product counts 2 per multiply-add, and the backward pass twice as much as the
forward pass; masked scores are not counted. Recomputation in the backward pass is not counted either, as usual for MFU.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from megatron.config.schema import Config
from megatron.distributed.mesh import Axis, ParallelSizes, get_pipeline_layer_range
from megatron.model.position_modules import build_attention_dims, list_layer_positions
from megatron.options.model import (
    GATED_ACTIVATIONS,
    ModelOptions,
    get_ffn_hidden_size,
    get_head_dim,
    get_kv_hidden_size,
    get_output_gate_size,
    get_padded_vocab_size,
    get_q_hidden_size,
    get_qk_norm,
    has_qkv_bias,
    list_norm_parameters,
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
    """Encoding with its options and declared costs."""

    facts: MethodFacts
    cost: EncodingCost
    options: MethodOptions

    def count_qk_numbers(self) -> int:
        """Return the length of a rotated query or key as a multiple of the head dimension."""
        return self.cost.count_qk_numbers(self.options)


@dataclass(frozen=True)
class PlannedProcessor:
    """Processor with its options and declared costs."""

    facts: MethodFacts
    cost: ProcessorCost
    options: MethodOptions
    width: int
    """Channels between the two convolutions."""
    left_context: int
    """Columns that it reads to the left of a row's first visible one."""
    preceding_rows: int
    """Rows that it reads above a row."""
    num_head_maps: int
    """float32 score matrices saved per head before the softmax."""
    num_weight_maps: int
    """float32 score matrices saved per head after the softmax, in addition to the weights."""
    num_sequence_maps: int
    """float32 score matrices saved for all heads together."""
    changes_weights: bool
    """True if it changes the weights after the softmax."""

    @property
    def kernel_size(self) -> int:
        """Kernel size of the two convolutions along the keys."""
        return 2 * self.left_context + 1

    def compute_kernel_width(self, num_heads: int) -> int:
        """Return the channels between the two convolutions in kernels, which compute a map of the heads as such."""
        return num_heads if self.cost.maps_heads else self.width

    def flops_per_score(self, dims: AttentionDims) -> float:
        """Return the forward FLOPs per score, over all heads, without those of a bias, which sequences share."""
        return 2.0 * self.cost.num_products(dims, self.options)

    def count_parameters(self, dims: AttentionDims, *, has_bias: bool) -> int:
        """Return the number of parameters in one layer."""
        return self.cost.num_parameters(dims, self.options, has_bias)


@dataclass(frozen=True)
class PlannedLayer:
    """Layer of one type, with the declared costs of its methods."""

    config: Config
    """Configuration in which all layers are like this one."""
    encoding: PlannedEncoding
    processor: PlannedProcessor | None
    num_encoding_parameters: int
    """Parameters of one encoding, shared by all layers or owned by each."""
    num_processor_parameters: int
    num_temperature_parameters: int


@dataclass(frozen=True)
class PlannedModel:
    """Model of a configuration, with the declared costs of its methods, which are read once."""

    config: Config
    layers: tuple[PlannedLayer, ...]
    """Layers until their patterns repeat; equal layers are the same object."""

    @property
    def layer_types(self) -> list[PlannedLayer]:
        """Distinct layers, in order of first occurrence."""
        return [layer for layer, _ in self.count_layer_types()]

    def count_layer_types(self, pipeline_stage: Axis | None = None) -> list[tuple[PlannedLayer, int]]:
        """Return the distinct layers of the model or a pipeline stage, in order of first occurrence, and their numbers.

        The search stops when the patterns repeat, so a million layers cost nothing.
        """
        num_layers, period = self.config.model.num_layers, len(self.layers)
        layers = range(num_layers) if pipeline_stage is None else get_pipeline_layer_range(num_layers, pipeline_stage)
        counts: dict[int, int] = {}
        for layer in layers[:period]:
            key = id(self.layers[layer % period])
            counts[key] = counts.get(key, 0) + len(range(layer, layers.stop, period))
        types = {id(layer): layer for layer in self.layers}
        return [(types[key], count) for key, count in counts.items()]


def plan_model(config: Config) -> PlannedModel:
    """Read the declared costs of a configuration's methods. Raises UserError if the file of one declares none."""
    position = config.position
    if not position.list_patterns():
        return PlannedModel(config, (plan_layer(config),))
    positions = list_layer_positions(position, min(position.period, config.model.num_layers))
    types = {id(own): own for own in positions}
    layers = {key: plan_layer(config.model_copy(update={"position": own})) for key, own in types.items()}
    return PlannedModel(config, tuple(layers[id(own)] for own in positions))


def plan_layer(config: Config) -> PlannedLayer:
    """Read the declared costs of the methods of a configuration whose layers are all alike.

    Raises UserError if the file of a method declares none.
    """
    model, position = config.model, config.position
    encoding, processor, dims = plan_encoding(position), plan_processor(position), build_attention_dims(model)
    num_processor_parameters = 0
    if processor is not None:
        num_processor_parameters = processor.count_parameters(dims, has_bias=encoding.facts.adds_bias)
    return PlannedLayer(
        config,
        encoding,
        processor,
        num_encoding_parameters=encoding.cost.num_parameters(dims, encoding.options),
        num_processor_parameters=num_processor_parameters,
        num_temperature_parameters=_count_temperature_parameters(model, position),
    )


def list_distinct_pipeline_stages(config: Config, num_stages: int) -> list[int]:
    """Return the indices of the pipeline stages that can have the maximum over all stages.

    These are the first, the last, and the earliest of each group of inner stages with the same layers. Later ones have
    at most as many micro-batches in flight, and so need no more memory or time.
    """
    period = config.position.period
    earliest: dict[tuple[Any, ...], int] = {}
    for stage in range(num_stages):
        layers = get_pipeline_layer_range(config.model.num_layers, Axis(stage, num_stages))
        earliest.setdefault((stage == 0, stage == num_stages - 1, layers.start % period, len(layers)), stage)
    return list(earliest.values())


def plan_encoding(position: PositionOptions) -> PlannedEncoding:
    """Return the encoding of a layer. Raises UserError if its file declares no costs."""
    facts = _read_facts("pos_emb", position.encoding, list_encodings, read_encoding_facts, EncodingCost)
    assert isinstance(facts.cost, EncodingCost)
    return PlannedEncoding(facts, facts.cost, facts.fill_options(position.pos_emb_options))


def plan_processor(position: PositionOptions) -> PlannedProcessor | None:
    """Return the processor of a layer, or None if it has none. Raises UserError as `plan_encoding`."""
    if position.processor == "none":
        return None
    facts = _read_facts("score_processor", position.processor, list_processors, read_processor_facts, ProcessorCost)
    cost, options = facts.cost, facts.fill_options(position.score_processor_options)
    assert isinstance(cost, ProcessorCost)
    return PlannedProcessor(
        facts,
        cost,
        options,
        width=cost.width(options),
        left_context=cost.left_context(options),
        preceding_rows=cost.preceding_rows(options),
        num_head_maps=cost.num_head_maps(options),
        num_weight_maps=cost.num_weight_maps(options),
        num_sequence_maps=cost.num_sequence_maps(options),
        changes_weights=cost.changes_weights(options),
    )


def _read_facts(
    key: str,
    name: str,
    list_methods: Callable[[], list[str]],
    read_facts: Callable[[str], MethodFacts],
    cost_type: type,
) -> MethodFacts:
    """Read the facts of a method, including its cost."""
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


def _count_temperature_parameters(model: ModelOptions, position: PositionOptions) -> int:
    """Return the number of parameters of one layer's temperature. Raises UserError as `plan_encoding`."""
    key, name = "attention_temperature", position.temperature
    if name == "none":
        return 0
    facts = _read_facts(key, name, list_temperatures, read_temperature_facts, TemperatureCost)
    assert isinstance(facts.cost, TemperatureCost)
    options = facts.fill_options(position.attention_temperature_options)
    return facts.cost.num_parameters(build_attention_dims(model), options)


Shapes = tuple[tuple[int, int], ...]
"""(rows, columns) of matrices."""


def list_layer_weights(model: ModelOptions) -> tuple[Shapes, ...]:
    """Return the matrices in each weight of one layer, in the order of its parameters.

    The weights are attention output; queries, keys and values; gates of the attention output, if any; first
    feed-forward weight (two matrices if gated); second one.
    """
    size, q_size, kv_size = model.hidden_size, get_q_hidden_size(model), get_kv_hidden_size(model)
    inner = get_ffn_hidden_size(model)
    num_inner = 2 if model.activation in GATED_ACTIVATIONS else 1
    gates = get_output_gate_size(model)
    return (
        ((size, q_size),),
        ((q_size, size), (kv_size, size), (kv_size, size)),
        *((((gates, size),),) if gates else ()),
        ((inner, size),) * num_inner,
        ((size, inner),),
    )


def list_layer_matrices(model: ModelOptions) -> tuple[int, ...]:
    """Return the number of elements in each weight of `list_layer_weights`."""
    return tuple(sum(rows * columns for rows, columns in shapes) for shapes in list_layer_weights(model))


def count_layer_norms(model: ModelOptions) -> int:
    """Return the number of norms in a layer, without those of queries and keys."""
    if model.gpt_j_residual and model.gpt_j_tied:
        return 1
    return 4 if model.norm_placement == "sandwich" else 2


def count_layer_parameters(layer: PlannedLayer, tensor_parallel_size: int) -> int:
    """Return the parameters of one layer on one tensor-parallel rank.

    Matrices are sharded; parameters added after their all-reduce are not.
    """
    model, position = layer.config.model, layer.config.position
    hidden_size, ffn_size = model.hidden_size, get_ffn_hidden_size(model)
    fc1_size = ffn_size * (2 if model.activation in GATED_ACTIVATIONS else 1)
    norm_parameters = hidden_size * len(list_norm_parameters(model, model.norm))
    total_norm_parameters = norm_parameters * count_layer_norms(model)
    qkv_size = get_q_hidden_size(model) + 2 * get_kv_hidden_size(model)
    matrices = sum(list_layer_matrices(model))
    sharded_biases = (qkv_size if has_qkv_bias(model) else 0) + (fc1_size if model.use_bias_in_mlp else 0)
    qk_norm_vectors = len(list_norm_parameters(model, get_qk_norm(model)))
    if model.qk_layernorm_over_heads:
        sharded_biases += qk_norm_vectors * (get_q_hidden_size(model) + get_kv_hidden_size(model))
    else:
        total_norm_parameters += qk_norm_vectors * 2 * get_head_dim(model)
    replicated_biases = (hidden_size if model.use_bias_in_attn_linear else 0) + (
        hidden_size if model.use_bias_in_mlp else 0
    )
    return (
        (matrices + sharded_biases) // tensor_parallel_size
        + replicated_biases
        + total_norm_parameters
        + (layer.num_encoding_parameters if position.pos_emb_per_layer else 0)
        + layer.num_processor_parameters
        + layer.num_temperature_parameters
        + (model.num_attention_heads if position.softmax == "learnable" else 0)
    )


def count_rank_parameters(planned: PlannedModel, sizes: ParallelSizes, vocab_size: int, pipeline_stage: int = 0) -> int:
    """Return the parameters of a rank in a pipeline stage, before ZeRO shards them.

    A tied embedding is in the first and last stage. An encoding that all layers share is in every stage, unless it only
    adds to the embeddings.
    """
    model = planned.config.model
    is_first, is_last = pipeline_stage == 0, pipeline_stage == sizes.pipeline - 1
    embedding_parameters = get_padded_vocab_size(model, vocab_size) * model.hidden_size // sizes.tensor
    stage = Axis(pipeline_stage, sizes.pipeline)
    count = sum(
        num_layers * count_layer_parameters(layer, sizes.tensor)
        for layer, num_layers in planned.count_layer_types(stage)
    )
    if not planned.config.position.pos_emb_per_layer:
        # Every stage has all shared encodings, including those of layers in other stages.
        shared = {layer.encoding.facts.name: layer for layer in planned.layers}
        for layer in shared.values():
            if is_first or not layer.encoding.facts.only_adds_embeddings:
                count += layer.num_encoding_parameters
    if is_last:
        count += model.hidden_size * len(list_norm_parameters(model, model.norm))
    is_tied = not model.no_weight_tying
    return count + embedding_parameters * ((is_first or (is_last and is_tied)) + (is_last and not is_tied))


def count_parameters(planned: PlannedModel, vocab_size: int) -> int:
    """Return the number of parameters of the model, each counted once."""
    return count_rank_parameters(planned, ParallelSizes(), vocab_size)


TRAINING_TO_FORWARD_RATIO = 3
"""FLOPs of forward and backward pass over those of the forward pass."""


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of the forward pass, per token."""

    linear: float
    """Linear layers of one layer."""
    attention: float
    """Query-key and probability-value products of one layer, and the encoding's own; the mean if layers differ."""
    processor: float
    """Processor of one layer; the mean if layers differ."""
    output: float
    """Output layer."""
    num_layers: int

    @property
    def training_flops_per_token(self) -> float:
        """FLOPs of forward and backward pass, per token."""
        return TRAINING_TO_FORWARD_RATIO * (
            self.num_layers * (self.linear + self.attention + self.processor) + self.output
        )


def estimate_forward_flops(planned: PlannedModel, vocab_size: int, pipeline_stage: Axis | None = None) -> ForwardFlops:
    """Estimate the FLOPs of a model's forward pass at its training length.

    pipeline_stage: pipeline stage whose layers are counted; all if None.
    """
    types = planned.count_layer_types(pipeline_stage)
    each = [(estimate_layer_flops(layer, vocab_size), count) for layer, count in types]
    (first, _), num_layers = each[0], sum(count for _, count in each)
    if len(each) == 1:
        return first
    return replace(
        first,
        attention=sum(count * flops.attention for flops, count in each) / num_layers,
        processor=sum(count * flops.processor for flops, count in each) / num_layers,
    )


def estimate_layer_flops(layer: PlannedLayer, vocab_size: int) -> ForwardFlops:
    """Estimate the FLOPs of a model whose layers are all like this one."""
    model, position = layer.config.model, layer.config.position
    hidden_size, ffn_size, seq_length = model.hidden_size, get_ffn_hidden_size(model), model.seq_length
    fc1_size = ffn_size * (2 if model.activation in GATED_ACTIVATIONS else 1)
    max_keys = min(position.window or seq_length, seq_length)
    keys_per_token = (
        max_keys - max_keys * (max_keys - 1) / 2 / seq_length
    )  # keys that a token sees: the mean of min(i + 1, window)
    encoding, processor = layer.encoding, layer.processor
    return ForwardFlops(
        linear=2.0
        * hidden_size
        * (
            2 * get_q_hidden_size(model)
            + 2 * get_kv_hidden_size(model)
            + get_output_gate_size(model)
            + fc1_size
            + ffn_size
        ),
        attention=get_q_hidden_size(model)
        * (
            2.0 * (1 + encoding.count_qk_numbers()) * keys_per_token
            + 2.0 * encoding.cost.num_products(encoding.options, keys_per_token)
        )
        + 2.0 * encoding.cost.num_input_products(build_attention_dims(model), encoding.options),
        processor=0.0 if processor is None else processor.flops_per_score(build_attention_dims(model)) * keys_per_token,
        output=2.0 * get_padded_vocab_size(model, vocab_size) * hidden_size,
        num_layers=model.num_layers,
    )
