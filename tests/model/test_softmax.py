"""Sinks, stick-breaking and gates in the model, compared with float64 formulas and published code, at all positions."""

import math
from typing import Any

import pytest
import torch
from models import SUMS, TERMS, VOCABULARY, build_model, check_masked_documents, check_reading_in_parts
from torch.nn import functional as F

from megatron.attention.segments import build_segments
from megatron.attention.softmax import compute_stick_breaking
from megatron.model.attention import AttentionContext
from megatron.model.gpt import GPT
from megatron.model.layer import apply_gate
from megatron.model.parameter_groups import build_parameter_groups, find_model_parts
from megatron.options.model import ModelOptions
from megatron.options.position import SOFTMAX_TYPES, PositionOptions
from megatron.utils.errors import UserError
from tools.tolerances import assert_close_in_rounding

LENGTH, EOD = 26, 39
OTHERS = [name for name in SOFTMAX_TYPES if name != "vanilla"]


def build_gpt(
    softmax: str | list[str], encoding: str, processor: str, backend: str = "auto", keys: Any = None, **place: Any
) -> GPT:
    """Build a model with different sinks in every layer and head."""
    model = ModelOptions(
        num_layers=2, hidden_size=24, num_attention_heads=3, seq_length=LENGTH, init_method_std=0.2,
        attention_chunk_rows=8, make_vocab_size_divisible_by=8, attention_backend=backend, **(keys or {}),
    )  # fmt: skip
    position = PositionOptions(pos_emb=encoding, score_processor=processor, softmax_type=softmax, **place)
    gpt, generator = build_model(model, position, VOCABULARY, seed=5).eval(), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            if name.endswith(("sink.logits", "processor.output.bias")):
                parameter.copy_(2 * torch.rand(parameter.shape, generator=generator) - 0.5)
    return gpt


def tokens(batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, EOD, (batch, length), generator=torch.Generator().manual_seed(4))


def expected_weights(softmax: str, logits: list[float], sink: float) -> list[float]:
    """Return the weights of a row's keys, the last of which is its own, from the papers' formulas."""
    if not softmax.startswith("stick-breaking"):
        total = sum(map(math.exp, logits)) + {"vanilla": 0.0, "off-by-one": 1.0, "learnable": math.exp(sink)}[softmax]
        return [math.exp(x) / total for x in logits]
    shares = [1 / (1 + math.exp(-x)) for x in logits[:-1]]  # fraction left by the keys between
    own = math.prod(1 - share for share in shares) if softmax == "stick-breaking-remainder" else 0.0
    return [share * math.prod(1 - later for later in shares[j + 1 :]) for j, share in enumerate(shares)] + [own]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softmax", SOFTMAX_TYPES)
