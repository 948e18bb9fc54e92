"""Runs a Python program on the null device: `python -m megatron.rehearsal.null_device [--gpu CARD] [--devices N]
[--ledger FOLDER] PROGRAM ARGUMENT…`, a program being a file, or `-m` and a module."""

import argparse
import os
import sys
from pathlib import Path

from megatron.rehearsal.null_device.cards import get_card
from megatron.rehearsal.null_device.environment import build_environment
from megatron.utils.errors import FarfieldError


def main() -> int:
    """Become the program, on the null device; 2 if it cannot be had here."""
    parser = argparse.ArgumentParser(prog="python -m megatron.rehearsal.null_device", description=__doc__)
    parser.add_argument("--gpu", default="a100-80gb", help="the card that each device is (a100-80gb)")
    parser.add_argument("--devices", type=int, default=1, help="devices of the node (1)")
    parser.add_argument("--ledger", type=Path, help="a folder for what each rank did")
    parser.add_argument("program", nargs="*", help="a Python file, or -m and a module, and arguments")
    # What follows is the program's own, whatever it looks like.
    arguments, own = sys.argv[1:], 0
    while own < len(arguments) and arguments[own].startswith("--"):
        own += 1 if "=" in arguments[own] or arguments[own] == "--help" else 2
    options, program = parser.parse_args(arguments[:own]), arguments[own:]
    if not program:
        parser.error("which program?")
    try:
        environment = build_environment(get_card(options.gpu), devices=options.devices, ledger=options.ledger)
    except FarfieldError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    os.execve(sys.executable, [sys.executable, *program], environment)


if __name__ == "__main__":
    sys.exit(main())
