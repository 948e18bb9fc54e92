"""Runs that `evaluate` and `analyze` process: validated before torch is imported, then loaded one at a time.

A `RunJob` is a run with its device and data type. `read_eval_request` and `run_eval_jobs` are the parts of an
evaluation that do not depend on its target. They are shared by texts, probes, and trained tasks (`run.py`) and tasks of
lm-evaluation-harness (`harness_tasks.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from megatron.checkpoint.layout import find_run_folder
from megatron.checkpoint.trained_run import TrainedRun, open_runs
from megatron.config.position_overrides import list_overrides
from megatron.data.load_tokenizer import load_run_tokenizer
from megatron.evaluation.eval_target import EvalTarget, ProgressCallback, ScoringContext
from megatron.evaluation.provenance import (
    describe_machine,
    distinguish_names,
    list_method_names,
    list_software_versions,
)
from megatron.model.device_dtype import check_precision, resolve_device, resolve_dtype
from megatron.options.evaluation import EvaluationOptions
from megatron.reports import records as record_files
from megatron.reports.method_rows import disambiguate_methods
from megatron.reports.records import Record
from megatron.reports.results_output import (
    check_no_foreign_results,
    merge_into_results,
    print_comparison_tables,
    read_saved_records,
)
from megatron.utils.atomic_io import check_writable, folder_lock
from megatron.utils.errors import UserError
from megatron.utils.imports import pause_garbage_collection
from megatron.utils.progress import ProgressMeter, WorkItem

if TYPE_CHECKING:
    import torch

    from megatron.checkpoint.load_model import LoadedModel
    from megatron.config.schema import Config

# torch and matplotlib are imported inside functions, so that errors in the options are reported at once.

LogFunction = Callable[[str], None]

UNFINISHED_FILE = "results.unfinished.json"
"""File in the results folder with the partial records of a running or interrupted evaluation."""


@dataclass(frozen=True)
class PartialRecords:
    """Partial records of models whose evaluation is not finished. The next evaluation can resume from them.

    Args:
        path: file of the records, or None to save nothing.
        previous: records left by an interrupted evaluation.
    """

    path: Path | None
    previous: tuple[Record, ...]

    @classmethod
    def open(cls, folder: Path | None) -> PartialRecords:
        """Open the partial records of a results folder.

        Raises:
            UserError: the file exists but cannot be parsed.
        """
        path = None if folder is None else folder / UNFINISHED_FILE
        return cls(path, tuple(record_files.read_records(path)) if path is not None and path.exists() else ())

    def save(self, records: Sequence[Record]) -> None:
        """Save records, and keep those of other models, which other evaluations may write at the same time."""
        if self.path is not None and records:
            self._rewrite(self.path, records, records)

    def remove(self, records: Sequence[Record]) -> None:
        """Remove the partial records of a finished evaluation, given its records."""
        if self.path is not None and self.path.exists():
            self._rewrite(self.path, records, ())

    def _rewrite(self, path: Path, measured: Sequence[Record], kept: Sequence[Record]) -> None:
        with folder_lock(path.parent):
            others = record_files.read_records(path) if path.exists() else []
            left = [*record_files.drop_remeasured(others, measured, same_run=False), *kept]
            if left:
                record_files.write_records(path, left)
            else:
                path.unlink(missing_ok=True)


@dataclass(frozen=True)
class RunJob:
    """Run to be loaded and evaluated."""

    run: TrainedRun
    name: str  # name of its method
    device: torch.device
    dtype: torch.dtype
    work_item: WorkItem
    note: str | None = None  # printed before the work begins

    @property
    def config(self) -> Config:
        return self.run.config

    def load(self, backend: str | None, **overrides: Any) -> LoadedModel:
        """Load the model of the run.

        Args:
            backend: attention backend; that of the run's configuration if None.
            overrides: position options to override (`override_position`).

        Raises:
            UserError: documents must be masked, but the tokenizer has no end-of-document token.
            RunError: the checkpoint is damaged.
        """
        with pause_garbage_collection():
            from megatron.checkpoint.load_model import load_model

        end_of_document = None
        mask = overrides.get("attention_mask") or self.config.position.attention_mask
        if mask == "document" and "eod" not in (self.run.trainer_state.vocabulary or {}):
            tokenizer = load_run_tokenizer(self.run.folder, self.config.data, self.run.tokenizer_name)
            end_of_document = check_end_of_document(tokenizer.name, tokenizer.eod)

        return load_model(
            self.run,
            device=self.device,
            dtype=self.dtype,
            backend=backend,
            end_of_document=end_of_document,
            **overrides,
        )


def check_end_of_document(tokenizer: str, eod: int | None) -> int:
    """Return the end-of-document token.

    Args:
        tokenizer: name of the tokenizer.
        eod: its end-of-document token.

    Raises:
        UserError: the tokenizer has no such token.
    """
    if eod is None:
        raise UserError(f"--attention-mask document: {tokenizer} has no end-of-document token to separate documents")
    return eod


def build_run_jobs(
    runs: Sequence[TrainedRun],
    names: Sequence[str],
    work_items: Sequence[WorkItem],
    *,
    device: str,
    precision: str,
    notes: Sequence[str | None] | None = None,
) -> list[RunJob]:
    """Build jobs from runs, with their devices and data types.

    Args:
        names, work_items, notes: one for each run.
        device, precision: values of the options.

    Raises:
        UserError: the device is unavailable or does not support the precision.
    """
    if not runs:
        return []
    resolved = resolve_device(device)
    return [
        RunJob(run, name, resolved, resolve_dtype(precision, run.config.training.precision, resolved), item, note)
        for run, name, item, note in zip(runs, names, work_items, notes or [None] * len(runs), strict=True)
    ]


def make_log_function(console: Console | None) -> LogFunction:
    """Return a function that prints a line, or does nothing if there is no console."""
    if console is None:
        return lambda line: None
    return lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True)
class EvalRequest:
    """Runs to evaluate, and the folder of the results."""

    runs: tuple[TrainedRun, ...]
    options: EvaluationOptions
    folder: Path | None  # folder of the results
    saved_records: tuple[Record, ...]  # records in the folder when the evaluation begins; others may add more
    is_single_run: bool  # True if the folder is the run folder of the only run


def read_eval_request(runs: Sequence[str | Path], options: EvaluationOptions, output: str | Path | None) -> EvalRequest:
    """Open each named run once, and read the existing results.

    For arguments and errors see `megatron.evaluation.run.evaluate_runs`.
    """
    if not runs:
        raise UserError("no run given; give at least one run folder")
    check_precision(options.precision, options.device)
    trained_runs = open_runs(runs)
    run_folder = _find_run_folder(trained_runs)
    folder = run_folder if output is None else Path(output)
    is_single_run = run_folder is not None and folder is not None and folder.resolve() == run_folder.resolve()
    records = () if folder is None else _read_saved_records(describe_output_option(output), folder)
    return EvalRequest(trained_runs, options, folder, records, is_single_run)


def describe_output_option(output: str | Path | None) -> str:
    """Return the name by which errors call the output folder: the option, or its default if it was not given."""
    return "--output" if output is not None else "the default of --output"


def _read_saved_records(option: str, folder: Path) -> tuple[Record, ...]:
    """Read the results in a folder, which errors call by `option`.

    Raises:
        UserError: the folder is not writable, or its results cannot be parsed.
    """
    check_writable(option, folder)
    check_no_foreign_results(option, folder)
    return tuple(read_saved_records(folder))


def _find_run_folder(runs: Sequence[TrainedRun]) -> Path | None:
    """Return the run folder of a single run, also if its checkpoint folder is given.

    Return None for a checkpoint named directly, which leaves the results of its run unchanged.
    """
    folder = find_run_folder(runs[0].name)
    return folder if len(runs) == 1 and folder.resolve() != runs[0].checkpoint.resolve() else None


def build_eval_jobs(
    request: EvalRequest, costs: Sequence[tuple[float, str | None]], names: Sequence[str] | None = None
) -> list[RunJob]:
    """Build jobs with names, devices, and data types. Errors are raised before any model is loaded.

    Args:
        request: the runs.
        costs: FLOPs and an optional line to print, for each run.
        names: as for `evaluate_runs`.
    """
    runs, options = request.runs, request.options
    overrides = list_overrides(options)
    distinct_names = names
    if names is None:
        configs = [run.config for run in runs]
        names = list_method_names(configs, **overrides)
        distinct_names = distinguish_names(names, configs, [run.name for run in runs])
    work_items = [
        WorkItem(f"{name} seed {run.config.training.seed}", "evaluate", work)
        for run, name, (work, _) in zip(runs, distinct_names or names, costs, strict=True)
    ]
    notes = [note for _, note in costs]
    return build_run_jobs(runs, names, work_items, device=options.device, precision=options.precision, notes=notes)


def run_eval_jobs(
    request: EvalRequest,
    jobs: Sequence[RunJob],
    target: EvalTarget,
    console: Console | None,
    progress: ProgressCallback | None = None,
) -> list[Record]:
    """Load and score runs one after another, then print and save their records.

    Args:
        request: runs and results folder.
        jobs: one job for each run.
        target: target on which each loaded model is scored.
        console, progress: as for `evaluate_runs`.
    """
    log = make_log_function(console)
    partial_records = PartialRecords.open(request.folder)
    if {record.run for record in partial_records.previous} & {job.run.name for job in jobs}:
        log(f"resuming an interrupted evaluation: reusing the finished records in {partial_records.path}")
    for job in jobs:
        if job.note is not None:
            log(f"{job.run.name}: {job.note}")
    import torch

    records: list[Record] = []
    with ProgressMeter(console if progress is None else None, [job.work_item for job in jobs]) as meter:
        for job in jobs:
            meter.begin(job.work_item, "loading")
            report = progress or (lambda length, done, total: meter.update(done, f"length {length:,}"))
            loaded = job.load(request.options.backend, **list_overrides(request.options))
            meter.log(_describe_verification(job, loaded))
            scoring = ScoringContext(
                describe_run(job, request.options),
                request.options.batch_tokens,
                report,
                partial_records.previous,
                partial_records.save,
            )
            records += target.score(loaded, scoring)
            if job is jobs[-1]:
                records += target.build_baseline_records()
            del loaded
            if job.device.type == "cuda":
                torch.cuda.empty_cache()  # free memory for the next model and for other processes
            meter.finish()
            if request.folder is not None:  # save after every run, in case a later one fails
                merge_into_results(request.folder, records, same_run=request.is_single_run, only_records=True)
    if console is not None:
        print_comparison_tables(console, records)
    if request.folder is not None:
        written = merge_into_results(request.folder, records, same_run=request.is_single_run)
        partial_records.remove(records)
        log(f"written: {', '.join(map(str, written))}")
    return disambiguate_methods(records)


def _describe_verification(job: RunJob, loaded: LoadedModel) -> str:
    checkpoint = f"{job.run.name}: {job.run.checkpoint.name}"
    if loaded.verified:
        return f"{checkpoint}, checksums match"
    return f"{checkpoint}, not verified: it has no checksums"


def describe_run(job: RunJob, options: EvaluationOptions) -> dict[str, Any]:
    """Return record fields that describe a run, the machine, and the software."""
    run = job.run
    return {
        "method": job.name,
        "run": run.name,
        "training_digest": run.training_digest,
        "step": run.trainer_state.step,
        "train_tokens": run.trainer_state.consumed_tokens,
        "backend": options.backend or run.config.model.attention_backend,
        "machine": describe_machine(),
        "software": list_software_versions(),
    }


def describe_output_folder(request: EvalRequest) -> str:
    """Describe the output folder. Shown before evaluation starts, so that the user can still change it."""
    if request.folder is None:
        return "results will not be saved; use --output FOLDER to save them"
    line = f"results will be saved in {request.folder}"
    if (count := len(request.saved_records)) > 0:
        kept = "records there are kept, except those" if count > 1 else "record there is kept, unless it is"
        line += f"; the {count} {kept} measured again"
    return line
