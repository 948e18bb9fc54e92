"""The files that a run writes into its folder, beside those that somebody else has put there.

What a person wrote is never written over. A configuration of theirs keeps its name, and the run's goes beside it:

    RUN/config.yml              of the run; or a person's own, from which they train
    RUN/config.resolved.yml     then: the run's

Records and heartbeats have one name each, by which others find them, so a folder that holds such files of somebody else
takes no run.
"""

import os
from pathlib import Path

from megatron.checkpoint.layout import CONFIG, list_checkpoints
from megatron.checkpoint.lock import LOCK
from megatron.config.load import read_config
from megatron.config.schema import Config
from megatron.utils.errors import FarfieldError, UserError

CONFIG_NAMES = "config.resolved.yml"


def get_config_path(run: str | Path) -> Path:
    """Where the whole configuration of a run lies, whether it is there or not."""
    beside = Path(run) / CONFIG_NAMES
    return beside if beside.is_file() else Path(run) / CONFIG


def save_config(config: Config, run: str | Path) -> str | None:
    """Write the whole configuration into a run's folder. Returns a line to tell if a person's own lies there.

    Raises:
        UserError: it may not be written there; RunError if the disk refuses.
    """
    own, beside = Path(run) / CONFIG, Path(run) / CONFIG_NAMES
    if own.exists() and not is_saved_config(own):
        config.save(beside)
        return f"{own} was not written by a run and stays as it is; the whole configuration is in {beside}"
    config.save(own)
    if beside.is_file() and is_saved_config(beside):
        beside.unlink()  # of an earlier run, when there was somebody else's in its place
    return None


def refuse_foreign_run_files(run: str | Path | None, names: tuple[str, ...]) -> None:
    """Refuse a folder in which no run has begun, but which holds files that a run would replace.

    Args:
        run: where `save` points; None if nothing is saved.
        names: of the files that a run begins anew.

    Raises:
        UserError: with the first of them.
    """
    # A folder that cannot be looked into is refused, with the key, by whoever makes files in it.
    if (
        run is None
        or os.path.exists(Path(run) / LOCK)
        or not os.access(run, os.R_OK | os.X_OK)
        or list_checkpoints(run)
    ):
        return
    found = [name for name in names if os.path.exists(Path(run) / name)]
    if os.path.exists(Path(run) / CONFIG_NAMES) and not is_saved_config(Path(run) / CONFIG_NAMES):
        found.append(CONFIG_NAMES)
    if found:
        raise UserError(
            f"save: {run} holds {found[0]}, which no run wrote and a run would replace; choose another folder, or move "
            "it away"
        )


def is_saved_config(path: Path) -> bool:
    """Is a file, byte for byte, what `Config.save` makes of the configuration in it?"""
    try:
        return path.read_bytes() == read_config(path).to_yaml().encode()
    except (OSError, FarfieldError):
        return False
