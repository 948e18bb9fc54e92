"""Replacements of parts that a rehearsal omits: checkpoint files of ranks that do not run, and values of weights.

`complete_checkpoint` writes the files of the missing ranks. Every element of every parameter belongs to the file of one
rank (`megatron.checkpoint.sharded_state`). The elements that no running rank wrote are divided among the missing ranks
of the same pipeline stage and tensor coordinate: flattened, concatenated and split evenly, much as ZeRO does. These
files have the sizes and headers of real files, and zeros as values. Rank 0 merges them, and ranks verify and resume
from them, with the code of a real run.

The states that a rehearsal saves are almost all zeros. Those of a large model would fill the disk of the machine.
Blocks of zeros are therefore left as holes: the file has its full size and reads as usual (`SaveHooks.open_file`).

`skip_weight_initialization` makes weights without values, which use neither host memory nor time: the null device
ignores their values. A run initializes its weights on the host in float32, so that every device starts with the same
values, and moves them to its device. For 2.7 billion parameters this would waste 11 GB and a minute. Here the tensors
exist with their shapes and types, in pages that are never touched. The report states the host memory that the run
really needs (`report.py`).
"""

import json
import mmap
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors import safe_open
from torch import Tensor

from megatron.checkpoint.engine_state import MOMENTS
from megatron.checkpoint.manifest import STATES, FileChecksum
from megatron.checkpoint.sharded_state import PARTS, PinnedStagingBuffers, ShardMetadata, get_rank_path
from megatron.distributed.mesh import Mesh, ParallelSizes
from megatron.distributed.sharding import get_shard_spec, is_replica
from megatron.model.parameter_groups import Algorithm, get_algorithm
from megatron.utils.errors import RunError

_POLYNOMIAL = 0xEDB88320
"""Polynomial of CRC-32 with reversed bits, as in zlib."""


class SparseFile:
    """File written sequentially that skips blocks of zeros.

    Args:
        path: file to replace.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = open(path, "wb")  # noqa: SIM115

    def __enter__(self) -> "SparseFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, block: bytes | memoryview) -> int:
        """Write a block, or skip it if it is all zeros."""
        if len(block) >= 4096 and is_zero(block):
            self._file.seek(len(block), os.SEEK_CUR)
            return len(block)
        return self._file.write(block)

    def skip(self, size: int) -> None:
        """Skip `size` zero bytes."""
        self._file.seek(size, os.SEEK_CUR)

    def flush(self) -> None:
        """Extend the file to its full size, including trailing zeros."""
        self._file.flush()
        self._file.truncate()

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        if not self._file.closed:
            self.flush()
            self._file.close()


def is_zero(block: bytes | memoryview) -> bool:
    """Return True if a block contains only zeros."""
    view = memoryview(block)
    # Compares the first bytes with zero, then each byte with an earlier one, in the C library.
    return not any(view[:16]) and view[16:] == view[:-16]


def extend_crc32_with_zeros(checksum: int, size: int) -> int:
    """Return the CRC-32 of data with this checksum followed by `size` zeros.

    A zero byte shifts the register, which is linear over bits, so `size` zeros are a power of one matrix (as in zlib's
    crc32_combine).
    """
    register = checksum ^ 0xFFFFFFFF
    matrix = [_POLYNOMIAL, *(1 << bit for bit in range(31))]  # effect of one zero bit on each bit of the register
    for _ in range(3):
        matrix = [_apply(matrix, row) for row in matrix]  # effect of one zero byte
    while size:
        if size & 1:
            register = _apply(matrix, register)
        matrix = [_apply(matrix, row) for row in matrix]
        size >>= 1
    return register ^ 0xFFFFFFFF


def _apply(matrix: list[int], vector: int) -> int:
    """Multiply a matrix of bits by a vector of bits, modulo 2."""
    result, row = 0, 0
    while vector:
        if vector & 1:
            result ^= matrix[row]
        vector >>= 1
        row += 1
    return result


_METADATA = "pieces"
_DTYPE, _ITEMSIZE = "F32", 4


@dataclass(frozen=True)
class StageParameter:
    """Parameter of a pipeline stage, as each of its tensor-parallel ranks stores it."""

    name: str
    shape: tuple[int, ...]
    dim: int | None
    """Dimension sharded across tensor-parallel ranks; None if each rank stores the whole parameter."""
    strips: int
    is_replica: bool
    """True if an earlier stage also stores the parameter and saves it."""
    algorithm: Algorithm = "AdamW"
    """Algorithm of the optimizer step for this parameter."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def build_shard_metadata(
        self, start: int, size: int, tensor_index: int, tensor_size: int, step: int
    ) -> ShardMetadata:
        """Build the file-header entry for a range of the parameter's elements."""
        division = (0, 1, 0, 1) if self.dim is None else (tensor_index, tensor_size, self.dim, self.strips)
        return ShardMetadata(start, size, self.shape, *division, float(step))


