"""Models that `analyze` processes: validated before torch is imported, then loaded one at a time with their inputs.

Trained models read windows of a text, or sequences of the task that they were trained on. An untrained configuration
has the encodings at the start of training.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron.checkpoint.trained_run import TrainedRun, open_runs
from megatron.config.load import load_config
from megatron.config.position_overrides import list_overrides, override_position
from megatron.evaluation.analysis.analysis import (
    AnalysisContext,
    LayerEncoding,
    check_analysis_names,
    is_data_file,
    list_analysis_names,
    needs_text,
)
from megatron.evaluation.eval_target import choose_lengths
from megatron.evaluation.jobs import RunJob, build_run_jobs, describe_output_option
from megatron.evaluation.protocols import build_scoring_plan
from megatron.evaluation.provenance import distinguish_names, list_method_names
from megatron.evaluation.task_eval import TaskEval, build_task_eval, is_task_run
from megatron.evaluation.texts import EvalText, load_common_text
from megatron.model.device_dtype import check_precision
from megatron.options.commands import AnalysisOptions
from megatron.options.evaluation import EvaluationOptions
from megatron.reports.html_page import is_generated_page
from megatron.utils.atomic_io import check_no_foreign_files, check_writable
from megatron.utils.errors import UserError
from megatron.utils.progress import WorkItem

if TYPE_CHECKING:
    from megatron.config.schema import Config
    from megatron.position.encoding import Encoding

# torch is imported inside functions, so that errors in the options are reported at once.

DEFAULT_ANALYSIS_MULTIPLES = [1.0, 4.0]
"""Default window lengths, as multiples of the training length."""
PAGE_FILE = "analysis.html"
RESULTS_FOLDER = "analysis"
"""Folder for the results of a single run, inside its run folder."""


@dataclass(frozen=True)
class AnalysisInputs:
    """Windows of tokens that all models read."""

    description: str
    """Description in one sentence."""
    windows: Mapping[int, Sequence[np.ndarray]]
    """Length in tokens, ascending → windows of shape [length]; the same number for every length."""


@dataclass(frozen=True)
class AnalysisRequest:
    """Models to analyze, options, and output folder."""

    runs: tuple[TrainedRun, ...]
    untrained: tuple[tuple[str, Config], ...]
    """Texts of configurations, and the parsed configurations."""
    options: AnalysisOptions
    folder: Path
    lengths: tuple[int, ...]
    """Window lengths in tokens, ascending."""
    inputs: AnalysisInputs | None
    """Inputs of the runs; None if no analysis needs them."""


def read_analysis_request(
    runs: Sequence[str | Path],
    configs: Sequence[str],
    options: AnalysisOptions,
    output: str | Path | None,
) -> AnalysisRequest:
    """Open the named runs and configurations.

    Args:
        runs: run folders or checkpoints.
        configs: untrained configurations in the format of `train`: `125M kerple_log num_layers=2`.
        options: analysis options.
        output: folder for the page and the data; a single run's own if None.

    Raises:
        UserError: a model cannot be analyzed, or the models are not comparable.
        RunError: a checkpoint is damaged.
    """
    if not runs and not configs:
        raise UserError("no run given; give a run folder, or a configuration with --config")
    check_analysis_names(options.only)
    check_precision(options.precision, options.device)
    trained_runs = open_runs(runs)
    if duplicate := next((text for text in configs if configs.count(text) > 1), None):
        raise UserError(f"--config {duplicate!r}: given twice")
    untrained = tuple((text, _load_config(text)) for text in configs)
    all_configs = [run.config for run in trained_runs] + [config for _, config in untrained]
    _check_indices("--layers", options.layers, [config.model.num_layers for config in all_configs], "layers")
    _check_indices("--heads", options.heads, [config.model.num_attention_heads for config in all_configs], "heads")
    folder = _choose_folder(trained_runs, untrained, output)
    check_writable(describe_output_option(output), folder)
    _check_no_foreign_results(folder, options)
    lengths, inputs = _choose_lengths_and_inputs(trained_runs, all_configs, options)
    return AnalysisRequest(trained_runs, untrained, options, folder, lengths, inputs)


def _load_config(text: str) -> Config:
    """Load a configuration in the format of `train`."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"--config {text!r}: {str(error)[0].lower()}{str(error)[1:]}") from error
    pairs = [word for word in words if "=" in word and not os.path.isfile(word)]
    try:
        return load_config([word for word in words if word not in pairs], pairs).config
    except UserError as error:  # its keys are not options of this command
        lines = [line.removeprefix("command line: ") for line in str(error).splitlines()]
        raise UserError("\n".join(f"--config {text!r}: {line}" for line in lines)) from error


def _check_indices(key: str, indices: Sequence[int] | None, counts: Sequence[int], noun: str) -> None:
    """Check the indices of layers or heads.

    Raises:
        UserError: no model has an index.
    """
    for index in indices or ():
        if not -max(counts) <= index < max(counts):
            numbers = f"{noun} are numbered from 0 to {max(counts) - 1}, or from the end from -1 to {-max(counts)}"
            raise UserError(f"{key}: {index} does not exist; {numbers}")


