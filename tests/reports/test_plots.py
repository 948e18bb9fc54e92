"""Contents of the curves, read from matplotlib's objects, and validity of the PNG."""

import struct
import warnings
import zlib
from itertools import pairwise

import pytest
from matplotlib.figure import Figure

from megatron.reports import plots
from megatron.reports.comparison_table import build_comparison_tables
from megatron.reports.paper_figure import render_paper_figure
from megatron.reports.records import Record
from megatron.utils.errors import UserError

from .conftest import record


def axes_of(records: list[Record]):
    axes = Figure().add_subplot()
    (layout,) = build_comparison_tables(records)
    plots.draw_panel(axes, layout)
    return axes


def curves(axes) -> list:
    """Return the curves, without error bars and the mark of the training length."""
    return [line for line in axes.lines if line.get_marker() not in ("_", "None")]


def test_png_is_whole_and_large_enough_to_read(story: list[Record]) -> None:
    content = plots.render_plots_png(build_comparison_tables(story))
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    assert width >= 1000
    assert height >= 600
    at, pixels = 8, b""
    while at < len(content):  # checksum of every chunk
        size, kind = struct.unpack(">I4s", content[at : at + 8])
        body = content[at + 8 : at + 8 + size]
        assert zlib.crc32(kind + body) == struct.unpack(">I", content[at + 8 + size : at + 12 + size])[0]
        pixels += body if kind == b"IDAT" else b""
        at += 12 + size
    assert len(set(zlib.decompress(pixels))) > 20  # more than one color


