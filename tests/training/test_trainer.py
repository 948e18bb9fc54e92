"""Whole runs: reports, ends, and no leftover files."""

import math
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import losses, records, same_weights, tiny_config, train_and_print

from megatron.checkpoint import layout
from megatron.checkpoint.load_model import load_model
from megatron.config.load import read_config
from megatron.data.datasets import load_token_stream
from megatron.training import metrics
from megatron.training.engine import Engine
from megatron.training.evaluations import Validator
from megatron.training.metrics_log import METRICS_FILE, read_metrics_log
from megatron.training.train import train
from megatron.utils.errors import RunError, UserError


def test_a_run_learns_and_reports(corpus: Path, tmp_path: Path) -> None:
    config = tiny_config(
        corpus, tmp_path, train_iters=30, log_interval=10, eval_interval=20, peak_tflops=0.5, use_tensorboard=True,
        test_data_paths=[str(corpus / "test_text_document")],
    )  # fmt: skip
    text, result = train_and_print(config)
    assert list(records(tmp_path)) == [10, 20, 30]
    assert list(records(tmp_path, "valid")) == [20, 30]
    assert list(records(tmp_path, "test")) == [30]
    first, last = records(tmp_path)[10], records(tmp_path)[30]
    assert first["loss"] < math.log(128)
    assert last["loss"] < first["loss"] - 0.3
    assert last["perplexity"] == pytest.approx(math.exp(last["loss"]))
    assert last["tokens"] == 30 * 4 * 16
    assert last["tokens_per_second"] == pytest.approx(4 * 16 / last["ms_per_step"] * 1e3)
    assert last["mfu"] == pytest.approx(last["tflops"] / 0.5)
    assert last["learning_rate"] == pytest.approx(1e-2 / 30)  # linear, one step before its end
    assert last["seconds_left"] == 0
    assert last["loss_scale"] == 1.0
    assert last["skipped_steps"] == 0
    assert 0 < last["grad_norm"] < 10
    assert 0.01 < last["memory_gib"] < 64
    assert result.loss == last["loss"]
    assert result.valid_loss == records(tmp_path, "valid")[30]["loss"]
    assert result.test_loss == records(tmp_path, "test")[30]["loss"]
    assert (result.step, result.exit_code) == (30, 0)
    assert result.checkpoint == tmp_path / "checkpoints" / "step_0000030"
    begins, rows, epochs, validation, *lines, ends = text.splitlines()
    assert epochs == "training text: 4,071 tokens, 47.16% read"
    assert re.match(r"validation every 20 steps: valid 128 of \d+ tokens", validation)
    assert " parameters on " in begins
    assert rows.endswith("% of rows contain several documents; attention crosses document boundaries")
    assert ends == f"saved {result.checkpoint}; next: ./deepy.py evaluate {tmp_path}"
    assert [line.split()[1] for line in lines] == ["10/30", "20/30", "20/30", "30/30", "30/30", "30/30"]
    assert "\x1b" not in text
    assert all(
        word in lines[0] for word in ("loss", "ppl", "lr", "grad", "tok/s", "ms", "FLOP/s", "MFU", "GiB", "left")
    )
    assert list((tmp_path / "tensorboard").glob("events*"))
    assert read_config(tmp_path / "config.yml").to_flat() == config.to_flat()


def test_validation_reads_its_text_once_for_any_batch_and_seed(corpus: Path, tmp_path: Path) -> None:
    """Validation reads its text once for any batch and seed, at several lengths, on several sets, and before the first
    step.
    """
    keys = {"eval_interval": 1, "train_iters": 1, "eval_iters": None, "eval_at_start": True, "eval_lengths": "2x,4x"}
    keys |= {
        "valid_data_sets": {"twin": str(corpus / "valid_text_document"), "other": str(corpus / "test_text_document")}
    }
    found = []
    for name, more in (("a", {}), ("b", {"seed": 5, "train_batch_size": 6, "train_micro_batch_size_per_gpu": 3})):
        train(
            tiny_config(
                corpus,
                tmp_path / name,
                **keys,
                **more,
                optimizer={"params": {"lr": 1e-30}},
                lr_decay_style="constant",
                min_lr=0.0,
            )
        )
        found.append(lines_by_kind(tmp_path / name))
    tokens = len(load_token_stream(tiny_config(corpus).data, "valid")) - 1
    names = [f"valid{name}{length}" for name in ("", "/twin", "/other") for length in ("", "/2x", "/4x")]
    for kinds in found:
        assert sorted(set(kinds) - {"train", "test"}) == sorted(names)
        assert all([record["step"] for record in kinds[name]] == [0, 1] for name in names)
        assert {record["tokens"] for name in names if "other" not in name for record in kinds[name]} == {tokens}
        for length in ("", "/2x", "/4x"):
            assert kinds[f"valid{length}"][0]["loss"] == kinds[f"valid/twin{length}"][0]["loss"]


