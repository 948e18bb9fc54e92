"""Command-line parsing for the tools.

An invalid command line prints one line to stderr and exits with 2 before any work.
"""

import argparse
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import NoReturn


class ToolParser(argparse.ArgumentParser):
    """Parser that prints an error as one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def int_at_least(minimum: int) -> Callable[[str], int]:
    """Return an argument type for integers with a lower bound."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"it must be an integer of at least {minimum}, not {text!r}")
        return value

    return number


def comma_separated(choices: Collection[str]) -> Callable[[str], list[str]]:
    """Return an argument type for comma-separated names."""

    def names(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in choices]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(choices)}")
        return text.split(",")

    return names


def parse_device(text: str) -> str:
    """Parse a device: cpu, or cuda if a GPU is available."""
    import torch

    if text not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"it must be cpu or cuda, not {text!r}")
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("no CUDA device found; use cpu")
    return text


def parse_output_path(text: str) -> Path:
    """Parse the path of an output file. Reports an unwritable path before a long run starts."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: {'is a folder' if path.is_dir() else 'its folder does not exist'}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: cannot be written")
    return path


def parse_record_path(text: str) -> Path:
    """Parse the path of a record; `records.write_record` writes a page with the same stem next to it."""
    path = parse_output_path(text)
    if path.suffix == ".md":
        raise argparse.ArgumentTypeError(f"{text} is the name of the page; choose another extension, such as .json")
    return path


def print_interrupts_in_one_line() -> None:
    """Make Ctrl-C print one line instead of a traceback from now on. Call it before slow imports.

    Python then ends with the signal itself, so that the shell or the caller sees it.
    """
    otherwise = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            print("interrupted", file=sys.stderr)
        else:
            otherwise(kind, error, trace)

    sys.excepthook = tell
