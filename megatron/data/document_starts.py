"""Can the documents of a dataset be told apart, and how many rows hold several?"""

import numpy as np

from megatron.data.blend import DatasetSlice
from megatron.data.load_tokenizer import Vocabulary
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
