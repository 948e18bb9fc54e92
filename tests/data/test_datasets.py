"""Datasets written by the tests' own writer, with token ids that identify their positions."""

import hashlib
import json
import multiprocessing
import os
import pickle
import re
import tempfile
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import prepare, validate
from full_disk import full_disk
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.gpt_dataset import GPTDataset

from megatron.data.blend import compute_sequence_range
from megatron.data.datasets import SampleOrder, build_datasets, load_token_stream
from megatron.data.indexed_dataset import find_token_range
from megatron.data.load_tokenizer import read_vocabulary
from megatron.distributed.launcher_environment import RankInfo
from megatron.distributed.mesh import ParallelSizes
from megatron.distributed.process_groups import ProcessGroups, init_distributed
from megatron.options.data import DataOptions
from megatron.utils.errors import RunError, UserError

ALONE = ProcessGroups()


def numbered(lengths, first=0):
    """Return documents whose tokens are all different: first, first + 1, and so on."""
    edges = np.cumsum([first, *lengths])
    return [list(range(a, b)) for a, b in pairwise(edges)]


LENGTHS = [17, 1, 40, 3, 29, 64, 5, 12, 33, 8] * 3  # 636 tokens


@pytest.fixture
def words(tmp_path):
    """Write a tokenizer.json with 2,000 words; word 1,999 ends documents."""
    import tokenizers as hf

    path = tmp_path / "words.json"
    ids = {f"w{i}": i for i in range(1999)} | {"</s>": 1999}
    hf.Tokenizer(hf.models.WordLevel(ids, unk_token="w0")).save(str(path))
    return {"tokenizer_type": "HFTokenizer", "vocab_file": str(path)}


def build(data, *, seq_length=8, train=0, valid=0, test=0, seed=3, cache=None, extend=None, processes=ALONE):
    order = SampleOrder(seed=seed, train_samples=train, valid_samples=valid, test_samples=test, extend_train_to=extend)
    return build_datasets(data, order, seq_length=seq_length, cache=cache, groups=processes)


def rows(samples):
    return [samples[i]["tokens"].tolist() for i in range(len(samples))]


def test_samples_are_windows_of_shuffled_documents_and_an_epoch_repeats_nothing(dataset, words):
    data = DataOptions(train_data_paths=[dataset("d", numbered(LENGTHS))], **words)
    samples = build(data, train=79).train  # (636 - 1) // 8: one epoch
    assert len(samples) == 79
    follows = {}
    for i in range(79):
        sample = samples[i]
        assert {name: (value.shape, value.dtype) for name, value in sample.items()} == {
            "tokens": ((8,), torch.int64),
            "labels": ((8,), torch.int64),
            "loss_mask": ((8,), torch.float32),
        }
        assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
        assert sample["loss_mask"].tolist() == [1.0] * 8
        follows |= dict(zip(sample["tokens"].tolist(), sample["labels"].tolist(), strict=True))
    assert len(follows) == 79 * 8  # no token is an input twice
    inside = [(a, b) for document in numbered(LENGTHS) for a, b in pairwise(document)]
    assert all(follows.get(a, b) == b for a, b in inside)  # documents are read from left to right
    begins = {document[0] for document in numbered(LENGTHS)}
    ends = {document[-1] for document in numbered(LENGTHS)}
    assert all(b in begins for a, b in follows.items() if a in ends)  # and follow each other as a whole
    with pytest.raises(IndexError):
        samples[79]


def test_the_order_follows_from_the_seed(dataset, words):
    data = DataOptions(train_data_paths=[dataset("d", numbered(LENGTHS))], **words)
    first = rows(build(data, train=50).train)
    assert rows(build(data, train=50).train) == first
    assert rows(build(data, train=50, seed=4).train) != first


@pytest.mark.parametrize("blend", [False, True])
@pytest.mark.parametrize("began_with", [5, 79, 100, 200])
def test_extending_keeps_the_order_of_old_and_new_samples(dataset, words, blend, began_with):
    paths = [dataset("d", numbered(LENGTHS))]
    if blend:
        paths.append(dataset("e", numbered([100, 200], first=1000)))
    data = DataOptions(train_data_paths=paths, train_data_weights=[0.7, 0.3] if blend else [], **words)
    long = rows(build(data, train=began_with, extend=700).train)
    for total in (None, began_with + 1, 81, 250, 499):
        samples = build(data, train=began_with, extend=total).train
        assert len(samples) == max(began_with, total or 0)
        assert rows(samples) == long[: len(samples)]
    assert rows(build(data, train=700).train)[:200] != long[:200]  # requesting more alone does not change the order


