"""Resolved values and errors before a run, for any machine."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.config.load import load_config, read_config
from megatron.config.schema import Config
from megatron.config.validation import check_config
from megatron.distributed.hardware import LocalHardware
from megatron.distributed.launcher_environment import RankInfo
from megatron.training.resolve_run import resolve_run
from megatron.training.train import train
from megatron.utils.errors import UserError

ROOT = Path(__file__).parents[2]
SMALL = [
    *("num_layers=1", "hidden_size=8", "num_attention_heads=1", "seq_length=8", "train_iters=2"),
    *("train_data_paths=[nowhere]", "train_batch_size=8", "train_micro_batch_size_per_gpu=2"),
]
LOGIN_NODE = LocalHardware(num_gpus=0, num_cores=2)


def config(*overrides: str) -> Config:
    return load_config([], [*SMALL, *overrides]).config


@pytest.mark.parametrize(
    ("gpus", "overrides", "device", "world_size", "backend", "steps"),
    [
        (0, [], "cpu", 1, "gloo", 4),
        (0, ["num_gpus=2"], "cpu", 2, "gloo", 2),
        (0, ["distributed_backend=nccl"], "cpu", 1, "gloo", 4),
        (4, [], "cuda", 4, "nccl", 1),
        (4, ["num_gpus=2"], "cuda", 2, "nccl", 2),
        (4, ["device=cuda", "num_gpus=1", "precision=fp16"], "cuda", 1, "nccl", 4),
        (4, ["device=cpu"], "cpu", 1, "gloo", 4),
        (4, ["distributed_backend=gloo"], "cuda", 4, "gloo", 1),
        (0, ["context_parallel_size=2"], "cpu", 2, "gloo", 4),
        (4, ["context_parallel_size=2"], "cuda", 4, "nccl", 2),
    ],
)
@pytest.mark.parametrize("dry", [False, True])
def test_the_machine_determines_unset_keys(
    gpus: int, overrides: list[str], device: str, world_size: int, backend: str, steps: int, dry: bool
) -> None:
    machine = LocalHardware(gpus, num_cores=2)
    settled = resolve_run(config("save=runs/a", *overrides), machine, dry_run=dry)
    launch, training = settled.config.launch, settled.config.training
    assert (launch.device, launch.num_gpus, launch.distributed_backend) == (device, world_size, backend)
    assert settled.world_size == world_size
    assert (training.gradient_accumulation_steps, training.train_batch_size) == (steps, 8)
    assert len(settled.notes) == overrides.count("distributed_backend=nccl")
    assert resolve_run(settled.config, machine).config == settled.config
    assert resolve_run(settled.config, machine, rank_info=RankInfo(0, world_size)).config == settled.config
    assert any("save is not set" in note for note in resolve_run(config(), machine).notes)


@pytest.mark.parametrize(
    ("machine", "overrides", "message"),
    [
        (LOGIN_NODE, ["device=cuda"], "this machine has no CUDA device"),
        (LOGIN_NODE, ["precision=fp16"], "precision is fp16, which needs a GPU, and this machine has none"),
        (
            LocalHardware(4, 2),
            ["precision=fp16", "device=cpu"],
            "precision is fp16, which needs a GPU, and device is cpu",
        ),
        (LocalHardware(2, 2), ["num_gpus=4"], "num_gpus is 4, but this machine has 2 GPUs"),
        (LocalHardware(1, 2), ["num_gpus=4"], "this machine has 1 GPU;"),
        (LOGIN_NODE, ["train_data_paths=[]"], "`./deepy.py prepare` creates a corpus"),
        (LocalHardware(3, 2), [], r"train_batch_size 8 is not .* 3 ranks"),
        (
            LocalHardware(0, 1),
            ["train_batch_size=10", "num_gpus=5"],
            r"num_gpus is 5, but this machine has 1 CPU core .* at most 4, 4",
        ),
        (
            LOGIN_NODE,
            ["train_batch_size=18", "num_gpus=9"],
            r"num_gpus is 9, but this machine has 2 CPU cores .* at most 8",
        ),
    ],
)
def test_invalid_runs_are_rejected_before_anything_starts(
    machine: LocalHardware, overrides: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        resolve_run(config(*overrides), machine)


def test_started_processes_determine_the_world_size() -> None:
    assert resolve_run(config(), LOGIN_NODE, rank_info=RankInfo(0, 2)).config.launch.num_gpus == 2
    with pytest.raises(UserError, match=r"num_gpus is 4, but 2 processes were started"):
        resolve_run(config("num_gpus=4"), LOGIN_NODE, rank_info=RankInfo(0, 2))


def test_processes_on_several_machines() -> None:
    there, one_each = RankInfo(5, 8, 1, 4), "train_micro_batch_size_per_gpu=1"
    for overrides in ([], ["num_gpus=4", "nodes=2"], ["nodes=2"]):
        settled = resolve_run(config(one_each, *overrides), LocalHardware(4, 8), rank_info=there)
        launch = settled.config.launch
        assert (settled.world_size, launch.nodes, launch.num_gpus, launch.device) == (8, 2, 4, "cuda")
        assert settled.config.training.gradient_accumulation_steps == 1
        assert resolve_run(settled.config, LocalHardware(4, 8), rank_info=there).config == settled.config
    bound = resolve_run(config(one_each), LocalHardware(1, 8), rank_info=there)  # each process sees only its own GPU
    assert (bound.config.launch.num_gpus, bound.config.launch.device) == (4, "cuda")
    uneven = resolve_run(config(one_each, "train_batch_size=5"), LOGIN_NODE, rank_info=RankInfo(4, 5, 0, 2))
    assert (uneven.world_size, uneven.config.launch.num_gpus, uneven.config.launch.nodes) == (5, None, None)
    from_afar = resolve_run(config(one_each, "num_gpus=4", "nodes=2", "device=cuda"), LOGIN_NODE, dry_run=True)
    assert (from_afar.world_size, from_afar.config.training.gradient_accumulation_steps) == (8, 1)


@pytest.mark.parametrize(
    ("overrides", "rank_info", "message"),
    [
        (["num_gpus=1", "nodes=4"], RankInfo(5, 8, 1, 4), "num_gpus is 1 and nodes is 4, but 8 processes were started"),
        (["num_gpus=4"], RankInfo(5, 8, 1, 4), "num_gpus is 4, but 8 processes were started"),
        (
            ["nodes=4"],
            RankInfo(5, 8, 1, 4),
            r"nodes is 4, but 8 processes were started \(WORLD_SIZE\), 4 of them on this machine",
        ),
        (["nodes=2"], None, "nodes is 2, but this process was started alone; start it with srun"),
        (
            ["device=cuda", "train_micro_batch_size_per_gpu=1"],
            RankInfo(5, 8, 1, 8),
            "num_gpus is 8, but this machine has 4 GPUs",
        ),
    ],
)
def test_an_unexpected_number_of_processes(overrides: list[str], rank_info: RankInfo | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve_run(config(*overrides), LocalHardware(4, 8), rank_info=rank_info)


def test_configurations_built_in_python_are_checked() -> None:
    wrong = config().replace(num_attention_heads=3)
    for use in (check_config, train):
        with pytest.raises(UserError, match="hidden_size 8 is not divisible by num_attention_heads 3"):
            use(wrong)


def reloaded(config: Config, folder: Path) -> Config:
    config.save(folder / "config.yml")
    return read_config(folder / "config.yml")


@pytest.mark.parametrize("overrides", [["precision=fp16"], ["device=cuda"]])
def test_a_dry_run_on_a_login_node_lists_unchecked_parts(overrides: list[str], tmp_path: Path) -> None:
    settled = resolve_run(config("save=a", "distributed_backend=nccl", *overrides), LOGIN_NODE, dry_run=True)
    assert settled.open_config is not None
    launch, training = settled.open_config.launch, settled.open_config.training
    assert (launch.device, launch.num_gpus, launch.distributed_backend) == ("cuda", None, "nccl")
    assert (training.train_batch_size, training.train_micro_batch_size_per_gpu) == (8, 2)
    assert settled.world_size is None
    assert [note for note in settled.notes if "the number of GPUs (num_gpus), the batch size" in note] == list(
        settled.notes
    )
    there = resolve_run(reloaded(settled.open_config, tmp_path), LocalHardware(num_gpus=4, num_cores=8)).config
    assert (there.launch.num_gpus, there.training.gradient_accumulation_steps) == (4, 1)

    known = resolve_run(config("save=a", "num_gpus=2", *overrides), LOGIN_NODE, dry_run=True)
    assert (known.world_size, known.config.training.gradient_accumulation_steps) == (2, 2)
    assert known.notes == (
        "this run needs a GPU, and this machine has none; not checked: the number of GPUs, and GPU memory",
    )
    with pytest.raises(UserError, match="train_batch_size 8 is not"):
        resolve_run(config("num_gpus=3", *overrides).replace(num_gpus=3), LOGIN_NODE, dry_run=True)
    with pytest.raises(UserError, match="needs a GPU, and device is cpu"):
        resolve_run(config("precision=fp16", "device=cpu"), LOGIN_NODE, dry_run=True)


def test_it_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from megatron.config.load import load_config; from megatron.distributed.hardware import "
        "LocalHardware\n"
        "from megatron.training.resolve_run import resolve_run\n"
        "resolve_run(load_config(['162M', 'local_setup']).config, LocalHardware.detect(), dry_run=True)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_checkpoint_beyond_the_last_step_is_reported() -> None:
    notes = resolve_run(config("save=runs/a", "extra_save_iters=[1, 2, 9]"), LOGIN_NODE).notes
    assert notes == ("extra_save_iters 9: after train_iters 2, so nothing is saved",)
    unknown = ("save=runs/a", "extra_save_iters=[9]", "train_iters=0", "train_epochs=1")
    assert resolve_run(config(*unknown), LOGIN_NODE).notes == ()  # the number of steps depends on the data


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        ((), ""),
        (("tensorboard_dir=foo", "use_tensorboard=false"), ""),
        (("tensorboard_dir=foo",), " except TensorBoard events in foo"),
        (
            ("tensorboard_dir=foo", "use_wandb=true"),
            " except TensorBoard events in foo and Weights & Biases records in wandb",
        ),
    ],
)
def test_a_run_without_a_folder_is_reported(overrides: tuple[str, ...], kept: str) -> None:
    (note,) = resolve_run(config(*overrides), LOGIN_NODE).notes
    assert note == f"save is not set: this run saves no checkpoints, metrics or log{kept}"


def test_ineffective_zero_options_are_reported() -> None:
    def notes(*overrides: str) -> tuple[str, ...]:
        return resolve_run(
            config("save=runs/a", *(f"zero_optimization.{each}" for each in overrides)), LOGIN_NODE
        ).notes

    at_three = ("stage3_prefetch_bucket_size=0", "sub_group_size=1000")
    assert notes("overlap_comm=true", "reduce_bucket_size=500000000") == (
        "zero_optimization: overlap_comm has no effect at stage 0",
    )
    assert notes("stage=3", *at_three) == ()
    assert notes("stage=2", "allgather_partitions=false", *at_three) == (
        "zero_optimization: allgather_partitions, sub_group_size, stage3_prefetch_bucket_size have no effect at "
        "stage 2",
    )
    (note,) = notes("stage=1", "contiguous_gradients=false", "offload_optimizer.device=cpu")
    assert note.startswith("zero_optimization.contiguous_gradients has no effect with offload_optimizer")


def test_pure_half_precision_needs_zero_with_a_note() -> None:
    divided = ["num_attention_heads=2", "save=runs/a", "precision=bf16"]
    for key in ("model_parallel_size=2", "pipe_parallel_size=2", "context_parallel_size=2"):
        layers = ["num_layers=2"] if key.startswith("pipe") else []
        settled = resolve_run(config(*divided, *layers, key), LOGIN_NODE)
        stage, notes = settled.config.training.zero_optimization.stage, settled.notes
        if key.startswith("context"):
            assert (stage, notes) == (0, ())
        else:
            assert (stage, notes) == (
                1,
                ("zero_optimization.stage 1 instead of 0: bf16 with a sharded model needs ZeRO",),
            )
        assert resolve_run(settled.config, LOGIN_NODE).notes == ()


@pytest.mark.parametrize(
    ("overrides", "sums"),
    [
        (["train_batch_size=128"], 64),
        (["stages=[{until: 1}, {train_batch_size: 256}]", "train_batch_size=64"], 128),
        (["train_batch_size=64"], None),
        (["train_batch_size=128", "zero_optimization.stage=1"], None),
        (["train_batch_size=128", "precision=fp32"], None),
    ],
)
def test_long_sums_in_bfloat16_are_reported(overrides: list[str], sums: int | None) -> None:
    notes = resolve_run(config("save=runs/a", "precision=bf16", *overrides), LOGIN_NODE).notes
    assert notes == (() if sums is None else (
        f"zero_optimization.stage 0: the gradients of {sums} micro-batches are summed in bfloat16, whose rounding "
        "errors add up; stages 1 and 2 sum in float32",
    ))  # fmt: skip


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("sums", [256, 512])
def test_long_sums_in_float16_are_reported(sums: int, stage: int) -> None:
    keys = ("save=runs/a", "precision=fp16", f"train_batch_size={2 * sums}", "num_gpus=1")
    notes = resolve_run(config(*keys, f"zero_optimization.stage={stage}"), LocalHardware(1, 2)).notes
    assert notes == (() if sums == 256 else (
        "precision fp16: the gradients of 512 micro-batches are summed in float16, whose rounding errors add up; "
        "precision bf16 with zero_optimization.stage 1 or 2 sums in float32",
    ))  # fmt: skip
