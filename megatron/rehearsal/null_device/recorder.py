"""Records of this process on the null device: every collective, and a summary of memory, counters and kernels.

NCCL calls are recorded in the null device's library, gloo calls on entry.

The ledger of rank r is `rank-r.jsonl` in the ledger's folder. Each line is either a group that contains the rank,

    {"group": "3", "ranks": [0, 4, 8, 12]}

or an operation, in the order in which the rank issued it:

    {"op": "all_reduce", "group": "3", "count": 1024, "dtype": "bf16", "bytes": 2048, "batch": 7, "device": "cuda",
     "where": ["megatron/distributed/sharding.py:41 all_reduce_sum_", …]}

Optional keys are `peer` (a rank of the job: the root, or the other side of a send) and `reduction`. `batch` is equal
for calls that NCCL issues together in no particular order. `where` lists the project's lines, innermost first.

A summary of the process (peak memory, counters, kernels and stub calls) is written at exit to `rank-r.summary.json` in
the ledger's folder.
"""

import atexit
import ctypes
import functools
import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from megatron.utils.project import find_own_path


@dataclass(frozen=True)
class Counters:
    """Operations requested from the device so far, in the order of `struct counters` in native/null_device.h."""

    launches: int
    """Kernel launches of the CUDA runtime: PyTorch's own kernels."""
    triton: int
    """Kernel launches of the driver: Triton's kernels, and kernels that PyTorch compiles with NVRTC."""
    gemm: int
    """Matrix products of cuBLAS."""
    convolutions: int
    """Convolutions of cuDNN."""
    copies: int
    """Copies in any direction."""
    fills: int
    synchronizations: int
    """Number of times the host waited for the device."""
    collectives: int
    """NCCL calls that exchange data."""

    def __sub__(self, other: "Counters") -> "Counters":
        return Counters(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(Counters)))

    @property
    def all_launches(self) -> int:
        """Total operations that a GPU would run.

        These are kernels, matrix products, convolutions, copies, fills and collectives.
        """
        return self.launches + self.triton + self.gemm + self.convolutions + self.copies + self.fills + self.collectives


@dataclass(frozen=True)
class LoadedKernel:
    """Triton kernel that was compiled and loaded."""

    name: str
    registers: int
    """Registers per thread."""
    stack: int
    """Local memory per thread, in bytes: values spilled from registers."""
    shared: int
    """Largest shared memory per block of any launch, in bytes."""
    launches: int


Listener = Callable[[str, str, int, int, int, int, int, int, int, int], None]
"""Listener of collectives. Its arguments are the operation, the communicator, the communicator's size, and this rank's
index in it. The others are the number of elements and their type, the peer or root, the reduction, and the addresses of
the send and receive buffers."""

_LISTENER = ctypes.CFUNCTYPE(
    None,
    ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_size_t,
    ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
)  # fmt: skip


@cache
def load_library() -> ctypes.CDLL:
    """Return the library, which this process must have loaded already.

    Raises:
        RuntimeError: if this process does not run on the null device.
    """
    library = ctypes.CDLL(None)
    try:
        library.null_device_listen.restype = None
    except AttributeError:
        raise RuntimeError("its library was not loaded first (LD_PRELOAD)") from None
    return library


def read_counters() -> Counters:
    """Return the operations that this process has requested from the device so far."""
    count = len(fields(Counters))
    return Counters(*(ctypes.c_long * count).in_dll(load_library(), "null_device_counters"))


def read_kernels() -> list[LoadedKernel]:
    """Return the Triton kernels loaded in this process, one entry per compilation."""
    library = load_library()
    kernels: list[LoadedKernel] = []
    name, values = ctypes.create_string_buffer(256), (ctypes.c_int * 4)()
    while library.null_device_kernel(len(kernels), name, values) == 0:
        kernels.append(LoadedKernel(name.value.decode(), *values))
    return kernels


def read_stub_calls() -> dict[str, int]:
    """Return the call counts of the stubs for CUDA, cuBLAS, cuDNN and NCCL functions that only return success."""
    library = load_library()
    names: list[str] = []
    pointers = ctypes.cast(library.null_device_stub_names, ctypes.POINTER(ctypes.c_char_p))
    while (name := pointers[len(names)]) is not None:
        names.append(name.decode())
    calls = (ctypes.c_long * len(names)).in_dll(library, "null_device_stub_calls")
    return {name: count for name, count in zip(names, calls, strict=True) if count}


_kept: list[Any] = []


def listen_to_collectives(listener: Listener) -> None:
    """Register a function to be called on each NCCL call, in the calling thread and with the interpreter's lock."""

    def call(operation: bytes, communicator: bytes, *rest: Any) -> None:
        listener(operation.decode(), communicator.decode(), *(0 if value is None else value for value in rest))

    callback = _LISTENER(call)
    _kept.append(callback)  # ctypes keeps no reference
    load_library().null_device_listen(callback)


def get_summary_path(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"rank-{rank}.summary.json"


def write_summary_at_exit(folder: str) -> Callable[[Any], None]:
    """Return the patch of torch that writes this process's summary at exit."""

    def change(torch: Any) -> None:
        process = os.getpid()

        def write() -> None:
            if os.getpid() == process and torch.cuda.is_initialized():
                write_summary(folder, torch)

        atexit.register(write)

    return change


def write_summary(folder: str | Path, torch: Any) -> None:
    """Write the summary of this process so far."""
    summary = {
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "counters": asdict(read_counters()),
        "kernels": [asdict(kernel) for kernel in read_kernels()],
        "stub_calls": read_stub_calls(),
    }
    path = get_summary_path(folder, int(os.environ.get("RANK", "0")))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


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
