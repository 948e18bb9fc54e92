"""`./deepy.py evaluate RUN… --tasks …`: evaluate runs on tasks of lm-evaluation-harness.

Each run is evaluated on every task at every length. A length is the maximum number of tokens in the model's context;
the default is the training length. Values are computed by the harness. Metric names are also the harness's, except for
`perplexity`: it covers only the target text, not all tokens, and is called `target_perplexity` here.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from megatron.config.yaml_files import parse_scalar
from megatron.data.load_tokenizer import load_run_tokenizer
from megatron.data.tokenizers import Tokenizer
from megatron.evaluation.accuracy import add_relative_changes
from megatron.evaluation.eval_target import ScoringContext, choose_lengths, limit_lengths
from megatron.evaluation.harness_names import check_task_names
from megatron.evaluation.jobs import LogFunction, make_log_function, read_eval_request
from megatron.evaluation.provenance import describe_model, start_stopwatch
from megatron.evaluation.run import evaluate_target
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
from megatron.utils.progress import WaitAnnouncer

if TYPE_CHECKING:
    import torch

    from megatron.checkpoint.load_model import LoadedModel
    from megatron.evaluation.harness import HarnessModel, RequestCounts
    from megatron.model.gpt import GPT

OPTIONS_UNUSED_BY_HARNESS = (
    "data", "protocol", "num_windows", "targets", "stride", "min_context", "measures", "depths", "score_threshold",
    *LOSS_OPTIONS,
)  # fmt: skip
"""Options that do not apply to harness tasks."""

OWN_METRIC_NAMES = {"perplexity": "target_perplexity"}
"""Our names for harness metrics whose names have another meaning here."""

FEWSHOT_SEED = 1234
"""Seed of the choice of solved examples; the harness uses the same."""

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
        check_task_names(tasks.tasks, tasks.include_path, "--tasks")
        loaded_tasks = load_tasks(tasks, log)
    return evaluate_target(request, HarnessEval(loaded_tasks, tasks.limit, lengths, tokenizers, log), console)


@dataclass(frozen=True)
class HarnessEval:
    """Tasks of lm-evaluation-harness, and the lengths at which every run is evaluated on them."""

    tasks: Any  # return value of `load_tasks`
    limit: int | None  # documents per task
    sequence_lengths: Sequence[int]
    tokenizers: Mapping[Path, Tokenizer]  # of each run, by its checkpoint
    log: LogFunction

    def count_flops(self, model: GPT) -> dict[int, float]:
        """Return equal costs for all lengths, because the texts of the requests are not known in advance."""
        return dict.fromkeys(limit_lengths(self.sequence_lengths, model.max_length), 1.0)

    def score(self, loaded: LoadedModel, scoring: ScoringContext) -> list[Record]:
        """Evaluate a model, and return its records by task with their changes from the shortest length.

        Raises:
            UserError: the model supports none of the lengths.
            RunError: a task needs an unsupported feature, or device memory is too small.
        """
        from megatron.evaluation.harness import HarnessModel

        tokenizer = self.tokenizers[loaded.run.checkpoint]
        shared = {**describe_model(loaded), **scoring.record_fields, "tokenizer": tokenizer.name}
        shared["software"] = f"{shared['software']}, lm_eval {version('lm_eval')}"
        lengths = limit_lengths(self.sequence_lengths, loaded.model.max_length)
        records: list[Record] = []
        for index, length in enumerate(lengths):

            def report_requests(done: int, total: int, length: int = length, index: int = index) -> None:
                scoring.progress(length, index + min(done / max(total, 1), 0.999), float(len(lengths)))

            model = HarnessModel(
                loaded.model, tokenizer, length, batch_tokens=scoring.batch_tokens, on_batch_done=report_requests
            )
            stop_stopwatch = start_stopwatch(loaded.model)
            results = run_tasks(model, self.tasks, self.limit)
            fields = {**shared, "length": length, **stop_stopwatch()}
            for name, counts in model.request_counts.items():
                if counts.num_truncated:
                    truncated = f"{counts.num_truncated:,} of {counts.num_requests:,} requests"
                    self.log(f"{name}: {truncated} were truncated on the left to {length:,} tokens")
            records += build_task_records(results, model.request_counts, fields, self.log)
        return add_relative_changes(records)

    def build_baseline_records(self) -> list[Record]:
        return []


class MissingTaskDataError(RunError):
    """Error for tasks whose data are not on this machine and are not or cannot be downloaded."""


def name_command_option(option: str) -> str:
    """Return the name of a task option on the command line."""
    return f"--{option.replace('_', '-')}"


def load_tasks(
    options: TaskOptions,
    log: LogFunction,
    *,
    name_option: Callable[[str], str] = name_command_option,
    allow_download: bool = True,
) -> Any:
    """Load tasks by name, in the harness's format.

    Args:
        options: names of the tasks and their options.
        log: called with a line for the user.
        name_option: returns the user's name of an option, for messages.
        allow_download: False to use only data on this machine.

    Raises:
        UserError: a task does not exist, is multimodal, or runs code generated by a model.
        MissingTaskDataError: the data of a task are unavailable.
        RunError: a task cannot be loaded.
    """
    from lm_eval.tasks import TaskManager

    folder, key = options.include_path, name_option("tasks")
    if folder is not None and not Path(folder).is_dir():
        raise UserError(f"{name_option('include_path')} {folder}: not a folder", name_option("include_path"))
    metadata = _parse_metadata(options.metadata, name_option("metadata"))
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
            raise UserError(f"{key}: unknown task {name!r}; {suggestion or '`lm_eval ls tasks` lists all'}", key)
        names += [match for match in matches if match not in names]
    try:
        with nullcontext() if allow_download else forbid_downloads():
            loaded = manager.load(names)
    except ConnectionError as error:
        reason = "and the hub cannot be reached" if allow_download else f"and {name_option('download')} is false"
        raise MissingTaskDataError(
            f"{key} {','.join(names)}: the data of a task are not in the Hugging Face cache, {reason}; download them "
            f"on a machine with a network, or use your own tasks with {name_option('include_path')}"
        ) from error
    except Exception as error:  # the code and data libraries of tasks may raise anything
        reason = f"{type(error).__name__}: {describe_cause(error)}"
        raise RunError(f"{key} {','.join(names)}: cannot be read: {reason}") from error
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            reason = "runs model-generated code" if getattr(task, "UNSAFE_CODE", False) else "needs images"
            raise UserError(f"{key} {name}: {reason}, which is not supported", key)
        task_num_fewshot = task.get_config("num_fewshot")
        if task_num_fewshot == 0 and options.num_fewshot:
            log(f"{name}: always zero-shot; ignoring {name_option('num_fewshot')}")
        elif options.num_fewshot is not None or task_num_fewshot is None:
            task.set_config(key="num_fewshot", value=options.num_fewshot or 0)
    return loaded


@contextmanager
def forbid_downloads() -> Iterator[None]:
    """Restrict the Hugging Face libraries to files on this machine; requests for other data raise ConnectionError."""
    import datasets
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def run_tasks(model: HarnessModel, tasks: Any, limit: int | None) -> Mapping[str, Any]:
    """Evaluate a model on tasks, and return the harness's results. No random state changes.

    Args:
        model: model interface of one process. It divides the requests among processes itself.
        tasks: return value of `load_tasks`.
        limit: number of documents per task, or None for all.
    """
    from lm_eval import evaluator

    for task in tasks["tasks"].values():
        task.set_fewshot_seed(seed=FEWSHOT_SEED)  # otherwise each evaluation draws other examples
    with _preserve_random_state(model.device), _allow_infinite_perplexities():
        results = evaluator.evaluate(
            model, tasks, limit=limit, bootstrap_iters=NUM_BOOTSTRAP_SAMPLES, log_samples=False
        )
    assert results is not None  # the harness believes that this is the only process
    return results


@contextmanager
def _allow_infinite_perplexities() -> Iterator[None]:
    """Make the harness report an infinite perplexity, instead of an error, if it exceeds the range of a float.

    A text without spaces is one word, whose perplexity per word is the product of those of all its tokens.
    """
    from lm_eval.api import metrics

    def compute_exp(nats: float) -> float:
        try:
            return math.exp(nats)
        except OverflowError:
            return math.inf

    metrics.math = SimpleNamespace(**{**vars(math), "exp": compute_exp})
    try:
        yield
    finally:
        metrics.math = math


def _parse_metadata(given: dict[str, Any] | str | None, name: str) -> dict[str, Any] | None:
    """Return the metadata as a mapping, whose text is parsed. Raises UserError if it is not a mapping."""
    value = parse_scalar(given, name) if isinstance(given, str) else given
    if value is not None and not isinstance(value, dict):
        raise UserError(
            f"{name}: {given!r} is not a mapping; it must be '{{max_seq_lengths: [4096], tokenizer: FOLDER}}'", name
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
    records: list[Record] = []
    for name, values, leaves in iter_task_results(results, request_counts):
        digest = sha256("".join(leaf.digest.hexdigest() for leaf in leaves).encode()).hexdigest()[:16]
        shared = {
            "tokens": max(sum(leaf.num_tokens for leaf in leaves), 1),
            "target_digest": digest,
            "text_digest": digest,
            **record_fields,
        }
        for value in iter_task_values(values):
            protocol = ", ".join([name, f"{results['n-shot'].get(name, 0)}-shot", *value.filters])
            if value.text_length is not None:
                protocol = f"{protocol}, texts of {value.text_length:,} tokens"
            if value.metric == "bits_per_byte":
                continue  # already part of the record of the perplexity per byte
            if (
                value.metric not in METRICS
                or METRICS[value.metric].describe_invalid(value.value) is not None
                or not math.isfinite(value.value)
            ):
                log(f"{protocol}: {value.metric} = {value.value:.6g} does not fit in a record")
                continue
            # The harness gives the error of the value, not of its logarithm.
            stderr = None if METRICS[value.metric].comparison == "ratio" else value.stderr
            bits: dict[str, Any] = (
                {"bits_per_byte": math.log2(value.value)} if value.metric == "byte_perplexity" else {}
            )
            records.append(
                Record(**shared, **bits, protocol=protocol, metric=value.metric, value=value.value, stderr=stderr)
            )
    return records


@dataclass(frozen=True)
class TaskValue:
    """Value of one metric of a task."""

    metric: str
    """Our name of the metric."""
    value: float
    stderr: float | None
    """Standard error, or None if unknown."""
    filters: tuple[str, ...]
    """Name of the filter of the answers, if any."""
    text_length: int | None
    """Length of the task's texts in tokens, if the task names its metrics by lengths, as RULER does."""


