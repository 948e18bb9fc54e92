"""Text to score: a run's own held-out split or the `--data` text, tokenized with the run's tokenizer.

`--data` is the prefix of a dataset, a corpus folder, or a text file (.txt, .jsonl, .jsonl.gz, .jsonl.zst), which is
tokenized here as `prepare` would. This module does not need torch, so that missing files are reported at once.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from megatron.checkpoint.trained_run import TrainedRun
from megatron.config.schema import Config
from megatron.data.blend import compute_sequence_range, list_split_prefixes
from megatron.data.corpus.hub_dataset import HUB_PREFIX
from megatron.data.corpus.sources import BUILT_IN_SOURCES, SUFFIXES, iter_raw_documents, scan_sources
from megatron.data.corpus.tokenize_worker import ChunkEncoder, encode_chunks, iter_chunks
from megatron.data.corpus_metadata import CORPUS_FILE, get_split_basename, read_corpus
from megatron.data.datasets import load_token_stream
from megatron.data.indexed_dataset import find_corpus_metadata
from megatron.data.load_tokenizer import Vocabulary, build_vocabulary, load_run_tokenizer, read_vocabulary
from megatron.data.tokenizers import Tokenizer
from megatron.options.data import DataOptions, Split
from megatron.utils.errors import UserError, check_reachable
from megatron.utils.formatting import suggest_path

MAX_DIGEST_TOKENS = 1 << 20
"""Maximum number of tokens hashed for a text's digest: all of a small text, blocks spread over a large one."""


@dataclass(frozen=True)
class EvalText:
    """Tokens to score, with the name of their text."""

    tokens: np.ndarray
    name: str
    vocabulary: Vocabulary

    @cached_property
    def digest(self) -> str:
        """Hash that identifies a text independent of its path: tokenizer, number of tokens, and up to 2^20 tokens."""
        size, num_blocks = len(self.tokens), 256
        block = MAX_DIGEST_TOKENS // num_blocks
        if size <= MAX_DIGEST_TOKENS:
            starts = np.arange(0, size, block)
        else:
            starts = np.linspace(0, size - block, num_blocks).astype(np.int64)
        digest = hashlib.sha256(f"{self.vocabulary.name} {size}".encode())
        for start in starts:
            digest.update(np.ascontiguousarray(self.tokens[start : start + block], dtype="<i8").tobytes())
        return digest.hexdigest()[:16]


def load_text(
    name: str, config: Config, data: str | Path | None, tokenizer_name: str | None = None, run: Path | None = None
) -> EvalText:
    """Load the text that a run is scored on.

    Args:
        name: name of the run, for messages.
        config: configuration of the run.
        data: value of `--data`; None for the run's own test split, or its valid split if there is no test split.
        tokenizer_name: name of the tokenizer that the run was trained with, if known.
        run: run folder, if there is one.

    Raises:
        UserError: the text does not exist, or was made by another tokenizer.
        RunError: the files of the text are damaged.
    """
    if data is not None and _is_text_file(Path(data)):
        tokenizer = _load_own_tokenizer(name, config, data, tokenizer_name, run)
        vocabulary = build_vocabulary(tokenizer)
        source = str(data)
    else:
        options, split = _choose_split(name, config, data, tokenizer_name, run)
        tokenizer, vocabulary = None, read_vocabulary(options)
        source = str(data) if data is not None else f"the {split} data of {name}"
    if vocabulary.name != (tokenizer_name or vocabulary.name):
        raise UserError(f"{source}: tokenized with {vocabulary.name}, but {name} was trained with {tokenizer_name}")
    if tokenizer is not None:
        return EvalText(_encode_file(source, Path(source).stat().st_mtime_ns, tokenizer), source, vocabulary)
    prefixes = ", ".join(map(str, list_split_prefixes(options, split)))
    text_name = f"{prefixes} ({split} of {options.split})" if options.data_path is not None else prefixes
    return EvalText(load_token_stream(options, split, vocabulary), text_name, vocabulary)


def load_common_text(runs: Sequence[TrainedRun], data: str | Path | None) -> EvalText:
    """Load the text that all runs are scored on.

    Raises:
        UserError: as for `load_text`, or the runs do not share a text and a tokenizer.
    """

    def load_text_of(run: TrainedRun) -> EvalText:
        return load_text(run.name, run.config, data, run.tokenizer_name, run.folder)

    first, *others = runs
    text = load_text_of(first)
    for run in others:
        other = load_text_of(run)
        check_tokenizer(run.name, other.vocabulary.name, first.name, text.vocabulary.name)
        is_same_file = (other.name, other.vocabulary) == (text.name, text.vocabulary)
        if not is_same_file and not np.array_equal(other.tokens, text.tokens):
            raise UserError(
                f"{run.name} would be scored on {other.name}, {first.name} on {text.name}; choose one text for all "
                "with --data"
            )
    return text


