"""What the pictures of analyses share: sizes, panels, colours, scales. Style and colours are those of the reports."""

import io
import textwrap
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

REFERENCE_COLOR = "0.45"
EMPTY_COLOR = "0.93"
"""The colour of cells in which there is nothing to show."""


def create_panels(
    count: int, narrow: bool, *, columns: int = 3, width: float = 3.2, height: float = 2.7, legend_height: float = 0.0
) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels, row by row.

    Args:
        narrow: for telephones: 4 inches wide, at most two panels side by side if each is small.
        columns: panels side by side.
        width, height: inches of a panel.
        legend_height: inches for a legend under all of them.
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
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def add_titles(axes: Axes, title: str, x_label: str = "", y_label: str = "", wrap: int | None = None) -> None:
    """A panel's title, in lines of at most `wrap` characters, and the names of its axes."""
    if wrap is not None:
        title = "\n".join(line for part in title.split("\n") for line in textwrap.wrap(part, wrap))
    axes.set_title(title, loc="left", fontsize=8.5)
    axes.set_xlabel(x_label, fontsize=8)
    axes.set_ylabel(y_label, fontsize=8)


def choose_norm(values: Sequence[np.ndarray], *, signed: bool = False, logarithmic: bool = False) -> Normalize:
    """The scale of colours of some maps: with zero in the middle, by the logarithm down to a millionth, or linear."""
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
    """A matrix as colours, blue to red where zero is in the middle of the scale; NaN is grey.

    Args:
        extent: of the axes: left, right, bottom, top.
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
    """The bar with the scale of the colours."""
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
    """Maps of several lengths side by side, kinds one under the other; a kind has one scale and one bar of colours.

    Args:
        rows: kind → a map per length.
        logarithmic: kinds whose colours go by the logarithm; those of the others have zero in the middle.
    """
    height, width = 1.25 if narrow else 1.6, 4.0 if narrow else 2.4 * len(lengths) + 0.9
    figure = Figure(figsize=(width, height * len(rows) + 0.75), dpi=170 if narrow else 110)
    FigureCanvasAgg(figure)
    # Not matplotlib's automatic layout, which takes seconds for as many panels.
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
            if narrow and column:  # the same numbers as below
                axes.set_yticklabels([])
            prefix = f"{kind}, " if column == 0 else ""
            axes.set_title(f"{prefix}{length:,}", loc="left", fontsize=6.6 if narrow else 7.5, pad=2.5)
        bar = figure.colorbar(image, cax=figure.add_subplot(grid[row, -1]))
        bar.ax.tick_params(labelsize=6, length=2)
        bar.outline.set_visible(False)
    return save_png(figure)
