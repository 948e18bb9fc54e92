"""Metrics interpret and format their values; every metric of the registry works from file to page."""

import csv
import re
import struct
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from pages import page_of

from megatron.reports import plots, records, table_formats
from megatron.reports.comparison_table import build_comparison_tables
from megatron.reports.metrics import METRICS, Metric, format_number, format_percent, get_metric
from megatron.reports.records import Record, record_from_row
from megatron.utils.errors import UserError

ROOT = Path(__file__).parents[2]
COMMON = {"train_length": 40, "protocol": "task", "tokens": 512, "seed": 1}


def accuracies() -> list[Record]:
    """Records of two methods at 40 and 160: one keeps its accuracy, one loses half of it."""
    found = []
    for method, start, end, low, high in (("rotary", 1.0, 0.5, -0.56, -0.44), ("cdape", 0.96, 0.97, -0.01, 0.03)):
        found.append(
            record_from_row(
                {
                    **COMMON,
                    "method": method,
                    "length": 40,
                    "accuracy": start,
                    "accuracy_low": start - 0.05,
                    "accuracy_high": min(start + 0.03, 1.0),
                }
            )
        )
        found.append(
            record_from_row(
                {
                    **COMMON,
                    "method": method,
                    "length": 160,
                    "accuracy": end,
                    "change": end - start,
                    "change_low": low,
                    "change_high": high,
                    "change_from": 40,
                }
            )
        )
    return found


def test_accuracy_from_file_to_table(tmp_path: Path) -> None:
    found = records.read_records(records.write_records(tmp_path / "results.json", accuracies()))
    assert found == accuracies()
    assert [(r.value, r.bootstrap_interval) for r in found[:2]] == [(1.0, (0.95, 1.0)), (0.5, None)]
    (layout,) = build_comparison_tables(found)
    assert [line.rstrip() for line in table_formats.render_comparison_text(layout).splitlines()] == [
        "Accuracy in %, trained at 40 tokens, protocol task",
        "method     1×      4×   change",
        "           40     160   1× to 4×",
        "rotary  100.0*  50.00   -50.00 [-56.00, -44.00] falls",
        "cdape   96.00   97.00*  +1.00 [-1.00, +3.00] holds",
        "512 tokens scored at every length; higher is better.",
        "* best in its column.",
        "95% bootstrap intervals of individual cells are within -5.00 and +3.00.",
        "Change: accuracy at 160 minus that at 40 tokens [95% bootstrap interval].",
        "“holds”: the interval contains 0 or the change is under 0.5; otherwise “rises” or “falls”.",
    ]


def test_accuracy_in_a_plot_and_a_page() -> None:
    axes = Figure().add_subplot()
    (layout,) = build_comparison_tables(accuracies())
    plots.draw_panel(axes, layout)
    assert axes.get_ylabel() == "accuracy in %"
    assert axes.get_yscale() == "linear"
    assert axes.yaxis.get_major_formatter()(0.5, 0) == "50"
    page = page_of(accuracies())
    assert "accuracy in % at 160 tokens (4×, protocol task): cdape 97.00 (+1.00 from 40 tokens, holds), rotary" in page
    assert (
        'aria-label="Plot of accuracy in %, trained at 40 tokens, protocol task, over length 40 to 160 tokens: ' in page
    )
    assert "cdape 96.00 to 97.00; rotary 100.0 to 50.00." in page
    assert "correctly. Higher is better." in page
    assert re.search(r'class="best"[^>]*>97\.00\*', page)


def test_metrics_never_share_a_table_and_both_are_shown(tmp_path: Path) -> None:
    both = [*accuracies(), record_from_row({**COMMON, "method": "cdape", "length": 40, "perplexity": 5.5})]
    assert [layout.metric.name for layout in build_comparison_tables(both)] == ["accuracy", "perplexity"]
    one, two = (plots.render_plots_png(build_comparison_tables(found)) for found in (accuracies(), both))
    assert struct.unpack(">I", two[20:24])[0] == 2 * struct.unpack(">I", one[20:24])[0]
    head, *rows = records.write_records_csv(tmp_path / "r.csv", both).read_text().splitlines()
    assert head.startswith("method,train_length,length,protocol,accuracy,perplexity,tokens,seed,")
    assert rows[-1].startswith("cdape,40,40,task,,5.5,512,1,")
    # A new measurement of one metric does not replace another metric's records.
    again = both[-1].replace(value=6.0)
    assert records.merge_records(both, [again], same_run=True) == [*accuracies(), again]


def test_an_entry_of_the_registry_is_all_that_a_metric_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    gain = Metric(
        "gain", "Gain", "in nats", "Gain is the decrease of the loss with more context.", "higher", "difference", 0.01
    )
    monkeypatch.setitem(METRICS, "gain", gain)
    found = [record_from_row({**COMMON, "method": m, "length": n, "gain": v, "stderr": 0.5})
             for m, n, v in (("a", 40, -0.25), ("b", 40, -740.5), ("a", 80, 0.002), ("b", 80, -1.5))]  # fmt: skip
    (layout,) = build_comparison_tables(found)
    assert [str(cell) for cell in layout.cells.values()] == ["-0.25*", "-740.5", "0.002*", "-1.50"]
    assert found[0].interval == (-0.25 - 0.98, -0.25 + 0.98)
    assert "Gain in nats" in page_of(found)


