"""Server of `./deepy.py report FOLDER --serve`: the live report of a run or sweep on this machine.

The page is the report written by `report -o`, preceded by the progress of training. A script in the page requests it
every few seconds and updates what has changed. The server is local: it listens on 127.0.0.1, answers only requests for
that host, serves this one page and no files, and accepts no input. Anyone with an account on this machine can read the
page.

Training curves are read from the runs' metrics.jsonl as it grows. If a resumed run records a step again, later points
of the earlier attempt are dropped.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from megatron.checkpoint.run_folder import is_sweep_running
from megatron.launch.run_status import RunStatus, find_runs, format_status_cells, is_alive, read_status
from megatron.options.commands import ReportOptions
from megatron.reports.charts import Chart
from megatron.reports.combine import build_sections
from megatron.reports.curve_chart import ChartLine, HorizontalAxis, build_line_chart
from megatron.reports.records import RESULTS_FILE, Record
from megatron.reports.report import ReportSection, TrainingSection, render_report
from megatron.reports.run_records import list_run_files
from megatron.reports.table_formats import TextTable
from megatron.training.metrics_log import HARNESS_KIND, HEARTBEAT_FILE, METRICS_FILE, MetricsFollower, parse_record
from megatron.utils.errors import FarfieldError, UserError, describe_error

MAX_POINTS = 160
"""Maximum number of points per curve."""
MAX_CURVES = 40
"""Maximum number of runs on a page with curves; for more runs only the table is shown."""
MAX_TASK_CHARTS = 6
"""Maximum number of metrics of tasks on a page."""
TASK_COUNTS = ("kind", "step", "tokens", "requests", "seconds")
"""Keys of a record of a task that are not scores."""
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
    task_values: dict[tuple[str, str], list[tuple[int, float]]] = field(default_factory=dict)
    """Step and value of each metric and task of lm-evaluation-harness."""

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
        elif kind.startswith(HARNESS_KIND):
            pairs = [
                (self.task_values.setdefault((name, kind.removeprefix(HARNESS_KIND)), []), value)
                for name, value in record.items()
                if name not in TASK_COUNTS and not name.endswith("_stderr")
            ]
        else:
            pairs = [(self.validations, record.get("loss") if kind == "valid" else None)]
        for points, value in pairs:
            if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
                points.append((step, float(value)))

    def _forget_from(self, step: int) -> None:
        for points in (self.losses, self.validations, self.speeds, *self.task_values.values()):
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
            found = (_build_loss_chart(curves), *_build_task_charts(curves), _build_speed_chart(curves))
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
            lines.append(ChartLine(name, _downsample(curve.losses), style=style))
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


def _build_task_charts(curves: dict[str, CurveReader]) -> Iterator[Chart]:
    """Yield a chart for each of the first metrics of tasks, with a line for each task of each run."""
    metrics = dict.fromkeys(metric for curve in curves.values() for metric, _ in curve.task_values)
    for number, metric in enumerate(list(metrics)[:MAX_TASK_CHARTS]):
        found = [
            (task if len(curves) == 1 else f"{name} {task}", points)
            for name, curve in curves.items()
            for (other, task), points in curve.task_values.items()
            if other == metric and points
        ]
        lines = [
            ChartLine(name, _downsample(points), style=style) for style, (name, points) in enumerate(found[:MAX_CURVES])
        ]
        if lines:
            values = [value for line in lines for _, value in line.points]
            title, limits = f"Tasks: {metric}", (min(values), max(values))
            note = f"{len(found) - MAX_CURVES} more lines are not shown." if len(found) > MAX_CURVES else ""
            yield _build_chart(f"training_tasks_{number}", title, metric, lines, limits, note)


def _build_speed_chart(curves: dict[str, CurveReader]) -> Chart | None:
    lines = [
        ChartLine(name, _downsample(curve.speeds), style=style)
        for style, (name, curve) in enumerate(curves.items())
        if curve.speeds
    ]
    if not lines:
        return None
    highest = max(speed for line in lines for _, speed in line.points)
    return _build_chart("training_speed", "Training speed", "tokens per second", lines, (0.0, highest), "")


def _build_chart(
    name: str, title: str, y_title: str, lines: list[ChartLine], limits: tuple[float, float], note: str
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


HOST = "127.0.0.1"
REFRESH_SECONDS = 5
"""Time between refreshes of an open page, in seconds."""
RENDER_FRACTION = 0.1
"""Maximum share of time spent on rendering the page of a large sweep, which shares the machine with training."""
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


class LivePage:
    """The page of some folders, rendered again when one of their files has changed.

    Args:
        folders: folders of runs or sweeps.
        options: options of the report.
    """

    def __init__(self, folders: Sequence[Path], options: ReportOptions) -> None:
        self.folders, self.options = folders, options
        self._monitor, self._lock = TrainingMonitor(), threading.Lock()
        self._state: tuple[object, ...] | None = None
        self._text = ""
        self._next_time = 0.0

    def render(self) -> str:
        """Render the current page.

        Raises UserError if a folder is not a run or sweep, or its results cannot be read.
        """
        with self._lock:
            start_time = time.monotonic()
            if start_time < self._next_time:
                return self._text
            runs, results = self._find_runs()
            files = [run / METRICS_FILE for run in runs]
            files += [run / HEARTBEAT_FILE for run in runs]
            files += [folder / RESULTS_FILE for folder in (*self.folders, *runs)]
            files += [path for folder in results for path in list_run_files(folder)]
            alive = tuple(is_alive(run) for run in runs)
            is_live = any(alive) or any(map(is_sweep_running, self.folders))
            state = (is_live, alive, *((path, *_stat_file(path)) for path in files))
            if state != self._state:
                self._text = self._render(runs, results, is_live)
                self._state = state
                now = time.monotonic()
                if now - start_time > 1:
                    self._next_time = now + (now - start_time) / RENDER_FRACTION
            return self._text

    def _find_runs(self) -> tuple[list[Path], list[Path]]:
        """Return the runs, and the folders with results or saved records."""
        runs, results = [], []
        for folder in self.folders:
            has_results = (folder / RESULTS_FILE).is_file()
            try:
                runs += find_runs([folder])
            except UserError:
                # A sweep may still be preparing its corpus; evaluations and saved records have only results.
                has_results = has_results or bool(list_run_files(folder))
                if not (has_results or is_sweep_running(folder)):
                    raise
            results += [folder] if has_results else []
        return list(dict.fromkeys(runs)), results

    def _render(self, runs: Sequence[Path], results: Sequence[Path], is_live: bool) -> str:
        sections: Sequence[ReportSection] = ()
        if results:
            sections = build_sections(results, self.options.against, self.options.delta, is_whole=not is_live)
        runs = _sort_as_results(runs, [record for section in sections for record in section.records])
        training: TrainingSection = self._monitor.describe(runs, is_live=is_live)
        title = self.options.title
        if title is None and not sections:
            title = f"Training of {', '.join(map(str, self.folders))}"
        return render_report(sections, title=title, training=training, refresh_seconds=REFRESH_SECONDS)


def _sort_as_results(runs: Sequence[Path], records: Sequence[Record]) -> list[Path]:
    """Sort runs in the order of their records, so that tables agree. Runs without records follow in their own order."""
    order = {Path(run).resolve(): index for index, run in enumerate(dict.fromkeys(r.run for r in records if r.run))}
    return sorted(runs, key=lambda run: order.get(run.resolve(), len(order)))


def _stat_file(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def serve_report(folders: Sequence[Path], port: int, log: Callable[[str], None], options: ReportOptions) -> None:
    """Serve the page until the process is interrupted.

    Args:
        folders: folders of runs or sweeps.
        port: port to listen on; 0 selects a free one.
        log: receives a line with the address of the page.
        options: options of the report.

    Raises:
        UserError: the port is in use, or a folder is not a run or sweep.
    """
    page = LivePage(folders, options)
    page.render()
    with build_server(page, port) as server:
        log(f"http://{HOST}:{server.server_address[1]}/ shows {', '.join(map(str, folders))} until Ctrl-C")
        server.serve_forever(poll_interval=0.2)


def build_server(page: LivePage, port: int) -> ThreadingHTTPServer:
    """Build a server that listens but does not serve yet. Raises UserError if the port cannot be used."""

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "farfield", ""

        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").partition(":")[0]  # the port may be a tunnel's
            if host not in (HOST, "localhost"):  # DNS rebinding: a foreign page whose name resolves to this address
                return self._answer(403, "this server only answers requests to its own address")
            if self.path.partition("?")[0] != "/":
                return self._answer(404, "the only page is /")
            try:
                text = page.render()
            except FarfieldError as error:
                return self._answer(503, str(error))
            except Exception as error:
                return self._answer(500, describe_error(error))
            self._answer(200, text)

        do_HEAD = do_GET

        def _answer(self, code: int, text: str) -> None:
            content = text.encode("utf-8", errors="replace")  # a record may contain an unpaired surrogate
            self.send_response(code)
            headers = HEADERS if code == 200 else {**HEADERS, "Content-Type": "text/plain; charset=utf-8"}
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, format: str, *values: Any) -> None:
            """Log nothing: a line per request would hide everything else."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, address: Any) -> None:
            """Ignore the error of a client that disconnects early."""

    try:
        return Server((HOST, port), Handler)
    except OSError as error:
        raise UserError(
            f"--port {port}: cannot listen on it ({error.strerror}); --port 0 selects a free port"
        ) from error
