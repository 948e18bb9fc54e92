"""Keys of GPT-NeoX, KERPLE and DAPE, as data.

Most of Farfield's keys are GPT-NeoX's own. These tables cover the rest. Each key is either *understood* (perhaps under
our name), *without effect* here for a stated reason, or *not supported*, with an alternative. Nothing is ignored
silently: a note at the start of a run lists keys without effect. `docs/configuration.md` shows these tables.
`neox_rules.py` and `neox_deferred_rules.py` define the kinds of rules; `neox_unsupported.py` lists the keys without
effect and those that are not supported.
"""

from __future__ import annotations

from typing import Any

from megatron.config.neox_deferred_rules import (
    AgreeingSwitches,
    EventSwitch,
    FractionOf,
    LayerFrequency,
    MethodOption,
    MethodOptionAlias,
    StepKey,
    StepKeyRule,
    ValueSwitch,
    WindowSize,
)
from megatron.config.neox_rules import (
    Alias,
    ChosenMethods,
    NeoxRule,
    PositionAlias,
    UnsupportedValue,
    ValidatedNoop,
    ValueAlias,
    ValueRule,
)
from megatron.config.neox_unsupported import (
    DEEPSPEED_ADVICE,
    FLOAT32_SOFTMAX,
    IGNORED,
    UNSUPPORTED,
    find_attention_config_problem,
    find_layer_scaling_problem,
)

_OFFLOAD = ("cpu", "none")

ALIASES = (
    Alias("save_interval", "checkpoint_factor"),
    Alias("batch_size", "train_micro_batch_size_per_gpu"),
    Alias("feedforward_size", "intermediate_size"),
    Alias("clip_grad", "gradient_clipping"),
    Alias("lr", "optimizer.params.lr"),
    Alias("lr_warmup_fraction", "warmup"),
    # GPT-NeoX's pull request 1375, which decays along a cosine
    Alias("wsd_decay_ratio", "lr_wsd_decay_fraction", implied={"lr_wsd_decay_style": "cosine"}),
    Alias("optimizer_type", "optimizer.type"),
    Alias("optimizer.params.weight_decay", "weight_decay"),
    Alias("zero_stage", "zero_optimization.stage"),
    Alias("zero_reduce_scatter", "zero_optimization.reduce_scatter"),
    Alias("zero_contiguous_gradients", "zero_optimization.contiguous_gradients"),
    Alias("zero_reduce_bucket_size", "zero_optimization.reduce_bucket_size"),
    Alias("zero_allgather_bucket_size", "zero_optimization.allgather_bucket_size"),
    Alias("zero_optimization.cpu_offload", "zero_optimization.offload_optimizer.device", _OFFLOAD),
    Alias("zero_optimization.cpu_offload_param", "zero_optimization.offload_param.device", _OFFLOAD),
    Alias("zero_optimization.cpu_offload_params", "zero_optimization.offload_param.device", _OFFLOAD),
    Alias("zero_optimization.cpu_offload_use_pin_memory", "zero_optimization.offload_optimizer.pin_memory"),
    Alias("loss_scale", "fp16.loss_scale"),
    Alias("loss_scale_window", "fp16.loss_scale_window"),
    Alias("hysteresis", "fp16.hysteresis"),
    Alias("min_scale", "fp16.min_loss_scale"),
    Alias("account", "slurm.account"),
    Alias("peak_theoretical_tflops", "peak_tflops"),
    # Megatron-LM's
    Alias("recompute_granularity", "checkpoint_activations", null_value=False),
    Alias("recompute_activations", "checkpoint_activations", ("selective", False)),
    Alias("recompute_num_layers", "checkpoint_num_layers", null_value=1),
    # Theirs counts the keys before a token; ours also counts the token (`get_attn_mask` in GPT-NeoX's utils.py).
    Alias("sliding_window_width", "attention_window", offset=1),
    # GPT-NeoX's pull request 1416, and Megatron's names in its dataset configuration and on its command line.
    Alias("inter_document_attention_masking", "attention_mask", ("document", "causal")),
    Alias("inter_document_masking", "attention_mask", ("document", "causal")),
    Alias("dataloader_inter_document_masking", "attention_mask", ("document", "causal")),
)

