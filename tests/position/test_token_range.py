"""Randomized positions of the tokens of a sequence."""

import pytest
import torch

from megatron.attention.inputs import AttentionInputs
from megatron.attention.reference import compute_scores_and_bias
from megatron.position.facts import AttentionDims
from megatron.position.registry import build_encoding
from megatron.position.token_range import TokenRange, sample_positions


def test_continuous_positions_are_uniform_and_in_order() -> None:
    drawn = sample_positions(20_000, 20_001, seed=5, continuous=True)
    assert drawn.values.dtype == torch.float64
    assert bool((drawn.values.diff() >= 0).all())
    assert 0 <= float(drawn.values[0]) <= float(drawn.values[-1]) <= 20_000
    # Order statistics of a uniform sample deviate from its values by more than 0.5·√T at most once in a million samples
    # of this size.
    assert float((drawn.values - torch.arange(20_000)).abs().max()) < 2.7 * 20_000**0.5
    assert float((drawn.values % 1 - 0.5).mean().abs()) < 0.02
    again, other = (sample_positions(20_000, 20_001, seed=seed, continuous=True) for seed in (5, 6))
    assert torch.equal(drawn.values, again.values)
    assert not torch.equal(drawn.values, other.values)
    with pytest.raises(ValueError, match="randomized_positions offers 5 positions"):
        sample_positions(6, 5, seed=0, continuous=True)


@pytest.mark.parametrize("name", ["alibi", "kerple_log", "t5", "fire"])
def test_a_bias_is_that_of_real_distances(name: str) -> None:
    """The bias follows the formula at each pair's own distance.

    T5's buckets ignore the fraction of the distance if they are one position wide.
    """
    encoding = build_encoding(name, AttentionDims(2, 4, 8, 16, 16))
    span = TokenRange(0, 12, sample_positions(12, 16, seed=3, continuous=True))
    q = torch.zeros(1, 2, 12, 4)
    _, bias = compute_scores_and_bias(AttentionInputs(q, q, q, span, span, encoding))
    i, j = span.positions()[:, None], span.positions()[None, :]
    n = (i - j).clamp(min=0)
    match name:
        case "alibi":
            exact = torch.stack([-n / 16, -n / 256])
        case "kerple_log":
            r1, r2 = (p.value.double()[:, None, None] for p in (encoding.r1, encoding.r2))
            exact = -r1 * torch.log(1 + r2 * n)
        case "t5":
            exact = encoding.bias().double()[n.floor().long()].permute(2, 0, 1)
        case _:
            x = torch.log(1 + 0.1 * n) / (torch.log(1 + 0.1 * i.clamp(min=8)) + 1e-6)
            fire = encoding.kernel_parameters()
            hidden = (x[..., None] * fire.weight1.double()[:, 0] + fire.bias1.double()).relu()
            exact = (hidden @ fire.weight2.double().T + fire.bias2.double()).permute(2, 0, 1)
    seen = torch.ones(12, 12).tril().bool()
    torch.testing.assert_close(bias.double()[:, seen], exact[:, seen], rtol=1e-5, atol=1e-6)
