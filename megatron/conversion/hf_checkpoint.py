"""Hugging Face model folders: the supported families, config.json, weights, and tokenizer files.

Weights are safetensors, or torch files that are read without running code from them. torch is imported only when
tensors are read, so that unsupported models are rejected without it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from megatron.checkpoint import manifest
from megatron.config.schema import Config
from megatron.conversion.families.cohere import COHERE, COHERE2
from megatron.conversion.families.farfield import CHECKSUMS_FILE, FARFIELD
from megatron.conversion.families.gemma import GEMMA, GEMMA2, GEMMA3
from megatron.conversion.families.gpt2 import GPT2
from megatron.conversion.families.gpt_neox import GPT_NEOX
from megatron.conversion.families.llama import LLAMA
from megatron.conversion.families.llama_variants import GRANITE, MISTRAL, SMOLLM3
from megatron.conversion.families.olmo import OLMO2, OLMO3
from megatron.conversion.families.opt import OPT
from megatron.conversion.families.phi3 import PHI3
from megatron.conversion.families.qwen import QWEN2, QWEN3
from megatron.conversion.hf_config import HFConfigReader
from megatron.conversion.model_family import (
    EMBEDDING_WEIGHT,
    HF_CONFIG_FILE,
    OUTPUT_WEIGHT,
    ModelFamily,
    ModelSource,
    WeightMapping,
)
from megatron.utils.atomic_io import parse_json
from megatron.utils.errors import RunError, UserError, describe_cause
from megatron.utils.formatting import format_choices

if TYPE_CHECKING:
    from torch import Tensor


_FAMILIES = (
    GPT_NEOX, GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, OLMO3, GEMMA, GEMMA2, GEMMA3, GRANITE, PHI3, SMOLLM3, COHERE,
    COHERE2, OPT,
)  # fmt: skip
HF_FAMILIES: dict[str, ModelFamily] = {family.model_type: family for family in _FAMILIES}
"""Published families, by `model_type`. `find_exact_family` returns the first match."""

IMPORTABLE_FAMILIES = {**HF_FAMILIES, FARFIELD.model_type: FARFIELD}
"""All families that can be imported."""


UNSUPPORTED_MODEL_TYPES = {
    "gemma3": "it has image input; save its text model, whose model_type is gemma3_text, on its own",
    "ministral3": "its attention temperature and rotation are not supported",
    **dict.fromkeys(
        ("mixtral", "phimoe", "granitemoe", "qwen2_moe", "qwen3_moe", "olmoe", "llama4_text", "deepseek_v3"),
        "mixtures of experts are not supported",
    ),
    "gpt_oss": "mixtures of experts are not supported; its attention is supported (configs/position/gpt_oss.yml)",
}
"""Related families that cannot be imported, with the reason."""


def get_family(model_type: Any, source: str) -> ModelFamily:
    """Return the family of a model_type. Raises UserError with the supported families."""
    if isinstance(model_type, str) and model_type in UNSUPPORTED_MODEL_TYPES:
        raise UserError(
            f"{source}: model_type {model_type!r} cannot be imported: {UNSUPPORTED_MODEL_TYPES[model_type]}"
        )
    if model_type not in IMPORTABLE_FAMILIES:
        raise UserError(
            f"{source}: unknown model_type {model_type!r}; {format_choices(str(model_type), IMPORTABLE_FAMILIES)}"
        )
    return IMPORTABLE_FAMILIES[model_type]


def find_exact_family(config: Config) -> tuple[ModelFamily | None, dict[str, str]]:
    """Return the family that represents a configuration exactly, and the reasons of those that do not."""
    reasons = {name: family.describe_unsupported(config) for name, family in HF_FAMILIES.items()}
    matching_family = next((HF_FAMILIES[name] for name, reason in reasons.items() if reason is None), None)
    return matching_family, {name: reason for name, reason in reasons.items() if reason is not None}


def read_hf_source(folder: Path) -> ModelSource:
    """Read the description of the model in a folder.

    Raises UserError if the folder is invalid or the model is not supported, with the key.
    """
    return build_hf_source(folder, read_json_object(folder / HF_CONFIG_FILE))


def build_hf_source(folder: Path, values: dict[str, Any]) -> ModelSource:
    """Build the source of a model from the content of its config.json."""
    path = folder / HF_CONFIG_FILE
    family = get_family(values.get("model_type"), str(path))
    config_reader = HFConfigReader(values, str(path), family.auto_map, family.architecture)
    config_keys = family.from_hf_config(config_reader)
    num_embeddings = config_reader.get_positive_int("vocab_size")
    document_end = config_reader.get("document_end_token_id") if family is FARFIELD else None
    if not (document_end is None or (type(document_end) is int and 0 <= document_end < num_embeddings)):
        raise config_reader.value_error("document_end_token_id", f"it must be a token from 0 to {num_embeddings - 1}")
    notes: tuple[str, ...] = ()
    if unread_keys := config_reader.unread_keys():
        notes = (f"{path}: {', '.join(unread_keys)}: ignored; unknown keys for model_type {family.model_type}",)
    return ModelSource(
        folder,
        family.model_type,
        config_keys,
        partial(_open_weights, folder, family, num_embeddings),
        folder,
        notes,
        document_end,
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file. Raises UserError."""
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({describe_cause(error)})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: it must be a JSON object")
    return values


