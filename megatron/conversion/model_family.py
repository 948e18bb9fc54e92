"""A published family of models: what its files call things, and which models of ours it can express.

family.from_hf_config(hf_config)       their config.json → our keys
family.unsupported_reason(config)      why a configuration of ours is none of this family, or None
family.to_hf_config(config, …)         our configuration → their config.json
family.weight_mappings(config)         the table of weights, for both directions

A transform says how tensors of theirs make one of ours, and the other way round, bit for bit. d head dimension, H
heads, G of them with keys and values of their own (G = H unless queries are grouped). Ours has queries, keys and values
of a group behind one another, [G, (H/G + 2), d, …] (megatron-core's linear_qkv), and the gate before the values that it
gates. Torch is imported once there are tensors: tables are read, and refused, before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from megatron.config.schema import Config
from megatron.conversion.hf_config import HFConfigReader
from megatron.model.mup import get_multipliers
from megatron.options.model import has_qkv_bias, num_kv_heads

if TYPE_CHECKING:
    from torch import Tensor


HF_CONFIG_FILE = "config.json"
"""What describes a model, beside its weights."""

EMBEDDING_WEIGHT, OUTPUT_WEIGHT = "embedding.word_embeddings.weight", "output_layer.weight"
"""Our names of the matrices at both ends."""


def _cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    import torch

    return torch.cat(list(parts), dim)


class Transform(Protocol):
    """Some tensors of theirs and one of ours, which hold the same."""

    def to_megatron(self, hf_tensors: Sequence[Tensor]) -> Tensor:
        """Theirs, in the order of the table, as ours."""

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        """Ours as theirs, in the order of the table."""


@dataclass(frozen=True)
class Identity:
    """One tensor, as it is."""

    def to_megatron(self, hf_tensors: Sequence[Tensor]) -> Tensor:
        return hf_tensors[0]

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]


@dataclass(frozen=True)
class Transpose:
    """A matrix stored as [inputs, outputs] (GPT-2's Conv1D)."""

    def to_megatron(self, hf_tensors: Sequence[Tensor]) -> Tensor:
        return hf_tensors[0].t().contiguous()

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.t().contiguous()]


@dataclass(frozen=True)
class Concat:
    """So many tensors of one size that lie behind one another in ours."""

    num_chunks: int

    def to_megatron(self, hf_tensors: Sequence[Tensor]) -> Tensor:
        return _cat(hf_tensors)

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        return [part.contiguous() for part in tensor.chunk(self.num_chunks)]


@dataclass(frozen=True)
class SeparateQKV:
    """Queries, keys and values, three tensors [H·d, …], [G·d, …], [G·d, …]."""

    num_heads: int
    num_kv_heads: int
    turns_neighbours: bool = False
    """Are neighbouring numbers of a query's or key's head turned together (Command), where ours turns its halves?"""

    def to_megatron(self, hf_tensors: Sequence[Tensor]) -> Tensor:
        q, k, v = hf_tensors
        if self.turns_neighbours:
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
        if self.turns_neighbours:  # [G, heads, 2, d/2, …] → [G, heads, d/2, 2, …]
            q, k = (x.unflatten(2, (2, -1)).transpose(2, 3) for x in (q, k))
        return [part.reshape(-1, *tensor.shape[1:]).contiguous() for part in (q, k, v)]


@dataclass(frozen=True)
class ConcatQKV:
    """Queries, keys and values behind one another in one tensor, `head_dim_index` being where their heads are."""

    num_heads: int
    head_dim_index: int = 0

    @property
    def _separate_qkv(self) -> SeparateQKV:
        return SeparateQKV(self.num_heads, self.num_heads)

    def to_megatron(self, hf_tensors: Sequence[Tensor]) -> Tensor:
        return self._separate_qkv.to_megatron(hf_tensors[0].transpose(0, self.head_dim_index).chunk(3))

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        return [_cat(self._separate_qkv.to_hf(tensor)).transpose(0, self.head_dim_index).contiguous()]


@dataclass(frozen=True)
class SkipRows:
    """A table whose first rows no token ever reads (OPT's positions). They are dropped, and zero on the way back."""

    num_rows: int

    def to_megatron(self, hf_tensors: Sequence[Tensor]) -> Tensor:
        return hf_tensors[0][self.num_rows :].contiguous()

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        return [_cat([tensor.new_zeros(self.num_rows, *tensor.shape[1:]), tensor])]


@dataclass(frozen=True)
class AddOne:
    """The weight of a norm that multiplies by 1 + weight (Gemma). In float32, which rounds what is lost beside 1."""

    def to_megatron(self, hf_tensors: Sequence[Tensor]) -> Tensor:
        return hf_tensors[0].float() + 1.0

    def to_hf(self, tensor: Tensor) -> list[Tensor]:
        return [tensor - 1.0]


IDENTITY = Identity()


