"""Checkpoints of sharded models: one file of whole weights, resumed bit for bit, and loaded as weights by other
layouts.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import VOCABULARY, losses, same_weights, tiny_config, train_with_processes, write_corpora

from megatron.checkpoint import layout
from megatron.checkpoint.load_model import load_model
from megatron.config.schema import Config
from megatron.training.train import train
from tools.tolerances import compute_tolerance, count_gpt_sums

MODEL = {
    "num_layers": 3, "score_processor": "cdape", "activation": "swiglu", "gradient_accumulation_steps": 2,
    "train_micro_batch_size_per_gpu": 2, "optimizer": {"params": {"lr": 1e-2, "eps": 1e-2}},
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"model_parallel_size": 2},
    "tensor, ZeRO 2": {"model_parallel_size": 2, "zero_optimization": {"stage": 2}},
    "context": {"context_parallel_size": 2, "zero_optimization": {"stage": 1}},
    "pipeline": {"pipe_parallel_size": 2},
    "pipeline, bf16": {"pipe_parallel_size": 2, "precision": "bf16"},
}
TERMS, SUMS = count_gpt_sums(32, layers=3)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str | None], Path]:
    """Runs of two ranks, in one and in two parts, and a run of one rank; errors of rejected runs; the corpus."""
    where = tmp_path_factory.mktemp("layouts")
    corpus = write_corpora(where / "corpus")

    def config(run: str, **keys: Any) -> Config:
        return tiny_config(corpus, where / run, **{**MODEL, "num_gpus": 2, **keys})

    train(config("alone", num_gpus=1))
    jobs, short = [], {"train_iters": 2, "lr_decay_iters": 4}
    for name, keys in LAYOUTS.items():
        jobs += [config(name, **keys), config(f"{name}, stopped", **keys, **short)]
        jobs.append(config(f"{name}, stopped", **keys, load=str(where / f"{name}, stopped")))
        start_time = {"load": str(where / "alone"), "finetune": True, "train_iters": 1}
        jobs.append(config(f"{name}, finetuned", **keys, **start_time))
    errors = train_with_processes(where / "job", jobs)
    train(config("alone, finetuned", num_gpus=1, load=str(where / "alone"), finetune=True, train_iters=1))
    return where, errors, corpus


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(layout.resolve_checkpoint_path(run) / layout.WEIGHTS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_gathered_weights_match_one_process(runs: tuple[Path, list[str | None], Path], name: str) -> None:
    where, errors, _ = runs
    assert errors == [None] * len(errors)
    ours, alone = weights(where / name), weights(where / "alone")
    assert ours.keys() == alone.keys()
    half = LAYOUTS[name].get("precision") == "bf16"
    unit = compute_tolerance(1, 2 * SUMS, torch.bfloat16) if half else compute_tolerance(TERMS, 2 * SUMS)
    # Each of four steps moves a weight by at most lr/eps = 1 times its gradient, whose total norm is clipped to 1.
    for weight, expected in alone.items():
        torch.testing.assert_close(ours[weight], expected, rtol=0, atol=4 * unit, msg=weight)
    assert not list((where / name).rglob("parts"))
    loaded = load_model(where / name)
    tokens = torch.randint(VOCABULARY, (1, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.isfinite(loaded.model(tokens)).all()


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_layout_resumes_bit_for_bit(runs: tuple[Path, list[str | None], Path], name: str) -> None:
    where, _, _ = runs
    assert losses(where / f"{name}, stopped") == losses(where / name)
    assert same_weights(where / f"{name}, stopped", where / name)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_loads_the_weights_of_one_process(runs: tuple[Path, list[str | None], Path], name: str) -> None:
    where, _, _ = runs
    unit = compute_tolerance(1, SUMS, torch.bfloat16) if "bf16" in name else compute_tolerance(TERMS, SUMS)
    assert losses(where / f"{name}, finetuned") == pytest.approx(losses(where / "alone, finetuned"), rel=unit)
