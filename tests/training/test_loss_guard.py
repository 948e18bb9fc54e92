"""A run with a bad loss rolls back like a restart and skips the data; or it stops."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tiny_runs import losses, records, same_weights, tiny_config, train_and_print

from megatron.checkpoint import layout
from megatron.checkpoint.trainer_state import TrainerState
from megatron.config.load import load_config
from megatron.distributed.hardware import LocalHardware
from megatron.distributed.launcher_environment import RankInfo
from megatron.distributed.process_groups import build_single_process_groups
from megatron.launch.run_status import read_status
from megatron.training.console import ConsoleReporter
from megatron.training.engine import Engine
from megatron.training.loss_guard import ContinueRun, LossGuard, Rollback, RunningMeanLoss, StopRun
from megatron.training.metrics_log import find_divergence
from megatron.training.resolve_run import resolve_run
from megatron.training.summary import describe_stop
from megatron.training.train import train
from megatron.training.trainer import Trainer
from megatron.training.training_run import build_training_run
from megatron.utils.errors import RunError, UserError

KEYS: dict[str, Any] = {"train_iters": 8, "checkpoint_factor": 2, "num_workers": 0}


def spike(monkeypatch: pytest.MonkeyPatch, *steps: int, factor: float = 100.0) -> None:
    """Multiply the losses of some steps by a factor; steps count from 1 over all starts."""
    usual, calls = Engine.forward_backward, [0]

    def accumulate(self: Engine, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls[0] += 1
        loss = usual(self, *args, **kwargs)
        return loss * factor if calls[0] in steps else loss

    monkeypatch.setattr(Engine, "forward_backward", accumulate)


def progress(run: Path) -> TrainerState:
    return TrainerState.read(layout.resolve_checkpoint_path(run))


def test_a_spike_rolls_back_like_a_restart_and_skips_the_data(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_hand = tmp_path / "by_hand"
    train(tiny_config(corpus, by_hand, **KEYS | {"train_iters": 4, "lr_decay_iters": 8}))
    rest = resolve_run(tiny_config(corpus, by_hand, load=str(by_hand), **KEYS), LocalHardware.detect()).config
    behind_step_6 = Rollback(str(by_hand), 4, samples=24)
    run = build_training_run(rest, RankInfo(), ConsoleReporter(None, 8), behind_step_6)
    trainer = Trainer(run, 0.0)
    trainer.train()
    trainer.close()
    run.close()

    went_back = tmp_path / "went_back"
    spike(monkeypatch, 6)
    text = train_and_print(tiny_config(corpus, went_back, on_bad_loss="rollback", loss_spike=3.0, **KEYS))[0]
    assert "step 6: its loss " in text
    assert "rolling back to " in text
    assert "step_0000004 and skipping the data read since" in text
    assert "rolled back once because of its loss, skipping 8 sequences" in text
    assert losses(went_back) == losses(by_hand)
    assert sorted(records(went_back)) == list(range(1, 9))
    assert same_weights(went_back, by_hand)
    assert (progress(went_back).rollbacks, progress(went_back).skipped_samples) == (1, 8)
    assert progress(went_back).consumed_samples == 8 * 4 + 8


def test_skipped_data_stays_skipped_after_a_resume(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"on_bad_loss": "rollback", "loss_spike": 3.0, **KEYS}
    with monkeypatch.context() as patch:
        spike(patch, 4)
        train(tiny_config(corpus, tmp_path / "whole", **keys))
    with monkeypatch.context() as patch:
        spike(patch, 4)
        train(tiny_config(corpus, tmp_path / "parts", **keys | {"train_iters": 6, "lr_decay_iters": 8}))
    text = train_and_print(tiny_config(corpus, tmp_path / "parts", load=str(tmp_path / "parts"), **keys))[0]
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert same_weights(tmp_path / "parts", tmp_path / "whole")
    assert "rolled back once because of its loss, skipping 8 sequences" in text


def test_non_finite_steps_roll_back(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, calls = Engine.forward_backward, [0]

    def accumulate(self: Engine, micro_batches: list[Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] in (4, 5):
            micro_batches[0]["loss_mask"].fill_(float("nan"))
        return usual(self, micro_batches, *args, **kwargs)

    monkeypatch.setattr(Engine, "forward_backward", accumulate)
    text = train_and_print(tiny_config(corpus, tmp_path, on_bad_loss="rollback", max_bad_steps=2, **KEYS))[0]
    assert "step 4 skipped: its loss is nan (1 of max_bad_steps 2 in a row)" in text
    assert "step 5: its loss is nan, for 2 steps in a row (max_bad_steps); rolling back to" in text
    assert all(json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()[4:])


def test_the_run_ends_if_rollbacks_do_not_help(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spike(monkeypatch, 3, 4, 5, 6)
    config = tiny_config(corpus, tmp_path, on_bad_loss="rollback", loss_spike=3.0, **KEYS)
    with pytest.raises(
        RunError,
        match=r"rolled back 3 times without a good step after a new checkpoint; the last checkpoint is",
    ):
        train(config)


def test_a_spike_without_a_checkpoint_ends_the_run(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spike(monkeypatch, 2)
    with pytest.raises(RunError, match=r"^step 2: its loss .* exceeds loss_spike × its running mean .*; no checkpoint"):
        train(tiny_config(corpus, tmp_path, on_bad_loss="rollback", loss_spike=3.0, **KEYS))
    step, why = find_divergence(tmp_path) or (0, "")
    assert step == 2
    assert "exceeds loss_spike" in why
    monkeypatch.undo()
    train(tiny_config(corpus, tmp_path, on_bad_loss="rollback", loss_spike=3.0, **KEYS))
    assert find_divergence(tmp_path) is None  # it was restarted, and finished


def test_stop_ends_the_run_after_the_first_bad_step(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(corpus, tmp_path, on_bad_loss="stop", loss_spike=3.0, **KEYS)
    for factor in (100.0, float("nan")):
        with monkeypatch.context() as patch:
            spike(patch, 4, factor=factor)
            with pytest.raises(RunError, match=r"^step 4: its loss .* the last good checkpoint is .*step_0000002"):
                train(config.replace(save=str(tmp_path / str(factor))))


def test_loss_spike_with_skip_is_rejected() -> None:
    shape = ["num_layers=1", "hidden_size=8", "num_attention_heads=1", "seq_length=8", "train_iters=2"]
    with pytest.raises(UserError, match=r"loss_spike 2 needs on_bad_loss: rollback or stop; "):
        load_config([], [*shape, "loss_spike=2"])


def test_the_running_mean_of_the_loss() -> None:
    usual = RunningMeanLoss()
    assert not usual.is_spike(100.0, 2.0)  # nothing to compare with
    usual.add(4.0)
    usual.add(2.0)
    assert usual.mean == pytest.approx(0.98 * 4 + 0.02 * 2)
    assert (usual.is_spike(7.9, 2.0), usual.is_spike(8.0, 2.0)) == (False, True)


def test_the_guard_decides_and_remembers_actions(corpus: Path, tmp_path: Path) -> None:
    config = tiny_config(corpus, tmp_path, on_bad_loss="rollback", loss_spike=3.0, max_bad_steps=2, **KEYS)
    engine = SimpleNamespace(skipped=False, precision="fp32", loss_scale=1.0)
    checkpoint = tmp_path / "checkpoints" / layout.format_checkpoint_name(4)

    def build_guard(path: Path | None, last: Rollback | None = None) -> LossGuard:
        return LossGuard(
            config, cast(Engine, engine), build_single_process_groups(), lambda: [path] if path else [], last
        )

    guard = build_guard(checkpoint)
    assert guard.check(5, 20, torch.tensor(2.0)) == ContinueRun()
    assert guard.state_dict() == {"usual_loss": 2.0, "rollbacks": 0}
    rollback = guard.check(6, 24, torch.tensor(7.0))
    assert isinstance(rollback, Rollback)
    assert (rollback.load, rollback.step, rollback.samples, rollback.count) == (str(tmp_path), 4, 24, 1)
    skipped = rollback.skip_samples(TrainerState(step=4, consumed_samples=16, rollbacks=1, skipped_samples=3), 16)
    assert (skipped.consumed_samples, skipped.rollbacks, skipped.skipped_samples) == (24, 1, 11)

    other = build_guard(None, rollback)
    other.load_state_dict({"usual_loss": 2.0, "rollbacks": 1, "step": 4})
    assert other.state_dict() == {"usual_loss": 2.0, "rollbacks": 1}
    stop = other.check(6, 24, torch.tensor(7.0))
    assert stop == StopRun(
        "its loss 7 exceeds loss_spike × its running mean 2",
        "step 6: its loss 7 exceeds loss_spike × its running mean 2; no checkpoint was saved",
    )
    assert cast(Rollback, build_guard(checkpoint, rollback).check(7, 28, torch.tensor(math.nan))).count == 2
    third = build_guard(checkpoint, Rollback(str(tmp_path), 4, 24, count=3))
    assert (
        "rolled back 3 times without a good step after a new checkpoint"
        in cast(StopRun, third.check(7, 28, torch.tensor(math.nan))).message
    )

    engine.skipped = True
    first = guard.check(7, 28, torch.tensor(math.nan))
    assert first == ContinueRun("step 7 skipped: its loss is nan (1 of max_bad_steps 2 in a row)")
    assert isinstance(guard.check(8, 32, torch.tensor(1.0)), Rollback)


def break_weights(monkeypatch: pytest.MonkeyPatch, step: int, factor: float, *, persistent: bool = False) -> None:
    """Multiply all matrices by a factor after the optimizer's n-th step, counted over all starts.

    Args:
        persistent: True to repeat this after all later steps.
    """
    usual, calls = Engine.step, [0]

    def take_step(self: Engine, *args: Any, **kwargs: Any) -> None:
        usual(self, *args, **kwargs)
        calls[0] += 1
        if calls[0] == step or (persistent and calls[0] > step):
            with torch.no_grad():
                for shard in self.model.parameters():
                    if shard.ndim > 1:
                        shard.mul_(factor)

    monkeypatch.setattr(Engine, "step", take_step)


def list_steps(run: Path) -> list[int | None]:
    return [layout.parse_step(path) for path in layout.list_checkpoints(run)]


@pytest.mark.parametrize("broken_after", [3, 4])
def test_broken_weights_never_push_out_good_checkpoints(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken_after: int
) -> None:
    # Step 4 is saved during bad steps, or directly after a good loss.
    break_weights(monkeypatch, broken_after, 1e25)
    config = tiny_config(corpus, tmp_path, **KEYS, keep_last_n_checkpoints=1)
    good = r"for 3 steps in a row \(max_bad_steps\); the last good checkpoint is .*step_0000002$"
    with pytest.raises(RunError, match=good):
        train(config)
    assert 2 in list_steps(tmp_path)
    if broken_after == 3:
        assert list_steps(tmp_path) == [2]


@pytest.mark.parametrize(("factor", "eval_interval"), [(1e25, 4), (math.inf, 4)])
def test_broken_weights_at_the_last_step_are_an_error(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, eval_interval: int
) -> None:
    """Weights that break in the last step do not count as success.

    They are finite, so that only another loss reveals the damage, or the save rejects them.
    """
    break_weights(monkeypatch, 8, factor)
    keys = {**KEYS, "keep_last_n_checkpoints": 1, "eval_interval": eval_interval}
    config = tiny_config(corpus, tmp_path, **keys)
    with pytest.raises(RunError, match=r"^step 8: .*finite; the last good checkpoint is .*step_0000006$"):
        train(config)
    assert 6 in list_steps(tmp_path)
    assert read_status(tmp_path).state == "diverged"


@pytest.mark.parametrize("factor", [1e25, math.inf])
def test_a_rollback_that_fails_tries_the_checkpoint_before(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    break_weights(monkeypatch, 4, factor)  # directly after a good loss, before a save
    config = tiny_config(corpus, tmp_path, on_bad_loss="rollback", max_bad_steps=1, **KEYS)
    text = train_and_print(config)[0]
    if factor != math.inf:  # the broken state is saved, loaded once, and moved aside
        assert "rolling back to " in text
        assert list((tmp_path / "checkpoints" / "abandoned").rglob("step_0000004"))
    assert f"rolling back to {tmp_path / 'checkpoints' / 'step_0000002'}" in text
    assert list_steps(tmp_path) == [2, 4, 6, 8]
    assert all(math.isfinite(loss) for loss in losses(tmp_path))


def test_rollbacks_end_if_every_step_breaks_the_weights(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollbacks end if every step breaks the weights: each start saves the step that it breaks, which is not
    progress.
    """
    break_weights(monkeypatch, 3, 1e25, persistent=True)
    keys = {**KEYS, "checkpoint_factor": 1, "on_bad_loss": "rollback", "max_bad_steps": 1}
    with pytest.raises(RunError, match="rolled back 3 times without a good step after a new checkpoint"):
        train(tiny_config(corpus, tmp_path, **keys))
    assert len(list((tmp_path / "checkpoints" / "abandoned").iterdir())) <= 3


