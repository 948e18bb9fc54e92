"""Run a Python program on the null device. PROGRAM is a file, or `-m` and a module."""

import argparse
import os
import sys
from pathlib import Path

from megatron.rehearsal.null_device.environment import VOID_RESULTS, build_environment, get_gpu_model
from megatron.utils.errors import FarfieldError

MAX_DEVICES = 64
"""Maximum number of devices; same value as in `native/memory.c`."""


def main() -> int:
    """Replace this process with the program on the null device. Return 2 if the null device is unavailable."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron.rehearsal.null_device",
        description=__doc__,
        usage="%(prog)s [--gpu CARD] [--devices N] [--ledger FOLDER] PROGRAM ARGUMENT…",
    )
    parser.add_argument("--gpu", default="a100-80gb", help="GPU to emulate (a100-80gb)")
    parser.add_argument("--devices", type=int, default=1, help=f"number of devices, 1 to {MAX_DEVICES} (1)")
    parser.add_argument("--ledger", type=Path, help="folder for the ledger and the summary of each rank")
    parser.add_argument("program", nargs="*", help="Python file, or -m and a module, with its arguments")
    # Everything after these options belongs to the program.
    arguments, own = sys.argv[1:], 0
    while own < len(arguments) and arguments[own].startswith("--"):
        own += 1 if "=" in arguments[own] or arguments[own] == "--help" else 2
    own = max(own, int(arguments[:1] == ["-h"]))
    options, program = parser.parse_args(arguments[:own]), arguments[own:]
    if not program:
        parser.error("no program given; give a Python file, or -m and a module")
    if not 1 <= options.devices <= MAX_DEVICES:
        parser.error(f"--devices {options.devices}: it must be from 1 to {MAX_DEVICES}")
    try:
        environment = build_environment(get_gpu_model(options.gpu), devices=options.devices, ledger=options.ledger)
    except FarfieldError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"note: {VOID_RESULTS}", file=sys.stderr, flush=True)
    os.execve(sys.executable, [sys.executable, *program], environment)


if __name__ == "__main__":
    sys.exit(main())
