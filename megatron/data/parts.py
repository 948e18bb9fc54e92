"""What a split takes of each of its datasets, checked before anything is built of it."""

from dataclasses import dataclass

import numpy as np

from megatron.data.description import MAX_CHECKED_WHOLE
from megatron.data.indexed import IndexedTokens, open_indexed
from megatron.data.paths import check_dataset, list_split_prefixes
from megatron.data.vocabulary import Vocabulary
from megatron.options.data import SPLITS, DataOptions, Split, parse_split_fractions
from megatron.utils.errors import UserError


@dataclass(frozen=True)
class DatasetSlice:
    """A run of sequences of one dataset: what a split takes of it."""

    key: str  # the configuration key that names it
    dataset: IndexedTokens
    first: int
    last: int  # exclusive
    weight: float

    def num_tokens(self) -> int:
        return int(self.dataset.lengths[self.first : self.last].sum(dtype=np.int64))


def compute_sequence_range(shares: str, split: Split, sequences: int) -> tuple[int, int] | None:
    """First and last (exclusive) sequence of a split under shares such as `969,30,1`; None if its share is zero.

    The same rounding as megatron-core's, so a run reads the documents that Megatron-LM would give it.
    """
    numbers = parse_split_fractions(shares)
    edges = np.cumsum([0.0, *(np.array(numbers) / np.sum(numbers))])
    i = SPLITS.index(split)
    if numbers[i] == 0:
        return None
    return round(float(edges[i]) * sequences), round(float(edges[i + 1]) * sequences)


def list_dataset_slices(data: DataOptions, split: Split) -> list[DatasetSlice]:
    """What a split takes of each of its datasets; empty if the configuration has no data for it."""
    named = list_split_prefixes(data, split)
    weights: list[float] = getattr(data, f"{split}_data_weights")
    parts = []
    for i, (key, prefix) in enumerate(named):
        check_dataset(prefix, content=False)  # first: it names the file that changed, where both no longer fit
        dataset = open_indexed(prefix)
        sequences = (0, len(dataset.lengths))
        if key == "data_path":
            share = compute_sequence_range(data.split, split, len(dataset.lengths))
            if share is None:
                continue
            sequences = share
        parts.append(DatasetSlice(key, dataset, *sequences, weight=weights[i] if weights else 1.0))
    return parts


def check_dataset_content(dataset: IndexedTokens) -> None:
    """Compare the tokens with their checksum, if one was recorded and the file is not too large to be read for that."""
    check_dataset(dataset.prefix, content=dataset.tokens.nbytes <= MAX_CHECKED_WHOLE)


def check_dataset_slice(dataset_slice: DatasetSlice, split: Split, seq_length: int, vocab_size: Vocabulary) -> None:
    """Refuse a part without a sample of `seq_length` tokens, or with tokens beyond the vocabulary. Raises UserError."""
    prefix = dataset_slice.dataset.prefix
    what = (
        f"{dataset_slice.key}: the {split} split of {prefix}"
        if dataset_slice.key == "data_path"
        else f"{dataset_slice.key}: {prefix}"
    )
    tokens = dataset_slice.num_tokens()
    if tokens == 0:
        why = f" ({len(dataset_slice.dataset.lengths)} documents in all)" if dataset_slice.key == "data_path" else ""
        raise UserError(f"{what} has no tokens{why}", dataset_slice.key)
    if tokens < seq_length + 1:
        raise UserError(
            f"{what} has {tokens} tokens; one sample of seq_length {seq_length} needs {seq_length + 1}",
            dataset_slice.key,
        )
    largest = dataset_slice.dataset.find_largest_token()
    if largest >= vocab_size.size:
        raise UserError(
            f"{what} has token {largest}, but tokenizer {vocab_size.name} has only {vocab_size.size} tokens: a "
            f"tokenizer that "
            "does not fit the data"
        )
