"""Checkpoints of GPT-NeoX, and of KERPLE and DAPE, which are built on it: any number of tensor-parallel ranks.

    RUN/latest                                        the name of the newest checkpoint
    RUN/global_step1000/layer_03-model_01-model_states.pt    one layer's part of one tensor-parallel rank
    RUN/global_step1000/mp_rank_01_model_states.pt           or all layers', under `module`, as `sequential.3.…`
    RUN/global_step1000/configs/*.yml                 the configuration, where it was saved (`--config` names others)

Layer 0 is the embedding, 2 to L + 1 are the layers, L + 3 is the last norm and L + 4 the output matrix. What becomes of
the parts of several ranks:

| part                                  | whole                                                                       |
|---------------------------------------|-----------------------------------------------------------------------------|
| embedding, output matrix              | behind one another                                                          |
| queries, keys, values                 | behind one another, heads in order; grouped, each rank has [q; k; v]        |
| feed-forward, first matrix            | behind one another; gated, each rank has [up; gate], and ours is [gate; up] |
| attention's and feed-forward's second | side by side; their biases are one and the same, but with gpt_j_residual    |
|                                       | each rank adds its own before the sum over ranks, so they are summed        |
| norms                                 | the mean of what should be equal                                            |
| kernels and tables of positions       | behind one another, heads in order                                          |

KERPLE's modules are in every layer's file although all layers share them; DAPE's are each layer's own.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config.load import merge_documents
from megatron.config.neox_keys import RULES
from megatron.config.neox_rules import MODEL_SECTIONS
from megatron.config.schema import Config, map_key_owners
from megatron.config.yaml_files import YamlDocument, read_yaml
from megatron.conversion.model_source import ModelSource
from megatron.conversion.transforms import SeparateQKV
from megatron.options.model import GATED, ffn_hidden_size, intermediate_size_of, num_kv_heads
from megatron.utils.errors import RunError, UserError, shorten_text

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.conversion.weight_files import LazyTensors

LATEST_FILE, CONFIGS_FOLDER = "latest", "configs"
MAX_LATEST_CHARS = 4096
"""Characters that are read of `latest`, which holds a name."""
_LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_RANK_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
IGNORED_TENSORS = re.compile(r".*\b(inv_freq|slopes|masked_bias)|attention\.bias|.*\.cached_\w+|.*\.cache_matrix\w*")
"""Buffers that are computed anew."""

FC1_NAMES = ("mlp.dense_h_to_4h", "mlp.linear1")
"""Names that versions of GPT-NeoX have given the first matrix of the feed-forward layer."""

TRAINING_KEYS = {
    "init_method", "output_layer_init_method", "init_method_std", "hidden_dropout", "attention_dropout",
    "checkpoint_activations", "checkpoint_num_layers", "attention_backend", "attention_chunk_rows",
    "make_vocab_size_divisible_by",
}  # fmt: skip
"""Keys of the model that its weights do not depend on any more."""
UNSUPPORTED_MODEL_KEYS = (
    "sparsity_config", "sparse_attention", "use_qk_layernorm", "num_unique_layers",
    "opt_pos_emb_offset", "soft_prompt_tuning", "moe_num_experts", "use_mup",
)  # fmt: skip
"""Of what is refused in a training's configuration, that which changes what the weights compute."""


def find_neox_checkpoint(path: Path) -> Path | None:
    """The checkpoint in a folder of GPT-NeoX's, which may be the folder itself; None if it is none of them."""
    if (path / LATEST_FILE).is_file():
        with open(path / LATEST_FILE, encoding="utf-8", errors="replace") as file:
            name = file.read(MAX_LATEST_CHARS).strip()
        if name and Path(name).name == name and os.path.isdir(path / name):
            return path / name
        if not _has_state_files(path):
            raise UserError(
                f"{path / LATEST_FILE}: names {shorten_text(name)!r}, and there is no such folder beside it"
            )
    return path if _has_state_files(path) else None


