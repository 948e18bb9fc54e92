"""A model's weights under the names of the exported code, in shards, never more than one of them in memory.

The names are a pure renaming: megatron-core's layouts (queries, keys and values of one group together, [gate; up]) are
what the exported code computes with, so a weight is the same bytes here and there.
"""

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron.errors import RunError

INDEX = "model.safetensors.index.json"
_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
_RENAMED = (
    (r"embedding\.word_embeddings\.", "model.embed."),
    (r"output_layer\.", "lm_head."),
    (r"decoder\.final_layernorm\.", "model.norm."),
    (r"position\.", "model.position."),
    (r"decoder\.layers\.(\d+)\.input_layernorm\.", r"model.layers.\1.attention_norm."),
    (r"decoder\.layers\.(\d+)\.pre_mlp_layernorm\.", r"model.layers.\1.mlp_norm."),
    (r"decoder\.layers\.(\d+)\.self_attention\.linear_qkv\.", r"model.layers.\1.attention.qkv."),
    (r"decoder\.layers\.(\d+)\.self_attention\.linear_proj\.", r"model.layers.\1.attention.out."),
    (r"decoder\.layers\.(\d+)\.self_attention\.core_attention\._own\.", r"model.layers.\1.attention.encoding."),
    (r"decoder\.layers\.(\d+)\.self_attention\.core_attention\.processor\.", r"model.layers.\1.attention.processor."),
    (r"decoder\.layers\.(\d+)\.mlp\.linear_fc1\.", r"model.layers.\1.mlp.up."),
    (r"decoder\.layers\.(\d+)\.mlp\.linear_fc2\.", r"model.layers.\1.mlp.down."),
)


def exported_name(name: str) -> str:
    """What the exported code calls a weight of ours. KeyError if it has no such weight."""
    for pattern, replacement in _RENAMED:
        if re.match(pattern, name):
            return re.sub(pattern, replacement, name, count=1)
    raise KeyError(name)


class Weights:
    """The weights of a checkpoint by their exported names; each is read when it is asked for.

    Args:
        path: a checkpoint's model.safetensors.
        dtype: to convert to; None keeps what is stored.

    Raises:
        RunError: the file cannot be read.
    """

    def __init__(self, path: Path, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        try:
            self._file: Any = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise RunError(f"{path}: cannot be read as safetensors ({error})") from None
        self._names = {exported_name(name): name for name in self._file.keys()}  # noqa: SIM118 (it is no mapping)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._file.get_tensor(self._names[name])
        return tensor if self.dtype is None else tensor.to(self.dtype)

    def parameters(self) -> int:
        """Numbers in all of them."""
        return sum(math.prod(self._file.get_slice(stored).get_shape()) for stored in self._names.values())

    def sizes(self) -> dict[str, int]:
        """The bytes of each weight as it will be written."""
        return {name: self._bytes(stored) for name, stored in self._names.items()}

    def _bytes(self, stored: str) -> int:
        part = self._file.get_slice(stored)
        each = _BYTES[part.get_dtype()] if self.dtype is None else self.dtype.itemsize
        return math.prod(part.get_shape()) * each


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def write_shards(sizes: Mapping[str, int], read: Callable[[str], Tensor], folder: Path, largest: int) -> None:
    """Write weights into as many files as are needed, and where there is more than one an index of them.

    Args:
        sizes: bytes of each weight, by name.
        read: the weight of a name.
        largest: bytes of a file; a single weight may be larger.
    """
    split = split_state_dict_into_shards_factory(
        dict(sizes),  # the planner asks for sizes only
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=largest,
    )
    for file, names in split.filename_to_tensors.items():
        save_file({name: read(name).contiguous() for name in names}, folder / file, metadata={"format": "pt"})
        os.chmod(folder / file, 0o666 & ~_umask())  # safetensors leaves it to its owner alone
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
