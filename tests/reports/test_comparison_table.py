"""Numbers of a table, compared with manual arithmetic, in every output format."""

import io
import math
import statistics
from html.parser import HTMLParser

import pytest
from pages import table_html
from rich.console import Console

from megatron.reports import results_output, table_formats
from megatron.reports.comparison_table import build_comparison_tables
from megatron.reports.records import TRIVIAL_BASELINE_PREFIX, Record
from megatron.reports.significance import build_significance_table

from .conftest import record


def shown(records: list[Record], **options: object) -> str:
    console = Console(file=io.StringIO(), **options)  # type: ignore[arg-type]
    results_output.print_comparison_tables(console, records)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_rows_and_columns(story: list[Record]) -> None:
    (layout,) = build_comparison_tables(list(reversed(story)))
    assert layout.methods == ("cdape", "kerple_log", "rotary")  # in the order of the records
    assert layout.x_values == (64, 512, 2048)
    assert layout.get_column_headers() == [("1×", "64"), ("8×", "512"), ("32×", "2,048")]


@pytest.mark.parametrize(
    ("steps", "tokens", "expected"),
    [
        ((20, 20, 20), (900, 900, 900), None),
        ((30, 20, 20), (900, 600, 600), "steps: 20 (kerple_log, cdape), 30 (rotary)."),
        ((0, 20, 20), (0, 600, 600), "steps: 0, imported or untrained (rotary), 20 (kerple_log, cdape)."),
        ((20, 20, 20), (600, 600, 900), "tokens: 600 (rotary, kerple_log), 900 (cdape)."),
        ((None, None, 20), (None, None, 900), None),  # unknown, as in records of other programs
    ],
)
def test_unequal_amounts_of_training_are_noted(
    story: list[Record], steps: tuple[int | None, ...], tokens: tuple[int | None, ...], expected: str | None
) -> None:
    methods = ("rotary", "kerple_log", "cdape")
    budgets = {method: {"step": s, "train_tokens": t} for method, s, t in zip(methods, steps, tokens, strict=True)}
    trained = [r.replace(**budgets[r.method]) for r in story]
    # The length of a task's sequences depends on the seed.
    others = [r.replace(seed=2, run=f"runs/{r.method}/2", train_tokens=r.train_tokens and r.train_tokens + 7)
              for r in trained]  # fmt: skip
    (table,) = build_comparison_tables([*trained, *others])
    for notes in (table.notes, build_significance_table(table, "rotary").notes):
        found = [note for note in notes if note.startswith("Methods were trained for different numbers of ")]
        assert found == ([] if expected is None else [f"Methods were trained for different numbers of {expected}"])


def test_the_smallest_of_each_column_is_best(story: list[Record]) -> None:
    swapped = [r for r in story if (r.method, r.length) != ("rotary", 64)] + [record("rotary", 64, 4.0)]
    (layout,) = build_comparison_tables(swapped)
    best = {(method, length) for (method, length), cell in layout.cells.items() if cell.is_best}
    assert best == {("rotary", 64), ("cdape", 512), ("cdape", 2048)}


def test_a_lone_method_is_not_best(story: list[Record]) -> None:
    (layout,) = build_comparison_tables([r for r in story if r.method == "rotary"])
    assert not any(cell.is_best for cell in layout.cells.values())
    assert "best" not in table_formats.render_comparison_text(layout)


def test_equal_values_have_no_best() -> None:
    """A tie of some methods is marked, a tie of all is not; a trivial baseline does not count."""
    baseline = f"{TRIVIAL_BASELINE_PREFIX}chance"
    values = {"rotary": (0.0, 0.5), "cdape": (0.0, 0.5), "kerple_log": (0.0, 0.25), baseline: (1.0, 1.0)}
    found = [
        record(method, length, 1.0, run=None if method == baseline else "runs/a").replace(
            metric="accuracy", value=value, nll=None
        )
        for method, pair in values.items()
        for length, value in zip((64, 2048), pair, strict=True)
    ]
    (layout,) = build_comparison_tables(found)
    best = {key for key, cell in layout.cells.items() if cell.is_best}
    assert best == {("rotary", 2048), ("cdape", 2048)}


def test_plain_text_is_aligned_and_marked(story: list[Record]) -> None:
    (layout,) = build_comparison_tables(story)
    assert table_formats.render_comparison_text(layout).splitlines() == [
        "Perplexity per token, trained at 64 tokens, protocol last",
        "method        1×      8×     32×",
        "              64     512   2,048",
        "rotary      5.25   12.50   29.75",
        "kerple_log  5.50    5.45    5.43",
        "cdape       4.96*   4.90*   4.87*",
        "4,096 tokens scored at every length; lower is better.",
        "Protocol last scores the end of each window: the same tokens at every length, with increasing context.",
        "* best in its column.",
    ]


