"""Gain from context: records of models whose use of context is known by construction."""

import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from megatron.reports.combine import combine_results
from megatron.reports.comparison_table import build_comparison_tables
from megatron.reports.context_gain import (
    HURT,
    IGNORED,
    UNDECIDED,
    USED,
    build_context_tables,
    build_gain_tables,
    find_base_length,
    find_bound,
    measure_gain,
)
from megatron.reports.records import Record, read_records, write_records

LENGTHS, TARGETS, WINDOWS = (64, 256, 1024), 16, 48
COPY_DISTANCE = 500
"""Distance at which the copied text occurred before, in tokens."""


def score_copier(
    method: str, reach: float, train_length: int = 64, *, seed: int = 1, harm: float = 0.0, noise: float = 0.0
) -> list[Record]:
    """Return records of a copier: its loss drops by 2 nats on targets whose source is in its window and its reach.

    Half the targets of each window repeat the text `COPY_DISTANCE` tokens before. All other targets are unpredictable
    and their losses differ by window, far more than the effect of the context.

    Args:
        method: name of the copier.
        reach: maximum distance in tokens at which it copies.
        train_length: training length.
        seed: seed of the run.
        harm: nats added to each loss when the window is longer than the training length.
        noise: standard deviation of a window's loss at each length, in nats per token.
    """
    difficulty = np.random.default_rng(7).normal(0.0, 1.0, WINDOWS) + 4.0
    generator = np.random.default_rng(1000 * seed + int(10 * harm))
    records = []
    for length in LENGTHS:
        copies = min(length - TARGETS, reach) >= COPY_DISTANCE
        means = difficulty - 2.0 * copies / 2 + harm * (length > train_length) + noise * generator.normal(size=WINDOWS)
        nll = float(means.mean())
        records.append(
            Record(
                method=method, train_length=train_length, length=length, protocol="last", metric="perplexity",
                value=math.exp(min(nll, 700.0)), nll=nll, tokens=WINDOWS * TARGETS, seed=seed, targets=TARGETS,
                windows=WINDOWS, blocks=WINDOWS, block_sums=(TARGETS * means).tolist(), target_digest="same",
                run=f"runs/{method}/{seed}",
            )
        )  # fmt: skip
    return records


def test_each_verdict_on_a_model_that_deserves_it() -> None:
    records = [
        *score_copier("copies", 1000, noise=0.02),
        *score_copier("short", 300, noise=0.004),
        *score_copier("confused", 300, harm=0.3, noise=0.02),
        *score_copier("noisy", 300, noise=0.5),
    ]
    (table,) = build_comparison_tables(records)
    assert find_base_length(table) == 64
    gains = {method: measure_gain(table, method, 64, 1024) for method in table.methods}
    assert {method: gain.verdict for method, gain in gains.items()} == {
        "copies": USED, "short": IGNORED, "confused": HURT, "noisy": UNDECIDED,
    }  # fmt: skip
    assert gains["copies"].gain == pytest.approx(1.0, abs=0.02), "half of the targets gain two nats"
    assert gains["confused"].gain == pytest.approx(-0.3, abs=0.02)
    # Unpaired intervals would be as wide as the difference between windows: 4 standard deviations of 1 over 7.
    low, high = gains["short"].interval
    assert low < gains["short"].gain < high
    assert high - low < 0.01
    assert measure_gain(table, "copies", 64, 256).verdict != USED, "the source is 500 tokens before the targets"


def test_the_base_has_the_context_of_training() -> None:
    """With as many targets as the training length, the first target has no context at 1×."""
    records = [record.replace(targets=64) for record in score_copier("copies", 1000)]
    (table,) = build_comparison_tables(records)
    assert find_base_length(table) == 256
    (table,) = build_comparison_tables([record for record in records if record.length < 1024])
    assert find_base_length(table) is None
    assert build_context_tables([table]) == []
    (table,) = build_comparison_tables([record.replace(protocol="nonoverlapping") for record in records])
    assert build_context_tables([table]) == build_gain_tables([table]) == []


