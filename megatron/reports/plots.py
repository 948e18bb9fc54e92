"""Plots of a metric over length or another axis: one curve per method, with the training length marked.

Colors are Okabe and Ito's, which color-blind readers can distinguish. Markers and dashes keep curves distinct in
grayscale. Token axes are logarithmic, because lengths double. The value axis is logarithmic if the metric requests it
and values differ by more than a factor of 4; on a linear axis an exploding perplexity would flatten all others. A
second panel then shows the methods that end close to the best one. Linear axes leave out extreme values, as the charts
of reports do; triangles at their edges point to these.

Bars show the range over several seeds, or the 95% interval over windows of one seed. With more than eight methods there
are no bars, because they would hide the curves. Curves with bars are drawn side by side around each length, both
markers and bars, because intervals on the same text overlap.
"""

import io
import math
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize
from matplotlib.figure import Figure, SubFigure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, Formatter, FuncFormatter, NullFormatter, NullLocator

from megatron.reports.axes import choose_log_ticks, choose_scales, format_multiple
from megatron.reports.charts import get_style_indices
from megatron.reports.comparison_table import ComparisonTable, select_curve_tables
from megatron.reports.curve_chart import get_bar_meaning, get_curve
from megatron.reports.depth_maps import DepthMap, split_depth_maps
from megatron.reports.metrics import Metric
from megatron.utils.errors import UserError

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D1F")
MARKERS = "osD^vPX*"
DASHES = ("-", "--", "-.", ":")
MAX_CURVES_WITH_BARS = len(COLORS)
BAR_GAP, MAX_BAR_SPREAD = 0.1, 0.4
"""Offset between curves with bars, and maximum total offset, relative to the distance to the next length."""
CLOSE_RATIO = 1.25
"""Maximum ratio to the lowest value at the last x for a method to be in the close-up."""
CLOSE_SHARE = 0.1
"""Maximum share of the logarithmic axis that these methods take, for a close-up to be drawn."""
MAX_WRITTEN_CELLS = 80
"""Maximum number of cells of a map that shows numbers."""
LEGEND_ROWS = 24
"""Number of legend lines that fit next to a panel."""
LEGEND_CHARACTERS = 44
"""Maximum number of characters in a legend line."""


@dataclass(frozen=True)
class PlotStyle:
    """Sizes of the parts of a plot. Font sizes are in points.

    Attributes:
        title_size, legend_size, note_size, tick_size, cell_size: font sizes of titles, legends, notes, and of the tick
            labels and numbers of maps.
        title_characters: number of characters in a line of the title; 0 omits titles.
        marker_size, line_width: sizes of curves, in points.
        max_ticks: maximum number of labels on the horizontal axis.
        label_characters: number of characters in a line of the horizontal axis's label.
        legend: position of the legend, right of the panel or below it; a figure legend is drawn by the caller.
        map_columns, map_height: number of maps side by side, and the height of a map in inches.
    """

    title_size: float = 11
    legend_size: float = 9
    note_size: float = 8
    tick_size: float = 7
    cell_size: float = 6
    title_characters: int = 84
    marker_size: float = 5
    line_width: float = 1.4
    max_ticks: int = 9
    label_characters: int = 60
    legend: Literal["right", "below", "figure"] = "right"
    map_columns: int = 3
    map_height: float = 2.4


WIDE = PlotStyle()
NARROW = PlotStyle(
    title_size=8.5, legend_size=8, title_characters=52, label_characters=52, legend="below", map_columns=1
)


