"""Kernel tests run in Triton's interpreter if there is no GPU.

Triton decides twice: on import (in tests/conftest.py) and when a kernel is decorated. So TRITON_INTERPRET is set while
this folder is collected, which imports the kernels, and while its tests run, because they may import more and call
`kernels.runtime.is_interpreted`. Other folders and their processes never see it. `triton.knobs.runtime.interpret` stays
unset: it reads the environment each time, and a value set there would persist and affect the other folders' tests.

A fixture provides the device of every test. FARFIELD_REHEARSE_DEVICE=1 rehearses a device without a GPU. The fixture
then returns PyTorch's meta device, each test runs until it first reads a value, and passing a CPU tensor to an operator
is an error. `test_rehearsal.py` does this with one case of every test that passes tensors to a kernel.
"""

import os
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

import pytest
import rehearsal
import torch
import triton.language
from hypothesis import Phase, settings

INTERPRETED = not torch.cuda.is_available()
REHEARSED = INTERPRETED and os.environ.get("FARFIELD_REHEARSE_DEVICE") == "1"
if REHEARSED:  # the first example ends at its first value, so there is nothing to shrink
    settings.register_profile("rehearsed", deadline=None, phases=[Phase.generate], report_multiple_bugs=False)
    settings.load_profile("rehearsed")

if INTERPRETED and isinstance(triton.language.cdiv, triton.JITFunction):
    raise RuntimeError("triton was imported without TRITON_INTERPRET: tests/conftest.py has to import it first")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            patch.setenv("TRITON_INTERPRET", "1")
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if REHEARSED:
        first = {item.originalname: item for item in reversed(items) if isinstance(item, pytest.Function)}
        items[:] = [item for item in items if "device" in first[item.originalname].fixturenames]
        items[:] = [item for item in items if first[item.originalname] is item]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    if not REHEARSED:
        return (yield)
    with rehearsal.on_another_device():
        return (yield)


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device() -> str:
    """Device of the kernels and of all tensors passed to them: a GPU if available."""
    if REHEARSED:
        return rehearsal.DEVICE
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Data types of the kernels."""
    return request.param


@pytest.fixture
def tall_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use CDAPE tiles of 16 rows and 16 distances, and two splits.

    The interpreter takes equally long for tiles of any size. Few large tiles are fast, and short sequences still have
    several.
    """
    from megatron.kernels.cdape_attention import chunks, head_products, partial_sums, triton_mixer
    from megatron.kernels.cdape_attention.configs import (
        choose_attend_tile,
        choose_heads_tile,
        choose_processor_tile,
        choose_product_tile,
    )
    from megatron.kernels.runtime import Tile

    def choose_tall_processor_tile(kernel: str, *args: Any) -> Tile:
        """Return a tile; on a GPU with fewer rows for the weights' gradients, because 256 pixels in float32 exceed
        shared memory.
        """
        rows = 4 if kernel == "mix_bwd_dw" and not INTERPRETED else 16
        return replace(choose_processor_tile(kernel, *args), block_m=rows, block_n=16)

    small: dict[str, int] = {"block_m": 16, "block_n": 16}
    monkeypatch.setattr(chunks, "choose_processor_tile", choose_tall_processor_tile)
    monkeypatch.setattr(head_products, "choose_attend_tile", lambda *args: replace(choose_attend_tile(*args), **small))
    monkeypatch.setattr(triton_mixer, "choose_heads_tile", lambda *args: replace(choose_heads_tile(*args), **small))
    monkeypatch.setattr(
        head_products, "choose_product_tile", lambda *args: replace(choose_product_tile(*args), **small)
    )
    if INTERPRETED:  # on a GPU this tile has 2,048 values per thread, and ptxas takes minutes
        monkeypatch.setattr(partial_sums, "BLOCK", (64, 4096))
    monkeypatch.setattr(triton_mixer, "choose_splits", lambda blocks, batch, row_blocks: min(row_blocks, 2))


@pytest.fixture
def uninitialised_is_nan() -> Iterator[None]:
    """Fill torch.empty with NaN, to detect elements that a kernel does not write."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
