"""Page of what is known: its table is current, and its first sentence still holds."""

import gzip
import json
import math
import re
from pathlib import Path
from types import ModuleType

import pytest

from megatron.reports.records import Record, write_records
from megatron.reports.run_records import RunOutcome, get_run_file, write_run_file
from tools.docs import agreement_page, card_page

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", [card_page, agreement_page], ids=["card", "agreement"])
def test_a_page_is_current(page: ModuleType) -> None:
    assert (ROOT / page.PAGE).read_text(encoding="utf-8") == page.render_page(), "run: make docs"


def test_the_summary_holds_for_all_records() -> None:
    """No model above about three million parameters has been trained to its end. Rewrite the page once one has."""
    largest = 0
    for path in (ROOT / "docs" / "results").rglob("*.json*"):  # *.json.gz are single runs of a sweep
        content = path.read_bytes()
        rows = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
        if path.suffix == ".gz":
            rows = rows["records"]
        for row in rows if isinstance(rows, list) else ():
            if isinstance(row, dict) and "perplexity" in row and row.get("step"):
                largest = max(largest, row["parameters"])
    assert 0 < largest < 3.5e6
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
    large = record.replace(parameters=29_500_000, train_tokens=60_000_000)
    write_run_file(get_run_file(tmp_path / "evidence", None, "rotary", 1), "digest", RunOutcome([large]))
    assert [each.name for each in card_page.list_trainings(tmp_path)] == ["a.json", "evidence/"]
    assert "largest model has 29.50M parameters, and the longest training 60.00M" in card_page.render_table(tmp_path)
    write_records(tmp_path / "evidence.json", [large])  # the published sweep
    assert [each.name for each in card_page.list_trainings(tmp_path)] == ["a.json", "evidence.json"]


def test_the_leaderboard_is_described_by_contest() -> None:
    record = Record(
        method="rotary", train_length=64, length=64, protocol="last", metric="perplexity", value=5.0, tokens=64, seed=1,
        parameters=1000, step=10, run="a", dataset="text", date="2026-11-28T00:00:00",
    )  # fmt: skip
    task = record.replace(dataset="task copy(letters=8)", step=30, run="c", date="2026-11-29T00:00:00")
    text = " ".join(card_page.describe_board([record, record.replace(seed=2, run="b"), task]).split())
    assert text == (
        "The published leaderboard has 3 trainings, the latest from 2026-11-29: text (10 steps; seeds per method: 2), "
        "task copy (30 steps; seeds per method: 1)."
    )


def test_use_of_context_is_counted_by_verdict() -> None:
    """Two methods with known losses at twice and 32 times the training length: one gains half a nat, one nothing."""
    records = [
        Record(
            method=method, train_length=64, length=length, protocol="last", metric="perplexity", value=math.exp(nll),
            nll=nll, tokens=640, seed=1, targets=64, blocks=10, target_digest="same",
            block_sums=[64 * (nll + 0.1 * block) for block in range(-4, 5)] + [64 * nll], run=f"runs/{method}",
        )
        for method, losses in {"gains": (2.0, 1.5), "flat": (2.0, 2.0)}.items()
        for length, nll in zip((128, 2048), losses, strict=True)
    ]  # fmt: skip
    text = " ".join(card_page.describe_use_of_context(records).split())
    assert "from 128 to 2,048 bytes" in text
    assert "of 2 methods, 1 use it, 1 ignore it, 0 are hurt by it, and 0 are undecided" in text
    assert card_page.describe_use_of_context(records[:1]) == ""
