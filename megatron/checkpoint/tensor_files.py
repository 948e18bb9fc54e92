"""Files of torch, read without running what is in them, and refused in words of ours."""

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.utils.errors import RunError, describe_cause


def read_torch_file(
    path: str | Path, *, classes: Sequence[Any] = (), map_location: Any = "cpu", mapped: bool = False
) -> Any:
    """What `torch.save` wrote: tensors, numbers, text, and plain `classes` allowed by name.

    mapped: leave the tensors on the disk until they are used, where the file's format allows it.

    Raises:
        RunError: the file is missing, or it is damaged or holds something else, which is not opened.
    """
    path = Path(path)
    if not path.is_file():
        raise RunError(f"{path}: is missing; the checkpoint is damaged")
    try:
        with torch.serialization.safe_globals(list(classes)):
            return torch.load(
                path, map_location=map_location, weights_only=True, mmap=mapped and zipfile.is_zipfile(path)
            )
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({describe_cause(error)})") from None
    except Exception:  # damaged files fail in as many ways as there are readers, and some ask for unsafe loading
        raise RunError(f"{path}: {_describe_refusal(path, classes)}, and was not opened") from None


def _describe_refusal(path: Path, classes: Sequence[Any]) -> str:
    """What stands against reading a file. What it wants to run is listed without running it."""
    known = {f"{each.__module__}.{each.__qualname__}" for each in classes if hasattr(each, "__qualname__")}
    try:
        wanted = sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - known)
    except Exception:  # damaged
        wanted = []
    if wanted:
        return f"holds more than tensors, numbers and text: {', '.join(wanted)}"
    return "is damaged, or holds more than tensors, numbers and text"
