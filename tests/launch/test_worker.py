"""One rank of several, as the launcher sees it: an exit code, and an error in a file of its own."""

import json
from pathlib import Path

import pytest
from tiny_runs import tiny_config

from megatron.launch import worker


def test_an_error_is_left_for_the_launcher_in_one_line(tmp_path: Path, capfd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(worker, "end_with_parent", lambda: None)
    config = tiny_config(tmp_path / "corpus", load=str(tmp_path / "no run"))
    config.save(tmp_path / worker.CONFIG_FILE)
    assert worker.main([str(tmp_path), str(tmp_path / "log.txt"), "0"]) == 2
    left = json.loads(worker.error_file(tmp_path, 0).read_text())
    assert left["kind"] == "user"
    assert left["message"].startswith(f"load: {tmp_path}/no run: no such folder")
    assert "\n" not in left["message"]
    assert capfd.readouterr() == ("", "")  # the launcher tells it, once
