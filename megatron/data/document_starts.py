"""Can the documents of a dataset be told apart, and how many rows hold several?"""

import numpy as np

from megatron.data.blend import DatasetSlice, list_dataset_slices
from megatron.data.load_tokenizer import Vocabulary
from megatron.options.data import DataOptions
from megatron.utils.errors import UserError

CHECKED_DOCUMENTS = 256
"""The first documents of a dataset, one of which must end with the end-of-document token to be told from the next."""
MAX_COUNTED_DOCUMENTS = 1 << 20
"""Of which the share of rows that hold several is computed."""


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


def estimate_crossing_share(data: DataOptions, seq_length: int) -> float | None:
    """The share of training rows that hold several documents, these read in the order of their datasets, which training
    shuffles; None without a row. Raises as `list_dataset_slices`."""
    total, sum_of_shares = 0.0, 0.0
    for part in list_dataset_slices(data, "train"):
        share = compute_crossing_share(part.dataset.lengths[part.first : part.last], seq_length)
        if share is not None:
            total, sum_of_shares = total + part.weight, sum_of_shares + part.weight * share
    return sum_of_shares / total if total else None


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
