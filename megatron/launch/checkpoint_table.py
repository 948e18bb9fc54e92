"""`./deepy.py checkpoints RUN`: the table of a run's checkpoints. Without torch."""

import json
import time
from collections.abc import Callable
from pathlib import Path

from rich.table import Table

from megatron.checkpoint import layout, listing
from megatron.checkpoint.run_files import get_config_path
from megatron.config.load import read_config
from megatron.launch.console import PlainConsole
from megatron.training.records import METRICS_FILE, read_records
from megatron.utils.formatting import format_bytes


def prune_checkpoints(run: Path, keep: int, say: Callable[[str], None]) -> None:
    """Delete all but the newest `keep` that are whole; those of the run's extra_save_iters stay.

    Raises UserError (see `listing`).
    """
    listing.list_checkpoint_infos(run, checksums=False)  # is it a run?
    result = listing.prune_run(run, keep, _list_extra_save_steps(run))
    for path in result.deleted:
        say(f"deleted {path}")
    for path, problem in result.damaged:
        say(f"not counted: {path} is damaged: {problem}")
    if result.damaged and result.num_valid < keep:
        say(
            f"nothing was deleted: only {result.num_valid} of --keep {keep} "
            f"{'is' if result.num_valid == 1 else 'are'} whole"
        )


def print_checkpoints(run: Path, *, verify: bool, as_json: bool) -> bool:
    """Print the table. Returns whether all are whole. Raises UserError: there is no checkpoint."""
    checkpoints = listing.list_checkpoint_infos(run, checksums=verify)
    losses = _read_losses(layout.find_run_folder(run))
    if as_json:
        rows = [
            {
                "path": str(checkpoint.path),
                "step": checkpoint.step,
                "bytes": checkpoint.bytes,
                "written": checkpoint.written,
                "loss": losses.get(("train", checkpoint.step)),
                "valid_loss": losses.get(("valid", checkpoint.step)),
                "problem": checkpoint.problem,
            }
            for checkpoint in checkpoints
        ]
        print(json.dumps(rows, indent=2))
        return all(checkpoint.problem is None for checkpoint in checkpoints)
    table = Table("step", "size", "written", "loss", "validation", box=None)
    table.add_column("whole" if verify else "names and sizes", overflow="fold")
    for checkpoint in checkpoints:
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(checkpoint.written))
        numbers = [losses.get((kind, checkpoint.step)) for kind in ("train", "valid")]
        cells = ["–" if number is None else f"{number:.4f}" for number in numbers]
        table.add_row(
            f"{checkpoint.step:,}", format_bytes(checkpoint.bytes), written, *cells, checkpoint.problem or "yes"
        )
    console = PlainConsole(highlight=False)
    console.print(table)
    console.print(
        f"{len(checkpoints)} in {layout.find_run_folder(run) / layout.CHECKPOINTS}, "
        f"{format_bytes(sum(checkpoint.bytes for checkpoint in checkpoints))} in all"
    )
    return all(checkpoint.problem is None for checkpoint in checkpoints)


def _list_extra_save_steps(run: Path) -> list[int]:
    """The steps whose checkpoints are never deleted. Raises UserError if the run's configuration cannot be read."""
    return read_config(get_config_path(layout.find_run_folder(run))).checkpoint.extra_save_iters


def _read_losses(run: Path) -> dict[tuple[str, int], float]:
    """The losses on record, by kind and step."""
    losses = {}
    for _, record in read_records(run / METRICS_FILE):
        if isinstance(record.get("loss"), float):
            losses[str(record.get("kind")), int(record["step"])] = record["loss"]
    return losses
