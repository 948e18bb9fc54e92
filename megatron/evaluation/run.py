"""`./deepy.py evaluate RUN…`: trained runs in, records, a table and files out.

Each model is rebuilt from the configuration in its checkpoint, and every run is scored on the same tokens of the same
text by the same protocol; whatever would prevent that (other tokenizers, other data) is refused before the first
model is loaded. A model whose positions end is scored up to there, which is said, on the same targets as the others.
Files are written after each run, so what was measured is kept whatever happens later. Results of other runs,
protocols and texts that a folder holds stay in its files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from megatron.checkpoint.trained_run import TrainedRun
from megatron.evaluation.provenance import describe_machine, list_software_versions
from megatron.evaluation.request import EvalRequest, read_eval_request
from megatron.evaluation.sketch import estimate_evaluation
from megatron.evaluation.subject import Progress, ScoringContext
from megatron.evaluation.subjects import build_eval_target
from megatron.model.device_dtype import resolve_device, resolve_dtype
from megatron.options.evaluation import EvaluationOptions
from megatron.reports import records as record_files
from megatron.reports import table_formats
from megatron.reports.records import RESULTS_FILE, Record, merge_records
from megatron.reports.results_folder import write_results
from megatron.utils.progress import ProgressMeter, WorkItem

if TYPE_CHECKING:
    import torch

    from megatron.checkpoint.load_model import LoadedModel

# What needs torch or matplotlib is imported where it is used: a mistake in what was asked for is told at once.

LogFunction = Callable[[str], None]


@dataclass(frozen=True)
class EvalJob:
    """A run that is about to be scored."""

    run: TrainedRun
    name: str  # of its row in tables
    device: torch.device
    dtype: torch.dtype
    job: WorkItem
    note: str | None  # what is said of it before the work begins


ScoreFunction = Callable[[EvalJob, "LoadedModel", "Progress"], list[Record]]


def evaluate_runs(
    runs: Sequence[str | Path],
    options: EvaluationOptions | None = None,
    *,
    output: str | Path | None = None,
    console: Console | None = None,
    names: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> list[Record]:
    """Evaluate runs side by side.

    Args:
        runs: run folders (their latest checkpoint is taken) or checkpoint folders.
        options: how they are scored; the defaults if None.
        output: folder for results.json, .csv, .md and .png; a single run folder writes into itself if None. Results
            that are there stay, but for those that this measures again (`megatron.reports.records.replaced`).
        console: where the progress, the table and the names of the files go; None is silent.
        names: methods' names, one per run, instead of those made from the configurations.
        progress: called as `evaluate` calls it, instead of showing a bar; for callers with a display of their own.

    Returns:
        The records of all runs and lengths.

    Raises:
        UserError: anything that would keep the runs from being compared, before any work.
        RunError: what fails while scoring; the files of finished runs stay.
    """
    asked = read_eval_request(runs, options or EvaluationOptions(), output)
    subject = build_eval_target(asked.runs, asked.options)
    sketches = [estimate_evaluation(run.name, run.config, subject, asked.options) for run in asked.runs]
    candidates = build_jobs(asked, [(sketched.flops, sketched.note) for sketched in sketches], names)

    def score(candidate: EvalJob, loaded: LoadedModel, report: Progress) -> list[Record]:
        scoring = ScoringContext(describe_run(candidate, asked.options), asked.options.batch_tokens, report)
        found = subject.score(loaded, scoring)
        return [*found, *(subject.baseline_records() if candidate is candidates[-1] else ())]

    return run_jobs(asked, candidates, score, console, progress)


def run_jobs(
    request: EvalRequest,
    jobs: Sequence[EvalJob],
    score: ScoreFunction,
    console: Console | None,
    progress: Progress | None = None,
) -> list[Record]:
    """Load runs one after the other and measure each; show and write what is found.

    Args:
        request: what was asked for.
        jobs: its runs.
        score: measures a loaded model.
        console, progress: as for `evaluate_runs`.
    """
    say = make_log_function(console)
    say(_describe_output(request))
    for candidate in jobs:
        if candidate.note is not None:
            say(f"{candidate.run.name}: {candidate.note}")
    import torch

    found: list[Record] = []
    with ProgressMeter(console if progress is None else None, [candidate.job for candidate in jobs]) as meter:
        for candidate in jobs:
            meter.begin(candidate.job, "loading")
            report = progress or (lambda length, done, total: meter.update(done, f"length {length:,}"))
            loaded = _load_model(candidate, request)
            meter.log(_describe_verification(candidate, loaded))
            found += score(candidate, loaded, report)
            del loaded
            if candidate.device.type == "cuda":
                torch.cuda.empty_cache()  # room for the next model, and for whoever shares the GPU
            meter.finish()
            if request.folder is not None:  # what is measured is kept whatever happens to the next run
                record_files.write_records(
                    request.folder / RESULTS_FILE,
                    merge_records(request.saved_records, found, same_run=request.is_single_run),
                )
    if console is not None:
        table_formats.print_comparison_tables(console, found)
    if request.folder is not None:
        written = write_results(
            request.folder, merge_records(request.saved_records, found, same_run=request.is_single_run)
        )
        say(f"written: {', '.join(map(str, written))}")
    return found


def build_jobs(
    request: EvalRequest, foreseen: Sequence[tuple[float, str | None]], names: Sequence[str] | None = None
) -> list[EvalJob]:
    """The runs with their names, devices and types, which are refused before any model is loaded.

    Args:
        request: what was asked for.
        foreseen: the work that each run will be, and what is to be said of it.
        names: as for `evaluate_runs`.
    """
    from megatron.evaluation.names import assign_distinct_names

    runs, options = request.runs, request.options
    device = resolve_device(options.device)
    dtypes = [resolve_dtype(options.precision, run.config.training.precision, device) for run in runs]
    if names is None:
        names = assign_distinct_names([run.config for run in runs], [run.name for run in runs], options.window)
    return [
        EvalJob(
            run=run,
            name=name,
            device=device,
            dtype=dtype,
            job=WorkItem(f"{name} seed {run.config.training.seed}", "evaluate", work),
            note=note,
        )
        for run, name, dtype, (work, note) in zip(runs, names, dtypes, foreseen, strict=True)
    ]


def _load_model(candidate: EvalJob, asked: EvalRequest) -> LoadedModel:
    from megatron.checkpoint.load_model import load_model

    return load_model(
        candidate.run.checkpoint,
        device=str(candidate.device),
        dtype=candidate.dtype,
        backend=asked.options.backend,
        window=asked.options.window,
    )


def _describe_verification(candidate: EvalJob, loaded: LoadedModel) -> str:
    """Whether the model is known to be what training wrote."""
    step = f"{candidate.run.name}: {loaded.checkpoint.name}"
    if loaded.verified:
        return f"{step}, whole by its checksums"
    return f"{step}, which has no manifest: whether its files are as they were written is not known"


def describe_run(candidate: EvalJob, options: EvaluationOptions) -> dict[str, Any]:
    """What records say of a run, and of where and with what it was measured."""
    run = candidate.run
    return {
        "method": candidate.name,
        "run": run.name,
        "step": run.progress.step,
        "train_tokens": run.progress.consumed_tokens,
        "backend": options.backend or run.config.model.attention_backend,
        "machine": describe_machine(),
        "software": list_software_versions(),
    }


def _describe_output(asked: EvalRequest) -> str:
    """What will become of the results, said while they can still be given another place."""
    if asked.folder is None:
        return "results will not be written: give --output FOLDER to keep them"
    line = f"results will be written to {asked.folder}"
    if asked.saved_records:
        line += f"; the {len(asked.saved_records)} there stay, unless this measures the same again"
    return line


def make_log_function(console: Console | None) -> LogFunction:
    """How lines are told; on no console, to nobody."""
    if console is None:
        return lambda line: None
    return lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True)
