"""What a split takes of each of its datasets, checked before anything is built of it."""

from dataclasses import dataclass

import numpy as np

from megatron.data.description import CHECKED_WHOLE
from megatron.data.indexed import Indexed, open_indexed
from megatron.data.paths import check_dataset, split_prefixes
from megatron.data.vocabulary import Vocabulary
from megatron.options.data import SPLITS, DataOptions, Split, split_shares
from megatron.utils.errors import UserError


@dataclass(frozen=True)
class Part:
    """A run of sequences of one dataset: what a split takes of it."""

    key: str  # the configuration key that names it
    dataset: Indexed
    first: int
    last: int  # exclusive
    weight: float

    def num_tokens(self) -> int:
        return int(self.dataset.lengths[self.first : self.last].sum(dtype=np.int64))


def sequence_range(shares: str, split: Split, sequences: int) -> tuple[int, int] | None:
    """First and last (exclusive) sequence of a split under shares such as `969,30,1`; None if its share is zero.

    The same rounding as megatron-core's, so a run reads the documents that Megatron-LM would give it.
    """
    numbers = split_shares(shares)
    edges = np.cumsum([0.0, *(np.array(numbers) / np.sum(numbers))])
    i = SPLITS.index(split)
    if numbers[i] == 0:
        return None
    return round(float(edges[i]) * sequences), round(float(edges[i + 1]) * sequences)


def parts_of(data: DataOptions, split: Split) -> list[Part]:
    """What a split takes of each of its datasets; empty if the configuration has no data for it."""
    named = split_prefixes(data, split)
    weights: list[float] = getattr(data, f"{split}_data_weights")
    parts = []
    for i, (key, prefix) in enumerate(named):
        check_dataset(prefix, content=False)  # first: it names the file that changed, where both no longer fit
        dataset = open_indexed(prefix)
        sequences = (0, len(dataset.lengths))
        if key == "data_path":
            share = sequence_range(data.split, split, len(dataset.lengths))
            if share is None:
                continue
            sequences = share
        parts.append(Part(key, dataset, *sequences, weight=weights[i] if weights else 1.0))
    return parts


def check_content(dataset: Indexed) -> None:
    """Compare the tokens with their checksum, if one was recorded and the file is not too large to be read for that."""
    check_dataset(dataset.prefix, content=dataset.tokens.nbytes <= CHECKED_WHOLE)


def check_part(part: Part, split: Split, seq_length: int, known: Vocabulary) -> None:
    """Refuse a part without a sample of `seq_length` tokens, or with tokens beyond the vocabulary. Raises UserError."""
    prefix = part.dataset.prefix
    what = f"{part.key}: the {split} split of {prefix}" if part.key == "data_path" else f"{part.key}: {prefix}"
    tokens = part.num_tokens()
    if tokens == 0:
        why = f" ({len(part.dataset.lengths)} documents in all)" if part.key == "data_path" else ""
        raise UserError(f"{what} has no tokens{why}", part.key)
    if tokens < seq_length + 1:
        raise UserError(
            f"{what} has {tokens} tokens; one sample of seq_length {seq_length} needs {seq_length + 1}", part.key
        )
    largest = part.dataset.largest_token()
    if largest >= known.size:
        raise UserError(
            f"{what} has token {largest}, but tokenizer {known.name} has only {known.size} tokens: a tokenizer that "
            "does not fit the data"
        )
