"""`./deepy.py evaluate RUN…`: score trained runs, and write records, a table, and files.

Each model is rebuilt from the configuration in its checkpoint. All runs are scored on the same tokens of the same text
by the same protocol. Incompatible runs (other tokenizers, other data) are rejected before the first model is loaded. A
model with limited positions is scored on the same targets up to its maximum length, and the output says so. Files are
written after each run, so that results survive a later failure. Results of other runs, protocols, and texts in the
folder are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from megatron.evaluation.eval_target import ProgressCallback, ScoringContext
from megatron.evaluation.jobs import (
    RunJob,
    build_eval_jobs,
    describe_output_folder,
    make_log_function,
    read_eval_request,
    run_eval_jobs,
)
from megatron.evaluation.targets import build_eval_target, estimate_evaluation
from megatron.options.evaluation import EvaluationOptions
from megatron.reports.records import Record
from megatron.utils.progress import IMPORTING, WaitAnnouncer

if TYPE_CHECKING:
    from megatron.checkpoint.load_model import LoadedModel


def evaluate_runs(
    runs: Sequence[str | Path],
    options: EvaluationOptions | None = None,
    *,
    output: str | Path | None = None,
    console: Console | None = None,
    names: Sequence[str] | None = None,
    progress: ProgressCallback | None = None,
) -> list[Record]:
    """Evaluate runs side by side.

    Args:
        runs: run folders (the latest checkpoint is used) or checkpoint folders.
        options: evaluation options; the defaults if None.
        output: folder for results.json, .csv, .md, and .png. If None, a single run folder receives its own results.
            Existing results are kept, unless they are measured again (`megatron.reports.records.merge_records`).
        console: console for progress, the table, and file names; None is silent.
        names: method names, one per run, instead of those derived from the configurations.
        progress: called by `evaluate` instead of showing a progress bar, for callers with their own display.

    Returns:
        Records of all runs and lengths. Runs of one method that differ in more than the seed have distinct names.

    Raises:
        UserError: the runs cannot be compared, or an option is invalid; raised before any work.
        RunError: scoring fails; the files of finished runs are kept.
    """
    request, log = read_eval_request(runs, options or EvaluationOptions(), output), make_log_function(console)
    target = build_eval_target(request.runs, request.options)
    log(describe_output_folder(request))
    with WaitAnnouncer(log, IMPORTING):
        estimates = [estimate_evaluation(run.name, run.config, target, request.options) for run in request.runs]
        jobs = build_eval_jobs(request, [(estimate.flops, estimate.note) for estimate in estimates], names)

    def score(job: RunJob, loaded: LoadedModel, scoring: ScoringContext) -> list[Record]:
        records = target.score(loaded, scoring)
        return [*records, *(target.build_baseline_records() if job is jobs[-1] else ())]

    return run_eval_jobs(request, jobs, score, console, progress)
