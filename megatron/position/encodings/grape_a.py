"""GRAPE-A: a penalty that grows with the distance at a rate computed from the key, or from the query and the key.

    −n · ω_h · (softplus(u_h·k_j/√d) + softplus(v_h·q_i/√d)),   ω_h = m_h · softplus(w_h)

This is ALiBi with content-dependent slopes. It needs queries and keys, so it is a contextual term, added to the scores.

The formula is equation 4.6 of the paper, in which ω is any nonnegative number. The released code and its comment
disagree (the comment omits √d); both √d here are the paper's. ALiBi's slopes m_h in ω, which let heads start apart, and
vectors u and v of length 1 (`normalize: true`) come only from the code.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.position.bounded_parameter import BoundedParameter, init_constant, init_normal
from megatron.position.encoding import Encoding
from megatron.position.encodings.alibi import cache_slopes
from megatron.position.facts import AttentionDims, EncodingCost, OptionError
from megatron.position.numerics import promote_to_float32
from megatron.position.token_range import TokenRange

GATES = ("key", "query_key")


class GrapeA(Encoding):
    formula = "q_i·k_j/√d − n·ω_h·softplus(u_h·k_j/√d), with gates: query_key also − n·ω_h·softplus(v_h·q_i/√d)"
    parameters_summary = "w [H] such that ω = omega_init·m, m ALiBi's slopes; u, v [H, d] ~ N(0, 1/d)"
    source = "GRAPE: Zhang et al. 2025, arXiv:2512.07805, equation 4.6"
    advice = (
        "For comparison with alibi, which it equals if the gates are constant, and with fox (arXiv:2512.07805, section "
        "4). Its slopes depend on the keys of a layer, so give each layer its own (pos_emb_per_layer: true)."
    )
    other_names = ("grape", "additive_grape")
    cost = EncodingCost(
        num_parameters=lambda dims, options: (
            dims.num_heads * (1 + dims.head_dim * (2 if options["gates"] == "query_key" else 1))
        ),
        saved_bytes_per_score=lambda options: 4,  # the distances
        promotes_keys=True,
        num_products=lambda options, num_keys: 2 if options["gates"] == "query_key" else 1,
    )

    def __init__(
        self, dims: AttentionDims, *, gates: str = "key", normalize: bool = False, omega_init: float = 1.0
    ) -> None:
        """
        Args:
            gates: inputs of the penalty's rate: `key`, or `query_key` for both.
            normalize: normalize u and v to length 1.
            omega_init: start value of ω, as a multiple of the head's ALiBi slope.
        """
        super().__init__(dims)
        if gates not in GATES:
            raise OptionError("gates", f"is {gates!r}; choose from {', '.join(GATES)}")
        if not omega_init > 0:
            raise OptionError("omega_init", f"is {omega_init}; it must be greater than 0")
        self.normalize = normalize
        start, init = math.log(math.expm1(omega_init)), init_normal(dims.head_dim**-0.5)
        self.omega = BoundedParameter((dims.num_heads,), init_constant(start))
        self.u = BoundedParameter((dims.num_heads, dims.head_dim), init)
        self.v = BoundedParameter((dims.num_heads, dims.head_dim), init) if gates == "query_key" else None

    def list_growing_fan_ins(self) -> list[tuple[nn.Parameter, Literal["hidden", "heads"]]]:
        return []  # the sums are over the head dimension, which does not grow

    def _compute_rates(self, x: Tensor, parameter: BoundedParameter, heads: slice) -> Tensor:
        """Return gates of queries or keys [B, h, T, d] times the rates of their heads: float32 [B, h, T]."""
        vector = parameter()[heads]
        if self.normalize:
            vector = vector * torch.rsqrt((vector * vector).sum(-1, keepdim=True))
        slope = cache_slopes(self.dims.num_heads, vector.dtype, x.device)[heads]
        logits = torch.matmul(promote_to_float32(x), vector[..., None])[..., 0] * self.dims.head_dim**-0.5
        return F.softplus(logits) * (slope * F.softplus(self.omega()[heads]))[:, None]

    def contextual(
        self, q: Tensor, k: Tensor, scores: Tensor, query: TokenRange, key: TokenRange, heads: slice
    ) -> Tensor:
        distance = query.positions(q.device)[:, None] - key.positions(q.device)[None, :]
        distance = distance.clamp_(min=0).to(torch.promote_types(q.dtype, torch.float32))
        terms = distance * -self._compute_rates(k, self.u, heads)[..., None, :]
        if self.v is not None:
            terms = terms - distance * self._compute_rates(q, self.v, heads)[..., None]
        return terms
