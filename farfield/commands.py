"""The commands of `./deepy.py` for scripts: what they take, as arguments, and what they make, as values.

Trainings and what begins processes of its own (`train`, `sweep`, `prepare`) run as the command line does, in a process
of their own: a notebook keeps its memory and its signals, and what they print is printed here.
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

from farfield.arguments import check_characters, describe_value, method_errors, to_optional_path, to_path, to_paths
from megatron.launch.child_command import DEEPY, build_command_error, stop_child
from megatron.utils.errors import UserError
from megatron.utils.signals import get_parent_variable

NEGATED_FLAGS = ("add-bos",)
"""Of `prepare`: those whose default is neither."""
KEPT_LINES = 200
"""Of what a command printed, to find its error in."""


@method_errors()
def train(*files: str | Path, quiet: bool = False, **keys: Any) -> Path:
    """Train a model as `./deepy.py train` does, and wait for its end.

    Args:
        files: configurations, paths or names in configs/.
        quiet: print nothing of it.
        keys: in place of what the files say; nested ones as `**{"optimizer.params.lr": 1e-3}`.

    Returns:
        The run's folder, which `save` names.

    Raises:
        UserError: what the configuration says cannot be done.
        RunError: the training failed.
    """
    from megatron.config.load import load_config

    names = to_paths("files", files)
    save = load_config(names, format_overrides(keys)).config.checkpoint.save
    if save is None:
        raise UserError("save is not set; a training in a script needs the folder of its run")
    run_command("train", "--", *names, *format_overrides(keys), quiet=quiet)
    return Path(save)


@method_errors()
def sweep(*files: str | Path, quiet: bool = False, **keys: Any) -> list[dict[str, Any]]:
    """Run a sweep as `./deepy.py sweep` does, from wherever an earlier attempt left it.

    Args:
        files, quiet, keys: as for `train`; keys of the sweep as `**{"sweep.output": "runs/mine"}`.

    Returns:
        Its records, as `read_results` gives them.

    Raises:
        UserError, RunError: as the command ends with.
    """
    from megatron.sweeps.spec import read_sweep

    names, overrides = to_paths("files", files), format_overrides(keys)
    if not names:
        raise UserError("name the files of the sweep")
    output = read_sweep(names, overrides).output_folder
    run_command("sweep", "--", *names, *overrides, quiet=quiet)
    return read_results(output)


def prepare(
    *sources: str | Path, output: str | Path, overwrite: bool = False, quiet: bool = False, **options: Any
) -> Path:
    """Make a corpus of texts as `./deepy.py prepare` does.

    Args:
        sources: files, folders, `python` for the standard library's own code, or `shakespeare` for the plays that come
            with Farfield.
        output: the corpus' folder.
        overwrite: replace a corpus that was made differently.
        quiet: print nothing of it.
        options: those of the command, with underscores: `tokenizer="bpe"`, `suffixes=[".tex"]`.

    Returns:
        The folder.

    Raises:
        UserError, RunError: as the command ends with.
    """
    from megatron.config.validation_errors import parse_section
    from megatron.options.data import CorpusOptions

    folder, names = to_path("output", output), to_paths("sources", sources)
    if not isinstance(overwrite, bool):
        raise UserError(f"overwrite is {describe_value(overwrite)}; it must be True or False")
    plain = {name: _to_plain_option(value) for name, value in options.items()}
    parse_section(CorpusOptions, {**plain, "sources": names}, source=None)  # in the words of Python
    flags = [f"--output={folder}", *format_flags({**plain, "overwrite": overwrite})]
    run_command("prepare", *flags, "--", *names, quiet=quiet)
    return Path(folder)


@method_errors()
def evaluate(
    runs: str | Path | Sequence[str | Path], output: str | Path | None = None, **options: Any
) -> list[dict[str, Any]]:
    """Evaluate runs side by side as `./deepy.py evaluate` does.

    Args:
        runs: a run's folder, or several.
        output: folder for results.json, .csv and .png; a single run's own if None.
        options: those of the command by their keys (`sweep.evaluate` in docs/configuration.md): `lengths=[512, 4096]`,
            `multiples=[1, 2, 4]`, `protocol="nonoverlapping"`, `data="book.txt"`.

    Returns:
        A record for each run and length: method, length, perplexity, nll, …

    Raises:
        UserError, RunError: as the command ends with.
    """
    from megatron.config.validation_errors import parse_section
    from megatron.evaluation.run import evaluate_runs
    from megatron.options.evaluation import EvaluationOptions

    records = evaluate_runs(
        to_paths("runs", runs),
        parse_section(EvaluationOptions, options, source=None),
        output=to_optional_path("output", output),
    )
    return [record.to_row() for record in records]


def read_results(path: str | Path) -> list[dict[str, Any]]:
    """The records of a results.json, or of a folder that has one.

    Raises UserError: there is none, or it is no file of records.
    """
    from megatron.reports.records import RESULTS_FILE, read_records

    file = Path(to_path("path", path))
    return [record.to_row() for record in read_records(file / RESULTS_FILE if file.is_dir() else file)]


@method_errors()
def analyze(runs: str | Path | Sequence[str | Path], output: str | Path | None = None, **options: Any) -> Path:
    """Look into runs as `./deepy.py analyze` does.

    Args:
        runs: a run's folder, or several.
        output: folder for the page and its data; `analysis` in a single run's folder if None.
        options: those of the command: `lengths=[64, 512]`, `only=["kernels"]`, `layers=[0]`, `heads=[0, 1]`.

    Returns:
        The page.

    Raises:
        UserError, RunError: as the command ends with.
    """
    from megatron.analysis.run import analyze as analyze_runs
    from megatron.config.validation_errors import parse_section
    from megatron.options.commands import AnalysisOptions

    return analyze_runs(
        to_paths("runs", runs),
        parse_section(AnalysisOptions, options, source=None),
        output=to_optional_path("output", output),
    )


@method_errors()
def list_methods() -> list[dict[str, Any]]:
    """All position encodings, score processors and temperatures, those of `FARFIELD_METHODS` among them: kind, name,
    formula, parameters, options with their defaults, traits, source and advice of each.

    Raises UserError: a file of a method cannot be used.
    """
    from megatron.position.catalog import list_encodings, list_processors, list_temperatures
    from megatron.position.registry import describe_methods

    records, errors = describe_methods([*list_encodings(), *list_processors(), *list_temperatures()])
    if errors:
        raise UserError("\n".join(errors))
    return records


def format_overrides(keys: dict[str, Any]) -> list[str]:
    """Keys with their values as the command line takes them: KEY=VALUE, values in YAML."""
    return [f"{name}={_format_value(name, value)}" for name, value in keys.items()]


def _format_value(name: str, value: Any) -> str:
    try:
        return json.dumps(value, default=_to_plain, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise UserError(f"{name} is {describe_value(value)}; it is no value of a configuration") from None


def _to_plain(value: Any) -> Any:
    """NumPy's numbers and arrays as Python's, and paths as texts."""
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise UserError(f"{describe_value(value)} is no value of a configuration")


def _to_plain_option(value: Any) -> Any:
    """Paths as texts, NumPy's numbers as Python's, and tuples as lists. Anything else stays."""
    if isinstance(value, list | tuple):
        return [_to_plain_option(each) for each in value]
    return _to_plain(value) if isinstance(value, Path) or hasattr(value, "tolist") else value


def format_flags(options: dict[str, Any]) -> list[str]:
    """Options as the command line takes them: --add-bos for True, --no-add-bos for False, a list with commas."""
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
    """Run a command of `./deepy.py` in a process of its own, and print what it prints.

    Raises:
        UserError, RunError: with the line that the command ended with.
    """
    for argument in arguments:
        check_characters("an argument", argument)
    lines: deque[str] = deque(maxlen=KEPT_LINES)
    child = subprocess.Popen(
        [sys.executable, str(DEEPY), verb, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        # A notebook's kernel asks for colours, which an error's line is better without.
        env={name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
        | {"NO_COLOR": "1"}
        | get_parent_variable(),  # it ends with this process, however that goes
        start_new_session=True,  # Ctrl-C reaches this process alone, which hands it on once
    )
    try:
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line)
            if not quiet:
                print(line, end="")
        child.wait()
    finally:
        stop_child(child)
    if child.returncode != 0:
        raise build_command_error(child.returncode, lines, f"{verb} ended with exit code {child.returncode}")
