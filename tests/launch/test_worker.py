"""One rank of several, from the launcher's view: an exit code, and an error in a separate file."""

import json
from pathlib import Path

import forked
import pytest
from tiny_runs import tiny_config, write_corpora

from megatron.config.schema import CONFIG_FILE
from megatron.distributed.hardware import LocalHardware
from megatron.distributed.launcher_environment import RankInfo
from megatron.launch import worker
from megatron.training.resolve_run import resolve_run

SCRIPT = Path(__file__).parents[1] / "support" / "ending_rank.py"


def test_an_error_is_written_for_the_launcher_in_one_line(
    corpus: Path, tmp_path: Path, capfd, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in RankInfo().to_environment("127.0.0.1", 0).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(worker, "exit_with_parent", lambda: None)
    config = tiny_config(corpus, load=str(tmp_path / "no run"))
    resolve_run(config, LocalHardware.detect()).config.save(tmp_path / CONFIG_FILE)
    assert worker.main([str(tmp_path), str(tmp_path / "log.txt"), "0"]) == 2
    left = json.loads(worker.get_error_path(tmp_path, 0).read_text())
    assert left["kind"] == "user"
    assert left["message"].startswith(f"load: {tmp_path}/no run: no such folder")
    assert "\n" not in left["message"]
    assert capfd.readouterr() == ("", "")  # the launcher reports it once


@pytest.mark.parametrize(
    ("way", "code"), [("end", 0), ("signal", 143), ("user", 2), ("run", 1), ("unexpected", 1), ("interrupt", None)]
)
def test_process_groups_end_with_their_process(tmp_path: Path, way: str, code: int | None) -> None:
    config = tiny_config(write_corpora(tmp_path / "data"), tmp_path / "run", train_iters=2)
    resolve_run(config, LocalHardware.detect()).config.save(tmp_path / CONFIG_FILE)
    done = forked.run(SCRIPT, str(tmp_path), way, "gloo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    met, there, aborted = True, False, 0
    assert json.loads((tmp_path / "found.json").read_text()) == [code, met, there, aborted]


@pytest.mark.parametrize(("way", "waits"), [("end", True), ("run", False)])
def test_a_rank_that_failed_does_not_wait_for_the_others_of_nccl(tmp_path: Path, way: str, waits: bool) -> None:
    config = tiny_config(write_corpora(tmp_path / "data"), tmp_path / "run", train_iters=1)
    resolve_run(config, LocalHardware.detect()).config.save(tmp_path / CONFIG_FILE)
    done = forked.run(SCRIPT, str(tmp_path), way, "nccl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    _, _, there, aborted = json.loads((tmp_path / "found.json").read_text())
    assert (there, aborted) == ((False, 0) if waits else (True, 1))  # the replacement ends nothing