def _has_state_files(path: Path) -> bool:
    """Are there files of a checkpoint's in a folder?"""
    return any(any(path.glob(pattern)) for pattern in ("*_model_states.pt", "layer_*-model_*-model_states.pt"))


def read_neox_source(checkpoint: Path, configs: Sequence[Path] = ()) -> ModelSource:
    """What a checkpoint's configuration says that it holds.

    Args:
        checkpoint: its folder.
        configs: configuration files; those that it was saved with if there are none.

    Raises UserError: there is no configuration, or it says what ours cannot be, naming the key.
    """
    files = list(configs) or sorted((checkpoint / CONFIGS_FOLDER).glob("*.y*ml"))
    if not files:
        raise UserError(f"{checkpoint}: holds no {CONFIGS_FOLDER}/*.yml; name the model's configuration with --config")
    loaded = merge_documents([_select_model_keys(read_yaml(path)) for path in files])
    config = loaded.config
    sections = (config.model, config.position)
    keys = {name: value for section in sections for name, value in section.model_dump(exclude_unset=True).items()}
    keys.pop("mlp_multiple_of", None)
    notes = loaded.notes
    if (activation := config.model.activation) in GATED:
        ffn_size = _read_gated_ffn_size(checkpoint)
        keys["intermediate_size"] = intermediate_size_of(ffn_size, activation)
        if (configured_size := ffn_hidden_size(config.model)) != ffn_size:
            notes = (
                *notes,
                f"{checkpoint}: its weights have a feed-forward width of {ffn_size}, not {configured_size}",
            )
    return ModelSource(checkpoint, "GPT-NeoX", keys, partial(_open_weights, checkpoint), None, notes)


def _read_gated_ffn_size(checkpoint: Path) -> int:
    """The width of gated layers, from the weights: versions of GPT-NeoX have counted it differently."""
    shards = TensorParallelShards(checkpoint)
    name = next((name for name in FC1_NAMES if f"2.{name}.weight" in shards), FC1_NAMES[0])
    return sum(shard.shape[0] for shard in shards[f"2.{name}.weight"]) // 2


def _select_model_keys(document: YamlDocument) -> YamlDocument:
    """Of a configuration the keys that say what the model is; those of its training do not matter any more."""
    model_values = {name: value for name, value in document.values.items() if _is_model_key(name.replace("-", "_"))}
    return YamlDocument(document.source, model_values, document.lines)


def _is_model_key(name: str) -> bool:
    if (rule := RULES.get(name)) is not None:
        return rule.describes_model() or name in UNSUPPORTED_MODEL_KEYS
    return map_key_owners().get(name) in MODEL_SECTIONS and name not in TRAINING_KEYS


@contextmanager
def _open_weights(checkpoint: Path, config: Config) -> "Iterator[NeoxWeightReader]":
    yield NeoxWeightReader(checkpoint, config)


class TensorParallelShards:
    """What each tensor-parallel rank holds, by number of the layer and name."""

    def __init__(self, checkpoint: Path) -> None:
        from megatron.conversion.weight_files import LazyTensors

        self.checkpoint = checkpoint
        matches = [(path, _LAYER_FILE.fullmatch(path.name)) for path in sorted(checkpoint.iterdir())]
        layers = [(path, int(match[1]), int(match[2])) for path, match in matches if match]
        self.tensors_by_rank: dict[int, LazyTensors] = {}
        if layers:
            for path, layer_number, rank in layers:
                self._add_file(self.tensors_by_rank.setdefault(rank, LazyTensors()), path, f"{layer_number}.")
        else:
            rank_files = [(path, _RANK_FILE.fullmatch(path.name)) for path in sorted(checkpoint.iterdir())]
            for path, match in rank_files:
                if match:
                    self._add_file(self.tensors_by_rank.setdefault(int(match[1]), LazyTensors()), path, None)
        if sorted(self.tensors_by_rank) != list(range(len(self.tensors_by_rank))) or not self.tensors_by_rank:
            raise RunError(f"{checkpoint}: holds parts of the ranks {sorted(self.tensors_by_rank)}; some are missing")
        self.names = self.tensors_by_rank[0].names
        for rank, tensors in self.tensors_by_rank.items():
            if unmatched := sorted(set(tensors.names) ^ set(self.names)):
                raise RunError(f"{checkpoint}: rank {rank} and rank 0 differ in {unmatched[0]}; a file is missing")

    @staticmethod
    def _add_file(tensors: "LazyTensors", path: Path, prefix: str | None) -> None:
        from megatron.conversion.weight_files import add_state_dict, load_torch_file

        content = load_torch_file(path, classes=_get_numpy_classes())
        if prefix is None:
            content = content.get("module") if isinstance(content, dict) else None
            if not isinstance(content, dict) or not all(str(name).startswith("sequential.") for name in content):
                raise RunError(f"{path}: holds no `module` of GPT-NeoX's (sequential.…)")
            content = {name.removeprefix("sequential."): value for name, value in content.items()}
        add_state_dict(tensors, path, content, prefix or "")

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> "list[Tensor]":
        """The parts of a tensor, in the order of the ranks. Raises RunError if there is none of this name."""
        if name not in self.names:
            raise RunError(f"{self.checkpoint}: holds no {name}, which its configuration asks for")
        return [self.tensors_by_rank[rank][name] for rank in range(len(self.tensors_by_rank))]


