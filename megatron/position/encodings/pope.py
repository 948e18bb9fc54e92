"""Polar coordinate position embedding: magnitudes carry content, and angles carry position only.

Each of the d elements of a head becomes a point in the plane with radius softplus(x_c) at the angle of its position.
There are d frequencies, where rotary has d/2, and rotated queries and keys have 2d elements. Values keep d elements,
and the scale stays 1/√d.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from megatron.position.bounded_parameter import BoundedParameter, init_constant, init_uniform
from megatron.position.encoding import Encoding
from megatron.position.facts import AttentionDims, EncodingCost, OptionError
from megatron.position.numerics import compute_position_angles
from megatron.position.token_range import ALL_HEADS, TokenRange, select_heads

DELTA_STARTS = {"zero": init_constant(0.0), "uniform": init_uniform(-2 * math.pi, 0.0)}


class Pope(Encoding):
    formula = "Σ_c softplus(q_ic)·softplus(k_jc)·cos((j − i)/base^(c/d) + δ_c)/√d, c = 0 … d − 1"
    parameters_summary = "δ [H, d] in [−2π, 0], starts at 0; none without learned_delta"
    source = (
        "PoPE: Gopalakrishnan et al. 2025 (2509.10534), equation of the score with its optional bias δ per frequency; "
        "per head, as in x-transformers"
    )
    advice = (
        "Use it instead of rotary: its authors report lower perplexities for 124 to 774 million parameters, and "
        "extrapolation without changes to the model. Queries and keys need twice the memory, also in the cache, and "
        "kernels twice the head dimension. As with rotary, the theorems on biases in Exploring Transformer "
        "Extrapolation do not apply, because it has no bias."
    )
    other_names = ("polar", "polar_pos_emb", "polar_coordinate")
    rotates_alike = False
    rotates_linearly = False
    cost = EncodingCost(
        num_parameters=lambda dims, options: dims.num_heads * dims.head_dim if options["learned_delta"] else 0,
        qk_width=2,
        num_rotation_tables=lambda options: 3 if options["learned_delta"] else 0,
        keeps_unrotated=True,
    )

    def __init__(
        self, dims: AttentionDims, *, base: float = 10000.0, learned_delta: bool = True, delta_init: str = "zero"
    ) -> None:
        """
        Args:
            base: frequencies are base^(−c/d) of the d elements c; a larger base makes the slowest frequency slower.
            learned_delta: learn a phase δ for each head and element; no phase if false.
            delta_init: start value of δ: `zero`, or `uniform` between −2π and 0.
        """
        super().__init__(dims)
        if base <= 1:
            raise OptionError("base", f"is {base}; it must be greater than 1")
        if delta_init not in DELTA_STARTS:
            raise OptionError("delta_init", f"is {delta_init!r}; choose from {', '.join(DELTA_STARTS)}")
        self.base = base
        shape = (dims.num_heads, dims.head_dim)
        self.delta = BoundedParameter(shape, DELTA_STARTS[delta_init], -2 * math.pi, 0.0) if learned_delta else None

    def rotate(self, x: Tensor, tokens: TokenRange, heads: slice = ALL_HEADS) -> Tensor:
        # Queries carry δ, because heads that share keys may have different phases.
        return self._rotate(x, tokens, None if self.delta is None else select_heads(self.delta(), heads))

    def rotate_keys(self, x: Tensor, tokens: TokenRange, heads: slice = ALL_HEADS) -> Tensor:
        return self._rotate(x, tokens, None)

    def _rotate(self, x: Tensor, tokens: TokenRange, delta: Tensor | None) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        # Reduce modulo 2π in float64, so that adding to it in float32 keeps its precision.
        angle = compute_position_angles(tokens.positions(x.device), self.dims.head_dim, self.base).remainder(
            2 * math.pi
        )
        turned = angle.to(dtype) if delta is None else angle.to(dtype) - delta[:, None]
        # Products of 2d elements are divided by √(2d): compensate by √2 for the scale 1/√d, half on each side.
        root = 2**0.25
        result: Tensor = _PolarRotation.apply(x, root * turned.cos(), root * turned.sin())
        return result


class _PolarRotation(torch.autograd.Function):
    """[softplus(x)·cos, softplus(x)·sin] of x [B, H, T, d] and cos, sin [T, d] or [H, T, d], as [B, H, T, 2d].

    Saves only x for the backward pass, where autograd would save float32 intermediates.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(x, cos, sin)
        magnitude = softplus(x.to(cos.dtype))
        return torch.cat([magnitude * cos, magnitude * sin], dim=-1).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, cos, sin = ctx.saved_tensors
        by_cos, by_sin = grad.to(cos.dtype).chunk(2, dim=-1)
        x_float = x.to(cos.dtype)
        dx = ((by_cos * cos + by_sin * sin) * x_float.sigmoid()).to(x.dtype)
        if not (ctx.needs_input_grad[1] or ctx.needs_input_grad[2]):
            return dx, None, None
        magnitude = softplus(x_float)
        return dx, (by_cos * magnitude).sum(0), (by_sin * magnitude).sum(0)
