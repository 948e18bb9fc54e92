"""The commands of `./deepy.py` as functions: options are arguments, and results are return values.

`train`, `sweep` and `prepare` start processes of their own, so each runs in a child process as the command line does. A
notebook keeps its memory and its signal handlers, and the child's output is printed in the notebook.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farfield.arguments import (
    check_characters,
    describe_value,
    report_argument_errors,
    to_optional_path,
    to_path,
    to_paths,
    to_run_paths,
)
from megatron.sweeps.member_run import build_command_error, stop_child
from megatron.utils.errors import UserError
from megatron.utils.project import COMMAND
from megatron.utils.signals import get_parent_variable

NEGATED_FLAGS = ("add-bos",)
"""Options of `prepare` that have a `--no-` form, because their default is neither true nor false."""
KEPT_LINES = 200
"""Number of output lines of a command that are kept to find its error message."""


@report_argument_errors
def train(*files: str | Path, quiet: bool = False, **keys: Any) -> Path:
    """Train a model as `./deepy.py train` does, and wait until it finishes.

    Args:
        files: configuration files, as paths or names in configs/.
        quiet: do not print the training output.
        keys: values that override those of the files; nested keys as `**{"optimizer.params.lr": 1e-3}`.

    Returns:
        The run folder, as given by `save`.

    Raises:
        UserError: the configuration is invalid.
        RunError: the training failed.
    """
    from megatron.config.load import load_config

    names = to_paths("files", files)
    save = load_config(names, format_overrides(keys)).config.checkpoint.save
    if save is None:
        raise UserError("save is not set; training from a script needs a run folder")
    run_command("train", "--", *names, *format_overrides(keys), quiet=quiet)
    return Path(save)


@report_argument_errors
def sweep(*files: str | Path, quiet: bool = False, **keys: Any) -> list[dict[str, Any]]:
    """Run a sweep as `./deepy.py sweep` does, resuming an earlier attempt.

    Args:
        files, quiet, keys: as for `train`; keys of the sweep as `**{"sweep.output": "runs/mine"}`.

    Returns:
        The records of the sweep, as returned by `read_results`. They are empty if no run has ended, as after submitting
        the first runs to SLURM.

    Raises:
        UserError, RunError: the command failed.
    """
    from megatron.reports.records import RESULTS_FILE
    from megatron.sweeps.spec import read_sweep

    names, overrides = to_paths("files", files), format_overrides(keys)
    if not names:
        raise UserError("no files given; name the files of the sweep")
    output = read_sweep(names, overrides).output_folder
    run_command("sweep", "--", *names, *overrides, quiet=quiet)
    return read_results(output) if (output / RESULTS_FILE).exists() else []


@report_argument_errors
def prepare(
    *sources: str | Path, output: str | Path, overwrite: bool = False, quiet: bool = False, **options: Any
) -> Path:
    """Prepare a corpus from text files as `./deepy.py prepare` does.

    Args:
        sources: files, folders, `python` for the code of the standard library, or `shakespeare` for the plays shipped
            with Farfield.
        output: folder of the corpus.
        overwrite: replace a corpus that was prepared with other options.
        quiet: do not print the command's output.
        options: options of the command, with underscores: `tokenizer="bpe"`, `suffixes=[".tex"]`.

    Returns:
        The folder of the corpus.

    Raises:
        UserError, RunError: the command failed.
    """
    from megatron.config.schema import parse_section
    from megatron.options.data import CorpusOptions

    folder, names = to_path("output", output), to_paths("sources", sources)
    if not isinstance(overwrite, bool):
        raise UserError(f"overwrite is {describe_value(overwrite)}; it must be True or False")
    plain = {name: _to_plain_option(value) for name, value in options.items()}
    # reports errors under the names of the Python arguments
    parse_section(CorpusOptions, {**plain, "sources": names}, source=None)
    flags = [f"--output={folder}", *format_flags({**plain, "overwrite": overwrite})]
    run_command("prepare", *flags, "--", *names, quiet=quiet)
    return Path(folder)


@report_argument_errors
def evaluate(
    runs: str | Path | Sequence[str | Path], output: str | Path | None = None, **options: Any
) -> list[dict[str, Any]]:
    """Evaluate runs side by side as `./deepy.py evaluate` does.

    Args:
        runs: one run folder or several.
        output: folder for results.json, .csv and .png. If None, the folder of a single run.
        options: options of the command by key (`sweep.evaluate` in docs/configuration.md): `lengths=[512, 4096]`,
            `lengths="1x,2x,4x"`, `protocol="nonoverlapping"`, `data="book.txt"`.

    Returns:
        One record per run and length: method, length, perplexity, nll, …

    Raises:
        UserError, RunError: the command failed.
    """
    from megatron.config.schema import parse_section
    from megatron.evaluation.run import evaluate_runs
    from megatron.options.evaluation import EvaluationOptions

    records = evaluate_runs(
        to_run_paths(runs),
        parse_section(EvaluationOptions, options, source=None),
        output=to_optional_path("output", output),
    )
    return [record.to_row() for record in records]


@report_argument_errors
def read_results(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a results.json file, of a folder that contains one, or of a folder with a file per run.

    Raises UserError if the file is missing or does not contain records.
    """
    from megatron.reports.combine import read_result_files
    from megatron.reports.records import RESULTS_FILE
    from megatron.utils.formatting import suggest_path

    file = Path(to_path("path", path))
    if not file.exists():
        raise UserError(
            f"path is {file}, which does not exist; {suggest_path(file)}give a {RESULTS_FILE} or its folder"
        )
    records_by_path, _ = read_result_files([file])
    return [record.to_row() for records in records_by_path.values() for record in records]


