"""`./deepy.py evaluate RUN… --tasks …`: evaluate runs on tasks of lm-evaluation-harness.

Each run is evaluated on every task at every length. A length is the maximum number of tokens in the model's context;
the default is the training length. Values are computed by the harness. Metric names are also the harness's, except for
`perplexity`: it covers only the target text, not all tokens, and is called `target_perplexity` here.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from megatron.config.yaml_files import parse_scalar
from megatron.data.load_tokenizer import load_run_tokenizer
from megatron.data.tokenizers import Tokenizer
from megatron.evaluation.accuracy import add_relative_changes
from megatron.evaluation.eval_target import ScoringContext, choose_lengths, limit_lengths
from megatron.evaluation.jobs import (
    LogFunction,
    RunJob,
    build_eval_jobs,
    describe_output_folder,
    make_log_function,
    read_eval_request,
    run_eval_jobs,
)
from megatron.evaluation.provenance import describe_model, start_stopwatch
from megatron.evaluation.run import build_evaluated_model, describe_length_limit
from megatron.options.evaluation import (
    LOSS_OPTIONS,
    EvaluationOptions,
    TaskOptions,
    reject_task_options,
    reject_text_options,
)
from megatron.reports.metrics import METRICS
from megatron.reports.records import Record
from megatron.utils.errors import RunError, UserError, describe_cause
from megatron.utils.formatting import suggest_names
from megatron.utils.imports import require_package
from megatron.utils.progress import IMPORTING, WaitAnnouncer

if TYPE_CHECKING:
    from megatron.checkpoint.load_model import LoadedModel
    from megatron.evaluation.harness import RequestCounts

OPTIONS_UNUSED_BY_HARNESS = (
    "data", "protocol", "windows", "targets", "stride", "min_context", "measures", "depths", "effective_score",
    *LOSS_OPTIONS,
)  # fmt: skip
"""Options that do not apply to harness tasks."""

OWN_METRIC_NAMES = {"perplexity": "target_perplexity"}
"""Our names for harness metrics whose names have another meaning here."""

NUM_BOOTSTRAP_SAMPLES = 1000
"""Bootstrap samples for the standard errors of metrics that are not means.

