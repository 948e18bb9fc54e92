"""Import helpers: optional packages, and megatron-core and DeepSpeed without unused parts.

At import, megatron-core applies torch.compile to its fused functions, and that alone loads Dynamo and Inductor: two of
the eight seconds of CPU time before a run does anything. None of these functions is called here, because
`megatron/model/build.py` disables the fusions. The modules in data, model and distributed that import megatron-core do
so inside `trim_imports`; the first one determines the result for the process. DeepSpeed's ZeRO does the same with
functions of an optimizer that is not offered here, so `megatron/training/engine.py` imports it in the same way.

At import, both warn about missing packages that are not needed here (Apex, Transformer Engine). These warnings would
look like a broken installation and are suppressed. So are messages of torch's `cpp_extension`, which both import, about
a missing GPU: nothing here is built with its compiler.

megatron-core also imports wandb and tensorboard if they are installed, for an inference engine and timers that are not
used here. wandb takes a second and creates two temporary folders, which remain if a process is killed; tensorboard has
180 modules. `megatron/training/reporters.py` imports them if a run needs them.

While thousands of modules are imported, Python repeatedly searches for garbage and finds none, which takes a fifth of
the time. Garbage collection is therefore paused inside `trim_imports`, and around other imports of models by
`pause_garbage_collection`.

A Python that is started with `-m` or `-c` imports from the current folder first, so a user's file with the name of a
standard module would be imported instead. Every such start has `SAFE_PATH_VARIABLE` in its environment. Programs that
receive a command line and no environment are started with `-P`, which is equivalent (`ssh_launcher.py`).
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
"""Modules of run reporters, which megatron-core imports unconditionally."""
MAX_FROZEN_BY_PYTHON = 5000
"""Upper bound of objects that Python itself excludes from garbage collection: 375 in 3.12.1, and none in 3.11."""
REQUIREMENTS_FILE = "requirements-eval.txt"
"""Requirements file in the project root, which pins optional packages."""

SAFE_PATH_VARIABLE = {"PYTHONSAFEPATH": "1"}
"""Environment variable that disables imports from the current folder, for every Python that is started with `-m` or
`-c`.

The project's own folder is then found by PYTHONPATH.
"""


@contextmanager
def protect_child_imports() -> Iterator[None]:
    """Prevent processes spawned by multiprocessing from importing from the current folder, inside the context."""
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
    """Check that a package is installed, without importing it.

    Raises:
        UserError: the package, needed by `feature`, is missing; the message says how to install it.
    """
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"{feature} needs the package {package}, which is not installed: pip install -r {REQUIREMENTS_FILE}"
        )


@contextmanager
def trim_imports() -> Iterator[None]:
    """Trim imports inside the context.

    torch.compile as a decorator returns functions unchanged, modules of run reporters are not found unless imported
    before, and warnings are suppressed.
    """
    with pause_garbage_collection():
        import torch  # imported here, because `require_package` is called before torch is needed

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
    """Pause garbage collection inside the context."""
    enabled, imported = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            # Skip this if nothing was imported, or if other code has frozen objects.
            if len(sys.modules) > imported and gc.get_freeze_count() < MAX_FROZEN_BY_PYTHON:
                gc.freeze()
                gc.unfreeze()  # all objects are old now, and only a full collection visits them again
            gc.enable()


def _return_unchanged(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    return function if function is not None else lambda decorated: decorated
