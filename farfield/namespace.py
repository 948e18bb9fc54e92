"""Check of the namespace `megatron`, which Farfield shares with megatron-core.

Other projects have packages of the same names: a checkout of Megatron-LM on PYTHONPATH has `megatron.training`, and old
versions of it are a regular package, which hides every other part of a namespace.
"""

from importlib.machinery import PathFinder
from pathlib import Path
from typing import Optional

OWN_FOLDER = Path(__file__).resolve().parents[1] / "megatron"


def find_foreign_megatron() -> Optional[str]:  # noqa: UP045 - deepy.py calls this with old Python versions too
    """Return the folder of another project that hides Farfield's modules, or None if there is none."""
    spec = PathFinder.find_spec("megatron")
    if spec is None:
        return None
    if spec.origin is not None:  # a regular package
        return str(Path(spec.origin).parent)
    own = {path.name for path in OWN_FOLDER.iterdir() if path.is_dir()} - {"core", "__pycache__"}
    for folder in (Path(location).resolve() for location in spec.submodule_search_locations or ()):
        if folder == OWN_FOLDER:
            return None
        if any((folder / name).is_dir() for name in own):
            return str(folder)
    return None


def describe_foreign_megatron() -> Optional[str]:  # noqa: UP045
    """Return the error for a folder that hides Farfield's modules, or None."""
    folder = find_foreign_megatron()
    if folder is None:
        return None
    return f"error: {folder} hides Farfield's package `megatron`; remove its parent from PYTHONPATH, or uninstall it"
