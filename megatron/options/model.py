"""Keys that define the model: shape, initialization, attention backend; and sizes derived from them."""

from typing import Literal

from megatron.options.section import ConfigSection, config_field

MAX_SIZE = 10**6
"""Upper bound of every size of the model, so that 64 bits can count the elements of each tensor."""

MAX_LENGTH = 10**9
"""Upper bound of a sequence length, in tokens."""

DROPOUT_KEYS = ("hidden_dropout", "attention_dropout")

GATED_ACTIVATIONS = ("geglu", "geglu_tanh", "swiglu")
"""Activations in which one half of the inner values gates the other."""

AttentionBackend = Literal["auto", "eager", "chunked", "sdpa", "triton", "native", "flex"]
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
        None, "head dimension; hidden_size / num_attention_heads if absent", ge=1, le=MAX_SIZE,
        policy="architecture",
    )  # fmt: skip
    num_kv_heads: int | None = config_field(
        None,
        "key and value heads, each shared by num_attention_heads / num_kv_heads query heads (grouped-query "
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
        "layernorm", "normalization around attention and feed-forward (norm_placement) and after the last layer",
        policy="architecture",
    )  # fmt: skip
    norm_placement: Literal["pre", "post", "sandwich"] = config_field(
        "pre",
        "placement of the norms in a branch: pre, x + f(norm(x)); post, x + norm(f(x)) (OLMo 2); sandwich, "
        "x + norm(f(norm(x))) (Gemma 2)",
        policy="architecture",
    )
    layernorm_epsilon: float = config_field(1e-5, "epsilon of layernorm", gt=0, policy="architecture")
    layernorm_bias: bool = config_field(
        True, "bias in layernorm (Command R has none); rmsnorm never has one", policy="architecture"
    )
    rms_norm_epsilon: float = config_field(1e-8, "epsilon of rmsnorm", gt=0, policy="architecture")
    use_qk_layernorm: bool = config_field(
        False,
        "normalize the queries and keys of each head before they are rotated (Henry et al. 2020, Dehghani et al. 2023)",
        policy="architecture",
    )
    qk_norm: Literal["layernorm", "rmsnorm"] | None = config_field(
        None, "with use_qk_layernorm: kind of norm; `norm` if absent", policy="architecture"
    )
    qk_layernorm_over_heads: bool = config_field(
        False, "with use_qk_layernorm: normalize over all heads together instead of each head (OLMo 2)",
        policy="architecture",
    )  # fmt: skip
    attn_logit_softcapping: float | None = config_field(
        None,
        "c of the soft cap c·tanh(q·k/(c√d)) of attention scores, before any encoding or processor; none if absent",
        gt=0,
        policy="architecture",
    )
    final_logit_softcapping: float | None = config_field(
        None, "c of the soft cap c·tanh(logit/c) of the logits of the vocabulary; none if absent", gt=0,
        policy="architecture",
    )  # fmt: skip
    query_pre_attn_scalar: float | None = config_field(
        None, "q·k is divided by the square root of this; the head dimension if absent (Gemma 2 27B differs)", gt=0,
        policy="architecture",
    )  # fmt: skip
    embedding_multiplier: float = config_field(
        1.0, "factor on token embeddings before the first layer (Gemma: √hidden_size)", gt=0,
        policy="architecture",
    )  # fmt: skip
    residual_multiplier: float = config_field(
        1.0, "factor on what attention and feed-forward add to the residual stream (Granite: 0.22)", gt=0,
        policy="architecture",
    )  # fmt: skip
    logit_scale: float = config_field(
        1.0, "factor on the logits of the vocabulary, before their soft cap (Command R: 0.0625)", gt=0,
        policy="architecture",
    )  # fmt: skip
    activation: Literal["gelu", "gelu_tanh", "relu", "silu", "geglu", "geglu_tanh", "swiglu"] = config_field(
        "gelu",
        "feed-forward activation; those with _tanh use the tanh approximation of gelu (GPT-2, and GPT-NeoX's "
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
        False, "separate output matrix instead of the transposed embedding", policy="architecture"
    )
    use_bias_in_attn_linear: bool = config_field(True, "bias in the linear layers of attention", policy="architecture")
    use_bias_in_qkv: bool | None = config_field(
        None,
        "bias of queries, keys and values; use_bias_in_attn_linear if absent (Qwen2 sets only this one, like "
        "megatron-core's add_qkv_bias)",
        policy="architecture",
    )
    use_bias_in_mlp: bool = config_field(
        True, "bias in the linear layers of the feed-forward layer", policy="architecture"
    )
    init_method: InitMethod = config_field("normal", "initialization of weights", policy="initialization")
    output_layer_init_method: InitMethod = config_field(
        "scaled_normal", "initialization of the layers that write to the residual stream", policy="initialization"
    )
    init_method_std: float = config_field(
        0.02, "standard deviation of normal and scaled_normal", gt=0, policy="initialization"
    )
    use_mup: bool = config_field(
        False,
        "scale initialization, learning rates and the forward pass by width and depth relative to a base model, so "
        "that hyperparameters tuned on it transfer: muP and CompleteP (docs/optimizers.md)",
        policy="architecture",
    )
    mup_base_hidden_size: int | None = config_field(
        None, "hidden_size of muP's base model", ge=1, le=MAX_SIZE, policy="architecture"
    )
    mup_base_num_attention_heads: int | None = config_field(
        None,
        "attention heads of the base model; if absent, the number that gives this model's head size",
        ge=1,
        le=MAX_SIZE,
        policy="architecture",
    )
    mup_base_num_layers: int | None = config_field(
        None, "layers of the base model (CompleteP); if absent, nothing is scaled with the depth", ge=1, le=MAX_SIZE,
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
        1.0,
        "muP: divisor of attention scores, whose scale is √(base head size) / head size",
        gt=0,
        policy="architecture",
    )
    mup_output_temp: float = config_field(1.0, "muP: divisor of logits", gt=0, policy="architecture")
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
        "multiply each head's output by σ(W·x), with x the layer's input, before the output projection (Qiu et al. "
        "2025): true, one gate per element (as megatron-core); headwise, one per head",
        policy="architecture",
    )
    checkpoint_activations: Literal[False, True, "selective"] = config_field(
        False,
        "activations that the backward pass recomputes: true, whole layers; selective, everything between the two "
        "linear layers of attention (Korthikanti et al. 2022)",
        policy="machine",
    )
    checkpoint_num_layers: int = config_field(
        1, "with checkpoint_activations true: layers per recomputed block", ge=1, le=MAX_SIZE, policy="machine"
    )
    attention_backend: AttentionBackend = config_field(
        "auto",
        "attention backend; auto selects the fastest that supports the position encoding and, on a GPU, passes a "
        "self-check (docs/gpu.md)",
        policy="machine",
    )
    attention_check: bool = config_field(
        True,
        "run the self-check of auto on a GPU: compare backends with float64 and time them, for about 20 s in the "
        "first run of its kind; if false, auto uses sdpa if nothing is added to the scores, else chunked (row blocks)",
        policy="machine",
    )
    compile_regions: bool = config_field(
        True,
        "in training on a GPU, use torch.compile for the operations between matrix products and attention: biases, "
        "residual sums, norms, activations, rotation, the loss; if false, they run one by one, as they always do on a "
        "CPU and in evaluation (docs/gpu.md lists further exceptions)",
        policy="machine",
    )
    attention_chunk_rows: int = config_field(
        128,
        "query rows per block of the chunked backend, and of auto (at least 128 in training without a score processor)",
        ge=1,
        le=MAX_LENGTH,
        policy="machine",
    )


