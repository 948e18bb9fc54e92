"""Datasets saved by Hugging Face's library, read without it."""

import json
import sys
from pathlib import Path

import pytest
from corpora import prepare

from megatron.data.corpus.sources import decode_document, iter_raw_documents, scan_sources
from megatron.utils.errors import UserError

datasets = pytest.importorskip("datasets", reason="requirements-eval.txt is not installed")

TEXTS = [f"text {number} of the dataset, {'long ' * (number % 7)}" for number in range(40)]


def read(*sources: Path | str, hf_split: str | None = None) -> list[str | None]:
    files = scan_sources([str(source) for source in sources], hf_split=hf_split)
    return [decode_document(document) for file in files for document in iter_raw_documents(file)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dataset alone in two files, a dataset in splits, and the library's cache of a dataset, each with expected
    contents.
    """
    folder = tmp_path_factory.mktemp("saved")
    datasets.disable_progress_bars()
    all_texts = datasets.Dataset.from_dict({"text": TEXTS, "id": list(range(len(TEXTS)))})
    all_texts.save_to_disk(folder / "alone", num_shards=2)
    datasets.DatasetDict(train=all_texts.shuffle(seed=1), test=all_texts.select([3, 1])).save_to_disk(folder / "splits")
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    files = {"train": str(folder / "texts.jsonl"), "test-a": str(folder / "texts.jsonl")}
    cached = datasets.load_dataset("json", data_files={"train": files["train"]}, cache_dir=str(folder / "cache"))
    for dataset in (datasets.load_from_disk(str(folder / "alone")), cached["train"]):
        dataset.map(lambda row: {"text": "of a cache"})
    return folder


def test_rows_match_the_library(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = datasets.load_from_disk(str(saved / "splits"))
    monkeypatch.setitem(sys.modules, "datasets", None)  # the library is not needed any more
    assert len(list((saved / "alone").glob("*.arrow"))) == 3
    assert read(saved / "alone") == read(f"hf:{saved / 'alone'}") == TEXTS
    assert read(saved / "splits") == list(expected["train"]["text"])
    assert read(saved / "splits", hf_split="test") == [TEXTS[3], TEXTS[1]]
    assert read(saved / "splits/test") == [TEXTS[3], TEXTS[1]]
    (cached,) = (path.parent for path in (saved / "cache").rglob("dataset_info.json"))
    assert len(list(cached.glob("*.arrow"))) == 2
    assert read(cached) == TEXTS
    assert read(saved) == [*TEXTS, *TEXTS, *TEXTS, *expected["train"]["text"]]  # texts.jsonl, and everything below it


def test_they_become_a_corpus(saved: Path, tmp_path: Path) -> None:
    corpus = prepare([str(saved / "splits")], tmp_path / "corpus", split=None)
    assert corpus.splits["all"].documents == len(TEXTS)
    assert corpus.splits["all"].bytes == sum(map(len, TEXTS))
    assert prepare([str(saved / "splits")], tmp_path / "corpus", split=None).reused
    with pytest.raises(UserError, match="contains a corpus made from the same sources with other files"):
        prepare([str(saved / "splits")], tmp_path / "corpus", split=None, hf_split="test")


def test_missing_files_are_named(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets.Dataset.from_dict({"text": TEXTS}, split="test").save_to_disk(tmp_path / "test")
    (cached,) = (path.parent for path in (saved / "cache").rglob("dataset_info.json"))
    for source, split, message in [
        (saved / "splits", "valid", r"splits: no split 'valid'; .*train, test.* \(--hf-split\)"),
        (cached, "test", "no split 'test'"),
        (tmp_path / "test", "train", "is the split test of a dataset, not train"),
        (saved / "texts.jsonl", "train", "hf_split: train: no source is a Hugging Face dataset"),
    ]:
        with pytest.raises(UserError, match=message):
            read(source, hf_split=split)
    state = tmp_path / "test/state.json"
    written = json.loads(state.read_text())
    for change, message in [
        ({"_indices_data_files": [{"filename": "i.arrow"}]}, r"selected by an index \(datasets before 2.0"),
        ({"_data_files": [{"filename": "gone.arrow"}]}, "gone.arrow: not found but listed in state.json"),
        ({"_data_files": ["gone.arrow"]}, "state.json: _data_files does not list files"),
    ]:
        state.write_text(json.dumps(written | change))
        with pytest.raises(UserError, match=message):
            read(tmp_path / "test")
    state.write_text("[]")
    with pytest.raises(UserError, match=r"state\.json: not written by Hugging Face datasets: _data_files is missing"):
        read(tmp_path / "test")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs the package pyarrow, which is not installed: pip install -r"):
        read(saved / "alone")


@pytest.mark.parametrize(
    ("source", "instead"),
    [
        ("s3://bucket/a.jsonl", "copy it to a local disk first and prepare the copy"),
        ("hf://datasets/allenai/c4", "for a dataset on the hub, use hf:allenai/c4) and prepare the copy"),
    ],
)
def test_object_stores_are_rejected_with_the_reason(source: str, instead: str) -> None:
    with pytest.raises(UserError, match="remote sources are not supported: a source is read several times") as error:
        scan_sources([source])
    assert str(error.value).startswith(source)
    assert str(error.value).endswith(instead)
