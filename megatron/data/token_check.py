"""Checks that a dataset's tokens belong to its vocabulary, run before megatron-core reads them."""

import numpy as np

from megatron.data.corpus_metadata import MAX_CHECKSUM_BYTES
from megatron.data.indexed_dataset import SAMPLED_TOKENS, IndexedTokens, check_dataset_content
from megatron.data.load_tokenizer import Vocabulary
from megatron.utils.errors import UserError


def check_token_range(name: str, token_range: tuple[int, int], dtype: np.dtype, vocabulary: Vocabulary) -> None:
    """Check that the smallest and the largest token id of a dataset are in its vocabulary.

    megatron-core uses negative ids as markers: it would treat a token -1 as padding and exclude it from the loss.

    Raises:
        UserError: an id is negative or exceeds the vocabulary.
    """
    smallest, largest = token_range
    if smallest < 0:
        limit, narrow = np.iinfo(dtype).max, dtype.itemsize < 4
        cause = f": its tokens are stored as {dtype.name}, where ids above {limit:,} become negative" if narrow else ""
        wide = "uint16 or int32" if vocabulary.size <= 1 << 16 else "int32"
        raise UserError(
            f"{name} has token {smallest}, but ids start at 0{cause}; write the dataset again with {wide} tokens"
        )
    if largest >= vocabulary.size:
        raise UserError(
            f"{name} has token {largest}, but tokenizer {vocabulary.name} has only {vocabulary.size} tokens: the "
            "tokenizer does not match the data"
        )


def check_all_tokens(name: str, dataset: IndexedTokens, vocabulary: Vocabulary) -> None:
    """Check every token of a dataset before its first use: the recorded checksum, if any, then the range.

    Files that exceed the size limit are checked in blocks; training also checks each sample it reads.

    Raises:
        UserError: an id is negative or exceeds the vocabulary.
        RunError: a file changed since the corpus was made.
    """
    check_dataset_content(dataset)
    max_tokens = None if dataset.tokens.nbytes <= MAX_CHECKSUM_BYTES else SAMPLED_TOKENS
    check_token_range(name, dataset.find_token_range(max_tokens), dataset.tokens.dtype, vocabulary)
