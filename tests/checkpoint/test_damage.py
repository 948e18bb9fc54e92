"""A run resumes from the newest intact checkpoint, reports this, and never uses a damaged one."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from permissions import unprivileged, unreadable
from rich.console import Console
from tiny_runs import losses, records, replace_text, same_weights, tiny_config

from megatron.checkpoint import layout
from megatron.config.load import read_config
from megatron.training.train import train
from megatron.utils.errors import RunError, UserError


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def resumed(corpus: Path, run: Path, **keys: object) -> str:
    """Resume the run and return the output."""
    stream = io.StringIO()
    train(tiny_config(corpus, run, **{"load": str(run), **keys}), Console(file=stream, width=250))
    return stream.getvalue()


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def states(checkpoint: Path) -> Path:
    return checkpoint / "states" / "rank_00000.safetensors"


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of the weights": (lambda c: flipped(c / "model.safetensors"), "model.safetensors changed since"),
    "a bit of the states": (lambda c: flipped(states(c)), "rank_00000.safetensors changed since"),
    "another activation": (
        lambda c: replace_text(c / "config.yml", "activation: gelu", "activation: relu"),
        "config.yml changed",
    ),
    "other samples": (
        lambda c: replace_text(c / "progress.json", '"consumed_samples": 16', '"consumed_samples": 12'),
        "progress.json changed since",
    ),
    "states cut short": (lambda c: states(c).write_bytes(b"PK\x03\x04"), "rank_00000.safetensors has 4 bytes"),
    "no states": (lambda c: shutil.rmtree(c / "states"), "rank_00000.safetensors is missing"),
    "another rank's states": (
        lambda c: shutil.copy(states(c), c / "states" / "rank_00001.safetensors"),
        "rank_00001.safetensors is not listed in manifest",
    ),
    "no manifest": (lambda c: (c / "manifest.json").unlink(), "manifest.json is missing"),
    "no progress": (lambda c: (c / "progress.json").unlink(), "progress.json is missing"),
    "nothing": (lambda c: [shutil.rmtree(c), c.mkdir()], "config.yml is missing"),
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_the_previous_checkpoint_is_used_and_reaches_the_same_end(
    trained: Path, run: Path, corpus: Path, damage: str
) -> None:
    act, words = DAMAGE[damage]
    checkpoint = run / "checkpoints" / layout.format_checkpoint_name(4)
    act(checkpoint)
    output = resumed(corpus, run)
    (line,) = [line for line in output.splitlines() if "skipped because it is damaged" in line]
    assert line.startswith(f"{checkpoint}: skipped because it is damaged: ")
    assert words in line
    assert (
        f"resuming from {checkpoint.with_name(layout.format_checkpoint_name(2))} at step 2, "
        "the newest undamaged checkpoint" in output
    )
    reason = "with a copy of the metrics, because it is damaged; the run resumes from step_0000002"
    assert f"step_0000004: moved to {run}/checkpoints/abandoned/0001, {reason}" in output
    assert losses(run) == losses(trained)
    assert same_weights(run, trained)
    assert (run / "checkpoints" / "abandoned" / "0001" / "step_0000004").is_dir()


@pytest.mark.parametrize("file", ["model.safetensors", "manifest.json", "states/rank_00000.safetensors"])
def test_a_file_that_may_not_be_read_is_not_damaged(run: Path, corpus: Path, file: str) -> None:
    """The run does not resume from an older checkpoint, and the newest stays."""
    newest = layout.resolve_checkpoint_path(run)
    with (
        unprivileged(),
        unreadable(newest / file),
        pytest.raises(UserError, match=rf"load: {newest}/{file}: cannot be read \(Permission denied\)"),
    ):
        resumed(corpus, run)
    assert layout.resolve_checkpoint_path(run) == newest


def test_a_named_damaged_checkpoint_is_rejected_without_changes(run: Path, corpus: Path) -> None:
    checkpoint = run / "checkpoints" / layout.format_checkpoint_name(4)
    flipped(states(checkpoint))
    before = sorted(run.rglob("*"))
    for keys in ({"train_iters": 6}, {"save": str(run.parent / "tuned"), "finetune": True}):
        if keys.get("finetune"):
            flipped(checkpoint / "model.safetensors")
        with pytest.raises(RunError, match=r"load: .*step_0000004: damaged: .* changed since it was written") as caught:
            resumed(corpus, run, load=str(checkpoint), **keys)
        assert "\n" not in str(caught.value)
    assert sorted(run.rglob("*")) == before


def test_no_complete_checkpoint(run: Path, corpus: Path) -> None:
    for checkpoint in layout.list_checkpoints(run):
        flipped(states(checkpoint))
    with pytest.raises(RunError, match=r"all checkpoints are damaged: step_0000004: .*; step_0000002: .* start over"):
        resumed(corpus, run, train_iters=6)


def test_rolling_back_needs_a_request_and_keeps_everything(trained: Path, run: Path, corpus: Path) -> None:
    old, rate = run / "checkpoints" / layout.format_checkpoint_name(2), {"optimizer": {"params": {"lr": 2e-2}}}
    later = (run / "checkpoints" / layout.format_checkpoint_name(4) / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="rollback=true"):
        resumed(corpus, run, load=str(old), **rate)
    output = resumed(corpus, run, load=str(old), rollback=True, **rate)
    kept = read_config(run / "config.yml").checkpoint
    assert (kept.load, kept.rollback) == (str(run), False)  # the run's own file is kept, as for any run
    assert (
        f"step_0000004: moved to {run}/checkpoints/abandoned/0001, with a copy of the metrics, because of the rollback"
        in output
    )
    assert losses(run)[:2] == losses(trained)[:2]
    assert losses(run)[3] != losses(trained)[3]
    aside = run / "checkpoints" / "abandoned" / "0001"
    assert (aside / "step_0000004" / "model.safetensors").read_bytes() == later
    shutil.copy(trained / "config.yml", aside)  # a folder that `losses` reads as a run
    assert losses(aside) == losses(trained)
    assert not same_weights(run, trained)
    assert "rollback: true" not in (run / "config.yml").read_text()
    assert "moved" not in resumed(corpus, run, train_iters=6, **rate)  # and resume again, from the newest
    assert [layout.parse_step(path) for path in layout.list_checkpoints(run)] == [2, 4, 6]


def test_an_interrupted_test_is_repeated(corpus: Path, tmp_path: Path) -> None:
    """A run killed between its last checkpoint and the end of its test repeats the test."""
    keys = {"eval_interval": 4, "test_data_paths": [str(corpus / "test_text_document")]}
    train(tiny_config(corpus, tmp_path, **keys))
    before = records(tmp_path, "test")
    assert list(before) == [4]
    metrics = tmp_path / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    assert json.loads(lines[-1])["kind"] == "test"
    metrics.write_text("".join(lines[:-1]) + lines[-1][:20])  # in the middle of a line
    assert "nothing to train: the run is at step 4, and train_iters is 4; evaluating the test text" in resumed(
        corpus, tmp_path, **keys
    )
    after = records(tmp_path, "test")
    assert {**after[4], "seconds": 0} == {**before[4], "seconds": 0}
    assert losses(tmp_path) == [record["loss"] for record in map(json.loads, lines[:-1]) if record["kind"] == "train"]
    assert "nothing to do: the run is at step 4, and train_iters is 4; increase it to continue" in resumed(
        corpus, tmp_path, **keys
    )
    assert records(tmp_path, "test") == after
