"""One learned vector per absolute position. Positions past the table are not supported."""

import torch
from torch import Tensor, nn

from megatron.position.bounded_parameter import init_normal
from megatron.position.encoding import Encoding
from megatron.position.facts import AttentionDims, EncodingCost
from megatron.position.token_range import TokenRange


class PositionEmbedding(nn.Embedding):
    """Table of one vector per position, initialized from N(0, std²)."""

    def __init__(self, rows: int, width: int, std: float) -> None:
        self.start = init_normal(std)  # set first, because the constructor of the base class calls `reset_parameters`
        super().__init__(rows, width)

    def reset_parameters(self) -> None:
        super().reset_parameters()  # also draws, to keep the random state of earlier versions
        with torch.no_grad():
            self.start(self.weight)


class Learned(Encoding):
    formula = "x_i + p_i, p a learned table"
    parameters_summary = "p [max_position_embeddings, D] ~ N(0, std²)"
    source = "GPT-2: Radford et al. 2019"
    advice = (
        "For models that never read beyond the training length: sequences longer than its table raise an error. "
        "Absolute positions generalize poorly to longer sequences (DAPE V2, section 2)."
    )
    other_names = ("ape", "absolute", "learned_absolute", "wpe")
    cost = EncodingCost(num_parameters=lambda dims, options: dims.max_length * dims.hidden_size)
    relative = False
    has_position_table = True
    takes_real_positions = False

    def __init__(self, dims: AttentionDims, *, std: float = 0.02) -> None:
        """
        Args:
            std: standard deviation of the initial normal distribution of the table.
        """
        super().__init__(dims)
        self.max_length = dims.max_length
        self.vectors = PositionEmbedding(dims.max_length, dims.hidden_size, std)

    def embed(self, tokens: TokenRange, like: Tensor) -> Tensor:
        if tokens.position_limit > self.dims.max_length:
            request = f"a sequence of length {tokens.stop} was given"
            if tokens.sampled is not None:
                request = f"positions are drawn from {tokens.position_limit} (randomized_positions)"
            raise ValueError(
                f"learned positions end at {self.dims.max_length} (max_position_embeddings), but {request}"
            )
        return self.vectors(tokens.positions(like.device)).to(like.dtype)
