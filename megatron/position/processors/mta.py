"""Multi-Token Attention: convolutions of each head's score matrix over queries and keys, and mixing of heads.

    Z = K_s ∗ mask₀(S + B)                convolution of each head's map, c_q rows by c_k columns, ending with the row
    A = softmax(mask₋∞(M_s Z))            M_s mixes all heads, if enabled
    A = M_w mask₀(K_w ∗ A)                a second convolution, if enabled; M_w mixes the heads of each group
    output = g · (1 − λ) · norm(A V)      RMS norm of each head's output, λ = 0.8 − 0.6 exp(−0.3 layer)

Both masks of the paper are applied: hidden entries are zero before a convolution and have no weight after it, so no
future key and no key of another document is read. Kernels and head maps are the identity plus a learned difference,
which starts at zero and which weight decay pulls to zero. With `absolute` the kernels and maps are learned themselves:
they start as the identity and decay to zero, as in the released training.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.position.facts import AttentionDims, OptionError, ProcessorCost
from megatron.position.numerics import promote_to_float32
from megatron.position.processor import Processor
from megatron.position.processors.talking_heads import HeadMixing
from megatron.position.token_range import ALL_HEADS


class MapConvolution(nn.Module):
    """Convolution of float32 maps [B, H, R, C] with a c_q × c_k kernel per head.

    A kernel covers the rows above and the row itself, and columns on both sides. Entries outside the map are zero. The
    kernel is the identity plus the weight, or the weight itself with `absolute`.
    """

    def __init__(self, num_heads: int, num_rows: int, num_columns: int, *, absolute: bool = False) -> None:
        super().__init__()
        self.absolute = absolute
        self.weight = nn.Parameter(torch.empty(num_heads, num_rows, num_columns))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset to the identity."""
        with torch.no_grad():
            self.weight.copy_(self._identity() if self.absolute else torch.zeros_like(self.weight))

    def _identity(self) -> Tensor:
        identity = torch.zeros_like(self.weight)
        identity[:, -1, identity.shape[-1] // 2] = 1
        return identity

    def has_effect(self) -> bool:
        """Return False if the convolution is exactly the identity."""
        return bool((self.weight != self._identity()).any() if self.absolute else self.weight.any())

    def forward(self, maps: Tensor) -> Tensor:
        heads, num_rows, num_columns = self.weight.shape
        padded = F.pad(maps, (num_columns // 2, num_columns // 2, num_rows - 1, 0))
        convolved = F.conv2d(padded, self.weight[:, None].to(maps.dtype), groups=heads)
        return convolved if self.absolute else maps + convolved


class OutputNorm(nn.Module):
    """RMS norm of head outputs [B, h, R, d] times a constant, optionally with a gate computed from each output."""

    def __init__(self, head_dim: int, factor: float, *, has_gate: bool) -> None:
        super().__init__()
        self.factor = factor
        self.weight = nn.Parameter(torch.ones(head_dim))
        self.gate = nn.Parameter(torch.zeros(head_dim + 1)) if has_gate else None

    def reset_parameters(self) -> None:
        """Reset to a norm with scale 1 and a half-open gate."""
        nn.init.ones_(self.weight)
        if self.gate is not None:
            nn.init.zeros_(self.gate)

    def forward(self, output: Tensor) -> Tensor:
        x = promote_to_float32(output)
        x = (
            x
            * torch.rsqrt(x.square().sum(-1, keepdim=True) / x.shape[-1] + 1e-5)
            * (self.weight.to(x.dtype) * self.factor)
        )
        if self.gate is not None:
            gate = self.gate.to(x.dtype)
            x = x * torch.sigmoid(x @ gate[:-1] + gate[-1])[..., None]
        return x.to(output.dtype)


class Mta(Processor):
    formula = "M_w softmax(K ∗ (S + B)), K of c_q × c_k per head over queries and keys, M_w over groups of heads; norm"
    parameters_summary = (
        "K [H, c_q, c_k] and M_w [H/c_h, c_h, c_h], stored as differences from the identity, start at 0 (absolute: "
        "stored directly, start as the identity); norm [d] starts at 1"
    )
    source = "Multi-Token Attention: Golovneva et al. 2025 (arXiv:2504.00927), sections 3 and 4; facebookresearch/RAM"
    advice = (
        "For finding content that only several words together identify (the paper, sections 4.1 and 4.4). Released "
        "configurations have kernels before and after the softmax in the third of every four layers. They mix heads "
        "before and after it in all layers, and have a gate and no depth_scale. The pattern `[talking_heads, "
        "talking_heads, mta, talking_heads]` with absolute is closest to that; its other layers have no norm and gate. "
        "It is slow, because no kernel fuses it."
    )
    other_names = ("multi-token attention",)
    cost = ProcessorCost(
        num_parameters=lambda dims, options, has_bias: (
            dims.num_heads * options["query_kernel_size"] * options["key_kernel_size"]
            + dims.num_heads * options["weights_query_kernel_size"] * options["weights_key_kernel_size"]
            + dims.num_heads * (options["head_kernel_size"] or dims.num_heads)
            + dims.num_heads**2 * options["mixes_scores"]
            + dims.head_dim * options["group_norm"]
            + (dims.head_dim + 1) * options["gate"]
        ),
        num_products=lambda dims, options: float(
            dims.num_heads
            * (
                options["query_kernel_size"] * options["key_kernel_size"]
                + options["weights_query_kernel_size"] * options["weights_key_kernel_size"]
                + (options["head_kernel_size"] or dims.num_heads)
                + dims.num_heads * options["mixes_scores"]
            )
        ),
        left_context=lambda options: options["key_kernel_size"] // 2 + options["weights_key_kernel_size"] // 2,
        preceding_rows=lambda options: (
            options["query_kernel_size"] - 1 + max(options["weights_query_kernel_size"] - 1, 0)
        ),
        changes_weights=lambda options: True,
        num_head_maps=lambda options: 1 + options["mixes_scores"],
        num_weight_maps=lambda options: 2 if options["weights_query_kernel_size"] else 0,
    )

    def __init__(
        self,
        dims: AttentionDims,
        *,
        has_bias: bool,
        query_kernel_size: int = 6,
        key_kernel_size: int = 11,
        head_kernel_size: int | None = None,
        weights_query_kernel_size: int = 0,
        weights_key_kernel_size: int = 0,
        mixes_scores: bool = False,
        mixes_bias: bool = True,
        group_norm: bool = True,
        depth_scale: bool = True,
        gate: bool = False,
        absolute: bool = False,
    ) -> None:
        """
        Args:
            query_kernel_size: rows c_q of the kernels: the row itself and those above it.
            key_kernel_size: keys c_k of the kernels, odd.
            head_kernel_size: heads c_h per group that are mixed after the softmax; all heads if null, no mixing if 1.
            weights_query_kernel_size: rows of the kernels of a second convolution, of the weights after the softmax; 0
                for none.
            weights_key_kernel_size: keys of these kernels, odd; 0 for none.
            mixes_scores: also mix all heads before the softmax, after the convolution.
            mixes_bias: convolve (and mix) S + B; if false, B is added unchanged to the result for S.
            group_norm: apply an RMS norm to each head's output, with a scale per dimension shared by all heads.
            depth_scale: multiply the output by 0.2 + 0.6·exp(−0.3·layer), as Differential Transformer does.
            gate: multiply the output by a gate between 0 and 1 per head and token, computed from the output.
            absolute: learn the kernels and maps themselves, which weight decay pulls to zero, instead of their
                differences from the identity.
        """
        super().__init__(dims, has_bias=has_bias)
        kernels = {"": (query_kernel_size, key_kernel_size)}
        if (weights_query_kernel_size == 0) != (weights_key_kernel_size == 0):
            given = f"{weights_query_kernel_size} by {weights_key_kernel_size}"
            raise OptionError(
                "weights_query_kernel_size", f"and weights_key_kernel_size are {given}; give both or none"
            )
        if weights_query_kernel_size:
            kernels["weights_"] = (weights_query_kernel_size, weights_key_kernel_size)
        for prefix, (num_rows, num_columns) in kernels.items():
            if num_rows < 1:
                least = "0 (none) or more" if prefix else "at least 1"
                raise OptionError(f"{prefix}query_kernel_size", f"is {num_rows}; it must be {least}")
            if num_columns < 1 or num_columns % 2 == 0:
                raise OptionError(
                    f"{prefix}key_kernel_size", f"is {num_columns}; it must be a positive odd number: 1, 3, 5, 7 …"
                )
        heads = dims.num_heads
        head_kernel_size = heads if head_kernel_size is None else head_kernel_size
        if head_kernel_size < 1 or heads % head_kernel_size:
            raise OptionError("head_kernel_size", f"is {head_kernel_size}; it must divide the {heads} heads")
        if gate and not group_norm:
            raise OptionError("gate", "is true, but it needs group_norm, which is false")
        self.mixes_bias = mixes_bias
        self.preceding_rows = sum(num_rows - 1 for num_rows, _ in kernels.values())
        self.left_context = sum(num_columns // 2 for _, num_columns in kernels.values())
        self.absolute = absolute
        self.scores = MapConvolution(heads, query_kernel_size, key_kernel_size, absolute=absolute)
        self.score_heads = HeadMixing(heads, heads, absolute=absolute) if mixes_scores else None
        self.weights = MapConvolution(heads, *kernels["weights_"], absolute=absolute) if "weights_" in kernels else None
        self.weight_heads = HeadMixing(heads, head_kernel_size, absolute=absolute)
        factor = 0.2 + 0.6 * math.exp(-0.3 * dims.layer) if depth_scale else 1.0
        self.norm = OutputNorm(dims.head_dim, factor, has_gate=gate) if group_norm else None

    @classmethod
    def traits(cls) -> tuple[str, ...]:
        return ("reads rows above",)

    @property
    def supports_packed_documents(self) -> bool:
        return self.preceding_rows == 0 and self.left_context == 0

    def has_effect(self) -> bool:
        maps = (self.scores, self.score_heads, self.weights, self.weight_heads)
        return self.norm is not None or any(each.has_effect() for each in maps if each is not None)

    def list_growing_fan_ins(self) -> list[tuple[nn.Parameter, Literal["hidden", "heads"]]]:
        if self.absolute:  # muP would scale the identity that a map starts as
            return []
        mixings = [mixing for mixing in (self.score_heads, self.weight_heads) if mixing is not None]
        return [(each.weight, "heads") for each in mixings if each.weight.shape[0] == 1]

    def forward(
        self,
        scores: Tensor,
        bias: Tensor | None,
        visible: Tensor,
        heads: slice = ALL_HEADS,
        bias_contribution: Tensor | None = None,
        first_columns: Tensor | None = None,
    ) -> Tensor:
        maps = promote_to_float32(scores)
        if bias is not None and self.mixes_bias:
            maps = maps + bias
        maps = self.scores(maps.masked_fill(~visible, 0))
        maps = maps[:, heads] if self.score_heads is None else self.score_heads(maps, heads)
        return maps if bias is None or self.mixes_bias else maps + bias[..., heads, :, :]

    def process_weights(self, weights: Tensor, visible: Tensor, heads: slice = ALL_HEADS) -> Tensor:
        if self.weights is not None:
            weights = self.weights(weights).masked_fill(~visible, 0)
        return self.weight_heads(weights, heads)

    def process_output(self, output: Tensor) -> Tensor:
        return output if self.norm is None else self.norm(output)

    def flops_per_score(self) -> float:
        maps = (self.scores, self.score_heads, self.weights, self.weight_heads)
        return 2.0 * sum(each.weight.numel() for each in maps if each is not None)
