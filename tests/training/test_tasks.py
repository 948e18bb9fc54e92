"""Training on a task: same loop, checkpoints and resuming as for a text."""

from pathlib import Path

import pytest
from tiny_runs import losses, records, same_weights, tiny_config, train_with_processes

from megatron.checkpoint.load_model import load_model
from megatron.config.schema import Config
from megatron.data.datasets import SampleOrder, build_datasets
from megatron.data.torch_data import build_dataloader
from megatron.distributed.mesh import Mesh
from megatron.distributed.process_groups import build_single_process_groups
from megatron.training.train import train
from megatron.utils.errors import UserError


def task_config(run: Path | None, **keys: object) -> Config:
    """Return the tiny model's configuration for strings of up to eight bits, reversed."""
    base = {
        "train_data_paths": [],
        "valid_data_paths": [],
        "task": "reverse_string",
        "task_length": 8,
        "seq_length": 16,
        "make_vocab_size_divisible_by": 8,
        "no_weight_tying": True,
        "lr_decay_style": "constant",
    }
    return tiny_config(Path("no corpus"), run, **{**base, **keys})


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(task_config(whole, train_iters=6, eval_interval=6))
    train(task_config(parts, train_iters=3))
    train(task_config(parts, train_iters=6, eval_interval=6, load=str(parts)))
    assert losses(parts) == losses(whole)
    assert records(parts, "valid")[6]["loss"] == records(whole, "valid")[6]["loss"]
    assert records(parts, "test")[6]["loss"] == records(whole, "test")[6]["loss"]
    assert same_weights(parts, whole)


def test_two_ranks_train_like_one(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    train(task_config(one))
    keys = {"num_gpus": 2, "train_micro_batch_size_per_gpu": 2}
    assert train_with_processes(tmp_path / "job", [task_config(two, **keys)]) == [None]
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)  # 4 steps, float32 sums in another order


def test_speed_counts_processed_tokens(tmp_path: Path) -> None:
    """Speed counts tokens and FLOPs at each step's own length; the loss is per scored token."""
    config = task_config(tmp_path / "run", train_iters=8)
    train(config)
    order = SampleOrder(seed=1234, train_samples=32, batch_size=4)
    data = build_datasets(config.data, order, seq_length=16, cache=None, groups=build_single_process_groups())
    lengths = [batch["tokens"].shape[1] for batch in build_dataloader(data.train, micro_batch_size=4, mesh=Mesh())]
    assert len(set(lengths)) > 2
    found = records(tmp_path / "run")
    assert [found[step]["tokens"] for step in range(1, 9)] == [4 * sum(lengths[:step]) for step in range(1, 9)]
    model = load_model(tmp_path / "run").model
    for step, length in enumerate(lengths, start=1):
        expected = found[step]["tokens_per_second"] * model.count_flops_per_token(length) / 1e12
        assert found[step]["tflops"] == pytest.approx(expected)


def test_learning(tmp_path: Path) -> None:
    """Comparing two bits is learned in a few dozen steps, which shows that labels are at the scored positions."""
    keys = {"task": "even_pairs", "task_length": 2, "task_shortest_length": 2, "seq_length": 3, "train_batch_size": 32}
    train(task_config(tmp_path / "run", **keys, train_micro_batch_size_per_gpu=32, train_iters=100, log_interval=20))
    found = losses(tmp_path / "run")
    assert found[0] > 0.5  # ln 2 is .69
    assert found[-1] < 0.1


def test_another_task_does_not_resume(tmp_path: Path) -> None:
    train(task_config(tmp_path / "run", train_iters=1))
    keys = {"task": "duplicate_string", "task_length": 5, "seq_length": 15, "load": str(tmp_path / "run")}
    with pytest.raises(UserError, match=r"^task: .* of task duplicate_string .* of task reverse_string"):
        train(task_config(tmp_path / "other", **keys, finetune=True))
