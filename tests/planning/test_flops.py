"""Estimated FLOPs equal those that a model counts for itself."""

from pathlib import Path
from typing import Any

import pytest
from models import build_model
from tiny_runs import VOCABULARY, tiny_config

from megatron.planning.model_costs import estimate_forward_flops, plan_model
from megatron.position.catalog import list_encodings, list_processors


def check(**keys: Any) -> None:
    config = tiny_config(Path(), **keys)
    gpt = build_model(config.model, config.position, VOCABULARY, device="meta")
    assert estimate_forward_flops(plan_model(config), VOCABULARY).training_flops_per_token == pytest.approx(
        gpt.count_flops_per_token(config.model.seq_length), rel=1e-12
    )


@pytest.mark.parametrize("processor", ["none", *list_processors()])
def test_every_method(processor: str) -> None:
    for name in list_encodings():
        check(pos_emb=name, score_processor=processor)


@pytest.mark.parametrize(
    "keys",
    [
        {"attention_window": 5},
        {"attention_window": 500},
        {"attention_temperature": "ssmax"},
        {"softmax_type": "learnable", "attention_output_gate": True, "num_kv_heads": 1, "head_dim": 24},
        {"attention_output_gate": "headwise"},
        {"num_layers": 4, "pos_emb": ["rotary", "cope"], "attention_window": [None, 5, 3, 7],
         "score_processor": ["cdape", "none"], "attention_temperature": ["ssmax", "none"]},
        {"num_kv_heads": 1, "head_dim": 24, "score_processor": "cdape"},
        {"head_dim": 24, "pos_emb": "transformer_xl"},
        {"num_attention_heads": 4, "num_kv_heads": 2, "activation": "gelu_tanh"},
        {"activation": "swiglu", "mlp_multiple_of": 24, "no_weight_tying": True},
        {"num_layers": 3, "intermediate_size": 40, "score_processor": "cdape",
         "score_processor_options": {"width": 5, "kernel_size": 7}},
    ],
)  # fmt: skip
def test_other_models(keys: dict[str, Any]) -> None:
    check(**keys)