def test_an_extended_run_sees_everything_equally_often(dataset, words):
    data = DataOptions(train_data_paths=[dataset("d", numbered(LENGTHS))], **words)
    samples = rows(build(data, train=10, extend=79 * 4).train)
    assert len({tuple(row) for row in samples[:79]}) == 79  # the current epoch is finished first
    seen = np.bincount(np.ravel(samples), minlength=636)
    assert seen.min() >= 3  # each of the four epochs omits less than one sample
    assert seen.max() == 4


def test_blends_follow_their_weights(dataset, words):
    paths = [dataset("d", numbered(LENGTHS)), dataset("e", numbered([50, 70], first=1000))]
    for weights, share in ([[3.0, 1.0], 0.75], [[], 0.5]):
        data = DataOptions(train_data_paths=paths, train_data_weights=weights, **words)
        origin = np.array([row[0] < 1000 for row in rows(build(data, train=400).train)])
        assert origin.mean() == pytest.approx(share, abs=0.01)
        assert origin[:40].mean() == pytest.approx(share, abs=0.06)  # and well mixed


def test_splits_share_no_document_and_agree_with_the_stream(dataset, words):
    data = DataOptions(data_path=dataset("d", numbered([20] * 30)), split="8,1,1", **words)
    built = build(data, train=100, valid=7, test=7)
    seen = {}
    for split in ("train", "valid", "test"):
        stream = load_token_stream(data, split)
        first, last = compute_sequence_range("8,1,1", split, 30)
        assert stream.tolist() == list(range(20 * first, 20 * last))
        samples = getattr(built, split)
        seen[split] = {token for i in range(len(samples)) for token in samples[i]["tokens"].tolist()}
        if split != "train":
            scored = [s["labels"][s["loss_mask"] > 0].tolist() for s in (samples[i] for i in range(len(samples)))]
            seen[split] = set(chain(*scored))
            assert len(seen[split]) == sum(map(len, scored)) >= 7 * 8 - 5  # only 3 of the last window's 59 targets
        assert seen[split] <= set(stream.tolist())
        assert len(seen[split]) >= min(51, 0.7 * len(stream))
    assert [len(load_token_stream(data, split)) for split in seen] == [480, 60, 60]
    only_train = DataOptions(data_path=data.data_path, split="1", **words)
    assert build(only_train, train=5, valid=5).valid is None


@given(st.lists(st.sampled_from([0, 1, 3, 30, 969, 0.05, 0.9]), min_size=1, max_size=3), st.integers(1, 5000))
@settings(max_examples=100, deadline=None)
def test_shares_are_rounded_as_megatron_core_does(numbers, sequences):
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    if sum(numbers) == 0:
        return
    text = ",".join(map(str, numbers))
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(text))
    for i, split in enumerate(("train", "valid", "test")):
        expected = matrix[i] and tuple(round(edge * float(sequences)) for edge in matrix[i])
        assert compute_sequence_range(text, split, sequences) == expected


def test_streams_of_several_datasets_follow_each_other(dataset, words):
    paths = [dataset("d", numbered([3, 4])), dataset("e", numbered([5], first=100), dtype="uint16")]
    data = DataOptions(test_data_paths=paths, **words)
    assert load_token_stream(data, "test").tolist() == [*range(7), *range(100, 105)]
    with pytest.raises(UserError, match="no valid data: valid_data_paths is not given"):
        load_token_stream(data, "valid")
    one = DataOptions(data_path=paths[0], split="1,1,0", **words)
    with pytest.raises(UserError, match="no test data: data_path's split is '1,1,0'"):
        load_token_stream(one, "test")


