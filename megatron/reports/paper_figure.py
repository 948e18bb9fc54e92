"""Figures for papers: curves and maps as vector graphics, with the width and the font size of a text column.

A figure has the exact width, so that a document includes it without scaling and its text has the size of the
document's. It has no title, because the caption in the document describes it.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure, SubFigure

from megatron.reports.comparison_table import ComparisonTable, build_comparison_tables, select_curve_tables
from megatron.reports.context_gain import build_gain_tables
from megatron.reports.depth_maps import DepthMap, split_depth_maps
from megatron.reports.plots import PlotStyle, draw_depth_maps, draw_panel, save_figure, wrap_name
from megatron.reports.records import Record
from megatron.reports.run_records import RunFailure
from megatron.utils.errors import UserError

CREATOR = "Farfield: deepy.py report"
"""Creator in the metadata of the files, by which an earlier figure is recognized."""
POINTS_PER_INCH = 72
CHARACTER_WIDTH = 0.62
"""Mean width of a character relative to the font size, rounded up."""
LEGEND_SPACING = 4.4
"""Width of a legend's line, of the gap to its name and of that to the next column, relative to the font size."""
MAX_HEIGHT = 9.0
"""Height of a page in inches. Higher figures are rejected, because no document can include them."""


def list_panels(records: Sequence[Record], failures: Sequence[RunFailure] = ()) -> list[ComparisonTable | DepthMap]:
    """Return the contents of the figures: one for each comparable group of records.

    Args:
        records: records to plot.
        failures: runs without records; the legend marks methods without any records.

    Raises:
        UserError: there is nothing to plot.
    """
    tables, depth_maps = split_depth_maps(build_comparison_tables(records, failures))
    panels: list[ComparisonTable | DepthMap] = [*select_curve_tables(tables), *build_gain_tables(tables), *depth_maps]
    if not panels:
        raise UserError("no records to plot")
    return panels


def render_paper_figure(
    panel: ComparisonTable | DepthMap, file_format: str, *, width: float, font_size: float
) -> bytes:
    """Render one panel as vector graphics.

    Args:
        panel: table of curves, or map over depth and length.
        file_format: suffix of the file, .pdf or .svg.
        width: width of the figure in inches.
        font_size: font size of the axis labels in points. Ticks and legends are 10% smaller.

    Raises:
        UserError: the figure is higher than a page.
    """
    with use_font_size(font_size):
        figure = build_paper_figure(panel, width, font_size)
        date_key = "CreationDate" if file_format == ".pdf" else "Date"
        return save_figure(figure, file_format[1:], {"Creator": CREATOR, date_key: None})


def use_font_size(font_size: float) -> AbstractContextManager[None]:
    """Set the font size of figures, and proportional lines, while a figure is built and drawn."""
    line_width = 0.07 * font_size
    settings: dict[Any, Any] = {
        "font.size": font_size, "xtick.labelsize": 0.9 * font_size, "ytick.labelsize": 0.9 * font_size,
        "axes.linewidth": line_width, "xtick.major.width": line_width, "ytick.major.width": line_width,
        "pdf.fonttype": 42, "svg.fonttype": "path", "svg.hashsalt": CREATOR,
    }  # fmt: skip
    return rc_context(settings)


def build_paper_figure(panel: ComparisonTable | DepthMap, width: float, font_size: float) -> Figure:
    """Build the figure of a panel. For arguments and errors see `render_paper_figure`."""
    style = _build_style(width, font_size)
    line_height = 1.5 * font_size / POINTS_PER_INCH
    if isinstance(panel, DepthMap):
        height = 2 * line_height + style.map_height * -(-len(panel.methods) // style.map_columns)
    else:
        num_columns = _count_legend_columns(panel, width, font_size)
        height = max(0.6 * width, 24 * CHARACTER_WIDTH * font_size / POINTS_PER_INCH)
        height += line_height * (2.5 + _count_legend_lines(panel, num_columns))
    if height > MAX_HEIGHT:
        raise UserError(
            f"--figure: {len(panel.methods)} methods need {height:.1f} inches, more than a page ({MAX_HEIGHT:g}); "
            "use results of fewer methods, a larger --figure-width, or a smaller --figure-font"
        )
    figure = Figure(figsize=(width, height), layout="constrained")
    part = figure.add_subfigure(figure.add_gridspec(1, 1)[0])
    if isinstance(panel, DepthMap):
        draw_depth_maps(part, panel, style)
    else:
        _draw_curves(part, panel, style, num_columns)
    return figure


def is_generated_figure(path: Path) -> bool:
    """Return True if a file is a figure of ours."""
    return path.is_file() and CREATOR.encode() in path.read_bytes()


def _build_style(width: float, font_size: float) -> PlotStyle:
    character = CHARACTER_WIDTH * font_size / POINTS_PER_INCH
    return PlotStyle(
        legend_size=0.9 * font_size,
        note_size=0.9 * font_size,
        tick_size=0.8 * font_size,
        cell_size=0.6 * font_size,
        title_characters=0,
        marker_size=0.45 * font_size,
        line_width=0.13 * font_size,
        max_ticks=max(2, int((width - 6 * character) / (7 * character))),
        label_characters=int(width / character) - 6,
        legend="figure",
        map_columns=max(1, int(width / 2)),
        map_height=1.8,
    )


def _draw_curves(figure: SubFigure, table: ComparisonTable, style: PlotStyle, num_columns: int) -> None:
    """Draw curves with their legend below, and room above the curves for the words "training length"."""
    axes = figure.add_subplot()
    lines, names, legend_title = draw_panel(axes, table, style)
    if table.axis.in_tokens:
        low, high = axes.transScale.transform([(1, limit) for limit in axes.get_ylim()])[:, 1]
        ticks = [tick for tick in axes.get_yticks() if axes.get_ylim()[0] <= tick <= axes.get_ylim()[1]]
        axes.set_ylim(top=axes.transScale.inverted().transform((0, high + 0.15 * (high - low)))[1])
        axes.set_yticks(ticks)  # none above the curves, such as an accuracy of 120%
        axes.texts[0].set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    figure.legend(
        lines, names, loc="outside lower center", ncols=num_columns, frameon=False, fontsize=style.legend_size,
        title=legend_title, title_fontsize=style.note_size, columnspacing=1.2, handlelength=2.2,
    )  # fmt: skip


def _count_legend_columns(table: ComparisonTable, width: float, font_size: float) -> int:
    longest = max(len(line) for method in table.methods for line in wrap_name(method).split("\n"))
    column_width = (CHARACTER_WIDTH * longest + LEGEND_SPACING) * 0.9 * font_size / POINTS_PER_INCH
    return max(1, min(len(table.methods), int(width / column_width)))


def _count_legend_lines(table: ComparisonTable, num_columns: int) -> int:
    """Return the number of lines of a legend, whose entries fill one column after the other, including its title."""
    names = [wrap_name(method) for method in table.methods]
    num_rows = -(-len(names) // num_columns)
    return 1 + sum(max(name.count("\n") + 1 for name in names[row::num_rows]) for row in range(num_rows))