def _get_numpy_classes() -> list[Any]:
    """numpy's random state, which DeepSpeed's files hold beside the weights: nothing of it is run."""
    import numpy as np
    from numpy._core.multiarray import _reconstruct

    dtype_classes = {type(np.dtype(dtype_name)) for dtype_name in ("u1", "u4", "u8", "i4", "i8", "f4", "f8")}
    names = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
    return [*((_reconstruct, name) for name in names), np.ndarray, np.dtype, *dtype_classes]


class NeoxWeightReader:
    """The weights of a checkpoint, by our names."""

    def __init__(self, checkpoint: Path, config: Config) -> None:
        self.checkpoint, self.config, self.shards = checkpoint, config, TensorParallelShards(checkpoint)
        model = config.model
        self.num_ranks = len(self.shards.tensors_by_rank)
        self.used_names: set[str] = set()
        self.final_norm_number = model.num_layers + 3
        self.num_embeddings = sum(shard.shape[0] for shard in self.shards["0.word_embeddings.weight"])

    def check_names(self, names: list[str]) -> None:
        for name in names:
            self._get_sources(name)
        for layer_number in self._layer_numbers():
            if self.config.model.gpt_j_tied:  # built and never used
                self.used_names |= {
                    shard_name
                    for shard_name in self.shards.names
                    if f"{layer_number}.post_attention_layernorm." in shard_name
                }
            # What all layers share was taken from the first; the others' files have copies.
            self.used_names |= {f"{layer_number}.{suffix}" for suffix in self._get_used_suffixes(2)} & set(
                self.shards.names
            )
        if not self.config.position.pos_emb_per_layer:
            self._check_shared_encoding()
        if not self.config.model.no_weight_tying:  # a copy for the last stage
            self.used_names.add(f"{self.final_norm_number + 1}.final_linear.weight")
        unused = [
            name for name in self.shards.names if name not in self.used_names and not IGNORED_TENSORS.fullmatch(name)
        ]
        unused = [name for name in unused if not IGNORED_TENSORS.fullmatch(name.partition(".")[2])]
        if unused:
            more_text = f", and {len(unused) - 1} more" if len(unused) > 1 else ""
            raise RunError(
                f"{self.checkpoint}: holds {unused[0]}{more_text}, which a model of its configuration has not; it "
                f"would be "
                "dropped"
            )

    def _get_used_suffixes(self, layer_number: int) -> set[str]:
        """What is used of a layer's file."""
        return {name.partition(".")[2] for name in self.used_names if name.startswith(f"{layer_number}.")}

    def _check_shared_encoding(self) -> None:
        """An encoding that all layers share is the same in every layer's file."""
        first, *others = (
            {k: v for k, v in self._list_position_tensors(layer_number).items() if "mlp2." not in k}
            for layer_number in self._layer_numbers()
        )
        for other in others:
            for suffix, name in other.items():
                pairs = zip(self.shards[name], self.shards[first.get(suffix, name)], strict=True)
                if suffix not in first or not all(a.equal(b) for a, b in pairs):
                    raise RunError(
                        f"{self.checkpoint}: {name} is another than layer 2's, although its configuration says "
                        "pos_emb_per_layer: false; name a configuration that says true with --config"
                    )

    def __call__(self, name: str) -> "Tensor":
        sources, join = self._get_sources(name)
        try:
            return join([self.shards[source] for source in sources])
        except (RuntimeError, ValueError, IndexError) as error:
            message = str(error).splitlines()[0]
            raise RunError(
                f"{self.checkpoint}: the parts of {sources[0]} do not fit its configuration ({message})"
            ) from None

    def _layer_numbers(self) -> range:
        return range(2, self.config.model.num_layers + 2)

    def _get_sources(self, name: str) -> "tuple[list[str], Callable[[list[list[Tensor]]], Tensor]]":
        """The tensors that a weight of ours is made of, and how."""
        sources_and_join = self._map_weight(name)
        self.used_names |= set(sources_and_join[0])
        for source in sources_and_join[0]:
            _ = self.shards[source]
        return sources_and_join

    def _map_weight(self, name: str) -> "tuple[list[str], Callable[[list[list[Tensor]]], Tensor]]":
        parameter_kind = name.rpartition(".")[2]
        if name == "embedding.word_embeddings.weight":
            return ["0.word_embeddings.weight"], _concat_rows
        if name == "output_layer.weight":
            return [f"{self.final_norm_number + 1}.final_linear.weight"], _concat_rows
        if name == "position.vectors.weight":
            return ["0.position_embeddings.weight"], _average_shards
        if name.startswith("decoder.final_layernorm."):
            return [self._get_norm_name(f"{self.final_norm_number}.norm", parameter_kind)], _average_shards
        if name.startswith("position."):
            return self._map_position_weight(2, name.removeprefix("position."))
        _, _, layer, layer_parameter = name.split(".", 3)
        return self._map_layer_weight(int(layer) + 2, layer_parameter, parameter_kind)

    def _get_norm_name(self, neox_name: str, parameter_kind: str) -> str:
        """RMSNorm's weight is called scale."""
        return (
            f"{neox_name}.scale"
            if parameter_kind == "weight" and f"{neox_name}.scale" in self.shards
            else f"{neox_name}.{parameter_kind}"
        )

    def _map_layer_weight(
        self, layer_number: int, layer_parameter: str, parameter_kind: str
    ) -> "tuple[list[str], Callable[[list[list[Tensor]]], Tensor]]":
        model = self.config.model
        combine_bias = _sum_shards if model.gpt_j_residual else _average_shards
        if layer_parameter.startswith("input_layernorm."):
            return [self._get_norm_name(f"{layer_number}.input_layernorm", parameter_kind)], _average_shards
        if layer_parameter.startswith("pre_mlp_layernorm."):
            return [self._get_norm_name(f"{layer_number}.post_attention_layernorm", parameter_kind)], _average_shards
        if layer_parameter.startswith("self_attention.linear_qkv."):
            has_grouped_queries = num_kv_heads(model) != model.num_attention_heads
            return [
                f"{layer_number}.attention.query_key_value.{parameter_kind}"
            ], self._join_grouped_qkv if has_grouped_queries else _concat_rows
        if layer_parameter.startswith("self_attention.linear_proj."):
            return [
                f"{layer_number}.attention.dense.{parameter_kind}"
            ], _concat_columns if parameter_kind == "weight" else combine_bias
        if layer_parameter.startswith("mlp.linear_fc1."):
            neox_name = self._select_existing(layer_number, *FC1_NAMES)
            return [f"{neox_name}.{parameter_kind}"], _concat_gate_first if model.activation in GATED else _concat_rows
        if layer_parameter.startswith("mlp.linear_fc2."):
            neox_name = self._select_existing(layer_number, "mlp.dense_4h_to_h", "mlp.linear2")
            return [f"{neox_name}.{parameter_kind}"], _concat_columns if parameter_kind == "weight" else combine_bias
        attention_prefix = "self_attention.core_attention."
        position_parameter = layer_parameter.removeprefix(attention_prefix).removeprefix("position.")
        if layer_parameter.startswith(attention_prefix):
            return self._map_position_weight(layer_number, position_parameter)
        raise RuntimeError(f"no rule for {layer_parameter}")

    def _select_existing(self, layer_number: int, *names: str) -> str:
        """Versions differ in a name."""
        return next(
            (f"{layer_number}.{name}" for name in names if f"{layer_number}.{name}.weight" in self.shards),
            f"{layer_number}.{names[0]}",
        )

    def _join_grouped_qkv(self, shards: "list[list[Tensor]]") -> "Tensor":
        model = self.config.model
        num_local_heads, num_local_kv_heads = (
            model.num_attention_heads // self.num_ranks,
            num_kv_heads(model) // self.num_ranks,
        )
        head_dim = model.hidden_size // model.num_attention_heads
        transform = SeparateQKV(num_local_heads, num_local_kv_heads)
        return _concat_rows(
            [
                [
                    transform.to_megatron(
                        shard.split(
                            [num_local_heads * head_dim, num_local_kv_heads * head_dim, num_local_kv_heads * head_dim]
                        )
                    )
                    for shard in shards[0]
                ]
            ]
        )

    # Positions

    def _list_position_tensors(self, layer_number: int) -> dict[str, str]:
        """What a layer's file holds of positions: the end of each name, without that of its module, and the name."""
        pattern = re.compile(rf"{layer_number}\.attention\.(?!query_key_value|dense|rotary_emb|qk_)\w+\.(.+)")
        matches = ((pattern.fullmatch(name), name) for name in self.shards.names)
        return {match[1]: name for match, name in matches if match and not IGNORED_TENSORS.fullmatch(name)}

    def _map_position_weight(
        self, layer_number: int, parameter: str
    ) -> "tuple[list[str], Callable[[list[list[Tensor]]], Tensor]]":
        encoding, position_tensors = self.config.position.pos_emb, self._list_position_tensors(layer_number)
        if parameter.startswith("processor."):
            module, _, parameter_kind = parameter.removeprefix("processor.").partition(".")
            source = f"mlp2.{ {'hidden': 0, 'output': 2}[module] }.{parameter_kind}"
            join = _to_conv_kernel if parameter_kind == "weight" else _average_shards
        else:
            rules = ENCODING_TENSORS.get(encoding, {})
            if parameter not in rules:
                raise UserError(
                    f"{self.checkpoint}: pos_emb {encoding} cannot be imported from GPT-NeoX's files; of those with "
                    f"weights, {', '.join(sorted(ENCODING_TENSORS))} can"
                )
            source, convert = rules[parameter]
            join = partial(convert, self.config)
        names = source.split(" and ")
        missing = [name for name in names if name not in position_tensors]
        if missing:
            raise RunError(
                f"{self.checkpoint}: layer {layer_number} holds no attention.….{missing[0]}, for {encoding}'s "
                f"{parameter}"
            )
        return [position_tensors[name] for name in names], join


