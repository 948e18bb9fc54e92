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
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from megatron.data.corpus_folder import CorpusInfo, Progress, find_existing_corpus, read_corpus
from megatron.data.description import (
    CORPUS_FILE,
    TOKENIZER_FILES,
    CorpusMetadata,
    SplitCounts,
    SplitName,
    file_facts,
)
from megatron.data.documents import CorpusDocuments, SplitAssignment, assign_splits, limit_tokens
from megatron.data.encode import Encoder, encode_chunks, iter_chunks
from megatron.data.hub import UnfinishedError
from megatron.data.paths import ALL_SPLITS, SPLITS
from megatron.data.recipe import CorpusRecipe, read_corpus_recipe
from megatron.data.sources import SourceFile, decode_document
from megatron.data.tokenizers import Tokenizer, tokenizer_from_files, train_bpe
from megatron.data.writing import PROGRESS_FILE, CorpusWriter, read_progress
from megatron.options.data import CorpusOptions
from megatron.utils.atomic_directory import atomic_directory, describe_write_errors, recover_abandoned
from megatron.utils.atomic_io import get_farfield_version
from megatron.utils.errors import UserError
from megatron.utils.signals import StoppedBySignal


def prepare_corpus(
    options: CorpusOptions,
    output: str | Path,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> CorpusInfo:
    """Make a corpus folder from sources of text, or find it made already.

    The corpus is the same for any number of workers. Work that is interrupted, by Ctrl-C, by a kill or because the hub
    cannot be reached any more, goes on where it was when the same corpus is prepared again.

    Args:
        options: what it is made from; see `megatron.data.sources` for sources. A split with share 0 is not written, a
            lone text file is cut at line ends, and of limits whole documents are taken.
        output: the folder.
        overwrite: replace a corpus that was made differently.
        progress: told how far the work is.
        log: gets lines worth telling before the work.

    Raises:
        UserError: sources, tokenizers and choices that are wrong.
        RunError: the disk is full or the folder cannot be written.
        In either case nothing is left behind, and a corpus that was there stays.
    """
    output, report = Path(output), progress or (lambda stage, done, total: None)
    recipe = read_corpus_recipe(options)
    recover_abandoned(output.resolve(), recipe.key)
    if (found := find_existing_corpus(output, options.sources, recipe.made_from, overwrite, report)) is not None:
        return found
    for note in recipe.list_notes():
        log(note)
    with _open_work_folder(output, recipe.key) as folder:
        _write_corpus(recipe, folder, report)
    return read_corpus(output)


def _write_corpus(recipe: CorpusRecipe, folder: Path, report: Progress) -> None:
    """Write all files of a corpus, or those that earlier work has left to do."""
    options, work = recipe.options, folder.parent
    before = read_progress(work)
    _remove_unfinished(folder, keep=before is not None)
    text = CorpusDocuments(recipe.files, options.column, work / "read", report, options.documents)
    if options.tokens is not None:
        assert recipe.tokenizer is not None
        counted = (
            limit_tokens(options.tokens, text, recipe.tokenizer, recipe.choose_num_workers)
            if before is None
            else before["limit"]
        )
        text = replace(text, limit=counted)
    division = assign_splits(text, recipe.split_fractions, options.seed)
    tokenizer = recipe.tokenizer or _train_tokenizer(folder, division, options.vocab_size, found=before is not None)
    if recipe.tokenizer is not None:
        tokenizer.copy_files(folder)
    notes = []
    if options.vocab_size is not None and tokenizer.vocab_size < options.vocab_size:
        notes.append(f"the text gave {tokenizer.vocab_size} tokens of the {options.vocab_size} asked for")
    writer = CorpusWriter(
        work, _split_names(recipe.split_fractions), tokenizer.vocab_size, {"limit": text.limit}, before
    )
    if before is None and (options.tokens is not None or recipe.tokenizer is None):
        writer.save()  # counting and training took long
    _write_splits(writer, tokenizer, division, recipe.choose_num_workers)
    _refuse_empty_split(writer.split_counts, recipe.files)
    if writer.skipped:
        few = ", ".join(writer.skipped[:5])
        notes.append(f"{len(writer.skipped)} Python files left out, as Python cannot decode them: {few}")
    described = CorpusMetadata(
        farfield=get_farfield_version(),
        sources=list(options.sources),
        made_from=recipe.made_from,
        tokenizer=tokenizer.describe,
        splits=writer.split_counts,
        notes=notes,
        files={path.name: file_facts(path) for path in sorted(folder.iterdir())},
    )
    content = json.dumps(described.model_dump(), indent=2)  # model_dump_json takes Unicode alone: not all names are
    (folder / CORPUS_FILE).write_text(content + "\n", encoding="utf-8")


def _split_names(shares: tuple[float, ...] | None) -> dict[int, SplitName]:
    """The splits that are written, by their number."""
    return {0: ALL_SPLITS} if shares is None else {i: SPLITS[i] for i, share in enumerate(shares) if share > 0}


def _remove_unfinished(folder: Path, *, keep: bool) -> None:
    """Remove what earlier work left and is made anew: all of it, or all but tokens and a trained tokenizer."""
    for path in folder.iterdir():
        if not (keep and (path.suffix == ".bin" or path.name in TOKENIZER_FILES["HFTokenizer"])):
            path.unlink()


def find_unfinished(output: str | Path) -> bool:
    """Is there work on a corpus that was interrupted, and that preparing the same again goes on with?"""
    real = Path(output).resolve()
    return any(_can_continue(work) for work in real.parent.glob(f".{glob.escape(real.name)}.????????.tmp"))


def _can_continue(work: Path) -> bool:
    return (work / PROGRESS_FILE).exists() or any((work / "read").glob("*/*.json"))


def _train_tokenizer(folder: Path, division: SplitAssignment, vocab_size: int | None, *, found: bool) -> Tokenizer:
    """A byte-level BPE trained on the training documents alone, so that valid and test stay unseen; or `found` already,
    by work that was interrupted."""
    assert vocab_size is not None
    text = division.text

    def texts() -> Iterator[str]:
        done = 0
        for document, split in division.documents():
            done += document.size
            if split == 0 and (decoded := decode_document(document, text.column)):
                yield decoded
            text.report_progress("training the tokenizer", done)

    if not found:
        train_bpe(texts(), vocab_size, folder / "tokenizer.json")
    return tokenizer_from_files("HFTokenizer", folder / "tokenizer.json")


def _write_splits(writer: CorpusWriter, tokenizer: Tokenizer, division: SplitAssignment, workers: int) -> None:
    """Tokenize the documents that are not written yet into the datasets."""
    text = division.text
    try:
        work = iter_chunks(islice(division.documents(), writer.documents, None))
        with contextlib.closing(encode_chunks(Encoder(tokenizer, writer.dtype, text.column), work, workers)) as results:
            for result in results:
                writer.add(result)
                text.report_progress("tokenizing", writer.documents_done)
        writer.finish()
    finally:
        writer.close()


def _refuse_empty_split(counted: dict[SplitName, SplitCounts], files: list[SourceFile]) -> None:
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
def _open_work_folder(output: Path, key: str) -> Iterator[Path]:
    """A folder that becomes `output` if all goes well; a disk that refuses is one line that says what is kept.

    Work that was interrupted stays, if there is something to go on with, for a later call with the same key.
    """
    real = output.resolve()  # a link to another disk stays one
    work: Path | None = None

    def keep_after(error: BaseException) -> bool:
        assert work is not None
        return isinstance(error, KeyboardInterrupt | StoppedBySignal | UnfinishedError) and _can_continue(work)

    with (
        describe_write_errors(output, "the corpus that"),
        atomic_directory(real, key=key, keep_after=keep_after) as folder,
    ):
        work = folder.parent
        yield folder
