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
    Case(1, 9, 40, 40, COMPILED[torch.bfloat16].dim, 17, 3, window=17, chunk=24),
    Case(1, 12, 40, 56, COMPILED[torch.bfloat16].dim, 12, 1, offset=16, is_linear=True, has_head_map=True),
]


def run(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, inputs: list[Tensor | None], into: Tensor
) -> dict[str, Tensor]:
    """Return the output and all gradients, with CUDA kernels in the emulator."""
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
        return tuple(compiled.build_for_rows(family, is_local=is_local) for family in families)

    def launch(kernel: CudaKernel, grid: tuple[int, int], arguments: ctypes.Structure) -> None:
        launched.append(kernel.header)
        emulator.launch(kernel, grid, arguments)

    monkeypatch.setattr(mixer_chunks, "choose_kernels", choose_kernels)
    monkeypatch.setattr(mixer_chunks, "launch_kernel", launch)
    attend = partial(takes_fields(op.cdape_attention), **case.options, chunk=case.chunk)
    found = differentiated(attend, inputs, into)
    of_gradients = {"logit_gradient.h", "mixer_backward.h"} if case.heads <= HEADS else set()
    of_gradients -= {"logit_gradient.h"} if case.has_head_map else set()
    assert set(launched) == {"mixer_forward.h"} | of_gradients
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


@pytest.mark.parametrize("case", IN_BFLOAT16, ids=str)
def test_gradients_of_a_small_loss_lose_no_bit(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, into = case.inputs(torch.bfloat16), into_output(case, torch.bfloat16)
    found, small = (run(case, torch.bfloat16, monkeypatch, inputs, into * strength) for strength in (1.0, SMALL_LOSS))
    del found["output"], small["output"]
    assert [name for name in found if not torch.equal(small[name], found[name] * SMALL_LOSS)] == []
