"""Indexed datasets (.bin and .idx): their format, reading, and verification.

A dataset is named by its prefix, as in Megatron and GPT-NeoX: `corpora/python/train_text_document` refers to that path
with `.bin` (the tokens) and with `.idx` (the document boundaries). For datasets made by `./deepy.py prepare`, the
folder's `corpus.json` names the tokenizer.

The format is Megatron's, shared with GPT-NeoX. `.bin` contains only tokens. `.idx` contains, in little-endian order:

| bytes | content |
|---|---|
| 9 | `MMIDIDX`, then two zero bytes |
| 8 | version, 1 |
| 1 | type of the tokens: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16 (6 and 7 are floating point) |
| 8 | S, number of sequences |
| 8 | D, number of document boundaries: documents + 1 |
| 4 S | length of each sequence in tokens, int32 |
| 8 S | its first byte in .bin, int64 |
| 8 D | sequence at which each document begins, int64; the last is S |

Training reads such files through megatron-core, which does not validate them: a truncated file causes an assertion or a
crash much later. All datasets are therefore opened with `open_indexed` first.
"""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.data.corpus_metadata import (
    CORPUS_FILE,
    MAX_CHECKSUM_BYTES,
    CorpusMetadata,
    check_files,
    get_split_basename,
    read_corpus_metadata,
)
from megatron.utils.errors import RunError, UserError, check_reachable

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
SAMPLED_TOKENS = 1 << 24
"""Number of tokens of a dataset that each process reads at startup to detect ids outside the vocabulary."""
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


@dataclass(frozen=True)
class IndexedTokens:
    """Dataset with consistent files. Tokens are memory-mapped."""

    prefix: Path
    tokens: np.ndarray  # all of .bin
    lengths: np.ndarray  # int32 [sequences], in tokens
    starts: np.ndarray  # int64 [sequences], in tokens
    documents: np.ndarray  # int64 [documents + 1], in sequences

    def read_stream(self, first: int = 0, last: int | None = None) -> np.ndarray:
        """Return the tokens of sequences first … last − 1 in order; a view of the file if they are contiguous."""
        starts, lengths = self.starts[first:last], self.lengths[first:last]
        if len(starts) == 0:
            return self.tokens[:0]
        ends = starts + lengths
        if np.array_equal(starts[1:], ends[:-1]):
            return self.tokens[starts[0] : ends[-1]]
        return np.concatenate([self.tokens[start:end] for start, end in zip(starts, ends, strict=True)])

    def find_token_range(self, max_tokens: int | None = SAMPLED_TOKENS) -> tuple[int, int]:
        """Return the smallest and the largest token id, or (0, -1) if there are none.

        For datasets of more than `max_tokens` tokens, only evenly spaced blocks are read; None reads everything.
        """
        blocks, size = 256, len(self.tokens)
        if max_tokens is None or size <= max_tokens:
            return find_token_range(self.tokens)
        length = max_tokens // blocks
        block_starts = np.linspace(0, size - length, blocks).astype(np.int64)
        return find_token_range(self.tokens, block_starts, length)


