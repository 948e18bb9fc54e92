"""GPU check: valid command lines of all parts, and a record of every outcome."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.bench import attention as attention_bench
from tools.bench import (
    graph_training,
    instruction_rates,
    kernel_counters,
    profile_step,
    tiles,
    train_loop,
    train_step,
)
from tools.gpu import check as gpu_check
from tools.gpu import evidence, self_check
from tools.gpu import parts as gpu_parts
from tools.gpu.parts import CheckPart

ROOT = Path(__file__).resolve().parents[2]
GOOD = CheckPart("good", 30, ("-c", "open(r'{output}', 'w').write('{\"records\": [], \"command\": \"inner\"}')"))
BAD = CheckPart("bad", 30, ("-c", "import sys; print('what went wrong'); sys.exit(3)"))
HALF = CheckPart("half", 30, ("-c", "open(r'{output}', 'w').write('{\"rec'); raise SystemExit(4)"))
ALL = [
    *(*gpu_parts.list_parts(), *gpu_parts.list_rehearsal_parts()),
    *(*gpu_parts.list_visit_parts(), *gpu_parts.list_visit_rehearsal_parts()),
]
STAMP = {"date": "2026-11-21", "command": "python", "commit": None, "machine": "cpu", "versions": {"torch": "2"}}
TOOLS = {
    "tools/gpu/self_check.py": self_check.parse_arguments,
    "tools/bench/attention.py": attention_bench.parse_arguments,
    "tools/bench/train_step.py": train_step.parse_arguments,
    "tools/bench/profile_step.py": profile_step.parse_arguments,
    "tools/bench/tiles.py": tiles.parse_arguments,
    "tools/bench/graph_training.py": graph_training.parse_arguments,
    "tools/bench/train_loop.py": train_loop.parse_arguments,
    "tools/bench/instruction_rates.py": instruction_rates.parse_arguments,
    "tools/bench/kernel_counters.py": kernel_counters.parse_arguments,
    "tools/gpu/evidence.py": evidence.parse_arguments,
}


@pytest.mark.parametrize("part", ALL, ids=[f"{part.name}-{place}" for place, part in enumerate(ALL)])
def test_the_tool_passes_arguments_to_its_parts(
    part: CheckPart, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if part.name == "tests":
        command = list(part.command)
        assert (ROOT / command[command.index("pytest") + 1]).is_dir()
        return
    if "cpu" in part.command:
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # a CPU has no such peer otherwise
    else:
        request.getfixturevalue("gpu")
    values = {"{output}": str(tmp_path / "a.json"), "{results}": str(tmp_path), "{seconds}": "9"}
    words = [gpu_check._fill_in(word, values) for word in part.command]
    monkeypatch.setattr(sys, "argv", words)
    arguments = TOOLS[words[0]]()
    assert arguments.json == tmp_path / "a.json"
    if "device" in arguments:  # the tools that train have one each
        assert arguments.device == ("cpu" if {"cpu", "--rehearse"} & {*part.command} else "cuda")


def test_the_rehearsals_choice_of_tests_is_not_empty() -> None:
    command = next(part.command for part in gpu_parts.list_rehearsal_parts() if part.name == "tests")
    wanted = command[command.index("-k") + 1].split(" or ")
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests/kernels").rglob("test_*.py"))
    for word in wanted:
        assert re.search(rf"def test_\w*{word}", sources), word


@pytest.mark.parametrize(
    ("list_parts", "list_rehearsed"),
    [
        (gpu_parts.list_parts, gpu_parts.list_rehearsal_parts),
        (gpu_parts.list_visit_parts, gpu_parts.list_visit_rehearsal_parts),
    ],
)
def test_a_rehearsal_has_every_part_in_the_same_order(
    list_parts: Callable[[], list[CheckPart]], list_rehearsed: Callable[[], list[CheckPart]]
) -> None:
    names, rehearsed = ([part.name for part in parts] for parts in (list_parts(), list_rehearsed()))
    assert len(set(names)) == len(names)
    assert names == rehearsed


def test_the_most_important_parts_come_first_with_enough_time() -> None:
    parts = gpu_parts.list_parts()
    first = parts[: [part.name for part in parts].index("tests")]
    assert [part.name for part in first] == [
        "self_check", "correct_bias", "correct_cdape", "mixer", "step_350m", "cdape", "cdape_compiled", "bias", "flex",
        "memory", "long", "long_layer",
    ]  # fmt: skip
    assert sum(part.seconds for part in first[:5]) < gpu_check.MAX_TOTAL_SECONDS - 5 * gpu_check.GRACE_SECONDS
    assert gpu_check.MAX_TOTAL_SECONDS < 8 * 60  # stated in the help and the Makefile


@pytest.fixture
def at_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """File; a part's time is up as soon as the part has created it, however slow the machine is."""
    busy_message = tmp_path / "at work"

    class Timed(subprocess.Popen):
        waited = False

        def wait(self, timeout: float | None = None) -> int:
            if timeout is None or self.waited:
                return super().wait(timeout)
            self.waited = True
            while not busy_message.exists():
                time.sleep(0.01)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(gpu_check.subprocess, "Popen", Timed)
    return busy_message