def check_tokenizer(run: str, tokenizer: str, first_run: str, first_tokenizer: str) -> None:
    """Check that two runs share a tokenizer, so that their losses are comparable.

    Raises:
        UserError: the tokenizers differ.
    """
    if tokenizer != first_tokenizer:
        difference = f"{run} was trained with tokenizer {tokenizer}, {first_run} with {first_tokenizer}"
        raise UserError(f"{difference}; losses per token are not comparable")


def _choose_split(
    name: str, config: Config, data: str | Path | None, tokenizer_name: str | None, run: Path | None
) -> tuple[DataOptions, Split]:
    """Return the data options and the split that a run is scored on."""
    run_data = config.data
    if data is not None:
        prefix = _find_dataset(Path(data))
        options = DataOptions(test_data_paths=[str(prefix)])
        try:
            dataset, *_ = list_split_prefixes(options, "test")
        except UserError as error:  # the user named the data with an option, not with this key
            raise UserError(str(error).replace("test_data_paths", "--data", 1)) from None
        if find_corpus_metadata(dataset) is None:
            tokenizer = _load_own_tokenizer(name, config, prefix, tokenizer_name, run)
            files = dict(zip(("vocab_file", "merge_file"), map(str, tokenizer.files.values()), strict=False))
            special = {"end_token": tokenizer.end_token, "add_bos": False}  # the tokens already include BOS tokens
            options = options.replace(tokenizer_type=tokenizer.type, **files, **special)
        return options, "test"
    for split in ("test", "valid"):
        if run_data.data_path is not None and compute_sequence_range(run_data.split, split, 1 << 20) is not None:
            return run_data, split
        if run_data.data_path is None and list_split_prefixes(run_data, split):
            return run_data, split
    raise UserError(f"{name}: no test or valid data in its configuration; choose a text with --data")


def _find_dataset(path: Path) -> Path:
    """Return the dataset prefix that `--data` refers to.

    For a corpus folder it is the test split, else the valid split, else the full corpus.
    """
    if not path.is_dir():
        check_reachable(path)
        files = [file for suffix in (".bin", ".idx") for file in path.parent.glob(f"{path.name}*{suffix}")]
        if not path.exists() and not files:
            name = str(path)
            if name in BUILT_IN_SOURCES or name.startswith(HUB_PREFIX):
                folder = f"data/{Path(name.removeprefix(HUB_PREFIX)).name.partition(':')[0]}"
                raise UserError(
                    f"{name}: is a source of `prepare`; --data expects a file or a corpus, such as that of "
                    f"`./deepy.py prepare {name} -o {folder}`"
                )
            raise UserError(
                f"{path}: no such file or folder; {suggest_path(path)}--data expects a file ({', '.join(SUFFIXES)}), a "
                "corpus, or a dataset"
            )
        return path
    if not (path / CORPUS_FILE).is_file():
        return path  # a folder of datasets
    splits = read_corpus(path).splits
    split = next((split for split in ("test", "valid", "all") if split in splits), None)
    if split is None:
        raise UserError(
            f"{path}: only {', '.join(splits)} found; give a folder with test, valid or all, or one of its datasets"
        )
    return path / get_split_basename(split)


def _is_text_file(path: Path) -> bool:
    return path.is_file() and path.suffix not in (".bin", ".idx") and not Path(f"{path}.idx").exists()


def _load_own_tokenizer(
    name: str, config: Config, file: str | Path, tokenizer_name: str | None, run: Path | None
) -> Tokenizer:
    """Load the run's own tokenizer, for data that do not record their tokenizer."""
    try:
        return load_run_tokenizer(run, config.data, tokenizer_name)
    except UserError as error:
        raise UserError(f"{file}: cannot load the tokenizer of {name}: {error}") from None


@lru_cache(maxsize=2)  # a sweep loads the same text for each run
def _encode_file(file: str, modification_time: int, tokenizer: Tokenizer) -> np.ndarray:
    """Tokenize all documents of a text file, each with its end-of-document token, int [N]."""
    if not file.endswith(SUFFIXES):
        raise UserError(
            f"{file}: its suffix must be {', '.join(SUFFIXES)}; rename a text file, for example to "
            f"{Path(file).with_suffix('.txt').name}"
        )
    documents = (
        (document, 0)
        for source in scan_sources([str(Path(file).absolute())])
        for document in iter_raw_documents(source)
    )
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32
    token_arrays = [
        part.tokens
        for chunk in encode_chunks(ChunkEncoder(tokenizer, dtype, "text"), iter_chunks(documents), num_workers=1)
        for part in chunk.by_split.values()
    ]
    if not token_arrays:
        raise UserError(f"{file}: no text found")
    return np.concatenate(token_arrays)
