from itertools import chain

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.data.indexed_dataset import find_token_range, open_indexed
from megatron.utils.errors import FarfieldError, RunError, UserError

DOCUMENTS = [[5, 6, 7], [8], [], [9, 1, 2, 3, 4]]


@given(
    st.lists(st.lists(st.integers(0, 100), max_size=9), max_size=9),
    st.sampled_from(["uint8", "int16", "int32", "int64", "uint16"]),
    st.data(),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_streams_are_the_documents_in_order(dataset, documents, dtype, data):
    opened = open_indexed(dataset("d", documents, dtype))
    assert opened.read_stream().tolist() == list(chain(*documents))
    first = data.draw(st.integers(0, len(documents)))
    last = data.draw(st.integers(first, len(documents)))
    assert opened.read_stream(first, last).tolist() == list(chain(*documents[first:last]))
    tokens = list(chain(*documents))
    assert opened.find_token_range() == (min(tokens, default=0), max(tokens, default=-1))


def test_a_stream_is_a_view_of_the_file(dataset):
    opened = open_indexed(dataset("d", DOCUMENTS))
    assert np.shares_memory(opened.read_stream(1, 4), opened.tokens)


def test_sequences_may_be_in_any_order_in_the_file(dataset, tmp_path):
    prefix = dataset("d", [[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    idx = bytearray((tmp_path / "d.idx").read_bytes())
    starts = slice(34 + 12, 34 + 12 + 24)
    idx[starts] = np.array([24, 0, 12], dtype=np.int64).tobytes()
    (tmp_path / "d.idx").write_bytes(idx)
    assert open_indexed(prefix).read_stream().tolist() == [7, 8, 9, 1, 2, 3, 4, 5, 6]


def test_large_datasets_are_sampled_for_the_range_of_their_tokens(dataset):
    opened = open_indexed(dataset("d", [[3, *range(1, 10), -2, *range(10, 5001)]]))
    assert opened.find_token_range(max_tokens=256 * 4) == (1, 5000)
    assert opened.find_token_range(None) == (-2, 5000)
    assert find_token_range(opened.tokens, length=7) == (-2, 5000)


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_every_truncation_is_noticed(dataset, tmp_path, ending):
    prefix = dataset("d", DOCUMENTS)
    path = tmp_path / f"d{ending}"
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(RunError, match=rf"d\{ending}: truncated: {size} bytes"):
            open_indexed(prefix)
    path.write_bytes(whole + b"\0\0\0\0")
    with pytest.raises(RunError, match=rf"d\{ending}.* damaged"):
        open_indexed(prefix)


@given(st.integers(0, 200), st.integers(0, 255))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_index_never_crashes(dataset, tmp_path, position, byte):
    prefix = dataset("d", DOCUMENTS)
    idx = bytearray((tmp_path / "d.idx").read_bytes())
    idx[position % len(idx)] = byte
    (tmp_path / "d.idx").write_bytes(idx)
    try:
        opened = open_indexed(prefix)
        opened.read_stream()
    except FarfieldError as error:
        assert "d.idx" in str(error)  # noqa: PT017
        assert "\n" not in str(error)  # noqa: PT017


def test_missing_and_foreign_files_are_named(dataset, tmp_path):
    prefix = dataset("d", DOCUMENTS)
    with pytest.raises(UserError, match=r"none\.bin: no such file"):
        open_indexed(tmp_path / "none")
    (tmp_path / "d.idx").rename(tmp_path / "gone")
    with pytest.raises(UserError, match=r"d\.idx: no such file"):
        open_indexed(prefix)
    for content in (b"TNTIDX\x00\x00" + bytes(100), b"TNTIDX", b"a text\n"):
        (tmp_path / "d.idx").write_bytes(content)
        with pytest.raises(UserError, match="not an index in Megatron's mmap format"):
            open_indexed(prefix)
    dataset("d", DOCUMENTS)
    idx = bytearray((tmp_path / "d.idx").read_bytes())
    idx[17] = 7
    (tmp_path / "d.idx").write_bytes(idx)
    with pytest.raises(UserError, match="token type 7 is not an integer type"):
        open_indexed(prefix)
