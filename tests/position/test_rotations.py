"""Rotations that treat queries and keys differently, compared with float64 formulas of the scores for each token
pair.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron.attention.inputs import AttentionInputs
from megatron.attention.reference import compute_scores_and_bias
from megatron.position import registry
from megatron.position.encoding import Encoding
from megatron.position.facts import AttentionDims
from megatron.position.token_range import TokenRange

HEADS, D, T = 3, 8, 40
DIMS = AttentionDims(HEADS, D, HEADS * D, 16, 16)


def _scores(encoding: Encoding, q: torch.Tensor, k: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Return the scores of all rows and columns, [B, H, T, T]."""
    span = TokenRange(start, q.shape[2])
    rotated = encoding.rotate(q, span), encoding.rotate_keys(k, span)
    assert all(x.shape[-1] == encoding.qk_head_dim for x in rotated)
    return compute_scores_and_bias(AttentionInputs(*rotated, q, span, span, encoding))[0]


def _turned_product(q: np.ndarray, k: np.ndarray, distance: float, base: float = 10000.0) -> np.ndarray:
    """Return the real part of q·conj(k)·e^(iθn) for each pair of dimensions at a distance n."""
    half = len(q) // 2
    z = (q[:half] + 1j * q[half:]) * np.conj(k[:half] + 1j * k[half:])
    return (z * np.exp(1j * distance * base ** (-np.arange(half) / half))).real


def _exact_scores(score, q: torch.Tensor, k: torch.Tensor) -> np.ndarray:
    """Return score(q_i, k_j, i, j, head)/√d for j ≤ i of the first sequence, 0 elsewhere."""
    q, k = q[0].double().numpy(), k[0].double().numpy()
    result = np.zeros((HEADS, q.shape[1], q.shape[1]))
    for h in range(HEADS):
        for i in range(q.shape[1]):
            for j in range(i + 1):
                result[h, i, j] = score(q[h, i], k[h, j], i, j, h) / math.sqrt(q.shape[-1])
    return result


def _assert_close(found: torch.Tensor, exact: np.ndarray, atol: float) -> None:
    np.testing.assert_allclose(found[0].detach().tril().numpy(), exact, atol=atol)


def _far_place(kind: str, i: int, j: int, w: int, group: int) -> float:
    if i - j < w:
        return i - j
    return w if kind == "rerope" else i // group - j // group + w - w // group


@pytest.mark.parametrize(
    ("options", "distance"),
    [
        ({"scaling": "rerope", "neighbors": 6}, lambda i, j: _far_place("rerope", i, j, 6, 0)),
        ({"scaling": "rerope", "neighbors": T}, lambda i, j: i - j),
        *(
            (
                {"scaling": "selfextend", "group": group, "neighbors": w},
                lambda i, j, w=w, g=group: _far_place("selfextend", i, j, w, g),
            )
            for group, w in ((4, 6), (3, 9), (1, 5))
        ),
    ],
)
def test_far_keys_are_at_their_own_distance(options: dict[str, object], distance) -> None:
    """Far keys have their own distance.

    With one position per group, or if all tokens are neighbors, plain rotary remains.
    """
    q, k = torch.randn(2, 1, HEADS, T, D, dtype=torch.float64)
    encoding = registry.build_encoding("rotary", DIMS, options)
    exact = _exact_scores(lambda a, b, i, j, h: _turned_product(a, b, distance(i, j)).sum(), q, k)
    _assert_close(_scores(encoding, q, k), exact, atol=1e-13)
    if options.get("group") == 1 or options.get("neighbors") == T:
        _assert_close(_scores(registry.build_encoding("rotary", DIMS), q, k), exact, atol=1e-13)


