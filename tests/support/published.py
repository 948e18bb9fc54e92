"""Small random models of other families, written by transformers, with biases and norms that affect the results."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from megatron.data.tokenizers import train_bpe

IS_4 = transformers.__version__.startswith("4.")
"""True if the models are those of transformers 4, which has the options of rotations under other keys."""
LENGTH, WIDTH, LAYERS, ROWS, TOKENS = 48, 32, 2, 304, 290
"""Sizes of all models; the number of tokens is that of the tokenizer next to them."""

SHAPE = {"hidden_size": WIDTH, "num_attention_heads": 4, "num_hidden_layers": LAYERS, "vocab_size": ROWS}
OF_NEOX = {**SHAPE, "intermediate_size": 80, "max_position_embeddings": LENGTH}
OF_GPT2 = {"n_embd": WIDTH, "n_head": 4, "n_layer": LAYERS, "n_positions": LENGTH, "vocab_size": ROWS}
OF_OPT = {**SHAPE, "ffn_dim": 80, "max_position_embeddings": LENGTH, "word_embed_proj_dim": WIDTH}
OF_LLAMA = {**OF_NEOX, "num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e3, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 24}

LOCAL, FULL = "sliding_attention", "full_attention"
MIXED = {"layer_types": [LOCAL, FULL], "sliding_window": 9}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.2, 2.0, 3.5, 7.0],
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "pythia": ("GPTNeoX", {**OF_NEOX, "rotary_pct": 0.25}),
    "neox, serial, tied": ("GPTNeoX", {**OF_NEOX, "use_parallel_residual": False, "tie_word_embeddings": True}),
    "neox, no bias, tanh": ("GPTNeoX", {**OF_NEOX, "attention_bias": False, "hidden_act": "gelu_new"}),
    "gpt2": ("GPT2", OF_GPT2),
    "gpt2, exact gelu, untied": (
        "GPT2", {**OF_GPT2, "activation_function": "gelu", "n_inner": 48, "tie_word_embeddings": False}
    ),
    "opt": ("OPT", OF_OPT),
    "opt, no bias": ("OPT", {**OF_OPT, "enable_bias": False, "activation_function": "gelu"}),
    "llama": ("Llama", OF_LLAMA),
    "llama3, tied": ("Llama", {**OF_LLAMA, "rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama, yarn, biases": (
        "Llama", {**OF_LLAMA, "rope_parameters": YARN, "attention_bias": True, "mlp_bias": True}
    ),
    "llama, linear, one head": (
        "Llama",
        {
            **OF_LLAMA, "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        },
    ),
    "qwen2": ("Qwen2", OF_LLAMA),
    "qwen3": ("Qwen3", {**OF_LLAMA, "head_dim": 12}),
    "qwen3, biases, tied": (
        "Qwen3", {**OF_LLAMA, "head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}
    ),
    "olmo2": ("Olmo2", OF_LLAMA),
    "gemma": ("Gemma", {**OF_LLAMA, "head_dim": 12}),
    "gemma2": (
        "Gemma2",
        {
            **OF_LLAMA, "head_dim": 8, "query_pre_attn_scalar": 11, "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 4.0, "layer_types": ["full_attention"] * LAYERS,
        },
    ),
    "gemma2, as published": ("Gemma2", {**OF_LLAMA, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 9}),
    "smollm3": (
        "SmolLM3", {**OF_LLAMA, "no_rope_layer_interval": 2, "pad_token_id": None, "tie_word_embeddings": True}
    ),
    "smollm3, windows, biases": (
        "SmolLM3",
        {
            **OF_LLAMA, "pad_token_id": None, "no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"], "attention_bias": True, "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "cohere": ("Cohere", {**OF_LLAMA, "logit_scale": 1.5}),
    "cohere2": (
        "Cohere2",
        {
            **OF_LLAMA, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9,
            "attention_bias": True, "logit_scale": 2.5,
        },
    ),
    "mistral": ("Mistral", {**OF_LLAMA, "sliding_window": 9}),
    "mistral, yarn, tied, no window": (
        "Mistral",
        {
            **OF_LLAMA, "sliding_window": None, "head_dim": 12, "rope_parameters": YARN, "tie_word_embeddings": True,
        },
    ),
    "qwen2, windows from a layer on": (
        "Qwen2", {**OF_LLAMA, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    ),
    "qwen3, windows": ("Qwen3", {**OF_LLAMA, **MIXED, "head_dim": 12, "use_sliding_window": True}),
    "gemma3": (
        "Gemma3Text",
        {
            **OF_LLAMA, **MIXED, "head_dim": 12, "query_pre_attn_scalar": 11, "final_logit_softcapping": 4.0,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
                LOCAL: {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "gemma3, windows, biases, untied": (
        "Gemma3Text",
        {
            **OF_LLAMA, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 9, "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "olmo3": (
        "Olmo3",
        {
            **OF_LLAMA, **MIXED,
            "rope_parameters": {
                FULL: {**YARN, "rope_theta": 5e5}, LOCAL: {"rope_type": "default", "rope_theta": 5e5}
            },
        },
    ),
    "olmo3, windows, biases": ("Olmo3", {**OF_LLAMA, "sliding_window": 9, "attention_bias": True}),
    "granite": (
        "Granite",
        {
            **OF_LLAMA, "embedding_multiplier": 12.0, "attention_multiplier": 0.5, "residual_multiplier": 0.22,
            "logits_scaling": 0.125, "rope_parameters": LLAMA3,
        },
    ),
    "granite, biases, tied": (
        "Granite",
        {
            **OF_LLAMA, "attention_multiplier": 0.25, "residual_multiplier": 1.5, "attention_bias": True,
            "mlp_bias": True, "tie_word_embeddings": True,
        },
    ),
    "phi3": (
        "Phi3",
        {**OF_LLAMA, "sliding_window": 9, "pad_token_id": None, "rope_parameters": {"partial_rotary_factor": 0.5}},
    ),
    "phi3, longrope": (
        "Phi3",
        {**OF_LLAMA, "pad_token_id": None, "original_max_position_embeddings": 24, "rope_parameters": LONGROPE},
    ),
    "gemma2, windows, no caps": (
        "Gemma2",
        {
            **OF_LLAMA, "head_dim": 12, "query_pre_attn_scalar": 12, "attn_logit_softcapping": None,
            "final_logit_softcapping": None, "layer_types": ["sliding_attention"] * LAYERS, "sliding_window": 9,
        },
    ),
}  # fmt: skip


def model_of(name: str) -> PreTrainedModel:
    """Return a model with weights of realistic size and no two equal values."""
    return build_random_model(*MODELS[name], seed=sum(map(ord, name)))


def build_random_model(family: str, keys: dict[str, Any], seed: int) -> PreTrainedModel:
    """Build a family's model with random weights, which no two seeds share."""
    configuration = getattr(transformers, f"{family}Config")(**(use_version_4_keys(family, keys) if IS_4 else keys))
    if IS_4 and family == "Gemma2":
        configuration._attn_implementation = "eager"  # the default drops the cap of scores
    head = "GPT2LMHeadModel" if family == "GPT2" else f"{family.removesuffix('Text')}ForCausalLM"
    model: PreTrainedModel = getattr(transformers, head)(configuration).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.15 if parameter.dim() > 1 else 0.2
            parameter.add_(spread * torch.randn(parameter.shape, generator=generator))
    return model