def test_several_seeds_give_a_t_interval() -> None:
    harms = (0.1, 0.2, 0.6)
    records = [record for seed, harm in enumerate(harms, start=1)
               for record in score_copier("confused", 300, seed=seed, harm=harm)]  # fmt: skip
    (table,) = build_comparison_tables(records)
    gain = measure_gain(table, "confused", 64, 1024)
    assert sorted(gain.gains) == pytest.approx([-0.6, -0.2, -0.1])
    half_width = 4.302653 * np.std(harms, ddof=1) / math.sqrt(3)  # the quantile of t with 2 degrees of freedom
    assert gain.interval == pytest.approx((-0.3 - half_width, -0.3 + half_width), abs=1e-5)
    assert gain.verdict == UNDECIDED


def test_a_model_trained_at_the_length_is_the_bound() -> None:
    """The best long model on the same targets bounds the gain; other targets are no bound."""
    short = score_copier("short", 300, noise=0.004)
    half = score_copier("half", 1000, noise=0.004)
    half = [*half[:2], half[2].replace(nll=half[2].nll + 0.5, value=half[2].value * math.exp(0.5),
                                       block_sums=[each + 0.5 * TARGETS for each in half[2].block_sums])]  # fmt: skip
    long, worse = score_copier("long", 1000, 1024), score_copier("worse", 300, 1024)
    tables = build_comparison_tables([*short, *half, *long, *worse])
    source, bound = find_bound(tables[0], tables, 64, 1024)
    assert (source.train_length, bound.method, bound.verdict) == (1024, "long", USED)
    (grid,) = build_context_tables(tables)
    rows = dict(grid.rows)
    assert rows["half"][3:] == ("50%", USED)
    assert rows["short"][3:] == ("0%", IGNORED)
    assert "long's gain" in grid.column_headers[3]
    (chart,) = build_gain_tables(tables)
    assert chart.methods == ("short", "half", "long (trained at 1,024)")
    assert chart.cells["short", 64].mean == 0
    assert chart.cells["long (trained at 1,024)", 1024].mean == pytest.approx(1.0)

    others = build_comparison_tables([*short, *(record.replace(target_digest="others") for record in long)])
    assert find_bound(others[0], others, 64, 1024) is None
    blind = build_comparison_tables([*half, *worse])
    (grid,) = build_context_tables(blind)
    assert len(grid.column_headers) == 4, "a bound without a gain has no shares"
    assert any("cannot show what the text offers" in note for note in grid.notes)


def test_the_page_of_the_record_has_its_numbers() -> None:
    folder = Path(__file__).resolve().parents[2] / "docs" / "results"
    records = [record for name in ("context", "context_rotary") for record in read_records(folder / f"{name}.json")]
    (grid,) = build_context_tables(build_comparison_tables(records))
    page = (folder / "context.md").read_text(encoding="utf-8")
    for method, cells in grid.rows:
        assert f"| {method} | {' | '.join(cells)} |" in page
    bound = next(note for note in grid.notes if note.startswith("Bound: "))
    assert "gains +0.018 [+0.012, +0.024] and reaches a loss of 1.680" in bound
    assert "gains +0.018 [+0.012, +0.024]" in page
    assert "loss of 1.680" in page


@pytest.mark.parametrize("suffix", ["html", "md", "tex"])
def test_report_pages_have_the_verdict(suffix: str, tmp_path: Path) -> None:
    records = [*score_copier("copies", 1000), *score_copier("short", 300), *score_copier("long", 1000, 1024)]
    path = write_records(tmp_path / "results.json", records)
    page = tmp_path / f"page.{suffix}"
    combine_results([path], Console(quiet=True), output=page)
    text = page.read_text()
    assert text.count(IGNORED) >= 2, "in the row and in the legend"
    if suffix == "html":
        assert "figure-1-context-1" in text


def test_a_gain_whose_factor_underflows_has_an_interval() -> None:
    """exp(−800) is 0 in float64; gains stay in nats."""
    records = score_copier("confused", 300, harm=800.0, noise=0.02)
    (table,) = build_comparison_tables(records)
    gain = measure_gain(table, "confused", 64, 1024)
    assert gain is not None
    assert gain.interval is not None
    assert gain.gain == pytest.approx(-800, abs=1)
    assert gain.interval == pytest.approx((-800, -800), abs=1)
    assert gain.verdict == HURT
