"""Recorder of every collective of this process.

It records NCCL calls in the null device's library, and gloo calls on entry.

The ledger of rank r is `rank-r.jsonl` in the ledger's folder. Each line is either a group that contains the rank,

    {"group": "3", "ranks": [0, 4, 8, 12]}

or an operation, in the order in which the rank issued it:

    {"op": "all_reduce", "group": "3", "count": 1024, "dtype": "bf16", "bytes": 2048, "batch": 7, "device": "cuda",
     "where": ["megatron/distributed/collectives.py:41 all_reduce_sum_", …]}

Optional keys are `peer` (a rank of the job: the root, or the other side of a send) and `reduction`. `batch` is equal
for calls that NCCL issues together in no particular order. `where` lists the project's lines, innermost first.
"""

import functools
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.rehearsal.null_device.library import listen_to_collectives
from megatron.utils.project import find_own_path

_OWN = str(Path(__file__).parents[1]) + os.sep
DTYPES = ("i8", "u8", "i32", "u32", "i64", "u64", "fp16", "fp32", "fp64", "bf16", "fp8_e4m3", "fp8_e5m2")
"""NCCL data types, indexed by their number."""
SIZES = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)
REDUCTIONS = ("sum", "prod", "max", "min", "avg")
MAX_FRAMES = 4


def get_ledger_path(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"rank-{rank}.jsonl"


def start_recording(folder: str) -> Callable[[Any], None]:
    """Return the patch of torch.distributed that records this process's collectives."""

    def change(c10d: Any) -> None:
        global _recorder
        _recorder = CollectiveRecorder(folder, c10d)
        listen_to_collectives(_recorder.record_device_call)
        _recorder.watch_host_collectives()

    return change


_recorder: "CollectiveRecorder | None" = None


def get_recorder() -> "CollectiveRecorder | None":
    """Return this process's recorder, or None."""
    return _recorder


class CollectiveRecorder:
    """Recorder of this process's ledger.

    Args:
        folder: folder of the ledger.
        c10d: torch.distributed.distributed_c10d.
    """

    def __init__(self, folder: str, c10d: Any) -> None:
        self._c10d = c10d
        self._folder = Path(folder)
        self._file: Any = None
        self._lock = threading.Lock()
        self._groups: dict[str, tuple[str, list[int]]] = {}
        """Group name and ranks of each NCCL communicator, as torch numbers them."""
        self._written_groups: set[str] = set()
        self._depth = 0
        self._batch = 0

    def write(self, **line: Any) -> None:
        """Append a line to the ledger."""
        with self._lock:
            if self._file is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                path = get_ledger_path(self._folder, int(os.environ.get("RANK", "0")))
                self._file = path.open("a", buffering=1, encoding="utf-8")
            self._file.write(json.dumps(line) + "\n")

    def record_device_call(
        self, op: str, communicator: str, size: int, rank: int, count: int, dtype: int, peer: int, reduction: int,
        sent: int, received: int,
    ) -> None:  # fmt: skip
        if op == "group_start":
            self._batch += self._depth == 0
            self._depth += 1
            return
        if op == "group_end":
            self._depth -= 1
            return
        if op in ("init", "split"):
            self._groups[communicator] = _find_group(size)
            return
        group, ranks = self._groups.get(communicator, (communicator, []))
        self._batch += self._depth == 0
        line: dict[str, Any] = {"count": count, "dtype": DTYPES[dtype], "bytes": count * SIZES[dtype]}
        if peer >= 0:
            line["peer"] = ranks[peer] if ranks else peer
        if 0 <= reduction < len(REDUCTIONS):
            line["reduction"] = REDUCTIONS[reduction]
        self._write_group(group, ranks)
        self.write(op=op, group=group, **line, batch=self._batch, device="cuda", where=list_own_frames())

    def _write_group(self, group: str, ranks: list[int]) -> None:
        if group not in self._written_groups:
            self._written_groups.add(group)
            self.write(group=group, ranks=ranks)

    def record_host_call(self, op: str, group: Any, **line: Any) -> None:
        """Record a collective on the host."""
        c10d = self._c10d
        group = c10d._get_default_group() if group is None else group
        name = str(group.group_name)
        self._write_group(name, c10d.get_process_group_ranks(group))
        self._batch += 1
        self.write(op=op, group=name, **line, batch=self._batch, device="cpu", where=list_own_frames())

    def watch_host_collectives(self) -> None:
        """Patch the gloo collectives to record tensors and objects of the host."""
        c10d = self._c10d

        def watch_tensors(name: str, position: int, peer: str | None = None) -> None:
            real = getattr(c10d, name)

            @functools.wraps(real)
            def call(*args: Any, **kwargs: Any) -> Any:
                tensor: Any = args[position] if len(args) > position else None
                if isinstance(tensor, list | tuple) and tensor:
                    tensor = tensor[0]
                if tensor is not None and hasattr(tensor, "is_cuda") and not tensor.is_cuda:
                    size = {"count": tensor.numel(), "dtype": str(tensor.dtype).removeprefix("torch.")}
                    self.record_host_call(
                        name, kwargs.get("group"), **size, bytes=tensor.numel() * tensor.element_size()
                    )
                return real(*args, **kwargs)

            setattr(c10d, name, call)

        for name, position in (
            ("all_reduce", 0), ("broadcast", 0), ("reduce", 0), ("all_gather", 1), ("all_gather_into_tensor", 1),
            ("reduce_scatter_tensor", 1), ("gather", 0), ("scatter", 0),
        ):  # fmt: skip
            watch_tensors(name, position)

        def watch_objects(name: str) -> None:
            real = getattr(c10d, name)

            @functools.wraps(real)
            def call(*args: Any, **kwargs: Any) -> Any:
                self.record_host_call(name, kwargs.get("group"))
                return real(*args, **kwargs)

            setattr(c10d, name, call)

        for name in ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"):
            watch_objects(name)


def _find_group(size: int) -> tuple[str, list[int]]:
    """Find the torch group for which a communicator is being created, by inspecting the stack."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_new_process_group_helper":
            ranks = list(frame.f_locals["global_ranks_in_group"])
            return str(frame.f_locals["group_name"]), ranks or list(range(frame.f_locals["group_size"]))
        frame = frame.f_back  # type: ignore[assignment]
    return f"unnamed group of {size}", []


def list_own_frames() -> list[str]:
    """List the project's frames, innermost first, without those of the rehearsal."""
    frames: list[str] = []
    frame: Any = sys._getframe(1)
    while frame is not None and len(frames) < MAX_FRAMES:
        path = frame.f_code.co_filename
        own = None if path.startswith(_OWN) else find_own_path(path)
        if own is not None:
            frames.append(f"{own}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return frames
