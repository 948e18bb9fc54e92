"""Synthetic corpus of random tokens with a given vocabulary size, for rehearsals without the run's own data.

It is a corpus folder as made by `prepare`, with a tokenizer of made-up words, so the run reads it like any other
corpus. The tokens themselves do not matter: losses on the null device are meaningless.
"""

import json
from pathlib import Path

import numpy as np

from megatron.data.corpus_metadata import CORPUS_FILE, CorpusMetadata, SplitCounts, SplitName, split_basename
from megatron.data.indexed_dataset import HEADER, MAGIC
from megatron.data.tokenizers import HuggingFaceTokenizer
from megatron.options.data import SPLITS

END_TOKEN = "<|endoftext|>"
INT32 = 4
"""Data type code of tokens in an index file."""
MIN_TOKENS = 1 << 20
"""Minimum number of tokens of each split, which gives readers room to skip; longer sequences get more."""


def write_synthetic_corpus(
    folder: Path, vocab_size: int, seq_length: int, document_length: int | None = None
) -> dict[str, Path]:
    """Write a corpus folder and return the dataset of each split, as `train_data_paths` and similar keys name it.

    Args:
        folder: folder to create.
        vocab_size: vocabulary size of the tokenizer, including the end-of-document token.
        seq_length: sequence length of the run; every split contains several sequences.
        document_length: length of a document in tokens; None for almost no document boundaries.

    Raises:
        OSError: if the files cannot be written.
    """
    folder.mkdir(parents=True)
    tokenizer_file = folder / "tokenizer.json"
    tokenizer_file.write_text(json.dumps(_describe_tokenizer(vocab_size)), encoding="utf-8")
    tokenizer = HuggingFaceTokenizer(tokenizer_file)
    generator, num_tokens = np.random.default_rng(0), max(MIN_TOKENS, 4 * (seq_length + 1))
    counts: dict[SplitName, SplitCounts] = {}
    prefixes: dict[str, Path] = {}
    for split in SPLITS:
        prefix = folder / split_basename(split)
        tokens = generator.integers(0, vocab_size, num_tokens, dtype=np.int32)
        if document_length is not None:
            tokens[document_length - 1 :: document_length] = tokenizer.eod
        tokens[-1] = tokenizer.eod
        _write_dataset(prefix, tokens)
        counts[split] = SplitCounts(documents=1, tokens=num_tokens, bytes=num_tokens)
        prefixes[split] = prefix
    metadata = CorpusMetadata(made_from={"synthetic": vocab_size}, tokenizer=tokenizer.metadata, splits=counts)
    (folder / CORPUS_FILE).write_text(metadata.model_dump_json(), encoding="utf-8")
    return prefixes


def _write_dataset(prefix: Path, tokens: np.ndarray) -> None:
    """Write an indexed dataset of one document. Importing megatron-core's builder would take seconds."""
    tokens.astype("<i4").tofile(f"{prefix}.bin")
    header = HEADER.pack(MAGIC, 1, INT32, 1, 2)
    index = (np.array([len(tokens)], "<i4"), np.array([0], "<i8"), np.array([0, 1], "<i8"))
    Path(f"{prefix}.idx").write_bytes(header + b"".join(part.tobytes() for part in index))


def _describe_tokenizer(vocab_size: int) -> dict[str, object]:
    """Return a tokenizer.json with the words w1, w2 and so on."""
    words = {END_TOKEN: 0} | {f"w{index}": index for index in range(1, vocab_size)}
    end = {"id": 0, "content": END_TOKEN, "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [end | flags],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": END_TOKEN},
    }
