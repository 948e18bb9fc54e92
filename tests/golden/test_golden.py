"""Golden losses and perplexities: exact on the recording machine, and within rounding elsewhere.

A refactoring must not change them.

    RECORD_GOLDEN=1 .venv/bin/python -m pytest tests/golden     before a refactoring; then without, after every step

A change that alters numbers on purpose records them again and explains this in its commit.
"""

import hashlib
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import losses, records, tiny_config, train_with_processes

from megatron.evaluation.run import evaluate_runs
from megatron.options.evaluation import EvaluationOptions
from megatron.training.train import train
from tools.tolerances import compute_tolerance, count_gpt_sums

GOLDEN = Path(__file__).with_name("golden.json")
# Forward passes differ by float32 rounding. Adam's first steps normalize gradients, so an element whose true gradient
# is rounding noise moves by a whole learning rate. Later losses therefore have a larger tolerance.
FIRST, LATER = compute_tolerance(*count_gpt_sums(32, layers=2)), 5e-3

PATHS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS")
"""Variables that select other code paths of the libraries on the same processor."""

SCORING = EvaluationOptions(lengths=[16, 64], windows=4, targets=8, device="cpu")

Numbers = dict[str, list[float]]

CDAPE = {"score_processor": "cdape", "attention_backend": "chunked"}
"""PyTorch only, because the last digits of our C code depend on the compiler too."""


def machine() -> str:
    """Return the properties of the machine that exact digits depend on."""
    model = next((line for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.processor())
    capability = torch.backends.cpu.get_cpu_capability()
    flags = next((line for line in _lines("/proc/cpuinfo") if line.startswith("flags")), "")  # names are not unique
    kind = hashlib.sha256(flags.encode()).hexdigest()[:8]
    chosen = "".join(f", {key}={os.environ[key]}" for key in PATHS if key in os.environ)
    name = f"{model.split(':')[-1].strip()} ({kind}), {capability}, torch {torch.__version__}"
    return f"{name}, {torch.get_num_threads()} thread{chosen}"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def trained(corpus: Path, run: Path, **keys: Any) -> Numbers:
    train(tiny_config(corpus, run, **keys))
    norms = [record["grad_norm"] for _, record in sorted(records(run).items())]
    return {"losses": losses(run), "norms": norms}


def method(**keys: Any) -> Callable[[Path, Path], Numbers]:
    def numbers(corpus: Path, folder: Path) -> Numbers:
        found = trained(corpus, folder / "run", eval_interval=2, **keys)
        valid = [record["loss"] for _, record in sorted(records(folder / "run", "valid").items())]
        scored = evaluate_runs([folder / "run"], SCORING)
        return found | {"valid": valid, "perplexities": [record.value for record in scored]}

    return numbers


def zero(stage: int) -> Callable[[Path, Path], Numbers]:
    optimization = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return lambda corpus, folder: trained(corpus, folder / "run", pos_emb="t5", zero_optimization=optimization, **CDAPE)


def resumed(corpus: Path, folder: Path) -> Numbers:
    run, keys = folder / "run", {"hidden_dropout": 0.1, "lr_decay_iters": 4, "pos_emb": "fire", "precision": "bf16"}
    trained(corpus, run, train_iters=2, **keys)
    return trained(corpus, run, load=str(run), **keys)


def two_ranks(corpus: Path, folder: Path) -> Numbers:
    keys = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "num_gpus": 2, "eod_mask_loss": True}
    keys |= {"score_processor": "dape", "attention_backend": "chunked", "zero_optimization": {"stage": 1}}
    config = tiny_config(corpus, folder / "run", **keys)
    assert train_with_processes(folder / "job", [config]) == [None]
    return {"losses": losses(folder / "run")}


RUNS: dict[str, Callable[[Path, Path], Numbers]] = {
    "rotary": method(pos_emb="rotary"),
    "kerple_log": method(pos_emb="kerple_log"),
    "cdape": method(pos_emb="kerple_log", score_processor_options={"width": 8}, **CDAPE),
    "zero 1": zero(1),
    "zero 2": zero(2),
    "zero 3": zero(3),
    "resumed": resumed,
    "two ranks": two_ranks,
}


@pytest.mark.parametrize("name", RUNS)
def test_numbers_match_the_recorded_ones(name: str, corpus: Path, tmp_path: Path) -> None:
    found = RUNS[name](corpus, tmp_path)
    golden = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.is_file() else {"runs": {}}
    if os.environ.get("RECORD_GOLDEN"):
        golden["machine"], golden["runs"][name] = machine(), found
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")
        return
    expected = golden["runs"][name]
    if machine() == golden["machine"]:
        assert found == expected
    assert found.keys() == expected.keys()
    assert found["losses"][0] == pytest.approx(expected["losses"][0], rel=FIRST)
    for kind, values in expected.items():
        assert found[kind] == pytest.approx(values, rel=LATER), kind
