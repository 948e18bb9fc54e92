"""Published table beside ours: τ compared with counted pairs, its interval, and cells at equal multiples."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.reports.comparison_table import build_comparison_tables
from megatron.reports.paper_experiment import (
    PublishedTable,
    build_published_tables,
    compute_kendall_tau,
    compute_rank_agreement,
)
from megatron.reports.records import Record

from .conftest import record

THEIRS = PublishedTable(
    source="A paper, table 1",
    train_length=512,
    metric="perplexity",
    lengths=(512, 4096, 16384),
    rows={
        "rotary": (5.0, 20.0, 90.0),
        "kerple_log": (5.1, 4.9, 4.8),
        "cdape": (4.7, 4.5, None),
        "fire": (1.0, 1.0, 1.0),
    },
)


@given(st.integers(2, 7).flatmap(lambda n: st.tuples(*[st.lists(st.integers(0, 4), min_size=n, max_size=n)] * 2)))
def test_tau_counts_pairs(drawn: tuple[list[int], list[int]]) -> None:
    """Kendall's τ-b: concordant minus discordant pairs over the geometric mean of untied pairs."""
    a, b = drawn
    pairs = list(itertools.combinations(range(len(a)), 2))
    alike = sum((a[i] - a[j]) * (b[i] - b[j]) > 0 for i, j in pairs)
    unlike = sum((a[i] - a[j]) * (b[i] - b[j]) < 0 for i, j in pairs)
    untied = math.sqrt(sum(a[i] != a[j] for i, j in pairs) * sum(b[i] != b[j] for i, j in pairs))
    expected = pytest.approx((alike - unlike) / untied if untied else 0.0)
    assert compute_kendall_tau(a, b) == expected
    assert compute_kendall_tau(a, [b, a, b])[2] == expected  # many rankings at once


def test_our_numbers_are_next_to_published_ones_at_equal_multiples(story: list[Record]) -> None:
    """Our results at 64, 512 and 2,048 tokens, trained at 64, are 1, 8 and 32 training lengths."""
    (layout,) = build_comparison_tables(story)
    (grid,) = build_published_tables(THEIRS, [layout])
    assert grid.column_headers == ("1× (512 | 64)", "8× (4,096 | 512)", "32× (16,384 | 2,048)")
    rows = dict(grid.rows)
    assert rows["rotary"] == ("5.00 | 5.25", "20.00 | 12.50", "90.00 | 29.75")
    assert rows["cdape"][2] == "– | 4.87"
    assert rows["fire"] == ("1.00 | –", "1.00 | –", "1.00 | –")
    assert rows["order agreement τ"] == ("+1.00", "+1.00", "+1.00")
    assert grid.notes[0] == "Single numbers are not comparable; the order of methods is."
    tied = PublishedTable(**{**vars(THEIRS), "rows": {"rotary": (1.0, 1.0, 1.0), "cdape": (2.0, 2.0, 2.0)}})
    assert [each.tau for each in compute_rank_agreement(tied, layout)] == [-1.0, -1.0, -1.0]
    assert compute_rank_agreement(PublishedTable(**{**vars(THEIRS), "rows": {"cdape": (1.0, 2.0, 3.0)}}), layout) == []
    assert build_published_tables(PublishedTable(**{**vars(THEIRS), "metric": "accuracy"}), [layout]) == []


def test_the_interval_is_over_seeds() -> None:
    """Interval over seeds: with two methods and two seeds, each better once, one of four resamples has both equal and
    two are ties.
    """
    values = {"rotary": (5.0, 5.4), "cdape": (5.1, 5.2)}
    records = [record(name, 64, value, seed=seed) for name, pair in values.items() for seed, value in enumerate(pair)]
    both = PublishedTable(**{**vars(THEIRS), "lengths": (512,), "rows": {"rotary": (5.0,), "cdape": (4.0,)}})
    (found,) = compute_rank_agreement(both, build_comparison_tables(records)[0])
    assert found.tau == 1.0  # 5.2 and 5.15 on average, like theirs
    assert found.interval == (-1.0, 1.0)  # a quarter of all resamples draws seed 0 twice and reverses the order


def test_the_interval_over_blocks() -> None:
    def made(name: str, sums: list[float]) -> Record:
        return record(name, 64, math.exp(sum(sums) / 8), tokens=8, target_digest="a", block_sums=sums)

    both = PublishedTable(**{**vars(THEIRS), "lengths": (512,), "rows": {"rotary": (5.0,), "cdape": (4.0,)}})
    (sure,) = compute_rank_agreement(
        both, build_comparison_tables([made("rotary", [9.0, 9.1, 9.2, 9.0]), made("cdape", [8.0, 8.1, 8.3, 8.4])])[0]
    )
    (chance,) = compute_rank_agreement(
        both, build_comparison_tables([made("rotary", [9.0, 9.1, 7.9, 8.6]), made("cdape", [8.0, 8.1, 9.3, 8.4])])[0]
    )
    assert (sure.tau, sure.interval) == (1.0, (1.0, 1.0))
    assert (chance.tau, chance.interval) == (1.0, (-1.0, 1.0))