# Megatron's older spelling.
AGREEING_SWITCHES = (
    AgreeingSwitches(
        ("reset_attention_mask", "reset_position_ids"),
        "attention_mask",
        "document",
        "causal",
        "documents are either fully separate or not",
    ),
)

# Patterns of layers in megatron-core (`TransformerConfig`, `is_layer_window_attention`).
LAYER_PATTERNS = (
    WindowSize(),
    LayerFrequency("window_attn_skip_freq", "attention_window", None, 0),
    LayerFrequency("no_rope_freq", "pos_emb", "none", 1, ("rotary",), divides=True),
)

_PROCESSOR_WIDTH = MethodOption("score_processor", ("dape", "cdape"), "width")
_KERNEL_SIZE = MethodOption("score_processor", ("cdape",), "kernel_size")

METHOD_OPTION_ALIASES = (
    MethodOptionAlias("rotary_pct", (MethodOption("pos_emb", ("rotary",), "fraction"),)),
    MethodOptionAlias("rotary_emb_base", (MethodOption("pos_emb", ("rotary",), "base"),)),
    MethodOptionAlias("rpe_num_buckets", (MethodOption("pos_emb", ("t5",), "num_buckets"),)),
    MethodOptionAlias("rpe_max_distance", (MethodOption("pos_emb", ("t5",), "max_distance"),)),
    # Also sets the width of DAPE's FIRE network. Its FIRE has a threshold of noise_seq_length / 2, where ours is half
    # of seq_length times the multiplier, and parameters in each layer, to which GPT-NeoX applies weight decay.
    MethodOptionAlias("mlp_width", (_PROCESSOR_WIDTH, MethodOption("pos_emb", ("fire",), "width"))),
    MethodOptionAlias(
        "noise_seq_length",
        (
            MethodOption(
                "pos_emb",
                ("fire",),
                "multiplier_start",
                divisor_key="seq_length",
                implied={"pos_emb_per_layer": True, "decay_positions": True},
            ),
        ),
    ),
    MethodOptionAlias("dapev2_kernel", (_KERNEL_SIZE,)),
    MethodOptionAlias("capev2_kernel", (_KERNEL_SIZE,)),
)

FRACTIONS = (
    FractionOf("expansion_factor", "hidden_size", "intermediate_size"),
    FractionOf("lr_decay_fraction", "train_iters", "lr_decay_iters"),
)

# Their fused kernel of bias and gelu computes the tanh approximation. No other activation has one.
VALUE_SWITCHES = (ValueSwitch("bias_gelu_fusion", "activation", {"gelu": "gelu_tanh"}),)

