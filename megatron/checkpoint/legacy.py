"""Resuming from checkpoints of format 2 and earlier, which contain DeepSpeed's own files.

    deepspeed/         optimizer states, masters, loss scale: one file per rank, for the same layout and optimizer
    random_states/     one torch file per rank

These files are no longer written.

`deepspeed_files.py` reads them and imports DeepSpeed. This module does not import DeepSpeed, so that a dry run can
check such a checkpoint without it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint import manifest, tensor_files
from megatron.checkpoint.trainer_state import TrainerState
from megatron.config.schema import Config
from megatron.distributed import rng
from megatron.distributed.mesh import Mesh, ParallelSizes
from megatron.utils.errors import FarfieldError, RunError, UserError

DEEPSPEED_FOLDER, RNG_FOLDER = "deepspeed", "random_states"


@dataclass(frozen=True)
class DeepSpeedStateReader:
    """Reader that restores training state stored by DeepSpeed (`megatron.checkpoint.resume.StateReader`)."""

    checkpoint: Path
    config: Config
    """Configuration of the run that wrote the checkpoint."""
    state: TrainerState

    def check_engine(self, config: Config, sizes: ParallelSizes) -> None:
        """Reject configurations that DeepSpeed's files cannot be loaded into, before anything is built.

        Each model-parallel rank stored its own shard, so the number of these ranks must not change. ZeRO 1–3 stored one
        shard of the optimizer states per data- and context-parallel rank, so that number must not change either;
        without ZeRO it may. Stages 1 and 2 stored the same shards, except that stage 1 in bfloat16 uses another
        optimizer when it accumulates gradients on the device. Stage 3 stored one shard per sub-group.

        Raises:
            UserError: names the key and both values.
        """
        before, now, state = self.config.training, config.training, self.state
        stage, precision = now.zero_optimization.stage, now.compute_dtype
        same_parts = {state.zero_stage, stage} == {1, 2} and precision != "bf16"
        old_steps, new_steps = before.gradient_accumulation_steps, now.gradient_accumulation_steps
        old_zero, new_zero = before.zero_optimization, now.zero_optimization
        old_device, new_device = old_zero.offload_optimizer.device, new_zero.offload_optimizer.device
        accumulates, accumulated = new_steps > 1 and new_device == "none", old_steps > 1 and old_device == "none"
        same_optimizer = stage != 1 or precision != "bf16" or accumulates == accumulated
        same_groups = stage != 3 or old_zero.sub_group_size == new_zero.sub_group_size
        for key, old, new, fits in (
            ("precision", state.precision, precision, state.precision == precision),
            ("zero_optimization.stage", state.zero_stage, stage, state.zero_stage == stage or same_parts),
            ("model_parallel_size", state.tensor, sizes.tensor, state.tensor == sizes.tensor),
            ("pipe_parallel_size", state.pipeline, sizes.pipeline, state.pipeline == sizes.pipeline),
            ("num_gpus", state.world, sizes.world_size, state.world == sizes.world_size or stage == 0),
            (
                "gradient_accumulation_steps",
                old_steps,
                new_steps,
                same_optimizer or (old_steps > 1) == (new_steps > 1),
            ),
            ("zero_optimization.offload_optimizer.device", old_device, new_device, same_optimizer),
            ("zero_optimization.sub_group_size", old_zero.sub_group_size, new_zero.sub_group_size, same_groups),
        ):
            if not fits:
                raise UserError(
                    f"{key}: {self.checkpoint} was written with {old}, but this run has {new}; its optimizer states "
                    "cannot be resharded; keep the old value, or load only the weights (finetune=true)"
                )

    def restore(self, engine: Any, mesh: Mesh) -> None:
        """Restore masters, optimizer states, loss scale and counters in a new DeepSpeed engine.

        All ranks must call this. Raises RunError if files are missing or damaged; a run never resumes from partial
        state.
        """
        from megatron.checkpoint.deepspeed_files import use_safe_loading

        folder = self.checkpoint / DEEPSPEED_FOLDER
        try:
            with use_safe_loading(engine, manifest.read_format_version(self.checkpoint)):
                engine.load_checkpoint(
                    str(self.checkpoint),
                    tag=DEEPSPEED_FOLDER,
                    load_optimizer_states=True,
                    load_lr_scheduler_states=False,
                )
        except FarfieldError:
            raise
        except AssertionError as failure:
            has_files = any(folder.glob("*.pt"))
            reason = _get_first_line(failure) if has_files else "it contains no DeepSpeed files"
            raise RunError(f"{folder}: cannot be loaded: {reason}") from None
        except Exception as failure:  # each DeepSpeed optimizer fails differently on incompatible states
            raise RunError(f"{folder}: cannot be loaded: {_get_first_line(failure)}") from None
        if engine.global_steps != self.state.step:
            raise RunError(
                f"{folder}: contains the states of step {engine.global_steps}, but progress.json is from step "
                f"{self.state.step}; the files belong to different checkpoints"
            )

    def synchronize(self, engine: Any) -> None:
        """No-op: DeepSpeed has already loaded the weights."""

    def restore_rng(self, mesh: Mesh) -> bool:
        """Restore this rank's random states.

        Returns False if there are none for it; raises RunError if they are damaged.
        """
        if mesh.rank >= self.state.world:
            return False
        path = self.checkpoint / RNG_FOLDER / f"rank_{mesh.rank:05d}.pt"
        states = tensor_files.read_torch_file(path)
        try:
            rng.restore_rng_state(states)
        except Exception:
            raise RunError(f"{path}: not the random states of a process; the checkpoint is damaged") from None
        return True


def _get_first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'its files do not match this run').splitlines()[0]}"
