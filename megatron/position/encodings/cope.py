"""CoPE: positions counted by gates, so that the context determines what counts as a step.

g_ij = σ(q_i·k_j/√d); p_ij = Σ_{t=j}^{i} g_it, at most positions − 1; the term is q_i·e[p_ij] with e interpolated
between whole positions. Only q·k is divided by √d, as in the paper's listing and DAPE's module. The method needs
queries and keys, so it is a contextual term, added to the scores.
"""

import torch
from torch import Tensor, nn

from megatron.position.bounded_parameter import BoundedParameter
from megatron.position.encoding import Encoding
from megatron.position.facts import AttentionDims, EncodingCost, OptionError
from megatron.position.token_range import TokenRange, build_causal_mask


class Cope(Encoding):
    formula = "q_i·k_j/√d + q_i·e[p_ij], p_ij = min(Σ_{t=j}^{i} σ(q_i·k_t/√d), positions − 1), e interpolated"
    parameters_summary = "e [positions, d] = 0, one table for all heads"
    takes_positions = False
    source = (
        "CoPE: Golovneva et al. 2024, equations 2 to 5, computed as in the listing of its appendix, in DAPE's module "
        "and in x-transformers: q·e is not divided by √d"
    )
    advice = (
        "For comparison with other encodings that depend on the content. Up to four times the training length its "
        "perplexity is close to theirs (25.8, transformer_xl 26.1). At 64 times it is far higher (90.7, transformer_xl "
        "41.1; DAPE V2, table 9)."
    )
    other_names = ("contextual_position_encoding",)
    cost = EncodingCost(
        num_parameters=lambda dims, options: options["positions"] * dims.head_dim,
        saved_bytes_per_head_score=32,  # the position of each key as counted by the gates
        num_products=lambda options, num_keys: options["positions"],  # q·e
    )

    def __init__(self, dims: AttentionDims, *, positions: int = 64, scaled: bool = False) -> None:
        """
        Args:
            positions: number of rows of the table e; counts beyond the last row use the last row.
            scaled: also divide q·e by √d, as in checkpoints of format 5 and earlier; no published code does this.
        """
        super().__init__(dims)
        if positions < 2:
            raise OptionError("positions", f"is {positions}; it must be at least 2")
        self.positions, self.scaled = positions, scaled
        self.vectors = BoundedParameter((positions, dims.head_dim), nn.init.zeros_)

    def contextual(
        self, q: Tensor, k: Tensor, scores: Tensor, query: TokenRange, key: TokenRange, heads: slice
    ) -> Tensor:
        visible = build_causal_mask(query, key, q.device)
        gates = torch.sigmoid(scores.to(torch.promote_types(scores.dtype, torch.float32))) * visible
        # Count from the right: column j includes j itself and everything up to the query.
        position = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=self.positions - 1)
        below = position.detach().floor().long().clamp(max=self.positions - 2)
        fraction = position - below
        terms = torch.matmul(
            q * q.shape[-1] ** -0.5 if self.scaled else q, self.vectors().to(q.dtype).t()
        )  # [B, H, R, positions]
        terms = terms.to(fraction.dtype)
        low, high = terms.gather(-1, below), terms.gather(-1, below + 1)
        return (low + fraction * (high - low)).to(scores.dtype)