@report_argument_errors
def analyze(runs: str | Path | Sequence[str | Path], output: str | Path | None = None, **options: Any) -> Path:
    """Analyze runs as `./deepy.py analyze` does.

    Args:
        runs: one run folder or several.
        output: folder for the page and its data. If None, the `analysis` folder of a single run.
        options: options of the command: `lengths=[64, 512]`, `only=["kernels"]`, `layers=[0]`, `heads=[0, 1]`.

    Returns:
        Path of the page.

    Raises:
        UserError, RunError: the command failed.
    """
    from megatron.config.schema import parse_section
    from megatron.evaluation.analysis.run import analyze as analyze_runs
    from megatron.options.commands import AnalysisOptions

    return analyze_runs(
        to_run_paths(runs),
        parse_section(AnalysisOptions, options, source=None),
        output=to_optional_path("output", output),
    )


@report_argument_errors
def list_methods() -> list[dict[str, Any]]:
    """List all position encodings, score processors and temperatures, including those in `FARFIELD_METHODS`.

    Each record has the kind, name, formula, parameters, options with their defaults, traits, source and advice.

    Raises UserError if the file of a method is invalid.
    """
    from megatron.position.catalog import list_encodings, list_processors, list_temperatures
    from megatron.position.registry import describe_methods

    records, errors = describe_methods([*list_encodings(), *list_processors(), *list_temperatures()])
    if errors:
        raise UserError("\n".join(errors))
    return records


def format_overrides(keys: dict[str, Any]) -> list[str]:
    """Format keys as KEY=VALUE arguments of the command line, with values in YAML."""
    return [f"{name}={_format_value(name, value)}" for name, value in keys.items()]


def _format_value(name: str, value: Any) -> str:
    try:
        return json.dumps(value, default=_to_plain, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise UserError(f"{name} is {describe_value(value)}; not a valid configuration value") from None


def _to_plain(value: Any) -> Any:
    """Convert NumPy numbers and arrays to Python values, and paths to strings."""
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise UserError(f"{describe_value(value)} is not a valid configuration value")


def _to_plain_option(value: Any) -> Any:
    """Convert paths to strings, NumPy values to Python values and tuples to lists; return other values unchanged."""
    if isinstance(value, list | tuple):
        return [_to_plain_option(each) for each in value]
    return _to_plain(value) if isinstance(value, Path) or hasattr(value, "tolist") else value


def format_flags(options: dict[str, Any]) -> list[str]:
    """Format options as command-line flags: --add-bos for True, --no-add-bos for False, lists joined with commas."""
    flags = []
    for name, value in options.items():
        name = name.replace("_", "-")
        if isinstance(value, bool):
            flags += [f"--{name}"] if value else [f"--no-{name}"] if name in NEGATED_FLAGS else []
        elif value is not None:
            text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            flags.append(f"--{name}={text}")
    return flags


def run_command(verb: str, *arguments: str, quiet: bool = False) -> None:
    """Run a command of `./deepy.py` in a child process, and print its output except error lines, which are raised.

    Raises:
        UserError, RunError: the command failed; the message is the last error line of its output.
    """
    for argument in arguments:
        check_characters("an argument", argument)
    lines: deque[str] = deque(maxlen=KEPT_LINES)
    child = subprocess.Popen(
        [sys.executable, *COMMAND, verb, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        # Notebook kernels force colors, which would end up in the error message.
        env={name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
        | {"NO_COLOR": "1"}
        | get_parent_variable(),  # the child ends whenever this process ends
        start_new_session=True,  # only this process receives Ctrl-C, and forwards it once
    )
    assert child.stdout is not None

    def show(line: str) -> None:
        lines.append(line)
        if not quiet and not line.startswith("error: "):  # raised below
            print(line, end="")

    try:
        for line in child.stdout:
            show(line)
        child.wait()
    finally:
        stop_child(child, show)
        child.stdout.close()
    if child.returncode != 0:
        raise build_command_error(child.returncode, lines, f"{verb} ended with exit code {child.returncode}")
