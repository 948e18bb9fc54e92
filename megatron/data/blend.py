"""Datasets of a run: the corpora named by the configuration, the slice each split reads, and the sampling weights.

A *corpus* is one entry of `train_data_paths`, `valid_data_paths` or `test_data_paths`, or the value of `data_path`. It
is a dataset, a folder of datasets, or a list of either. Weights apply to corpora. A corpus of several datasets is read
as one; each dataset is sampled in proportion to its tokens.

A folder means every dataset in it and in its subfolders. For a corpus made by `./deepy.py prepare`, only the datasets
of the requested split are read. For other folders all datasets are read, so a folder whose file names mention several
splits raises an error. `megatron/training/check_start.py` writes the resolved datasets to the run's configuration.
"""

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.data.corpus.hub_dataset import is_saved_dataset
from megatron.data.corpus_metadata import ALL_SPLITS, get_split_basename
from megatron.data.indexed_dataset import IndexedTokens, check_dataset, find_corpus_metadata, open_indexed
from megatron.options.data import (
    SPLITS,
    CorpusName,
    DataOptions,
    Split,
    list_corpus_names,
    parse_split_fractions,
)
from megatron.utils.errors import UserError, check_reachable

_SPLIT_WORDS: dict[str, Split] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("valid", "validation", "val", "dev"), "valid"),
    "test": "test",
}
"""Words in a dataset's file name that indicate its split."""

MAX_SHOWN = 6
"""Maximum number of names or corpora listed in a message."""


@dataclass(frozen=True)
class DatasetSlice:
    """Consecutive sequences of one dataset that a split reads."""

    key: str  # configuration key that names the dataset
    dataset: IndexedTokens
    first: int
    last: int  # exclusive
    weight: float

    def num_tokens(self) -> int:
        return int(self.dataset.lengths[self.first : self.last].sum(dtype=np.int64))


def list_corpora(data: DataOptions, split: Split, key: str | None = None) -> list[list[Path]]:
    """Return the dataset prefixes of each corpus of a split, or an empty list if the configuration names none.

    A prefix may end in `.bin` or `.idx`. Raises UserError if a dataset's files are missing, a dataset is named twice,
    or a folder contains no dataset for the split.

    data: validated options (`find_data_conflicts`).
    key: configuration key shown in errors; the split's own key by default.
    """
    own_key = "data_path" if data.data_path is not None else f"{split}_data_paths"
    names: Sequence[CorpusName] = getattr(data, own_key) if data.data_path is None else [data.data_path]
    key = key or own_key
    corpora = [
        [prefix for name in list_corpus_names(corpus) for prefix in _find_datasets(key, name, split)]
        for corpus in names
    ]
    known: set[Path] = set()
    for prefix in (prefix for corpus in corpora for prefix in corpus):
        if prefix.resolve() in known:
            raise UserError(
                f"{key}: {prefix} is listed more than once, possibly through its folder; use a weight instead", key
            )
        known.add(prefix.resolve())
    return corpora


def list_split_prefixes(data: DataOptions, split: Split, key: str | None = None) -> list[Path]:
    """Return the dataset prefixes of a split. Empty results and errors are those of `list_corpora`."""
    return [prefix for corpus in list_corpora(data, split, key) for prefix in corpus]


def select_validation_sets(data: DataOptions) -> dict[str, DataOptions]:
    """Return data options for each additional validation set, with only that set as valid_data_paths, by its key."""
    return {
        f"valid_data_sets.{name}": DataOptions(valid_data_paths=[corpus], tokenizer_type=data.tokenizer_type)
        for name, corpus in data.valid_data_sets.items()
    }


def iter_corpora(data: DataOptions) -> Iterator[tuple[str, Sequence[CorpusName], list[list[Path]]]]:
    """Yield each key that names data of a run, with the names and the dataset prefixes of its corpora.

    Raises UserError as `list_corpora`.
    """
    if data.data_path is not None:
        yield "data_path", [data.data_path], list_corpora(data, "train")
    else:
        for split in SPLITS:
            yield f"{split}_data_paths", getattr(data, f"{split}_data_paths"), list_corpora(data, split)
    for key, validation_set in select_validation_sets(data).items():
        yield key, validation_set.valid_data_paths, list_corpora(validation_set, "valid", key)


def list_all_prefixes(data: DataOptions) -> list[Path]:
    """Return the dataset prefixes of all splits without duplicates. Raises UserError if no dataset is configured."""
    found = [prefix for _, _, corpora in iter_corpora(data) for corpus in corpora for prefix in corpus]
    prefixes = list(dict.fromkeys(found))
    if not prefixes:
        lists = ", ".join(f"{split}_data_paths" for split in SPLITS)
        raise UserError(f"data_path: no data configured; set data_path or {lists}")
    return prefixes