def _cat(tensors: "Sequence[Tensor]", dim: int) -> "Tensor":
    import torch

    return torch.cat(list(tensors), dim) if len(tensors) > 1 else tensors[0]


def _concat_rows(shards: "list[list[Tensor]]") -> "Tensor":
    return _cat(shards[0], 0)


def _concat_columns(shards: "list[list[Tensor]]") -> "Tensor":
    return _cat(shards[0], 1)


def _sum_shards(shards: "list[list[Tensor]]") -> "Tensor":
    return shards[0][0] if len(shards[0]) == 1 else sum(shard.float() for shard in shards[0])  # type: ignore[return-value]


def _average_shards(shards: "list[list[Tensor]]") -> "Tensor":
    first, *others = shards[0]
    return first if all(first.equal(other) for other in others) else _sum_shards(shards) / len(shards[0])


def _concat_gate_first(shards: "list[list[Tensor]]") -> "Tensor":
    halves = [shard.chunk(2) for shard in shards[0]]
    return _cat([gate for _, gate in halves] + [up for up, _ in halves], 0)


def _to_conv_kernel(shards: "list[list[Tensor]]") -> "Tensor":
    """A layer of a perceptron [out, in] is a convolution of size 1, [out, in, 1, 1]."""
    weight = _average_shards(shards)
    return weight if weight.dim() == 4 else weight[:, :, None, None]