def test_the_token_after_a_document_can_be_left_unscored(dataset, words):
    eod = 1999
    path = dataset("d", [[*document, eod] for document in numbered(LENGTHS)])
    for masked in (False, True):
        samples = build(DataOptions(train_data_paths=[path], eod_mask_loss=masked, **words), train=60).train
        for i in range(60):
            unscored = samples[i]["tokens"] == eod
            assert torch.equal(samples[i]["loss_mask"], 1 - (unscored & masked).float())
            own = samples.chains[0].datasets[0]
            if i < len(own):
                theirs = GPTDataset.__getitem__(own, i)
                assert all(torch.equal(value, theirs[name]) for name, value in own[i].items())


def test_writing_into_a_sample_changes_no_other(dataset, words):
    samples = build(DataOptions(train_data_paths=[dataset("d", numbered(LENGTHS))], **words), train=9).train
    samples[0]["loss_mask"].zero_()
    assert samples[0]["loss_mask"].tolist() == samples[1]["loss_mask"].tolist() == [1.0] * 8


def test_vocabulary_comes_from_the_corpus_or_from_the_keys(texts, dataset, words):
    folder = texts.parent
    corpus = prepare([str(texts)], folder / "bytes", split=None)
    prefix = str(corpus.get_dataset_prefix("all"))
    found = read_vocabulary(DataOptions(data_path=prefix))
    assert (found.size, found.name, found.eod) == (257, "bytes", 256)
    assert read_vocabulary(DataOptions(data_path=prefix + ".bin", tokenizer_type="bytes")) == found
    other = prepare([str(texts)], folder / "bpe", split=None, tokenizer="bpe", vocab_size=270)
    learned = str(other.get_dataset_prefix("all"))
    assert read_vocabulary(DataOptions(data_path=learned)).name == other.tokenizer
    assert read_vocabulary(DataOptions(data_path=learned, tokenizer_type="HFTokenizer")).size == 270
    given_file = {"tokenizer_type": "HFTokenizer", "vocab_file": str(folder / "bpe/tokenizer.json")}
    assert read_vocabulary(DataOptions(data_path=learned, **given_file)).name == other.tokenizer
    foreign = dataset("foreign", numbered([30]))
    assert read_vocabulary(DataOptions(train_data_paths=[foreign], **words)).eod == 1999
    text = str(texts.parent / "my text.txt")
    Path(text).write_text("a text")
    for options, message in [
        ({"train_data_paths": [prefix, learned]}, r"bpe/text_document: made by tokenizer HFTok.*, but .* by bytes"),
        ({"train_data_paths": [prefix], "valid_data_paths": [learned]}, "made by tokenizer"),
        ({"data_path": foreign}, r"tokenizer_type: the data have no corpus\.json"),
        (
            {"data_path": prefix, **words},
            "tokenizer_type: HFTokenizer-.* does not match the data: .* was made by bytes",
        ),
        ({"data_path": learned, "tokenizer_type": "bytes"}, "tokenizer_type: bytes does not match the data"),
        ({"data_path": learned, **words}, "does not match the data"),
        ({"data_path": prefix, "vocab_file": "x"}, "vocab_file is given without tokenizer_type"),
        ({}, "data_path: no data configured"),
        ({"data_path": prefix, "test_data_paths": [prefix]}, "test_data_paths and data_path exclude each other"),
        ({"train_data_paths": [text]}, rf"{text} is not a dataset .* `\./deepy\.py prepare '{text}' --output FOLDER`"),
        (
            {"data_path": "no/x"},
            r"no dataset no/x: .* are missing in the current folder, /.*, where relative",
        ),
        ({"data_path": prefix[:-3]}, r"no dataset .*text_docum: .* are missing; datasets there: .*bytes/text_document"),
    ]:
        with pytest.raises(UserError, match=message) as error:
            read_vocabulary(validate(DataOptions(**options)))
        assert "\n" not in str(error.value)


