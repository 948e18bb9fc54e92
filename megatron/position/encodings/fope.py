"""Fourier position embedding: each pair is rotated by a sum of the frequencies that complete a period in training."""

import math

import torch
from torch import Tensor

from megatron.position.encoding import Encoding
from megatron.position.facts import AttentionDims, EncodingCost, OptionError
from megatron.position.numerics import compute_rotary_frequencies, rotate_halves
from megatron.position.token_range import ALL_HEADS, TokenRange, select_heads

_SEED_STEP = 1_000_003
"""Difference between the seeds of neighboring layers."""


class Fope(Encoding):
    formula = (
        "(F_i q_i)·(F_j k_j)/√d, F_n maps the pair m by [C, −S; S, C], C = Σ_ω a_mω·cos(ωn), S = Σ_ω b_mω·sin(ωn), "
        "over ω = base^(−2m/d) ≥ 2π/L; pairs of smaller ω are unchanged"
    )
    source = (
        "Fourier Position Embedding: Hua et al. 2024 (2412.17739, ICML 2025). As in its released code, a and b are 1 "
        "for a pair's own ω and 0 otherwise, plus fixed random numbers from N(0, σ²) for each head, with σ = "
        "gain·√(2/(M·(M + H))) for M pairs. `released` follows that code further: at most d/4 pairs are rotated, and "
        "every layer draws its own weights (pos_emb_per_layer: true). The other pairs are multiplied by [1, −1; 1, 1], "
        "although the paper's ω = 0 rotates nothing"
    )
    advice = (
        "Use it instead of rotary beyond the training length. Its authors attribute RoPE's failure there to "
        "frequencies that complete no full period in training, and to layers that mix frequencies. They use a gain of "
        "0.3 for 60 million parameters, and of 0.4 for 180 million. It is not relative: shifting all positions changes "
        "the scores slightly. The theorems on biases in Exploring Transformer Extrapolation do not apply, because it "
        "has no bias."
    )
    other_names = ("fourier", "fourier_position_embedding")
    relative = False
    rotates_alike = False
    cost = EncodingCost(num_rotation_tables=lambda options: 4)

    def __init__(
        self,
        dims: AttentionDims,
        *,
        base: float = 10000.0,
        original_length: int | None = None,
        gain: float = 0.3,
        seed: int = 0,
        released: bool = False,
    ) -> None:
        """
        Args:
            base: frequencies are base^(−2m/d) of the pairs m; a larger base makes the slowest pair slower.
            original_length: L; pairs that complete less than one period within it are not rotated; the training length
                if null.
            gain: size of the random weights of the other frequencies.
            seed: seed of these weights, which are drawn once and not trained.
            released: compute what the released code trains: at most d/4 pairs are rotated, by all frequencies; the
                others are multiplied by [1, −1; 1, 1]; and layers with their own encoding draw their own weights.
        """
        super().__init__(dims)
        if dims.head_dim % 2:
            raise ValueError(f"fope rotates pairs of dimensions; a head has {dims.head_dim}, an odd number")
        for name, value, least in (("base", base, 1), ("original_length", original_length, 0)):
            if value is not None and value <= least:
                raise OptionError(name, f"is {value}; it must be greater than {least}")
        if gain < 0 or seed < 0:
            raise OptionError("gain" if gain < 0 else "seed", "must not be negative")
        self.base, self.num_pairs = base, dims.head_dim // 2
        slowest = 2 * math.pi / (dims.train_length if original_length is None else original_length)
        self.num_frequencies = sum(base ** (-m / self.num_pairs) >= slowest for m in range(self.num_pairs))
        self.num_rotated = min(self.num_frequencies, dims.head_dim // 4) if released else self.num_frequencies
        self.layer = dims.layer if released else 0
        self.still_sine = 1.0 if released else 0.0
        if not self.num_rotated:
            raise OptionError("original_length", f"is {original_length}; no pair would rotate; use pos_emb none")
        self.gain, self.seed = gain, seed

    def rotate(self, x: Tensor, tokens: TokenRange, heads: slice = ALL_HEADS) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.no_grad():
            frequencies = compute_rotary_frequencies(self.num_pairs, self.base, x.device)[: self.num_frequencies]
            angle = tokens.positions(x.device).double()[:, None] * frequencies
            by_cos, by_sin = (select_heads(each, heads).to(x.device, dtype) for each in self.compute_coefficients())
            cos, sin = angle.cos().to(dtype) @ by_cos, angle.sin().to(dtype) @ by_sin  # [H, T, M]
            still = (0, self.num_pairs - self.num_rotated)
            cos = torch.nn.functional.pad(cos, still, value=1.0)
            sin = torch.nn.functional.pad(sin, still, value=self.still_sine)
            turns = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        return rotate_halves(x, *turns)

    def compute_coefficients(self) -> tuple[Tensor, Tensor]:
        """Return a and b, float32 [H, F, M]: the weight of each frequency (dim 1) in each pair (dim 2).

        They are determined by the option seed (with released also by the layer) and not stored in checkpoints.
        """
        heads, size, pairs = self.dims.num_heads, self.num_frequencies, self.num_rotated
        generator = torch.Generator().manual_seed(self.seed + _SEED_STEP * self.layer)
        deviation = self.gain * math.sqrt(2 / (pairs * (size + heads)))
        step = -(-size // pairs)  # step from one pair's own frequency to the next pair's; pairs past the last have none
        with torch.device("cpu"):
            noise = torch.randn((2, heads, size, pairs), generator=generator, dtype=torch.float32)
            own = torch.zeros(size, pairs)
            own[::step, : -(-size // step)] = torch.eye(-(-size // step))
            by_cos, by_sin = own + deviation * noise
        return by_cos, by_sin
