"""Table of the weights of GPT-NeoX, KERPLE and DAPE checkpoints, by our names.

Layer 0 is the embedding, layers 2 to L + 1 are the transformer layers, L + 3 is the final norm, and L + 4 is the output
matrix. The shards of several ranks are merged as follows:

| shard                                 | merged tensor                                                               |
|---------------------------------------|-----------------------------------------------------------------------------|
| embedding, output matrix              | concatenated by rows                                                        |
| queries, keys, values                 | concatenated by heads; grouped, each rank has [q; k; v]                     |
| feed-forward, first matrix            | concatenated by rows; gated, ranks have [up; gate], and ours is [gate; up]  |
| attention output, feed-forward second | concatenated by columns; biases are equal, except that with gpt_j_residual  |
|                                       | each rank adds its own before the reduction, so they are summed             |
| norms                                 | mean of values that should be equal                                         |
| kernels and tables of positions       | concatenated by heads                                                       |

KERPLE's modules are in every layer's file although all layers share them; DAPE's differ between layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config.schema import Config
from megatron.conversion.hf_checkpoint import LazyTensors, add_state_dict, load_torch_file
from megatron.conversion.model_family import EMBEDDING_WEIGHT, OUTPUT_WEIGHT, SeparateQKV
from megatron.options.model import GATED_ACTIVATIONS, get_num_kv_heads
from megatron.utils.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor

_LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_RANK_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
IGNORED_TENSORS = re.compile(r".*\b(inv_freq|slopes|masked_bias)|attention\.bias|.*\.cached_\w+|.*\.cache_matrix\w*")
"""Buffers that are recomputed."""

Merge = Callable[[Sequence[Any]], Any]
"""Function that merges the shards of a tensor, in the order of the ranks."""

NEOX_EMBEDDING = "0.word_embeddings.weight"
FC1_NAMES, FC2_NAMES = ("mlp.dense_h_to_4h", "mlp.linear1"), ("mlp.dense_4h_to_h", "mlp.linear2")
"""Names of the two feed-forward matrices in versions of GPT-NeoX."""


class TensorParallelShards:
    """Tensors of each tensor-parallel rank, by layer number and name."""

    def __init__(self, checkpoint: Path) -> None:
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
            raise RunError(
                f"{checkpoint}: contains shards of the ranks {sorted(self.tensors_by_rank)}; some are missing"
            )
        self.names = self.tensors_by_rank[0].names
        for rank, tensors in self.tensors_by_rank.items():
            if unmatched := sorted(set(tensors.names) ^ set(self.names)):
                raise RunError(f"{checkpoint}: rank {rank} and rank 0 differ in {unmatched[0]}; a file is missing")

    @staticmethod
    def _add_file(tensors: LazyTensors, path: Path, prefix: str | None) -> None:
        content = load_torch_file(path, classes=_get_numpy_classes())
        if prefix is None:
            content = content.get("module") if isinstance(content, dict) else None
            if not isinstance(content, dict) or not all(str(name).startswith("sequential.") for name in content):
                raise RunError(f"{path}: contains no GPT-NeoX `module` (sequential.…)")
            content = {name.removeprefix("sequential."): value for name, value in content.items()}
        add_state_dict(tensors, path, content, prefix or "")

    @property
    def num_ranks(self) -> int:
        return len(self.tensors_by_rank)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> list[Tensor]:
        """Return the shards of a tensor, in the order of the ranks. Raises RunError if it does not exist."""
        self.check_name(name)
        return [self.tensors_by_rank[rank][name] for rank in range(self.num_ranks)]

    def check_name(self, name: str) -> None:
        """Raise RunError if there is no tensor with this name."""
        if name not in self.names:
            raise RunError(f"{self.checkpoint}: contains no {name}, which its configuration requires")

    def count_rows(self, name: str) -> int:
        """Return the number of rows of a tensor over all ranks."""
        return sum(shard.shape[0] for shard in self[name])

    def select_module(self, layer_number: int, names: Sequence[str]) -> str:
        """Return the name of a module in a layer's file, given its names in all versions; the first if none exists."""
        modules = [f"{layer_number}.{name}" for name in names]
        return next((module for module in modules if f"{module}.weight" in self), modules[0])

    def find_position_tensors(self, layer_number: int) -> dict[str, str]:
        """Return the position tensors in a layer's file: their names by suffix, without the module's name."""
        pattern = re.compile(rf"{layer_number}\.attention\.(?!query_key_value|dense|rotary_emb|qk_)\w+\.(.+)")
        matches = ((pattern.fullmatch(name), name) for name in self.names)
        return {match[1]: name for match, name in matches if match and not IGNORED_TENSORS.fullmatch(name)}


def _get_numpy_classes() -> list[Any]:
    """Return numpy's random state classes, which DeepSpeed's files contain; none of their code is run."""
    import numpy as np
    from numpy._core.multiarray import _reconstruct

    dtype_classes = {type(np.dtype(dtype_name)) for dtype_name in ("u1", "u4", "u8", "i4", "i8", "f4", "f8")}
    names = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
    return [*((_reconstruct, name) for name in names), np.ndarray, np.dtype, *dtype_classes]


