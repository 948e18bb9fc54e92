"""docs/tutorial.md in a copy of the project: all files written, all commands run, with fewer steps.

The commands are forks of a process that has imported the copy, except the one that runs tests; it checks that a
separate process finds everything.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import forked

ROOT = Path(__file__).resolve().parents[1]
TAKEN = ("farfield", "megatron", "configs", "docs", "tests", "tools", "deepy.py", "pyproject.toml")
SET_UP = "make setup-dev"
"""The only omitted command; the tests run in the environment that it creates."""
LESS = {"train_iters: 400": "train_iters: 20", "--num-windows 16": "--num-windows 4"}


def blocks(text: str) -> list[tuple[str, str]]:
    """Return the fenced blocks of a page with their languages."""
    return re.findall(r"^```(\w+)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[list[str]]:
    """Return the commands of a block as words, starting with the program."""
    lines = block.replace("\\\n", " ").splitlines()
    return [line.split() for line in lines if line and line != SET_UP]


def run(words: list[str], here: Path) -> subprocess.CompletedProcess[str]:
    program, *rest = words
    assert program in ("./deepy.py", ".venv/bin/python")
    if program == ".venv/bin/python":
        return subprocess.run([sys.executable, *rest], cwd=here, capture_output=True, text=True, timeout=300)
    return forked.run(here / program, *rest, cwd=here, root=here)


def test_the_tutorial_works(tmp_path: Path) -> None:
    here = tmp_path / "farfield"
    here.mkdir()
    for name in TAKEN:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, here / name, ignore=shutil.ignore_patterns("images"))
        else:
            shutil.copy(ROOT / name, here / name)
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    for much, less in LESS.items():
        assert page.count(much) == 1
        page = page.replace(much, less)
    output = ""
    for language, block in blocks(page):
        if language != "sh":
            (here / block.splitlines()[0].removeprefix("# ")).write_text(block, encoding="utf-8")
            continue
        for command in commands(block):
            done = run(command, here)
            assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            output += done.stdout
    assert re.search(r"^ *root ", output, flags=re.MULTILINE)
    assert re.search(r"\d\d passed", output)
    records = json.loads((here / "results" / "tutorial" / "results.json").read_text())
    found = {(Path(each["run"]).name, each["length"]): each["perplexity"] for each in records}
    methods = ("rotary", "kerple_log", "root", "root_cdape")
    assert set(found) == {(method, 32 * multiple) for method in methods for multiple in (1, 2, 4, 8, 16)}
    assert all(found[method, 32] < 100 for method in methods)  # starts at 257: all are learning
    assert (here / "results" / "tutorial" / "results.png").stat().st_size > 0
