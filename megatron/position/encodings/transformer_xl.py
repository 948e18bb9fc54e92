"""Transformer-XL's relative positions: the query is multiplied by the key and by a projected sinusoid of the distance.

Each of the two products has its own learned vector (u, v), which is added to the query. The score (q + u)·k/√d + (q +
v)·W_R·R_n/√d is q·k/√d plus contextual terms.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.position.bounded_parameter import BoundedParameter, init_normal, init_uniform
from megatron.position.encoding import Encoding
from megatron.position.facts import AttentionDims, EncodingCost, OptionError
from megatron.position.numerics import compute_sinusoidal_embeddings
from megatron.position.token_range import TokenRange, count_distances


class PositionProjection(nn.Module):
    """Projection W_R without a bias, applied to sinusoids or, transposed, to queries.

    It does not use nn.Linear. Tools that replace linear layers by layers that add to their outputs (peft's
    `all-linear`) would break the transposed use.
    """

    def __init__(self, inputs: int, outputs: int, init: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.init = init
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.weight)  # only to keep the random state of earlier versions
        with torch.no_grad():
            self.init(self.weight)

    def forward(self, x: Tensor, heads: slice | None = None) -> Tensor:
        """Project sinusoids R_n [N, D] → W_R R_n [N, H·d].

        With given heads, project queries q [B, h, R, d] → W_Rᵀ q [B, h, R, D].
        """
        if heads is None:
            return F.linear(x, self.weight)
        return torch.matmul(x, self.weight.view(-1, x.shape[-1], self.weight.shape[1])[heads])


class TransformerXL(Encoding):
    formula = "((q_i + u)·k_j + (q_i + v)·W_R R_n)/√d, R_n = [sin(n/base^(2m/D)); cos(n/base^(2m/D))]"
    parameters_summary = "u, v [H, d] ~ N(0, std²); W_R [H·d, D] ~ N(0, std²), or U(−1/√D, 1/√D) with linear_init"
    source = (
        "Transformer-XL: Dai et al. 2019, section 3.3; start values of its released code, which shares u and v over "
        "layers. linear_init is the initialization of W_R in DAPE's module"
    )
    advice = (
        "For comparison with other encodings that depend on the content: at 64 times the training length its "
        "perplexity is 41.1, compared with 90.7 for cope and 25.0 for dape on kerple_log (DAPE V2, table 9)."
    )
    other_names = ("txl", "trxl", "xl")
    takes_real_positions = False  # sinusoids are computed once for each integer distance
    cost = EncodingCost(
        num_parameters=lambda dims, options: dims.num_heads * dims.head_dim * (dims.hidden_size + 2),
        num_saved_maps=1,
        saved_bytes_per_score=lambda options: 8,
        num_products=lambda options, num_keys: num_keys,  # (q + v)·W_R R; u·k is linear in T
    )

    def __init__(
        self, dims: AttentionDims, *, base: float = 10000.0, std: float = 0.02, linear_init: bool = False
    ) -> None:
        """
        Args:
            base: frequencies are base^(−2m/D) of the vectors R_n.
            std: standard deviation of the initial normal distribution of u, v and W_R.
            linear_init: initialize W_R like the weight of torch.nn.Linear, uniformly between ±1/√D.
        """
        super().__init__(dims)
        if dims.hidden_size % 2:
            raise ValueError(f"transformer_xl needs an even hidden_size, not {dims.hidden_size}")
        if base <= 1:
            raise OptionError("base", f"is {base}; it must be greater than 1")
        self.base = base
        self.u = BoundedParameter((dims.num_heads, dims.head_dim), init_normal(std))
        self.v = BoundedParameter((dims.num_heads, dims.head_dim), init_normal(std))
        bound = 1 / math.sqrt(dims.hidden_size)
        init = init_uniform(-bound, bound) if linear_init else init_normal(std)
        self.project = PositionProjection(dims.hidden_size, dims.num_heads * dims.head_dim, init)
        self._table: Tensor | None = None

    def list_growing_fan_ins(self) -> list[tuple[nn.Parameter, Literal["hidden", "heads"]]]:
        return [(self.project.weight, "hidden")]

    def list_weights_initialized_by_fan_in(self) -> list[nn.Parameter]:
        return [self.project.weight] if self.option_values["linear_init"] else []

    def _get_sinusoids(self, count: int, like: Tensor) -> Tensor:
        """Return R_0 … R_{count−1}, [count, D], cached and recomputed when more are needed.

        A decoding step needs one more than the previous step, a row block more than the block above it, and every
        layer needs the same.
        """
        table = self._table
        if table is None or len(table) < count or table.dtype != like.dtype or table.device != like.device:
            with torch.inference_mode(False):  # allows a training step after an evaluation
                distances = torch.arange(1 << (count - 1).bit_length(), device=like.device)
                table = self._table = compute_sinusoidal_embeddings(
                    distances, self.dims.hidden_size, self.base, like.dtype
                )
        return table[:count]

    def _multiply_by_distance(self, q: Tensor, count: int, heads: slice) -> Tensor:
        """Return q·W_R R_n of queries [B, h, R, d] for n < count: [B, h, R, count].

        Projects the cheaper side: a few rows to the space of the sinusoids, or all sinusoids to the space of the
        queries.
        """
        rows, dim, width = q.shape[0] * q.shape[2], self.dims.head_dim, self.dims.hidden_size
        table = self._get_sinusoids(count, q)
        if rows * width * (dim + count) < count * dim * (width + rows):
            return torch.matmul(self.project(q, heads), table.t())
        projected = self.project(table).view(-1, self.dims.num_heads, dim).permute(1, 2, 0)[heads]  # [h, d, N]
        return torch.matmul(q, projected)

    def contextual(
        self, q: Tensor, k: Tensor, scores: Tensor, query: TokenRange, key: TokenRange, heads: slice
    ) -> Tensor:
        u, v = (p()[heads].to(q.dtype)[:, None] for p in (self.u, self.v))
        by_distance = self._multiply_by_distance(q + v, count_distances(query, key), heads)
        distance = query.positions(q.device)[:, None] - key.positions(q.device)[None, :]
        index = distance.clamp_(min=0).expand(*by_distance.shape[:3], -1)
        return (torch.matmul(u, k.transpose(-1, -2)) + by_distance.gather(-1, index)) * self.dims.head_dim**-0.5
