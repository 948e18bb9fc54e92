"""Datasets of a run: samples for training, and plain tokens for evaluation.

A run trains on text or on a task. Task samples are generated (`torch_data.py`); the rest of this description
concerns text.

`data_path` names one dataset that `split` divides into consecutive fractions of its documents, as in GPT-NeoX.
Alternatively, `train_data_paths`, `valid_data_paths` and `test_data_paths` name weighted datasets per split. Data are
checked before samples are built. Missing or truncated files, tokens outside the vocabulary, datasets of different
tokenizers, and a split shorter than one sequence (which megatron-core would silently repeat) each raise a one-line
error that names the file.

megatron-core is imported only to build samples, so that evaluation starts quickly.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron.data.blend import (
    MAX_SHOWN,
    DatasetSlice,
    describe_document_weights,
    list_dataset_slices,
    select_validation_sets,
)
from megatron.data.document_starts import check_document_ends
from megatron.data.indexed_dataset import check_dataset_content, find_token_range
from megatron.data.load_tokenizer import Vocabulary, check_all_tokens, check_token_range, read_vocabulary
from megatron.data.stage_order import StageOrder
from megatron.data.tasks.task_config import read_task_config
from megatron.options.data import SPLITS, DataOptions, Split
from megatron.utils.errors import FarfieldError, UserError
from megatron.utils.formatting import format_quantity

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from megatron.distributed.process_groups import ProcessGroups


INDEX_BYTES_PER_SAMPLE = 12
"""Minimum bytes per sample while megatron-core builds the index: the sample's start and its position in the order."""


def get_machine_memory() -> int:
    """Return the physical memory of this machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True)
class Datasets:
    """Samples per split; None if no data are configured or no samples are requested.

    A sample is a dictionary with `tokens` and `labels`, int64 [T], and `loss_mask`, float32 [T]. T is the same for all
    samples of a step. For text, labels are shifted by one token. Documents are concatenated within a sample. Positions
    continue and attention crosses document boundaries, as in GPT-NeoX, unless documents are masked; samples then also
    have `document_starts`, int64 [T].
    """

    train: "Dataset | None"
    valid: "Dataset | None"
    test: "Dataset | None"
    """Held-out samples, which cover each token of the text once, or a fixed subset (`ValidationDataset`)."""
    lengths: tuple[int, ...]
    """Lengths T of training samples, with repetitions proportional to their frequency."""
    crossing_fraction: float | None = None
    """Fraction of training samples with more than one document, on the first rank; None for a task."""
    extra_valid_sets: Mapping[str, "Dataset"] = field(default_factory=dict)
    """Additional validation sets by record name: valid/NAME for a named set, valid/4x for a multiple of the length."""
    epochs: str | None = None
    """Sentence about the number of passes over the training text, or None for a task."""
    notes: tuple[str, ...] = ()
    """Notes for the user, on the first rank, for example about a damaged index that was rebuilt."""


@dataclass(frozen=True)
class SampleOrder:
    """Number of samples a run reads from each split, and the inputs that determine their order.

    The order of training samples is determined by `seed` and `train_samples`. An extended run passes its original
    `train_samples` and the new count as `extend_train_to`: existing samples keep their order and new ones are appended
    (`megatron.data.gpt_dataset`).
    """

    seed: int
    train_samples: int = 0
    valid_samples: int | None = 0
    test_samples: int | None = 0
    """Maximum number of held-out samples of the training length; None for the whole text, 0 for no dataset."""
    extend_train_to: int | None = None
    batch_size: int = 1
    """Sequences per optimizer step; task sequences of one step have the same length."""
    consumed_samples: int = 0
    """Number of training samples already consumed; a task starts drawing there."""
    stage: StageOrder | None = None
    """Order within a stage, for runs in stages; training samples are then counted in blocks."""

    @property
    def num_samples(self) -> dict[Split, int | None]:
        """Number of samples per split for which the order is built; None for all."""
        return dict(zip(SPLITS, (self.train_samples, self.valid_samples, self.test_samples), strict=True))

    @property
    def total_train_samples(self) -> int:
        """Number of training samples including an extension; within a stage, the number until the stage's end."""
        return (
            self.extend_train_to or 0 if self.stage is not None else max(self.train_samples, self.extend_train_to or 0)
        )


