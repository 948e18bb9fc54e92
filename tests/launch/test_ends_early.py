"""Runs that end for external reasons: exits in a user's file, a removed folder, too few files."""

import os
import resource
import shutil
from pathlib import Path

import pytest
from tiny_runs import tiny_config

from megatron.config.execution import ResolvedRun
from megatron.distributed.launcher_environment import RankInfo
from megatron.distributed.mesh import ParallelSizes
from megatron.distributed.process_groups import init_distributed
from megatron.launch.local_launcher import LOG_FILE, train_on_this_machine
from megatron.position.catalog import METHODS_VARIABLE
from megatron.training.resolve_run import resolve_run
from megatron.training.trainer import TrainingHooks
from megatron.utils.console import log_traceback
from megatron.utils.errors import RunError, forbid_exits, is_out_of_files
from megatron.utils.signals import StoppedBySignal

LEAVING = """\
import sys

from megatron.position.encodings.kerple_log import KerpleLog


class Leaving(KerpleLog):
    calls = 0

    def table(self, distances):
        Leaving.calls += 1
        if Leaving.calls > 5:
            {call}
        return super().table(distances)
"""


def resolve(corpus: Path, run: Path, **keys: object) -> ResolvedRun:
    from megatron.distributed.hardware import LocalHardware

    return resolve_run(tiny_config(corpus, run, **keys), LocalHardware.detect())


@pytest.mark.parametrize("call", ["sys.exit()", "sys.exit(0)", "raise SystemExit('done')"])
def test_a_method_that_exits_while_it_trains(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    file = tmp_path / "methods" / "encodings" / "leaving.py"
    file.parent.mkdir(parents=True)
    file.write_text(LEAVING.format(call=call))
    monkeypatch.setenv(METHODS_VARIABLE, str(tmp_path / "methods"))
    with pytest.raises(RunError, match=rf"{file}:12: sys\.exit\(.*\) was called while a command ran") as ended:
        train_on_this_machine(resolve(corpus, tmp_path / "run", pos_emb="leaving", train_iters=9))
    assert ended.value.exit_code == 1
    assert "in table" in (tmp_path / "run" / LOG_FILE).read_text()


def test_a_signal_is_not_an_exit_in_a_file() -> None:
    with pytest.raises(StoppedBySignal), forbid_exits():
        raise StoppedBySignal(15)


@pytest.mark.parametrize("change", ["moved", "removed", "replaced"])
@pytest.mark.parametrize("keys", [{"checkpoint_factor": 3}, {"log_interval": 100}, {"log_interval": 2}])
def test_a_deleted_folder_ends_the_run_and_is_not_recreated(
    corpus: Path, tmp_path: Path, keys: dict[str, int], change: str
) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"

    def take_folder_away(phase: str, step: int) -> None:
        if step != 1 or phase != "data":
            return
        run.rename(moved)  # one step: TensorBoard's thread may open its file by its path again during a removal
        if change == "removed":
            shutil.rmtree(moved)
        if change == "replaced":
            run.mkdir()

    resolved = resolve(corpus, run, **{"log_interval": 1, "use_tensorboard": True, **keys})
    with pytest.raises(RunError, match=f"^save: {run}: the folder was moved or removed during training"):
        train_on_this_machine(resolved, hooks=TrainingHooks(on_phase=take_folder_away))
    assert run.exists() == (change == "replaced")
    assert not run.exists() or not any(run.iterdir())
    assert change == "removed" or "error: save: " in (moved / LOG_FILE).read_text()


def test_too_few_files_for_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (48, 48))
    with pytest.raises(
        RunError, match=r"^too many open files: .* open 48 here; .*ulimit -n 4096; only an administrator"
    ):
        init_distributed(RankInfo(0, 2, 0, 2), ParallelSizes.from_world_size(2), device="cpu", backend="gloo")


def test_too_many_open_files_are_one_line(tmp_path: Path) -> None:
    gloo = RuntimeError("[enforce fail at socket.cc:24] rv != -1. -1 vs -1. socket: Too many open files")
    assert is_out_of_files(gloo)
    with pytest.raises(RunError, match=r"^too many open files: "), log_traceback(tmp_path / "log"):
        raise gloo
    carried = OSError(5, os.strerror(5))
    carried.__context__ = RuntimeError("its carrier")
    carried.__context__.__cause__ = carried
    assert not is_out_of_files(carried)
