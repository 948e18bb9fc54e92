"""Starting a run on this machine: what is settled, what is refused, what is left behind."""

from pathlib import Path

import pytest

from megatron.config.load import load
from megatron.config.schema import Config
from megatron.errors import RunError, UserError
from megatron.launch import devices, local, worker
from megatron.launch.console import UnexpectedError

SMALL = [
    *("num_layers=1", "hidden_size=8", "num_attention_heads=1", "seq_length=8", "train_iters=2"),
    *("train_data_paths=[nowhere]", "train_batch_size=8", "train_micro_batch_size_per_gpu=2"),
]


def config(*overrides: str) -> Config:
    return load([], [*SMALL, *overrides]).config


@pytest.fixture(autouse=True)
def _data_are_there(monkeypatch):
    monkeypatch.setattr(local, "split_prefixes", lambda data, split: [])


@pytest.fixture
def gpus(monkeypatch):
    """Pretend that this machine has some GPUs."""

    def _gpus(count: int) -> None:
        monkeypatch.setattr(devices, "count_gpus", lambda: count)

    _gpus(0)
    return _gpus


@pytest.mark.parametrize(
    ("count", "overrides", "device", "ranks", "backend", "steps"),
    [
        (0, [], "cpu", 1, "gloo", 4),
        (0, ["num_gpus=2"], "cpu", 2, "gloo", 2),
        (0, ["distributed_backend=nccl"], "cpu", 1, "gloo", 4),
        (4, [], "cuda", 4, "nccl", 1),
        (4, ["num_gpus=2"], "cuda", 2, "nccl", 2),
        (4, ["device=cuda", "num_gpus=1", "precision=fp16"], "cuda", 1, "nccl", 4),
        (4, ["device=cpu"], "cpu", 1, "gloo", 4),
        (4, ["distributed_backend=gloo"], "cuda", 4, "gloo", 1),
    ],
)
def test_machine_decides_what_the_configuration_leaves_open(gpus, count, overrides, device, ranks, backend, steps):
    gpus(count)
    resolved = local.resolve(config("save=runs/a", *overrides))
    launch, training = resolved.config.launch, resolved.config.training
    assert (launch.device, launch.num_gpus, launch.distributed_backend) == (device, ranks, backend)
    assert resolved.ranks == ranks
    assert (training.gradient_accumulation_steps, training.train_batch_size) == (steps, 8)
    changed = [text for text in overrides if text == "distributed_backend=nccl"]
    assert len(resolved.notes) == len(changed)
    assert local.resolve(resolved.config).config == resolved.config
    assert any("save is not set" in note for note in local.resolve(config()).notes)


@pytest.mark.parametrize(
    ("count", "overrides", "message"),
    [
        (0, ["device=cuda"], "there is no CUDA device here"),
        (2, ["num_gpus=4"], "num_gpus is 4, but 2 GPUs are here"),
        (1, ["num_gpus=4"], "1 GPU is here"),
        (0, ["precision=fp16"], "use precision=bf16 or fp32"),
        (0, ["train_data_paths=[]"], "`./deepy.py prepare` makes a corpus"),
        (3, [], r"train_batch_size 8 is not .* 3 ranks"),
    ],
)
def test_refused_before_anything_is_started(gpus, count, overrides, message):
    gpus(count)
    with pytest.raises(UserError, match=message):
        local.resolve(config(*overrides))


@pytest.fixture
def fake_run(monkeypatch, gpus):
    """Replace the training by a function of the log."""

    def _fake(body):
        monkeypatch.setattr(worker, "run", lambda config, log, rank: body(log))

    return _fake


def raising(error: Exception):
    def body(log: Path) -> int:
        raise error

    return body


def test_refusal_leaves_no_folder_behind(fake_run, tmp_path):
    fake_run(raising(UserError("no such data")))
    with pytest.raises(UserError, match="no such data"):
        local.train(config(f"save={tmp_path / 'runs' / 'a'}"))
    assert list(tmp_path.iterdir()) == []


def test_refusal_keeps_a_folder_that_was_there(fake_run, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "log.txt").write_text("an earlier run\n")
    fake_run(raising(UserError("no")))
    with pytest.raises(UserError):
        local.train(config(f"save={tmp_path / 'a'}"))
    assert (tmp_path / "a" / "log.txt").read_text().startswith("an earlier run\n")


def test_failure_keeps_the_log(fake_run, tmp_path):
    fake_run(raising(RunError("loss is NaN")))
    with pytest.raises(RunError, match="NaN"):
        local.train(config(f"save={tmp_path / 'a'}"))
    assert (tmp_path / "a" / "log.txt").exists()


def test_without_a_run_folder_the_log_is_temporary(fake_run):
    logs = []
    fake_run(lambda log: logs.append(log) or 0)
    assert local.train(config()) == 0
    fake_run(lambda log: logs.append(log) or raising(UnexpectedError("bug"))(log))
    with pytest.raises(UnexpectedError):
        local.train(config())
    assert not logs[0].exists()
    assert logs[1].exists()
    logs[1].unlink()


def test_a_place_that_cannot_be_written(fake_run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="which is a file"):
        local.train(config(f"save={tmp_path / 'file'}"))
    with pytest.raises(UserError, match=r"save is .*/file/inside, but .*/file is a file; name a folder"):
        local.train(config(f"save={tmp_path / 'file' / 'inside'}"))


def test_one_rank_runs_in_this_process_with_its_place_in_the_environment(fake_run, monkeypatch):
    import os

    monkeypatch.delenv("RANK", raising=False)
    seen = {}
    fake_run(lambda log: seen.update(os.environ) or 130)
    assert local.train(config("master_port=2345")) == 130
    assert (seen["RANK"], seen["WORLD_SIZE"], seen["MASTER_PORT"]) == ("0", "1", "2345")
    assert "RANK" not in os.environ
