"""The report is self-contained: well formed, everything embedded and escaped, every number from the records."""

import base64
import gzip
import json
import math
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from pages import page_of
from rich.console import Console

from megatron.reports import html_page, report
from megatron.reports.combine import combine_results
from megatron.reports.comparison_table import build_comparison_tables
from megatron.reports.html_page import read_citation, render_bibtex
from megatron.reports.leaderboard import Leaderboard
from megatron.reports.records import Record, record_from_row, write_records, write_records_csv
from megatron.reports.report import ReportSection, TrainingSection
from megatron.reports.report_sentences import describe_measurements, describe_plots
from megatron.reports.table_formats import LATEX_MARKER, TextTable, render_latex_file
from megatron.utils.atomic_io import write_page_atomically
from megatron.utils.errors import UserError

from .conftest import record

VOID = {"meta", "img", "br", "source"}
RESULTS = Path(__file__).parents[2] / "docs/results"


class Page(HTMLParser):
    """Parser that checks nesting of tags, and collects text, tags with attributes, and the JSON of charts."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[dict[str, str]] = []
        self.charts: list[dict] = []
        self.text = ""
        self.feed(content)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.append({name: value or "" for name, value in attributes})
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.append({name: value or "" for name, value in attributes})

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" in self.stack and self.attributes[-1].get("type") == "application/json":
            self.charts.append(json.loads(data))
        elif not {"style", "script"} & set(self.stack):
            self.text += data

    def list_values(self, name: str) -> list[str]:
        """List the values of an attribute over all elements."""
        return [attributes[name] for attributes in self.attributes if name in attributes]


def unpack(href: str) -> str:
    """Return the file embedded in a link."""
    return gzip.decompress(base64.b64decode(href.split(",")[1], validate=True)).decode()


def test_the_page_is_self_contained(story: list[Record], tmp_path: Path) -> None:
    section = ReportSection(None, [record.replace(position="cdape+kerple_log") for record in story])
    content = report.render_report([section], command="./deepy.py report a.json")
    path = write_page_atomically(tmp_path / "report.html", content)
    page = Page(content)
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    assert "://" not in content
    assert "url(" not in content
    assert all(value.startswith("#") for value in page.list_values("src") + page.list_values("href")
               if not value.startswith("data:application/gzip;base64,"))  # fmt: skip
    csv_file, tex_file = (unpack(href) for href in page.list_values("href") if href.startswith("data:"))
    assert csv_file == write_records_csv(tmp_path / "r.csv", section.records).read_text()
    assert tex_file == report.render_report_latex([section], "tables")
    assert html_page.is_generated_page(path)
    for part in (
        "./deepy.py report a.json",
        "Chi et al. 2022, section 4",
        "DAPE V2, equation 5",
        "@inproceedings{chi2022",
    ):
        assert part in page.text, part
    assert "Press et al." not in page.text


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.html")), ids=lambda path: path.name)
def test_stored_pages_have_the_current_design(path: Path) -> None:
    """Stored pages have the current design; `./deepy.py report` regenerates an old page from its records."""
    content = path.read_text(encoding="utf-8")
    head, _, _ = (html_page.TEMPLATES_FOLDER / "page.html").read_text(encoding="utf-8").partition("<title>")
    assert content.startswith(head)
    ids = set(Page(content).list_values("id"))
    assert {"main", "theme", "downloads", "markers", "measurements", "cite"} <= ids


def test_sections_have_ids_in_order(story: list[Record]) -> None:
    page = Page(page_of([*story, *(record(f"m{i}", 64, 5.0) for i in range(12))], configurations={"a": "b"}))
    assert "Missing results" in page.text
    ids = page.list_values("id")
    assert len(ids) == len(set(ids))
    links = [value[1:] for value in page.list_values("href") if value.startswith("#")]
    assert set(links) <= set(ids)
    assert [page.tags.count(tag) for tag in ("h1", "main", "nav", "header", "footer")] == [1] * 5
    levels = [int(tag[1]) for tag in page.tags if tag in ("h1", "h2", "h3")]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert page.tags.count("table") == page.tags.count("caption") == 3
    heads = [attributes for tag, attributes in zip(page.tags, page.attributes, strict=True) if tag == "th"]
    assert {head["scope"] for head in heads} == {"col", "row"}
    figures = [attributes for attributes in page.attributes if attributes.get("role") == "img"]
    assert all(figure["aria-label"] for figure in figures)


def test_navigation_lists_the_headings_in_order(story: list[Record]) -> None:
    """The navigation lists all headings in order, on a page with a single section."""
    output, training = TextTable("Said", "method", ("a",), (("x", ("1",)),)), TextTable("Runs", "run", (), ())
    section = ReportSection(None, [*story, record("alibi", 64, 5.0)], [output])
    for is_live in (False, True):
        content = report.render_report(
            [section], training=TrainingSection(training, is_live=is_live), configurations={"a": "b"}
        )
        headings = re.findall(r'<h2 id="([^"]+)">([^<]+)</h2>', content)
        assert content.count("<h2") == len(headings)
        nav = content[content.index("<nav") : content.index("</nav>")]
        assert re.findall(r'href="#([^"]+)">([^<]+)</a>', nav) == headings
        names = [name for _, name in headings if name != "Trainings"]
        assert names[:3] == ["Results", "Missing results", "Conclusions"]


def test_charts_hold_the_records_and_draw_them(story: list[Record]) -> None:
    page = Page(page_of(story))
    (chart,) = page.charts
    found = {
        (series["name"], chart["places"][place][1]): (value, text, low, high)
        for series in chart["series"]
        for place, value, text, low, high in series["points"]
    }
    assert len(found) == len(story)
    for each in story:
        value, text, low, high = found[each.method, f"{each.length // 64}× ({each.length:,})"]
        assert value == pytest.approx(each.value, rel=1e-6)
        assert (low, high) == pytest.approx(each.interval, rel=1e-6)
        assert text == f"{each.value:.2f}"
    assert [series["drawn"] for series in chart["series"]] == [True] * 3
    assert [scale["name"] for scale in chart["scales"]] == ["log", "linear"], "values differ by more than a factor of 4"
    # The drawing agrees: a marker for each point, at a height that falls with the value.
    scale = chart["scales"][0]
    heights = [100 * math.log(scale["high"] / value) / math.log(scale["high"] / scale["low"])
               for series in reversed(chart["series"]) for _, value, *_ in series["points"]]  # fmt: skip
    drawn = [
        float(attributes["y"].removesuffix("%"))
        for tag, attributes in zip(page.tags, page.attributes, strict=True)
        if tag == "use" and attributes["y"] != "50%"  # in the legend
    ]
    assert drawn == pytest.approx(heights, abs=0.02)


def test_exploding_curves_are_clipped_and_reported() -> None:
    curves = {"calm": (5.0, 5.1), "mild": (5.5, 30.0), "gone": (6.0, 1e304)}
    records = [record(m, n, v) for m, values in curves.items() for n, v in zip((64, 2048), values, strict=True)]
    content = page_of(records)
    (chart,) = Page(content).charts
    diverged = next(series for series in chart["series"] if series["name"] == "gone")
    assert diverged["points"][1][1:3] == [1e304, "1e+304"]
    log, linear = chart["scales"]
    assert log["high"] < 10_000
    assert linear["high"] < 100
    assert content.count('<use href="#over"') == 1
    assert "A filled triangle at the edge marks a value beyond the axis" in content
    assert "beyond the axis" not in page_of(records[:4])


def test_clipped_faint_curves_have_triangles_too() -> None:
    many = [record(f"m{i:02}", length, 5.0 + i / 10) for i in range(9) for length in (64, 128, 256)]
    diverged = [record("gone", 64, 9.0), record("gone", 128, 1e8), record("gone", 256, 1e30)]
    content = page_of([*many, *diverged])
    assert "2 more (faint)" in content
    assert content.count('<use href="#over"') == 2


def test_no_bar_leaves_the_plot() -> None:
    many = [record(f"m{i}", length, 5.0 + i, low=4.0 + i, high=6.0 + i) for i in range(8) for length in (64, 128, 256)]
    page = Page(page_of(many))
    bars = [each for tag, each in zip(page.tags, page.attributes, strict=True)
            if tag == "line" and "y1" in each and each["y1"] != each["y2"]]  # fmt: skip
    x_positions = [float(bar["x1"].removesuffix("%")) for bar in bars]
    assert len(x_positions) == 24
    assert 0 < min(x_positions) < max(x_positions) < 100
    # A bar is at its marker, and the line passes through both.
    markers = [float(each["x"].removesuffix("%")) for tag, each in zip(page.tags, page.attributes, strict=True)
               if tag == "use" and each["x"] != "50%"]  # fmt: skip
    corners = [float(point.split(",")[0]) / 10 for points in page.list_values("points") for point in points.split()]
    assert sorted(markers) == sorted(x_positions)
    assert sorted(corners) == pytest.approx(sorted(x_positions), abs=0.06)
    assert len(set(x_positions)) == 24


def test_only_the_best_of_many_methods_are_colored_at_first() -> None:
    many = [record(f"m{i:02}", length, 5.0 + i + length / 1e3) for i in range(60) for length in (64, 128)]
    content = page_of(many)
    (chart,) = Page(content).charts
    assert [series["name"] for series in chart["series"] if series["drawn"]] == [f"m{i:02}" for i in range(8)]
    assert len(chart["series"]) == 60
    assert "52 more (faint)" in content
    assert content.count('class="series') == 60
    board = ReportSection("All", many, leaderboard=Leaderboard("m30", (), 3))
    (chart,) = Page(report.render_report([board])).charts
    assert [series["name"] for series in chart["series"] if series["drawn"]] == ["m00", "m01", "m02", "m30"]
    # Markup and script are small compared with pictures.
    assert len(content) < 200_000


def test_it_describes_the_measurement(story: list[Record]) -> None:
    known = {
        "targets": 64, "windows": 61, "dataset": "data/python/test_text_document", "tokenizer": "bytes", "step": 500,
        "bits_per_byte": 2.3, "parameters": 861_234, "machine": "Linux, 2 threads", "software": "torch 2.13.0",
        "train_tokens": 1_024_000, "position": "cdape(width=16)+kerple_log", "backend": "chunked", "dtype": "float32",
        "date": "2025-01-02T03:04:05+00:00", "device": "cpu", "seconds": 1.5,
    }  # fmt: skip
    text = Page(page_of([r.replace(**known) for r in story], title="A & B")).text
    for part in (
        *("A & B", "Only the last 64 tokens", "the same 61 positions", "the same 4,096 tokens", "861,234"),
        *("data/python/test_text_document", "1,024,000", "cdape(width=16)+kerple_log", "chunked, float32, 4.5 s"),
        *("Linux, 2 threads", "torch 2.13.0", "2025-01-02T03:04:05+00:00", "cdape 4.87 (-1.8% from 64 tokens)"),
        *("rotary 29.75 (+466.7% from 64 tokens)", "29.75", "4.96*"),
    ):
        assert part in text, part


def test_a_protocol_is_described_once_with_its_texts(story: list[Record]) -> None:
    known = {"windows": 61, "targets": 64, "dataset": "data/a", "tokenizer": "bytes"}
    bytes_of_a = [each.replace(**known, bits_per_byte=2.3) for each in story]
    others = [
        record(method, length, 5.0, seed, **known | {"windows": 32, "dataset": "data/b"}, target_digest="b")
        for method in ("rotary", "alibi") for length in (64, 512) for seed in (1, 2, 3)
    ]  # fmt: skip
    (text,) = describe_measurements(build_comparison_tables([*bytes_of_a, *others]))
    assert text.startswith("Protocol last. Only the last 64 tokens")
    assert "the same 32 or 61 positions" in text
    assert "Texts: data/a (tokenizer bytes, one token is one byte); data/b (tokenizer bytes)." in text
    assert "With several seeds, cells are arithmetic means over 3 seeds" in text
    assert "With one seed, bars are 95% intervals" in text
    (text,) = describe_measurements(build_comparison_tables(others))
    assert " Cells are arithmetic means over 3 seeds" in text
    assert "one seed" not in text


def test_the_summary_ranks_by_the_largest_length(story: list[Record]) -> None:
    summary = re.search(r"perplexity per token at 2,048 tokens.*?\.\s*\n", Page(page_of(story)).text).group()
    assert summary.index("cdape") < summary.index("kerple_log") < summary.index("rotary")


def test_the_axis_of_each_metric_is_named(story: list[Record]) -> None:
    title = "Plot of perplexity per token, trained at 64 tokens, protocol last, over length 64 to 2,048 tokens: "
    curves = "cdape 4.96 to 4.87; kerple_log 5.50 to 5.43; rotary 5.25 to 29.75."
    assert f'aria-label="{title}{curves}"' in page_of(story)
    here = {"metric": "loss", "axis": "depth"}
    probed = [story[0].replace(**here, place=place, value=value) for place, value in ((0.25, 3.0), (1.0, 2.0))]
    page = page_of([*story, *probed])
    map_title = "Map of loss in nats per token by depth and length, trained at 64 tokens, protocol last"
    assert f'aria-label="{title}{curves}"' in page
    assert f'aria-label="{map_title}; means over depths: rotary 2.50 at 64."' in page
    here["axis"] = "distance"
    probed = [story[0].replace(**here, place=place, value=value) for place, value in ((16.0, 3.0), (32.0, 2.0))]
    page = page_of([*story, *probed])
    assert 'aria-label="Plot of loss in nats per token by distance, windows of 64 tokens,' in page
    assert "over distance 16 to 32 tokens: rotary 3.00 to 2.00." in page
    assert "at distance 32 tokens (0.5×, protocol last): rotary 2.00 (-1.00 from 16 tokens)." in Page(page).text
    where = {"axis": "position", "place": 64.0}
    (inside,) = build_comparison_tables([record("rotary", 512, 5.0, **where, change=1.5, change_from=64)])
    assert inside.changes == {}, "a change is from another length, and this is none"


def test_the_summary_states_significant_differences() -> None:
    change = {"change": 6.0, "change_low": 5.0, "change_high": 7.0, "change_from": 64}
    page = Page(page_of([record("rotary", 64, 5.0), record("rotary", 2048, 30.0, **change)]))
    assert "rotary 30.00 (+500.0% from 64 tokens, rises)" in page.text
    assert "use the same windows at both lengths" in page.text


def test_records_with_required_fields_only(story: list[Record]) -> None:
    bare = record_from_row(
        {
            "method": "x",
            "train_length": 64,
            "length": 64,
            "protocol": "mine",
            "perplexity": 5.0,
            "tokens": 10,
            "seed": 0,
        }
    )
    assert "Protocol mine" in Page(page_of([bare])).text
    with pytest.raises(UserError, match="no records"):
        page_of([])


def test_nothing_from_outside_becomes_markup() -> None:
    evil = "</td><script>alert(1)</script>"
    hostile = record(evil, 64, 5.0, dataset=evil, position=evil, machine=evil, run=evil, tokenizer=evil)
    page = Page(page_of([hostile], title=evil, configurations={evil: evil}))
    assert page.tags.count("script") == 2, "the page's own, and the chart's data"
    assert page.text.count("alert(1)") >= 7
    assert page.charts[0]["series"][0]["name"] == evil
    assert evil not in page_of([hostile])
    # The placeholder sign of Template is harmless too.
    assert "$plot" in Page(page_of([record("$plot", 64, 5.0)])).text


def test_the_alternative_text_describes_curve_ends_and_is_bounded() -> None:
    gain = [record("a", 64, 5.0, metric="delta_perplexity"), record("short", 64, 6.0), record("short", 128, 6.5)]
    rows = [*gain[1:], record("long", 64, 5.0), record("long", 256, 4.0)]
    assert describe_plots(build_comparison_tables(rows)).endswith(
        ": long 5.00 to 4.00; short 6.00 to 6.50 at 128 tokens, where it ends."
    )
    assert describe_plots(build_comparison_tables(gain[:1])).startswith("Plot of ΔP per token, trained at 64")
    many = [record(f"m{i}", 64, 5.0 + i) for i in range(30)]
    assert describe_plots(build_comparison_tables(many)).endswith("m7 12.00; 21 others between; m29 34.00.")


def test_the_title_describes_the_contents(story: list[Record]) -> None:
    title = "<h1>Perplexity of rotary, kerple_log and cdape at 64 to 2,048 tokens, trained at 64 tokens"
    assert f"{title}</h1>" in page_of(story)
    assert f"{title} (2 runs pending)</h1>" in page_of(story, num_pending_runs=2)
    many = [record(f"m{i}", 64, 5.0) for i in range(5)]
    assert "<h1>Perplexity of 5 methods at 64 tokens, trained at 64 tokens</h1>" in page_of(many)
    assert "<h1>A &amp; B</h1>" in page_of(story, title="A & B")


def test_configurations_are_collapsed(story: list[Record]) -> None:
    page = Page(page_of(story, configurations={"rotary.yml": "pos_emb: rotary\n"}))
    assert "details" in page.tags
    assert "pos_emb: rotary" in page.text
    assert "pos_emb" not in page_of(story)


def test_latex_shows_any_name_and_the_best_in_bold(tmp_path: Path) -> None:
    rows = [record("50% & a_b", 64, 5.0), record(r"\\x^2~{$#}", 64, 6.0, max_length=64), record("50% & a_b", 128, 7.0)]
    (table,) = build_comparison_tables(rows)
    lines = render_latex_file([(None, table)], "x").splitlines()
    assert r"method & 1$\times$ & 2$\times$ \\" in lines
    assert r"50\% \& a\_b & \textbf{5.00} & 7.00 \\" in lines
    special = r"\textbackslash{}\textbackslash{}x\textasciicircum{}2\textasciitilde{}\{\$\#\}"
    assert rf"{special} & 6.00 & max 64 \\" in lines
    assert [line for line in lines if line.endswith("rule")] == [r"\toprule", r"\midrule", r"\bottomrule"]
    write_records(tmp_path / "results.json", rows)
    for _ in range(2):  # its own file may be overwritten
        combine_results([tmp_path], Console(quiet=True), output=tmp_path / "x.tex")
    assert (tmp_path / "x.tex").read_text().count(r"\begin{tabular}") >= 1
    assert "\n".join(lines) in (tmp_path / "x.tex").read_text()
    labels = re.findall(r"\\label\{(.+)\}", (tmp_path / "x.tex").read_text())
    assert labels[0] == "tab:x-perplexity-per-token"
    assert len(set(labels)) == len(labels)
    assert r"\providecommand{\captionXPerplexityPerToken}{Perplexity per token, trained at 64 tokens," in "\n".join(
        lines
    )
    assert r"\caption{\captionXPerplexityPerToken}" in lines
    assert [line for line in render_latex_file([(None, table)] * 3, "x2").splitlines() if "label" in line] == [
        r"\label{tab:x2-perplexity-per-token}",
        r"\label{tab:x2-perplexity-per-token-2}",
        r"\label{tab:x2-perplexity-per-token-3}",
    ]
    assert r"\caption{\captionXTwoPerplexityPerTokenThree}" in render_latex_file([(None, table)] * 3, "x2")
    (tmp_path / "mine.tex").write_text("mine")
    with pytest.raises(UserError, match=r"mine\.tex"):
        combine_results([tmp_path], Console(quiet=True), output=tmp_path / "mine.tex")


def test_a_wide_latex_table_spans_both_columns() -> None:
    """Eight numbers of four or more digits and gaps of two do not fit 46 characters; six do, in bold as well."""
    for num_lengths, environment in ((2, "table"), (6, "table"), (8, "table*")):
        lengths = [64 * 2**index for index in range(num_lengths)]
        rows = [
            record(method, length, value) for method, value in (("rotary", 5.0), ("alibi", 4.0)) for length in lengths
        ]
        (table,) = build_comparison_tables(rows)
        lines = render_latex_file([(None, table)], "x").splitlines()
        assert [line for line in lines if "{table" in line] == [
            rf"\begin{{{environment}}}",
            rf"\end{{{environment}}}",
        ]


def test_a_latex_table_wider_than_a_page_is_wrapped_or_scaled() -> None:
    """Columns of sentences are wrapped. A table of many short columns is scaled, which needs another package."""

    def render(*cells: str) -> str:
        headers = tuple(f"{index}" for index in range(len(cells)))
        return render_latex_file([(None, TextTable("t", "method", headers, (("a", cells),)))], "x")

    assert r"\begin{tabular}{lll}" in render("x" * 40, "x" * 40)
    long = render("x" * 30, "x " * 100, "1.0")
    assert r"\begin{tabular}{llp{0.50\textwidth}l}" in long
    both = render("x " * 70, "x " * 100, "1.0")
    assert sum(map(float, re.findall(r"p\{([\d.]+)\\textwidth\}", both))) < 0.9
    assert "graphicx" not in long + both
    short = render(*["1.00 ± 0.01"] * 12)
    assert "\\resizebox{\\textwidth}{!}{\\begin{tabular}{lllllllllllll}\n" in short
    assert "\n\\end{tabular}}\n" in short
    assert r"\usepackage{graphicx}" in short
    for text in (long, both, short):
        assert text.count("{") == text.count("}")
        assert text.startswith(LATEX_MARKER)


@pytest.mark.parametrize(("methods", "parts"), [(0, 1), (1, 1), (45, 1), (46, 2), (90, 2), (91, 3)])
def test_a_latex_table_longer_than_a_page_is_split(methods: int, parts: int) -> None:
    rows = tuple((f"m{index}", ("1.0",)) for index in range(methods))
    text = render_latex_file([(None, TextTable("t", "method", ("a",), rows, ("n",)))], "x")
    assert re.findall(r"^m\d+", text, re.MULTILINE) == [method for method, _ in rows]
    pages = text.split(r"\begin{table}")[1:]
    assert len(pages) == parts
    for number, page in enumerate(pages):
        assert page.count(r"method & a \\") == page.count(r"\end{table}") == page.count(r"\caption{") == 1
        assert (r"\label{" in page) == (number == 0) == (r"\addtocounter{table}{-1}" not in page)
        assert (r"\notes" in page) == (number == parts - 1)


def test_tables_of_several_experiments_have_their_own_captions_and_labels(story: list[Record]) -> None:
    titles = ("KERPLE, table 3: 5 seeds", "DAPE V2, table 1: ΔP", None, "DAPE V2, table 1: ΔP")
    sections = [report.ReportSection(title, story) for title in titles]
    text = report.render_report_latex(sections, "x")
    captions = re.findall(r"^\\providecommand\{(\\caption\w+)\}\{(.+)\}$", text, re.MULTILINE)
    labels = re.findall(r"\\label\{(.+)\}", text)
    for found in (*zip(*captions, strict=True), labels):
        assert len(set(found)) == len(found) >= len(titles)
    assert captions[0][1].startswith("KERPLE, table 3: 5 seeds. Perplexity per token, trained at ")
    assert labels[0] == "tab:x-kerple-table-3-perplexity-per-token"
    # A section's labels do not change with the experiments before it.
    assert set(re.findall(r"\\label\{(.+)\}", report.render_report_latex(sections[1:3], "x"))) <= set(labels)
    (alone, *_) = re.findall(r"\\label\{(.+)\}", report.render_report_latex(sections[:1], "x"))
    assert alone == "tab:x-perplexity-per-token"


def test_pages_of_earlier_versions_may_be_overwritten(tmp_path: Path) -> None:
    (tmp_path / "old.html").write_text("<style>\n:root { color-scheme: light; }\n* { box-sizing: border-box; }\n")
    (tmp_path / "mine.html").write_text("<style>\n:root { color-scheme: light dark; }\n")
    assert html_page.is_generated_page(tmp_path / "old.html")
    assert not html_page.is_generated_page(tmp_path / "mine.html")


def test_every_reference_names_people_and_an_identifier():
    for work in read_citation()["references"]:
        assert all({"family-names", "given-names"} <= author.keys() for author in work["authors"]), work["title"]
        assert "conference" in work or "journal" in work, work["title"]
        assert "doi" in work or "arXiv" in work.get("notes", ""), work["title"]


def test_dape_v2_is_cited_as_published():
    bibtex = render_bibtex(read_citation())
    entry = next(part for part in bibtex.split("\n\n" if "\n\n" in bibtex else "\n@") if "DAPE V2" in part)
    assert "zheng2025dape" in entry
    assert "doi = {10.18653/v1/2025.acl-long.522}" in entry
    assert entry.count(" and ") == 11  # twelve authors