def build_datasets(
    data: DataOptions,
    order: SampleOrder,
    *,
    seq_length: int,
    cache: str | Path | None,
    groups: "ProcessGroups",
    vocabulary: Vocabulary | None = None,
    separates_documents: bool = False,
    eval_multiples: Sequence[int] = (),
    slices: Mapping[str, list[DatasetSlice]] | None = None,
) -> Datasets:
    """Build the samples of every split that has data and requests samples, for text or a task.

    cache: folder for sample indices, shared by all processes of the run. The first process builds them while the others
    wait, so every process must call this function. None keeps indices in memory. vocabulary: vocabulary of the data, if
    already read. separates_documents: add document starts to samples (`attention_mask: document`). eval_multiples:
    additional lengths of validation samples, as multiples of `seq_length`. slices: datasets, if already opened with
    `open_dataset_slices`.

    Raises UserError for unusable data, and RunError for damaged files or an unwritable cache.
    """
    vocabulary = vocabulary or read_vocabulary(data)
    if slices is None:
        slices = open_dataset_slices(
            data, order, seq_length=seq_length, vocabulary=vocabulary, separates_documents=separates_documents
        )
    if data.task is not None:
        return _build_task_datasets(data, order)
    check_index_size(order)
    train_length = _get_train_length(order, seq_length)

    from megatron.data.gpt_dataset import DocumentDataset, SplitSamplesDataset, build_training_dataset
    from megatron.data.sample_index import SampleFormat

    train_slices = slices.get("train", [])
    notes = describe_document_weights(data, train_slices)
    crossing_fraction, epochs = None, None
    samples: dict[str, Dataset] = {}
    if train_slices:
        dataset = build_training_dataset(
            train_slices,
            SampleFormat("train", train_length, vocabulary, data.eod_mask_loss),
            ordered=order.train_samples,
            total=order.total_train_samples,
            seed=order.seed,
            cache=None if cache is None else Path(cache),
            groups=groups,
            notes=notes,
            sources=order.stage.sources if order.stage is not None else None,
        )
        epochs = _describe_epochs(train_slices, order.total_train_samples * train_length)
        if groups.is_main:
            crossing_fraction = dataset.compute_crossing_fraction(seq_length)
        pieces = train_length // seq_length
        samples["train"] = SplitSamplesDataset(dataset, pieces) if pieces > 1 else dataset
    held_out = {name: own for name, own in slices.items() if name != "train"}
    samples |= _build_held_out(data, order, held_out, seq_length, eval_multiples, vocabulary, groups)
    if separates_documents:
        assert vocabulary.eod is not None
        samples = {name: DocumentDataset(dataset, vocabulary.eod) for name, dataset in samples.items()}
    train, valid, test = (samples.pop(split, None) for split in SPLITS)
    lengths = list_sequence_lengths(data, seq_length)
    return Datasets(train, valid, test, lengths, crossing_fraction, samples, epochs, tuple(notes))


def open_dataset_slices(
    data: DataOptions,
    order: SampleOrder,
    *,
    seq_length: int,
    vocabulary: Vocabulary,
    separates_documents: bool = False,
) -> dict[str, list[DatasetSlice]]:
    """Open and check the datasets of each split in use, and of each additional validation set as valid/NAME.

    For large datasets only a subset of the tokens is checked here; each sample is checked when it is read. A task has
    no datasets.

    Raises UserError for unusable data and RunError for damaged files.
    """
    if not 0 <= order.seed < 1 << 32:
        raise UserError(f"seed: {order.seed} is not between 0 and {(1 << 32) - 1}")
    if data.task is not None:
        return {}
    named: dict[str, list[DatasetSlice]] = {
        split: list_dataset_slices(data, split) for split in SPLITS if order.num_samples[split] != 0
    }
    if order.valid_samples != 0:
        for key, validation_set in select_validation_sets(data).items():
            named[f"valid/{key.partition('.')[2]}"] = list_dataset_slices(validation_set, "valid", key)
    train_length = _get_train_length(order, seq_length)
    for name, slices_of_split in named.items():
        split: Split = "valid" if name.startswith("valid/") else name  # type: ignore[assignment]
        for dataset_slice in slices_of_split:
            check_dataset_slice(dataset_slice, split, train_length if split == "train" else 1, vocabulary)
            if separates_documents:
                check_document_ends(dataset_slice, vocabulary)
    return named


