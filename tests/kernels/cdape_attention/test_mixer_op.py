"""The operator with the mixer's CUDA kernels in the emulator and the rest in Triton's interpreter, against float64."""

import ctypes
from functools import partial

import pytest
import torch
from cdape_calls import SMALL_LOSS, Case, differentiated, into_output, takes_fields, truth
from cuda_emulator import Emulator, find_compiler
from mixer_emulation import LOCAL_CASES, NO_ERRORS, AllMemory
from torch import Tensor

from megatron.kernels.cdape_attention import mixer, mixer_chunks, op
from megatron.kernels.cdape_attention.chunks import CdapeProblem, Chunk
from megatron.kernels.cdape_attention.geometry import FOLDER, HEADS, KernelFamily, MixerKernel, pad_sizes
from megatron.kernels.cuda.compile import CudaKernel
from tools.tolerances import assert_within_rounding

COMPILED = {case.dtype: case for case in LOCAL_CASES[:2]}
DIM = COMPILED[torch.float16].dim

pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler (c++, g++, clang++)"),
    pytest.mark.usefixtures("uninitialised_is_nan"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU"),
]


CASES = [
    Case(1, 9, 40, 40, DIM, 17, 3, window=17, chunk=24),
    Case(1, 9, 24, 72, DIM, 17, 3, offset=48, window=20, chunk=16, has_sinks=True),
    Case(2, 9, 40, 40, DIM, 17, 3, chunk=24, documents=((40,), (3, 1, 20, 16)), has_sinks=True),
    Case(1, 9, 40, 64, DIM, 17, 3, offset=24, window=30, documents=((23, 10, 31),), has_bias=False),
    Case(1, 9, 40, 40, DIM, 36, 5, window=23, chunk=24),
    Case(2, 9, 40, 40, DIM, 17, 1, window=23, chunk=24, documents=((40,), (3, 1, 20, 16)), has_sinks=True),
    Case(1, 17, 24, 40, DIM, 17, 3, offset=16, window=30, chunk=16),  # CUDA kernels compute the logits alone
    Case(1, 12, 40, 56, DIM, 12, 1, offset=16, is_linear=True, has_head_map=True),
    Case(
        *(2, 16, 40, 40, DIM, 16, 1),
        **{"chunk": 24, "documents": ((40,), (3, 1, 20, 16)), "has_sinks": True},
        **{"is_linear": True, "has_head_map": True},
    ),
]


IN_BFLOAT16 = [
    Case(1, 9, 40, 40, 64, 17, 3, window=17, chunk=24),
    Case(2, 9, 40, 40, 64, 17, 3, chunk=24, documents=((40,), (3, 1, 20, 16)), has_sinks=True),
    Case(1, 12, 40, 56, 64, 12, 1, offset=16, is_linear=True, has_head_map=True),
]


