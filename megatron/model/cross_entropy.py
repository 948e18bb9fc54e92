"""Cross entropy of tokens from hidden states, over a vocabulary that tensor-parallel ranks may divide.

The logits of long sequences do not fit in memory at once: `chunked_cross_entropy` computes them in chunks of tokens and
again in the backward pass. Shapes: B batch, T sequence, D hidden size, V logits of a rank.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from megatron.distributed.process_groups import ProcessGroups
from megatron.distributed.sharding import all_gather
from megatron.model.core_modules import TransformerConfig, vocab_parallel_cross_entropy
from megatron.model.layer import recompute_in_backward
from megatron.model.layer_config import can_compile, compile_region, compute_log_z
from megatron.options.model import compute_loss_chunk_length
from megatron.position.numerics import soft_cap


@dataclass(frozen=True)
class CrossEntropy:
    """Cross entropy of tokens, compiled if the device allows it."""

    compute_logits: Callable[[Tensor], Tensor]
    """Function from hidden states [T, B, D] to the logits of this rank's vocabulary shard [T, B, V]."""
    config: TransformerConfig
    groups: ProcessGroups
    softcap: float | None
    """Bound of the logits (`numerics.soft_cap`), or None."""

    def compute_losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of each token, float32 [B, T], from hidden states [T, B, D]."""
        if can_compile(self.config, hidden):
            return self._compute_compiled(hidden, labels)[0]
        return self._compute_cross_entropy(soft_cap(self.compute_logits(hidden).float(), self.softcap), labels)

    def compute_losses_and_log_z(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss and log Z of each token, [2, B, T]. Log Z is the sum of the loss and the label's logit."""
        if can_compile(self.config, hidden):
            return torch.stack(self._compute_compiled(hidden, labels))
        logits = soft_cap(self.compute_logits(hidden).float(), self.softcap)
        of_labels = select_label_logits(logits, labels, self.groups)  # first, because the loss may overwrite the logits
        losses = self._compute_cross_entropy(logits, labels)
        return torch.stack([losses, losses + of_labels])

    def _compute_compiled(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return losses and log Z, float32 [B, T]. The logits stay in their own data type."""
        logits, tensor = self.compute_logits(hidden), self.groups.mesh.tensor
        first = tensor.index * logits.shape[-1]
        log_z, of_labels = compile_region(compute_log_z)(logits, labels, first, self.softcap)
        if tensor.size > 1:
            own = torch.stack([log_z, of_labels])[None]
            parts = all_gather(own, 0, self.groups, "tensor", reduce_grad=False)
            log_z, of_labels = parts[:, 0].logsumexp(0), parts[:, 1].sum(0)
        return log_z - of_labels, log_z

    def _compute_cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of each token [B, T] from this rank's logits [T, B, V] in float32."""
        if self.groups.mesh.tensor.size > 1:
            return vocab_parallel_cross_entropy(logits, labels.t().contiguous()).t()
        flat = rearrange(logits, "t b v -> (t b) v")
        losses = F.cross_entropy(flat, rearrange(labels, "b t -> (t b)"), reduction="none")
        return rearrange(losses, "(t b) -> b t", b=labels.shape[0])


def select_label_logits(logits: Tensor, labels: Tensor, groups: ProcessGroups) -> Tensor:
    """Return the logit of each token's label [B, T] from each rank's logits [T, B, V].

    All ranks use the result identically, so its gradient is not summed. `gather` is not used, because it would save the
    logits for its backward pass.
    """
    size = logits.shape[-1]
    index = labels.t().flatten() - groups.mesh.tensor.index * size
    is_local = (index >= 0) & (index < size)
    found = logits.flatten(0, 1)[torch.arange(len(index), device=index.device), index.clamp(0, size - 1)]
    found = torch.where(is_local, found, 0.0)
    parts = all_gather(found[:, None], 1, groups, "tensor", reduce_grad=False)
    return parts.sum(1).unflatten(0, logits.shape[:2]).t()


def chunked_cross_entropy(
    compute_losses: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, labels: Tensor, vocabulary: int, max_logits: int
) -> Tensor:
    """Compute losses in chunks of tokens whose logits are recomputed in the backward pass.

    All tokens are computed at once if their logits number at most `max_logits`.

    Args:
        compute_losses: function from hidden states [t, B, D] and labels [B, t] to float32 [B, t], or several such,
            [n, B, t].
        hidden: [T, B, D].
        labels: [B, T].
        vocabulary: logits per token.
        max_logits: maximum number of logits in memory; a chunk has at least one position of the batch.

    Returns:
        float32 [B, T] or [n, B, T].
    """
    step = compute_loss_chunk_length(hidden.shape[0], hidden.shape[1], vocabulary, max_logits)
    if step == hidden.shape[0]:
        return compute_losses(hidden, labels)
    blocks = zip(hidden.split(step), labels.split(step, dim=1), strict=True)
    return torch.cat([recompute_in_backward(compute_losses, *block, draws=False) for block in blocks], dim=-1)


def gather_vocabulary(logits: Tensor, groups: ProcessGroups) -> Tensor:
    """Gather logits over the whole vocabulary from each rank's shard, along the last dimension.

    All ranks use the result identically, so its gradient is not summed.
    """
    return all_gather(logits, logits.dim() - 1, groups, "tensor", reduce_grad=False)
