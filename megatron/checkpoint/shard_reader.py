"""Parameters in pieces: what every rank wrote of them, and any part of a whole put together again.

A *piece* is a fragment in a file: flat, under the name `kind/parameter`, with kinds such as `master` and `exp_avg`. The
file's header says which elements of the parameter it holds, and how tensor-parallel ranks divided that parameter, so
that ranks of any other layout find what they need, and read no more of it than they must.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.checkpoint.optimizer_shards import OptimizerShard
from megatron.distributed.mesh import Axis
from megatron.distributed.sharding import ShardSpec, get_shard_spec, shard_tensor, unshard_tensors
from megatron.utils.atomic_io import parse_json
from megatron.utils.errors import RunError

METADATA = "pieces"


@dataclass(frozen=True)
class ShardMetadata:
    """Consecutive elements of what one tensor-parallel rank held of a parameter."""

    start: int
    size: int
    shape: tuple[int, ...]
    """Of all that this rank held of the parameter."""
    index: int
    """Which of the tensor-parallel ranks it was; 0 if the parameter was not divided."""
    ranks: int
    """Among how many the parameter was divided."""
    dim: int
    strips: int
    """How it was divided, see `ShardSpec`."""
    step: float
    """Adam's count of steps."""

    @property
    def stop(self) -> int:
        return self.start + self.size


def describe_shards(shards: Iterable[OptimizerShard], tensor: Axis) -> dict[str, str]:
    """The metadata of a file that holds these fragments.

    tensor: which of the tensor-parallel ranks this one is.
    """
    metadata = {}
    for shard in shards:
        how = get_shard_spec(shard.parameter)
        shape = getattr(shard.parameter, "ds_shape", shard.parameter.shape)  # under ZeRO 3 the data are elsewhere
        where = (0, 1, 0, 1) if how is None else (tensor.index, tensor.size, how.dim, how.num_strips)
        shard_metadata = ShardMetadata(shard.start, shard.master.numel(), tuple(shape), *where, float(shard.step))
        metadata[shard.name] = asdict(shard_metadata)
    return {METADATA: json.dumps(metadata)}


class ShardReader:
    """What is in the files of all ranks. To be used in a `with` block, in which the files stay open.

    Args:
        files: of the ranks.
        migrate_name: from the name of a parameter in the files to the one that it has today.

    Raises (all methods):
        RunError: a file cannot be read or is not one of these, or no file has what is asked for.
    """

    def __init__(self, files: Sequence[Path], migrate_name: Callable[[str], str] = str) -> None:
        self._files = files
        self._migrate_name = migrate_name
        self._found: dict[str, list[tuple[ShardMetadata, Any]]] = {}
        self._stored_names: dict[str, str] = {}
        self._open = ExitStack()

    def __enter__(self) -> "ShardReader":
        for path in self._files:
            try:
                file = self._open.enter_context(safe_open(path, "pt"))
                for stored_name, values in parse_json(file.metadata()[METADATA]).items():
                    name = self._migrate_name(stored_name)
                    self._stored_names[name] = stored_name
                    piece = ShardMetadata(**{**values, "shape": tuple(values["shape"])})
                    self._found.setdefault(name, []).append((piece, file))
            except (OSError, SafetensorError, ValueError, TypeError, LookupError) as error:
                self._open.close()
                raise RunError(f"{path}: does not hold pieces of parameters ({error})") from None
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def list_names(self) -> list[str]:
        """All parameters, in the order of the files."""
        return list(self._found)

    def get_step(self, name: str) -> float:
        """Adam's count of steps of a parameter."""
        return self._get_any_shard(name).step

    def get_shape(self, name: str) -> tuple[int, ...]:
        """Of the whole parameter."""
        piece = self._get_any_shard(name)
        return tuple(size * (piece.ranks if dim == piece.dim else 1) for dim, size in enumerate(piece.shape))

    def read_tensor(self, kind: str, name: str) -> Tensor:
        """All of a parameter."""
        piece = self._get_any_shard(name)
        parts = [self._read_flat(kind, name, index, 0, None).view(piece.shape) for index in range(piece.ranks)]
        return parts[0] if piece.ranks == 1 else unshard_tensors(parts, ShardSpec(piece.dim, piece.strips))

    def read_range(self, kind: str, name: str, how: ShardSpec | None, tensor: Axis, start: int, stop: int) -> Tensor:
        """Some elements, flat, of what one rank of another layout holds of a parameter.

        Args:
            kind, name: what and of which parameter.
            how: the way in which that layout's tensor-parallel ranks divide the parameter.
            tensor: which of these ranks asks.
            start, stop: the elements of what it holds.
        """
        piece = self._get_any_shard(name)
        if piece.ranks == (tensor.size if how is not None else 1):
            return self._read_flat(kind, name, tensor.index if piece.ranks > 1 else 0, start, stop)
        whole = self.read_tensor(kind, name)
        return (whole if how is None else shard_tensor(whole, how, tensor)).reshape(-1)[start:stop]

    def _get_any_shard(self, name: str) -> ShardMetadata:
        if name not in self._found:
            raise RunError(f"{self._files[0].parent}: holds nothing of {name}")
        return self._found[name][0][0]

    def _read_flat(self, kind: str, name: str, index: int, start: int, stop: int | None) -> Tensor:
        """Elements of what the tensor-parallel rank `index` held; to the end if `stop` is None."""
        stop = torch.Size(self._get_any_shard(name).shape).numel() if stop is None else stop
        found = torch.empty(stop - start)
        there = start
        for piece, file in sorted((p for p in self._found[name] if p[0].index == index), key=lambda p: p[0].start):
            low, high = max(there, piece.start), min(stop, piece.stop)
            if low >= high:
                continue
            if low > there:
                break
            try:
                part = file.get_slice(f"{kind}/{self._stored_names[name]}")[low - piece.start : high - piece.start]
            except SafetensorError as error:
                raise RunError(f"{self._files[0].parent}: {kind} of {name} cannot be read ({error})") from None
            found[low - start : high - start] = part
            there = high
        if there < stop:
            raise RunError(f"{self._files[0].parent}: holds no {kind} of element {there} of {name}")
        return found
