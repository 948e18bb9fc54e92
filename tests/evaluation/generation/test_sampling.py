"""Sampling, compared with the definitions computed token by token in Python's float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.evaluation.forward_passes import TokenSampler
from megatron.utils.errors import RunError

ROUNDING = 1e-13  # sums of at most 24 float64 terms, each from one exp and one division


def defined(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Return the sampling probabilities by the definitions of temperature, top-k and nucleus sampling."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if top_k:
        order = order[:top_k]
    weights = {token: math.exp((logits[token] - max(logits)) / temperature) for token in order}
    probabilities = {token: weight / math.fsum(weights.values()) for token, weight in weights.items()}
    kept, reached = [], 0.0
    for token in order:
        kept.append(token)
        reached += probabilities[token]
        if reached >= top_p:
            break
    whole = math.fsum(probabilities[token] for token in kept)
    return [probabilities[token] / whole if token in kept else 0.0 for token in range(len(logits))]


@given(
    logits=st.lists(st.integers(-60, 60), min_size=2, max_size=24, unique=True),  # no ties at the boundary of a set
    temperature=st.sampled_from([0.25, 0.7, 1.0, 3.0]),
    top_k=st.integers(0, 30),
    top_p=st.sampled_from([0.03, 0.31, 0.77, 0.983, 1.0]),
)
@settings(max_examples=300, deadline=None)
def test_probabilities_match_the_definitions(logits: list[int], temperature: float, top_k: int, top_p: float) -> None:
    values = [value / 10 for value in logits]
    sampling = TokenSampler(len(values), temperature, top_k, top_p)
    found = sampling.compute_probabilities(torch.tensor([[*values, 1e3, 1e3]], dtype=torch.float64))[0]
    assert found.tolist() == pytest.approx(defined(values, temperature, top_k, top_p), abs=ROUNDING)


def test_token_frequencies_match_probabilities() -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sampling, draws = TokenSampler(10, temperature=1.3, top_k=7, top_p=0.9), 20_000
    expected = defined(logits[0, :10].tolist(), 1.3, 7, 0.9)
    evenly = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    counts = torch.bincount(sampling.sample(logits.expand(draws, -1), evenly), minlength=10)
    assert counts.tolist() == pytest.approx([draws * share for share in expected], abs=1)  # both ends of an interval
    assert 0 < sum(count == 0 for count in counts) < 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_and_truncated_tokens_are_never_sampled(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, -torch.inf, 3.0, 1.0, 50.0, 60.0]] * 4, dtype=dtype)
    edges = torch.tensor([0.0, 0.5, 1 - 2**-53, 1 - 2**-30], dtype=torch.float64)
    for sampling in (
        TokenSampler(4),
        TokenSampler(4, 1e-300),
        TokenSampler(4, 0.0),
        TokenSampler(4, 9.0, top_k=3),
        TokenSampler(4, top_p=1e-9),
    ):
        chosen = sampling.sample(logits, edges)
        assert set(chosen.tolist()) <= {0, 2, 3}
        assert chosen[1] == 2 or sampling.temperature > 1
    assert TokenSampler(4, 0.0).sample(logits, edges).tolist() == [2] * 4
    assert TokenSampler(4, 5.0, top_k=1).sample(logits, edges).tolist() == [2] * 4
    assert TokenSampler(6, 0.0).sample(logits, edges).tolist() == [5] * 4


@pytest.mark.parametrize("logit", [torch.nan, torch.inf])
def test_logits_without_a_distribution_are_reported(logit: float) -> None:
    uniforms = torch.zeros(1, dtype=torch.float64)
    for temperature in (0.0, 1.0):
        with pytest.raises(RunError, match="logits are NaN or infinite"):
            TokenSampler(2, temperature).sample(torch.tensor([[0.0, logit]]), uniforms)
        assert TokenSampler(2, temperature).sample(torch.tensor([[0.0, -torch.inf]]), uniforms).tolist() == [0]
