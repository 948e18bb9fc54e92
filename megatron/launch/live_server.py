"""Server of `./deepy.py report FOLDER --serve`: the live report of a run or sweep on this machine.

The page is the report written by `report -o`, preceded by the progress of training. A script in the page requests it
every few seconds and updates what has changed. The server is local: it listens on 127.0.0.1, answers only requests for
that host, serves this one page and no files, and accepts no input. Anyone with an account on this machine can read the
page.
"""

import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from megatron.checkpoint.run_folder import is_sweep_running
from megatron.launch.run_status import find_runs, is_alive
from megatron.launch.training_curves import TrainingMonitor
from megatron.options.commands import ReportOptions
from megatron.reports.combine import build_sections
from megatron.reports.records import RESULTS_FILE, Record
from megatron.reports.report import ReportSection, TrainingSection, render_report
from megatron.training.metrics_log import HEARTBEAT_FILE, METRICS_FILE
from megatron.utils.errors import FarfieldError, UserError, describe_error

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
            runs = self._find_runs()
            files = [run / METRICS_FILE for run in runs]
            files += [run / HEARTBEAT_FILE for run in runs]
            files += [folder / RESULTS_FILE for folder in (*self.folders, *runs)]
            alive = tuple(is_alive(run) for run in runs)
            is_live = any(alive) or any(map(is_sweep_running, self.folders))
            state = (is_live, alive, *((path, *_stat(path)) for path in files))
            if state != self._state:
                self._text = self._render(runs, is_live)
                self._state = state
                now = time.monotonic()
                if now - start_time > 1:
                    self._next_time = now + (now - start_time) / RENDER_FRACTION
            return self._text

    def _find_runs(self) -> list[Path]:
        runs = []
        for folder in self.folders:
            try:
                runs += find_runs([folder])
            except UserError:  # a sweep may still be preparing its corpus, and an evaluation has only results
                if not (is_sweep_running(folder) or (folder / RESULTS_FILE).is_file()):
                    raise
        return list(dict.fromkeys(runs))

    def _render(self, runs: Sequence[Path], is_live: bool) -> str:
        results = [folder for folder in self.folders if (folder / RESULTS_FILE).is_file()]
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


def _stat(path: Path) -> tuple[int, int]:
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
