"""Preparing a corpus: sources of text become a folder of indexed datasets with their tokenizer.

    corpora/python/
      train_text_document.bin   the tokens, documents one after the other, each ended by end-of-document
      train_text_document.idx   where they begin
      valid_text_document.…, test_text_document.…
      corpus.json               tokenizer, vocabulary, documents, tokens and bytes per split, sources, checksums
      tokenizer.json            the tokenizer's own files, so that the folder is complete

The datasets are written by megatron-core's IndexedDatasetBuilder: Megatron-LM and GPT-NeoX read them. The folder is
built under a temporary name and renamed when it is whole, so there is never half a corpus. Preparing the same thing
again finds it there, compares every file with its checksum, and does nothing.
"""

import contextlib
import glob
import hashlib
import json
import os
import tomllib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, repeat
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from megatron.data.description import (
    CORPUS_FILE,
    TOKENIZER_FILES,
    Description,
    SplitCounts,
    SplitName,
    check_files,
    file_facts,
    read_description,
)
from megatron.data.encode import Encoder, chunks, encode_all
from megatron.data.folders import recover, whole_folder, written
from megatron.data.hub import PREFIX as HUB
from megatron.data.hub import UnfinishedError
from megatron.data.indexed import open_indexed
from megatron.data.paths import SPLITS, WHOLE, basename, check_dataset
from megatron.data.sources import RawDocument, SourceFile, cut, decode, document_names, raw_documents, scan
from megatron.data.splits import assign, check_shares
from megatron.data.tokenizers import TOKENIZERS, Tokenizer, open_tokenizer, train_bpe
from megatron.data.writing import PROGRESS, CorpusWriter, read_progress
from megatron.errors import FarfieldError, RunError, UserError
from megatron.stopping.signals import Stopped
from megatron.suggest import choose_from

Item = TypeVar("Item")
Documents = Iterator[tuple[RawDocument, int]]
"""Documents, each with the number of its split."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, and how many bytes of the sources are done, of how many."""

TRAINED = "bpe"
"""The choice of `tokenizer` that trains one here, on the training documents; it becomes an `HFTokenizer`."""

_FORMAT = 1  # of corpus.json and of the way documents are read and divided: another number makes another corpus
_FILES = {CORPUS_FILE, *(name for names in TOKENIZER_FILES.values() for name in names)} | {
    f"{basename(split)}{ending}" for split in (*SPLITS, WHOLE) for ending in (".bin", ".idx")
}
_BYTES_PER_WORKER = {"bytes": 1 << 28}  # less than this is done sooner than a further process has started
_BYTES_PER_WORKER_DEFAULT = 1 << 22


@dataclass(frozen=True)
class Corpus:
    """What a corpus folder holds."""

    folder: Path
    tokenizer: str  # its name, which tells tokenizers apart
    vocab_size: int
    eod: int
    splits: dict[str, SplitCounts]  # "train", "valid", "test", or "all" alone
    sources: list[str]
    notes: list[str]  # what a person should know: files left out, a vocabulary smaller than asked for
    reused: bool = False  # it was there already

    def prefix(self, split: str) -> Path:
        """The dataset of a split, as `train_data_paths` and the like name it."""
        return self.folder / basename(split)


