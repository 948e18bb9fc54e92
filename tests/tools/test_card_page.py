"""Page of what is known: its table is current, and its first sentence still holds."""

import json
import re
from pathlib import Path

from megatron.reports.records import Record, write_records
from tools.docs import card_page

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_is_current() -> None:
    assert (ROOT / card_page.PAGE).read_text(encoding="utf-8") == card_page.render_page(), "run: make docs"


def test_the_summary_holds_for_all_records() -> None:
    """No model above about a million parameters has been trained to its end. Rewrite the page once one has."""
    largest = 0
    for path in (ROOT / "docs" / "results").rglob("*.json"):
        rows = json.loads(path.read_text(encoding="utf-8"))
        for row in rows if isinstance(rows, list) else ():
            if isinstance(row, dict) and "perplexity" in row and row.get("step"):
                largest = max(largest, row["parameters"])
    assert 0 < largest < 1.5e6
    assert f"The largest model has {largest / 1e6:.2f}M parameters" in card_page.render_table()


def test_a_row_by_hand() -> None:
    rows = json.loads((ROOT / "docs" / "results" / "muon.json").read_text(encoding="utf-8"))
    runs = {row["run"] for row in rows}
    (line,) = (line for line in card_page.render_table().splitlines() if line.startswith("| `muon.json`"))
    assert re.fullmatch(rf"\| `muon.json` \| {len(runs)} \| 0.84M to 0.85M \| 64 \| 1.02M \| 3 \|", line)


def test_only_trained_models_are_listed(tmp_path: Path) -> None:
    record = Record(
        method="rotary", train_length=64, length=64, protocol="last", metric="perplexity", value=5.0, tokens=64, seed=1,
        parameters=1000, step=10, train_tokens=640_000, run="runs/a",
    )  # fmt: skip
    write_records(tmp_path / "a.json", [record, record.replace(seed=2, run="runs/b"), record.replace(length=128)])
    write_records(tmp_path / "baselines.json", [record.replace(parameters=None)])
    (tmp_path / "other.json").write_text('{"steps": 3}')
    (trainings,) = card_page.list_trainings(tmp_path)
    assert trainings.format_row() == "| `a.json` | 2 | 0.00M | 64 | 0.64M | 2 |"