# For `pos_emb` see POSITION_ALIASES.
VALUE_ALIASES: dict[str, dict[Any, Any]] = {
    "precision": {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"},
    "data_impl": {"infer": "mmap"},
    "optimizer.type": {"adam": "Adam", "adamw": "AdamW", "lion": "Lion", "muon": "Muon"},
    # Megatron-LM's names, and those of GPT-NeoX's pull request 1194.
    "lr_decay_style": {
        "WSD": "wsd",
        "inverse-square-root": "inverse_sqrt",
        "infinite_cosine": "infinite",
        "cosine_cooldown_infinite": "infinite",
    },
    "lr_wsd_decay_style": {"1-sqrt": "minus_sqrt", "sqrt": "minus_sqrt"},
    "activation": {"swish": "silu"},
    "checkpoint_activations": {"full": True},
    "norm": {"te_layernorm": "layernorm", "te_rmsnorm": "rmsnorm"},
    "launcher": dict.fromkeys(("pdsh", "openmpi", "mpich", "impi", "mvapich"), "auto"),
}

_OTHER_INIT = dict.fromkeys(
    ("orthogonal", "scaled_orthogonal", "single_residual_scaled_normal"), "use normal or scaled_normal"
)

UNSUPPORTED_VALUES: dict[str, dict[Any, str]] = {
    "norm": dict.fromkeys(("scalenorm", "non_parametric_layernorm"), "use layernorm or rmsnorm"),
    "activation": {
        **dict.fromkeys(("softsign", "mish"), "use gelu, relu or silu"),
        **dict.fromkeys(("glu", "reglu", "bilinear"), "use geglu or swiglu"),
    },
    "init_method": _OTHER_INIT,
    "output_layer_init_method": _OTHER_INIT,
    "optimizer.type": dict.fromkeys(
        ("OneBitAdam", "onebitadam", "CPUAdam", "cpu_adam", "cpu_torch_adam", "sm3", "madgrad_wd", "sgd"),
        "use Adam, AdamW, Muon or Lion",
    ),
    "data_impl": dict.fromkeys(("cached", "lazy"), "only memory-mapped .bin/.idx is read; prepare the data again"),
    "tokenizer_type": {
        "HFGPT2Tokenizer": "use GPT2BPETokenizer with vocab_file and merge_file, or HFTokenizer with a tokenizer.json",
        "CharLevelTokenizer": "use bytes, which is similar and has an end-of-document token",
        "TiktokenTokenizer": "use HFTokenizer with a tokenizer.json",
    },
    "pos_emb": {
        "xpos": "use rotary with pos_emb_options.xpos: true",
        **{
            name: f"use rotary with pos_emb_options.scaling: {name}"
            for name in ("yarn", "ntk", "hope", "p_rope", "longrope", "selfextend", "rerope")
        },
        "kerple_power_original": "it is ALiBi with slopes of at least 0.01; use alibi, which has no such bound",
    },
    "lr_decay_style": {
        "exponential": "use cosine, linear, constant or inverse_sqrt",
        **dict.fromkeys(
            ("infinite_inv_sqrt", "inverse_sqrt_infinite"), "use infinite with lr_cooldown_style: inverse_sqrt"
        ),
    },
    "zero_optimization.offload_optimizer.device": {"nvme": "use cpu"},
    "zero_optimization.offload_param.device": {"nvme": "use cpu"},
}


# With its processors, DAPE uses another activation in FIRE's network than without.
_FIRE_IN_DAPE = {"activation": "leaky_relu"}

# GPT-NeoX multiplies the table by √d and initializes it with Xavier's normal distribution.
_T5_OF_NEOX = {"root_scale": True, "xavier_init": True}

# DAPE initializes the projection of sinusoids as torch.nn.Linear does; GPT-NeoX does not initialize it again.
_XL_OF_DAPE = {"linear_init": True}

# DAPE has separate parameters in each layer; KERPLE shares them between layers.
POSITION_ALIASES: dict[str, PositionAlias] = {
    "rpe": PositionAlias("t5", None, None, _T5_OF_NEOX, decays=True),
    "kerple_power_ap_": PositionAlias("kerple_power", decays=True),
    "kerple_power__ap": PositionAlias("gaussian_weight2", decays=True),
    "kerple_power_ap_ap": PositionAlias("kerple_bias_weight", decays=True),
    "kerple": PositionAlias("kerple_log", None, True, decays=True),
    "kerple_c": PositionAlias("kerple_log", "dape", True, decays=True),
    "kerple_dapev1": PositionAlias("kerple_log", "dape", True, decays=True),
    "kerple_dapev2": PositionAlias("kerple_log", "cdape", True, decays=True),
    "kerple_capev2": PositionAlias("kerple_log", "cdape", True, decays=True),
    "capev2": PositionAlias(
        "kerple_log", "cdape", True, decays=True
    ),  # spelled this way in DAPE's 125M_kerple_capev2.yml
    "alibi_c": PositionAlias("alibi", "dape"),
    "alibi_dapev2": PositionAlias("alibi", "cdape"),
    "alibi_capev2": PositionAlias("alibi", "cdape"),
    "nope_c": PositionAlias("none", "dape"),
    "nope_c_ffn": PositionAlias("none", "cdape"),
    "nope_dapev2": PositionAlias("none", "cdape"),
    "rope_dapev1": PositionAlias("rotary", "dape"),
    "rope_dapev2": PositionAlias("rotary", "cdape"),
    "fire_c": PositionAlias("fire", "dape", True, _FIRE_IN_DAPE, decays=True),
    "fire_dapev2": PositionAlias("fire", "cdape", True, _FIRE_IN_DAPE, decays=True),
    "fire_capev2": PositionAlias("fire", "cdape", True, _FIRE_IN_DAPE, decays=True),
    "xl_bias": PositionAlias("transformer_xl", None, True, _XL_OF_DAPE, decays=True),
    "xl_bias_c": PositionAlias("transformer_xl", "dape", True, _XL_OF_DAPE, decays=True),
}

# Theirs profiles the step after profile_step_start, and takes memory snapshots at the same steps.
_FIRST_STEP = StepKey("profile_step_start", 10, offset=1)
_LAST_STEP = StepKey("profile_step_stop", 12)
EVENT_SWITCHES = (
    EventSwitch("profile", {"profile.from": _FIRST_STEP, "profile.to": _LAST_STEP}),
    EventSwitch("memory_profiling", {"memory_snapshot": _LAST_STEP}),
    StepKeyRule(_FIRST_STEP, ("profile",)),
    StepKeyRule(_LAST_STEP, ("profile", "memory_profiling")),
)


def find_deepspeed_section_problem(value: Any, methods: ChosenMethods) -> str | None:
    """Return what is wrong with the first section of DeepSpeed's configuration that would have an effect, or None."""
    if value is None:
        return None
    if not isinstance(value, dict):
        return f"is {value!r}; it must be a mapping of keys to values"
    for key, section in value.items():
        rule = RULES.get(key)
        if rule is None or not rule.has_no_effect(section):
            return f"{key} is not supported: {(rule.advice if rule else '') or DEEPSPEED_ADVICE}"
    return None


VALIDATED_NOOPS = (
    ValidatedNoop(
        "attention_config", find_attention_config_problem, "every layer attends to all earlier tokens (global)"
    ),
    ValidatedNoop("apply_query_key_layer_scaling", find_layer_scaling_problem, FLOAT32_SOFTMAX),
    ValidatedNoop("deepspeed_extra_args", find_deepspeed_section_problem, "its sections have no effect here"),
)

UNDERSTOOD: tuple[NeoxRule, ...] = (
    *ALIASES, *METHOD_OPTION_ALIASES, *FRACTIONS, *VALUE_SWITCHES, *AGREEING_SWITCHES, *LAYER_PATTERNS, *EVENT_SWITCHES
)  # fmt: skip

RULES: dict[str, NeoxRule] = {
    key: rule for rules in (UNDERSTOOD, VALIDATED_NOOPS, IGNORED, UNSUPPORTED) for rule in rules for key in rule.keys
}
"""Rule for each key of these projects; nested keys are dotted."""

_VALUE_RULE_TABLES: tuple[dict[str, dict[Any, ValueRule]], ...] = (
    {
        key: {value: ValueAlias(farfield_value) for value, farfield_value in values.items()}
        for key, values in VALUE_ALIASES.items()
    },
    {
        key: {value: UnsupportedValue(text) for value, text in values.items()}
        for key, values in UNSUPPORTED_VALUES.items()
    },
    {"pos_emb": dict(POSITION_ALIASES)},
)
VALUE_RULES: dict[str, dict[Any, ValueRule]] = {
    key: {value: rule for table in _VALUE_RULE_TABLES for value, rule in table.get(key, {}).items()}
    for table in _VALUE_RULE_TABLES
    for key in table
}
"""Rule for each of their values of our keys."""