def _join_per_head(config: Config, shards: "list[list[Tensor]]") -> "Tensor":
    """[heads of a rank, 1, 1] of each; where every rank holds all heads, one and the same."""
    num_heads = config.model.num_attention_heads
    return (_average_shards(shards) if shards[0][0].shape[0] == num_heads else _concat_rows(shards)).reshape(-1)


def _join_t5_buckets(config: Config, shards: "list[list[Tensor]]") -> "Tensor":
    """T5's table [buckets, heads of a rank], which the module multiplies by the root of the head dimension."""
    model = config.model
    return _cat(shards[0], 1).float() * (model.hidden_size / model.num_attention_heads) ** 0.5


def _convert_replicated(config: Config, shards: "list[list[Tensor]]") -> "Tensor":
    return _average_shards(shards)


def _convert_cope_vectors(config: Config, shards: "list[list[Tensor]]") -> "Tensor":
    """CoPE's table [1, d, positions], whose products with queries are not divided by the root of d there."""
    head_dim = config.model.hidden_size // config.model.num_attention_heads
    return _average_shards(shards)[0].t().float() * head_dim**0.5


def _convert_fire_c(config: Config, shards: "list[list[Tensor]]") -> "Tensor":
    """FIRE computes with the absolute value."""
    return _average_shards(shards).abs().reshape(1)


