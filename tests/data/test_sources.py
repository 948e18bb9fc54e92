import gzip
import hashlib
import json
import os

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.corpus import file_readers, sources
from megatron.data.corpus.sources import (
    SourceFile,
    decode_document,
    iter_raw_documents,
    list_document_names,
    scan_sources,
    split_text_file,
)
from megatron.data.corpus.tokenize_worker import Chunk, ChunkEncoder
from megatron.data.tokenizers import ByteTokenizer
from megatron.utils.errors import RunError, UserError


def read(*given, key="text", **options):
    """Return (name, text) of everything in the sources."""
    files = scan_sources([str(source) for source in given], **options)
    documents = [document for file in files for document in iter_raw_documents(file)]
    assert [document.name for document in documents] == [name for file in files for name in list_document_names(file)]
    return [(document.name, decode_document(document, key)) for document in documents]


def write_lines(path, lines):
    content = "\n".join(lines).encode("utf-8", "surrogatepass")
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        content = zstandard.compress(content)
    path.write_bytes(content)
    return path


def test_text_files_of_a_folder_have_a_fixed_order(texts, expected_texts):
    found = read(texts)
    assert [name for name, _ in found] == [
        "texts/a.txt",
        "texts/b.txt",
        "texts/e.txt",
        "texts/empty.txt",
        "texts/deep/c.txt",
        "texts/deep/er/d.txt",
    ]
    assert sorted(text for _, text in found if text) == sorted(expected_texts)  # line ends are preserved


def test_shakespeare_is_the_same_text_on_every_machine():
    found = read("shakespeare")
    text = "".join(text for _, text in found)
    assert len(found) == 133
    assert hashlib.sha256(text.encode()).hexdigest() == (
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
    )


def test_suffixes_choose_files(texts):
    (texts / "code.rs").write_text("fn main() {}")
    assert read(texts, suffixes=[".rs"]) == [("texts/code.rs", "fn main() {}")]
    assert read(texts / "code.rs", suffixes=[".rs"]) == [("code.rs", "fn main() {}")]
    with pytest.raises(UserError, match=r"code\.rs.*--suffixes \.rs"):
        scan_sources([str(texts / "code.rs")])
    with pytest.raises(UserError, match=r"no file in this folder ends in \.c"):
        scan_sources([str(texts)], suffixes=[".c"])
    for suffix in ("txt", "."):
        with pytest.raises(UserError, match="must be a dot and at least one more character"):
            scan_sources([str(texts)], suffixes=[suffix])
    (texts / "LICENSE").write_text("any use")
    with pytest.raises(UserError, match=r"LICENSE: it has no suffix; .*; rename .* to .*/LICENSE\.txt"):
        scan_sources([str(texts / "LICENSE")])


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_json_lines(tmp_path, suffix):
    lines = ['{"text": "ä\\nb", "n": 1}', "", '  {"n": 2, "text": ""}  ', '{"text": "🦊"}']
    path = write_lines(tmp_path / f"data{suffix}", lines)
    name = path.name
    assert read(path) == [(f"{name}:1", "ä\nb"), (f"{name}:3", ""), (f"{name}:4", "🦊")]
    path = write_lines(path, ['{"body": "x"}'])
    assert read(path, key="body") == [(f"{name}:1", "x")]