@contextmanager
def _open_weights(folder: Path, family: ModelFamily, num_embeddings: int, config: Config) -> Iterator[HFWeightReader]:
    with open_hf_weights(folder) as tensors:
        yield HFWeightReader(folder, family, num_embeddings, config, tensors)


class HFWeightReader:
    """Reader of a family's weight files by our names."""

    def __init__(
        self, folder: Path, family: ModelFamily, num_embeddings: int, config: Config, tensors: LazyTensors
    ) -> None:
        self.folder, self.family, self.num_embeddings, self.tensors = folder, family, num_embeddings, tensors
        self.is_tied = not config.model.no_weight_tying
        self.mappings = {weight.megatron_name: weight for weight in family.weight_mappings(config)}
        self._names = set(tensors.names)

    def _find_tensor_name(self, hf_name: str) -> str | None:
        """Return the name of a tensor in these files."""
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
                raise RunError(f"{self.folder}: contains no {hf_name}, which {HF_CONFIG_FILE} requires")
            used.add(tensor_name)
        ignored = re.compile(self.family.ignored_pattern)
        unused = [name for name in self.tensors.names if name not in used and not ignored.fullmatch(name)]
        output_names = {"lm_head.weight", *self.family.tensor_aliases, *self.family.tensor_aliases.values()}
        if self.is_tied and unused and set(unused) <= output_names:
            self._check_tied(unused)
        elif unused:
            more_text = f", and {len(unused) - 1} more" if len(unused) > 1 else ""
            raise RunError(
                f"{self.tensors.get_file(unused[0])}: contains {unused[0]}{more_text}, which a "
                f"{self.family.model_type} model with this {HF_CONFIG_FILE} does not have; it would be dropped"
            )

    def _check_tied(self, output_names: list[str]) -> None:
        """Check that a tied matrix that is stored twice is the same in both copies."""
        import torch

        embedding = self.tensors[self._find_tensor_name(self.mappings[EMBEDDING_WEIGHT].hf_names[0]) or ""]
        for name in output_names:
            if not torch.equal(self.tensors[name], embedding):
                raise RunError(
                    f"{self.tensors.get_file(name)}: {name} differs from the embedding, but {HF_CONFIG_FILE} has "
                    "tie_word_embeddings: true; set it to false if both are intended"
                )

    def __call__(self, name: str) -> Tensor:
        mapping: WeightMapping = self.mappings[name]
        hf_tensors = [self.tensors[self._find_tensor_name(hf_name) or hf_name] for hf_name in mapping.hf_names]
        for hf_name, hf_tensor in zip(mapping.hf_names, hf_tensors, strict=True):
            if not hf_tensor.is_floating_point():
                dtype_name = str(hf_tensor.dtype).removeprefix("torch.")
                raise RunError(f"{self.folder}: {hf_name} has type {dtype_name}; quantized weights are not supported")
        try:
            tensor = mapping.transform.to_megatron(hf_tensors)
        except (RuntimeError, ValueError, IndexError):
            shapes = ", ".join(str(list(hf_tensor.shape)) for hf_tensor in hf_tensors)
            raise RunError(
                f"{self.folder}: {', '.join(mapping.hf_names)}: {shapes} do not match {HF_CONFIG_FILE}"
            ) from None
        if name in (EMBEDDING_WEIGHT, OUTPUT_WEIGHT) and tensor.shape[0] != self.num_embeddings:
            raise RunError(
                f"{self.folder}: {mapping.hf_names[0]} has {tensor.shape[0]} rows, but {HF_CONFIG_FILE} specifies "
                f"{self.num_embeddings}"
            )
        return tensor


WEIGHT_FORMATS = (("model.safetensors", "safetensors"), ("pytorch_model.bin", "torch"))
"""Names and formats of a folder's weight files; the first match is used."""


