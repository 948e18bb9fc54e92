"""Multiprocess tokenization for corpus preparation: raw documents in, token arrays out.

Every worker imports this module, so it must stay light: no torch, no megatron-core.
"""

import os
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process

import numpy as np

from megatron.data.corpus.sources import BadDocumentError, RawDocument, decode_document
from megatron.data.tokenizers import Tokenizer, load_tokenizer_from_files
from megatron.utils.errors import RunError, UserError
from megatron.utils.imports import protect_child_imports

CHUNK_BYTES = 1 << 20
CHUNK_DOCUMENTS = 1024


@dataclass
class Chunk:
    """Consecutive documents and the split of each."""

    documents: list[RawDocument] = field(default_factory=list)
    splits: list[int] = field(default_factory=list)
    size: int = 0  # bytes of the sources it represents


@dataclass
class EncodedSplit:
    """Tokenized documents of one split in a chunk, without empty documents."""

    tokens: np.ndarray  # [sum of lengths], including the tokens that begin and end documents
    lengths: list[int]
    bytes: int  # UTF-8


@dataclass
class EncodedChunk:
    by_split: dict[int, EncodedSplit]
    lengths: list[int]  # of every document, including its end token; 0 for skipped documents
    skipped: list[str]  # Python files that Python cannot decode
    bad: list[str]  # error message for each document that cannot be decoded
    is_blank: bool  # True if no document contains more than white space
    size: int


def iter_chunks(documents: Iterable[tuple[RawDocument, int]]) -> Iterator[Chunk]:
    """Group (document, split) pairs into chunks. Chunk boundaries do not affect the corpus."""
    chunk = Chunk()
    for document, split in documents:
        chunk.documents.append(document)
        chunk.splits.append(split)
        chunk.size += document.size
        if chunk.size >= CHUNK_BYTES or len(chunk.documents) >= CHUNK_DOCUMENTS:
            yield chunk
            chunk = Chunk()
    if chunk.documents:
        yield chunk


class ChunkEncoder:
    """Callable that decodes and tokenizes chunks.

    With `skip_bad`, documents that cannot be decoded are skipped and listed instead of raising BadDocumentError.
    """

    def __init__(
        self, tokenizer: Tokenizer, dtype: type[np.integer], jsonl_key: str, *, skip_bad: bool = False
    ) -> None:
        self.tokenizer, self.dtype, self.jsonl_key, self.skip_bad = tokenizer, np.dtype(dtype), jsonl_key, skip_bad

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        texts: dict[int, list[str]] = {}
        splits: list[int | None] = []
        skipped, bad = [], []
        for document, split in zip(chunk.documents, chunk.splits, strict=True):
            try:
                text = decode_document(document, self.jsonl_key)
            except MemoryError:
                raise build_size_error(document) from None
            except BadDocumentError as error:
                if not self.skip_bad:
                    raise
                bad.append(str(error))
                splits.append(None)
                continue
            splits.append(split if text else None)
            if text is None:
                skipped.append(document.name)
            elif text:
                texts.setdefault(split, []).append(text)
        try:
            by_split = {split: self._encode_texts(texts[split]) for split in texts}
        except MemoryError:
            raise build_size_error(max(chunk.documents, key=lambda document: document.size)) from None
        remaining = {split: iter(encoded.lengths) for split, encoded in by_split.items()}
        lengths = [0 if split is None else next(remaining[split]) for split in splits]
        is_blank = all(text.isspace() for split in texts.values() for text in split)
        return EncodedChunk(by_split, lengths, skipped, bad, is_blank, chunk.size)

    def _check_tokens(self, tokens: np.ndarray) -> None:
        """Raise UserError for ids outside the vocabulary, which the file's token type may not be able to represent."""
        smallest, largest = int(tokens.min()), int(tokens.max())
        if smallest < 0 or largest >= self.tokenizer.vocab_size:
            token = smallest if smallest < 0 else largest
            raise UserError(
                f"tokenizer {self.tokenizer.name} produces token {token}, but its vocabulary has "
                f"{self.tokenizer.vocab_size} tokens; its files do not match"
            )

    def _encode_texts(self, texts: list[str]) -> EncodedSplit:
        encoded = self.tokenizer.encode_batch(texts)
        bos = self.tokenizer.bos
        num_bos = 0 if bos is None else 1
        lengths = [num_bos + len(ids) + 1 for ids in encoded]
        tokens = np.full(sum(lengths), self.tokenizer.eod, dtype=np.int64)
        start = 0
        for ids, length in zip(encoded, lengths, strict=True):
            if bos is not None:
                tokens[start] = bos
            tokens[start + num_bos : start + length - 1] = ids
            start += length
        self._check_tokens(tokens)
        return EncodedSplit(tokens.astype(self.dtype), lengths, sum(len(text.encode("utf-8")) for text in texts))


def build_size_error(document: RawDocument) -> RunError:
    return RunError(f"{document.where}: a document of {document.size:,} bytes does not fit in memory; split it")


def encode_chunks(
    encoder: ChunkEncoder, chunks: Iterable[Chunk], num_workers: int
) -> Generator[EncodedChunk, None, None]:
    """Encode chunks in `num_workers` processes. Results are yielded in the order of the chunks."""
    if num_workers == 1:
        yield from map(encoder, chunks)
        return
    tokenizer = encoder.tokenizer
    files = [str(path) for path in tokenizer.files.values()]
    worker_arguments = (
        *(tokenizer.type, files, tokenizer.end_token, tokenizer.bos),
        *(encoder.dtype.str, encoder.jsonl_key, encoder.skip_bad),
    )
    # spawn, not fork: the parent may have threads (progress display, torch, tokenizers)
    with protect_child_imports():
        pool = ProcessPoolExecutor(
            num_workers, mp_context=get_context("spawn"), initializer=_start_worker, initargs=worker_arguments
        )
    pending: deque[Future[EncodedChunk]] = deque()
    try:
        for chunk in chunks:
            with protect_child_imports():  # the pool starts further processes on demand
                pending.append(pool.submit(_encode_in_worker, chunk))
            if len(pending) > 4 * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise RunError("a tokenizing process died (out of memory?); try fewer --workers") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_encoder: ChunkEncoder | None = None  # of this worker process


def _start_worker(
    type: str, files: list[str], end_token: str | None, bos: int | None, dtype: str, jsonl_key: str, skip_bad: bool
) -> None:
    global _encoder
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # parallelism comes from the processes
    tokenizer = load_tokenizer_from_files(type, *files, end_token=end_token, bos=False)
    tokenizer.bos = bos
    _encoder = ChunkEncoder(tokenizer, np.dtype(dtype).type, jsonl_key, skip_bad=skip_bad)


def _exit_with_parent() -> None:
    """Exit when the parent process dies; otherwise the worker would wait for chunks forever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_in_worker(chunk: Chunk) -> EncodedChunk:
    assert _encoder is not None
    return _encoder(chunk)
