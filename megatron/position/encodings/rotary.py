"""Rotary position embedding: queries and keys are rotated by angles proportional to their positions.

The option `scaling` changes the frequencies, or the positions of far keys (`position/rotary_scaling.py`).

With xpos, scores decay with the distance, and faster pairs decay faster. A query at i is multiplied by ζ_m^((i − c)/S)
and a key at j by ζ_m^((c − j)/S), so their product is multiplied by ζ_m^((i − j)/S),

    ζ_m = (2m/r + 0.4)/1.4,    S = xpos_scale_base

as in the released code. c is the middle of the sequence, which keeps the factors within float32's range up to about
68,000 tokens with S = 512, and within float16's up to about 4,500. Longer sequences raise an error. Pairs without a
position under a scaling do not decay.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron.position.encoding import Encoding
from megatron.position.facts import AttentionDims, EncodingCost, OptionError
from megatron.position.numerics import compute_rotary_frequencies, retain_for_capture, rotate_halves
from megatron.position.rotary_scaling import RotaryScaling
from megatron.position.token_range import ALL_HEADS, TokenRange

MAX_CACHED_ROTATIONS = 8
"""Number of token ranges whose cosines and sines an encoding caches.

This suffices for training, evaluation and the two chunks of a rank, also if queries and keys have separate ones.
"""
XPOS_START, XPOS_BITS = 0.4, 8
"""ζ of the fastest pair is 0.4/1.4; XPOS_BITS bits of a type's exponent range are reserved for the queries
themselves."""


class Rotary(Encoding):
    formula = "(R_i q_i)·(R_j k_j)/√d, R_i turns the pair (m, m + r/2) by i/base^(2m/r), r = fraction·d"
    source = (
        "RoFormer: Su et al. 2021, equation 15 (pairs in two halves, in GPT-NeoX's layout). Scalings that stretch the "
        "frequencies, as published models do: linear (Chen et al. 2023), ntk and dynamic (bloc97 and emozilla 2023), "
        "llama3 (Llama 3.1), yarn (Peng et al. 2023), longrope (2402.13753). Scalings that remove positions from slow "
        "pairs: p_rope (Barbero et al. 2024) keeps a share of the fastest pairs, hope (Chen et al. 2024) those with a "
        "full period within original_length. Scalings that move far keys: selfextend (Jin et al. 2024), rerope (Su "
        "2023). xpos: Sun et al. 2022 (2212.10554), the factors of its released code"
    )
    advice = (
        "The usual choice within the training length, and a baseline beyond it: perplexity rises from 4.07 to 86 at "
        "twice that length (DAPE V2, table 2). cdape improves it, and dape makes it worse (DAPE V2, section 4.4)."
    )
    other_names: ClassVar[tuple[str, ...]] = ("rope", "roformer", "rotary_embedding", "rotary_embeddings")
    cost = EncodingCost(
        num_rotations=lambda options: 2 if options["scaling"] in ("selfextend", "rerope") else 1,
        has_cos_sin=lambda options: not options["xpos"] and options["scaling"] not in ("selfextend", "rerope"),
    )

    def __init__(
        self,
        dims: AttentionDims,
        *,
        fraction: float = 1.0,
        base: float = 10000.0,
        scaling: str = "none",
        factor: float | None = None,
        original_length: int | None = None,
        low_freq_factor: float | None = None,
        high_freq_factor: float | None = None,
        beta_fast: float | None = None,
        beta_slow: float | None = None,
        attention_factor: float | None = None,
        share: float | None = None,
        short_factor: list | None = None,
        long_factor: list | None = None,
        group: int | None = None,
        neighbors: int | None = None,
        xpos: bool = False,
        xpos_scale_base: float = 512.0,
    ) -> None:
        """
        Args:
            fraction: share of each head's dimensions that are rotated (GPT-NeoX's `rotary_pct`).
            base: frequencies are base^(−2m/r) of the pairs m; a larger base makes the slowest pair slower.
            scaling: scaling of frequencies or far positions: `none`, `p_rope`, `hope`, `linear`, `ntk`, `dynamic`,
                `llama3`, `yarn`, `longrope`, `selfextend` or `rerope`; the options below, except xpos, belong to some
                of these.
            factor: s, the ratio of the new to the original length (linear, ntk, dynamic, llama3, yarn, longrope).
            original_length: L, the training length of the original model in tokens (hope, dynamic, llama3, yarn,
                longrope).
            low_freq_factor: pairs with fewer periods than this within L are stretched in full (llama3; 1 if null).
            high_freq_factor: pairs with more periods than this within L are unchanged (llama3; 4 if null).
            beta_fast: pairs with more periods than this within L are unchanged (yarn; 32 if null).
            beta_slow: pairs with fewer periods than this within L are stretched in full (yarn; 1 if null).
            attention_factor: factor that multiplies cosines and sines (yarn, longrope); as published if null.
            share: share of the pairs that are rotated, the fastest ones (p_rope).
            short_factor: divisor of each pair's frequency up to L (longrope).
            long_factor: divisor of each pair's frequency beyond L (longrope).
            group: G, the number of far tokens that share one position (selfextend).
            neighbors: w; tokens nearer than this keep their positions (selfextend, rerope).
            xpos: let scores decay with the distance, fastest for fast pairs.
            xpos_scale_base: S, the number of tokens in which the fastest pair decays to ζ = 0.29 of its size (xpos).
        """
        super().__init__(dims)
        if not 0 < fraction <= 1:
            raise OptionError("fraction", f"is {fraction}; it must be in (0, 1]")
        if base <= 1:
            raise OptionError("base", f"is {base}; it must be greater than 1")
        self.base = base
        self.rotated = int(dims.head_dim * fraction)
        if self.rotated < 2 or self.rotated % 2:
            raise ValueError(
                f"rotary rotates {self.rotated} of {dims.head_dim} dimensions (fraction {fraction}); "
                "the number must be even and at least 2"
            )

        if xpos_scale_base <= 0:
            raise OptionError("xpos_scale_base", f"is {xpos_scale_base}; it must be greater than 0")
        if scaling in ("hope", "dynamic") and original_length is None:
            original_length = dims.train_length
        self.scaling = RotaryScaling(
            scaling, factor, original_length, low_freq_factor, high_freq_factor, beta_fast, beta_slow, attention_factor,
            share, short_factor, long_factor, group, neighbors,
        )  # fmt: skip
        self.scaling.check_pairs(self.rotated // 2, base)
        self.depends_on_length = self.scaling.depends_on_length
        self.far_distance = self.scaling.far_distance
        if xpos and self.far_distance is not None:
            raise OptionError("xpos", f"is true, but scaling {scaling} moves far keys, for which xpos defines no decay")
        self.xpos_scale = xpos_scale_base if xpos else None
        self.rotates_alike = not xpos and self.far_distance is None
        if xpos and (reason := self._describe_xpos_overflow(torch.float32, dims.train_length)):
            raise OptionError("xpos_scale_base", f"is {xpos_scale_base:g}: {reason}")
        if scaling == "selfextend":
            self.relative = False  # groups start at position 0
        self._rotations: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def compute_frequencies(self, device: torch.device | str | None = None, length: int = 0) -> Tensor:
        """Return radians per token of each pair, in a sequence of the given length (scaling dynamic): float64 [r/2]."""
        return self.scaling.compute_frequencies(
            compute_rotary_frequencies(self.rotated // 2, self.base, device), self.base, length
        )

    def rotate(self, x: Tensor, tokens: TokenRange, heads: slice = ALL_HEADS) -> Tensor:
        return self._rotate(x, tokens, are_queries=True)

    def rotate_keys(self, x: Tensor, tokens: TokenRange, heads: slice = ALL_HEADS) -> Tensor:
        return self._rotate(x, tokens, are_queries=False)

    def get_cos_sin(self, like: Tensor, tokens: TokenRange) -> tuple[Tensor, Tensor] | None:
        return self._compute_cos_sin(like, tokens, are_queries=True) if self.rotates_alike else None

    def _rotate(self, x: Tensor, tokens: TokenRange, *, are_queries: bool) -> Tensor:
        if self.xpos_scale is not None and (reason := self._describe_xpos_overflow(x.dtype, tokens.position_bound)):
            raise OptionError("xpos_scale_base", f"is {self.xpos_scale:g}: {reason}")
        near = rotate_halves(x, *self._compute_cos_sin(x, tokens, are_queries))
        if self.far_distance is None:
            return near
        return torch.cat([near, rotate_halves(x, *self._compute_cos_sin(x, tokens, are_queries, are_far=True))], dim=-1)

    def _compute_cos_sin(
        self, x: Tensor, tokens: TokenRange, are_queries: bool, are_far: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin [T, r] of each dimension's angle, with negative sines in the first half.

        The last few results are cached, because all layers of a step and all steps of a run use the same ones.
        """
        dtype = torch.promote_types(x.dtype, torch.float32)
        key = (tokens, x.device, dtype, are_queries or self.rotates_alike, are_far)
        cos_sin = self._rotations.get(key)
        if cos_sin is None:
            # Training may use the cached tensors later, so they must not be inference tensors.
            with torch.inference_mode(False), torch.no_grad():
                cos_sin = self._compute_rotations(tokens, x.device, dtype, are_queries, are_far)
            if len(self._rotations) >= MAX_CACHED_ROTATIONS:
                del self._rotations[next(iter(self._rotations))]
            self._rotations[key] = cos_sin
        retain_for_capture(*cos_sin)
        return cos_sin

    def _compute_rotations(
        self, tokens: TokenRange, device: torch.device, dtype: torch.dtype, are_queries: bool, are_far: bool
    ) -> tuple[Tensor, Tensor]:
        # Use float64, because at position 65,536 a float32 angle is already off by 0.004 rad.
        positions = tokens.positions(device).double()
        frequencies = self.compute_frequencies(device, tokens.known_length)
        rotation_positions = (
            self.scaling.map_far_positions(positions, are_queries=are_queries) if are_far else positions
        )
        angle = rotation_positions[:, None] * frequencies
        amplitude: float | Tensor = self.scaling.amplitude
        if self.xpos_scale is not None:
            steps = (positions - tokens.position_bound // 2) / self.xpos_scale
            decay = steps[:, None] * self._compute_xpos_logarithms(frequencies)
            amplitude = amplitude * (decay if are_queries else -decay).exp()
        cos, sin = ((amplitude * turn).to(dtype) for turn in (angle.cos(), angle.sin()))
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)

    @staticmethod
    def _compute_xpos_logarithms(frequencies: Tensor) -> Tensor:
        """Return ln ζ of each pair, float64 [r/2]."""
        share = torch.arange(len(frequencies), dtype=torch.float64, device=frequencies.device) / len(frequencies)
        return torch.where(frequencies > 0, ((share + XPOS_START) / (1 + XPOS_START)).log(), 0.0)

    def describe_unsupported_length(self, num_positions: int) -> str | None:
        if self.xpos_scale is None:
            return None
        return self._describe_xpos_overflow(torch.float32, num_positions)

    def _describe_xpos_overflow(self, dtype: torch.dtype, num_tokens: int) -> str | None:
        """Explain why a type cannot represent the factors for this many tokens; None if it can."""
        assert self.xpos_scale is not None
        bits = math.log2((1 + XPOS_START) / XPOS_START) * (num_tokens / 2) / self.xpos_scale
        if bits <= math.log2(torch.finfo(dtype).max) - XPOS_BITS:
            return None
        name = str(dtype).removeprefix("torch.")
        return f"queries and keys of {num_tokens:,} tokens are scaled by up to 2^{bits:.0f}, which exceeds {name}"

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the cached cosines and sines from copies and from stored modules."""
        return {**super().__getstate__(), "_rotations": {}}
