"""A run's copy of its tokenizer: complete, verified when read, with a fallback if missing."""

import json
import shutil
from pathlib import Path

import pytest
from corpora import prepare
from tokenizer_files import SAMPLE, open_tokenizers, write_tokenizers

from megatron.data.load_tokenizer import load_run_tokenizer, load_tokenizer, save_tokenizer
from megatron.data.tokenizers import Tokenizer, load_tokenizer_from_files
from megatron.options.data import DataOptions
from megatron.utils.errors import RunError, UserError


@pytest.fixture(scope="module")
def all_tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return open_tokenizers(write_tokenizers(tmp_path_factory.mktemp("tokenizers")))


@pytest.mark.parametrize("kind", ["bytes", "HFTokenizer", "GPT2BPETokenizer", "SPMTokenizer"])
def test_a_copy_is_the_tokenizer_wherever_the_run_goes(
    tmp_path: Path, all_tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    original = all_tokenizers[kind]
    folder = save_tokenizer(original, tmp_path / "run")
    assert {path.name for path in folder.iterdir()} == {"description.json", *original.files}
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    copy = load_run_tokenizer(moved, DataOptions(), original.name)
    assert (copy.metadata, copy.encode(SAMPLE[0])) == (original.metadata, original.encode(SAMPLE[0]))
    assert all(path.is_relative_to(moved) for path in copy.files.values())
    # Saving it again changes nothing, and the copy itself can be saved.
    before = (moved / "tokenizer" / "description.json").stat().st_mtime_ns
    save_tokenizer(copy, moved)
    assert (moved / "tokenizer" / "description.json").stat().st_mtime_ns == before


def test_a_changed_tokenizer_file_is_named_and_restored_by_the_run(
    tmp_path: Path, all_tokenizers: dict[str, Tokenizer]
) -> None:
    folder = save_tokenizer(all_tokenizers["HFTokenizer"], tmp_path)
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text + "\n")
    with pytest.raises(RunError, match=r"tokenizer: tokenizer.json changed since it was written; restore it or delete"):
        load_tokenizer(folder)
    save_tokenizer(all_tokenizers["HFTokenizer"], tmp_path)
    assert (folder / "tokenizer.json").read_text() == text
    facts = json.loads((folder / "description.json").read_text())
    for damaged in ({**facts, "eod": 1}, {**facts, "vocab_size": -1}, []):
        (folder / "description.json").write_text(json.dumps(damaged))
        with pytest.raises(RunError, match=r"description\.json: ") as error:
            load_tokenizer(folder)
        assert "\n" not in str(error.value)
    save_tokenizer(all_tokenizers["bytes"], tmp_path)  # the run restarted with another tokenizer
    assert {path.name for path in folder.iterdir()} == {"description.json"}
    assert load_tokenizer(folder).name == "bytes"


@pytest.mark.parametrize("files", [["notes.md"], ["tokenizer.json"], ["description.json", "special_tokens_map.json"]])
def test_a_folder_that_is_something_else_stays(
    tmp_path: Path, all_tokenizers: dict[str, Tokenizer], files: list[str]
) -> None:
    (tmp_path / "tokenizer").mkdir()
    for name in files:
        (tmp_path / "tokenizer" / name).write_text("mine")
    with pytest.raises(UserError, match=r"tokenizer: not a copy of the run's tokenizer; move it away"):
        save_tokenizer(all_tokenizers["bytes"], tmp_path)
    assert [path.read_text() for path in (tmp_path / "tokenizer").iterdir()] == ["mine"] * len(files)


def test_runs_without_a_tokenizer_use_that_of_their_data(tmp_path: Path, all_tokenizers: dict[str, Tokenizer]) -> None:
    (tmp_path / "text.txt").write_text("some text\n" * 40)
    prepare([str(tmp_path / "text.txt")], tmp_path / "corpus", split=None)
    data = DataOptions(train_data_paths=[str(tmp_path / "corpus" / "text_document")])
    assert load_run_tokenizer(tmp_path, data, "bytes").name == "bytes"
    with pytest.raises(UserError, match="was trained with tokenizer HFTokenizer-1, but its data now have bytes"):
        load_run_tokenizer(tmp_path, data, "HFTokenizer-1")
    # A copy of another tokenizer belongs to a later run in this folder.
    save_tokenizer(all_tokenizers["HFTokenizer"], tmp_path)
    assert load_run_tokenizer(tmp_path, data, "bytes").name == "bytes"
    assert load_run_tokenizer(tmp_path, data, None).type == "HFTokenizer"
    shutil.rmtree(tmp_path / "tokenizer")
    shutil.rmtree(tmp_path / "corpus")
    assert load_run_tokenizer(tmp_path, data, "bytes").name == "bytes"  # which needs no file
    with pytest.raises(
        UserError, match=r"has no copy of its tokenizer, and none could be loaded from its data: train_data"
    ):
        load_run_tokenizer(tmp_path, data, "HFTokenizer-1")
    named = load_tokenizer_from_files("GPT2BPETokenizer", *all_tokenizers["GPT2BPETokenizer"].files.values())
    files = dict(zip(("vocab_file", "merge_file"), map(str, named.files.values()), strict=True))
    assert (
        load_run_tokenizer(None, data.replace(tokenizer_type=named.type, **files), named.name).metadata
        == named.metadata
    )