@given(
    st.lists(st.binary(max_size=30).filter(lambda b: b"\n" not in b), max_size=20), st.integers(1, 40), st.booleans()
)
@settings(max_examples=50, deadline=None)
def test_lines_do_not_depend_on_the_block_size(tmp_path_factory, lines, block, zst):
    path = tmp_path_factory.mktemp("lines") / ("x.jsonl.zst" if zst else "x.jsonl")
    content = b"\n".join(lines)
    half = len(content) // 2  # a file may contain several zstandard frames
    path.write_bytes(zstandard.compress(content[:half]) + zstandard.compress(content[half:]) if zst else content)
    before, file_readers.BLOCK_BYTES = file_readers.BLOCK_BYTES, block * 8
    try:
        found = [line for line, _ in file_readers.iter_lines(path)]
    finally:
        file_readers.BLOCK_BYTES = before
    expected = content.split(b"\n")
    assert found == (expected[:-1] if expected[-1] == b"" else expected)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"', r"data\.jsonl:2: not JSON"),
        ('{"test": "x", "id": 3}', r"data\.jsonl:2: no key 'text'; available: 'test', 'id'"),
        ("{}", r"data\.jsonl:2: no key 'text'; available: none"),
        ('["x"]', r"data\.jsonl:2: JSON value is an array; it must be an object"),
        ('{"text": 3}', r"data\.jsonl:2: 'text' is a number; it must be a string"),
        ('{"text": null}', r"data\.jsonl:2: 'text' is null; it must be a string"),
        ('{"text": "\\ud800"}', r"data\.jsonl:2: .*lone surrogate at character 0"),
        ('{"text": "\udcff"}', r"data\.jsonl:2: not UTF-8: byte 0xed"),
        ("[" * 100_000, r"data\.jsonl:2: not JSON"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, message):
    path = write_lines(tmp_path / "data.jsonl", ['{"text": "fine"}', line])
    with pytest.raises(UserError, match=message) as error:
        read(path)
    assert "\n" not in str(error.value)


def test_bytes_that_are_not_text_are_named(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"fine\nstill fine\nbad \xff here")
    with pytest.raises(UserError, match=r"bad\.txt:3: not UTF-8: byte 0xff at offset 20"):
        read(tmp_path / "bad.txt")
    (tmp_path / "bad.txt").write_bytes(b"\xef\xbb\xbfa\n\xfe")
    with pytest.raises(UserError, match=r"bad\.txt:2: not UTF-8: byte 0xfe at offset 5 "):
        read(tmp_path / "bad.txt")
    (tmp_path / "mark.txt").write_bytes(b"\xef\xbb\xbftext")
    assert read(tmp_path / "mark.txt") == [("mark.txt", "text")]


@pytest.mark.parametrize(("suffix", "kind"), [(".gz", "gzip"), (".zst", "zstandard")])
@pytest.mark.parametrize("damage", ["cut", "garbage", "flipped"])
def test_damaged_compressed_files_are_named(tmp_path, suffix, kind, damage):
    lines = [json.dumps({"text": os.urandom(20).hex()}) for _ in range(200)]
    path = write_lines(tmp_path / f"data.jsonl{suffix}", lines)
    content = path.read_bytes()
    content = {
        "cut": content[:-9],
        "garbage": b"not compressed",
        "flipped": content[:20] + b"\0" * 900 + content[920:],
    }[damage]
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"data\.jsonl\{suffix}: broken {kind} file"):
        list(list_document_names(scan_sources([str(path)])[0]))


def test_missing_and_repeated_sources(texts):
    with pytest.raises(UserError, match="none given"):
        scan_sources([])
    with pytest.raises(UserError, match="no-such: no such file or folder"):
        scan_sources(["no-such"])
    with pytest.raises(UserError, match=rf"^{texts}/a\.txt is given twice, by {texts}, {texts}/a\.txt$"):
        scan_sources([str(texts), str(texts / "a.txt")])
    with pytest.raises(UserError, match=f"^{texts} is given twice$"):
        scan_sources([str(texts), str(texts)])
    with pytest.raises(UserError, match="only the source `python`"):
        scan_sources([str(texts)], packages=True)


