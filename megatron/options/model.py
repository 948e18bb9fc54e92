"""Keys that decide what the model is: its shape, its initialisation, its positions, its attention backend."""

from collections.abc import Callable, Iterator
from math import gcd, lcm
from typing import Annotated, Any, Literal, TypeVar

from pydantic import PlainValidator
from pydantic_core import PydanticCustomError, PydanticKnownError

from megatron.options.section import ConfigSection, config_field

MAX_SIZE = 10**6
"""Of every size of the model: no tensor of it has more elements than 64 bits can count."""

MAX_LENGTH = 10**9
"""Tokens of a sequence."""

MAX_POSITIONS = 10**7
"""Positions to draw from: a table of a method may hold a row for each."""

DROPOUT_KEYS = ("hidden_dropout", "attention_dropout")

GATED_ACTIVATIONS = ("geglu", "geglu_tanh", "swiglu")
"""Activations of which one half of the inner values gates the other."""

SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable", "stick-breaking")

InitMethod = Literal["normal", "scaled_normal", "small_init", "wang_init", "xavier_uniform", "xavier_normal"]


class ModelOptions(ConfigSection):
    """Shape and numerics of the GPT (GPT-NeoX's names)."""

    num_layers: int = config_field(..., "transformer layers", ge=1, le=MAX_SIZE, policy="architecture")
    hidden_size: int = config_field(..., "width of the residual stream", ge=1, le=MAX_SIZE, policy="architecture")
    num_attention_heads: int = config_field(
        ..., "attention heads; must divide hidden_size unless head_dim is given", ge=1, le=MAX_SIZE,
        policy="architecture",
    )  # fmt: skip
    head_dim: int | None = config_field(
        None, "numbers of a head; hidden_size / num_attention_heads if absent", ge=1, le=MAX_SIZE,
        policy="architecture",
    )  # fmt: skip
    num_kv_heads: int | None = config_field(
        None,
        "heads of keys and values, each shared by num_attention_heads / num_kv_heads heads of queries (grouped-query "
        "attention); num_attention_heads if absent",
        ge=1,
        le=MAX_SIZE,
        policy="architecture",
    )
    seq_length: int = config_field(..., "training length, in tokens", ge=2, le=MAX_LENGTH, policy="context")
    max_position_embeddings: int | None = config_field(
        None, "rows of a learned position table; seq_length if absent", ge=1, le=MAX_LENGTH, policy="architecture"
    )
    intermediate_size: int | None = config_field(
        None,
        "width of the feed-forward layer, or three times it if gated (geglu, swiglu); 4 × hidden_size if absent",
        ge=1,
        le=MAX_SIZE,
        policy="architecture",
    )
    mlp_multiple_of: int = config_field(
        1, "the width of the feed-forward layer is rounded up to a multiple of this", ge=1, le=MAX_SIZE,
        policy="architecture",
    )  # fmt: skip
    norm: Literal["layernorm", "rmsnorm"] = config_field(
        "layernorm", "normalisation around attention and feed-forward (norm_placement) and after the last layer",
        policy="architecture",
    )  # fmt: skip
    norm_placement: Literal["pre", "post", "sandwich"] = config_field(
        "pre",
        "where a branch is normalised: pre, x + f(norm(x)); post, x + norm(f(x)) (OLMo 2); sandwich, "
        "x + norm(f(norm(x))) (Gemma 2)",
        policy="architecture",
    )
    layernorm_epsilon: float = config_field(1e-5, "epsilon of layernorm", gt=0, policy="architecture")
    layernorm_bias: bool = config_field(
        True, "has layernorm a bias beside its weight? Command has none; rmsnorm never has one", policy="architecture"
    )
    rms_norm_epsilon: float = config_field(1e-8, "epsilon of rmsnorm", gt=0, policy="architecture")
    use_qk_layernorm: bool = config_field(
        False,
        "normalise queries and keys, each head by itself, before they are rotated (Henry et al. 2020, Dehghani et al. "
        "2023)",
        policy="architecture",
    )
    qk_norm: Literal["layernorm", "rmsnorm"] | None = config_field(
        None, "with use_qk_layernorm: the kind of that norm; norm if absent", policy="architecture"
    )
    qk_layernorm_over_heads: bool = config_field(
        False, "with use_qk_layernorm: over all heads together instead of each by itself (OLMo 2)",
        policy="architecture",
    )  # fmt: skip
    attn_logit_softcapping: float | None = config_field(
        None,
        "c of c·tanh(q·k/(c√d)), which bounds what a query and a key say to each other, before anything of an encoding "
        "or a processor; no bound if absent",
        gt=0,
        policy="architecture",
    )
    final_logit_softcapping: float | None = config_field(
        None, "c of c·tanh(logit/c), which bounds the logits of the vocabulary; no bound if absent", gt=0,
        policy="architecture",
    )  # fmt: skip
    query_pre_attn_scalar: float | None = config_field(
        None, "q·k is divided by the root of this; the size of a head if absent (Gemma 2's 27B has another)", gt=0,
        policy="architecture",
    )  # fmt: skip
    embedding_multiplier: float = config_field(
        1.0, "factor on token embeddings where they enter the first layer (Gemma: √hidden_size)", gt=0,
        policy="architecture",
    )  # fmt: skip
    logit_scale: float = config_field(
        1.0, "factor on the logits of the vocabulary, before their soft cap (Command: 0.0625)", gt=0,
        policy="architecture",
    )  # fmt: skip
    activation: Literal["gelu", "gelu_tanh", "relu", "silu", "geglu", "geglu_tanh", "swiglu"] = config_field(
        "gelu",
        "feed-forward activation; the ones with _tanh have gelu's approximation by tanh (GPT-2, and GPT-NeoX's "
        "bias_gelu_fusion)",
        policy="architecture",
    )
    gpt_j_residual: bool = config_field(
        False, "attention and feed-forward in parallel, x + attn(ln1(x)) + mlp(ln2(x))", policy="architecture"
    )
    gpt_j_tied: bool = config_field(
        False, "with gpt_j_residual: one layer norm for both branches", policy="architecture"
    )
    no_weight_tying: bool = config_field(
        False, "an output matrix of its own instead of the transposed embedding", policy="architecture"
    )
    use_bias_in_attn_linear: bool = config_field(True, "bias in the linear layers of attention", policy="architecture")
    use_bias_in_qkv: bool | None = config_field(
        None,
        "bias of queries, keys and values; use_bias_in_attn_linear if absent (with that one false and this one true, "
        "as in Qwen2, it is megatron-core's add_qkv_bias)",
        policy="architecture",
    )
    use_bias_in_mlp: bool = config_field(
        True, "bias in the linear layers of the feed-forward layer", policy="architecture"
    )
    init_method: InitMethod = config_field("normal", "initialisation of weights", policy="initialization")
    output_layer_init_method: InitMethod = config_field(
        "scaled_normal", "initialisation of the layers that write to the residual stream", policy="initialization"
    )
    init_method_std: float = config_field(
        0.02, "standard deviation of normal and scaled_normal", gt=0, policy="initialization"
    )
    use_mup: bool = config_field(
        False,
        "scale initialisation, learning rates and the forward pass with the width, and the depth, over those of a base "
        "model, so that what is tuned there serves here: muP and CompleteP (docs/optimizers.md)",
        policy="architecture",
    )
    mup_base_hidden_size: int | None = config_field(
        None, "hidden_size of muP's base model", ge=1, le=MAX_SIZE, policy="architecture"
    )
    mup_base_num_attention_heads: int | None = config_field(
        None,
        "attention heads of the base model; as many as have this model's head size if absent",
        ge=1,
        le=MAX_SIZE,
        policy="architecture",
    )
    mup_base_num_layers: int | None = config_field(
        None, "layers of the base model (CompleteP); if absent nothing is scaled with the depth", ge=1, le=MAX_SIZE,
        policy="architecture",
    )  # fmt: skip
    mup_depth_alpha: float = config_field(
        1.0,
        "with mup_base_num_layers: residual branches are multiplied by (layers / base layers) to minus this power",
        ge=0.5,
        le=1,
        policy="architecture",
    )
    mup_init_scale: float = config_field(1.0, "muP: factor on all initial weights", gt=0, policy="initialization")
    mup_attn_temp: float = config_field(
        1.0, "muP: divides attention scores, whose scale is √(base head size) / head size", gt=0, policy="architecture"
    )
    mup_output_temp: float = config_field(1.0, "muP: divides logits", gt=0, policy="architecture")
    mup_embedding_mult: float = config_field(1.0, "muP: factor on token embeddings", gt=0, policy="architecture")
    mup_rp_embedding_mult: float = config_field(
        1.0, "muP: factor on position embeddings (learned, sinusoidal)", gt=0, policy="architecture"
    )
    hidden_dropout: float = config_field(0.0, "dropout on the residual branches", ge=0, lt=1, policy="numerics")
    attention_dropout: float = config_field(0.0, "dropout on attention probabilities", ge=0, lt=1, policy="numerics")
    make_vocab_size_divisible_by: int = config_field(
        128, "the vocabulary is padded up to a multiple of this", ge=1, le=MAX_SIZE, policy="architecture"
    )
    attention_output_gate: Literal[False, True, "headwise"] = config_field(
        False,
        "multiply what each head attends to by σ(W·x), x being the layer's input, before the output projection (Qiu et "
        "al. 2025): true, a gate for every number (megatron-core's); headwise, one for every head",
        policy="architecture",
    )
    checkpoint_activations: Literal[False, True, "selective"] = config_field(
        False,
        "what the backward pass computes again instead of keeping it: true, whole layers; selective, of each layer "
        "what lies between attention's two linear layers (Korthikanti et al. 2022)",
        policy="machine",
    )
    checkpoint_num_layers: int = config_field(
        1, "with checkpoint_activations true: layers per recomputed block", ge=1, le=MAX_SIZE, policy="machine"
    )
    attention_backend: Literal["auto", "eager", "chunked", "sdpa", "triton", "native", "flex"] = config_field(
        "auto",
        "how attention is computed; auto takes the fastest that can do this position encoding, on a GPU of those that "
        "it has found right there (docs/gpu.md)",
        policy="machine",
    )
    attention_check: bool = config_field(
        True,
        "whether auto on a GPU first runs what it may take, compares it with float64 and times it, for about 20 s at "
        "the first run of its kind; if false it takes sdpa where nothing is added to the scores, else blocks of rows",
        policy="machine",
    )
    attention_chunk_rows: int = config_field(
        128,
        "query rows per block of the chunked backend, and of auto (which trains with at least 128 where there is no "
        "score processor)",
        ge=1,
        le=MAX_LENGTH,
        policy="machine",
    )


