"""Validation scores every token once, at any length and with any layout."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.load_tokenizer import Vocabulary
from megatron.data.torch_data import PaddedDataset, ValidationDataset, choose_blocks

WORDS = Vocabulary(size=5000, eod=7, name="words", tokenizer=None)


def scored_labels(dataset) -> list[int]:
    samples = [dataset[i] for i in range(len(dataset))]
    return [token for sample in samples for token in sample["labels"][sample["loss_mask"] > 0].tolist()]


@given(st.lists(st.integers(2, 90), min_size=1, max_size=4), st.integers(1, 9), st.integers(1, 4), st.integers(1, 13))
@settings(max_examples=60, deadline=None)
def test_every_token_is_scored_once_with_its_context(sizes, length, pieces, batch_size):
    ends = np.cumsum([0, *sizes])
    streams = [np.arange(first, last) for first, last in pairwise(ends)]
    dataset = ValidationDataset(streams, [1.0] * len(sizes), length, WORDS, block_length=length * pieces)
    assert dataset.is_whole
    padded = PaddedDataset(dataset, batch_size)
    assert len(padded) % batch_size == 0
    assert scored_labels(padded) == [token for stream in streams for token in stream[1:].tolist()]
    for i in range(len(padded)):
        sample = padded[i]
        assert {value.shape for value in sample.values()} == {(length,)}
        is_scored = sample["loss_mask"] > 0
        assert torch.equal(sample["tokens"][is_scored] + 1, sample["labels"][is_scored])


def test_a_lone_text_is_not_weighed_and_several_by_their_weights():
    (lone,) = [ValidationDataset([np.arange(40)], [3.0], 8, WORDS)]
    assert {float(value) for i in range(len(lone)) for value in lone[i]["loss_mask"]} == {0.0, 1.0}
    two = ValidationDataset([np.zeros(41, int), np.ones(11, int)], [3.0, 1.0], 8, WORDS)
    sums = [0.0, 0.0]
    for i in range(len(two)):
        sums[int(two[i]["labels"].max())] += float(two[i]["loss_mask"].sum())
    assert sums[0] == pytest.approx(3 * sums[1])
    assert sum(sums) == pytest.approx(50)


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 10, 97, 1000, 1024])
def test_a_limit_keeps_blocks_spread_over_the_text_and_a_smaller_one_a_part_of_them(num_blocks):
    for limit in range(1, num_blocks, max(1, num_blocks // 20)):
        chosen = choose_blocks(num_blocks, limit)
        assert len(set(chosen.tolist())) == limit
        assert set(chosen.tolist()) <= set(choose_blocks(num_blocks, limit + 1).tolist())
        if limit >= 10:
            gaps = np.diff([0, *sorted(chosen), num_blocks])
            assert gaps.max() <= 4 * num_blocks / limit
    assert choose_blocks(num_blocks, None).tolist() == choose_blocks(num_blocks, num_blocks).tolist()


def test_lengths_under_a_limit_score_the_same_tokens():
    text = [np.arange(1025)]
    found = [
        sorted(scored_labels(ValidationDataset(text, [1.0], length, WORDS, block_length=32, max_blocks=5)))
        for length in (8, 16, 32)
    ]
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 160


def test_the_token_after_an_end_of_document_may_be_excluded():
    dataset = ValidationDataset([np.array([1, 2, 7, 3, 4, 7, 5])], [1.0], 4, WORDS, eod_mask_loss=True)
    assert scored_labels(dataset) == [2, 7, 4, 7]
