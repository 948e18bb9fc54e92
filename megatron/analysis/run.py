"""`./deepy.py analyze RUN…`: trained runs and configurations in, one page with its data out.

Models are looked at one after the other, each by every analysis; then the page shows them side by side. The data of an
analysis are written as soon as a model has been looked at, so what was measured is kept whatever happens later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.analysis.analysis import Table, load_analyses
from megatron.analysis.candidates import AnalysisJob, build_jobs, estimate_relative_cost, load_analysis_context
from megatron.analysis.findings import AnalysisResults
from megatron.analysis.request import PAGE, AnalysisRequest, read_analysis_request
from megatron.evaluation.provenance import describe_machine, list_software_versions
from megatron.evaluation.run import make_log_function
from megatron.options.analysis import AnalysisOptions
from megatron.utils.atomic_io import write_text_atomically
from megatron.utils.progress import ProgressMeter

if TYPE_CHECKING:
    from rich.console import Console

# What needs torch or matplotlib is imported where it is used: a mistake in what was asked for is told at once.


def analyze(
    runs: Sequence[str | Path],
    options: AnalysisOptions | None = None,
    *,
    configs: Sequence[str] = (),
    output: str | Path | None = None,
    console: Console | None = None,
) -> Path:
    """Look at models side by side.

    Args:
        runs: run folders (their latest checkpoint is taken) or checkpoint folders.
        options: what is looked at; the defaults if None.
        configs: configurations to look at untrained, each as `train` takes them.
        output: folder for the page and its data; `analysis` in a single run's folder if None.
        console: where the progress and the names of the files go; None is silent.

    Returns:
        The page.

    Raises:
        UserError: anything that would keep the models from being looked at, before any work.
        RunError: a checkpoint is damaged, or what fails on the way.
    """
    asked = read_analysis_request(runs, configs, options or AnalysisOptions(), output)
    say = make_log_function(console)
    say(f"the page will be written to {asked.folder / PAGE}")
    candidates = build_jobs(asked)
    only = asked.options.only
    findings = [
        AnalysisResults(name, each, asked.folder)
        for name, each in load_analyses().items()
        if only is None or name in only
    ]
    with ProgressMeter(console, [candidate.job for candidate in candidates]) as meter:
        for candidate in candidates:
            meter.begin(candidate.job, "loading")
            model = load_analysis_context(candidate, asked)
            done = 0.0
            for each in findings:
                title, work = (
                    each.analysis.title,
                    estimate_relative_cost(each.name, asked, candidate.checkpoint is not None),
                )
                meter.update(done, title)

                def told(share: float, done: float = done, work: float = work, title: str = title) -> None:
                    meter.update(done + share * work, title)

                each.measure(replace(model, progress=told))
                done += work
            del model
            meter.finish()
    page = write_text_atomically(asked.folder / PAGE, _build_page(asked, candidates, findings))
    say(f"written: {', '.join(map(str, [page, *(each.file for each in findings if each.results)]))}")
    return page


def _build_page(asked: AnalysisRequest, candidates: Sequence[AnalysisJob], findings: Sequence[AnalysisResults]) -> str:
    from megatron.analysis.page import render_analysis_page

    names = [candidate.name for candidate in candidates]
    title = f"What {', '.join(names[:4])}{' and others' * (len(names) > 4)} attend to"
    facts = {
        "machine": describe_machine(),
        "software": list_software_versions(),
        "made at (UTC)": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
    }
    parts = [each.to_section(names) for each in findings]
    return render_analysis_page(title, _build_summary(asked), parts, _build_model_table(asked, candidates), facts)


def _build_summary(asked: AnalysisRequest) -> list[str]:
    if asked.inputs is None:
        return ["No text was read: what stands here follows from the biases alone."]
    return [f"{asked.inputs.description} Layers and heads are counted from 0."]


def _build_model_table(asked: AnalysisRequest, candidates: Sequence[AnalysisJob]) -> Table:
    rows = []
    of_runs = {run.checkpoint: run for run in asked.runs}
    for candidate in candidates:
        model = candidate.config.model
        shape = f"{model.num_layers} × {model.hidden_size}, {model.num_attention_heads} heads"
        cells = [candidate.name, shape, f"{model.seq_length:,}"]
        if candidate.checkpoint is None:
            rows.append([*cells, "–", "a configuration, not trained"])
        else:
            run = of_runs[candidate.checkpoint]
            rows.append([*cells, f"{run.progress.step:,}", f"run {run.name}, {candidate.checkpoint.name}"])
    return Table(["method", "layers × width", "training length", "step", "where it comes from"], rows)