def test_no_metric_is_called_like_a_field_of_a_record() -> None:
    fields = set(Record.model_fields)
    for name, metric in METRICS.items():
        assert metric.name == name
        assert not {name, f"{name}_low", f"{name}_high"} & fields


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"accuracy": 1.2}, r"accuracy must be at least 0 and at most 1, not 1.2"),
        ({"perplexity": 0.0}, r"perplexity must be at least 0\.001 and at most 1e\+305, not 0"),
        ({"perplexity": 2.0, "change": -0.5}, "change is a ratio and must be greater than 0, not -0.5"),
        ({"perplexity": 2.0, "accuracy": 0.5}, "values of perplexity and accuracy; a record must have one metric"),
        ({}, "no value; give one of perplexity, long_perplexity"),
        ({"acuracy": 0.5}, "unknown field acuracy; did you mean accuracy?"),
        ({"accuracy": 0.5, "perplexity_low": 1.0}, "unknown field perplexity_low"),
        ({"accuracy": 0.5, "metric": "accuracy"}, "unknown field metric"),
    ],
)
def test_values_that_a_metric_cannot_have(row: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        record_from_row({**COMMON, "method": "x", "length": 40, **row})


def test_find() -> None:
    assert get_metric("accuracy").better == "higher"
    with pytest.raises(ValueError, match="unknown metric 'acuracy'; did you mean accuracy"):
        get_metric("acuracy")


def test_files_of_earlier_versions_are_read_and_written_as_they_were(tmp_path: Path) -> None:
    """Files of earlier versions with only perplexities are written back byte for byte; in CSV, newer columns are
    empty.
    """
    old = Path(__file__).with_name("results_of_2026.json")
    found = records.read_records(old)
    assert [(r.method, r.length, r.metric) for r in found] == [
        ("rotary", 64, "perplexity"), ("rotary", 2048, "perplexity"), ("cdape", 64, "perplexity"),
        ("cdape", 2048, "perplexity"), ("learned", 64, "perplexity"),
    ]  # fmt: skip
    assert records.write_records(tmp_path / "results.json", found).read_bytes() == old.read_bytes()
    before, now = (
        list(csv.DictReader(path.open(encoding="utf-8")))
        for path in (old.with_suffix(".csv"), records.write_records_csv(tmp_path / "r.csv", found))
    )
    assert [{name: value for name, value in row.items() if value} for row in now] == [
        {name: value for name, value in row.items() if value} for row in before
    ]
    assert [name for name in now[0] if name in before[0]] == list(before[0])
    assert found[1].verdict == "rises"


@pytest.mark.parametrize(
    ("value", "text"),
    [(4.866, "4.87"), (99.994, "99.99"), (152.34, "152.3"), (16443.4, "16,443"), (-0.254, "-0.25"), (0.00341, "0.0034"),
     (0.0, "0.00"), (9_876_543.0, "9,876,543"), (3.2e17, "3.2e+17")],
)  # fmt: skip
def test_numbers_are_short(value: float, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("value", "spread", "text"),
    [(4.8661, 0.5, "4.87"), (4.8661, 0.02, "4.87"), (4.8661, 0.019, "4.866"), (4.8661, 0.0004, "4.8661"),
     (16443.4, 0.3, "16,443.4"), (0.0012, 0.3, "0.00"), (-0.0012, 0.3, "0.00"), (4.8661, 0.0, "4.87")],
)  # fmt: skip
def test_numbers_have_digits_enough_for_their_interval(value: float, spread: float, text: str) -> None:
    """The last digit is at most half of the interval's half-width, so that the limits differ from each other and the
    value.
    """
    assert format_number(value, spread) == text


def test_a_narrow_interval_shows_its_ends() -> None:
    rows = [{"length": 40, "perplexity": 5.0, "perplexity_low": 4.9994, "perplexity_high": 5.0006},
            {"length": 80, "perplexity": 5.001, "change": 1.0002, "change_low": 0.99992, "change_high": 1.00042,
             "change_from": 40}]  # fmt: skip
    found = [record_from_row({**COMMON, "method": "a", **row}) for row in rows]
    (layout,) = build_comparison_tables(found)
    assert str(layout.cells["a", 40]) == "5.0000"
    assert layout.cells["a", 40].interval_texts == ("4.9994", "5.0006")
    assert str(layout.changes["a"]) == "1.0002 [0.9999, 1.0004] holds"
    assert "individual cells are within -0.01% and +0.01%" in table_formats.render_comparison_text(layout)
    assert "+0.02% from 40 tokens" in page_of(found)


def test_large_changes_have_separators() -> None:
    assert get_metric("perplexity").format_relative_change(165.43) == "+16,443%"
    assert format_percent(165.4321, min_decimals=1) == "+16,543.2%"
    assert get_metric("perplexity").format_change(16443.4) == "16,443"
    assert (format_percent(0.0), format_percent(-1e-12), format_percent(0.003)) == ("0%", "0%", "+0.3%")


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_is_in_the_documentation(name: str) -> None:
    page = ROOT / "docs" / "evaluation.md"
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert any(f"`{name}`" in row.split("|")[1] for row in rows)


def test_titles_inside_sentences() -> None:
    assert get_metric("delta_perplexity").axis_label.startswith("ΔP")
    assert get_metric("perplexity").axis_label == "perplexity per token"
    assert get_metric("log_ratio").inline_title.startswith("log-ratio")


@pytest.mark.parametrize(
    ("ticks", "texts"),
    [
        ([4.075, 4.1, 4.125, 4.15], ["4.075", "4.100", "4.125", "4.150"]),
        ([312.25, 312.5, 312.75], ["312.25", "312.50", "312.75"]),
        ([5.0, 10.0, 20.0], ["5", "10", "20"]),
        ([0.0, 2500.0, 5000.0], ["0", "2,500", "5,000"]),
    ],
)
def test_ticks_have_the_digits_that_place_them(ticks: list[float], texts: list[str]) -> None:
    assert [METRICS["perplexity"].format_tick(tick, ticks) for tick in ticks] == texts
