"""C code on a CPU, compared with float64: outputs, gradients, and integration with PyTorch."""

import platform
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from cdape_calls import NAMES, SMALL, Case, differentiated, doubled, into_output, reference, takes_fields, truth
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from megatron.kernels import jit_build
from megatron.kernels.cdape_attention import cpu
from tools.tolerances import assert_within_rounding

cdape_attention = takes_fields(cpu.cdape_attention)
pytestmark = pytest.mark.skipif(cpu.describe_unavailable() is not None, reason=str(cpu.describe_unavailable()))

TILES = [
    Case(1, 3, 100, 100, 8, 6, 3),
    Case(1, 2, 70, 230, 8, 6, 7, offset=160),
    Case(1, 2, 130, 130, 8, 6, 5, window=75),
    Case(2, 2, 66, 66, 8, 6, 3, has_bias=False),
    Case(1, 2, 30, 130, 8, 3, cpu.MAX_KERNEL_SIZE, offset=100),
    Case(2, 3, 250, 250, 8, 6, 3, documents=((60, 1, 1, 98, 90), (250,))),
    Case(2, 2, 90, 230, 8, 6, 7, offset=140, documents=((100, 60, 2, 68), (3, 3, 224))),
    Case(2, 2, 130, 130, 8, 6, 5, window=30, documents=((84, 1, 2, 43), (7, 123))),
    Case(1, 2, 20, 20, 8, 6, 1, documents=((8, 12),)),
]
"""Several tiles of columns and row units; documents that start at and within tiles, some shorter than k."""


def _instructions() -> Iterator[tuple[str, ...]]:
    """Yield the compiler flags for vectors of 16, 8 and 4 floats that this processor supports."""
    yield jit_build.ARCH_FLAGS
    if platform.machine() == "x86_64":
        if {"avx2", "fma"} <= set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split()):
            yield ("-march=x86-64-v3",)
        yield ("-march=x86-64",)


@pytest.fixture(params=_instructions(), ids=lambda flags: flags[0].removeprefix("-march="))
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cpu, "_load_library", lambda: cpu.set_signatures(jit_build.build_library(cpu.NATIVE, request.param))
    )


def _assert_rounding_alone(case: Case) -> None:
    inputs, into = case.inputs(torch.float32), into_output(case, torch.float32)
    found = differentiated(partial(cdape_attention, **case.options), inputs, into)
    assert_within_rounding(found, truth(case, inputs, into), torch.float32)


@pytest.mark.parametrize("case", [*SMALL, *TILES], ids=str)
def test_outputs_and_gradients_err_by_rounding_alone(case: Case) -> None:
    _assert_rounding_alone(case)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("case", [SMALL[1], SMALL[3], TILES[0]], ids=str)
def test_with_vectors_of_any_length(case: Case) -> None:
    _assert_rounding_alone(case)


@settings(max_examples=20)
@given(
    case=st.builds(
        Case,
        batch=st.integers(1, 3),
        heads=st.integers(1, 9),
        rows=st.integers(1, 40),
        columns=st.just(0),
        dim=st.integers(1, 20),
        width=st.integers(1, 40),
        size=st.sampled_from(range(1, cpu.MAX_KERNEL_SIZE + 1, 2)),
        offset=st.integers(0, 150),
        window=st.none() | st.integers(1, 150),
        residual_bias=st.booleans(),
        has_bias=st.booleans(),
    ),
    starts=st.none() | st.lists(st.integers(1, 189), max_size=5),
)
def test_any_shape(case: Case, starts: list[int] | None) -> None:
    """Any shape matches the reference. `starts` are the document starts of all sequences, or None."""
    case = replace(case, columns=case.offset + case.rows)
    if starts is not None:
        borders = sorted({0, case.columns, *(start for start in starts if start < case.columns)})
        lengths = tuple(stop - start for start, stop in pairwise(borders))
        case = replace(case, documents=(lengths,) * case.batch)
    inputs = case.inputs(torch.float32)
    found = {"output": cdape_attention(*inputs, **case.options)}
    assert_within_rounding(found, lambda: {"output": reference(*doubled(inputs), **case.options)}, torch.float32)


@pytest.mark.parametrize(
    "case", [Case(1, 2, 24, 24, 8, 6, size, window=window) for size in (3, 7) for window in (None, 4)], ids=str
)
def test_the_reference_reads_each_document_as_if_it_were_alone(case: Case) -> None:
    """The reference of the C code and the kernels reads each document as if it were alone."""
    inputs, lengths = doubled(case.inputs(torch.float32)), (5, 1, 2, 16)
    found = reference(*inputs, **replace(case, documents=(lengths,)).options)
    alone, start = [], 0
    for length in lengths:
        own = [x[:, :, start : start + length] for x in inputs[:3]]
        alone.append(reference(*own, *inputs[3:], **case.options))
        start += length
    torch.testing.assert_close(found, torch.cat(alone, dim=2), rtol=1e-12, atol=1e-12)


def test_keys_of_other_documents_are_not_read() -> None:
    """Time falls with the documents' length: rows do not read NaN from other documents."""
    case = Case(1, 2, 400, 400, 8, 6, 3, documents=((256, 144),))
    inputs, into = case.inputs(torch.float32), into_output(case, torch.float32)
    expected = differentiated(partial(cdape_attention, **case.options), inputs, into)
    for x in (*inputs[:3], into):
        x[:, :, :240] = float("nan")
    found = differentiated(partial(cdape_attention, **case.options), inputs, into)
    for name in ("output", "q", "k", "v"):
        assert torch.equal(found[name][:, :, 256:], expected[name][:, :, 256:])