def test_evaluations_do_not_count_as_training_time(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations do not count as training time, not even the one before the first step."""
    evaluating = 0.0

    def validate(self: Validator, step: int) -> None:
        nonlocal evaluating
        evaluating += 1e6

    monkeypatch.setattr(Validator, "validate", validate)
    monkeypatch.setattr(metrics, "_read_clocks", lambda: (time.perf_counter() + evaluating, time.process_time()))
    train(tiny_config(corpus, tmp_path, eval_interval=1, eval_at_start=True))
    assert evaluating == 5e6
    assert all(record["ms_per_step"] < 1e6 for record in records(tmp_path).values())


def lines_by_kind(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the records of a run by kind."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for _, record in read_metrics_log(run / METRICS_FILE):
        kinds.setdefault(record["kind"], []).append(record)
    return kinds


def test_reported_flops_are_those_of_the_model(corpus: Path, tmp_path: Path) -> None:
    train(tiny_config(corpus, tmp_path))
    loaded = load_model(tmp_path)
    record = records(tmp_path)[4]
    expected = record["tokens_per_second"] * loaded.model.count_flops_per_token(16) / 1e12
    assert record["tflops"] == pytest.approx(expected)


def test_nothing_is_written_without_a_folder(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = train(tiny_config(corpus))
    assert result.checkpoint is None
    assert result.loss is not None
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_gets_a_bar(corpus: Path) -> None:
    text, _ = train_and_print(tiny_config(corpus, train_iters=2), force_terminal=True)
    assert "training" in text
    assert "2/2" in text


def test_evaluating_does_not_change_training(corpus: Path, tmp_path: Path) -> None:
    keys = {"train_iters": 6, "hidden_dropout": 0.1, "attention_dropout": 0.1}
    train(tiny_config(corpus, tmp_path / "never", **keys))
    train(tiny_config(corpus, tmp_path / "often", **keys, eval_interval=1))
    assert losses(tmp_path / "never") == losses(tmp_path / "often")
    assert len(records(tmp_path / "often", "valid")) == 6


def test_the_same_run_twice_is_the_same_run(corpus: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        train(tiny_config(corpus, tmp_path / name, seed=seed, deterministic=True))
    assert torch.are_deterministic_algorithms_enabled()
    assert losses(tmp_path / "a") == losses(tmp_path / "b") != losses(tmp_path / "c")
    train(tiny_config(corpus, tmp_path / "d", seed=7))
    assert not torch.are_deterministic_algorithms_enabled()


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Set the loss of some steps (counted from 1) to NaN."""
    usual, calls = Engine.forward_backward, [0]

    def accumulate(self: Engine, micro_batches: list[Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] in steps:
            micro_batches[0]["loss_mask"].fill_(math.nan)
        return usual(self, micro_batches, *args, **kwargs)

    monkeypatch.setattr(Engine, "forward_backward", accumulate)


def test_a_bad_step_is_skipped(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {2})
    text, _ = train_and_print(tiny_config(corpus, tmp_path))
    assert "step 2 skipped: its loss is nan (1 of max_bad_steps 3 in a row)" in text
    found = records(tmp_path)
    assert found[2]["loss"] is None
    assert [found[step]["skipped_steps"] for step in (1, 2, 3, 4)] == [0, 1, 1, 1]
    assert found[4]["loss"] < found[1]["loss"]


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (0, "bf16"), (2, "fp32"), (3, "bf16")])
def test_bad_steps_in_a_row_end_the_run_and_keep_the_good_checkpoint(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int, precision: str
) -> None:
    poison(monkeypatch, {4, 5})
    config = tiny_config(
        corpus, tmp_path, train_iters=9, checkpoint_factor=2, max_bad_steps=2, precision=precision,
        zero_optimization={"stage": stage},
    )  # fmt: skip
    with pytest.raises(
        RunError, match=r"^step 5: its loss is nan, for 2 steps in a row .*checkpoint is .*step_0000002"
    ):
        train(config)
    # Step 4 was skipped, so nothing was saved then.
    weights = load_model(tmp_path).model.state_dict()
    assert all(
        torch.isfinite(w).all() for w in weights.values() if isinstance(w, torch.Tensor) and w.is_floating_point()
    )


