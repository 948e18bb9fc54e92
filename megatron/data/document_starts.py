"""Document boundaries of datasets: end-of-document tokens, fraction of rows with several documents, and sample rows."""

from collections.abc import Iterable, Sequence

import numpy as np

from megatron.data.blend import DatasetSlice, list_dataset_slices
from megatron.data.load_tokenizer import Vocabulary
from megatron.options.data import DataOptions
from megatron.utils.errors import UserError

CHECKED_DOCUMENTS = 256
"""Number of documents of a dataset to check; one of them must end with the end-of-document token."""
MAX_COUNTED_DOCUMENTS = 1 << 20
"""Maximum number of documents used to compute the fraction of rows with several documents."""
DRAW_SEED = 20
"""Seed for drawing rows. It is independent of a run's seed, so results apply to every run on the same data."""


def check_document_ends(dataset_slice: DatasetSlice, vocabulary: Vocabulary) -> int:
    """Return the end-of-document token that separates the documents of a slice.

    Raises UserError if the tokenizer has none, or if none of the first documents ends with it.
    """
    dataset, eod = dataset_slice.dataset, vocabulary.eod
    bounds = range(dataset_slice.first, min(dataset_slice.first + CHECKED_DOCUMENTS, dataset_slice.last))
    ends = [int(dataset.starts[i]) + int(dataset.lengths[i]) - 1 for i in bounds if dataset.lengths[i]]
    if eod is None or (ends and not (dataset.tokens[ends] == eod).any()):
        token = "" if eod is None else f" ({eod})"
        raise UserError(
            f"attention_mask: document, but the documents of {dataset.prefix} do not end with the end-of-document "
            f"token of {vocabulary.name}{token}, which separates them; prepare them with it",
            "attention_mask",
        )
    return eod


def describe_crossing_fraction(attention_mask: str, fraction: float | None) -> list[str]:
    """Return a line on the fraction of rows with several documents and how attention treats them.

    There is no line if there are no rows, or if the fraction rounds to 0%.
    """
    if fraction is None or f"{fraction:.0%}" == "0%":
        return []
    effect = "each attends only to itself" if attention_mask == "document" else "attention crosses document boundaries"
    return [f"attention_mask {attention_mask}: {fraction:.0%} of rows contain several documents; {effect}"]


def estimate_crossing_fraction(slices: Sequence[DatasetSlice], seq_length: int) -> float | None:
    """Estimate the fraction of training rows with several documents from unshuffled datasets; None without rows."""
    fractions = (compute_crossing_fraction(each.dataset.lengths[each.first : each.last], seq_length) for each in slices)
    return average_crossing_fractions((each.weight for each in slices), fractions)


def average_crossing_fractions(weights: Iterable[float], fractions: Iterable[float | None]) -> float | None:
    """Return the mean of fractions, weighted by dataset.

    Datasets without a row (None) are ignored; None is returned if there are no others.
    """
    known = [(weight, fraction) for weight, fraction in zip(weights, fractions, strict=True) if fraction is not None]
    total = sum(weight for weight, _ in known)
    return sum(weight * fraction for weight, fraction in known) / total if total else None


def compute_crossing_fraction(lengths: np.ndarray, seq_length: int) -> float | None:
    """Return the fraction of rows with more than one document, or None if there are no rows.

    lengths: integers [documents], document lengths in tokens including end tokens, in the order in which they are cut
        into rows of `seq_length` tokens. Only the first MAX_COUNTED_DOCUMENTS are counted.
    """
    ends = np.cumsum(lengths[:MAX_COUNTED_DOCUMENTS], dtype=np.int64)
    num_rows = int(ends[-1]) // seq_length if len(ends) else 0
    if num_rows == 0:
        return None
    # Starts of the next documents. A start at the beginning of a row crosses nothing.
    starts = ends[ends % seq_length != 0]
    return int((np.unique(starts // seq_length) < num_rows).sum()) / num_rows


def draw_document_starts(data: DataOptions, num_rows: int, seq_length: int) -> np.ndarray:
    """Draw rows like those of training and return, for each token, the column at which its document begins.

    Document lengths are sampled from the training data. The last row contains the most documents, and at least two if
    it has two tokens.

    Returns:
        int64 [rows, T].

    Raises the same errors as `list_dataset_slices`.
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
    """Return the columns at which documents begin in a row of documents in random order, starting at a random token."""
    ends = np.cumsum(lengths, dtype=np.int64)
    token = generator.integers(ends[-1])
    begins, end = [0], int(ends[np.searchsorted(ends, token, side="right")] - token)
    while end < seq_length:
        begins.append(end)
        end += int(lengths[generator.integers(len(lengths))])
    return np.array(begins)
