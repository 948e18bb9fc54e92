"""Perplexity over length, as a PNG: one curve per method, the training length marked.

Colours are Okabe and Ito's, told apart by colour-blind eyes too; markers and dashes repeat the distinction in grey.
The length axis is logarithmic (lengths double); the perplexity axis becomes logarithmic where curves differ by more
than a factor of 4, since on a linear one an exploding curve would flatten all others. Bands: with several seeds,
smallest to largest; with one, the 95% interval over windows; with more than eight methods none, as they would hide the
curves.
"""

import io
import statistics
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from megatron.errors import UserError
from megatron.evaluation.records import Record
from megatron.evaluation.tables import Layout, layouts, multiple

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D1F")
MARKERS = "osD^vPX*"
DASHES = ("-", "--", "-.", ":")
MOST_BANDS = len(COLOURS)
ROWS = 24
"""Lines of a legend's column that fit beside a panel."""


def png(records: Sequence[Record]) -> bytes:
    """A PNG with one panel per comparable group of records (see `tables.layouts`).

    Raises:
        UserError: there is nothing to draw.
    """
    groups = layouts(records)
    if not groups:
        raise UserError("no records to plot")
    # Figure instead of pyplot: no window system, no global state.
    columns = max(-(-len(layout.methods) // ROWS) for layout in groups)
    figure = Figure(figsize=(6.4 + 2.2 * columns, 4.6 * len(groups)), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    for row, layout in enumerate(groups, start=1):
        _draw(figure.add_subplot(len(groups), 1, row), layout)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def _draw(axes: Axes, layout: Layout) -> None:
    low, high, banded = float("inf"), 0.0, False
    curves: list[Line2D] = []
    for index, method in enumerate(layout.methods):
        lengths, means, bands = _curve(layout, method)
        colour, style = COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]
        marker = MARKERS[index % len(MARKERS)]
        curves += axes.plot(lengths, means, style, color=colour, marker=marker, markersize=5, linewidth=1.8)
        if len(layout.methods) <= MOST_BANDS and all(band is not None for band in bands):
            lower, upper = zip(*(band for band in bands if band is not None), strict=True)
            axes.fill_between(lengths, lower, upper, color=colour, alpha=0.15, linewidth=0)
            banded = True
        low, high = min(low, *means), max(high, *means)

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(layout.lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    trained = layout.train_length
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{round(x):,}\n{multiple(round(x) / trained)}"))
    axes.set_xlabel("length: tokens, and multiples of the training length")
    if high > 4 * low:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(FixedLocator(_ticks(low, high)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.3g}" if y < 1000 else f"{y:,.0f}"))
    axes.set_ylabel("perplexity per token")
    axes.axvline(layout.train_length, color="0.45", linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    axes.annotate(
        "training length", (layout.train_length, 1), xycoords=("data", "axes fraction"), xytext=(4, -4),
        textcoords="offset points", ha="left", va="top", fontsize=8, color="0.35",
    )  # fmt: skip
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(layout.title, loc="left", fontsize=11)
    # matplotlib leaves out curves whose label begins with an underscore unless handles and labels are both given.
    band = "band: smallest to\nlargest seed" if layout.repeats > 1 else "band: 95% interval\nover windows"
    # Beside the axes, where no curve can run through it.
    legend = axes.legend(
        curves, layout.methods, frameon=False, fontsize=9, title=band if banded else None, alignment="left",
        loc="upper left", bbox_to_anchor=(1.01, 1.0), ncols=-(-len(curves) // ROWS),
    )  # fmt: skip
    legend.get_title().set_fontsize(8)


def _curve(layout: Layout, method: str) -> tuple[list[int], list[float], list[tuple[float, float] | None]]:
    """Lengths, mean perplexities and bands of one method."""
    found: dict[int, list[Record]] = {}
    for record in layout.records:
        if record.method == method:
            found.setdefault(record.length, []).append(record)
    lengths = sorted(found)
    means, bands = [], []
    for length in lengths:
        values = [record.perplexity for record in found[length]]
        means.append(statistics.fmean(values))
        bands.append((min(values), max(values)) if len(values) > 1 else found[length][0].interval)
    return lengths, means, bands


def _ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, 20, 50 … around the range; powers of ten alone over more than three decades."""
    steps = (1, 2, 5) if high / low < 1000 else (1,)
    candidates = [step * 10.0**power for power in range(-1, 12) for step in steps]
    inside = [tick for tick in candidates if low / 2.6 <= tick <= high * 2.6]
    return inside or [low, high]
