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
        vocab_size: tokens of the tokenizer, v.
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: only so many tokens, the likeliest, are drawn from; 0 for all.
        top_p: only the fewest likeliest tokens are drawn from whose probabilities add up to at least this; 1 for all.
    """

    vocab_size: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def probabilities(self, logits: Tensor) -> Tensor:
        """The sampled distribution: logits [B, V] → float64 [B, v]; the temperature must not be 0. RunError for NaN."""
        scores = self._drop_padding(logits).double()
        scores = (scores - scores.amax(-1, keepdim=True)) / self.temperature  # before dividing: 1e-300 is a temperature
        sorted_scores, order = scores.sort(dim=-1, descending=True, stable=True)
        if 0 < self.top_k < self.vocab_size:
            sorted_scores[:, self.top_k :] = -torch.inf
        probabilities = sorted_scores.softmax(-1)
        if self.top_p < 1:
            before = probabilities.cumsum(-1) - probabilities  # the sum of all likelier ones
            probabilities = probabilities.masked_fill(before >= self.top_p, 0.0)
            probabilities /= probabilities.sum(-1, keepdim=True)
        return torch.zeros_like(probabilities).scatter_(-1, order, probabilities)

    def sample(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """The next token of each row.

        Args:
            logits: [B, V].
            uniforms: float64 [B] in [0, 1), a random number for each row; greedy choices do not look at them.

        Returns:
            int64 [B], each less than v.

        Raises:
            RunError: a logit is no number.
        """
        if self.temperature == 0:
            return self._drop_padding(logits).argmax(-1)
        cumulative = self.probabilities(logits).cumsum(-1)
        total = cumulative[:, -1]
        # The first token whose sum is greater; rounding must not lead past the last one that has a probability.
        thresholds = torch.minimum(uniforms.to(total.device) * total, torch.nextafter(total, torch.zeros_like(total)))
        return torch.searchsorted(cumulative, thresholds[:, None], right=True)[:, 0]

    def _drop_padding(self, logits: Tensor) -> Tensor:
        """Logits of the tokenizer's own tokens, [B, v]. RunError for NaN."""
        logits = logits[:, : self.vocab_size]
        if logits.isnan().any():
            raise RunError("the model's logits are not numbers; its weights or its precision cannot do this")
        return logits
