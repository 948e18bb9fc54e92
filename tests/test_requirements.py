"""Pinned versions satisfy the requirements of the packages themselves, so that pip finds a solution."""

import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megatron.utils.errors import UserError
from megatron.utils.imports import require_package

ROOT = Path(__file__).resolve().parents[1]
FILES = ("requirements.txt", "requirements-dev.txt", "requirements-eval.txt")


def pinned(path: Path) -> dict[str, Requirement]:
    """Return the requirements of a file by name, without included files."""
    lines = [line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    found = [Requirement(line) for line in lines if line and not line.startswith("-r")]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


def test_triton_version_matches_torch() -> None:
    asked = [Requirement(line) for line in requires("torch") or ()]
    of_triton = [r for r in asked if r.name == "triton" and (r.marker is None or r.marker.evaluate())]
    if not of_triton:
        pytest.skip("this build of torch does not require triton (a CPU build)")
    pins = pinned(ROOT / "requirements.txt")
    if not pins["torch"].specifier.contains(version("torch")):
        pytest.skip("this environment has another version of torch than the pinned one")
    (pin,) = {specifier.version for specifier in pins["triton"].specifier}
    assert of_triton[0].specifier.contains(pin)


def test_spills_were_counted_with_the_pinned_triton() -> None:
    """A new pin needs `python -m megatron.kernels.compile` again, and its budgets."""
    source = (ROOT / "megatron/kernels/compile.py").read_text(encoding="utf-8")
    (version,) = (specifier.version for specifier in pinned(ROOT / "requirements.txt")["triton"].specifier)
    assert f'\nBUDGETED_TRITON = "{version}"\n' in source


@pytest.mark.parametrize("file", FILES)
def test_every_requirement_is_bounded(file: str) -> None:
    """Every requirement has an upper bound, so that new releases of other projects are not installed silently."""
    for name, requirement in pinned(ROOT / file).items():
        assert any(specifier.operator in ("==", "<", "<=", "~=") for specifier in requirement.specifier), name


def test_images_install_the_required_versions() -> None:
    """constraints.txt has an allowed version for each requirement."""
    exact = pinned(ROOT / "constraints.txt")
    for file in FILES:
        for name, requirement in pinned(ROOT / file).items():
            (specifier,) = exact[name].specifier
            assert specifier.operator == "=="
            assert requirement.specifier.contains(specifier.version), name


def test_images_install_only_pinned_versions() -> None:
    """constraints.txt also covers the dependencies of all requirements that are installed in the pinned version."""
    exact = pinned(ROOT / "constraints.txt")
    asked = [requirement for file in FILES for requirement in pinned(ROOT / file).values()]
    seen: set[str] = set()
    while asked:
        requirement = asked.pop()
        name = canonicalize_name(requirement.name)
        if name in seen or name.startswith(("nvidia-", "cuda-")):  # a CUDA build of torch asks for those itself
            continue
        seen.add(name)
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue
        assert name in exact, name
        if exact[name].specifier.contains(installed.version):
            further = [Requirement(line) for line in installed.requires or ()]
            asked += [each for each in further if each.marker is None or each.marker.evaluate({"extra": ""})]
    assert len(seen) > 100


def test_uv_does_not_replace_the_pinned_versions(tmp_path: Path) -> None:
    """uv would resolve a project that it manages by itself, without constraints.txt."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    assert tomllib.loads((tmp_path / "pyproject.toml").read_text())["tool"]["uv"] == {"managed": False}
    if (uv := shutil.which("uv")) is None:
        return
    for command in ("sync", "lock"):
        done = subprocess.run([uv, command, "--offline"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 2
        assert "The project is marked as unmanaged" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["pyproject.toml"]


def test_other_versions_are_installed_for_every_requirement() -> None:
    """`make test-with` upgrades all requirements, and no other package; the versions that it is given come last."""
    command = ["make", "--dry-run", "test-with", "VERSIONS=torch==2.11.0 transformers==4.57.6"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (installed,) = (line for line in printed.splitlines() if "--upgrade-strategy" in line)
    words = installed.partition("--upgrade-strategy eager ")[2].partition(" && ")[0].split()
    assert words[-2:] == ["torch==2.11.0", "transformers==4.57.6"]
    assert {canonicalize_name(name) for name in words[:-2]} == {name for file in FILES for name in pinned(ROOT / file)}


def test_a_missing_package_is_reported_in_one_line() -> None:
    require_package("pytest", "this test")
    with pytest.raises(
        UserError, match=r"^--tasks needs the package lm_evil, .*: pip install -r requirements-eval\.txt$"
    ):
        require_package("lm_evil", "--tasks")


@pytest.mark.parametrize(
    ("version", "hidden", "message"),
    [
        ("(3, 10)", "", "error: Farfield needs Python 3.11 to 3.14; set PYTHON="),
        ("(3, 15)", "", "error: Farfield needs Python 3.11 to 3.14; set PYTHON="),
        (
            "(3, 14)",
            "import shutil; shutil.which = lambda name: None; ",
            "error: megatron-core is compiled on Python 3.14: install g++ and Python's headers",
        ),
        ("(3, 13)", "sys.modules['ensurepip'] = None; ", "error: {python} has no ensurepip, which Debian and Ubuntu"),
    ],
)
def test_make_refuses_a_python_that_pip_would_fail_on(version: str, hidden: str, message: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\nimport sys; {hidden}sys.version_info = (*{version}, 0, 'final', 0); exec(sys.argv[2])\n"
    )
    python.chmod(0o755)
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("requirements.txt", "constraints.txt"):
        (tmp_path / name).touch()
    made = subprocess.run(["make", "setup", f"PYTHON={python}"], cwd=tmp_path, capture_output=True, text=True)
    assert made.returncode == 2
    assert made.stderr.startswith(message.format(python=python))
    assert not (tmp_path / ".venv").exists()


def test_make_keeps_an_environment_that_is_complete(tmp_path: Path) -> None:
    """Files of a clone are newer than an environment that it links to. A stand-in for its Python records the calls."""
    (tmp_path / "shared" / "bin").mkdir(parents=True)
    python = tmp_path / "shared" / "bin" / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexit 0\n')
    python.chmod(0o755)
    (tmp_path / ".venv").symlink_to(tmp_path / "shared")
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("requirements.txt", "requirements-dev.txt", "requirements-eval.txt", "constraints.txt"):
        (tmp_path / name).touch()
    for name in (".runtime", ".dev"):
        (tmp_path / "shared" / name).touch()
        os.utime(tmp_path / "shared" / name, (0, 0))
    made = subprocess.run(
        ["make", "--no-print-directory", "setup-dev", f"PYTHON={sys.executable}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (made.returncode, made.stdout) == (0, ""), made.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 2
    assert all("--no-index" in call for call in calls)
    assert (tmp_path / ".venv").is_symlink()
