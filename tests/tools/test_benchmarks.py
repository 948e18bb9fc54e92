"""Benchmarks of saves and of documents in rows: every kind is measured, and counts agree with an enumeration."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_runs import write_corpora

from tools.bench import checkpoint_save, tiles
from tools.bench.document_distances import measure_distances
from tools.bench.document_perplexity import cut_definitions


def test_every_kind_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_save, "prepare_corpus", lambda sources, where: write_corpora(where.parent))
    found = checkpoint_save.measure_saves("tiny", 1, tmp_path)
    assert set(found["medians"]) == {"step", "stall", "step_while_writing", "written", "waited_for"}
    assert 12 < found["bytes"] / found["parameters"] < 13
    assert found["medians"]["stall"] < found["medians"]["written"]
    stamp = {"versions": {}, "date": "2026-11-22", "command": "", "commit": "", "machine": ""}
    assert "| a step |" in checkpoint_save.render_page({**found, "stamp": stamp})


@given(st.lists(st.integers(0, 9), min_size=3, max_size=9).filter(lambda lengths: sum(lengths) >= 8))
def test_every_pair_is_counted(lengths: list[int]) -> None:
    length, owners = 8, np.repeat(np.arange(len(lengths)), lengths)
    rows = [owners[first : first + length] for first in range(0, len(owners) - length + 1, length)]
    pairs = {"causal": [], "document": []}
    for row in rows:
        for i in range(length):
            pairs["causal"] += [i - j for j in range(i + 1)]
            pairs["document"] += [i - j for j in range(i + 1) if row[i] == row[j]]
    found = measure_distances(np.array(lengths, dtype=np.int32), length)
    assert found.crossing_share == pytest.approx(np.mean([len(set(row)) > 1 for row in rows]))
    assert found.lost_pairs == pytest.approx(1 - len(pairs["document"]) / len(pairs["causal"]))
    for mask, distances in pairs.items():
        assert found.context[mask] == pytest.approx(len(distances) / (length * len(rows)))
        for quantile, distance in found.quantiles[mask].items():
            assert distance == sorted(distances)[int(np.ceil(float(quantile) * len(distances))) - 1]
    for fraction, share in found.remaining.items():
        both = [distances.count(int(float(fraction) * length)) for distances in (pairs["document"], pairs["causal"])]
        assert share == pytest.approx(both[0] / both[1])


TEXT = '''"""Head."""
import os

@cached
def first():
    return 1

class Second:
    """Of two."""

    def third(self):
        def inner():
            return 2
        return inner

x = 3
'''


def test_a_file_is_split_at_definitions() -> None:
    begins = [part.split("\n")[0] for part in cut_definitions(TEXT)]
    assert begins == ['"""Head."""', "@cached", "class Second:", "    def third(self):"]


@given(st.lists(st.sampled_from(["\n", "\n\n", "def f():\n", "  @x\n", "text\n", "class A:\n"])))
def test_parts_are_the_text(pieces: list[str]) -> None:
    text = "".join(pieces)
    parts = list(cut_definitions(text))
    assert "".join(parts).split() == text.split()
    assert all(part.strip() for part in parts)


def test_interrupted_tiles_keep_the_records_of_finished_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []

    class Worker:
        """Worker of which only the first finishes; Ctrl-C comes while the second one runs."""

        returncode = None

        def __init__(self, command: list[str], **options: object) -> None:
            self.place, folder = int(command[-1]), Path(command[command.index("--worker") + 1])
            if self.place == 0:
                record = {"kernel": "mix_fwd", "tile": "first", "B": 1, "T": 16, "us": {"_fwd_kernel": 2.0}}
                (folder / "records0.json").write_text(json.dumps([record]))

        def wait(self) -> None:
            if self.place == 1 and not killed:
                raise KeyboardInterrupt

        def kill(self) -> None:
            killed.append(self.place)

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(tiles.subprocess, "Popen", Worker)
    monkeypatch.setattr(tiles, "collect_provenance", lambda *_: {})
    monkeypatch.setattr(sys, "argv", ["tiles.py", "--device", "cpu", "--json", str(tmp_path / "a.json")])
    with pytest.raises(KeyboardInterrupt):
        tiles.main()
    (record,) = json.loads((tmp_path / "a.json").read_text())["records"]
    assert record["tile"] == "first"
    assert 1 in killed
