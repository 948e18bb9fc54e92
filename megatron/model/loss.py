"""The loss of each token, without the logits of all tokens at once where these would be too many.

T tokens of a sequence, B batch, D hidden size, V vocabulary, of which a rank may hold a part.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.distributed.collectives import all_gather
from megatron.distributed.process_groups import ProcessGroups
from megatron.options.model import count_scored_at_once


def chunked_cross_entropy(
    losses_of: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, labels: Tensor, vocabulary: int, max_logits: int
) -> Tensor:
    """Losses of some tokens at a time, whose logits are computed again in the backward pass; of all at once where their
    logits are no more than `max_logits`.

    Args:
        losses_of: from hidden states [t, B, D] and labels [B, t] to float32 [B, t].
        hidden: [T, B, D].
        labels: [B, T].
        vocabulary: logits of a token.
        max_logits: logits to hold at once; those of one position of the batch are held whatever it says.

    Returns:
        float32 [B, T].
    """
    step = count_scored_at_once(hidden.shape[0], hidden.shape[1], vocabulary, max_logits)
    if step == hidden.shape[0]:
        return losses_of(hidden, labels)
    pieces = zip(hidden.split(step), labels.split(step, dim=1), strict=True)
    return torch.cat([checkpoint(losses_of, *piece, use_reentrant=False) for piece in pieces], dim=1)


def gather_vocabulary(logits: Tensor, groups: ProcessGroups) -> Tensor:
    """Logits over the whole vocabulary from each rank's part, along the last dimension; all ranks go on alike."""
    return all_gather(logits, logits.dim() - 1, groups, "tensor", reduce_grad=False)
