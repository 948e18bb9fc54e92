import importlib
import io
import json
import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import pytest
import tokenizers as hf
from corpora import prepare
from full_disk import full_disk
from rich.console import Console

from megatron.cli.convert import _print_summary
from megatron.config.yaml_files import parse_scalar
from megatron.data.corpus import documents as documents_module
from megatron.data.corpus import prepare as prepare_module
from megatron.data.corpus import sources as sources_module
from megatron.data.corpus.recipe import read_corpus_recipe
from megatron.data.corpus.sources import scan_sources
from megatron.data.corpus_metadata import read_corpus
from megatron.data.load_tokenizer import load_tokenizer
from megatron.data.tokenizers import load_tokenizer_from_files
from megatron.options.data import CorpusOptions
from megatron.utils.errors import RunError, UserError


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def everything(corpus, reader):
    """Return the decoded documents of each split without end tokens."""
    tokenizer = load_tokenizer(corpus.folder)
    result = {}
    for split in corpus.splits:
        documents = reader(corpus.get_dataset_prefix(split))
        assert all(document[-1] == tokenizer.eod for document in documents)
        result[split] = [tokenizer.decode(document[:-1]) for document in documents]
    return result


def check_counts(corpus, texts, reader):
    for split, documents in texts.items():
        size = corpus.splits[split]
        assert size.documents == len(documents)
        assert size.bytes == sum(len(text.encode()) for text in documents)
        assert size.tokens == sum(map(len, reader(corpus.get_dataset_prefix(split))))


@pytest.fixture
def many(tmp_path):
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {i} " + "ab\n" * (i % 17)}) + "\n" for i in range(3000)))
    return path


def test_a_folder_of_texts_becomes_three_datasets(texts, tmp_path, reader, expected_texts):
    corpus = prepare([str(texts)], tmp_path / "out", split=(0.5, 0.25, 0.25))
    found = everything(corpus, reader)
    assert sorted(chain(*found.values())) == sorted(expected_texts)  # each once, without the empty one
    assert set(found) == {"train", "valid", "test"}
    check_counts(corpus, found, reader)
    assert (corpus.vocab_size, corpus.eod, corpus.tokenizer, corpus.reused) == (257, 256, "bytes", False)
    assert read_corpus(tmp_path / "out") == corpus
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts"]  # no temporary folder is left
    assert os.path.getsize(f"{corpus.get_dataset_prefix('train')}.bin") == 2 * corpus.splits["train"].tokens


def test_megatron_core_reads_written_datasets(texts, tmp_path, reader):
    from megatron.data.core_datasets import IndexedDataset

    corpus = prepare([str(texts)], tmp_path / "out", split=None)
    dataset = IndexedDataset(str(corpus.get_dataset_prefix("all")))
    assert corpus.get_dataset_prefix("all").name == "text_document"
    assert [document.tolist() for document in dataset] == reader(corpus.get_dataset_prefix("all"))
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_workers_and_chunks_change_nothing(many, tmp_path, tokenizer, monkeypatch, reader):
    size = 300 if tokenizer == "bpe" else None
    one = prepare([str(many)], tmp_path / "one", tokenizer=tokenizer, vocab_size=size, workers=1)
    monkeypatch.setattr("megatron.data.corpus.tokenize_worker.CHUNK_BYTES", 5000)
    two = prepare([str(many)], tmp_path / "two", tokenizer=tokenizer, vocab_size=size, workers=2)
    assert contents(one.folder) == contents(two.folder)
    assert [size.documents for size in one.splits.values()] == [2700, 150, 150]
    expected = [json.loads(line)["text"] for line in many.read_text().splitlines()]
    found = everything(two, reader)
    assert sorted(chain(*found.values())) == sorted(expected)
    positions = [expected.index(text) for text in found["valid"]]
    assert positions == sorted(positions)  # documents stay in order inside a split


def test_the_seed_and_the_names_decide_the_split(many, tmp_path, reader):
    first = everything(prepare([str(many)], tmp_path / "a"), reader)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(many, elsewhere)
    assert everything(prepare([str(elsewhere / "many.jsonl")], tmp_path / "b"), reader) == first
    assert everything(prepare([str(many)], tmp_path / "c", seed=7), reader) != first


