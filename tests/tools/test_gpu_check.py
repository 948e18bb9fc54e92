"""The one command for a GPU: its parts' command lines are valid, and whatever happens to a part is in the file."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tools import bench_kernels, bench_step, gpu_check
from tools.gpu_check import Part

ROOT = Path(__file__).resolve().parents[2]
GOOD = Part("good", 30, ("-c", "open(r'{output}', 'w').write('{\"records\": [1, 2], \"command\": \"inner\"}')"))
BAD = Part("bad", 30, ("-c", "import sys; print('what went wrong'); sys.exit(3)"))
HALF = Part("half", 30, ("-c", "open(r'{output}', 'w').write('{\"rec'); raise SystemExit(4)"))
ALL = [*gpu_check.PARTS, *gpu_check.REHEARSAL]
TOOLS = {"tools/bench_kernels.py": bench_kernels.parse, "tools/bench_step.py": bench_step.parse}


@pytest.mark.parametrize("part", ALL, ids=[f"{part.name}-{place}" for place, part in enumerate(ALL)])
def test_the_tool_takes_a_parts_words(part: Part, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if part.name == "tests":
        command = list(part.command)
        assert (ROOT / command[command.index("pytest") + 1]).is_dir()
        return
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # else a CPU has no peer of that name
    words = [word.replace("{output}", str(tmp_path / "a.json")) for word in part.command]
    monkeypatch.setattr(sys, "argv", words)
    arguments = TOOLS[words[0]]()
    assert arguments.json == tmp_path / "a.json"


def test_the_rehearsals_choice_of_tests_is_not_empty() -> None:
    command = gpu_check.REHEARSAL[0].command
    wanted = command[command.index("-k") + 1].split(" or ")
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests/kernels").rglob("test_*.py"))
    for word in wanted:
        assert re.search(rf"def test_\w*{word}", sources), word


def test_a_rehearsal_has_parts_of_the_check_and_leaves_out_long_ones_only() -> None:
    names, rehearsed = ([part.name for part in parts] for parts in (gpu_check.PARTS, gpu_check.REHEARSAL))
    assert len(set(names)) == len(names)
    assert [name for name in names if not name.endswith("_long")] == rehearsed


def check(parts: list[Part], path: Path) -> tuple[int, dict[str, Any]]:
    code = gpu_check.check(parts, path, rehearsal=True)
    return code, json.loads(path.read_text(encoding="utf-8"))


def test_a_part_that_fails_is_told_and_the_others_have_their_turn(tmp_path: Path) -> None:
    code, result = check([BAD, HALF, GOOD], tmp_path / "a.json")
    assert code == 1
    assert list(result)[:5] == ["date", "command", "commit", "machine", "versions"]
    assert result["rehearsal"] is True
    assert {name: part["exit"] for name, part in result["parts"].items()} == {"bad": 3, "half": 4, "good": 0}
    assert result["parts"]["bad"]["output"] == "what went wrong\n"
    assert result["parts"]["half"]["records"] == []
    assert result["parts"]["good"]["records"] == [1, 2]
    assert result["parts"]["good"]["command"].startswith("python -c")
    assert str(tmp_path) not in result["parts"]["good"]["command"]
    assert "output" not in result["parts"]["good"]


def test_all_well_is_exit_code_0(tmp_path: Path) -> None:
    assert check([GOOD], tmp_path / "a.json")[0] == 0


def test_a_part_that_hangs_is_stopped_with_all_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    shell = f"sleep 600 & echo $! > {pid}; wait"
    hanging = Part("hangs", 2, ("-c", f"import os; os.execlp('sh', 'sh', '-c', {shell!r})"))
    exit_code, result = check([hanging, GOOD], tmp_path / "a.json")
    assert exit_code == 1
    assert result["parts"]["hangs"]["exit"] == "stopped after 2 s"
    assert result["parts"]["hangs"]["seconds"] < 300
    assert result["parts"]["good"]["exit"] == 0
    child = Path("/proc") / pid.read_text().strip() / "cmdline"
    assert not child.exists() or not child.read_bytes()  # gone, or dead and not yet buried


def test_records_of_a_part_that_is_stopped_are_kept(tmp_path: Path) -> None:
    code = "import time; open(r'{output}', 'w').write('{\"records\": [1]}'); time.sleep(30)"
    result = check([Part("slow", 1, ("-c", code))], tmp_path / "a.json")[1]
    assert result["parts"]["slow"]["records"] == [1]


def test_a_part_gets_no_more_than_is_left(tmp_path: Path) -> None:
    sleeper = Part("sleeper", 60, ("-c", "import time; time.sleep(30)"))
    assert gpu_check.run(sleeper, tmp_path, {}, left=0.5)["exit"] == "stopped after 0 s"
    assert gpu_check.run(sleeper, tmp_path, {}, left=-1.0)["exit"] == "not run: no time was left"
    assert gpu_check.TOTAL < 8 * 60  # what the help and the Makefile promise


def test_the_total_holds_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_check, "TOTAL", 1)
    monkeypatch.setattr(gpu_check, "stamp", lambda script, device: {"device": device})
    sleeper = Part("sleeper", 60, ("-c", "import time; time.sleep(30)"))
    assert gpu_check.check([sleeper, GOOD], tmp_path / "a.json", rehearsal=False) == 1
    result = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert result["device"] == "cuda"
    assert [part["exit"] for part in result["parts"].values()] == ["stopped after 1 s", "not run: no time was left"]


def test_a_bare_machine_runs_what_it_can(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = {"megatron.core", "pydantic"}
    find = gpu_check.find_spec

    def absent(name: str) -> Any:
        if name in gone:
            raise ModuleNotFoundError(name)
        return find(name)

    monkeypatch.setattr(gpu_check, "find_spec", absent)
    code, result = check([*(part for part in gpu_check.PARTS if part.name == "steps"), GOOD], tmp_path / "a.json")
    assert code == 1
    assert result["parts"]["steps"] == {"exit": "not run: needs megatron-core, pydantic", "seconds": 0.0}
    assert result["parts"]["good"]["exit"] == 0
    command = gpu_check.tests(90).command
    ignored = ROOT / command[command.index("--ignore") + 1]
    assert "build_model" in ignored.read_text(encoding="utf-8")
    needing = {path for path in (ROOT / "tests/kernels").rglob("*.py") if "megatron.model.build" in path.read_text()}
    assert needing == {ignored}


def test_junit_counts(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_a(): pass\ndef test_b(): assert False\n")
    words = ("-m", "pytest", "-q", "-c", "/dev/null", "-p", "no:cacheprovider", "--rootdir", str(tmp_path))
    part = Part("tests", 50, (*words, str(tmp_path / "test_a.py"), "--junitxml", "{output}"))
    code, result = check([part], tmp_path / "a.json")
    assert code == 1
    assert result["parts"]["tests"]["counts"] == {"tests": 2, "failures": 1, "errors": 0, "skipped": 0}
    assert result["parts"]["tests"]["failed"] == ["test_b"]
    assert "assert False" in result["parts"]["tests"]["output"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--rehearse", "--parts", "all"), "--parts: invalid choice: 'all'"),
        (("--rehearse", "--parts", "cdape_long"), "a rehearsal has no part cdape_long"),
        (("--rehearse", "--json", "no/such/folder/a.json"), "its folder does not exist"),
        pytest.param(
            (), "no CUDA device is here; --rehearse", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="GPU")
        ),
    ],
)
def test_a_bad_argument_is_one_line(words: tuple[str, ...], says: str, refuses: Callable[..., None]) -> None:
    refuses("tools/gpu_check.py", *words, says=says)