def use_emulator(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> tuple[Emulator, list[str]]:
    """Let the operator run its CUDA kernels in an emulator; return it and a list of the headers of launched kernels."""
    emulator, launched = Emulator(FOLDER), []
    emulator.begin([AllMemory()])  # type: ignore[list-item]

    def choose_kernels(
        problem: CdapeProblem, chunk: Chunk, k: Tensor, families: tuple[KernelFamily, ...]
    ) -> tuple[MixerKernel, ...] | None:
        sizes = (problem.shape, dtype, case.dim, chunk.right - chunk.left)
        if not all(mixer.is_supported(*sizes, family.limits) for family in families):
            return None
        heads, width = pad_sizes(case.heads, case.width)
        compiled = COMPILED[dtype]._replace(taps=case.size, heads=heads, width=width, is_linear=case.is_linear)
        is_local = mixer_chunks.find_spans(problem, chunk) is not None
        kernels = [compiled.find_for_rows(family, is_local=is_local) for family in families]
        found = tuple(kernel for kernel in kernels if kernel is not None)
        return found if len(found) == len(kernels) else None

    def launch(kernel: CudaKernel, grid: tuple[int, int], arguments: ctypes.Structure) -> None:
        launched.append(kernel.header)
        emulator.launch(kernel, grid, arguments)

    monkeypatch.setattr(mixer_chunks, "choose_kernels", choose_kernels)
    monkeypatch.setattr(mixer_chunks, "launch_kernel", launch)
    return emulator, launched


def run(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, inputs: list[Tensor | None], into: Tensor
) -> dict[str, Tensor]:
    """Return the output and all gradients, with CUDA kernels in the emulator."""
    emulator, launched = use_emulator(case, dtype, monkeypatch)
    attend = partial(takes_fields(op.cdape_attention), **case.options, chunk=case.chunk)
    found = differentiated(attend, inputs, into)
    of_gradients = {"logit_gradient.h", "mixer_backward.h"} if case.heads <= HEADS else set()
    of_gradients -= {"logit_gradient.h"} if case.has_head_map else set()
    forward = "attention.h" if case.heads <= HEADS and not case.has_head_map else "mixer_forward.h"
    assert set(launched) == {forward} | of_gradients
    assert emulator.get_faults().errors == NO_ERRORS
    return found


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, torch.float16) for case in CASES), *((case, torch.bfloat16) for case in IN_BFLOAT16)],
    ids=str,
)
def test_outputs_and_gradients_err_by_rounding_alone(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, into = case.inputs(dtype), into_output(case, dtype)
    found = run(case, dtype, monkeypatch, inputs, into)
    assert_within_rounding(found, truth(case, inputs, into), dtype, stored=True)


LEFT_CASE = Case(1, 9, 40, 104, 64, 17, 3, offset=64, window=17, chunk=16)
"""Chunks whose maps begin at other columns than the first."""


@pytest.mark.parametrize("case", [*IN_BFLOAT16[:2], LEFT_CASE], ids=str)
def test_output_without_gradients_takes_one_launch_and_has_the_same_bits(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, into = case.inputs(torch.bfloat16), into_output(case, torch.bfloat16)
    expected = run(case, torch.bfloat16, monkeypatch, inputs, into)["output"]
    _, launched = use_emulator(case, torch.bfloat16, monkeypatch)
    with torch.no_grad():
        output = takes_fields(op.cdape_attention)(*inputs, **case.options, chunk=case.chunk)
    assert launched == ["attention.h"]
    assert torch.equal(output, expected)


def test_a_pass_that_activation_checkpointing_may_repeat_has_the_bits_of_its_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, dtype = IN_BFLOAT16[0], torch.bfloat16
    inputs, into = case.inputs(dtype), into_output(case, dtype)
    attend = partial(takes_fields(op.cdape_attention), **case.options, chunk=case.chunk)
    in_cuda = run(case, dtype, monkeypatch, inputs, into)["output"]
    choose_kernels = mixer_chunks.choose_kernels
    monkeypatch.setattr(  # the last chunk has too few blocks
        mixer_chunks,
        "choose_kernels",
        lambda problem, chunk, *rest: choose_kernels(problem, chunk, *rest) if chunk.rows >= 24 else None,
    )
    repeated = differentiated(attend, inputs, into)["output"]
    with torch.no_grad():
        assert torch.equal(attend(*inputs), repeated)
    with torch.inference_mode():
        assert torch.equal(attend(*inputs), in_cuda)
    assert not torch.equal(in_cuda, repeated)


@pytest.mark.parametrize("case", IN_BFLOAT16, ids=str)
def test_gradients_of_a_small_loss_lose_no_bit(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, into = case.inputs(torch.bfloat16), into_output(case, torch.bfloat16)
    found, small = (run(case, torch.bfloat16, monkeypatch, inputs, into * strength) for strength in (1.0, SMALL_LOSS))
    del found["output"], small["output"]
    assert [name for name in found if not torch.equal(small[name], found[name] * SMALL_LOSS)] == []
