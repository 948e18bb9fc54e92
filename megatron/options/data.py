"""Keys that decide which text is read, in which order, and how it was tokenized."""

import re
from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from megatron.options.section import (
    CommaSeparated,
    ConfigSection,
    config_field,
    get_default,
    require_count,
    require_pattern,
)
from megatron.utils.errors import UserError, quote_text

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

MAX_INPUT_LENGTH = 10**6
"""Longest input of a task in training. The sequences of each length up to it are counted one by one."""

MAX_VOCAB_SIZE = 1 << 24
"""Largest vocabulary size. The largest in use have about a million tokens; a larger number in a damaged file would not
fit into memory."""

SetName = Annotated[
    str,
    require_pattern(
        r"[A-Za-z][A-Za-z0-9_.-]*", "the name of a set must start with a letter and use only letters, digits and _.-"
    ),
]
"""Name of a validation set."""

TokenizerType = Literal["bytes", "HFTokenizer", "GPT2BPETokenizer", "SPMTokenizer"]


def _check_corpus_name(value: Any) -> Any:
    """Check the type of a corpus name, as pydantic would but with a one-line error."""
    if not isinstance(value, str) and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        raise PydanticCustomError("corpus_name", "it must be a string or a list of strings")
    return value


CorpusName = Annotated[str | list[str], BeforeValidator(_check_corpus_name)]
"""Entry of `train_data_paths`: a dataset, a folder of datasets, or a list of either."""


def _parse_corpus_split(value: Any) -> Any:
    """Parse the split fractions of the command line: 0.9,0.05,0.05, or none."""
    if not isinstance(value, str):
        return value
    if value == "none":
        return None
    try:
        train, valid, test = (float(part) for part in value.split(","))
    except ValueError:
        raise PydanticCustomError("split", "it must be three fractions such as 0.9,0.05,0.05, or none") from None
    return [train, valid, test]


class CorpusOptions(ConfigSection):
    """Sources and processing of a corpus (`megatron.data.corpus.prepare.prepare_corpus`)."""

    sources: list[str] = config_field(
        ...,
        "files, folders, datasets saved by Hugging Face's library, python (the standard library), shakespeare (1.1 "
        "MB, the same on every machine), or hf:NAME (a dataset on the hub)",
        min_length=1,
    )
    tokenizer: str = config_field(
        "bytes", "tokenizer: bytes, HFTokenizer, GPT2BPETokenizer, SPMTokenizer, or bpe (trained on the corpus)"
    )
    vocab_file: str | None = config_field(None, "file of the tokenizer: tokenizer.json, vocab.json or .model")
    merge_file: str | None = config_field(None, "file of GPT2BPETokenizer: merges.txt")
    end_token: str | None = config_field(None, "end-of-document token, if its name is not one of the usual ones")
    add_bos: bool | None = config_field(
        None,
        "prepend the tokenizer's beginning-of-text token to each document; if absent, as the tokenizer's file says",
    )
    vocab_size: int | None = config_field(
        None, "vocabulary size of bpe: 256 byte values, <|endoftext|>, and learned tokens", ge=257, le=MAX_VOCAB_SIZE
    )
    split: Annotated[
        list[float] | None, CommaSeparated, BeforeValidator(_parse_corpus_split), require_count(3, "fractions")
    ] = config_field(
        lambda: [0.9, 0.05, 0.05],
        "train, valid and test fractions of the documents, which sum to 1, or a ratio such as 969,30,1; none writes "
        "one dataset without splits",
        metavar="FRACTIONS|none",
    )
    packages: bool = config_field(False, "with python: include all installed packages")
    suffixes: Annotated[list[str] | None, CommaSeparated] = config_field(
        None, "file types to read from folders, such as .txt; all supported ones if absent", metavar=".EXT,…"
    )
    column: str = config_field(
        "text", "key of a JSON line, or column of a table, that contains the text", old_name="jsonl_key"
    )
    hf_split: str | None = config_field(
        None, "split of a Hugging Face dataset, hf:NAME or saved on disk; train if absent"
    )
    documents: int | None = config_field(None, "use only the first documents, up to this number", ge=1)
    tokens: int | None = config_field(
        None, "use only the first documents, up to this many tokens including document ends", ge=1
    )
    skip_bad: int = config_field(
        0, "skip up to this many documents that cannot be decoded (not UTF-8, not JSON, no text in the column)", ge=0
    )
    seed: int = config_field(1234, "seed of the assignment of documents to splits", ge=0)
    workers: int | None = config_field(
        None, "number of processes; if absent, chosen by cores and size of the text", ge=1
    )


