"""Check exports with each supported version of transformers, and write one record.

    python tools/export/versions.py --json docs/results/export_versions.json
    python tools/export/versions.py --versions 5.25.0 --packages ~/transformers     a newer one, kept for next time

pip installs each version into its own folder, with other versions of its dependencies if the environment's do not
match. Each version reads every export of the matrix (`compare.py`) and runs the tests of caches, decoding, packed
documents, training and refreshed code. The exit code is 1 if anything differs or fails.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from tools.arguments import ToolParser, parse_output_path, print_interrupts_in_one_line  # noqa: E402

if __name__ == "__main__":
    print_interrupts_in_one_line()

from packaging.requirements import Requirement  # noqa: E402

VERSIONS = ("4.57.6", "5.23.0", "5.24.0")
TESTS = tuple(
    f"tests/conversion/{name}.py"
    for name in ("test_caches", "test_packed_documents", "test_transformers", "test_refresh_export", "test_tokenizer")
)


def install_version(wanted: str, folder: Path) -> None:
    """Install a version of transformers into a folder, with dependencies that need another version.

    Raises:
        SystemExit: if pip fails.
    """
    if find_distribution("transformers", folder) is None:
        run_pip([f"transformers=={wanted}"], folder)
    if missing := [str(each) for each in list_missing_requirements(folder)]:
        run_pip(missing, folder)


def run_pip(requirements: list[str], folder: Path) -> None:
    """Install exactly these requirements. Raises SystemExit if pip fails."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(folder),
        *requirements,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: pip cannot install {', '.join(requirements)}: {done.stderr.strip()[-500:]}")


def find_distribution(name: str, folder: Path) -> Distribution | None:
    """Return a package installed in a folder, or None."""
    return next((each for each in distributions(path=[str(folder)]) if each.metadata["Name"] == name), None)


def list_missing_requirements(folder: Path) -> Iterator[Requirement]:
    """Yield the requirements of the folder's transformers that neither the folder nor this environment satisfies."""
    package = find_distribution("transformers", folder)
    assert package is not None
    for requirement in map(Requirement, package.requires or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        own = find_distribution(requirement.name.replace("-", "_"), folder)
        own = own or find_distribution(requirement.name, folder)
        try:
            found = version(requirement.name) if own is None else own.version
        except PackageNotFoundError:
            found = None
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            yield requirement


def run_tests(packages: Path, folder: Path) -> dict[str, Any]:
    """Run the tests with a folder's packages.

    Return the counts of passed and skipped tests, and the names of failed ones.
    """
    report = folder / "tests.xml"
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *TESTS]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{packages}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(f"error: the tests cannot be run: {done.stdout[-2000:]}")
    return read_report(report)


def read_report(report: Path) -> dict[str, Any]:
    """Return the counts of a JUnit report, and the names of failed tests."""
    found: dict[str, Any] = {"passed": 0, "skipped": 0, "failed": []}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            found["failed"].append(f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}")
        else:
            found["passed" if case.find("skipped") is None else "skipped"] += 1
    return found


def render_page(record: dict[str, Any]) -> str:
    from tools.records import format_provenance

    lines = []
    for row in record["rows"]:
        packages = ", ".join(f"{name} {number}" for name, number in row["packages"].items())
        tests = (
            f"{row['tests']['passed']} passed, {row['tests']['skipped']} skipped, {len(row['tests']['failed'])} failed"
        )
        lines.append(f"| {row['transformers']} | {packages} | {row['exports']} | {row['largest']:.1e} | {tests} |")
    failures = [f"- {row['transformers']}: {name}" for row in record["rows"] for name in list_failures(row)]
    return f"""# Exports with each version of transformers

Each version reads every export of the [matrix](export.md) and runs the tests of caches, decoding modes, packed
documents, training and refreshed code.
The difference is the largest of any logit from this project's, relative to the largest logit; rounding allows
{record["allowed"]:.1e}.

| transformers | with | exports | difference | tests |
|---|---|--:|--:|---|
{chr(10).join(lines)}

{chr(10).join(failures) if failures else "Nothing failed."}

{format_provenance(record["stamp"])}
"""


def list_failures(row: dict[str, Any]) -> list[str]:
    """List the exports and tests that fail with a version."""
    return [*row["beyond_rounding"], *row["tests"]["failed"]]


def main() -> None:
    """Install the versions, read the exports, run the tests and write the record."""
    parser = ToolParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--json", type=parse_output_path, help="output file of the record; its page is written next to it"
    )
    parser.add_argument("--versions", nargs="+", default=VERSIONS, metavar="VERSION", help=f"{', '.join(VERSIONS)}")
    parser.add_argument("--packages", type=Path, help="folder for the installed versions; by default temporary")
    arguments = parser.parse_args()

    from tools.export.cases import compute_export_tolerance
    from tools.export.compare import list_cases, read_exports, select_beyond_rounding, write_exports
    from tools.records import collect_provenance, write_record

    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        places = write_exports(list_cases(), folder)
        for wanted in arguments.versions:
            packages = (arguments.packages or folder / "packages").resolve() / wanted
            install_version(wanted, packages)
            found = read_exports(places, folder, packages=packages)
            row = {
                "transformers": wanted,
                "packages": {
                    package: (find_distribution(package, packages) or Distribution.from_name(package)).version
                    for package in ("huggingface_hub", "tokenizers", "torch")
                },
                "exports": len(found),
                "largest": max(max(apart.values()) for apart in found.values()),
                "beyond_rounding": list(select_beyond_rounding(found)),
                "tests": run_tests(packages, folder),
            }
            rows.append(row)
            print(f"transformers {wanted}: {len(found)} exports, {row['tests']['passed']} tests passed", flush=True)
            for failure in list_failures(row):
                print(f"  failed: {failure}")
    record = {"stamp": collect_provenance(__file__, "cpu"), "allowed": compute_export_tolerance(), "rows": rows}
    if arguments.json is not None:
        write_record(arguments.json, record, render_page(record))
    if any(map(list_failures, rows)):
        sys.exit(1)


if __name__ == "__main__":
    main()
