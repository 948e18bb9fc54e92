"""The data of a run: which tokenizer made them, samples to train on, and plain tokens to evaluate on.

`data_path` names one dataset, divided by `split` into consecutive shares of its documents, as in GPT-NeoX; or
`train_data_paths` and its sisters name datasets per split, blended by weights. Everything here checks before it
builds: files that are missing or cut short, tokens beyond the vocabulary, datasets of different tokenizers, a split
shorter than one sequence (megatron-core would silently repeat it) each end in one line that names the file.

megatron-core is imported only where samples are built, so that evaluation and `vocabulary` start quickly.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron.data.description import CHECKED_WHOLE
from megatron.data.indexed import Indexed, open_indexed
from megatron.data.options import SPLITS, DataOptions, Split, split_shares
from megatron.data.paths import all_prefixes, check_dataset, description_of, split_prefixes
from megatron.data.tokenizers import Tokenizer, load_tokenizer, open_tokenizer
from megatron.errors import UserError

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from megatron.parallel.processes import Processes


@dataclass(frozen=True)
class Vocabulary:
    """Token ids are in [0, size). `name` identifies the tokenizer, `eod` ends documents."""

    size: int
    name: str
    eod: int


@dataclass(frozen=True)
class Datasets:
    """Samples per split; None where the configuration names no data or no samples are asked for.

    A sample is a dictionary: `tokens` and `labels`, int64 [T], labels one token ahead, and `loss_mask`, float32 [T].
    Documents follow each other inside a sample, positions run on, and attention crosses them, as in GPT-NeoX.
    """

    train: "Dataset | None"
    valid: "Dataset | None"
    test: "Dataset | None"
    notes: tuple[str, ...] = ()
    """What a person should know, on the first rank: a damaged index that was built anew."""


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


def vocabulary(data: DataOptions) -> Vocabulary:
    """The vocabulary of a run's data: from the corpus.json beside them, else from the tokenizer keys.

    Raises UserError if there is neither, if datasets were made by different tokenizers, or if `tokenizer_type` and its
    files contradict corpus.json.
    """
    found: dict[Path, Vocabulary] = {}
    for prefix in all_prefixes(data):
        if description_of(prefix) is not None:
            same = next((other for other in found if other.parent == prefix.parent), None)
            found[prefix] = found[same] if same else _of(load_tokenizer(prefix.parent))
    if found:
        (first, expected), *others = found.items()
        for prefix, other in others:
            if other != expected:
                raise UserError(f"{prefix}: made by tokenizer {other.name}, but {first} by {expected.name}")
    if data.tokenizer_type is None:
        if not found:
            raise UserError("tokenizer_type: the data have no corpus.json beside them; say which tokenizer made them")
        return expected
    named_only = data.vocab_file is None and data.merge_file is None
    if found and named_only and data.tokenizer_type == expected.name.split("-")[0]:
        return expected
    tokenizer = open_tokenizer(data.tokenizer_type, data.vocab_file, data.merge_file)
    if found and tokenizer.name != expected.name:
        raise UserError(f"tokenizer_type: {tokenizer.name} does not fit the data: {first} was made by {expected.name}")
    return _of(tokenizer)


def _of(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer.vocab_size, tokenizer.name, tokenizer.eod)


def build_datasets(
    data: DataOptions,
    *,
    seq_length: int,
    train_samples: int,
    valid_samples: int,
    test_samples: int,
    seed: int,
    cache: str | Path | None,
    processes: "Processes",
    extend_train_to: int | None = None,
) -> Datasets:
    """Samples of `seq_length` tokens for each split that has data and is asked for some.

    The order of the training samples follows from `seed` and `train_samples`. A run that is extended passes the
    `train_samples` it began with and the new count as `extend_train_to`: the old samples stay in their order and
    new ones follow (`megatron.data.samples`).

    cache: folder for the sample indices, shared by all processes of the run, of which the first builds them while the
    others wait: all must call this. None keeps them in memory.

    Raises UserError for data that cannot be used, RunError for damaged files and a cache that cannot be written.
    """
    known = vocabulary(data)
    wanted = dict(zip(SPLITS, (train_samples, valid_samples, test_samples), strict=True))
    totals = {**wanted, "train": max(train_samples, extend_train_to or 0)}
    chosen = {split: _parts(data, split) for split in SPLITS if wanted[split] > 0}
    for split, parts in chosen.items():
        for part in parts:
            _check(part, split, seq_length, known)
    if not 0 <= seed < 1 << 32:
        raise UserError(f"seed: {seed} is not between 0 and {(1 << 32) - 1}")

    from megatron.data.samples import build_samples

    notes: list[str] = []
    built = {
        split: build_samples(
            parts,
            split=split,
            seq_length=seq_length,
            ordered=wanted[split],
            total=totals[split],
            seed=seed,
            cache=None if cache is None else Path(cache),
            processes=processes,
            vocabulary=known,
            eod_mask_loss=data.eod_mask_loss,
            notes=notes,
        )
        for split, parts in chosen.items()
        if parts
    }
    return Datasets(built.get("train"), built.get("valid"), built.get("test"), tuple(notes))


def token_stream(data: DataOptions, split: Split) -> np.ndarray:
    """All tokens of a split, [N] integers: documents in order, datasets one after the other, weights not applied.

    A view of the file where the split is one dataset. Raises UserError if the configuration has no data for the split.
    """
    parts = _parts(data, split)
    if not parts:
        shares = f"data_path's split is {data.split!r}" if data.data_path else f"{split}_data_paths is not given"
        raise UserError(f"{split}_data_paths: no {split} data: {shares}")
    known = vocabulary(data)
    for part in parts:
        _check(part, split, 1, known)
        check_content(part.dataset)
    streams = [part.dataset.stream(part.first, part.last) for part in parts]
    return streams[0] if len(streams) == 1 else np.concatenate(streams)


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


def _parts(data: DataOptions, split: Split) -> list[Part]:
    """What a split takes of each of its datasets; empty if the configuration has no data for it."""
    named = split_prefixes(data, split)
    weights: list[float] = getattr(data, f"{split}_data_weights")
    parts = []
    for i, (key, prefix) in enumerate(named):
        dataset = open_indexed(prefix)
        check_dataset(prefix, content=False)
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


def _check(part: Part, split: Split, seq_length: int, known: Vocabulary) -> None:
    prefix = part.dataset.prefix
    what = f"{part.key}: the {split} split of {prefix}" if part.key == "data_path" else f"{part.key}: {prefix}"
    tokens = part.num_tokens()
    if tokens == 0:
        why = f" ({len(part.dataset.lengths)} documents in all)" if part.key == "data_path" else ""
        raise UserError(f"{what} has no tokens{why}")
    if tokens < seq_length + 1:
        raise UserError(f"{what} has {tokens} tokens; one sample of seq_length {seq_length} needs {seq_length + 1}")
    largest = part.dataset.largest_token()
    if largest >= known.size:
        raise UserError(
            f"{what} has token {largest}, but tokenizer {known.name} has only {known.size} tokens: a tokenizer that "
            "does not fit the data"
        )
