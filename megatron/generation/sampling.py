"""Choosing the next token from logits. B rows, V padded vocabulary, v tokens of the tokenizer.

The rows of the output layer beyond the tokenizer's vocabulary are padding, and are never chosen. Probabilities are
float64, so that a draw is the same wherever the logits are the same.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.utils.errors import RunError


@dataclass(frozen=True)
class TokenSampler:
    """How the next token is drawn: `temperature` first, then `top_k`, then `top_p` of what is left of the probability.

    Args:
        vocabulary: tokens of the tokenizer, v.
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: only so many tokens, the likeliest, are drawn from; 0 for all.
        top_p: only the fewest likeliest tokens are drawn from whose probabilities add up to at least this; 1 for all.
    """

    vocabulary: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def probabilities(self, logits: Tensor) -> Tensor:
        """What is drawn from: logits [B, V] → float64 [B, v]; the temperature must not be 0. RunError for NaN."""
        scores = self._known(logits).double()
        scores = (scores - scores.amax(-1, keepdim=True)) / self.temperature  # before dividing: 1e-300 is a temperature
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        if 0 < self.top_k < self.vocabulary:
            ordered[:, self.top_k :] = -torch.inf
        kept = ordered.softmax(-1)
        if self.top_p < 1:
            before = kept.cumsum(-1) - kept  # the sum of all likelier ones
            kept = kept.masked_fill(before >= self.top_p, 0.0)
            kept /= kept.sum(-1, keepdim=True)
        return torch.zeros_like(kept).scatter_(-1, order, kept)

    def choose(self, logits: Tensor, draws: Tensor) -> Tensor:
        """The next token of each row.

        Args:
            logits: [B, V].
            draws: float64 [B] in [0, 1), one number drawn for each row; greedy choices do not look at them.

        Returns:
            int64 [B], each less than v.

        Raises:
            RunError: a logit is no number.
        """
        if self.temperature == 0:
            return self._known(logits).argmax(-1)
        sums = self.probabilities(logits).cumsum(-1)
        # The first token whose sum is greater; rounding must not lead past the last one that has a probability.
        most = torch.nextafter(sums[:, -1], torch.zeros_like(sums[:, -1]))
        sought = torch.minimum(draws.to(sums.device) * sums[:, -1], most)
        return torch.searchsorted(sums, sought[:, None], right=True)[:, 0]

    def _known(self, logits: Tensor) -> Tensor:
        known = logits[:, : self.vocabulary]
        if known.isnan().any():
            raise RunError("the model's logits are not numbers; its weights or its precision cannot do this")
        return known
