"""Activation of the null device in this process, before torch is imported.

`sitecustomize` calls `activate` when the interpreter starts. The module therefore imports as little as possible and
patches other modules only when the process itself imports them.
"""

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from megatron.rehearsal.null_device.environment import LEDGER_VARIABLE, SINGLE_RANK_VARIABLE
from megatron.rehearsal.null_device.library import load_library


def activate() -> None:
    """Install the import hook that patches modules according to this process's environment.

    Raises:
        RuntimeError: if the null device's library does not replace the CUDA runtime in this process.
    """
    load_library()
    sys.meta_path.insert(0, _ChangedModules(_collect_changes()))


def _collect_changes() -> dict[str, Callable[[ModuleType], None]]:
    """Return the patch of each module, applied right after its import."""
    # These modules import nothing but the standard library until they are called.
    from megatron.rehearsal.null_device import host_reads, library, recorder, single_rank

    changes: dict[str, list[Callable[[Any], None]]] = {}
    for name, change in host_reads.IMPORT_PATCHES.items():
        changes.setdefault(name, []).append(change)
    if os.environ.get(SINGLE_RANK_VARIABLE):
        for name, change in single_rank.IMPORT_PATCHES.items():
            changes.setdefault(name, []).append(change)
    if folder := os.environ.get(LEDGER_VARIABLE):
        changes.setdefault("torch.distributed.distributed_c10d", []).append(recorder.start_recording(folder))
        changes.setdefault("torch", []).append(library.write_summary_at_exit(folder))

    def join(parts: list[Callable[[Any], None]]) -> Callable[[ModuleType], None]:
        def change(module: ModuleType) -> None:
            for part in parts:
                part(module)

        return change

    return {name: join(parts) for name, parts in changes.items()}


class _ChangedModules(importlib.abc.MetaPathFinder):
    """Import finder that finds modules as usual and patches some of them after loading."""

    def __init__(self, changes: dict[str, Callable[[ModuleType], None]]) -> None:
        self._changes = changes
        self._searching = False

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in self._changes or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is None or spec.loader is None:
            return None
        execute, change = spec.loader.exec_module, self._changes[fullname]

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec
