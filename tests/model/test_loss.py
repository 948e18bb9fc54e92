"""Chunked loss equals the loss of all tokens: values, gradients and saved memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.distributed.process_groups import build_single_process_groups
from megatron.model.build import build_model
from megatron.model.gpt import GPT
from megatron.options.model import ModelOptions, compute_loss_chunk_length
from megatron.options.position import PositionOptions
from tools.tolerances import assert_close_in_rounding, count_gpt_sums

VOCABULARY, LENGTH, WIDTH = 300, 40, 16
TERMS, SUMS = count_gpt_sums(WIDTH, layers=1)
TOKENS, LABELS = torch.randint(VOCABULARY, (2, 2, LENGTH), generator=torch.Generator().manual_seed(3))


def gpt(**keys: object) -> GPT:
    options = ModelOptions(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=2,
        seq_length=LENGTH,
        make_vocab_size_divisible_by=4,
        **keys,
    )
    return build_model(
        options, PositionOptions(pos_emb="rotary"), VOCABULARY, groups=build_single_process_groups(), seed=5
    )


@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize("together", [1, 7, 20, LENGTH - 1])
def test_chunked_loss_equals_the_loss_of_all_tokens(together: int, untied: bool) -> None:
    model = gpt(no_weight_tying=untied)
    found = []
    for most in (2 * VOCABULARY * LENGTH, 2 * VOCABULARY * together + 1):
        model.max_logits = most
        losses = model(TOKENS, LABELS)
        # Different weights per token, as with a mask.
        grads = torch.autograd.grad((losses * torch.linspace(0, 2, LENGTH)).sum(), list(model.parameters()))
        found.append([losses.detach(), *grads])
    for whole, pieces in zip(*found, strict=True):
        assert_close_in_rounding(pieces, whole, max(TERMS, 2 * LENGTH), 2 * SUMS, size=0.0)


def test_no_logits_are_kept_for_the_backward_pass() -> None:
    model = gpt()

    def largest() -> int:
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            model(TOKENS, LABELS)
        return max(sizes)

    assert largest() == 2 * LENGTH * VOCABULARY
    model.max_logits = 2 * VOCABULARY * 4
    assert largest() < 2 * LENGTH * VOCABULARY / 2


@given(st.integers(1, 5000), st.integers(1, 9), st.integers(1, 600), st.integers(1, 10**6))
def test_so_many_are_scored_at_once_as_fit(length: int, batch: int, vocabulary: int, most: int) -> None:
    found = compute_loss_chunk_length(length, batch, vocabulary, most)
    assert 1 <= found <= length
    assert found == 1 or found * batch * vocabulary <= most
    assert found == length or (found + 1) * batch * vocabulary > most