def get_num_kv_heads(model: ModelOptions) -> int:
    """Return the number of key and value heads."""
    return model.num_kv_heads or model.num_attention_heads


def get_head_dim(model: ModelOptions) -> int:
    """Return the head dimension."""
    return model.head_dim or model.hidden_size // model.num_attention_heads


def get_attention_sizes(model: ModelOptions) -> dict[str, int]:
    """Return the sizes for building encodings, processors and temperatures: the fields of `AttentionDims`."""
    return {
        "num_heads": model.num_attention_heads,
        "head_dim": get_head_dim(model),
        "hidden_size": model.hidden_size,
        "train_length": model.seq_length,
        "max_length": model.max_position_embeddings or model.seq_length,
    }


def get_q_hidden_size(model: ModelOptions) -> int:
    """Return the width of a token's queries and attention output: hidden_size unless head_dim is set."""
    return get_head_dim(model) * model.num_attention_heads


def get_kv_hidden_size(model: ModelOptions) -> int:
    """Return the width of a token's keys, which is also that of its values.

    It is the width of the queries unless several query heads share a key.
    """
    return get_head_dim(model) * get_num_kv_heads(model)


def get_output_gate_size(model: ModelOptions) -> int:
    """Return the number of gates in a token's attention output; 0 without attention_output_gate."""
    if model.attention_output_gate == "headwise":
        return model.num_attention_heads
    return get_q_hidden_size(model) if model.attention_output_gate else 0


