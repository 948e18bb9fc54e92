"""The range that a plan prints for score processors contains every measured step."""

import re

import pytest
from rich.console import Console

from megatron.config.load import load_config
from megatron.config.schema import Config
from megatron.distributed.hardware import get_gpu_spec
from megatron.distributed.mesh import ParallelSizes
from megatron.planning import plan
from megatron.planning.model_costs import plan_model
from megatron.planning.plan import MEASURED_OVERHEADS, estimate_measured_range, make_plan
from megatron.planning.print_plan import print_plan
from megatron.planning.step_time import Cluster

ONE_GPU = Cluster(get_gpu_spec("a100-40gb"), 1)
ROW = re.compile(r"\| (c?dape) +\| (\S+), (\d+) × (\d+) +\| ([\d.]+) +\| ([\d.]+) +\| ([\d.]+) +\|")
MEASURED = ROW.findall(plan.__doc__ or "")
NAMES = {"350M": "350M", "2.7B": "2-7B", "6.7B": "6-7B"}


def configure(model: str, processor: str, micro: int = 1, length: int = 512, **keys: object) -> Config:
    flat = {
        "seq_length": length, "precision": "bf16", "checkpoint_activations": False, "gradient_accumulation_steps": 1,
        "train_micro_batch_size_per_gpu": micro, "train_batch_size": micro, "score_processor": processor,
    }  # fmt: skip
    return load_config([model, "kerple_log"]).config.replace(**(flat | keys))


def test_every_measurement_is_in_the_table() -> None:
    assert len(MEASURED) == 8
    assert {row[0] for row in MEASURED} == set(MEASURED_OVERHEADS)


@pytest.mark.parametrize(("processor", "model", "micro", "length", "measured", "planned", "factor"), MEASURED)
def test_measured_times_are_within_the_range(
    processor: str, model: str, micro: str, length: str, measured: str, planned: str, factor: str
) -> None:
    config = configure(NAMES[model], processor, int(micro), int(length))
    step_range = estimate_measured_range(plan_model(config), ParallelSizes(), 50257, ONE_GPU)
    assert step_range is not None
    assert step_range.planned_ratio == pytest.approx(float(planned), abs=6e-4)
    assert step_range.low_ratio - 0.005 <= float(measured) <= step_range.high_ratio + 0.005
    assert float(factor) == pytest.approx((float(measured) - 1) / (step_range.planned_ratio - 1), rel=0.05)
    assert MEASURED_OVERHEADS[processor].low <= float(factor) <= MEASURED_OVERHEADS[processor].high


def test_a_plan_prints_the_range_and_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    config = configure("350M", "cdape", 32)
    console = Console(width=240, highlight=False)
    print_plan(make_plan(config, 50257, Cluster(get_gpu_spec("h200"), 1)), console, 3)
    output = capsys.readouterr().out
    assert (
        "cdape: estimated from FLOPs, a step takes 1.05 times as long as without it; from measurements, 1.33 to 1.84 "
        "times" in output
    )
    assert "docs/results/gpu_visit.md" in output
    assert re.search(r"from measurements of cdape +\d+–\d+", output)
    layout = make_plan(config, 50257, Cluster(get_gpu_spec("h200"), 1)).to_dict(1)["layouts"][0]
    assert layout["seconds_as_measured"]["low"] > layout["seconds"]["total"]
    print_plan(make_plan(configure("350M", "none", 32), 50257, ONE_GPU), console, 3)
    output = capsys.readouterr().out
    assert "measurements" not in output
    assert re.search(r"^1 GPU of \d", output, re.MULTILINE)
    planned = plan_model(configure("350M", "talking_heads"))
    assert estimate_measured_range(planned, ParallelSizes(), 50257, ONE_GPU) is None


@pytest.mark.parametrize("width", [60, 80])
def test_a_plan_shortens_no_number(capsys: pytest.CaptureFixture[str], width: int) -> None:
    plan = make_plan(configure("350M", "cdape", 32), 50257, Cluster(get_gpu_spec("h200"), 8))
    print_plan(plan, Console(width=width, highlight=False), 3)
    lines = capsys.readouterr().out.splitlines()
    (start,) = (number for number, line in enumerate(lines) if line.split()[:3] == ["tp", "cp", "dp"])
    heading, *rows = (line.split() for line in lines[start : start + 4])
    assert {len(row) for row in rows} == {len(heading)}
    for row, layout in zip(rows, plan.to_dict(3)["layouts"], strict=True):
        cells = dict(zip(heading, row, strict=True))
        assert cells["ms/step"] == f"{1e3 * layout['seconds']['total']:,.0f}"
        assert "…" not in "".join(row)


@pytest.mark.parametrize("model", ["125M", "350M", "1-3B", "2-7B", "6-7B"])
def test_the_overlay_of_512_tokens_is_near_what_a_plan_proposes(model: str) -> None:
    """The overlay of 512 tokens is within 3% of the same layout without recomputation, and within 13% of the best
    layout.
    """
    cluster = Cluster(get_gpu_spec("a100-40gb"), 8)
    plan = make_plan(load_config([model, "cdape_kerple_log", "a100_512"]).config, 50257, cluster)
    assert plan.configured_layout is not None
    assert plan.fits_gpu(plan.configured_layout)
    assert plan.configured_layout.step_time.total < 1.13 * plan.fitting_layouts[0].step_time.total


@pytest.mark.parametrize(
    ("keys", "is_shown"), [({}, True), ({"cuda_graph": "off"}, False), ({"attention_mask": "document"}, False)]
)
def test_a_plan_lists_the_memory_of_cuda_graphs(
    keys: dict[str, str], is_shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configure("350M", "none", 32).replace(**keys)
    print_plan(make_plan(config, 50257, ONE_GPU), Console(width=240, highlight=False), 3)
    assert ("with CUDA graphs, at most" in capsys.readouterr().out) == is_shown
