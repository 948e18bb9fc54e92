"""Llama family in transformers' format: Llama 2 and 3, and SmolLM2.

Families that differ by biases, norms, windows or multipliers reuse most of this module.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.config.schema import Config
from megatron.conversion.hf_config import HFConfigReader, read_activation
from megatron.conversion.hf_layers import ROPE_DIFFERENCE, build_rope_keys, check_rope_scaling, read_rope_options
from megatron.conversion.model_family import (
    EMBEDDING_WEIGHT,
    IDENTITY,
    OUTPUT_WEIGHT,
    Concat,
    ConcatQKV,
    ModelFamily,
    SeparateQKV,
    Transform,
    WeightMapping,
    check_equal_biases,
    map_layers,
)
from megatron.options.model import (
    compute_intermediate_size,
    get_ffn_hidden_size,
    get_head_dim,
    get_num_kv_heads,
    has_qkv_bias,
)

ACTIVATION_TO_HF = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_pytorch_tanh"}
"""Activation of the gate in transformers, by our gated activation."""
GATE_ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh"}
"""Gated activation, by the activation of its gate."""
LLAMA_NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
"""Names of a layer's norms: ours, and the family's."""


LLAMA_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "activation": "silu", "tie_word_embeddings": False, "rope_theta": 10000.0,
}  # fmt: skip
"""Values of missing keys in files of Llama. Files that transformers writes omit keys with a family's default values."""


