"""A metric over length or another axis, as a PNG: one curve per method, the training length marked.

Colours are Okabe and Ito's, told apart by colour-blind eyes too; markers and dashes repeat the distinction in grey.
An axis of tokens is logarithmic (lengths double); the other one is where the metric asks for it and values differ by
more than a factor of 4, since on a linear axis an exploding perplexity would flatten all others. Bars: with several
seeds, smallest to largest; with one, the 95% interval over windows; with more than eight methods none, as they would
hide the curves. Curves stand where their lengths are; their bars stand side by side around each length, because
intervals of the same text overlap and areas or bars on top of each other could not be told apart.
"""

import io
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from megatron.errors import UserError
from megatron.reports.axes import multiple
from megatron.reports.failures import Failure
from megatron.reports.layout import Layout, layouts
from megatron.reports.records import Record

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D1F")
MARKERS = "osD^vPX*"
DASHES = ("-", "--", "-.", ":")
MOST_BARS = len(COLOURS)
GAP, SPREAD = 0.1, 0.4
"""How far apart bars of a length stand, and all of them together at most: shares of the way to the next length."""
MOST_TICKS = 9
ROWS = 24
"""Lines of a legend's column that fit beside a panel."""


def png(records: Sequence[Record], *, narrow: bool = False, failures: Sequence[Failure] = ()) -> bytes:
    """A PNG with one panel per comparable group of records (see `layout.layouts`).

    Args:
        records: what to draw.
        narrow: for telephones: as wide as high, with the legend below.
        failures: runs without records; of a method that has none the legend says so.

    Raises:
        UserError: there is nothing to draw.
    """
    groups = layouts(records, failures)
    if not groups:
        raise UserError("no records to plot")
    # Figure instead of pyplot: no window system, no global state.
    most = max(len(layout.methods) for layout in groups)
    size = (4.0, 3.6 + 0.19 * most) if narrow else (6.4 + 2.2 * -(-most // ROWS), 4.6)
    figure = Figure(figsize=(size[0], size[1] * len(groups)), dpi=200 if narrow else 160, layout="constrained")
    figure.get_layout_engine().set(hspace=0.05)  # type: ignore[union-attr,call-arg]
    FigureCanvasAgg(figure)
    for row, layout in enumerate(groups, start=1):
        _draw(figure.add_subplot(len(groups), 1, row), layout, narrow=narrow)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def style(index: int) -> dict[str, str]:
    """Colour, marker and dashes of a curve: no two of 64 share colour and marker, no two of 256 all three."""
    row = index // len(COLOURS)
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[(index + row) % len(MARKERS)],
        "linestyle": DASHES[(row + index // (len(COLOURS) * len(MARKERS))) % len(DASHES)],
    }


def _draw(axes: Axes, layout: Layout, *, narrow: bool = False) -> None:
    low, high = float("inf"), float("-inf")
    drawn = [_curve(layout, method) for method in layout.methods]
    barred = len(drawn) <= MOST_BARS and any(any(bars) for _, _, bars in drawn)
    places = _side_by_side(layout, len(drawn)) if barred else [1.0] * len(drawn)
    curves: list[Line2D] = []
    for index, ((where, means, bars), place) in enumerate(zip(drawn, places, strict=True)):
        look = style(index)
        curves += axes.plot(where, means, **look, markersize=5, linewidth=1.8 if not barred else 1.4)  # type: ignore[arg-type]
        if barred and any(bars):
            at = [each * place for each, bar in zip(where, bars, strict=True) if bar is not None]
            lower, upper = zip(*(bar for bar in bars if bar is not None), strict=True)
            axes.vlines(at, lower, upper, color=look["color"], linewidth=1.6, alpha=0.85)
            axes.plot(
                [*at, *at], [*lower, *upper], linestyle="none", marker="_", markersize=6, markeredgewidth=1.6,
                color=look["color"], alpha=0.85,
            )  # fmt: skip
        low, high = min([low, *means]), max([high, *means])

    _along(axes, layout, narrow=narrow)
    if layout.metric.scale == "logarithmic" and high > 4 * low > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(FixedLocator(_ticks(low, high)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: layout.metric.tick(y)))
    axes.set_ylabel(layout.metric.axis)
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(layout.title, loc="left", fontsize=8.5 if narrow else 11)
    # matplotlib leaves out curves whose label begins with an underscore unless handles and labels are both given.
    bar = "bar: smallest to\nlargest seed" if layout.repeats > 1 else "bar: 95% interval\nover windows"
    title = bar.replace("\n", " " if narrow else "\n") if barred else None
    # Outside the axes, where no curve can run through it.
    outside: dict[str, Any] = (
        {"loc": "upper left", "bbox_to_anchor": (0.0, -0.24), "fontsize": 8}
        if narrow
        else {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "fontsize": 9, "ncols": -(-len(curves) // ROWS)}
    )
    names = [name if where else f"{name} (failed)" for name, (where, _, _) in zip(layout.methods, drawn, strict=True)]
    legend = axes.legend(curves, names, frameon=False, title=title, alignment="left", **outside)
    legend.get_title().set_fontsize(8)


def _along(axes: Axes, layout: Layout, *, narrow: bool) -> None:
    """The horizontal axis: its ticks, its label, and the training length if it has a place there."""
    axis, trained = layout.axis, layout.train_length
    if axis.tokens:
        axes.set_xscale("log", base=2)
    thin = -(-len(layout.places) // MOST_TICKS)
    axes.xaxis.set_major_locator(FixedLocator(layout.places[::-thin][::-1]))
    axes.xaxis.set_minor_locator(NullLocator())
    if not axis.tokens:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: axis.shown(x)))
        axes.set_xlabel(axis.title)
        return
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{axis.shown(x)}\n{multiple(x / trained)}"))
    axes.set_xlabel(f"{axis.title}, {'× training length' if narrow else 'and multiples of the training length'}")
    axes.axvline(trained, color="0.45", linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    axes.annotate(
        "training length", (trained, 1), xycoords=("data", "axes fraction"), xytext=(4, -4),
        textcoords="offset points", ha="left", va="top", fontsize=8, color="0.35",
    )  # fmt: skip


def _side_by_side(layout: Layout, count: int) -> list[float]:
    """Factors on the place that put `count` bars next to each other around each place."""
    if not layout.axis.tokens:
        return [1.0] * count
    steps = [later / place for place, later in pairwise(layout.places)]
    step = min(steps, default=2.0) ** min(SPREAD, GAP * (count - 1))
    return [step ** (index / max(count - 1, 1) - 0.5) if count > 1 else 1.0 for index in range(count)]


def _curve(layout: Layout, method: str) -> tuple[list[float], list[float], list[tuple[float, float] | None]]:
    """Places, mean values and bars of one method."""
    found: dict[float, list[Record]] = {}
    for record in layout.records:
        if record.method == method:
            found.setdefault(record.at, []).append(record)
    places = sorted(found)
    means, bars = [], []
    for place in places:
        values = [record.value for record in found[place]]
        means.append(statistics.fmean(values))
        # Bars of one picture mean one thing: among several seeds a lone one has none.
        alone = None if layout.repeats > 1 else found[place][0].interval
        bars.append((min(values), max(values)) if len(values) > 1 else alone)
    return places, means, bars


def _ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, 20, 50 … around the range; powers of ten alone over more than three decades."""
    steps = (1, 2, 5) if high / low < 1000 else (1,)
    candidates = [step * 10.0**power for power in range(-1, 12) for step in steps]
    inside = [tick for tick in candidates if low / 2.6 <= tick <= high * 2.6]
    return inside or [low, high]