class DataOptions(ConfigSection):
    """Indexed datasets (megatron-core's .bin/.idx, named by their prefix) and their tokenizer; or a task."""

    task: str | None = config_field(
        None, "synthetic task of docs/tasks.md to train on instead of text; its data are sampled at every step",
        policy="data",
    )  # fmt: skip
    task_options: dict[str, Any] = config_field(dict, "options of the task (docs/tasks.md)", policy="data")
    task_length: int | None = config_field(
        None,
        "longest input of the task in training; it determines seq_length, the length of the whole sequence",
        ge=1,
        le=MAX_INPUT_LENGTH,
        policy="data",
    )
    task_shortest_length: int | None = config_field(
        None,
        "shortest input of the task in training; the task's shortest if absent",
        ge=1,
        le=MAX_INPUT_LENGTH,
        policy="data",
    )
    data_path: CorpusName | None = config_field(
        None,
        "one corpus for all splits: an indexed dataset, a folder or a list of them, each divided by `split`",
        policy="data",
    )
    split: str = config_field("969,30,1", "train, valid and test fractions of data_path", policy="data")
    train_data_paths: list[CorpusName] = config_field(
        list, "corpora to train on: each an indexed dataset, a folder of them, or a list of either", policy="data"
    )
    valid_data_paths: list[CorpusName] = config_field(
        list, "corpora to validate on, as in train_data_paths", policy="data"
    )
    valid_data_sets: dict[SetName, CorpusName] = config_field(
        dict,
        "additional validation sets, each reported by name: {books: data/books, code: [data/c, data/python]}",
        policy="data",
    )
    test_data_paths: list[CorpusName] = config_field(
        list, "corpora to test on, as in train_data_paths; used by `evaluate`", policy="data"
    )
    train_data_weights: list[float] = config_field(
        list, "blend weights of train_data_paths; equal if absent", policy="data"
    )
    valid_data_weights: list[float] = config_field(
        list, "blend weights of valid_data_paths; equal if absent", policy="data"
    )
    test_data_weights: list[float] = config_field(
        list, "blend weights of test_data_paths; equal if absent", policy="data"
    )
    weight_by_num_documents: bool = config_field(
        False,
        "compute blend weights of all splits from numbers of documents, as GPT-NeoX does (docs/data.md)",
        policy="data",
    )
    weighted_sampler_alpha: float = config_field(
        1.0,
        "with weight_by_num_documents: exponent of the document fractions, the inverse temperature; a small exponent "
        "gives more weight to small corpora",
        ge=0,
        policy="data",
    )
    data_cache: str | None = config_field(
        None, "folder of the sample indices; in the run's folder if absent", policy="machine"
    )
    data_impl: Literal["mmap"] = config_field(
        "mmap", "format of the indexed datasets; GPT-NeoX's infer and mmap both mean mmap", policy="data"
    )
    tokenizer_type: TokenizerType | None = config_field(
        None, "tokenizer of the data; read from the data's corpus.json if absent", policy="data"
    )
    vocab_file: str | None = config_field(
        None, "tokenizer.json, vocab.json or .model file of the tokenizer", policy="data"
    )
    merge_file: str | None = config_field(None, "merges.txt of GPT2BPETokenizer", policy="data")
    end_token: str | None = config_field(
        None, "the tokenizer's end-of-document token, if its name is not one of the usual ones", policy="data"
    )
    add_bos: bool | None = config_field(
        None, "true if the tokenizer prepends a token to each text; if absent, as its file says", policy="data"
    )
    eod_mask_loss: bool = config_field(False, "do not score the token after the end of a document", policy="data")
    num_workers: int = config_field(
        0, "processes per rank that load data; 0: the training process loads it", ge=0, le=1024, policy="machine"
    )


TASK_KEYS = ("task_options", "task_length", "task_shortest_length")
"""Keys that apply to a task."""

TEXT_KEYS = (
    *("data_path", "split", *(f"{split}_data_{suffix}" for split in SPLITS for suffix in ("paths", "weights"))),
    *("valid_data_sets", "weight_by_num_documents", "weighted_sampler_alpha"),
    *("tokenizer_type", "vocab_file", "merge_file", "end_token", "add_bos", "eod_mask_loss"),
)
"""Keys that apply to text."""