def find_token_range(
    tokens: np.ndarray, block_starts: Iterable[int] | None = None, length: int = 1 << 20
) -> tuple[int, int]:
    """Return the smallest and the largest of some token ids, [N] integers, or (0, -1) if there are none.

    Tokens may be memory-mapped. They are read in blocks of `length`, either all or those starting at `block_starts`.
    """
    if len(tokens) == 0:
        return 0, -1
    starts = range(0, len(tokens), length) if block_starts is None else block_starts
    ranges = [(int(block.min()), int(block.max())) for block in (tokens[start : start + length] for start in starts)]
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def open_indexed(prefix: str | Path) -> IndexedTokens:
    """Open a dataset. Raises UserError if a file is missing or has another format, RunError if one is truncated."""
    bin_file, idx_file = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    for file in (bin_file, idx_file):
        if not file.is_file():
            check_reachable(file)
            raise UserError(f"{file}: no such file (a dataset is a .bin and an .idx)")
    try:
        size = idx_file.stat().st_size
        with open(idx_file, "rb") as stream:
            header = stream.read(HEADER.size)
        if not header.startswith(MAGIC[: len(header)]):
            raise UserError(f"{idx_file}: not an index in Megatron's mmap format, version 1")
        if len(header) < HEADER.size:
            raise RunError(f"{idx_file}: truncated: {size} bytes, less than its header")
        magic, version, code, sequences, boundaries = HEADER.unpack(header)
        if magic != MAGIC or version != 1:
            raise UserError(f"{idx_file}: not an index in Megatron's mmap format, version 1")
        if code not in _DTYPES:
            raise UserError(f"{idx_file}: token type {code} is not an integer type ({', '.join(map(str, _DTYPES))})")
        expected = HEADER.size + 12 * sequences + 8 * boundaries
        if size != expected:
            problem = "truncated" if size < expected else "damaged"
            raise RunError(
                f"{idx_file}: {problem}: {size} bytes, but its header specifies {expected}; prepare it again"
            )
        index = np.memmap(idx_file, mode="r")
        offset = HEADER.size
        lengths = index[offset : offset + 4 * sequences].view("<i4")
        offset += 4 * sequences
        starts = index[offset : offset + 8 * sequences].view("<i8")
        offset += 8 * sequences
        documents = index[offset : offset + 8 * boundaries].view("<i8")
        dtype = np.dtype(_DTYPES[code]).newbyteorder("<")
        needed = int((starts + lengths.astype(np.int64) * dtype.itemsize).max(initial=0))
        size = bin_file.stat().st_size
        if size < needed:
            raise RunError(f"{bin_file}: truncated: {size} bytes, but {idx_file.name} needs {needed}; prepare it again")
        if size != needed or not _is_consistent(lengths, starts, documents, dtype.itemsize):
            raise RunError(f"{bin_file}, {idx_file.name}: inconsistent or damaged; prepare them again")
        tokens = np.memmap(bin_file, dtype=dtype, mode="r") if size else np.empty(0, dtype=dtype)
    except OSError as error:
        raise UserError(f"{error.filename or prefix}: cannot be read: {error.strerror or error}") from None
    return IndexedTokens(Path(prefix), tokens, lengths, starts // dtype.itemsize, documents)


def _is_consistent(lengths: np.ndarray, starts: np.ndarray, documents: np.ndarray, itemsize: int) -> bool:
    """Return True if the sequences cover every token exactly once, and the documents cover the sequences."""
    if len(documents) == 0 or documents[0] != 0 or documents[-1] != len(lengths) or (np.diff(documents) < 0).any():
        return False
    if (lengths < 0).any():
        return False
    sizes = lengths.astype(np.int64) * itemsize
    ends = starts + sizes
    if len(starts) and (starts[0] != 0 or not np.array_equal(starts[1:], ends[:-1])):
        order = np.lexsort((sizes, starts))  # sequences may be in any order in the file
        starts, ends = starts[order], ends[order]
        return bool(starts[0] == 0) and np.array_equal(starts[1:], ends[:-1])
    return True


def find_corpus_metadata(prefix: Path) -> CorpusMetadata | None:
    """Return the corpus.json that describes a dataset, or None if `prepare` did not make it."""
    if not (prefix.parent / CORPUS_FILE).is_file():
        return None
    metadata = read_corpus_metadata(prefix.parent)
    return metadata if prefix.name in {get_split_basename(split) for split in metadata.splits} else None


def check_dataset(prefix: Path, *, content: bool) -> None:
    """Compare a dataset with the records of its corpus, if there are any.

    The index is compared by checksum; the tokens by size and, with `content`, also by checksum. Raises RunError naming
    the file that differs.
    """
    metadata = find_corpus_metadata(prefix)
    if metadata is not None:
        check_files(prefix.parent, metadata, [f"{prefix.name}.idx"], content=True)
        check_files(prefix.parent, metadata, [f"{prefix.name}.bin"], content=content)


def check_dataset_content(dataset: IndexedTokens) -> None:
    """Compare the tokens with their recorded checksum, if any, unless the file is too large for this check."""
    check_dataset(dataset.prefix, content=dataset.tokens.nbytes <= MAX_CHECKSUM_BYTES)


def compute_dataset_digest(prefix: Path) -> str:
    """Return the checksum of a dataset's tokens in its corpus.json, or their size in bytes if it has none."""
    tokens = prefix.with_name(f"{prefix.name}.bin")
    metadata = find_corpus_metadata(prefix)
    recorded = {} if metadata is None else metadata.files or {}
    return recorded[tokens.name].sha256 if tokens.name in recorded else f"{tokens.stat().st_size} bytes"


def find_changed_datasets(digests: Mapping[str, str]) -> list[str]:
    """Return the datasets whose tokens differ from those of earlier; missing datasets are not listed.

    Args:
        digests: earlier result of `compute_dataset_digest` for each prefix.
    """
    present = (prefix for prefix in digests if Path(f"{prefix}.bin").is_file())
    return [prefix for prefix in present if compute_dataset_digest(Path(prefix)) != digests[prefix]]
