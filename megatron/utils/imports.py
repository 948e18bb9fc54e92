"""How packages are imported: those that may be missing, and megatron-core and DeepSpeed without what nobody needs.

While it is imported, megatron-core puts torch.compile on its fused functions, and that alone loads Dynamo and Inductor:
two of the eight seconds of processor time before a run does anything. None of these functions is called here, for
`megatron/model/build.py` leaves the fusions off. The doors to megatron-core, in data, model and
distributed, import it inside `trim_imports`; whichever comes first decides for the process. DeepSpeed's ZeRO
does the same with the functions of an optimizer that is not offered here, so `megatron/training/engine.py` imports it
in the same way.

Both warn while they are imported that packages are missing which nothing here needs (Apex, Transformer Engine). A log
that begins so reads as a broken installation, and they are not shown. Nor is what torch's `cpp_extension`, which both
import, logs where a CUDA build of torch finds no GPU: nothing here builds with its compiler.

megatron-core also imports wandb and tensorboard if they are installed, for an inference engine and timers that are not
used here. wandb takes a second and makes two temporary folders, which stay where a process is killed; tensorboard has
180 modules. `megatron/training/reporters.py` imports them where a run asks for them.

Python searches for garbage again and again while thousands of modules are imported, and finds none: a fifth of the
time. So it does not inside `trim_imports`, and what needs a model imports it inside `pause_garbage_collection`.

A Python that is started with `-m` or `-c` imports from the current folder first, so a user's file with the name of a
standard module would run in its place. Every such start has `SAFE_PATH_VARIABLE` in its environment. Programs that get
a command line and no environment are started with `-P`, which is the same (`ssh_launcher.py`).
"""

import gc
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.utils.errors import UserError

_EXTENSION_LOGGER = logging.getLogger("torch.utils.cpp_extension")
REPORTER_MODULES = ("wandb", "torch.utils.tensorboard")
"""What reports a run, and megatron-core imports all the same."""
MAX_FROZEN_BY_PYTHON = 5000
"""Python itself leaves no more objects out of garbage collection: 375 in 3.12.1, and none in 3.11."""
REQUIREMENTS_FILE = "requirements-eval.txt"
"""In the project's root; it pins them."""

SAFE_PATH_VARIABLE = {"PYTHONSAFEPATH": "1"}
"""In the environment of every Python that is started to run a module or code: nothing is imported from the current
folder. The project's own folder then comes from PYTHONPATH."""


@contextmanager
def protect_child_imports() -> Iterator[None]:
    """Inside it, processes that multiprocessing spawns import nothing from the current folder."""
    (name, value), before = *SAFE_PATH_VARIABLE.items(), os.environ.get(*SAFE_PATH_VARIABLE)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def require_package(package: str, feature: str) -> None:
    """See that a package is installed, without importing it.

    Raises:
        UserError: `feature` needs it, and this is how to install it.
    """
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"{feature} needs the package {package}, which is not installed: pip install -r {REQUIREMENTS_FILE}"
        )


@contextmanager
def trim_imports() -> Iterator[None]:
    """Inside it torch.compile, used as a decorator, leaves functions as they are, what reporters of runs need is not
    found unless it was imported before, and no warning is shown."""
    with pause_garbage_collection():
        import torch  # not at the top: `require_package` is asked before torch is there

        usual, torch.compile = torch.compile, _return_unchanged  # type: ignore[assignment]
        level = _EXTENSION_LOGGER.level
        _EXTENSION_LOGGER.setLevel(logging.ERROR)
        hidden = [name for name in REPORTER_MODULES if name not in sys.modules]
        sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            torch.compile = usual
            _EXTENSION_LOGGER.setLevel(level)
            for name in hidden:
                del sys.modules[name]


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Inside it Python does not search for garbage. Afterwards it does if it did before."""
    enabled, imported = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            # Unless all was imported before, or somebody has left out objects for longer.
            if len(sys.modules) > imported and gc.get_freeze_count() < MAX_FROZEN_BY_PYTHON:
                gc.freeze()
                gc.unfreeze()  # all objects are old now, and only a full search looks at them again
            gc.enable()


def _return_unchanged(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    return function if function is not None else lambda decorated: decorated
