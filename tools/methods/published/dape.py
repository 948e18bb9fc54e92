"""DAPE's repository: the encodings compared in its tables, and DAPE and CDAPE applied to them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from tools.methods.comparison import HEADS, WIDTH, AttentionComparison, build_gpt, copy_attention, load_module
from tools.methods.published.x_transformers import draw_projections

REPOSITORY = "chuanyang-Zheng/DAPE"
NOTES = """\
DAPE's modules receive scores, or queries and keys, from its attention.
Its convolutions see the right edge of their matrix, so the rows of CDAPE use one extra token, which is dropped.
"""
HEAD_DIM, LENGTH = WIDTH // HEADS, 64
_CDAPE = {"score_processor": "cdape", "score_processor_options": {"width": 32, "kernel_size": 3}}
_DAPE = {"score_processor": "dape", "score_processor_options": {"width": 32}}
_LEAKY = {"pos_emb_options": {"activation": "leaky_relu"}}


@torch.no_grad()
def list_comparisons(clone: Path) -> Iterator[AttentionComparison]:
    """Yield comparisons of one attention layer."""
    stem = "positional_embeddings"
    module = load_module(clone / "megatron" / "model" / f"{stem}.py")
    for name, method, keys, reads_logits in (
        ("AliBi", "alibi", {}, True),
        ("AliBi_C", "alibi", _DAPE, True),
        ("Alibi_DAPEV2", "alibi", _CDAPE, True),
        ("ParallelKerpleLog", "kerple_log", {}, True),
        ("ParallelKerpleLog_C", "kerple_log", _DAPE, True),
        ("Kerple_DAPEV2", "kerple_log", _CDAPE, True),
        ("FIRE", "fire", {}, True),
        ("FIRE_C", "fire", {**_LEAKY, **_DAPE}, True),
        ("FIRE_DAPEV2", "fire", {**_LEAKY, **_CDAPE}, True),
        ("CoPE", "cope", {}, False),
        ("RelativePositionalEncodingLayer", "transformer_xl", {"pos_emb_options": {"linear_init": True}}, False),
    ):
        theirs = _build_theirs(module, name)
        ours = build_gpt(pos_emb=method, pos_emb_per_layer=True, **keys)
        attention = ours.decoder.layers[0].self_attention.core_attention
        _share_position(method, attention.position, theirs)
        if keys.get("score_processor"):
            first, _, second = theirs.mlp2
            for convolution, layer in ((attention.processor.hidden, first), (attention.processor.output, second)):
                convolution.weight.copy_(layer.weight.view_as(convolution.weight))
                convolution.bias.copy_(layer.bias)
        projections = draw_projections()
        copy_attention(ours, *projections)
        title = f"{method}{', ' + keys['score_processor'] if 'score_processor' in keys else ''}"
        call = _build_attention(theirs, *projections, reads_logits=reads_logits)
        yield AttentionComparison(f"{title}: DAPE's {name}, one layer", ours, call)


def _build_theirs(module: ModuleType, name: str) -> nn.Module:
    """Build one of its modules with random parameters; kernel parameters are positive."""
    options = SimpleNamespace(
        num_attention_heads=HEADS, mlp_width=32, dapev2_kernel=3, noise_seq_length=LENGTH, pos_emb="kerple",
        params_dtype=torch.float32,
    )  # fmt: skip
    arguments: dict[str, Any] = {
        "AliBi": {"num_heads": HEADS, "mp_rank": 0},
        "AliBi_C": {"num_heads": HEADS, "mp_rank": 0},
        "Alibi_DAPEV2": {"num_heads": HEADS, "mp_rank": 0, "neox_args": options},
        "ParallelKerpleLog": {"neox_args": options},
        "ParallelKerpleLog_C": {"neox_args": options, "layer_number": 0},
        "Kerple_DAPEV2": {"neox_args": options, "layer_number": 0},
        "FIRE": {"num_heads": HEADS, "init_L": LENGTH},
        "FIRE_C": {"num_heads": HEADS, "init_L": LENGTH},
        "FIRE_DAPEV2": {"num_heads": HEADS, "init_L": LENGTH, "neox_args": options},
        "CoPE": {"npos_max": 64, "head_dim": HEAD_DIM},
        "RelativePositionalEncodingLayer": {
            "num_heads": HEADS, "num_hiddens": HEAD_DIM, "scale_factor": HEAD_DIM**-0.5, "train_length": LENGTH,
        },
    }  # fmt: skip
    with mock.patch("torch.cuda.current_device", return_value="cpu"):
        theirs: nn.Module = getattr(module, name)(**arguments[name]).eval()
    generator = torch.Generator().manual_seed(7)
    for parameter_name, parameter in theirs.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter_name in ("c", "L_multiplier") or parameter_name.startswith("bias_"):
            parameter.add_(0.1 * noise.abs())
        elif parameter_name != "init_L":
            parameter.add_(0.2 * noise)
    return theirs


def _share_position(method: str, position: Any, theirs: Any) -> None:
    """Copy its parameters into our encoding."""
    pairs: dict[str, Callable[[], list[tuple[Tensor, Tensor]]]] = {
        "alibi": lambda: [],
        "kerple_log": lambda: [(position.r1.value, theirs.bias_p), (position.r2.value, theirs.bias_a)],
        "fire": lambda: [
            (position.c.value, theirs.c), (position.multiplier.value, theirs.L_multiplier),
            (position.weight1.value, theirs.mlp[0].weight), (position.bias1.value, theirs.mlp[0].bias),
            (position.weight2.value, theirs.mlp[2].weight), (position.bias2.value, theirs.mlp[2].bias),
        ],
        "cope": lambda: [(position.vectors.value, theirs.pos_emb[0].T)],
        "transformer_xl": lambda: [
            (position.u.value, theirs.r_w_bias), (position.v.value, theirs.r_r_bias),
            (position.project.weight, theirs.r_net.weight),
        ],
    }  # fmt: skip
    for ours, own in pairs[method]():
        ours.copy_(own.reshape(ours.shape))


def _build_attention(
    theirs: nn.Module, q: Tensor, k: Tensor, v: Tensor, output: Tensor, *, reads_logits: bool
) -> Callable[[Tensor], Tensor]:
    """Build plain attention with projections [D, D] whose logits come from its module."""

    def attend(x: Tensor) -> Tensor:
        x = torch.nn.functional.pad(x, (0, 0, 0, 1))  # one extra token, beyond the rows that see the right edge
        heads = [(x @ weight.T).unflatten(2, (HEADS, -1)) for weight in (q, k, v)]
        by_head = [each.transpose(1, 2) for each in heads]
        scores = by_head[0] @ by_head[1].transpose(-1, -2) * HEAD_DIM**-0.5
        if reads_logits:
            logits = theirs(scores)
        elif hasattr(theirs, "pos_emb") and hasattr(theirs, "npos_max"):
            logits = theirs(by_head[0], scores)
        else:
            logits = theirs(heads[0].transpose(0, 1), heads[1].transpose(0, 1))
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        weights = logits.masked_fill(hidden, float("-inf")).softmax(-1)
        return ((weights @ by_head[2]).transpose(1, 2).flatten(2) @ output.T)[:, :-1]

    return attend
