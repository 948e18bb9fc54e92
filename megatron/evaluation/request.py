"""What `evaluate` was asked for, read and checked before torch is imported: mistakes are told at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from megatron.checkpoint.folder import CONFIG, resolve
from megatron.checkpoint.progress import Progress
from megatron.config.schema import Config
from megatron.errors import RunError, UserError
from megatron.evaluation.located import located
from megatron.evaluation.protocols import Plan, default_lengths, default_targets, make_plan
from megatron.evaluation.texts import Text, common_text
from megatron.files import check_folder
from megatron.model.options import ModelOptions
from megatron.reports import records as record_files
from megatron.reports.records import RESULTS, Record

BACKENDS: tuple[str, ...] = get_args(ModelOptions.model_fields["attention_backend"].annotation)
PRECISIONS = ("auto", "fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Run:
    """A trained model that has not been loaded yet."""

    name: str  # as the user wrote it
    checkpoint: Path
    config: Config  # with the paths of its data as they are found from here
    progress: Progress


@dataclass(frozen=True)
class Request:
    """Runs that can be put side by side, and on what."""

    runs: tuple[Run, ...]
    lengths: tuple[int, ...]
    targets: int
    text: Text
    plan: Plan
    folder: Path | None  # for the results
    kept: tuple[Record, ...]  # which are there already
    alone: bool  # the folder is that of the only run


def read_request(
    runs: Sequence[str | Path],
    lengths: Sequence[int] | str | None,
    protocol: str,
    windows: int | None,
    targets: int | None,
    *,
    data: str | Path | None,
    output: str | Path | None,
    device: str,
    precision: str,
    backend: str | None,
    window: int | None,
) -> Request:
    """Arguments and errors as for `megatron.evaluation.run.evaluate_runs`."""
    if not runs:
        raise UserError("no run given")
    check_device(device)
    if precision not in PRECISIONS:
        raise UserError(f"precision = {precision!r}: choose one of {', '.join(PRECISIONS)}")
    if precision == "fp16" and device == "cpu":
        raise UserError("precision = 'fp16': needs a GPU; on CPU choose fp32 or bf16")
    if window is not None and window < 1:
        raise UserError(f"window = {window}: at least 1 is needed, the token itself")
    check_backend(backend)
    opened = tuple(open_run(path) for path in runs)
    if len({run.checkpoint.resolve() for run in opened}) < len(opened):
        raise UserError(f"the same checkpoint is given twice: {', '.join(run.name for run in opened)}")
    wanted = parse_lengths(lengths, [run.config.model.seq_length for run in opened])
    text = common_text([(run.name, run.config, (run.progress.vocabulary or {}).get("name")) for run in opened], data)
    if targets is None:
        targets = default_targets(min(run.config.model.seq_length for run in opened), wanted, protocol)
    plan = make_plan(len(text.tokens), wanted, protocol, targets=targets, windows=windows)
    own = _own_folder(opened)
    folder = own if output is None else Path(output)
    kept: list[Record] = []
    if folder is not None:
        check_folder("--output", folder)
        if (folder / RESULTS).exists():
            kept = record_files.read(folder / RESULTS)
    alone = own is not None and folder is not None and folder.resolve() == own.resolve()
    return Request(opened, tuple(wanted), targets, text, plan, folder, tuple(kept), alone)


def open_run(path: str | Path) -> Run:
    """A run by its folder or one of its checkpoints. Raises UserError if there is none, RunError if it is damaged."""
    checkpoint = resolve(path)
    if not (checkpoint / CONFIG).is_file():
        raise RunError(f"{checkpoint / CONFIG}: is missing; the checkpoint is damaged")
    config, progress = Config.read(checkpoint / CONFIG), Progress.read(checkpoint)
    return Run(str(path), checkpoint, located(config, checkpoint, progress.directory), progress)


def check_device(name: str) -> tuple[str, int]:
    """The kind and number of a device called auto, cpu, cuda or cuda:1. Raises UserError if it is none of these."""
    kind, _, index = name.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and not index.isdigit()) or (kind == "auto" and index):
        raise UserError(f"device = {name!r}: choose one of auto, cpu, cuda")
    return kind, int(index or 0)


def check_backend(name: str | None) -> None:
    """Raises UserError if there is no such attention backend; None is the run's own."""
    if name is not None and name not in BACKENDS:
        raise UserError(f"backend = {name!r}: choose one of {', '.join(BACKENDS)}")


def parse_lengths(lengths: Sequence[int] | str | None, train_lengths: Sequence[int]) -> list[int]:
    """Window lengths in tokens, ascending.

    Args:
        lengths: numbers of tokens; or text of them, separated by commas, each in tokens (`128`) or in training lengths
            (`2x`, `2×`, `1.5x`); None means 1x to 32x.
        train_lengths: training lengths of the runs; multiples need them to be equal.

    Raises:
        UserError: a part that is no length, or multiples for runs of different training lengths.
    """
    alike = len(set(train_lengths)) == 1
    if lengths is None:
        if not alike:
            trained = ", ".join(f"{length:,}" for length in sorted(set(train_lengths)))
            raise UserError(f"lengths: name them in tokens, as the runs were trained at different ones ({trained})")
        return default_lengths(train_lengths[0])
    if not isinstance(lengths, str):
        if not lengths:
            raise UserError("lengths: none given")
        return sorted(set(lengths))
    result = set()
    for part in (part.strip() for part in lengths.split(",")):
        number = part.removesuffix("x").removesuffix("×").replace("_", "")
        try:
            value = float(int(number)) if number == part.replace("_", "") else float(number) * train_lengths[0]
        except (ValueError, OverflowError):
            value = 0.0  # refused below
        if not (1 <= value < 2**40 and value == int(value)):
            raise UserError(f"lengths: {part!r} is not a length; write tokens (128,256) or training lengths (1x,2x)")
        if number != part.replace("_", "") and not alike:
            raise UserError(f"lengths: {part} is ambiguous, as the runs were trained at different lengths; name tokens")
        result.add(int(value))
    return sorted(result)


def _own_folder(runs: Sequence[Run]) -> Path | None:
    """A single run's folder. A checkpoint named directly keeps the results of its run as they are."""
    folder = Path(runs[0].name)
    return folder if len(runs) == 1 and folder.resolve() != runs[0].checkpoint.resolve() else None
