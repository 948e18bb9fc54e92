"""Models of the installed transformers whose attention is one of our methods."""

from collections.abc import Iterator
from pathlib import Path

from tools.methods.comparison import HEADS, LAYERS, VOCABULARY, WIDTH, ModelComparison, build_gpt, share_weights

REPOSITORY = None
"""It is installed."""
NOTES = """\
`logn` is not in the table: Qwen's `use_logn_attn`, whose code is none of transformers' own, is the formula that
`tests/position/test_temperatures.py` computes in float64.
"""


def list_comparisons(clone: Path | None) -> Iterator[ModelComparison]:
    """Of Llama 4's temperature."""
    from transformers import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4ForCausalLM

    for floor_scale, attn_scale in ((8192, 0.1), (5, 0.7)):
        config = Llama4TextConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=WIDTH, intermediate_size_mlp=WIDTH,
            num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=WIDTH // HEADS,
            moe_layers=[], no_rope_layers=[0] * LAYERS, attn_temperature_tuning=True, floor_scale=floor_scale,
            attn_scale=attn_scale, rms_norm_eps=1e-5, attn_implementation="eager",
        )  # fmt: skip
        theirs = Llama4ForCausalLM(config).eval()
        options = {"floor_scale": floor_scale, "attn_scale": attn_scale}
        ours = build_gpt(pos_emb="none", attention_temperature="llama4", attention_temperature_options=options)
        share_weights(ours, theirs, "transformers")
        title = f"llama4, floor_scale {floor_scale:,}, attn_scale {attn_scale}: transformers' Llama 4 without rotation"
        yield ModelComparison(title, ours, lambda tokens, _, model=theirs: model(tokens).logits)