def write_stage_parameters(path: Path, model: Any) -> None:
    """Write the list of the stage parameters that a rank stores."""
    parameters = []
    for name, parameter in model.named_parameters():
        spec = get_shard_spec(parameter)
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))  # under ZeRO 3 the data are stored elsewhere
        dim, strips = (None, 1) if spec is None else (spec.dim, spec.num_strips)
        parameters.append(
            asdict(StageParameter(name, shape, dim, strips, is_replica(parameter), get_algorithm(parameter)))
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(parameters), encoding="utf-8")


def read_stage_parameters(path: Path) -> list[StageParameter]:
    """Read the list written by `write_stage_parameters`."""
    entries = json.loads(path.read_text(encoding="utf-8"))
    return [StageParameter(**{**entry, "shape": tuple(entry["shape"])}) for entry in entries]


def complete_checkpoint(
    checkpoint: Path, sizes: ParallelSizes, stages: Sequence[Sequence[StageParameter]], step: int
) -> dict[str, FileChecksum]:
    """Write the files of all ranks that have none.

    Args:
        checkpoint: unpublished checkpoint folder.
        sizes: mesh sizes.
        stages: parameters of each pipeline stage.
        step: Adam's step count.

    Returns:
        Manifest entries of all state files, including those that existed before.

    Raises:
        OSError: if the files cannot be written.
    """
    entries: dict[str, FileChecksum] = {}
    missing: dict[tuple[int, int], list[int]] = {}
    present: dict[tuple[int, int], list[int]] = {}
    for rank in range(sizes.world_size):
        mesh = Mesh(rank, sizes)
        path = get_rank_path(checkpoint, STATES, rank)
        (present if path.is_file() else missing).setdefault((mesh.pipeline.index, mesh.tensor.index), []).append(rank)
    for (stage, tensor), ranks in missing.items():
        counted = [p for p in stages[stage] if not p.is_replica and (p.dim is not None or tensor == 0)]
        written = [read_shards(get_rank_path(checkpoint, STATES, rank)) for rank in present.get((stage, tensor), ())]
        shares = divide_unwritten(counted, written, len(ranks))
        random = _read_random_states(checkpoint, present.get((stage, tensor)) or present[0, 0])
        for rank, share in zip(ranks, shares, strict=True):
            pieces = {
                parameter.name: parameter.build_shard_metadata(start, stop - start, tensor, sizes.tensor, step)
                for parameter, start, stop in share
            }
            masters = [(f"master/{name}", piece.size) for name, piece in pieces.items()]
            _write_zeros(get_rank_path(checkpoint, PARTS, rank), masters, {_METADATA: _dump(pieces)})
            path = get_rank_path(checkpoint, STATES, rank)
            moments = [
                (f"{kind}/{parameter.name}", stop - start)
                for parameter, start, stop in share
                for kind in MOMENTS[parameter.algorithm]
            ]
            checksum = _write_zeros(path, moments, {_METADATA: _dump(pieces), **random})
            entries[path.relative_to(checkpoint).as_posix()] = checksum
    return entries


