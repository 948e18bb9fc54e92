"""Terms computed from the tables and weights of all layers at once, before the first layer.

Each layer applies the same few dozen small operations to its table and its weights. The host launches them one by one,
and a GPU may wait for it. This module launches the operations once, for all layers together. Gradients follow the same
path: each layer's kernels accumulate into the graph node that computed the terms. After the last layer, the node
converts the sums of all layers to gradients.

L layers, H heads, R query rows, N distances, D processor width, p = k//2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.cdape_attention import mixer
from megatron.kernels.cdape_attention.bias_product import BiasProduct, get_bias_product
from megatron.kernels.cdape_attention.chunks import NO_WINDOW_INT32, CdapeProblem
from megatron.kernels.cdape_attention.mixer_operands import MixerOperands
from megatron.kernels.cdape_attention.term_sums import TermSums, add_mixer_sums, allocate_term_sums, unpack_mixer_sums
from megatron.kernels.cdape_attention.weights import PackedWeights, get_weight_shape, pack_weights, unpack_gradients
from megatron.kernels.runtime import get_backward_number, get_uncompiled_apply

MAX_ENTRIES = 1 << 23
"""Maximum number of bias contributions of all layers together: 32 MiB, and as much for the gradient."""

LayerWeights = tuple[Tensor, Tensor, Tensor, Tensor]
"""w1, b1, w2, b2 as in `args.CdapeArgs`."""


def build_problems(
    product: BiasProduct,
    contributions: Tensor,
    biases: Tensor | None,
    weights: PackedWeights,
    *,
    residual_bias: bool,
) -> list[CdapeProblem]:
    """Return the problem of each layer, from the contributions of their biases [L, H, N] and their packed weights.

    Without a residual bias, biases may be [L, H, 0].
    """
    shape, last = product.shape, product.count
    window = NO_WINDOW_INT32 if product.window is None else min(product.window, NO_WINDOW_INT32)
    if biases is None or not residual_bias:
        biases = contributions.new_empty(len(contributions), shape.heads, 0)
    by_distance, edge = contributions.split([shape.padding + last, contributions.shape[1] - shape.padding - last], 1)
    edge = edge.unflatten(1, (product.rows, shape.padding))
    operands = MixerOperands(by_distance, edge, biases, weights, shape, last)
    extent = (product.rows, product.offset, window, product.dtype)
    uses_mixer = mixer.is_enabled()
    each = zip(contributions.unbind(), biases.unbind(), *(x.unbind() for x in weights), strict=True)
    return [
        CdapeProblem(
            *(own, bias, PackedWeights(*rest), shape, *extent),
            uses_mixer=uses_mixer,
            operands=operands,
            layer=layer,
        )
        for layer, (own, bias, *rest) in enumerate(each)
    ]


def compute_terms(
    product: BiasProduct, biases: Tensor | None, weights: Sequence[LayerWeights]
) -> tuple[Tensor, PackedWeights]:
    """Return the bias contributions [L, p + N + R·p, D] and the packed weights for biases [L, H, N] or None."""
    packed = pack_weights(product.shape, weights, product.dtype)
    return product.compute(product.build_neighborhoods(biases), packed), packed


def differentiate_terms(
    product: BiasProduct,
    biases: Tensor | None,
    bias_weight: Tensor,
    sums: TermSums,
    dtypes: tuple[torch.dtype, ...],
) -> tuple[tuple[Tensor, ...], list[tuple[Tensor, ...]]]:
    """Return the gradients of each layer's bias, and of its weights in these types.

    Args:
        biases: as for `compute_terms`.
        bias_weight: field of the packed weights.
        sums: sums of all layers; they are overwritten.
    """
    unpack_mixer_sums(sums, product)
    dweight, constants = product.differentiate(sums.bias_product, biases, bias_weight, sums.bias_table)
    return sums.bias_table.mT.unbind(), unpack_gradients(product.shape, sums.patches, dweight, constants, dtypes)


@dataclass(frozen=True, eq=False)
class LayerTerms:
    """Terms of one layer, from `compute_layer_terms`."""

    problem: CdapeProblem
    product: BiasProduct
    anchor: Tensor
    """Placeholder whose graph node accumulates the sums of all layers; its value is not used."""

    def fits(self, q: Tensor, offset: int, window: int | None) -> bool:
        """Return True if the terms match a call with queries [B, H, R, d], this offset and this window."""
        product = self.product
        return (product.rows, product.offset, product.window, product.dtype) == (q.shape[2], offset, window, q.dtype)


class _ComputeTerms(torch.autograd.Function):
    """Autograd function for the terms of all layers. Only `anchor` is differentiable; it represents all of them."""

    @staticmethod
    def forward(ctx: Any, product: BiasProduct, num_layers: int, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the terms of all layers.

        Args:
            tensors: each layer's bias, if any, then each layer's weights.
        """
        biases = torch.stack(tensors[:num_layers]) if product.shape.has_bias else None
        flat = tensors[len(tensors) - 4 * num_layers :]
        weights: list[LayerWeights] = [flat[start : start + 4] for start in range(0, len(flat), 4)]  # type: ignore[misc]
        contributions, packed = compute_terms(product, biases, weights)
        ctx.save_for_backward(biases, packed.bias_weight)
        ctx.product, ctx.num_layers, ctx.num_tensors = product, num_layers, len(tensors)
        ctx.dtypes = tuple(x.dtype for x in weights[0])
        ctx.sums, ctx.finished, ctx.backward_number = None, set(), None
        ctx.set_materialize_grads(False)
        anchor, terms = contributions.new_empty(()), [x for x in (biases, contributions, *packed) if x is not None]
        ctx.mark_non_differentiable(*terms)
        return anchor, biases, contributions, *packed

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        sums, ctx.sums = ctx.sums, None
        if sums is None or ctx.backward_number != get_backward_number():
            return (None,) * (2 + ctx.num_tensors)
        biases, bias_weight = ctx.saved_tensors
        dbiases, dweights = differentiate_terms(ctx.product, biases, bias_weight, sums, ctx.dtypes)
        return None, None, *(() if biases is None else dbiases), *(x for layer in dweights for x in layer)