def _find_datasets(key: str, name: str, split: Split) -> list[Path]:
    """Return the prefixes of the dataset or of the folder that `name` refers to."""
    prefix = Path(name.removesuffix(".bin").removesuffix(".idx"))
    bin_file, idx_file = (Path(f"{prefix}{suffix}") for suffix in (".bin", ".idx"))
    if bin_file.is_file() and idx_file.is_file():
        return [prefix]
    if prefix.is_dir():
        return _list_folder(key, prefix, split)
    if bin_file.is_file() or idx_file.is_file():
        missing, present = (idx_file, bin_file) if bin_file.is_file() else (bin_file, idx_file)
        raise UserError(f"{key}: {missing} is missing (there is a {present.name})", key)
    if Path(name).is_file():
        raise UserError(
            f"{key}: {name} is not a dataset (.bin and .idx); if it is a text, convert it once with "
            f"`./deepy.py prepare {shlex.quote(name)} --output FOLDER`",
            key,
        )
    check_reachable(bin_file)
    datasets = _list_indices([prefix.parent])
    hint = f"; datasets there: {format_names(datasets)}" if datasets else " (create one with `./deepy.py prepare`)"
    if not (prefix.is_absolute() or prefix.parent.is_dir()):
        hint = f" in the current folder, {Path.cwd()}, where relative paths begin{hint}"
    raise UserError(f"{key}: no dataset {prefix}: {bin_file.name} and {idx_file.name} are missing{hint}", key)


def _list_folder(key: str, folder: Path, split: Split) -> list[Path]:
    """Return the datasets in a folder and its subfolders that `key` reads for a split."""
    wanted = (ALL_SPLITS,) if key == "data_path" else (split, ALL_SPLITS)
    folders = [Path(root) for root, _, _ in _walk(folder)]
    datasets = _list_indices(folders)
    if not datasets:
        if (saved := next(filter(is_saved_dataset, folders), None)) is not None:
            raise UserError(
                f"{key}: {saved} is a Hugging Face text dataset, but training reads tokens; "
                f"convert it once with `./deepy.py prepare {saved} --output FOLDER`",
                key,
            )
        raise UserError(f"{key}: the folder {folder} contains no dataset (create one with `./deepy.py prepare`)", key)
    described = {prefix: find_corpus_metadata(prefix) for prefix in datasets}
    taken = [p for p, metadata in described.items() if metadata is None or p.name in map(get_split_basename, wanted)]
    if not taken:
        keys = ", ".join(f"{s}_data_paths" for s in SPLITS if any(p.name == get_split_basename(s) for p in datasets))
        raise UserError(f"{key}: the corpus {folder} is divided into splits; it has data for {keys}", key)
    words = {p: _find_split_words(p.name) for p, metadata in described.items() if metadata is None}
    if key != "data_path" and (other := [p for p, splits in words.items() if splits - {split}]):
        raise UserError(
            f"{key}: {folder} contains {format_names(other)}, named for another split; list the datasets "
            f"for {key} instead of the folder",
            key,
        )
    return taken


