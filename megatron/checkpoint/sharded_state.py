"""Sharded training states, one file per rank, in a form that any layout can resume from.

    states/rank_00000.safetensors     shards `exp_avg/…` and others named in `MOMENTS`, and `random/…`
    parts/rank_00000.safetensors      shards `master/…` and whole buffers `buffer/…`; merged into model.safetensors
                                      and removed before the checkpoint is renamed

A shard is flat and named `kind/parameter`. The file's header records which elements of the parameter it contains and
how tensor-parallel ranks divided that parameter. Ranks of any other layout can therefore find what they need and read
no more than that. The masters are stored once, as the model's weights, which any layout can slice. Every element is
written by one rank; ranks with identical data each write a share.

torch.distributed.checkpoint provides the same for DTensors. It is not used because DeepSpeed owns the optimizer, whose
states are its own flat tensors.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.checkpoint import manifest
from megatron.checkpoint.engine_state import (
    MOMENTS,
    EngineCounters,
    OptimizerShard,
    is_replicated,
    list_optimizer_shards,
    sync_model_weights,
)
from megatron.checkpoint.layout import WEIGHTS
from megatron.checkpoint.manifest import STATES, FileChecksum, map_to_stored_names, migrate_weight_name
from megatron.checkpoint.tensor_files import OpenFile, TensorSpec, open_plain_file, write_tensor_stream, write_tensors
from megatron.checkpoint.trainer_state import TrainerState
from megatron.checkpoint.weights import list_persistent_buffers
from megatron.config.schema import Config
from megatron.distributed import rng
from megatron.distributed.mesh import Axis, Mesh, ParallelSizes
from megatron.distributed.sharding import (
    ShardSpec,
    get_shard_spec,
    is_owned_by_rank,
    shard_tensor,
    unshard_tensors,
)
from megatron.utils.atomic_io import parse_json
from megatron.utils.errors import RunError

PARTS = "parts"
_METADATA = "pieces"
"""Header key that describes a file's shards."""
_MASTER, _BUFFER = "master", "buffer"


def get_rank_path(checkpoint: Path, kind: str, rank: int) -> Path:
    return checkpoint / kind / f"rank_{rank:05d}.safetensors"


@dataclass(frozen=True)
class ShardMetadata:
    """Consecutive elements of a parameter on one tensor-parallel rank."""

    start: int
    size: int
    shape: tuple[int, ...]
    """Shape of the parameter on this rank."""
    index: int
    """Index of the tensor-parallel rank; 0 if the parameter was not divided."""
    ranks: int
    """Number of ranks the parameter was divided among."""
    dim: int
    strips: int
    """Division of the parameter, see `ShardSpec`."""
    step: float
    """Adam's step count; 0 for algorithms without one."""

    @property
    def stop(self) -> int:
        return self.start + self.size


def describe_shards(shards: Iterable[OptimizerShard], tensor: Axis) -> dict[str, str]:
    """Return the metadata for a file with these shards.

    tensor: position of this rank among the tensor-parallel ranks.
    """
    metadata = {}
    for shard in shards:
        spec = get_shard_spec(shard.parameter)
        shape = getattr(shard.parameter, "ds_shape", shard.parameter.shape)  # under ZeRO 3 the data are elsewhere
        division = (0, 1, 0, 1) if spec is None else (tensor.index, tensor.size, spec.dim, spec.num_strips)
        description = ShardMetadata(
            shard.start, shard.master.numel(), tuple(shape), *division, 0.0 if shard.step is None else float(shard.step)
        )
        metadata[shard.name] = asdict(description)
    return {_METADATA: json.dumps(metadata)}