def test_a_trained_tokenizer_sees_training_documents_only(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(
        "".join(json.dumps({"text": f"{word} " * 50}) + "\n" for word in ["alpha", "beta", "gamma", "delta"] * 5)
    )
    corpus = prepare([str(path)], tmp_path / "a", tokenizer="bpe", vocab_size=270, split=(1, 0, 0))
    vocabulary = json.loads((corpus.folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert corpus.vocab_size == len(vocabulary) == 270
    assert list(corpus.splits) == ["train"]
    prepare([str(path)], tmp_path / "b", tokenizer="bpe", vocab_size=270, split=(0.5, 0.25, 0.25))
    unseen = json.loads((tmp_path / "b" / "tokenizer.json").read_text())["model"]["vocab"]
    assert unseen != vocabulary
    small = prepare([str(path)], tmp_path / "c", tokenizer="bpe", vocab_size=5000, split=None)
    assert small.vocab_size < 5000
    assert small.notes == [f"the text yielded a vocabulary of {small.vocab_size:,} tokens; 5,000 were requested"]


def test_large_vocabularies_are_stored_as_int32(texts, tmp_path, reader):
    words = {f"w{i}": i for i in range(70_000)} | {"x": 70_000, "</s>": 70_001, "?": 70_002}
    path = tmp_path / "large.json"
    hf.Tokenizer(hf.models.WordLevel(words, unk_token="?")).save(str(path))
    corpus = prepare([str(texts / "deep")], tmp_path / "out", tokenizer="HFTokenizer", vocab_file=path, split=None)
    assert sorted(reader(corpus.get_dataset_prefix("all"))) == [[70_000, 70_001], [70_002, 70_001]]
    assert load_tokenizer(corpus.folder).vocab_size == corpus.vocab_size == 70_003
    path.unlink()  # the folder does not depend on its sources
    assert load_tokenizer(corpus.folder).encode("w17") == [17]


def test_long_documents_become_several_sequences(texts, tmp_path, monkeypatch, reader):
    whole = prepare([str(texts)], tmp_path / "a", split=None)
    monkeypatch.setattr("megatron.data.corpus.writer.MAX_SEQUENCE_TOKENS", 7)
    pieces = prepare([str(texts)], tmp_path / "b", split=None)
    assert reader(whole.get_dataset_prefix("all")) == reader(pieces.get_dataset_prefix("all"))  # same documents
    assert (tmp_path / "a/text_document.bin").read_bytes() == (tmp_path / "b/text_document.bin").read_bytes()
    assert os.path.getsize(tmp_path / "b/text_document.idx") > os.path.getsize(tmp_path / "a/text_document.idx")


def test_a_lone_text_file_is_cut(tmp_path, reader):
    path = tmp_path / "play.txt"
    path.write_text("".join(f"line {i}\n" for i in range(1000)))
    corpus = prepare([str(path)], tmp_path / "out")
    found = everything(corpus, reader)
    assert "".join(found["train"] + found["valid"] + found["test"]) == path.read_text()
    assert corpus.splits["train"].bytes == pytest.approx(0.9 * path.stat().st_size, abs=10)
    assert [size.documents for size in corpus.splits.values()] == [1, 1, 1]
    two = prepare([str(path)], tmp_path / "two", split=(0.8, 0, 0.2))
    assert list(two.splits) == ["train", "test"]


def test_bad_bytes_of_a_cut_file_are_placed_in_the_file(tmp_path):
    path = tmp_path / "late.txt"
    good = b"".join(b"line %d\n" % i for i in range(1000))
    path.write_bytes(good + b"bad \xff\n" + b"end\n")
    with pytest.raises(UserError) as error:
        prepare([str(path)], tmp_path / "out")
    offset = len(good) + 4
    problem = f"{path}:1001: not UTF-8: byte 0xff at offset {offset} (invalid start byte)"
    assert str(error.value) == f"{problem}; --skip-bad N skips up to N such documents"


def test_the_same_corpus_is_found_again(texts, tmp_path):
    arguments = {"sources": [str(texts)], "output": tmp_path / "out"}
    first = prepare(**arguments)
    before = contents(tmp_path / "out")
    stages = []
    again = prepare(**arguments, overwrite=True, progress=lambda stage, *_: stages.append(stage))
    assert again.reused
    assert not first.reused
    assert set(stages) == {"checking"}  # every file is verified against its checksum
    assert again.splits == first.splits
    for change, message in [
        ({"split": (0.5, 0.25, 0.25)}, r"split \[0.9, .*\], not \[0.5"),
        ({"seed": 5}, r"seed 1234, not 5"),
        ({"split": None}, r"split \[0.9, .*\], not None"),
        ({"tokenizer": "bpe", "vocab_size": 300}, r"tokenizer bytes, not bpe, 300 tokens"),
        ({"suffixes": [".png"]}, "made from the same sources with other files .*--suffixes"),
    ]:
        with pytest.raises(UserError, match=rf"out: contains a corpus .*{message}.*replace it with --overwrite"):
            prepare(**arguments, **change)
    (texts / "a.txt").write_text("changed")
    with pytest.raises(UserError, match=r"from the same sources .*files changed.*replace it with --overwrite"):
        prepare(**arguments)
    assert contents(tmp_path / "out") == before
    assert not prepare(**arguments, overwrite=True).reused
    assert contents(tmp_path / "out") != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts"]


def test_a_corpus_of_other_sources_is_named(texts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    corpus = prepare(["texts"], "out")
    before = contents(corpus.folder)
    advice = "choose another --output, or replace it with --overwrite"
    with pytest.raises(UserError) as error:
        prepare(["texts/a.txt"], "out")
    assert (
        str(error.value)
        == f"out: contains a corpus made from other sources (sources `texts`, not `texts/a.txt`); {advice}"
    )
    with pytest.raises(UserError, match=r"other sources with other settings \(sources `texts`, .*; seed 1234, not 5\)"):
        prepare(["texts/a.txt"], "out", seed=5)
    with pytest.raises(UserError, match=r"\(split \[0\.9, 0\.05, 0\.05\], not \[0\.7, 0\.2, 0\.1\]\)"):
        prepare(["texts"], "out", split=[0.7, 0.2, 0.1])
    assert prepare([f"{texts}/"], "out").reused  # same path in another notation
    (texts / "a.txt").write_text("changed")
    with pytest.raises(UserError, match="made from the same sources with other files"):
        prepare([f"{texts}/"], "out")
    assert contents(corpus.folder) == before


@pytest.mark.parametrize("recorded", ["today's", "an earlier version's"])
def test_the_included_text_is_the_same_after_another_installation(tmp_path, monkeypatch, recorded):
    text = Path(shutil.copy(sources_module.SHAKESPEARE, tmp_path))
    monkeypatch.setattr(sources_module, "SHAKESPEARE", text)
    assert not prepare(["shakespeare"], tmp_path / "out").reused
    if recorded != "today's":
        stored = json.loads((tmp_path / "out/corpus.json").read_text(encoding="utf-8"))
        stored["made_from"]["files"] = "0" * 64
        (tmp_path / "out/corpus.json").write_text(json.dumps(stored), encoding="utf-8")
    os.utime(text, (1, 1))
    assert prepare(["shakespeare"], tmp_path / "out").reused


def test_a_damaged_corpus_is_noticed_and_replaced_on_demand(texts, tmp_path):
    arguments = {"sources": [str(texts)], "output": tmp_path / "out"}
    prepare(**arguments)
    before = contents(tmp_path / "out")
    os.truncate(tmp_path / "out/train_text_document.bin", 11)
    with pytest.raises(UserError, match=r"damaged corpus .*train_text_document\.bin: size is 11 bytes.*--overwrite"):
        prepare(**arguments)
    prepare(**arguments, overwrite=True)
    assert contents(tmp_path / "out") == before
    (tmp_path / "out/corpus.json").write_text("{")
    with pytest.raises(RunError, match=r"corpus\.json: not a corpus description"):
        read_corpus(tmp_path / "out")
    prepare(**arguments, overwrite=True)
    assert contents(tmp_path / "out") == before


def test_a_folder_that_is_no_corpus_is_never_replaced(texts, tmp_path):
    with pytest.raises(UserError, match="texts: exists but is not a corpus folder"):
        prepare([str(texts / "a.txt")], texts, overwrite=True)
    assert (texts / "b.txt").exists()
    (tmp_path / "empty").mkdir()
    assert prepare([str(texts)], tmp_path / "empty").splits
    prepare([str(texts)], tmp_path / "out")
    (tmp_path / "out" / "notes.md").write_text("mine")
    with pytest.raises(UserError, match=r"out: contains files that do not belong to a corpus \(notes\.md\)"):
        prepare([str(texts)], tmp_path / "out", seed=2, overwrite=True)
    assert (tmp_path / "out" / "notes.md").read_text() == "mine"


def test_a_link_to_another_place_stays_a_link(texts, tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "scratch", target_is_directory=True)
    for seed in (1, 2):
        prepare([str(texts)], tmp_path / "out", seed=seed, overwrite=True)
        assert (tmp_path / "out").is_symlink()
        assert (tmp_path / "scratch" / "corpus.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": "byte"}, r"unknown value 'byte'; did you mean bytes\?.*bpe"),
        ({"tokenizer": "bpe"}, "vocab_size: tokenizer bpe needs a number of tokens"),
        ({"tokenizer": "bpe", "vocab_size": 20}, "vocab_size is 20; it must be at least 257"),
        (
            {"tokenizer": "bpe", "vocab_size": 300, "vocab_file": "x"},
            "vocab_file: x: tokenizer bpe is trained on the corpus",
        ),
        ({"vocab_size": 300}, "vocab_size: only tokenizer bpe accepts it"),
        ({"tokenizer": "HFTokenizer"}, r"needs its tokenizer\.json"),
        ({"workers": 0}, "workers is 0; it must be at least 1"),
        ({"split": (-1.0, 1, 1.0)}, "split: -1,1,1 is invalid"),
        ({"split": (1, 2)}, "split is .*; it must be a list of 3 fractions"),
        ({"split": (0.5, 0.5, 0.5)}, r"split: 0\.5,0\.5,0\.5 sums to 1\.5; fractions must sum to 1, or be whole"),
        ({"suffixes": [".bad"]}, r"x\.bad:1: not UTF-8"),
    ],
)
def test_invalid_choices_leave_no_files(texts, tmp_path, options, message):
    (texts / "x.bad").write_bytes(b"\xff\xff")
    with pytest.raises(UserError, match=message) as error:
        prepare([str(texts)], tmp_path / "out", **({"split": None} | options))
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


@pytest.mark.parametrize(
    ("sources", "options", "message"),
    [
        (["a.txt"], {"column": "foo"}, r"^column: foo: no source has JSON lines or table rows$"),
        (["python"], {"column": "foo"}, r"^column: foo: no source has JSON lines"),
        (["python"], {"suffixes": [".md"]}, r"^suffixes: \.md: no source is a folder or a file$"),
    ],
)
def test_options_that_no_source_reads_are_rejected(texts, tmp_path, monkeypatch, sources, options, message):
    monkeypatch.chdir(texts)
    with pytest.raises(UserError, match=message):
        prepare(sources, tmp_path / "out", **options)


def test_an_unused_seed_is_reported(texts):
    def list_notes(source, **options):
        notes = read_corpus_recipe(CorpusOptions(sources=[str(source)], **options)).list_notes()
        return [note for note in notes if note.startswith("seed ")]

    assert list_notes(texts, seed=5) == []
    assert list_notes(texts, seed=5, split=None) == ["seed 5 has no effect: there is one split"]
    (texts / "lone.txt").write_text("one\ntwo\nthree\nfour\n")
    lone = list_notes(texts / "lone.txt", seed=5, split=[0.5, 0.25, 0.25])
    assert lone == ["seed 5 has no effect: a single text file is cut into splits at line ends"]
    assert list_notes(texts, split=None) == []


def test_a_large_document_is_reported_only_if_it_is_read(texts):
    def list_notes(**options):
        notes = read_corpus_recipe(CorpusOptions(sources=[str(texts)], **options)).list_notes()
        return [note for note in notes if "is one document with" in note]

    (texts / "zzz.txt").write_text("a line\n" * 10_000)
    (note,) = list_notes()
    assert note.startswith(f"{texts / 'zzz.txt'} is one document with ")
    assert list_notes(documents=1) == list_notes(tokens=3) == []


def test_errors_in_workers_arrive_as_they_are(many, tmp_path):
    lines = many.read_text().splitlines()
    lines[2000] = '{"text": 5}'
    many.write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"many\.jsonl:2001: 'text' is a number; it must be a string; --skip-bad N"):
        prepare([str(many)], tmp_path / "out", workers=2)
    assert [path.name for path in tmp_path.glob("[!.]*")] == ["many.jsonl"]


