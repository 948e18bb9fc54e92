"""Transformer-XL's relative positions: the query meets the key and, projected, a sinusoid of the distance.

Each of the two products has a learned vector (u, v) of its own, which is added to the query. The score
(q + u)·k/√d + (q + v)·W_R·R_n/√d is q·k/√d plus contextual terms.
"""

import torch
from torch import Tensor, nn

from ..angles import angles
from ..encoding import Encoding
from ..parameters import Bounded, normal
from ..shape import Shape, Span, distance_count


class TransformerXL(Encoding):
    formula = "((q_i + u)·k_j + (q_i + v)·W_R R_n)/√d, R_n = [sin(n/base^(2m/D)); cos(n/base^(2m/D))]"
    parameters_text = "u, v [H, d] ~ N(0, std²); W_R [H·d, D] ~ N(0, std²)"
    source = "Transformer-XL: Dai et al. 2019, section 3.3"
    advice = (
        "For comparison with other encodings that look at the context: at 64 times the training length its perplexity "
        "is 41.1, that of cope 90.7 and that of dape on kerple_log 25.0 (DAPE V2, table 9)."
    )

    def __init__(self, shape: Shape, *, base: float = 10000.0, std: float = 0.02) -> None:
        super().__init__(shape)
        if shape.hidden_size % 2:
            raise ValueError(f"transformer_xl needs an even hidden_size, not {shape.hidden_size}")
        if base <= 1:
            raise ValueError(f"option base of transformer_xl is {base}; it must be greater than 1")
        self.base = base
        self.u = Bounded((shape.num_heads, shape.head_dim), normal(std))
        self.v = Bounded((shape.num_heads, shape.head_dim), normal(std))
        self.project = nn.Linear(shape.hidden_size, shape.num_heads * shape.head_dim, bias=False)
        normal(std)(self.project.weight)

    def contextual(self, q: Tensor, k: Tensor, scores: Tensor, query: Span, key: Span, heads: slice) -> Tensor:
        dim = self.shape.head_dim
        half = self.shape.hidden_size // 2
        angle = angles(torch.arange(distance_count(query, key), device=q.device), half, self.base)
        sinusoids = torch.cat([angle.sin(), angle.cos()], dim=-1).to(q.dtype)
        r = self.project(sinusoids).view(-1, self.shape.num_heads, dim).permute(1, 2, 0)[heads]  # [h, d, N]
        u, v = (p()[heads].to(q.dtype)[:, None] for p in (self.u, self.v))
        by_distance = torch.matmul(q + v, r)  # [B, h, R, N]
        distance = query.positions(q.device)[:, None] - key.positions(q.device)[None, :]
        index = distance.clamp_(min=0).expand(*by_distance.shape[:3], -1)
        return (torch.matmul(u, k.transpose(-1, -2)) + by_distance.gather(-1, index)) * dim**-0.5

    def contextual_flops(self, scores: float) -> float:
        return 2.0 * self.shape.num_heads * self.shape.head_dim * scores  # (q + v)·W_R R; u·k is linear in T