class ShardReader:
    """Reader of the files of all ranks.

    Use it in a `with` block, which keeps the files open.

    Args:
        files: files of the ranks.
        migrate_name: function from a parameter's name in the files to its current name.

    Raises (all methods):
        RunError: a file cannot be read or has another format, or no file contains the requested data.
    """

    def __init__(self, files: Sequence[Path], migrate_name: Callable[[str], str] = str) -> None:
        self._files = files
        self._migrate_name = migrate_name
        self._shards: dict[str, list[tuple[ShardMetadata, Any]]] = {}
        self._stored_names: dict[str, str] = {}
        self._open = ExitStack()

    def __enter__(self) -> "ShardReader":
        for path in self._files:
            try:
                file = self._open.enter_context(safe_open(path, "pt"))
                for stored_name, values in parse_json(file.metadata()[_METADATA]).items():
                    name = self._migrate_name(stored_name)
                    self._stored_names[name] = stored_name
                    shard = ShardMetadata(**{**values, "shape": tuple(values["shape"])})
                    self._shards.setdefault(name, []).append((shard, file))
            except (OSError, SafetensorError, ValueError, TypeError, LookupError) as error:
                self._open.close()
                raise RunError(f"{path}: not a file of parameter shards ({error})") from None
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def list_names(self) -> list[str]:
        """Return the names of all parameters, in the order of the files."""
        return list(self._shards)

    def get_step(self, name: str) -> float:
        """Return Adam's step count of a parameter."""
        return self._get_any_shard(name).step

    def get_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole parameter."""
        shard = self._get_any_shard(name)
        return tuple(size * (shard.ranks if dim == shard.dim else 1) for dim, size in enumerate(shard.shape))

    def read_tensor(self, kind: str, name: str) -> Tensor:
        """Return a whole parameter."""
        shard = self._get_any_shard(name)
        parts = [self._read_flat(kind, name, index, 0, None).view(shard.shape) for index in range(shard.ranks)]
        return parts[0] if shard.ranks == 1 else unshard_tensors(parts, ShardSpec(shard.dim, shard.strips))

    def read_range(self, kind: str, name: str, spec: ShardSpec | None, tensor: Axis, start: int, stop: int) -> Tensor:
        """Return some elements, flat, of a parameter's shard in another layout.

        Args:
            kind, name: kind of state, and name of the parameter.
            spec: how tensor-parallel ranks of that layout divide the parameter.
            tensor: position of the requesting rank among them.
            start, stop: range of elements within its shard.
        """
        shard = self._get_any_shard(name)
        if shard.ranks == (tensor.size if spec is not None else 1):
            return self._read_flat(kind, name, tensor.index if shard.ranks > 1 else 0, start, stop)
        whole = self.read_tensor(kind, name)
        return (whole if spec is None else shard_tensor(whole, spec, tensor)).reshape(-1)[start:stop]

    def _get_any_shard(self, name: str) -> ShardMetadata:
        if name not in self._shards:
            raise RunError(f"{self._files[0].parent}: contains no data for {name}")
        return self._shards[name][0][0]

    def _read_flat(self, kind: str, name: str, index: int, start: int, stop: int | None) -> Tensor:
        """Return elements of the shard of tensor-parallel rank `index`; to its end if `stop` is None."""
        stop = torch.Size(self._get_any_shard(name).shape).numel() if stop is None else stop
        elements = torch.empty(stop - start)
        position = start
        candidates = (shard for shard in self._shards[name] if shard[0].index == index)
        for shard, file in sorted(candidates, key=lambda candidate: candidate[0].start):
            low, high = max(position, shard.start), min(stop, shard.stop)
            if low >= high:
                continue
            if low > position:
                break
            try:
                part = file.get_slice(f"{kind}/{self._stored_names[name]}")[low - shard.start : high - shard.start]
            except SafetensorError as error:
                raise RunError(f"{self._files[0].parent}: {kind} of {name} cannot be read ({error})") from None
            elements[low - start : high - start] = part
            position = high
        if position < stop:
            raise RunError(f"{self._files[0].parent}: contains no {kind} for element {position} of {name}")
        return elements


class PinnedStagingBuffers:
    """Host memory for copies of tensors, reused for every snapshot.

    Newly allocated memory is several times slower to fill, and a GPU copies to pinned memory at full speed.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def copy_to_host(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy flat float32 tensors to host memory, overwriting the previous copies."""
        size = sum(tensor.numel() for tensor in tensors.values())
        on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        if self._memory.numel() != size:
            self._memory = torch.empty(size, pin_memory=on_gpu)
        parts = self._memory.split([tensor.numel() for tensor in tensors.values()])
        for part, tensor in zip(parts, tensors.values(), strict=True):
            part.copy_(tensor, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        return dict(zip(tensors, parts, strict=True))


class NonFiniteWeightError(RunError):
    """Error for infinite or NaN weights; such a state is not saved."""


class Snapshot:
    """Copy of a rank's states at one step, written while training continues."""

    def __init__(self, engine: Any, mesh: Mesh, copies: PinnedStagingBuffers) -> None:
        """Copy the states of an engine. `copies` must not be used for another snapshot until this one is written."""
        shards = [shard for shard in list_optimizer_shards(engine) if is_owned_by_rank(shard.parameter, mesh)]
        if is_replicated(engine):
            shards = [shard.split_over_axis(mesh.dp_cp) for shard in shards]
        shards = [shard for shard in shards if shard.master.numel()]
        copied = copies.copy_to_host(dict(_name_tensors(shards)))
        self._masters = {name: tensor for name, tensor in copied.items() if name.startswith(f"{_MASTER}/")}
        self._moments = {name: tensor for name, tensor in copied.items() if name not in self._masters}
        self._metadata = describe_shards(shards, mesh.tensor)
        self._rank = mesh.rank
        self._random, self._random_metadata = rng.pack_rng_state(rng.capture_rng_state())
        self._buffers: dict[str, Tensor] = {}
        if mesh.dp_cp.index == 0 and mesh.tensor.index == 0:
            self._buffers = {
                f"{_BUFFER}/{name}": buffer.detach().to(device="cpu", copy=True)
                for name, buffer in list_persistent_buffers(engine.module)
            }

    def write(self, checkpoint: Path, open_file: OpenFile = open_plain_file) -> dict[str, FileChecksum]:
        """Write the rank's files and return the manifest entries of the permanent ones.

        Raises:
            OSError: the disk fails.
            NonFiniteWeightError: a weight is not finite.
        """
        for name, master in self._masters.items():
            if not bool(torch.isfinite(master).all()):
                raise NonFiniteWeightError(f"{name.removeprefix(f'{_MASTER}/')} is not finite")
        for kind in (PARTS, STATES):
            (checkpoint / kind).mkdir(parents=True, exist_ok=True)
        parts = get_rank_path(checkpoint, PARTS, self._rank)
        write_tensors(parts, self._masters | self._buffers, self._metadata, open_file)
        path = get_rank_path(checkpoint, STATES, self._rank)
        entry = write_tensors(path, self._moments | self._random, self._metadata | self._random_metadata, open_file)
        return {path.relative_to(checkpoint).as_posix(): entry}


def _name_tensors(shards: Sequence[OptimizerShard]) -> Iterator[tuple[str, Tensor]]:
    for shard in shards:
        yield f"{_MASTER}/{shard.name}", shard.master
    for kind in dict.fromkeys(kind for kinds in MOMENTS.values() for kind in kinds):
        for shard in shards:
            if kind in shard.moments:
                yield f"{kind}/{shard.name}", shard.moments[kind]


def merge_weight_shards(
    checkpoint: Path, world_size: int, metadata: dict[str, str], open_file: OpenFile = open_plain_file
) -> FileChecksum:
    """Merge the files of all ranks into model.safetensors, one weight at a time, and remove them.

    Raises OSError or RunError if the disk fails.
    """
    files = [get_rank_path(checkpoint, PARTS, rank) for rank in range(world_size)]
    with ShardReader(files) as masters:
        specs = {name: TensorSpec(masters.get_shape(name)) for name in masters.list_names()}
        buffers: dict[str, Tensor] = {}
        for path in files:
            with safe_open(path, "pt") as file:
                for key in file.keys():  # noqa: SIM118
                    if key.startswith(f"{_BUFFER}/"):
                        buffers.setdefault(key.removeprefix(f"{_BUFFER}/"), file.get_tensor(key))
        specs |= {name: TensorSpec.from_tensor(buffer) for name, buffer in buffers.items()}
        tensors = (buffers[name] if name in buffers else masters.read_tensor(_MASTER, name) for name in specs)
        entry = write_tensor_stream(checkpoint / WEIGHTS, specs, tensors, metadata, open_file)
    shutil.rmtree(checkpoint / PARTS)
    return entry


class ShardedStateReader:
    """Reader that restores states written by ranks of any layout (`megatron.checkpoint.resume.StateReader`).

    Args:
        checkpoint: checkpoint to restore from.
        state: content of its `progress.json`.
    """

    def __init__(self, checkpoint: Path, state: TrainerState) -> None:
        self.checkpoint, self.state = checkpoint, state

    def check_engine(self, config: Config, sizes: ParallelSizes) -> None:
        """Accept every layout, ZeRO stage and precision."""

    @torch.no_grad()
    def restore(self, engine: Any, mesh: Mesh) -> None:
        """Restore masters and moments in a new engine of any layout; call `synchronize` afterwards.

        Raises RunError if a file is missing or lacks expected data.
        """
        path = self.checkpoint / WEIGHTS
        files = [get_rank_path(self.checkpoint, STATES, rank) for rank in range(self.state.sizes.world_size)]
        migrate_name = partial(migrate_weight_name, written=manifest.read_format_version(self.checkpoint))
        try:
            with ShardReader(files, migrate_name) as moments, safe_open(path, "pt") as weights:
                stored_names = map_to_stored_names(self.checkpoint, weights.keys())
                for shard in list_optimizer_shards(engine):
                    spec = get_shard_spec(shard.parameter)
                    weight = weights.get_tensor(stored_names.get(shard.name, shard.name))
                    weight = weight if spec is None else shard_tensor(weight, spec, mesh.tensor)
                    shard.master.copy_(weight.reshape(-1)[shard.start : shard.stop])
                    for kind, moment in shard.moments.items():
                        moment.copy_(moments.read_range(kind, shard.name, spec, mesh.tensor, shard.start, shard.stop))
                    if shard.step is not None:
                        shard.step.fill_(moments.get_step(shard.name))
                for name, buffer in list_persistent_buffers(engine.module):
                    buffer.copy_(weights.get_tensor(stored_names.get(name, name)))
        except (OSError, SafetensorError) as error:
            raise RunError(f"{path}: cannot be read ({error})") from None

    def synchronize(self, engine: Any) -> None:
        """Copy the masters to the model's weights and restore the engine's counters. All ranks must call this."""
        sync_model_weights(engine)
        EngineCounters(engine).load_state_dict(asdict(self.state))

    def restore_rng(self, mesh: Mesh) -> bool:
        """Restore this rank's random states; return False if it starts with new ones.

        With the layout that wrote the checkpoint, each rank restores its own states. With another layout, ranks that
        read the same sequences must stay in sync, so they use the states of the first rank that read these sequences,
        if any.

        Raises RunError if the file is missing or damaged.
        """
        sizes = self.state.sizes
        rank = mesh.rank if mesh.sizes == sizes else sizes.find_first_rank_of_data(mesh.data.index)
        if rank is None:
            return False
        path = get_rank_path(self.checkpoint, STATES, rank)
        try:
            with safe_open(path, "pt") as file:
                states = rng.unpack_rng_state(file)
        except (OSError, SafetensorError, RunError) as error:
            raise RunError(f"{path}: {error}") from None
        rng.restore_rng_state(states)
        return True
