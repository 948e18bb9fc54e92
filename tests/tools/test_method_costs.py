"""Costs of a leaderboard's methods: ratios to the baseline in the same round, for training steps and scoring."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.bench import method_costs

TINY = {
    "num_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 8,
    "train_data_paths": ["data/shakespeare/train_text_document"],
    "test_data_paths": ["data/shakespeare/test_text_document"],
    "train_iters": 2,
    "train_micro_batch_size_per_gpu": 2,
    "sweep": {
        "output": "runs/tiny",
        "corpus": {"sources": ["shakespeare"], "folder": "data/shakespeare"},
        "seeds": [1, 2],
        "against": "rotary",
        "variants": {"rotary": {"pos_emb": "rotary"}, "learned": {"pos_emb": "learned"}, "none": {"pos_emb": "none"}},
        "evaluate": {"lengths": ["1x", "4x"], "num_windows": 4, "targets": 4},
    },
}


def test_ratios_are_of_the_same_round() -> None:
    """The machine of the second round is ten times as slow, which changes no ratio."""
    times = {"rotary": [1.0, 10.0, 2.0], "none": [0.5, 6.0, 1.2]}
    summary = method_costs.compute_cost_ratios(times, "rotary")
    assert summary["rotary"] == {"seconds": 2.0, "ratio": [1.0, 1.0, 1.0]}
    assert summary["none"] == {"seconds": 1.2, "ratio": [0.55, 0.6, 0.6]}


@pytest.mark.slow
def test_all_methods_are_measured_in_each_round(
    command: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny.yml").write_text(yaml.safe_dump(TINY, sort_keys=False), encoding="utf-8")
    words = ("--configs", str(tmp_path / "tiny.yml"), "--rounds", "2", "--steps", "2", "--windows", "3")
    assert command(method_costs, *words, "--json", str(tmp_path / "costs.json")) in (None, 0)
    record = json.loads((tmp_path / "costs.json").read_text(encoding="utf-8"))
    assert (record["baseline"], record["length"], record["rounds"]) == ("rotary", 32, 2)
    assert set(record["step"]) == {"rotary", "learned", "none"}
    assert set(record["scoring"]) == {"rotary", "none"}  # the table of learned ends at 8
    assert all(cost["seconds"] > 0 for name in ("step", "scoring") for cost in record[name].values())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["rotary", "learned", "none"]
    assert lines[3].endswith("–")


def test_configurations_without_a_baseline_are_rejected(refuses: Callable[..., Any], tmp_path: Path) -> None:
    sweep = {key: value for key, value in TINY["sweep"].items() if key != "against"}  # type: ignore[attr-defined]
    (tmp_path / "tiny.yml").write_text(yaml.safe_dump({**TINY, "sweep": sweep}), encoding="utf-8")
    refuses(method_costs, "--configs", str(tmp_path / "tiny.yml"), says="sweep.against and sweep.corpus are missing")


@pytest.mark.parametrize(
    ("name", "hint"), [("rotry", "did you mean rotary?"), ("zzz", "choose from rotary, learned, none")]
)
def test_unknown_methods_are_rejected(refuses: Callable[..., Any], tmp_path: Path, name: str, hint: str) -> None:
    (tmp_path / "tiny.yml").write_text(yaml.safe_dump(TINY, sort_keys=False), encoding="utf-8")
    words = ("--configs", str(tmp_path / "tiny.yml"), "--methods", "rotary", name)
    refuses(method_costs, *words, says=f"{name!r} is not a variant of the sweep; {hint}")
