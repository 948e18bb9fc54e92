#!/usr/bin/env python3
"""Farfield's command line. `./deepy.py --help` lists its commands, which live in megatron/cli/."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # Python does not do it with -P or PYTHONSAFEPATH

from farfield.__main__ import start

if __name__ == "__main__":
    start()

import importlib.util
from pathlib import Path

if importlib.util.find_spec("typer") is None:  # a bare python3: continue in the environment that `make` made
    own = Path(__file__).resolve().parent / ".venv" / "bin" / "python"
    try:
        if os.stat(own) and Path(sys.prefix).resolve() != own.parent.parent.resolve():
            os.execv(own, [str(own), *sys.argv])
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        sys.exit(f"error: {own}: cannot be run ({error.strerror}); use a Python with Farfield's requirements")
    sys.exit("error: Farfield's requirements are not installed; run: make setup, or pip install -r requirements.txt")

from megatron.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
