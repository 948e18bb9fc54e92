"""Encodings with input-dependent decay: their bias compared with its definition, and start of their sums."""

import math

import pytest
import torch
from models import VOCABULARY, build_model, small_gpt
from position_methods import build
from torch import Tensor

from megatron.attention.reference import add_row_and_key_bias, sum_gates
from megatron.model.parameter_groups import build_parameter_groups
from megatron.options.model import ModelOptions
from megatron.options.position import PositionOptions
from megatron.position import registry
from megatron.position.encodings.alibi import compute_slopes
from megatron.position.facts import AttentionDims
from megatron.position.token_range import ALL_HEADS, TokenRange

DIMS = AttentionDims(3, 8, 24, 16, 16)


def bias_of(gates: Tensor, num_rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return add_row_and_key_bias(*sum_gates(gates, num_rows), dtype)


def test_fox_against_a_loop() -> None:
    encoding, x = registry.build_encoding("fox", DIMS, {"std": 0.3, "bias_init": 1.0}).double(), torch.randn(2, 9, 24)
    weight, bias = (parameter.detach() for parameter in encoding.parameters())
    found = bias_of(encoding.gate(x.double(), ALL_HEADS), 9, torch.float64)
    for b in range(2):
        for h in range(3):
            logits = [float(weight[h] @ x[b, token].double() + bias[h]) for token in range(9)]
            for i in range(9):
                for j in range(i + 1):
                    exact = sum(-math.log1p(math.exp(-logits[token])) for token in range(j + 1, i + 1))
                    assert float(found[b, h, i, j].detach()) == pytest.approx(exact, abs=9 * 2**-29)


def test_gradients_match_plain_autograd() -> None:
    encoding = registry.build_encoding("fox", DIMS, {"std": 0.3}).double()
    for heads in (ALL_HEADS, slice(1, 3)):
        x = torch.randn(2, 7, 24, dtype=torch.float64, requires_grad=True)
        leaves = [x, *encoding.parameters()]
        found = encoding.gate(x, heads)
        weight, bias = encoding.parameters()
        plain = torch.nn.functional.logsigmoid(x @ weight.t() + bias).transpose(1, 2)[:, heads]
        torch.testing.assert_close(found, plain)
        upstream = torch.randn_like(plain)
        for ours, exact in zip(*(torch.autograd.grad(y, leaves, upstream) for y in (found, plain)), strict=True):
            torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_model_has_float32_gates(dtype: torch.dtype) -> None:
    """Gates stay float32 in a half-precision model: bfloat16 would change log(gate) near gate = 1 by several
    percent.
    """
    encoding, x = registry.build_encoding("fox", DIMS, {"bias_init": 5.0}).to(dtype), torch.randn(1, 50, 24).to(dtype)
    exact = registry.build_encoding("fox", DIMS)
    exact.load_state_dict(encoding.state_dict())  # the rounded parameters, used in float32
    found = encoding.gate(x, ALL_HEADS)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, exact.gate(x.float(), ALL_HEADS), rtol=1e-6, atol=1e-7)


def test_decay_times_match_initialized_heads() -> None:
    options = {"std": 0.0, "decay_time_min_init": 2.0, "decay_time_max_init": 32.0}
    gates = registry.build_encoding("fox", DIMS, options).gate(torch.randn(1, 1, 24), ALL_HEADS)
    torch.testing.assert_close(-1 / gates[0, :, 0].detach(), torch.tensor([2.0, 8.0, 32.0]))
    for wrong in ({"decay_time_min_init": 2.0}, options | {"bias_init": 1.0}, options | {"decay_time_max_init": 0.0}):
        with pytest.raises(ValueError, match=r"option (decay_time_max_init|bias_init) of fox is"):
            registry.build_encoding("fox", DIMS, wrong)


@pytest.mark.parametrize("dropped", [1, 777, 60_000])
def test_a_difference_of_sums_does_not_depend_on_their_start(dropped: int) -> None:
    """Differences of sums do not depend on the start of the sums, bit for bit.

    At 65,536 tokens the sums reach −45,000, and float32 keeps nearby differences exact that plain sums lose.
    """
    gates = torch.nn.functional.logsigmoid(torch.randn(1, 1, 65_536))
    rows = 3
    whole = bias_of(gates, rows)
    assert torch.equal(whole[..., dropped:], bias_of(gates[..., dropped:], rows))
    exact = gates.double().flip(-1).cumsum(-1).flip(-1)[0, 0, 1:]  # Σ_{l > j} for the last row
    near = (whole[0, 0, -1, :-1].double() - exact)[-64:].abs().max()
    sums = gates.cumsum(-1)[0, 0]
    plain = ((sums[-1] - sums[:-1]).double() - exact)[-64:].abs().max()
    assert near < 1e-5
    assert plain > 100 * near


