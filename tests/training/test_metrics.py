"""Metrics between two reports, and the device's peak."""

import math
import time

import pytest
import torch

from megatron.distributed.process_groups import build_single_process_groups
from megatron.training import metrics
from megatron.training.metrics import IntervalMetrics

CPU = torch.device("cpu")


def test_an_interval_averages_the_steps_that_counted() -> None:
    interval = IntervalMetrics(build_single_process_groups())
    interval.load_state_dict({"interval_loss": 10.0, "interval_steps": 2, "interval_z_loss": None})
    interval.add(torch.tensor(2.0), 64, 1e6, 0.5, skipped=False)
    interval.add(torch.tensor(math.nan), 64, 1e6, math.inf, skipped=True)
    loss, norm, _ = interval.read()
    assert loss == pytest.approx(4.0)
    assert norm == 0.5
    assert (interval.steps, interval.tokens, interval.counted) == (2, 128, 3)
    assert interval.state_dict() == {
        "interval_loss": pytest.approx(12.0), "interval_steps": 3, "interval_z_loss": None
    }  # fmt: skip
    record = interval.report(step=3, train_iters=5, tokens=192, learning_rate=0.1, loss_scale=1.0, skipped_steps=1)
    assert (record.loss, record.grad_norm) == (pytest.approx(4.0), 0.5)
    assert interval.read()[:2] == (None, None)
    assert interval.last_loss == pytest.approx(4.0)
    assert record.z_loss is None


def test_a_z_loss_is_averaged_over_the_same_steps_across_sessions() -> None:
    first, second = IntervalMetrics(build_single_process_groups()), IntervalMetrics(build_single_process_groups())
    first.add(torch.tensor(2.0), 64, 1e6, 0.5, skipped=False, z_loss=torch.tensor(0.25))
    first.add(torch.tensor(9.0), 64, 1e6, math.inf, skipped=True, z_loss=torch.tensor(9.0))
    second.load_state_dict(first.state_dict())
    second.add(torch.tensor(4.0), 64, 1e6, 0.5, skipped=False, z_loss=torch.tensor(0.75))
    record = second.report(step=3, train_iters=5, tokens=192, learning_rate=0.1, loss_scale=1.0, skipped_steps=1)
    assert (record.loss, record.z_loss) == (pytest.approx(3.0), pytest.approx(0.5))


def test_the_clock_stops_while_paused() -> None:
    interval = IntervalMetrics(build_single_process_groups())
    time.sleep(0.02)
    interval.pause()
    interval.pause()
    first = interval.read()[2]
    time.sleep(0.02)
    assert interval.read()[2] == first
    assert first >= 0.02
    interval.resume()
    interval.resume()
    time.sleep(0.01)
    assert interval.read()[2] >= first + 0.01


def test_cpu_time_excludes_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processor time counts work, not waiting.

    The test has two steps of 3 s with 1 s of processor time, and a validation of 5 s with full processor use between
    them.
    """
    clocks = iter([(0.0, 0.0), (1.0, 0.5), (6.0, 5.5), (8.0, 6.0), (8.0, 6.0), (8.0, 6.0)])
    monkeypatch.setattr(metrics, "_read_clocks", lambda: next(clocks))
    interval = IntervalMetrics(build_single_process_groups())
    for _ in range(2):
        interval.add(torch.tensor(2.0), 64, 1e6, 0.5, skipped=False)
    interval.pause()
    interval.resume()
    record = interval.report(step=2, train_iters=5, tokens=128, learning_rate=0.1, loss_scale=1.0, skipped_steps=0)
    assert (record.ms_per_step, record.cpu_ms_per_step) == (1500.0, 500.0)


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100-PCIE-40GB", "fp32", 19.5),
        ("NVIDIA H100 80GB HBM3", "fp16", 989.0),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA GH200 480GB", "bf16", 989.0),
        ("NVIDIA L40S", "bf16", 362.0),
        ("Tesla T4", "fp16", 65.0),
        ("Some Other Device", "bf16", None),
    ],
)
def test_peaks_of_known_gpus(name: str, precision: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert metrics.find_peak_tflops(torch.device("cuda", 0), precision, None) == peak
    assert metrics.find_peak_tflops(torch.device("cuda", 0), precision, 7.0) == 7.0


def test_the_cpu_has_no_known_peak() -> None:
    assert metrics.find_peak_tflops(CPU, "fp32", None) is None
    assert metrics.find_peak_tflops(CPU, "fp32", 0.1) == 0.1
    assert 0.01 < metrics.get_peak_memory_gib(CPU) < 1024
