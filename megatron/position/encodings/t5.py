"""T5's relative bias: a learned scalar per head and distance bucket, with logarithmically growing buckets."""

import math

import torch
from torch import Tensor, nn

from megatron.position.bounded_parameter import BoundedParameter, init_normal
from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.facts import AttentionDims, EncodingCost, OptionError
from megatron.position.series_tails import SeriesTail, constant_tail


class T5(Encoding):
    formula = (
        "s·b[bucket(n)], s = 1, or √d with root_scale; bucket = n below e = num_buckets/2, then "
        "e + ⌊log(n/e)/log(max_distance/e)·e⌋, at most 2e − 1"
    )
    parameters_summary = "b [num_buckets, H] ~ N(0, std²) (xavier_init: 2/(num_buckets + H) instead of std²)"
    source = (
        "Raffel et al. 2020 (causal buckets of the released code; KERPLE's section 4 prints them without “e +”). The "
        "factor √d and Xavier's initialization are those of GPT-NeoX's `rpe`, which KERPLE and DAPE V2 train"
    )
    advice = (
        "In KERPLE's table 3 it has the lowest perplexity up to two or four times the training length; beyond, "
        "kerple_log's is lower. kerple_log is 9.7% faster (KERPLE, section 5.2). In a 1.3B model t5 is worse than "
        "kerple_log and alibi (KERPLE, appendix A.4)."
    )
    other_names = ("t5_rpe", "t5_bias", "t5_relative_bias", "relative_bias")
    adds_bias = True
    cost = EncodingCost(num_parameters=lambda dims, options: options["num_buckets"] * dims.num_heads)

    def __init__(
        self,
        dims: AttentionDims,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        std: float = 0.02,
        root_scale: bool = False,
        xavier_init: bool = False,
    ) -> None:
        """
        Args:
            num_buckets: number of distance buckets, each with its own bias; even.
            max_distance: distances from this one on share the last bucket.
            std: standard deviation of the initial normal distribution of the table of biases.
            root_scale: multiply the table by √d, as GPT-NeoX does, so that Adam moves a bias √d times as far per step.
            xavier_init: initialize the table from Xavier's normal distribution, as GPT-NeoX does, instead of `std`.
        """
        super().__init__(dims)
        if num_buckets < 2 or num_buckets % 2:
            raise OptionError("num_buckets", f"is {num_buckets}; it must be even and at least 2")
        if max_distance <= num_buckets // 2:
            raise OptionError("max_distance", f"is {max_distance}; it must exceed num_buckets/2 = {num_buckets // 2}")
        if xavier_init and std != 0.02:
            raise OptionError("std", f"is {std}; it has no effect with xavier_init: leave one of them out")
        self.scale = math.sqrt(dims.head_dim) if root_scale else 1.0
        self.num_buckets, self.max_distance = num_buckets, max_distance
        init = nn.init.xavier_normal_ if xavier_init else init_normal(std)
        self.bias = BoundedParameter((num_buckets, dims.num_heads), init)

    def compute_buckets(self, distances: Tensor) -> Tensor:
        """Return the bucket of each distance [N], int64 [N]."""
        exact = self.num_buckets // 2
        log = torch.log(distances.double().clamp(min=exact) / exact) / math.log(self.max_distance / exact)
        far = exact + (log * exact).long()
        return torch.where(distances < exact, distances.long(), far.clamp(max=self.num_buckets - 1))

    def table(self, distances: Tensor) -> ScoreTerms:
        return ScoreTerms(bias=self.scale * self.bias()[self.compute_buckets(distances)].t())

    def bias_tails(self) -> list[SeriesTail]:
        reason = f"all distances from about {self.max_distance} on share the last bucket"
        return [constant_tail(factor, reason) for factor in (self.scale * self.bias()[-1].double()).exp().tolist()]
