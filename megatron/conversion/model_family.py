"""Models of other projects: published families, and the source of an import.

A family defines names in its files, and which of our models it can represent:

    family.from_hf_config(config_reader)   config.json → our keys
    family.describe_unsupported(config)    why the family does not support a configuration, or None
    family.to_hf_config(config, …)         our configuration → config.json
    family.weight_mappings(config)         table of weights, for both directions

A transform converts tensors of the family to one of ours and back, bit for bit. Dimensions: d head dimension, H heads,
G key and value heads (G = H unless queries are grouped). Our format concatenates queries, keys and values per group,
[G, (H/G + 2), d, …] (megatron-core's linear_qkv), and puts the gate before the values that it gates. Torch is imported
only when tensors are converted, so that unsupported models are rejected without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import ValidationError

from megatron.config.schema import Config, describe_validation_error
from megatron.config.validation import validate_config
from megatron.conversion.hf_config import HFConfigReader
from megatron.model.mup import get_multipliers
from megatron.options.model import get_num_kv_heads, has_qkv_bias
from megatron.utils.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

HF_CONFIG_FILE = "config.json"
"""File that describes a model, next to its weights."""

EMBEDDING_WEIGHT, OUTPUT_WEIGHT = "embedding.word_embeddings.weight", "output_layer.weight"
"""Our names of the embedding and the output matrix."""


def _cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    import torch

    return torch.cat(list(parts), dim)


class Transform(Protocol):
    """Bijective conversion between one or more tensors of a family and one of ours."""

    def to_megatron(self, hf_tensors: Sequence[Tensor]) -> Tensor:
        """Convert a family's tensors, in the order of the table, to ours."""

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        """Convert our tensor to the family's, in the order of the table."""


@dataclass(frozen=True)
class Identity:
    """Single tensor without conversion."""

    def to_megatron(self, hf_tensors: Sequence[Tensor]) -> Tensor:
        return hf_tensors[0]

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]


@dataclass(frozen=True)
class Transpose:
    """Matrix stored as [inputs, outputs] (GPT-2's Conv1D)."""

    def to_megatron(self, hf_tensors: Sequence[Tensor]) -> Tensor:
        return hf_tensors[0].t().contiguous()

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.t().contiguous()]


@dataclass(frozen=True)
class Concat:
    """Several tensors of equal size that are concatenated in ours."""

    num_chunks: int

    def to_megatron(self, hf_tensors: Sequence[Tensor]) -> Tensor:
        return _cat(hf_tensors)

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        return [part.contiguous() for part in tensor.chunk(self.num_chunks)]


@dataclass(frozen=True)
class SeparateQKV:
    """Queries, keys and values as three tensors [H·d, …], [G·d, …], [G·d, …]."""

    num_heads: int
    num_kv_heads: int
    rotates_adjacent_pairs: bool = False
    """True if adjacent elements of query and key heads are rotated together (Command), instead of the two halves."""

    def to_megatron(self, hf_tensors: Sequence[Tensor]) -> Tensor:
        q, k, v = hf_tensors
        if self.rotates_adjacent_pairs:
            q, k = (
                x.reshape(num_heads, -1, 2, *x.shape[1:]).transpose(1, 2)
                for x, num_heads in ((q, self.num_heads), (k, self.num_kv_heads))
            )
        q, k, v = (part.reshape(self.num_kv_heads, -1, *v.shape[1:]) for part in (q, k, v))
        return _cat([q, k, v], 1).reshape(-1, *hf_tensors[0].shape[1:])

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        queries_per_group = self.num_heads // self.num_kv_heads
        parts = tensor.reshape(self.num_kv_heads, queries_per_group + 2, -1, *tensor.shape[1:])
        q, k, v = parts[:, :queries_per_group], parts[:, queries_per_group : queries_per_group + 1], parts[:, -1:]
        if self.rotates_adjacent_pairs:  # [G, heads, 2, d/2, …] → [G, heads, d/2, 2, …]
            q, k = (x.unflatten(2, (2, -1)).transpose(2, 3) for x in (q, k))
        return [part.reshape(-1, *tensor.shape[1:]).contiguous() for part in (q, k, v)]


