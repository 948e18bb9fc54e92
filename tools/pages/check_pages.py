"""Check the HTML pages in a real browser: `.venv/bin/python tools/pages/check_pages.py [PAGE…] -o FOLDER`.

Chromium (Debian's package `chromium`) renders each page at four widths in both color schemes. The tool saves a
screenshot of each for visual inspection. A script in the page checks that nothing is wider than the window, that chart
labels do not overlap each other, bars or marks, and that all text has the contrast required by WCAG level AA. It also
checks that charts are readable by keyboard, methods and scales switch, tables sort, charts can be saved, and no network
is used.

Without PAGE, the tool builds pages from difficult synthetic records: sixty methods with long and hostile names, some of
which diverge, end early or fail.
"""

import argparse
import base64
import itertools
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from megatron.evaluation.analysis.analysis import Figure, Table
from megatron.evaluation.analysis.run import PageSection, render_analysis_page
from megatron.reports.charts import Chart
from megatron.reports.curve_chart import ChartLine, HorizontalAxis, build_line_chart
from megatron.reports.leaderboard import Ablation, Leaderboard
from megatron.reports.records import Record
from megatron.reports.report import ReportSection, render_report
from megatron.reports.run_records import RunFailure

WIDTHS = (360, 768, 1280, 1920)
SCHEMES = ("light", "dark")
CHECKS = Path(__file__).parent / "checks.js"
READ_LAST_CHART = """(() => {
  const plot = [...document.querySelectorAll("figure.chart .plot")].at(-1);
  if (!plot) return null;
  plot.focus();
  for (const key of ["End", "ArrowLeft", "ArrowLeft", "ArrowDown"]) {
    plot.dispatchEvent(new KeyboardEvent("keydown", {key}));
  }
  const box = plot.closest("figure").getBoundingClientRect();
  return {x: box.x + scrollX, y: box.y + scrollY, width: box.width, height: box.height};
})()"""
HOSTILE_NAMES = (
    '<script>alert("x")</script>',
    "3 × rotary(window=64) | none (attention_mask=document at evaluation)",
    "a_name_without_any_blank_or_dash_that_goes_on_for_much_longer_than_a_telephone_is_wide",
    "cdape(kernel_size=5)+kerple_log(per_layer) & 100%",
)
CHROMIUM_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="HTML files; by default pages of synthetic records")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder for pages and pictures")
    parser.add_argument("--width", type=int, action="append", help=f"window width; by default {WIDTHS}")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    paths = arguments.pages or write_fake_pages(arguments.output)
    num_problems = 0
    with open_browser() as browser:
        for path in paths:
            print(f"{path.name}: {path.stat().st_size / 1024:,.0f} KiB")
            for width in arguments.width or WIDTHS:
                for scheme in SCHEMES:
                    picture = arguments.output / f"{path.stem}_{width}_{scheme}.png"
                    problems = browser.check_page(path, width, scheme, picture)
                    num_problems += len(problems)
                    for problem in problems:
                        print(f"  {width} {scheme}: {problem}")
    print(f"{num_problems} problems; pictures in {arguments.output}")
    return min(num_problems, 1)


