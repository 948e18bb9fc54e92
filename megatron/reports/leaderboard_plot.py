"""What methods cost against what they reach: a picture of a leaderboard."""

import io

from megatron.reports.html_page import HtmlPicture, encode_picture
from megatron.reports.leaderboard import LeaderboardReport
from megatron.reports.metrics import format_number

# matplotlib takes a while, and is imported where it is used.

MAX_CROWDED_NAMES = 30
"""Methods that have their name beside their point; of more, those that pictures show and those that nothing beats."""


def list_cost_points(board: LeaderboardReport) -> list[tuple[str, float, float]]:
    """Method, seconds of a training step over the baseline's, and perplexity at the largest length."""
    text = board.text
    if text is None:
        return []
    last = text.x_values[-1]
    return [
        (method, step, text.cells[method, last].mean)
        for method, cost in board.costs.items()
        if (step := cost.step) is not None and (method, last) in text.cells
    ]


def build_cost_picture(board: LeaderboardReport) -> HtmlPicture | None:
    """The picture for a page; None if no cost is known."""
    points = list_cost_points(board)
    if not points:
        return None
    best = sorted(points, key=lambda point: point[2])[:5]
    described = "; ".join(f"{name} {step:.2f} times and {format_number(value)}" for name, step, value in best)
    alt_text = (
        f"Plot of perplexity at {board.largest} over the time of a training step, {board.leaderboard.baseline} being "
        f"1, of {len(points)} methods. The best: {described}."
    )
    return encode_picture(lambda is_narrow: render_cost_png(board, narrow=is_narrow), alt_text)


def find_frontier(points: list[tuple[str, float, float]]) -> list[str]:
    """The methods than which none is both faster and better, from the fastest on."""
    frontier, least = [], float("inf")
    for name, _, value in sorted(points, key=lambda point: (point[1], point[2])):
        if value < least:
            frontier.append(name)
            least = value
    return frontier


def render_cost_png(board: LeaderboardReport, *, narrow: bool = False) -> bytes:
    """A point for each method, with the frontier joined. Raises ValueError if no cost is known."""
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
    axes.set_xlabel(f"time of a training step, {board.leaderboard.baseline} = 1")
    axes.set_ylabel(f"perplexity at {board.largest}")
    axes.grid(color="0.92", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()
