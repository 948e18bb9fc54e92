"""Head dimensions that are not powers of two."""

import pytest

from megatron.kernels.head_dim import MAX_HEAD_DIM, split_head_dim


@pytest.mark.parametrize(
    ("dim", "split"), [(8, (16, 0)), (64, (64, 0)), (72, (64, 16)), (80, (64, 16)), (96, (64, 32))]
)
def test_head_dimension_in_two_powers_of_two(dim: int, split: tuple[int, int]) -> None:
    assert split_head_dim(dim) == split


def test_every_head_dimension_fits_its_split() -> None:
    for dim in range(1, MAX_HEAD_DIM + 1):
        first, second = split_head_dim(dim)
        assert dim <= first + second < 2 * max(dim, 16)