class Browser:
    """Chromium, controlled through the DevTools protocol over two pipes: JSON messages terminated by a zero byte."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.to_browser, self.from_browser = to_browser, from_browser
        self.last_id, self.buffer = 0, b""
        self.events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.ask(f"{domain}.enable")

    session: str | None = None

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its result; keep events received meanwhile."""
        self.last_id += 1
        message = {"id": self.last_id, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.to_browser, data) :]
        while True:
            answer = self._read_message()
            if answer.get("id") == self.last_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    def wait_for(self, method: str) -> None:
        """Wait until an event has been received since the last command that cleared the events."""
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._read_message())

    def _read_message(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            content = os.read(self.from_browser, 1 << 20)
            if not content:
                raise RuntimeError("the browser has ended")
            self.buffer += content
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def check_page(self, path: Path, width: int, scheme: str, picture: Path) -> list[str]:
        """Open a page, save its screenshot, and list its problems."""
        self.events.clear()
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.ask("Emulation.setDeviceMetricsOverride", **metrics)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.ask("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("Page.loadEventFired")
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        shot = self.ask(
            "Page.captureScreenshot",
            captureBeyondViewport=True,
            clip={"x": 0, "y": 0, "width": width, "height": min(size["height"], 16000), "scale": 1},
        )
        picture.write_bytes(base64.b64decode(shot["data"]))
        answer = self.ask(
            "Runtime.evaluate",
            expression=CHECKS.read_text(encoding="utf-8"),
            awaitPromise=True,
            returnByValue=True,
        )
        if reading := self.ask("Runtime.evaluate", expression=READ_LAST_CHART, returnByValue=True)["result"]["value"]:
            shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True, clip={**reading, "scale": 1})
            picture.with_stem(f"{picture.stem}_reading").write_bytes(base64.b64decode(shot["data"]))
        problems = [] if "exceptionDetails" in answer else list(answer["result"]["value"])
        if "exceptionDetails" in answer:
            problems.append(f"checks.js: {answer['exceptionDetails']['exception']['description']}")
        for event in self.events:
            if event.get("method") == "Runtime.exceptionThrown":
                problems.append(f"page.js: {event['params']['exceptionDetails']['exception']['description']}")
            if event.get("method") == "Network.requestWillBeSent":
                url = event["params"]["request"]["url"]
                if not url.startswith(("data:", "blob:", path.resolve().as_uri())):
                    problems.append(f"requests {url}")
        return problems


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Open a browser with a temporary profile, closed at the end of the block."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        raise SystemExit("Chromium not found: apt-get install chromium")
    read_commands, to_browser = os.pipe()
    from_browser, write_answers = os.pipe()

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:  # the browser still writes while it exits
        process = subprocess.Popen(
            # The browser reads from file descriptor 3 and writes to 4.
            ["/bin/sh", "-c", f'exec "$@" 3<&{read_commands} 4>&{write_answers}', "sh", program, *CHROMIUM_OPTIONS,
             f"--user-data-dir={profile}"], pass_fds=(read_commands, write_answers), stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read_commands)
        os.close(write_answers)
        try:
            yield Browser(to_browser, from_browser)
        finally:
            process.terminate()
            process.wait(timeout=20)


def write_fake_pages(folder: Path) -> list[Path]:
    """Write reports of 3, 30 and 60 methods, the last with a leaderboard, and a page of analyses."""
    sixty = [*HOSTILE_NAMES, *(f"cdape+method_{i}" if i % 3 == 0 else f"method_{i}" for i in range(56))]
    ablations = tuple(Ablation("cdape", name, name.removeprefix("cdape+")) for name in sixty if name[:6] == "cdape+")
    failure = RunFailure("failed_method", 1, "the loss is not finite: <nan>", 7, 512)
    pages = {
        "report_3": [ReportSection(None, build_fake_records(["rotary", "kerple_log", "cdape+kerple_log"], seed=3))],
        "report_30": [ReportSection("Thirty methods", build_fake_records(sixty[:30]), failures=[failure]),
                      ReportSection("Three seeds", build_fake_seeds(["rotary", "alibi", "t5"]))],
        "report_60": [
            ReportSection("All methods", [*build_fake_records(sixty), *build_fake_needles(sixty[:12])],
                          failures=[failure], own_seeds=True, leaderboard=Leaderboard("method_1", ablations, 6))
        ],
    }  # fmt: skip
    command = "./deepy.py report runs/zoo/results.json runs/a/rather/long/path/to/results.json -o report.html"
    paths = []
    for name, sections in pages.items():
        paths.append(folder / f"{name}.html")
        text = render_report(sections, configurations={"<a>.yml": "pos_emb: rotary\n" * 9}, command=command)
        paths[-1].write_text(text, encoding="utf-8")
    paths.append(folder / "analysis.html")
    paths[-1].write_text(render_fake_analysis(), encoding="utf-8")
    return paths


def build_fake_records(
    methods: Sequence[str], seed: int = 0, lengths: Sequence[int] = (512, 1024, 2048, 4096, 8192, 16384)
) -> list[Record]:
    """Build synthetic perplexities over lengths with intervals.

    Every seventh method diverges; every eleventh has few positions.
    """
    random_numbers, records = random.Random(seed), []
    for number, method in enumerate(methods):
        base = 4 + 3 * random_numbers.random()
        slope = random_numbers.choice([0.0, -0.02, 0.05, 0.3])
        for index, length in enumerate(lengths):
            value = base * math.exp(slope * index + random_numbers.gauss(0, 0.02))
            if number % 7 == 6 and index > 1:
                value = (1e6, 1e8, 1e30, 1e304)[min(index - 2, 3)]
            if number % 11 == 10 and index > 2:
                continue
            sums = [random_numbers.gauss(math.log(value), 0.3) * 256 for _ in range(16)]
            records.append(
                Record(
                    method=method, train_length=512, length=length, protocol="last", metric="perplexity", value=value,
                    tokens=4096, seed=1, low=value * 0.93, high=value * 1.06, dataset="data/python/test_text_document",
                    max_length=2048 if number % 11 == 10 else None, block_sums=sums, target_digest="d", targets=64,
                    run=f"runs/zoo/{number}/seed_1", parameters=842_496 + number, step=500, step_seconds=0.1 + 0.01 * (
                    number % 17), seconds=0.2 * (1 + index) * (1 + number % 5), machine="Linux x86_64, AMD EPYC, 2 thr",
                    software="farfield 0.1.0, torch 2.13.0", position=method, date="2026-01-02T03:04:05+00:00",
                )
            )  # fmt: skip
    return records


def build_fake_seeds(methods: Sequence[str]) -> list[Record]:
    """Build synthetic records with three seeds per method."""
    return [
        record.replace(seed=seed, run=f"runs/{record.method}/{seed}", value=record.value * (1 + 0.03 * seed))
        for seed in range(3)
        for record in build_fake_records(methods, seed=9)
    ]


def build_fake_needles(methods: Sequence[str]) -> list[Record]:
    """Build synthetic accuracies over depth and length."""
    random_numbers = random.Random(5)
    return [
        Record(
            method=method, train_length=512, length=length, protocol="depths", metric="accuracy", axis="depth",
            place=depth / 10, value=max(0.0, min(1.0, 1.2 - length / 9000 * random_numbers.random())), tokens=64,
            seed=1, run=f"runs/zoo/{method}", dataset="task needle", target_digest=str(length),
        )
        for method in methods
        for length in (512, 2048, 8192)
        for depth in range(0, 11, 2)
    ]  # fmt: skip


def render_fake_analysis() -> str:
    """Render charts, a picture, tables and sentences like those of analyses."""
    distances = [float(distance) for distance in (0, 1, 3, 10, 100, 1000, 10_000)]

    def build_chart(number: int, name: str) -> Chart:
        lines = [
            ChartLine(f"head {head}", [(n, -n * 2.0**-head if n < 5000 else -math.inf) for n in distances], style=head)
            for head in range(40)
        ]
        axis = HorizontalAxis("distance", 0.0, distances[-1], "log1p")
        return build_line_chart(
            f"kernels_{number}", f"Bias of {name}", "Bias over the distance.", axis, "bias", lines,
            y_limits=(-12.0, 0.0), note="Biases below −12 are cut off.",
            mark=(512.0, "training length"), series_word="heads",
        )  # fmt: skip

    def draw(narrow: bool) -> bytes:
        from megatron.evaluation.analysis.drawing import add_titles, create_panels, save_png

        figure, axes = create_panels(6, narrow)
        for panel in axes:
            panel.plot(range(9))
            add_titles(panel, "head 0", "distance", "bias")
        return save_png(figure)

    rows = [[name, f"{index:,}", "converges", "1.23e+30", "a reason in words that is longer than forty letters are"]
            for index, name in enumerate(HOSTILE_NAMES)]  # fmt: skip
    columns = ["method", "heads", "verdict", "sum of 1,000 terms", "why"]
    section = PageSection(
        "kernels", "Kernels per head", "Each head's bias over the distance.",
        ["kerple_log: every head's series diverges.", *itertools.starmap(build_chart, enumerate(HOSTILE_NAMES)),
         Figure("Bias over distance.", draw), Table(columns, rows, "Sums"),
         Table(columns, rows * 9, "Heads, with more rows", folded=True)],
        {"none": "It adds no bias."}, "kernels.csv",
    )  # fmt: skip
    models = Table(["method", "layers × width", "where it comes from"], [["rotary", "4 × 128", "run runs/rotary"]])
    return render_analysis_page(
        "What rotary attends to", ["No text was read."], [section], models, {"machine": "Linux", "software": "torch"}
    )


if __name__ == "__main__":
    sys.exit(main())
