"""Command lines of the tools: what is wrong with one is one line on standard error and exit code 2, before any work."""

import argparse
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import NoReturn


class ToolParser(argparse.ArgumentParser):
    """Errors without the usage: one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def int_at_least(least: int) -> Callable[[str], int]:
    """The type of a whole number with a lower bound."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"must be a whole number, at least {least}, not {text!r}")
        return value

    return number


def comma_separated(choices: Collection[str]) -> Callable[[str], list[str]]:
    """The type of names with commas between them."""

    def names(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in choices]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(choices)}")
        return text.split(",")

    return names


def parse_device(text: str) -> str:
    """The type of a device: cpu, or cuda where there is a GPU."""
    import torch

    if text not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"must be cpu or cuda, not {text!r}")
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("no CUDA device is here; use cpu")
    return text


def parse_output_path(text: str) -> Path:
    """The type of a file to write: a long run should not find out at its end that it cannot."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: {'is a folder' if path.is_dir() else 'its folder does not exist'}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: may not be written")
    return path


def parse_record_path(text: str) -> Path:
    """The type of a record's file, beside which a page of the same name goes (`records.write_record`)."""
    path = parse_output_path(text)
    if path.suffix == ".md":
        raise argparse.ArgumentTypeError(f"{text} is where the page goes; choose another ending, such as .json")
    return path


def print_interrupts_in_one_line() -> None:
    """From here on Ctrl-C ends this process with one line instead of a traceback; call it before slow imports.

    Python then ends by the signal itself, so that a shell or a caller sees what happened.
    """
    otherwise = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            print("interrupted", file=sys.stderr)
        else:
            otherwise(kind, error, trace)

    sys.excepthook = tell
