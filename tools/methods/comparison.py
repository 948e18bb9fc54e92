"""Comparison of a published model with ours: same random weights, difference of logits.

H heads, d head dimension, D hidden size.
"""

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron.distributed.process_groups import build_single_process_groups
from megatron.model.build import build_model
from megatron.model.gpt import GPT
from megatron.options.model import ModelOptions
from megatron.options.position import PositionOptions

LAYERS, WIDTH, HEADS, VOCABULARY, END = 3, 48, 4, 96, 95
LAYER_NAMES = {  # BAM's names, based on Meta's Llama; transformers' names
    "bam": ("layers.{}.", "attention.wq attention.wk attention.wv attention.wo feed_forward.w1 feed_forward.w3 "
            "feed_forward.w2 attention_norm ffn_norm", "tok_embeddings norm output"),
    "transformers": ("model.layers.{}.", "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj "
                     "feed_forward.gate_proj feed_forward.up_proj feed_forward.down_proj input_layernorm "
                     "post_attention_layernorm", "model.embed_tokens model.norm lm_head"),
}  # fmt: skip


class Comparison(Protocol):
    """Published computation and its counterpart in this project."""

    title: str

    def measure(self, length: int) -> float:
        """Return the largest difference at a length in float32, relative to the largest value."""


@dataclass(frozen=True)
class ModelComparison:
    """Published model, and ours with its weights."""

    title: str
    ours: GPT
    call: Callable[[Tensor, Tensor | None], Tensor]
    """Logits of the published model for tokens, and for document numbers if it masks documents."""
    documents: bool = False

    @torch.no_grad()
    def measure(self, length: int) -> float:
        """Return the largest difference of any logit."""
        tokens = torch.randint(0, END, (2, length), generator=torch.Generator().manual_seed(length))
        codes = None
        if self.documents:
            tokens[:, length // 3 :: 17] = END
            codes = torch.nn.functional.pad((tokens == END).cumsum(1)[:, :-1], (1, 0))
        self.ours.end_of_document = END if self.documents else None
        return compare_tensors(self.ours(tokens), self.call(tokens, codes))


@dataclass(frozen=True)
class AttentionComparison:
    """Published attention, and the attention of our first layer, both with projections."""

    title: str
    ours: GPT
    call: Callable[[Tensor], Tensor]
    """Published output [B, T, D] for the layer's input [B, T, D]."""

    @torch.no_grad()
    def measure(self, length: int) -> float:
        """Return the largest difference of any element of the output."""
        x = torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(length))
        ours, _ = self.ours.decoder.layers[0].self_attention(x.transpose(0, 1))
        return compare_tensors(ours.transpose(0, 1), self.call(x))


@torch.no_grad()
def copy_attention(ours: GPT, q: Tensor, k: Tensor, v: Tensor, output: Tensor) -> None:
    """Copy the published projections [D, D] into our first layer."""
    attention = ours.decoder.layers[0].self_attention
    attention.linear_qkv.weight.copy_(torch.cat([x.unflatten(0, (HEADS, -1)) for x in (q, k, v)], 1).flatten(0, 1))
    attention.linear_proj.weight.copy_(output)


def compare_tensors(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of any element, relative to the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def build_gpt(sizes: Mapping[str, Any] | None = None, **position: Any) -> GPT:
    """Build a Llama-style model with our attention. `sizes` are further configuration keys of the model."""
    model = ModelOptions(
        num_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS, seq_length=64, norm="rmsnorm",
        activation="swiglu", intermediate_size=3 * WIDTH, mlp_multiple_of=1, no_weight_tying=True,
        use_bias_in_attn_linear=False, use_bias_in_mlp=False, make_vocab_size_divisible_by=VOCABULARY,
        rms_norm_epsilon=1e-5, **(sizes or {}),
    )  # fmt: skip
    return build_model(
        model, PositionOptions(**position), VOCABULARY, groups=build_single_process_groups(), seed=1
    ).eval()


@torch.no_grad()
def copy_weights(ours: GPT, theirs: nn.Module, kind: str, *, adjacent_pairs: bool = False) -> None:
    """Initialize the published model with random weights and copy them into ours.

    Args:
        adjacent_pairs: True if the published rotation pairs elements 2c and 2c + 1 of a head; ours pairs c and c + d/2.
    """
    generator = torch.Generator().manual_seed(7)
    for name, parameter in theirs.named_parameters():
        if parameter.dim() == 2:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)  # attention is not uniform
        elif "seq_scale" not in name:
            parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
        else:
            parameter.copy_(0.2 + torch.rand(parameter.shape, generator=generator))
    prefix, names, ends = LAYER_NAMES[kind]
    weights = dict(theirs.named_parameters())
    for index, layer in enumerate(ours.decoder.layers):
        own = [weights[f"{prefix.format(index)}{name}.weight"] for name in names.split()]
        q, k, v, output, gate, up, down, first_norm, second_norm = own
        heads = [x.unflatten(0, (HEADS, -1)) for x in (q, k, v)]
        if adjacent_pairs:
            heads[:2] = [x.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2) for x in heads[:2]]
        attention, mlp = layer.self_attention, layer.mlp
        attention.linear_qkv.weight.copy_(torch.cat(heads, 1).flatten(0, 1))
        attention.linear_proj.weight.copy_(output)
        mlp.linear_fc1.weight.copy_(torch.cat([gate, up]))
        mlp.linear_fc2.weight.copy_(down)
        layer.input_layernorm.weight.copy_(first_norm)
        layer.pre_mlp_layernorm.weight.copy_(second_norm)
        scale = weights.get(f"{prefix.format(index)}attention.seq_scale")
        for parameter in (
            ()
            if scale is None
            else (attention.core_attention.temperature or attention.core_attention.processor).parameters()
        ):
            parameter.copy_(scale.flatten())
    embedding, norm, head = (weights[f"{name}.weight"] for name in ends.split())
    ours.embedding.word_embeddings.weight.copy_(embedding)
    ours.decoder.final_layernorm.weight.copy_(norm)
    ours.output_layer.weight.copy_(head)


class PackageStub(ModuleType):
    """Replacement of a package that a published file imports but the compared code does not use.

    Each of its names is a class that does nothing.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **options: None})


def load_module(path: Path, *, missing: Sequence[str] = (), package: str | None = None) -> ModuleType:
    """Load a single file of a clone.

    Args:
        path: path of the file.
        missing: modules that the comparison does not need (`PackageStub`).
        package: package of the file's relative imports, as named in `missing`.
    """
    name = f"published_{path.stem}" if package is None else f"{package}.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    stood_in = {each: PackageStub(each) for each in ([] if package is None else [package]) + list(missing)}
    before = {each: sys.modules.get(each) for each in stood_in}
    sys.modules.update(stood_in)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    finally:
        for each, found in before.items():
            if found is None:
                del sys.modules[each]
            else:
                sys.modules[each] = found
    return module


def pair_adjacent_numbers(weight: Tensor) -> Tensor:
    """Reorder a projection [D, D] whose heads rotate elements 2c and 2c + 1 together.

    Ours pair c and c + d/2.
    """
    return weight.unflatten(0, (HEADS, -1, 2)).transpose(1, 2).flatten(0, 2)
