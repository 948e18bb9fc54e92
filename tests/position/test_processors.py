"""Processors that read earlier rows, sum over them or modify weights, compared with the papers' equations in
float64.
"""

import math

import pytest
import torch
from models import build_model, disturb
from position_methods import SHAPE, random_qkv
from torch import Tensor

from megatron.attention.inputs import AttentionInputs
from megatron.attention.reference import compute_attention, compute_dense_terms
from megatron.options.model import ModelOptions
from megatron.options.position import PositionOptions
from megatron.position import registry
from megatron.position.facts import OptionError
from megatron.position.processor import Processor
from megatron.position.token_range import TokenRange

LENGTH = 13
SPAN = TokenRange(0, LENGTH)
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def build(name: str, **options: object) -> Processor:
    return disturb(registry.build_processor(name, SHAPE, options, has_bias=True)).double()


def attend(processor: Processor) -> tuple[Tensor, Tensor, Tensor]:
    """Return our output and the inputs of the equations: S + B, and values."""
    encoding = registry.build_encoding("kerple_log", SHAPE).double()
    q, k, v = random_qkv(LENGTH, dtype=torch.float64)
    ours = compute_attention(AttentionInputs(q, k, v, SPAN, SPAN, encoding, processor))
    bias = compute_dense_terms(encoding, SPAN, SPAN, q).bias
    return ours, q @ k.transpose(-1, -2) / math.sqrt(SHAPE.head_dim) + bias, v


def softmax(logits: Tensor) -> Tensor:
    return logits.masked_fill(~CAUSAL, -math.inf).softmax(-1)


@pytest.mark.parametrize("absolute", [False, True])
def test_talking_heads(absolute: bool) -> None:
    """Talking heads (2003.02436, section 3): J = einsum(logits, P_l), U = einsum(softmax(J), P_w)."""
    processor = build("talking_heads", absolute=absolute)
    ours, logits, v = attend(processor)
    identity = 0 if absolute else torch.eye(SHAPE.num_heads)
    before, after = (each.weight[0] + identity for each in (processor.logits, processor.weights))
    weights = softmax(torch.einsum("bhij,gh->bgij", logits, before))
    torch.testing.assert_close(ours, torch.einsum("bhij,gh->bgij", weights, after) @ v)