def test_data_that_cannot_be_used_are_rejected(dataset, words, tmp_path):
    good, short = dataset("good", numbered(LENGTHS)), dataset("short", numbered([5, 3]))
    large, empty = dataset("large", [[1, 2, 3, 2000] * 9]), dataset("empty", [[], []])
    os.remove(dataset("half", [[1]]) + ".idx")
    cut = dataset("cut", numbered(LENGTHS))
    os.truncate(cut + ".bin", 99)
    for options, message in [
        ({"train_data_paths": [short]}, "short has 8 tokens; one sample of seq_length 8 needs 9"),
        (
            {"train_data_paths": [large]},
            r"large has token 2000, but tokenizer HFTok.* has only 2000 tokens: the tokenizer",
        ),
        ({"train_data_paths": [empty]}, "train_data_paths: .*empty has no tokens"),
        ({"train_data_paths": [str(tmp_path / "half")]}, r"train_data_paths: .*half\.idx is missing"),
        (
            {"train_data_paths": [good, short], "train_data_weights": [1.0]},
            "train_data_weights has 1 value for 2 paths in train_data_paths",
        ),
        ({"train_data_paths": [good], "train_data_weights": [0.0]}, "each must be greater than 0"),
        ({"data_path": good, "train_data_weights": [1.0]}, "train_data_weights has 1 value for 0 paths"),
        ({"data_path": good, "split": "1,-1"}, "split is '1,-1'; it must be up to three fractions"),
        ({"data_path": good, "split": "a"}, "split is 'a'; it must be up to three fractions"),
        (
            {"data_path": good, "split": "0.001,1,1"},
            r"the train split of .*good has no tokens \(30 documents in total\); split=8,1,1 .*, split=1,0,0",
        ),
    ]:
        with pytest.raises(UserError, match=message) as error:
            build(validate(DataOptions(**options, **words)), train=4)
        assert "\n" not in str(error.value)
    for split in ("8,1,1", "1,0,0"):  # the advice above
        assert build(validate(DataOptions(data_path=good, split=split, **words)), train=4)
    with pytest.raises(RunError, match=r"cut\.bin: truncated: 99 bytes"):
        build(DataOptions(train_data_paths=[cut], **words), train=4)
    with pytest.raises(UserError, match="seed: 4294967296"):
        build(DataOptions(train_data_paths=[good], **words), train=4, seed=1 << 32)


@pytest.mark.parametrize("token", [2000, -1, -2])
def test_a_token_outside_the_vocabulary_is_caught_when_it_is_read(dataset, words, monkeypatch, token):
    monkeypatch.setattr(
        "megatron.data.indexed_dataset.IndexedTokens.find_token_range", lambda self, max_tokens=0: (0, 0)
    )  # as if it were not checked
    samples = build(DataOptions(train_data_paths=[dataset("d", [[5] * 9 + [token] * 21])], **words), train=3).train
    with pytest.raises(RunError, match=f"d: sample [012] has token {token}; the vocabulary has 2000"):
        rows(samples)


@pytest.mark.parametrize("dtype", ["int32", "int16", "int64"])
@pytest.mark.parametrize("token", [-1, -2, 2000])
@pytest.mark.parametrize("cached", [True, False])
def test_tokens_outside_the_vocabulary_are_rejected_before_training(
    dataset, words, tmp_path, monkeypatch, token, dtype, cached
):
    monkeypatch.setattr("megatron.data.indexed_dataset.IndexedTokens.find_token_range", _skip_sampling)
    data = DataOptions(train_data_paths=[dataset("d", [[5] * 300, [1, token, 1]], dtype)], **words)
    with pytest.raises(UserError, match=rf"^train_data_paths: .*d has token {token}, but") as error:
        build(data, train=3, cache=tmp_path / "cache" if cached else None)
    assert ("stored as int16, where ids above 32,767 become negative" in str(error.value)) == (
        dtype == "int16" and token < 0
    )


def _skip_sampling(self, max_tokens=0):
    """Simulate a file so large that the sampled blocks miss the token."""
    return find_token_range(self.tokens) if max_tokens is None else (0, 0)


@pytest.mark.parametrize("token", [-1, -2, 2000])
def test_a_stream_to_evaluate_on_has_no_token_outside_the_vocabulary(dataset, words, monkeypatch, token):
    data = DataOptions(test_data_paths=[dataset("d", [[5] * 300, [1, token, 1]])], **words)
    for _ in range(2):
        with pytest.raises(UserError, match=rf"^test_data_paths: .*d has token {token}, but"):
            load_token_stream(data, "test")
        monkeypatch.setattr("megatron.data.indexed_dataset.IndexedTokens.find_token_range", _skip_sampling)


