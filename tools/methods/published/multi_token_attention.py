"""Original code of Multi-Token Attention: its convolutions and its mixing of heads."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from megatron.position.processors.mta import Mta
from tools.methods.comparison import HEADS, WIDTH, AttentionComparison, build_gpt, copy_attention, load_module
from tools.methods.published.x_transformers import draw_projections

REPOSITORY = "facebookresearch/RAM"
NOTES = """\
Multi-Token Attention's forward pass requires a GPU, so the rows call its functions in its order.
Its kernels and head mixing matrices start as the identity. Ours store the difference from the identity, so the rows
subtract it, except with `absolute`, which stores the same values.
"""
MISSING = ("lingua", "lingua.transformer", "xformers", "xformers.ops")
"""Modules that its file imports but its convolutions do not use."""


@torch.no_grad()
def list_comparisons(clone: Path) -> Iterator[AttentionComparison]:
    """Yield comparisons of one attention layer."""
    stem = "mta_transformer"
    module = load_module(clone / "projects" / "mta" / f"{stem}.py", missing=MISSING)
    plain = {"query_kernel_size": 6, "key_kernel_size": 11, "head_kernel_size": 2}
    second = {"weights_query_kernel_size": 6, "weights_key_kernel_size": 11, "mixes_scores": True}
    for title, options in (
        ("mta, 6 × 11, heads in pairs, norm", plain),
        ("mta, 6 × 11 before and after the softmax, all heads", {**plain, **second, "head_kernel_size": HEADS}),
        ("mta, the same, absolute", {**plain, **second, "head_kernel_size": HEADS, "absolute": True}),
    ):
        ours = build_gpt(pos_emb="none", score_processor="mta", score_processor_options=options)
        projections = draw_projections()
        copy_attention(ours, *projections)
        processor = ours.decoder.layers[0].self_attention.core_attention.processor
        generator = torch.Generator().manual_seed(7)
        for parameter in processor.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        call = build_attention(module, processor, *projections)
        yield AttentionComparison(f"{title}: facebookresearch/RAM's {stem}.py, one layer", ours, call)


def build_attention(
    module: object, processor: Mta, q: Tensor, k: Tensor, v: Tensor, output: Tensor
) -> Callable[[Tensor], Tensor]:
    """Build its attention, in the order of its forward pass, with a processor's parameters in its own format."""
    theirs = module.Attention  # type: ignore[attr-defined]
    size = processor.weight_heads.weight.shape[1]
    attention = SimpleNamespace(n_heads=HEADS, pad_key="both", head_kernel_size=size)
    added = 0.0 if processor.absolute else 1.0
    attention.head_kernel = processor.weight_heads.weight.mT + added * torch.eye(size)
    norm = SimpleNamespace(weight=processor.norm.weight, layer_norm=True, layer_id=torch.tensor(0), eps=1e-5)
    norm._norm = lambda x: module.RMSNorm._norm(norm, x)  # type: ignore[attr-defined]

    def convolve(scores: Tensor, mask: Tensor, kernel: Tensor) -> Tensor:
        kernel = kernel[:, None].clone()
        kernel[:, :, -1, kernel.shape[-1] // 2] += added
        return theirs._mta_convolution(attention, scores=scores, mask=mask, chunk_start_ids=None, kernel=kernel)

    def attend(x: Tensor) -> Tensor:
        heads = [(x @ weight.T).unflatten(2, (HEADS, -1)).transpose(1, 2) for weight in (q, k, v)]
        batch, length = x.shape[:2]
        mask = torch.full((length, length), -math.inf).triu(1).repeat(batch, HEADS, 1, 1)
        scores = heads[0] @ heads[1].transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        scores = convolve(scores, mask, processor.scores.weight)
        if processor.score_heads is not None:
            matrix = processor.score_heads.weight[0] + added * torch.eye(HEADS)
            scores = torch.nn.functional.linear(scores.transpose(1, -1), matrix).transpose(1, -1)
        weights = (scores + mask).softmax(-1)
        if processor.weights is not None:
            weights = convolve(weights, mask, processor.weights.weight)
            weights = torch.where(mask == -math.inf, 0.0, weights)
        weights = theirs._head_convolution(attention, scores=weights, bsz=batch, seq_len=length)
        normed = module.RMSNorm.forward(norm, (weights @ heads[2]).transpose(1, 2))  # type: ignore[attr-defined]
        return normed.flatten(2) @ output.T

    return attend
