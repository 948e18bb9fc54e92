"""CDAPE, compared with the published module, reimplemented from DAPE V2's appendix N."""

from dataclasses import replace

import pytest
import torch
from memory_measurement import Peak
from torch import nn

from megatron.attention.inputs import AttentionInputs
from megatron.attention.reference import precompute_terms
from megatron.position import registry
from megatron.position.encoding import Encoding
from megatron.position.facts import AttentionDims
from megatron.position.numerics import toeplitz
from megatron.position.processor import Processor
from megatron.position.token_range import TokenRange, build_causal_mask, sample_positions


class Appendix(nn.Module):
    """Module of appendix N: two Conv2d over [scores, bias], both lower-triangular, hidden map cut at column T."""

    def __init__(self, channels: int, heads: int, width: int, kernel_size: int) -> None:
        super().__init__()
        pad = (0, kernel_size // 2)
        self.mlp = nn.Sequential(
            nn.Conv2d(channels, width, (1, kernel_size), padding=pad),
            nn.LeakyReLU(),
            nn.Conv2d(width, heads, (1, kernel_size), padding=pad),
        )

    def forward(self, attention: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        both = attention if bias is None else torch.cat([attention, bias.expand(attention.shape[0], -1, -1, -1)], 1)
        processed = self.mlp(torch.tril(both))
        return attention + processed if bias is None else attention + bias + processed


def _pair(heads: int, width: int, k: int, has_bias: bool):
    ours = registry.build_processor(
        "cdape", AttentionDims(heads, 8, 8 * heads, 16, 16), {"width": width, "kernel_size": k}, has_bias=has_bias
    ).double()
    theirs = Appendix(2 * heads if has_bias else heads, heads, width, k).double()
    with torch.no_grad():
        theirs.mlp[0].weight.copy_(ours.hidden.weight)
        theirs.mlp[0].bias.copy_(ours.hidden.bias)
        theirs.mlp[2].weight.copy_(ours.output.weight)
        theirs.mlp[2].bias.copy_(ours.output.bias)
    return ours, theirs


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("k", [1, 3, 5, 7])
@pytest.mark.parametrize(("heads", "width", "length"), [(3, 7, 13), (4, 32, 30)])
def test_equals_the_appendix_on_every_row_but_the_last(k: int, heads: int, width: int, length: int, has_bias) -> None:
    ours, theirs = _pair(heads, width, k, has_bias)
    scores = torch.randn(2, heads, length, length, dtype=torch.float64)
    bias = torch.randn(heads, length, length, dtype=torch.float64) if has_bias else None
    span = TokenRange(0, length)
    visible = build_causal_mask(span, span)[None, None]
    mine, published = ours(scores, bias, visible), theirs(scores, bias)
    same = length - k // 2
    lower = visible.expand_as(mine)
    torch.testing.assert_close(mine.where(lower, 0)[:, :, :same], published.where(lower, 0)[:, :, :same])
    if k > 1:
        assert not torch.allclose(mine[0, :, -1], published[0, :, -1], atol=1e-4)


def test_the_last_rows_differ_because_the_published_hidden_map_ends_at_column_T() -> None:
    """Row i of the published module changes when the sequence grows; with a longer sequence it equals ours."""
    ours, theirs = _pair(3, 8, 5, True)
    length, longer = 12, 14  # k//2 = 2 more columns
    scores = torch.randn(1, 3, longer, longer, dtype=torch.float64)
    bias = torch.randn(3, longer, longer, dtype=torch.float64)
    span = TokenRange(0, length)
    mine = ours(scores[..., :length, :length], bias[:, :length, :length], build_causal_mask(span, span)[None, None])
    short = theirs(scores[..., :length, :length], bias[:, :length, :length])
    grown = theirs(scores, bias)[..., :length, :length]
    lower = build_causal_mask(span, span).expand_as(mine)
    torch.testing.assert_close(mine.where(lower, 0), grown.where(lower, 0))
    assert (short - grown).where(lower, 0)[..., -2:, :].abs().max() > 1e-3
    torch.testing.assert_close(
        short[..., :-2, :].where(lower[..., :-2, :], 0), grown[..., :-2, :].where(lower[..., :-2, :], 0)
    )


def test_dape_is_cdape_with_kernel_one() -> None:
    shape = AttentionDims(3, 8, 24, 16, 16)
    dape = registry.build_processor("dape", shape, {"width": 9}, has_bias=True)
    cdape = registry.build_processor("cdape", shape, {"width": 9, "kernel_size": 1}, has_bias=True)
    cdape.load_state_dict(dape.state_dict())
    scores, bias = torch.randn(2, 3, 7, 7), torch.randn(3, 7, 7)
    visible = build_causal_mask(TokenRange(0, 7), TokenRange(0, 7))[None, None]
    assert torch.equal(dape(scores, bias, visible), cdape(scores, bias, visible))


@pytest.mark.parametrize("residual", [True, False])
def test_zero_init_is_the_identity_and_residual_bias_is_optional(residual: bool) -> None:
    shape = AttentionDims(3, 8, 24, 16, 16)
    options = {"zero_init": True, "residual_bias": residual}
    processor = registry.build_processor("cdape", shape, options, has_bias=True)
    scores, bias = torch.randn(2, 3, 7, 7), torch.randn(3, 7, 7)
    visible = build_causal_mask(TokenRange(0, 7), TokenRange(0, 7))[None, None]
    expected = scores + bias if residual else scores  # DAPE V2 equation 3; equation 2
    assert torch.equal(processor(scores, bias, visible), expected)


def test_start_values_are_conv2d_s() -> None:
    processor = registry.build_processor("cdape", AttentionDims(64, 8, 512, 16, 16), {"width": 64}, has_bias=True)
    bound = (128 * 3) ** -0.5
    assert processor.hidden.weight.abs().max() <= bound
    assert abs(processor.hidden.weight.std() / (bound / 3**0.5) - 1) < 0.02


@pytest.mark.parametrize("options", [{"kernel_size": 4}, {"kernel_size": 0}, {"width": 0}, {"kernel": 3}])
def test_bad_options_are_rejected(options: dict) -> None:
    with pytest.raises(ValueError, match="cdape"):
        registry.build_processor("cdape", AttentionDims(3, 8, 24, 16, 16), options, has_bias=True)


def some_inputs(encoding: Encoding, processor: Processor, tokens: TokenRange) -> AttentionInputs:
    x = torch.zeros(1, 3, tokens.length, 8)
    return AttentionInputs(x, x, x, tokens, tokens, encoding, processor)


@pytest.mark.parametrize("k", [1, 3, 5, 7])
@pytest.mark.parametrize("length", [1, 2, 5, 23])
def test_the_bias_share_from_a_table_equals_the_convolution_of_the_bias(k: int, length: int) -> None:
    """The bias contribution from a table equals the convolution of the bias, including the left edge and row blocks."""
    shape = AttentionDims(3, 8, 24, 16, 16)
    encoding = registry.build_encoding("kerple_log3", shape).double()
    processor = registry.build_processor("cdape", shape, {"width": 5, "kernel_size": k}, has_bias=True).double()
    whole, p = TokenRange(0, length), k // 2
    inputs = precompute_terms(some_inputs(encoding, processor, whole))
    table, share = inputs.table, inputs.bias_contribution
    lower = build_causal_mask(whole, whole)
    dense = toeplitz(table.bias, whole, whole).masked_fill(~lower, 0)
    exact = processor.hidden(torch.nn.functional.pad(dense, (0, p))[None].double(), processor.bias_channels)[0]
    used = build_causal_mask(TokenRange(p, length), TokenRange(0, length + p))  # inputs of all visible outputs
    for start in range(length):
        rows = TokenRange(start, length - start)
        ours = share.select_rows(rows, length)
        torch.testing.assert_close(ours.where(used[start:], 0), exact[:, start:].where(used[start:], 0))


def test_no_share_where_keys_are_hidden() -> None:
    encoding = registry.build_encoding("alibi", AttentionDims(3, 8, 24, 16, 16))
    processor = registry.build_processor("cdape", encoding.dims, has_bias=True)
    whole = TokenRange(0, 9)
    inputs = some_inputs(encoding, processor, whole)
    assert precompute_terms(inputs).bias_contribution is not None
    mask = torch.ones(1, 9, dtype=torch.bool)
    sampled = TokenRange(0, 9, sample_positions(9, 20, seed=3))
    for hidden in (
        replace(inputs, key_mask=mask),
        replace(inputs, window=4),
        replace(inputs, query=sampled, key=sampled),
        replace(inputs, query=TokenRange(4, 5), key=TokenRange(4, 5)),
    ):
        assert precompute_terms(hidden).bias_contribution is None


@pytest.mark.parametrize("columns", [2, 4])
def test_the_gradient_of_a_long_strip_takes_memory_linear_in_its_rows(columns: int) -> None:
    """The gradient of a long strip takes memory linear in its rows.

    The left edge's strip has one row per token and few columns; sheared along its rows it would be square.
    """
    rows = 512
    table = torch.randn(3, rows, dtype=torch.float64, requires_grad=True)
    strip = toeplitz(table, TokenRange(0, rows), TokenRange(0, columns))
    gradient = torch.randn(3, rows, columns, dtype=torch.float64)
    with Peak() as tracked:
        (found,) = torch.autograd.grad(strip, table, gradient)
    distance = (torch.arange(rows)[:, None] - torch.arange(columns)).clamp(min=0)
    wanted = torch.zeros_like(table).index_add_(1, distance.flatten(), gradient.flatten(1))
    torch.testing.assert_close(found.detach(), wanted.detach())
    assert tracked.most < 8 * gradient.nbytes
