"""Every command that computes runs on a CUDA device as users start it, without warnings of PyTorch."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.rehearsal.null_device.environment import build_environment, get_gpu_model
from tools.gpu.null_device_cases import BASE, CPLUSPLUS_LINE

ROOT = Path(__file__).parents[2]
NOISE = re.compile(r"Traceback|\w*Warning: |destroy_process_group", re.MULTILINE)
FOREIGN = re.compile(r"site-packages/(?!torch/|triton/)[^\n]*Warning: [^\n]*")
"""Deprecation warnings of other packages in a log."""


def find_noise(text: str) -> list[str]:
    """Tracebacks and warnings in printed or logged text."""
    lines = FOREIGN.sub("", text).splitlines()
    return [line for line in lines if NOISE.search(line) or CPLUSPLUS_LINE.match(line)]


def test_noise_is_found() -> None:
    line = "/x/site-packages/torch/utils.py:3: UserWarning: pin_memory is set"
    other = "/x/site-packages/deepspeed/utils.py:3: FutureWarning: planted"
    cpp = "[rank0]:[W1125 01:02:03.4 ProcessGroupNCCL.cpp:1] Warning: destroy_process_group() was not called"
    assert find_noise("\n".join([line, other, cpp, "step 1", "Traceback (most recent call last):"])) == [
        line,
        cpp,
        "Traceback (most recent call last):",
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Folder with a configuration and a run, trained for two steps and resumed for two."""
    folder = tmp_path_factory.mktemp("commands")
    names = ("train", "valid", "test")
    keys = {name: value for name, value in BASE.items() if name not in ("device", "distributed_backend", "num_gpus")}
    keys |= {f"{name}_data_paths": [str(corpus / f"{name}_text_document")] for name in names}
    keys |= {"eval_interval": 1, "checkpoint_factor": 1, "zero_optimization": {"stage": 1}, "num_layers": 2}
    (folder / "tiny.yml").write_text(json.dumps(keys), encoding="utf-8")  # JSON is YAML
    run_command(folder, "train tiny.yml cdape_kerple_log save=run attention_backend=triton")
    assert (folder / "run/checkpoints/step_0000002").is_dir()
    run_command(folder, "train tiny.yml cdape_kerple_log save=run load=run attention_backend=triton train_iters=4")
    assert (folder / "run/checkpoints/step_0000004").is_dir()
    return folder


def run_command(folder: Path, command: str, *, devices: int = 1, program: str = "deepy.py", codes=(0,)) -> str:
    """Return the output of a command. Fail on other exit codes, and on warnings in the output or a log."""
    base = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "LD_LIBRARY_PATH")}
    environment = build_environment(get_gpu_model("h100"), devices=devices, base=base)
    done = subprocess.run(
        [sys.executable, str(ROOT / program), *command.split()],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    printed = done.stdout + done.stderr
    assert done.returncode in codes, printed
    logs = [path.read_text(encoding="utf-8") for path in folder.rglob("log.txt")]
    assert [line for text in (printed, *logs) for line in find_noise(text)] == []
    return printed


def test_train_and_resume(place: Path) -> None:
    text = (place / "run/log.txt").read_text(encoding="utf-8")
    assert "step 2/2" in text
    assert "step 4/4" in text
    assert "falling back to PyTorch" not in text


def test_train_on_two_devices(place: Path) -> None:
    printed = run_command(place, "train tiny.yml kerple_log save=two num_gpus=2", devices=2)
    assert "2 ranks" in printed
    assert (place / "two/checkpoints/step_0000002").is_dir()


def test_evaluate(place: Path) -> None:
    assert "Perplexity" in run_command(place, "evaluate run --lengths 128,512 --num-windows 2 -o scored")
    assert (place / "scored/results.json").is_file()


def test_evaluate_on_a_device_that_is_not_the_current_one(place: Path) -> None:
    """The kernels run on it, and the memory in the records is its own."""
    run_command(place, "evaluate run --device cuda:1 --lengths 128 --num-windows 2 -o second", devices=2)
    records = json.loads((place / "second/results.json").read_text(encoding="utf-8"))
    assert min(record["memory_gib"] for record in records) > 0.001


def test_generate(place: Path) -> None:
    run_command(place, "generate run --prompt w1 --max-new-tokens 4")


def test_export_and_import(place: Path) -> None:
    run_command(place, "export run exported")
    run_command(place, "import exported imported")
    assert (place / "imported").is_dir()


def test_analyze(place: Path) -> None:
    run_command(place, "analyze run --lengths 64,128 --num-windows 1 -o looked")
    assert (place / "looked/analysis.html").stat().st_size > 10_000


def test_sweep(place: Path) -> None:
    keys = json.loads((place / "tiny.yml").read_text(encoding="utf-8"))
    sweep = {
        "output": "swept", "seeds": [1], "variants": {"kerple": {"pos_emb": "kerple_log"}, "none": {}},
        "evaluate": {"lengths": [128], "windows": 2},
    }  # fmt: skip
    (place / "sweep.yml").write_text(json.dumps({**keys, "pos_emb": "none", "sweep": sweep}), encoding="utf-8")
    run_command(place, "sweep sweep.yml")
    assert (place / "swept/report.html").is_file()


def test_gpu_check(place: Path) -> None:
    """A part of `make gpu-check` runs, or is interrupted on a busy machine, and writes its record and page.

    Its numbers have no meaning here.
    """
    output = place / "checked.json"
    run_command(place, f"--parts memory --json {output}", program="tools/gpu/check.py", codes=(0, 1))
    code = json.loads(output.read_text(encoding="utf-8"))["parts"]["memory"]["exit"]
    assert code == 0 or str(code).startswith("cut after")
    assert output.with_suffix(".md").is_file()