def _convert_fire_multiplier(config: Config, shards: "list[list[Tensor]]") -> "Tensor":
    """FIRE's threshold is |multiplier · init_L|, ours multiplier · T_train / 2."""
    multiplier, initial_length = (_average_shards([tensor_shards]) for tensor_shards in shards)
    return (multiplier.float() * initial_length.float()).abs().reshape(1) / (config.model.seq_length / 2)


ShardConverter = Callable[[Config, "list[list[Tensor]]"], "Tensor"]
ENCODING_TENSORS: dict[str, dict[str, tuple[str, ShardConverter]]] = {
    "t5": {"bias.value": ("weight", _join_t5_buckets)},
    # The two kernels give the same names to different numbers.
    "kerple_log": {"r1.value": ("bias_p", _join_per_head), "r2.value": ("bias_a", _join_per_head)},
    "kerple_power": {"r1.value": ("bias_a", _join_per_head), "r2.value": ("bias_p", _join_per_head)},
    "gaussian_weight2": {"r1.value": ("wei_a", _join_per_head), "r2.value": ("wei_p", _join_per_head)},
    "kerple_bias_weight": {
        "r1.value": ("bias_a", _join_per_head),
        "r2.value": ("bias_p", _join_per_head),
        "r3.value": ("wei_a", _join_per_head),
        "r4.value": ("wei_p", _join_per_head),
    },
    "fire": {
        "c.value": ("c", _convert_fire_c),
        "multiplier.value": ("L_multiplier and init_L", _convert_fire_multiplier),
        "weight1.value": ("mlp.0.weight", _convert_replicated),
        "bias1.value": ("mlp.0.bias", _convert_replicated),
        "weight2.value": ("mlp.2.weight", _convert_replicated),
        "bias2.value": ("mlp.2.bias", _convert_replicated),
    },
    "cope": {"vectors.value": ("pos_emb", _convert_cope_vectors)},
    "transformer_xl": {
        "u.value": ("r_w_bias", _convert_replicated),
        "v.value": ("r_r_bias", _convert_replicated),
        "project.weight": ("r_net.weight", _convert_replicated),
    },
}
"""For each weight of an encoding of ours, how the name of theirs ends, and how the one is made of the other."""
