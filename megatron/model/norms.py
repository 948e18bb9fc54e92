"""Norms of hidden states, queries and keys, including those that megatron-core's layer lacks."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.distributed.process_groups import ProcessGroups
from megatron.distributed.sharding import all_gather, register_grad_all_reduce
from megatron.model.core_modules import TransformerConfig
from megatron.position.numerics import promote_to_float32


def build_norm(kind: str, size: int, epsilon: float, *, bias: bool = True) -> nn.Module:
    """Build PyTorch's LayerNorm, optionally without bias, or RMSNorm (never with bias) over the last dimension."""
    return nn.RMSNorm(size, eps=epsilon) if kind == "rmsnorm" else nn.LayerNorm(size, eps=epsilon, bias=bias)


class LayerNormWithoutBias:
    """Builder of PyTorch's LayerNorm without bias, called with megatron-core's arguments."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float) -> nn.LayerNorm:  # type: ignore[misc]
        return nn.LayerNorm(hidden_size, eps=eps, bias=False)


class NormOverHeads(nn.Module):
    """Norm of the queries or keys of all heads of a token together, as in OLMo 2: [T, B, h, d] → [T, B, h, d].

    With tensor parallelism each rank holds the weights of its heads, and the means are summed over ranks.
    """

    def __init__(
        self, kind: str, num_heads: int, head_dim: int, epsilon: float, groups: ProcessGroups, *, bias: bool
    ) -> None:
        super().__init__()
        self.groups, self.epsilon, self.size = groups, epsilon, num_heads * head_dim
        size = self.size // groups.mesh.tensor.size
        self.centers = kind == "layernorm"
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if self.centers and bias else None
        for parameter in self.parameters():  # same marks as megatron-core's sharded parameters
            parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, 0, 1  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(2)
        if self.groups.mesh.tensor.size == 1:
            if not self.centers:
                return F.rms_norm(flat, (self.size,), self.weight, self.epsilon).view_as(x)
            return F.layer_norm(flat, (self.size,), self.weight, self.bias, self.epsilon).view_as(x)
        values = promote_to_float32(flat)
        if self.centers:
            values = values - self._compute_mean(values)
        values = values * torch.rsqrt(self._compute_mean(values.square()) + self.epsilon)
        values = values.to(x.dtype) * self.weight
        return (values if self.bias is None else values + self.bias).view_as(x)

    def _compute_mean(self, values: Tensor) -> Tensor:
        """Return the mean over the last dimension of all ranks. Ranks use it differently, so its gradient is summed."""
        sums = all_gather(values.sum(-1, keepdim=True), values.dim() - 1, self.groups, "tensor", reduce_grad=True)
        return sums.sum(-1, keepdim=True) / self.size


def build_qk_norm(
    kind: str, num_heads: int, head_dim: int, epsilon: float, groups: ProcessGroups, *, bias: bool, over_heads: bool
) -> nn.Module:
    """Build the norm of queries or keys [T, B, h, d], over each head or over all heads together.

    A norm over each head has the same weights for all heads. A rank computes the gradients of its own heads, and
    gradients are summed over ranks.
    """
    if over_heads:
        return NormOverHeads(kind, num_heads, head_dim, epsilon, groups, bias=bias)
    norm = build_norm(kind, head_dim, epsilon, bias=bias)
    register_grad_all_reduce(norm, groups)
    return norm
