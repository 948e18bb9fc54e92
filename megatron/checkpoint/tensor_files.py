"""Files of tensors: safetensors written as a stream, and torch's own read without running what is in them.

    8 bytes: length of the header · header: JSON {name: {dtype, shape, data_offsets}} · data, back to back

A safetensors file is written one tensor at a time, and its checksum is taken on the way. The header needs no more than
types and shapes, so a file that is put together from many others, as all weights of a model are from what its ranks
hold, never stands in memory as a whole. safetensors' own `save_file` wants all tensors at once.
Format: https://huggingface.co/docs/safetensors.
"""

import json
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.manifest import FileChecksum
from megatron.utils.errors import RunError, describe_cause

_DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_BLOCK = 1 << 24

OpenFile = Callable[[Path], Any]
"""Opens a file that is written from its beginning to its end, in place of what is there: `write`, `flush`, `fileno`."""


def open_plain_file(path: Path) -> Any:
    """A file as Python has them."""
    return open(path, "wb")


@dataclass(frozen=True)
class TensorSpec:
    """What the header says of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @staticmethod
    def from_tensor(tensor: Tensor) -> "TensorSpec":
        return TensorSpec(tuple(tensor.shape), tensor.dtype)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], open_file: OpenFile = open_plain_file
) -> FileChecksum:
    """Write tensors that are all in memory. See `write_tensor_stream`."""
    specs = {name: TensorSpec.from_tensor(tensor) for name, tensor in tensors.items()}
    return write_tensor_stream(path, specs, tensors.values(), metadata, open_file)


def write_tensor_stream(
    path: Path,
    specs: Mapping[str, TensorSpec],
    tensors: Iterable[Tensor],
    metadata: Mapping[str, str],
    open_file: OpenFile = open_plain_file,
) -> FileChecksum:
    """Write a file and bring it to the disk; writing and computing let other threads run.

    Args:
        path: the file; it is replaced.
        specs: of the tensors, by name.
        tensors: in host memory, in the order of `specs`.
        metadata: text to keep in the header.
        open_file: opens the file.

    Returns:
        The file's size and checksum.

    Raises:
        OSError: the disk refuses.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for name, spec in specs.items():
        header[name] = {
            "dtype": _DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, offset + spec.bytes]
        }  # fmt: skip
        offset += spec.bytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    checksum, size = 0, 0
    with open_file(path) as file:

        def put(block: bytes | memoryview) -> None:
            nonlocal checksum, size
            checksum = zlib.crc32(block, checksum)
            size += len(block)
            file.write(block)

        put(len(text).to_bytes(8, "little"))
        put(text)
        for (name, spec), tensor in zip(specs.items(), tensors, strict=True):
            if TensorSpec.from_tensor(tensor) != spec:
                raise ValueError(f"{name} is {TensorSpec.from_tensor(tensor)}, not {spec}")
            data = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            for start in range(0, len(data), _BLOCK):
                put(data[start : start + _BLOCK])
        file.flush()
        os.fsync(file.fileno())
    return FileChecksum(size, f"{checksum:08x}")


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
    allowed = {f"{cls.__module__}.{cls.__qualname__}" for cls in classes if hasattr(cls, "__qualname__")}
    try:
        refused = sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - allowed)
    except Exception:  # damaged
        refused = []
    if refused:
        return f"holds more than tensors, numbers and text: {', '.join(refused)}"
    return "is damaged, or holds more than tensors, numbers and text"