def divide_unwritten(
    parameters: Sequence[StageParameter], written: Iterable[dict[str, ShardMetadata]], num_ranks: int
) -> list[list[tuple[StageParameter, int, int]]]:
    """Divide the elements that no file contains among ranks: a list of (parameter, start, end) for each rank.

    No rank gets two ranges of one parameter, because a file cannot store two.
    """
    files = list(written)
    gaps: list[tuple[StageParameter, int, int]] = []
    for parameter in parameters:
        position = 0
        pieces = sorted((file[parameter.name] for file in files if parameter.name in file), key=lambda p: p.start)
        for piece in (*pieces, None):
            start = parameter.numel if piece is None else piece.start
            if start > position:
                gaps.append((parameter, position, start))
            position = max(position, parameter.numel if piece is None else piece.stop)
    size = -(-sum(stop - start for _, start, stop in gaps) // num_ranks)
    shares: list[list[tuple[StageParameter, int, int]]] = [[] for _ in range(num_ranks)]
    rank, room = 0, size
    for parameter, start, stop in gaps:
        while start < stop:
            if rank < num_ranks - 1 and (room <= 0 or any(other.name == parameter.name for other, *_ in shares[rank])):
                rank, room = rank + 1, size
                continue
            taken = stop - start if rank == num_ranks - 1 else min(room, stop - start)
            shares[rank].append((parameter, start, start + taken))
            start, room = start + taken, room - taken
    return shares


def read_shards(path: Path) -> dict[str, ShardMetadata]:
    """Return the shards in a rank's file, by parameter name. Raises RunError if the file is damaged."""
    try:
        with safe_open(path, "pt") as file:
            entries = json.loads(file.metadata()[_METADATA])
    except Exception as error:  # safetensors raises various types
        raise RunError(f"{path}: does not contain parameter shards ({error})") from None
    return {name: ShardMetadata(**{**values, "shape": tuple(values["shape"])}) for name, values in entries.items()}


def _read_random_states(checkpoint: Path, ranks: Sequence[int]) -> dict[str, str]:
    """Read the random-state metadata of a rank that ran. Only ranks that run read their own."""
    with safe_open(get_rank_path(checkpoint, STATES, ranks[0]), "pt") as file:
        return {key: value for key, value in file.metadata().items() if key not in (_METADATA, "format")}


def _dump(pieces: dict[str, ShardMetadata]) -> str:
    return json.dumps({name: asdict(piece) for name, piece in pieces.items()})


def _write_zeros(path: Path, tensors: Sequence[tuple[str, int]], metadata: dict[str, str]) -> FileChecksum:
    """Write a sparse safetensors file of flat float32 zeros."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for name, size in tensors:
        stop = offset + _ITEMSIZE * size
        header[name] = {"dtype": _DTYPE, "shape": [size], "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    beginning = len(text).to_bytes(8, "little") + text
    path.parent.mkdir(parents=True, exist_ok=True)
    with SparseFile(path) as file:
        file.write(beginning)
        file.skip(offset)
    assert os.path.getsize(path) == len(beginning) + offset
    return FileChecksum(len(beginning) + offset, f"{extend_crc32_with_zeros(zlib.crc32(beginning), offset):08x}")


MIN_ELEMENTS = 1 << 16
"""Elements below which tensors keep their values: those of encodings and processors, norms, batches."""


@contextmanager
def skip_weight_initialization() -> Iterator[None]:
    """Build models without initializing weights.

    Large floating-point tensors are converted or moved without their contents.
    """
    from megatron.model.core_modules import ColumnParallelLinear

    layers = sys.modules[ColumnParallelLinear.__module__]  # which initializes sharded layers

    def mark_divided(
        weight: Tensor, output_size: int, input_size: int, per_partition_size: int, partition_dim: int,
        init_method: Any, stride: int = 1, *_: Any, skip_set_tensor_parallel_attributes: bool = False, **__: Any,
    ) -> None:  # fmt: skip
        if not skip_set_tensor_parallel_attributes:
            layers.set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=partition_dim, stride=stride)

    with (
        mock.patch.object(layers, "_initialize_affine_weight_cpu", mark_divided),
        mock.patch.object(Tensor, "to", _drop_values(Tensor.to)),
        mock.patch.object(Tensor, "bfloat16", _drop_values(Tensor.bfloat16)),
        mock.patch.object(Tensor, "half", _drop_values(Tensor.half)),
    ):
        yield


class ZeroStagingBuffers(PinnedStagingBuffers):
    """Staging buffers that provide zeros instead of copies of a rank's states."""

    def copy_to_host(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return zeros with the size of each tensor."""
        sizes = [tensor.numel() for tensor in tensors.values()]
        return dict(zip(tensors, _reserve_zeros(sum(sizes)).split(sizes), strict=True))


def _reserve_zeros(size: int) -> Tensor:
    """Allocate unpinned float32 zeros. Pages that are only read use no memory."""
    if size == 0:
        return torch.empty(0)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return torch.frombuffer(mmap.mmap(-1, 4 * size, flags=flags), dtype=torch.float32)


def _drop_values(convert: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a conversion that drops the contents of large floating-point tensors of the host."""

    def convert_shape(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        is_large = tensor.numel() >= MIN_ELEMENTS and tensor.device.type == "cpu" and tensor.is_floating_point()
        if not is_large or (torch.is_grad_enabled() and tensor.requires_grad):
            return convert(tensor, *arguments, **options)
        target = convert(tensor.new_empty(0), *arguments, **options)
        if (target.device, target.dtype) == (tensor.device, tensor.dtype):
            return convert(tensor, *arguments, **options)
        return torch.empty(tensor.shape, dtype=target.dtype, device=target.device)

    return convert_shape
