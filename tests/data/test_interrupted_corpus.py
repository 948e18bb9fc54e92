"""An interrupted preparation resumes and gives the same corpus, byte for byte."""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from corpora import prepare
from sigkill import die, killed

from megatron.data.corpus import hub_dataset, writer
from megatron.data.corpus.hub_dataset import HubDataset, UnfinishedError
from megatron.data.corpus.prepare import find_unfinished
from megatron.utils.errors import RunError, UserError

DOCUMENTS = [f"document {i} " + "ab\n" * (i % 17) if i % 11 else "" for i in range(400)]


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save progress after every chunk, with small chunks."""
    monkeypatch.setattr(writer, "SAVE_INTERVAL", 0.0)
    monkeypatch.setattr("megatron.data.corpus.tokenize_worker.CHUNK_DOCUMENTS", 25)
    monkeypatch.setattr(hub_dataset, "SHARD_BYTES", 500)


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "many.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in DOCUMENTS))
    return str(path)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Interrupting:
    """Progress that interrupts the work at the n-th report of a stage, and records all reports."""

    def __init__(self, stage: str = "", number: int = 0, how: Callable[[], object] | None = None) -> None:
        self.stage, self.number, self.how = stage, number, how
        self.seen: list[tuple[str, int]] = []

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.seen.append((stage, done))
        if self.how is not None and stage == self.stage and sum(s == stage for s, _ in self.seen) == self.number:
            self.how()


def stop() -> None:
    raise KeyboardInterrupt


CHOICES: list[dict[str, Any]] = [
    {},
    {"split": None, "documents": 350},
    {"tokens": 9000, "split": (0.5, 0.5, 0)},
    {"tokenizer": "bpe", "vocab_size": 300},
]


@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_interrupted_work_resumes(tmp_path: Path, source: str, choices: dict[str, Any]) -> None:
    whole = contents(prepare([source], tmp_path / "whole", **choices).folder)
    first = Interrupting("tokenizing", 4, stop)
    with pytest.raises(KeyboardInterrupt):
        prepare([source], tmp_path / "out", **choices, progress=first)
    (left,) = set(names(tmp_path)) - {"many.jsonl", "whole"}
    assert left.startswith(".out.")
    assert find_unfinished(tmp_path / "out")
    assert not find_unfinished(tmp_path / "whole")
    second = Interrupting("tokenizing", 3, die)
    killed(lambda: prepare([source], tmp_path / "out", **choices, progress=second))
    third = Interrupting()
    prepare([source], tmp_path / "out", **choices, progress=third)
    usual = Interrupting()
    prepare([source], tmp_path / "again", **choices, progress=usual)
    chunks = {
        one: sum(stage == "tokenizing" for stage, _ in each.seen) for one, each in enumerate((usual, first, third))
    }
    assert chunks[2] == chunks[0] - chunks[1] - 3 > 0
    assert not any(stage in ("training the tokenizer", "counting tokens") for stage, _ in third.seen)
    found = contents(tmp_path / "out")
    assert {name: found[name] for name in whole if name != "corpus.json"} == {
        name: content for name, content in whole.items() if name != "corpus.json"
    }
    assert json.loads(found["corpus.json"]) == json.loads(whole["corpus.json"])
    assert names(tmp_path) == ["again", "many.jsonl", "out", "whole"]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_invalid_line_stops_the_work_and_the_command_resumes(tmp_path: Path, workers: int) -> None:
    lines = [json.dumps({"text": text}) for text in DOCUMENTS]
    path = tmp_path / "bad.jsonl"
    good = [line if i not in (201, 350) else json.dumps({"text": ""}) for i, line in enumerate(lines)]
    path.write_text("\n".join(good))
    whole = contents(prepare([str(path)], tmp_path / "whole").folder)
    path.write_text("\n".join("{" if i in (201, 350) else line for i, line in enumerate(lines)))
    first = r"bad\.jsonl:202: not JSON: "
    with pytest.raises(UserError, match=first + r".*; --skip-bad N skips up to N .*; work so far is kept"):
        prepare([str(path)], tmp_path / "out", workers=workers)
    seen = Interrupting()
    with pytest.raises(
        UserError, match=rf"at least 2 documents .*{first}.*; .*bad\.jsonl:351: .*; raise --skip-bad; work"
    ):
        prepare([str(path)], tmp_path / "out", workers=workers, skip_bad=1, progress=seen)
    assert sum(stage == "tokenizing" for stage, _ in seen.seen) == 6  # the first 8 of 16 were kept
    corpus = prepare([str(path)], tmp_path / "out", workers=workers, skip_bad=2)
    found = contents(tmp_path / "out")
    assert all(found[name] == whole[name] for name in whole if name != "corpus.json")
    assert json.loads(found["corpus.json"])["bad_documents"] == 2
    assert corpus.notes[0].startswith(f"2 documents skipped because they cannot be decoded: {path}:202: not JSON")
    assert not list(tmp_path.glob(".out.*"))


@pytest.mark.parametrize("choices", [{"tokens": 100_000}, {"tokenizer": "bpe", "vocab_size": 300}], ids=str)
def test_invalid_documents_are_excluded_from_counts_and_training(tmp_path: Path, choices: dict[str, Any]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join([*(json.dumps({"text": text}) for text in DOCUMENTS[:80]), "[]", '{"txt": 1}', "{"]))
    with pytest.raises(UserError, match=r"at least 3 documents cannot be decoded"):
        prepare([str(path)], tmp_path / "out", skip_bad=2, **choices)
    prepare([str(path)], tmp_path / "out", skip_bad=3, **choices)
    assert json.loads((tmp_path / "out" / "corpus.json").read_text())["bad_documents"] == 3


def test_other_work_and_damaged_files_restart(tmp_path: Path, source: str) -> None:
    whole = contents(prepare([source], tmp_path / "whole").folder)

    def interrupted() -> Path:
        with pytest.raises(KeyboardInterrupt):
            prepare([source], tmp_path / "out", progress=Interrupting("tokenizing", 4, stop))
        (left,) = tmp_path.glob(".out.*")
        return left

    for damage in ("new/train_text_document.bin", "lengths/train", "progress.json"):
        path = interrupted() / damage
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        seen = Interrupting()
        prepare([source], tmp_path / "out", progress=seen)
        assert sum(stage == "tokenizing" for stage, _ in seen.seen) == 16
        assert contents(tmp_path / "out") == whole
        (tmp_path / "out").rename(tmp_path / f"done-{path.name}")
    interrupted()
    prepare([source], tmp_path / "out", seed=5)
    assert not list(tmp_path.glob(".out.*"))
    # A folder in use by another process is left untouched.
    (tmp_path / "out").rename(tmp_path / "other")
    left = interrupted()
    descriptor = os.open(left, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    prepare([source], tmp_path / "out")
    assert contents(tmp_path / "out") == whole
    assert left.exists()
    os.close(descriptor)


def test_nothing_stays_of_work_that_had_not_begun(tmp_path: Path, source: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        prepare([source], tmp_path / "out", progress=Interrupting("listing files", 1, stop))
    assert names(tmp_path) == ["many.jsonl"]


class Stream:
    """Dataset that counts fetched rows, and becomes unreachable after a number of rows."""

    def __init__(self, rows: list[Any], column: str = "text", reach: int = 10**9) -> None:
        self.rows, self.column, self.reach = rows, column, reach
        self.fetched: list[int] = []
        self.at = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.at < len(self.rows):
            if len(self.fetched) == self.reach:
                raise ConnectionError("the network is\ngone")
            self.fetched.append(self.at)
            self.at += 1
            yield {self.column: self.rows[self.at - 1]}

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    made = Stream(list(DOCUMENTS))
    monkeypatch.setattr(HubDataset, "_open_stream", lambda self: made)
    return made


def test_a_dataset_is_downloaded_once_and_resumes(
    tmp_path: Path, source: str, stream: Stream, reader: Callable[[Path], list[list[int]]]
) -> None:
    pytest.importorskip("datasets", reason="requirements-eval.txt is not installed")
    whole = reader(prepare([source], tmp_path / "whole", split=None).get_dataset_prefix("all"))
    stream.reach = 120
    with pytest.raises(
        UnfinishedError, match=r"hf:some/name:en: stopped after 120 documents: ConnectionError: the netw"
    ):
        prepare(["hf:some/name:en"], tmp_path / "out")
    stream.reach = 10**9
    corpus = prepare(["hf:some/name:en"], tmp_path / "out")
    assert stream.fetched == list(range(400))
    kept = [
        tuple(document) for split in ("train", "valid", "test") for document in reader(corpus.get_dataset_prefix(split))
    ]
    assert sorted(kept) == sorted(tuple(document) for document in whole)
    assert len(reader(corpus.get_dataset_prefix("valid"))) == pytest.approx(20, abs=4)  # of 400, without the empty ones
    assert names(tmp_path) == ["many.jsonl", "out", "whole"]
    assert prepare(["hf:some/name:en"], tmp_path / "out").reused
    with pytest.raises(UserError, match=r"contains a corpus made from .*sources"):
        prepare(["hf:some/name:en"], tmp_path / "out", hf_split="validation")


@pytest.mark.parametrize("limit", [{"documents": 90}, {"tokens": 1500}])
def test_a_limit_fetches_no_more(
    tmp_path: Path, source: str, stream: Stream, limit: dict[str, int], reader: Callable[[Path], list[list[int]]]
) -> None:
    pytest.importorskip("datasets", reason="requirements-eval.txt is not installed")
    expected = reader(prepare([source], tmp_path / "whole", split=None, **limit).get_dataset_prefix("all"))
    found = prepare(["hf:some/name"], tmp_path / "out", split=None, workers=1, **limit)
    assert reader(found.get_dataset_prefix("all")) == expected
    assert len(stream.fetched) == len(set(stream.fetched)) < 300


def test_rows_that_are_no_text_are_named(tmp_path: Path, stream: Stream) -> None:
    pytest.importorskip("datasets", reason="requirements-eval.txt is not installed")
    stream.rows[30] = 5
    with pytest.raises(UserError, match=r"hf:a, row 31: column 'text' has type int; it must be text \(--column\)"):
        prepare(["hf:a"], tmp_path / "out")
    with pytest.raises(UserError, match=r"hf:a, row 1: no column 'body'; choose from text \(--column\)"):
        prepare(["hf:a"], tmp_path / "out", column="body")
    assert names(tmp_path) == []


def test_a_local_folder_through_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: Callable[[Path], list[list[int]]]
) -> None:
    datasets = pytest.importorskip("datasets", reason="requirements-eval.txt is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "mine"
    folder.mkdir()
    for split, texts in (("train", DOCUMENTS), ("test", ["held\u2028out", "é"])):
        (folder / f"{split}.jsonl").write_text("\n".join(json.dumps({"body": text, "n": 1}) for text in texts))
    out = tmp_path / "out"
    test = prepare([f"hf:{folder}"], out, column="body", hf_split="test", split=None)
    assert reader(test.get_dataset_prefix("all")) == [[*text.encode(), 256] for text in ("held\u2028out", "é")]
    # After a kill during reading, texts read before are not read again.
    train = {"column": "body", "split": None, "overwrite": True, "workers": 1}
    killed(lambda: prepare([f"hf:{folder}"], out, **train, progress=Interrupting("tokenizing", 4, die)))
    found = prepare([f"hf:{folder}"], out, **train)
    assert reader(found.get_dataset_prefix("all")) == [[*text.encode(), 256] for text in DOCUMENTS if text]
    for source, split, message in (
        (f"hf:{folder}", "valid", r"--hf-split valid\): Bad split: valid. Available splits: \['train', 'test'\]"),
        (f"hf:{folder}:en", "train", "BuilderConfig 'en' not found"),
        (f"hf:{tmp_path / 'absent'}", "train", "Couldn't find any data file"),
    ):
        with pytest.raises((UserError, RunError), match=message) as error:
            prepare([source], tmp_path / "none", column="body", hf_split=split)
        assert "\n" not in str(error.value)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^hf:a needs the package datasets, .*: pip install -r requirements-eval\.txt"):
        prepare(["hf:a"], tmp_path / "none")


def test_dropping_all_text_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"x": 1}\n' * 3)
    with pytest.raises(
        UserError, match=r"no text found; 3 documents skipped because they cannot be decoded: .*:1: no key"
    ):
        prepare([str(path)], tmp_path / "out", skip_bad=3, split=None)
    path.write_text('{"text": "a"}\n{"x": 1}\n{"text": ""}\n')
    with pytest.raises(UserError, match=r"only 1 document is not empty; .*; 1 document skipped because it cannot"):
        prepare([str(path)], tmp_path / "out", skip_bad=3)
