"""A folder of Hugging Face's libraries: config.json, weights, and a tokenizer's files."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config.schema import Config
from megatron.conversion.hf_config import HFConfigReader
from megatron.conversion.model_family import EMBEDDING_WEIGHT, HF_CONFIG_FILE, OUTPUT_WEIGHT, ModelFamily, WeightMapping
from megatron.conversion.model_source import ModelSource
from megatron.conversion.registry import get_family
from megatron.utils.atomic_io import parse_json
from megatron.utils.errors import RunError, UserError, describe_cause

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.conversion.weight_files import LazyTensors


def read_hf_source(folder: Path) -> ModelSource:
    """What a folder says that it holds.

    Raises UserError: it is no such folder, or its model is none that ours can be, naming the key.
    """
    return build_hf_source(folder, read_json_object(folder / HF_CONFIG_FILE))


def build_hf_source(folder: Path, values: dict[str, Any]) -> ModelSource:
    """Return the same from the content of config.json."""
    path = folder / HF_CONFIG_FILE
    family = get_family(values.get("model_type"), str(path))
    hf_config = HFConfigReader(values, str(path), family.auto_map)
    config_keys = family.from_hf_config(hf_config)
    num_embeddings = hf_config.get_positive_int("vocab_size")
    notes: tuple[str, ...] = ()
    if unread_keys := hf_config.unread_keys():
        notes = (f"{path}: {', '.join(unread_keys)}: no {family.model_type} model has such keys; passed over",)
    return ModelSource(
        folder, family.model_type, config_keys, partial(_open_weights, folder, family, num_embeddings), folder, notes
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the mapping that a file of JSON holds. Raises UserError."""
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({describe_cause(error)})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds no keys")
    return values


@contextmanager
def _open_weights(folder: Path, family: ModelFamily, num_embeddings: int, config: Config) -> "Iterator[HFWeightReader]":
    from megatron.conversion.weight_files import open_hf_weights

    with open_hf_weights(folder) as tensors:
        yield HFWeightReader(folder, family, num_embeddings, config, tensors)


class HFWeightReader:
    """The weights of a family's files, by our names."""

    def __init__(
        self, folder: Path, family: ModelFamily, num_embeddings: int, config: Config, tensors: "LazyTensors"
    ) -> None:
        self.folder, self.family, self.num_embeddings, self.tensors = folder, family, num_embeddings, tensors
        self.is_tied = not config.model.no_weight_tying
        self.mappings = {weight.megatron_name: weight for weight in family.weight_mappings(config)}
        self._names = set(tensors.names)

    def _find_tensor_name(self, hf_name: str) -> str | None:
        """The name that a tensor has in these files."""
        names = (
            hf_name,
            hf_name.removeprefix(self.family.base_model_prefix),
            self.family.tensor_aliases.get(hf_name, hf_name),
        )
        return next((name for name in names if name in self._names), None)

    def check_names(self, names: list[str]) -> None:
        if unmatched := set(names) ^ self.mappings.keys():
            raise RuntimeError(f"the table of {self.family.model_type} and the model differ in {sorted(unmatched)[0]}")
        used = set()
        for hf_name in (mapped_name for weight in self.mappings.values() for mapped_name in weight.hf_names):
            tensor_name = self._find_tensor_name(hf_name)
            if tensor_name is None:
                raise RunError(f"{self.folder}: holds no {hf_name}, which {HF_CONFIG_FILE} asks for")
            used.add(tensor_name)
        ignored = re.compile(self.family.ignored_pattern)
        unused = [name for name in self.tensors.names if name not in used and not ignored.fullmatch(name)]
        output_names = {"lm_head.weight", *self.family.tensor_aliases, *self.family.tensor_aliases.values()}
        if self.is_tied and unused and set(unused) <= output_names:
            self._check_tied(unused)
        elif unused:
            more_text = f", and {len(unused) - 1} more" if len(unused) > 1 else ""
            raise RunError(
                f"{self.tensors.get_file(unused[0])}: holds {unused[0]}{more_text}, which a {self.family.model_type} "
                f"model with this "
                f"{HF_CONFIG_FILE} has not; it would be dropped"
            )

    def _check_tied(self, output_names: list[str]) -> None:
        """Files may hold a tied matrix twice, but not two matrices."""
        import torch

        embedding = self.tensors[self._find_tensor_name(self.mappings[EMBEDDING_WEIGHT].hf_names[0]) or ""]
        for name in output_names:
            if not torch.equal(self.tensors[name], embedding):
                raise RunError(
                    f"{self.tensors.get_file(name)}: {name} is not the embedding, although {HF_CONFIG_FILE} says "
                    "tie_word_embeddings: true; set it to false if the two belong together"
                )

    def __call__(self, name: str) -> "Tensor":
        mapping: WeightMapping = self.mappings[name]
        hf_tensors = [self.tensors[self._find_tensor_name(hf_name) or hf_name] for hf_name in mapping.hf_names]
        for hf_name, hf_tensor in zip(mapping.hf_names, hf_tensors, strict=True):
            if not hf_tensor.is_floating_point():
                dtype_name = str(hf_tensor.dtype).removeprefix("torch.")
                raise RunError(f"{self.folder}: {hf_name} is of type {dtype_name}; quantized weights are not read")
        try:
            tensor = mapping.transform.to_megatron(hf_tensors)
        except (RuntimeError, ValueError, IndexError):
            shapes = ", ".join(str(list(hf_tensor.shape)) for hf_tensor in hf_tensors)
            raise RunError(
                f"{self.folder}: {', '.join(mapping.hf_names)}: {shapes} do not fit {HF_CONFIG_FILE}"
            ) from None
        if name in (EMBEDDING_WEIGHT, OUTPUT_WEIGHT) and tensor.shape[0] != self.num_embeddings:
            raise RunError(
                f"{self.folder}: {mapping.hf_names[0]} has {tensor.shape[0]} rows, {HF_CONFIG_FILE} says "
                f"{self.num_embeddings}"
            )
        return tensor
