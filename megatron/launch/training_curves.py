"""Training curves of runs, read from their metrics.jsonl as it grows, as charts and a table of a page.

A step that was recorded before belongs to a resumed run, and later points of the earlier attempt are dropped.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.launch.run_status import RunStatus, format_status_cells, read_status
from megatron.reports.charts import Chart
from megatron.reports.line_chart import HorizontalAxis, Line, build_line_chart
from megatron.reports.report import TrainingSection
from megatron.reports.table_formats import TextTable
from megatron.training.metrics_log import METRICS_FILE, MetricsFollower, parse_record

MAX_POINTS = 160
"""Maximum number of points per curve."""
MAX_CURVES = 40
"""Maximum number of runs on a page with curves; for more runs only the table is shown."""
MIN_STEPS = 5
"""Minimum length of the horizontal axis, so that its ticks are integers."""
START_FRACTION = 0.1
"""Share of all steps at the start whose losses may exceed the chart, because they would otherwise dominate it."""


@dataclass
class CurveReader:
    """Reader of the recorded steps of one run.

    Args:
        run: folder of the run.
    """

    run: Path
    losses: list[tuple[int, float]] = field(default_factory=list)
    """Step and mean loss of the interval that ended there, in nats per token."""
    validations: list[tuple[int, float]] = field(default_factory=list)
    speeds: list[tuple[int, float]] = field(default_factory=list)
    """Step and tokens per second."""

    def __post_init__(self) -> None:
        self._follower = MetricsFollower(self.run / METRICS_FILE)

    def read(self) -> bool:
        """Read new records. Returns True if there were any."""
        lines, is_replaced = self._follower.read_lines()
        if is_replaced:
            self._forget_from(0)
        for line in lines:
            self._add(line)
        return bool(lines)

    def _add(self, line: bytes) -> None:
        record = parse_record(line)
        if record is None:
            return  # a damaged line, which `status` reports
        kind, step = record["kind"], record["step"]
        if kind == "train":
            if self.losses and step <= self.losses[-1][0]:
                self._forget_from(step)
            pairs = [(self.losses, record.get("loss")), (self.speeds, record.get("tokens_per_second"))]
        else:
            pairs = [(self.validations, record.get("loss") if kind == "valid" else None)]
        for points, value in pairs:
            if isinstance(value, int | float) and abs(value) < 1e300:
                points.append((step, float(value)))

    def _forget_from(self, step: int) -> None:
        for points in (self.losses, self.validations, self.speeds):
            points[:] = [point for point in points if point[0] < step]


class TrainingMonitor:
    """Monitor that reads the runs of a folder repeatedly."""

    def __init__(self) -> None:
        self._readers: dict[Path, CurveReader] = {}

    def describe(self, runs: Sequence[Path], *, is_live: bool = False) -> TrainingSection:
        """Describe the training progress of runs with all records so far, as a section of a page.

        Args:
            runs: folders of the runs.
            is_live: True if the page refreshes while the runs train.
        """
        names = _shorten_names(runs)
        has_curves = len(runs) <= MAX_CURVES
        for run in runs if has_curves else ():
            self._readers.setdefault(run, CurveReader(run)).read()
        statuses = {names[run]: read_status(run) for run in runs}
        charts: list[Chart] = []
        if has_curves:
            curves = {names[run]: self._readers[run] for run in runs}
            found = (_build_loss_chart(curves), _build_speed_chart(curves))
            charts = [chart for chart in found if chart is not None]
        return TrainingSection(_build_table(statuses, shows_curves=has_curves), charts, is_live)


def _shorten_names(runs: Sequence[Path]) -> dict[Path, str]:
    """Return the folders without their common prefix."""
    whole = {run: Path(os.path.abspath(run)) for run in runs}
    if len(runs) <= 1:
        return {run: path.name for run, path in whole.items()}
    common = Path(os.path.commonpath(whole.values()))
    return {run: path.relative_to(common).as_posix() for run, path in whole.items()}


def _build_table(statuses: dict[str, RunStatus], *, shows_curves: bool) -> TextTable:
    notes = () if shows_curves else (f"Curves are shown for at most {MAX_CURVES} runs.",)
    problems = tuple(problem for status in statuses.values() for problem in status.problems)
    headers, rows = format_status_cells(list(statuses.values()))
    return TextTable(
        "Status of each run", "run", headers, tuple(zip(statuses, rows, strict=True)), (*notes, *problems)
    )  # fmt: skip


def _build_loss_chart(curves: dict[str, CurveReader]) -> Chart | None:
    lines, shown = [], []
    last = max((curve.losses[-1][0] for curve in curves.values() if curve.losses), default=0)
    for style, (name, curve) in enumerate(curves.items()):
        if curve.losses:
            lines.append(Line(name, _downsample(curve.losses), style=style))
            shown += [loss for step, loss in curve.losses if step >= START_FRACTION * last or len(curve.losses) < 3]
    if not lines:
        return None
    validations = [
        f"{name} {curve.validations[-1][1]:.4f} at step {curve.validations[-1][0]:,}"
        for name, curve in curves.items()
        if curve.validations
    ]
    note = f"Validation: {'; '.join(validations)}." if validations else ""
    low, high = min(shown), max(shown)
    return _build_chart("training_loss", "Training loss", "loss in nats per token", lines, (low, high), note)


def _build_speed_chart(curves: dict[str, CurveReader]) -> Chart | None:
    lines = [
        Line(name, _downsample(curve.speeds), style=style)
        for style, (name, curve) in enumerate(curves.items())
        if curve.speeds
    ]
    if not lines:
        return None
    highest = max(speed for line in lines for _, speed in line.points)
    return _build_chart("training_speed", "Training speed", "tokens per second", lines, (0.0, highest), "")


def _build_chart(
    name: str, title: str, y_title: str, lines: list[Line], limits: tuple[float, float], note: str
) -> Chart:
    steps = [step for line in lines for step, _ in line.points]
    ends = "; ".join(f"{line.name} {line.points[-1][1]:,.4g} at step {line.points[-1][0]:,.0f}" for line in lines[:8])
    low, high = limits
    # Start at 0, unless all points start late, as in a run that branches from another's checkpoint.
    first = min(steps) if min(steps) < max(steps) < 2 * min(steps) else 0
    return build_line_chart(
        name,
        title,
        f"{title} over the steps. Last: {ends}.",
        HorizontalAxis("step", first, max(max(steps), first + MIN_STEPS)),
        y_title,
        lines,
        y_limits=(low, high) if high > low else (low - 0.5, low + 0.5),
        note=note,
        series_word="runs",
    )


def _downsample(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """Return at most `MAX_POINTS` evenly spaced points, including the last."""
    if len(points) <= MAX_POINTS:
        return [(float(step), value) for step, value in points]
    indices = (round(index * (len(points) - 1) / (MAX_POINTS - 1)) for index in range(MAX_POINTS))
    return [(float(points[index][0]), points[index][1]) for index in indices]