def test_attention_is_the_formula(softmax: str, window: int | None) -> None:
    """Attention, compared key by key in float64, with ALiBi's published slopes."""
    gpt = build_gpt(softmax, "alibi", "none", "eager", attention_window=window).double()
    attention = gpt.local_layers[1].self_attention.core_attention
    q, k, v = torch.randn(3, LENGTH, 2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = attention(q, k, v, AttentionContext(build_segments(LENGTH))).view(LENGTH, 2, 3, 8)
    sinks = attention.sink.logits.tolist() if softmax == "learnable" else [0.0] * 3
    slopes = attention.encoding.table(torch.tensor([1.0])).bias[:, 0].tolist()
    for row in range(LENGTH):
        first = 0 if window is None else max(row - window + 1, 0)
        for head in range(3):
            for sequence in range(2):
                products = k[first : row + 1, sequence, head] @ q[row, sequence, head] / 8**0.5
                logits = [x + slopes[head] * (row - first - j) for j, x in enumerate(products.tolist())]
                weights = torch.tensor(expected_weights(softmax, logits, sinks[head]), dtype=torch.float64)
                expected = weights @ v[first : row + 1, sequence, head]
                torch.testing.assert_close(found[row, sequence, head], expected, rtol=1e-6, atol=1e-7)


def test_sinks_match_gpt_oss() -> None:
    """Outputs and gradients equal transformers' PyTorch attention, which appends a column to the scores."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    gpt = build_gpt("learnable", "none", "none", "chunked", {"num_kv_heads": 1}, attention_window=7).double()
    attention = gpt.local_layers[1].self_attention.core_attention
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(LENGTH, 2, 3, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    k, v = (torch.randn(LENGTH, 2, 1, 8, dtype=torch.float64, generator=generator, requires_grad=True) for _ in "kv")
    theirs = torch.nn.Module()
    theirs.sinks, theirs.num_key_value_groups = attention.sink.logits, 3
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.float64)
    mask.masked_fill_((distance < 0) | (distance >= 7), float("-inf"))
    expected, _ = eager_attention_forward(
        theirs, *(x.permute(1, 2, 0, 3) for x in (q, k, v)), mask[None, None], scaling=8**-0.5
    )
    found = attention(q, k, v, AttentionContext(build_segments(LENGTH)))
    expected = expected.permute(1, 0, 2, 3).flatten(2)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    leaves, into = (q, k, v, attention.sink.logits), torch.randn(found.shape, dtype=torch.float64, generator=generator)
    for one, other in zip(
        torch.autograd.grad(found, leaves, into), torch.autograd.grad(expected, leaves, into), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_stick_breaking_is_stable_if_the_product_underflows() -> None:
    """Outputs and gradients are finite for keys that take everything, and for hundreds of keys that take half each."""
    generator = torch.Generator().manual_seed(3)
    logits = 30 * torch.randn(1, 2, 4, 600, generator=generator)
    logits[..., -1] = float("-inf")
    logits = logits.requires_grad_()
    weights = compute_stick_breaking(logits)
    (gradient,) = torch.autograd.grad(weights.square().sum(), logits)
    assert weights.isfinite().all()
    assert gradient.isfinite().all()
    assert (weights[..., -1] == 0).all()
    exact = logits.detach().double()
    exact = torch.exp(F.logsigmoid(exact) + F.pad(F.logsigmoid(-exact).flip(-1).cumsum(-1).flip(-1)[..., 1:], (0, 1)))
    assert_close_in_rounding(weights, exact.float(), 600, 3)
    assert torch.equal(compute_stick_breaking(F.pad(logits, (0, 9), value=float("-inf")))[..., :600], weights)


PLACES = [
    ("rotary", "none", {}),
    ("kerple_log", "cdape", {"attention_window": 5}),
    ("cope", "dape", {}),
    ("fire", "none", {"randomized_positions": LENGTH + 20}),
    ("transformer_xl", "cdape", {"attention_temperature": "ssmax"}),
]


@pytest.mark.parametrize(("encoding", "processor", "place"), PLACES, ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.parametrize("softmax", OTHERS)
@torch.no_grad()
def test_decoding_padding_and_the_last_tokens_are_the_whole(
    softmax: str, encoding: str, processor: str, place: dict[str, Any]
) -> None:
    gates = {"attention_output_gate": "headwise" if processor == "none" else True}
    gpt, x = build_gpt(softmax, encoding, processor, keys=gates, **place), tokens()
    whole = gpt(x)
    assert (whole - build_gpt("vanilla", encoding, processor, keys=gates, **place)(x)).abs().max() > 1e-3
    check_reading_in_parts(gpt, x, has_sampled_positions="randomized_positions" in place)


@pytest.mark.parametrize(("encoding", "processor"), [("rotary", "none"), ("kerple_log", "cdape"), ("fire", "cdape")])
@pytest.mark.parametrize("softmax", OTHERS)
@torch.no_grad()
def test_masked_documents_match_separate_ones(softmax: str, encoding: str, processor: str) -> None:
    gpt = build_gpt(softmax, encoding, processor, attention_mask="document")
    check_masked_documents(gpt, tokens())


@pytest.mark.parametrize("softmax", OTHERS)
def test_backends_agree_in_losses_and_gradients(softmax: str) -> None:
    for encoding, processor in (("rotary", "none"), ("kerple_log", "cdape")):
        results = []
        for backend in ("eager", "chunked", "auto"):
            gpt = build_gpt(softmax, encoding, processor, backend, {"attention_output_gate": True}).train()
            x = tokens()
            loss = gpt(x, x).mean()
            gradients = torch.autograd.grad(loss, list(gpt.parameters()))
            assert all(gradient.isfinite().all() for gradient in gradients)
            results.append((loss, *gradients))
        for other in results[1:]:
            for one, expected in zip(other, results[0], strict=True):
                assert_close_in_rounding(one, expected, 2 * LENGTH * TERMS, 2 * SUMS)


def test_an_output_gate_equals_megatron_cores() -> None:
    """An element gate equals megatron-core's `attention_output_gate` in float64; a head gate is shared by its
    elements.
    """
    from megatron.core.transformer.attention import Attention

    attended, gate = torch.randn(2, 5, 2, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = Attention._apply_output_gate(None, attended, gate.float())
    torch.testing.assert_close(apply_gate(attended, gate.float()), expected)
    of_heads = gate[..., :3].float()
    repeated = apply_gate(attended, of_heads.repeat_interleave(8, dim=-1))
    assert torch.equal(apply_gate(attended, of_heads), repeated)


@pytest.mark.parametrize(("kind", "gates"), [(True, 24), ("headwise", 3)])
def test_a_gate_multiplies_the_attention_output(kind: Any, gates: int) -> None:
    """The gate multiplies the attention output before its projection; its weight does not change other initial
    weights.
    """
    gpt = build_gpt("vanilla", "rotary", "none", keys={"attention_output_gate": kind})
    module = gpt.local_layers[0].self_attention
    assert module.linear_gate.weight.shape == (gates, 24)
    assert module.linear_gate.bias is None
    hidden, seen = torch.randn(LENGTH, 2, 24, generator=torch.Generator().manual_seed(1)), []
    handle = module.core_attention.register_forward_hook(lambda *call: seen.append(call[2]))
    output, _ = module(hidden, AttentionContext(build_segments(LENGTH)))
    handle.remove()
    factors = torch.sigmoid(hidden @ module.linear_gate.weight.T).repeat_interleave(24 // gates, dim=-1)
    expected = (seen[0] * factors) @ module.linear_proj.weight.T
    torch.testing.assert_close(output, expected)
    groups = build_parameter_groups(gpt, 0.1, "Muon")
    own = next(group for group in groups if any(p is module.linear_gate.weight for p in group["params"]))
    assert own["algorithm"] == "Muon"
    parts = find_model_parts(gpt)
    assert parts["decoder.layers.0.self_attention.linear_gate.weight"] == "attention"


def test_sinks_start_as_off_by_one_without_random_numbers() -> None:
    model = ModelOptions(num_layers=2, hidden_size=24, num_attention_heads=3, seq_length=LENGTH)
    built = {name: build_model(model, PositionOptions(softmax_type=name), VOCABULARY, seed=1) for name in SOFTMAX_TYPES}
    weights, plain = dict(built["learnable"].named_parameters()), dict(built["vanilla"].named_parameters())
    assert all(torch.equal(weights[name], other) for name, other in plain.items())
    own = weights.keys() - plain.keys()
    assert own == {f"decoder.layers.{layer}.self_attention.core_attention.sink.logits" for layer in (0, 1)}
    assert all(torch.equal(weights[name], torch.zeros(3)) for name in own)
    x = tokens()
    assert torch.equal(built["learnable"](x), built["off-by-one"](x))
    (group,) = [
        g for g in build_parameter_groups(built["learnable"], 0.1) if any(p is weights[min(own)] for p in g["params"])
    ]
    assert group["weight_decay"] == 0
    assert {find_model_parts(built["learnable"])[name] for name in own} == {"attention"}


def test_layers_may_differ_in_their_softmax() -> None:
    gpt = build_gpt(["learnable", "vanilla"], "rotary", "none", attention_window=[5, None])
    kinds = [layer.self_attention.core_attention for layer in gpt.local_layers]
    assert [attention.formula.softmax_type for attention in kinds] == ["learnable", "vanilla"]
    assert [type(attention.backend).__name__ for attention in kinds] == ["RowBlockBackend", "SdpaBackend"]
    assert PositionOptions(softmax_type=["learnable"] * 2).softmax_type == "learnable"


@pytest.mark.parametrize(
    ("backend", "softmax", "processor", "problem"),
    [
        ("sdpa", "learnable", "none", "it cannot add a sink to the softmax"),
        ("sdpa", "stick-breaking", "none", "it computes a softmax and not stick-breaking"),
        ("native", "stick-breaking", "cdape", "it computes a softmax and not stick-breaking"),
    ],
)
def test_unsupported_backends_are_rejected(backend: str, softmax: str, processor: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        build_gpt(softmax, "rotary", processor, backend)
