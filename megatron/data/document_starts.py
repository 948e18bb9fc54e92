"""Can the documents of a dataset be told apart, how many rows hold several, and what do such rows look like?"""

from collections.abc import Iterable, Sequence

import numpy as np

from megatron.data.blend import DatasetSlice, list_dataset_slices
from megatron.data.load_tokenizer import Vocabulary
from megatron.options.data import DataOptions
from megatron.utils.errors import UserError

CHECKED_DOCUMENTS = 256
"""The first documents of a dataset, one of which must end with the end-of-document token to be told from the next."""
MAX_COUNTED_DOCUMENTS = 1 << 20
"""Of which the share of rows that hold several is computed."""
DRAW_SEED = 20
"""Of rows that are drawn: no run's own, so that what is found out on them is true of every run on these data."""


def check_document_ends(dataset_slice: DatasetSlice, vocabulary: Vocabulary) -> int:
    """The end-of-document token that tells the documents of a slice apart.

    UserError if the tokenizer has none, or if none of the first documents ends with it.
    """
    dataset, eod = dataset_slice.dataset, vocabulary.eod
    bounds = range(dataset_slice.first, min(dataset_slice.first + CHECKED_DOCUMENTS, dataset_slice.last))
    ends = [int(dataset.starts[i]) + int(dataset.lengths[i]) - 1 for i in bounds if dataset.lengths[i]]
    if eod is None or (ends and not (dataset.tokens[ends] == eod).any()):
        token = "" if eod is None else f" ({eod})"
        raise UserError(
            f"attention_mask: document, but the documents of {dataset.prefix} do not end with the end-of-document "
            f"token of {vocabulary.name}{token}, which tells them apart; prepare them with it",
            "attention_mask",
        )
    return eod


def describe_crossing_share(attention_mask: str, share: float | None) -> list[str]:
    """A line on how many rows hold several documents, and what becomes of these; none where there are no rows."""
    then = "each is read alone" if attention_mask == "document" else "attention crosses them"
    return (
        []
        if share is None
        else [f"attention_mask {attention_mask}: {share:.0%} of rows hold several documents; {then}"]
    )


def estimate_crossing_share(parts: Sequence[DatasetSlice], seq_length: int) -> float | None:
    """Return the share of training rows that hold several documents, these read in the order of their datasets, which
    training shuffles; None without a row."""
    shares = (compute_crossing_share(part.dataset.lengths[part.first : part.last], seq_length) for part in parts)
    return average_crossing_shares((part.weight for part in parts), shares)


def average_crossing_shares(weights: Iterable[float], shares: Iterable[float | None]) -> float | None:
    """Their mean, weighted as the datasets are that they are of; None of a dataset without a row counts for nothing,
    and is what comes of no others."""
    known = [(weight, share) for weight, share in zip(weights, shares, strict=True) if share is not None]
    total = sum(weight for weight, _ in known)
    return sum(weight * share for weight, share in known) / total if total else None


def compute_crossing_share(lengths: np.ndarray, seq_length: int) -> float | None:
    """The share of rows that hold more than one document; None where there is not one row.

    lengths: integers [documents], in tokens with their ends, in the order in which they are cut into rows of
        `seq_length` tokens. The first MAX_COUNTED_DOCUMENTS are counted.
    """
    ends = np.cumsum(lengths[:MAX_COUNTED_DOCUMENTS], dtype=np.int64)
    num_rows = int(ends[-1]) // seq_length if len(ends) else 0
    if num_rows == 0:
        return None
    starts = ends[ends % seq_length != 0]  # those of the next document each; at a row's beginning nothing is crossed
    return int((np.unique(starts // seq_length) < num_rows).sum()) / num_rows


def draw_document_starts(data: DataOptions, num_rows: int, seq_length: int) -> np.ndarray:
    """Of each token of rows like those of training, drawn by the lengths of its documents, the column at which its
    document begins. The last row holds the most documents, and at least two if it has two tokens.

    Returns:
        int64 [rows, T].

    Raises as `list_dataset_slices`.
    """
    generator = np.random.default_rng(DRAW_SEED)
    parts = list_dataset_slices(data, "train")
    weights = np.array([part.weight for part in parts])
    rows = []
    for number in generator.choice(len(parts), num_rows, p=weights / weights.sum()):
        part = parts[number]
        lengths = part.dataset.lengths[part.first : part.last]
        rows.append(_draw_row(lengths[lengths > 0], seq_length, generator))
    rows.sort(key=len)
    if len(rows[-1]) == 1 and seq_length > 1:
        rows[-1] = np.array([0, generator.integers(1, seq_length)])
    return np.stack([np.repeat(begins, np.diff([*begins, seq_length])) for begins in rows])


def _draw_row(lengths: np.ndarray, seq_length: int, generator: np.random.Generator) -> np.ndarray:
    """The columns at which documents begin in a row that is cut from documents in random order: it begins at any of
    their tokens."""
    ends = np.cumsum(lengths, dtype=np.int64)
    token = generator.integers(ends[-1])
    begins, end = [0], int(ends[np.searchsorted(ends, token, side="right")] - token)
    while end < seq_length:
        begins.append(end)
        end += int(lengths[generator.integers(len(lengths))])
    return np.array(begins)
