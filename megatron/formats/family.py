"""A published family of models: what its files call things, and which models of ours it can express.

family.read(keys)            their config.json → our keys
family.why_not(config)       why a configuration of ours is none of this family, or None
family.written(config, …)    our configuration → their config.json
family.weights(config)       the table of weights, for both directions
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.config.schema import Config
from megatron.formats.keys import Keys
from megatron.formats.transforms import Same, Transform
from megatron.options.model import has_qkv_bias, num_kv_heads

FILE = "config.json"
"""What describes a model, beside its weights."""

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
"""Our names of the matrices at both ends."""


AS_IS = Same()


@dataclass(frozen=True)
class Weight:
    """One weight of ours and the tensors of theirs that hold the same."""

    ours: str
    theirs: tuple[str, ...]
    transform: Transform = AS_IS


@dataclass(frozen=True)
class Family:
    """See the module's docstring."""

    name: str
    """In `model_type` of config.json."""
    architecture: str
    """In `architectures`: the class that computes a language model."""
    base: str
    """How names of tensors begin, in files of the language model; files of the base model leave it out."""
    read: Callable[[Keys], dict[str, Any]]
    """Our keys of model and position. Raises UserError, naming the key, for what ours cannot express."""
    needs: Callable[[Config], Mapping[str, tuple[Any, ...]]]
    """For some of our keys, the values that this family has."""
    keys: Callable[[Config], dict[str, Any]]
    """config.json, but for what all families share."""
    weights: Callable[[Config], Iterator[Weight]]
    """Every weight of ours, in both directions."""
    ignored: str = r"(?!)"
    """A pattern of names, in their files, of what is computed anew and never read."""
    synonyms: Mapping[str, str] = field(default_factory=dict)
    """Names that some versions write instead of those of the table."""
    code: Mapping[str, str] = field(default_factory=dict)
    """Its `auto_map`: classes of code that travels with it. It is not run here."""
    drifts: str | None = None
    """Where its class in transformers computes something else than we do, in words."""
    also: Callable[[Config], str | None] = lambda config: None
    """Further reasons why a configuration is none of this family."""

    def why_not(self, config: Config) -> str | None:
        """Why a configuration of ours is none of this family, in words; None if it is one, exactly."""
        ours = {**config.model.model_dump(), **config.position.model_dump()}
        for key, values in {**COMMON, **self.needs(config)}.items():
            if ours[key] not in values:
                choices = " or ".join(_shown(value) for value in values)
                return f"{key} is {_shown(ours[key])}; {self.architecture} has {choices}"
        return self.also(config)

    def written(self, config: Config, rows: int, **others: Any) -> dict[str, Any]:
        """The content of config.json.

        Args:
            config: ours, of which `why_not` finds nothing.
            rows: of the embedding, padding included.
            others: keys to put beside them, such as bos_token_id and eos_token_id.
        """
        return {
            "architectures": [self.architecture],
            "model_type": self.name,
            "vocab_size": rows,
            "tie_word_embeddings": not config.model.no_weight_tying,
            "torch_dtype": "float32",
            **self.keys(config),
            **others,
        }


def _shown(value: Any) -> str:
    return {True: "true", False: "false", None: "null"}.get(value, str(value)) if not isinstance(value, dict) else "{}"


COMMON: dict[str, tuple[Any, ...]] = {
    "score_processor": ("none",), "attention_window": (None,), "randomized_positions": (None,)
}  # fmt: skip
"""What no family has."""


def layers(config: Config, table: Callable[[str], Iterator[tuple[str, Any, Transform]]]) -> Iterator[Weight]:
    """The weights of all layers.

    table: of one layer's number as text: our name within the layer, their names, how the one is made of the others.
    """
    for number in range(config.model.num_layers):
        for ours, theirs, transform in table(str(number)):
            names = (theirs,) if isinstance(theirs, str) else tuple(theirs)
            yield Weight(f"decoder.layers.{number}.{ours}", names, transform)


def linears(config: Config, theirs: str, names: Sequence[str], mlp_bias: bool) -> Iterator[tuple[str, str, Transform]]:
    """The linear layers of one layer, for families that keep each as it is.

    Args:
        config: ours.
        theirs: how their names within the layer begin.
        names: theirs of the queries' keys' and values' projection, the output's, and the MLP's first and second.
        mlp_bias: have the MLP's a bias?

    Yields:
        What the table of `layers` wants.
    """
    model = config.model
    ours = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    biases = (has_qkv_bias(model), model.use_bias_in_attn_linear, mlp_bias, mlp_bias)
    for own, name, bias in zip(ours, names, biases, strict=True):
        for part in ("weight", "bias") if bias else ("weight",):
            yield f"{own}.{part}", f"{theirs}.{name}.{part}", AS_IS


def grouped(config: Config) -> bool:
    """Are there fewer heads of keys and values than of queries?"""
    return num_kv_heads(config.model) != config.model.num_attention_heads


def same_biases(config: Config) -> str | None:
    """For families whose queries, keys, values and output have a bias all alike."""
    if has_qkv_bias(config.model) != config.model.use_bias_in_attn_linear:
        return "use_bias_in_qkv is true without use_bias_in_attn_linear; only Qwen2 has that"
    return None
