"""What config.json and generation_config.json of an export say, from a run's configuration."""

from typing import Any

from megatron.config.schema import Config
from megatron.data.tokenizers import Tokenizer
from megatron.model.options import feed_forward_size, has_qkv_bias, kv_heads, padded_vocabulary

CLASSES = {
    "AutoConfig": "configuration_farfield.FarfieldConfig",
    "AutoModel": "modeling_farfield.FarfieldModel",
    "AutoModelForCausalLM": "modeling_farfield.FarfieldForCausalLM",
}


def model_description(config: Config, tokenizer: Tokenizer, dtype: str) -> dict[str, Any]:
    """config.json of the bundled code (`FarfieldConfig` explains the names).

    Args:
        dtype: of the weights, as torch names it.
    """
    model, position = config.model, config.position
    return {
        "architectures": ["FarfieldForCausalLM"],
        "auto_map": CLASSES,
        "model_type": "farfield",
        "dtype": dtype,
        "vocab_size": padded_vocabulary(model, tokenizer.vocab_size),
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": kv_heads(model),
        "intermediate_size": feed_forward_size(model),
        "hidden_act": model.activation,
        "norm": model.norm,
        "norm_epsilon": model.layernorm_epsilon if model.norm == "layernorm" else model.rms_norm_epsilon,
        "parallel_residual": model.gpt_j_residual,
        "tied_norm": model.gpt_j_tied,
        "qkv_bias": has_qkv_bias(model),
        "attention_bias": model.use_bias_in_attn_linear,
        "mlp_bias": model.use_bias_in_mlp,
        "tie_word_embeddings": not model.no_weight_tying,
        "train_length": model.seq_length,
        "max_position_embeddings": model.seq_length,
        "position_table": model.max_position_embeddings or model.seq_length,
        "pos_emb": position.pos_emb,
        "pos_emb_options": position.pos_emb_options,
        "pos_emb_per_layer": position.pos_emb_per_layer,
        "score_processor": position.score_processor,
        "score_processor_options": position.score_processor_options,
        "attention_window": position.attention_window,
        "randomized_positions": position.randomized_positions,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "attention_rows": model.attention_chunk_rows,
        "initializer_range": model.init_method_std,
        "use_cache": position.randomized_positions is None,
        **_special(tokenizer),
    }


def generation_description(config: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    """generation_config.json: the rows that only pad the vocabulary are never drawn."""
    rows = padded_vocabulary(config.model, tokenizer.vocab_size)
    padding = list(range(tokenizer.vocab_size, rows))
    return {
        **_special(tokenizer),
        "use_cache": config.position.randomized_positions is None,
        **({"suppress_tokens": padding} if padding else {}),
    }


def _special(tokenizer: Tokenizer) -> dict[str, int]:
    return {"eos_token_id": tokenizer.eod, "pad_token_id": tokenizer.eod}
