"""docs/tutorial.md in a copy of the project: every file written, every command run; with fewer steps, to be cheap."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TAKEN = ("megatron", "kernels", "configs", "docs", "tests", "tools", "deepy.py", "pyproject.toml")
SET_UP = "make setup-dev"
"""The one command that is left out: the tests run in what it makes."""


def blocks(text: str) -> list[tuple[str, str]]:
    """The fenced blocks of a page, each with its language."""
    return re.findall(r"^```(\w+)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[list[str]]:
    lines = block.replace("\\\n", " ").splitlines()
    programs = {"./deepy.py": [sys.executable, "deepy.py"], ".venv/bin/python": [sys.executable]}
    words = [line.split() for line in lines if line and line != SET_UP]
    return [[*programs[first], *rest] for first, *rest in words]


def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    here = tmp_path / "farfield"
    here.mkdir()
    for name in TAKEN:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, here / name, ignore=shutil.ignore_patterns("__pycache__", "images"))
        else:
            shutil.copy(ROOT / name, here / name)
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    said = ""
    for language, block in blocks(page):
        if language != "sh":
            target = block.splitlines()[0].removeprefix("# ")
            (here / target).write_text(block.replace("train_iters: 150", "train_iters: 20"), encoding="utf-8")
            continue
        for command in commands(block):
            done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            said += done.stdout
    assert re.search(r"^ *root ", said, flags=re.MULTILINE)
    assert re.search(r"\d\d passed", said)
    records = json.loads((here / "results" / "tutorial" / "results.json").read_text())
    found = {(Path(each["run"]).name, each["length"]): each["perplexity"] for each in records}
    methods = ("rotary", "kerple_log", "root", "root_cdape")
    assert set(found) == {(method, 32 * multiple) for method in methods for multiple in (1, 2, 4, 8, 16)}
    assert all(found[method, 32] < 100 for method in methods)  # of 257: all have begun to learn
    assert (here / "results" / "tutorial" / "results.png").stat().st_size > 0
