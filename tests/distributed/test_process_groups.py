"""Communication of a single process, and of four processes on meshes of several shapes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked import Forked
from mesh_rank import MESHES

from megatron.distributed.launcher_environment import RankInfo
from megatron.distributed.mesh import Mesh, ParallelSizes
from megatron.distributed.process_groups import (
    ProcessGroups,
    build_single_process_groups,
    configure_cuda,
    init_distributed,
)
from megatron.utils.errors import RunError

SCRIPT = Path(__file__).parents[1] / "support" / "mesh_rank.py"


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """Results of each of four ranks on each mesh."""
    folder = tmp_path_factory.mktemp("mesh")
    ranks = [Forked(SCRIPT, str(folder), str(rank), output=folder / f"{rank}.txt") for rank in range(4)]
    assert [rank.wait(120) for rank in ranks] == [0] * 4, "\n".join(rank.printed() for rank in ranks)
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(4)]


@pytest.mark.parametrize("number", range(len(MESHES)), ids=[str(mesh) for mesh in MESHES])
def test_groups_match_the_mesh(four: list[list[dict[str, Any]]], number: int) -> None:
    for rank in range(4):
        found = four[rank][number]
        for name, (ours, theirs) in found["groups"].items():
            assert ours == theirs, (rank, name)


@pytest.mark.parametrize("number", range(len(MESHES)), ids=[str(mesh) for mesh in MESHES])
def test_all_ranks_get_the_same_results(four: list[list[dict[str, Any]]], number: int) -> None:
    sizes = ParallelSizes(**MESHES[number])
    shares = sizes.data * sizes.context
    for found in (each[number] for each in four):
        assert found["whole"] == [4 * (2**53 + 1), 6]  # in float64 the first would end in 0
        assert found["parts"] == [1.0, 6.0]
        assert found["once"] == [int("1" * shares)]  # each shard of the batch exactly once
        assert found["max"] == 0.0
        assert found["gather"] == [[rank, Mesh(rank, sizes).data.index] for rank in range(4)]
        assert found["agree"] == [None, "error of 2"]
        assert found["alone"].startswith("this process already belongs to another mesh") == (
            sizes != ParallelSizes(data=4)
        )


def test_collectives_of_a_single_process() -> None:
    processes = build_single_process_groups()
    assert processes == ProcessGroups() == build_single_process_groups()
    assert processes.is_main
    assert processes.all_reduce_sum(3, 4) == [3, 4]
    assert processes.all_reduce_sum(0.5) == [0.5]
    assert processes.all_reduce_max(-2.0) == -2.0
    assert processes.gather_objects("x") == ["x"]
    assert (processes.find_first_error(None), processes.find_first_error("no")) == (None, "no")
    assert processes.group("tensor").size() == 1


ROOT = Path(__file__).parents[2]
LONE_MODEL = """
import sys
import warnings
import torch
from torch import distributed as dist
warnings.simplefilter("ignore")
hook = sys.excepthook

from megatron.distributed.launcher_environment import RankInfo
from megatron.distributed.mesh import ParallelSizes
from megatron.distributed.process_groups import build_single_process_groups, init_distributed
from megatron.model.build import build_model
from megatron.options.model import ModelOptions
from megatron.options.position import PositionOptions

options = ModelOptions(num_layers=2, hidden_size=32, num_attention_heads=2, seq_length=16)
tokens = torch.arange(32).reshape(2, 16)

def build():
    position = PositionOptions(pos_emb="kerple_log")
    return build_model(options, position, 100, groups=build_single_process_groups(), seed=1)

def compute(model):
    loss = model(tokens, labels=tokens).mean()
    loss.backward()
    return loss.item()

model = build()
expected = compute(model)
assert not dist.is_initialized()
assert sys.excepthook is hook
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
own = dist.group.WORLD
assert compute(model) == compute(build()) == expected
assert dist.group.WORLD is own
groups = init_distributed(RankInfo(), ParallelSizes(), device="cpu", backend="gloo")
assert groups.group("tensor") is own
assert compute(model) == compute(build()) == expected
"""


def test_a_model_of_one_process_leaves_torch_alone() -> None:
    """In a fresh process: no default group and no other excepthook, before and after the caller makes its own group."""
    result = subprocess.run([sys.executable, "-c", LONE_MODEL], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (result.returncode, result.stderr) == (0, "")


def test_joining_an_existing_group_is_rejected() -> None:
    init_distributed(RankInfo(), ParallelSizes(), device="cpu", backend="gloo")
    with pytest.raises(RunError, match="WORLD_SIZE is 2, but this process is already in a group of 1"):
        init_distributed(RankInfo(0, 2), ParallelSizes(data=2), device="cpu", backend="gloo")
    with pytest.raises(RunError, match="this process already belongs to another mesh"):
        init_distributed(RankInfo(), ParallelSizes(tensor=2), device="cpu", backend="gloo")


@pytest.mark.parametrize(("chosen", "expected"), [(None, "1"), ("0", "0")])
def test_kernels_of_pytorch_fuse_multiply_adds_with_every_triton(
    chosen: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default depends on Triton's version; a user's choice stays."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", chosen or "")
    if chosen is None:
        monkeypatch.delenv("TRITON_DEFAULT_FP_FUSION")
    configure_cuda()
    assert os.environ["TRITON_DEFAULT_FP_FUSION"] == expected


def test_float32_is_exact_in_containers_that_allow_tf32() -> None:
    """PyTorch reads the variable once, so this needs a process of its own."""
    code = (
        "import torch; from megatron.distributed.process_groups import configure_cuda; "
        "assert torch.backends.cuda.matmul.allow_tf32; configure_cuda(); "
        "print(torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)"
    )
    environment = os.environ | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]
