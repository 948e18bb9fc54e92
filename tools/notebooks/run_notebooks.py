#!/usr/bin/env python3
"""Run the notebooks of docs/notebooks/ and save their outputs: `.venv/bin/python tools/notebooks/run_notebooks.py`.

Each notebook runs in its own empty folder with a kernel of this environment that can import the project.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "docs" / "notebooks"
TIMEOUT_SECONDS = 600
"""Time limit of a cell, in seconds."""


def run_notebook(path: Path, folder: Path, replacements: Mapping[str, str] | None = None) -> NotebookNode:
    """Run a notebook and return it with its outputs, without progress bars, warnings and local paths.

    Args:
        path: path of the notebook.
        folder: working folder.
        replacements: texts in its cells and their replacements, with which tests shorten the run.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    sources = [cell.source for cell in notebook.cells]
    for text, shorter in (replacements or {}).items():
        for cell in notebook.cells:
            cell.source = cell.source.replace(text, shorter)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    client = NotebookClient(notebook, timeout=TIMEOUT_SECONDS, kernel_name="python3")
    client.execute(cwd=str(folder), env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    for cell, source in zip(notebook.cells, sources, strict=True):
        cell.metadata, cell.source = NotebookNode(), source
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                if "text" in output:
                    output.text = output.text.replace(str(folder), "…")
    return notebook


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("notebooks", nargs="*", type=Path, help="notebooks to run; by default all of docs/notebooks/")
    for path in parser.parse_args().notebooks or sorted(NOTEBOOKS.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(run_notebook(path, Path(folder)), path)
        print(f"{path.name}: run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
