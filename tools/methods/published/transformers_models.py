"""Models of the installed transformers package whose attention is one of our methods."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from tools.methods.comparison import (
    HEADS,
    LAYERS,
    VOCABULARY,
    WIDTH,
    AttentionComparison,
    Comparison,
    ModelComparison,
    build_gpt,
    copy_attention,
    copy_weights,
)

REPOSITORY = None
"""No repository: the package is installed."""
NOTES = """\
`logn` is not in the table: Qwen's `use_logn_attn` is not part of transformers' own code.
`tests/position/test_temperatures.py` computes its formula in float64.
"""


def compare_sinks() -> AttentionComparison:
    """Compare gpt-oss's attention in plain PyTorch with a window. Its mixture-of-experts layers have no counterpart."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    generator, window = torch.Generator().manual_seed(3), 20
    *inputs, output = projections = [0.15 * torch.randn(WIDTH, WIDTH, generator=generator) for _ in range(4)]
    ours = build_gpt(pos_emb="none", softmax_type="learnable", attention_window=window)
    copy_attention(ours, *projections)
    sinks, module = ours.decoder.layers[0].self_attention.core_attention.sink.logits, nn.Module()
    with torch.no_grad():
        sinks.copy_(torch.linspace(-1, 3, HEADS))
    module.sinks, module.num_key_value_groups = sinks, 1

    def call(x: Tensor) -> Tensor:
        q, k, v = ((x @ weight.T).unflatten(2, (HEADS, -1)).transpose(1, 2) for weight in inputs)
        distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        mask = torch.zeros(distance.shape).masked_fill((distance < 0) | (distance >= window), float("-inf"))
        attended, _ = eager_attention_forward(module, q, k, v, mask[None, None], scaling=(WIDTH // HEADS) ** -0.5)
        return attended.flatten(2) @ output.T

    return AttentionComparison("learned sinks, window 20: one layer's attention, transformers' gpt-oss", ours, call)


def list_comparisons(clone: Path | None) -> Iterator[Comparison]:
    """Yield comparisons of Llama 4's temperature and of gpt-oss's sinks."""
    yield compare_sinks()
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
        copy_weights(ours, theirs, "transformers")
        title = f"llama4, floor_scale {floor_scale:,}, attn_scale {attn_scale}: transformers' Llama 4 without rotation"
        yield ModelComparison(title, ours, lambda tokens, _, model=theirs: model(tokens).logits)
