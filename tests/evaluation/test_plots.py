"""What the curves show, asked of matplotlib's own objects, and that the PNG is one."""

import struct
import zlib

import pytest
from matplotlib.figure import Figure

from megatron.errors import UserError
from megatron.evaluation import plots, tables
from megatron.evaluation.records import Record

from .conftest import record


def axes_of(records: list[Record]):
    axes = Figure().add_subplot()
    (layout,) = tables.layouts(records)
    plots._draw(axes, layout)
    return axes


def test_png_is_whole_and_large_enough_to_read(story: list[Record]) -> None:
    content = plots.png(story)
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    assert width >= 1000
    assert height >= 600
    at, pixels = 8, b""
    while at < len(content):  # every chunk's checksum
        size, kind = struct.unpack(">I4s", content[at : at + 8])
        body = content[at + 8 : at + 8 + size]
        assert zlib.crc32(kind + body) == struct.unpack(">I", content[at + 8 + size : at + 12 + size])[0]
        pixels += body if kind == b"IDAT" else b""
        at += 12 + size
    assert len(set(zlib.decompress(pixels))) > 20  # not one colour


def test_curves_are_the_records(story: list[Record]) -> None:
    axes = axes_of(story)
    rotary, _, cdape = axes.lines[:3]
    assert list(rotary.get_xdata()) == [64, 512, 2048]
    assert list(rotary.get_ydata()) == [5.25, 12.5, 29.75]
    assert list(cdape.get_ydata()) == [4.96, 4.9, 4.87]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["rotary", "kerple_log", "cdape"]
    styles = {(line.get_color(), line.get_marker()) for line in axes.lines[:3]}
    assert len(styles) == 3


def test_axes(story: list[Record]) -> None:
    axes = axes_of(story)
    assert axes.get_xscale() == "log"
    assert axes.get_yscale() == "log"  # 29.75 / 4.87 is more than 4
    assert list(axes.xaxis.get_major_locator()()) == [64, 512, 2048]
    assert axes.xaxis.get_major_formatter()(2048, 0) == "2,048\n32×"
    assert any(list(line.get_xdata()) == [64, 64] for line in axes.lines[3:])  # the training length
    flat = axes_of([r for r in story if r.method != "rotary"])
    assert flat.get_yscale() == "linear"


def test_bands_are_intervals_or_seeds(story: list[Record]) -> None:
    axes = axes_of(story)
    assert len(axes.collections) == 3
    assert axes.get_legend().get_title().get_text() == "band: 95% interval\nover windows"
    seeds = axes_of([record("t5", length, p, seed) for length in (64, 128) for seed, p in enumerate((5.0, 5.5, 6.5))])
    (band,) = seeds.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (5.0, 6.5)
    assert seeds.get_legend().get_title().get_text() == "band: smallest to\nlargest seed"
    assert not axes_of([record("t5", 64, 5.0), record("t5", 128, 5.5)]).collections


def test_many_methods_with_odd_names_stay_distinct() -> None:
    names = [f"_method {i} $\\frac" for i in range(11)]
    records = [record(name, length, 5 + i) for i, name in enumerate(names) for length in (64, 128)]
    axes = axes_of(records)
    styles = {(line.get_color(), line.get_linestyle()) for line in axes.lines[:11]}
    assert len(styles) == 11
    assert len(axes.get_legend().get_texts()) == 11
    assert plots.png(records)  # a dollar sign in a name is no formula


def test_many_methods_have_no_bands_and_a_legend_beside_the_panel() -> None:
    records = [record(f"method {i}", length, 5 + i, stderr=0.05) for i in range(31) for length in (64, 2048)]
    axes = axes_of(records)
    assert not axes.collections
    assert axes.get_legend().get_title().get_text() == ""
    figure = axes.figure
    figure.set_size_inches(10.8, 4.6)
    figure.draw_without_rendering()
    box = axes.get_legend().get_window_extent()
    assert box.height <= figure.bbox.height
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines[:31]}) == 31


def test_groups_that_cannot_be_compared_get_panels(story: list[Record]) -> None:
    one, two = plots.png(story), plots.png([*story, record("rotary", 64, 5.0, protocol="nonoverlapping")])
    assert struct.unpack(">I", two[20:24])[0] == 2 * struct.unpack(">I", one[20:24])[0]


def test_nothing_to_draw() -> None:
    with pytest.raises(UserError, match="no records"):
        plots.png([])