@pytest.mark.parametrize("start", [0, 1000])
def test_xpos_decays_pair_by_pair(start: int) -> None:
    q, k = torch.randn(2, 1, HEADS, T, D, dtype=torch.float64)
    zeta = (np.arange(D // 2) * 2 / D + 0.4) / 1.4
    encoding = registry.build_encoding("rotary", DIMS, {"xpos": True, "xpos_scale_base": 16.0})
    exact = _exact_scores(lambda a, b, i, j, h: (_turned_product(a, b, i - j) * zeta ** ((i - j) / 16)).sum(), q, k)
    _assert_close(_scores(encoding, q, k, start), exact, atol=1e-11)


def test_xpos_is_finite_at_65536_tokens_and_refuses_more() -> None:
    """xPos is finite at 65,536 tokens (32 × 2,048) in float32 and bfloat16, and rejects more.

    The score of a token with itself equals the one without xPos.
    """
    encoding, plain = (registry.build_encoding("rotary", DIMS, {"xpos": xpos}) for xpos in (True, False))
    q, k = torch.randn(2, 1, HEADS, 1, D)
    for place in (0, 32_768, 65_535):
        one = TokenRange(place, 1, sequence_length=65_536)
        turned, wanted = ((e.rotate(q, one) * e.rotate_keys(k, one)).sum(-1).double() for e in (encoding, plain))
        torch.testing.assert_close(turned, wanted, rtol=1e-5, atol=1e-5)
        for dtype in (torch.float32, torch.bfloat16):
            rotated = encoding.rotate(q.to(dtype), one), encoding.rotate_keys(k.to(dtype), one)
            assert all(x.isfinite().all() and x.dtype == dtype for x in rotated)
    with pytest.raises(
        ValueError, match=r"xpos_scale_base .*is 512: .* 80,000 tokens are scaled by up to 2\^141, which exceeds"
    ):
        encoding.rotate(q, TokenRange(0, 1, sequence_length=80_000))
    with pytest.raises(ValueError, match="which exceeds float16"):
        encoding.rotate(q.half(), TokenRange(0, 1, sequence_length=8192))
    with pytest.raises(ValueError, match="of 131,072 tokens are scaled by up to"):
        registry.build_encoding("rotary", AttentionDims(HEADS, D, HEADS * D, 131_072, 131_072), {"xpos": True})
    with pytest.raises(ValueError, match="xpos of rotary is true, but scaling rerope moves far keys"):
        registry.build_encoding("rotary", DIMS, {"xpos": True, "scaling": "rerope", "neighbors": 4})


@pytest.mark.parametrize("length", [T, 65_536])
def test_pope_is_a_sum_of_cosines(length: int) -> None:
    """PoPE is a sum of cosines with frequencies and phases of each of the d elements and the scale 1/√d, also far from
    0.
    """
    q, k = torch.randn(2, 1, HEADS, T, D)
    encoding = registry.build_encoding("pope", DIMS, {"delta_init": "uniform"})
    delta = encoding.delta().detach().double().numpy()
    assert -2 * math.pi <= delta.min() < delta.max() <= 0
    theta = 10000.0 ** (-np.arange(D) / D)

    def score(a, b, i, j, h):
        return (np.log1p(np.exp(a)) * np.log1p(np.exp(b)) * np.cos((j - i) * theta + delta[h])).sum()

    _assert_close(_scores(encoding, q, k, length - T), _exact_scores(score, q, k), atol=1e-5)


def test_gradients_of_pope_match_autograd() -> None:
    encoding = registry.build_encoding("pope", DIMS, {"delta_init": "uniform"}).double()
    q, k = (x.requires_grad_() for x in torch.randn(2, 2, HEADS, 5, D, dtype=torch.float64))
    span, parameter = TokenRange(7, 5), encoding.delta.value

    def by_autograd(x: torch.Tensor, delta: torch.Tensor | float) -> torch.Tensor:
        angle = torch.arange(7, 12)[:, None] * 10000.0 ** (-torch.arange(D, dtype=torch.float64) / D) - delta
        magnitude = 2**0.25 * torch.nn.functional.softplus(x)
        return torch.cat([magnitude * angle.cos(), magnitude * angle.sin()], -1)

    for ours, exact, inputs in (
        (encoding.rotate(q, span), by_autograd(q, parameter[:, None]), (q, parameter)),
        (encoding.rotate_keys(k, span), by_autograd(k, 0.0), (k,)),
    ):
        torch.testing.assert_close(ours, exact, rtol=1e-6, atol=1e-6)  # angles are float32 if δ is
        upstream = torch.randn_like(ours)
        for found, wanted in zip(*(torch.autograd.grad(y, inputs, upstream) for y in (ours, exact)), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_fope_is_a_fourier_series_of_the_frequencies_that_turn() -> None:
    """FoPE without noise: pairs that complete a turn within the training length equal rotary's, and the others stay
    fixed.
    """
    q, k = torch.randn(2, 1, HEADS, T, D, dtype=torch.float64)
    dims, half = AttentionDims(HEADS, D, HEADS * D, 300, 300), D // 2
    theta = 10000.0 ** (-np.arange(half) / half)
    kept = int((theta >= 2 * math.pi / 300).sum())
    assert 1 < kept < half
    encoding = registry.build_encoding("fope", dims, {"gain": 0.5})
    by_cos, by_sin = (each.double().numpy() for each in encoding.compute_coefficients())
    deviation = 0.5 * math.sqrt(2 / (kept * (kept + HEADS)))
    many = registry.build_encoding("fope", AttentionDims(64, D, 64 * D, 300, 300), {"gain": 0.5}).compute_coefficients()
    noise = torch.stack(many) - torch.eye(kept)
    assert abs(float(noise.std()) / (0.5 * math.sqrt(2 / (kept * (kept + 64)))) - 1) < 0.1
    assert 0 < np.abs(by_cos[0] - np.eye(kept)).max() < 5 * deviation

    def turn(x, place, h):
        cos, sin = np.ones(half), np.zeros(half)
        cos[:kept] = np.cos(place * theta[:kept]) @ by_cos[h]
        sin[:kept] = np.sin(place * theta[:kept]) @ by_sin[h]
        return np.concatenate([x[:half] * cos - x[half:] * sin, x[half:] * cos + x[:half] * sin])

    exact = _exact_scores(lambda a, b, i, j, h: turn(a, i, h) @ turn(b, j, h), q, k)
    _assert_close(_scores(encoding, q, k), exact, atol=1e-12)
    plain = registry.build_encoding("fope", dims, {"gain": 0.0})
    hope = registry.build_encoding("rotary", dims, {"scaling": "hope"})
    torch.testing.assert_close(_scores(plain, q, k), _scores(hope, q, k), rtol=0, atol=1e-13)
    options = {"original_length": 4000, "gain": 0.5, "released": True}
    released = [registry.build_encoding("fope", replace(dims, layer=layer), options) for layer in (0, 1)]
    turned, kept = D // 4, int((theta >= 2 * math.pi / 4000).sum())
    assert kept > turned, "the case says something"
    by_cos, by_sin = (each.double().numpy() for each in released[1].compute_coefficients())
    assert by_cos.shape == (HEADS, kept, turned)
    assert not np.array_equal(by_cos, released[0].compute_coefficients()[0].numpy()), "layers draw their own"

    def turn_released(x, place, h):
        cos, sin = np.ones(half), np.ones(half)  # the other pairs are multiplied by [1, −1; 1, 1]
        cos[:turned] = np.cos(place * theta[:kept]) @ by_cos[h]
        sin[:turned] = np.sin(place * theta[:kept]) @ by_sin[h]
        return np.concatenate([x[:half] * cos - x[half:] * sin, x[half:] * cos + x[:half] * sin])

    exact = _exact_scores(lambda a, b, i, j, h: turn_released(a, i, h) @ turn_released(b, j, h), q, k)
    _assert_close(_scores(released[1], q, k), exact, atol=1e-12)
    silent = registry.build_encoding("fope", dims, {**options, "gain": 0.0}).compute_coefficients()[0][0]
    step = -(-kept // turned)  # a pair's own frequency is at step positions after the last
    own = [(pair * step, pair) for pair in range(turned) if pair * step < kept]
    assert silent.nonzero().tolist() == [list(each) for each in own]
    with pytest.raises(ValueError, match="original_length of fope is 6; no pair would rotate"):
        registry.build_encoding("fope", dims, {"original_length": 6})
