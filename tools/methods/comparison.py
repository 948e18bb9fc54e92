"""A published model and ours with the same random weights, by their logits.

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

from megatron.distributed.process_groups import single_process
from megatron.model.build import build_model
from megatron.model.gpt import GPT
from megatron.options.model import ModelOptions
from megatron.options.position import PositionOptions

LAYERS, WIDTH, HEADS, VOCABULARY, END = 3, 48, 4, 96, 95
LAYER_NAMES = {  # BAM's, after Meta's Llama; transformers'
    "bam": ("layers.{}.", "attention.wq attention.wk attention.wv attention.wo feed_forward.w1 feed_forward.w3 "
            "feed_forward.w2 attention_norm ffn_norm", "tok_embeddings norm output"),
    "transformers": ("model.layers.{}.", "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj "
                     "feed_forward.gate_proj feed_forward.up_proj feed_forward.down_proj input_layernorm "
                     "post_attention_layernorm", "model.embed_tokens model.norm lm_head"),
}  # fmt: skip


class Comparison(Protocol):
    """A published computation beside ours."""

    title: str

    def measure(self, length: int) -> float:
        """The largest difference of any number at a length, relative to the largest number, in float32."""


@dataclass(frozen=True)
class ModelComparison:
    """A published model and ours with its weights."""

    title: str
    ours: GPT
    call: Callable[[Tensor, Tensor | None], Tensor]
    """Their logits of tokens, and of document numbers where they keep documents apart."""
    documents: bool = False

    @torch.no_grad()
    def measure(self, length: int) -> float:
        """Of any logit."""
        tokens = torch.randint(0, END, (2, length), generator=torch.Generator().manual_seed(length))
        codes = None
        if self.documents:
            tokens[:, length // 3 :: 17] = END
            codes = torch.nn.functional.pad((tokens == END).cumsum(1)[:, :-1], (1, 0))
        self.ours.end_of_document = END if self.documents else None
        return compare_tensors(self.ours(tokens), self.call(tokens, codes))


@dataclass(frozen=True)
class AttentionComparison:
    """One published attention and that of our first layer, its projections among both."""

    title: str
    ours: GPT
    call: Callable[[Tensor], Tensor]
    """Their output [B, T, D] from the layer's input [B, T, D]."""

    @torch.no_grad()
    def measure(self, length: int) -> float:
        """Of any number of the output."""
        x = torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(length))
        ours, _ = self.ours.decoder.layers[0].self_attention(x.transpose(0, 1))
        return compare_tensors(ours.transpose(0, 1), self.call(x))


@torch.no_grad()
def share_attention(ours: GPT, q: Tensor, k: Tensor, v: Tensor, output: Tensor) -> None:
    """Give our first layer their projections [D, D]."""
    attention = ours.decoder.layers[0].self_attention
    attention.linear_qkv.weight.copy_(torch.cat([x.unflatten(0, (HEADS, -1)) for x in (q, k, v)], 1).flatten(0, 1))
    attention.linear_proj.weight.copy_(output)


def compare_tensors(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of any number, relative to the largest one."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def build_gpt(sizes: Mapping[str, Any] | None = None, **position: Any) -> GPT:
    """Llama's layers with our attention; `sizes` are further keys of the model."""
    model = ModelOptions(
        num_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS, seq_length=64, norm="rmsnorm",
        activation="swiglu", intermediate_size=3 * WIDTH, mlp_multiple_of=1, no_weight_tying=True,
        use_bias_in_attn_linear=False, use_bias_in_mlp=False, make_vocab_size_divisible_by=VOCABULARY,
        rms_norm_epsilon=1e-5, **(sizes or {}),
    )  # fmt: skip
    return build_model(model, PositionOptions(**position), VOCABULARY, groups=single_process(), seed=1).eval()


@torch.no_grad()
def share_weights(ours: GPT, theirs: nn.Module, kind: str, *, adjacent_pairs: bool = False) -> None:
    """Draw their weights and copy them.

    adjacent_pairs: their rotation turns the numbers 2c and 2c + 1 of a head together, where ours turns c and c + d/2.
    """
    generator = torch.Generator().manual_seed(7)
    for name, parameter in theirs.named_parameters():
        if parameter.dim() == 2:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)  # attention is far from uniform
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


class StandIn(ModuleType):
    """A package that a published file imports and that what is compared does not use: each of its names is a class that
    does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **options: None})


def load_module(path: Path, *, missing: Sequence[str] = (), package: str | None = None) -> ModuleType:
    """A file of a clone, by itself.

    Args:
        path: of the file.
        missing: modules that need not be installed for what is compared (`StandIn`).
        package: which its relative imports are of, as `missing` calls it.
    """
    name = f"published_{path.stem}" if package is None else f"{package}.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    stood_in = {each: StandIn(each) for each in ([] if package is None else [package]) + list(missing)}
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
    """A projection [D, D] of heads whose numbers 2c and 2c + 1 turn together, for ours, which turn c and c + d/2."""
    return weight.unflatten(0, (HEADS, -1, 2)).transpose(1, 2).flatten(0, 2)
