"""Files of ranks that did not run: every element once, with the sizes and checksums of real files."""

import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import build_model

from megatron.checkpoint.manifest import compute_checksums
from megatron.checkpoint.sharded_state import (
    PARTS,
    STATES,
    ShardMetadata,
    ShardReader,
    get_rank_path,
    merge_weight_shards,
)
from megatron.checkpoint.tensor_files import write_tensors
from megatron.distributed.mesh import Mesh, ParallelSizes
from megatron.distributed.sharding import get_shard_spec
from megatron.options.model import ModelOptions
from megatron.options.position import PositionOptions
from megatron.rehearsal.missing_ranks import (
    MIN_ELEMENTS,
    SparseFile,
    StageParameter,
    ZeroStagingBuffers,
    complete_checkpoint,
    divide_unwritten,
    extend_crc32_with_zeros,
    is_zero,
    read_shards,
    read_stage_parameters,
    skip_weight_initialization,
    write_stage_parameters,
)
from megatron.rehearsal.missing_ranks import _dump as dump_pieces

SIZES = ParallelSizes(tensor=2, data=4, pipeline=2)
DIVIDED = StageParameter("layer.weight", (6, 10), 0, 1, False)
WHOLE = StageParameter("norm.weight", (7,), None, 1, False)
REPLICA = StageParameter("position.r1", (3,), None, 1, True)


def parameters_of(stage):
    """Return a matrix, a vector, and a parameter shared by stages, whose original is in the first."""
    named = [StageParameter(f"{stage}.{p.name}", p.shape, p.dim, p.strips, p.is_replica) for p in (DIVIDED, WHOLE)]
    return [*named, StageParameter("position.r1", (3,), None, 1, stage > 0)]


def write_rank(checkpoint, rank, pieces):
    """Write the file of a rank that ran, with its rank as values; each piece is (parameter, first, size)."""
    mesh = Mesh(rank, SIZES)
    described = {p.name: p.build_shard_metadata(start, size, mesh.tensor.index, 2, 3) for p, start, size in pieces}
    for kind, names, extra in ((PARTS, ("master",), {}), (STATES, ("exp_avg", "exp_avg_sq"), {"random": "{}"})):
        path = get_rank_path(checkpoint, kind, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {f"{n}/{p.name}": torch.full((size,), float(rank)) for n in names for p, _, size in pieces}
        write_tensors(path, tensors, {"pieces": dump_pieces(described), **extra})


def test_checkpoints_are_completed_for_missing_ranks(tmp_path):
    stages = [parameters_of(0), parameters_of(1)]
    matrix, vector, shared = stages[0]
    write_rank(tmp_path, 0, [(matrix, 0, 20)])
    write_rank(tmp_path, 7, [(matrix, 41, 19)])
    write_rank(tmp_path, 8, [])
    entries = complete_checkpoint(tmp_path, SIZES, stages, step=3)
    ran = {0, 7, 8}
    assert set(entries) == {f"states/rank_{rank:05d}.safetensors" for rank in set(range(16)) - ran}
    real = compute_checksums(tmp_path, [tmp_path / name for name in entries])
    assert real == entries, "checksums are those of the files' bytes"
    with ShardReader([get_rank_path(tmp_path, STATES, rank) for rank in range(16)]) as moments:
        assert set(moments.list_names()) == {p.name for stage in stages for p in stage}
        values = moments.read_tensor("exp_avg_sq", matrix.name)
        assert values.shape == (12, 10)
        assert moments.get_step(vector.name) == 3
        assert (values.reshape(2, 60)[1, 41:] == 7).all()
        assert values.count_nonzero() == 19
        assert moments.read_tensor("exp_avg", shared.name).tolist() == [0, 0, 0]
    merge_weight_shards(tmp_path, 16, {})
    assert not (tmp_path / PARTS).exists()
    assert "random" not in read_shards(get_rank_path(tmp_path, STATES, 1))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(2, 5), st.data())