def check(parts: list[CheckPart], path: Path) -> tuple[int, dict[str, Any]]:
    code = gpu_check.report_check(gpu_check.run_parts(parts, path, rehearsal=True), path)
    return code, json.loads(path.read_text(encoding="utf-8"))


def test_a_failed_part_is_reported_and_the_others_run(tmp_path: Path) -> None:
    code, result = check([BAD, HALF, GOOD], tmp_path / "a.json")
    assert code == 1
    assert list(result)[:5] == ["date", "command", "commit", "machine", "versions"]
    assert result["rehearsal"] is True
    assert {name: part["exit"] for name, part in result["parts"].items()} == {"bad": 3, "half": 4, "good": 0}
    assert result["parts"]["bad"]["output"] == "what went wrong\n"
    assert result["parts"]["half"]["records"] == []
    assert result["parts"]["good"]["records"] == []
    assert result["parts"]["good"]["command"].startswith("python -c")
    assert str(tmp_path) not in result["parts"]["good"]["command"]
    assert "output" not in result["parts"]["good"]


def test_all_well_is_exit_code_0(tmp_path: Path) -> None:
    assert check([GOOD], tmp_path / "a.json")[0] == 0


def test_a_part_that_does_not_end_is_killed_with_all_it_started(
    at_work: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_check, "GRACE_SECONDS", 0.1)
    shell = f"trap '' INT; sleep 600 & echo $! > '{at_work}.pid'; mv '{at_work}.pid' '{at_work}'; wait; wait"
    hanging = CheckPart("hangs", 2, ("-c", f"import os; os.execlp('sh', 'sh', '-c', {shell!r})"))
    assert gpu_check.run_part(hanging, tmp_path, {})["exit"] == "cut after 2 s, killed"
    child = Path("/proc") / at_work.read_text().strip() / "cmdline"
    for _ in range(500):  # ended, or a zombie
        if not child.exists() or not child.read_bytes():
            return
        time.sleep(0.01)
    pytest.fail("a child is left")


def test_an_interrupted_part_writes_its_results(at_work: Path, tmp_path: Path) -> None:
    code = (
        "import time\n"
        f"try:\n    open({str(at_work)!r}, 'w'); time.sleep(60)\n"
        "except KeyboardInterrupt:\n    open(r'{output}', 'w').write('{\"records\": []}'); raise SystemExit(0)"
    )
    cut = CheckPart("slow", 2, ("-c", code))
    exit_code, result = check([cut], tmp_path / "a.json")
    assert exit_code == 1
    assert result["parts"]["slow"]["exit"] == "cut after 2 s"
    assert result["parts"]["slow"]["records"] == []


