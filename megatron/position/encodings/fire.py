"""FIRE: a small network of the distance relative to the query's position, both on a logarithmic scale.

The bias depends on i through the normalizer, so it is not Toeplitz: rows beyond L see the same curve stretched.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.position.base import FireParameters
from megatron.position.bounded_parameter import BoundedParameter, init_constant, init_uniform
from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.facts import AttentionDims, EncodingCost, OptionError
from megatron.position.series_tails import SeriesTail, constant_tail
from megatron.position.token_range import TokenRange

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "leaky_relu": F.leaky_relu}


class Fire(Encoding):
    formula = "f(log(1 + c·n) / (log(1 + c·max(L, i)) + 10⁻⁶)), f an MLP 1→width→H with ReLU, L = multiplier·T_train/2"
    parameters_summary = "c = c_start ≥ 0.0001; multiplier = multiplier_start ≥ 0; MLP initialized like torch.nn.Linear"
    source = (
        "FIRE: Li et al. 2023, equation 3; normalizer and start values of its released code. Its MLP has ReLU. In "
        "CDAPE-FIRE, DAPE V2's released code has LeakyReLU with slope 0.01 (activation: leaky_relu)"
    )
    advice = (
        "May be better than kerple_log if training length and number of tokens suffice to train its network. With dape "
        "it diverged at a training length of 128 tokens and did well at 512 (DAPE V2, appendix A). Without a processor "
        "it does not extrapolate (perplexity 4.06 at the training length of 1,024 tokens, 441 at 8,192; DAPE V2, table "
        "2)."
    )
    other_names = ("functional_interpolation",)
    adds_bias = True
    cost = EncodingCost(
        # c, multiplier, and the two layers of the network.
        num_parameters=lambda dims, options: 2 + 2 * options["width"] + (options["width"] + 1) * dims.num_heads,
        # Hidden values in float32 (a smooth activation also keeps its input), and four maps of the network's input.
        saved_bytes_per_score=lambda options: 4 * options["width"] * (1 if options["activation"] == "relu" else 2) + 16,
    )
    relative = False

    def __init__(
        self,
        dims: AttentionDims,
        *,
        width: int = 32,
        activation: str = "relu",
        c_start: float = 0.1,
        multiplier_start: float = 1.0,
    ) -> None:
        """
        Args:
            width: hidden units of the network f.
            activation: activation of these units: `relu`, which kernels fuse, or `leaky_relu`.
            c_start: start value of c, which sets how strongly the logarithm compresses distances.
            multiplier_start: start value of the multiplier; rows before multiplier·T_train/2 share one normalizer.
        """
        super().__init__(dims)
        if activation not in ACTIVATIONS:
            raise OptionError("activation", f"is {activation!r}; choose from {', '.join(ACTIVATIONS)}")
        if width < 1:
            raise OptionError("width", f"is {width}; it must be at least 1")
        if c_start < 1e-4:
            raise OptionError("c_start", f"is {c_start}; it must be at least 0.0001")
        if multiplier_start < 0:
            raise OptionError("multiplier_start", f"is {multiplier_start}; it must not be negative")
        self.activation = activation
        self.c = BoundedParameter((1,), init_constant(c_start), low=1e-4)
        self.multiplier = BoundedParameter((1,), init_constant(multiplier_start), low=0.0)
        bound = 1 / math.sqrt(width)
        self.weight1, self.bias1 = (
            BoundedParameter((width, 1), init_uniform(-1, 1)),
            BoundedParameter((width,), init_uniform(-1, 1)),
        )
        self.weight2 = BoundedParameter((dims.num_heads, width), init_uniform(-bound, bound))
        self.bias2 = BoundedParameter((dims.num_heads,), init_uniform(-bound, bound))

    def list_biases(self) -> list[nn.Parameter]:
        return [self.bias1.value, self.bias2.value]

    def kernel_parameters(self) -> FireParameters | None:
        return self._collect_parameters() if self.activation == "relu" else None  # the activation of the kernel

    def _collect_parameters(self) -> FireParameters:
        layers = (self.weight1(), self.bias1(), self.weight2(), self.bias2())
        return FireParameters(self.c(), self.multiplier(), *layers, half_length=self.dims.train_length / 2)

    def dense(self, query: TokenRange, key: TokenRange, like: Tensor, heads: slice) -> ScoreTerms:
        c, multiplier, weight1, bias1, weight2, bias2, half_length = self._collect_parameters()
        i = query.positions(like.device).to(c.dtype)
        j = key.positions(like.device).to(c.dtype)
        n = (i[:, None] - j[None, :]).clamp(min=0)
        normalizer = torch.maximum(multiplier * half_length, i)
        x = torch.log1p(c * n) / (torch.log1p(c * normalizer) + 1e-6)[:, None]  # [R, C]
        hidden = ACTIVATIONS[self.activation](F.linear(x[..., None], weight1, bias1))
        return ScoreTerms(bias=F.linear(hidden, weight2[heads], bias2[heads]).permute(2, 0, 1))

    def bias_tails(self) -> list[SeriesTail]:
        # f is linear between the points where a hidden unit bends, so its minimum on [0, 1] is at one of these or at an
        # end.
        _, _, weight1, bias1, weight2, bias2, _ = self._collect_parameters()
        bends = (-bias1 / weight1[:, 0]).nan_to_num(0.0).clamp(0, 1)
        x = torch.cat([bends, bends.new_tensor([0.0, 1.0])])
        hidden = ACTIVATIONS[self.activation](F.linear(x[:, None], weight1, bias1))
        lowest = F.linear(hidden, weight2, bias2).amin(0)
        why = "the bias depends on i: it is f of a number in [0, 1] at every distance, and f has a minimum there"
        return [constant_tail(factor, why) for factor in lowest.double().exp().tolist()]
