#!/usr/bin/env python3
"""Run the notebooks of docs/notebooks/ and keep what they show: `.venv/bin/python tools/notebooks/run_notebooks.py`.

Each is run in an empty folder of its own, with the project importable, by a kernel of this environment.
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
"""Of a cell."""


def run_notebook(path: Path, folder: Path, replacements: Mapping[str, str] | None = None) -> NotebookNode:
    """The notebook with the outputs of a run; progress bars, warnings and the machine's paths are left out.

    Args:
        path: the notebook.
        folder: where it is run.
        replacements: texts in its cells, each with the shorter one that stands in for it, so that a test takes less
            time.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
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
    parser.add_argument("notebooks", nargs="*", type=Path, help="all of docs/notebooks/ if none is named")
    for path in parser.parse_args().notebooks or sorted(NOTEBOOKS.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(run_notebook(path, Path(folder)), path)
        print(f"{path.name}: run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
