"""Reference implementation of attention, compared with loops written from its definition."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.attention.inputs import AttentionInputs
from megatron.attention.reference import compute_attention, compute_logits
from megatron.position.encoding import Encoding, ScoreTerms
from megatron.position.facts import AttentionDims
from megatron.position.numerics import toeplitz
from megatron.position.token_range import TokenRange
from tools.tolerances import assert_close_in_rounding

SHAPE = AttentionDims(2, 4, 8, 16, 16)


@given(start=st.integers(0, 9), rows=st.integers(1, 6), key=st.integers(0, 3), columns=st.integers(1, 9))
def test_toeplitz_reads_the_table_and_sums_its_diagonals(start: int, rows: int, key: int, columns: int) -> None:
    size = max(start + rows - key, 1) + 2
    table = torch.randn(2, size, dtype=torch.float64, requires_grad=True)
    query_span, key_span = TokenRange(start, rows), TokenRange(key, columns)
    matrix = toeplitz(table, query_span, key_span)
    exact = torch.stack(
        [
            torch.stack([table[:, max(i - j, 0)] for j in range(key, key + columns)], 1)
            for i in range(start, start + rows)
        ],
        1,
    )
    assert torch.equal(matrix, exact)
    seed = torch.randn_like(exact)
    (ours,) = torch.autograd.grad((matrix * seed).sum(), table, retain_graph=True)
    (reference,) = torch.autograd.grad((exact * seed).sum(), table)
    torch.testing.assert_close(ours, reference)


@given(start=st.integers(0, 9), rows=st.integers(1, 6), columns=st.integers(1, 9), width=st.integers(0, 9))
def test_edge_values_are_in_the_first_columns_with_any_channel_layout(
    start: int, rows: int, columns: int, width: int
) -> None:
    width = min(width, columns)
    table = torch.randn(3, start + rows + 2, dtype=torch.float64, requires_grad=True)
    edge = torch.randn(3, rows, width, dtype=torch.float64, requires_grad=True)
    query, key = TokenRange(start, rows), TokenRange(0, columns)
    matrix = toeplitz(table, query, key, edge=edge, channels_last=True)
    exact = torch.cat([edge, toeplitz(table, query, key)[..., width:]], dim=-1)
    assert torch.equal(matrix, exact)
    assert matrix.movedim(0, -1).is_contiguous()
    seed = torch.randn_like(exact)
    ours, reference = (torch.autograd.grad((x * seed).sum(), [table, edge]) for x in (matrix, exact))
    torch.testing.assert_close(ours, reference)


class Everything(Encoding):
    """Encoding with bias, weight and contextual terms."""

    formula = source = "test"

    def table(self, n):
        return ScoreTerms(bias=torch.stack([-n, n.sqrt()]), weight=torch.stack([1 / (1 + n), torch.exp(-n)]))

    def contextual(self, q, k, scores, query, key, heads):
        return q[..., :1] + k[..., :1].transpose(-1, -2)


def test_logits_and_attention_against_loops() -> None:
    batch, length, d = 2, 6, 4
    q, k, v = torch.randn(3, batch, 2, length, d)
    mask = torch.tensor([[True] * 6, [False, False] + [True] * 4])  # the second sequence is left-padded
    span = TokenRange(0, length)
    encoding = Everything(SHAPE)
    inputs = AttentionInputs(q, k, v, span, span, encoding, key_mask=mask)
    ours, out = compute_logits(inputs), compute_attention(inputs)
    for b in range(batch):
        for h in range(2):
            for i in range(length):
                row = []
                for j in range(length):
                    n = i - j
                    if n < 0 or not mask[b, j]:
                        row.append(-math.inf)
                        continue
                    weight = 1 / (1 + n) if h == 0 else math.exp(-n)
                    bias = -n if h == 0 else math.sqrt(n)
                    dot = float(q[b, h, i].double() @ k[b, h, j].double()) / math.sqrt(d)
                    row.append(dot * weight + float(q[b, h, i, 0] + k[b, h, j, 0]) + bias)
                assert_close_in_rounding(
                    ours[b, h, i], torch.tensor(row), length, 3
                )  # product, weight and sum of three
                top = max(row)
                if top == -math.inf:
                    assert out[b, h, i].abs().max() == 0
                    continue
                p = [math.exp(x - top) for x in row]
                exact = sum(x / sum(p) * v[b, h, j] for j, x in enumerate(p))
                assert_close_in_rounding(out[b, h, i], exact, length, 5)
