"""What a rank must have to go on: its fragments of Adam's moments and its random states, in a file of its own.

    states/rank_00000.safetensors     pieces `exp_avg/…` and `exp_avg_sq/…` (pieces.py), and `random/…`
    parts/rank_00000.safetensors      pieces `master/…` and whole buffers `buffer/…`; joined into model.safetensors,
                                      and gone before the checkpoint gets its name

The masters are kept once, as the model's weights, from which any layout cuts what it needs.
Every element is written by one rank: of ranks that hold the same, each writes a share.
"""

import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.checkpoint import manifest, rng_state, tensor_writer
from megatron.checkpoint.layout import WEIGHTS
from megatron.checkpoint.manifest import STATES, FileChecksum
from megatron.checkpoint.optimizer_shards import MOMENTS, OptimizerShard, is_replicated, list_optimizer_shards
from megatron.checkpoint.shard_reader import ShardReader, describe_shards
from megatron.checkpoint.stored_config import map_to_stored_names, migrate_weight_name
from megatron.checkpoint.weights import list_persistent_buffers
from megatron.distributed.mesh import Mesh, ParallelSizes
from megatron.distributed.sharding import get_shard_spec, is_counted_here, shard_tensor
from megatron.utils.errors import RunError

PARTS = "parts"
_MASTER, _BUFFER = "master", "buffer"


class PinnedStagingBuffers:
    """Copies of tensors in host memory that is used again for the next ones: fresh memory takes several times as long,
    and what is pinned is read by a GPU at full speed."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def copy_to_host(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of flat float32 tensors. Those of the call before are overwritten."""
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


class Snapshot:
    """A rank's states at one step, to be written while training goes on."""

    def __init__(self, engine: Any, mesh: Mesh, copies: PinnedStagingBuffers) -> None:
        """Copy the states out of an engine. `copies` must not serve another snapshot until this one is written."""
        held = [each for each in list_optimizer_shards(engine) if is_counted_here(each.parameter, mesh)]
        if is_replicated(engine):
            held = [each.split_over_axis(mesh.dp_cp) for each in held]
        held = [each for each in held if each.master.numel()]
        copied = copies.copy_to_host(dict(_name_tensors(held)))
        self._masters = {name: tensor for name, tensor in copied.items() if name.startswith(f"{_MASTER}/")}
        self._moments = {name: tensor for name, tensor in copied.items() if name not in self._masters}
        self._metadata = describe_shards(held, mesh.tensor)
        self._rank = mesh.rank
        self._random, self._random_metadata = rng_state.pack_rng_state(rng_state.capture_rng_state())
        self._buffers: dict[str, Tensor] = {}
        if mesh.dp_cp.index == 0 and mesh.tensor.index == 0:
            self._buffers = {
                f"{_BUFFER}/{name}": buffer.detach().to(device="cpu", copy=True)
                for name, buffer in list_persistent_buffers(engine.module)
            }

    def write(self, checkpoint: Path) -> dict[str, FileChecksum]:
        """Write the rank's files; returns what is to be said of those that stay.

        Raises:
            OSError: the disk refuses.
            RunError: a weight is not finite.
        """
        for name, master in self._masters.items():
            if not bool(torch.isfinite(master).all()):
                raise RunError(f"{name.removeprefix(f'{_MASTER}/')} is not finite")
        for kind in (PARTS, STATES):
            (checkpoint / kind).mkdir(parents=True, exist_ok=True)
        tensor_writer.write_tensors(
            get_rank_path(checkpoint, PARTS, self._rank), self._masters | self._buffers, self._metadata
        )
        path = get_rank_path(checkpoint, STATES, self._rank)
        entry = tensor_writer.write_tensors(path, self._moments | self._random, self._metadata | self._random_metadata)
        return {path.relative_to(checkpoint).as_posix(): entry}


def _name_tensors(held: Sequence[OptimizerShard]) -> Iterator[tuple[str, Tensor]]:
    for each in held:
        yield f"{_MASTER}/{each.name}", each.master
    for kind in MOMENTS:
        for each in held:
            yield f"{kind}/{each.name}", each.moments[kind]


