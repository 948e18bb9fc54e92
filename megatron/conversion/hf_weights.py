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

from megatron.checkpoint.stored_config import map_to_stored_names
from megatron.config.schema import Config
from megatron.conversion.model_family import HF_CONFIG_FILE, ModelFamily, WeightMapping
from megatron.utils.errors import RunError, describe_cause

WEIGHTS_INDEX_FILE = "model.safetensors.index.json"


class HFWeights:
    """The weights of a checkpoint by the names of a family; each is read when it is asked for.

    Args:
        path: a checkpoint's model.safetensors.
        family: whose names; it must express the configuration.
        config: of the checkpoint.
        dtype: to convert to; None keeps what is stored.

    Raises:
        RunError: the file cannot be read, or its weights are not the configuration's.
    """

    def __init__(self, path: Path, family: ModelFamily, config: Config, dtype: torch.dtype | None = None) -> None:
        self.path, self.dtype = path, dtype
        mappings = list(family.weight_mappings(config))
        self._mappings = {name: mapping for mapping in mappings for name in mapping.hf_names}
        with self._open_file() as file:
            self._stored_names = map_to_stored_names(path.parent, file.keys())
            stored = {name: file.get_slice(stored_name) for name, stored_name in self._stored_names.items()}
            if unmatched := set(stored) ^ {mapping.megatron_name for mapping in mappings}:
                raise RunError(f"{path}: does not fit its configuration: {min(unmatched)} is in one of them only")
            self._shapes = {
                name: (tensor_slice.get_shape(), _TORCH_DTYPES[tensor_slice.get_dtype()])
                for name, tensor_slice in stored.items()
            }

    @contextmanager
    def _open_file(self) -> Iterator[Any]:
        """The file, for one weight at a time: what was read of it counts as memory of ours until it is closed."""
        try:
            with safe_open(self.path, framework="pt") as file:
                yield file
        except (OSError, SafetensorError) as error:
            raise RunError(f"{self.path}: cannot be read as safetensors ({error})") from None

    @property
    def num_parameters(self) -> int:
        """Numbers in all of them."""
        return sum(math.prod(shape) for shape, _ in self._shapes.values())

    def __getitem__(self, name: str) -> Tensor:
        mapping = self._mappings[name]
        with self._open_file() as file:
            tensor = file.get_tensor(self._stored_names[mapping.megatron_name])
        tensor = tensor if self.dtype is None else tensor.to(self.dtype)
        return mapping.transform.to_hf(tensor)[mapping.hf_names.index(name)]

    def get_tensor_sizes(self) -> dict[str, int]:
        """The bytes of each weight as it will be written."""
        hf_tensors = {
            mapping.megatron_name: mapping.transform.to_hf(self._make_meta_tensor(mapping))
            for mapping in self._mappings.values()
        }
        return {
            name: hf_tensors[mapping.megatron_name][mapping.hf_names.index(name)].nbytes
            for name, mapping in self._mappings.items()
        }

    def _make_meta_tensor(self, mapping: WeightMapping) -> Tensor:
        """A tensor without memory like the one that is stored."""
        shape, dtype = self._shapes[mapping.megatron_name]
        return torch.empty(shape, dtype=self.dtype or dtype, device="meta")


_TORCH_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def write_shards(weights: HFWeights, folder: Path, max_shard_bytes: int) -> None:
    """Write weights into as many files as are needed, and where there is more than one an index of them.

    Args:
        folder: with its config.json, which says who may read the weights.
        max_shard_bytes: bytes of a file; a single weight may be larger.

    Raises RunError: the checkpoint cannot be read; OSError: the disk refuses.
    """
    sizes: Mapping[str, Any] = weights.get_tensor_sizes()
    split = split_state_dict_into_shards_factory(
        dict(sizes),  # the planner asks for sizes only
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        shard = {name: weights[name].contiguous() for name in names}
        try:
            save_file(shard, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(describe_cause(error)) from error
        shutil.copymode(folder / HF_CONFIG_FILE, folder / file)  # safetensors leaves it to its owner alone
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        (folder / WEIGHTS_INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