@dataclass(frozen=True)
class ConcatQKV:
    """Queries, keys and values concatenated in one tensor; `head_dim_index` is the dimension of the heads."""

    num_heads: int
    num_kv_heads: int
    head_dim_index: int = 0

    @property
    def _separate_qkv(self) -> SeparateQKV:
        return SeparateQKV(self.num_heads, self.num_kv_heads)

    def to_megatron(self, hf_tensors: Sequence[Tensor]) -> Tensor:
        tensor = hf_tensors[0].transpose(0, self.head_dim_index)
        head_dim = tensor.shape[0] // (self.num_heads + 2 * self.num_kv_heads)
        sizes = [num_heads * head_dim for num_heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        return self._separate_qkv.to_megatron(tensor.split(sizes))

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        return [_cat(self._separate_qkv.to_hf(tensor)).transpose(0, self.head_dim_index).contiguous()]


@dataclass(frozen=True)
class SkipRows:
    """Table with initial rows that no token reads (OPT's positions). They are dropped on import and zero on export."""

    num_rows: int

    def to_megatron(self, hf_tensors: Sequence[Tensor]) -> Tensor:
        return hf_tensors[0][self.num_rows :].contiguous()

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        return [_cat([tensor.new_zeros(self.num_rows, *tensor.shape[1:]), tensor])]


@dataclass(frozen=True)
class AddOne:
    """Weight of a norm that multiplies by 1 + weight (Gemma). Computed in float32, with rounding of small weights."""

    def to_megatron(self, hf_tensors: Sequence[Tensor]) -> Tensor:
        return hf_tensors[0].float() + 1.0

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        return [tensor - 1.0]


IDENTITY = Identity()


@dataclass(frozen=True)
class WeightMapping:
    """Mapping between one of our weights and the corresponding tensors of a family."""

    megatron_name: str
    hf_names: tuple[str, ...]
    transform: Transform = IDENTITY


@dataclass(frozen=True)
class ModelFamily:
    """Published model family (see the module's docstring)."""

    model_type: str
    """Value of `model_type` in config.json."""
    architecture: str
    """Value of `architectures` in config.json: the language model class."""
    base_model_prefix: str
    """Prefix of tensor names in files of the language model; files of the base model omit it."""
    from_hf_config: Callable[[HFConfigReader], dict[str, Any]]
    """Returns our keys of model and position. Raises UserError with the key for unsupported values."""
    supported_values: Callable[[Config], Mapping[str, tuple[Any, ...]]]
    """Returns the values that the family supports, for some of our keys."""
    to_hf_keys: Callable[[Config], dict[str, Any]]
    """Returns config.json without the keys that all families share."""
    weight_mappings: Callable[[Config], Iterator[WeightMapping]]
    """Yields the mappings of all weights, for both directions."""
    ignored_pattern: str = r"(?!)"
    """Pattern of names of tensors in weight files that are recomputed and never read."""
    tensor_aliases: Mapping[str, str] = field(default_factory=dict)
    """Alternative tensor names written by some versions."""
    auto_map: Mapping[str, str] = field(default_factory=dict)
    """`auto_map` of the family: classes of included code, which is not run here."""
    known_difference: str | None = None
    """Sentence about known differences between the class in transformers and this project, or None."""
    find_other_conflict: Callable[[Config], str | None] = lambda config: None
    """Returns further reasons why the family does not support a configuration, or None."""
    multipliers: tuple[str, ...] = ()
    """Fields of `Multipliers` (`model/mup.py`) that may differ from 1."""

    def describe_unsupported(self, config: Config) -> str | None:
        """Return why the family does not support a configuration exactly, or None if it does."""
        options = {**config.model.model_dump(), **config.position.model_dump()}
        for key, values in {**COMMON_SUPPORTED_VALUES, **self.supported_values(config)}.items():
            if options[key] not in values:
                choices = " or ".join(_format_value(value) for value in values)
                return f"{key} is {_format_value(options[key])}; {self.architecture} supports {choices}"
        for name, factor in asdict(get_multipliers(config.model)).items():
            if factor != 1.0 and name not in self.multipliers:
                cause = "use_mup is true and" if config.model.use_mup else "the model"
                return f"{cause} multiplies by {factor:.4g} ({name}); not supported by {self.architecture}"
        return self.find_other_conflict(config)

    def to_hf_config(self, config: Config, num_embeddings: int, **extra_keys: Any) -> dict[str, Any]:
        """Return the content of config.json.

        Args:
            config: our configuration, for which `describe_unsupported` returns None.
            num_embeddings: rows of the embedding, including padding.
            extra_keys: additional keys, such as bos_token_id and eos_token_id.
        """
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": num_embeddings,
            "tie_word_embeddings": not config.model.no_weight_tying,
            "torch_dtype": "float32",
            **self.to_hf_keys(config),
            **extra_keys,
        }


