"""All commands in one application, with help that names the page that explains more."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from megatron.cli.analyze import analyze
from megatron.cli.convert import export, import_
from megatron.cli.evaluate import evaluate
from megatron.cli.generate import generate
from megatron.cli.plan import plan
from megatron.cli.prepare import prepare
from megatron.cli.reference import keys, positions, tasks
from megatron.cli.rehearse import rehearse
from megatron.cli.report import report
from megatron.cli.run_command import pass_errors_through, run_command
from megatron.cli.runs import checkpoints, status
from megatron.cli.sweep import sweep
from megatron.cli.train import train
from megatron.options.section import read_docstring
from megatron.utils.errors import UserError

COMMANDS: tuple[tuple[Callable[..., Any], str], ...] = (
    (train, "docs/training.md"),
    (plan, "docs/planning.md"),
    (rehearse, "docs/gpu.md"),
    (prepare, "docs/data.md"),
    (import_, "docs/export.md"),
    (evaluate, "docs/evaluation.md"),
    (analyze, "docs/analysis.md"),
    (generate, "docs/export.md"),
    (positions, "docs/positions.md"),
    (tasks, "docs/tasks.md"),
    (sweep, "docs/evaluation.md"),
    (report, "docs/evaluation.md"),
    (export, "docs/export.md"),
    (checkpoints, "docs/training.md"),
    (status, "docs/training.md"),
    (keys, "docs/configuration.md"),
)
"""Every command, in the order of the help, with the page that explains more. It is called as its function is, without
the underscore that keeps a name from being a word of Python."""


PACKAGES = ("torch", "triton", "deepspeed", "megatron-core", "transformers", "lm-eval")
"""Those that decide what is computed, and that reports of a problem should name (`--version`)."""


class Commands(TyperGroup):
    """Commands with or without `.py`, GPT-NeoX's habit: `./deepy.py train.py …`."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name.removesuffix(".py"))

    def invoke(self, ctx: Any) -> Any:
        with pass_errors_through():
            return super().invoke(ctx)


class Command(TyperCommand):
    """A command that refuses empty arguments and values: as a path, an empty text is the current folder."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flags = {flag for param in self.params for flag in param.opts if flag.startswith("-")}
        for word, previous in zip(args, ["", *args], strict=False):
            flag, has_value, value = word.partition("=")
            if word == "":
                name = previous if previous in flags else "an argument"
            elif has_value and not value and flag in flags:
                name = flag
            else:
                continue
            if name not in EMPTY_OPTIONS:
                raise UserError(f"{name} is empty; give a value, or leave it out")
        return super().parse_args(ctx, args)


EMPTY_OPTIONS = ("-p", "--prompt")
"""Options whose value may be an empty text."""


def format_help(text: str) -> str:
    """Help as rich should show it: paragraphs wrapped to the terminal, indented lines as they are."""
    blocks = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(block if block.startswith(" ") else " ".join(block.splitlines()) for block in blocks)


app = typer.Typer(
    cls=Commands,
    name="deepy.py",
    help="""Pretrain GPTs that extrapolate to lengths they were never trained on.

    From text to a table in three steps:

      ./deepy.py prepare python --output data/python

      ./deepy.py train 125M cdape_kerple_log local_setup save=runs/cdape

      ./deepy.py evaluate runs/cdape --lengths 1x,2x,4x,8x,16x

    Each command explains itself: ./deepy.py train --help""",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def add_command(function: Callable[..., Any], page: str) -> None:
    """Add a command whose help is the function's docstring."""
    text = f"{format_help(read_docstring(function))}\n\nMore: {page}"
    app.command(function.__name__.rstrip("_"), cls=Command, help=text)(function)


for function, page in COMMANDS:
    add_command(function, page)


def _show_versions(is_requested: bool) -> None:
    if is_requested:
        for name, version in list_versions().items():
            print(f"{name} {version}")
        raise typer.Exit


def list_versions() -> dict[str, str]:
    """Names and versions of what is installed, without importing any of it: ours first, the device last."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from megatron.utils.atomic_io import get_farfield_version

    versions = {"farfield": get_farfield_version(), "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions | {"device": _describe_device()}


def _describe_device() -> str:
    """What `device: auto` would take, with the GPU's name where its driver tells."""
    from megatron.distributed.hardware import LocalHardware, read_gpu_name

    hardware = LocalHardware.detect()
    if not hardware.num_gpus:
        return f"cpu ({hardware.num_cores} cores)"
    return f"cuda ({hardware.num_gpus} × {read_gpu_name() or 'GPU'})"


@app.callback()
def before_any_command(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="What is installed here, and on what it would run.",
            callback=_show_versions,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Options that belong to no command."""


def main() -> int:
    """Run a command; every failure is a line on standard error and an exit code."""
    return run_command(app, "./deepy.py")