def prepare(
    sources: Sequence[str],
    output: str | Path,
    *,
    tokenizer: str = "bytes",
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
    vocab_size: int | None = None,
    split: Sequence[float] | None = (0.9, 0.05, 0.05),
    seed: int = 1234,
    workers: int | None = None,
    packages: bool = False,
    jsonl_key: str = "text",
    suffixes: Sequence[str] | None = None,
    hf_split: str = "train",
    documents: int | None = None,
    tokens: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Corpus:
    """Make a corpus folder from sources of text, or find it made already.

    sources: files, folders, `python` or `hf:NAME`, see `megatron.data.sources`. `packages` adds all installed packages
        to `python`; `suffixes` are the files to take from folders; `hf_split` is the split of a dataset on the hub.
    tokenizer: `bytes`, `HFTokenizer`, `GPT2BPETokenizer` or `SPMTokenizer` with their `vocab_file` (and `merge_file`),
        or `bpe`, trained here on the training documents with `vocab_size` tokens.
    split: shares of documents for train, valid and test (a split with share 0 is not written), or None for one dataset
        of everything. A lone text file is cut at line ends.
    jsonl_key: the key of a JSON line, or the column of a table, that holds the text.
    documents, tokens: only the first documents of the sources, so many, or as few as hold so many tokens with their
        ends; the whole documents of them.
    workers: processes; None takes as many as cores and text are worth. The corpus is the same for any number.
    overwrite: replace a corpus that was made differently.

    Work that is interrupted, by Ctrl-C, by a kill or because the hub cannot be reached any more, goes on where it was
    when the same corpus is prepared again.

    Raises UserError for sources, tokenizers and choices that are wrong, RunError if the disk is full or the folder
    cannot be written. In either case nothing is left behind, and a corpus that was there stays.
    """
    output = Path(output)
    report = progress or (lambda stage, done, total: None)
    shares = None if split is None else check_shares(split)
    opened = _open_or_none(tokenizer, vocab_file, merge_file, vocab_size)
    if workers is not None and workers < 1:
        raise UserError(f"workers: {workers} is too few; at least 1")
    for name, limit in (("documents", documents), ("tokens", tokens)):
        if limit is not None and limit < 1:
            raise UserError(f"{name}: {limit} is too few; at least 1")
    if tokens is not None and opened is None:
        raise UserError(f"tokens: tokenizer {TRAINED} is trained on the documents, so limit those; --documents does")
    files = scan(sources, packages=packages, suffixes=suffixes, hf_split=hf_split)
    if (documents or tokens) and shares is not None and len(files) == 1 and files[0].format == "text":
        raise UserError(f"{files[0].path}: is one document, which is cut into splits; there is nothing to limit")
    made_from = {
        "format": _FORMAT,
        "files": _digest([[file.name, file.size, file.modified] for file in files]),
        "tokenizer": opened.name if opened else f"{TRAINED}, {vocab_size} tokens",
        "split": list(shares) if shares else None,
        "seed": seed,
        "jsonl_key": jsonl_key,
        "documents": documents,
        "tokens": tokens,
    }
    key = _digest(made_from)[:8]
    recover(output.resolve(), key)
    if (found := _already_there(output, sources, made_from, overwrite, report)) is not None:
        return found

    workers = _workers(files, opened, workers)
    with _building(output, key) as folder:
        work = folder.parent
        before = read_progress(work)
        _clear(folder, keep=before is not None)
        text = _Text(files, jsonl_key, work / "read", report, documents)
        if tokens is not None:
            assert opened is not None
            limit = _holding(tokens, text, opened, workers) if before is None else before["limit"]
            text = replace(text, limit=limit)
        assigned, parts = _assign(text, shares, seed)
        if opened is None:
            assert vocab_size is not None
            opened = _trained(folder, text, parts, assigned, vocab_size, found=before is not None)
        else:
            opened.copy_files(folder)
        notes = []
        if vocab_size is not None and opened.vocab_size < vocab_size:
            notes.append(f"the text gave {opened.vocab_size} tokens of the {vocab_size} asked for")
        names: dict[int, SplitName] = (
            {0: WHOLE} if shares is None else {i: SPLITS[i] for i, share in enumerate(shares) if share > 0}
        )
        writer = CorpusWriter(work, names, opened.vocab_size, {"limit": text.limit}, before)
        if before is None and (tokens is not None or vocab_size is not None):
            writer.save()  # counting and training took long
        _write(writer, opened, text, _documents(text, parts, assigned), workers)
        _no_empty_split(writer.counted, files)
        if writer.skipped:
            few = ", ".join(writer.skipped[:5])
            notes.append(f"{len(writer.skipped)} Python files left out, as Python cannot decode them: {few}")
        described = Description(
            farfield=_version(),
            sources=list(sources),
            made_from=made_from,
            tokenizer=opened.facts,
            splits=writer.counted,
            notes=notes,
            files={path.name: file_facts(path) for path in sorted(folder.iterdir())},
        )
        content = json.dumps(described.model_dump(), indent=2)  # model_dump_json takes Unicode alone: not all names are
        (folder / CORPUS_FILE).write_text(content + "\n", encoding="utf-8")
    return read_corpus(output)


def _clear(folder: Path, *, keep: bool) -> None:
    """Remove what earlier work left and is made anew: all of it, or all but tokens and a trained tokenizer."""
    for path in folder.iterdir():
        if not (keep and (path.suffix == ".bin" or path.name in TOKENIZER_FILES["HFTokenizer"])):
            path.unlink()


def unfinished(output: str | Path) -> bool:
    """Is there work on a corpus that was interrupted, and that preparing the same again goes on with?"""
    real = Path(output).resolve()
    return any(_goes_on(work) for work in real.parent.glob(f".{glob.escape(real.name)}.????????.tmp"))


def _goes_on(work: Path) -> bool:
    return (work / PROGRESS).exists() or any((work / "read").glob("*/*.json"))


def read_corpus(folder: str | Path) -> Corpus:
    """The description of a corpus folder. UserError if it is none, RunError if its description is damaged."""
    folder = Path(folder)
    described = read_description(folder)
    return Corpus(
        folder=folder,
        tokenizer=described.tokenizer.name,
        vocab_size=described.tokenizer.vocab_size,
        eod=described.tokenizer.eod,
        splits={str(name): size for name, size in described.splits.items()},
        sources=described.sources,
        notes=described.notes,
    )


def _open_or_none(
    type: str, vocab_file: str | Path | None, merge_file: str | Path | None, vocab_size: int | None
) -> Tokenizer | None:
    """The tokenizer asked for; None if it is to be trained."""
    if type == TRAINED:
        for key, value in (("vocab_file", vocab_file), ("merge_file", merge_file)):
            if value is not None:
                raise UserError(f"{key}: {value}: tokenizer {TRAINED} is trained here and takes no file")
        if vocab_size is None:
            raise UserError(f"vocab_size: tokenizer {TRAINED} needs it: how many tokens to train")
        if vocab_size < 257:
            raise UserError(f"vocab_size: {vocab_size} is too small; 256 byte values and <|endoftext|> make 257")
        return None
    if type not in TOKENIZERS:
        choices = (*TOKENIZERS, TRAINED)
        raise UserError(f"tokenizer: {type!r} is unknown; {choose_from(type, choices)}")
    if vocab_size is not None:
        raise UserError(f"vocab_size: only tokenizer {TRAINED} takes one; {type} has its own")
    return open_tokenizer(type, vocab_file, merge_file)


def _already_there(
    output: Path, sources: Sequence[str], made_from: dict[str, Any], overwrite: bool, report: Progress
) -> Corpus | None:
    """The corpus at `output` if it is the one asked for, and whole; None if there is nothing in the way.

    Raises UserError if there is something that must not be replaced.
    """
    if output.is_dir() and not any(output.iterdir()):
        return None
    if not output.exists():
        return None
    if not (output / CORPUS_FILE).is_file():
        raise UserError(f"{output}: exists and is not a corpus folder; choose another output")
    foreign = sorted({path.name for path in output.iterdir()} - _FILES)
    if foreign and overwrite:
        raise UserError(f"{output}: has files that are not a corpus's ({', '.join(foreign[:5])}); move them away first")
    try:
        described = read_description(output)
        corpus = read_corpus(output)
        for split in corpus.splits:
            check_dataset(corpus.prefix(split), content=False)
            open_indexed(corpus.prefix(split))
        before = described.made_from
        other = {key: before.get(key) for key in made_from if before.get(key) != made_from[key]}
        if not other:  # reading it all is worth it only where it is to be used
            _check_all(output, described, report)
            return Corpus(**{**vars(corpus), "reused": True})
    except FarfieldError as damage:
        if not overwrite:
            raise UserError(f"{output}: holds a damaged corpus ({damage}); --overwrite makes it anew") from None
        return None
    if overwrite:
        return None
    differences = [f"{key} {value}, not {made_from[key]}" for key, value in other.items() if key != "files"]
    if "files" in other and _places(corpus.sources) != _places(sources):
        differences.insert(0, f"sources `{_listed(corpus.sources)}`, not `{_listed(sources)}`")
        held = "of other sources" if len(differences) == 1 else "of other sources, made differently"
    elif differences:
        held = "made differently"
    else:
        held = "of the same sources with other files"
        differences = ["they changed since, or --suffixes or --packages was another"]
    raise UserError(
        f"{output}: holds a corpus {held} ({'; '.join(differences)}); "
        "another --output keeps it, --overwrite replaces it"
    )


def _check_all(folder: Path, described: Description, report: Progress) -> None:
    """Compare every file of a corpus with its checksum."""
    files = described.files or {}
    done, total = 0, sum(file.size for file in files.values())
    for name, file in files.items():
        check_files(folder, described, [name], content=True)
        done += file.size
        report("checking", done, total)


def _places(sources: Sequence[str]) -> list[str]:
    """Sources so that equal ones compare equal, however they are written: `books`, `./books/`, `/home/me/books`."""
    return [source if source == "python" or source.startswith(HUB) else os.path.abspath(source) for source in sources]


def _listed(sources: Sequence[str]) -> str:
    """The first few sources, as typed on a command line."""
    return " ".join(sources[:5]) + (f" and {len(sources) - 5} more" if len(sources) > 5 else "")


@dataclass(frozen=True)
class _Text:
    """The documents that a corpus is made of."""

    files: list[SourceFile]
    key: str  # where a line or a row holds its text
    kept: Path  # a folder for what is read of the hub
    report: Progress
    limit: int | None = None  # the first so many documents alone

    @property
    def size(self) -> int:
        """Bytes of the sources, for progress; nobody knows that of the hub's."""
        return sum(file.size for file in self.files)

    def names(self) -> Iterator[str]:
        """Of all documents."""
        return _first(self._names(), self.limit)

    def _names(self) -> Generator[str, None, None]:
        done = 0
        for file in self.files:
            yield from document_names(file, self.key, self.kept, self._said)
            done += file.size
            self.tell("listing", done)

    def documents(self) -> Iterator[RawDocument]:
        """All documents, in the order of their names."""
        every = (doc for file in self.files for doc in raw_documents(file, self.key, self.kept, self._said))
        return _first(every, self.limit)

    def tell(self, stage: str, done: int) -> None:
        """Report how much is done, in bytes of the sources."""
        if any(file.hub is not None and file.size == 0 for file in self.files):
            self.report(f"{stage} ({done / 1e6:,.0f} MB)", 0, 1)
        else:
            self.report(stage, done, self.size)

    def _said(self, documents: int) -> None:
        self.report(f"reading ({documents:,} documents)", 0, 1)


def _first(items: Generator[Item, None, None], limit: int | None) -> Iterator[Item]:
    with contextlib.closing(items):
        yield from islice(items, limit)


def _workers(files: list[SourceFile], tokenizer: Tokenizer | None, workers: int | None) -> int:
    """How many processes tokenize: as many as asked for, or as cores and text are worth."""
    if workers is not None:
        return workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if any(file.hub is not None and file.size == 0 for file in files):
        return cores
    kind = TRAINED if tokenizer is None else tokenizer.type
    worth = sum(file.size for file in files) // _BYTES_PER_WORKER.get(kind, _BYTES_PER_WORKER_DEFAULT)
    return max(1, min(cores, worth))


def _holding(tokens: int, text: _Text, tokenizer: Tokenizer, workers: int) -> int | None:
    """How many documents, of those within the limit, hold so many tokens; that limit if all together do not.

    Which split a document goes to follows from how many there are, so that they are counted before any is written.
    """
    found, count, done = 0, 0, 0
    work = chunks((document, 0) for document in text.documents())
    with contextlib.closing(encode_all(Encoder(tokenizer, np.int32, text.key), work, workers)) as results:
        for result in results:
            for length in result.lengths:
                found, count = found + length, count + 1
                if found >= tokens:
                    return count
            done += result.size
            text.tell("counting tokens", done)
    return text.limit


def _assign(text: _Text, shares: tuple[float, ...] | None, seed: int) -> tuple[np.ndarray | None, list[bytes]]:
    """The split of each document (None: all in one), or, for a lone text file, its three parts."""
    if shares is None:
        return None, []
    if len(text.files) == 1 and text.files[0].format == "text":
        return np.arange(3, dtype=np.uint8), cut(text.files[0], shares)
    return assign(text.names(), shares, seed), []


def _documents(text: _Text, parts: list[bytes], assigned: np.ndarray | None) -> Documents:
    """All documents with the number of their split."""
    if parts:
        line, offset = 1, 0
        for split, content in enumerate(parts):
            name, where = f"{text.files[0].name}:{SPLITS[split]}", str(text.files[0].path)
            yield RawDocument(name, where, "text", content, len(content), line, offset), split
            line, offset = line + content.count(b"\n"), offset + len(content)
        return
    splits = repeat(0) if assigned is None else assigned.tolist()
    try:
        yield from zip(text.documents(), splits, strict=assigned is not None)
    except ValueError as error:
        if "zip()" not in str(error):
            raise
        raise RunError("a source changed while it was read; prepare the corpus again") from None


def _trained(
    folder: Path, text: _Text, parts: list[bytes], assigned: np.ndarray | None, vocab_size: int, *, found: bool
) -> Tokenizer:
    """A byte-level BPE trained on the training documents alone, so that valid and test stay unseen; or `found` already,
    by work that was interrupted."""

    def texts() -> Iterator[str]:
        done = 0
        for document, split in _documents(text, parts, assigned):
            done += document.size
            if split == 0 and (decoded := decode(document, text.key)):
                yield decoded
            text.tell("training the tokenizer", done)

    if not found:
        train_bpe(texts(), vocab_size, folder / "tokenizer.json")
    return open_tokenizer("HFTokenizer", folder / "tokenizer.json")


def _write(writer: CorpusWriter, tokenizer: Tokenizer, text: _Text, documents: Documents, workers: int) -> None:
    """Tokenize the documents that are not written yet into the datasets."""
    try:
        work = chunks(islice(documents, writer.documents, None))
        with contextlib.closing(encode_all(Encoder(tokenizer, writer.dtype, text.key), work, workers)) as results:
            for result in results:
                writer.add(result)
                text.tell("tokenizing", writer.done)
        writer.finish()
    finally:
        writer.close()


def _no_empty_split(counted: dict[SplitName, SplitCounts], files: list[SourceFile]) -> None:
    documents = sum(size.documents for size in counted.values())
    if documents == 0:
        raise UserError(f"{files[0].path}{' and the other sources' * (len(files) > 1)}: no text in it")
    for name, size in counted.items():
        if size.documents == 0:
            there = "1 document is" if documents == 1 else f"{documents} documents are"
            raise UserError(
                f"split: no text is left for {name}: only {there} not empty; with --split none all text is one dataset"
            )


@contextlib.contextmanager
def _building(output: Path, key: str) -> Iterator[Path]:
    """A folder that becomes `output` if all goes well; a disk that refuses is one line that says what is kept.

    Work that was interrupted stays, if there is something to go on with, for a later call with the same key.
    """
    real = output.resolve()  # a link to another disk stays one
    work: Path | None = None

    def stays(error: BaseException) -> bool:
        assert work is not None
        return isinstance(error, KeyboardInterrupt | Stopped | UnfinishedError) and _goes_on(work)

    with written(output, "the corpus that"), whole_folder(real, key=key, stays=stays) as folder:
        work = folder.parent
        yield folder


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _version() -> str:
    project = Path(__file__).parents[2] / "pyproject.toml"
    return tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"]
