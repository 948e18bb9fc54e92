"""FoPE's repository: rotation of queries and keys by sums of frequencies."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

from megatron.model.gpt import GPT
from tools.methods.comparison import HEADS, WIDTH, AttentionComparison, build_gpt, copy_attention, load_module
from tools.methods.published.x_transformers import build_attention, draw_projections

REPOSITORY = "TsinghuaC3I/Fourier-Position-Embedding"
NOTES = """\
FoPE draws coefficients for each head and layer, `fope` for each head from an option; the rows use ours in FoPE's
code.
It multiplies the pairs without rotation by [1, −1; 1, 1], because it fills cosines and sines with ones, which doubles
their products. It also limits such sums to a fourth of the head dimension. `released: true` does both.
Without this option these pairs are unchanged, as for ω = 0. The row scales our projections of them by √2, and at most
a fourth of the dimension rotates.
"""
PACKAGE = "published_olmo"
MISSING = tuple(f"{PACKAGE}.{name}" for name in ("aliases", "beam_search", "config", "exceptions", "torch_util"))
"""Modules of its package that the rotation does not use."""


@torch.no_grad()
def list_comparisons(clone: Path) -> Iterator[AttentionComparison]:
    """Yield comparisons of one attention layer. Some of its pairs complete a turn within the training length."""
    stem = "model"
    module = load_module(clone / "olmo" / f"{stem}.py", missing=MISSING, package=PACKAGE)
    for released, length in ((False, 64), (True, 64), (True, 100_000)):
        ours, call = _build_pair(module, length, released=released)
        title = f"fope{f', released, L = {length:,}' if released else ''}: FoPE's olmo/{stem}.py, one layer"
        yield AttentionComparison(title, ours, call)


def _build_pair(module: ModuleType, length: int, *, released: bool) -> tuple[GPT, Callable[[Tensor], Tensor]]:
    """Build our model, and its attention with the same coefficients and projections."""
    base = 10_000.0
    config = SimpleNamespace(
        d_model=WIDTH, n_heads=HEADS, fourier_dim=0, fourier=True, fourier_ignore_zero=True,
        fourier_separate_head=True, fourier_separate_basis=True, fourier_learnable=False, fourier_norm=False,
        fourier_init="eye_xavier_norm", fourier_init_norm_gain=0.3, rope_init_distribution="exponential",
        rope_learnable=False, rope_include_neg_freq=False, rope_no_repetition=False, rope_init_floor_freq=0.0,
        rope_init_upper_freq=1.0, rope_clamp_floor_freq=True, rope_floor_freq_ratio=1.0, rope_clamp_floor_to_zero=True,
        rope_clamp_upper_freq=False, rope_zero_freq_ratio=-1.0, rope_clamp_to_linear=False,
        rope_clamp_to_linear_mode="", rope_theta=base, rope_no_pos=False, rope_full_precision=True, len_extra=False,
        max_sequence_length=length, init_device="cpu",
    )  # fmt: skip
    theirs = module.FourierEmbedding(config, {}, prefix="attn", use_rope_cache=False)
    options = {"base": base, "gain": 1.0, "seed": 3, "original_length": length, "released": released}
    ours = build_gpt(pos_emb="fope", pos_emb_options=options)
    kept = theirs.cos_coef.shape[-1]
    by_cos, by_sin = ours.position.compute_coefficients()
    assert ours.position.num_rotated == kept < WIDTH // HEADS // 2
    assert ours.position.num_frequencies == theirs.input_dim
    theirs.cos_coef.copy_(by_cos)
    theirs.sin_coef.copy_(by_sin)

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return theirs(q, q.shape[2]), theirs(k, k.shape[2])

    projections = draw_projections()
    pairs = torch.arange(WIDTH) % (WIDTH // HEADS // 2)
    factors = torch.where((pairs < kept) | torch.tensor(released), 1.0, 2**0.5)[:, None]
    copy_attention(ours, *(x * factors for x in projections[:2]), *projections[2:])
    return ours, build_attention(rotate, *projections)