def test_unwritten_elements_are_divided_in_single_ranges(sizes, ranks, data):
    parameters = [StageParameter(f"p{index}", (size,), None, 1, False) for index, size in enumerate(sizes)]
    files = [{}, {}]
    covered = {p.name: set() for p in parameters}
    for parameter in parameters:
        stop = data.draw(st.integers(0, parameter.numel))
        start = data.draw(st.integers(stop, parameter.numel))
        for file, (low, high) in zip(files, ((0, stop), (start, parameter.numel)), strict=True):
            if high > low:
                file[parameter.name] = ShardMetadata(low, high - low, parameter.shape, 0, 1, 0, 1, 3.0)
                covered[parameter.name].update(range(low, high))
    shares = divide_unwritten(parameters, files, ranks)
    for share in shares:
        names = [parameter.name for parameter, *_ in share]
        assert len(names) == len(set(names))
        for parameter, start, stop in share:
            elements = set(range(start, stop))
            assert elements
            assert not elements & covered[parameter.name]
            covered[parameter.name] |= elements
    assert covered == {p.name: set(range(p.numel)) for p in parameters}


def test_parameters_of_a_stage_are_written_and_read(tmp_path):
    model = torch.nn.Linear(4, 6)
    model.weight.tensor_model_parallel, model.weight.partition_dim, model.weight.partition_stride = True, 1, 2
    model.bias.ds_pipe_replicated = True
    write_stage_parameters(tmp_path / "new" / "stage.json", model)
    expected = [StageParameter("weight", (6, 4), 1, 2, False), StageParameter("bias", (6,), None, 1, True)]
    assert read_stage_parameters(tmp_path / "new" / "stage.json") == expected


@pytest.mark.parametrize("size", [0, 1, 5, 4096, 1_000_003])
def test_unused_checksum_of_zeros(size):
    for beginning in (b"", b"\0", b"header", bytes(range(256))):
        assert extend_crc32_with_zeros(zlib.crc32(beginning), size) == zlib.crc32(beginning + b"\0" * size)


def test_sparse_files_read_like_full_ones(tmp_path):
    tensors = {"a": torch.zeros(1 << 20), "b": torch.arange(5.0), "c": torch.zeros(1 << 18)}
    plain = write_tensors(tmp_path / "plain", tensors, {})
    sparse = write_tensors(tmp_path / "sparse", tensors, {}, SparseFile)
    assert sparse == plain
    assert (tmp_path / "sparse").read_bytes() == (tmp_path / "plain").read_bytes()
    assert (tmp_path / "sparse").stat().st_blocks * 512 < 1 << 20
    with SparseFile(tmp_path / "end") as file:
        file.write(b"x")
        file.skip(10_000)
    assert (tmp_path / "end").read_bytes() == b"x" + b"\0" * 10_000
    assert is_zero(bytes(5000))
    assert not is_zero(bytes(4999) + b"\1")
    assert not is_zero(b"\1" + bytes(4999))


OPTIONS = ModelOptions(num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=32, activation="swiglu")


def describe(model):
    return {name: (p.shape, p.dtype, get_shard_spec(p), p.requires_grad) for name, p in model.named_parameters()}


def test_models_without_values_are_sharded_like_others():
    drawn = build_model(OPTIONS, PositionOptions(pos_emb="kerple_log"), 5000)
    with skip_weight_initialization():
        unset = build_model(OPTIONS, PositionOptions(pos_emb="kerple_log"), 5000)
    assert describe(unset) == describe(drawn)
    assert sum(get_shard_spec(p) is not None for p in unset.parameters()) >= 10
    for name, value in unset.named_parameters():
        if "norm" in name:
            assert torch.equal(value, drawn.get_parameter(name)), name


def test_large_weights_change_their_type_without_contents():
    large, small = torch.ones(MIN_ELEMENTS), torch.ones(8)
    with skip_weight_initialization():
        assert (large.bfloat16().dtype, large.bfloat16().shape) == (torch.bfloat16, large.shape)
        assert torch.equal(small.bfloat16(), torch.ones(8, dtype=torch.bfloat16))
        assert large.to("cpu") is large
        copies = ZeroStagingBuffers().copy_to_host({"a": large, "b": small, "none": torch.empty(0)})
    assert {name: copy.shape for name, copy in copies.items()} == {"a": large.shape, "b": small.shape, "none": (0,)}
    assert not copies["a"].any()
    assert torch.equal(large.half(), torch.ones(MIN_ELEMENTS, dtype=torch.half)), "outside it nothing is changed"
