"""GPT in plain PyTorch, independent of megatron-core and Farfield: the reference of tests and benchmarks.

It is written in the straightforward way: nn.Linear, scaled_dot_product_attention without a bias, explicit matrices with
one, and DAPE V2's appendix module as printed for CDAPE.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Rotation(nn.Module):
    """Rotary position embedding over the whole head dimension, with precomputed tables."""

    def __init__(self, dim: int, length: int) -> None:
        super().__init__()
        angle = torch.outer(torch.arange(length).double(), 10000.0 ** (-torch.arange(0, dim, 2).double() / dim))
        self.register_buffer("cos", angle.cos().float().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angle.sin().float().repeat(1, 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        length = x.shape[-2]
        return x * self.cos[:length] + torch.cat([-second, first], dim=-1) * self.sin[:length]


class Kerple(nn.Module):
    """Bias −r1·log(1 + r2·n) as a matrix [H, T, T]."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.r1 = nn.Parameter(torch.rand(heads, 1, 1) * 2)
        self.r2 = nn.Parameter(torch.rand(heads, 1, 1))

    def forward(self, length: int) -> Tensor:
        i = torch.arange(length, device=self.r1.device)
        n = (i[:, None] - i[None, :]).clamp(min=0)
        return -self.r1.clamp(min=1e-2) * torch.log(1 + self.r2.clamp(min=1e-2) * n)


class AppendixCdape(nn.Module):
    """Module of DAPE V2's appendix N, which adds to scores and bias."""

    def __init__(self, heads: int, width: int, kernel_size: int) -> None:
        super().__init__()
        pad = (0, kernel_size // 2)
        self.mlp = nn.Sequential(
            nn.Conv2d(2 * heads, width, (1, kernel_size), padding=pad),
            nn.LeakyReLU(),
            nn.Conv2d(width, heads, (1, kernel_size), padding=pad),
        )

    def forward(self, scores: Tensor, bias: Tensor) -> Tensor:
        both = torch.cat([scores, bias.expand(scores.shape[0], -1, -1, -1)], dim=1)
        return scores + bias + self.mlp(torch.tril(both))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, length: int, method: str, cdape_width: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.rotation = Rotation(width // heads, length) if method == "rotary" else None
        self.cdape = AppendixCdape(heads, cdape_width, 3) if method == "cdape" else None

    def attention(self, x: Tensor, bias: Tensor | None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.rotation is not None:
            q, k = self.rotation(q), self.rotation(k)
        if bias is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            logits = scores + bias if self.cdape is None else self.cdape(scores, bias)
            future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            out = logits.masked_fill(future, float("-inf")).softmax(-1) @ v
        return self.proj(out.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        x = x + self.attention(self.norm1(x), bias)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PlainGPT(nn.Module):
    """Decoder with tied embeddings.

    Args:
        method: none, rotary, kerple_log, or cdape (k = 3, on kerple_log).
    """

    def __init__(
        self, layers: int, width: int, heads: int, length: int, vocabulary: int, method: str, cdape_width: int = 32
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, 0, 0.02)
        self.kerple = Kerple(heads) if method in ("kerple_log", "cdape") else None
        self.blocks = nn.ModuleList(Block(width, heads, length, method, cdape_width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [B, T, V]."""
        x = self.embedding(tokens)
        bias = None if self.kerple is None else self.kerple(tokens.shape[1])
        for block in self.blocks:
            x = block(x, bias)
        return self.norm(x) @ self.embedding.weight.t()
