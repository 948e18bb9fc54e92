"""Talking heads: linear maps between the heads, of the logits before the softmax and of the weights after it.

    weights = (I + W_w) softmax((I + W_l) (S + B))

Both maps start as the identity. The learned parameter, which weight decay pulls to zero, is the difference from it. The
paper starts with random maps. The published code of Multi-Token Attention, which compares with it, starts with the
identity and decays the maps themselves to zero (`absolute: true`).
"""

from typing import Literal

import torch
from torch import Tensor, nn

from megatron.position.base import ConvolutionParameters
from megatron.position.facts import AttentionDims, OptionError, ProcessorCost
from megatron.position.numerics import is_sharded_by_zero3, promote_to_float32
from megatron.position.processor import Processor
from megatron.position.token_range import ALL_HEADS


class HeadMixing(nn.Module):
    """Linear map between the heads of each group, applied to each entry: identity + weight, which starts at zero.

    Args:
        num_heads: H.
        group_size: consecutive heads that are mixed with each other, a divisor of H.
        absolute: the weight is the map itself and starts as the identity.
    """

    def __init__(self, num_heads: int, group_size: int, *, absolute: bool = False) -> None:
        super().__init__()
        self.absolute = absolute
        self.weight = nn.Parameter(torch.empty(num_heads // group_size, group_size, group_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset to the identity."""
        with torch.no_grad():
            self.weight.copy_(self._identity() if self.absolute else torch.zeros_like(self.weight))

    def _identity(self) -> Tensor:
        return torch.eye(self.weight.shape[-1], dtype=self.weight.dtype, device=self.weight.device)

    def has_effect(self) -> bool:
        """Return False if the map is exactly the identity."""
        return bool((self.weight != self._identity()).any() if self.absolute else self.weight.any())

    def forward(self, maps: Tensor | None, heads: slice = ALL_HEADS) -> Tensor:
        """Mix float32 maps [B, H, R, C] of all heads into [B, h, R, C] of the selected ones.

        If `maps` is None, return the difference of the map from the identity, float32 [H, H] (a copy under ZeRO-3,
        which frees the parameter after this call).
        """
        num_groups, size, _ = self.weight.shape
        if maps is None:
            groups = promote_to_float32(self.weight)
            groups = groups - self._identity() if self.absolute else groups
            if num_groups > 1:
                return torch.block_diag(*groups)
            return groups[0].clone() if is_sharded_by_zero3(self.weight) else groups[0]
        matrices = self.weight.to(maps.dtype)
        if not self.absolute:
            matrices = matrices + torch.eye(size, dtype=maps.dtype, device=maps.device)
        if num_groups == 1:
            # one product per sequence with or without gradients: matmul would fold the batch for gradients
            batch = matrices[0, heads].expand(len(maps), -1, -1)
            return torch.bmm(batch, maps.flatten(2)).unflatten(2, maps.shape[2:])
        grouped = maps.unflatten(1, (num_groups, size)).flatten(3)
        mixed: Tensor = torch.matmul(matrices, grouped).view(maps.shape)[:, heads]
        return mixed


class TalkingHeads(Processor):
    formula = "weights = (I + W_w) softmax((I + W_l)(S + B)), maps of the heads to each other"
    parameters_summary = "W_l [1, H, H], W_w [1, H, H]; both start at 0 (absolute: at the identity)"
    source = "Talking-heads attention: Shazeer et al. 2020 (arXiv:2003.02436), section 3"
    advice = (
        "In T5 and ALBERT it is better than plain attention with as many heads, and improves with the number of heads "
        "(the paper, section 5). With mixes_bias: false a learned map cannot reverse the decay of a bias."
    )
    other_names = ("talking heads attention",)
    cost = ProcessorCost(
        num_parameters=lambda dims, options, has_bias: (
            dims.num_heads**2 * (options["before_softmax"] + options["after_softmax"])
        ),
        num_products=lambda dims, options: float(
            dims.num_heads**2 * (options["before_softmax"] + options["after_softmax"])
        ),
        num_head_maps=lambda options: int(options["before_softmax"]),
        changes_weights=lambda options: options["after_softmax"],
        maps_heads=True,
    )

    def __init__(
        self,
        dims: AttentionDims,
        *,
        has_bias: bool,
        before_softmax: bool = True,
        after_softmax: bool = True,
        mixes_bias: bool = True,
        absolute: bool = False,
    ) -> None:
        """
        Args:
            before_softmax: mix the logits.
            after_softmax: mix the weights.
            mixes_bias: mix the logits of S + B; if false, B is added unchanged after the mixing of S.
            absolute: learn the maps themselves, which weight decay pulls to zero, instead of their differences from the
                identity.
        """
        super().__init__(dims, has_bias=has_bias)
        if not before_softmax and not after_softmax:
            raise OptionError("after_softmax", "is false, and so is before_softmax; set one of them to true")
        self.mixes_bias = mixes_bias
        self.absolute = absolute
        self.logits = HeadMixing(dims.num_heads, dims.num_heads, absolute=absolute) if before_softmax else None
        self.weights = HeadMixing(dims.num_heads, dims.num_heads, absolute=absolute) if after_softmax else None

    def has_effect(self) -> bool:
        return any(each.has_effect() for each in (self.logits, self.weights) if each is not None)

    def kernel_parameters(self) -> ConvolutionParameters:
        # Without an activation, W_l·S is Conv2 of the scores themselves. The bias is mapped apart, in float32.
        mixings = (self.logits, self.weights)
        before, after = (None if mixing is None else mixing(None) for mixing in mixings)
        like = next(self.parameters())
        identity = torch.eye(self.dims.num_heads, dtype=torch.float32, device=like.device)
        zeros = torch.zeros_like(identity)
        weight1 = torch.cat([identity, zeros], 1) if self.has_bias else identity
        weight2 = zeros if before is None else before
        bias_map = before if self.mixes_bias and self.has_bias else None
        convolutions = (weight1[:, :, None, None], zeros[0], weight2[:, :, None, None], zeros[0])
        return ConvolutionParameters(*convolutions, True, is_linear=True, bias_map=bias_map, head_map=after)

    def list_growing_fan_ins(self) -> list[tuple[nn.Parameter, Literal["hidden", "heads"]]]:
        # muP would scale the identity that a map starts as
        return [] if self.absolute else [(parameter, "heads") for parameter in self.parameters()]

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
        maps = maps[:, heads] if self.logits is None else self.logits(maps, heads)
        return maps if bias is None or self.mixes_bias else maps + bias[..., heads, :, :]

    def process_weights(self, weights: Tensor, visible: Tensor, heads: slice = ALL_HEADS) -> Tensor:
        return weights[:, heads] if self.weights is None else self.weights(weights, heads)

    def flops_per_score(self) -> float:
        return 2.0 * sum(parameter.numel() for parameter in self.parameters())