def read_llama_keys(
    config_reader: HFConfigReader,
    defaults: Mapping[str, Any] | None = None,
    *,
    activation_key: str = "hidden_act",
    rope_options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return our keys for configuration keys that Llama-like families share.

    Args:
        config_reader: reader of config.json.
        defaults: values of missing keys, where they differ from `LLAMA_DEFAULTS`.
        activation_key: key of the gate's activation.
        rope_options: `pos_emb_options`, for families with keys of their own; read from the common keys if None.
    """
    values = {**LLAMA_DEFAULTS, **(defaults or {})}
    hidden_size, num_heads, num_layers, ffn_size, length = (
        config_reader.get_positive_int(name, values[name])
        for name in (
            "hidden_size",
            "num_attention_heads",
            "num_hidden_layers",
            "intermediate_size",
            "max_position_embeddings",
        )
    )
    gate_activation = read_activation(config_reader, activation_key, values["activation"])
    if gate_activation not in GATE_ACTIVATIONS:
        raise config_reader.value_error(activation_key, f"it must be {', '.join(GATE_ACTIVATIONS)}")
    activation = GATE_ACTIVATIONS[gate_activation]
    # Null is not a missing key: it means hidden_size / num_attention_heads, and a key head for each query head.
    sizes = {"head_dim": max(hidden_size // num_heads, 1), "num_key_value_heads": num_heads}
    head_dim, num_kv_heads = (
        config_reader.get_positive_int(name, size if config_reader.is_null(name) else values[name] or size)
        for name, size in sizes.items()
    )
    if rope_options is None:
        rope_options = read_rope_options(
            config_reader,
            base_key="rope_theta",
            fraction_key=None,
            default_fraction=1.0,
            default_base=values["rope_theta"],
        )
    return {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        **({} if num_kv_heads == num_heads else {"num_kv_heads": num_kv_heads}),
        **({} if head_dim * num_heads == hidden_size else {"head_dim": head_dim}),
        "intermediate_size": compute_intermediate_size(ffn_size, activation),
        "seq_length": length,
        "norm": "rmsnorm",
        "rms_norm_epsilon": config_reader.get_positive_float("rms_norm_eps", values["rms_norm_eps"]),
        "activation": activation,
        "no_weight_tying": not config_reader.get_bool("tie_word_embeddings", values["tie_word_embeddings"]),
        "pos_emb": "rotary",
        "pos_emb_options": rope_options,
    }


def _llama_from_hf_config(config_reader: HFConfigReader) -> dict[str, Any]:
    config_reader.get("pretraining_tp")  # affects how a product is split, not its result
    config_reader.require_one_of("rope_interleaved", (None, False), "rotary pairs must be in two halves")
    return {
        **read_llama_keys(config_reader),
        "use_bias_in_attn_linear": config_reader.get_bool("attention_bias", False),
        "use_bias_in_mlp": config_reader.get_bool("mlp_bias", False),
    }


def list_supported_values(config: Config) -> Mapping[str, tuple[Any, ...]]:
    """Return the values that Llama supports, for some of our keys."""
    return {
        "pos_emb": ("rotary",),
        "norm": ("rmsnorm",),
        "activation": tuple(ACTIVATION_TO_HF),
        "gpt_j_residual": (False,),
        "head_dim": (config.model.head_dim,),
    }


def check_full_rotation(config: Config) -> str | None:
    """Return the conflict of a family that rotates whole heads with frequencies known to transformers, or None."""
    if reason := check_rope_scaling(config.position.pos_emb_options):
        return reason
    fraction = config.position.pos_emb_options.get("fraction", 1.0)
    return None if fraction == 1 else f"pos_emb_options.fraction is {fraction}; this family rotates whole heads"


def find_llama_conflict(config: Config) -> str | None:
    """Return the conflict of a family that rotates whole heads and has equal bias settings, or None."""
    return check_full_rotation(config) or check_equal_biases(config)


def write_llama_keys(config: Config) -> dict[str, Any]:
    """Return the keys that `read_llama_keys` reads."""
    model, options = config.model, config.position.pos_emb_options
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": get_num_kv_heads(model),
        "head_dim": get_head_dim(model),
        "intermediate_size": get_ffn_hidden_size(model),
        "max_position_embeddings": model.seq_length,
        "rms_norm_eps": model.rms_norm_epsilon,
        "hidden_act": ACTIVATION_TO_HF[model.activation],
        "rope_theta": options.get("base", 10000.0),
        **build_rope_keys(options, supports_fraction=False),
    }


def _llama_to_hf_keys(config: Config) -> dict[str, Any]:
    biases = {"attention_bias": config.model.use_bias_in_attn_linear, "mlp_bias": config.model.use_bias_in_mlp}
    return {**write_llama_keys(config), **biases}


def map_llama_weights(
    config: Config,
    norms: Mapping[str, str],
    norm_transform: Transform = IDENTITY,
    *,
    rotates_adjacent_pairs: bool = False,
    is_fused: bool = False,
) -> Iterator[WeightMapping]:
    """Yield the mappings of all weights of a Llama-like family.

    Args:
        config: our configuration.
        norms: our and the family's names of a layer's norms. Norms of queries and keys are added if the configuration
            has them.
        norm_transform: transform of all norms.
        rotates_adjacent_pairs: True if adjacent elements of a head are rotated together rather than its halves.
        is_fused: True if queries, keys and values are one tensor, and gate and up projection are another (Phi-3).
    """
    model = config.model
    num_heads = model.num_attention_heads, get_num_kv_heads(model)
    qkv_transform = ConcatQKV(*num_heads) if is_fused else SeparateQKV(*num_heads, rotates_adjacent_pairs)
    qkv_names = ("qkv_proj",) if is_fused else ("q_proj", "k_proj", "v_proj")
    up_names, up_transform = (("gate_up_proj",), IDENTITY) if is_fused else (("gate_proj", "up_proj"), Concat(2))

    def layer_table(layer_idx: str) -> Iterator[tuple[str, Any, Transform]]:
        hf_prefix = f"model.layers.{layer_idx}"
        for megatron_name, hf_name in norms.items():
            yield f"{megatron_name}.weight", f"{hf_prefix}.{hf_name}.weight", norm_transform
        for which in "qk" if model.use_qk_layernorm else "":
            hf_name = f"{hf_prefix}.self_attn.{which}_norm.weight"
            yield f"self_attention.{which}_layernorm.weight", hf_name, norm_transform
        for part, has_qkv, has_attention_output, has_mlp in (
            ("weight", True, True, True),
            ("bias", has_qkv_bias(model), model.use_bias_in_attn_linear, model.use_bias_in_mlp),
        ):
            if has_qkv:
                hf_names = [f"{hf_prefix}.self_attn.{name}.{part}" for name in qkv_names]
                yield f"self_attention.linear_qkv.{part}", hf_names, qkv_transform
            if has_attention_output:
                yield f"self_attention.linear_proj.{part}", f"{hf_prefix}.self_attn.o_proj.{part}", IDENTITY
            if has_mlp:
                hf_names = [f"{hf_prefix}.mlp.{name}.{part}" for name in up_names]
                yield f"mlp.linear_fc1.{part}", hf_names, up_transform
                yield f"mlp.linear_fc2.{part}", f"{hf_prefix}.mlp.down_proj.{part}", IDENTITY

    yield WeightMapping(EMBEDDING_WEIGHT, ("model.embed_tokens.weight",))
    yield from map_layers(config, layer_table)
    yield WeightMapping("decoder.final_layernorm.weight", ("model.norm.weight",), norm_transform)
    if model.no_weight_tying:
        yield WeightMapping(OUTPUT_WEIGHT, ("lm_head.weight",))


LLAMA = ModelFamily(
    model_type="llama",
    architecture="LlamaForCausalLM",
    base_model_prefix="model.",
    from_hf_config=_llama_from_hf_config,
    supported_values=list_supported_values,
    to_hf_keys=_llama_to_hf_keys,
    known_difference=ROPE_DIFFERENCE,
    weight_mappings=lambda config: map_llama_weights(config, LLAMA_NORMS),
    ignored_pattern=r".*\brotary_emb\.inv_freq",
    find_other_conflict=find_llama_conflict,
)
