"""Streamed files are valid safetensors files, and their reported sizes and checksums are correct."""

import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from safetensors import safe_open

from megatron.checkpoint import tensor_files

TYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)


@given(
    shapes=some.dictionaries(some.text(min_size=1), some.lists(some.integers(0, 5), max_size=3), max_size=5),
    kinds=some.lists(some.sampled_from(TYPES), min_size=5, max_size=5),
    note=some.text(),
)
def test_the_library_reads_written_files(
    tmp_path_factory: pytest.TempPathFactory, shapes: dict[str, list[int]], kinds: list[torch.dtype], note: str
) -> None:
    path = tmp_path_factory.mktemp("stream") / "file"
    shapes = {name: shape for name, shape in shapes.items() if name != "__metadata__"}
    tensors = {
        name: (100 * torch.randn(shape)).to(kind) for (name, shape), kind in zip(shapes.items(), kinds, strict=False)
    }
    entry = tensor_files.write_tensors(path, tensors, {"note": note})
    content = path.read_bytes()
    assert (entry.bytes, entry.crc32) == (len(content), f"{zlib.crc32(content):08x}")
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "note": note}
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            found = file.get_tensor(name)
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor)


def test_a_tensor_that_contradicts_the_header_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="weight is"):
        tensor_files.write_tensor_stream(
            tmp_path / "file", {"weight": tensor_files.TensorSpec((2, 3))}, [torch.zeros(3, 2)], {}
        )
