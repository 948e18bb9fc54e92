"""Checks that the tokens of a dataset are those of its vocabulary, before megatron-core reads them."""

import numpy as np

from megatron.data.corpus_metadata import MAX_CHECKSUM_BYTES
from megatron.data.indexed_dataset import SAMPLED_TOKENS, IndexedTokens, check_dataset_content
from megatron.data.load_tokenizer import Vocabulary
from megatron.utils.errors import UserError


def check_token_range(name: str, token_range: tuple[int, int], dtype: np.dtype, vocabulary: Vocabulary) -> None:
    """Check that the smallest and the largest token id of a dataset are ids of its vocabulary.

    megatron-core uses negative ids as marks: it would take a token -1 for padding, and not count it in the loss.

    Raises:
        UserError: an id is negative or beyond the vocabulary.
    """
    smallest, largest = token_range
    if smallest < 0:
        limit, narrow = np.iinfo(dtype).max, dtype.itemsize < 4
        cause = f": its tokens are stored as {dtype.name}, where ids above {limit:,} become negative" if narrow else ""
        wide = "uint16 or int32" if vocabulary.size <= 1 << 16 else "int32"
        raise UserError(f"{name} has token {smallest}, but ids begin at 0{cause}; write it again with {wide} tokens")
    if largest >= vocabulary.size:
        raise UserError(
            f"{name} has token {largest}, but tokenizer {vocabulary.name} has only {vocabulary.size} tokens: a "
            "tokenizer that does not fit the data"
        )


def check_all_tokens(name: str, dataset: IndexedTokens, vocabulary: Vocabulary) -> None:
    """Check every token of a dataset before its first use: its checksum if one was recorded, then its range.

    Of a file that is too large to be read for that, blocks are checked; training checks each sample it reads.

    Raises:
        UserError: an id is negative or beyond the vocabulary.
        RunError: a file changed since the corpus was made.
    """
    check_dataset_content(dataset)
    max_tokens = None if dataset.tokens.nbytes <= MAX_CHECKSUM_BYTES else SAMPLED_TOKENS
    check_token_range(name, dataset.find_token_range(max_tokens), dataset.tokens.dtype, vocabulary)
