"""Visible progress of a run: bar, estimates, first and last lines."""

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from models import build_model
from rich.console import Console
from screen import Clock, terminal
from tiny_runs import tiny_config, train_and_print

from megatron.checkpoint.run_folder import RESOLVED_CONFIG
from megatron.distributed.hardware import LocalHardware
from megatron.distributed.launcher_environment import RankInfo
from megatron.distributed.mesh import ParallelSizes
from megatron.training import summary
from megatron.training.console import ConsoleReporter
from megatron.training.metrics import measure_matmul_flops_per_second
from megatron.training.metrics_log import TrainRecord
from megatron.training.resolve_run import resolve_run
from megatron.training.train import train
from megatron.training.training_run import TrainingRun, build_training_run
from megatron.utils.console import run_console
from megatron.utils.formatting import format_count, format_quantity

RECORD = TrainRecord(
    step=1, loss=2.0, perplexity=7.4, learning_rate=1e-3, grad_norm=0.5, tokens_per_second=1e4, ms_per_step=41.5,
    tflops=0.1, mfu=None, loss_scale=1.0, skipped_steps=0, memory_gib=1.5, tokens=64, seconds_left=125.0,
)  # fmt: skip


def plain(train_iters: int) -> tuple[io.StringIO, Clock, ConsoleReporter]:
    stream, clock = io.StringIO(), Clock()
    return stream, clock, ConsoleReporter(Console(file=stream, width=200), train_iters, clock=clock)


@pytest.mark.parametrize("width", [60, 97, 200])
def test_the_bar_is_as_wide_as_the_terminal_and_stays_below_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLUMNS", raising=False)
    output = [f"line {number} " + "x" * (30 + 90 * (number % 2)) for number in range(4)]
    with terminal(width) as screen, run_console(tmp_path / "log.txt") as user:
        assert user.width == width
        reporter = ConsoleReporter(user, 10)
        reporter.begin(0, 7200.0)
        for step, line in enumerate(output, start=1):
            reporter.report_micro_step(0, 2)
            reporter.report_micro_step(1, 2)
            reporter.report_step(step)
            reporter.log(line)
        reporter.show_validation("valid", 3, 9)
        user.print("last")
        reporter.close()
    bars = [line for line in re.split(r"[\r\n]", re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.sent)) if "━" in line]
    assert len(bars) >= 5
    assert {len(bar.rstrip()) for bar in bars} <= {width, width - 1}
    assert any("about 2 h left" in bar for bar in bars)
    assert any(bar.startswith("valid 3/9") for bar in bars)
    # The bar has disappeared without traces between the lines; the terminal wraps long ones.
    broken = [line[at : at + width] for line in [*output, "last"] for at in range(0, len(line), width)]
    assert screen.shown == broken


def test_the_first_steps_correct_the_estimate_once() -> None:
    stream, clock, reporter = plain(1000)
    reporter.begin(0, estimate=60.0)
    for step, seconds in ((1, 30.0), (2, 3.0), (3, 3.0), (4, 3.0), (5, 3.0)):  # the first step compiles and allocates
        clock.now += seconds
        reporter.report_step(step)
    assert stream.getvalue() == "step 1/1000 is done\nabout 50 min left, estimated from the first steps\n"


def test_slow_first_steps_report_progress() -> None:
    """Slow first steps report progress until the first interval's line reports the speed."""
    stream, clock, reporter = plain(20)
    reporter.begin(0)
    for step in range(1, 4):
        for done in range(8):
            reporter.report_micro_step(done, 8)
            clock.now += 4
        reporter.report_step(step)
        if step == 2:
            reporter.report_training(RECORD)
    lines = stream.getvalue().splitlines()
    assert [line for line in lines if "loss" not in line] == [
        *(f"step 1/20: {done} of 8 micro-batches" for done in (3, 6)),
        *(f"step 2/20: {done} of 8 micro-batches" for done in (1, 4, 7)),
    ]
    assert len(lines) == 6


def test_steps_of_one_micro_batch_report_completion() -> None:
    stream, clock, reporter = plain(100)
    reporter.begin(0)
    for step in (1, 2):
        reporter.report_micro_step(0, 1)
        clock.now += 12
        reporter.report_micro_step(1, 1)
        reporter.report_step(step)
    assert stream.getvalue() == "step 1/100 is done\nstep 2/100 is done, about 20 min left\n"