def render_plots_png(all_tables: Sequence[ComparisonTable], *, narrow: bool = False) -> bytes:
    """Render a PNG with one panel for each table of curves, or two with a close-up, and the needle maps below.

    Args:
        all_tables: tables to plot (`build_comparison_tables`); the legend marks methods without any records.
        narrow: for phones: as wide as high, with the legend below.

    Raises:
        UserError: there is nothing to plot.
    """
    tables, depth_maps = split_depth_maps(all_tables)
    tables = select_curve_tables(tables)
    if not tables and not depth_maps:
        raise UserError("no records to plot")
    # Figure instead of pyplot, for no window system and no global state.
    legends = ["\n".join(map(wrap_name, table.methods)).split("\n") for table in tables]
    max_lines = max(map(len, legends), default=0)
    longest = max((len(line) for lines in legends for line in lines), default=0)
    column = max(2.2, 0.08 * longest)
    size = (4.0, 3.6 + 0.19 * max_lines) if narrow else (6.4 + column * -(-max_lines // LEGEND_ROWS), 4.6)
    style = NARROW if narrow else WIDE
    drawn: list[tuple[ComparisonTable, tuple[float, float] | None]] = []
    for table in tables:
        close_up = find_close_up(table)
        drawn += [(table, None), (table, close_up)] if close_up else [(table, None)]
    heights = [size[1]] * len(drawn)
    heights += [0.9 + style.map_height * -(-len(depth_map.methods) // style.map_columns) for depth_map in depth_maps]
    figure = Figure(figsize=(size[0], sum(heights)), dpi=200 if narrow else 160, layout="constrained")
    figure.get_layout_engine().set(hspace=0.05)  # type: ignore[union-attr,call-arg]
    FigureCanvasAgg(figure)
    if depth_maps:
        parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        panels = [part.add_subplot() for part in parts[: len(drawn)]]
        for part, depth_map in zip(parts[len(drawn) :], depth_maps, strict=True):
            draw_depth_maps(part, depth_map, style)
    else:
        panels = [figure.add_subplot(len(drawn), 1, row) for row in range(1, len(drawn) + 1)]
    for panel, (table, close_up) in zip(panels, drawn, strict=True):
        draw_panel(panel, table, style, close_up)
    return save_figure(figure)


def save_figure(figure: Figure, file_format: str = "png", metadata: dict[str, Any] | None = None) -> bytes:
    """Render a figure as the content of a file, without a warning for each character that no font here has."""
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        figure.savefig(content, format=file_format, metadata=metadata)
    return content.getvalue()


def wrap_name(name: str) -> str:
    """Wrap a name for the legend, because patterns of layers have long names."""
    return textwrap.fill(name, LEGEND_CHARACTERS, break_long_words=False, break_on_hyphens=False)


def get_curve_style(index: int) -> dict[str, str]:
    """Return the color, marker, and dash pattern of a curve.

    Among 64 curves, no two share color and marker; among 256, no two share all three.
    """
    color, marker, dash = get_style_indices(index)
    return {"color": COLORS[color], "marker": MARKERS[marker], "linestyle": DASHES[dash]}


def find_close_up(table: ComparisonTable) -> tuple[float, float] | None:
    """Find the range of the curves that end close to the lowest one.

    Returns:
        Lowest and highest value, including bars; None if only one curve ends there, or if the axis of all curves is
        linear or shows these well enough.
    """
    curves = [curve for curve in (get_curve(table, method) for method in table.methods) if curve[0]]
    values = [value for _, means, _ in curves for value in means]
    if not values or not _has_log_axis(table, min(values), max(values)):
        return None
    last_x = max(x_values[-1] for x_values, _, _ in curves)
    at_last_x = [curve for curve in curves if curve[0][-1] == last_x]
    limit = CLOSE_RATIO * min(means[-1] for _, means, _ in at_last_x)
    close = [curve for curve in at_last_x if max(curve[1]) <= limit]
    highest = max(value for _, means, _ in close for value in means)
    if len(close) < 2 or math.log(highest / min(values)) > CLOSE_SHARE * math.log(max(values) / min(values)):
        return None
    drawn = [value for _, means, bars in close for value in [*means, *(end for bar in bars if bar for end in bar)]]
    return min(drawn), max(drawn)


def _has_log_axis(table: ComparisonTable, low: float, high: float) -> bool:
    return table.metric.plot_scale == "logarithmic" and high > 4 * low > 0


def draw_panel(
    axes: Axes, table: ComparisonTable, style: PlotStyle = WIDE, close_up: tuple[float, float] | None = None
) -> tuple[list[Line2D], list[str], str]:
    """Draw the curves of a table, and return the lines, labels and title of its legend.

    Args:
        axes: panel to draw in.
        table: source of the values.
        style: sizes of the parts.
        close_up: range of values for a linear axis; None for all values.
    """
    low, high = float("inf"), float("-inf")
    curve_data = [get_curve(table, method) for method in table.methods]
    has_bars = len(curve_data) <= MAX_CURVES_WITH_BARS and any(any(bars) for _, _, bars in curve_data)
    x_factors = _get_bar_x_factors(table, len(curve_data)) if has_bars else [1.0] * len(curve_data)
    lines: list[Line2D] = []
    width, bar_width = style.line_width * (1 if has_bars else 1.3), style.line_width * 1.15
    for index, ((x_values, means, bars), x_factor) in enumerate(zip(curve_data, x_factors, strict=True)):
        style_kwargs = get_curve_style(index)
        if table.axis.is_dense:
            lines += _draw_dense_curve(axes, style_kwargs, x_values, means, bars)
            low, high = min([low, *means]), max([high, *means])
            continue
        shifted = [x * x_factor for x in x_values]
        lines += axes.plot(shifted, means, **style_kwargs, markersize=style.marker_size, linewidth=width)  # type: ignore[arg-type]
        if has_bars and any(bars):
            bar_x = [x for x, bar in zip(shifted, bars, strict=True) if bar is not None]
            lower, upper = zip(*(bar for bar in bars if bar is not None), strict=True)
            axes.vlines(bar_x, lower, upper, color=style_kwargs["color"], linewidth=bar_width, alpha=0.85)
            axes.plot(
                [*bar_x, *bar_x], [*lower, *upper], linestyle="none", marker="_", markersize=1.2 * style.marker_size,
                markeredgewidth=bar_width, color=style_kwargs["color"], alpha=0.85,
            )  # fmt: skip
        low, high = min([low, *means]), max([high, *means])

    _configure_x_axis(axes, table, style)
    notes = []
    if close_up is not None or not _has_log_axis(table, low, high):
        if _limit_y_axis(axes, table, close_up or (low, high), curve_data, x_factors):
            notes = ["triangle: beyond the axis"]
    else:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(FixedLocator(choose_log_ticks(low, high)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(MetricFormatter(table.metric))
    axes.set_ylabel(table.metric.axis_label)
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    if style.title_characters:
        title = f"{table.title} (close-up)" if close_up else table.title
        axes.set_title(textwrap.fill(title, style.title_characters), loc="left", fontsize=style.title_size)
    # matplotlib skips labels that begin with an underscore unless both handles and labels are given.
    if has_bars:
        notes.insert(0, f"{'band' if table.axis.is_dense else 'bar'}: {get_bar_meaning(table)}")
    if style.legend == "right":
        notes = [textwrap.fill(note, 18) for note in notes]
    legend_title = "\n".join(notes)
    # The legend is outside of the axes, so that no curve crosses it.
    legend_location: dict[str, Any] = (
        {"bbox_to_anchor": (0.0, -0.24)}
        if style.legend == "below"
        else {"bbox_to_anchor": (1.01, 1.0), "ncols": -(-len(lines) // LEGEND_ROWS)}
    )
    names = [
        wrap_name(name if x_values else f"{name} (failed)")
        for name, (x_values, _, _) in zip(table.methods, curve_data, strict=True)
    ]
    if style.legend != "figure":
        axes.legend(
            lines, names, loc="upper left", frameon=False, title=legend_title, alignment="left",
            fontsize=style.legend_size, title_fontsize=style.note_size, **legend_location,
        )  # fmt: skip
    return lines, names, legend_title


def _limit_y_axis(
    axes: Axes,
    table: ComparisonTable,
    limits: tuple[float, float],
    curves: Sequence[tuple[list[float], list[float], list[tuple[float, float] | None]]],
    x_factors: Sequence[float],
) -> bool:
    """Limit a linear axis to a range, without extreme values, and mark points beyond it by triangles at its edges.

    Returns:
        True if there are triangles. Curves over a dense axis have none.
    """
    inside = [y for _, means, _ in curves for y in means if limits[0] <= y <= limits[1]]
    if not inside:
        return False
    scale = next(each for each in choose_scales([*limits, *inside], [], table.metric) if each.name == "linear")
    has_points_beyond = False
    for index, ((x_values, means, _), factor) in enumerate(zip(curves, x_factors, strict=True)):
        for mark, edge, marker in (("over", scale.high, "^"), ("under", scale.low, "v")):
            beyond = [x * factor for x, y in zip(x_values, means, strict=True) if scale.get_clip_mark(y) == mark]
            if not beyond:
                continue
            has_points_beyond = True
            if not table.axis.is_dense:  # a dense curve would be a row of triangles
                color = get_curve_style(index)["color"]
                axes.plot(beyond, [edge] * len(beyond), linestyle="", marker=marker, color=color, clip_on=False)
    if has_points_beyond:
        axes.set_ylim(scale.low, scale.high)
    return has_points_beyond and not table.axis.is_dense


class MetricFormatter(Formatter):
    """Tick formatter for a metric. All ticks of an axis have as many decimals as are needed to distinguish them."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric

    def __call__(self, value: float, position: int | None = None) -> str:
        return self.metric.format_tick(value, [value])

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        return [self.metric.format_tick(value, values) for value in values]


def _draw_dense_curve(
    axes: Axes,
    style_kwargs: Mapping[str, str],
    x_values: Sequence[float],
    means: Sequence[float],
    bars: Sequence[tuple[float, float] | None],
) -> list[Line2D]:
    """Draw a line without markers, with a band instead of bars."""
    color, linestyle = style_kwargs["color"], style_kwargs["linestyle"]
    if x_values and all(bar is not None for bar in bars):
        lower, upper = zip(*(bar for bar in bars if bar is not None), strict=True)
        axes.fill_between(x_values, lower, upper, color=color, alpha=0.18, linewidth=0)
    return axes.plot(x_values, means, color=color, linestyle=linestyle, linewidth=1.3)


def draw_depth_maps(figure: SubFigure, depth_map: DepthMap, style: PlotStyle) -> None:
    """Draw a panel for each method, with a common color scale."""
    columns = min(style.map_columns, len(depth_map.methods))
    rows, panels = -(-len(depth_map.methods) // columns), []
    for number, method in enumerate(depth_map.methods, start=1):
        panels.append(figure.add_subplot(rows, columns, number))
        image = _draw_depth_map(panels[-1], depth_map, method, style)
    bar = figure.colorbar(image, ax=panels, shrink=0.9, pad=0.02)
    bar.ax.yaxis.set_major_formatter(MetricFormatter(depth_map.metric))
    bar.ax.tick_params(labelsize=style.tick_size)
    panels[0].set_ylabel("depth", fontsize=style.note_size)
    if style.title_characters:
        title = textwrap.fill(depth_map.title, style.title_characters)
        figure.suptitle(title, x=0.01, ha="left", fontsize=style.title_size)
    figure.supxlabel("length: tokens; dashed: the training length", fontsize=style.note_size)


def _draw_depth_map(axes: Axes, depth_map: DepthMap, method: str, style: PlotStyle) -> AxesImage:
    """Draw the map of a method, with lengths from left to right, and depths from top (start of the text) to bottom."""
    values, lengths, depths = depth_map.get_values(method), depth_map.lengths, depth_map.depths
    low, high = depth_map.scale
    cmap = "viridis" if depth_map.metric.better == "higher" else "viridis_r"
    axes.set_facecolor("0.93")
    image = axes.imshow(values, cmap=cmap, norm=Normalize(low, high), aspect="auto", interpolation="nearest")
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=style.tick_size, rotation=45)
    stride = -(-len(depths) // 6)
    percentages = [f"{depth:.0%}" for depth in depths[::stride]]
    axes.set_yticks(range(0, len(depths), stride), percentages, fontsize=style.tick_size)
    train_length = depth_map.tables[0].train_length
    if lengths[0] <= train_length < lengths[-1]:
        last_seen = max(index for index, length in enumerate(lengths) if length <= train_length)
        axes.axvline(last_seen + 0.5, color="white", linewidth=1.2, linestyle=(0, (3, 2)))
    if values.size <= MAX_WRITTEN_CELLS:
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                is_light = depth_map.compute_shade_index(value, 2) == 1
                axes.text(
                    column, row, depth_map.metric.format_tick(value), ha="center", va="center",
                    fontsize=style.cell_size,
                    color="black" if is_light else "white",
                )  # fmt: skip
    axes.set_title(method, loc="left", fontsize=style.note_size)
    return image


def _configure_x_axis(axes: Axes, table: ComparisonTable, style: PlotStyle) -> None:
    """Set the ticks and the label of the horizontal axis, and mark the training length."""
    axis, train_length = table.axis, table.train_length
    if axis.in_tokens:
        axes.set_xscale("log", base=2)
    stride = -(-len(table.x_values) // style.max_ticks)
    num_ticks = -(-len(table.x_values) // stride)
    indices = np.linspace(0, len(table.x_values) - 1, num_ticks).round().astype(int)  # with the first and the last one
    axes.xaxis.set_major_locator(FixedLocator([table.x_values[index] for index in dict.fromkeys(indices.tolist())]))
    axes.xaxis.set_minor_locator(NullLocator())
    if not axis.in_tokens:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: axis.format_value(x)))
        axes.set_xlabel(axis.title)
        return
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda x, _: f"{axis.format_value(x)}\n{format_multiple(x / train_length)}")
    )
    label = f"{axis.title}, and multiples of the training length"
    if len(label) > style.label_characters:
        label = textwrap.fill(f"{axis.title}, × training length", style.label_characters)
    axes.set_xlabel(label)
    axes.axvline(train_length, color="0.45", linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    axes.annotate(
        "training length", (train_length, 1), xycoords=("data", "axes fraction"), xytext=(4, -4),
        textcoords="offset points", ha="left", va="top", fontsize=style.note_size, color="0.35",
    )  # fmt: skip


def _get_bar_x_factors(table: ComparisonTable, count: int) -> list[float]:
    """Return factors on x that place `count` curves side by side."""
    if not table.axis.in_tokens:
        return [1.0] * count
    ratios = [next_x / x for x, next_x in pairwise(table.x_values)]
    width = min(ratios, default=2.0) ** min(MAX_BAR_SPREAD, BAR_GAP * (count - 1))
    return [width ** (index / max(count - 1, 1) - 0.5) if count > 1 else 1.0 for index in range(count)]
