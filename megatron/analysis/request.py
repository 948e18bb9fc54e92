"""What `analyze` was asked for, read and checked before torch is imported: mistakes are told at once."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.analysis.analysis import check_names, is_data_file, list_analysis_names, needs_text
from megatron.analysis.reading import AnalysisInputs, inputs_from_task, inputs_from_text
from megatron.checkpoint.trained_run import TrainedRun, open_runs
from megatron.config.load import load_config
from megatron.config.schema import Config
from megatron.evaluation.exercise import build_task_eval, is_task_run
from megatron.evaluation.lengths import choose_lengths
from megatron.evaluation.texts import load_common_text
from megatron.model.device_dtype import check_precision
from megatron.options.analysis import AnalysisOptions
from megatron.options.evaluation import EvaluationOptions
from megatron.reports.html_page import is_generated_page
from megatron.utils.atomic_io import check_folder, refuse_foreign_files
from megatron.utils.errors import UserError

MULTIPLES = [1.0, 4.0]
"""Window lengths in training lengths, if none are asked for."""
PAGE = "analysis.html"
FOLDER = "analysis"
"""In a run's folder, where the results of a single run go."""


@dataclass(frozen=True)
class AnalysisRequest:
    """What is to be looked at."""

    runs: tuple[TrainedRun, ...]
    untrained: tuple[tuple[str, Config], ...]
    """Configurations as they were written, and what they say."""
    options: AnalysisOptions
    folder: Path
    lengths: tuple[int, ...]
    """In tokens, ascending."""
    inputs: AnalysisInputs | None
    """Of the runs; None if nothing that was asked for reads."""


def read_analysis_request(
    runs: Sequence[str | Path],
    configs: Sequence[str],
    options: AnalysisOptions,
    output: str | Path | None,
) -> AnalysisRequest:
    """Open what was named.

    Args:
        runs: folders of runs, or checkpoints.
        configs: configurations to look at untrained, each as `train` takes them: `125M kerple_log num_layers=2`.
        output: the folder for the page and the data; a single run's own if None.

    Raises:
        UserError: what cannot be looked at, or side by side; RunError: a checkpoint is damaged.
    """
    if not runs and not configs:
        raise UserError("no run given; name a run's folder, or a configuration with --config")
    check_names(options.only)
    check_precision(options.precision, options.device)
    opened = open_runs(runs)
    if twice := next((text for text in configs if configs.count(text) > 1), None):
        raise UserError(f"--config {twice!r} is given twice")
    untrained = tuple((text, _load_config(text)) for text in configs)
    everyone = [run.config for run in opened] + [config for _, config in untrained]
    _check_indices("--layers", options.layers, [config.model.num_layers for config in everyone], "layers")
    _check_indices("--heads", options.heads, [config.model.num_attention_heads for config in everyone], "heads")
    folder = _choose_folder(opened, untrained, output)
    check_folder("--output", folder)
    _refuse_files_of_others(folder, options)
    lengths, reading = _choose_lengths_and_inputs(opened, everyone, options)
    return AnalysisRequest(opened, untrained, options, folder, lengths, reading)


def _refuse_files_of_others(folder: Path, options: AnalysisOptions) -> None:
    """Refuse a folder with files by the names of ours that no analysis wrote. Raises UserError."""
    data = [folder / f"{name}.{kind}" for name in options.only or list_analysis_names() for kind in ("csv", "json")]
    refuse_foreign_files("--output", [folder / PAGE], is_generated_page)
    refuse_foreign_files("--output", data, is_data_file)


def _choose_lengths_and_inputs(
    runs: Sequence[TrainedRun], everyone: Sequence[Config], options: AnalysisOptions
) -> tuple[tuple[int, ...], AnalysisInputs | None]:
    """The lengths of windows in tokens, and what the runs read, if anything that was asked for reads."""
    multiples = MULTIPLES if options.lengths is None and options.multiples is None else options.multiples
    asked = EvaluationOptions(lengths=options.lengths, multiples=multiples, data=options.data, windows=options.windows)
    reading = bool(runs) and (options.only is None or any(map(needs_text, options.only)))
    if reading and is_task_run(runs):
        found = inputs_from_task(build_task_eval(asked, [run.config for run in runs]))
        return tuple(found.windows), found
    lengths = choose_lengths(asked, [config.model.seq_length for config in everyone])
    if reading:
        return lengths, inputs_from_text(load_common_text(runs, options.data), lengths, options.windows)
    if options.data is not None:
        raise UserError("--data names a text, and nothing that was asked for reads one")
    return lengths, None


def _load_config(text: str) -> Config:
    """A configuration as `train` takes it."""
    words = shlex.split(text)
    pairs = [word for word in words if "=" in word and not os.path.isfile(word)]
    return load_config([word for word in words if word not in pairs], pairs).config


def _check_indices(key: str, asked: Sequence[int] | None, counts: Sequence[int], what: str) -> None:
    """Raises UserError for a layer or head that no model has."""
    for place in asked or ():
        if not 0 <= place < max(counts):
            raise UserError(f"{key}: there is no {place}; {what} are counted from 0 to {max(counts) - 1}")


def _choose_folder(
    runs: Sequence[TrainedRun], untrained: Sequence[tuple[str, Config]], output: str | Path | None
) -> Path:
    if output is not None:
        return Path(output)
    if len(runs) == 1 and not untrained:
        return runs[0].folder / FOLDER
    raise UserError("several models are looked at: name a folder for the page with --output")
