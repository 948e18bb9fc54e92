"""Resuming from checkpoints of format 2 and before, whose states are DeepSpeed's own files.

    deepspeed/         optimizer states, masters, loss scale: one part per rank, for the same layout and optimizer
    random_states/     one file of torch's per rank

Nothing writes them any more.
"""

from pathlib import Path
from typing import Any

from megatron.checkpoint import random_states, tensor_files
from megatron.checkpoint.progress import Progress
from megatron.checkpoint.stored import config_of
from megatron.config.schema import Config
from megatron.distributed.mesh import Sizes
from megatron.errors import FarfieldError, RunError, UserError

DEEPSPEED = "deepspeed"


def check_engine(checkpoint: Path, progress: Progress, config: Config, sizes: Sizes) -> None:
    """Refuse what DeepSpeed's files cannot be loaded into, before anything is built.

    Each of the ranks that hold a model together stored its own part, so their numbers must stay. ZeRO 1–3 stored one
    part of the optimizer states for each rank that divides the batch (data × context), so that number must stay too;
    without ZeRO it may change. Stages 1 and 2 stored the same parts, except that stage 1 in bfloat16 has another
    optimizer where it accumulates gradients on the device. Stage 3 stored a part for each of its sub-groups.

    Raises:
        UserError: naming the key and both values.
    """
    before, now = config_of(checkpoint).training, config.training
    stage, precision = now.zero_optimization.stage, now.compute_type
    same_parts = {progress.zero_stage, stage} == {1, 2} and precision != "bf16"
    was, steps = before.gradient_accumulation_steps, now.gradient_accumulation_steps
    old_zero, new_zero = before.zero_optimization, now.zero_optimization
    old_device, new_device = old_zero.offload_optimizer.device, new_zero.offload_optimizer.device
    accumulates, accumulated = steps > 1 and new_device == "none", was > 1 and old_device == "none"
    same_optimizer = stage != 1 or precision != "bf16" or accumulates == accumulated
    same_groups = stage != 3 or old_zero.sub_group_size == new_zero.sub_group_size
    for key, old, new, fits in (
        ("precision", progress.precision, precision, progress.precision == precision),
        ("zero_optimization.stage", progress.zero_stage, stage, progress.zero_stage == stage or same_parts),
        ("model_parallel_size", progress.tensor, sizes.tensor, progress.tensor == sizes.tensor),
        ("pipe_parallel_size", progress.pipeline, sizes.pipeline, progress.pipeline == sizes.pipeline),
        ("num_gpus", progress.world, sizes.world, progress.world == sizes.world or stage == 0),
        ("gradient_accumulation_steps", was, steps, same_optimizer or (was > 1) == (steps > 1)),
        ("zero_optimization.offload_optimizer.device", old_device, new_device, same_optimizer),
        ("zero_optimization.sub_group_size", old_zero.sub_group_size, new_zero.sub_group_size, same_groups),
    ):
        if not fits:
            raise UserError(
                f"{key}: {checkpoint} was written with {old}, this run has {new}; its optimizer states cannot be "
                "divided anew: go on as before, or take the weights alone (finetune=true)"
            )


def restore(checkpoint: Path, progress: Progress, engine: Any) -> None:
    """Put masters, optimizer states and loss scale back into a fresh DeepSpeed engine. All ranks must call this.

    Raises RunError if the files are missing or damaged: a run never goes on from less.
    """
    from megatron.checkpoint.deepspeed_files import safe_files  # DeepSpeed: only once its device is chosen

    states = checkpoint / DEEPSPEED
    try:
        with safe_files(engine):
            engine.load_checkpoint(
                str(checkpoint), tag=DEEPSPEED, load_optimizer_states=True, load_lr_scheduler_states=False
            )
    except FarfieldError:
        raise
    except AssertionError as failure:
        what = "DeepSpeed finds none of its files there" if not any(states.glob("*.pt")) else _first_line(failure)
        raise RunError(f"{states}: cannot be loaded: {what}") from None
    except Exception as failure:  # states of another kind fail in as many ways as DeepSpeed has optimizers
        raise RunError(f"{states}: cannot be loaded: {_first_line(failure)}") from None
    if engine.global_steps != progress.step:
        raise RunError(
            f"{states}: holds the states of step {engine.global_steps}, but progress.json is of step "
            f"{progress.step}; the files are not of one checkpoint"
        )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'its files do not fit this run').splitlines()[0]}"


def restore_random(checkpoint: Path, rank: int) -> None:
    """Put a rank's random states back. Raises RunError if they are missing or damaged."""
    path = checkpoint / "random_states" / f"rank_{rank:05d}.pt"
    states = tensor_files.read(path)
    try:
        random_states.restore(states)
    except Exception:
        raise RunError(f"{path}: does not hold the random states of a process; the checkpoint is damaged") from None