def test_markdown(story: list[Record]) -> None:
    (layout,) = build_comparison_tables([*story, record("a|b", 64, 7.0)])
    lines = table_formats.render_comparison_markdown(layout).splitlines()
    assert lines[:3] == [
        "| method | 1× (64) | 8× (512) | 32× (2,048) |",
        "|---|--:|--:|--:|",
        "| rotary | 5.25 | 12.50 | 29.75 |",
    ]
    assert "| cdape | **4.96** | **4.90** | **4.87** |" in lines
    assert "| a\\|b | 7.00 | – | – |" in lines


def test_several_seeds_become_mean_and_deviation() -> None:
    perplexities = (5.0, 5.5, 6.3)
    (layout,) = build_comparison_tables([record("t5", 64, p, seed) for seed, p in enumerate(perplexities)])
    cell = layout.cells["t5", 64]
    assert cell.mean == pytest.approx(sum(perplexities) / 3)
    assert cell.deviation == pytest.approx(statistics.stdev(perplexities))
    assert str(cell) == "5.60 ± 0.66"
    assert "mean ± standard deviation of 3 seeds" in " ".join(layout.notes)


def test_a_repeated_measurement_replaces_the_first() -> None:
    (layout,) = build_comparison_tables([record("t5", 64, 5.0), record("t5", 64, 6.0)])
    assert str(layout.cells["t5", 64]) == "6.00"


def test_numbers_that_cannot_be_compared_are_not_in_one_table(story: list[Record]) -> None:
    other = [
        record("rotary", 64, 5.0, protocol="nonoverlapping"),
        record("rotary", 64, 5.0, train_length=32),
        record("rotary", 64, 5.0, target_digest="abc"),
    ]
    assert len(build_comparison_tables(story + other)) == 4
    assert build_comparison_tables([]) == []


@pytest.fixture
def judged() -> list[Record]:
    """Records of two methods with a change, one with positions that end at 100, and one without bootstrap."""
    found = []
    for method, end, low, high in (("rotary", 30.0, 5.5, 6.5), ("type1", 5.02, 0.985, 1.023)):
        found.append(record(method, 64, 5.0, low=4.5, high=5.75))
        change = {"change": end / 5, "change_low": low, "change_high": high, "change_from": 64}
        found.append(record(method, 2048, end, **change))
    return [*found, record("learned", 64, 5.1, max_length=100), record("other", 2048, 5.2)]


def test_changes_have_a_column_and_a_verdict(judged: list[Record]) -> None:
    (layout,) = build_comparison_tables(judged)
    assert [str(change) for change in layout.changes.values()] == [
        "6.000 [5.500, 6.500] rises",
        "1.004 [0.985, 1.023] holds",
    ]
    lines = table_formats.render_comparison_text(layout).splitlines()
    assert [line.rstrip() for line in lines[1:7]] == [
        "method     1×       32×   change",
        "           64     2,048   1× to 32×",
        "rotary   5.00*    30.00   6.000 [5.500, 6.500] rises",
        "type1    5.00*     5.02*  1.004 [0.985, 1.023] holds",
        "learned  5.10   max 100   –",
        "other       –      5.20   –",
    ]
    assert "| type1 | **5.00** | **5.02** | 1.004 [0.985, 1.023] holds |" in table_formats.render_comparison_markdown(
        layout
    )
    assert "| learned | 5.10 | max 100 | – |" in table_formats.render_comparison_markdown(layout)
    assert table_formats.render_comparison_markdown(layout).splitlines()[:2] == [
        "| method | 1× (64) | 32× (2,048) | change 1× to 32× |",
        "|---|--:|--:|---|",
    ]
    assert "“holds”: the interval contains 1" in " ".join(layout.notes)
    assert "within -10% and +15%" in " ".join(layout.notes)
    parser = Cells()
    parser.feed(table_html(table_formats.build_html_table(layout)))
    assert parser.rows[0][-1] == ("text", "change1× to 32×")
    assert parser.rows[2][1:] == [
        ("best", "5.00*4.50 – 5.75"),
        ("best", "5.02*"),
        ("text wide", "1.004 [0.985, 1.023] holds"),
    ]
    assert "6.000 [5.500, 6.500] rises" in shown(judged, force_terminal=True, width=120)


