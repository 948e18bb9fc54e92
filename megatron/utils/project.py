"""Paths of the project's own files and its command, in a checkout or in an installed package.

A checkout has `deepy.py`, `configs/` and the packages side by side. `pip install` copies the packages into
site-packages, and the other files into `farfield/data/` (`setup.py`).
"""

import os
import tomllib
from importlib.metadata import version
from pathlib import Path

PACKAGES_FOLDER = Path(__file__).resolve().parents[2]
"""Folder that contains `megatron/` and `farfield/`: the checkout, or site-packages."""
IS_CHECKOUT = (PACKAGES_FOLDER / "deepy.py").is_file()
DATA_FOLDER = PACKAGES_FOLDER if IS_CHECKOUT else PACKAGES_FOLDER / "farfield" / "data"
SHIPPED_CONFIGS = DATA_FOLDER / "configs"
CITATION_FILE = DATA_FOLDER / "CITATION.cff"
COMMAND = (str(PACKAGES_FOLDER / "deepy.py"),) if IS_CHECKOUT else ("-P", "-m", "farfield")
"""Arguments of Python that start the command line."""
PROGRAM = "./deepy.py" if IS_CHECKOUT else "farfield"
"""Command line as a user types it."""
INSTALLED_FOLDERS = ("megatron", "farfield")
FOREIGN_FOLDER = ("megatron", "core")
"""megatron-core's folder in site-packages."""


def replace_program_name(text: str) -> str:
    """Return a text that names `./deepy.py` with the command of this installation instead."""
    return text.replace("./deepy.py", PROGRAM)


def find_own_path(filename: str) -> Path | None:
    """Return the path of a source file relative to the packages, or None if the file is not the project's."""
    path = Path(filename)
    if not path.is_relative_to(PACKAGES_FOLDER):
        return None
    path = path.relative_to(PACKAGES_FOLDER)
    if IS_CHECKOUT:
        return None if "site-packages" in path.parts else path
    return path if path.parts[0] in INSTALLED_FOLDERS and path.parts[:2] != FOREIGN_FOLDER else None


def join_python_path() -> str:
    """Return the PYTHONPATH of child processes that are started with `-m`: a checkout, and this process's own."""
    own = [str(PACKAGES_FOLDER)] if IS_CHECKOUT else []
    return os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])


def get_farfield_version() -> str:
    """Return the version of this project."""
    if not IS_CHECKOUT:
        return version("farfield")
    project = (PACKAGES_FOLDER / "pyproject.toml").read_text(encoding="utf-8")
    number: str = tomllib.loads(project)["project"]["version"]
    return number
