"""Scatter plot of cost and perplexity of methods, for a leaderboard's page and as a PNG file."""

import io
import math

from megatron.reports.axes import choose_scales
from megatron.reports.charts import Chart, ChartPoint, ChartPosition, ChartSeries, ChartTick
from megatron.reports.leaderboard import LeaderboardReport
from megatron.reports.metrics import format_number, get_metric

# matplotlib imports slowly, so it is imported inside functions.

MAX_CROWDED_NAMES = 30
"""Maximum number of methods for labels on all points; otherwise only shown methods and the frontier have labels."""


def list_cost_points(board: LeaderboardReport) -> list[tuple[str, float, float]]:
    """Return method, relative duration of a training step, and perplexity at the largest length, for each method."""
    text = board.text
    if text is None:
        return []
    last = text.x_values[-1]
    return [
        (method, step, text.cells[method, last].mean)
        for method, cost in board.costs.items()
        if (step := cost.step) is not None and (method, last) in text.cells
    ]


def build_cost_chart(board: LeaderboardReport, name: str) -> Chart | None:
    """Build the chart for a page, or return None if no cost is known.

    Args:
        name: name of the chart.
    """
    points = sorted(list_cost_points(board), key=lambda point: point[1])
    if not points:
        return None
    baseline = board.leaderboard.baseline
    best = sorted(points, key=lambda point: point[2])[:5]
    described = "; ".join(f"{method} {step:.2f} times and {format_number(value)}" for method, step, value in best)
    alt_text = (
        f"Plot of perplexity at {board.largest} over the duration of a training step relative to {baseline}, for "
        f"{len(points)} methods. The best: {described}."
    )
    low, high = points[0][1] / 1.05, points[-1][1] * 1.05
    frontier = find_frontier(points)

    def locate(step: float) -> float:
        return math.log(step / low) / math.log(high / low)

    doubles = [2.0**power for power in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]
    return Chart(
        name,
        f"Perplexity at {board.largest} over the duration of a training step",
        alt_text,
        f"duration of a training step, {baseline} = 1",
        f"perplexity at {board.largest}",
        tuple(ChartPosition(locate(step), f"{step:.2f}× a training step of {baseline}") for _, step, _ in points),
        tuple(ChartTick(locate(step), f"{step:g}×") for step in doubles),
        choose_scales([value for _, _, value in points], [], get_metric("perplexity"))[:1],
        tuple(
            ChartSeries(method, (ChartPoint(index, value, format_number(value)),), True, 0 if method in frontier else 6)
            for index, (method, _, value) in enumerate(points)
        ),
        "points",
        path=tuple(frontier),
    )


def find_frontier(points: list[tuple[str, float, float]]) -> list[str]:
    """Return the Pareto frontier: methods such that no other is both faster and better, fastest first."""
    frontier, least = [], float("inf")
    for name, _, value in sorted(points, key=lambda point: (point[1], point[2])):
        if value < least:
            frontier.append(name)
            least = value
    return frontier


def render_cost_png(board: LeaderboardReport, *, narrow: bool = False) -> bytes:
    """Render the scatter plot as PNG, with the frontier connected by a line.

    Raises:
        ValueError: no cost is known.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points = list_cost_points(board)
    if not points:
        raise ValueError("no costs to plot")
    figure = Figure(figsize=(4.0, 4.4) if narrow else (8.6, 4.8), dpi=200 if narrow else 160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    frontier = find_frontier(points)
    by_name = {name: (step, value) for name, step, value in points}
    named = set(by_name) if len(points) <= MAX_CROWDED_NAMES else {*frontier, *board.list_shown_methods()}
    axes.plot(*zip(*(by_name[name] for name in frontier), strict=True), color="0.6", linewidth=1, zorder=0)
    for name, (step, value) in by_name.items():
        axes.plot([step], [value], marker="o", markersize=4, color="#0072B2" if name in frontier else "0.55")
        if name in named:
            axes.annotate(name, (step, value), xytext=(4, 3), textcoords="offset points", fontsize=6 if narrow else 7)
    values = [value for _, _, value in points]
    if max(values) > 4 * min(values):
        axes.set_yscale("log")
    axes.set_xlabel(f"duration of a training step, {board.leaderboard.baseline} = 1")
    axes.set_ylabel(f"perplexity at {board.largest}")
    axes.grid(color="0.92", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()
