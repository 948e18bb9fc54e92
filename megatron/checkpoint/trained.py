"""A run that was trained, found by its folder or one of its checkpoints, with nothing of its weights loaded yet.

Whoever asks something of a model begins here: what it is, how far it was trained and by which tokenizer are known
before torch is imported.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint import manifest
from megatron.checkpoint.folder import CONFIG, PROGRESS, resolve, run_of_checkpoint
from megatron.checkpoint.located import located
from megatron.checkpoint.progress import Progress
from megatron.checkpoint.stored import config_of
from megatron.config.schema import Config
from megatron.errors import UserError


@dataclass(frozen=True)
class Run:
    """A trained model that has not been loaded yet."""

    name: str  # as the user wrote it
    checkpoint: Path
    config: Config  # with the paths of its data as they are found from here
    progress: Progress

    @property
    def folder(self) -> Path:
        """The run's folder, also where `name` is one of its checkpoints."""
        return run_of_checkpoint(self.checkpoint)

    @property
    def tokenizer_name(self) -> str | None:
        """The name of the tokenizer that it was trained with, if it is known."""
        return (self.progress.vocabulary or {}).get("name")


def open_run(path: str | Path) -> Run:
    """A run by its folder or one of its checkpoints. Raises UserError if there is none, RunError if it is damaged."""
    checkpoint = resolve(path)
    manifest.refuse_damage(checkpoint, (CONFIG, PROGRESS))
    config, progress = config_of(checkpoint), Progress.read(checkpoint)
    return Run(str(path), checkpoint, located(config, checkpoint, progress.directory), progress)


def open_runs(paths: Sequence[str | Path]) -> tuple[Run, ...]:
    """Runs that are to stand side by side. Raises as `open_run`, and UserError if a checkpoint is named twice."""
    opened = tuple(open_run(path) for path in paths)
    if len({run.checkpoint.resolve() for run in opened}) < len(opened):
        raise UserError(f"the same checkpoint is given twice: {', '.join(run.name for run in opened)}")
    return opened
