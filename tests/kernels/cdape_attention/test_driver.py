"""Static tables of sizes, and chunks: complete, and with memory linear in the length."""

import pytest
import torch
from cdape_calls import build_problem
from hypothesis import given
from hypothesis import strategies as st

from megatron.kernels.cdape_attention.chunks import NO_WINDOW_INT32, list_chunks
from megatron.kernels.cdape_attention.configs import (
    MIN_ROWS,
    WORKSPACE_FRACTION,
    choose_chunk_rows,
    choose_processor_tile,
    choose_splits,
    compute_max_chunk_rows,
    count_map_bytes,
    has_enough_blocks,
)
from megatron.kernels.cdape_attention.mixer_operands import MAX_TILE_COLUMNS
from megatron.kernels.cdape_attention.scores import count_padded_channels
from megatron.kernels.cdape_attention.triton_mixer import ChunkMaps
from megatron.kernels.head_dim import pad_for_dot
from megatron.kernels.runtime import DeviceProperties

TYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])


A100 = DeviceProperties(total_memory=40 << 30, multi_processor_count=108)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 4096), st.integers(1, 1 << 17), TYPES)
def test_a_chunk_keeps_to_the_workspace_or_to_few_rows(
    batch: int, heads: int, rows: int, columns: int, dtype: torch.dtype
) -> None:
    chunk = choose_chunk_rows(batch, heads, rows, columns, dtype, A100)
    assert 1 <= chunk <= rows
    assert (
        chunk <= MIN_ROWS
        or batch * chunk * columns * count_map_bytes(heads, dtype) <= A100.total_memory * WORKSPACE_FRACTION
    )
    assert chunk <= compute_max_chunk_rows(heads, columns)


@pytest.mark.parametrize(
    ("batch", "columns", "properties", "expected"),
    [
        (1, 131_072, DeviceProperties(141 << 30, 132), 512),
        (1, 131_072, A100, 128),
        (8, 2_048, A100, 1_024),
        (32, 2_048, A100, 256),
        (32, 512, A100, 512),
        (1, 2_048, A100, 1_024),
    ],
)
def test_chunk_rows_depend_on_memory(batch: int, columns: int, properties: DeviceProperties, expected: int) -> None:
    assert choose_chunk_rows(batch, 12, columns, columns, torch.bfloat16, properties) == expected


@pytest.mark.parametrize(
    ("batch", "columns", "expected"), [(1, 8_192, 4_096), (2, 8_192, 2_048), (4, 8_192, 1_024), (1, 131_072, 512)]
)
def test_chunks_are_long_enough_for_the_cuda_kernels_if_memory_allows(batch: int, columns: int, expected: int) -> None:
    h200 = DeviceProperties(141 << 30, 132)
    rows = choose_chunk_rows(batch, 16, columns, columns, torch.bfloat16, h200, has_cuda_kernels=True)
    assert rows == expected
    assert has_enough_blocks(rows, batch, h200) == (columns == 8_192)


@pytest.mark.parametrize(
    ("rows", "batch", "expected"), [(1, 512, False), (31, 512, False), (32, 88, True), (32, 87, False)]
)
def test_blocks_need_whole_rows_and_two_thirds_of_the_multiprocessors(rows: int, batch: int, expected: bool) -> None:
    assert has_enough_blocks(rows, batch, DeviceProperties(141 << 30, 132)) == expected


@pytest.mark.parametrize(
    ("columns", "expected"), [(6_144, [3_072, 3_072]), (9_000, [3_008, 3_008, 2_984]), (5_120, [4_096, 1_024])]
)
def test_chunks_are_equal_if_each_then_has_enough_blocks(columns: int, expected: list[int]) -> None:
    h200 = DeviceProperties(141 << 30, 132)
    rows = choose_chunk_rows(1, 16, columns, columns, torch.bfloat16, h200, has_cuda_kernels=True)
    assert [min(rows, columns - first) for first in range(0, columns, rows)] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [4, 12, 17])
def test_map_bytes_match_the_tensors(heads: int, dtype: torch.dtype) -> None:
    last, first = torch.empty(1, 5, 7, count_padded_channels(heads)), torch.empty(1, heads, 5, 7)
    maps, logits = ChunkMaps(last.to(dtype), first.to(dtype), last.to(dtype)), first
    assert sum(x.nbytes for x in (*maps, logits)) == 5 * 7 * count_map_bytes(heads, dtype)


@given(
    st.sampled_from(["mix_fwd", "mix_bwd", "mix_bwd_dw"]),
    st.integers(1, 64),
    st.integers(1, 64),
    st.integers(0, 3),
    st.integers(1, 300),
    TYPES,
)
def test_tiles_are_powers_of_two_that_keep_distances(
    kernel: str, heads: int, width: int, reach: int, rows: int, dtype: torch.dtype
) -> None:
    tile = choose_processor_tile(kernel, heads, width, 2 * reach + 1, rows, dtype)
    assert tile.block_m & (tile.block_m - 1) == 0
    assert tile.block_n & (tile.block_n - 1) == 0
    assert tile.block_n > 2 * reach
    assert tile.block_m * tile.block_n >= 16  # minimum size of a matrix product
    assert tile.block_m == 1 or tile.block_m < 2 * rows


@given(st.integers(1, 2048))
def test_padded_sizes_suit_a_matrix_product(size: int) -> None:
    assert pad_for_dot(size) >= max(size, 16)
    assert pad_for_dot(size) & (pad_for_dot(size) - 1) == 0
    assert pad_for_dot(size) < 2 * max(size, 16)


@given(st.integers(1, 5000), st.integers(1, 64), st.integers(1, 64))
def test_splits_leave_each_some_rows(blocks: int, batch: int, row_blocks: int) -> None:
    assert 1 <= choose_splits(blocks, batch, row_blocks) <= row_blocks


@given(st.integers(1, 40), st.integers(0, 40), st.none() | st.integers(1, 50), st.integers(1, 40))
def test_chunks_hold_every_row_once_with_all_columns_that_it_sees(
    rows: int, offset: int, window: int | None, size: int
) -> None:
    bound = NO_WINDOW_INT32 if window is None else window
    problem = build_problem(rows, offset, bound)
    found = []
    for chunk in list_chunks(problem, size):
        assert chunk.rows <= size
        for row in range(chunk.first, chunk.last):
            position = offset + row
            assert chunk.left <= max(position - bound + 1, 0)
            assert position < chunk.right <= offset + rows
            found.append(row)
        assert chunk.left == max(chunk.position - bound + 1, 0) // MAX_TILE_COLUMNS * MAX_TILE_COLUMNS  # and no more
        assert chunk.right == offset + chunk.last
    assert found == list(range(rows))
