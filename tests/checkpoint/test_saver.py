"""A save is complete or has no effect: full disks, weights that are not finite, pruning of old checkpoints."""

import errno
import io
import json
import shutil
import threading
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from full_disk import full_disk
from rich.console import Console
from safetensors.torch import load_file
from tiny_runs import losses, tiny_config

from megatron.checkpoint import engine_state, manifest, sharded_state
from megatron.checkpoint.saver import Entries, SaveHooks
from megatron.checkpoint.trainer_state import TrainerState
from megatron.config.load import read_config
from megatron.data.load_tokenizer import load_tokenizer
from megatron.distributed.hardware import LocalHardware
from megatron.distributed.launcher_environment import RankInfo
from megatron.training.resolve_run import resolve_run
from megatron.training.train import train, train_resolved
from megatron.training.trainer import TrainingHooks
from megatron.utils.errors import RunError


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_contents_of_a_checkpoint(corpus: Path, tmp_path: Path) -> None:
    config = tiny_config(corpus, tmp_path, zero_optimization={"stage": 2}, precision="bf16", bf16={"enabled": True})
    result = train(config)
    assert result.checkpoint is not None
    assert sorted(path.name for path in result.checkpoint.iterdir()) == [
        "config.yml", "manifest.json", "model.safetensors", "progress.json", "states"
    ]  # fmt: skip
    assert read_config(result.checkpoint / "config.yml").to_flat() == config.to_flat()
    progress = json.loads((result.checkpoint / "progress.json").read_text())
    assert progress["step"] == 4
    assert progress["train_samples"] == progress["consumed_samples"] == 16
    assert progress["consumed_tokens"] == 256
    assert progress["vocabulary"] == {"size": 61, "name": load_tokenizer(corpus).name}
    weights = load_file(result.checkpoint / "model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.float32}
    matrix = weights["decoder.layers.0.mlp.linear_fc1.weight"]
    assert not torch.equal(matrix, matrix.bfloat16().float())  # float32 masters, not copies
    assert sum(name.startswith("embedding") or name.startswith("output") for name in weights) == 1  # tied: saved once


def test_a_run_keeps_its_tokenizer_and_an_older_one_gets_it_when_it_is_resumed(corpus: Path, tmp_path: Path) -> None:
    train(tiny_config(corpus, tmp_path))
    assert load_tokenizer(tmp_path / "tokenizer").metadata == load_tokenizer(corpus).metadata
    shutil.rmtree(tmp_path / "tokenizer")
    train(tiny_config(corpus, tmp_path, train_iters=5, load=str(tmp_path)))
    assert load_tokenizer(tmp_path / "tokenizer").metadata == load_tokenizer(corpus).metadata


def test_only_the_last_n_are_kept(corpus: Path, tmp_path: Path) -> None:
    keys = {"checkpoint_factor": 2, "keep_last_n_checkpoints": 2, "extra_save_iters": [1, 5]}
    train(tiny_config(corpus, tmp_path, train_iters=7, **keys))
    assert names(tmp_path) == ["step_0000001", "step_0000005", "step_0000006", "step_0000007"]
    train(tiny_config(corpus, tmp_path, train_iters=8, load=str(tmp_path)))
    assert names(tmp_path) == ["step_0000001", "step_0000005", "step_0000006", "step_0000007", "step_0000008"]


def refuse(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def fail_in(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    if where == "weights":
        monkeypatch.setattr(sharded_state, "merge_weight_shards", refuse)
    elif where == "states":
        monkeypatch.setattr(sharded_state, "write_tensors", refuse)
    elif where == "manifest":
        monkeypatch.setattr(manifest, "write_manifest", refuse)
    else:
        monkeypatch.setattr(TrainerState, "write", refuse)


@pytest.mark.parametrize(
    ("where", "stage"),
    [("states", 0), ("states", 3), ("weights", 0), ("manifest", 0), ("progress", 0)],
)
def test_a_full_disk_leaves_the_last_checkpoint(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, stage: int
) -> None:
    zero = {"zero_optimization": {"stage": stage}}
    train(tiny_config(corpus, tmp_path, train_iters=2, lr_decay_iters=4, **zero))
    with monkeypatch.context() as patched:
        fail_in(patched, where)
        with pytest.raises(
            RunError, match=r"step_0000004: not saved: .*No space left on device; .* is .*step_0000002"
        ) as e:
            train(tiny_config(corpus, tmp_path, load=str(tmp_path), **zero))
    assert "\n" not in str(e.value)
    assert names(tmp_path) == ["step_0000002"]
    train(tiny_config(corpus, tmp_path, load=str(tmp_path), **zero))  # the checkpoint is complete
    assert names(tmp_path) == ["step_0000002", "step_0000004"]
    assert len(losses(tmp_path)) == 4


@pytest.mark.parametrize("kilobytes", [20, 100])
def test_a_full_disk(corpus: Path, tmp_path: Path, kilobytes: int) -> None:
    """A file size limit fails like a full disk, in a rank's file or in model.safetensors."""
    train(tiny_config(corpus, tmp_path, train_iters=2))
    reported = r"step_0000004: not saved: .*File too large.*; .* is .*step_0000002"
    with full_disk(kilobytes * 1000), pytest.raises(RunError, match=reported):
        train(tiny_config(corpus, tmp_path, load=str(tmp_path)))
    assert names(tmp_path) == ["step_0000002"]


def test_weights_that_are_not_finite_are_not_saved(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = sharded_state.PinnedStagingBuffers.copy_to_host

    def broken(self: sharded_state.PinnedStagingBuffers, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        copies = usual(self, tensors)
        copies["master/decoder.final_layernorm.weight"][3] = float("nan")
        return copies

    train(tiny_config(corpus, tmp_path, train_iters=2))
    monkeypatch.setattr(sharded_state.PinnedStagingBuffers, "copy_to_host", broken)
    with pytest.raises(
        RunError, match=r"step_0000004: not saved: decoder.final_layernorm.weight is not finite; .*0000002"
    ):
        train(tiny_config(corpus, tmp_path, load=str(tmp_path)))
    assert names(tmp_path) == ["step_0000002"]


def test_training_continues_while_a_checkpoint_is_written(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training continues during a save. The disk blocks until the next save waits; by then two more steps have run.

    The checkpoint contains the weights from before these steps.
    """
    asked, usual = threading.Event(), sharded_state.Snapshot.write

    def slowly(self: sharded_state.Snapshot, checkpoint: Path, *arguments: Any) -> Any:
        assert asked.wait(30)
        return usual(self, checkpoint, *arguments)

    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            if "waiting until" in text:
                asked.set()
            return super().write(text)

    keys = {"checkpoint_factor": 2, "lr_decay_iters": 6}
    train(tiny_config(corpus, tmp_path / "usual", train_iters=6, **keys))
    screen = Screen()
    with monkeypatch.context() as patched:
        patched.setattr(sharded_state.Snapshot, "write", slowly)
        result = train(tiny_config(corpus, tmp_path / "slow", train_iters=6, **keys), Console(file=screen, width=200))
    assert "step 4: waiting until the checkpoint of step 2 is written" in screen.getvalue()
    assert result.checkpoint == tmp_path / "slow" / "checkpoints" / "step_0000006"
    assert names(tmp_path / "slow") == names(tmp_path / "usual") == ["step_0000002", "step_0000004", "step_0000006"]
    for name in names(tmp_path / "usual"):
        one, other = (
            load_file(tmp_path / run / "checkpoints" / name / "model.safetensors") for run in ("usual", "slow")
        )
        assert all(torch.equal(one[weight], other[weight]) for weight in one)


def test_hooks_are_called_for_a_run_and_its_saves(corpus: Path, tmp_path: Path) -> None:
    """A caller's hooks are called for a run and its saves, and do not change the checkpoint."""
    received: list[tuple[Any, ...]] = []

    def complete(folder: Path, step: int, entries: Entries) -> Entries:
        received.append(("complete", folder.name, step, sorted(entries)))
        return entries

    def open_file(path: Path) -> Any:
        received.append(("open", path.name))
        return open(path, "wb")

    save = SaveHooks(
        open_file=open_file, complete=complete, on_published=lambda path: received.append(("is", path.name))
    )
    hooks = TrainingHooks(
        on_phase=lambda phase, step: received.append((phase, step)),
        on_built=lambda run: received.append(("built", run.parameters)),
        save=save,
    )
    configs = [tiny_config(corpus, tmp_path / name, train_iters=2) for name in ("heard", "usual")]
    resolved = [resolve_run(config, LocalHardware(0, 1)).config for config in configs]
    result = train_resolved(resolved[0], RankInfo(), hooks=hooks)
    train_resolved(resolved[1], RankInfo())
    saves = [entry for entry in received if entry[0] in ("open", "complete", "is")]
    name, states = "step_0000002", "rank_00000.safetensors"
    assert saves == [
        ("open", states), ("open", states), ("complete", f".{name}.tmp", 2, [f"states/{states}"]),
        ("open", "model.safetensors"), ("is", name),
    ]  # fmt: skip
    assert received[0][0] == "built"
    phases = [phase for phase, *_ in received if phase not in ("open", "complete", "is", "built")]
    assert [phase for phase, _ in groupby(phases)][:6] == [
        "start", "data", "reduce", "forward and backward", "step", "report"
    ]  # fmt: skip
    assert result.checkpoint is not None
    one, other = (tmp_path / run / "checkpoints" / name for run in ("heard", "usual"))
    for path in ("model.safetensors", f"states/{states}"):
        assert (one / path).read_bytes() == (other / path).read_bytes()


def test_a_disk_error_in_the_background_ends_the_run_at_the_next_step(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded_state, "write_tensors", refuse)
    with pytest.raises(RunError, match="step_0000002: not saved: No space left on device; the run has no checkpoint"):
        train(tiny_config(corpus, tmp_path, train_iters=1000, checkpoint_factor=2))
    assert names(tmp_path) == []
    assert len(losses(tmp_path)) < 100


def test_insufficient_memory_is_reported_without_data_loss(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tiny_config(corpus, tmp_path, train_iters=2, lr_decay_iters=4))
    monkeypatch.setattr(sharded_state.PinnedStagingBuffers, "copy_to_host", lambda *_: torch.empty(1 << 60))
    with pytest.raises(RunError, match=r"step_0000004: not saved: cannot copy the states \(.*memory.*0000002$"):
        train(tiny_config(corpus, tmp_path, load=str(tmp_path)))
    assert names(tmp_path) == ["step_0000002"]


def test_unknown_optimizers_are_rejected() -> None:
    class NewOptimizer:
        pass

    engine = SimpleNamespace(optimizer=NewOptimizer(), module=torch.nn.Linear(1, 1))
    with pytest.raises(RunError, match="DeepSpeed's NewOptimizer: unsupported optimizer class"):
        engine_state.list_optimizer_shards(engine)
