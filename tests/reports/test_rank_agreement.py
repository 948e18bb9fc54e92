"""Agreement of two orders of methods."""

import itertools
from collections.abc import Mapping, Sequence

import pytest

from megatron.reports.comparison_table import ComparisonTable, build_comparison_tables
from megatron.reports.paper_experiment import PublishedTable, build_published_tables
from megatron.reports.rank_agreement import build_agreement_table, compare_orders
from megatron.reports.records import Record, record_from_row


def build_table(values: Mapping[str, Sequence[Sequence[float]]], train_length: int = 64) -> ComparisonTable:
    """Build a table from perplexities: method → multiple (1×, 2×) → seed."""
    records: list[Record] = []
    for method, per_multiple in values.items():
        for multiple, per_seed in enumerate(per_multiple, 1):
            for seed, value in enumerate(per_seed):
                row = {"method": method, "train_length": train_length, "length": multiple * train_length, "tokens": 64,
                       "protocol": "last", "target_digest": "d", "perplexity": value, "seed": seed}  # fmt: skip
                records.append(record_from_row(row))
    (table,) = build_comparison_tables(records)
    return table


def count_agreement(values: Sequence[float], others: Sequence[float]) -> float:
    """Compute τ without ties from its definition: the mean over pairs of the sign of agreement."""
    pairs = list(itertools.combinations(range(len(values)), 2))
    signs = [1 if (values[a] - values[b]) * (others[a] - others[b]) > 0 else -1 for a, b in pairs]
    return sum(signs) / len(signs)


def test_orders_are_compared_at_equal_multiples_over_common_methods() -> None:
    own = build_table({"a": [[5.0], [5.0]], "b": [[6.0], [4.0]], "c": [[7.0], [9.0]], "only here": [[1.0], [1.0]]})
    other = build_table({"c": [[3.0], [9.0]], "a": [[2.0], [3.0]], "b": [[1.0], [2.0]]}, train_length=128)
    found = compare_orders(own, other)
    assert [agreement.length_ratio for agreement in found] == [1.0, 2.0]
    assert all(set(agreement.methods) == {"a", "b", "c"} for agreement in found)
    assert [agreement.tau for agreement in found] == pytest.approx([count_agreement((5, 6, 7), (2, 1, 3)), 1.0])
    assert all(agreement.interval is None for agreement in found), "a seed without blocks has no uncertainty"


def test_multiples_are_found_despite_rounding() -> None:
    rows = [
        {"method": method, "train_length": 100, "length": length, "tokens": 64, "protocol": "task", "seed": 1,
         "target_digest": "d", "accuracy": value}
        for length in (100, 107, 110) for method, value in (("good", 0.9), ("fair", 0.5), ("bad", 0.1))
    ]  # fmt: skip
    (table,) = build_comparison_tables([record_from_row(row) for row in rows])
    assert table.train_length * (110 / 100) != 110
    grid = build_agreement_table(table, table, "A title")
    assert dict(grid.rows)["good"] == ("90.00 | 90.00",) * 3
    assert [found.methods for found in compare_orders(table, table, 2)] == [("good", "fair")] * 3
    published = PublishedTable("a paper", 100, "accuracy", (100, 110), {"good": [0.8, 0.7], "bad": [0.3, None]})
    (text_table,) = build_published_tables(published, [table])
    assert text_table.rows[0] == ("good", ("80.00 | 90.00", "70.00 | 90.00"))


def test_the_interval_covers_the_seeds_of_either_table() -> None:
    single = build_table({"a": [[1.0]], "b": [[2.0]]})
    clear = build_table({"a": [[1.0, 1.1, 1.2]], "b": [[2.0, 2.1, 2.2]]})
    unclear = build_table({"a": [[1.0, 3.0, 1.0]], "b": [[2.0, 1.9, 2.1]]})
    for own, other in ((clear, single), (single, clear)):
        assert compare_orders(own, other)[0].interval == (1.0, 1.0)
    for own, other in ((unclear, single), (single, unclear), (clear, unclear)):
        assert compare_orders(own, other)[0].interval == (-1.0, 1.0)
    assert compare_orders(clear, unclear)[0].num_seeds == 3


def test_the_best_methods_have_a_row_of_their_own() -> None:
    own = build_table({"a": [[1.0]], "b": [[2.0]], "c": [[30.0]], "d": [[40.0]]})
    other = build_table({"a": [[2.0]], "b": [[1.0]], "c": [[30.0]], "d": [[40.0]]})
    rows = dict(build_agreement_table(own, other, "A title", [2]).rows)
    assert list(rows) == ["a", "b", "c", "d", "order agreement τ", "τ of the 2 best"]
    assert rows["a"] == ("1.00 | 2.00",)
    assert rows["order agreement τ"] == (f"{count_agreement((1, 2, 30, 40), (2, 1, 30, 40)):+.2f}",)
    assert rows["τ of the 2 best"] == ("-1.00",)
