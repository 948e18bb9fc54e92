"""Compiled regions equal PyTorch's operations, separately and in complete models."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_emulator import find_compiler
from models import build_model
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.model import layer_config
from megatron.model.layer import rotate_heads
from megatron.model.layer_config import compute_log_z
from megatron.options.model import ModelOptions
from megatron.options.position import PositionOptions
from megatron.position.encodings.rotary import Rotary
from megatron.position.numerics import rotate_halves, soft_cap
from megatron.position.token_range import ALL_HEADS, TokenRange

VOCABULARY, LENGTH, BATCH = 37, 6, 2
TOLERANCE = 3e-5
"""Tolerance of float32 sums of a few hundred terms, relative to the largest."""

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


def _build(name: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    shape = {"num_layers": 3, "hidden_size": 16, "num_attention_heads": 4, "seq_length": LENGTH}
    model, position = MODELS[name]
    options = ModelOptions(**{**shape, "make_vocab_size_divisible_by": 8, **model, **changes})
    return build_model(options, PositionOptions(**position), VOCABULARY, seed=2, backend="eager", dtype=dtype)


def _tokens() -> Tensor:
    return torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))


def _train(gpt: Any, *, with_log_z: bool = False) -> dict[str, Tensor]:
    """Return the losses and the gradients of all parameters."""
    tokens = _tokens()
    gpt.train()
    torch.manual_seed(5)
    losses = gpt(tokens[:, :-1], tokens[:, 1:], with_log_z=with_log_z)
    weights = torch.linspace(0.5, 1.5, losses.numel()).view_as(losses)
    (losses * weights).sum().backward()
    return {"losses": losses.detach()} | {name: p.grad for name, p in gpt.named_parameters() if p.grad is not None}


def _assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error, size = (found[name] - value).abs().max().item(), max(value.abs().max().item(), 1e-2)
        assert error <= tolerance * size, f"{name}: {error / size:.2g}"


def _count_graphs() -> int:
    """Compilations since the fixture was created."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Training on a CPU compiles regions with Dynamo and AOTAutograd, without Inductor, and none fails."""

    def fail(message: str, *values: object) -> None:
        raise AssertionError(message % values)

    monkeypatch.setattr(layer_config, "runs_compiled", lambda x: True)
    monkeypatch.setattr(layer_config, "COMPILE_ARGUMENTS", {"backend": "aot_eager"})
    monkeypatch.setattr(layer_config.logger, "warning", fail)
    layer_config.compile_region.cache_clear()
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    layer_config.compile_region.cache_clear()


@pytest.mark.parametrize("name", MODELS)
def test_training(name: str, compiled: None) -> None:
    expected = _train(_build(name, compile_regions=False), with_log_z=name == "as Gemma 2")
    assert _count_graphs() == 0
    _assert_close(_train(_build(name), with_log_z=name == "as Gemma 2"), expected)
    # Before the first attention, between two, after the last one, and the loss, once for all layers and passes.
    # Recomputed attention also splits heads, with and without a gradient.
    assert _count_graphs() == {"dropout": 1, "recomputed attention": 5}.get(name, 4)


@pytest.mark.parametrize("name", ["as GPT-2", "as LLaMA", "as GPT-NeoX", "recomputed attention"])
def test_regions_write_heads_first_for_a_backend_that_reads_them(
    name: str, compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _train(_build(name, compile_regions=False))
    gpt, layouts = _build(name), []
    attention = gpt.local_layers[0].self_attention.core_attention
    monkeypatch.setattr(type(attention.backend), "needs_heads_first_layout", True, raising=False)

    def note(module: Any, heads: tuple[Tensor, ...]) -> None:
        layouts.extend(x.permute(1, 2, 0, 3).is_contiguous() for x in heads[:3])

    attention.register_forward_pre_hook(note)
    found = _train(gpt)
    assert layouts
    assert all(layouts)
    _assert_close(found, expected)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.bfloat16, 3e-2)])
def test_training_in_other_types(dtype: torch.dtype, tolerance: float, compiled: None) -> None:
    expected = _train(_build("as GPT-NeoX", dtype=dtype, compile_regions=False))
    _assert_close(_train(_build("as GPT-NeoX", dtype=dtype)), expected, tolerance)


@pytest.fixture(scope="module")
def inductor_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """New folder for Inductor's precompiled headers and code.

    The user's own cache may contain code of another instruction set (ATEN_CPU_CAPABILITY), with wrong results.
    """
    return tmp_path_factory.mktemp("inductor")


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler (c++, g++, clang++)")
@pytest.mark.parametrize("name", ["as GPT-2", "as LLaMA"])
def test_training_with_inductor(
    name: str, compiled: None, inductor_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(inductor_cache))
    monkeypatch.setattr(layer_config, "COMPILE_ARGUMENTS", {"options": {"compile_threads": 1}})
    found = _train(_build(name))
    _assert_close(found, _train(_build(name, compile_regions=False)))
    torch.compiler.reset()  # as a resumed run, which compiles anew
    again = _train(_build(name))
    assert all(torch.equal(again[key], value) for key, value in found.items())


