"""corpus.json is validated, and the files beside it are validated against corpus.json."""

import json
import os
import shutil

import pytest
from corpora import prepare

from megatron.data import corpus_metadata as metadata_module
from megatron.data.corpus_metadata import CORPUS_FILE, read_corpus, read_corpus_metadata
from megatron.data.datasets import SampleOrder, build_datasets, load_token_stream
from megatron.data.load_tokenizer import load_tokenizer
from megatron.distributed.process_groups import ProcessGroups
from megatron.options.data import DataOptions
from megatron.utils.errors import RunError, UserError


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Corpora of bytes and of a BPE, prepared once."""
    folder = tmp_path_factory.mktemp("corpora")
    (folder / "text.txt").write_text("".join(f"line {i}\n" for i in range(400)))
    prepare([str(folder / "text.txt")], folder / "bytes", split=(0.8, 0.1, 0.1))
    prepare([str(folder / "text.txt")], folder / "bpe", split=(0.8, 0.1, 0.1), tokenizer="bpe", vocab_size=270)
    return folder


@pytest.fixture(params=["bytes", "bpe"])
def corpus(request, original, tmp_path):
    """Copy of a corpus that the test may damage."""
    return shutil.copytree(original / request.param, tmp_path / "corpus")


@pytest.fixture
def bpe(original, tmp_path):
    return shutil.copytree(original / "bpe", tmp_path / "corpus")


def edit(folder, place, value):
    """Set an entry such as `tokenizer.eod` of corpus.json, or remove it with DELETE."""
    described = json.loads((folder / CORPUS_FILE).read_text())
    inner, (*path, last) = described, place.split("/")
    for name in path:
        inner = inner[name]
    if value is DELETE:
        del inner[last]
    else:
        inner[last] = value
    (folder / CORPUS_FILE).write_text(json.dumps(described))


DELETE = object()


def data(folder):
    return DataOptions(
        train_data_paths=[str(folder / "train_text_document")], test_data_paths=[str(folder / "test_text_document")]
    )


def train_on(folder, cache=None):
    order = SampleOrder(seed=1, train_samples=20)
    return build_datasets(data(folder), order, seq_length=8, cache=cache, groups=ProcessGroups()).train


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("tokenizer/vocab_size", "many", r"tokenizer\.vocab_size is 'many'; it must be an integer"),
        ("tokenizer/vocab_size", "270", r"tokenizer\.vocab_size is '270'; it must be an integer"),
        ("tokenizer/vocab_size", 270.5, r"tokenizer\.vocab_size is 270\.5; it must be an integer"),
        ("tokenizer/vocab_size", True, r"tokenizer\.vocab_size is True; it must be an integer"),
        ("tokenizer/vocab_size", None, r"tokenizer\.vocab_size is null; it must be an integer"),
        ("tokenizer/vocab_size", 10**12, r"tokenizer\.vocab_size is 1000000000000; it must be at most "),
        ("tokenizer/vocab_size", 10**400, r"tokenizer\.vocab_size is 1000000000.*…; "),
        ("tokenizer/vocab_size", 0, r"tokenizer\.vocab_size is 0; it must be at least 1"),
        ("tokenizer/vocab_size", -5, r"tokenizer\.vocab_size is -5; "),
        ("tokenizer/vocab_size", DELETE, r"tokenizer\.vocab_size is missing"),
        ("tokenizer/vocab_size", 1000, r"tokenizer\.vocab_size is 1000, but the tokenizer's files give 2"),
        ("tokenizer/type", "HFTokeniser", r"tokenizer\.type is 'HFTokeniser'; it must be 'bytes', 'HFTokenizer', "),
        ("tokenizer/type", 3, r"tokenizer\.type is 3; it must be 'bytes'"),
        ("tokenizer/eod", -1, r"tokenizer\.eod is -1; "),
        ("tokenizer/eod", 300, r"tokenizer: eod is 300; it must be less than vocab_size 2"),
        ("tokenizer/eod", "x", r"tokenizer\.eod is 'x'; "),
        ("tokenizer/eod", 3, r"tokenizer\.eod is 3, but the tokenizer's files give "),
        ("tokenizer/eod", DELETE, r"tokenizer\.eod is missing"),
        ("tokenizer/files", ["../../etc/passwd"], r"tokenizer: files are \['\.\./\.\./etc/passwd'\]; for "),
        ("tokenizer/files", {}, r"tokenizer\.files is \{\}; it must be a list"),
        ("tokenizer/checksum", "abc", r"tokenizer\.checksum is 'abc'; it must match pattern"),
        ("tokenizer/name", 5, r"tokenizer\.name is 5; it must be a string"),
        ("tokenizer/name", "other", r"tokenizer\.name is other, but the tokenizer's files give "),
        ("tokenizer", "bytes", r"tokenizer is 'bytes'; "),
        ("tokenizer", DELETE, r"tokenizer is missing"),
        ("splits", {}, r"splits is \{\}; "),
        ("splits", ["train"], r"splits is \['train'\]; "),
        (
            "splits/training",
            {},
            r"splits\.training\.\[key\] is 'training'; it must be 'train', 'valid', 'test' or 'all'",
        ),
        ("splits/train", {"documents": 1}, r"splits\.train\.tokens is missing"),
        ("splits/train/tokens", -1, r"splits\.train\.tokens is -1; "),
        ("made_from", None, r"made_from is null; "),
        ("sources", [1], r"sources: it must be a list of strings"),
        ("files", [], r"files is \[\]; "),
        ("files/train_text_document.idx", DELETE, r"train_text_document\.idx is not listed in files"),
        ("files/train_text_document.idx/size", "1", r"files\.train_text_document\.idx\.size is '1'; "),
        ("files/train_text_document.idx/sha256", "0", r"files\.train_text_document\.idx\.sha256 is '0'; "),
    ],
)
def test_invalid_metadata_is_rejected(corpus, place, value, message):
    edit(corpus, place, value)
    with pytest.raises(RunError, match=rf"corpus\.json: .*{message}") as error:
        train_on(corpus)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b"\0" * 50],
    ids=["empty", "cut", "list", "number", "null", "not text", "deep", "digits", "zeros"],
)
def test_invalid_descriptions_are_rejected_in_one_line(bpe, content):
    (bpe / CORPUS_FILE).write_bytes(content)
    with pytest.raises(RunError, match=r"corpus\.json: not a corpus description \(.+\); prepare the corpus") as error:
        read_corpus(bpe)
    assert "\n" not in str(error.value)


def test_a_description_of_gigabytes_is_not_read(bpe, monkeypatch):
    monkeypatch.setattr(metadata_module, "MAX_JSON_BYTES", 100)
    with pytest.raises(RunError, match="file is larger than 100 bytes"):
        read_corpus_metadata(bpe)


def test_every_flipped_length_is_noticed(bpe):
    """Damaged lengths are detected even if the index is consistent, as when two documents change their lengths
    together.
    """
    path = bpe / "train_text_document.idx"
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(RunError, match=r"^[^;,]*train_text_document\.idx: changed since") as error:
            load_token_stream(DataOptions(test_data_paths=[str(path)]), "test")
        assert "\n" not in str(error.value)


def test_an_index_of_other_documents_of_the_same_size_is_noticed(original, tmp_path):
    """An index of other documents with the same size is consistent; only the checksum detects it."""
    folder = shutil.copytree(original / "bytes", tmp_path / "corpus")
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "abcd"}\n{"text": "abcdefgh"}\n')
    corpus = prepare([str(lines)], tmp_path / "two", split=None)
    lines.write_text('{"text": "abcdefgh"}\n{"text": "abcd"}\n')
    other = prepare([str(lines)], tmp_path / "three", split=None)
    shutil.copyfile(f"{other.get_dataset_prefix('all')}.idx", f"{corpus.get_dataset_prefix('all')}.idx")
    with pytest.raises(RunError, match=r"two/text_document\.idx: changed since the corpus was made"):
        load_token_stream(DataOptions(data_path=str(corpus.get_dataset_prefix("all")), split="0,0,1"), "test")
    shutil.copyfile(folder / "test_text_document.bin", folder / "train_text_document.bin")
    with pytest.raises(RunError, match=r"train_text_document\.bin: size is \d+ bytes, but was"):
        train_on(folder)


def flip(path, place=4):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("cached", [False, True])
def test_flipped_tokens_are_noticed_before_they_are_used(corpus, tmp_path, cached):
    cache = tmp_path / "cache" if cached else None
    rows = [sample["tokens"].tolist() for sample in train_on(corpus, cache)]
    flip(corpus / "train_text_document.bin")
    with pytest.raises(RunError, match=r"train_text_document\.bin: changed since .* checksum"):
        train_on(corpus, cache)
    flip(corpus / "test_text_document.bin")
    with pytest.raises(RunError, match=r"test_text_document\.bin: changed since"):
        load_token_stream(data(corpus), "test")
    flip(corpus / "train_text_document.bin")
    assert [sample["tokens"].tolist() for sample in train_on(corpus, cache)] == rows


def test_a_content_is_read_once(bpe, tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(metadata_module, "_compute_sha256", lambda path: read.append(path.name) or "0" * 64)
    folder = bpe
    for name in os.listdir(folder):
        if name != CORPUS_FILE:
            edit(folder, f"files/{name}/sha256", "0" * 64)
    for _ in range(3):
        train_on(folder)
    assert sorted(read) == ["train_text_document.bin", "train_text_document.idx"]
    monkeypatch.setattr("megatron.data.indexed_dataset.MAX_CHECKSUM_BYTES", 100)  # left to `prepare`
    monkeypatch.setattr(
        "megatron.data.corpus_metadata._compute_cached_sha256", lambda path, *_: read.append(path.name) or "0" * 64
    )
    train_on(folder)
    assert set(read[2:]) == {"train_text_document.idx"}


@pytest.mark.parametrize(
    "name", ["train_text_document.bin", "valid_text_document.bin", "test_text_document.idx", "tokenizer.json"]
)
def test_prepare_looks_at_every_file_before_it_finds_a_corpus_again(original, tmp_path, name):
    arguments = {"split": (0.8, 0.1, 0.1), "tokenizer": "bpe", "vocab_size": 270}
    sources = [str(original / "text.txt")]
    folder = shutil.copytree(original / "bpe", tmp_path / "corpus")
    assert prepare(sources, folder, **arguments).reused
    flip(folder / name, place=-1 if name.endswith("idx") else 40)
    with pytest.raises(UserError, match=rf"corpus: damaged corpus \(.*{name}.*\); rebuild it with --overwrite"):
        prepare(sources, folder, **arguments)
    assert not prepare(sources, folder, **arguments, overwrite=True).reused
    assert (folder / name).read_bytes() == (original / "bpe" / name).read_bytes()


def test_older_corpora_without_checksums_still_load(corpus):
    edit(corpus, "files", DELETE)
    edit(corpus, "tokenizer/a_later_fact", 1)
    assert read_corpus_metadata(corpus).files is None
    assert len(train_on(corpus)) == 20
    assert load_tokenizer(corpus).vocab_size == read_corpus(corpus).vocab_size
