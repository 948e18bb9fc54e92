"""Drawing functions shared by analyses: sizes, panels, colors, and scales, in the style of the reports."""

import textwrap
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from megatron.reports.plots import save_figure

REFERENCE_COLOR = "0.45"
EMPTY_COLOR = "0.93"
"""Color of empty cells."""


def create_panels(
    count: int, narrow: bool, *, columns: int = 3, width: float = 3.2, height: float = 2.7, legend_height: float = 0.0
) -> tuple[Figure, list[Axes]]:
    """Create a figure with `count` panels, row by row.

    Args:
        narrow: True for phones: 4 inches wide, with at most two small panels side by side.
        columns: number of panels side by side.
        width, height: size of a panel in inches.
        legend_height: height of a legend below all panels, in inches.
    """
    columns = min(count, columns)
    if narrow:
        columns = min(columns, max(1, int(4.2 // width)))
        width = 4.0 / columns
    rows = -(-count // columns)
    size = (width * columns, height * rows + legend_height)
    figure = Figure(figsize=size, dpi=200 if narrow else 140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(rows, columns, index + 1) for index in range(count)]
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=7.5)
    return figure, axes


def save_png(figure: Figure) -> bytes:
    return save_figure(figure)


def add_titles(axes: Axes, title: str, x_label: str = "", y_label: str = "", wrap: int | None = None) -> None:
    """Set a panel's title, wrapped after `wrap` characters, and its axis labels."""
    if wrap is not None:
        title = "\n".join(line for part in title.split("\n") for line in textwrap.wrap(part, wrap))
    axes.set_title(title, loc="left", fontsize=8.5)
    axes.set_xlabel(x_label, fontsize=8)
    axes.set_ylabel(y_label, fontsize=8)


def choose_norm(values: Sequence[np.ndarray], *, signed: bool = False, logarithmic: bool = False) -> Normalize:
    """Choose a color scale for maps: linear, symmetric around zero, or logarithmic over at most six decades."""
    finite = np.concatenate([array[np.isfinite(array)] for array in values])
    if logarithmic:
        finite = finite[finite > 0]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if logarithmic and high > low:
        return LogNorm(max(low, high * 1e-6), high)
    largest = max(abs(low), abs(high)) or 1.0
    return Normalize(-largest, largest) if signed else Normalize(low, high)


def draw_heatmap(
    axes: Axes, values: np.ndarray, norm: Normalize, *, extent: tuple[float, float, float, float] | None = None
) -> AxesImage:
    """Draw a matrix as colors, blue to red if the scale is symmetric around zero; NaN is gray.

    Args:
        extent: limits of the axes: left, right, bottom, top.
    """
    signed = norm.vmin is not None and norm.vmin == -(norm.vmax or 0)
    axes.set_facecolor(EMPTY_COLOR)
    clipped = values if norm.vmin is None else np.where(values < norm.vmin, norm.vmin, values)
    return axes.imshow(
        clipped,
        norm=norm,
        cmap="RdBu_r" if signed else "viridis",
        aspect="auto",
        interpolation="nearest",
        extent=extent,
    )


def add_color_bar(figure: Figure, image: AxesImage, axes: Axes | Sequence[Axes]) -> None:
    bar = figure.colorbar(image, ax=axes, shrink=0.9, pad=0.02)
    bar.ax.tick_params(labelsize=6.5)
    bar.outline.set_visible(False)


def draw_map_grid(
    rows: Mapping[str, Sequence[np.ndarray]],
    lengths: Sequence[int],
    title: str,
    *,
    logarithmic: Collection[str] = (),
    narrow: bool,
) -> bytes:
    """Draw maps of several lengths side by side, with one row and one color scale for each kind.

    Args:
        rows: kind → one map per length.
        logarithmic: kinds with logarithmic colors; those of other kinds are symmetric around zero.
    """
    height, width = 1.25 if narrow else 1.6, 4.0 if narrow else 2.4 * len(lengths) + 0.9
    figure = Figure(figsize=(width, height * len(rows) + 0.75), dpi=170 if narrow else 110)
    FigureCanvasAgg(figure)
    # Matplotlib's automatic layout takes seconds for this number of panels.
    inch = 1 / (height * len(rows) + 0.75)
    grid = figure.add_gridspec(
        len(rows), len(lengths) + 1, width_ratios=[*[1.0] * len(lengths), 0.05], hspace=0.42,
        wspace=0.28 if narrow else 0.22, left=0.45 / width, right=1 - 0.5 / width, top=1 - 0.62 * inch,
        bottom=0.25 * inch,
    )  # fmt: skip
    figure.text(0.05 / width, 1 - 0.06 * inch, title, fontsize=8.5, va="top")
    for row, (kind, maps) in enumerate(rows.items()):
        norm = choose_norm(maps, signed=kind not in logarithmic, logarithmic=kind in logarithmic)
        for column, (length, cells) in enumerate(zip(lengths, maps, strict=True)):
            axes = figure.add_subplot(grid[row, column])
            image = draw_heatmap(axes, cells, norm, extent=(0.0, float(length), float(length), 0.0))
            axes.tick_params(labelsize=6, length=2)
            axes.locator_params(nbins=3)
            axes.spines[["top", "right"]].set_visible(False)
            if narrow and column:  # same labels as below
                axes.set_yticklabels([])
            prefix = f"{kind}, " if column == 0 else ""
            axes.set_title(f"{prefix}{length:,}", loc="left", fontsize=6.6 if narrow else 7.5, pad=2.5)
        bar = figure.colorbar(image, cax=figure.add_subplot(grid[row, -1]))
        bar.ax.tick_params(labelsize=6, length=2)
        bar.outline.set_visible(False)
    return save_png(figure)