def test_changes_of_several_seeds() -> None:
    def seeds(*changes: tuple[float, float, float]) -> str:
        found = []
        for seed, (low, change, high) in enumerate(changes):
            about = {"change": change, "change_low": low, "change_high": high, "change_from": 64}
            found += [record("t5", 64, 5.0, seed), record("t5", 128, 5 * change, seed, **about)]
        (layout,) = build_comparison_tables(found)
        return str(layout.changes["t5"])

    mean, factor = math.sqrt(1.2 * 1.4), math.exp(statistics.stdev(map(math.log, (1.2, 1.4))))
    assert seeds((1.1, 1.2, 1.3), (1.3, 1.4, 1.5)) == f"{mean:.3f} ×/÷ {factor:.3f} rises"
    assert seeds((1.1, 1.2, 1.3), (0.9, 1.0, 1.1)).endswith(" mixed")


def test_a_change_from_another_length_is_not_shown() -> None:
    late = record("t5", 128, 5.0, change=1.5, change_from=32)
    (layout,) = build_comparison_tables([record("t5", 64, 5.0), late])
    assert layout.changes == {}
    assert "change" not in table_formats.render_comparison_text(layout)


def test_the_console_gets_a_frame_on_a_terminal_only(story: list[Record]) -> None:
    wide = shown(story, force_terminal=True, width=100)
    assert "┃" in wide
    assert "29.75" in wide
    assert shown(story, width=20) == table_formats.render_comparison_text(
        build_comparison_tables(story)[0]
    )  # a pipe: no truncation, no colors
    narrow = shown(story, force_terminal=True, width=30)
    assert "29.75" in narrow
    assert "…" not in narrow


def test_names_are_text_not_markup() -> None:
    assert "[bold]x[/]" in shown([record("[bold]x[/]", 64, 5.0)], force_terminal=True, width=100)


class Cells(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[tuple[str, str]]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append((dict(attributes).get("class") or "", ""))

    def handle_data(self, data: str) -> None:
        if self.rows:
            kind, text = self.rows[-1][-1]
            self.rows[-1][-1] = (kind, text + data)


def test_html(story: list[Record]) -> None:
    (layout,) = build_comparison_tables([*story, record("<i>&", 64, 7.0)])
    parser = Cells()
    parser.feed(table_html(table_formats.build_html_table(layout)).partition("</table>")[0])
    head, *body = parser.rows
    assert "<caption><span>Perplexity per token, trained at 64" in table_html(table_formats.build_html_table(layout))
    assert [text for _, text in head] == ["method", "1×64", "8×512", "32×2,048"]
    assert body[0] == [("", "rotary"), ("", "5.25"), ("", "12.50"), ("", "29.75")]
    assert body[2] == [("", "cdape"), ("best", "4.96*"), ("best", "4.90*"), ("best", "4.87*")]
    assert body[3] == [("", "<i>&"), ("", "7.00"), ("", "–"), ("", "–")]


def test_the_best_seed_is_shown_with_the_mean_if_published() -> None:
    shared = {"train_length": 40, "length": 500, "protocol": "task", "metric": "mean_accuracy", "tokens": 512}
    values = {"rotary": (0.9998, 0.5, 0.6), "floor: a constant": (0.5,)}
    found = [
        Record(**shared, method=method, value=value, seed=seed)
        for method, of_seeds in values.items()
        for seed, value in enumerate(of_seeds)
    ]
    text = shown(found)
    assert "mean ± standard deviation of 3 seeds. Best" in " ".join(text.split())
    assert "Best seed: rotary 99.98.\n" in text
    accuracy = [each.replace(metric="accuracy") for each in found]
    assert "Best seed" not in shown(accuracy)


def test_each_method_has_its_sentence() -> None:
    """Each method has a sentence: perplexities with intervals above, around, below and negligibly above 1."""
    courses = {
        "rotary": (6.67, 16.38, 0.1), "kerple_log": (6.93, 6.70, 0.04), "cdape": (6.36, 6.16, 0.01),
        "fire": (10.0, 10.02, 0.001),
    }  # fmt: skip
    found = [
        record(
            method, length, value,
            **({} if length == 64 else {"change": last / first, "change_low": last / first - half,
                                        "change_high": last / first + half, "change_from": 64}),
        )
        for method, (first, last, half) in courses.items()
        for length, value in ((64, first), (2048, last))
    ]  # fmt: skip
    sentences = [
        "rotary rises from 6.67 at 64 tokens to 16.38 at 2,048 tokens (+145.6%).",
        "kerple_log shows no significant change: 6.93 at 64 tokens, 6.70 at 2,048 tokens (-3.3%).",
        "cdape falls from 6.36 at 64 tokens to 6.16 at 2,048 tokens (-3.1%).",
        "fire is nearly unchanged: 10.00 at 64 tokens, 10.02 at 2,048 tokens (+0.20%).",
    ]
    assert shown(found, width=150).splitlines()[-4:] == sentences
    many = [r.replace(method=f"{r.method} {number}") for r in found for number in range(3)]
    assert "rises from" not in shown(many, width=150)
