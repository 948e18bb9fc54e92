"""Summary of a leaderboard: sentences that answer three questions, and a scatter plot of cost and perplexity."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.reports.axes import choose_scales, format_multiple
from megatron.reports.charts import Chart, ChartPoint, ChartPosition, ChartSeries, ChartTick
from megatron.reports.leaderboard import TEST_POWER, LeaderboardReport
from megatron.reports.leaderboard_benchmarks import TEXT_BENCHMARK, RankedBenchmark
from megatron.reports.method_rows import quote_method
from megatron.reports.metrics import format_number, format_percent, get_metric
from megatron.reports.significance import MethodComparison

MAX_EXTRAPOLATION_RATIO = 1.05
"""Maximum ratio of perplexity at the largest length to that at the training length for a method that extrapolates."""
MAX_RATIO_TO_BEST = 1.05
"""Maximum ratio of mean perplexity at the largest length to the lowest, for a method to be considered for its costs."""
MAX_NAMED = 8
"""Maximum number of methods that a sentence names; more are counted."""

MAX_TIED = 3
"""Maximum number of tied best methods that a sentence names."""


@dataclass(frozen=True)
class Answer:
    question: str
    sentences: tuple[str, ...]


def build_answers(board: LeaderboardReport) -> list[Answer]:
    """Build the questions and answers, in order; empty if no text was scored."""
    if board.text is None:
        return []
    answers = [Answer(f"Which methods extrapolate to {board.largest}?", tuple(_answer_which_extrapolate(board)))]
    if any(board.ablations.values()):
        answers.append(Answer("Do score processors and temperatures help?", tuple(_answer_what_helps(board))))
    return [*answers, Answer("What do methods cost?", tuple(_answer_costs(board)))]


def _answer_which_extrapolate(board: LeaderboardReport) -> Iterator[str]:
    text = board.text
    assert text is not None
    last = text.x_values[-1]
    changes = {
        method: change.mean
        for method in board.trained_methods
        if (change := text.compute_change(method, text.train_length, last)) is not None
    }
    best = board.best_text_method
    if TEXT_BENCHMARK in board.missing:
        num_missing = len(board.missing[TEXT_BENCHMARK])
        have = "methods have" if num_missing > 1 else "method has"
        yield f"Provisional, because {num_missing} {have} missing runs on the text."
    if best is None or not changes:
        yield f"No method has a result at {board.largest}."
        return
    holding = [method for method in changes if changes[method] <= MAX_EXTRAPOLATION_RATIO]
    holding.sort(key=lambda method: text.cells[method, last].mean)
    limit, named = f"{MAX_EXTRAPOLATION_RATIO - 1:.0%}", f" ({_join_method_names(holding)})" if holding else ""
    yield (
        f"For {len(holding)} of {len(changes)} methods, perplexity at {board.largest} is at most {limit} above that at "
        f"the training length{named}."
    )
    value = text.metric.format_value(text.cells[best, last].mean)
    yield f"{quote_method(best)} has the lowest mean perplexity at {board.largest}, {value}."
    yield _compare_with_best(board)
    if (detectable := board.find_detectable_change(last)) is not None:
        yield (
            f"With {text.max_seeds} seeds per method, these tests detect a difference of {detectable:.0%} with a "
            f"probability of {TEST_POWER:.0%}; they may miss smaller differences."
        )
    missing = [m for m in board.ranking if (m, last) not in text.cells and m in text.methods]
    ended: dict[int, list[str]] = {}
    for method in missing:
        if text.ends_before(method, last):
            ended.setdefault(text.max_lengths[method], []).append(method)
    for max_length, methods in ended.items():
        whose = "its maximum length is" if len(methods) == 1 else "their maximum length is"
        names = _join_method_names(methods)
        yield f"{names} cannot be evaluated at this length, because {whose} {max_length:,} tokens."
    unknown = [method for method in missing if not text.ends_before(method, last)]
    if unknown:
        yield f"No result at this length: {_join_method_names(unknown)}."
    num_partial = sum(text.cells[method, last].partial_num_seeds is not None for method in changes)
    if num_partial:
        have, whose = ("has", "its") if num_partial == 1 else ("have", "their")
        yield (
            f"{num_partial} of the {len(changes)} methods {have} fewer than {text.max_seeds} seeds (n in the tables), "
            f"so {whose} results are less certain."
        )
    for ranked_benchmark in board.ranked_benchmarks:
        if ranked_benchmark.kind != "text" and ranked_benchmark.scores:
            yield _describe_winner(ranked_benchmark)


def _compare_with_best(board: LeaderboardReport) -> str:
    """Return how many methods are significantly worse than the best over seeds, and how many are not."""
    tested = {method: found for method, found in board.against_best.items() if found.is_tested}
    if not tested:
        return "No other method shares two seeds with it, so no difference was tested."
    worse = sorted((m for m, found in tested.items() if found.verdict == "worse"), key=lambda m: tested[m].change)
    close = sorted((m for m in tested if m not in worse), key=lambda m: tested[m].change)
    named = _join_method_names([f"{quote_method(method)} {_format_change(tested[method])}" for method in close])
    if len(tested) == 1:
        only, verdict = (worse[0], "is") if worse else (named, "is not")
        return f"In the only test over seeds, the other method {verdict} significantly worse ({only})."
    if not worse:
        return f"In tests over seeds, none of {len(tested)} other methods is significantly worse: {named}."
    is_or_are = "is" if len(worse) == 1 else "are"
    rest = f"; the others are not: {named}" if close else ""
    return (
        f"In tests over seeds, {len(worse)} of {len(tested)} other methods {is_or_are} significantly worse "
        f"({_join_method_names(worse)}){rest}."
    )


def _format_change(comparison: MethodComparison) -> str:
    return format_percent(comparison.change - 1, min_decimals=1)


def _answer_what_helps(board: LeaderboardReport) -> Iterator[str]:
    """Name the significant differences of added components at each length, and count the others."""
    text = board.text
    assert text is not None
    for length, comparisons in board.ablations.items():
        where = format_multiple(length / text.train_length)
        tested = {ablation: found for ablation, found in comparisons.items() if found.is_tested}
        if not tested:
            yield f"At {where} no processor or temperature was tested: a test needs two seeds that both methods have."
            continue
        effects = []
        for verdict, verb in (("better", "lowers"), ("worse", "raises")):
            some = sorted((pair for pair in tested.items() if pair[1].verdict == verdict), key=lambda p: p[1].change)
            named = [f"{pair.name} on {quote_method(pair.base)} {_format_change(found)}" for pair, found in some]
            if named:
                names = _join_method_names(named)
                effects.append(f"significantly {verb} perplexity in {len(named)} of {len(tested)} cases ({names})")
        rest = len(tested) - sum(found.verdict in ("better", "worse") for found in tested.values())
        effects += [f"makes no significant difference in {rest} of {len(tested)}"] if rest else []
        yield (
            f"At {where} adding a processor or temperature {', '.join(effects[:-1])}{' and ' * (len(effects) > 1)}"
            f"{effects[-1]}."
        )


def _answer_costs(board: LeaderboardReport) -> Iterator[str]:
    text, baseline = board.text, board.leaderboard.baseline
    assert text is not None
    best = board.best_text_method
    if baseline not in text.methods:
        yield f"Costs are relative to {baseline}, which has no results here."
    elif best is not None and best in board.costs and best != baseline:
        cost = _describe_cost(board, best)
        yield f"Relative to {baseline}, {quote_method(best)}, the best at {board.largest}, {cost}."
    if best is None or len(text.methods) == 1 or not board.costs[best].has_times:
        return
    cheap = _find_cheapest(board, best)
    good = f"whose mean perplexity at {board.largest} is within {MAX_RATIO_TO_BEST - 1:.0%} of the lowest"
    if cheap:
        yield (
            f"Methods {good}, and that are at most 10% slower than {baseline} in training and in scoring at "
            f"{board.largest}: {_join_method_names(cheap)}."
        )
    else:
        yield (
            f"Every method {good} is more than 10% slower than {baseline} in training or in scoring at {board.largest}."
        )


def _find_cheapest(board: LeaderboardReport, best: str) -> list[str]:
    text = board.text
    assert text is not None
    last = text.x_values[-1]
    means = {method: cell.mean for (method, x), cell in text.cells.items() if x == last}
    return [
        method
        for method in sorted(means, key=means.__getitem__)
        if means[method] <= MAX_RATIO_TO_BEST * means[best]
        and (cost := board.costs.get(method)) is not None
        and (cost.step or math.inf) <= 1.1
        and (cost.scoring or math.inf) <= 1.1
    ]


def _describe_cost(board: LeaderboardReport, method: str) -> str:
    cost, base = board.costs[method], board.costs.get(board.leaderboard.baseline)
    parts = []
    if cost.step is not None:
        parts.append(f"takes {cost.step:.2f} times as long per training step")
    if cost.scoring is not None:
        parts.append(f"takes {cost.scoring:.2f} times as long to score at {board.largest}")
    if cost.parameters is not None and base is not None and base.parameters:
        share = cost.parameters / base.parameters - 1
        kind = "as many" if not share else f"{abs(share):.1%} {'more' if share > 0 else 'fewer'}"
        parts.append(f"has {kind} parameters")
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]])) or "has an unknown cost"


def _describe_winner(ranked_benchmark: RankedBenchmark) -> str:
    """Name the best methods in a task, and the number of methods above the trivial baselines."""
    order = sorted(
        ranked_benchmark.scores,
        key=lambda method: ranked_benchmark.metric.get_sort_key(ranked_benchmark.scores[method]),
    )
    top = [method for method in order if ranked_benchmark.scores[method] == ranked_benchmark.scores[order[0]]]
    names = _join_method_names(top) if len(top) <= MAX_TIED else f"{len(top)} methods tie"
    text = f"Best in {ranked_benchmark.title}: {names}, with {ranked_benchmark.format_score(order[0])}"
    if ranked_benchmark.baseline_score is None:
        return f"{text}."
    learned = [method for method in order if ranked_benchmark.beats_baselines(method)]
    floor = ranked_benchmark.metric.format_value(ranked_benchmark.baseline_score) + "%" * (
        ranked_benchmark.metric.unit == "in %"
    )
    return f"{text}; {len(learned)} of {len(order)} beat the best trivial baseline ({floor})."


def _join_method_names(names: Sequence[str]) -> str:
    """Join names in a sentence: a, b and c, or the first ones and the number of others."""
    if not names:
        return "none"
    names = [quote_method(name) for name in names]
    if len(names) > MAX_NAMED:
        return f"{', '.join(names[:MAX_NAMED])} and {len(names) - MAX_NAMED} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


# matplotlib imports slowly, so it is imported inside functions.

MAX_SHOWN_STEP, MAX_SHOWN_VALUE = 1.6, 10.0
"""Ends of the scatter plot's axes: duration relative to the median, and perplexity relative to the lowest."""
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
    described = "; ".join(
        f"{quote_method(method)} {step:.2f} times and {format_number(value)}" for method, step, value in best
    )
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
    from matplotlib.ticker import LogLocator

    from megatron.reports.plots import save_figure

    points = list_cost_points(board)
    if not points:
        raise ValueError("no costs to plot")
    figure = Figure(figsize=(4.0, 4.4) if narrow else (8.6, 4.8), dpi=200 if narrow else 160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    frontier = find_frontier(points)
    by_name = {name: (step, value) for name, step, value in points}
    named = set(by_name) if len(points) <= MAX_CROWDED_NAMES else {*frontier, *board.list_shown_methods()}
    steps, values = zip(*by_name.values(), strict=True)
    ends = MAX_SHOWN_STEP * statistics.median(steps), MAX_SHOWN_VALUE * min(values)
    for name, point in by_name.items():
        by_name[name], marker = clamp_to_axes(point, ends)
        color = "#0072B2" if name in frontier else "0.55"
        axes.plot(*by_name[name], marker=marker, markersize=4, color=color)
    axes.plot(*zip(*(by_name[name] for name in frontier), strict=True), color="0.6", linewidth=1, zorder=0)
    if max(values) > 4 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    beyond = "\n(triangles: beyond the axes)" if max(steps) > ends[0] or max(values) > ends[1] else ""
    axes.set_xlabel(f"duration of a training step, {board.leaderboard.baseline} = 1{beyond}")
    axes.set_ylabel(f"perplexity at {board.largest}")
    axes.grid(color="0.92", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    annotate_points(axes, {name: by_name[name] for name in named}, font_size=6 if narrow else 7)
    return save_figure(figure)


def clamp_to_axes(point: tuple[float, float], ends: tuple[float, float]) -> tuple[tuple[float, float], str]:
    """Return a point moved to the ends of the axes if it lies beyond them, and its marker, which points outward."""
    marker = ">" if point[0] > ends[0] else "^" if point[1] > ends[1] else "o"
    return (min(point[0], ends[0]), min(point[1], ends[1])), marker


def annotate_points(axes: Any, points: Mapping[str, tuple[float, float]], *, font_size: float) -> None:
    """Write names next to points, from left to right; a name that would cover others is moved up, with a line."""
    axes.figure.draw_without_rendering()  # the layout determines where texts are
    placed: list[Any] = []
    for name, point in sorted(points.items(), key=lambda item: item[1]):
        x, y, moved = 4, 3, 0.0
        label = axes.annotate(name, point, xytext=(x, y), textcoords="offset points", fontsize=font_size)
        while any(label.get_window_extent().overlaps(box) for box in placed):
            moved += font_size + 1
            label.set_position((x, y + moved))
        placed.append(label.get_window_extent().padded(font_size / 3))  # names do not touch either
        if moved:
            line = {"arrowstyle": "-", "color": "0.7", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2}
            axes.annotate("", point, xytext=(x, y + moved + 1), textcoords="offset points", arrowprops=line, zorder=0)
