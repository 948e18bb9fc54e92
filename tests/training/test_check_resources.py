"""Runs that exceed memory or disk are rejected with both numbers; uncertain ones are not; one key overrides the
check.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_runs import tiny_config

from megatron.checkpoint.layout import list_checkpoints
from megatron.config.load import LoadedConfig, load_config
from megatron.config.schema import Config
from megatron.data.load_tokenizer import find_vocab_size
from megatron.distributed.hardware import LocalHardware
from megatron.distributed.mesh import ParallelSizes
from megatron.launch.dispatch import launch_training
from megatron.planning.attention_memory import list_backends
from megatron.planning.memory_estimate import estimate_memory
from megatron.planning.model_costs import count_parameters, plan_encoding, plan_model, plan_processor
from megatron.training import check_resources
from megatron.training.check_resources import (
    CheckpointCounts,
    count_certain_bytes,
    count_checkpoints,
    estimate_checkpoint_size,
)
from megatron.training.resolve_run import resolve_remote_run, resolve_run
from megatron.training.train import train
from megatron.utils.errors import UserError
from megatron.utils.formatting import format_bytes

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
SMALL = [
    *("num_layers=2", "hidden_size=256", "num_attention_heads=4", "seq_length=128", "train_iters=10"),
    *("train_data_paths=[nowhere]", "train_micro_batch_size_per_gpu=8", "pos_emb=rotary"),
]
OFFLOAD = "zero_optimization={stage: 2, offload_optimizer: {device: cpu}}"
CPU = LocalHardware(num_gpus=0, num_cores=8, memory=8 * GIB)
GPU = LocalHardware(num_gpus=1, num_cores=8, memory=64 * GIB, gpu_memory=8 * GIB)


def small(*overrides: str) -> Config:
    return load_config([], [*SMALL, *overrides]).config


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.parametrize(
    ("machine", "keys", "more", "message"),
    [
        (CPU, [], ["num_layers=1000000"], r"num_layers 1000000 × hidden_size 256, .* at least 23\.\d TiB of this "
         r"machine's memory for its 1 process, but it has 8 GiB"),
        (CPU, ["num_layers=150", "num_gpus=2"], ["num_gpus=4"], r"GiB .* for its 4 processes, but it has 8 GiB"),
        (CPU, ["num_layers=150", "pipe_parallel_size=2", "gradient_accumulation_steps=2"], ["num_layers=300"],
         r"GiB .* for its 2 processes, but it has 8 GiB"),
        (CPU, [], ["seq_length=1000000000", "attention_backend=chunked"], r"× seq_length 1000000000: .* TiB"),
        (GPU, ["num_layers=300"], ["num_layers=1000000"], r"num_layers 1000000 × .*: a rank needs at least 21.6 TiB of "
         r"GPU memory \(2\.87 TiB of weights, 5\.75 TiB of optimizer states\), but a GPU has 8 GiB"),
        (GPU, [], ["hidden_size=100000"], r"hidden_size 100000, .* but a GPU has 8 GiB"),
        (GPU, [], ["train_micro_batch_size_per_gpu=10000"],
         r"train_micro_batch_size_per_gpu 10000 × seq_length 128: a rank needs at least [\d.]+ GiB of GPU memory "),
        (GPU, ["seq_length=8192"], ["attention_backend=eager"], "but a GPU has 8 GiB"),
        (LocalHardware(1, 8, memory=GIB, gpu_memory=80 * GIB), [], ["num_layers=500"],
         "building the model takes at least 1.47 GiB of this machine's memory for its 1 process, but it has 1 GiB"),
        (LocalHardware(1, 8, memory=4 * GIB, gpu_memory=80 * GIB), ["num_layers=500"], [OFFLOAD],
         "offload_optimizer takes at least 4.41 GiB of this machine's memory for its 1 process, but it has 4 GiB"),
    ],
)  # fmt: skip
def test_too_large_models_are_rejected_before_building(
    machine: LocalHardware, keys: list[str], more: list[str], message: str, dry: bool
) -> None:
    resolve_run(small(*keys), machine, dry_run=dry)
    with pytest.raises(UserError, match=message) as refused:
        resolve_run(small(*keys, *more), machine, dry_run=dry)
    assert "\n" not in str(refused.value)
    assert str(refused.value).endswith("set check_resources=false to start anyway")
    resolve_run(small(*keys, *more, "check_resources=false"), machine, dry_run=dry)


@given(layers=st.integers(1, 60), batch=st.sampled_from((1, 8, 64)), gib=st.floats(0.05, 4), stage=st.integers(0, 3))
def test_only_certain_failures_are_rejected(layers: int, batch: int, gib: float, stage: int) -> None:
    """Only certain failures are rejected: with every backend, and with a tenth of the plan in reserve."""
    keys = [f"num_layers={layers}", f"train_micro_batch_size_per_gpu={batch}"]
    keys += [f"zero_optimization={{stage: {stage}}}", "pos_emb=kerple_log", "score_processor=cdape", "precision=bf16"]
    memory = int(gib * GIB)
    machine = LocalHardware(2, 8, memory=64 * GIB, gpu_memory=memory)
    config, sizes = resolve_run(small(*keys, "check_resources=false"), machine).config, ParallelSizes(data=2)
    position = config.position
    backends = list_backends(plan_encoding(position), plan_processor(position), 64)
    plans = [estimate_memory(plan_model(config), sizes, 1, backend=backend, gpu_bytes=memory) for backend in backends]
    certain = min(max(plan.weights + plan.optimizer, int(0.9 * plan.total)) for plan in plans)
    if certain > memory:
        with pytest.raises(UserError, match=f"at least {format_bytes(certain)} of GPU memory"):
            resolve_run(small(*keys), machine)
    else:
        notes = resolve_run(small(*keys), machine).notes
        is_tight = plans[0].total > 0.9 * memory  # for `auto`
        assert any("memory may run out" in note for note in notes) == is_tight


def test_a_certain_bound_is_below_every_peak_that_was_measured() -> None:
    rows = json.loads((ROOT / "docs/results/planner_memory.json").read_text(encoding="utf-8"))["rows"]
    measured = [row for row in rows if row["error"] is None]  # the others are rejected before they are built
    assert len(measured) > 40
    assert all(check_resources.CERTAIN_FRACTION * row["planned"] < row["peak"] for row in measured)


def test_estimates_without_score_matrices_are_smaller() -> None:
    config = resolve_run(small("pos_emb=kerple_log", "score_processor=cdape", "seq_length=4096"), CPU).config
    for backend in ("eager", "chunked"):
        estimate = estimate_memory(plan_model(config), ParallelSizes(), 1000, backend=backend)
        less = estimate.drop_score_matrices()
        assert less.total < estimate.total - estimate.workspace_maps // 2
        assert (less.weights, less.optimizer) == (estimate.weights, estimate.optimizer)
        assert count_certain_bytes(less) >= less.weights + less.optimizer


STAGES = "stages=[{until: 4}, {until: 8, seq_length: 4194304}, {seq_length: 256, train_micro_batch_size_per_gpu: 8}]"


def test_future_stages_are_checked(tmp_path: Path) -> None:
    """Every future stage is checked; a run past its long stage may resume where that stage would not fit."""
    keys = (f"save={tmp_path}", "train_batch_size=32768", "gradient_accumulation_steps=4096", STAGES)
    with pytest.raises(UserError, match=r"^stage 2 of 3: .*seq_length 4194304: .* at least \d+ GiB .* has 8 GiB"):
        resolve_run(small(*keys), CPU)
    with pytest.raises(UserError, match=r"^stage 2 of 3: "):  # the number of epochs is not known yet
        resolve_run(small(*keys, "train_iters=0", "train_epochs=2"), CPU)
    (tmp_path / "checkpoints" / "step_0000008").mkdir(parents=True)
    resolve_run(small(*keys, f"load={tmp_path}"), CPU)
    (tmp_path / "checkpoints" / "step_0000008").rename(tmp_path / "checkpoints" / "step_0000007")
    with pytest.raises(UserError, match=r"^stage 2 of 3: "):
        resolve_run(small(*keys, f"load={tmp_path}"), CPU)


def test_unknown_values_are_not_checked() -> None:
    large = small("num_layers=1000000")
    resolve_run(large, LocalHardware(1, 8))
    resolve_run(large.replace(device="cuda", num_gpus=1), CPU, dry_run=True)  # on GPUs of another machine
    resolve_remote_run(large)
    with pytest.raises(UserError, match="but a GPU has 80 GiB"):
        resolve_remote_run(large, gpu_memory=80 * GIB)


def saving(train_iters: int = 10, **keys: Any) -> Config:
    plain = {"checkpoint_factor": None, "keep_last_n_checkpoints": None, "extra_save_iters": []}
    return small().replace(train_iters=train_iters, **plain | keys)


def simulate(config: Config, start: int, existing: set[int], stage_ends: set[int]) -> CheckpointCounts:
    """Simulate `Saver` step by step: write a checkpoint, then delete older ones."""
    options, there, most = config.checkpoint, set(existing), 0
    for step in range(start, config.training.train_iters + 1):
        is_due = step > 0 and options.checkpoint_factor is not None and step % options.checkpoint_factor == 0
        is_due |= step in options.extra_save_iters or step == config.training.train_iters or step in stage_ends
        if not is_due or step in existing or (step == start and start > 0):
            continue
        there.add(step)
        most = max(most, len(there) - len(existing))
        if options.keep_last_n_checkpoints is not None:
            regular = sorted(there - set(options.extra_save_iters))
            there -= set(regular[: -options.keep_last_n_checkpoints])
    return CheckpointCounts(most, len(there) - len(existing))


STEPS = st.integers(0, 30)


@given(
    train_iters=st.integers(1, 30),
    factor=st.none() | st.integers(1, 12),
    keep=st.none() | st.integers(1, 5),
    extra=st.lists(STEPS, max_size=4),
    start=STEPS,
    existing=st.sets(st.integers(1, 30), max_size=8),
    until=st.none() | st.integers(1, 29),
)
def test_checkpoints_are_counted_as_they_are_written_and_deleted(
    train_iters: int,
    factor: int | None,
    keep: int | None,
    extra: list[int],
    start: int,
    existing: set[int],
    until: int | None,
) -> None:
    start = min(start, train_iters)
    existing = {step for step in existing if step <= start} | ({start} if start else set())
    config = saving(train_iters, checkpoint_factor=factor, keep_last_n_checkpoints=keep, extra_save_iters=extra)
    ends = set() if until is None or until >= train_iters else {until}
    if ends:
        config = config.replace(stages=[{"until": until}, {"seq_length": 64}])
    assert count_checkpoints(config, start, existing) == simulate(config, start, existing, ends)


@pytest.mark.parametrize("algorithm", ["AdamW", "Lion", "Muon"])
def test_a_real_run_leaves_as_many_checkpoints_of_that_size(algorithm: str, corpus: Path, tmp_path: Path) -> None:
    keys = {"optimizer": {"type": algorithm, "params": {"lr": 1e-3}}, "checkpoint_factor": 1}
    config = tiny_config(corpus, tmp_path / "run", keep_last_n_checkpoints=2, extra_save_iters=[0, 1], **keys)
    counts = count_checkpoints(config)
    assert counts == CheckpointCounts(5, 4)
    train(config)
    checkpoints = list_checkpoints(tmp_path / "run")
    assert len(checkpoints) == counts.at_end
    size = estimate_checkpoint_size(config, find_vocab_size(config.data))
    weights = load_file(checkpoints[-1] / "model.safetensors")
    states = load_file(checkpoints[-1] / "states/rank_00000.safetensors")
    moments = {name: tensor for name, tensor in states.items() if not name.startswith("random")}
    assert sum(tensor.nbytes for tensor in weights.values()) == size.weights == size.parts
    assert sum(tensor.nbytes for tensor in moments.values()) == size.states
    on_disk = sum(file.stat().st_size for file in checkpoints[-1].rglob("*"))
    assert size.total <= on_disk < size.total + 100_000  # headers, configuration, random states


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Simulated disk with a given number of free bytes."""
    there = {"free": 0}
    monkeypatch.setattr(check_resources, "measure_free_bytes", lambda folder: there["free"])
    return there