def parse_split_fractions(text: str) -> list[float]:
    """Parse `split`, such as 969,30,1, into the fractions of train, valid and test; missing ones are 0.

    Raises UserError if no fraction is positive or one is invalid.
    """
    try:
        fractions = [float(part) for part in re.split(r"[,/]", text)]
    except ValueError:
        fractions = []
    if not (1 <= len(fractions) <= 3 and all(0 <= part < float("inf") for part in fractions) and sum(fractions) > 0):
        raise UserError(
            f"split is {quote_text(text)}; it must be up to three fractions of train, valid and test, such as 969,30,1"
        )
    return fractions + [0.0] * (3 - len(fractions))


def list_corpus_names(corpus: CorpusName) -> list[str]:
    """Return the datasets and folders that form one corpus."""
    return [corpus] if isinstance(corpus, str) else corpus


def is_url(name: str) -> bool:
    """Return True if a name is a network address, such as s3://bucket/file."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", name) is not None


def _find_name_problems(corpora: Sequence[CorpusName]) -> Iterator[str]:
    for corpus in corpora:
        if not corpus:
            yield f"has an empty entry, {corpus!r}; name a dataset, a folder, or a list of them"
        for name in filter(is_url, list_corpus_names(corpus)):
            yield (
                f"names {name}; ranks read shuffled samples of a few kilobytes, so data are memory-mapped from a disk "
                "and not streamed from an object store; copy the .bin and .idx to a disk"
            )


def find_data_conflicts(data: DataOptions) -> Iterator[tuple[str, str]]:
    """Yield invalid or conflicting values: the key to blame, and one sentence with the values."""
    for name in TASK_KEYS if data.task is None else TEXT_KEYS:
        if getattr(data, name) != get_default(type(data), name):
            if data.task is None:
                yield name, f"{name} is given without task"
            else:
                yield name, f"{name} and task exclude each other: the task {data.task} draws its own data"
    shortest, longest = data.task_shortest_length, data.task_length
    if shortest is not None and longest is not None and shortest > longest:
        yield "task_shortest_length", f"task_shortest_length {shortest} is more than task_length {longest}"
    for split in SPLITS:
        files, weights = getattr(data, f"{split}_data_paths"), getattr(data, f"{split}_data_weights")
        if data.data_path is not None and files:
            yield f"{split}_data_paths", f"{split}_data_paths and data_path exclude each other; give one of them"
        names = [name for corpus in files for name in list_corpus_names(corpus)]
        yield from ((f"{split}_data_paths", f"{split}_data_paths {problem}") for problem in _find_name_problems(files))
        for path in sorted({path for path in names if names.count(path) > 1}):
            yield f"{split}_data_paths", f"{split}_data_paths names {path} more than once; give it a greater weight"
        if weights and len(weights) != len(files):
            yield (
                f"{split}_data_weights",
                f"{split}_data_weights has {len(weights)} value{'s' * (len(weights) != 1)} for {len(files)} "
                f"path{'s' * (len(files) != 1)} in {split}_data_paths",
            )
        if weights and data.weight_by_num_documents:
            yield (
                f"{split}_data_weights",
                f"{split}_data_weights and weight_by_num_documents exclude each other (GPT-NeoX ignores the "
                "weights); remove one",
            )
        if not all(isfinite(weight) and weight > 0 for weight in weights):
            yield (
                f"{split}_data_weights",
                f"{split}_data_weights are {weights}; each must be greater than 0; remove a dataset instead",
            )
    yield from (
        ("valid_data_sets", f"valid_data_sets {problem}")
        for problem in _find_name_problems([*data.valid_data_sets.values()])
    )
    if data.data_path is not None:
        yield from (("data_path", f"data_path {problem}") for problem in _find_name_problems([data.data_path]))
    try:
        parse_split_fractions(data.split)
    except UserError as error:
        yield "split", str(error)
    for name in ("vocab_file", "merge_file", "end_token", "add_bos"):
        if data.tokenizer_type is None and getattr(data, name) is not None:
            yield name, f"{name} is given without tokenizer_type; choose HFTokenizer, SPMTokenizer or GPT2BPETokenizer"
