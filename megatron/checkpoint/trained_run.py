"""A trained run, opened from its folder or one of its checkpoints without loading weights.

Commands that use a model start here. Its configuration, progress and tokenizer are known before torch is imported.

Data files named in its configuration are found from any directory, and after the whole tree was moved. A configuration
keeps paths as the user wrote them, relative to the training's working directory (`progress.json`). If that directory
was moved, the new location follows from the run's own folder, which is `save`: the leading part of the path that
changed for the run has changed for the data as well.

    trained in    /home/ada/work      save: runs/cdape      train_data_paths: [data/python/train_text_document]
    now           /mnt/disk/work/runs/cdape                 → /mnt/disk/work/data/python/train_text_document
"""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint import manifest
from megatron.checkpoint.layout import PROGRESS, get_run_of_checkpoint, resolve_checkpoint_path
from megatron.checkpoint.manifest import load_checkpoint_config
from megatron.checkpoint.trainer_state import TrainerState
from megatron.config.schema import CONFIG_FILE, Config
from megatron.utils.errors import FarfieldWarning, UserError


@dataclass(frozen=True)
class TrainedRun:
    """Trained model whose weights are not loaded yet."""

    name: str  # as the user wrote it
    checkpoint: Path
    config: Config  # with resolved data paths
    trainer_state: TrainerState
    training_digest: str
    """Hash of the training setup without seed and steps (`TrainerState.compute_training_digest`)."""

    @property
    def folder(self) -> Path:
        """Folder of the run, even if `name` is one of its checkpoints."""
        return get_run_of_checkpoint(self.checkpoint)

    @property
    def tokenizer_name(self) -> str | None:
        """Name of the tokenizer used in training, or None if unknown."""
        return (self.trainer_state.vocabulary or {}).get("name")


def open_run(path: str | Path) -> TrainedRun:
    """Open a run by its folder or one of its checkpoints.

    Warns (FarfieldWarning) if the code of one of the user's own methods has changed since the training.

    Raises:
        UserError: there is no run, or the file of one of its methods is missing.
        RunError: the run is damaged.
    """
    checkpoint = resolve_checkpoint_path(path)
    manifest.verify_checkpoint(checkpoint, (CONFIG_FILE, PROGRESS))
    config, trainer_state = load_checkpoint_config(checkpoint), TrainerState.read(checkpoint)
    try:
        changed_files = trainer_state.find_changed_methods(config.position)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    for file in changed_files:
        text = f"{path}: the code of {file} has changed since the training; results may differ"
        warnings.warn(text, FarfieldWarning, stacklevel=2)
    found = resolve_data_paths(config, checkpoint, trainer_state.directory)
    return TrainedRun(str(path), checkpoint, found, trainer_state, trainer_state.compute_training_digest(config))


def open_runs(paths: Sequence[str | Path]) -> tuple[TrainedRun, ...]:
    """Open runs to be compared. Raises the errors of `open_run`, and UserError if a checkpoint is given twice."""
    opened = tuple(open_run(path) for path in paths)
    if len({run.checkpoint.resolve() for run in opened}) < len(opened):
        raise UserError(f"the same checkpoint is given twice: {', '.join(run.name for run in opened)}")
    return opened


PathNames = str | list["PathNames"] | dict[str, "PathNames"]
DATA_SUFFIXES = ("", ".idx", ".bin")
PATH_KEYS = (
    *("train_data_paths", "valid_data_paths", "valid_data_sets", "test_data_paths", "data_path"),
    *("vocab_file", "merge_file"),
)


def resolve_data_paths(config: Config, checkpoint: Path, directory: str | None) -> Config:
    """Return a configuration with resolved paths of data and tokenizer files.

    Args:
        config: configuration of a checkpoint.
        checkpoint: current location, in the `checkpoints` folder of its run.
        directory: working directory of the training, or None if unknown.

    Returns:
        `config` with every path that does not exist replaced by one that does; other paths are unchanged.
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
                # Keep the original spelling if it refers to the same file.
                return path if os.path.abspath(path) == os.path.abspath(moved) else os.path.abspath(moved)
        return path

    def find_all(value: PathNames) -> PathNames:
        if isinstance(value, dict):
            return {name: find_all(part) for name, part in value.items()}
        return find(value) if isinstance(value, str) else [find_all(part) for part in value]

    return config.replace(**{key: find_all(value) for key in PATH_KEYS if (value := getattr(config.data, key))})


def _list_base_folders(config: Config, checkpoint: Path, directory: str | None) -> list[tuple[str, str]]:
    """Return candidate base directories of relative paths as (old, new), most likely first.

    "" is the working directory.
    """
    bases = [] if directory is None else [(directory, directory)]
    if config.checkpoint.save is not None:
        old = Path(os.path.normpath(os.path.join(directory or "", config.checkpoint.save))).parts
        new = Path(os.path.abspath(checkpoint)).parts[:-2]
        while old and new and old[-1] == new[-1]:
            old, new = old[:-1], new[:-1]
        if new and os.path.join("", *old) != os.path.join(*new):
            bases.append((os.path.join("", *old), os.path.join(*new)))
    return [*bases, ("", "")]
