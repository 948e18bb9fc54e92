"""Compiled regions equal PyTorch's operations, by themselves and in whole models."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import build_model
from torch import Tensor

from megatron.model import compiled_regions
from megatron.options.model import ModelOptions
from megatron.options.position import PositionOptions

VOCABULARY, LENGTH, BATCH = 37, 6, 2
TOLERANCE = 3e-5
"""Of float32 sums of some hundred terms, by the size of the largest."""

MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as GPT-2": ({"activation": "gelu_tanh"}, {"pos_emb": "kerple_log"}),
    "as LLaMA": (
        {"norm": "rmsnorm", "activation": "swiglu", "num_kv_heads": 2, "use_bias_in_attn_linear": False,
         "use_bias_in_mlp": False, "no_weight_tying": True},
        {"pos_emb": "rotary"},
    ),
    "grouped without rotation": ({"num_kv_heads": 2, "activation": "relu"}, {"pos_emb": "none"}),
    "as GPT-NeoX": ({"gpt_j_residual": True}, {"pos_emb": "rotary", "pos_emb_options": {"fraction": 0.5}}),
    "one norm": ({"gpt_j_residual": True, "gpt_j_tied": True}, {"pos_emb": "alibi"}),
    "as OLMo 2": (
        {"norm_placement": "post", "use_qk_layernorm": True, "qk_layernorm_over_heads": True},
        {"pos_emb": "rotary"},
    ),
    "as Gemma 2": (
        {"norm_placement": "sandwich", "activation": "geglu_tanh", "final_logit_softcapping": 2.0},
        {"pos_emb": "rotary"},
    ),
    "no shift": ({"layernorm_bias": False, "use_qk_layernorm": True}, {"pos_emb": "rotary"}),
    "muP": ({"use_mup": True, "mup_base_hidden_size": 8, "mup_base_num_layers": 1}, {"pos_emb": "rotary"}),
    "recomputed layers": ({"checkpoint_activations": True, "checkpoint_num_layers": 2}, {"pos_emb": "kerple_log"}),
    "recomputed attention": ({"checkpoint_activations": "selective"}, {"pos_emb": "rotary"}),
    "dropout": ({"hidden_dropout": 0.3}, {"pos_emb": "rotary"}),
    "cdape": ({}, {"pos_emb": "kerple_log", "score_processor": "cdape"}),
}  # fmt: skip


def _build(name: str, **changes: Any) -> Any:
    shape = {"num_layers": 3, "hidden_size": 16, "num_attention_heads": 4, "seq_length": LENGTH}
    model, position = MODELS[name]
    options = ModelOptions(**{**shape, "make_vocab_size_divisible_by": 8, **model, **changes})
    return build_model(options, PositionOptions(**position), VOCABULARY, seed=2, backend="eager")


def _tokens() -> Tensor:
    return torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))


def _train(gpt: Any, *, with_log_z: bool) -> dict[str, Tensor]:
    """Losses, and the gradients of all parameters."""
    tokens = _tokens()
    gpt.train()
    torch.manual_seed(5)
    losses = gpt(tokens[:, :-1], tokens[:, 1:], with_log_z=with_log_z)
    weights = torch.linspace(0.5, 1.5, losses.numel()).view_as(losses)
    (losses * weights).sum().backward()
    return {"losses": losses.detach()} | {name: p.grad for name, p in gpt.named_parameters() if p.grad is not None}


def _assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error, size = (found[name] - value).abs().max().item(), max(value.abs().max().item(), 1e-2)
        assert error <= TOLERANCE * size, f"{name}: {error / size:.2g}"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Training compiles regions on any device, by Dynamo and AOTAutograd without Inductor."""
    monkeypatch.setattr(compiled_regions, "runs_compiled", lambda x: True)
    monkeypatch.setattr(compiled_regions, "COMPILE_ARGUMENTS", {"backend": "aot_eager"})
    compiled_regions.compile_region.cache_clear()
    torch.compiler.reset()
    yield
    compiled_regions.compile_region.cache_clear()


@pytest.mark.parametrize("name", MODELS)
def test_training(name: str, compiled: None, request: pytest.FixtureRequest) -> None:
    expected = _train(_build(name, compile_regions=False), with_log_z=name == "as Gemma 2")
    _assert_close(_train(_build(name), with_log_z=name == "as Gemma 2"), expected)


@pytest.mark.parametrize("name", ["as LLaMA", "as GPT-NeoX"])
def test_evaluation_and_decoding(name: str, compiled: None) -> None:
    results = []
    for uses in (False, True):
        gpt = _build(name, compile_regions=uses).eval()
        cache, tokens = gpt.new_kv_cache(LENGTH), _tokens()[:, :-1]
        with torch.inference_mode():
            whole = gpt(tokens, num_logits=2)
            decoded = [gpt(tokens[:, i : i + 1], num_logits=1, kv_cache=cache) for i in range(LENGTH)]
        results.append({"whole": whole, "decoded": torch.cat(decoded[-2:], 1)})
    _assert_close(results[1], results[0])
    _assert_close({"whole": results[1]["decoded"]}, {"whole": results[1]["whole"]})


def test_documents(compiled: None) -> None:
    tokens = _tokens()
    starts = torch.tensor([[0, 0, 0, 3, 3, 3], [0, 1, 1, 1, 1, 5]])
    losses = []
    for uses in (False, True):
        gpt = _build("as LLaMA", compile_regions=uses)
        losses.append({"losses": gpt(tokens[:, :-1], tokens[:, 1:], document_starts=starts).detach()})
    _assert_close(losses[1], losses[0])


def test_kernels_compute_everything_between_products(compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own operations are not called for it."""
    gpt = _build("as GPT-2")

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("computed by PyTorch")

    for name in ("gelu", "cross_entropy"):
        monkeypatch.setattr(torch.nn.functional, name, refuse)
    for layer in gpt.decoder.layers:
        for norm in (layer.input_layernorm, layer.pre_mlp_layernorm):
            monkeypatch.setattr(norm, "forward", refuse)
    _train(gpt, with_log_z=False)


def test_weights_that_zero_3_divides_are_left_to_their_modules(compiled: None) -> None:
    gpt = _build("as GPT-2")
    weight = gpt.decoder.layers[0].input_layernorm.weight
    assert layer_kernels.can_use_kernels(gpt.config, weight, weight)
    weight.ds_id = 1
    assert not layer_kernels.can_use_kernels(gpt.config, weight, weight)