T = TypeVar("T")


def find_period(pattern: list[T]) -> list[T]:
    """The shortest list that, repeated, gives the whole one."""
    lengths = (n for n in range(1, len(pattern) + 1) if len(pattern) % n == 0)
    return next((pattern[:n] for n in lengths if pattern == pattern[:n] * (len(pattern) // n)), pattern)


def _check_names(value: Any) -> Any:
    return _check_layers(value, "text", lambda item: isinstance(item, str))


def _check_softmax_types(value: Any) -> Any:
    return _check_layers(value, f"one of {', '.join(SOFTMAX_TYPES)}", lambda item: item in SOFTMAX_TYPES)


def _check_windows(value: Any) -> Any:
    if value is None:
        return value
    bounds = f"a whole number of 1 to {MAX_LENGTH}"
    if isinstance(value, list):
        return _check_layers(value, f"{bounds}, or null", lambda item: item is None or _is_window(item))
    if type(value) is not int:
        raise PydanticKnownError("int_from_float" if isinstance(value, float) else "int_type")
    if value < 1:
        raise PydanticKnownError("greater_than_equal", {"ge": 1})
    if value > MAX_LENGTH:
        raise PydanticKnownError("less_than_equal", {"le": MAX_LENGTH})
    return value


def _is_window(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_LENGTH


def _check_layers(value: Any, kind: str, is_valid: Callable[[Any], bool]) -> Any:
    """A value, or a list by its period, so that equal models have equal keys; one value where all are the same."""
    if not isinstance(value, list):
        if is_valid(value):
            return value
        raise PydanticCustomError("by_layer", f"it must be {kind}, or a list of such values, which repeats over layers")
    if not value:
        raise PydanticCustomError("by_layer", "it needs a value for each layer, or a pattern that repeats over them")
    for number, item in enumerate(value, start=1):
        if not is_valid(item):
            raise PydanticCustomError("by_layer", f"item {number} must be {kind}")
    period = find_period(value)
    return period[0] if len(period) == 1 else period


LAYER_KEYS = ("pos_emb", "attention_window", "score_processor", "attention_temperature", "softmax_type")
"""The keys that may differ from layer to layer: one value for all, or a list that repeats from the first to the last.
"""


class PositionOptions(ConfigSection):
    """Which position encoding, which score processor on top of it, and which temperature of attention."""

    pos_emb: Annotated[str | list[str], PlainValidator(_check_names)] = config_field(
        "learned",
        "position encoding: a file of megatron/position/encodings, see `./deepy.py positions`; a list is a pattern of "
        "layers",
        policy="architecture",
    )
    pos_emb_options: dict[str, Any] = config_field(
        dict,
        "options of that encoding, see `./deepy.py positions`; of several, each takes those that it has",
        policy="architecture",
    )
    pos_emb_per_layer: bool = config_field(
        False, "one set of encoding parameters per layer (DAPE) instead of one for all (KERPLE)", policy="architecture"
    )
    attention_window: Annotated[int | list[int | None] | None, PlainValidator(_check_windows)] = config_field(
        None,
        "every token sees the last this many only, its own included; all if absent; a list is a pattern of layers, "
        "null in it all",
        policy="context",
    )
    attention_mask: Literal["causal", "document"] = config_field(
        "causal",
        "which tokens of a row a token sees: all before it (causal), or those of its own document alone, whose "
        "positions begin at 0 (document)",
        policy="context",
    )
    randomized_positions: int | None = config_field(
        None,
        "each sequence's positions are drawn from this many, in ascending order (Ruoss et al. 2023); at least the "
        "longest length to be read",
        ge=1,
        le=MAX_POSITIONS,
        policy="context",
    )
    continuous_positions: bool = config_field(
        False,
        "with randomized_positions: real numbers below that many instead of integers (2602.14050)",
        policy="context",
    )
    score_processor: Annotated[str | list[str], PlainValidator(_check_names)] = config_field(
        "none",
        "score processor: none, or a file of megatron/position/processors; a list is a pattern of layers",
        policy="architecture",
    )
    score_processor_options: dict[str, Any] = config_field(
        dict,
        "options of that processor, see `./deepy.py positions`; of several, each takes those that it has",
        policy="architecture",
    )
    attention_temperature: Annotated[str | list[str], PlainValidator(_check_names)] = config_field(
        "none",
        "factor on each query, by which its scores grow with the keys that it sees: none, or a file of "
        "megatron/position/temperatures; a list is a pattern of layers",
        policy="architecture",
    )
    attention_temperature_options: dict[str, Any] = config_field(
        dict,
        "options of that temperature, see `./deepy.py positions`; of several, each takes those that it has",
        policy="architecture",
    )

    softmax_type: Annotated[str | list[str], PlainValidator(_check_softmax_types)] = config_field(
        "vanilla",
        "what makes attention weights of logits: vanilla; off-by-one, a denominator with 1 more; learnable, with exp "
        "of a sink more, a head's own (gpt-oss); or stick-breaking, where each key takes its share of what later "
        "ones have left (Tan et al. 2024); a list is a pattern of layers",
        policy="architecture",
    )

    @property
    def encodings(self) -> list[str]:
        """The encodings of the layers, each once."""
        return list(dict.fromkeys(self.pos_emb if isinstance(self.pos_emb, list) else [self.pos_emb]))

    @property
    def processors(self) -> list[str]:
        """The score processors of the layers, each once; `none` where layers have none."""
        given = self.score_processor
        return list(dict.fromkeys(given if isinstance(given, list) else [given]))

    @property
    def temperatures(self) -> list[str]:
        """The temperatures of the layers, each once; `none` where layers have none."""
        given = self.attention_temperature
        return list(dict.fromkeys(given if isinstance(given, list) else [given]))

    @property
    def encoding(self) -> str:
        """`pos_emb` of one layer; not for a pattern of layers, which has none."""
        return self._get_single("pos_emb")

    @property
    def processor(self) -> str:
        """`score_processor` of one layer."""
        return self._get_single("score_processor")

    @property
    def temperature(self) -> str:
        """`attention_temperature` of one layer."""
        return self._get_single("attention_temperature")

    @property
    def softmax(self) -> str:
        """`softmax_type` of one layer."""
        return self._get_single("softmax_type")

    @property
    def window(self) -> int | None:
        """`attention_window` of one layer."""
        return self._get_single("attention_window")

    def _get_single(self, key: str) -> Any:
        if isinstance(value := getattr(self, key), list):
            raise TypeError(f"{key} is a pattern of layers: {value}")
        return value

    def list_patterns(self) -> dict[str, list[Any]]:
        """The keys that differ from layer to layer, with their lists."""
        return {key: value for key in LAYER_KEYS if isinstance(value := getattr(self, key), list)}

    @property
    def period(self) -> int:
        """Layers after which all patterns begin anew; 1 where all layers are alike."""
        return lcm(*map(len, self.list_patterns().values()))

    def for_layer(self, layer: int) -> "PositionOptions":
        """The same with the values of one layer, counted from 0; itself where no key is a list."""
        patterns = self.list_patterns()
        return (
            self.replace(**{key: values[layer % len(values)] for key, values in patterns.items()}) if patterns else self
        )


def num_kv_heads(model: ModelOptions) -> int:
    """Heads of keys and values."""
    return model.num_kv_heads or model.num_attention_heads


def head_dim(model: ModelOptions) -> int:
    """Numbers of a head."""
    return model.head_dim or model.hidden_size // model.num_attention_heads


def get_attention_sizes(model: ModelOptions) -> dict[str, int]:
    """The sizes that encodings, processors and temperatures are built for: the fields of `AttentionDims`."""
    return {
        "num_heads": model.num_attention_heads,
        "head_dim": head_dim(model),
        "hidden_size": model.hidden_size,
        "train_length": model.seq_length,
        "max_length": model.max_position_embeddings or model.seq_length,
    }


def q_hidden_size(model: ModelOptions) -> int:
    """Numbers in the queries of one token, and in what attention gives: hidden_size unless head_dim is given."""
    return head_dim(model) * model.num_attention_heads


def kv_hidden_size(model: ModelOptions) -> int:
    """Numbers in the keys of one token, and in its values: as many as in its queries unless those are grouped."""
    return head_dim(model) * num_kv_heads(model)


def output_gate_size(model: ModelOptions) -> int:
    """Gates of one token's attention output; 0 without attention_output_gate."""
    if model.attention_output_gate == "headwise":
        return model.num_attention_heads
    return q_hidden_size(model) if model.attention_output_gate else 0


def qk_norm(model: ModelOptions) -> str | None:
    """The kind of norm of queries and keys: layernorm or rmsnorm; None if they are not normalised."""
    return (model.qk_norm or model.norm) if model.use_qk_layernorm else None


def list_norm_parts(model: ModelOptions, norm: str | None) -> tuple[str, ...]:
    """The names of the parameters of a kind of norm; none where nothing is normalised."""
    if norm is None:
        return ()
    return ("weight", "bias") if norm == "layernorm" and model.layernorm_bias else ("weight",)


def norm_epsilon(model: ModelOptions, norm: str) -> float:
    """The epsilon of a kind of norm."""
    return model.layernorm_epsilon if norm == "layernorm" else model.rms_norm_epsilon


def has_qkv_bias(model: ModelOptions) -> bool:
    """Do queries, keys and values have a bias?"""
    return model.use_bias_in_attn_linear if model.use_bias_in_qkv is None else model.use_bias_in_qkv


GATED_RATIO = 3
"""`intermediate_size` of a gated layer over its width, as GPT-NeoX counts it.

A gated layer has three matrices where a plain one has two. Two thirds of `intermediate_size` are therefore the rows of
its first matrix, of which each of two halves has one half (ParallelMLP in GPT-NeoX's transformer.py): gated and plain
layers of one `intermediate_size` have as many parameters.
"""


def ffn_hidden_size(model: ModelOptions) -> int:
    """Width of the feed-forward layer: what its second matrix reads."""
    size = model.intermediate_size or 4 * model.hidden_size
    width = size // GATED_RATIO if model.activation in GATED_ACTIVATIONS else size
    return -(-width // model.mlp_multiple_of) * model.mlp_multiple_of


def intermediate_size_of(width: int, activation: str) -> int:
    """The `intermediate_size` of a feed-forward layer of a width."""
    return width * GATED_RATIO if activation in GATED_ACTIVATIONS else width


MAX_LOGITS = 1 << 30
"""That the loss holds at once: 12 GB in float32, with their gradients. At a vocabulary of 50,304: 21,000 tokens."""


def count_scored_at_once(length: int, batch_size: int, vocab_size: int, max_logits: int = MAX_LOGITS) -> int:
    """Tokens of each of `batch_size` sequences whose logits the loss holds together."""
    return length if length * batch_size * vocab_size <= max_logits else max(max_logits // (batch_size * vocab_size), 1)


def padded_vocab_size(model: ModelOptions, vocab_size: int) -> int:
    """Rows of the embedding: the tokens that there are, rounded up."""
    multiple = model.make_vocab_size_divisible_by
    return -(-vocab_size // multiple) * multiple


def find_model_conflicts(model: ModelOptions, position: PositionOptions) -> Iterator[tuple[str, str]]:
    """Values that contradict each other: the key to blame, and one sentence with the values."""
    heads, width, length = model.num_attention_heads, model.hidden_size, model.seq_length
    if width % heads and model.head_dim is None:
        yield "num_attention_heads", f"hidden_size {width} is not divisible by num_attention_heads {heads}"
    if model.num_kv_heads is not None and heads % model.num_kv_heads:
        yield (
            "num_kv_heads",
            f"num_attention_heads {heads} is not divisible by num_kv_heads {model.num_kv_heads}; "
            f"{_nearest_divisor(heads, model.num_kv_heads)} would do",
        )
    if model.use_bias_in_attn_linear and not has_qkv_bias(model):
        yield (
            "use_bias_in_qkv",
            "use_bias_in_qkv: false needs use_bias_in_attn_linear: false; a bias after attention alone is not offered",
        )
    if ffn_hidden_size(model) == 0:
        yield (
            "intermediate_size",
            f"intermediate_size {model.intermediate_size} leaves no width with activation {model.activation}, which "
            f"takes a third of it; it must be at least {GATED_RATIO}",
        )
    if model.gpt_j_tied and not model.gpt_j_residual:
        yield "gpt_j_tied", "gpt_j_tied: true needs gpt_j_residual: true"
    if model.norm_placement != "pre" and model.gpt_j_residual:
        yield (
            "norm_placement",
            f"norm_placement {model.norm_placement} is for layers in series; gpt_j_residual: true reads one norm's "
            "output twice",
        )
    for key in ("qk_norm", "qk_layernorm_over_heads"):
        if getattr(model, key) and not model.use_qk_layernorm:
            yield key, f"{key}: {_format_value(getattr(model, key))} needs use_qk_layernorm: true"
    if not model.layernorm_bias and "layernorm" not in (model.norm, qk_norm(model)):
        yield "layernorm_bias", "layernorm_bias: false is for layernorm; rmsnorm has no bias as it is"
    if model.checkpoint_num_layers > model.num_layers:
        yield (
            "checkpoint_num_layers",
            f"checkpoint_num_layers {model.checkpoint_num_layers} is more than num_layers {model.num_layers}",
        )
    yield from _find_pattern_conflicts(model, position)
    yield from _find_mup_conflicts(model)
    if position.randomized_positions is not None and position.randomized_positions < length:
        limit = position.randomized_positions
        yield "randomized_positions", f"randomized_positions {limit} is less than seq_length {length}"
    if position.continuous_positions and position.randomized_positions is None:
        yield "continuous_positions", "continuous_positions: true says how randomized_positions are drawn; set that too"


def _find_pattern_conflicts(model: ModelOptions, position: PositionOptions) -> Iterator[tuple[str, str]]:
    for key, values in position.list_patterns().items():
        layers, length = model.num_layers, len(values)
        if layers % length:
            yield (
                key,
                f"{key} is a pattern of {length} layers, which does not divide num_layers {layers}; it repeats from "
                f"the first layer to the last: {_nearest_divisor(layers, length)} would do, or a value for each layer",
            )


def _find_mup_conflicts(model: ModelOptions) -> Iterator[tuple[str, str]]:
    if not model.use_mup:
        for name, field in ModelOptions.model_fields.items():
            if name.startswith("mup_") and (value := getattr(model, name)) != field.default:
                yield name, f"{name} is {value}, which has no effect without use_mup: true"
        return
    for name in ("head_dim", "embedding_multiplier", "query_pre_attn_scalar", "logit_scale"):
        if (value := getattr(model, name)) != ModelOptions.model_fields[name].default:
            yield name, f"{name} {value:g} is not offered with use_mup: true, which has a rule of its own for it"
    if model.mup_base_hidden_size is None:
        yield "use_mup", "use_mup: true needs mup_base_hidden_size, the width that was tuned"
        return
    width, head = model.mup_base_hidden_size, model.hidden_size // model.num_attention_heads
    heads = model.mup_base_num_attention_heads
    if heads is None and width % head:
        yield (
            "mup_base_hidden_size",
            f"mup_base_hidden_size {width} is not divisible by this model's head size, {head}; give "
            "mup_base_num_attention_heads too",
        )
    if heads is not None and width % heads:
        yield (
            "mup_base_num_attention_heads",
            f"mup_base_hidden_size {width} is not divisible by mup_base_num_attention_heads {heads}",
        )
    for name in ("init_method", "output_layer_init_method"):
        if (method := getattr(model, name)).startswith("xavier"):
            yield (
                name,
                f"{name} {method}: its deviation follows from a matrix's own shape, where muP's follows from the base "
                "model's; use normal, scaled_normal, small_init or wang_init",
            )


def find_indivisible_sizes(
    model: ModelOptions, *, tensor: int, context: int, pipeline: int
) -> Iterator[tuple[str, str]]:
    """What so many ranks cannot divide of a model: the key to blame, and one sentence with the values.

    tensor, context, pipeline: ranks along these dimensions of the mesh.
    """
    sizes = (
        ("num_attention_heads", model.num_attention_heads),
        ("num_kv_heads", num_kv_heads(model)),
        (
            "a third of intermediate_size," if model.activation in GATED_ACTIVATIONS else "intermediate_size",
            ffn_hidden_size(model),
        ),
        ("make_vocab_size_divisible_by", model.make_vocab_size_divisible_by),
    )
    if indivisible := [(name, value) for name, value in sizes if value % tensor]:
        name, value = indivisible[0]
        common = gcd(*(size for _, size in sizes))
        yield (
            "model_parallel_size",
            f"{name} {value} is not divisible by model_parallel_size {tensor}; {_nearest_divisor(common, tensor)} "
            f"would do",
        )
    length = model.seq_length
    if context > 1 and length % (2 * context):
        advice = (
            f"{_nearest_divisor(length // 2, context)} would do"
            if length % 2 == 0
            else "an odd length cannot be divided"
        )
        yield (
            "context_parallel_size",
            f"seq_length {length} is not divisible by 2 × context_parallel_size {context}; {advice}",
        )
    if pipeline > model.num_layers:
        yield (
            "pipe_parallel_size",
            f"pipe_parallel_size {pipeline} is more than num_layers {model.num_layers}; {model.num_layers} would do",
        )
    for name, size, dropouts, reason in (
        ("model_parallel_size", tensor, ("attention_dropout",), "every rank would drop the same entries of its heads"),
        ("context_parallel_size", context, DROPOUT_KEYS, "every rank would drop the same entries of its places"),
        ("pipe_parallel_size", pipeline, DROPOUT_KEYS, "what is dropped would follow from the layout"),
    ):
        for dropout in (key for key in dropouts if size > 1 and getattr(model, key)):
            yield dropout, f"{dropout} {getattr(model, dropout)}: with {name} {size} {reason}; set it to 0"


def _format_value(value: object) -> str:
    return "true" if value is True else str(value)


def _nearest_divisor(number: int, size: int) -> int:
    """The divisor of `number` that is nearest to `size`, of two the smaller."""
    return min((d for d in range(1, min(number, 2 * size) + 1) if number % d == 0), key=lambda d: abs(d - size))
