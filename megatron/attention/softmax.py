"""Attention weights from the logits of a row: a softmax, alone or with a sink, or stick-breaking.

| softmax_type   | weight of key j for row i                        | a row's weights add up to       |
|----------------|--------------------------------------------------|---------------------------------|
| vanilla        | exp(x_ij) / Σ_l exp(x_il)                        | 1                               |
| off-by-one     | exp(x_ij) / (1 + Σ_l exp(x_il))                  | less than 1                     |
| learnable      | exp(x_ij) / (exp(s_h) + Σ_l exp(x_il))           | less than 1                     |
| stick-breaking | σ(x_ij) · Π_{j<l<i} (1 − σ(x_il)) for j < i      | less than 1; 0 in the first row |

stick-breaking-remainder is stick-breaking whose row's own token, j = i, gets what the others leave, so that weights add
up to 1.

A sink is a logit beside those of a row's keys that has no value: what falls to it is attention to nothing. Rows that
find nothing to attend to need no first token to put their weight on. Sources: off-by-one, Miller 2023 (Attention is off
by one); learnable, one for each head, OpenAI's gpt-oss (2025); both under megatron-core's names. Stick-breaking: Tan et
al. 2024 (2410.17980, equations 2 and 3): going back from the row's own token, which is not attended to itself, each key
takes its share of what those after it have left. The paper's equations drop the remainder. The tests of its authors'
code add it to the output, times the row's own value.

Whatever makes logits (encoding, window, documents, soft cap, temperature, score processor) knows nothing of this, and
a cache needs nothing for it.

B batch, H heads of the model, h requested heads, R query rows, C key columns.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.position.numerics import promote_to_float32


class SoftmaxSink(nn.Module):
    """The sinks of a layer's heads. A learned one starts at 0, where off-by-one has it for good.

    Args:
        num_heads: H.
        learned: whether they are parameters.
    """

    def __init__(self, num_heads: int, *, learned: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.logits = nn.Parameter(torch.zeros(num_heads)) if learned else None

    def forward(self, like: Tensor) -> Tensor:
        """The sinks, float32 [H], on the device of a tensor.

        It is no parameter itself, which ZeRO 3 takes away after this call.
        """
        if self.logits is None:
            return like.new_zeros(self.num_heads, dtype=torch.promote_types(like.dtype, torch.float32))
        return promote_to_float32(self.logits) + 0.0


def build_softmax_sink(softmax_type: str, num_heads: int) -> SoftmaxSink | None:
    """The sinks of a layer with a `softmax_type`; None if it has none."""
    if softmax_type == "vanilla" or softmax_type.startswith("stick-breaking"):
        return None
    return SoftmaxSink(num_heads, learned=softmax_type == "learnable")


def append_sink(logits: Tensor, sinks: Tensor) -> Tensor:
    """Logits [B, h, R, C] with sinks [h] as one more column."""
    column = sinks.to(logits.dtype).view(-1, 1, 1).expand(*logits.shape[:3], 1)
    return torch.cat([logits, column], dim=-1)


def compute_softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """The weights of keys [B, h, R, C] from masked logits; with sinks [h] of a row that sees no key all are 0."""
    if sinks is None:
        return torch.softmax(logits, dim=-1)
    return torch.softmax(append_sink(logits, sinks), dim=-1)[..., :-1]


def break_sticks(logits: Tensor, own: Tensor | None = None) -> Tensor:
    """The weights [B, h, R, C] of stick-breaking from logits that are −∞ where a row may not attend.

    With log σ(x) = x − log(1 + eˣ) and log(1 − σ(x)) = −log(1 + eˣ) a weight is exp(x_ij − Σ_{l≥j} log(1 + exp(x_il))):
    no factor can vanish before it is multiplied, and a key that is hidden takes log(1 + 0) = 0. The sum runs from the
    last column back, and hidden columns after a row's own add exact zeros, so that no row depends on what follows it.

    own: bool [B, h, R, C], the rows' own keys, whose logits are −∞. Their weight is exp(−Σ log(1 + eˣ)).
    """
    taken = F.softplus(logits, threshold=40.0)  # beyond, x is exact to float64
    sums = taken.flip(-1).cumsum(-1).flip(-1)
    weights = torch.exp(logits - sums)
    return weights if own is None else torch.where(own, torch.exp(-sums[..., :1]), weights)
