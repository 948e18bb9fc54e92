"""`./deepy.py checkpoints RUN`: the table of a run's checkpoints. Without torch."""

import json
import time
from collections.abc import Callable
from pathlib import Path

from rich.table import Table

from megatron.checkpoint import folder, listing
from megatron.checkpoint.run_files import config_file
from megatron.config.load import read
from megatron.launch.console import PlainConsole
from megatron.quantities import size
from megatron.training.records import METRICS, lines


def thin(run: Path, keep: int, say: Callable[[str], None]) -> None:
    """Delete all but the newest `keep` that are whole; those of the run's extra_save_iters stay.

    Raises UserError (see `listing`).
    """
    listing.listed(run, checksums=False)  # is it a run?
    done = listing.keep_newest(run, keep, _milestones(run))
    for path in done.deleted:
        say(f"deleted {path}")
    for path, problem in done.damaged:
        say(f"not counted: {path} is damaged: {problem}")
    if done.damaged and done.whole < keep:
        say(f"nothing was deleted: only {done.whole} of --keep {keep} {'is' if done.whole == 1 else 'are'} whole")


def show(run: Path, *, verify: bool, as_json: bool) -> bool:
    """Print the table. Returns whether all are whole. Raises UserError: there is no checkpoint."""
    found = listing.listed(run, checksums=verify)
    losses = _losses(folder.run_of(run))
    if as_json:
        rows = [
            {
                "path": str(each.path),
                "step": each.step,
                "bytes": each.bytes,
                "written": each.written,
                "loss": losses.get(("train", each.step)),
                "valid_loss": losses.get(("valid", each.step)),
                "problem": each.problem,
            }
            for each in found
        ]
        print(json.dumps(rows, indent=2))
        return all(each.problem is None for each in found)
    table = Table("step", "size", "written", "loss", "validation", box=None)
    table.add_column("whole" if verify else "names and sizes", overflow="fold")
    for each in found:
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.written))
        numbers = [losses.get((kind, each.step)) for kind in ("train", "valid")]
        shown = ["–" if number is None else f"{number:.4f}" for number in numbers]
        table.add_row(f"{each.step:,}", size(each.bytes), written, *shown, each.problem or "yes")
    console = PlainConsole(highlight=False)
    console.print(table)
    console.print(
        f"{len(found)} in {folder.run_of(run) / folder.CHECKPOINTS}, {size(sum(each.bytes for each in found))} in all"
    )
    return all(each.problem is None for each in found)


def _milestones(run: Path) -> list[int]:
    """The steps whose checkpoints are never deleted. Raises UserError if the run's configuration cannot be read."""
    return read(config_file(folder.run_of(run))).checkpoint.extra_save_iters


def _losses(run: Path) -> dict[tuple[str, int], float]:
    """The losses on record, by kind and step."""
    found = {}
    for _, record in lines(run / METRICS):
        if isinstance(record.get("loss"), float):
            found[str(record.get("kind")), int(record["step"])] = record["loss"]
    return found
