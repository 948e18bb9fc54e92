"""Small corpora, and datasets written from the format's definition, independently of the code under test."""

import struct
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write_dataset(prefix: Path, documents: Sequence[Sequence[int]], dtype: str = "int32") -> Path:
    """Write .bin and .idx files of documents, one sequence each, little endian."""
    itemsize = np.dtype(dtype).itemsize
    lengths = [len(document) for document in documents]
    starts = [sum(lengths[:i]) * itemsize for i in range(len(lengths))]
    prefix.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{prefix}.bin").write_bytes(b"".join(np.array(d, dtype=f"<{dtype_char(dtype)}").tobytes() for d in documents))
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, CODES[dtype], len(documents), len(documents) + 1)
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(starts)}q", *starts)
        + struct.pack(f"<{len(lengths) + 1}q", *range(len(lengths) + 1))
    )
    return prefix


def dtype_char(dtype: str) -> str:
    return np.dtype(dtype).str[1:]


def read_dataset(prefix: Path) -> list[list[int]]:
    """Read the documents of a dataset from the format's definition, as GPT-NeoX's MMapIndexedDataset does."""
    idx, content = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    assert idx[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, boundaries = struct.unpack_from("<QBQQ", idx, 9)
    assert version == 1
    dtype = np.dtype({number: name for name, number in CODES.items()}[code])
    at = 34
    lengths = np.frombuffer(idx, np.int32, sequences, at)
    at += 4 * sequences
    starts = np.frombuffer(idx, np.int64, sequences, at)
    at += 8 * sequences
    bounds = np.frombuffer(idx, np.int64, boundaries, at)
    assert at + 8 * boundaries == len(idx)
    assert bounds[0] == 0
    assert bounds[-1] == sequences
    assert sum(lengths) * dtype.itemsize == len(content)
    read = [np.frombuffer(content, dtype, n, s).tolist() for n, s in zip(lengths, starts, strict=True)]
    return [list(chain(*read[a:b])) for a, b in pairwise(bounds)]


@pytest.fixture
def dataset(tmp_path: Path) -> Callable[..., str]:
    """Function that writes a dataset into the test's folder and returns its prefix."""

    def write(name: str, documents: Sequence[Sequence[int]], dtype: str = "int32") -> str:
        return str(write_dataset(tmp_path / name, documents, dtype))

    return write


@pytest.fixture
def reader() -> Callable[[Path], list[list[int]]]:
    return read_dataset


TEXTS = {
    "a.txt": "The quick brown fox\njumps over the lazy dog.\n",
    "b.txt": "Grüße aus Köln – 東京 🦊\n",
    "deep/c.txt": "one two three four five six\r\nseven\n\n",
    "deep/er/d.txt": "x",
    "e.txt": "def f(x):\n    return x + 1\n" * 20,
}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Folder with five text files, an empty one, and files that are not text."""
    folder = tmp_path / "texts"
    for name, text in TEXTS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    (folder / "empty.txt").write_text("")
    (folder / "image.png").write_bytes(b"\x89PNG\xff\xfe")
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "secret.txt").write_text("secret")
    return folder


@pytest.fixture
def expected_texts() -> list[str]:
    return list(TEXTS.values())
