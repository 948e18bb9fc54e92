"""Training as a process: its result, and how it is ended. Small scripts replace `deepy.py`."""

import os
import textwrap
import time
from pathlib import Path

import pytest

from megatron.sweeps import member_run
from megatron.training import metrics_log
from megatron.utils.errors import RunError, UserError


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(member_run, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(member_run, "COMMAND", [str(tmp_path / "trainer.py")])
    return tmp_path


def train(script: str, watch=lambda step: None) -> None:
    Path("trainer.py").write_text(textwrap.dedent(script))
    member_run.train_in_subprocess(Path("run.yml"), Path("run.txt"), Path("metrics.jsonl"), watch)


def test_a_training_is_watched_to_its_end(place: Path) -> None:
    Path("metrics.jsonl").write_text('{"kind": "train", "step": 99}\n')  # from an earlier attempt
    os.utime("metrics.jsonl", (1, 1))
    seen: list[int | None] = []

    def watch(step: int | None) -> None:
        seen.append(step)
        if step is None:
            Path("watched").touch()

    train(
        """
        import sys, time
        from pathlib import Path
        while not Path("watched").exists():
            time.sleep(0.01)
        Path("metrics.jsonl").write_text('{"kind": "train", "step": 1}\\n{"kind": "train", "step": 2}\\n{"kind": ')
        print("arguments", sys.argv[1:])
        time.sleep(0.2)
        """,
        watch,
    )
    assert seen[0] is None
    assert seen[-1] == 2
    assert Path("run.txt").read_text() == "arguments ['train', 'run.yml']\n"


def test_its_last_output_is_reported(place: Path) -> None:
    with pytest.raises(RunError) as caught:
        train("import sys; sys.exit('noise\\nerror: the loss is NaN\\nmore noise')")
    assert str(caught.value) == "the loss is NaN"
    assert "noise" in Path("run.txt").read_text()
    with pytest.raises(UserError, match=r"^no such key$"):
        train("import sys; print('error: no such key', file=sys.stderr); sys.exit(2)")
    with pytest.raises(RunError, match=r"training failed with exit code 9; output: run.txt"):
        train("import sys; sys.exit(9)")


PATIENT = """
    import os, signal, sys, time
    from pathlib import Path

    def save(*_):
        time.sleep(0.3)
        Path("saved").touch()
        sys.exit(143)

    signal.signal(signal.SIGTERM, save)
    parent = os.environ["FARFIELD_PARENT"]
    Path("started").write_text(f"{os.getpid()} {os.getsid(0)} {parent}")
    time.sleep(60)
"""


def interrupted(step: int | None) -> None:
    if Path("started").is_file() and Path("started").read_text():
        raise KeyboardInterrupt


def test_an_interrupt_lets_training_save(place: Path) -> None:
    """An interrupt gives training time to save: it gets one signal, in its own session."""
    with pytest.raises(KeyboardInterrupt):
        train(PATIENT, interrupted)
    pid, session, parent = map(int, Path("started").read_text().split())
    assert (session, parent) == (pid, os.getpid())
    assert Path("saved").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_second_interrupt_stops_immediately(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = member_run.subprocess.Popen.wait

    def impatient(self: object, timeout: float | None = None) -> int:
        monkeypatch.setattr(member_run.subprocess.Popen, "wait", usual)
        raise KeyboardInterrupt

    monkeypatch.setattr(member_run.subprocess.Popen, "wait", impatient)
    with pytest.raises(KeyboardInterrupt):
        train(PATIENT, interrupted)
    assert not Path("saved").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path("started").read_text().split()[0]), 0)


@pytest.mark.parametrize(
    ("content", "step"),
    [
        ("", None),
        ('{"kind": "train", "step": 1}\n{"kind": "train", "step": 2}\n', 2),
        ('{"kind": "train", "step": 1}\n{"ki', 1),
        ('{"kind": "train", "step": 1}\nnoise\n[]\n{"step": 2}\n', 1),
    ],
)
def test_the_newest_step_that_was_written(place: Path, content: str, step: int | None) -> None:
    metrics = Path("metrics.jsonl")
    assert metrics_log.read_last_step(metrics, 0) is None
    metrics.write_text(content)
    assert metrics_log.read_last_step(metrics, 0) == step
    assert metrics_log.read_last_step(metrics, time.time() + 60) is None
