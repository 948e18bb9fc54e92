"""Document masking: each document of a packed row is read as if it were alone.

A row of training data contains several documents, one after another. If documents are masked, a token sees only its own
document, and indices start at 0 at the first token of each document. The same holds for positions, distances, windows,
and the edge seen by a processor's convolutions. Queries and keys are rotated, and embeddings added, for all tokens at
once (`restart_positions`). Attention is computed in one of two equivalent ways:

* Document by document (`split_documents`): each is a segment of its row. Every encoding, processor and backend is
  called for one document at a time, so results cannot differ. Many short documents cause many small calls.
* All documents at once (`mask_documents`): each token sees the keys from its `document_starts` on. This is correct if
  the scores of a query and a key do not depend on where their document begins. Examples are a bias or weight of the
  distance, and contextual terms of the tokens between. `backend.py` defines which backends and methods support it, and
  prepares their masks.

The tokens determine where documents begin (`find_document_starts`), so rows of training, evaluation and prompts are
divided in the same way. A document that continues in the next row restarts there, like any text that is cut into rows.

B batch, T tokens of the forward pass, P tokens before them.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron.attention.segments import ALL_SEQUENCES, SampleFunction, Segment, skip_sampling
from megatron.position.token_range import SampledPositions, TokenRange


def find_document_starts(tokens: Tensor, eod: int | bool, mask: Tensor | None = None) -> Tensor:
    """Return the column of the first token of each token's document. The token that ends a document belongs to it.

    Args:
        tokens: int64 [..., T]; or bool, True for tokens that end a document.
        eod: the end-of-document token; or True.
        mask: bool [..., T], False for padding at either end of a row, which counts as a separate document.

    Returns:
        int64 [..., T], on the device of the tokens.
    """
    is_first = torch.nn.functional.pad(tokens[..., :-1] == eod, (1, 0))
    if mask is not None:
        changes = torch.nn.functional.pad(mask[..., 1:] != mask[..., :-1], (1, 0))
        is_first = (mask & is_first) | changes
    columns = torch.arange(tokens.shape[-1], device=tokens.device)
    return torch.where(is_first, columns, 0).cummax(-1).values


def check_document_starts(starts: Tensor, batch: int, length: int) -> None:
    """Check that document starts have the right shape and are consistent.

    Args:
        starts: int64 [B, P + T] on the CPU: the column at which each token's document begins.

    Raises:
        ValueError: describes the expected value.
    """
    if starts.shape != (batch, length) or starts.dtype != torch.int64 or starts.device.type != "cpu":
        raise ValueError(
            f"document_starts is {starts.dtype} {list(starts.shape)} on {starts.device}; it must be int64 "
            f"[{batch}, {length}] on the CPU"
        )
    columns = torch.arange(length)
    is_first = starts == columns
    if not bool((is_first | (starts == starts.roll(1, dims=1))).all() and is_first[:, :1].all()):
        raise ValueError("document_starts must contain the column of the first token of each token's document")


def split_documents(starts: Tensor, past: int = 0, sample: SampleFunction = skip_sampling) -> tuple[Segment, ...]:
    """Return a segment for each document that has a token at column P or later.

    If all rows are divided equally, a segment covers all rows together.

    Args:
        starts: document starts, as defined by `check_document_starts`.
        past: P.
        sample: sampling function of randomized positions.
    """
    if bool((starts == starts[:1]).all()):
        return tuple(_split_row(starts[0], ALL_SEQUENCES, past, sample))
    rows = [_split_row(row, slice(number, number + 1), past, sample) for number, row in enumerate(starts)]
    return tuple(segment for row in rows for segment in row)


def _split_row(starts: Tensor, sequences: slice, past: int, sample: SampleFunction) -> Iterator[Segment]:
    begins, counts = starts.unique_consecutive(return_counts=True)
    for begin, count in zip(begins.tolist(), counts.tolist(), strict=True):
        first, end = max(begin, past), begin + count
        if first < end:
            tokens = TokenRange(first - begin, end - first, sample(count))
            yield Segment(tokens, sequences, first_column=first - past, first_key_column=begin)


def mask_documents(starts: Tensor, past: int, device: torch.device) -> tuple[Segment, ...]:
    """Return all tokens from column P on as one segment in which each token sees its own document.

    The arguments are those of `split_documents`.
    """
    document_starts = starts[:, past:].to(device=device, dtype=torch.int32, non_blocking=True)
    return (Segment(TokenRange(past, starts.shape[1] - past), document_starts=document_starts),)


def restart_positions(
    starts: Tensor,
    columns: Tensor,
    device: torch.device,
    segments: Sequence[Segment] = (),
    capacity: int | None = None,
) -> TokenRange:
    """Return the positions of the tokens at some columns of all sequences, T · B.

    Tokens of one column are adjacent.

    Args:
        starts: document starts, as defined by `check_document_starts`.
        columns: int64 [T] on the CPU.
        device: device of the positions.
        segments: segments of the whole rows, if their positions are sampled.
        capacity: maximum number of tokens of a row; None if rows do not grow.
    """
    indices = torch.arange(starts.shape[1]) - starts
    positions, limit = indices, int(indices.max()) + 1
    if any(segment.tokens.is_continuous for segment in segments):
        positions = positions.double()
    for segment in segments:
        if segment.tokens.sampled is not None:
            first, last = segment.first_key_column, segment.first_key_column + segment.tokens.stop
            own = segment.tokens.sampled
            positions[segment.sequences, first:last], limit = own.values[: last - first], own.limit
    values = positions[:, columns].t().flatten().to(device, non_blocking=True)
    return TokenRange(0, len(values), SampledPositions(values, limit), capacity or starts.shape[1])
