"""Exact parameter counts of every shipped model, in every layout, with every method."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import build_model
from tiny_runs import tiny_config

from megatron.config import method_names
from megatron.config.load import load_config
from megatron.config.schema import Config
from megatron.distributed.mesh import Axis, Mesh, ParallelSizes, get_pipeline_layer_range
from megatron.distributed.process_groups import ProcessGroups
from megatron.distributed.sharding import count_all_elements, get_shard_spec
from megatron.model import build
from megatron.options.position import SOFTMAX_TYPES
from megatron.planning.model_costs import count_parameters, count_rank_parameters, plan_model
from megatron.position import catalog
from megatron.utils.project import SHIPPED_CONFIGS

VOCABULARY = 50257
MODELS = sorted(path.stem for path in (SHIPPED_CONFIGS / "model").glob("*.yml"))

PATTERN = "pos_emb=[kerple_log,t5,rotary] score_processor=[none,none,cdape]"
"""Layer pattern over stages with different encodings."""


def on_ranks(config: Config, tensor: int, stages: int, stage: int) -> int:
    """Count the parameters of a rank, from the parameters of the stage, built without memory."""
    processes = ProcessGroups(mesh=Mesh(stage, ParallelSizes(pipeline=stages)))
    gpt = build.build_model(config.model, config.position, VOCABULARY, device="meta", groups=processes)
    return sum(p.numel() // (1 if get_shard_spec(p) is None else tensor) for p in gpt.parameters())


def load_method(text: str) -> Config:
    """Load a model with an overlay, or with keys."""
    parts = text.split()
    return load_config(["125M"] if "=" in text else ["125M", *parts], parts if "=" in text else []).config


ENCODINGS = st.lists(st.sampled_from(("kerple_log", "t5", "rotary")), min_size=1, max_size=4)
WINDOWS = st.lists(st.sampled_from((None, 4, 8)), min_size=1, max_size=3)


@given(encodings=ENCODINGS, windows=WINDOWS, num_layers=st.integers(1, 20), stages=st.integers(1, 5))
def test_layer_kinds_match_explicit_counts(
    encodings: list[str], windows: list[int | None], num_layers: int, stages: int
) -> None:
    config = tiny_config(Path(), pos_emb=encodings, attention_window=windows, num_layers=num_layers)
    for stage in range(min(stages, num_layers)):
        axis = Axis(stage, min(stages, num_layers))
        counts: dict[tuple[str, int | None], int] = {}
        for layer in get_pipeline_layer_range(num_layers, axis):
            key = encodings[layer % len(encodings)], windows[layer % len(windows)]
            counts[key] = counts.get(key, 0) + 1
        kinds = [
            ((layer.config.position.encoding, layer.config.position.window), count)
            for layer, count in plan_model(config).count_layer_types(axis)
        ]
        assert kinds == list(counts.items())


@pytest.mark.parametrize("name", MODELS)
def test_shipped_models(name: str) -> None:
    config = load_config([name, "cdape_kerple_log"]).config
    planned = plan_model(config)
    gpt = build_model(config.model, config.position, VOCABULARY, device="meta")
    assert count_parameters(planned, VOCABULARY) == gpt.num_parameters()
    for tensor in (2, 4):
        parts = {p: p.numel() // (1 if get_shard_spec(p) is None else tensor) for p in gpt.parameters()}
        assert count_rank_parameters(planned, ParallelSizes(tensor=tensor), VOCABULARY) == sum(parts.values())
        assert (
            count_all_elements(gpt.embedding.word_embeddings.weight, Mesh(0, ParallelSizes(tensor=tensor))) % tensor
            == 0
        )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("method", ["kerple_log", "cdape_kerple_log", "learned", PATTERN])
@pytest.mark.parametrize(("tensor", "stages"), [(1, 2), (2, 5), (4, 12)])
def test_every_stage(method: str, tied: bool, tensor: int, stages: int) -> None:
    config = load_method(method).replace(no_weight_tying=not tied)
    planned, sizes = plan_model(config), ParallelSizes(tensor=tensor, pipeline=stages, data=2)
    for stage in sorted({0, 1, stages - 1}):
        assert count_rank_parameters(planned, sizes, VOCABULARY, stage) == on_ranks(config, tensor, stages, stage), (
            stage
        )


def counted(**keys: Any) -> tuple[int, int]:
    """Return the counted parameters, and the model's own."""
    config = tiny_config(Path(), **keys)
    gpt = build_model(config.model, config.position, 61, device="meta")
    return count_parameters(plan_model(config), 61), gpt.num_parameters()


def test_every_method() -> None:
    for encoding in catalog.list_encodings():
        for processor in method_names.list_processor_values():
            estimate, built = counted(pos_emb=encoding, score_processor=processor)
            assert estimate == built, (encoding, processor)
        # Heads need not divide the hidden size among them.
        estimate, built = counted(pos_emb=encoding, head_dim=24)
        assert estimate == built, encoding
    for name in catalog.list_temperatures():
        estimate, built = counted(pos_emb="rotary", score_processor="dape", attention_temperature=name)
        assert estimate == built, name
    fixed = {"attention_temperature": "ssmax", "attention_temperature_options": {"learned": False}}
    assert counted(**fixed) == counted()
    for softmax in SOFTMAX_TYPES:
        estimate, built = counted(softmax_type=softmax, attention_output_gate="headwise")
        assert estimate == built, softmax
    estimate, built = counted(attention_output_gate=True, num_kv_heads=1, head_dim=24)
    assert estimate == built


@pytest.mark.parametrize(
    ("position", "options"),
    [
        ("fire", {"width": 7}),
        ("cope", {"positions": 9}),
        ("t5", {"num_buckets": 16}),
        ("transformer_xl", {}),
    ],
)
def test_options_of_methods(position: str, options: dict[str, Any]) -> None:
    processor = {"score_processor": "cdape", "score_processor_options": {"width": 5, "kernel_size": 7}}
    estimate, built = counted(pos_emb=position, pos_emb_options=options, pos_emb_per_layer=True, **processor)
    assert estimate == built


@pytest.mark.parametrize(
    "keys",
    [
        {"activation": "swiglu", "norm": "rmsnorm", "mlp_multiple_of": 24},
        {"gpt_j_residual": True, "gpt_j_tied": True},
        {"use_bias_in_mlp": False, "no_weight_tying": True},
        {"use_qk_layernorm": True, "norm_placement": "sandwich", "head_dim": 12, "num_kv_heads": 1},
        {
            "use_qk_layernorm": True,
            "qk_layernorm_over_heads": True,
            "norm": "rmsnorm",
            "norm_placement": "post",
            "num_kv_heads": 1,
        },
        {"num_attention_heads": 4, "num_kv_heads": 2},
        {"num_kv_heads": 1, "use_bias_in_attn_linear": False, "use_bias_in_qkv": True},
        {"use_bias_in_attn_linear": False, "max_position_embeddings": 48, "pos_emb": "learned"},
    ],
)
def test_other_layers(keys: dict[str, Any]) -> None:
    estimate, built = counted(**keys)
    assert estimate == built