def launch(config: Config, *, dry: bool) -> None:
    """Launch like the command line, without training."""
    loaded = LoadedConfig(config, (), (), load_config([], SMALL).layers)
    launch_training(loaded, None, lambda notes: None, dry_run=dry, hardware=CPU)


@pytest.mark.parametrize("dry", [True, False])
def test_checkpoints_too_large_for_the_disk_are_rejected_early(
    dry: bool, corpus: Path, tmp_path: Path, disk: dict[str, int], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("megatron.launch.worker.run_rank", lambda config, log, rank_info, hooks=None: 0)
    run = tmp_path / "runs" / "a"
    keys = {"checkpoint_factor": 1, "keep_last_n_checkpoints": 2, "train_iters": 9}
    config = tiny_config(corpus, run, **keys)
    size = 4 * count_parameters(plan_model(config), 61)
    needed = 3 * 3 * size + size  # two checkpoints and one being written, each with two moments, and its shards
    disk["free"] = needed - 1
    with pytest.raises(UserError) as refused:
        launch(config, dry=dry)
    assert re.fullmatch(
        rf"save: {run}: the checkpoints of this run need at least {format_bytes(needed)} more \(3 × "
        rf"{format_bytes(3 * size)}, and {format_bytes(size)} while one is written\), but the disk has "
        rf"{format_bytes(needed - 1)} free; .*, or set check_resources=false to start anyway", str(refused.value),
    )  # fmt: skip
    assert not run.parent.exists()
    launch(config.replace(save=None), dry=dry)
    launch(config.replace(check_resources=False), dry=dry)
    disk["free"] = needed
    launch(config.replace(save=str(tmp_path / "b")), dry=dry)
    capsys.readouterr()


def test_a_resumed_run_counts_its_existing_checkpoints(corpus: Path, tmp_path: Path, disk: dict[str, int]) -> None:
    config = tiny_config(corpus, tmp_path, checkpoint_factor=1, keep_last_n_checkpoints=2, train_iters=9)
    size = 4 * count_parameters(plan_model(config), 61)
    for step in (4, 5):
        checkpoint = tmp_path / "checkpoints" / f"step_000000{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "config.yml").touch()
    resumed = config.replace(load=str(tmp_path))

    def check(config: Config) -> None:
        check_resources.check_disk(resolve_run(config, CPU))

    disk["free"] = 3 * size + size  # one more than exist, until the oldest is deleted
    check(resumed)
    disk["free"] -= 1
    with pytest.raises(UserError, match=r"\(1 × "):
        check(resumed)
    check(resumed.replace(train_iters=5))  # nothing left to save
    earlier = resumed.replace(load=str(tmp_path / "checkpoints" / "step_0000004"), rollback=True)
    with pytest.raises(UserError, match=r"\(2 × "):  # step 5 is moved aside and kept
        check(earlier)


def test_disk_space_is_that_of_the_nearest_existing_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def disk_usage(path: Path) -> Any:
        asked.append(path)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("shutil.disk_usage", disk_usage)
    assert check_resources.measure_free_bytes(tmp_path / "a" / "b") is None
    assert asked == [tmp_path]
    monkeypatch.undo()
    assert (check_resources.measure_free_bytes(tmp_path / "a") or 0) > 0
    assert check_resources.measure_free_bytes("/proc/x") is None  # reported when the file is created
