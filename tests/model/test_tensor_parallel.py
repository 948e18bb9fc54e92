"""Two tensor-parallel ranks compute one rank's losses and gradients, for every method and processor."""

from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Forked
from position_methods import COVERING
from tensor_parallel_cases import gradients

from megatron.distributed.process_groups import build_single_process_groups
from tools.tolerances import assert_close_in_rounding, count_gpt_sums

SUPPORT = Path(__file__).parents[1] / "support"
SWIGLU = {"activation": "swiglu", "no_weight_tying": True, "gpt_j_residual": True}
EXTRA: dict[str, dict[str, Any]] = {
    "per layer": {
        "model": {},
        "position": {"pos_emb": "kerple_log", "score_processor": "cdape", "pos_emb_per_layer": True},
    },
    "chunked": {
        "model": {"attention_backend": "chunked"},
        "position": {"pos_emb": "fire", "score_processor": "cdape", "attention_window": 6},
    },
    "recomputed": {
        "model": {"checkpoint_activations": True},
        "position": {"pos_emb": "transformer_xl", "score_processor": "dape"},
    },
    "attention recomputed": {
        "model": {"checkpoint_activations": "selective", "use_qk_layernorm": True, "qk_layernorm_over_heads": True},
        "position": {"pos_emb": "kerple_log", "score_processor": "cdape"},
    },
    "gates, attention recomputed": {
        "model": {"checkpoint_activations": "selective", "num_kv_heads": 2},
        "position": {"pos_emb": "fox", "pos_emb_per_layer": True, "score_processor": "cdape"},
    },
    "swiglu, untied, parallel residual": {"model": SWIGLU, "position": {"pos_emb": "rotary"}},
    "rmsnorm": {"model": {"norm": "rmsnorm", "use_bias_in_attn_linear": False}, "position": {"pos_emb": "t5"}},
    "grouped queries": {
        "model": {"num_kv_heads": 2, "use_bias_in_attn_linear": False, "use_bias_in_qkv": True},
        "position": {"pos_emb": "rotary"},
    },
    "pope, grouped queries": {
        "model": {"num_kv_heads": 2},
        "position": {"pos_emb": "pope", "pos_emb_options": {"delta_init": "uniform"}},
    },
    "fope, xpos": {
        "model": {"num_layers": 2},
        "position": {"pos_emb": ["fope", "rotary"], "pos_emb_options": {"xpos": True, "gain": 1.0}},
    },
    "far keys, processed": {
        "model": {"num_kv_heads": 2},
        "position": {
            "pos_emb": "rotary",
            "pos_emb_options": {"scaling": "selfextend", "group": 3, "neighbors": 5},
            "score_processor": "cdape",
        },
    },
    "grouped queries, processed": {
        "model": {"num_kv_heads": 2, "activation": "gelu_tanh"},
        "position": {"pos_emb": "kerple_log", "score_processor": "cdape"},
    },
    "rows that do not divide": {
        "model": {"num_kv_heads": 2},
        "position": {"pos_emb": "kerple_log", "score_processor": "cdape"},
        "length": 14,
    },
    "losses of 5 tokens at a time": {"model": {}, "position": {"pos_emb": "rotary"}, "max_logits": 2 * 16 * 5},
    "queries and keys normalized, scores capped": {
        "model": {"use_qk_layernorm": True, "num_kv_heads": 2, "attn_logit_softcapping": 1.5, "head_dim": 12},
        "position": {"pos_emb": "kerple_log", "score_processor": "cdape"},
    },
    "normalized over heads, z-loss": {
        "model": {
            "use_qk_layernorm": True,
            "qk_norm": "rmsnorm",
            "qk_layernorm_over_heads": True,
            "num_kv_heads": 2,
            "norm_placement": "post",
            "final_logit_softcapping": 2.0,
            "embedding_multiplier": 3.0,
        },
        "position": {"pos_emb": "rotary"},
        "z_loss": 0.1,
        "max_logits": 2 * 16 * 5,
    },
    "layernorm over heads, z-loss": {
        "model": {"use_qk_layernorm": True, "qk_layernorm_over_heads": True, "norm_placement": "sandwich"},
        "position": {"pos_emb": "rotary"},
        "z_loss": 0.1,
    },
    "layernorm over heads without biases, logits scaled": {
        "model": {
            "use_qk_layernorm": True,
            "qk_layernorm_over_heads": True,
            "layernorm_bias": False,
            "logit_scale": 0.5,
            "gpt_j_residual": True,
            "gpt_j_tied": True,
        },
        "position": {"pos_emb": "rotary"},
    },
    "no MLP bias": {"model": {"use_bias_in_mlp": False, "mlp_multiple_of": 24}, "position": {"pos_emb": "alibi"}},
}
CASES = {f"{e}+{p}": {"model": {}, "position": {"pos_emb": e, "score_processor": p}} for e, p in COVERING} | EXTRA
REFUSED = {
    "heads": (
        {"hidden_size": 24, "num_attention_heads": 3},
        "num_attention_heads 3 is not divisible by model_parallel_",
    ),
    "dropout": ({"attention_dropout": 0.1}, "attention_dropout 0.1: with model_parallel_size 2"),
    "groups": ({"num_kv_heads": 1}, "num_kv_heads 1 is not divisible by model_parallel_size 2"),
    "width": ({"intermediate_size": 65}, "intermediate_size 65 is not divisible by model_parallel_size 2"),
}
# Gradients involve as many sums again. They are compared relative to the largest of their tensor. If they cancel to
# zero (a constant added to all logits of a row), they are compared with a hundredth of the model's largest.
TERMS, SUMS = count_gpt_sums(32, layers=2)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of each of the two ranks; one pair of processes computes all cases."""
    folder = tmp_path_factory.mktemp("ranks")
    refused = {name: {"model": model, "position": {"pos_emb": "none"}} for name, (model, _) in REFUSED.items()}
    torch.save(CASES | refused, folder / "cases.pt")
    script = SUPPORT / "tensor_parallel_rank.py"
    ranks = [Forked(script, str(folder), str(rank), output=folder / f"{rank}.txt") for rank in range(2)]
    assert [rank.wait(300) for rank in ranks] == [0, 0], "\n".join(rank.printed() for rank in ranks)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def joined(parts: list[torch.Tensor], dim: int | None, stride: int) -> torch.Tensor:
    """Join one rank's parameter from the shards of all: strips of `stride` blocks each, or equal copies."""
    if dim is None:
        assert torch.equal(parts[0], parts[1]), "a parameter that both ranks hold got different gradients"
        return parts[0]
    strips = [part.chunk(stride, dim) for part in parts]
    return torch.cat([strip[index] for index in range(stride) for strip in strips], dim)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_compute_the_same_as_one(two_ranks: list[dict[str, Any]], name: str) -> None:
    one = gradients(build_single_process_groups(), **CASES[name])
    both = [rank[name] for rank in two_ranks]
    for rank in both:
        assert rank["parameters"] == one["parameters"]
        assert rank["flops"] == one["flops"]
        assert_close_in_rounding(rank["losses"], one["losses"], TERMS, SUMS)
        assert_close_in_rounding(rank["logits"], one["logits"], TERMS, SUMS)
    assert list(both[0]["gradients"]) == list(one["gradients"])
    largest = max(gradient.abs().max().item() for gradient, *_ in one["gradients"].values())
    for parameter, (gradient, *_) in one["gradients"].items():
        dim, stride = both[0]["gradients"][parameter][1:]
        ours = joined([rank["gradients"][parameter][0] for rank in both], dim, stride)
        assert_close_in_rounding(ours, gradient, TERMS, 2 * SUMS, size=largest / 100)


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_tensor_parallelism_is_rejected_by_name(two_ranks: list[dict[str, Any]], name: str) -> None:
    assert all(REFUSED[name][1] in rank[name] for rank in two_ranks)
