"""Records of docs/results state place, date and versions of their measurements in a uniform format."""

import json
import os
import platform
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from tools import records

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "tools/bench/attention.py")


def test_the_keys_match_existing_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tools/bench/attention.py", "--peers", "sdpa mask", "--op", "cdape"])
    made = records.collect_provenance(SCRIPT, "cpu")
    assert list(made) == ["date", "command", "commit", "machine", "versions"]
    for name in ("bench_train.json", "bench_cdape_cpu.json"):
        record = json.loads((ROOT / "docs/results" / name).read_text(encoding="utf-8"))
        assert set(record) - {"records"} <= set(made)
    assert made["date"] == date.today().isoformat()
    assert made["command"] == "python tools/bench/attention.py --peers 'sdpa mask' --op cdape"
    assert made["machine"].startswith(f"{platform.machine()}, ")
    assert made["machine"].endswith(f" cores, {torch.get_num_threads()} threads")
    assert made["versions"]["python"] == platform.python_version()
    assert made["versions"]["torch"] == version("torch")
    json.dumps(made)


def test_packages_that_are_not_installed_are_left_out() -> None:
    assert list(records.list_package_versions(("farfield-has-no-such-package", "numpy"))) == ["numpy"]


def test_without_git_the_commit_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(records, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert records.describe_commit() is None  # not a checkout
    monkeypatch.setenv("PATH", str(tmp_path))
    assert records.describe_commit() is None  # git is not installed


def test_a_changed_file_shows_in_the_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", *words]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "first")
    git("tag", "v1")
    monkeypatch.setattr(records, "ROOT", tmp_path)
    assert records.describe_commit() == git("rev-parse", "--short", "HEAD")
    (tmp_path / "file").write_text("2")
    assert records.describe_commit() == git("rev-parse", "--short", "HEAD") + "-dirty"


def test_it_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'triton', 'numpy', 'megatron'}"
    code = f"import sys, tools.records; sys.exit(' '.join({heavy} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_process_killed_while_it_writes_leaves_the_earlier_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    records.write_record(path, {"records": [1]}, "page")

    def be_killed(descriptor: int) -> None:
        os.truncate(descriptor, 5)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", be_killed)
    with pytest.raises(KeyboardInterrupt):
        records.write_record(path, {"records": [1, 2]}, "longer page")
    assert json.loads(path.read_text(encoding="utf-8")) == {"records": [1]}
    assert path.with_suffix(".md").read_text(encoding="utf-8") == "page"
