"""Corpus preparation: turn text sources into a folder of indexed datasets with their tokenizer.

    corpora/python/
      train_text_document.bin   tokens of all documents in sequence, each document ended by end-of-document
      train_text_document.idx   document offsets
      valid_text_document.…, test_text_document.…
      corpus.json               tokenizer, vocabulary, documents, tokens and bytes per split, sources, checksums
      tokenizer.json            the tokenizer's own files, which make the folder self-contained

megatron-core's IndexedDatasetBuilder writes the datasets, so Megatron-LM and GPT-NeoX can read them. The folder is
built under a temporary name and renamed when complete, so a corpus is never partial. Preparing the same corpus again
only verifies the checksums of all files.
"""

import contextlib
import glob
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from megatron.data.corpus.documents import (
    CorpusDocuments,
    CorpusProgress,
    SplitAssignment,
    assign_splits,
    count_documents_for_tokens,
)
from megatron.data.corpus.hub_dataset import UnfinishedError
from megatron.data.corpus.recipe import CorpusRecipe, find_existing_corpus, read_corpus_recipe
from megatron.data.corpus.sources import BadDocumentError, SourceFile, decode_document
from megatron.data.corpus.tokenize_worker import ChunkEncoder, encode_chunks, iter_chunks
from megatron.data.corpus.writer import PROGRESS_FILE, BadDocuments, CorpusWriter, read_progress
from megatron.data.corpus_metadata import (
    ALL_SPLITS,
    CORPUS_FILE,
    TOKENIZER_FILES,
    CorpusInfo,
    CorpusMetadata,
    SplitName,
    compute_file_digest,
    read_corpus,
)
from megatron.data.tokenizers import Tokenizer, load_tokenizer_from_files, train_bpe
from megatron.options.data import SPLITS, CorpusOptions
from megatron.utils.atomic_directory import (
    FolderConflictError,
    FolderVersion,
    atomic_directory,
    describe_write_errors,
    read_folder_version,
    recover_stale_work,
)
from megatron.utils.atomic_io import check_new_folder
from megatron.utils.errors import FarfieldError, UserError
from megatron.utils.progress import IMPORTING
from megatron.utils.project import get_farfield_version
from megatron.utils.signals import StoppedBySignal