def use_version_4_keys(family: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return a family's keys with `rope_theta` and `rope_scaling`, as transformers 4 reads them, for `rope_parameters`.

    Skip the test if transformers 4 has no keys for these rotations.
    """
    keys = dict(keys)
    rope = dict(keys.pop("rope_parameters", None) or {})
    if family == "Olmo3":
        bases = {each["rope_theta"] for each in rope.values()} or {5e5}
        if bases != {5e5}:
            pytest.skip("transformers 4 and 5 differ in the base of OLMo 3's windows unless it is 500,000")
        keys["rope_theta"] = 5e5  # the default of transformers 5; that of transformers 4 is 10,000
    if FULL in rope:
        if family == "Gemma3Text":
            keys["rope_local_base_freq"] = rope[LOCAL]["rope_theta"]
        rope = dict(rope[FULL])
    if family == "Phi3" and "attention_factor" in rope:
        pytest.skip("transformers 4 accepts no attention_factor for Phi-3")
    keys |= {name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    kind = rope.pop("rope_type", "default")
    if kind != "default":
        keys["rope_scaling"] = {"type" if family == "Phi3" else "rope_type": kind, **rope}
    return keys


def written(name: str, folder: Path, **options: Any) -> PreTrainedModel:
    """Write a model and a tokenizer into a folder."""
    model = model_of(name)
    model.save_pretrained(folder, **options)
    write_tokenizer(folder)
    return model


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer trained on a few words."""
    train_bpe(["the cat sat on the mat", "a dog ate the cat's food " * 9, "def f(x): return x"], 300, folder / "x.json")
    (folder / "x.json").rename(folder / "tokenizer.json")


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return transformers' logits."""
    return model(input_ids=tokens).logits


class RunsCode:
    """Object that runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('executed')",))
