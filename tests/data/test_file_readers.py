"""Documents from rows of Parquet and Arrow files, and limits, compared with the texts written."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from corpora import prepare

from megatron.data.corpus import file_readers
from megatron.data.corpus.sources import decode_document, iter_raw_documents, list_document_names, scan_sources
from megatron.data.corpus_metadata import read_corpus
from megatron.data.load_tokenizer import load_tokenizer
from megatron.utils.errors import UserError

pa = pytest.importorskip("pyarrow", reason="requirements-eval.txt is not installed")
pq = pytest.importorskip("pyarrow.parquet")

TEXTS = [f"document {i}: ü{'東京 ' * (i % 5)}\r\n" if i % 7 else "" for i in range(50)]
Writer = Callable[[Path, "pa.Table"], None]


def write_parquet(path: Path, table: "pa.Table") -> None:
    pq.write_table(table, path, row_group_size=8)


def write_file(path: Path, table: "pa.Table") -> None:
    with pa.ipc.new_file(path, table.schema) as out:
        out.write_table(table, max_chunksize=9)


def write_stream(path: Path, table: "pa.Table") -> None:
    with pa.ipc.new_stream(path, table.schema) as out:
        out.write_table(table, max_chunksize=9)


KINDS = [("a.parquet", write_parquet), ("a.arrow", write_file), ("b.arrow", write_stream)]


def table(**columns: object) -> "pa.Table":
    return pa.table({"text": pa.array(TEXTS), "id": pa.array(range(len(TEXTS))), **columns})


def decoded(path: Path, column: str = "text") -> list[str | None]:
    (file,) = scan_sources([str(path)])
    documents = list(iter_raw_documents(file, column))
    assert [document.name for document in documents] == list(list_document_names(file))
    assert sum(document.size for document in documents) == (path.stat().st_size if documents else 0)
    return [decode_document(document, column) for document in documents]


@pytest.mark.parametrize(("name", "write"), KINDS)
def test_every_row_is_a_document(tmp_path: Path, name: str, write: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    other = pa.array([f"\ufeff{i}" if i else None for i in range(50)]).dictionary_encode()
    write(tmp_path / name, table(other=other, long=pa.array(TEXTS, pa.large_string())))
    for rows in (1, 4, 1000):
        monkeypatch.setattr(file_readers, "ROWS_PER_BATCH", rows)
        assert decoded(tmp_path / name) == decoded(tmp_path / name, "long") == TEXTS
    assert decoded(tmp_path / name, "other") == ["", *(f"\ufeff{i}" for i in range(1, 50))]
    write(tmp_path / f"none-{name}", table().slice(0, 0))
    assert decoded(tmp_path / f"none-{name}") == []


@pytest.mark.parametrize(("name", "write"), KINDS)
def test_a_table_makes_the_corpus_of_its_texts(
    tmp_path: Path, name: str, write: Writer, reader: Callable[[Path], list[list[int]]]
) -> None:
    write(tmp_path / name, table())
    (tmp_path / "lines").mkdir()
    # Splits depend on names: equal names give equal splits.
    (tmp_path / "lines" / "x.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    lines = prepare([str(tmp_path / "lines" / "x.jsonl")], tmp_path / "of_lines", split=None)
    rows = prepare([str(tmp_path / name)], tmp_path / "of_rows", split=None, workers=2)
    assert reader(rows.get_dataset_prefix("all")) == reader(lines.get_dataset_prefix("all"))
    assert rows.splits == lines.splits
    assert prepare([str(tmp_path / name)], tmp_path / "of_rows", split=None).reused


def test_unreadable_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, write in KINDS:
        path = tmp_path / name
        write(path, table())
        for column, message in (
            ("texts", rf"{name}: no column 'texts'; did you mean text\? choose from text, id \(--column\)"),
            ("id", rf"{name}: column 'id' has type int64; it must be text"),
        ):
            with pytest.raises(UserError, match=message):
                decoded(path, column)
        binary = pa.array([b"fine"] * 20 + [b"a\xff"] + [b"fine"]).view(pa.string())
        write(path, pa.table({"text": binary}))
        with pytest.raises(UserError, match=rf"{name}: row 21: not UTF-8 at byte 1 \(invalid start byte\)"):
            decoded(path)
        skipped = prepare([str(path)], tmp_path / f"skipped-{name}", split=None, skip_bad=1)
        assert skipped.splits["all"].documents == 21
        whole = path.read_bytes()
        for damaged in (b"", whole[: len(whole) // 2], b"nothing of the kind"):
            path.write_bytes(damaged)
            with pytest.raises(UserError, match=rf"{name}: broken {path.suffix[1:]} file: ") as error:
                decoded(path)
            assert "\n" not in str(error.value)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"a\.parquet needs the package pyarrow, .*: pip install -r requirements-eval"):
        decoded(tmp_path / "a.parquet")


def test_limits_select_the_first_documents(tmp_path: Path, reader: Callable[[Path], list[list[int]]]) -> None:
    write_parquet(tmp_path / "a.parquet", table())
    source, out = [str(tmp_path / "a.parquet")], tmp_path / "out"
    whole = reader(prepare(source, tmp_path / "whole", split=None).get_dataset_prefix("all"))
    few = prepare(source, out, split=None, documents=20)
    assert reader(few.get_dataset_prefix("all")) == whole[: sum(bool(text) for text in TEXTS[:20])]
    with pytest.raises(UserError, match=r"contains a corpus made with other settings \(documents 20, not None"):
        prepare(source, out, split=None)
    assert prepare(source, out, split=None, documents=20).reused
    for tokens, workers in ((1, 1), (300, 1), (300, 2), (10**9, 1)):
        corpus = prepare(source, out, split=None, tokens=tokens, workers=workers, overwrite=True)
        sizes = [len(document) for document in whole]
        needed = next((n for n in range(len(sizes) + 1) if sum(sizes[:n]) >= tokens), len(sizes))
        assert reader(corpus.get_dataset_prefix("all")) == whole[:needed]
    # The fractions are those of the selected documents.
    divided = prepare(source, out, split=(0.5, 0.25, 0.25), documents=12, overwrite=True)
    assert [len(reader(divided.get_dataset_prefix(split))) for split in ("train", "valid", "test")] != [25, 13, 12]
    assert sum(size.documents for size in divided.splits.values()) == sum(bool(text) for text in TEXTS[:12])
    assert load_tokenizer(out).name == read_corpus(out).tokenizer
    (tmp_path / "lone.txt").write_text("a\nb\nc\n")
    for sources, options, message in (
        (source, {"documents": 0}, "documents is 0; it must be at least 1"),
        (source, {"tokens": 9, "tokenizer": "bpe", "vocab_size": 300}, "tokens: tokenizer bpe is trained on the docum"),
        ([str(tmp_path / "lone.txt")], {"documents": 2}, "a single document cannot be limited; it is cut into splits"),
    ):
        with pytest.raises(UserError, match=message):
            prepare(sources, tmp_path / "none", **options)