def get_qk_norm(model: ModelOptions) -> str | None:
    """Return the kind of norm of queries and keys, layernorm or rmsnorm, or None if they are not normalized."""
    return (model.qk_norm or model.norm) if model.use_qk_layernorm else None


def list_norm_parameters(model: ModelOptions, norm: str | None) -> tuple[str, ...]:
    """Return the names of a norm's parameters; empty if `norm` is None."""
    if norm is None:
        return ()
    return ("weight", "bias") if norm == "layernorm" and model.layernorm_bias else ("weight",)


def get_norm_epsilon(model: ModelOptions, norm: str) -> float:
    """Return the epsilon of a kind of norm."""
    return model.layernorm_epsilon if norm == "layernorm" else model.rms_norm_epsilon


def has_qkv_bias(model: ModelOptions) -> bool:
    """Return True if queries, keys and values have a bias."""
    return model.use_bias_in_attn_linear if model.use_bias_in_qkv is None else model.use_bias_in_qkv


GATED_RATIO = 3
"""`intermediate_size` of a gated layer over its width, as in GPT-NeoX.

A gated layer has three matrices where a plain layer has two. Its first matrix has two thirds of `intermediate_size` as
rows, one third for each half (ParallelMLP in GPT-NeoX's transformer.py). Gated and plain layers with the same
`intermediate_size` therefore have the same number of parameters.
"""


def get_ffn_hidden_size(model: ModelOptions) -> int:
    """Return the width of the feed-forward layer, the input of its second matrix."""
    size = model.intermediate_size or 4 * model.hidden_size
    width = size // GATED_RATIO if model.activation in GATED_ACTIVATIONS else size
    return -(-width // model.mlp_multiple_of) * model.mlp_multiple_of


def compute_intermediate_size(width: int, activation: str) -> int:
    """Return the `intermediate_size` of a feed-forward layer with a given width."""
    return width * GATED_RATIO if activation in GATED_ACTIVATIONS else width


MAX_LOGITS = 1 << 30
"""Maximum number of logits that the loss processes together: 12 GB in float32, with their gradients. With a vocabulary
of 50,304 they are those of 21,000 tokens."""


def compute_loss_chunk_length(length: int, batch_size: int, vocab_size: int, max_logits: int = MAX_LOGITS) -> int:
    """Return the number of tokens of each sequence in a batch whose logits the loss processes together."""
    return length if length * batch_size * vocab_size <= max_logits else max(max_logits // (batch_size * vocab_size), 1)


def get_padded_vocab_size(model: ModelOptions, vocab_size: int) -> int:
    """Return the rows of the embedding: the vocabulary size, rounded up."""
    multiple = model.make_vocab_size_divisible_by
    return -(-vocab_size // multiple) * multiple