def test_the_standard_library(tmp_path):
    files = scan_sources(["python"])
    names = {file.name for file in files}
    assert {"python/os.py", "python/json/decoder.py"} <= names
    assert not [name for name in names if "/test/" in name or "/tests/" in name or "site-packages" in name]
    assert 5e6 < sum(file.size for file in files) < 40e6
    os_file = next(file for file in files if file.name == "python/os.py")
    assert decode_document(next(iter_raw_documents(os_file))) == (os_file.path).read_text(encoding="utf-8")
    everything = {file.name for file in scan_sources(["python"], packages=True)}
    assert names < everything
    assert "site-packages/pydantic/main.py" in everything


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"# coding: latin-1\ns = '\xe9'\n", "# coding: latin-1\ns = 'é'\n"),
        (b"s = '\xe9'", None),
        (b"# coding: no-such\n", None),
    ],
)
def test_python_files_declare_their_encoding(tmp_path, content, text):
    path = tmp_path / "x.py"
    path.write_bytes(content)
    (document,) = iter_raw_documents(SourceFile(path, "x.py", "python", len(content), 0))
    assert decode_document(document) == text


@given(
    st.lists(st.text(max_size=12), max_size=12),
    st.sampled_from([(0.9, 0.05, 0.05), (0.5, 0.0, 0.5), (0.0, 0.3, 0.7), (0.5, 0.5, 0.0), (0.0, 1.0, 0.0)]),
)
@settings(max_examples=100, deadline=None)
def test_a_lone_file_is_cut_at_line_ends(tmp_path_factory, lines, shares):
    path = tmp_path_factory.mktemp("cut") / "x.txt"
    path.write_bytes("\n".join(lines).encode())
    parts = split_text_file(SourceFile(path, "x.txt", "text", 0, 0), shares)
    assert b"".join(parts) == path.read_bytes()
    assert len(parts) == 3
    assert not any(part for part, share in zip(parts, shares, strict=True) if share == 0)
    joined = path.read_bytes()
    for end in (len(parts[0]), len(parts[0]) + len(parts[1])):
        assert end in (0, len(joined)) or joined[end - 1 : end] == b"\n"


@pytest.mark.parametrize("name", ["one.jsonl", "one.jsonl.gz"])
def test_a_line_beyond_bounds_names_its_file(tmp_path, monkeypatch, name):
    """A line beyond the limit names its file; a small file may decompress to a huge one."""
    monkeypatch.setattr(file_readers, "MAX_LINE_BYTES", 1 << 20)
    content = b'{"text": "short"}\n{"text": "' + b"a" * (3 << 20) + b'"}\n'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    documents = sources.iter_raw_documents(sources.describe_source_file(tmp_path / name))
    next(documents)
    with pytest.raises(UserError, match=rf"{name}:2: line is longer than 1,048,576 bytes"):
        next(documents)


@pytest.mark.parametrize("token", [-1, 70_000, 257])
def test_a_tokenizer_with_unexpected_tokens_is_rejected(tmp_path, monkeypatch, token):
    """A tokenizer that returns ids outside its vocabulary is rejected. A 16-bit type would store 70,000 as 4,464."""
    (tmp_path / "a.txt").write_text("text")
    documents = list(sources.iter_raw_documents(sources.describe_source_file(tmp_path / "a.txt")))
    monkeypatch.setattr(ByteTokenizer, "encode_batch", lambda self, texts: [[1, token]])
    with pytest.raises(UserError, match=f"produces token {token}, but its vocabulary has 257 tokens"):
        ChunkEncoder(ByteTokenizer(), np.uint16, "text")(Chunk(documents, [0], 4))


def test_a_document_beyond_memory_is_named(tmp_path, monkeypatch):
    (tmp_path / "large.txt").write_text("text")
    documents = list(sources.iter_raw_documents(sources.describe_source_file(tmp_path / "large.txt")))
    encoder = ChunkEncoder(ByteTokenizer(), np.uint16, "text")

    def fill(texts: object) -> None:
        raise MemoryError

    monkeypatch.setattr(ByteTokenizer, "encode_batch", lambda self, texts: fill(texts))
    with pytest.raises(RunError, match=r"large.txt: a document of 4 bytes does not fit in memory; split it"):
        encoder(Chunk(documents, [0], 4))
