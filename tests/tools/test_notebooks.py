"""Notebooks of docs/notebooks/ run completely in an empty folder."""

import ast
import json
import shutil
from pathlib import Path

import forked
import nbformat
import pytest

import farfield
from tools.notebooks.run_notebooks import NOTEBOOKS

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
REPLACEMENTS = {
    '"train_iters": 300,': '"train_iters": 20,',
    '"checkpoint_factor": 300,': '"checkpoint_factor": 20,',
    "text[:6144]": "text[:2048]",
    "score(text, 512)": "score(text[:2048], 512)",
    # Drawing all pictures takes most of a notebook's time; tests/evaluation/analysis/test_run.py draws them.
    "lengths=[64, 128], windows=1": 'lengths=[64, 128], windows=1, only=["attention_entropy", "kernels"]',
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corpus that all notebooks prepare, prepared here for all."""
    return farfield.prepare("python", output=tmp_path_factory.mktemp("corpus") / "data", quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, corpus: Path) -> None:
    """Outputs of each cell have the same kinds as in the stored notebook, after a few training steps."""
    shutil.copytree(corpus, tmp_path / "data")
    # In a fork, so that its kernel and trainings are forks too.
    out, script = tmp_path / "run.ipynb", Path(forked.__file__).with_name("run_notebook.py")
    done = forked.run(script, str(path), str(tmp_path), json.dumps(REPLACEMENTS), str(out), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    notebook = nbformat.read(out, as_version=4)
    for cell, stored in zip(notebook.cells, nbformat.read(path, as_version=4).cells, strict=True):
        shown, kept = (
            [(output.output_type, sorted(output.get("data", {}))) for output in book.get("outputs", [])]
            for book in (cell, stored)
        )
        assert shown == kept, cell.source


def test_every_replacement_replaces_something() -> None:
    sources = "".join(cell.source for path in PATHS for cell in nbformat.read(path, as_version=4).cells)
    assert all(text in sources for text in REPLACEMENTS)
    assert sources.count('"train_iters"') == sources.count('"train_iters": 300,')


def test_cells_can_be_repeated() -> None:
    """`train` rejects a folder with checkpoints unless `load` names it, so every training names its own folder."""
    trained = 0
    for path in PATHS:
        cells = nbformat.read(path, as_version=4).cells
        for cell in (cell for cell in cells if cell.cell_type == "code" and not cell.source.startswith("%%")):
            calls = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Call)]
            for call in (call for call in calls if ast.unparse(call.func) == "farfield.train"):
                folders = {word.arg: ast.unparse(word.value) for word in call.keywords if word.arg in ("save", "load")}
                assert folders.get("load") == folders["save"], path.name
                trained += 1
    assert trained >= len(PATHS)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_with_its_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run in order, once"
    assert any(cell.outputs for cell in code)
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)
    assert path.stat().st_size < 600_000