def test_samples_share_no_mask(dataset, words):
    samples = build(DataOptions(train_data_paths=[dataset("d", numbered(LENGTHS))], **words), train=3).train
    samples[0]["loss_mask"].zero_()
    assert samples[1]["loss_mask"].all()
    assert samples[0]["loss_mask"].all()
    samples.chains[0].datasets[0][0]["loss_mask"].zero_()  # as if megatron-core modified it
    assert samples[1]["loss_mask"].all()


def test_the_index_is_cached_and_rebuilt_for_other_data(dataset, words, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    path = dataset("d", numbered(LENGTHS))
    data = DataOptions(train_data_paths=[path], **words)
    in_memory = rows(build(data, train=60).train)
    assert rows(build(data, train=60, cache=cache).train) == in_memory
    (folder,) = cache.iterdir()
    times = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    monkeypatch.chdir(tmp_path)
    again = build(DataOptions(train_data_paths=["./d"], **words), train=60, cache=str(cache)).train
    assert rows(again) == in_memory
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == times
    dataset("d", numbered([50] * 20))
    other = build(data, train=60, cache=cache).train
    assert max(max(row) for row in rows(other)) > 636
    assert len(list(cache.iterdir())) == 2


def test_a_cache_that_cannot_be_written_is_named(dataset, words, tmp_path):
    data = DataOptions(train_data_paths=[dataset("d", numbered(LENGTHS))], **words)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"file/train-\w+: cannot write the sample index: "):
        build(data, train=60, cache=tmp_path / "file")


def test_an_index_beyond_memory_is_rejected(dataset, words, monkeypatch):
    data = DataOptions(
        train_data_paths=[dataset("d", numbered(LENGTHS))], valid_data_paths=[dataset("e", numbered(LENGTHS))], **words
    )
    monkeypatch.setattr("megatron.data.datasets.get_machine_memory", lambda: 16 << 30)
    with pytest.raises(
        UserError, match=r"^train_iters: 4,000,000,000 training samples need an index of 45 GiB"
    ) as error:
        build(data, train=4_000_000_000, valid=10)
    assert error.value.key == "train_iters"


@pytest.mark.parametrize("cached", [True, False])
def test_a_full_disk_is_named_when_an_index_is_written(dataset, words, tmp_path, cached):
    data = DataOptions(train_data_paths=[dataset("d", numbered(LENGTHS))], **words)
    cache = tmp_path / "cache" if cached else None
    with full_disk(30_000):
        place = rf"{cache}/train-\w+" if cached else re.escape(tempfile.gettempdir())
        with pytest.raises(RunError, match=rf"^{place}: cannot write the sample index: (the disk is full|File too)"):
            build(data, train=20_000, cache=cache)


def edited(path, change):
    array = np.load(path).copy()
    change(array)
    np.save(path, array)


def recorded(folder, change, name):
    """Apply a change and update the manifest, like a deliberate manipulation."""
    edited(folder / f"{name}.npy", change)
    manifest = json.loads((folder / "index.json").read_text())
    content = (folder / f"{name}.npy").read_bytes()
    manifest[name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "index.json").write_text(json.dumps(manifest))


class Trap:
    """Class that creates a file when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def set_trap(folder, sprung):
    """Replace every array by a pickle that runs code. numpy treats a file without its own magic as a pickle."""
    for path in folder.glob("*.npy"):
        path.write_bytes(pickle.dumps(Trap(sprung)))


def set_trap_inside(folder, sprung):
    """Store such pickles in numpy's own format, as an array of objects."""
    for path in folder.glob("*.npy"):
        np.save(path, np.array([Trap(sprung)] * 4, dtype=object), allow_pickle=True)


@pytest.mark.parametrize("trap", [set_trap, set_trap_inside])
def test_loading_a_pickle_runs_its_code(tmp_path, trap):
    (tmp_path / "x.npy").touch()
    trap(tmp_path, tmp_path / "sprung")
    np.load(tmp_path / "x.npy", allow_pickle=True)
    assert (tmp_path / "sprung").exists()