def _choose_folder(
    runs: Sequence[TrainedRun], untrained: Sequence[tuple[str, Config]], output: str | Path | None
) -> Path:
    if output is not None:
        return Path(output)
    if len(runs) == 1 and not untrained:
        return runs[0].folder / RESULTS_FOLDER
    what = "several models" if runs or len(untrained) > 1 else "a configuration"
    raise UserError(f"the page of {what} needs --output FOLDER")


def _check_no_foreign_results(folder: Path, options: AnalysisOptions) -> None:
    """Check that a folder has no files with the names of our results that no analysis wrote.

    Raises:
        UserError: it has such a file.
    """
    names = options.only or list_analysis_names()
    data_files = [folder / f"{name}.{suffix}" for name in names for suffix in ("csv", "json")]
    check_no_foreign_files("--output", [folder / PAGE_FILE], is_generated_page)
    check_no_foreign_files("--output", data_files, is_data_file)


def _choose_lengths_and_inputs(
    runs: Sequence[TrainedRun], configs: Sequence[Config], options: AnalysisOptions
) -> tuple[tuple[int, ...], AnalysisInputs | None]:
    """Choose the window lengths in tokens, and the runs' inputs if any analysis needs them."""
    no_lengths = options.lengths is None and options.multiples is None
    multiples = DEFAULT_ANALYSIS_MULTIPLES if no_lengths else options.multiples
    eval_options = EvaluationOptions(
        lengths=options.lengths, multiples=multiples, data=options.data, num_windows=options.num_windows
    )
    needs_inputs = bool(runs) and (options.only is None or any(map(needs_text, options.only)))
    if needs_inputs and is_task_run(runs):
        inputs = build_inputs_from_task(build_task_eval(eval_options, [run.config for run in runs]))
        return tuple(inputs.windows), inputs
    lengths = choose_lengths(eval_options, [config.model.seq_length for config in configs])
    if needs_inputs:
        apart = any(run.config.position.attention_mask == "document" for run in runs)
        text = load_common_text(runs, options.data)
        return lengths, build_inputs_from_text(text, lengths, options.num_windows, inside_documents=apart)
    if options.data is not None:
        raise UserError("--data: no requested analysis reads a text")
    if options.num_windows != AnalysisOptions.model_fields["num_windows"].default:
        raise UserError("num_windows: no requested analysis reads a text")
    return lengths, None


def build_inputs_from_text(
    text: EvalText, lengths: Sequence[int], count: int, *, inside_documents: bool = False
) -> AnalysisInputs:
    """Choose windows of a text as protocol `last` does.

    Args:
        inside_documents: True if a model was trained with document masking. Windows then lie within one document each
            if any document is long enough. Otherwise they cross documents, and are treated as one document.

    Raises:
        UserError: the text is too short.
    """
    plan = build_scoring_plan(len(text.tokens), lengths, "last", targets=[1], windows=count)
    ends, where = plan.starts[plan.lengths[0]] + plan.lengths[0], ""
    if inside_documents and text.vocabulary.eod is not None:
        own_ends = find_ends_inside_documents(text.tokens, text.vocabulary.eod, plan.lengths[-1], count)
        where = " each within one document," if len(own_ends) else " across documents, because none is long enough,"
        ends = own_ends if len(own_ends) else ends
    windows = {
        length: [np.asarray(text.tokens[end - length : end]) for end in ends.tolist()] for length in plan.lengths
    }
    description = (
        f"Windows of {_format_lengths(lengths)} tokens of {text.name} (tokenizer {text.vocabulary.name}),{where} "
        f"{len(ends)} of each length; windows of all lengths end at the same tokens."
    )
    return AnalysisInputs(description, windows)


