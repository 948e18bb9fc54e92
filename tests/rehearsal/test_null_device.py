"""Errors of the null device before it is active, and its files; tests/cuda tests its behavior."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from megatron.distributed.hardware import describe_assumed_size, find_gpu_spec, get_gpu_spec, list_gpu_names
from megatron.kernels.jit_build import CompileError
from megatron.rehearsal.null_device import environment, host_reads, recorder
from megatron.rehearsal.null_device.environment import GPU_MODELS, get_gpu_model
from megatron.utils.errors import UserError

ROOT = Path(__file__).parents[2]


def test_gpu_names_are_resolved_as_in_plan() -> None:
    for text in ("a100-80", "A100_80GB", "a100-80gb"):
        assert get_gpu_model(text).memory == int(79.1 * 2**30)
    assert get_gpu_model("a100-40").memory < get_gpu_model("a100-80").memory < get_gpu_model("h200").memory
    assert {gpu.architecture for gpu in GPU_MODELS} == {"sm_80", "sm_90"}
    assert {gpu.name for gpu in GPU_MODELS} <= set(list_gpu_names())
    planned = {*list_gpu_names(), "a100", "a100-40", "A100_80GB", "H100"}
    for text in (gpu.name for gpu in GPU_MODELS):
        gpu = get_gpu_model(text)
        assert (gpu.memory, find_gpu_spec(gpu.device_name)) == (
            int(get_gpu_spec(text).gib * 2**30),
            get_gpu_spec(text.removesuffix("-80gb").removesuffix("-40gb")),
        )
    refused = set()
    for text in planned:
        get_gpu_spec(text)
        with suppress(UserError):
            refused.add(text)
            get_gpu_model(text)
            refused.remove(text)
    assert planned - refused == {*(gpu.name for gpu in GPU_MODELS), "a100", "a100-40", "A100_80GB", "H100"}
    with pytest.raises(UserError, match=r"^--gpu t4: supported by plan but not by rehearse, .* or 9\.0: a100-40gb, .*"):
        get_gpu_model("t4")


def test_unknown_gpus_are_one_line_with_the_nearest_name() -> None:
    for find in (get_gpu_model, get_gpu_spec):
        with pytest.raises(
            UserError, match=r"^--gpu a100-81: unknown GPU; did you mean a100-80gb\? choose from .*h200.*$"
        ):
            find("a100-81")


@pytest.mark.skipif(torch.version.cuda is not None, reason="requires the CPU build of torch")
def test_cpu_builds_are_rejected_with_a_remedy() -> None:
    command = [sys.executable, "-m", "megatron.rehearsal.null_device", "nothing.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert ".venv-cuda/bin/python" in done.stderr


def test_the_remedy_for_cpu_builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "PACKAGES_FOLDER", tmp_path)
    monkeypatch.setattr(environment, "torch_has_cuda", lambda: False)
    with pytest.raises(UserError, match="make setup-cuda") as refused:
        environment.build_null_device()
    assert environment.INSTALL_CUDA_TORCH in str(refused.value)
    (tmp_path / ".venv-cuda/bin").mkdir(parents=True)
    (tmp_path / ".venv-cuda/bin/python").touch()
    with pytest.raises(UserError, match=r"run with .*\.venv-cuda/bin/python, which has it"):
        environment.build_null_device()


def test_without_a_compiler_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_no_compiler() -> str:
        raise CompileError("no C compiler was found (cc, gcc, clang)")

    monkeypatch.setattr(environment, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(environment, "find_compiler", find_no_compiler)
    with pytest.raises(UserError, match=r"^the null device cannot be built: no C compiler was found"):
        environment.build_null_device()


def test_it_cannot_be_activated_without_its_library() -> None:
    """A process with the null device's environment but another CUDA library ends instead of mixing the two."""
    site = ROOT / "megatron/rehearsal/null_device/site"
    environment = {**os.environ, "FARFIELD_NULL_DEVICE": "card;devices=1", "PYTHONPATH": f"{site}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", "print('ran')"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: the null device cannot be activated: its library was not loaded first")


def test_a_function_that_deepspeed_no_longer_has_is_named() -> None:
    with pytest.raises(RuntimeError, match="has no has_overflow: unsupported version of DeepSpeed"):
        host_reads._run_and_answer(host_reads, "has_overflow", lambda: False)


def test_collectives_run_and_their_answer_is_replaced() -> None:
    class Optimizer:
        asked = 0

        def has_overflow(self, partition_gradients: bool) -> bool:
            Optimizer.asked += partition_gradients
            return True

    host_reads._run_and_answer(Optimizer, "has_overflow", lambda *args, **kwargs: False)
    assert Optimizer().has_overflow(partition_gradients=True) is False
    assert Optimizer.asked == 1


def test_uninitialized_numbers_are_not_used() -> None:
    read = [0.0, 2.5, -1.0, float("nan"), float("inf"), 1e30, 7, True]
    assert host_reads._replace_implausible([read]) == [[0.0, 2.5, 1.0, 1.0, 1.0, 1.0, 7, True]]


class _FakeC10d:
    """Replacement of torch.distributed with one gloo and one NCCL group."""

    class Group:
        group_name = "5"

    @staticmethod
    def get_process_group_ranks(group: object) -> list[int]:
        return [0, 2]


def test_the_ledger_names_members_peers_and_coalesced_calls(tmp_path: Path) -> None:
    ledger = recorder.CollectiveRecorder(str(tmp_path), _FakeC10d)

    def _new_process_group_helper() -> None:  # torch's function that creates an NCCL communicator
        global_ranks_in_group, group_name, group_size = [1, 3], "7", 2
        assert (len(global_ranks_in_group), group_name) == (group_size, "7")
        ledger.record_device_call("init", "abc", 2, 0, 0, -1, -1, -1, 0, 0)

    _new_process_group_helper()
    ledger.record_device_call("all_reduce", "abc", 2, 0, 100, 9, -1, 0, 0, 0)
    ledger.record_device_call("group_start", "", 0, 0, 0, -1, -1, -1, 0, 0)
    ledger.record_device_call("send", "abc", 2, 0, 3, 7, 1, -1, 0, 0)
    ledger.record_device_call("recv", "abc", 2, 0, 3, 7, 1, -1, 0, 0)
    ledger.record_device_call("group_end", "", 0, 0, 0, -1, -1, -1, 0, 0)
    ledger.record_host_call("all_gather_object", _FakeC10d.Group())
    lines = [json.loads(line) for line in recorder.get_ledger_path(tmp_path, 0).read_text().splitlines()]
    assert lines[0] == {"group": "7", "ranks": [1, 3]}
    reduced, sent, received = lines[1:4]
    assert [reduced[key] for key in ("op", "bytes", "dtype", "reduction")] == ["all_reduce", 200, "bf16", "sum"]
    assert (sent["peer"], received["peer"]) == (3, 3)
    assert reduced["batch"] < sent["batch"] == received["batch"]
    assert reduced["where"][0].startswith("tests/rehearsal/test_null_device.py:")
    assert lines[4] == {"group": "5", "ranks": [0, 2]}
    assert (lines[5]["op"], lines[5]["device"]) == ("all_gather_object", "cpu")


def test_a_name_without_a_size_is_noted() -> None:
    assert describe_assumed_size("A100") == (
        "--gpu A100: assuming the smallest size, a100-40gb; use --gpu a100-80gb for another"
    )
    assert [describe_assumed_size(name) for name in ("a100-80", "a100-40gb", "h100", "unknown")] == [None] * 4
