"""Selective attention: a token can mask earlier tokens for all later tokens.

    logit_ij − F_ij,   F_ij = Σ_{j < l < i} ReLU(S_lj + B_lj)  of head 0,   F_i0 = 0

The score of row l in head 0 determines how much of key j it hides from the rows below it, in all heads. A row never
hides its own key, and never the first token of the sequence or document. With a window, a row hides only keys it sees,
which include all earlier keys that later rows see.
"""

import torch
from torch import Tensor

from megatron.position.facts import ProcessorCost
from megatron.position.numerics import promote_to_float32
from megatron.position.processor import Processor
from megatron.position.token_range import ALL_HEADS, TokenRange


class Selective(Processor):
    formula = "S_ij + B_ij − Σ_{j < l < i} ReLU(S_lj + B_lj of head 0); the first token is never masked"
    source = "Selective attention: Leviathan et al. 2024 (arXiv:2410.02703), section 3"
    advice = (
        "It has no parameters, and a better perplexity than a model with twice the heads without it (the paper, "
        "section 5). Masked keys could be dropped from a cache, but Farfield keeps them, so it costs a cumulative sum "
        "and saves nothing. With rotary, evaluate at many lengths, not only at powers of two: attention to the first "
        "token, which is never masked, depends on its distance, and the perplexity oscillates."
    )
    other_names = ("selective attention",)
    cost = ProcessorCost(num_sequence_maps=lambda options: 1)
    summed_heads = slice(0, 1)

    def forward(
        self,
        scores: Tensor,
        bias: Tensor | None,
        visible: Tensor,
        heads: slice = ALL_HEADS,
        bias_contribution: Tensor | None = None,
        first_columns: Tensor | None = None,
    ) -> Tensor:
        own = promote_to_float32(scores[:, heads])
        return own if bias is None else own + bias[..., heads, :, :]

    def row_terms(
        self, scores: Tensor, bias: Tensor | None, visible: Tensor, query: TokenRange, key: TokenRange
    ) -> Tensor:
        logits = promote_to_float32(scores) if bias is None else promote_to_float32(scores) + bias
        rows, columns = (tokens.indices(scores.device) for tokens in (query, key))
        masks_key = visible & (rows[:, None] != columns) & (columns > 0)
        return torch.relu(logits).masked_fill(~masks_key, 0)[:, 0]

    def apply_row_sums(self, logits: Tensor, row_sums: Tensor) -> Tensor:
        return logits - row_sums[:, None]

    def flops_per_score(self) -> float:
        return 0.0