def get_rank_path(checkpoint: Path, kind: str, rank: int) -> Path:
    """A rank's file."""
    return checkpoint / kind / f"rank_{rank:05d}.safetensors"


def merge_weight_shards(checkpoint: Path, world_size: int, metadata: dict[str, str]) -> FileChecksum:
    """Make model.safetensors of what all ranks wrote, one weight at a time, and remove their parts.

    Raises OSError, RunError: the disk refuses.
    """
    files = [get_rank_path(checkpoint, PARTS, rank) for rank in range(world_size)]
    with ShardReader(files) as pieces:
        forms = {name: tensor_writer.TensorSpec(pieces.get_shape(name)) for name in pieces.list_names}
        rest: dict[str, Tensor] = {}
        for path in files:
            with safe_open(path, "pt") as file:
                for name in (each for each in file.keys() if each.startswith(f"{_BUFFER}/")):  # noqa: SIM118
                    rest.setdefault(name.removeprefix(f"{_BUFFER}/"), file.get_tensor(name))
        forms |= {name: tensor_writer.TensorSpec.from_tensor(tensor) for name, tensor in rest.items()}
        weights = (rest[name] if name in rest else pieces.read_tensor(_MASTER, name) for name in forms)
        entry = tensor_writer.write_tensor_stream(checkpoint / WEIGHTS, forms, weights, metadata)
    shutil.rmtree(checkpoint / PARTS)
    return entry


@torch.no_grad()
def restore_optimizer_states(engine: Any, checkpoint: Path, mesh: Mesh, written: ParallelSizes) -> None:
    """Put masters and moments back into an engine of any layout; `fragments.sync_model_weights` comes next.

    Args:
        engine: DeepSpeed's, fresh.
        checkpoint: to restore from.
        mesh: this rank's.
        written: the layout that wrote the checkpoint.

    Raises:
        RunError: a file is missing, or does not hold what it should.
    """
    path = checkpoint / WEIGHTS
    files = [get_rank_path(checkpoint, STATES, rank) for rank in range(written.world_size)]
    migrate_name = partial(migrate_weight_name, written=manifest.read_format_version(checkpoint))
    try:
        with ShardReader(files, migrate_name) as pieces, safe_open(path, "pt") as weights:
            stored_names = map_to_stored_names(checkpoint, weights.keys())
            for each in list_optimizer_shards(engine):
                how = get_shard_spec(each.parameter)
                whole = weights.get_tensor(stored_names.get(each.name, each.name))
                part = whole if how is None else shard_tensor(whole, how, mesh.tensor)
                each.master.copy_(part.reshape(-1)[each.start : each.stop])
                for kind, tensor in each.moments.items():
                    tensor.copy_(pieces.read_range(kind, each.name, how, mesh.tensor, each.start, each.stop))
                each.step.fill_(pieces.get_step(each.name))
            for name, buffer in list_persistent_buffers(engine.module):
                buffer.copy_(weights.get_tensor(stored_names.get(name, name)))
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: cannot be read ({error})") from None


def read_rng_state(checkpoint: Path, mesh: Mesh, written: ParallelSizes) -> dict[str, Any] | None:
    """The random states that a rank goes on with; None if it begins with fresh ones.

    In the layout that wrote the checkpoint they are its own. In another layout ranks that read the same sequences must
    go on alike, so they take those of the first rank that read these, if there was one.

    Raises RunError: the file is missing or damaged.
    """
    rank = mesh.rank if mesh.sizes == written else written.first_rank_of_data(mesh.data.index)
    if rank is None:
        return None
    path = get_rank_path(checkpoint, STATES, rank)
    try:
        with safe_open(path, "pt") as file:
            return rng_state.unpack_rng_state(file)
    except (OSError, SafetensorError, RunError) as error:
        raise RunError(f"{path}: {error}") from None
