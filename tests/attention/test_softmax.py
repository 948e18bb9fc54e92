"""Sinks and stick-breaking with every encoding and processor, in every backend that supports them."""

from dataclasses import replace

import pytest
import torch
from position_methods import MAPPED, build, inputs_of, random_qkv
from torch.nn.attention import flex_attention as torch_flex

from megatron.attention.backends.flex import FlexBackend
from megatron.attention.backends.fused_processor import NativeBackend
from megatron.attention.backends.pytorch import ChunkedBackend, EagerBackend
from megatron.attention.inputs import AttentionInputs
from megatron.attention.reference import compute_logits, compute_weights
from megatron.position.token_range import TokenRange
from tools.tolerances import assert_close_in_rounding

LENGTH = 14
SINKS = torch.tensor([-0.5, 0.4, 2.0])


def draw_inputs(encoding: str, processor: str, window: int | None = None) -> AttentionInputs:
    q, k, v = random_qkv(LENGTH)
    span = TokenRange(0, LENGTH)
    return inputs_of(q, k, v, span, span, *build(encoding, processor), window=window)


@pytest.mark.parametrize(("encoding", "processor"), MAPPED)
@torch.no_grad()
def test_sinks_and_stick_breaking_use_the_final_logits(encoding: str, processor: str) -> None:
    """A sink multiplies softmax weights by σ(logsumexp − s); stick-breaking multiplies a product of fractions."""
    inputs = draw_inputs(encoding, processor)
    if inputs.processor is not None and inputs.processor.overrides("process_weights"):
        inputs.processor.process_weights = lambda weights, *_: weights  # effects of weight processing are not known
    logits = compute_logits(inputs).double()
    found = compute_weights(replace(inputs, sinks=SINKS))
    share = torch.sigmoid(torch.logsumexp(logits, -1) - SINKS.double()[:, None])
    assert_close_in_rounding(found, (torch.softmax(logits, -1) * share[..., None]).float(), LENGTH, 4)
    broken = compute_weights(replace(inputs, uses_stick_breaking=True))
    expected, left = torch.zeros_like(logits), torch.ones_like(logits[..., 0])
    for column in reversed(range(LENGTH)):
        visible = torch.arange(LENGTH) > column
        taken = torch.sigmoid(logits[..., column]) * visible
        expected[..., column] = taken * left
        left = left * (1 - taken)
    assert_close_in_rounding(broken, expected.float(), LENGTH, 4)


def differentiate(backend, inputs: AttentionInputs, sinks: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the output and the gradients of queries, keys, values, sinks and all parameters."""
    leaves = [x.detach().clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    own = None if sinks is None else sinks.clone().requires_grad_()
    modules = [module for module in (inputs.encoding, inputs.processor) if module is not None]
    wanted = [*leaves, *([] if own is None else [own]), *(p for module in modules for p in module.parameters())]
    q, k, v = leaves
    output = backend(replace(inputs, q=q, k=k, v=v, sinks=own, uses_stick_breaking=own is None))
    into = torch.linspace(-1, 1, output.numel()).cos().view(output.shape)
    return [output, *torch.autograd.grad(output, wanted, into, allow_unused=True, materialize_grads=True)]


PAIRS = [("none", "none"), ("kerple_log", "none"), ("kerple_log", "cdape"), ("cope", "none"), ("fire", "dape")]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("sinks", [SINKS, None], ids=["sinks", "stick-breaking"])
@pytest.mark.parametrize(("encoding", "processor"), PAIRS)
def test_blocks_are_the_whole_with_all_gradients(
    encoding: str, processor: str, sinks: torch.Tensor | None, window: int | None
) -> None:
    inputs = draw_inputs(encoding, processor, window)
    expected = differentiate(EagerBackend(), inputs, sinks)
    for backend in (ChunkedBackend(4), ChunkedBackend(4, recompute=False)):
        for one, other in zip(differentiate(backend, inputs, sinks), expected, strict=True):
            assert_close_in_rounding(one, other, 2 * LENGTH * 8, 8)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("encoding", "processor"), [("none", "none"), ("kerple_log", "none"), ("kerple_log", "cdape"), ("none", "dape")]
)
def test_fused_backends_equal_eager_with_sinks(encoding: str, processor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C implementation with a processor (a sink gives its last bias an effect) and FlexAttention without one match
    eager.
    """
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)  # PyTorch does not support gradients on a CPU
    inputs = draw_inputs(encoding, processor, 6)
    unused = EagerBackend()
    backend = FlexBackend(unused) if processor == "none" else NativeBackend(unused, is_requested=True)
    expected = differentiate(EagerBackend(), inputs, SINKS)
    for one, other in zip(differentiate(backend, inputs, SINKS), expected, strict=True):
        assert_close_in_rounding(one, other, 2 * LENGTH * 8, 8)


def test_a_row_of_padding_has_no_weights() -> None:
    inputs = replace(draw_inputs("alibi", "none"), key_mask=torch.arange(LENGTH)[None] >= torch.tensor([[0], [3]]))
    for change in ({"sinks": SINKS}, {"uses_stick_breaking": True}, {}):
        weights = compute_weights(replace(inputs, **change))
        assert weights.isfinite().all()
        assert (weights[1, :, :3] == 0).all()
        assert (weights[1, :, :, :3] == 0).all()


def test_sinks_do_not_include_a_gates_row_term(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention omits a gate's row term from the scores, where it cancels in the softmax; a sink would not cancel
    it.
    """
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    inputs = draw_inputs("fox", "none")
    expected = EagerBackend()(replace(inputs, sinks=SINKS))
    found = FlexBackend(EagerBackend())(replace(inputs, sinks=SINKS))
    assert_close_in_rounding(found, expected, 2 * LENGTH * 8, 8)
    assert (found - EagerBackend()(replace(inputs, sinks=SINKS, row_bias=0 * inputs.row_bias))).abs().max() > 1e-3
