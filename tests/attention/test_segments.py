"""A padded sequence gives the same results as alone, for every method."""

from itertools import product

import pytest
import torch
from models import SUMS, TERMS, VOCABULARY, small_gpt
from position_methods import ALL
from torch import Tensor

from megatron.attention.segments import build_segments
from megatron.model.gpt import GPT
from megatron.position import registry
from tools.tolerances import assert_close_in_rounding

LENGTH = 18
LENGTHS = (18, 11, 14, 11, 1)


def padded() -> tuple[list[Tensor], Tensor, Tensor]:
    """Return sequences [1, length], their batch [B, LENGTH] left-padded with random tokens, and its mask."""
    sequences = [torch.randint(VOCABULARY, (1, length)) for length in LENGTHS]
    batch = torch.randint(VOCABULARY, (len(LENGTHS), LENGTH))
    mask = torch.arange(LENGTH)[None] >= LENGTH - torch.tensor(LENGTHS)[:, None]
    batch[mask] = torch.cat(sequences, dim=1)[0]
    return sequences, batch, mask


def assert_each_alike(found: Tensor, sequences: list[Tensor], alone: GPT) -> None:
    for row, sequence in zip(found, sequences, strict=True):
        assert_close_in_rounding(row[-sequence.shape[1] :], alone(sequence)[0], TERMS, SUMS)


@pytest.mark.parametrize(("encoding", "processor"), ALL)
@torch.inference_mode()
def test_padded_on_the_left(encoding: str, processor: str) -> None:
    gpt, (sequences, batch, mask) = small_gpt(LENGTH, encoding, processor), padded()
    assert_each_alike(gpt(batch, attention_mask=mask), sequences, gpt)
    cache, outputs = gpt.create_kv_cache(LENGTH), []
    for start, stop in ((0, 5), (5, 6), (6, 12), (12, 17), (17, 18)):  # the first two may be all padding
        outputs.append(gpt(batch[:, start:stop], kv_cache=cache, attention_mask=mask[:, :stop]))
    assert_each_alike(torch.cat(outputs, dim=1), sequences, gpt)


@pytest.mark.parametrize(
    ("encoding", "processor"),
    [*product(("rotary", "learned", "fire", "kerple_log"), ["cdape"]), ("rotary", "mta"), ("alibi", "selective")],
)
@pytest.mark.parametrize("place", [{"randomized_positions": LENGTH + 20}, {"attention_window": 6}])
@torch.inference_mode()
def test_padded_at_randomized_positions_and_in_a_window(encoding: str, processor: str, place: dict[str, int]) -> None:
    gpt, (sequences, batch, mask) = small_gpt(LENGTH, encoding, processor, **place), padded()
    assert_each_alike(gpt(batch, attention_mask=mask), sequences, gpt)


@pytest.mark.parametrize("encoding", registry.list_encodings())
@torch.inference_mode()
def test_padded_on_the_right(encoding: str) -> None:
    """Tokens after a sequence do not affect it."""
    gpt, (sequences, _, _) = small_gpt(LENGTH, encoding, "cdape"), padded()
    batch = torch.cat([torch.nn.functional.pad(each, (0, LENGTH - each.shape[1]), value=7) for each in sequences])
    mask = torch.arange(LENGTH)[None] < torch.tensor(LENGTHS)[:, None]
    for row, sequence in zip(gpt(batch, attention_mask=mask), sequences, strict=True):
        assert_close_in_rounding(row[: sequence.shape[1]], gpt(sequence)[0], TERMS, SUMS)


def test_gradients_come_from_the_tokens_alone() -> None:
    gpt, (sequences, batch, mask) = small_gpt(LENGTH, "fire", "cdape"), padded()
    (gpt(batch, attention_mask=mask)[mask] ** 2).sum().backward()
    found = [parameter.grad.clone() for parameter in gpt.parameters()]
    gpt.zero_grad()
    sum((gpt(sequence) ** 2).sum() for sequence in sequences).backward()
    for a, parameter in zip(found, gpt.parameters(), strict=True):
        assert_close_in_rounding(a, parameter.grad, TERMS * sum(LENGTHS), 2 * SUMS)


def test_padding_is_in_no_segment() -> None:
    mask = torch.tensor([[False, False, False], [False, True, True], [True, False, True]])
    whole, alone = build_segments(3, mask)
    assert (alone.tokens.start, alone.tokens.length, alone.first_column, alone.first_key_column) == (0, 2, 1, 1)
    assert alone.sequences.tolist() == [1]
    assert alone.key_mask is None
    assert whole.sequences.tolist() == [2]
    assert whole.key_mask.tolist() == [[True, False, True]]  # a masked token is hidden but keeps its position
    gpt = small_gpt(LENGTH, "kerple_log", "cdape")
    assert gpt(torch.ones(3, 3, dtype=torch.int64), attention_mask=mask).isfinite().all()
