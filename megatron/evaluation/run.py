"""`./deepy.py evaluate RUN…`: trained runs in, records, a table and files out.

Each model is rebuilt from the configuration in its checkpoint, and every run is scored on the same tokens of the same
text by the same protocol; whatever would prevent that (other tokenizers, other data) is refused before the first
model is loaded. A model whose positions end is scored up to there, which is said, on the same targets as the others.
Files are written after each run, so what was measured is kept whatever happens later. Results of other runs,
protocols and texts that a folder holds stay in its files.
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
        runs: run folders (their latest checkpoint is taken) or checkpoint folders.
        options: how they are scored; the defaults if None.
        output: folder for results.json, .csv, .md and .png; a single run folder writes into itself if None. Results
            that are there stay, but for those that this measures again (`megatron.reports.records.merge_records`).
        console: where the progress, the table and the names of the files go; None is silent.
        names: methods' names, one per run, instead of those made from the configurations.
        progress: called as `evaluate` calls it, instead of showing a bar; for callers with a display of their own.

    Returns:
        The records of all runs and lengths. Runs of one method that differ in more than the seed have distinct names.

    Raises:
        UserError: anything that would keep the runs from being compared, before any work.
        RunError: what fails while scoring; the files of finished runs stay.
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
