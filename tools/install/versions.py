"""Test an environment of other versions of the packages, and record which versions work together.

    make test-newest                        the newest of everything
    make test-oldest                        the oldest that are supported
    make test-with VERSIONS='torch==2.12.0 transformers==5.0.0'

The Makefile installs the environment. The tests are those that use the packages: formulas, kernels interpreted and
compiled, exports, lm-evaluation-harness, corpora of other libraries, DeepSpeed's engine and checkpoints. Then
checkpoints are exchanged in both directions. The exit code is 1 if anything fails.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from tools.arguments import ToolParser, parse_output_path, print_interrupts_in_one_line  # noqa: E402
from tools.export.versions import find_distribution, read_report  # noqa: E402
from tools.install.exchange import LAYERS, WIDTH, compare_checkpoints  # noqa: E402
from tools.records import describe_commit, write_record  # noqa: E402

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "deepspeed",
    "megatron-core",
    "lm_eval",
    "datasets",
    "numpy",
)
TESTS = (
    "tests/position/test_formulas.py",
    "tests/attention/test_backends.py",
    "tests/attention/test_flex.py",
    "tests/model/test_decoding.py",
    "tests/conversion/test_transformers.py",
    "tests/conversion/test_caches.py",
    "tests/conversion/test_packed_documents.py",
    "tests/conversion/test_refresh_export.py",
    "tests/conversion/test_tokenizer.py",
    "tests/conversion/test_families.py",
    "tests/conversion/test_hugging_face.py",
    "tests/conversion/test_newer_models.py",
    "tests/evaluation/test_harness_tasks.py",
    "tests/data/test_sources.py",
    "tests/checkpoint",
    "tests/training/test_engine.py",
    "tests/training/test_processes.py",
    "tests/training/test_trainer.py",
    "tests/kernels",
)


def list_versions(python: Path) -> dict[str, str]:
    """Return the version of Python and of the packages in an environment."""
    code = "import platform, sysconfig; print(platform.python_version(), sysconfig.get_path('purelib'))"
    number, folder = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    found = {package: find_distribution(package, Path(folder)) for package in PACKAGES}
    return {"python": number, **{package: each.version for package, each in found.items() if each is not None}}


def run_tests(python: Path, folder: Path) -> dict[str, Any]:
    """Run the tests with an environment's Python.

    Return the counts of passed and skipped tests, the names of failed ones and the duration in seconds.
    """
    report = folder / "tests.xml"
    options = ("-n", "auto", "--dist", "worksteal", "-p", "no:cacheprovider", f"--junitxml={report}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    started = time.monotonic()
    done = subprocess.run([python, "-P", "-m", "pytest", *options, *TESTS], cwd=ROOT, env=environment)
    if done.returncode not in (0, 1):
        raise SystemExit(f"error: the tests cannot be run: pytest's exit code is {done.returncode}")
    return {**read_report(report), "seconds": round(time.monotonic() - started)}


def render_page(rows: dict[str, dict[str, Any]], allowed: float) -> str:
    """Return the page of a record: a table of environments, and the tests that failed."""
    lines = []
    for name, row in rows.items():
        versions = " | ".join(row["versions"].get(package, "–") for package in ("python", *PACKAGES))
        tests = row["tests"]
        results = f"{tests['passed']:,} passed, {tests['skipped']} skipped, {len(tests['failed'])} failed"
        exchange = " | ".join(f"{each:.1e}" for each in row["exchange"].values())
        lines.append(f"| {name} | {versions} | {results} | {exchange} | {row['date']}, {row['commit']} |")
    failed = [f"- {name}: {test}" for name, row in rows.items() for test in row["tests"]["failed"]]
    notes = [f"- {name}: {note}" for name, row in rows.items() for note in row.get("notes", ())]
    return f"""# Versions tried together

Each row is an environment: `make test-newest`, `make test-oldest`, or `make test-with` with versions of your choice.
Its tests use the packages: formulas, kernels interpreted and compiled, exports, lm-evaluation-harness, DeepSpeed's
engine and checkpoints. `make test` runs all tests with the pinned versions of `constraints.txt`. A checkpoint is
written in one environment and read in the other; the losses of the steps that follow differ by at most the fraction in
the columns `written` (there, read with the pinned versions) and `read` (the reverse). Rounding allows {allowed:.1e}.

| environment | Python | {" | ".join(PACKAGES)} | tests | written | read | recorded |
|---|{"---|" * (len(PACKAGES) + 2)}--:|--:|---|
{chr(10).join(lines)}

{chr(10).join(failed + notes) if failed or notes else "Nothing failed."}
"""


def main() -> None:
    """Run the tests, exchange checkpoints and write the record."""
    parser = ToolParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("environment", type=Path, help="folder of the environment")
    parser.add_argument("--name", required=True, help="name of the row in the record")
    parser.add_argument("--json", type=parse_output_path, help="record to add the row to; a page is written next to it")
    arguments = parser.parse_args()
    python = arguments.environment.absolute() / "bin" / "python"
    if not python.exists():
        parser.error(f"{arguments.environment}: {python.relative_to(Path.cwd())} not found; run: make test-newest")

    from tools.tolerances import compute_tolerance, count_gpt_sums

    commit = describe_commit()
    versions = list_versions(python)
    print(", ".join(f"{name} {number}" for name, number in versions.items()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        print("exchanging checkpoints with the pinned versions: six short trainings", flush=True)
        exchange = compare_checkpoints(python, Path(sys.executable), Path(folder))
        print(f"checkpoints: losses differ by at most {max(exchange.values()):.1e}", flush=True)
        tests = run_tests(python, Path(folder))
    allowed = compute_tolerance(*count_gpt_sums(WIDTH, LAYERS))
    row = {"versions": versions, "tests": tests, "exchange": exchange}
    row |= {"date": date.today().isoformat(), "commit": commit}
    if arguments.json is not None:
        record = json.loads(arguments.json.read_text(encoding="utf-8")) if arguments.json.exists() else {"rows": {}}
        rows = {**record["rows"], arguments.name: row}
        write_record(arguments.json, {"allowed": allowed, "rows": rows}, render_page(rows, allowed))
    if tests["failed"] or max(exchange.values()) > allowed:
        sys.exit(1)


if __name__ == "__main__":
    print_interrupts_in_one_line()
    main()