@dataclass(frozen=True)
class WeightMapping:
    """One weight of ours and the tensors of theirs that hold the same."""

    megatron_name: str
    hf_names: tuple[str, ...]
    transform: Transform = IDENTITY


@dataclass(frozen=True)
class ModelFamily:
    """See the module's docstring."""

    model_type: str
    """In `model_type` of config.json."""
    architecture: str
    """In `architectures`: the class that computes a language model."""
    base_model_prefix: str
    """How names of tensors begin, in files of the language model; files of the base model leave it out."""
    from_hf_config: Callable[[HFConfigReader], dict[str, Any]]
    """Our keys of model and position. Raises UserError, naming the key, for what ours cannot express."""
    supported_values: Callable[[Config], Mapping[str, tuple[Any, ...]]]
    """For some of our keys, the values that this family has."""
    to_hf_keys: Callable[[Config], dict[str, Any]]
    """config.json, but for what all families share."""
    weight_mappings: Callable[[Config], Iterator[WeightMapping]]
    """Every weight of ours, in both directions."""
    ignored_pattern: str = r"(?!)"
    """A pattern of names, in their files, of what is computed anew and never read."""
    tensor_aliases: Mapping[str, str] = field(default_factory=dict)
    """Names that some versions write instead of those of the table."""
    auto_map: Mapping[str, str] = field(default_factory=dict)
    """Its `auto_map`: classes of code that travels with it. It is not run here."""
    known_difference: str | None = None
    """Where its class in transformers computes something else than we do, in words."""
    find_other_conflict: Callable[[Config], str | None] = lambda config: None
    """Further reasons why a configuration is none of this family."""
    multipliers: tuple[str, ...] = ()
    """Of the fields of `Multipliers` (`model/mup.py`), those that may be other than 1."""

    def unsupported_reason(self, config: Config) -> str | None:
        """Why a configuration of ours is none of this family, in words; None if it is one, exactly."""
        options = {**config.model.model_dump(), **config.position.model_dump()}
        for key, values in {**COMMON_SUPPORTED_VALUES, **self.supported_values(config)}.items():
            if options[key] not in values:
                choices = " or ".join(_format_value(value) for value in values)
                return f"{key} is {_format_value(options[key])}; {self.architecture} has {choices}"
        for name, factor in asdict(get_multipliers(config.model)).items():
            if factor != 1.0 and name not in self.multipliers:
                cause = "use_mup is true and" if config.model.use_mup else "it"
                return f"{cause} multiplies by {factor:.4g} ({name}); {self.architecture} cannot"
        return self.find_other_conflict(config)

    def to_hf_config(self, config: Config, num_embeddings: int, **extra_keys: Any) -> dict[str, Any]:
        """The content of config.json.

        Args:
            config: ours, of which `unsupported_reason` finds nothing.
            num_embeddings: of the embedding, padding included.
            extra_keys: keys to put beside them, such as bos_token_id and eos_token_id.
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
"""What a family has that says nothing else (`supported_values`)."""


def map_layers(
    config: Config, layer_table: Callable[[str], Iterator[tuple[str, Any, Transform]]]
) -> Iterator[WeightMapping]:
    """The weights of all layers.

    layer_table: of one layer's number as text: our name within the layer, their names, how the one is made of the
    others.
    """
    for layer_idx in range(config.model.num_layers):
        for megatron_name, hf_name, transform in layer_table(str(layer_idx)):
            names = (hf_name,) if isinstance(hf_name, str) else tuple(hf_name)
            yield WeightMapping(f"decoder.layers.{layer_idx}.{megatron_name}", names, transform)


def map_linear_layers(
    config: Config, hf_prefix: str, hf_names: Sequence[str], mlp_bias: bool
) -> Iterator[tuple[str, str, Transform]]:
    """The linear layers of one layer, for families that keep each as it is.

    Args:
        config: ours.
        hf_prefix: how their names within the layer begin.
        hf_names: theirs of the queries' keys' and values' projection, the output's, and the MLP's first and second.
        mlp_bias: have the MLP's a bias?

    Yields:
        What `map_layers` takes.
    """
    model = config.model
    megatron_names = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    biases = (has_qkv_bias(model), model.use_bias_in_attn_linear, mlp_bias, mlp_bias)
    for megatron_name, hf_name, has_bias in zip(megatron_names, hf_names, biases, strict=True):
        for part in ("weight", "bias") if has_bias else ("weight",):
            yield f"{megatron_name}.{part}", f"{hf_prefix}.{hf_name}.{part}", IDENTITY


def has_grouped_queries(config: Config) -> bool:
    """Are there fewer heads of keys and values than of queries?"""
    return num_kv_heads(config.model) != config.model.num_attention_heads


def check_equal_biases(config: Config) -> str | None:
    """For families whose queries, keys, values and output have a bias all alike."""
    if has_qkv_bias(config.model) != config.model.use_bias_in_attn_linear:
        return "use_bias_in_qkv is true without use_bias_in_attn_linear; only Qwen2 has that"
    return None