def test_a_run_with_bad_last_steps_is_not_finished(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_weights(monkeypatch, 6, 1e25)
    with pytest.raises(RunError, match=r"^step 8: the last 2 steps were bad; the last good checkpoint is"):
        train(tiny_config(corpus, tmp_path, **KEYS))
    assert read_status(tmp_path).state == "diverged"
    assert 8 not in list_steps(tmp_path)


def test_a_run_names_the_last_good_checkpoint_after_bad_steps(corpus: Path, tmp_path: Path) -> None:
    config = tiny_config(corpus, tmp_path)
    second, fourth = (tmp_path / "checkpoints" / layout.format_checkpoint_name(step) for step in (2, 4))
    assert f"at step 4 of 4; saved {fourth}; " in describe_stop(config, 4, fourth, 15)
    assert f"at step 4 of 4; the last checkpoint is {second}; " in describe_stop(config, 4, second, 15)

    engine = SimpleNamespace(skipped=True, precision="fp32", loss_scale=1.0)
    keys = {"on_bad_loss": "stop"}
    guard = LossGuard(
        config.replace(**keys), cast(Engine, engine), build_single_process_groups(), lambda: [second, fourth]
    )
    stop = guard.check(5, 20, torch.tensor(math.nan))
    assert isinstance(stop, StopRun)
    assert stop.message.endswith(f"{fourth}, and no good step followed it; the previous one is {second}")
