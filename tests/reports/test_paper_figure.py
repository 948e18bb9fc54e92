"""Figures for papers: exact width, text that does not overlap, vector formats, and files of others."""

import re
from itertools import combinations
from pathlib import Path

import pytest
from matplotlib.text import Text
from rich.console import Console

from megatron.reports.combine import combine_results
from megatron.reports.paper_figure import build_paper_figure, list_panels, render_paper_figure, use_font_size
from megatron.reports.records import Record, write_records
from megatron.utils.errors import UserError

from .conftest import record


@pytest.mark.parametrize(("width", "font_size"), [(2, 8), (3.25, 8), (3.25, 10), (5.5, 9), (7, 7)])
@pytest.mark.parametrize("num_methods", [3, 12])
def test_no_text_overlaps_another_or_leaves_the_figure(width: float, font_size: float, num_methods: int) -> None:
    lengths = [64, 128, 256, 512, 1024, 2048, 4096, 131072]
    records = [
        record(f"method_{i}" + "+kerple_log" * (i % 2), length, 5 + i, stderr=0.05)
        for i in range(num_methods)
        for length in lengths
    ]
    (panel,) = list_panels(records)
    with use_font_size(font_size):
        figure = build_paper_figure(panel, width, font_size)
        figure.draw_without_rendering()
        texts = [each for each in figure.findobj(Text) if each.get_visible() and each.get_text().strip()]
        shown = [(each.get_text(), each.get_window_extent()) for each in texts if _is_drawn(each)]
    assert figure.get_figwidth() == width
    expected = {"perplexity per token", "training length", "131,072\n2,048×", "method_1+kerple_log"}
    assert expected <= {text for text, _ in shown}
    for (first, box), (second, other) in combinations(shown, 2):
        assert not box.shrunk(0.98, 0.98).overlaps(other.shrunk(0.98, 0.98)), f"{first!r} overlaps {second!r}"
    for text, box in shown:
        assert box.x0 >= -1, text
        assert box.x1 <= figure.bbox.x1 + 1, text
        assert box.y0 >= -1, text
        assert box.y1 <= figure.bbox.y1 + 1, text


def _is_drawn(text: Text) -> bool:
    """Return False for labels of ticks outside of their axis, which matplotlib keeps but does not draw."""
    axes = text.axes
    if axes is None or text not in axes.yaxis.get_majorticklabels():
        return True
    low, high = axes.get_ylim()
    return bool(low <= text.get_position()[1] <= high)


def test_the_room_for_the_training_length_adds_no_ticks() -> None:
    (panel,) = list_panels([record("a", length, 5.0 + length / 64) for length in (64, 128, 192)])
    with use_font_size(8):
        figure = build_paper_figure(panel, 3.25, 8)
        figure.draw_without_rendering()
    (axes,) = figure.subfigs[0].axes
    assert axes.get_ylim()[1] > 8.3
    assert 5.5 < max(axes.get_yticks()) <= 8
    assert axes.get_ylim()[0] > 5


@pytest.mark.parametrize("num_lengths", range(2, 9))
def test_the_training_length_and_the_largest_have_ticks(num_lengths: int) -> None:
    lengths = [64 * 2**index for index in range(num_lengths)]
    records = [record("rotary", length, 5.0 + length) for length in lengths]
    (panel,) = list_panels(records)
    with use_font_size(8):
        ticks = build_paper_figure(panel, 3.25, 8).subfigs[0].axes[0].get_xticks().tolist()
    assert (ticks[0], ticks[-1]) == (64, lengths[-1])
    assert set(ticks) <= set(lengths)


def test_the_formats_are_vectors_and_reproducible(story: list[Record]) -> None:
    (panel,) = list_panels(story)
    pdf, svg = (render_paper_figure(panel, name, width=3.25, font_size=8) for name in (".pdf", ".svg"))
    assert pdf.startswith(b"%PDF-")
    box = re.search(rb"/MediaBox \[ ?0 0 ([\d.]+) ([\d.]+) ?\]", pdf)
    assert box is not None
    assert float(box[1]) == pytest.approx(3.25 * 72)
    assert b"/Subtype /Type3" not in pdf  # publishers reject Type 3 fonts
    assert b"/Subtype /Image" not in pdf
    assert b'width="234pt"' in svg
    assert b"<image" not in svg
    assert render_paper_figure(panel, ".pdf", width=3.25, font_size=8) == pdf
    assert render_paper_figure(panel, ".svg", width=3.25, font_size=8) == svg


def test_each_group_of_results_has_a_file_and_files_of_others_stay(story: list[Record], tmp_path: Path) -> None:
    write_records(tmp_path / "results.json", [*story, record("rotary", 64, 5.0, protocol="nonoverlapping")])
    console = Console(record=True, width=300)
    for _ in range(2):  # its own files may be overwritten
        combine_results([tmp_path], console, figure=tmp_path / "a.pdf", figure_width=5.5)
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "a.pdf", "a_2.pdf"}
    assert "a_2.pdf (Perplexity per token, trained at 64 tokens, protocol nonoverlapping)" in console.export_text()
    (tmp_path / "b_2.svg").write_text("mine")
    with pytest.raises(UserError, match=r"--figure: .*b_2\.svg"):
        combine_results([tmp_path], Console(quiet=True), figure=tmp_path / "b.svg")
    assert not (tmp_path / "b.svg").exists()


def test_errors(story: list[Record], tmp_path: Path) -> None:
    write_records(tmp_path / "results.json", story)
    quiet = Console(quiet=True)
    with pytest.raises(UserError, match=r"a\.png: it must be a name ending in \.pdf or \.svg"):
        combine_results([tmp_path], quiet, figure=tmp_path / "a.png")
    with pytest.raises(UserError, match="--figure-font: needs --figure"):
        combine_results([tmp_path], quiet, figure_font=9)
    many = [record(f"method {i}", length, 5 + i) for i in range(150) for length in (64, 128)]
    (panel,) = list_panels(many)
    with pytest.raises(UserError, match=r"150 methods need .* more than a page"):
        render_paper_figure(panel, ".pdf", width=3.25, font_size=8)
    with pytest.raises(UserError, match="no records"):
        list_panels([])
