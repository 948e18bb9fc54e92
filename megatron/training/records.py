"""Files by which a run tells how far it is, and what its metrics.jsonl says: one JSON object per record and line. Read
without torch."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
HEARTBEAT = "heartbeat.json"
"""In the run's folder: where the first rank is, every few seconds while the run is alive."""


def lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a file of records, each with its end and what it says; half a line, left by a crash, is left out."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
            int(record["step"])
        except (ValueError, KeyError, TypeError):
            continue
        yield line + "\n", record


def recorded(run: str | Path, kind: str, step: int) -> bool:
    """Does a run's folder have a record of this kind (train, valid, test) and step?"""
    return any(record.get("kind") == kind and record["step"] == step for _, record in lines(Path(run) / METRICS))