def test_plots_use_nothing_that_matplotlib_will_remove(story: list[Record]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plots.render_plots_png(build_comparison_tables(story))


def test_ticks_have_as_many_decimals_as_they_need(story: list[Record]) -> None:
    formatter = axes_of(story).yaxis.get_major_formatter()
    assert formatter.format_ticks([5.0, 7.5, 10.0]) == ["5.0", "7.5", "10.0"]


def test_names_in_scripts_without_a_font_cause_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    method = "\u65e5\u672c \U000131a3"  # no machine has a font of all these for matplotlib's default family
    tables = build_comparison_tables([record(method, 64, 8.0), record(method, 128, 8.0)])
    assert plots.render_plots_png(tables)
    for file_format in (".pdf", ".svg"):
        assert render_paper_figure(tables[0], file_format, width=3.25, font_size=8)
    assert not [str(warning.message) for warning in recwarn]


def test_curves_are_the_records(story: list[Record]) -> None:
    axes = axes_of(story)
    rotary, kerple, cdape = curves(axes)
    # Curves are shifted sideways, the middle one is at its lengths, and each point is on its bar.
    assert list(kerple.get_xdata()) == [64, 512, 2048]
    for curve, bars in zip((rotary, kerple, cdape), axes.collections, strict=True):
        assert [segment[0][0] for segment in bars.get_segments()] == pytest.approx(list(curve.get_xdata()))
    x_positions = [bars.get_segments()[0][0][0] for bars in axes.collections]
    assert 60 > x_positions[0] > 64 / 2
    assert x_positions[0] * x_positions[2] == pytest.approx(64**2)
    bare = axes_of([each.replace(low=None, high=None, stderr=None) for each in story])
    assert all(list(curve.get_xdata()) == [64, 512, 2048] for curve in curves(bare)), "without bars nothing is shifted"
    assert list(rotary.get_ydata()) == [5.25, 12.5, 29.75]
    assert list(cdape.get_ydata()) == [4.96, 4.9, 4.87]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["rotary", "kerple_log", "cdape"]
    styles = {(line.get_color(), line.get_marker()) for line in curves(axes)}
    assert len(styles) == 3


def test_axes(story: list[Record]) -> None:
    axes = axes_of(story)
    assert axes.get_xscale() == "log"
    assert axes.get_yscale() == "log"  # 29.75 / 4.87 exceeds 4
    assert list(axes.xaxis.get_major_locator()()) == [64, 512, 2048]
    assert axes.xaxis.get_major_formatter()(2048, 0) == "2,048\n32×"
    assert any(list(line.get_xdata()) == [64, 64] for line in axes.lines)  # the training length
    flat = axes_of([r for r in story if r.method != "rotary"])
    assert flat.get_yscale() == "linear"


def test_bars_are_intervals_or_seeds(story: list[Record]) -> None:
    axes = axes_of(story)
    assert len(axes.collections) == 3
    assert axes.get_legend().get_title().get_text() == "bar: 95% interval\nover windows"
    seeds = axes_of([record("t5", length, p, seed) for length in (64, 128) for seed, p in enumerate((5.0, 5.5, 6.5))])
    (bars,) = seeds.collections
    assert [segment.tolist() for segment in bars.get_segments()] == [[[x, 5.0], [x, 6.5]] for x in (64.0, 128.0)]
    assert seeds.get_legend().get_title().get_text() == "bar: range over\nseeds"
    assert not axes_of([record("t5", 64, 5.0), record("t5", 128, 5.5)]).collections


def test_five_overlapping_intervals_stand_side_by_side() -> None:
    """Five overlapping intervals are drawn side by side, without overlap and far from the next length."""
    lengths = (64, 128, 256)
    records = [record(f"m{i}", length, 5 + i / 100, stderr=0.05) for i in range(5) for length in lengths]
    axes = axes_of(records)
    axes.figure.set_size_inches(8.6, 4.6)
    axes.figure.draw_without_rendering()
    for at, length in enumerate(lengths):
        x_positions = [bars.get_segments()[at][0][0] for bars in axes.collections]
        pixels = [axes.transData.transform((place, 5))[0] for place in x_positions]
        assert all(later - earlier > 3 for earlier, later in pairwise(pixels))
        assert length / 2**0.5 < x_positions[0] < x_positions[-1] < length * 2**0.5


def test_sixty_four_methods_have_sixty_four_pairs_of_colour_and_marker() -> None:
    looks = [plots.get_curve_style(index) for index in range(256)]
    assert len({(look["color"], look["marker"]) for look in looks[:64]}) == 64
    assert len({tuple(look.values()) for look in looks}) == 256
    drawn = curves(axes_of([record(f"m{i}", length, 5 + i) for i in range(31) for length in (64, 2048)]))
    assert len({(line.get_color(), line.get_marker()) for line in drawn}) == 31


def test_a_narrow_plot_has_its_legend_below(story: list[Record]) -> None:
    wide, narrow = (
        struct.unpack(">II", plots.render_plots_png(build_comparison_tables(story), narrow=narrow)[16:24])
        for narrow in (False, True)
    )
    assert narrow[0] <= 800 < wide[0]
    assert narrow[1] > narrow[0]


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("narrow", [False, True])
def test_the_name_of_a_pattern_of_layers_leaves_room_for_the_curves(narrow: bool) -> None:
    """A long name of a layer pattern leaves room for the curves; matplotlib warns if a legend does not."""
    name = " | ".join(
        ["rotary(window=128, temperature=logn at evaluation)", "cdape(width=8)+kerple_log(per_layer)"] * 3
    )
    records = [record(name, length, 5.0) for length in (64, 128)]
    assert plots.render_plots_png(build_comparison_tables(records), narrow=narrow)
    (text,) = axes_of(records).get_legend().get_texts()
    assert max(map(len, text.get_text().split("\n"))) <= plots.LEGEND_CHARACTERS + 8  # no name is split
    assert text.get_text().replace("\n", " ") == name


def test_many_methods_with_odd_names_stay_distinct() -> None:
    names = [f"_method {i} $\\frac" for i in range(11)]
    records = [record(name, length, 5 + i) for i, name in enumerate(names) for length in (64, 128)]
    axes = axes_of(records)
    styles = {(line.get_color(), line.get_linestyle()) for line in curves(axes)}
    assert len(styles) == 11
    assert len(axes.get_legend().get_texts()) == 11
    assert plots.render_plots_png(build_comparison_tables(records))  # a dollar sign in a name does not start a formula


def test_many_methods_have_no_bars_and_a_legend_next_to_the_panel() -> None:
    records = [record(f"method {i}", length, 5 + i, stderr=0.05) for i in range(31) for length in (64, 2048)]
    axes = axes_of(records)
    assert not axes.collections
    assert axes.get_legend().get_title().get_text() == ""
    figure = axes.figure
    figure.set_size_inches(10.8, 4.6)
    figure.draw_without_rendering()
    box = axes.get_legend().get_window_extent()
    assert box.height <= figure.bbox.height
    assert len({(line.get_color(), line.get_linestyle()) for line in curves(axes)}) == 31


def test_groups_that_cannot_be_compared_get_panels(story: list[Record]) -> None:
    one, two = (
        plots.render_plots_png(build_comparison_tables(story)),
        plots.render_plots_png(build_comparison_tables([*story, record("rotary", 64, 5.0, protocol="nonoverlapping")])),
    )
    # The story's panel has a close-up; the other has not.
    assert 2 * struct.unpack(">I", two[20:24])[0] == 3 * struct.unpack(">I", one[20:24])[0]


def test_nothing_to_draw() -> None:
    with pytest.raises(UserError, match="no records"):
        plots.render_plots_png(build_comparison_tables([]))


def test_a_close_up_has_the_methods_that_end_near_the_best(story: list[Record]) -> None:
    """rotary, which ends at 29.75, leaves the panel, and triangles stand at its two points beyond the axis."""
    (table,) = build_comparison_tables(story)
    close_up = plots.find_close_up(table)
    assert close_up is not None
    assert 4.5 < close_up[0] < 4.87 < 5.5 < close_up[1] < 6
    axes = Figure().add_subplot()
    _, _, legend_title = plots.draw_panel(axes, table, close_up=close_up)
    low, high = axes.get_ylim()
    assert low < close_up[0] < close_up[1] < high < 12.5
    assert [list(line.get_ydata()) for line in axes.lines if line.get_marker() == "^"] == [[high, high]]
    assert "beyond" in legend_title


def test_there_is_no_close_up_of_one_method_or_of_an_axis_that_shows_all(story: list[Record]) -> None:
    for methods in (("rotary", "cdape"), ("kerple_log", "cdape")):
        (table,) = build_comparison_tables([each for each in story if each.method in methods])
        assert plots.find_close_up(table) is None


def test_a_linear_axis_leaves_out_extreme_values(story: list[Record]) -> None:
    gains = {"rotary": (-4.5, -160.0), **{f"flat_{index}": (0.05, 0.05 + index / 200) for index in range(6)}}
    records = [
        record(method, length, 5.0, metric="delta_perplexity", nll=None).replace(value=gain)
        for method, values in gains.items()
        for length, gain in zip((512, 2048), values, strict=True)
    ]
    axes = axes_of(records)
    low, high = axes.get_ylim()
    assert -4.5 < low < 0.05 < 0.075 < high
    assert [list(line.get_ydata()) for line in axes.lines if line.get_marker() == "v" and low in line.get_ydata()] == [
        [low, low]
    ]


def test_a_close_up_of_a_dense_axis_has_no_triangles() -> None:
    """There would be one for each of hundreds of positions."""
    records = [
        record(method, 2048, 5.0 + (position if method == "rotary" else 0), axis="tokens_seen", place=position)
        for method in ("rotary", "kerple_log", "cdape")
        for position in range(1, 200)
    ]
    (table,) = build_comparison_tables(records)
    assert table.axis.is_dense
    close_up = plots.find_close_up(table)
    assert close_up is not None
    axes = Figure().add_subplot()
    _, _, legend_title = plots.draw_panel(axes, table, close_up=close_up)
    assert axes.get_ylim()[1] < 10
    assert not [line for line in axes.lines if line.get_marker() == "^"]
    assert "beyond" not in legend_title
