"""Pages of the notebooks in docs/notebooks/, with their saved outputs; nothing is executed."""

import json
from pathlib import Path

from tools.site.markdown import read_title

FOLDER = "notebooks"


def list_notebooks(root: Path) -> dict[str, str]:
    """Return the notebooks' pages as paths in the site's docs/, with their titles.

    Args:
        root: repository folder.
    """
    pages = {}
    for path in sorted((root / "docs" / FOLDER).glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        pages[f"{FOLDER}/{path.stem}.md"] = read_title(text, path.stem.replace("_", " "))
    return pages


def write_notebook_pages(root: Path) -> dict[str, str | bytes]:
    """Return the pages and their pictures by path in the site's docs/. Requires nbconvert if there is a notebook."""
    written: dict[str, str | bytes] = {}
    for page in list_notebooks(root):
        from nbconvert import MarkdownExporter

        name = Path(page).stem
        text, resources = MarkdownExporter().from_filename(
            str(root / "docs" / FOLDER / f"{name}.ipynb"),
            resources={"output_files_dir": f"{name}_pictures", "unique_key": "output"},
        )
        written[page] = text
        written |= {f"{FOLDER}/{path}": picture for path, picture in resources["outputs"].items()}
    return written
