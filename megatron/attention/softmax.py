"""Attention weights from the logits of a row: a softmax with or without a sink, or stick-breaking.

| softmax_type             | weight of key j for row i                       | sum of a row's weights          |
|--------------------------|-------------------------------------------------|---------------------------------|
| vanilla                  | exp(x_ij) / Σ_l exp(x_il)                       | 1                               |
| off-by-one               | exp(x_ij) / (1 + Σ_l exp(x_il))                 | less than 1                     |
| learnable                | exp(x_ij) / (exp(s_h) + Σ_l exp(x_il))          | less than 1                     |
| stick-breaking           | σ(x_ij) · Π_{j<l<i} (1 − σ(x_il)) for j < i     | less than 1; 0 in the first row |
| stick-breaking-remainder | the same for j < i, and the remainder for j = i | 1                               |

A sink is an additional logit of a row without a value: its weight attends to nothing. Rows without relevant keys then
need not attend to the first token. Sources: off-by-one, Miller 2023 (Attention is off by one); learnable, one per head,
OpenAI's gpt-oss (2025); both with megatron-core's names. Stick-breaking: Tan et al. 2024 (2410.17980, equations 2 and
3): going back from the row's own token, which does not attend to itself, each key takes its share of what later keys
have left. The paper's equations drop the remainder. The tests of its authors' code add it to the output, times the
row's own value.

Encodings, windows, documents, soft cap, temperature and score processor do not depend on the softmax type, and neither
does a cache.

B batch, H heads of the model, h requested heads, R query rows, C key columns.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.position.numerics import promote_to_float32


class SoftmaxSink(nn.Module):
    """Sinks of a layer's heads. A learned sink starts at 0, the fixed value of off-by-one.

    Args:
        num_heads: H.
        learned: True if the sinks are parameters.
    """

    def __init__(self, num_heads: int, *, learned: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.logits = nn.Parameter(torch.zeros(num_heads)) if learned else None

    def forward(self, like: Tensor) -> Tensor:
        """Return the sinks, float32 [H], on the device of a tensor.

        The result is not the parameter itself, which ZeRO-3 frees after this call.
        """
        if self.logits is None:
            return like.new_zeros(self.num_heads, dtype=torch.promote_types(like.dtype, torch.float32))
        return promote_to_float32(self.logits) + 0.0


def build_softmax_sink(softmax_type: str, num_heads: int) -> SoftmaxSink | None:
    """Build the sinks of a layer with a `softmax_type`; None if it has none."""
    if softmax_type == "vanilla" or softmax_type.startswith("stick-breaking"):
        return None
    return SoftmaxSink(num_heads, learned=softmax_type == "learnable")


def append_sink(logits: Tensor, sinks: Tensor) -> Tensor:
    """Append sinks [h] to logits [B, h, R, C] as another column."""
    column = sinks.to(logits.dtype).view(-1, 1, 1).expand(*logits.shape[:3], 1)
    return torch.cat([logits, column], dim=-1)


def compute_softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Compute the weights of keys [B, h, R, C] from masked logits.

    With sinks [h], a row that sees no key has zero weights.
    """
    if sinks is None:
        return torch.softmax(logits, dim=-1)
    return torch.softmax(append_sink(logits, sinks), dim=-1)[..., :-1]


def compute_stick_breaking(logits: Tensor, own: Tensor | None = None) -> Tensor:
    """Compute the weights [B, h, R, C] of stick-breaking from logits that are −∞ for hidden keys.

    With log σ(x) = x − log(1 + eˣ) and log(1 − σ(x)) = −log(1 + eˣ), a weight is exp(x_ij − Σ_{l≥j} log(1 +
    exp(x_il))). So no factor vanishes before it is multiplied, and a hidden key adds log(1 + 0) = 0. The sum runs
    backwards from the last column, and hidden columns after a row's own add exact zeros, so no row depends on later
    columns.

    Args:
        own: bool [B, h, R, C], the rows' own keys, whose logits are −∞. Their weight is exp(−Σ log(1 + eˣ)).
    """
    taken = F.softplus(logits, threshold=40.0)  # beyond the threshold, x is exact in float64
    sums = taken.flip(-1).cumsum(-1).flip(-1)
    weights = torch.exp(logits - sums)
    return weights if own is None else torch.where(own, torch.exp(-sums[..., :1]), weights)
