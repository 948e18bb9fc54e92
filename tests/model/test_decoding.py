"""Decoding with a key/value cache equals the full forward pass, for every method and processor of the registry."""

import pytest
import torch
from models import SUMS, TERMS, VOCABULARY, build_model, small_gpt
from position_methods import ALL, COVERING, IN_TURN

from megatron.model.gpt import GPT
from megatron.options.model import ModelOptions
from megatron.options.position import PositionOptions
from megatron.position import registry
from megatron.utils.errors import UserError
from tools.tolerances import assert_close_in_rounding, compute_tolerance

LENGTH = 26
DIFFERENT = 100 * compute_tolerance(TERMS, SUMS)
TAKES_POSITIONS = [pair for pair in COVERING if registry.load_encoding_class(pair[0]).takes_positions]

# Steps of one or several tokens, in both orders, at the start and at the end.
MIXED = [1, 6, 1, 1, 9, 2, 1, 5]


def tokens(batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length))


@torch.inference_mode()
def decoded(gpt: GPT, x: torch.Tensor, steps: list[int]) -> torch.Tensor:
    """Return the logits of all tokens, read in steps of the given sizes and then one by one."""
    cache, outputs = gpt.create_kv_cache(x.shape[1]), []
    while cache.length < x.shape[1]:
        size = steps[len(outputs)] if len(outputs) < len(steps) else 1
        part = x[:, cache.length : cache.length + size]
        outputs.append(gpt(part, kv_cache=cache))
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize(("encoding", "processor"), ALL)
def test_decoding_equals_the_full_forward(encoding: str, processor: str) -> None:
    gpt, x = small_gpt(LENGTH, encoding, processor), tokens()
    with torch.no_grad():
        assert_close_in_rounding(decoded(gpt, x, MIXED), gpt(x), TERMS, SUMS)


@pytest.mark.parametrize(("encoding", "processor"), IN_TURN)
def test_decoding_token_by_token(encoding: str, processor: str) -> None:
    """Each encoding once suffices, because the cache stores keys and values, and rows use ordinary attention."""
    gpt, x = small_gpt(LENGTH, encoding, processor), tokens()
    with torch.no_grad():
        assert_close_in_rounding(decoded(gpt, x, []), gpt(x), TERMS, SUMS)


@pytest.mark.parametrize(("encoding", "processor"), COVERING)
def test_decoding_in_a_window(encoding: str, processor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.model.kv_cache.WINDOW_SLACK", 2)
    gpt, x = small_gpt(LENGTH, encoding, processor, attention_window=5), tokens()
    with torch.no_grad():
        whole = gpt(x)
        assert_close_in_rounding(decoded(gpt, x, [7, 1, 6, 1, 1, 1, 4, 4]), whole, TERMS, SUMS)
        free = small_gpt(LENGTH, encoding, processor)(x)
    assert_close_in_rounding(whole[:, :5], free[:, :5], TERMS, SUMS)
    assert (whole[:, 12:] - free[:, 12:]).abs().max() > DIFFERENT


@pytest.mark.parametrize(
    ("encoding", "processor", "continuous"),
    [*((*pair, False) for pair in TAKES_POSITIONS), ("pope", "none", True), ("sandwich", "cdape", True)],
)
def test_decoding_at_randomized_positions(encoding: str, processor: str, continuous: bool) -> None:
    keys = {"randomized_positions": LENGTH + 20, "continuous_positions": continuous}
    gpt, x = small_gpt(LENGTH, encoding, processor, **keys), tokens()
    with torch.no_grad():
        whole = gpt(x)
        assert_close_in_rounding(decoded(gpt, x, [3, 10, 1, 1, 7, 4]), whole, TERMS, SUMS)
        assert torch.equal(gpt(x), whole), "evaluation draws the same positions every time"
        free = small_gpt(LENGTH, encoding, processor)(x)
    assert (whole - free).abs().max() > DIFFERENT
    with torch.no_grad(), pytest.raises(UserError, match="rows padded on the left"):
        gpt(x, attention_mask=torch.arange(LENGTH) >= torch.tensor([[0], [3]]), kv_cache=gpt.create_kv_cache(LENGTH))
    assert torch.equal(gpt(x, position_seed=1), gpt(x, position_seed=1)), "a draw follows from its seed"
    assert not torch.equal(gpt(x, position_seed=1), gpt(x, position_seed=2))


def test_cache_memory_grows_with_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.model.kv_cache.MIN_CAPACITY", 4)
    gpt, x = small_gpt(LENGTH, "rotary", "cdape"), tokens()
    with torch.inference_mode():
        cache = gpt.create_kv_cache(10**9)
        parts = [gpt(x[:, start : start + 2], kv_cache=cache) for start in range(0, LENGTH, 2)]
        assert_close_in_rounding(torch.cat(parts, dim=1), gpt(x), TERMS, SUMS)


def test_unsupported_cache_operations_raise_an_error() -> None:
    gpt = small_gpt(LENGTH, "alibi", "none")
    cache = gpt.create_kv_cache(5)
    with torch.no_grad():
        gpt(tokens(1, 4), kv_cache=cache)
        with pytest.raises(UserError, match="room for 5 tokens; 4 are in it and 2 more"):
            gpt(tokens(1, 2), kv_cache=cache)
    with pytest.raises(RuntimeError, match="inference"):
        gpt(tokens(1, 1), kv_cache=gpt.create_kv_cache(5))
    with pytest.raises(UserError, match="at least 1 token, not 0"):
        gpt.create_kv_cache(0)
    with pytest.raises(UserError, match="num_logits is 0"):
        gpt(tokens(1, 4), num_logits=0)
    model = ModelOptions(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=LENGTH)
    with pytest.raises(UserError, match="'foo': choose from auto, sdpa, triton, native, flex, eager, chunked"):
        build_model(model, PositionOptions(pos_emb="none"), VOCABULARY, backend="foo")
    with pytest.raises(UserError, match="has 46 positions, but the requested sequence length is 47"):
        small_gpt(LENGTH, "learned", "none").create_kv_cache(47)
