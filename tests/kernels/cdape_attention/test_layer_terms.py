"""Terms computed for all layers at once: each layer has the output and gradients of a separate computation."""

from dataclasses import replace

import pytest
import torch
from cdape_calls import NAMES, Case, into_output
from torch import Tensor

from megatron.kernels.cdape_attention.args import CdapeArgs
from megatron.kernels.cdape_attention.layer_terms import LayerTerms, compute_layer_terms
from megatron.kernels.cdape_attention.op import cdape_attention

CASES = [
    Case(2, 2, 9, 9, 4, 3, 3, chunk=4),
    Case(1, 3, 6, 11, 4, 5, 5, offset=5, window=7),
    Case(1, 2, 7, 7, 4, 3, 1, residual_bias=False),
    Case(1, 2, 7, 7, 4, 3, 3, has_bias=False),
]
LAYERS = 3
pytestmark = pytest.mark.usefixtures("uninitialised_is_nan", "tall_tiles")


def _layers(case: Case, device: str) -> list[list[Tensor | None]]:
    """Return q, k, v, bias, w1, b1, w2 and b2 of each layer, all with gradients."""
    layers = [case.inputs(torch.float32, device, seed) for seed in range(LAYERS)]
    return [[x if x is None else x.requires_grad_() for x in tensors] for tensors in layers]


def _terms(case: Case, layers: list[list[Tensor | None]]) -> list[LayerTerms]:
    biases = [bias for *_, bias, _, _, _, _ in layers] if case.has_bias else None
    terms = compute_layer_terms(
        biases, [tuple(x[4:]) for x in layers], rows=case.rows, dtype=torch.float32, **case.options  # type: ignore[arg-type, misc]
    )  # fmt: skip
    assert terms is not None
    return terms


def _call(case: Case, tensors: list[Tensor | None], terms: LayerTerms | None) -> Tensor:
    return cdape_attention(CdapeArgs(*tensors, **case.options), chunk=case.chunk, terms=terms)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer_has_the_output_and_gradients_that_it_has_alone(case: Case, device: str) -> None:
    layers, into = _layers(case, device), into_output(case, torch.float32, device)
    leaves = [x for tensors in layers for x in tensors if x is not None]
    alone = [_call(case, tensors, None) for tensors in layers]
    expected = torch.autograd.grad(alone, leaves, [into * (1 + i) for i in range(LAYERS)])
    together = [_call(case, *pair) for pair in zip(layers, _terms(case, layers), strict=True)]
    for output, own in zip(together, alone, strict=True):
        torch.testing.assert_close(output, own)
    for _ in range(2):  # a retained graph is differentiated twice
        found = torch.autograd.grad(together, leaves, [into * (1 + i) for i in range(LAYERS)], retain_graph=True)
        for gradient, own in zip(found, expected, strict=True):
            torch.testing.assert_close(gradient, own)


def test_a_layer_without_a_backward_pass_has_no_gradient(device: str) -> None:
    case = CASES[0]
    layers, into = _layers(case, device), into_output(case, torch.float32, device)
    terms = _terms(case, layers)
    outputs = [_call(case, *pair) for pair in zip(layers, terms, strict=True)]
    queries = torch.autograd.grad(outputs[1], layers[1][0], into, retain_graph=True)  # leaves no state behind
    outputs[1].backward(into)
    torch.testing.assert_close(layers[1][0].grad, queries[0])  # type: ignore[union-attr]
    for name, used, unused in zip(NAMES[4:], layers[1][3:], layers[0][3:], strict=True):
        assert used is not None and unused is not None and unused.grad is not None  # noqa: PT018
        assert not unused.grad.any()
        assert used.grad.any() or name == "b2"  # type: ignore[union-attr]


def test_terms_are_for_one_call_like_theirs(device: str) -> None:
    case = CASES[0]
    layers, into = _layers(case, device), into_output(case, torch.float32, device)
    terms = _terms(case, layers)
    other = replace(case, rows=8, columns=8)
    with pytest.raises(ValueError, match="precomputed terms do not match"):
        _call(other, other.inputs(torch.float32, device), terms[0])
    twice = _call(case, layers[0], terms[0]) + _call(case, layers[0], terms[0])
    with pytest.raises(RuntimeError, match="by only one call"):
        twice.backward(into)