def find_ends_inside_documents(tokens: np.ndarray, eod: int, length: int, count: int) -> np.ndarray:
    """Find window ends in a text [N] such that the `length` tokens before each end belong to one document.

    Returns:
        `count` ends, or fewer if there are not enough, evenly spread over all candidates, int64 [ends].
    """
    stops = np.append(np.flatnonzero(tokens == eod) + 1, len(tokens))
    starts = np.append(0, stops[:-1])
    places = np.maximum(stops - starts - length + 1, 0)
    before = np.cumsum(places) - places
    picked = np.unique(np.arange(count) * max(int(places.sum()) - 1, 0) // max(count - 1, 1))
    picked = picked[: int(places.sum())]
    owners = np.searchsorted(np.cumsum(places), picked, side="right")
    return starts[owners] + length + picked - before[owners]


def build_inputs_from_task(task_eval: TaskEval) -> AnalysisInputs:
    """Sample sequences of a task at each input length, including placeholders and answers.

    Raises:
        UserError: the task sets position ids, which analyses do not support.
    """
    if task_eval.task_config.task.position_limit is not None:
        raise UserError(f"{task_eval.task_config.label} sets position ids, which analyses do not support")
    batches = {length: task_eval.sample_batch(length).tokens for length in task_eval.lengths}
    windows = {tokens.shape[1]: list(tokens) for tokens in batches.values()}
    description = (
        f"New sequences of the task {task_eval.task_config.label}, {task_eval.num_sequences} for each "
        f"input length ({_format_lengths(task_eval.lengths)}). Including the answers, sequences have "
        f"{_format_lengths(list(windows))} tokens."
    )
    return AnalysisInputs(description, windows)


def _format_lengths(lengths: Sequence[int]) -> str:
    return ", ".join(f"{length:,}" for length in lengths)


@dataclass(frozen=True)
class UntrainedJob:
    config: Config
    name: str
    work_item: WorkItem


AnalysisJob = RunJob | UntrainedJob


def build_analysis_jobs(request: AnalysisRequest) -> list[AnalysisJob]:
    """Build jobs for the runs, then for the configurations, with distinct names."""
    options = request.options
    overrides = list_overrides(options)
    configs, run_sources = [run.config for run in request.runs], [run.name for run in request.runs]
    names = distinguish_names(list_method_names(configs, **overrides), configs, run_sources)
    names += [
        f"{name} (untrained)" for name in list_method_names([config for _, config in request.untrained], **overrides)
    ]
    sources = [*run_sources, *(text for text, _ in request.untrained)]
    unique_names: list[str] = []
    for name, source in zip(names, sources, strict=True):  # in evaluations the seeds of a method share a name
        unique_names.append(f"{name} [{source}]" if name in unique_names else name)
    num_runs = len(request.runs)
    run_names, untrained_names = unique_names[:num_runs], unique_names[num_runs:]
    run_cost, untrained_cost = _sum_costs(request, trained=True), _sum_costs(request, trained=False)
    run_items = [WorkItem(name, "analyze", run_cost) for name in run_names]
    return [
        *build_run_jobs(request.runs, run_names, run_items, device=options.device, precision=options.precision),
        *(
            UntrainedJob(config, name, WorkItem(name, "analyze, untrained", untrained_cost))
            for name, (_, config) in zip(untrained_names, request.untrained, strict=True)
        ),
    ]


def _sum_costs(request: AnalysisRequest, trained: bool) -> float:
    names = request.options.only or list_analysis_names()
    return sum(estimate_relative_cost(name, request, trained) for name in names)


def estimate_relative_cost(analysis: str, request: AnalysisRequest, trained: bool) -> float:
    """Estimate the cost of an analysis relative to one that needs no inputs."""
    if request.inputs is None or not trained or not needs_text(analysis):
        return 1.0
    return 1.0 + sum(len(windows) * (length / 512) ** 2 for length, windows in request.inputs.windows.items())


def load_analysis_context(job: AnalysisJob, request: AnalysisRequest) -> AnalysisContext:
    """Load a model, or build the encodings of a configuration.

    Raises:
        RunError: a checkpoint is damaged.
    """
    options, config = request.options, job.config
    if isinstance(job, UntrainedJob):
        encodings = _build_untrained_encodings(config, options)
        return AnalysisContext(job.name, config, encodings, options, request.lengths)
    from megatron.evaluation.forward_passes import list_attention_layers

    model = job.load("chunked", **list_overrides(options)).model
    model.end_of_document = None  # each window is treated as one document (`build_inputs_from_text`)
    attentions = list_attention_layers(model)
    encodings = _group_encodings(
        [(each.encoding, each.window) for each in attentions],
        is_shared=model.position is not None or bool(model.positions),
    )
    windows = {} if request.inputs is None else request.inputs.windows
    return AnalysisContext(job.name, config, encodings, options, request.lengths, model, windows)


def _group_encodings(layers: Sequence[tuple[Encoding, int | None]], *, is_shared: bool) -> list[LayerEncoding]:
    """Group encodings: one for each layer, or for each set of layers that share an encoding and a window."""
    if not is_shared:
        return [LayerEncoding(encoding, (layer,), window) for layer, (encoding, window) in enumerate(layers)]
    kinds: dict[tuple[int, int | None], list[int]] = {}
    for layer, (encoding, window) in enumerate(layers):
        kinds.setdefault((id(encoding), window), []).append(layer)
    return [
        LayerEncoding(layers[own[0]][0], None if len(kinds) == 1 else tuple(own), layers[own[0]][1])
        for own in kinds.values()
    ]


def _build_untrained_encodings(config: Config, options: AnalysisOptions) -> list[LayerEncoding]:
    """Build the encodings at the start of training, with the overrides of the options."""
    import torch

    from megatron.model.position_modules import (
        build_attention_dims,
        build_encoding_from_options,
        list_layer_positions,
    )

    dims, per_layer = build_attention_dims(config.model), config.position.pos_emb_per_layer
    position = override_position(config.model, config.position, **list_overrides(options))
    layers = list_layer_positions(position, config.model.num_layers)
    shared: dict[str, Encoding] = {}
    encodings = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.training.seed)
        for own in layers:
            if per_layer or own.encoding not in shared:
                shared[own.encoding] = build_encoding_from_options(own, dims)
            encodings.append((shared[own.encoding], own.window))
    return _group_encodings(encodings, is_shared=not per_layer)
