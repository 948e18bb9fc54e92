"""Packages that only some commands use: asked for in one line where they are missing, before any work."""

import importlib.util

from megatron.errors import UserError

FILE = "requirements-eval.txt"
"""In the project's root; it pins them."""


def need(package: str, what: str) -> None:
    """See that a package is installed, without importing it. UserError says that `what` needs it, and how it comes."""
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{what} needs the package {package}, which is not installed: pip install -r {FILE}")