@pytest.mark.parametrize(("has_second", "absolute"), [(False, False), (True, False), (True, True)])
def test_multi_token_attention(has_second: bool, absolute: bool) -> None:
    """Multi-token attention (2504.00927, equations 3 and 4) element by element; masked elements are zero before each
    convolution.
    """
    sizes = {"weights_query_kernel_size": 2, "weights_key_kernel_size": 3} if has_second else {}
    options = {"query_kernel_size": 3, "key_kernel_size": 5, "head_kernel_size": 1 if has_second else 3}
    processor = build("mta", **options, **sizes, mixes_scores=has_second, gate=has_second, absolute=absolute)
    added = 0 if absolute else 1
    ours, logits, v = attend(processor)

    def convolve(maps: Tensor, kernel: Tensor) -> Tensor:
        rows, columns = kernel.shape[1:]
        kernel = kernel.clone()
        kernel[:, -1, columns // 2] += added
        result, maps = torch.zeros_like(maps), maps.masked_fill(~CAUSAL, 0)
        for i in range(LENGTH):
            for j in range(i + 1):
                for a in range(min(rows, i + 1)):
                    for c in range(max(0, j - columns // 2), min(LENGTH, j + columns // 2 + 1)):
                        tap = kernel[:, rows - 1 - a, c - j + columns // 2]
                        result[:, :, i, j] += tap * maps[:, :, i - a, c]
        return result

    def mix(maps: Tensor, weight: Tensor) -> Tensor:
        matrix = torch.block_diag(*weight) + added * torch.eye(SHAPE.num_heads)
        return torch.einsum("bhij,gh->bgij", maps, matrix)

    maps = convolve(logits, processor.scores.weight)
    weights = softmax(maps if processor.score_heads is None else mix(maps, processor.score_heads.weight))
    if processor.weights is not None:
        weights = convolve(weights, processor.weights.weight)
    output = mix(weights, processor.weight_heads.weight) @ v
    output = output / (output.square().mean(-1, keepdim=True) + 1e-5).sqrt() * processor.norm.weight
    output = output * (1 - (0.8 - 0.6 * math.exp(-0.3 * SHAPE.layer)))
    if processor.norm.gate is not None:
        output = output * torch.sigmoid(output @ processor.norm.gate[:-1] + processor.norm.gate[-1])[..., None]
    torch.testing.assert_close(ours, output)


def test_selective_attention() -> None:
    """Selective attention (2410.02703, section 3) element by element: no token masks itself, and none masks the
    first.
    """
    ours, logits, v = attend(build("selective"))
    masking = torch.zeros(2, LENGTH, LENGTH, dtype=torch.float64)
    for i in range(LENGTH):
        for j in range(1, i):
            masking[:, i, j] = sum(logits[:, 0, row, j].clamp(min=0) for row in range(j + 1, i))
    torch.testing.assert_close(ours, softmax(logits - masking[:, None]) @ v)


@pytest.mark.parametrize("options", [{}, {"s": 0.43, "learned": False}])
def test_scalable_softmax_of_scores_and_prior(options: dict[str, object]) -> None:
    """BAM's released code with `ssmax_prior`: logits are (q·k/√d + prior)·s·log n, with n visible keys."""
    processor = registry.build_processor("ssmax_prior", SHAPE, options, has_bias=True).double()
    s = torch.full((3,), 0.43, dtype=torch.float64)
    if processor.s is not None:
        s = torch.linspace(0.3, 1.7, 3, dtype=torch.float64)
        processor.s.value.data.copy_(s)
    ours, logits, v = attend(processor)
    log_n = torch.arange(1, LENGTH + 1, dtype=torch.float64).log()
    torch.testing.assert_close(ours, softmax(logits * s[:, None, None] * log_n[:, None]) @ v)


def test_scalable_softmax_counts_the_keys_that_a_row_sees() -> None:
    """Scalable softmax counts visible keys: within window and document, without padding.

    Without a bias it is the temperature.
    """
    model = ModelOptions(num_attention_heads=3, hidden_size=24, seq_length=16, num_layers=2)
    tokens = torch.randint(1, 50, (2, 12), generator=torch.Generator().manual_seed(3))
    mask = torch.arange(12) >= torch.tensor([[3], [0]])
    for keys in ({}, {"attention_window": [4, None]}):
        gpts = [
            build_model(model, PositionOptions(pos_emb="rotary", **keys, **{name: value}), 50).eval()
            for name, value in (("attention_temperature", "ssmax"), ("score_processor", "ssmax_prior"))
        ]
        for number, layer in enumerate(gpts[0].local_layers):
            layer.self_attention.core_attention.temperature.s.value.data = torch.tensor([0.5, 1.0, 2.0]) + number
        gpts[1].load_state_dict({k.replace(".temperature.", ".processor."): v for k, v in gpts[0].state_dict().items()})
        starts = torch.tensor([[0] * 5 + [5] * 7, [0] * 12])
        for choices in ({}, {"document_starts": starts}, {"attention_mask": mask}):
            with torch.no_grad():
                expected, found = (gpt(tokens, **choices) for gpt in gpts)
            read = mask if "attention_mask" in choices else torch.ones_like(mask)
            torch.testing.assert_close(found[read], expected[read], rtol=1e-4, atol=1e-5)


def test_zero_effect_initialization_is_reported() -> None:
    for name, options in (
        ("talking_heads", {}),
        ("talking_heads", {"absolute": True}),
        ("mta", {"group_norm": False}),
        ("mta", {"group_norm": False, "absolute": True, "mixes_scores": True}),
    ):
        fresh = registry.build_processor(name, SHAPE, options, has_bias=True)
        assert not fresh.has_effect()
        ours, logits, v = attend(fresh.double())
        torch.testing.assert_close(ours, softmax(logits) @ v)
        assert disturb(fresh).has_effect()
    for name in ("mta", "selective"):
        assert registry.build_processor(name, SHAPE, has_bias=True).has_effect()


def test_invalid_options_are_rejected() -> None:
    for options, problem in (
        ({"query_kernel_size": 0}, "query_kernel_size of mta is 0; it must be at least 1"),
        ({"key_kernel_size": 4}, "key_kernel_size of mta is 4; it must be a positive odd number"),
        ({"weights_query_kernel_size": 2}, "weights_key_kernel_size are 2 by 0; give both or none"),
        ({"head_kernel_size": 2}, "head_kernel_size of mta is 2; it must divide the 3 heads"),
        ({"group_norm": False, "gate": True}, "gate of mta is true, but it needs group_norm"),
    ):
        with pytest.raises(OptionError, match=problem):
            registry.build_processor("mta", SHAPE, options, has_bias=False)
    with pytest.raises(OptionError, match=r"s of ssmax_prior is 0\.0; it must be greater than 0"):
        registry.build_processor("ssmax_prior", SHAPE, {"s": 0.0}, has_bias=False)


def test_talking_heads_that_mix_nothing_are_rejected() -> None:
    with pytest.raises(OptionError, match="is false, and so is before_softmax; set one of them to true"):
        build("talking_heads", before_softmax=False, after_softmax=False)
