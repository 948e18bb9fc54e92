"""A run that was trained, found by its folder or one of its checkpoints, with nothing of its weights loaded yet.

Whoever asks something of a model begins here: what it is, how far it was trained and by which tokenizer are known
before torch is imported.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint import manifest
from megatron.checkpoint.data_paths import resolve_data_paths
from megatron.checkpoint.layout import CONFIG, PROGRESS, get_run_of_checkpoint, resolve_checkpoint_path
from megatron.checkpoint.stored_config import load_checkpoint_config
from megatron.checkpoint.trainer_state import TrainerState
from megatron.config.schema import Config
from megatron.utils.errors import UserError


@dataclass(frozen=True)
class TrainedRun:
    """A trained model that has not been loaded yet."""

    name: str  # as the user wrote it
    checkpoint: Path
    config: Config  # with the paths of its data as they are found from here
    progress: TrainerState

    @property
    def folder(self) -> Path:
        """The run's folder, also where `name` is one of its checkpoints."""
        return get_run_of_checkpoint(self.checkpoint)

    @property
    def tokenizer_name(self) -> str | None:
        """The name of the tokenizer that it was trained with, if it is known."""
        return (self.progress.vocabulary or {}).get("name")


def open_run(path: str | Path) -> TrainedRun:
    """A run by its folder or one of its checkpoints. Raises UserError if there is none, RunError if it is damaged."""
    checkpoint = resolve_checkpoint_path(path)
    manifest.verify_checkpoint(checkpoint, (CONFIG, PROGRESS))
    config, progress = load_checkpoint_config(checkpoint), TrainerState.read(checkpoint)
    return TrainedRun(str(path), checkpoint, resolve_data_paths(config, checkpoint, progress.directory), progress)


def open_runs(paths: Sequence[str | Path]) -> tuple[TrainedRun, ...]:
    """Runs that are to stand side by side. Raises as `open_run`, and UserError if a checkpoint is named twice."""
    opened = tuple(open_run(path) for path in paths)
    if len({run.checkpoint.resolve() for run in opened}) < len(opened):
        raise UserError(f"the same checkpoint is given twice: {', '.join(run.name for run in opened)}")
    return opened