def _walk(folder: Path) -> Iterable[tuple[str, list[str], list[str]]]:
    """Yield the same tuples as os.walk, in sorted order, without hidden folders.

    Raises UserError for unreadable folders.
    """

    def raise_unreadable(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None

    for root, folders, names in os.walk(folder, onerror=raise_unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield root, folders, names


def _list_indices(folders: Iterable[Path]) -> list[Path]:
    """Return the prefixes of the index files directly in the given folders."""
    return [path.with_suffix("") for folder in folders for path in sorted(folder.glob("[!.]*.idx"))]


def _find_split_words(name: str) -> set[Split]:
    return {_SPLIT_WORDS[word] for word in re.split(r"[^a-z]+", name.lower()) if word in _SPLIT_WORDS}


def format_names(prefixes: Sequence[Path]) -> str:
    """Format the first prefixes of a list, and the number of the others."""
    more = f" and {len(prefixes) - MAX_SHOWN} more" if len(prefixes) > MAX_SHOWN else ""
    return ", ".join(map(str, prefixes[:MAX_SHOWN])) + more


def compute_sequence_range(fractions: str, split: Split, num_sequences: int) -> tuple[int, int] | None:
    """Return the range of sequences (end exclusive) of a split, or None for fraction 0.

    Fractions are given as in `969,30,1`.

    Rounding matches megatron-core, so a run reads the same documents as Megatron-LM would.
    """
    values = parse_split_fractions(fractions)
    edges = np.cumsum([0.0, *(np.array(values) / np.sum(values))])
    i = SPLITS.index(split)
    if values[i] == 0:
        return None
    return round(float(edges[i]) * num_sequences), round(float(edges[i + 1]) * num_sequences)


def list_dataset_slices(data: DataOptions, split: Split, key: str | None = None) -> list[DatasetSlice]:
    """Return the slice that a split reads of each of its datasets, or an empty list if no data are configured."""
    key = key or ("data_path" if data.data_path is not None else f"{split}_data_paths")
    corpora = [
        [dataset_slice for prefix in corpus if (dataset_slice := _open_slice(data, key, prefix, split)) is not None]
        for corpus in list_corpora(data, split, key)
    ]
    weights: Sequence[float] = getattr(data, f"{split}_data_weights") or [1.0] * len(corpora)
    if data.weight_by_num_documents and key != "data_path":
        weights = _weigh_documents(data, corpora)
    return [
        DatasetSlice(key, s.dataset, s.first, s.last, weight * share)
        for corpus, weight in zip(corpora, weights, strict=True)
        for s, share in zip(corpus, _compute_shares(corpus), strict=True)
    ]


def _open_slice(data: DataOptions, key: str, prefix: Path, split: Split) -> DatasetSlice | None:
    check_dataset(prefix, content=False)  # checked first, to name the changed file if index and data do not match
    dataset = open_indexed(prefix)
    sequence_range: tuple[int, int] | None = (0, len(dataset.lengths))
    if key == "data_path":
        sequence_range = compute_sequence_range(data.split, split, len(dataset.lengths))
    return None if sequence_range is None else DatasetSlice(key, dataset, *sequence_range, weight=1.0)


def _compute_shares(corpus: Sequence[DatasetSlice]) -> list[float]:
    """Return each dataset's fraction of the corpus's tokens, so that all datasets are sampled at the same rate."""
    if len(corpus) == 1:
        return [1.0]
    sizes = [dataset_slice.num_tokens() for dataset_slice in corpus]
    return [size / max(1, sum(sizes)) for size in sizes]


def _weigh_documents(data: DataOptions, corpora: Sequence[Sequence[DatasetSlice]]) -> list[float]:
    counts = [sum(dataset_slice.last - dataset_slice.first for dataset_slice in corpus) for corpus in corpora]
    names = [str(corpus[0].dataset.prefix) for corpus in corpora]
    for name, count in zip(names, counts, strict=True):
        if count == 0:
            raise UserError(f"weight_by_num_documents: {name} has no documents", "weight_by_num_documents")
    weights = compute_document_weights(counts, data.weighted_sampler_alpha)
    for name, weight in zip(names, weights, strict=True):
        if weight == 0:
            raise UserError(
                f"weighted_sampler_alpha: {data.weighted_sampler_alpha:g} gives {name} a weight of 0; use a smaller "
                "value",
                "weighted_sampler_alpha",
            )
    return weights


def compute_document_weights(counts: Sequence[int], alpha: float) -> list[float]:
    """Return weights of corpora from their document counts n, as computed by GPT-NeoX.

    The weights sum to 1.

    With p_i = n_i / Σ n, the temperature sampling of XLM-R (Conneau et al. 2020, arXiv:1911.02116) draws a corpus with
    probability q_i = p_i^α / Σ p^α, where 1/α is the temperature. GPT-NeoX multiplies this by 1 − p_i:

        w_i = q_i (1 − p_i) / Σ_j q_j (1 − p_j)

    Small corpora therefore gain more than α alone implies, and with α = 1 two corpora always get weight 1/2 each. A
    single corpus has weight 1. Source: the function `weights_by_num_docs` of GPT-NeoX at commit ea7aefd (May 2026),
    where a document is a sequence of the index. This function omits the common factor (Σ n)^(1+α) Σ p^α and raises
    ratios to the largest n to the power, which avoids overflow.

    Args:
        counts: number of documents of each corpus, positive.
        alpha: exponent, at least 0.
    """
    if len(counts) < 2:
        return [1.0] * len(counts)
    largest, total = max(counts), sum(counts)
    weights = [(count / largest) ** alpha * (total - count) for count in counts]
    return [weight / sum(weights) for weight in weights]


def describe_document_weights(data: DataOptions, slices: Sequence[DatasetSlice]) -> list[str]:
    """Return one line with the weights from `weight_by_num_documents`, or no line if they have no effect."""
    if not data.weight_by_num_documents or len(slices) < 2 or data.data_path is not None:
        return []
    total = sum(s.weight for s in slices)
    parts = [f"{s.weight / total:.3g} of {s.dataset.prefix} ({s.last - s.first:,})" for s in slices[:MAX_SHOWN]]
    more = f" and {len(slices) - MAX_SHOWN} more" if len(slices) > MAX_SHOWN else ""
    alpha = f"weighted_sampler_alpha {data.weighted_sampler_alpha:g}"
    return [f"{slices[0].key} by documents, {alpha}: {', '.join(parts)}{more}"]
