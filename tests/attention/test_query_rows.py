"""Temperatures receive the correct number of visible keys for each query row."""

import pytest
import torch

from megatron.attention.documents import find_document_starts, mask_documents, split_documents
from megatron.attention.query_rows import describe_query_rows
from megatron.attention.segments import Segment, build_segments, concatenate_ranges, select_chunks, select_last_tokens
from megatron.distributed.mesh import Axis, list_context_chunks
from megatron.position.token_range import TokenRange, sample_positions

CPU = torch.device("cpu")
LENGTH = 24
TOKENS = torch.tensor([[5, 0, 5, 5, 5, 0] + [5] * 11 + [0] + [5] * 6, [5] * 9 + [0, 0] + [5] * 13])
STARTS = find_document_starts(TOKENS, 0)


def count_keys(segments: tuple[Segment, ...], window: int | None, batch: int, length: int) -> torch.Tensor:
    """Count the keys of each row one by one: same document or sequence, not masked, not later, within the window."""
    counts = torch.ones(batch, length)
    for segment in segments:
        sequences = (
            torch.arange(batch)[segment.sequences] if isinstance(segment.sequences, slice) else segment.sequences
        )
        for place, sequence in enumerate(sequences.tolist()):
            for offset in range(segment.tokens.length):
                row = segment.tokens.start + offset
                first = 0 if segment.document_starts is None else int(segment.document_starts[place, offset])
                if window is not None:
                    first = max(first, row - window + 1)
                seen = [
                    key
                    for key in range(first, row + 1)
                    if segment.key_mask is None or bool(segment.key_mask[place, key])
                ]
                counts[sequence, segment.first_column + offset] = max(len(seen), 1)
    return counts


MASK = torch.ones(3, LENGTH, dtype=torch.bool)
MASK[0, :5] = False
MASK[1, 20:] = False
MASK[2, 3:6] = MASK[2, 12] = False
CHUNKS = list_context_chunks(LENGTH, Axis(1, 2))
PLACES = {
    "whole": (build_segments(LENGTH), 1),
    "decoding": (build_segments(3, past=LENGTH - 3), 1),
    "padded": (build_segments(LENGTH, MASK), 3),
    "padded, decoding": (build_segments(2, MASK, past=LENGTH - 2), 3),
    "documents, masked": (mask_documents(STARTS, 0, CPU), 2),
    "documents, split": (split_documents(STARTS), 2),
    "documents, decoding": (split_documents(STARTS, LENGTH - 5), 2),
    "the last tokens": (select_last_tokens(split_documents(STARTS), LENGTH, 7), 2),
    "a rank's chunks": (concatenate_ranges([TokenRange(6, 6), TokenRange(12, 6)]), 2),
    "a rank's chunks of documents": (select_chunks(mask_documents(STARTS, 0, CPU), CHUNKS, join_adjacent=False), 2),
}  # fmt: skip


@pytest.mark.parametrize("window", [None, 1, 4, LENGTH])
@pytest.mark.parametrize("place", PLACES)
def test_keys_are_counted(place: str, window: int | None) -> None:
    segments, batch = PLACES[place]
    length = max(segment.first_column + segment.tokens.length for segment in segments)
    found = describe_query_rows(segments, window, batch, length, CPU)
    expected = count_keys(segments, window, batch, length)
    assert torch.equal(found.num_keys.expand(batch, -1), expected)
    assert found.num_keys.dtype == found.positions.dtype == torch.float32


def test_positions_restart_with_documents_and_after_padding() -> None:
    within = (torch.arange(LENGTH) - STARTS).float()
    for segments in (mask_documents(STARTS, 0, CPU), split_documents(STARTS)):
        assert torch.equal(describe_query_rows(segments, None, 2, LENGTH, CPU).positions, within)
    padded = describe_query_rows(build_segments(LENGTH, MASK), None, 3, LENGTH, CPU).positions
    assert torch.equal(padded[0, 5:], torch.arange(LENGTH - 5.0))
    assert torch.equal(padded[2], torch.arange(float(LENGTH)))


def test_randomized_positions_are_rejected_and_keys_counted() -> None:
    drawn = sample_positions(LENGTH, 100, seed=1)
    found = describe_query_rows((Segment(TokenRange(4, LENGTH - 4, drawn)),), None, 1, LENGTH - 4, CPU)
    assert torch.equal(found.positions[0], drawn.values[4:].float())
    assert torch.equal(found.num_keys[0], torch.arange(5.0, LENGTH + 1))