def test_a_part_gets_at_most_the_remaining_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[float] = []
    monkeypatch.setattr(
        gpu_check, "_run_command", lambda command, environment, seconds: (given.append(seconds), (0, ""))[1]
    )
    sleeper = CheckPart("sleeper", 60, ("-c", ""))
    grace = gpu_check.GRACE_SECONDS
    for left in (float("inf"), 1000.0, grace + 5.0):
        gpu_check.run_part(sleeper, tmp_path, {}, left=left)
    assert given == [60, 60, 5]
    assert gpu_check.run_part(sleeper, tmp_path, {}, left=grace)["exit"] == "not run: no time left"
    assert len(given) == 3


def test_the_total_holds_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_check, "collect_provenance", lambda script, device: {**STAMP, "machine": device})
    limit = gpu_check.GRACE_SECONDS
    done = gpu_check.run_parts([GOOD], tmp_path / "a.json", rehearsal=False, max_seconds=limit)
    assert gpu_check.get_exit_code(done) == 1
    result = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert result["machine"] == "cuda"
    assert result["parts"]["good"]["exit"] == "not run: no time left"


def test_folders_in_pythonpath_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PYTHONPATH is kept, because packages missing on a machine are provided in a folder that it names."""
    (tmp_path / "carried_package.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = CheckPart(
        "finds", 30, ("-c", "import carried_package, tools.records; print(carried_package, tools.records)")
    )
    assert gpu_check.run_part(finding, tmp_path, gpu_check.build_environment(rehearsal=True))["exit"] == 0
    monkeypatch.delenv("PYTHONPATH")
    assert gpu_check.build_environment(rehearsal=False)["PYTHONPATH"] == str(ROOT)
    assert gpu_check.build_environment(rehearsal=True)["TRITON_INTERPRET"] == "1"


def test_a_bare_machine_skips_missing_dependencies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing = {"megatron.core", "pydantic"}
    find = gpu_parts.find_spec

    def absent(name: str) -> Any:
        if name in missing:
            raise ModuleNotFoundError(name)
        return find(name)

    monkeypatch.setattr(gpu_parts, "find_spec", absent)
    code, result = check([*(part for part in ALL if part.name == "step_350m"), GOOD], tmp_path / "a.json")
    assert code == 1
    assert result["parts"]["step_350m"] == {"exit": "not run: needs megatron-core, pydantic", "seconds": 0.0}
    assert result["parts"]["good"]["exit"] == 0
    command = gpu_parts.build_test_part(90).command
    ignored = {ROOT / path for word, path in pairwise(command) if word == "--ignore"}
    tests = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests/kernels").rglob("test_*.py")}
    assert ignored <= set(tests)
    assert {path for path, text in tests.items() if "import build_model" in text} <= ignored


def test_the_gpu_check_includes_every_kernel_test_with_a_device() -> None:
    left = {ROOT / "tests/kernels" / name for name in gpu_parts.HOST_TESTS}
    tests = set((ROOT / "tests/kernels").rglob("test_*.py"))
    taking = {path for path in tests if re.search(r"\b(device|DEVICE)\b", path.read_text(encoding="utf-8"))}
    assert left == tests - taking | {ROOT / "tests/kernels/test_rehearsal.py"}  # which uses its own device


def test_junit_counts_exist_if_pytest_is_interrupted(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        "import os, signal\n"
        "def test_a(): pass\ndef test_b(): assert False\n"
        "def test_c(): os.kill(os.getpid(), signal.SIGINT)\ndef test_d(): pass\n"
    )
    words = ("-m", "pytest", "-q", "-c", "/dev/null", "-p", "no:cacheprovider", "-p", "no:hypothesispytest")
    files = ("--rootdir", str(tmp_path), str(tmp_path / "test_a.py"), "--junitxml", "{output}")
    code, result = check([CheckPart("tests", 50, (*words, *files))], tmp_path / "a.json")
    assert code == 1
    assert result["parts"]["tests"]["counts"] == {"tests": 2, "failures": 1, "errors": 0, "skipped": 0}
    assert result["parts"]["tests"]["failed"] == ["test_a::test_b"]
    assert "assert False" in result["parts"]["tests"]["output"]


def test_ctrl_c_ends_the_part_and_keeps_those_before(tmp_path: Path) -> None:
    started = tmp_path / "started"
    sleep = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    code = (
        "import sys, tools.gpu.check as check, pathlib\n"
        "from tools.gpu.parts import CheckPart\n"
        "from tools.arguments import print_interrupts_in_one_line\n"
        "print_interrupts_in_one_line()\n"
        "provenance = {'date': '', 'machine': '', 'versions': {}, 'command': '', 'commit': None}\n"
        "check.collect_provenance = lambda *_: provenance\n"
        f"parts = [CheckPart('good', 30, ('-c', '')), CheckPart('slow', 60, ('-c', {sleep!r}))]\n"
        f"check.run_parts(parts, pathlib.Path({str(tmp_path / 'a.json')!r}), rehearsal=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not (started.exists() and started.read_text()):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.communicate()[1] == "interrupted\n"
    assert list(json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["parts"]) == ["good"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_ctrl_c_while_a_part_starts_does_not_leave_it_running(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[subprocess.Popen] = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *words: Any, **options: Any) -> None:
            super().__init__(*words, **options)
            started.append(self)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(gpu_check.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        gpu_check.run_part(CheckPart("slow", 60, ("-c", "import time; time.sleep(60)")), tmp_path, {})
    assert started[0].returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--rehearse", "--parts", "all"), "--parts: invalid choice: 'all'"),
        (("--rehearse", "--json", "no/such/folder/a.json"), "its folder does not exist"),
        (("--rehearse", "--json", "a.md"), "a.md is the name of the page"),
        pytest.param(
            (), "no CUDA device found; --rehearse", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="GPU")
        ),
    ],
)
def test_a_bad_argument_is_one_line(words: tuple[str, ...], says: str, refuses: Callable[..., None]) -> None:
    refuses(gpu_check, *words, says=says)


def test_a_rehearsal_does_not_write_over_a_record(command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    monkeypatch.setattr(gpu_check, "run_parts", lambda chosen, path, rehearsal: written.append(path) or {})
    monkeypatch.setattr(gpu_check, "report_check", lambda result, path: 0)
    assert command(gpu_check, "--rehearse") == 0
    assert gpu_check.RECORD not in written
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert command(gpu_check) == 0
    assert written[1] == gpu_check.RECORD


def test_the_self_check_accepts_method_files_and_checks_each_layer_kind(tmp_path: Path) -> None:
    tiny = ["--device", "cpu", "--lengths", "8", "--batch", "1", "--heads", "2", "--dim", "16", "--dtype", "fp32"]
    command = [sys.executable, "tools/gpu/self_check.py", *tiny, "--json", str(tmp_path / "found.json")]
    methods = ["irope", "rotary_randomized", "cope"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([*command, "--methods", *methods], cwd=ROOT, env=environment, check=True, capture_output=True)
    records = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["records"]
    assert [record["method"] for record in records] == ["irope: rotary", "irope: none", "rotary_randomized", "cope"]
    trials = [{trial["backend"]: trial["refusal"] for trial in record["trials"]} for record in records]
    assert [found.get("triton", "not there") for found in trials] == [
        *(None, None), "falls back to row blocks for randomized positions", "not there",
    ]  # fmt: skip
    assert trials[3] == {"row blocks": "is the only supported backend, and not checked"}
    assert (tmp_path / "found.md").read_text(encoding="utf-8").count("irope: none") == 3


def test_the_self_check_tries_every_backend_however_long_it_takes(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A run leaves backends untried after `CHECK_SECONDS`; a part of a visit measures them all."""
    monkeypatch.setattr("megatron.attention.check.trials.CHECK_SECONDS", -1.0)
    monkeypatch.setattr(self_check.gc, "freeze", lambda: None)
    tiny = ("--device", "cpu", "--lengths", "8", "--batch", "1", "--heads", "2", "--dim", "16", "--dtype", "fp32")
    command(self_check, "--methods", "rotary", *tiny, "--json", str(tmp_path / "a.json"))
    (record,) = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["records"]
    assert len(record["trials"]) > 1
    assert all(trial["refusal"] is None for trial in record["trials"])
