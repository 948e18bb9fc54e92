"""Tensor files: streaming writes of safetensors, and safe reads of torch files.

    8 bytes: length of the header · header: JSON {name: {dtype, shape, data_offsets}} · data, back to back

A safetensors file is written one tensor at a time, and its checksum is computed along the way. The header needs only
types and shapes. A file that is assembled from many others, such as the model's weights from all ranks, is therefore
never in memory as a whole. The library's `save_file` needs all tensors at once. Format:
https://huggingface.co/docs/safetensors.
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
from megatron.utils.errors import RunError, check_reachable, describe_cause

_DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_BLOCK = 1 << 24

OpenFile = Callable[[Path], Any]
"""Function that opens a file for sequential writing, replacing existing content: `write`, `flush`, `fileno`."""


def open_plain_file(path: Path) -> Any:
    """Open a regular file for writing."""
    return open(path, "wb")


@dataclass(frozen=True)
class TensorSpec:
    """Header entry of a tensor: shape and data type."""

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
    """Write tensors that are in memory. See `write_tensor_stream`."""
    specs = {name: TensorSpec.from_tensor(tensor) for name, tensor in tensors.items()}
    return write_tensor_stream(path, specs, tensors.values(), metadata, open_file)


def write_tensor_stream(
    path: Path,
    specs: Mapping[str, TensorSpec],
    tensors: Iterable[Tensor],
    metadata: Mapping[str, str],
    open_file: OpenFile = open_plain_file,
) -> FileChecksum:
    """Write a file and sync it to disk; writing and checksums release the GIL.

    Args:
        path: output file; an existing one is replaced.
        specs: shapes and types of the tensors, by name.
        tensors: tensors in host memory, in the order of `specs`.
        metadata: text stored in the header.
        open_file: function that opens the file.

    Returns:
        Size and checksum of the file.

    Raises:
        OSError: the disk fails.
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
    """Read a file written by `torch.save`: tensors, numbers, text, and the plain `classes` allowed by name.

    mapped: leave the tensors on disk until they are used, if the file's format supports it.

    Raises:
        RunError: the file is missing or damaged, or contains other objects, in which case it is not opened.
    """
    path = Path(path)
    if not path.is_file():
        check_reachable(path)
        raise RunError(f"{path}: not found; the checkpoint is damaged")
    try:
        with torch.serialization.safe_globals(list(classes)):
            return torch.load(
                path, map_location=map_location, weights_only=True, mmap=mapped and zipfile.is_zipfile(path)
            )
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({describe_cause(error)})") from None
    except Exception:  # damaged files raise many kinds of errors, and some suggest unsafe loading
        raise RunError(f"{path}: {_describe_refusal(path, classes)}; not opened") from None


def _describe_refusal(path: Path, classes: Sequence[Any]) -> str:
    """Return why a file cannot be read. Disallowed globals are listed without being run."""
    allowed = {f"{cls.__module__}.{cls.__qualname__}" for cls in classes if hasattr(cls, "__qualname__")}
    try:
        refused = sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - allowed)
    except Exception:  # damaged
        refused = []
    if refused:
        return f"contains more than tensors, numbers and text: {', '.join(refused)}"
    return "damaged, or contains more than tensors, numbers and text"
