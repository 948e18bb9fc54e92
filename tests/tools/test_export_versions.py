"""Checks of exports with several versions of transformers: installation and report."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

from tools.export.versions import list_failures, list_missing_requirements, read_report, render_page


def write_package(folder: Path, name: str, number: str, requires: tuple[str, ...] = ()) -> None:
    info = folder / f"{name}-{number}.dist-info"
    info.mkdir(parents=True)
    lines = [f"Name: {name}", f"Version: {number}", *(f"Requires-Dist: {each}" for each in requires)]
    (info / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")


def test_only_missing_versions_are_installed(tmp_path: Path) -> None:
    needs = (f"numpy>={version('numpy')}", "tokenizers<0.1", "huggingface-hub<0.2", 'nothing; extra == "torch"')
    write_package(tmp_path, "transformers", "4.0", needs)
    assert [each.name for each in list_missing_requirements(tmp_path)] == ["tokenizers", "huggingface-hub"]
    write_package(tmp_path, "huggingface_hub", "0.1")
    assert [each.name for each in list_missing_requirements(tmp_path)] == ["tokenizers"]


def test_the_page_names_what_failed(tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.a" name="x"/><testcase classname="tests.a" name="y">'
        '<failure/></testcase><testcase classname="tests.a" name="z"><skipped/></testcase></testsuite></testsuites>'
    )
    tests = read_report(report)
    assert tests == {"passed": 1, "skipped": 1, "failed": ["a::y"]}
    row: dict[str, Any] = {"transformers": "5.0", "packages": {"torch": "2"}, "exports": 3, "largest": 1e-6}
    row |= {"beyond_rounding": [], "tests": tests}
    stamp = {"versions": {}, "date": "", "command": "", "commit": "", "machine": ""}
    page = render_page({"stamp": stamp, "allowed": 1e-5, "rows": [row]})
    assert "| 5.0 | torch 2 | 3 | 1.0e-06 | 1 passed, 1 skipped, 1 failed |" in page
    assert "- 5.0: a::y" in page
    assert list_failures(row) == ["a::y"]