class LazyTensors:
    """Tensors by name, read on demand."""

    def __init__(self) -> None:
        self._readers: dict[str, tuple[Path, Callable[[], Tensor]]] = {}

    def add(self, name: str, path: Path, read: Callable[[], Tensor]) -> None:
        """Add a tensor. Raises RunError if the name exists."""
        if name in self._readers:
            raise RunError(f"{path}: contains {name}, which is also in {self._readers[name][0]}")
        self._readers[name] = (path, read)

    @property
    def names(self) -> list[str]:
        """Names of all tensors, in the order of the files."""
        return list(self._readers)

    def get_file(self, name: str) -> Path:
        """Return the file that contains a tensor."""
        return self._readers[name][0]

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor. Raises RunError if its file is damaged."""
        path, read = self._readers[name]
        try:
            return read()
        except (OSError, SafetensorError, RuntimeError) as error:
            raise RunError(f"{path}: {name} cannot be read ({describe_cause(error)})") from None


@contextmanager
def open_hf_weights(folder: Path) -> Iterator[LazyTensors]:
    """Open the weights of a Hugging Face model folder: one file, or shards with an index.

    Raises:
        UserError: there are no weights.
        RunError: a file is missing or damaged, or contains more than tensors.
    """
    _verify_export(folder)
    paths, file_format = _find_weight_files(folder)
    with ExitStack() as stack:
        tensors = LazyTensors()
        for path in paths:
            if file_format == "safetensors":
                _add_safetensors(tensors, path, stack)
            else:
                _add_torch_file(tensors, path)
        yield tensors


def _find_weight_files(folder: Path) -> tuple[list[Path], str]:
    for name, file_format in WEIGHT_FORMATS:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name], file_format
        if index.is_file():
            return _list_shards(index), file_format
    expected_files = ", ".join(f"{name} or its .index.json" for name, _ in WEIGHT_FORMATS)
    raise UserError(f"{folder}: contains no weights; looked for {expected_files}")


def _list_shards(index: Path) -> list[Path]:
    """Return the files listed in an index."""
    try:
        files = sorted(set(parse_json(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if not files or not all(isinstance(name, str) and Path(name).name == name for name in files):
            raise ValueError("it lists no files in its folder")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RunError(f"{index}: not an index of shards ({describe_cause(error)})") from None
    for name in files:
        if not (index.parent / name).is_file():
            raise RunError(f"{index.parent / name}: not found, but listed in {index.name}")
    return [index.parent / name for name in files]


def _verify_export(folder: Path) -> None:
    """Compare the weights of this project's export with their recorded checksums. Raises RunError if they differ."""
    checksums_path = folder / CHECKSUMS_FILE
    if not checksums_path.is_file():
        return
    checksums = manifest.read_manifest(checksums_path)
    if checksums is None or any(Path(name).name != name for name in checksums):
        raise RunError(f"{checksums_path}: cannot be read; export the model again")
    if (problem := manifest.find_difference(folder, checksums)) is not None:
        raise RunError(
            f"{folder}: {problem}; export the model again, or delete {CHECKSUMS_FILE} if you changed the weights"
        )


def _add_safetensors(tensors: LazyTensors, path: Path, stack: ExitStack) -> None:
    try:
        file = stack.enter_context(safe_open(path, "pt"))
        names = list(file.keys())
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: cannot be read as safetensors ({describe_cause(error)})") from None
    for name in names:
        tensors.add(name, path, lambda name=name: file.get_tensor(name))  # type: ignore[misc]


def _add_torch_file(tensors: LazyTensors, path: Path) -> None:
    add_state_dict(tensors, path, load_torch_file(path))


def load_torch_file(path: Path, *, classes: Sequence[Any] = ()) -> Any:
    """Load a torch.save file; tensors are memory-mapped if the format supports it."""
    from megatron.checkpoint import tensor_files

    return tensor_files.read_torch_file(path, classes=classes, mapped=True)


def add_state_dict(tensors: LazyTensors, path: Path, state_dict: Any, prefix: str = "") -> None:
    """Add the tensors of a mapping in a file. Raises RunError if it is not a mapping of tensors."""
    from torch import Tensor

    if not isinstance(state_dict, dict):
        raise RunError(f"{path}: contains no named tensors")
    for name, tensor in state_dict.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise RunError(f"{path}: {name!r} is not a tensor")
        tensors.add(f"{prefix}{name}", path, lambda tensor=tensor: tensor)  # type: ignore[misc]