def get_layer_sums(node: Any, problem: CdapeProblem, *, uses_mixer: bool) -> TermSums:
    """Return the layer's tensors, initially zero, to which the kernels of a call add their sums.

    Args:
        node: graph node of `LayerTerms.anchor`.
        uses_mixer: True if the CUDA kernels compute sums.

    Raises:
        RuntimeError: if another call of the layer has already used them.
    """
    number = get_backward_number()
    if node.backward_number != number:
        node.sums, node.finished, node.backward_number = None, set(), number
    if problem.layer in node.finished:
        raise RuntimeError("the terms of a layer can be used by only one call")
    node.finished.add(problem.layer)
    if node.sums is None:
        biases, bias_weight = node.saved_tensors
        distances = 0 if biases is None else biases.shape[2]
        node.sums = allocate_term_sums(node.num_layers, node.product, distances, bias_weight.device)
    if uses_mixer and node.sums.mixer is None:
        node.sums = add_mixer_sums(node.sums, problem)
    sums: TermSums = node.sums.select_layer(problem.layer)
    return sums


def compute_layer_terms(
    biases: Sequence[Tensor] | None,
    weights: Sequence[LayerWeights],
    *,
    rows: int,
    offset: int,
    window: int | None,
    dtype: torch.dtype,
    residual_bias: bool,
    is_linear: bool = False,
) -> list[LayerTerms] | None:
    """Return the terms of layers with equal call sizes, for one call of each, or None if they are too large together.

    Args:
        biases: float32 [H, N] of each layer, N ≥ offset + R, or None.
        weights: weights of each layer, all in one type.
        rows, offset, window, residual_bias, is_linear: as in `args.CdapeArgs`.
        dtype: type of the queries.
    """
    w1, _, w2, _ = weights[0]
    shape = get_weight_shape(w2.shape[0], w1.shape[0], w1.shape[-1], biases is not None, is_linear)
    product = get_bias_product(shape, rows, offset, window, dtype)
    if len(weights) * product.num_contributions > MAX_ENTRIES:
        return None
    tensors = [*(biases or ()), *(x for layer in weights for x in layer)]
    anchor, stacked, contributions, *packed = get_uncompiled_apply(_ComputeTerms)(product, len(weights), *tensors)
    with torch.no_grad():
        problems = build_problems(product, contributions, stacked, PackedWeights(*packed), residual_bias=residual_bias)
    return [LayerTerms(problem, product, anchor) for problem in problems]
