"""An installed wheel is the whole project: the command, the configurations, and what child processes need."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from farfield.namespace import describe_foreign_megatron

ROOT = Path(__file__).resolve().parents[1]
FILES = (
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
    "CITATION.cff",
    "requirements.txt",
    "requirements-eval.txt",
)
CORE = Path(sysconfig.get_path("purelib")).resolve() / "megatron"
FOLDERS = ("farfield", "megatron", "configs")
TINY = (
    "num_layers=1", "hidden_size=32", "num_attention_heads=2", "seq_length=16", "train_batch_size=2", "train_iters=2",
    "warmup=0", "device=cpu", "eval_interval=2", "eval_iters=1",
)  # fmt: skip


def build(tmp_path: Path, hook: str) -> Path:
    """Build a wheel of the tracked files by a hook of setuptools, without a network, and return it."""
    source = tmp_path / "source"
    source.mkdir()
    for path in (*(ROOT / name for name in FILES), *ROOT.glob("requirements*.txt")):
        shutil.copy(path, source)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = f"from setuptools import build_meta; build_meta.{hook}({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", command], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    return wheel


def test_an_editable_installation_puts_the_project_on_the_path(tmp_path: Path) -> None:
    with zipfile.ZipFile(build(tmp_path, "build_editable")) as files:
        (paths,) = (files.read(name).decode().split() for name in files.namelist() if name.endswith(".pth"))
    assert paths == [str(tmp_path / "source")]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of programs of an environment with the wheel, and with the packages of this one."""
    folder = tmp_path_factory.mktemp("installation")
    wheel = build(folder, "build_wheel")
    venv.create(folder / "venv", symlinks=True)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    with zipfile.ZipFile(wheel) as files:
        files.extractall(packages)
    shutil.rmtree(folder / "source")
    return folder / "venv" / "bin"


def run(installed: Path, *words: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    return subprocess.run(
        [installed / "python", "-P", "-m", "farfield", *words],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.slow
def test_an_installed_project_prepares_and_trains(installed: Path, tmp_path: Path) -> None:
    """Training reads shipped configurations, and its rank is another process."""
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text(f"text {number} of a few words, again and again. " * 40)
    done = run(installed, "prepare", "text", "--output", "corpus", "--tokenizer", "bytes", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    data = [f"{name}_data_paths=[corpus/{name}_text_document]" for name in ("train", "valid")]
    done = run(installed, "train", "cdape_kerple_log", *TINY, *data, "save=run", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "checkpoints" / "step_0000002").is_dir()


def test_an_installed_project_knows_its_files(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "cli.py").write_text("raise SystemExit('imported from the current folder')")
    done = run(installed, "plan", "125M", "cdape_kerple_log", "a100_2k", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "keys of the first layout" in done.stdout
    for words in (("--help",), ("train", "--help"), ("train", "125M", "xyz=3")):
        done = run(installed, *words, folder=tmp_path)
        assert done.returncode == (2 if "xyz=3" in words else 0)
        assert "farfield " in done.stdout + done.stderr
        assert "deepy.py" not in done.stdout + done.stderr
    code = (
        "from megatron.reports.html_page import read_citation; from megatron.utils import project; "
        "print(read_citation()['title'], project.get_farfield_version(), project.IS_CHECKOUT)"
    )
    reported = subprocess.run(
        [installed / "python", "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout  # fmt: skip
    assert reported.split()[-2:] == ["0.1.0", "False"]


@pytest.mark.parametrize("kind", ["Megatron-LM", "regular package"])
def test_another_projects_megatron_is_rejected(kind: str, installed: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "megatron"
    (other / "training").mkdir(parents=True)
    if kind == "regular package":
        (other / "__init__.py").touch()
    done = run(installed, "--version", folder=tmp_path, PYTHONPATH=str(other.parent))
    assert done.returncode == 2
    hidden = f"{other} hides Farfield's package `megatron`; remove its parent from PYTHONPATH, or uninstall it\n"
    assert done.stderr == f"error: {hidden}"
    command = [installed / "python", "-P", "-c", "import farfield; farfield.load"]
    environment = os.environ | {"PYTHONPATH": str(other.parent)}
    imported = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert imported.stderr.endswith(f"ImportError: {hidden}")


@pytest.mark.parametrize(
    ("files", "hidden"),
    [
        (("training/global_vars.py",), None),
        (("training/global_vars.py", "core/__init__.py"), f"`megatron.core` of {CORE}"),
        (("__init__.py",), "Farfield's package `megatron`"),
    ],
)
def test_a_checkout_beside_megatron_lm_is_right_or_rejected(
    files: tuple[str, ...], hidden: str | None, tmp_path: Path
) -> None:
    """A checkout's own modules come first, but not before a regular package, and megatron-core is the installed one."""
    other = tmp_path / "megatron"
    for name in files:
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        (other / name).touch()
    done = subprocess.run(
        [sys.executable, ROOT / "deepy.py", "keys", "seq_length"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == (0 if hidden is None else 2), done.stderr
    if hidden is not None:
        assert done.stderr == (f"error: {other} hides {hidden}; remove its parent from PYTHONPATH, or uninstall it\n")


def test_nothing_is_hidden_here() -> None:
    assert describe_foreign_megatron() is None
