"""Check of the namespace `megatron`, which Farfield shares with megatron-core.

Other projects have packages of the same names. A checkout of Megatron-LM on PYTHONPATH has `megatron.training`, and a
`megatron.core` of another version than the installed one. Old versions of it are a regular package, which hides every
other part of a namespace.
"""

from importlib.machinery import PathFinder
from itertools import takewhile
from pathlib import Path
from typing import Optional

OWN_FOLDER = Path(__file__).resolve().parents[1] / "megatron"
INSTALLATION_FOLDERS = ("site-packages", "dist-packages")


def describe_foreign_megatron() -> Optional[str]:  # noqa: UP045 - deepy.py calls this with old Python versions too
    """Return a sentence on another project that hides modules of Farfield or megatron-core, or None."""
    spec = PathFinder.find_spec("megatron")
    if spec is None:
        return None
    if spec.origin is not None:  # a regular package
        return _describe_hidden(Path(spec.origin).parent, "Farfield's package `megatron`")
    own = {path.name for path in OWN_FOLDER.iterdir() if path.is_dir()} - {"core", "__pycache__"}
    folders = [Path(location).resolve() for location in spec.submodule_search_locations or ()]
    for folder in takewhile(lambda folder: folder != OWN_FOLDER, folders):
        if any((folder / name).is_dir() for name in own):
            return _describe_hidden(folder, "Farfield's package `megatron`")
    cores = [folder for folder in folders if (folder / "core").is_dir()]
    if len(cores) > 1 and cores[0].parent.name not in INSTALLATION_FOLDERS:
        return _describe_hidden(cores[0], f"`megatron.core` of {cores[1]}")
    return None


def _describe_hidden(folder: Path, hidden: str) -> str:
    return f"{folder} hides {hidden}; remove its parent from PYTHONPATH, or uninstall it"
