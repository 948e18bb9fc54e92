"""Regions compiled by Inductor for a GPU: how much memory their kernels access."""

from typing import Any

import pytest
import torch
from models import build_model
from torch._inductor import compile_fx, config, metrics

from megatron.model.layer import FeedForward
from megatron.model.layer_config import choose_region
from megatron.options.model import ModelOptions
from megatron.options.position import PositionOptions

WIDTH, TOKENS = 256, (512, 8)


def count_accessed_bytes(monkeypatch: pytest.MonkeyPatch, **options: Any) -> int:
    """Return the bytes that the compiled forward and backward pass of an MLP access."""
    monkeypatch.setattr(compile_fx.inductor_metrics_log, "isEnabledFor", lambda level: True)  # else nothing is counted
    sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": WIDTH, "num_attention_heads": 4, "seq_length": TOKENS[0]}
    model = ModelOptions(**sizes, **options)
    gpt = build_model(model, PositionOptions(pos_emb="none"), 64, device="cuda", dtype=torch.bfloat16, backend="sdpa")
    hidden = torch.randn(*TOKENS, WIDTH, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    torch.compiler.reset()
    before = metrics.num_bytes_accessed
    with config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        output, _ = choose_region(FeedForward.forward, compiles=True)(gpt.local_layers[0].mlp, hidden)
        output.sum().backward()
    return metrics.num_bytes_accessed - before


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "silu"])
def test_the_bias_before_an_activation_is_summed_while_its_gradient_is_written(
    activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_bias, without = (
        count_accessed_bytes(monkeypatch, activation=activation, use_bias_in_mlp=bias) for bias in (True, False)
    )
    activation_bytes = TOKENS[0] * TOKENS[1] * 4 * WIDTH * 2
    assert without > 8 * activation_bytes
    assert with_bias - without < activation_bytes / 2