def _format_value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_format_value, value))}]"
    return {True: "true", False: "false", None: "null"}.get(value, str(value)) if not isinstance(value, dict) else "{}"


COMMON_SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "score_processor": ("none",), "attention_window": (None,), "randomized_positions": (None,),
    "attention_temperature": ("none",), "softmax_type": ("vanilla",), "attention_output_gate": (False,),
    "use_qk_layernorm": (False,), "norm_placement": ("pre",), "head_dim": (None,),
    "attn_logit_softcapping": (None,), "final_logit_softcapping": (None,), "layernorm_bias": (True,),
}  # fmt: skip
"""Values supported by families that do not specify others (`supported_values`)."""


def map_layers(
    config: Config, layer_table: Callable[[str], Iterator[tuple[str, Any, Transform]]]
) -> Iterator[WeightMapping]:
    """Yield the weight mappings of all layers.

    layer_table: function from a layer's index as text to our name within the layer, the family's names, and the
        transform.
    """
    for layer_idx in range(config.model.num_layers):
        for megatron_name, hf_name, transform in layer_table(str(layer_idx)):
            names = (hf_name,) if isinstance(hf_name, str) else tuple(hf_name)
            yield WeightMapping(f"decoder.layers.{layer_idx}.{megatron_name}", names, transform)


def map_linear_layers(
    config: Config, hf_prefix: str, hf_names: Sequence[str], mlp_bias: bool
) -> Iterator[tuple[str, str, Transform]]:
    """Yield the linear layers of one layer, for families that keep each unchanged.

    Args:
        config: our configuration.
        hf_prefix: prefix of the family's names within the layer.
        hf_names: the family's names of the query-key-value and output projections, and of the two feed-forward layers.
        mlp_bias: True if the feed-forward layers have biases.

    Yields:
        Entries for `map_layers`.
    """
    model = config.model
    megatron_names = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    biases = (has_qkv_bias(model), model.use_bias_in_attn_linear, mlp_bias, mlp_bias)
    for megatron_name, hf_name, has_bias in zip(megatron_names, hf_names, biases, strict=True):
        for part in ("weight", "bias") if has_bias else ("weight",):
            yield f"{megatron_name}.{part}", f"{hf_prefix}.{hf_name}.{part}", IDENTITY


def has_grouped_queries(config: Config) -> bool:
    """Return True if there are fewer key and value heads than query heads."""
    return get_num_kv_heads(config.model) != config.model.num_attention_heads


def check_equal_biases(config: Config) -> str | None:
    """Return the conflict of a family with equal bias settings for queries, keys, values and output, or None."""
    if has_qkv_bias(config.model) != config.model.use_bias_in_attn_linear:
        return "use_bias_in_qkv is true without use_bias_in_attn_linear; only Qwen2 supports that"
    return None


class WeightReader(Protocol):
    """Reader of a source's weights by our names."""

    num_embeddings: int
    """Number of rows of the embedding."""

    def check_names(self, names: list[str]) -> None:
        """Check that the source contains exactly these weights. Raises RunError."""

    def __call__(self, name: str) -> Tensor:
        """Return one of our weights in its stored type. Raises RunError if a file is damaged."""


@dataclass(frozen=True)
class ModelSource:
    """Model from another project: its configuration has been read, its weights have not."""

    path: Path
    format_name: str
    """Name of the format."""
    config_keys: dict[str, Any]
    """Our keys of model and position, except for vocabulary padding."""
    open_weights: Callable[[Config], AbstractContextManager[WeightReader]]
    """Opens the weights; the configuration built from the keys determines their names."""
    tokenizer_folder: Path | None = None
    """Folder to search for tokenizer files."""
    notes: tuple[str, ...] = field(default=())
    """Notes for the user."""
    document_end: int | None = None
    """Token at which the model's attention ends a document, or None if the source does not state it."""

    def build_config(self, **overrides: Any) -> Config:
        """Build the configuration of a run.

        Raises UserError if the model is not supported.
        """
        try:
            config = Config.from_flat({**self.config_keys, **overrides})
        except ValidationError as error:
            raise UserError(f"{self.path}: {next(describe_validation_error(error, lambda _: None))}") from None
        for _, problem in validate_config(config):
            raise UserError(f"{self.path}: {problem}")
        return config
