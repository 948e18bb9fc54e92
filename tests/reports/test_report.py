"""The report stands alone: well formed, everything embedded, everything escaped, every number from the records."""

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from pages import page_of

from megatron.reports import plots, report
from megatron.reports.comparison_table import build_comparison_tables
from megatron.reports.records import Record, record_from_row
from megatron.reports.report import ReportSection, describe_plots
from megatron.utils.errors import UserError

from .conftest import record

VOID = {"meta", "img", "br", "source"}


class Page(HTMLParser):
    """Checks that tags nest, and gathers text, sources and links."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.text = ""
        self.feed(content)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attributes if name in ("src", "href")]
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.stack:
            self.text += data


def test_it_stands_alone_and_embeds_the_plot(story: list[Record], tmp_path: Path) -> None:
    path = report.write_report(tmp_path / "deep" / "report.html", [ReportSection(None, story)])
    content = path.read_text(encoding="utf-8")
    page = Page(content)
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert "http" not in content
    assert "url(" not in content
    (source,) = page.sources
    assert source.startswith("data:image/png;base64,")
    assert base64.b64decode(source.split(",")[1], validate=True) == plots.render_plots_png(story)
    (narrow,) = re.findall(r'srcset="data:image/png;base64,([^"]+)"', content)
    assert base64.b64decode(narrow, validate=True) == plots.render_plots_png(story, narrow=True)


def test_it_says_what_was_measured(story: list[Record]) -> None:
    known = {
        "targets": 64, "windows": 61, "dataset": "data/python/test_text_document", "tokenizer": "bytes", "step": 500,
        "bits_per_byte": 2.3, "parameters": 861_234, "machine": "Linux, 2 threads", "software": "torch 2.13.0",
        "train_tokens": 1_024_000, "position": "cdape(width=16)+kerple_log", "backend": "chunked", "dtype": "float32",
        "date": "2025-01-02T03:04:05+00:00", "device": "cpu", "seconds": 1.5,
    }  # fmt: skip
    text = Page(page_of([r.replace(**known) for r in story], title="A & B")).text
    for part in (
        *("A & B", "Only the last 64 tokens", "the same 61 places", "the same 4,096 tokens", "861,234"),
        *("data/python/test_text_document", "1,024,000", "cdape(width=16)+kerple_log", "chunked, float32, 4.5 s"),
        *("Linux, 2 threads", "torch 2.13.0", "2025-01-02T03:04:05+00:00", "cdape 4.87 (-2% from 64 tokens)"),
        *("rotary 29.75 (+467% from 64 tokens)", "29.75", "4.96*"),
    ):
        assert part in text, part


def test_the_summary_ranks_by_the_largest_length(story: list[Record]) -> None:
    summary = re.search(r"perplexity per token at 2,048 tokens.*?\.\s*\n", Page(page_of(story)).text).group()
    assert summary.index("cdape") < summary.index("kerple_log") < summary.index("rotary")


def test_the_axis_of_each_metric_is_named(story: list[Record]) -> None:
    title = "Plot of perplexity per token, trained at 64 tokens, protocol last, over length 64 to 2,048 tokens: "
    curves = "cdape 4.96 to 4.87; kerple_log 5.50 to 5.43; rotary 5.25 to 29.75."
    assert f'alt="{title}{curves}"' in page_of(story)
    here = {"metric": "loss", "axis": "depth"}
    probed = [story[0].replace(**here, place=place, value=value) for place, value in ((0.25, 3.0), (1.0, 2.0))]
    page = page_of([*story, *probed])
    map_title = "Map of loss in nats per token by depth and length, trained at 64 tokens, protocol last"
    assert f"{title}{curves} {map_title}; means over depths: rotary 2.50 at 64." in page
    here["axis"] = "distance"
    probed = [story[0].replace(**here, place=place, value=value) for place, value in ((16.0, 3.0), (32.0, 2.0))]
    page = page_of([*story, *probed])
    assert f"{title}{curves} Plot of loss in nats per token by distance, windows of 64 tokens," in page
    assert "over distance 16 to 32 tokens: rotary 3.00 to 2.00." in page
    assert "at distance 32 tokens (0.5×, protocol last): rotary 2.00 (-1.00 from 16 tokens)." in Page(page).text
    where = {"axis": "position", "place": 64.0}
    (inside,) = build_comparison_tables([record("rotary", 512, 5.0, **where, change=1.5, change_from=64)])
    assert inside.changes == {}, "a change is from another length, and this is none"


def test_the_summary_says_what_is_beyond_chance() -> None:
    change = {"change": 6.0, "change_low": 5.0, "change_high": 7.0, "change_from": 64}
    page = Page(page_of([record("rotary", 64, 5.0), record("rotary", 2048, 30.0, **change)]))
    assert "rotary 30.00 (+500% from 64 tokens, rises)" in page.text
    assert "draw the same windows at both lengths" in page.text


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
    assert "script" not in page.tags
    assert page.text.count("alert(1)") >= 7
    # Template's own placeholder sign is harmless too.
    assert "$plot" in Page(page_of([record("$plot", 64, 5.0)])).text


def test_the_alternative_text_tells_where_curves_end_and_does_not_grow_without_bound() -> None:
    gain = [record("a", 64, 5.0, metric="delta_perplexity"), record("short", 64, 6.0), record("short", 128, 6.5)]
    rows = [*gain[1:], record("long", 64, 5.0), record("long", 256, 4.0)]
    assert describe_plots(build_comparison_tables(rows)).endswith(
        ": long 5.00 to 4.00; short 6.00 to 6.50 at 128 tokens, where it ends."
    )
    assert describe_plots(build_comparison_tables(gain[:1])).startswith("Plot of ΔP per token, trained at 64")
    many = [record(f"m{i}", 64, 5.0 + i) for i in range(30)]
    assert describe_plots(build_comparison_tables(many)).endswith("m7 12.00; 21 others between; m29 34.00.")


def test_the_title_says_what_is_shown(story: list[Record]) -> None:
    title = "<h1>Perplexity of rotary, kerple_log and cdape at 64 to 2,048 tokens, trained at 64"
    assert f"{title}</h1>" in page_of(story)
    assert f"{title} (2 runs to come)</h1>" in page_of(story, num_pending_runs=2)
    many = [record(f"m{i}", 64, 5.0) for i in range(5)]
    assert "<h1>Perplexity of 5 methods at 64 tokens, trained at 64</h1>" in page_of(many)
    assert "<h1>A &amp; B</h1>" in page_of(story, title="A & B")


def test_configurations_are_folded(story: list[Record]) -> None:
    page = Page(page_of(story, configurations={"rotary.yml": "pos_emb: rotary\n"}))
    assert "details" in page.tags
    assert "pos_emb: rotary" in page.text
    assert "details" not in Page(page_of(story)).tags


def test_every_cell_names_its_column_for_narrow_screens(story: list[Record]) -> None:
    content = page_of(story)
    cells = re.findall(r"<td[^>]*>", content)
    assert len(cells) == 3 * 3 + 3 * 5  # lengths, and facts of the models
    assert all(re.search(r'data-label="[^"]+"', cell) for cell in cells)
    assert re.search(r'<td data-label="32× \(2,048\)">29.75', content)
    assert "@media (max-width: 56rem)" in content