def test_positions_are_decayed_on_request_except_biases() -> None:
    """GPT-NeoX applies weight decay to all parameters except those named `bias`: KERPLE's r1 and r2, T5's table, and
    FIRE's c.
    """
    model = ModelOptions(num_layers=1, hidden_size=16, num_attention_heads=4, seq_length=8)
    decayed = {}
    for name in ("kerple_log", "t5", "fire", "fox", "learned"):
        gpt = build_model(model, PositionOptions(pos_emb=name), VOCABULARY, seed=3)
        names = {id(parameter): weight for weight, parameter in gpt.position.named_parameters()}
        groups = build_parameter_groups(gpt, 0.1, decay_positions=True)
        own = [(names[id(p)], group) for group in groups for p in group["params"] if id(p) in names]
        decayed[name] = {weight for weight, group in own if group["weight_decay"] == 0.1}
    assert decayed == {
        "kerple_log": {"r1.value", "r2.value"},
        "t5": {"bias.value"},
        "fire": {"c.value", "multiplier.value", "weight1.value", "weight2.value"},
        "fox": {"forget.weight"},
        "learned": {"vectors.weight"},
    }


def test_its_projection_is_decayed_and_grows_with_the_model() -> None:
    sizes = {"num_layers": 1, "num_attention_heads": 4, "seq_length": 8, "make_vocab_size_divisible_by": 8}
    mup = {"use_mup": True, "mup_base_hidden_size": 16, "mup_base_num_attention_heads": 2}
    position = PositionOptions(pos_emb="fox", pos_emb_per_layer=True)
    gpt = build_model(ModelOptions(**sizes, **mup, hidden_size=32), position, VOCABULARY, seed=3)
    forget = gpt.decoder.layers[0].self_attention.core_attention.position.forget
    groups = build_parameter_groups(gpt, 0.1)
    of_weight, of_bias = (
        next(group for group in groups if any(p is parameter for p in group["params"]))
        for parameter in (forget.weight, forget.bias)
    )
    assert (of_weight["weight_decay"], of_bias["weight_decay"]) == (pytest.approx(0.2), 0.0)
    assert (of_weight["lr_scale"], of_bias["lr_scale"]) == (pytest.approx(0.5), 1.0)
    spread = registry.build_encoding("fox", AttentionDims(400, 2, 800, 8, 8)).forget.weight.std()
    assert float(spread) == pytest.approx(0.02, rel=0.02)


def test_a_cache_has_one_float32_for_each_token_and_head() -> None:
    with torch.no_grad():
        caches = []
        for name in ("none", "fox"):
            gpt = small_gpt(26, name, "none")
            caches.append(gpt.create_kv_cache(26))
            gpt(torch.zeros(2, 20, dtype=torch.int64), kv_cache=caches[-1])
    without, with_gates = (cache.count_bytes() for cache in caches)
    assert with_gates - without == 2 * 2 * 3 * 26 * 4  # layers, sequences, heads, capacity, bytes


def test_a_processor_sees_the_whole_bias_of_each_sequence() -> None:
    """With Conv1's score weights zero and W = H, dape's output depends only on the bias."""
    from megatron.attention.inputs import AttentionInputs
    from megatron.attention.reference import compute_scores_and_bias

    encoding, processor = build("fox", "dape")
    gates = encoding.gate(torch.randn(2, 6, 24), ALL_HEADS)
    q, span = torch.randn(2, 3, 6, 8), TokenRange(0, 6)
    row_bias, key_bias = sum_gates(gates, 6)
    inputs = AttentionInputs(q, q, q, span, span, encoding, processor, row_bias=row_bias, key_bias=key_bias)
    _, bias = compute_scores_and_bias(inputs)
    exact = gates.cumsum(-1)
    torch.testing.assert_close(bias, exact[..., :, None] - exact[..., None, :])


@pytest.mark.parametrize("gates", ["key", "query_key"])
@pytest.mark.parametrize("normalize", [False, True])
def test_grape_a_against_a_loop(gates: str, normalize: bool) -> None:
    encoding = registry.build_encoding("grape_a", DIMS, {"gates": gates, "normalize": normalize}).double()
    q, k = torch.randn(2, 1, 3, 6, 8, dtype=torch.float64)
    span = TokenRange(2, 6)
    found = encoding.contextual(q, k, q @ k.mT, span, span, ALL_HEADS)
    length = {"u": encoding.u, "v": encoding.v}
    vectors = {name: None if each is None else each.value.detach() for name, each in length.items()}
    if normalize:
        vectors = {name: None if x is None else x / x.norm(dim=-1, keepdim=True) for name, x in vectors.items()}

    def softplus(x: float) -> float:
        return math.log1p(math.exp(x))

    for h in range(3):
        rate = compute_slopes(3)[h] * softplus(float(encoding.omega.value[h]))
        for i in range(6):
            for j in range(i + 1):
                gate = softplus(float(vectors["u"][h] @ k[0, h, j]) / math.sqrt(8))
                if gates == "query_key":
                    gate += softplus(float(vectors["v"][h] @ q[0, h, i]) / math.sqrt(8))
                assert float(found[0, h, i, j].detach()) == pytest.approx(-(i - j) * rate * gate, rel=1e-9, abs=1e-12)
