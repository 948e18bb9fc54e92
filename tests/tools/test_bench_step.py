"""The benchmark of training steps as a user runs it, on a CPU with the tiny model made for that."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools import bench_step

SCRIPT = "tools/bench_step.py"
TINY = ("--device", "cpu", "--shapes", "tiny:16", "--tokens", "32", "--rounds", "2", "--dtype", "fp32")


def test_a_rehearsal_has_every_model_and_field(run_tool: Callable[..., Any], tmp_path: Path) -> None:
    done = run_tool(SCRIPT, *TINY, "--json", str(tmp_path / "a.json"))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert list(result) == ["date", "command", "commit", "machine", "versions", "records"]
    assert [record["peer"] for record in result["records"]] == ["rotary", "kerple_log", "cdape", "plain"]
    for record in result["records"]:
        expected = {"op": "train_step", "model": "tiny", "device": "cpu", "dtype": "fp32", "B": 2, "T": 16, "rounds": 2}
        assert {key: record[key] for key in expected} == expected
        low, middle, high = record["ms"]["both"]
        assert 0 < low <= middle <= high
        assert record["tokens_per_second"] == pytest.approx(1e3 * 2 * 16 / middle, rel=0.01)
        assert {"ratio_to_rotary", "ratio_to_kerple_log", "ratio_to_plain", "tflops"} < set(record)
        assert record[f"ratio_to_{record['peer']}"] == 1 if record["peer"] != "cdape" else True
        assert record["mfu"] is None  # a CPU's peak is not known
    assert len(done.stdout.splitlines()) == 4


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("--shapes", "tiny:16", "huge:512"),
            "must be MODEL:LENGTH with MODEL one of tiny, 125M, 350M, not 'huge:512'",
        ),
        (("--shapes", "tiny:0"), "not 'tiny:0'"),
        (("--rounds", "1"), "--rounds: must be a whole number, at least 2, not '1'"),
        (("--methods", "alibi"), "--methods: invalid choice: 'alibi'"),
    ],
)
def test_a_bad_argument_is_one_line(
    words: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [SCRIPT, *TINY, *words])
    with pytest.raises(SystemExit) as left:
        bench_step.parse()
    said = capsys.readouterr().err
    assert left.value.code == 2
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert says in said


def test_the_benchmark_of_training_takes_no_other_words(refuses: Callable[..., None]) -> None:
    refuses("tools/bench_train.py", "--shapes", "quickstart,tiny", says="'tiny' is not one of quickstart, medium")
