"""Tools of installation: the image's files and steps, records, and the exchange of checkpoints."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import forked
import pytest

from tools.install import exchange, try_bare_roots, versions
from tools.install.bare_root import BareRoot, CommandResult
from tools.install.try_bare_roots import add_to_record, copy_files, read_definition

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_image_has_every_file_that_its_own_test_needs(tmp_path: Path) -> None:
    """The section `test` of apptainer.def runs in a folder with the section `files` only, and this environment."""
    sections = read_definition((ROOT / "apptainer.def").read_text(encoding="utf-8"))
    copy_files(sections["files"], tmp_path)
    script = f"set -e\n{sections['environment']}\n{sections['test']}"
    script = script.replace("/farfield", f"{tmp_path}/farfield").replace("python3", sys.executable)
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("farfield 0.1.0")


def test_images_name_only_files_and_steps_that_exist() -> None:
    steps = set(
        re.findall(r"^        ([a-z-]+)\) install", (ROOT / "tools/install/image.sh").read_text(), re.MULTILINE)
    )
    used = set()
    for name in ("Dockerfile", "apptainer.def"):
        text = (ROOT / name).read_text(encoding="utf-8")
        for called in re.findall(r"image\.sh ([a-z -]+)$", text, re.MULTILINE):
            used |= set(called.split())
        for copied in re.findall(r"^COPY (?:--\S+ )?(.*) \S+$", text, re.MULTILINE):
            assert all((ROOT / source).exists() for source in copied.split()), copied
    assert used == steps
    done = subprocess.run(["sh", ROOT / "tools/install/image.sh", "sistem"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: image.sh: unknown step sistem; steps: system, cpu-torch, packages")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("3.12", "quickstart"), "error: --python FOLDER is needed for 3.12, which no release of Debian has\n"),
        (
            ("3.13", "image"),
            "error: image is a step of its own, and needs --python FOLDER for the base image's Python\n",
        ),
    ],
)
def test_bare_roots_are_rejected_before_any_work(
    words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["try_bare_roots.py", *words])
    with pytest.raises(SystemExit) as exited:
        try_bare_roots.main()
    assert exited.value.code == 2
    assert capsys.readouterr().err == message


def test_a_record_of_bare_roots_keeps_other_pythons(tmp_path: Path) -> None:
    def build_row(python: str, step: str, seconds: float) -> dict[str, Any]:
        command = {"command": f"make {step}", "seconds": seconds, "exit_code": 0, "printed": [f"{step} done"]}
        row = {"requested": python, "python": f"{python}.1", "debian": "13", "step": step, "commands": [command]}
        return row | {"date": "2026-11-28", "commit": "abc", "machine": "2 cores, load 1", "note": "stopped"}

    path = tmp_path / "record.json"
    for row in (("3.13", "test", 9.0), ("3.11", "quickstart", 5.0), ("3.13", "test", 1234.0)):
        add_to_record(path, build_row(*row))
    page = path.with_suffix(".md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if "`make" in line]
    assert [line.split(" | ")[4] for line in lines] == ["5 s", "1,234 s"]
    assert "\n\n- Python 3.11.1, quickstart: stopped\n- Python 3.13.1, test: stopped\n\n" in page
    assert "## Python 3.11.1 on Debian 13: quickstart\n\n```\nquickstart done\n```" in page


def test_a_record_of_a_bare_root_names_the_commit_that_was_cloned() -> None:
    """The checkout may have moved on since, or have uncommitted changes, which a clone does not get."""

    class Root:
        def run(self, command: str) -> CommandResult:
            return CommandResult(command, 0.1, 0, ["Python 3.13.5", "13.8"])

    done = CommandResult("make test", 9.04, 0, ["3% left in total", "all passed"])
    found = try_bare_roots.describe(cast(BareRoot, Root()), "3.13", "abc", [done])
    assert (found["commit"], found["python"], found["debian"]) == ("abc", "3.13.5", "13.8")
    assert found["commands"] == [{"command": "make test", "seconds": 9.0, "exit_code": 0, "printed": ["all passed"]}]


@pytest.mark.parametrize(
    ("ending", "recorded"),
    [(0, {"setup-dev": 4, "test": 1}), (2, {"test": 2}), (None, {"test": 9})],
)
def test_an_interrupted_step_keeps_its_earlier_record(
    ending: int | None, recorded: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of two steps passes, fails or is interrupted. Numbers are seconds of a step's last command."""

    class Root:
        @staticmethod
        def build(*_: Any) -> "Root":
            return Root()

        def add_packages(self, packages: list[str]) -> CommandResult:
            return CommandResult("apt-get", 1, 0, [])

        def add_repository(self, source: Path) -> str:
            return "/srv/farfield.git"

        def run(self, command: str, working_folder: str = "") -> CommandResult:
            if command == "make test" and ending is None:
                raise KeyboardInterrupt
            if command == "make test":
                return CommandResult(command, 1 + ending / 2, ending, [])
            return CommandResult(command, 4, 0, ["Python 3.13.5", "13.8"])

    path = tmp_path / "record.json"
    earlier = {"command": "make test", "seconds": 9, "exit_code": 0, "printed": []}
    row = {"requested": "3.13", "python": "3.13.5", "debian": "13.8", "step": "test", "commands": [earlier]}
    add_to_record(path, row | {"date": "2026-11-27", "commit": "abc", "machine": "2 cores, load 1"})
    monkeypatch.setattr(try_bare_roots, "BareRoot", Root)
    monkeypatch.setattr(sys, "argv", ["try_bare_roots.py", "3.13", "test", "setup-dev", "--json", str(path)])
    if ending == 0:
        try_bare_roots.main()
    else:
        with pytest.raises(KeyboardInterrupt if ending is None else SystemExit):
            try_bare_roots.main()
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert {each["step"]: each["commands"][-1]["seconds"] for each in rows} == recorded
    assert [each["step"] for each in rows] == sorted(recorded)


def test_the_table_of_versions_names_failed_tests() -> None:
    tests = {"passed": 1200, "skipped": 2, "failed": ["test_a::x"], "seconds": 10}
    row = {
        "versions": {"python": "3.11.7", "torch": "2.15.0"},
        "tests": tests,
        "exchange": {"written": 0.0, "read": 1e-7},
    }
    page = versions.render_page({"newest": row | {"date": "2026-11-28", "commit": "abc"}}, 1e-5)
    line = "| 1,200 passed, 2 skipped, 1 failed | 0.0e+00 | 1.0e-07 | 2026-11-28, abc |"
    assert line in page
    assert page.startswith("# Versions tried together")
    assert "- newest: test_a::x" in page


@pytest.mark.slow
def test_checkpoints_are_exchanged_between_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One environment reads its own checkpoints without any difference, in six trainings."""
    trained = []

    def run(python: Path, folder: Path, *words: str) -> None:
        trained.append((python.name, words[0]))
        done = forked.run(ROOT / "deepy.py", *words, cwd=folder)
        assert done.returncode == 0, done.stderr

    monkeypatch.setattr(exchange, "run_command", run)
    assert exchange.compare_checkpoints(Path("a"), Path("b"), tmp_path) == {"written": 0.0, "read": 0.0}
    assert "".join(python for python, command in trained if command == "train") == "aabbba"


def test_every_test_of_other_versions_exists() -> None:
    assert all((ROOT / path).exists() for path in versions.TESTS)
