"""Reported norms equal those of the checkpoints' weights, in any layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import losses, records, same_weights, tiny_config, train_with_processes, write_corpora

from megatron.checkpoint import layout
from megatron.training.optimizer import TOTAL
from megatron.training.train import train
from megatron.utils.errors import RunError
from tools.tolerances import compute_tolerance, count_gpt_sums

STEPS = 2
METHOD = {"pos_emb": "kerple_log", "score_processor": "cdape", "score_processor_options": {"kernel_size": 3}}
NORMS = {"log_param_norm": True, "checkpoint_factor": 1, "extra_save_iters": [0], "train_iters": STEPS}
HALF = {"train_micro_batch_size_per_gpu": 2, "num_gpus": 2}


def zero(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}


def label(name: str) -> str:
    """Return group and part of a weight, from its name in a checkpoint."""
    if name.startswith("position."):
        return "bounded to [0.01, inf]/position encoding"
    group = "decayed" if name.endswith("weight") and "norm" not in name else "not decayed"
    parts = {"processor": "score processor", "norm": "norms", "self_attention": "attention", "mlp": "feed-forward"}
    return f"{group}/{next((part for key, part in parts.items() if key in name), 'embedding')}"


def compute_norms(run: Path, step: int) -> tuple[dict[str, float], dict[str, float]]:
    """Compute norms of a run's weights after a step, and of the step, from its checkpoints in float64."""
    before, after = (
        load_file(run / "checkpoints" / f"step_{number:07d}" / layout.WEIGHTS) for number in (step - 1, step)
    )
    sums: dict[str, list[float]] = {}
    for name, weight in after.items():
        squares = [float(x.double().square().sum()) for x in (weight, weight.double() - before[name].double())]
        for key in (TOTAL, label(name)):
            sums.setdefault(key, [0.0, 0.0])
            sums[key] = [old + new for old, new in zip(sums[key], squares, strict=True)]
    return {key: pair[0] ** 0.5 for key, pair in sums.items()}, {key: pair[1] ** 0.5 for key, pair in sums.items()}


def test_norms_of_every_layout(tmp_path: Path) -> None:
    corpus = write_corpora(tmp_path / "corpus")
    plain, alone = tmp_path / "plain", tmp_path / "alone"
    train(tiny_config(corpus, plain, train_iters=STEPS, **METHOD))
    train(tiny_config(corpus, alone, **NORMS, **METHOD))
    assert losses(alone) == losses(plain)
    assert same_weights(alone, plain)
    assert records(plain)[1]["param_norm"] is None

    layouts: dict[str, dict[str, Any]] = {
        "zero0 bf16": {**HALF, **zero(0), "precision": "bf16"},
        "zero1": {**HALF, **zero(1)},
        "zero3": {**HALF, **zero(3)},
        "zero2": {**HALF, **zero(2)},
        "context zero0": {**zero(0), "num_gpus": 2, "context_parallel_size": 2},
        "context zero2": {**zero(2), "num_gpus": 2, "context_parallel_size": 2},
        "tensor": {**zero(2), "num_gpus": 2, "model_parallel_size": 2},
        "pipeline": {
            **zero(0), "num_gpus": 2, "pipe_parallel_size": 2, "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
        },
    }  # fmt: skip
    configs = [tiny_config(corpus, tmp_path / name, **{**NORMS, **METHOD, **keys}) for name, keys in layouts.items()]
    assert train_with_processes(tmp_path / "job", configs) == [None] * len(layouts)
    tolerance = compute_tolerance(*count_gpt_sums(32, layers=2))
    expected = records(alone)
    for name in ("alone", *layouts):
        for step, record in records(tmp_path / name).items():
            norms, updates = compute_norms(tmp_path / name, step)
            assert record["param_norm"] == pytest.approx(norms, rel=1e-6), (name, step)
            # A difference of float32 numbers keeps only the last digits, on both sides.
            assert record["update_norm"] == pytest.approx(updates, rel=1e-5), (name, step)
            assert record["update_norm"][TOTAL] > 0
            if "bf16" not in name:
                assert record["param_norm"] == pytest.approx(expected[step]["param_norm"], rel=tolerance), (name, step)


def test_a_step_that_is_skipped_moves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training.engine import Engine

    real = Engine.forward_backward

    def spoiled(self: Engine, *args: Any, **keys: Any) -> torch.Tensor:
        loss = real(self, *args, **keys)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(float("inf"))
        return loss

    monkeypatch.setattr(Engine, "forward_backward", spoiled)
    corpus = write_corpora(tmp_path / "corpus")
    with pytest.raises(RunError, match="the last step was bad"):
        train(tiny_config(corpus, tmp_path / "run", log_param_norm=True, train_iters=1))
    (record,) = records(tmp_path / "run").values()
    assert set(record["update_norm"].values()) == {0.0}
    assert record["param_norm"][TOTAL] > 0
