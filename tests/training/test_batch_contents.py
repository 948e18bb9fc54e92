"""`./deepy.py show-batch`: the documents of a step equal the batches that training read."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny_runs import losses, records, tiny_config, train_with_processes

from megatron.checkpoint import layout
from megatron.cli.show import describe_attempt, parse_steps, show_batch
from megatron.config.schema import Config
from megatron.data.indexed_dataset import open_indexed
from megatron.data.torch_data import build_dataloader
from megatron.distributed.mesh import Mesh, ParallelSizes
from megatron.training.batch_contents import BatchHistory
from megatron.training.engine import Engine
from megatron.training.train import train
from megatron.utils.errors import RunError, UserError, escape_control_characters

Micro = list[list[int]]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[list[Micro]]:
    """Token ids of the micro-batches of every step that this process trained, in order, as training read them."""
    steps: list[list[Micro]] = []
    usual = Engine.forward_backward

    def forward_backward(self: Engine, micro_batches: list[Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        steps.append([batch["tokens"].tolist() for batch in micro_batches])
        return usual(self, micro_batches, *args, **kwargs)

    monkeypatch.setattr(Engine, "forward_backward", forward_backward)
    return steps


def run_training(config: Config) -> None:
    train(config, Console(file=io.StringIO(), width=300))


def find_batches(run: Path, step: int, rank: int = 0) -> list[list[Micro]]:
    """Return the token ids that the stored state gives for each attempt at a step, and check their documents."""
    history, found = BatchHistory(run), []
    for attempt in history.find_attempts(step):
        rows = describe_attempt(history, attempt, rank, 10_000)["rows"]
        micro_batches: list[Micro] = [[] for _ in range(rows[-1]["micro_batch"] + 1)]
        for row in rows:
            micro_batches[row["micro_batch"]].append(row["token_ids"] if "task" in row else read_documents(row))
        found.append(micro_batches)
    return found


def read_documents(row: dict[str, Any]) -> list[int]:
    """Read the tokens of a row from the files of its datasets, and compare them with its text."""
    tokens: list[int] = []
    for part in row["documents"]:
        dataset, first = open_indexed(part["corpus"]), part["first_token"]
        members = slice(*dataset.documents[part["document"] : part["document"] + 2])
        document = dataset.read_stream(members.start, members.stop)
        assert part["document_tokens"] == len(document)
        assert part["column"] == len(tokens)
        own = document[first : first + part["tokens"]].tolist()
        assert part["text"].split() == [str(token) if token < 60 else "</s>" for token in own]
        tokens += own
    assert row["tokens"] == len(tokens)
    return tokens


def blend(corpus: Path) -> dict[str, Any]:
    paths = [str(corpus / f"{split}_text_document") for split in ("train", "test")]
    return {"train_data_paths": paths, "train_data_weights": [0.7, 0.3]}


CASES: dict[str, dict[str, Any]] = {
    "one dataset": {},
    "fractions of one dataset": {"data_path": "CORPUS", "train_data_paths": [], "valid_data_paths": []},
    "a blend in micro-batches": {"blend": True, "train_micro_batch_size_per_gpu": 2, "train_batch_size": 6},
    "masked documents over two epochs": {"attention_mask": "document", "train_batch_size": 48},
    "stages of other lengths, data and batches": {
        "blend": True,
        "pos_emb": "rotary",
        "stages": [{"until": 3, "seq_length": 8}, {"until": 5, "seq_length": 16}, {"train_data_weights": [1, 3]}],
        "train_batch_size": 16,
    },
    "a task of several lengths": {
        "task": "reverse_string", "task_length": 8, "train_data_paths": [], "valid_data_paths": [],
        "make_vocab_size_divisible_by": 8, "no_weight_tying": True,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("keys", CASES.values(), ids=CASES)
def test_batches_equal_those_that_training_read(
    corpus: Path, tmp_path: Path, read: list[list[Micro]], keys: dict[str, Any]
) -> None:
    """Batches are found before and after the checkpoints of a run that stopped and was extended."""
    run, keys = tmp_path / "run", {"checkpoint_factor": 2, "num_workers": 0, "lr_decay_style": "constant", **keys}
    if keys.pop("blend", False):
        keys |= blend(corpus)
    if keys.get("data_path"):
        keys["data_path"] = str(corpus / "train_text_document")
    run_training(tiny_config(corpus, run, train_iters=5, **keys))
    run_training(tiny_config(corpus, run, train_iters=8, load=str(run), **keys))
    assert len(read) == 8
    for step in range(1, 9):
        assert find_batches(run, step) == [read[step - 1]], step
    shutil.rmtree(run / "checkpoints" / layout.format_checkpoint_name(8))  # as if killed before the last save
    for step in (7, 8):
        assert find_batches(run, step) == [read[step - 1]], step


def test_a_tree_that_was_moved(corpus: Path, tmp_path: Path, read: list[list[Micro]]) -> None:
    """A staged run, whose checkpoints name its datasets, and its data are found in another folder."""
    shutil.copytree(corpus, tmp_path / "old" / "corpus")
    keys = {**CASES["stages of other lengths, data and batches"], **blend(tmp_path / "old" / "corpus")}
    del keys["blend"]
    run_training(
        tiny_config(tmp_path / "old" / "corpus", tmp_path / "old" / "run", num_workers=0, train_iters=6, **keys)
    )
    (tmp_path / "old").rename(tmp_path / "new")
    assert [find_batches(tmp_path / "new" / "run", step) for step in range(1, 7)] == [[batch] for batch in read]


def test_validation_sets_of_a_tree_that_was_moved(corpus: Path, tmp_path: Path, read: list[list[Micro]]) -> None:
    """After the last checkpoint all datasets of the run are opened, validation sets by name too."""
    shutil.copytree(corpus, tmp_path / "old" / "corpus")
    data, run = tmp_path / "old" / "corpus", tmp_path / "new" / "run"
    keys = {"eval_interval": 2, "valid_data_sets": {"twins": [str(data / "valid_text_document")]}}
    run_training(tiny_config(data, tmp_path / "old" / "run", checkpoint_factor=2, **keys))
    (tmp_path / "old").rename(tmp_path / "new")
    shutil.rmtree(run / "checkpoints" / layout.format_checkpoint_name(4))
    assert [find_batches(run, step) for step in (2, 3)] == [[batch] for batch in read[1:3]]


@pytest.mark.parametrize("is_relative", [True, False])
def test_a_staged_run_after_its_last_checkpoint_whose_tree_was_moved(
    corpus: Path, tmp_path: Path, read: list[list[Micro]], monkeypatch: pytest.MonkeyPatch, is_relative: bool
) -> None:
    """The stages name the data by their old paths: the error says how to make these valid, in folders that exist."""
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(corpus, old / "corpus")
    monkeypatch.chdir(old)
    base = Path() if is_relative else old
    keys = {**CASES["stages of other lengths, data and batches"], **blend(base / "corpus"), "checkpoint_factor": 5}
    del keys["blend"]
    run_training(tiny_config(base / "corpus", base / "run", num_workers=0, train_iters=6, **keys))
    monkeypatch.chdir(tmp_path)
    old.rename(new)
    shutil.rmtree(new / "run" / "checkpoints" / layout.format_checkpoint_name(6))
    advice = (
        f"run this command in {new}" if is_relative else rf"link {old}/corpus/.*\.bin and .idx to those of {new}/corpus"
    )
    with pytest.raises(UserError, match=f"new/run: its data were moved; {advice}"):
        find_batches(Path("new/run"), 6)
    if is_relative:
        monkeypatch.chdir(new)
        assert find_batches(Path("run"), 6) == [read[5]]


def test_a_run_without_checkpoints(corpus: Path, tmp_path: Path, read: list[list[Micro]]) -> None:
    run_training(tiny_config(corpus, tmp_path, num_workers=0))
    shutil.rmtree(tmp_path / "checkpoints")
    assert [find_batches(tmp_path, step) for step in (1, 2, 3, 4)] == [[batch] for batch in read]


def test_a_resume_with_another_batch_size(corpus: Path, tmp_path: Path, read: list[list[Micro]]) -> None:
    keys = {"checkpoint_factor": 2, "num_workers": 0, "lr_decay_style": "constant"}
    run_training(tiny_config(corpus, tmp_path, **keys))
    run_training(tiny_config(corpus, tmp_path, train_iters=8, train_batch_size=8, load=str(tmp_path), **keys))
    assert [find_batches(tmp_path, step) for step in range(1, 9)] == [[batch] for batch in read]
    shutil.rmtree(tmp_path / "checkpoints" / layout.format_checkpoint_name(4))
    with pytest.raises(RunError, match="batch size changed between step_0000002 and step_0000006"):
        BatchHistory(tmp_path).find_attempts(3)


def test_a_rollback_shows_both_attempts(
    corpus: Path, tmp_path: Path, read: list[list[Micro]], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, calls = Engine.forward_backward, iter(range(1, 100))

    def spike_at_the_sixth_step(self: Engine, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = usual(self, *args, **kwargs)
        return loss * 100 if next(calls) == 6 else loss

    monkeypatch.setattr(Engine, "forward_backward", spike_at_the_sixth_step)
    keys = {"checkpoint_factor": 4, "num_workers": 0, "train_iters": 12, "lr_decay_style": "constant"}
    run_training(tiny_config(corpus, tmp_path, on_bad_loss="rollback", loss_spike=3.0, **keys))
    first, again = read[:6], read[6:]  # steps 1 to 6, then 5 to 12
    assert len(again) == 8
    assert find_batches(tmp_path, 4) == [first[3]]
    assert find_batches(tmp_path, 5) == [first[4], again[0]]
    assert find_batches(tmp_path, 6) == [first[5], again[1]]
    assert find_batches(tmp_path, 7) == [again[2]]
    assert find_batches(tmp_path, 12) == [again[7]]
    assert [attempt.is_rolled_back for attempt in BatchHistory(tmp_path).find_attempts(6)] == [True, False]
    checkpoints = tmp_path / "checkpoints"
    shutil.rmtree(checkpoints / layout.format_checkpoint_name(12))
    (note,) = (attempt.note for attempt in BatchHistory(tmp_path).find_attempts(9))
    assert note is not None
    assert "assumes that the run did not roll back to step_0000008" in note
    shutil.rmtree(checkpoints / layout.format_checkpoint_name(4))
    with pytest.raises(RunError, match="rolled back between its start and step_0000008"):
        BatchHistory(tmp_path).find_attempts(5)


@pytest.mark.slow
def test_two_data_ranks(corpus: Path, tmp_path: Path) -> None:
    """Each rank's rows are those of its data loader, and the text they train on gives one process's losses."""
    run, keys = tmp_path / "run", {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "num_workers": 0}
    assert train_with_processes(tmp_path / "job", [tiny_config(corpus, run, num_gpus=2, **keys)]) == [None]
    (attempt,) = BatchHistory(run).find_attempts(3)
    assert (attempt.order.num_ranks, attempt.samples) == (2, 16)
    for rank in (0, 1):
        mesh = Mesh(rank, ParallelSizes(data=2))
        dataset = attempt.order.datasets.train
        assert dataset is not None
        batches = build_dataloader(dataset, micro_batch_size=2, mesh=mesh, start=attempt.samples)
        assert find_batches(run, 3, rank) == [[next(batches)["tokens"].tolist() for _ in range(2)]]
    run_training(tiny_config(corpus, tmp_path / "one", **keys))
    assert losses(run) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)  # 4 steps, float32 sums in another order


def test_the_command(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_training(tiny_config(corpus, tmp_path, train_iters=4, log_interval=2, num_workers=0))
    before = sorted(tmp_path.rglob("*"))
    show_batch(tmp_path, ["3-4"], None, 5)
    out = capsys.readouterr().out
    loss = records(tmp_path)[4]["loss"]
    assert f"step 3: loss {loss:.4f} (mean of steps 3-4); 4 sequences, 1 data-parallel rank\n" in out
    assert "columns 0-" in out
    assert f"{corpus}/train_text_document, document " in out
    assert all(len(line.strip()) <= 6 for line in out.splitlines() if line.startswith(" " * 6))
    show_batch(tmp_path, ["3"], 0, 200, as_json=True)
    (batch,) = json.loads(capsys.readouterr().out)
    assert (batch["step"], batch["loss"], batch["loss_steps"], len(batch["rows"])) == (3, loss, [3, 4], 4)
    assert sorted(tmp_path.rglob("*")) == before  # nothing is written
    with pytest.raises(UserError, match=r"^step 5 is after the last step; batches are known up to step 4$"):
        show_batch(tmp_path, ["5"])
    with pytest.raises(UserError, match=r"^--rank 1: step 2 has data-parallel ranks 0 to 0$"):
        show_batch(tmp_path, ["2"], 1)
    with pytest.raises(UserError, match="no checkpoint"):
        show_batch(corpus, ["2"])


def test_steps_and_text() -> None:
    assert parse_steps(["7", "2-4", "3"]) == [7, 2, 3, 4]
    for text, problem in {"4-2": "range is empty", "x": "it must be a step", "-1": "it must be a step"}.items():
        with pytest.raises(UserError, match=problem):
            parse_steps([text])
    assert escape_control_characters("é\x1b[2J\n\u202e") == "é\\x1b[2J\\n\\u202e"
