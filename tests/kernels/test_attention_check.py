"""The self-check of `auto` accepts our kernels, and rejects a faulty one."""

import math

import pytest
import torch
from position_methods import build

from megatron.attention.backends.backend import AttentionFormula
from megatron.attention.backends.registry import list_candidates
from megatron.attention.check import check_result
from megatron.attention.check.check_result import BackendTrial
from megatron.attention.check.float64_reference import CheckedDocuments
from megatron.attention.check.problem import build_problem
from megatron.attention.check.trials import try_backends
from megatron.kernels.cdape_attention import mixer
from megatron.position.facts import AttentionDims
from megatron.position.token_range import ALL_HEADS, TokenRange

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = AttentionDims(num_heads=3, head_dim=16, hidden_size=48, train_length=16, max_length=16)


@pytest.fixture(autouse=True)
def _unlimited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try every backend however slow the machine is."""
    monkeypatch.setattr("megatron.attention.check.trials.CHECK_SECONDS", math.inf)


def try_candidates(
    method: tuple[str, str], *, dtype: torch.dtype = torch.float32, documents: CheckedDocuments | None = None
) -> list[BackendTrial]:
    torch.manual_seed(1)
    rows = (TokenRange(0, 13),)
    problem = build_problem(
        AttentionFormula(*build(*method, SHAPE)), rows, batch=1, window=None, heads=ALL_HEADS, dtype=dtype,
        device=DEVICE, documents=documents,
    )  # fmt: skip
    candidates = list_candidates(8, problem.formula)
    trials = try_backends(problem, candidates, timer=lambda run, device: 1.0)
    assert [trial.backend for trial in trials] == list(candidates)
    return trials


@pytest.mark.parametrize(
    ("method", "dtype", "names"),
    [
        (("none", "none"), torch.float32, {"sdpa", "triton", "row blocks"}),
        (("kerple_log", "none"), torch.float16, {"triton", "row blocks"}),
        (("fire", "none"), torch.float16, {"triton", "row blocks"}),
        (("kerple_log", "cdape"), torch.bfloat16, {"triton", "row blocks"}),
        (("kerple_log", "talking_heads"), torch.float16, {"triton", "row blocks"}),
    ],
)
@pytest.mark.parametrize("apart", [False, True])
def test_every_backend_is_correct(method, dtype, names, apart: bool) -> None:
    """Every backend is correct for rows of one document and of three."""
    starts = torch.tensor([[0] * 4 + [4] * 2 + [6] * 7])
    documents = CheckedDocuments(starts, masked=method[0] != "fire") if apart else None
    trials = {trial.backend: trial for trial in try_candidates(method, dtype=dtype, documents=documents)}
    assert names <= trials.keys()
    assert {name: trial.refusal for name, trial in trials.items()} == dict.fromkeys(trials)
    assert all(0 < trial.largest_error_ratio < 4 for trial in trials.values())


def test_a_kernel_with_a_shifted_table_gradient_is_rejected(monkeypatch) -> None:
    """A planted error moves the bias gradient from distance n to n + 1; output, dq, dk and dv stay correct."""
    from megatron.attention.backends import triton

    real = triton.compute_table

    class Shifted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, bias):
            return bias.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient.roll(1, -1)

    def shift(encoding, query, key, device):
        table = real(encoding, query, key, device)
        return table._replace(bias=Shifted.apply(table.bias))

    monkeypatch.setattr(triton, "compute_table", shift)
    row_blocks, kernel, *_ = try_candidates(("kerple_log", "none"))
    assert row_blocks.refusal is None
    assert kernel.backend == "triton"
    assert kernel.refusal is not None
    assert kernel.refusal.startswith("errs in encoding.r")
    assert kernel.excess is not None
    assert max(kernel.excess[name] for name in ("output", "dq", "dk", "dv")) < 4


def test_a_kernel_with_a_transposed_map_of_weights_is_rejected(monkeypatch) -> None:
    """A planted error maps head g to h as h to g: the logits, which have another map, stay correct."""
    from megatron.attention.backends import fused_processor

    real = fused_processor.collect_kernel_args

    def transpose(inputs, bias):
        args = real(inputs, bias)
        return args._replace(head_map=args.head_map.mT)

    monkeypatch.setattr(fused_processor, "collect_kernel_args", transpose)
    row_blocks, kernel, *_ = try_candidates(("kerple_log", "talking_heads"))
    assert row_blocks.refusal is None
    assert kernel.backend == "triton"
    assert kernel.refusal is not None
    assert kernel.refusal.startswith("errs in")


def test_the_switch_of_the_kernels_is_a_condition_of_a_check() -> None:
    assert check_result.KERNEL_VARIABLE == mixer.VARIABLE