def test_documents(compiled: None) -> None:
    """Packed documents restart their positions, so the encoding rotates them itself."""
    tokens, starts = _tokens(), torch.tensor([[0, 0, 0, 3, 3, 3], [0, 1, 1, 1, 1, 5]])
    expected, found = (
        {"losses": _build("as LLaMA", compile_regions=uses)(tokens[:, :-1], tokens[:, 1:], document_starts=starts)}
        for uses in (False, True)
    )
    _assert_close(found, expected)
    assert _count_graphs() == 4


def test_only_training_compiles(compiled: None) -> None:
    gpt, tokens = _build("as LLaMA"), _tokens()
    with torch.no_grad():
        gpt(tokens[:, :-1], tokens[:, 1:])
        gpt.eval()(tokens)
    assert _count_graphs() == 0


class _Counter(TorchDispatchMode):
    """Mode that counts every operation, as PyTorch's FLOP counter does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_operations_and_later_steps_compile(compiled: None) -> None:
    gpt = _build("as GPT-2")
    with _Counter():
        expected = _train(gpt)
    assert _count_graphs() == 0
    gpt.zero_grad()
    _assert_close(_train(gpt), expected)
    assert _count_graphs() == 4


def test_weights_sharded_by_zero_3_are_gathered_by_their_modules(compiled: None) -> None:
    gpt = _build("as GPT-2")
    for layer in gpt.local_layers:
        layer.self_attention.linear_qkv.weight.ds_id = 1
    attention, hidden = layer.self_attention, torch.zeros(1)
    assert layer_config.can_compile(gpt.config, hidden)
    assert not attention.can_compile(hidden)


def test_a_region_that_cannot_be_compiled_runs_eagerly(compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here\nand more")

    lines: list[str] = []
    monkeypatch.setattr(layer_config, "COMPILE_ARGUMENTS", {"backend": refuse})
    monkeypatch.setattr(layer_config.logger, "warning", lambda message, *values: lines.append(message % values))
    expected = _train(_build("as GPT-2", compile_regions=False))
    _assert_close(_train(_build("as GPT-2")), expected)
    assert len(lines) == 4  # one of each region, not of each layer
    assert all("runs without compilation" in line and "no compiler here" in line for line in lines)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_compute_log_z(dtype: torch.dtype, tolerance: float, cap: float | None) -> None:
    """Two ranks that divide a vocabulary match PyTorch's cross entropy over the whole vocabulary."""
    generator = torch.Generator().manual_seed(3)
    logits = (10 * torch.randn(4, 3, 70, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(70, (3, 4), generator=generator)
    parts = [compute_log_z(part, labels, 35 * i, cap) for i, part in enumerate(logits.split(35, -1))]
    log_z = torch.stack([part[0] for part in parts]).logsumexp(0)
    losses = log_z - parts[0][1] - parts[1][1]
    whole = soft_cap(logits.double(), cap).transpose(0, 1)
    expected = F.cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="none").view(3, 4)
    found = {"losses": losses.double(), "log Z": log_z.double(), "gradient": _differentiate(losses, logits)}
    wanted = {"losses": expected, "log Z": whole.logsumexp(-1), "gradient": _differentiate(expected, logits)}
    _assert_close(found, wanted, tolerance)


def _differentiate(losses: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(losses.sum(), logits, retain_graph=True)[0].double()


@pytest.mark.parametrize("rotated", [4, 6])
def test_rotate_heads(rotated: int) -> None:
    x, angle = torch.randn(5, 2, 3, 6).double(), torch.randn(5, rotated // 2).double()
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([-angle.sin(), angle.sin()], -1)
    expected = rotate_halves(x.permute(1, 2, 0, 3), cos, sin).permute(2, 0, 1, 3)
    torch.testing.assert_close(rotate_heads(x, cos, sin), expected)


class _Backward(Rotary):
    """Rotation in the other direction: it overrides one function and inherits cosines and sines."""

    def rotate(self, x: Tensor, tokens: TokenRange, heads: slice = ALL_HEADS) -> Tensor:
        cos, sin = self._compute_cos_sin(x, tokens, are_queries=True)
        return rotate_halves(x, cos, -sin)


def test_a_subclass_that_replaces_the_rotation_alone_keeps_it(compiled: None) -> None:
    found = []
    for compiles in (False, True):
        gpt = _build("as LLaMA", compile_regions=compiles)
        encodings = [module for module in gpt.modules() if isinstance(module, Rotary)]
        assert encodings
        before = _train(gpt)["losses"]
        for encoding in encodings:
            encoding.__class__ = _Backward
        gpt.zero_grad()
        found.append(_train(gpt))
        assert not torch.allclose(found[-1]["losses"], before)
    _assert_close(found[1], found[0])
