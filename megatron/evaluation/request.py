"""What `evaluate` was asked for, read and checked before torch is imported: mistakes are told at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.trained_run import TrainedRun, open_runs
from megatron.model.device_dtype import check_backend, check_precision
from megatron.options.evaluation import EvaluationOptions
from megatron.reports import records as record_files
from megatron.reports.records import RESULTS_FILE, Record
from megatron.reports.results_folder import check_no_foreign_results
from megatron.utils.atomic_io import check_folder
from megatron.utils.errors import UserError


@dataclass(frozen=True)
class EvalRequest:
    """Runs that are to be measured, and where the results go."""

    runs: tuple[TrainedRun, ...]
    options: EvaluationOptions
    folder: Path | None  # for the results
    saved_records: tuple[Record, ...]  # which are there already
    is_single_run: bool  # the folder is that of the only run


def read_eval_request(runs: Sequence[str | Path], options: EvaluationOptions, output: str | Path | None) -> EvalRequest:
    """The runs that are named, each once, and the results that are there.

    Arguments and errors as for `megatron.evaluation.run.evaluate_runs`.
    """
    if not runs:
        raise UserError("no run given")
    check_precision(options.precision, options.device)
    check_backend(options.backend)
    opened = open_runs(runs)
    own = _default_folder(opened)
    folder = own if output is None else Path(output)
    alone = own is not None and folder is not None and folder.resolve() == own.resolve()
    return EvalRequest(opened, options, folder, _read_saved_records(folder), alone)


def _read_saved_records(folder: Path | None) -> tuple[Record, ...]:
    """The results that a folder holds. Raises UserError if it cannot take more, or they are not understood."""
    if folder is None:
        return ()
    check_folder("--output", folder)
    check_no_foreign_results("--output", folder)
    return tuple(record_files.read_records(folder / RESULTS_FILE)) if (folder / RESULTS_FILE).exists() else ()


def _default_folder(runs: Sequence[TrainedRun]) -> Path | None:
    """A single run's folder. A checkpoint named directly keeps the results of its run as they are."""
    folder = Path(runs[0].name)
    return folder if len(runs) == 1 and folder.resolve() != runs[0].checkpoint.resolve() else None
