"""What `analyze` was asked for, read and checked before torch is imported: mistakes are told at once."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.analysis.analysis import check_names, names, reads
from megatron.analysis.options import AnalysisOptions
from megatron.checkpoint.trained import Run, open_run
from megatron.config.load import load
from megatron.config.schema import Config
from megatron.errors import UserError
from megatron.evaluation.lengths import wanted_lengths
from megatron.evaluation.options import EvaluationOptions
from megatron.evaluation.protocols import make_plan
from megatron.evaluation.texts import Text, common_text
from megatron.files import check_folder
from megatron.model.placement import check_device, check_precision

MULTIPLES = [1.0, 4.0]
"""Window lengths in training lengths, if none are asked for."""
FOLDER = "analysis"
"""In a run's folder, where the results of a single run go."""


@dataclass(frozen=True)
class Request:
    """What is to be looked at."""

    runs: tuple[Run, ...]
    untrained: tuple[tuple[str, Config], ...]
    """Configurations as they were written, and what they say."""
    options: AnalysisOptions
    folder: Path
    lengths: tuple[int, ...]
    text: Text | None
    """Of the runs; None if nothing reads one."""
    windows: dict[int, list[np.ndarray]]
    """Length → tokens of each window; those of all lengths end at the same places."""


def read_request(
    runs: Sequence[str | Path],
    configs: Sequence[str],
    options: AnalysisOptions,
    output: str | Path | None,
) -> Request:
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
    check_precision(options.precision, check_device(options.device)[0])
    opened = tuple(open_run(path) for path in runs)
    if len({run.checkpoint.resolve() for run in opened}) < len(opened):
        raise UserError(f"the same checkpoint is given twice: {', '.join(run.name for run in opened)}")
    untrained = tuple((text, _config(text)) for text in configs)
    everyone = [run.config for run in opened] + [config for _, config in untrained]
    _check_places("--layers", options.layers, [config.model.num_layers for config in everyone], "layers")
    _check_places("--heads", options.heads, [config.model.num_attention_heads for config in everyone], "heads")
    lengths = _lengths(options, everyone)
    folder = _folder(opened, untrained, output)
    check_folder("--output", folder)
    text = None
    windows: dict[int, list[np.ndarray]] = {}
    if opened and (options.only is None or any(map(reads, options.only))):
        _check_tasks(opened)
        text = common_text(opened, options.data)
        windows = _windows(text, lengths, options.windows)
    elif options.data is not None:
        raise UserError("--data names a text, and nothing that was asked for reads one")
    return Request(opened, untrained, options, folder, lengths, text, windows)


def _check_tasks(runs: Sequence[Run]) -> None:
    """Raises UserError for a run that learned a task: its tokens are no text's."""
    for run in runs:
        if run.config.data.task is not None:
            raise UserError(
                f"{run.name} learned the task {run.config.data.task} and reads no text; look at its bias alone: "
                f"--only {','.join(names('from_bias'))}"
            )


def _config(text: str) -> Config:
    """A configuration as `train` takes it."""
    words = shlex.split(text)
    pairs = [word for word in words if "=" in word and not Path(word).is_file()]
    return load([word for word in words if word not in pairs], pairs).config


def _check_places(key: str, asked: Sequence[int] | None, counts: Sequence[int], what: str) -> None:
    """Raises UserError for a layer or head that no model has."""
    for place in asked or ():
        if not 0 <= place < max(counts):
            raise UserError(f"{key}: there is no {place}; {what} are counted from 0 to {max(counts) - 1}")


def _lengths(options: AnalysisOptions, configs: Sequence[Config]) -> tuple[int, ...]:
    multiples = options.multiples
    if options.lengths is None and multiples is None:
        multiples = MULTIPLES
    asked = EvaluationOptions(lengths=options.lengths, multiples=multiples)
    return wanted_lengths(asked, [config.model.seq_length for config in configs])


def _folder(runs: Sequence[Run], untrained: Sequence[tuple[str, Config]], output: str | Path | None) -> Path:
    if output is not None:
        return Path(output)
    if len(runs) == 1 and not untrained:
        return runs[0].folder / FOLDER
    raise UserError("several models are looked at: name a folder for the page with --output")


def _windows(text: Text, lengths: Sequence[int], count: int) -> dict[int, list[np.ndarray]]:
    plan = make_plan(len(text.tokens), lengths, "last", targets=[1], windows=count)
    return {
        length: [np.asarray(text.tokens[start : start + length]) for start in plan.starts[length].tolist()]
        for length in plan.lengths
    }
