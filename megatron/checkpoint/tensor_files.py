"""Files of torch, read without running what is in them, and refused in words of ours."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.errors import RunError, reason


def read(path: str | Path, *, classes: Sequence[Any] = (), map_location: Any = "cpu") -> Any:
    """What `torch.save` wrote: tensors, numbers, text, and plain `classes` allowed by name.

    Raises:
        RunError: the file is missing, or it is damaged or holds something else, which is not opened.
    """
    path = Path(path)
    if not path.is_file():
        raise RunError(f"{path}: is missing; the checkpoint is damaged")
    try:
        with torch.serialization.safe_globals(list(classes)):
            return torch.load(path, map_location=map_location, weights_only=True)
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({reason(error)})") from None
    except Exception:  # damaged files fail in as many ways as there are readers, and some ask for unsafe loading
        raise RunError(
            f"{path}: is damaged, or holds more than tensors, numbers and text, and was not opened"
        ) from None