The harness's default of 100,000 takes minutes and gives the same two digits.
"""


def evaluate_tasks(
    runs: Sequence[str | Path],
    tasks: TaskOptions,
    options: EvaluationOptions | None = None,
    *,
    output: str | Path | None = None,
    console: Console | None = None,
) -> list[Record]:
    """Evaluate runs on tasks of lm-evaluation-harness.

    Args:
        runs, output, console: as for `megatron.evaluation.run.evaluate_runs`.
        tasks: names of the tasks and their options.
        options: evaluation options, including the lengths. If None, the defaults at the training length.

    Returns:
        Records of all runs, lengths, and tasks. A group with its own score has one record, and its subtasks have none.

    Raises:
        UserError: a run or task does not exist, lm_eval is not installed, or an option conflicts with the tasks.
        RunError: the data of a task are unavailable, or a task needs an unsupported feature. Results of finished runs
            are kept.
    """
    options = options or EvaluationOptions()
    reject_text_options(options, OPTIONS_UNUSED_BY_HARNESS, "--tasks is given")
    reject_task_options(options)
    require_package("lm_eval", "--tasks")
    request = read_eval_request(runs, options, output)
    tokenizers = {
        run.checkpoint: load_run_tokenizer(run.folder, run.config.data, run.tokenizer_name) for run in request.runs
    }
    if options.lengths is None and options.multiples is None:
        options = options.replace(multiples=[1.0])
    lengths = choose_lengths(options, [run.config.model.seq_length for run in request.runs])
    log = make_log_function(console)
    with WaitAnnouncer(log, "reading the list of tasks", first=0.0):
        loaded_tasks = load_tasks(tasks, log)
    harness_eval = HarnessEval(loaded_tasks, tasks.limit, lengths, log)
    log(describe_output_folder(request))
    with WaitAnnouncer(log, IMPORTING):
        notes = [
            describe_length_limit(run.name, run.config, build_evaluated_model(run.config, options), lengths)
            for run in request.runs
        ]
        jobs = build_eval_jobs(request, [(float(len(lengths)), note) for note in notes])

    def score(job: RunJob, loaded: LoadedModel, scoring: ScoringContext) -> list[Record]:
        return harness_eval.score(loaded, tokenizers[job.run.checkpoint], scoring)

    return run_eval_jobs(request, jobs, score, console)


@dataclass(frozen=True)
class HarnessEval:
    """Tasks and lengths that every run is evaluated on."""

    tasks: Any  # return value of `load_tasks`
    limit: int | None  # documents per task
    lengths: Sequence[int]
    log: LogFunction

    def score(self, loaded: LoadedModel, tokenizer: Tokenizer, scoring: ScoringContext) -> list[Record]:
        """Evaluate a model, and return its records by task with their changes from the shortest length.

        Args:
            loaded: model of the run.
            tokenizer: tokenizer that the model was trained with.
            scoring: settings and callbacks.

        Raises:
            UserError: the model supports none of the lengths.
            RunError: a task needs an unsupported feature, or device memory is too small.
        """
        from lm_eval import evaluator

        from megatron.evaluation.harness import HarnessModel

        shared = {**describe_model(loaded), **scoring.record_fields, "tokenizer": tokenizer.name}
        shared["software"] = f"{shared['software']}, lm_eval {version('lm_eval')}"
        lengths = limit_lengths(self.lengths, loaded.model.max_length)
        records: list[Record] = []
        for index, length in enumerate(lengths):

            def report_requests(done: int, total: int, length: int = length, index: int = index) -> None:
                scoring.progress(length, index + min(done / max(total, 1), 0.999), float(len(lengths)))

            model = HarnessModel(
                loaded.model, tokenizer, length, batch_tokens=scoring.batch_tokens, after=report_requests
            )
            stop_stopwatch = start_stopwatch()
            with _preserve_random_state():
                results = evaluator.evaluate(
                    model, self.tasks, limit=self.limit, bootstrap_iters=NUM_BOOTSTRAP_SAMPLES, log_samples=False
                )
            assert results is not None  # holds in a single process
            fields = {**shared, "length": length, **stop_stopwatch()}
            for name, counts in model.request_counts.items():
                if counts.num_truncated:
                    truncated = f"{counts.num_truncated:,} of {counts.num_requests:,} requests"
                    self.log(f"{name}: {truncated} were truncated on the left to {length:,} tokens")
            records += build_task_records(results, model.request_counts, fields, self.log)
        return add_relative_changes(records)


def load_tasks(options: TaskOptions, log: LogFunction) -> Any:
    """Load tasks by name, in the harness's format.

    Raises:
        UserError: a task does not exist, is multimodal, or runs code generated by a model.
        RunError: a task cannot be loaded, or its data are unavailable.
    """
    from lm_eval.tasks import TaskManager

    folder = options.include_path
    if folder is not None and not Path(folder).is_dir():
        raise UserError(f"--include-path {folder}: not a folder")
    metadata = _parse_metadata(options.metadata)
    manager = TaskManager(include_path=folder, include_defaults=False, metadata=metadata)
    if not all(manager.match_tasks([name]) for name in options.tasks):
        manager = TaskManager(
            include_path=folder, metadata=metadata
        )  # searches thousands of files, so only if a name needs it
    names: list[str] = []
    for name in options.tasks:
        matches = manager.match_tasks([name])
        if not matches:
            suggestion = suggest_names(name, manager.all_tasks, max_suggestions=3)
            raise UserError(f"--tasks: unknown task {name!r}; {suggestion or 'lm_eval ls tasks lists them'}")
        names += [match for match in matches if match not in names]
    try:
        loaded = manager.load(names)
    except ConnectionError as error:
        raise RunError(
            f"--tasks {','.join(names)}: the data of a task are not in the Hugging Face cache, and the hub cannot be "
            "reached; download them on a machine with a network, or use your own tasks with --include-path"
        ) from error
    except Exception as error:  # the code and data libraries of tasks may raise anything
        raise RunError(
            f"--tasks {','.join(names)}: cannot be read: {type(error).__name__}: {describe_cause(error)}"
        ) from error
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            reason = "runs model-generated code" if getattr(task, "UNSAFE_CODE", False) else "needs images"
            raise UserError(f"--tasks {name}: {reason}, which is not supported")
        task_num_fewshot = task.get_config("num_fewshot")
        if task_num_fewshot == 0 and options.num_fewshot:
            log(f"{name}: always zero-shot; ignoring --num-fewshot")
        elif options.num_fewshot is not None or task_num_fewshot is None:
            task.set_config(key="num_fewshot", value=options.num_fewshot or 0)
        task.set_fewshot_seed(seed=1234)
    return loaded


def _parse_metadata(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    value = parse_scalar(text, "--metadata")
    if not isinstance(value, dict):
        raise UserError(
            f"--metadata: {text!r} is not a mapping; expected '{{max_seq_lengths: [4096], tokenizer: FOLDER}}'"
        )
    return value


def build_task_records(
    results: Mapping[str, Any],
    request_counts: Mapping[str, RequestCounts],
    record_fields: Mapping[str, Any],
    log: LogFunction,
) -> list[Record]:
    """Build records from the harness's results.

    Args:
        results: return value of `lm_eval.evaluator.evaluate`.
        request_counts: request statistics by task name.
        record_fields: fields common to all records, including the length.
        log: called with a line for each value that does not fit in a record.
    """
    subtasks = results.get("group_subtasks", {})
    in_groups = {task for group in results.get("groups", {}) for task in _list_leaf_tasks(group, subtasks)}
    records: list[Record] = []
    for name, values in {**results["results"], **results.get("groups", {})}.items():
        if name in in_groups or (name in subtasks and name not in results.get("groups", {})):
            continue
        leaves = [request_counts[task] for task in _list_leaf_tasks(name, subtasks) if task in request_counts]
        digest = sha256("".join(leaf.digest.hexdigest() for leaf in leaves).encode()).hexdigest()[:16]
        shared = {
            "tokens": max(sum(leaf.num_tokens for leaf in leaves), 1),
            "target_digest": digest,
            "text_digest": digest,
            **record_fields,
        }
        for metric, value, stderr, filter_ in _iter_metric_values(values):
            metric_name = OWN_METRIC_NAMES.get(metric, metric)
            protocol = ", ".join([name, f"{results['n-shot'].get(name, 0)}-shot", *filter_])
            if metric.isdecimal():  # RULER names metrics by text length; −1 means no texts of it
                if value == -1:
                    continue
                metric_name, protocol = "string_match", f"{protocol}, texts of {int(metric):,} tokens"
            if metric == "bits_per_byte":
                continue  # already part of the record of the perplexity per byte
            if (
                metric_name not in METRICS
                or METRICS[metric_name].describe_invalid(value) is not None
                or not math.isfinite(value)
            ):
                log(f"{protocol}: {metric} = {value:.6g} does not fit in a record")
                continue
            if METRICS[metric_name].comparison == "ratio":
                stderr = None  # the harness gives the error of the value, not of its logarithm
            bits: dict[str, Any] = {"bits_per_byte": math.log2(value)} if metric_name == "byte_perplexity" else {}
            records.append(Record(**shared, **bits, protocol=protocol, metric=metric_name, value=value, stderr=stderr))
    return records


def _iter_metric_values(values: Mapping[str, Any]) -> Iterator[tuple[str, float, float | None, list[str]]]:
    """Yield the metrics of a result whose keys look like `acc,none` and `acc_stderr,none`.

    Yields:
        Metric, value, standard error (None if unknown), and a list with the name of the filter, if any.
    """
    for key, value in values.items():
        metric, _, filter_ = key.partition(",")
        if not filter_ or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        stderr = values.get(f"{metric}_stderr,{filter_}")
        known_stderr = float(stderr) if isinstance(stderr, int | float) and math.isfinite(stderr) else None
        yield metric, float(value), known_stderr, [] if filter_ == "none" else [filter_]


def _list_leaf_tasks(name: str, subtasks: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the tasks in a group, recursively; a task that is not a group returns itself."""
    if not subtasks.get(name):
        return [name]
    return [leaf for subtask in subtasks[name] for leaf in _list_leaf_tasks(subtask, subtasks)]


@contextmanager
def _preserve_random_state() -> Iterator[None]:
    """Set fixed random seeds, and restore the previous random states on exit.

    Multiprocessing for standard errors is disabled, because forked processes would keep using the GPU.
    """
    import numpy as np
    import torch

    previous = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            random.seed(0)
            np.random.seed(1234)
            torch.manual_seed(1234)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if previous is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = previous