def _get_train_length(order: SampleOrder, seq_length: int) -> int:
    """Return the number of tokens in the blocks from which training samples are cut."""
    return seq_length if order.stage is None else order.stage.block_length


def _describe_epochs(slices: Sequence[DatasetSlice], num_tokens: int) -> str:
    """Return a line on the number of passes over the training text, or over each dataset if these differ."""
    sizes, total_weight = [each.num_tokens() for each in slices], sum(each.weight for each in slices)
    times = [num_tokens * each.weight / total_weight / size for each, size in zip(slices, sizes, strict=True)]
    line = f"training text: {sum(sizes):,} tokens, {_describe_passes(num_tokens / sum(sizes))}"
    if max(times) - min(times) > 0.01 * max(times):
        shown = [f"{s.dataset.prefix} {_describe_passes(t)}" for s, t in zip(slices[:MAX_SHOWN], times, strict=False)]
        line += f": {', '.join(shown)}" + (f" and {len(slices) - MAX_SHOWN} more" if len(slices) > MAX_SHOWN else "")
    return line


def _describe_passes(passes: float) -> str:
    """Describe how much of a text is read: 4.2% read, or read 2.5 times."""
    return f"{passes:.2%} read" if passes < 1 else f"read {passes:.3g} times"


def _build_held_out(
    data: DataOptions,
    order: SampleOrder,
    slices: Mapping[str, Sequence[DatasetSlice]],
    seq_length: int,
    multiples: Sequence[int],
    vocabulary: Vocabulary,
    groups: "ProcessGroups",
) -> dict[str, "Dataset"]:
    """Build test samples, validation samples at the training length, and validation samples at additional lengths."""
    from megatron.data.torch_data import ValidationDataset

    samples: dict[str, Dataset] = {}
    for name, slices_of_set in slices.items():
        if not slices_of_set:
            continue
        streams, problem = [each.dataset.read_stream(each.first, each.last) for each in slices_of_set], None
        try:
            if groups.is_main:
                for each, stream in zip(slices_of_set, streams, strict=True):
                    _check_stream(each, stream, vocabulary)
        except FarfieldError as error:
            problem = error
        if (problem := groups.gather_objects(problem)[0]) is not None:
            raise problem
        limit = order.num_samples["test" if name == "test" else "valid"]
        extra_valid_sets = () if name == "test" else multiples
        block = seq_length * math.lcm(1, *extra_valid_sets)
        for multiple in (1, *extra_valid_sets):
            samples[name if multiple == 1 else f"{name}/{multiple}x"] = ValidationDataset(
                streams,
                [each.weight for each in slices_of_set],
                seq_length * multiple,
                vocabulary,
                eod_mask_loss=data.eod_mask_loss,
                block_length=block,
                max_blocks=None if limit is None else max(1, limit * seq_length // block),
            )
    return samples


def _check_stream(dataset_slice: DatasetSlice, stream: np.ndarray, vocabulary: Vocabulary) -> None:
    """Check a token stream against its recorded checksum, if any, and against the vocabulary."""
    check_dataset_content(dataset_slice.dataset)
    name = f"{dataset_slice.key}: {dataset_slice.dataset.prefix}"
    check_token_range(name, find_token_range(stream), stream.dtype, vocabulary)


def check_slice_contents(slices: Mapping[str, Sequence[DatasetSlice]], vocabulary: Vocabulary) -> None:
    """Run the checks of first use on opened datasets, without building samples. Raises the same errors."""
    checked: set[Path] = set()
    for name, slices_of_split in slices.items():
        for each in slices_of_split:
            if name != "train":
                _check_stream(each, each.dataset.read_stream(each.first, each.last), vocabulary)
            elif each.dataset.prefix not in checked:
                checked.add(each.dataset.prefix)
                check_all_tokens(f"{each.key}: {each.dataset.prefix}", each.dataset, vocabulary)


def check_index_size(order: SampleOrder) -> None:
    """Check that the sample index fits in this machine's memory. Raises UserError."""
    total = order.total_train_samples
    if (needed := INDEX_BYTES_PER_SAMPLE * total) > get_machine_memory():
        needed_gib, memory_gib = needed / 2**30, get_machine_memory() / 2**30
        raise UserError(
            f"train_iters: {total:,} training samples need an index of {needed_gib:,.0f} GiB, more than the memory of "
            f"this machine ({memory_gib:,.0f} GiB)",
            "train_iters",
        )


def _build_task_datasets(data: DataOptions, order: SampleOrder) -> Datasets:
    """Build the datasets of a task, with the requested number of samples per split."""
    from megatron.data.torch_data import TaskDataset

    task_config = read_task_config(data)
    train, valid, test = (
        TaskDataset(
            task_config,
            split,
            total,
            seed=order.seed,
            batch_size=order.batch_size,
            start=order.consumed_samples if split == "train" else 0,
        )
        if total
        else None
        for split, total in {**order.num_samples, "train": order.total_train_samples}.items()
    )
    return Datasets(train, valid, test, task_config.sequence_lengths)


def check_dataset_slice(dataset_slice: DatasetSlice, split: Split, seq_length: int, vocabulary: Vocabulary) -> None:
    """Raise UserError if a slice has fewer than `seq_length` + 1 tokens, or tokens outside the vocabulary."""
    key, dataset, num_tokens = dataset_slice.key, dataset_slice.dataset, dataset_slice.num_tokens()
    name = f"{key}: the {split} split of {dataset.prefix}" if key == "data_path" else f"{key}: {dataset.prefix}"
    if num_tokens == 0:
        if key != "data_path":
            raise UserError(f"{name} has no tokens", key)
        total = format_quantity(len(dataset.lengths), "document")
        advice = "split=8,1,1 gives each split a part of them, split=1,0,0 trains on all"
        raise UserError(f"{name} has no tokens ({total} in total); {advice}", key)
    if num_tokens < seq_length + 1:
        raise UserError(
            f"{name} has {format_quantity(num_tokens, 'token')}; one sample of seq_length {seq_length:,} needs "
            f"{seq_length + 1:,}",
            key,
        )
    check_token_range(name, dataset.find_token_range(), dataset.tokens.dtype, vocabulary)


def list_sequence_lengths(data: DataOptions, seq_length: int) -> tuple[int, ...]:
    """Return the training sequence lengths, with repetitions proportional to frequency: seq_length, or the task's."""
    return (seq_length,) if data.task is None else read_task_config(data).sequence_lengths


def load_token_stream(data: DataOptions, split: Split, vocabulary: Vocabulary | None = None) -> np.ndarray:
    """Return all tokens of a split, [N] integers: documents in order, datasets concatenated without weights.

    The result is a view of the file if the split is one dataset. `vocabulary` is that of the data, if already read.
    Raises UserError if the configuration has no data for the split.
    """
    slices = list_dataset_slices(data, split)
    if not slices:
        reason = f"data_path's split is {data.split!r}" if data.data_path else f"{split}_data_paths is not given"
        raise UserError(f"{split}_data_paths: no {split} data: {reason}")
    vocabulary = vocabulary or read_vocabulary(data)
    for dataset_slice in slices:
        check_dataset_slice(dataset_slice, split, 1, vocabulary)
    streams = [dataset_slice.dataset.read_stream(dataset_slice.first, dataset_slice.last) for dataset_slice in slices]
    for dataset_slice, stream in zip(slices, streams, strict=True):
        _check_stream(dataset_slice, stream, vocabulary)
    return streams[0] if len(streams) == 1 else np.concatenate(streams)
