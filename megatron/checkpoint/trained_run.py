"""A run that was trained, found by its folder or one of its checkpoints, with nothing of its weights loaded yet.

Whoever asks something of a model begins here: what it is, how far it was trained and by which tokenizer are known
before torch is imported.

The files that its configuration names are found from any directory, and after the whole tree was moved. A configuration
keeps paths as the user wrote them. What they are relative to is the directory of the training (`progress.json`). If
that directory has moved, the run's own folder tells where to: it is `save`, and whatever part of the path above it has
changed has changed for the data as well.

    trained in    /home/ada/work      save: runs/cdape      train_data_paths: [data/python/train_text_document]
    now           /mnt/disk/work/runs/cdape                 → /mnt/disk/work/data/python/train_text_document
"""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint import manifest
from megatron.checkpoint.layout import CONFIG, PROGRESS, get_run_of_checkpoint, resolve_checkpoint_path
from megatron.checkpoint.stored_config import load_checkpoint_config
from megatron.checkpoint.trainer_state import TrainerState
from megatron.config.schema import Config
from megatron.utils.errors import FarfieldWarning, UserError


@dataclass(frozen=True)
class TrainedRun:
    """A trained model that has not been loaded yet."""

    name: str  # as the user wrote it
    checkpoint: Path
    config: Config  # with the paths of its data as they are found from here
    trainer_state: TrainerState
    training_digest: str
    """Hash of how it was trained, but for its seed and steps (`TrainerState.compute_training_digest`)."""

    @property
    def folder(self) -> Path:
        """The run's folder, also where `name` is one of its checkpoints."""
        return get_run_of_checkpoint(self.checkpoint)

    @property
    def tokenizer_name(self) -> str | None:
        """The name of the tokenizer that it was trained with, if it is known."""
        return (self.trainer_state.vocabulary or {}).get("name")


def open_run(path: str | Path) -> TrainedRun:
    """A run by its folder or one of its checkpoints.

    Warns (FarfieldWarning) where the code of a method of the user's own has changed since.

    Raises:
        UserError: there is none, or the file of one of its methods is not there.
        RunError: it is damaged.
    """
    checkpoint = resolve_checkpoint_path(path)
    manifest.verify_checkpoint(checkpoint, (CONFIG, PROGRESS))
    config, trainer_state = load_checkpoint_config(checkpoint), TrainerState.read(checkpoint)
    for file in trainer_state.find_changed_methods(config.position):
        text = f"{path}: the code of {file} has changed since the training, so numbers may be other ones"
        warnings.warn(text, FarfieldWarning, stacklevel=2)
    found = resolve_data_paths(config, checkpoint, trainer_state.directory)
    return TrainedRun(str(path), checkpoint, found, trainer_state, trainer_state.compute_training_digest(config))


def open_runs(paths: Sequence[str | Path]) -> tuple[TrainedRun, ...]:
    """Runs that are to stand side by side. Raises as `open_run`, and UserError if a checkpoint is named twice."""
    opened = tuple(open_run(path) for path in paths)
    if len({run.checkpoint.resolve() for run in opened}) < len(opened):
        raise UserError(f"the same checkpoint is given twice: {', '.join(run.name for run in opened)}")
    return opened


PathNames = str | list["PathNames"]
DATA_SUFFIXES = ("", ".idx", ".bin")
PATH_KEYS = (
    *("train_data_paths", "valid_data_paths", "test_data_paths", "data_path"),
    *("vocab_file", "merge_file"),
)


def resolve_data_paths(config: Config, checkpoint: Path, directory: str | None) -> Config:
    """A configuration whose data and tokenizer files are named as they are found from here.

    Args:
        config: of a checkpoint.
        checkpoint: where it lies now, in the `checkpoints` folder of its run.
        directory: where it was trained; None if that is not known.

    Returns:
        `config` with every path that would not be found changed to one that is; others are left as they are.
    """
    bases = _list_base_folders(config, checkpoint, directory)

    def find(path: str) -> str:
        for old, new in bases:
            moved = joined = os.path.join(old, path)
            if old != new:
                below = os.path.relpath(joined, old or ".")
                if os.path.isabs(joined) != os.path.isabs(old) or below.startswith(".."):
                    continue
                moved = os.path.join(new, below)
            if any(os.path.exists(moved + suffix) for suffix in DATA_SUFFIXES):
                # As it is written where that means the same file.
                return path if os.path.abspath(path) == os.path.abspath(moved) else os.path.abspath(moved)
        return path

    def find_all(value: PathNames) -> PathNames:
        return find(value) if isinstance(value, str) else [find_all(part) for part in value]

    return config.replace(**{key: find_all(value) for key in PATH_KEYS if (value := getattr(config.data, key))})


def _list_base_folders(config: Config, checkpoint: Path, directory: str | None) -> list[tuple[str, str]]:
    """Directories that paths may be relative to, as (then, now), the likeliest first; "" is the working directory."""
    bases = [] if directory is None else [(directory, directory)]
    if config.checkpoint.save is not None:
        old = Path(os.path.normpath(os.path.join(directory or "", config.checkpoint.save))).parts
        new = Path(os.path.abspath(checkpoint)).parts[:-2]
        while old and new and old[-1] == new[-1]:
            old, new = old[:-1], new[:-1]
        if new and os.path.join("", *old) != os.path.join(*new):
            bases.append((os.path.join("", *old), os.path.join(*new)))
    return [*bases, ("", "")]