@pytest.mark.parametrize("split", [None, (0.5, 0, 0.5)])
def test_a_text_of_white_space_is_no_text(tmp_path, split):
    (tmp_path / "blank.txt").write_text(" \n\n\t\n  \n")
    with pytest.raises(UserError, match=r"blank\.txt: no text found$"):
        prepare([str(tmp_path / "blank.txt")], tmp_path / "out", split=split)


def test_the_parent_of_a_missing_folder_is_rejected_before_anything_is_written(texts, tmp_path):
    for output in (tmp_path / "none" / ".." / "out", tmp_path / "none" / ".." / "deeper" / "out"):
        with pytest.raises(UserError, match=r"^--output is .*/\.\./.*, but .*/none does not exist; leave out"):
            prepare([str(texts)], output)
    assert not list(tmp_path.glob("*out*"))
    assert not (tmp_path / "deeper").exists()
    (tmp_path / "here").mkdir()
    assert prepare([str(texts)], tmp_path / "here" / ".." / "out").splits


def test_the_printed_keys_load_the_corpus_whatever_its_folder_is_called(texts, tmp_path):
    keys = {"train": "train_data_paths", "valid": "valid_data_paths", "test": "test_data_paths"}
    names = ("plain", "a b", "a, b", "x [1]", "it's #1: {q}", "new\nline", "$HOME", "~x", 'a"b', "日本", "a #b", "end ")
    for number, name in enumerate(names):
        for split in (None, (0.8, 0.1, 0.1)):
            output = io.StringIO()
            corpus = prepare([str(texts)], tmp_path / f"{number}{split is None}" / name, split=split)
            _print_summary(Console(file=output, width=80), corpus)
            words = shlex.split(output.getvalue().partition("train on it with ")[2])
            given = dict(word.split("=", 1) for word in words)
            if split is None:
                assert parse_scalar(given["data_path"], "") == str(corpus.get_dataset_prefix("all"))
            else:
                for part, key in keys.items():
                    assert parse_scalar(given[key], "") == [str(corpus.get_dataset_prefix(part))]