def prepare_corpus(
    options: CorpusOptions,
    output: str | Path,
    *,
    overwrite: bool = False,
    progress: CorpusProgress | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> CorpusInfo:
    """Build a corpus folder from text sources, or reuse it if it already exists.

    The result does not depend on the number of workers. Work interrupted by Ctrl-C, a kill, a bad document or an
    unreachable hub resumes when the same corpus is prepared again.

    Args:
        options: sources and settings; see `megatron.data.corpus.sources` for sources. A split with fraction 0 is not
            written, a single text file is cut at line ends, and limits keep whole documents.
        output: corpus folder.
        overwrite: replace a corpus that was made with other settings.
        progress: called while the work advances.
        log: receives notes before the work starts.

    Raises:
        UserError: sources, tokenizer or options are invalid, or the folder is not writable.
        RunError: the disk is full or fails, or another command made a different corpus there meanwhile. After either
            error an existing corpus is intact. Only documents tokenized before a bad one are kept, in a hidden folder.
    """
    output, progress = Path(output), progress or (lambda stage, done, total: None)
    recipe = read_corpus_recipe(options)
    recover_stale_work(output.resolve(), recipe.key)
    replaced_version = read_folder_version(output)
    if (corpus := find_existing_corpus(output, recipe, overwrite=overwrite, progress=progress)) is not None:
        return corpus
    check_new_folder("--output", output)
    for note in recipe.list_notes():
        log(note)
    try:
        with _open_work_folder(output, recipe.key, replaced_version) as folder:
            _write_corpus(recipe, folder, progress)
    except BadDocumentError as error:
        kept = "; work so far is kept" if find_unfinished(output) else ""
        advice = "--skip-bad N skips up to N such documents" if not options.skip_bad else "raise --skip-bad"
        raise UserError(f"{error}; {advice}{kept}") from None
    except FolderConflictError as conflict:
        return _use_other_corpus(output, recipe, progress, conflict)
    return read_corpus(output)


def _use_other_corpus(
    output: Path, recipe: CorpusRecipe, progress: CorpusProgress, conflict: FolderConflictError
) -> CorpusInfo:
    """Return the corpus that another process made meanwhile if it is identical; raise `conflict` otherwise."""
    try:
        corpus = find_existing_corpus(output, recipe, overwrite=False, progress=progress)
    except FarfieldError:
        raise conflict from None
    if corpus is None:
        raise conflict
    shutil.rmtree(conflict.kept, ignore_errors=True)
    return corpus


def _write_corpus(recipe: CorpusRecipe, folder: Path, progress: CorpusProgress) -> None:
    """Write all files of a corpus, or only the missing ones if earlier work is resumed."""
    options, work = recipe.options, folder.parent
    earlier = read_progress(work)
    _remove_unfinished(folder, keep=earlier is not None)
    documents = CorpusDocuments(recipe.files, options.column, work / "read", progress, options.documents)
    if options.tokens is not None:
        assert recipe.tokenizer is not None
        limit = (
            count_documents_for_tokens(
                options.tokens, documents, recipe.tokenizer, recipe.num_workers, BadDocuments(options.skip_bad)
            )
            if earlier is None
            else earlier["limit"]
        )
        documents = replace(documents, limit=limit)
    assignment = assign_splits(documents, recipe.split_fractions, options.seed)
    if recipe.tokenizer is None:
        tokenizer = _train_tokenizer(
            folder,
            assignment,
            options.vocab_size,
            bad=BadDocuments(options.skip_bad),
            is_trained=earlier is not None,
        )
    else:
        tokenizer = recipe.tokenizer
        tokenizer.copy_files(folder)
    notes = []
    if options.vocab_size is not None and tokenizer.vocab_size < options.vocab_size:
        notes.append(
            f"the text yielded a vocabulary of {tokenizer.vocab_size:,} tokens; {options.vocab_size:,} were requested"
        )
    split_names = _list_split_names(recipe.split_fractions)
    documents.report_progress(IMPORTING, 0)  # by the writer of datasets
    writer = CorpusWriter(
        work, split_names, tokenizer.vocab_size, {"limit": documents.limit}, earlier, options.skip_bad
    )
    if earlier is None and (options.tokens is not None or recipe.tokenizer is None):
        writer.save()  # counting and training take long
    _write_splits(writer, tokenizer, assignment, recipe.num_workers)
    _check_split_not_empty(writer, recipe.files)
    if writer.skipped:
        examples = ", ".join(writer.skipped[:5])
        notes.append(f"{len(writer.skipped)} Python files skipped because Python cannot decode them: {examples}")
    if writer.bad.count:
        notes.append(writer.bad.describe())
    num_tokens = sum(counts.tokens for counts in writer.split_counts.values())
    if options.tokens is not None and num_tokens < options.tokens:
        notes.append(f"the text yielded {num_tokens:,} tokens; {options.tokens:,} were requested")
    metadata = CorpusMetadata(
        farfield=get_farfield_version(),
        sources=list(options.sources),
        made_from=recipe.made_from,
        tokenizer=tokenizer.metadata,
        splits=writer.split_counts,
        bad_documents=writer.bad.count,
        notes=notes,
        files={path.name: compute_file_digest(path) for path in sorted(folder.iterdir())},
    )
    content = json.dumps(metadata.model_dump(), indent=2)  # unlike model_dump_json, accepts names that are not Unicode
    (folder / CORPUS_FILE).write_text(content + "\n", encoding="utf-8")


def _list_split_names(fractions: tuple[float, ...] | None) -> dict[int, SplitName]:
    """Return the names of the splits to write, by their index."""
    if fractions is None:
        return {0: ALL_SPLITS}
    return {i: SPLITS[i] for i, fraction in enumerate(fractions) if fraction > 0}


def _remove_unfinished(folder: Path, *, keep: bool) -> None:
    """Remove unfinished files of earlier work; `keep` retains tokens and a trained tokenizer."""
    for path in folder.iterdir():
        if not (keep and (path.suffix == ".bin" or path.name in TOKENIZER_FILES["HFTokenizer"])):
            path.unlink()


def find_unfinished(output: str | Path) -> bool:
    """Return True if there is interrupted work on a corpus that preparing it again would resume."""
    resolved = Path(output).resolve()
    return any(_can_resume(work) for work in resolved.parent.glob(f".{glob.escape(resolved.name)}.????????.tmp"))


def _can_resume(work: Path) -> bool:
    return (work / PROGRESS_FILE).exists() or any((work / "read").glob("*/*.json"))


def _train_tokenizer(
    folder: Path, assignment: SplitAssignment, vocab_size: int | None, *, bad: BadDocuments, is_trained: bool
) -> Tokenizer:
    """Train a byte-level BPE on the training documents only, so that valid and test stay unseen.

    is_trained: True if interrupted work already trained the tokenizer.
    """
    assert vocab_size is not None
    documents = assignment.documents

    def iter_training_texts() -> Iterator[str]:
        bytes_done = 0
        for document, split in assignment.iter_documents():
            bytes_done += document.size
            text = None
            if split == 0:
                try:
                    text = decode_document(document, documents.column)
                except BadDocumentError as error:
                    if not bad.limit:
                        raise
                    bad.add([str(error)])
            if text:
                yield text
            documents.report_progress("training the tokenizer", bytes_done)

    if not is_trained:
        train_bpe(iter_training_texts(), vocab_size, folder / "tokenizer.json")
    return load_tokenizer_from_files("HFTokenizer", folder / "tokenizer.json")


def _write_splits(writer: CorpusWriter, tokenizer: Tokenizer, assignment: SplitAssignment, num_workers: int) -> None:
    """Tokenize the documents that are not yet written and add them to the datasets."""
    documents = assignment.documents
    try:
        chunks = iter_chunks(islice(assignment.iter_documents(), writer.documents, None))
        encoder = ChunkEncoder(tokenizer, writer.dtype, documents.column, skip_bad=writer.bad.limit > 0)
        with contextlib.closing(encode_chunks(encoder, chunks, num_workers)) as encoded_chunks:
            for chunk in encoded_chunks:
                writer.add(chunk)
                documents.report_progress("tokenizing", writer.bytes_done)
        writer.finish()
    except BadDocumentError:
        if writer.documents:
            writer.save()  # keeps the tokenized documents for the same command with --skip-bad
        raise
    finally:
        writer.close()


def _check_split_not_empty(writer: CorpusWriter, files: list[SourceFile]) -> None:
    num_documents = sum(counts.documents for counts in writer.split_counts.values())
    bad = f"; {writer.bad.describe()}" if writer.bad.count else ""
    if num_documents == 0 or writer.is_blank:
        raise UserError(f"{files[0].path}{' and the other sources' * (len(files) > 1)}: no text found{bad}")
    for name, counts in writer.split_counts.items():
        if counts.documents == 0:
            subject = "1 document is" if num_documents == 1 else f"{num_documents} documents are"
            raise UserError(
                f"split: no text left for {name}: only {subject} not empty; --split none puts all text in one "
                f"dataset{bad}"
            )


@contextlib.contextmanager
def _open_work_folder(output: Path, key: str, replaces: FolderVersion | None) -> Iterator[Path]:
    """Open a folder that becomes `output` on success.

    Disk errors raise RunError, which names the files that are kept.

    Resumable interrupted work is kept for a later call with the same key.
    """
    target = output.resolve()  # a link to another disk stays a link
    work: Path | None = None

    def should_keep_after(error: BaseException) -> bool:
        assert work is not None
        return isinstance(
            error, KeyboardInterrupt | StoppedBySignal | UnfinishedError | BadDocumentError
        ) and _can_resume(work)

    with (
        describe_write_errors(output, "corpus"),
        atomic_directory(target, replaces=replaces, key=key, should_keep_after=should_keep_after) as folder,
    ):
        work = folder.parent
        yield folder
