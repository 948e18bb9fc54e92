"""Run a notebook: `run_notebook.py NOTEBOOK FOLDER REPLACEMENTS OUT`, with replacements as JSON."""

import json
import sys
from pathlib import Path

import nbformat

from tools.notebooks.run_notebooks import run_notebook

if __name__ == "__main__":
    notebook, folder, replacements, out = sys.argv[1:]
    nbformat.write(run_notebook(Path(notebook), Path(folder), json.loads(replacements)), out)