def test_fewer_tokens_than_requested_are_noted(many, tmp_path):
    whole = prepare([str(many)], tmp_path / "whole")
    num_tokens = sum(size.tokens for size in whole.splits.values())
    assert not prepare([str(many)], tmp_path / "enough", tokens=num_tokens).notes
    short = prepare([str(many)], tmp_path / "short", tokens=num_tokens + 1)
    assert short.notes == [f"the text yielded {num_tokens:,} tokens; {num_tokens + 1:,} were requested"]


def test_corpora_without_text_are_rejected(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for i in range(6):
        (folder / f"{i}.txt").write_text("")
    with pytest.raises(UserError, match="no text found"):
        prepare([str(folder)], tmp_path / "out")
    (folder / "0.txt").write_text("something")
    with pytest.raises(UserError, match=r"split: no text left for .*: only 1 document is not empty; --split none"):
        prepare([str(folder)], tmp_path / "out")
    (tmp_path / "empty.jsonl").write_text("")
    for tokenizer in ({}, {"tokenizer": "bpe", "vocab_size": 300}):
        with pytest.raises(UserError, match=r"empty\.jsonl: no text found$"):
            prepare([str(tmp_path / "empty.jsonl")], tmp_path / "out", **tokenizer)
    (tmp_path / "two.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    with pytest.raises(UserError, match="2 documents cannot be divided into 3 splits"):
        prepare([str(tmp_path / "two.jsonl")], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_nothing_behind(many, tmp_path):
    prepare([str(many)], tmp_path / "old", split=None)
    before = contents(tmp_path / "old")
    with full_disk(20_000):
        with pytest.raises(RunError, match="out: cannot be written: the disk is full; nothing was saved"):
            prepare([str(many)], tmp_path / "out")
        with pytest.raises(RunError, match=r"old: .*the disk is full; the existing corpus is unchanged"):
            prepare([str(many)], tmp_path / "old", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["many.jsonl", "old"]
    assert contents(tmp_path / "old") == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_killed_preparation_leaves_nothing_for_good(texts, tmp_path, overwrite):
    if overwrite:
        prepare([str(texts)], tmp_path / "out", seed=5)
    before = contents(tmp_path / "out") if overwrite else None
    arguments = {"sources": [str(texts)], "output": tmp_path / "out", "overwrite": overwrite}
    importlib.import_module("megatron.data.core_datasets")  # before the fork, because it takes seconds
    child = os.fork()
    if child == 0:
        prepare(**arguments, progress=lambda stage, *_: stage == "tokenizing" and os.kill(os.getpid(), signal.SIGKILL))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert any(path.name.endswith(".tmp") for path in tmp_path.iterdir())
    if before is not None:
        assert contents(tmp_path / "out") == before
        assert prepare([str(texts)], tmp_path / "out", seed=5).reused
    else:
        prepare(**arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts"]


def ended(process):
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"  # on some machines the init process does not reap orphans


def test_the_workers_of_a_killed_preparation_end(many, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.data.corpus.tokenize_worker.CHUNK_BYTES", 5000)

    def die(stage, *_):
        if stage == "tokenizing":
            workers = [str(process.pid) for process in multiprocessing.active_children()]
            (tmp_path / "workers").write_text(" ".join(workers))
            os.kill(os.getpid(), signal.SIGKILL)

    importlib.import_module("megatron.data.core_datasets")
    child = os.fork()
    if child == 0:
        prepare([str(many)], tmp_path / "out", workers=2, progress=die)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    workers = (tmp_path / "workers").read_text().split()
    assert len(workers) == 2
    deadline = time.monotonic() + 60
    while not all(map(ended, workers)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_output_that_cannot_be_made_is_named(many, tmp_path):
    with pytest.raises(UserError, match=r"^--output is .*out, .* is a file; name a folder$"):
        prepare([str(many)], many / "out")


def test_progress_counts_the_bytes_of_the_sources(many, tmp_path):
    seen: dict[str, list[tuple[int, int]]] = {}
    prepare(
        [str(many)],
        tmp_path / "out",
        tokenizer="bpe",
        vocab_size=260,
        progress=lambda stage, done, total: seen.setdefault(stage, []).append((done, total)),
    )
    assert list(seen) == ["listing files", "training the tokenizer", "importing PyTorch", "tokenizing"]
    assert seen.pop("importing PyTorch") == [(0, many.stat().st_size)]
    for states in seen.values():
        assert states == sorted(states)
        assert {total for _, total in states} == {many.stat().st_size}
        assert states[-1][0] == many.stat().st_size


def test_a_source_that_changes_meanwhile_is_noticed(many, tmp_path, monkeypatch):
    names = sources_module.list_document_names
    monkeypatch.setattr(documents_module, "list_document_names", lambda *how: list(names(*how))[:-1])
    with pytest.raises(RunError, match="a source changed while it was being read"):
        prepare([str(many)], tmp_path / "out")


def test_the_tokenizer_of_a_corpus_must_stay_as_it_is(many, tmp_path):
    corpus = prepare([str(many)], tmp_path / "out", tokenizer="bpe", vocab_size=260)
    assert load_tokenizer(corpus.folder).name == corpus.tokenizer
    path = corpus.folder / "tokenizer.json"
    path.write_text(path.read_text() + " ")
    with pytest.raises(RunError, match=r"tokenizer\.json changed since the corpus was made"):
        load_tokenizer(corpus.folder)


def test_file_names_need_not_be_unicode(tmp_path):
    folder = os.fsencode(tmp_path / "in")
    os.mkdir(folder)
    for name in (b"\xff.txt", b"b.txt", b"\xc3\xa4.txt"):
        with open(os.path.join(folder, name), "w") as file:
            file.write("text")
    corpus = prepare([str(tmp_path / "in")], tmp_path / "out")
    assert [size.documents for size in corpus.splits.values()] == [1, 1, 1]
    os.rename(folder, os.fsencode(tmp_path) + b"/\xfe")
    named = [os.fsdecode(os.fsencode(tmp_path) + b"/\xfe")]
    assert prepare(named, tmp_path / "again").sources == named


def test_preparing_needs_no_torch_until_it_writes():
    program = "import sys, megatron.data.corpus.prepare, megatron.data.datasets; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_file_that_pythons_library_names_twice_is_read_once(tmp_path, monkeypatch):
    """A file with two names is read once; Debian links one file of the standard library to another."""
    library = tmp_path / "library"
    library.mkdir()
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in (library / "a.py", library / "c.py", library / "e.py", packages / "p.py", tmp_path / "outside.py"):
        path.write_text(f"name = {path.name!r}\n" * 20)
    links = {"b.py": "c.py", "d.py": "../outside.py", "f.py": "../outside.py", "g.py": "nowhere.py"}
    for link, target in links.items():
        (library / link).symlink_to(target)
    (packages / "q.py").symlink_to(library / "a.py")
    folders = {"stdlib": str(library), "purelib": str(packages), "platlib": str(packages)}
    monkeypatch.setattr("sysconfig.get_paths", lambda: folders)
    files = scan_sources(["python"], packages=True)
    assert [file.name for file in files] == [
        *("python/a.py", "python/c.py", "python/d.py", "python/e.py", "site-packages/p.py"),
    ]


def test_python_is_prepared_reproducibly(tmp_path, reader):
    corpus = prepare(["python"], tmp_path / "python")
    tokenizer = load_tokenizer_from_files("bytes")
    again = prepare(["python"], tmp_path / "again", workers=2)
    assert contents(again.folder) == contents(corpus.folder)
    valid = [tokenizer.decode(document[:-1]) for document in reader(corpus.get_dataset_prefix("valid"))]
    assert sum("def " in text for text in valid) > len(valid) / 2
    assert sum(size.tokens for size in corpus.splits.values()) > 5_000_000
    assert corpus.splits["test"].tokens > 100_000


def prepare_during(monkeypatch, output, *arguments, **options):
    """Prepare `output` with other arguments while the next corpus is being written."""
    write = prepare_module._write_corpus

    def write_slowly(*own):
        monkeypatch.setattr(prepare_module, "_write_corpus", write)
        prepare(*arguments, output, **options)
        write(*own)

    monkeypatch.setattr(prepare_module, "_write_corpus", write_slowly)


def test_the_same_corpus_prepared_twice_at_once_is_used_by_both(texts, tmp_path, monkeypatch):
    prepare_during(monkeypatch, tmp_path / "out", [str(texts)])
    corpus = prepare([str(texts)], tmp_path / "out")
    assert corpus.reused
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts"]


@pytest.mark.parametrize("there", [False, True])
def test_two_corpora_prepared_concurrently_are_both_kept(there, texts, many, tmp_path, monkeypatch):
    output = tmp_path / "out"
    if there:
        prepare([str(texts)], output, seed=7)
    prepare_during(monkeypatch, output, [str(many)], overwrite=there)
    with pytest.raises(RunError, match=f"{output}: another command wrote it at the same time.* is in {output}-2$"):
        prepare([str(texts)], output, overwrite=there)
    assert read_corpus(output).sources == [str(many)]
    assert read_corpus(tmp_path / "out-2").sources == [str(texts)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["many.jsonl", "out", "out-2", "texts"]
