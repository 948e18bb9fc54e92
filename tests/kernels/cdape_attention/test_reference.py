"""Plain reference, compared with the model's own processor and with loops over the definition."""

import pytest
import torch
from cdape_calls import SATURATED, SMALL, Case, reference

from megatron.attention.reference import apply_weights
from megatron.attention.softmax import compute_softmax
from megatron.position.facts import AttentionDims
from megatron.position.numerics import toeplitz
from megatron.position.processors.cdape import Cdape
from megatron.position.token_range import TokenRange, build_causal_mask


def _with_the_model(case: Case, inputs: list[torch.Tensor | None]) -> torch.Tensor:
    """Return the output of Cdape and attend in megatron."""
    q, k, v, bias, w1, b1, w2, b2, *sinks = inputs
    shape = AttentionDims(case.heads, case.dim, case.heads * case.dim, 64, 64)
    processor = Cdape(
        shape,
        has_bias=case.has_bias,
        width=case.width,
        kernel_size=case.size,
        residual_bias=case.residual_bias,
    )
    state = {"hidden.weight": w1, "hidden.bias": b1, "output.weight": w2, "output.bias": b2}
    processor.to(q.dtype).load_state_dict(state)
    query, key = TokenRange(case.offset, case.rows), TokenRange(0, case.columns)
    visible, edge = build_causal_mask(query, key, window=case.window)[None, None], {}
    if (document_starts := case.options.get("document_starts")) is not None:
        visible = visible & (torch.arange(case.columns) >= document_starts[:, None, :, None])
        edge = {"first_columns": document_starts}
    spread = None if bias is None else toeplitz(bias, query, key)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    logits = processor(scores, spread, visible, **edge).masked_fill(~visible, float("-inf"))
    return apply_weights(compute_softmax(logits, sinks[0] if sinks else None), v)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_equals_the_model_in_float64(case: Case) -> None:
    inputs = case.inputs(torch.float64)
    inputs[3] = None if inputs[3] is None else inputs[3].double()
    expected = _with_the_model(case, inputs)
    torch.testing.assert_close(reference(*inputs, **case.options), expected, atol=1e-12, rtol=1e-12)


def test_saturates_at_float16_as_the_model_does() -> None:
    inputs = SATURATED.inputs(torch.float16)
    inputs[3] = inputs[3] * 1e6
    inputs[4], inputs[6] = inputs[4] * 1e-2, inputs[6] * 1e-4
    case = Case(**{**vars(SATURATED), "residual_bias": False})
    found = reference(*inputs, **case.options)
    assert found.isfinite().all()
    torch.testing.assert_close(found, _with_the_model(case, inputs))


def test_equals_loops_over_the_definition() -> None:
    case = Case(1, 2, 5, 5, 3, 3, 5)
    q, k, v, bias, w1, b1, w2, b2 = (x.double() for x in case.inputs(torch.float64))
    reach, (heads, width) = case.size // 2, (case.heads, case.width)
    for i in range(case.rows):
        channels = torch.zeros(2 * heads, 5 + 2 * reach, dtype=torch.float64)  # columns 0 … i, then zeros
        for j in range(i + 1):
            channels[:heads, j] = (q[0, :, i] * k[0, :, j]).sum(-1) / case.dim**0.5
            channels[heads:, j] = bias[:, i - j]
        hidden = torch.zeros(width, 5 + reach, dtype=torch.float64)
        for j in range(5 + reach):
            hidden[:, j] = b1
            for tap in range(case.size):
                column = j + tap - reach
                if column >= 0:
                    hidden[:, j] += w1[:, :, 0, tap] @ channels[:, column]
        active = torch.where(hidden > 0, hidden, 0.01 * hidden)
        logits = torch.empty(heads, i + 1, dtype=torch.float64)
        for j in range(i + 1):
            logits[:, j] = channels[:heads, j] + channels[heads:, j] + b2
            for tap in range(case.size):
                if j + tap - reach >= 0:
                    logits[:, j] += w2[:, :, 0, tap] @ active[:, j + tap - reach]
        expected = torch.einsum("hj,hjd->hd", logits.softmax(-1), v[0, :, : i + 1])
        found = reference(q, k, v, bias, w1, b1, w2, b2)[0, :, i]
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
