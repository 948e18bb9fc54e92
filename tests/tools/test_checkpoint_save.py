"""The benchmark of saves runs, and its page reports the measurements."""

from pathlib import Path

import pytest
from tiny_runs import write_corpora

from tools.bench import checkpoint_save


def test_every_kind_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_save, "prepare_corpus", lambda sources, where: write_corpora(where.parent))
    found = checkpoint_save.measure_saves("tiny", 1, tmp_path)
    assert set(found["medians"]) == {"step", "stall", "step_while_writing", "written", "waited_for"}
    assert 12 < found["bytes"] / found["parameters"] < 13
    assert found["medians"]["stall"] < found["medians"]["written"]
    stamp = {"versions": {}, "date": "2026-11-22", "command": "", "commit": "", "machine": ""}
    assert "| a step |" in checkpoint_save.render_page({**found, "stamp": stamp})
