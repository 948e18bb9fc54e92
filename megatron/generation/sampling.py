"""Sampling of the next token from logits. B rows, V padded vocabulary, v tokens of the tokenizer.

Rows of the output layer beyond the tokenizer's vocabulary are padding, and are never sampled. Probabilities are
float64, so that equal logits give equal samples.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.utils.errors import RunError


@dataclass(frozen=True)
class TokenSampler:
    """Sampler of the next token. It applies `temperature`, then `top_k`, then `top_p` to the remaining probability.

    Args:
        vocab_size: size of the tokenizer's vocabulary, v.
        temperature: divisor of the logits; 0 selects the likeliest token.
        top_k: number of likeliest tokens to sample from; 0 for all.
        top_p: sample from the smallest set of likeliest tokens with at least this total probability; 1 for all.
    """

    vocab_size: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def probabilities(self, logits: Tensor) -> Tensor:
        """Compute the sampled distribution, float64 [B, v], from logits [B, V]. The temperature must not be 0.

        Raises:
            RunError: a logit is NaN.
        """
        scores = self._drop_padding(logits).double()
        scores = (scores - scores.amax(-1, keepdim=True)) / self.temperature  # first: 1e-300 is a valid temperature
        sorted_scores, order = scores.sort(dim=-1, descending=True, stable=True)
        if 0 < self.top_k < self.vocab_size:
            sorted_scores[:, self.top_k :] = -torch.inf
        probabilities = sorted_scores.softmax(-1)
        if self.top_p < 1:
            before = probabilities.cumsum(-1) - probabilities  # total probability of likelier tokens
            probabilities = probabilities.masked_fill(before >= self.top_p, 0.0)
            probabilities /= probabilities.sum(-1, keepdim=True)
        return torch.zeros_like(probabilities).scatter_(-1, order, probabilities)

    def sample(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """Sample the next token of each row.

        Args:
            logits: [B, V].
            uniforms: random numbers in [0, 1), float64 [B]; ignored by greedy decoding.

        Returns:
            int64 [B], each less than v.

        Raises:
            RunError: a logit is NaN.
        """
        if self.temperature == 0:
            return self._drop_padding(logits).argmax(-1)
        cumulative = self.probabilities(logits).cumsum(-1)
        total = cumulative[:, -1]
        # First token with a larger cumulative sum, guarded against rounding past the last token with nonzero
        # probability.
        thresholds = torch.minimum(uniforms.to(total.device) * total, torch.nextafter(total, torch.zeros_like(total)))
        return torch.searchsorted(cumulative, thresholds[:, None], right=True)[:, 0]

    def _drop_padding(self, logits: Tensor) -> Tensor:
        """Return the logits of the tokenizer's own tokens, [B, v].

        Raises:
            RunError: a logit is NaN.
        """
        logits = logits[:, : self.vocab_size]
        if logits.isnan().any():
            raise RunError("the model's logits are NaN; check its weights, or use a higher precision")
        return logits