def iter_task_values(values: Mapping[str, Any]) -> Iterator[TaskValue]:
    """Yield the metrics of a result, whose keys look like `acc,none` and `acc_stderr,none`."""
    for key, value in values.items():
        metric, _, filter_ = key.partition(",")
        if not filter_ or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        if metric.isdecimal() and value == -1:  # there are no texts of this length
            continue
        stderr = values.get(f"{metric}_stderr,{filter_}")
        yield TaskValue(
            "string_match" if metric.isdecimal() else OWN_METRIC_NAMES.get(metric, metric),
            float(value),
            float(stderr) if isinstance(stderr, int | float) and math.isfinite(stderr) else None,
            () if filter_ == "none" else (filter_,),
            int(metric) if metric.isdecimal() else None,
        )


def iter_task_results(
    results: Mapping[str, Any], request_counts: Mapping[str, RequestCounts]
) -> Iterator[tuple[str, Mapping[str, Any], list[RequestCounts]]]:
    """Yield the name, the values and the request statistics of each task, or of a group that has its own score."""
    groups, subtasks = results.get("groups", {}), results.get("group_subtasks", {})
    in_groups = {task for group in groups for task in _list_leaf_tasks(group, subtasks)}
    for name, values in {**results["results"], **groups}.items():
        if name not in in_groups and (name not in subtasks or name in groups):
            leaves = _list_leaf_tasks(name, subtasks)
            yield name, values, [request_counts[task] for task in leaves if task in request_counts]


def _list_leaf_tasks(name: str, subtasks: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the tasks in a group, recursively; a task that is not a group returns itself."""
    if not subtasks.get(name):
        return [name]
    return [leaf for subtask in subtasks[name] for leaf in _list_leaf_tasks(subtask, subtasks)]


@contextmanager
def _preserve_random_state(device: torch.device) -> Iterator[None]:
    """Set fixed random seeds, and restore the previous random states on exit, those of `device` included.

    Multiprocessing for standard errors is disabled, because forked processes would keep using the GPU.
    """
    import numpy as np
    import torch

    previous = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
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