# Merging of shards


def concat_shards(shards: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate shards, by columns if dim is 1."""
    import torch

    return torch.cat(list(shards), dim) if len(shards) > 1 else shards[0]


def sum_shards(shards: Sequence[Tensor]) -> Tensor:
    return shards[0] if len(shards) == 1 else sum(shard.float() for shard in shards)  # type: ignore[return-value]


def average_shards(shards: Sequence[Tensor]) -> Tensor:
    """Average shards that should be equal; return the first if they are."""
    first, *others = shards
    return first if all(first.equal(other) for other in others) else sum_shards(shards) / len(shards)


def concat_gate_up(shards: Sequence[Tensor]) -> Tensor:
    """Convert [up; gate] of each rank to [gate; up]."""
    halves = [shard.chunk(2) for shard in shards]
    return concat_shards([gate for _, gate in halves] + [up for up, _ in halves])


def concat_grouped_qkv(shards: Sequence[Tensor], *, num_heads: int, num_kv_heads: int, head_dim: int) -> Tensor:
    """Convert [q; k; v] of each rank to concatenated groups. The numbers of heads are those of all ranks together."""
    num_local_heads, num_local_kv_heads = num_heads // len(shards), num_kv_heads // len(shards)
    sizes = [heads * head_dim for heads in (num_local_heads, num_local_kv_heads, num_local_kv_heads)]
    transform = SeparateQKV(num_local_heads, num_local_kv_heads)
    return concat_shards([transform.to_megatron(shard.split(sizes)) for shard in shards])


def merge_per_head(shards: Sequence[Tensor], *, num_heads: int) -> Tensor:
    """Merge shards [heads of a rank, …]; if every rank has all heads, the shards should be equal."""
    return average_shards(shards) if shards[0].shape[0] == num_heads else concat_shards(shards)


# Table of weights


@dataclass(frozen=True)
class NeoxWeight:
    """One of our weights, and the GPT-NeoX tensors it is made of."""

    megatron_name: str
    neox_names: tuple[str, ...]
    merge: Merge
    """Merges the shards of a tensor, in the order of the ranks."""
    convert: Callable[..., Tensor] | None = None
    """Computes our weight from the merged tensors; None for a single, unchanged tensor."""


@dataclass(frozen=True)
class PositionWeight:
    """Weight of an encoding or a processor; names are suffixes, without layer and module."""

    suffixes: tuple[str, ...]
    merge: Merge = average_shards
    convert: Callable[..., Tensor] | None = None


def list_neox_weights(config: Config, shards: TensorParallelShards) -> Iterator[NeoxWeight]:
    """Yield every weight that a model may have; biases are listed even if the configuration has none."""
    final_norm_number = config.model.num_layers + 3
    yield NeoxWeight(EMBEDDING_WEIGHT, (NEOX_EMBEDDING,), concat_shards)
    yield NeoxWeight(OUTPUT_WEIGHT, (f"{final_norm_number + 1}.final_linear.weight",), concat_shards)
    yield NeoxWeight("position.vectors.weight", ("0.position_embeddings.weight",), average_shards)
    yield from _list_module(
        "decoder.final_layernorm", f"{final_norm_number}.norm", shards, average_shards, average_shards
    )
    encoding_weights = list_neox_encoding_weights(config).get(config.position.encoding, {})
    if not config.position.pos_emb_per_layer:
        yield from _list_position_weights("position", 2, shards, encoding_weights)
    for layer_idx in range(config.model.num_layers):
        prefix, number = f"decoder.layers.{layer_idx}", layer_idx + 2
        for megatron_name, neox_names, merge_weight, merge_bias in _list_layer_modules(config):
            module = shards.select_module(number, neox_names)
            yield from _list_module(f"{prefix}.{megatron_name}", module, shards, merge_weight, merge_bias)
        attention = f"{prefix}.self_attention.core_attention"
        yield from _list_position_weights(f"{attention}.processor", number, shards, PROCESSOR_WEIGHTS)
        if config.position.pos_emb_per_layer:
            yield from _list_position_weights(f"{attention}.position", number, shards, encoding_weights)


def _list_module(
    megatron_name: str, neox_name: str, shards: TensorParallelShards, merge_weight: Merge, merge_bias: Merge
) -> Iterator[NeoxWeight]:
    """Yield weight and bias of a module; the weight of RMSNorm is named scale."""
    weight = "scale" if f"{neox_name}.scale" in shards else "weight"
    yield NeoxWeight(f"{megatron_name}.weight", (f"{neox_name}.{weight}",), merge_weight)
    yield NeoxWeight(f"{megatron_name}.bias", (f"{neox_name}.bias",), merge_bias)


def _list_layer_modules(config: Config) -> Iterator[tuple[str, tuple[str, ...], Merge, Merge]]:
    """Yield the modules of a layer: our name, GPT-NeoX's names in all versions, and the merge functions."""
    model = config.model
    num_heads, kv_heads = model.num_attention_heads, get_num_kv_heads(model)
    head_dim = model.hidden_size // num_heads
    grouped = partial(concat_grouped_qkv, num_heads=num_heads, num_kv_heads=kv_heads, head_dim=head_dim)
    merge_qkv: Merge = concat_shards if kv_heads == num_heads else grouped
    merge_fc1: Merge = concat_gate_up if model.activation in GATED_ACTIVATIONS else concat_shards
    concat_columns = partial(concat_shards, dim=1)
    merge_bias = sum_shards if model.gpt_j_residual else average_shards
    yield "input_layernorm", ("input_layernorm",), average_shards, average_shards
    yield "pre_mlp_layernorm", ("post_attention_layernorm",), average_shards, average_shards
    yield "self_attention.linear_qkv", ("attention.query_key_value",), merge_qkv, merge_qkv
    yield "self_attention.linear_proj", ("attention.dense",), concat_columns, merge_bias
    yield "mlp.linear_fc1", FC1_NAMES, merge_fc1, merge_fc1
    yield "mlp.linear_fc2", FC2_NAMES, concat_columns, merge_bias


def _list_position_weights(
    prefix: str, layer_number: int, shards: TensorParallelShards, weights: Mapping[str, PositionWeight]
) -> Iterator[NeoxWeight]:
    tensors = shards.find_position_tensors(layer_number)
    for parameter, weight in weights.items():
        names = tuple(tensors.get(suffix, f"{layer_number}.attention.….{suffix}") for suffix in weight.suffixes)
        yield NeoxWeight(f"{prefix}.{parameter}", names, weight.merge, weight.convert)


def _to_conv_kernel(weight: Tensor) -> Tensor:
    """Convert a perceptron layer [out, in] to a convolution of size 1, [out, in, 1, 1]."""
    return weight if weight.dim() == 4 else weight[:, :, None, None]


PROCESSOR_WEIGHTS = {
    "hidden.weight": PositionWeight(("mlp2.0.weight",), convert=_to_conv_kernel),
    "hidden.bias": PositionWeight(("mlp2.0.bias",)),
    "output.weight": PositionWeight(("mlp2.2.weight",), convert=_to_conv_kernel),
    "output.bias": PositionWeight(("mlp2.2.bias",)),
}


def list_neox_encoding_weights(config: Config) -> dict[str, dict[str, PositionWeight]]:
    """Return the weights of each encoding that can be imported."""
    model = config.model
    root_head_dim = (model.hidden_size / model.num_attention_heads) ** 0.5
    options = config.position.pos_emb_options
    # GPT-NeoX does not divide these products by √d; our configuration may.
    t5_scale = 1.0 if options.get("root_scale", False) else root_head_dim
    cope_scale = root_head_dim if options.get("scaled", False) else 1.0

    def per_head(suffix: str) -> PositionWeight:
        merge = partial(merge_per_head, num_heads=model.num_attention_heads)
        return PositionWeight((suffix,), merge, lambda tensor: tensor.reshape(-1))

    return {
        # [buckets, heads of a rank], multiplied by the square root of the head dimension, as with root_scale
        "t5": {
            "bias.value": PositionWeight(
                ("weight",), partial(concat_shards, dim=1), lambda table: table.float() * t5_scale
            )
        },
        # The two kernels use the same names for different values.
        "kerple_log": {"r1.value": per_head("bias_p"), "r2.value": per_head("bias_a")},
        "kerple_power": {"r1.value": per_head("bias_a"), "r2.value": per_head("bias_p")},
        "gaussian_weight2": {"r1.value": per_head("wei_a"), "r2.value": per_head("wei_p")},
        "kerple_bias_weight": {
            "r1.value": per_head("bias_a"),
            "r2.value": per_head("bias_p"),
            "r3.value": per_head("wei_a"),
            "r4.value": per_head("wei_p"),
        },
        "fire": {
            # FIRE uses the absolute value. Its threshold is |multiplier · init_L|; ours is multiplier · T / 2.
            "c.value": PositionWeight(("c",), convert=lambda c: c.abs().reshape(1)),
            "multiplier.value": PositionWeight(
                ("L_multiplier", "init_L"),
                convert=lambda multiplier, initial_length: (
                    (multiplier.float() * initial_length.float()).abs().reshape(1) / (model.seq_length / 2)
                ),
            ),
            "weight1.value": PositionWeight(("mlp.0.weight",)),
            "bias1.value": PositionWeight(("mlp.0.bias",)),
            "weight2.value": PositionWeight(("mlp.2.weight",)),
            "bias2.value": PositionWeight(("mlp.2.bias",)),
        },
        # [1, d, positions]; products with queries are not divided by the square root of d
        "cope": {
            "vectors.value": PositionWeight(("pos_emb",), convert=lambda table: table[0].t().float() * cope_scale)
        },
        "transformer_xl": {
            "u.value": PositionWeight(("r_w_bias",)),
            "v.value": PositionWeight(("r_r_bias",)),
            "project.weight": PositionWeight(("r_net.weight",)),
        },
    }