DAMAGES = {
    "pickles": lambda folder: set_trap(folder, folder.parent / "sprung"),
    "arrays of pickles": lambda folder: set_trap_inside(folder, folder.parent / "sprung"),
    "cut": lambda folder: os.truncate(folder / "shuffle_index.npy", 150),
    "empty": lambda folder: os.truncate(folder / "sample_index.npy", 0),
    "missing": lambda folder: (folder / "document_index.npy").unlink(),
    "no manifest": lambda folder: (folder / "index.json").unlink(),
    "bad manifest": lambda folder: (folder / "index.json").write_text("[" * 100_000),
    "old layout": lambda folder: [
        path.rename(folder / f"0a-GPTDataset-train-{path.name}") for path in folder.iterdir()
    ],
    "flipped": lambda folder: edited(folder / "shuffle_index.npy", lambda array: array.__setitem__(0, array[1])),
    "too short": lambda folder: recorded(folder, lambda array: array.resize(20, refcheck=False), "shuffle_index"),
    "wrong shape": lambda folder: recorded(folder, lambda array: array.resize((80, 3), refcheck=False), "sample_index"),
    "beyond": lambda folder: recorded(folder, lambda array: array.__setitem__(3, 10**6), "shuffle_index"),
    "negative": lambda folder: recorded(folder, lambda array: array.__setitem__(3, -1), "document_index"),
    "past a document": lambda folder: recorded(folder, lambda array: array.__setitem__((3, 1), 70), "sample_index"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_rebuilt_without_executing_it(dataset, words, tmp_path, damage):
    data = DataOptions(train_data_paths=[dataset("d", numbered(LENGTHS))], **words)
    cache = tmp_path / "cache"
    first = build(data, train=60, cache=cache)
    assert first.notes == ()
    expected = rows(first.train)  # mapped files reflect the change
    (folder,) = cache.iterdir()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    DAMAGES[damage](folder)
    again = build(data, train=60, cache=cache)
    assert not (cache / "sprung").exists()
    (note,) = again.notes
    assert note.startswith(f"{folder}: the sample index was damaged (")
    assert "\n" not in note
    assert rows(again.train) == expected
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert build(data, train=60, cache=cache).notes == ()
    assert list(cache.iterdir()) == [folder]


def _two_processes(rank: int, folder: str, options: dict) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    processes = init_distributed(RankInfo(rank, 2), ParallelSizes(data=2), device="cpu", backend="gloo")
    problems, notes = [], []
    for cache in (f"{folder}/cache", f"{folder}/trapped", f"{folder}/file"):
        try:
            built = build(DataOptions(**options), train=30, valid=5, extend=100, cache=cache, processes=processes)
            found = json.dumps([rows(built.train), rows(built.valid)])
            Path(f"{folder}/rows-{Path(cache).name}{rank}").write_text(found)
            notes += built.notes
        except RunError as error:
            problems.append(str(error))
    Path(f"{folder}/problems{rank}").write_text(json.dumps(problems))
    Path(f"{folder}/notes{rank}").write_text(json.dumps(notes))
    torch.distributed.destroy_process_group()


def test_two_processes_read_the_same_and_fail_together(dataset, words, tmp_path):
    paths = [dataset("d", numbered(LENGTHS)), dataset("e", numbered([50, 70], first=1000))]
    options = {"train_data_paths": paths, "valid_data_paths": paths[:1], **words}
    (tmp_path / "file").write_text("")
    alone = build(DataOptions(**options), train=30, valid=5, extend=100, cache=tmp_path / "trapped")
    expected = json.dumps([rows(alone.train), rows(alone.valid)])
    for folder in (tmp_path / "trapped").iterdir():
        set_trap(folder, tmp_path / "sprung")
    # Forked from a process that has imported slow modules and, unlike this one, has no process group.
    multiprocessing.set_forkserver_preload(["megatron.data.gpt_dataset"])
    torch.multiprocessing.start_processes(_two_processes, (str(tmp_path), options), nprocs=2, start_method="forkserver")
    for cache in ("cache", "trapped"):
        assert (tmp_path / f"rows-{cache}0").read_text() == (tmp_path / f"rows-{cache}1").read_text() == expected
        assert not list((tmp_path / cache).glob(".*"))
    assert not (tmp_path / "sprung").exists()
    damaged = json.loads((tmp_path / "notes0").read_text())
    assert len(damaged) == len(list((tmp_path / "trapped").iterdir()))
    assert json.loads((tmp_path / "notes1").read_text()) == []
    problems = (tmp_path / "problems0").read_text()
    assert problems == (tmp_path / "problems1").read_text()
    assert ": cannot write the sample index" in problems
