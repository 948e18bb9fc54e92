"""Charts of functions: point positions, hover text, and colored lines."""

import math
from itertools import pairwise

import pytest

from megatron.reports.axes import choose_log_ticks
from megatron.reports.curve_chart import ChartLine, HorizontalAxis, build_line_chart, build_median_line
from megatron.reports.html_page import TEMPLATES_FOLDER


def test_lines_are_at_their_values() -> None:
    axis = HorizontalAxis("distance", 0.0, 99.0, "log1p")
    lines = [
        ChartLine("a", [(0.0, -1.0), (9.0, -math.inf), (99.0, math.nan)], style=3),
        ChartLine("b", [(9.0, -2.0), (99.0, 0.5)], [(-3.0, -1.0), (0.0, 1.0)]),
    ]
    chart = build_line_chart("id", "Title", "in words", axis, "bias", lines, y_limits=(-4.0, 0.0), mark=(9.0, "here"))
    assert [place.share for place in chart.x_positions] == pytest.approx([0.0, 0.5, 1.0])
    assert [place.text for place in chart.x_positions] == ["distance: 0", "distance: 9", "distance: 99"]
    first, second = chart.series
    # Values beyond the axis are kept as they are; NaN has no point.
    assert [(point.x_index, point.value) for point in first.points] == [(0, -1.0), (1, -1e300)]
    assert "∞" in first.points[1].text or "inf" in first.points[1].text
    assert second.points[0].interval == (-3.0, -1.0)
    assert second.points[1].interval == (0.0, 1.0)
    assert second.points[1].text.startswith("0.5")
    assert chart.mark == (pytest.approx(0.5), "here")
    assert first.style == 3
    assert chart.data["word"] == "methods"


def test_a_line_to_a_value_beyond_the_axis_is_cut_off_on_its_way_there() -> None:
    """A line to a value beyond the axis is clipped; a line along the edge would suggest values at the edge."""
    lines = [ChartLine("a", [(0.0, 4.0), (10.0, 3.0), (20.0, 2.0), (30.0, 1.0)])]
    chart = build_line_chart("id", "", "", HorizontalAxis("step", 0.0, 30.0), "loss", lines, y_limits=(1.0, 2.0))
    points = [point.split(",") for point in chart.list_shapes(chart.series[0])["line"].split()]
    heights = [float(y) for _, y in points]
    steps = [before - after for before, after in pairwise(heights)]
    assert steps == pytest.approx([steps[0]] * 3, abs=0.2), "equal steps of the loss are equal heights, inside and out"
    assert heights[1] < -900 < 0 < heights[2], "1,000 is the height of the plot"
    assert chart.clip_note.startswith("A line that leaves the plot has values beyond the axis, up to 4.00;")
    assert chart.data["series"][0]["points"][0][1:3] == [4.0, "4.00"], "which the pointer tells"
    inside = build_line_chart("id", "", "", HorizontalAxis("step", 0.0, 30.0), "loss", lines, y_limits=(1.0, 4.0))
    assert inside.clip_note == ""
    style = (TEMPLATES_FOLDER / "style.css").read_text(encoding="utf-8")
    assert ".canvas svg { overflow: hidden; }" in style


def test_lines_without_a_number_leave_the_chart_empty() -> None:
    """Lines without numbers, as in a diverged run, leave the chart empty."""
    lines = [ChartLine("a", [(0.0, math.nan), (1.0, math.nan)])]
    chart = build_line_chart("id", "", "", HorizontalAxis("x", 0.0, 1.0), "bias", lines, y_limits=(0.0, 1.0))
    assert chart.clip_note == ""
    assert chart.list_shapes(chart.series[0])["line"] == ""


def test_a_value_without_an_end_falls_steeply_and_stays_a_number() -> None:
    lines = [ChartLine("a", [(0.0, -1.0), (1.0, -math.inf)], [(-2.0, 0.0), (-math.inf, -1.0)])]
    chart = build_line_chart("id", "", "", HorizontalAxis("x", 0.0, 1.0), "bias", lines, y_limits=(-4.0, 0.0))
    shapes = chart.list_shapes(chart.series[0])
    assert "inf" not in shapes["line"] + shapes["band"] + str(chart.data["series"][0]["points"][1][1])
    assert float(shapes["line"].split()[1].split(",")[1]) > 50_000


def test_a_line_of_one_point_is_its_marker() -> None:
    lines = [ChartLine("a", [(20.0, 3.0)]), ChartLine("b", [(10.0, 3.0), (20.0, 2.0)], style=1)]
    chart = build_line_chart("id", "", "", HorizontalAxis("step", 0.0, 20.0), "loss", lines, y_limits=(2.0, 3.0))
    alone, line = map(chart.list_shapes, chart.series)
    ((marker, x, _),) = alone["markers"]
    assert (marker, x) == ("m0", "100%")
    assert line["markers"] == []


def test_an_axis_may_descend() -> None:
    axis = HorizontalAxis("ε", 1.0, 0.0)
    assert [axis.locate(x) for x in (1.0, 0.75, 0.0)] == [0.0, 0.25, 1.0]
    assert [tick.text for tick in axis.choose_ticks()] == ["1", "0.8", "0.6", "0.4", "0.2", "0"]
    assert [t.text for t in HorizontalAxis("n", 1.0, 3e6, "log").choose_ticks()][-1] == "1,000,000"


def test_evenly_spaced_lines_are_colored() -> None:
    lines = [ChartLine(f"head {head}", [(0.0, head), (1.0, head)], style=head) for head in range(24)]
    chart = build_line_chart("id", "", "", HorizontalAxis("x", 0.0, 1.0), "y", lines, y_limits=(0.0, 23.0))
    assert [s.name for s in chart.series if s.is_colored] == [f"head {head}" for head in range(0, 24, 3)]
    assert [s.is_colored for s in chart.series] == [True] * 8 + [False] * 16, "the legend begins with them"
    assert len({s.name for s in chart.series}) == 24


def test_a_median_is_within_its_band() -> None:
    line = build_median_line("m", [1.0, 2.0], [[float(k), 10.0 * k] for k in range(11)], 0)
    assert list(line.points) == [(1.0, 5.0), (2.0, 50.0)]
    assert list(line.band) == [(1.0, 9.0), (10.0, 90.0)]


@pytest.mark.parametrize(
    ("low", "high", "inside"), [(6.4, 38, [7, 10, 15, 20, 30]), (4, 200, [5, 10, 20, 50, 100, 200])]
)
def test_a_logarithmic_axis_has_several_ticks_within_its_range(low: float, high: float, inside: list[float]) -> None:
    assert [tick for tick in choose_log_ticks(low, high) if low <= tick <= high] == inside
