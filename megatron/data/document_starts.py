"""Where documents begin in the rows of a text, and how many rows hold several.

A row holds the documents of a text one after another. The token that ends a document (`eod`) belongs to it, and the
next token begins another. A document that goes on in the next row begins there anew, as any text that is cut into rows.

The tokens alone say where documents begin, not the index of their dataset: so rows of a training sample, of a window of
an evaluation and of a prompt are divided alike, whoever prepared them (Megatron's `reset_position_ids` does so too).

T tokens of a row.
"""

import numpy as np

from megatron.data.blend import DatasetSlice
from megatron.data.load_tokenizer import Vocabulary
from megatron.utils.errors import UserError

CHECKED_DOCUMENTS = 256
"""The first documents of a dataset, one of which must end with the end-of-document token to be told from the next."""
MAX_COUNTED_DOCUMENTS = 1 << 20
"""Of which the share of rows that hold several is computed."""


def find_document_starts(tokens: np.ndarray, eod: int) -> np.ndarray:
    """Of each token of rows [..., T], the column of its document's first token in the row: int64 [..., T]."""
    is_first = np.zeros(tokens.shape, dtype=bool)
    is_first[..., 1:] = tokens[..., :-1] == eod
    return np.maximum.accumulate(np.where(is_first, np.arange(tokens.shape[-1]), 0), axis=-1)


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