def test_gradients_that_are_not_finite_count_as_bad(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Engine.forward_backward

    def accumulate(self: Engine, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = usual(self, *args, **kwargs)
        gradient = next(self.model.parameters()).grad
        assert gradient is not None
        gradient.fill_(math.inf)
        return loss

    monkeypatch.setattr(Engine, "forward_backward", accumulate)
    with pytest.raises(RunError, match=r"^step 1: its gradients are not finite, for 1 step .*no checkpoint was saved"):
        train(tiny_config(corpus, max_bad_steps=1))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_after_the_step_and_the_run_resumes(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    train(tiny_config(corpus, tmp_path / "whole"))
    usual, calls = Engine.step, [0]

    def step(self: Engine, lr: float) -> None:
        calls[0] += 1
        if calls[0] == 2:
            os.kill(os.getpid(), number)  # during step 2
        usual(self, lr)

    before = signal.getsignal(number)
    with monkeypatch.context() as patched:
        patched.setattr(Engine, "step", step)
        text, result = train_and_print(tiny_config(corpus, tmp_path / "run"))
    assert signal.getsignal(number) == before
    assert (result.step, result.signal, result.exit_code) == (2, number, 128 + number)
    output = text.splitlines()[-2:]  # on a busy machine, the thread that acknowledges the signal may print last
    assert (
        sum(line.startswith(f"stopped by {signal.Signals(number).name} at step 2 of 4; saved ") for line in output) == 1
    )
    assert layout.find_latest_checkpoint(tmp_path / "run") == result.checkpoint
    train(tiny_config(corpus, tmp_path / "run", load=str(tmp_path / "run")))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"train_data_paths": []}, "data"),
        ({"precision": "fp16"}, "precision is fp16, which needs a GPU"),
        ({"device": "cuda"}, "device is cuda, but this machine has no CUDA device"),
        ({"valid_data_paths": ["no/such"], "eval_interval": 1}, "no/such"),
        ({"pos_emb": "kerple_lag"}, "kerple_lag"),
    ],
)
def test_unsupported_runs_are_rejected_without_leftovers(
    corpus: Path, tmp_path: Path, keys: dict[str, object], message: str
) -> None:
    if keys.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(UserError, match=message) as caught:
        train(tiny_config(corpus, tmp_path / "run", **keys))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("zero", [0, 2])
def test_initial_weights_can_be_saved(corpus: Path, tmp_path: Path, zero: int) -> None:
    """`extra_save_iters: [0]` saves the initial weights, as in Pythia's files; a run can resume from them."""
    keys = {"zero_optimization": {"stage": zero}, "extra_save_iters": [0], "train_iters": 2}
    train(tiny_config(corpus, tmp_path / "run", **keys))
    first = tmp_path / "run/checkpoints/step_0000000"
    assert load_model(first).run.trainer_state.step == 0
    train(tiny_config(corpus, tmp_path / "again", load=str(first), **keys))
    assert losses(tmp_path / "again") == losses(tmp_path / "run")
    assert same_weights(tmp_path / "again", tmp_path / "run")
    assert layout.parse_step(layout.resolve_checkpoint_path(tmp_path / "run")) == 2


@pytest.mark.parametrize("stage", [1, 3])
def test_recomputed_attention_trains_the_same_bit_for_bit(corpus: Path, tmp_path: Path, stage: int) -> None:
    """Recomputed attention trains identically, with dropout (same random numbers) and stage 3 (releases weights after
    use).
    """
    keys = {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, "attention_dropout": 0.2,
        "hidden_dropout": 0.1, "gradient_accumulation_steps": 2, "train_batch_size": None, "score_processor": "cdape",
        "use_qk_layernorm": True,
    }  # fmt: skip
    for what in (False, "selective", True):
        train(tiny_config(corpus, tmp_path / str(what), checkpoint_activations=what, **keys))
    for what in ("selective", "True"):
        assert losses(tmp_path / what) == losses(tmp_path / "False")
        assert same_weights(tmp_path / what, tmp_path / "False")


def test_insufficient_memory_is_reported_with_the_plan(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An out-of-memory error reports the planned memory. A CPU's allocator raises a generic RuntimeError."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 123456789012 bytes. Error code 12 (Cannot allocate memory)"
        )

    monkeypatch.setattr(Engine, "forward_backward", fail)
    output = r"out of memory \(123456789012 bytes more requested\); the plan of this run, "
    output += r"train_micro_batch_size_per_gpu 4 × seq_length 16, needs [\d.]+ "
    with pytest.raises(RunError, match=output):
        train(tiny_config(corpus, tmp_path))
