"""The data of a run: samples to train on, and plain tokens to evaluate on.

A run learns a text or a task. What follows is about texts; a task's samples are drawn (`megatron.data.task_samples`).

`data_path` names one dataset, divided by `split` into consecutive shares of its documents, as in GPT-NeoX; or
`train_data_paths` and its sisters name datasets per split, blended by weights. Everything here checks before it
builds: files that are missing or cut short, tokens beyond the vocabulary, datasets of different tokenizers, a split
shorter than one sequence (megatron-core would silently repeat it) each end in one line that names the file.

megatron-core is imported only where samples are built, so that evaluation starts quickly.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron.data.lengths import list_sequence_lengths
from megatron.data.parts import check_dataset_content, check_dataset_slice, list_dataset_slices
from megatron.data.vocabulary import Vocabulary, read_vocabulary
from megatron.options.data import SPLITS, DataOptions, Split
from megatron.tasks.task_config import read_task_config
from megatron.utils.errors import UserError

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from megatron.distributed.process_groups import ProcessGroups


INDEX_BYTES = 12
"""Of a sample, at least, while megatron-core builds the index: where it begins, and its place in the order."""


def measure_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True)
class Datasets:
    """Samples per split; None where the configuration names no data or no samples are asked for.

    A sample is a dictionary: `tokens` and `labels`, int64 [T], and `loss_mask`, float32 [T]. T is the same for all
    samples of a step. Of texts labels are one token ahead.
    Documents follow each other inside a sample, positions run on, and attention crosses them, as in GPT-NeoX.
    """

    train: "Dataset | None"
    valid: "Dataset | None"
    test: "Dataset | None"
    lengths: tuple[int, ...]
    """The lengths T of training samples, each as often as it stands here."""
    notes: tuple[str, ...] = ()
    """What a person should know, on the first rank: a damaged index that was built anew."""


def build_datasets(
    data: DataOptions,
    *,
    vocabulary: Vocabulary | None = None,
    seq_length: int,
    train_samples: int,
    valid_samples: int,
    test_samples: int,
    seed: int,
    cache: str | Path | None,
    groups: "ProcessGroups",
    extend_train_to: int | None = None,
    batch: int = 1,
    consumed: int = 0,
) -> Datasets:
    """Samples for each split that has data and is asked for some: of `seq_length` tokens, or a task's.

    The order of the training samples follows from `seed` and `train_samples`. A run that is extended passes the
    `train_samples` it began with and the new count as `extend_train_to`: the old samples stay in their order and
    new ones follow (`megatron.data.samples`).

    vocabulary: of the data, if it has been read.
    cache: folder for the sample indices, shared by all processes of the run, of which the first builds them while the
    others wait: all must call this. None keeps them in memory.
    batch: sequences of an optimizer step.
    consumed: training samples that were read already.

    Raises UserError for data that cannot be used, RunError for damaged files and a cache that cannot be written.
    """
    vocabulary = vocabulary or read_vocabulary(data)
    wanted = dict(zip(SPLITS, (train_samples, valid_samples, test_samples), strict=True))
    totals = {**wanted, "train": max(train_samples, extend_train_to or 0)}
    if data.task is not None:
        return _build_task_datasets(data, totals, seed=seed, batch=batch, consumed=consumed)
    chosen = {split: list_dataset_slices(data, split) for split in SPLITS if wanted[split] > 0}
    for split, parts in chosen.items():
        for part in parts:
            check_dataset_slice(part, split, seq_length, vocabulary)
    for split, total in totals.items():
        if (needed := INDEX_BYTES * total) > measure_memory():
            key = "train_iters" if split == "train" else "eval_iters"
            sizes = (
                f"{needed / 2**30:,.0f} GiB, more than the memory of this machine, {measure_memory() / 2**30:,.0f} GiB"
            )
            raise UserError(f"{key}: {total:,} {split} samples need an index of {sizes}", key)
    if not 0 <= seed < 1 << 32:
        raise UserError(f"seed: {seed} is not between 0 and {(1 << 32) - 1}")

    from megatron.data.samples import build_training_dataset

    notes: list[str] = []
    built = {
        split: build_training_dataset(
            parts,
            split=split,
            seq_length=seq_length,
            ordered=wanted[split],
            total=totals[split],
            seed=seed,
            cache=None if cache is None else Path(cache),
            groups=groups,
            vocabulary=vocabulary,
            eod_mask_loss=data.eod_mask_loss,
            notes=notes,
        )
        for split, parts in chosen.items()
        if parts
    }
    return Datasets(
        built.get("train"), built.get("valid"), built.get("test"), list_sequence_lengths(data, seq_length), tuple(notes)
    )


def _build_task_datasets(
    data: DataOptions, totals: dict[Split, int], *, seed: int, batch: int, consumed: int
) -> Datasets:
    """What the task of a configuration draws: so many samples of each split."""
    from megatron.data.task_samples import TaskDataset

    chosen = read_task_config(data)
    train, valid, test = (
        TaskDataset(chosen, split, total, seed=seed, batch=batch, start=consumed if split == "train" else 0)
        if total
        else None
        for split, total in totals.items()
    )
    return Datasets(train, valid, test, chosen.sequence_lengths)


def load_token_stream(data: DataOptions, split: Split) -> np.ndarray:
    """All tokens of a split, [N] integers: documents in order, datasets one after the other, weights not applied.

    A view of the file where the split is one dataset. Raises UserError if the configuration has no data for the split.
    """
    parts = list_dataset_slices(data, split)
    if not parts:
        shares = f"data_path's split is {data.split!r}" if data.data_path else f"{split}_data_paths is not given"
        raise UserError(f"{split}_data_paths: no {split} data: {shares}")
    known = read_vocabulary(data)
    for part in parts:
        check_dataset_slice(part, split, 1, known)
        check_dataset_content(part.dataset)
    streams = [part.dataset.read_stream(part.first, part.last) for part in parts]
    return streams[0] if len(streams) == 1 else np.concatenate(streams)