def test_a_record_determines_the_remaining_time_without_correction() -> None:
    stream, clock, reporter = plain(1000)
    reporter.begin(0, estimate=60.0)
    reporter.report_step(1)
    reporter.report_training(RECORD)
    clock.now += 30
    reporter.report_step(2)
    assert len(stream.getvalue().splitlines()) == 1


def test_a_long_validation_reports_its_progress() -> None:
    stream, clock, reporter = plain(10)
    for done in range(101):
        reporter.show_validation("test", done, 100)
        clock.now += 1.0
    assert stream.getvalue().splitlines() == [f"test: {done} of 100 batches" for done in range(10, 100, 10)]
    stream, clock, reporter = plain(10)
    for done in range(101):  # a short one prints nothing
        reporter.show_validation("valid", done, 100)
        clock.now += 0.05
    assert stream.getvalue() == ""


def test_validation_reports_every_micro_batch(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(ConsoleReporter, "show_validation", lambda self, *at: seen.append(at))
    train(tiny_config(corpus, train_iters=1, eval_interval=1, eval_iters=3))
    assert seen == [("valid", done, 3) for done in range(4)]


def test_counts_are_abbreviated() -> None:
    assert [format_count(n) for n in (7, 12_345, 124_439_808, 999_999, 2.65e9, 26.2e9)] == [
        "7", "12.3k", "124M", "1.00M", "2.65B", "26.2B"
    ]  # fmt: skip


def test_a_run_prints_a_summary_at_start_and_end(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(
        corpus, tmp_path / "a run", train_iters=2, train_batch_size=8, gradient_accumulation_steps=2, log_interval=5,
        zero_optimization={"stage": 1},
    )  # fmt: skip
    model = build_model(config.model, config.position, 61, device="meta")
    # At a millionth of a step's FLOPs per second, two steps take two million seconds.
    step = model.count_flops_per_token(16) * 8 * 16
    monkeypatch.setattr(summary, "measure_matmul_flops_per_second", lambda *place, **shape: step / 1e6)
    text, result = train_and_print(config)
    first, _, epochs, _, last = text.splitlines()
    assert epochs.startswith("training text: ")
    threads = format_quantity(torch.get_num_threads(), "thread")
    assert first == (
        f"{format_count(model.num_parameters())} parameters on CPU ({threads}) "
        "in fp32; 2 steps of 8 × 16 tokens (micro-batches of 4, 2 accumulated, ZeRO 1) = 256 tokens; about 23 days"
    )
    assert last == f"saved {result.checkpoint}; next: ./deepy.py evaluate '{tmp_path}/a run'"


def test_unfused_attention_on_a_gpu_is_explained(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    config = tiny_config(corpus, train_batch_size=4)
    model = build_model(config.model, config.position, 61, device="meta")
    lines = {}
    for device in ("cpu", "cuda"):
        processes = SimpleNamespace(device=torch.device(device), world_size=1)
        own = {"engine": SimpleNamespace(model=model), "datasets": SimpleNamespace(lengths=(16,))}
        own["resume"] = SimpleNamespace(stages=())
        run = SimpleNamespace(config=config, groups=processes, parameters=5, **own)
        lines[device] = summary.describe_start(cast(TrainingRun, run), 0, 1.0)
    assert "attention" not in lines["cpu"]
    assert lines["cuda"].endswith(
        "; attention in row blocks, saved up to 1,024 keys in training: sdpa cannot add a position bias to the scores"
    )


def test_a_layout_and_the_cost_of_its_pipeline_are_described_in_a_line(corpus: Path) -> None:
    config = tiny_config(corpus, num_layers=5, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=4)
    assert summary.describe_layout(config, ParallelSizes()) == []
    assert summary.describe_layout(config, ParallelSizes(tensor=2, data=3)) == [
        "6 ranks: tensor 2 × pipeline 1 × context 1 × data 3, ZeRO 0"
    ]
    piped = config.replace(zero_optimization={"stage": 1})
    assert summary.describe_layout(piped, ParallelSizes(context=2, pipeline=3)) == [
        "6 ranks: tensor 1 × pipeline 3 × context 2 × data 1, ZeRO 1",
        "pipeline: 3 stages, 4 micro-batches: a stage waits 33% of a step; layers per stage 2, 2, 1",
    ]


def test_ends_name_the_next_command(corpus: Path, tmp_path: Path) -> None:
    config = tiny_config(corpus, tmp_path)
    checkpoint = tmp_path / "checkpoints" / "step_0000004"
    without = config.replace(valid_data_paths=[])
    assert summary.describe_end(without, checkpoint, now=True).endswith(f"./deepy.py evaluate {tmp_path} --data TEXT")
    assert summary.describe_end(tiny_config(corpus), None, now=False) == "no checkpoint saved: save is not set"
    trunk = tmp_path / "trunk" / "checkpoints" / "step_0000004"  # a branch with no steps left saves no checkpoint
    branch = tiny_config(corpus, tmp_path / "branch", load=str(trunk))
    assert summary.describe_end(branch, trunk, now=False) == (
        f"the last checkpoint is {trunk}; next: ./deepy.py evaluate {trunk}"
    )
    assert summary.build_resume_command(config) == f"./deepy.py train {tmp_path}/config.yml load={tmp_path}"
    config.save(tmp_path / RESOLVED_CONFIG)  # beside the user's own, which may lack command-line keys
    command = f"./deepy.py train {tmp_path}/{RESOLVED_CONFIG} load={tmp_path}"
    assert summary.build_resume_command(config) == command
    finetuned = config.replace(load="runs/a", finetune=True)
    assert summary.build_resume_command(finetuned) == f"{command} finetune=false"


def test_a_silent_run_measures_nothing(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "estimate_seconds", None)
    train(tiny_config(corpus, train_iters=1))


def test_the_speed_of_a_product_is_its_flops_over_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training import metrics

    clock = iter(range(100))
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: float(next(clock)))  # every matrix product takes a second
    assert (
        measure_matmul_flops_per_second(torch.device("cpu"), "fp32", rows=1024, inner=8, columns=3) == 2 * 512 * 8 * 3
    )


def test_extending_a_finished_run_warns_of_a_rate_jump(corpus: Path, tmp_path: Path) -> None:
    keys = {"save": str(tmp_path), "lr_decay_style": "cosine", "min_lr": 1e-4}
    train(tiny_config(corpus, **keys))
    again = {**keys, "load": str(tmp_path), "train_iters": 8}

    def notes(**more: object) -> list[str]:
        stream = io.StringIO()
        reporter = ConsoleReporter(Console(file=stream, width=300), 8)
        config = resolve_run(tiny_config(corpus, **again, **more), LocalHardware.detect()).config
        build_training_run(config, RankInfo(), reporter).close()
        return [line for line in stream.getvalue().splitlines() if "learning rate" in line]

    # Cosine from 1e-2 to 1e-4: step 3 of 4 uses 1e-4 + 99e-4 (1 + cos 3π/4)/2; step 4 of 8 uses the midpoint.
    assert notes() == [
        "the learning rate was 1.55e-03 and jumps to 5.05e-03, because its decay now ends at step 8; to keep the "
        "old schedule, set lr_decay_iters=4; its decay has ended, so the rate would stay at min_lr=0.0001"
    ]
    assert notes(lr_decay_iters=4) == []


def test_a_rate_that_ends_at_zero_needs_more_than_the_old_schedule() -> None:
    from megatron.training.schedule import LearningRateSchedule, describe_rate_jump

    old, new = LearningRateSchedule(1.0, 0.0, 0, 100, "linear"), LearningRateSchedule(1.0, 0.0, 0, 200, "linear")
    assert "; set min_lr above 0 too, or nothing is learned" in (describe_rate_jump(old, new, 100) or "")
    assert describe_rate_jump(old, old, 50) is None
    assert describe_rate_jump(old, new, 0) is None
    middle = describe_rate_jump(old, new, 50) or ""
    assert middle.endswith("to keep the old schedule, set lr_decay_iters=100")
    asked = describe_rate_jump(old, LearningRateSchedule(0.1, 0.0, 0, 100, "linear"), 50)
    assert asked == "the learning rate was 5.10e-01 and drops to 5.00e-02"
    warm = LearningRateSchedule(1.0, 0.0, 10, 100, "linear")  # in warmup every step differs
    assert describe_rate_jump(warm, warm, 2) is None
