"""Activation of the null device in this process, before torch is imported.

`sitecustomize` calls `activate` when the interpreter starts. The module therefore imports as little as possible and
patches other modules only when the process itself imports them.

A process can also run as a single rank of a job whose other ranks do not run. A store then answers on behalf of the
other ranks. NCCL groups are real but exchange nothing; gloo groups are torch's fake ones. Exchanges between ranks on
the host return this rank's own value. Broadcasts of the first rank are saved in the ledger's folder for the ranks
rehearsed after it.
"""

import ctypes
import hashlib
import importlib.abc
import importlib.util
import os
import pickle
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron.rehearsal.null_device.environment import LEDGER_VARIABLE, SINGLE_RANK_VARIABLE
from megatron.rehearsal.null_device.recorder import load_library


def _make_store(c10d: Any) -> Any:
    class SingleRankStore(c10d.Store):
        """In-memory store in which the other ranks have already set every key that this rank waits for."""

        def __init__(self) -> None:
            super().__init__()
            self.values: dict[str, bytes] = {}

        def set(self, key: str, value: str | bytes) -> None:
            self.values[key] = value if isinstance(value, bytes) else value.encode()

        def get(self, key: str) -> bytes:
            if key not in self.values:
                # An NCCL id, which the first rank of a group would have set; equal for all members.
                self.values[key] = hashlib.sha256(key.encode()).hexdigest()[:32].encode().ljust(128, b"\0")
            return self.values[key]

        def add(self, key: str, amount: int) -> int:
            total = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(total).encode()
            return max(total, int(os.environ["WORLD_SIZE"]))

        def wait(self, *args: Any) -> None:
            pass

        def check(self, keys: list[str]) -> bool:
            return all(key in self.values for key in keys)

        def delete_key(self, key: str) -> bool:
            return self.values.pop(key, None) is not None

        def num_keys(self) -> int:
            return len(self.values)

        def list_keys(self) -> list[str]:
            return list(self.values)

        def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
            self.set(key, desired)
            return self.values[key]

        def append(self, key: str, value: str | bytes) -> None:
            self.values[key] = self.values.get(key, b"") + (value if isinstance(value, bytes) else value.encode())

        def multi_get(self, keys: list[str]) -> list[bytes]:
            return [self.get(key) for key in keys]

        def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
            for key, value in zip(keys, values, strict=True):
                self.set(key, value)

        def set_timeout(self, timeout: Any) -> None:
            pass

        def has_extended_api(self) -> bool:
            return False

        def clone(self) -> "SingleRankStore":
            return self

    return SingleRankStore()


_kept: list[Any] = []
"""References to stores, because torch keeps none to a store implemented in Python."""


def _change_c10d(c10d: Any) -> None:
    init_process_group, new_group = c10d.init_process_group, c10d.new_group

    def init_single_rank_group(backend: str | None = None, **options: Any) -> None:
        import torch.testing._internal.distributed.fake_pg  # noqa: F401 — registers the backend

        known = {key: options[key] for key in ("rank", "world_size", "device_id", "timeout") if key in options}
        if known.get("world_size", 1) == 1:
            init_process_group(backend, **options)
            return
        _kept.append(_make_store(c10d))
        name = "fake" if backend == "gloo" else "cpu:fake,cuda:nccl"
        init_process_group(name, store=_kept[-1], **known)

    def make_group(ranks: Any = None, timeout: Any = None, backend: str | None = None, **options: Any) -> Any:
        known = None if backend is None else {"gloo": "fake", "nccl": "cpu:fake,cuda:nccl"}.get(backend, backend)
        if c10d.get_world_size() == 1:
            known = backend
        return new_group(ranks, timeout, known, **options)

    c10d.init_process_group, c10d.new_group = init_single_rank_group, make_group
    c10d.all_gather_object = _all_gather_object
    c10d.gather_object = _gather_object
    c10d.broadcast_object_list = _make_broadcast(c10d)


def _all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    object_list[:] = [obj] * len(object_list)


def _gather_object(obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


def _make_broadcast(c10d: Any) -> Callable[..., None]:
    counts: dict[str, int] = {}

    def broadcast(
        object_list: list[Any], src: int | None = None, group: Any = None, device: Any = None, group_src: Any = None
    ) -> None:
        folder = os.environ.get(LEDGER_VARIABLE)
        if folder is None:
            return
        group = c10d._get_default_group() if group is None else group
        root = src if src is not None else c10d.get_global_rank(group, group_src or 0)
        name = str(group.group_name)
        counts[name] = counts.get(name, 0) + 1
        path = Path(folder) / "objects" / f"{name}-{counts[name]}.pickle"
        if c10d.get_rank() == root:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pickle.dumps(object_list))
        elif path.is_file():
            object_list[:] = pickle.loads(path.read_bytes())  # written by another rank of this rehearsal

    return broadcast


def _report_group_sizes(c10d: Any) -> None:
    """Give the library the size of each group that PyTorch creates, because NCCL's calls do not contain it."""
    create_group = c10d._new_process_group_helper
    size = ctypes.c_int.in_dll(load_library(), "null_device_group_size")

    def create_group_of_size(group_size: int, *args: Any, **options: Any) -> Any:
        size.value = group_size
        try:
            return create_group(group_size, *args, **options)
        finally:
            size.value = 0

    c10d._new_process_group_helper = create_group_of_size


SINGLE_RANK_PATCHES: dict[str, Callable[[Any], None]] = {"torch.distributed.distributed_c10d": _change_c10d}
"""Patches of a single rank by module name, applied once the module is imported."""


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
    from megatron.rehearsal.null_device import host_reads, recorder

    changes: dict[str, list[Callable[[Any], None]]] = {"torch.distributed.distributed_c10d": [_report_group_sizes]}
    for name, change in host_reads.IMPORT_PATCHES.items():
        changes.setdefault(name, []).append(change)
    if os.environ.get(SINGLE_RANK_VARIABLE):
        for name, change in SINGLE_RANK_PATCHES.items():
            changes.setdefault(name, []).append(change)
    if folder := os.environ.get(LEDGER_VARIABLE):
        changes.setdefault("torch.distributed.distributed_c10d", []).append(recorder.start_recording(folder))
        changes.setdefault("torch", []).append(recorder.write_summary_at_exit(folder))

    def join(parts: list[Callable[[Any], None]]) -> Callable[[ModuleType], None]:
        def change(module: ModuleType) -> None:
            for part in parts:
                part(module)

        return change

    return {name: join(parts) for name, parts in changes.items()}


class _ChangedModules(importlib.abc.MetaPathFinder):
    """Import finder that finds modules as Python does and patches some of them after loading."""

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
