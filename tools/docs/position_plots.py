"""The pictures of docs/positions.md, one per method: `make docs`.

PNG without dates and versions: the same numbers give the same file.
"""

import io
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from megatron.position import registry
from megatron.reports.plots import COLORS, DASHES
from tools.docs import position_panels as panels
from tools.docs.position_panels import CurvePanel, MapPanel, Panel

FOLDER = Path("docs/images/positions")
MIN_BIAS = -20.0
"""Biases below are cut off: exp(−20) is a factor of 2·10⁻⁹."""
MIN_FACTOR = 1e-4
MAX_PIXELS = 256
"""Largest side of a drawn matrix: every n-th row and column."""


def get_picture_path(name: str) -> Path:
    """Where the picture of a method lies."""
    return FOLDER / f"{name}.png"


def draw_panels(shown: list[Panel]) -> bytes:
    """Panels side by side."""
    widths = [3.4 if isinstance(panel, CurvePanel) else 2.9 for panel in shown]
    rows = 1 if len(shown) <= 3 else 2
    columns = -(-len(shown) // rows)
    with matplotlib.rc_context({"font.family": "DejaVu Sans", "font.size": 8, "axes.unicode_minus": True}):
        figure = Figure(figsize=(max(sum(widths[:columns]), 4.2), 2.75 * rows), dpi=105, layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(rows, columns, width_ratios=widths[:columns])
        for place, panel in enumerate(shown):
            axes = figure.add_subplot(grid[place // columns, place % columns])
            (_draw_curves if isinstance(panel, CurvePanel) else _draw_map)(figure, axes, panel)
            axes.set_title(panel.title, loc="left", fontsize=8.5, pad=13)
        raw = io.BytesIO()
        options = {"optimize": True, "compress_level": 9}
        figure.savefig(raw, format="png", metadata={"Software": None}, pil_kwargs=options)
    return raw.getvalue()


def _draw_curves(figure: Figure, axes: Axes, panel: CurvePanel) -> None:
    for index, (label, values) in enumerate(panel.lines.items()):
        colour, dash = COLORS[index % len(COLORS)], DASHES[index % len(DASHES)]
        style = {"color": colour, "linestyle": dash, "label": label, "linewidth": 1.4}
        axes.plot(np.arange(len(values)), values.double().numpy(), **style)
    if panel.logarithmic:
        axes.set_xscale("symlog", base=2, linthresh=1, linscale=0.6)
        axes.xaxis.set_major_locator(FixedLocator([0, 1, 4, 16, 64, 256, 1024, 4096, 16384]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{round(x):,}"))
        trained = panels.SHAPE.train_length
        axes.axvline(trained, color="0.45", linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
        axes.annotate(
            "training length", (trained, 1), xycoords=("data", "axes fraction"), xytext=(0, 2),
            textcoords="offset points", ha="center", va="bottom", fontsize=6.5, color="0.35",
        )  # fmt: skip
    lowest = min(float(values.min()) for values in panel.lines.values())
    highest = max(float(values.max()) for values in panel.lines.values())
    if panel.cut and lowest < MIN_BIAS:
        axes.set_ylim(MIN_BIAS, highest + 0.05 * (highest - MIN_BIAS))
    axes.set_xlim(left=0, right=panel.far)
    axes.set_xlabel(panel.across)
    axes.grid(axis="y", color="0.9", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7, loc="best")


def _draw_map(figure: Figure, axes: Axes, panel: MapPanel) -> None:
    step = -(-max(panel.values.shape) // MAX_PIXELS)
    values = panel.values[::step, ::step].double().numpy()
    top = max(float(np.nanmax(np.abs(values))), 1e-12)
    if panel.scale == "decades":
        colours, faintest = "viridis", float(np.nanmin(values))
        # Within a decade a logarithmic scale would show one colour.
        near = 0.1 * top < faintest < top
        norm = Normalize(faintest, top) if near else LogNorm(MIN_FACTOR, max(1.0, top), clip=True)
    else:
        norm, colours = Normalize(-top, top), "RdBu_r"
    row, column = panel.first
    height, width = panel.values.shape
    extent = (column - 0.5, column + width - 0.5, row + height - 0.5, row - 0.5)
    few = matplotlib.colormaps[colours].resampled(65)  # odd, so that zero is white; few, so that files are small
    shown = axes.imshow(values, cmap=few, norm=norm, extent=extent, aspect="auto", interpolation="nearest")
    axes.set_xlabel(panel.across)
    axes.set_ylabel(panel.down)
    trained = panels.SHAPE.train_length
    if height > trained:
        for line in (axes.axhline, axes.axvline):
            line(trained, color="0.45", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.xaxis.set_major_locator(FixedLocator([0, trained, 2 * trained]))
        axes.yaxis.set_major_locator(FixedLocator([0, trained, 2 * trained]))
    bar = figure.colorbar(shown, ax=axes, fraction=0.05, pad=0.02)
    bar.ax.tick_params(labelsize=6.5)


def draw_pictures() -> dict[Path, bytes]:
    """Every picture, by its place in the repository."""
    made = {}
    for name in registry.list_encodings():
        made[get_picture_path(name)] = draw_panels(panels.build_encoding_panels(panels.build_encoding(name))[0])
    for name in registry.list_processors():
        made[get_picture_path(name)] = draw_panels(panels.build_processor_panels(name)[0])
    for name in registry.list_temperatures():
        temperature = registry.build_temperature(name, panels.SHAPE)
        made[get_picture_path(name)] = draw_panels(panels.build_temperature_panels(temperature))
    return made
