"""Packages that only some commands use: asked for in one line where they are missing, before any work."""

import importlib.util

from megatron.utils.errors import UserError

REQUIREMENTS_FILE = "requirements-eval.txt"
"""In the project's root; it pins them."""


def require_package(package: str, what: str) -> None:
    """See that a package is installed, without importing it. UserError says that `what` needs it, and how it comes."""
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"{what} needs the package {package}, which is not installed: pip install -r {REQUIREMENTS_FILE}"
        )