def test_threads_divide_the_work_and_sums_alone_depend_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(3, 2, 80, 80, 8, 6, 3)
    inputs, into = case.inputs(torch.float32), into_output(case, torch.float32)
    found = {}
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found[threads] = differentiated(cdape_attention, inputs, into)
        again = differentiated(cdape_attention, inputs, into)
        assert all(torch.equal(found[threads][name], again[name]) for name in NAMES)
        assert_within_rounding(found[threads], truth(case, inputs, into), torch.float32)
    assert all(torch.equal(found[1][name], found[5][name]) for name in ("output", "q"))


def test_no_row_reads_a_later_key_and_a_nan_stays_a_nan() -> None:
    case = Case(1, 2, 30, 30, 8, 6, 3)
    q, k, v, *rest = case.inputs(torch.float32)
    expected = cdape_attention(q, k, v, *rest)
    longer = [torch.cat([x, torch.full_like(x, float("nan"))], dim=2) for x in (k, v)]
    assert torch.equal(cdape_attention(q, *longer, *rest), expected)
    k[:, :, 20] = float("nan")
    found = cdape_attention(q, k, v, *rest)
    assert torch.equal(found[:, :, :20], expected[:, :, :20])
    assert found[:, :, 20:].isnan().all()


def test_checkpointing_changes_nothing() -> None:
    case = Case(2, 3, 20, 20, 8, 6, 5)
    inputs, into = case.inputs(torch.float32), into_output(case, torch.float32)
    plain = differentiated(cdape_attention, inputs, into)
    again = differentiated(partial(checkpoint, cdape_attention, use_reentrant=False), inputs, into)
    for name, expected in plain.items():
        assert torch.equal(again[name], expected), name


@pytest.mark.parametrize("dim", [7, 8])
@pytest.mark.parametrize("order", [(0, 2, 1, 3), (0, 3, 2, 1), (3, 1, 0, 2)], ids=str)
def test_inputs_may_have_any_memory_layout(order: tuple[int, ...], dim: int) -> None:
    case = Case(2, 3, 20, 20, dim, 6, 5)
    inputs, into = case.inputs(torch.float32), into_output(case, torch.float32)
    plain = differentiated(cdape_attention, inputs, into)
    back = torch.tensor(order).argsort().tolist()
    *strided, strided_into = (x.permute(order).contiguous().permute(back) for x in (*inputs[:3], into))
    other = differentiated(cdape_attention, [*strided, *inputs[3:]], strided_into)
    for name, expected in plain.items():
        assert torch.equal(other[name], expected), name


def test_saved_memory_is_linear_in_the_length() -> None:
    def kept(length: int) -> int:
        sizes: list[int] = []
        leaves = [x.requires_grad_() for x in Case(1, 2, length, length, 4, 3, 3).inputs(torch.float32)]
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            cdape_attention(*leaves)
        return sum(sizes)

    assert kept(256) < 2.1 * kept(128)


def test_the_compiler_prints_no_warnings() -> None:
    jit_build.build_library(cpu.NATIVE, (*jit_build.ARCH_FLAGS, "-Wall", "-Wextra", "-Werror"))


@pytest.mark.parametrize(
    ("line", "changed", "complaint"),
    [
        (
            "offset, window, num_threads;",
            "offset, num_threads, window;",
            "Problem.window is at byte 64 in cpu.py, but at byte 72 in",
        ),
        (
            "    long margin; ",
            "    long lanes, margin; ",
            "Problem.margin is at byte 104 in cpu.py, but at byte 112 in",
        ),
        (
            "} Problem;",
            "    float *dw3;\n} Problem;",
            "Problem has 336 bytes in cpu.py, 344 in native/problem.h",
        ),
        ("FIELD(w2), ", "", "Problem.w2 is at byte .* in cpu.py, but absent from native/problem.h"),
    ],
    ids=["reordered", "inserted", "added", "left out"],
)
def test_a_mismatched_c_struct_is_rejected(line: str, changed: str, complaint: str, tmp_path: Path) -> None:
    folder = tmp_path / "cdape" / "native"
    shutil.copytree(cpu.NATIVE, folder)
    (file,) = (path for path in folder.iterdir() if line in path.read_text(encoding="utf-8"))
    file.write_text(file.read_text(encoding="utf-8").replace(line, changed), encoding="utf-8")
    with pytest.raises(RuntimeError, match=complaint):
        cpu.set_signatures(jit_build.build_library(folder))


def test_unsupported_inputs_are_rejected_by_name() -> None:
    inputs = Case(1, 2, 5, 5, 4, 3, 3).inputs(torch.float32)
    half = [x.bfloat16() for x in inputs[:3]]
    with pytest.raises(ValueError, match=r"q is torch\.bfloat16 on cpu; it must be float32 on a CPU"):
        cdape_attention(*half, *inputs[3:])
    with pytest.raises(ValueError, match=r"b1 is torch\.float64 on cpu; it must be float32 on a CPU"):
        cdape_attention(*inputs[:5], inputs[5].double(), *inputs[6:])
    long = (
        torch.zeros(3, 4, 1, cpu.MAX_KERNEL_SIZE + 2),
        inputs[5],
        torch.zeros(2, 3, 1, cpu.MAX_KERNEL_SIZE + 2),
        inputs[7],
    )
    with pytest.raises(ValueError, match=r"w1 is \[3, 4, 1, 17\]; k must be at most 15"):
        cdape_attention(*inputs[:4], *long)
    with pytest.raises(ValueError, match="offset is 1 with 5 rows and 5 columns"):
        cdape_attention(*inputs, offset=1)
    assert torch.equal(cdape_attention(*inputs, window=2**64), cdape_attention(*inputs))
    q = inputs[0].requires_grad_()
    (grad,) = torch.autograd.grad(cdape_attention(*inputs).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
