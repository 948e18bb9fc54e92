"""A checkpoint's weights under a family's names, in files of which memory never holds more than one."""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron.config.schema import Config
from megatron.errors import RunError, reason
from megatron.formats.family import FILE, Family, Weight

INDEX = "model.safetensors.index.json"


class Weights:
    """The weights of a checkpoint by the names of a family; each is read when it is asked for.

    Args:
        path: a checkpoint's model.safetensors.
        family: whose names; it must express the configuration.
        config: of the checkpoint.
        dtype: to convert to; None keeps what is stored.

    Raises:
        RunError: the file cannot be read, or its weights are not the configuration's.
    """

    def __init__(self, path: Path, family: Family, config: Config, dtype: torch.dtype | None = None) -> None:
        self.path, self.dtype = path, dtype
        table = list(family.weights(config))
        self._sources = {name: weight for weight in table for name in weight.theirs}
        with self._opened() as file:
            stored = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            if wrong := set(stored) ^ {weight.ours for weight in table}:
                raise RunError(f"{path}: does not fit its configuration: {min(wrong)} is in one of them only")
            self._shapes = {name: (part.get_shape(), _TYPES[part.get_dtype()]) for name, part in stored.items()}

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """The file, for one weight at a time: what was read of it counts as memory of ours until it is closed."""
        try:
            with safe_open(self.path, framework="pt") as file:
                yield file
        except (OSError, SafetensorError) as error:
            raise RunError(f"{self.path}: cannot be read as safetensors ({error})") from None

    @property
    def parameters(self) -> int:
        """Numbers in all of them."""
        return sum(math.prod(shape) for shape, _ in self._shapes.values())

    def __getitem__(self, name: str) -> Tensor:
        weight = self._sources[name]
        with self._opened() as file:
            tensor = file.get_tensor(weight.ours)
        tensor = tensor if self.dtype is None else tensor.to(self.dtype)
        return weight.transform.to_theirs(tensor)[weight.theirs.index(name)]

    def sizes(self) -> dict[str, int]:
        """The bytes of each weight as it will be written."""
        made = {weight.ours: weight.transform.to_theirs(self._shaped(weight)) for weight in self._sources.values()}
        return {name: made[weight.ours][weight.theirs.index(name)].nbytes for name, weight in self._sources.items()}

    def _shaped(self, weight: Weight) -> Tensor:
        """A tensor without memory like the one that is stored."""
        shape, dtype = self._shapes[weight.ours]
        return torch.empty(shape, dtype=self.dtype or dtype, device="meta")


_TYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def write_shards(weights: Weights, folder: Path, largest: int) -> None:
    """Write weights into as many files as are needed, and where there is more than one an index of them.

    Args:
        folder: with its config.json, which says who may read the weights.
        largest: bytes of a file; a single weight may be larger.

    Raises RunError: the checkpoint cannot be read; OSError: the disk refuses.
    """
    sizes: Mapping[str, Any] = weights.sizes()
    split = split_state_dict_into_shards_factory(
        dict(sizes),  # the planner asks for sizes only
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=largest,
    )
    for file, names in split.filename_to_tensors.items():
        part = {name: weights[name].contiguous() for name in names}
        try:
            save_file(part, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(reason(error)) from error
        shutil.copymode(folder / FILE, folder / file)  # safetensors leaves it to its owner alone
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
