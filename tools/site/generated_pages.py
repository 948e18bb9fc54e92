"""Pages and files that the site adds to docs/, and their navigation."""

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.site import api_pages, command_pages, key_pages, method_pages, notebook_pages
from tools.site.links import LinkRewriter
from tools.site.markdown import make_anchor, read_title

ASSETS = Path("tools/site/assets")

RESULTS: dict[str, dict[str, str]] = {
    "Methods compared": {
        "zoo": "The leaderboard",
        "zoo_3m": "The leaderboard's second tier, 3.3M parameters",
        "zoo_text": "The leaderboard's text, trained longer",
        "agreement": "The leaderboard's order at other budgets",
        "small": "Small versions of the papers' tables",
        "context": "Use of context beyond the training length",
        "tasks": "Tasks from scratch",
        "drope": "DroPE",
        "recipe": "CDAPE added to a trained model",
        "muon": "Muon and Lion compared with AdamW",
        "mup_coordinates": "muP: activations over width",
        "document_distances": "Document masking: distances",
        "document_perplexity": "Document masking: perplexity",
    },
    "Comparisons with other code": {
        "methods": "Methods compared with published code",
        "export": "Exports compared with transformers",
        "export_versions": "Exports with versions of transformers",
        "stock_configs": "Other projects' configurations",
        "parity": "Layouts of 2 and 4 ranks",
        "parity_8": "Layouts of 8 ranks",
        "resume": "Resuming in another layout",
    },
    "Installation": {
        "versions": "Versions tried together",
        "bare_roots": "Bare systems",
    },
    "Time and memory": {
        "bench_cdape_cpu": "CDAPE on an Intel Xeon",
        "bench_cdape_cpu_epyc": "CDAPE on an AMD EPYC",
        "host_time": "Host time of a training step",
        "host_time_compiled": "Host time, compared with a compiled GPT",
        "host_time_graphs": "Host time with CUDA graphs",
        "save": "Cost of a checkpoint",
        "context_memory": "Memory saved by context parallelism",
        "planner_memory": "Planned memory",
    },
    "GPUs": {
        "gpu_check": "The first check on a GPU",
        "gpu_visit": "Profile of training steps on an H200",
        "gpu_methods": "Backends on a GPU",
        "cuda_matrix": "CUDA features on the null device",
        "rehearsals": "Rehearsals of configurations",
    },
}
"""Navigation of the pages of docs/results/: groups of short titles, by file stem."""


class GeneratedPages:
    """Files that the site adds to docs/.

    Attributes:
        contents: text or bytes by path in the site's docs/.
        sources: pages that show another file of the repository: about.md → README.md.
        folders: pages of a folder as navigation entries, which replace `folder/` in mkdocs.yml.
        moved: files of docs/ that the site renames: an HTML page whose name would collide with a Markdown page.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.contents: dict[str, str | bytes] = {}
        self.sources: dict[str, str] = {}
        self.folders: dict[str, list[Any]] = {}
        self.moved: list[str] = []
        self._show_files()
        configuration = (root / "docs" / key_pages.PAGE).read_text(encoding="utf-8")
        self._add(api_pages.FOLDER, api_pages.write_api_pages(root))
        self._add(command_pages.FOLDER, command_pages.write_command_pages())
        self._add(key_pages.FOLDER, key_pages.write_key_pages(configuration))
        self.folders[notebook_pages.FOLDER] = [
            {title: page} for page, title in notebook_pages.list_notebooks(root).items()
        ]
        methods = method_pages.write_method_pages(root)
        self._add(method_pages.FOLDER, methods)
        self.sources |= {page: f"docs/{page}" for page in methods}
        self.folders[method_pages.FOLDER] = [
            {kind: [{Path(page).stem: page} for page in pages]}
            for kind, pages in method_pages.list_pages_by_kind(methods).items()
        ]
        self.folders["results"] = self._group_results()
        for path in sorted((root / ASSETS).iterdir()):
            self.contents[f"assets/{path.name}"] = path.read_bytes()
        for path in sorted((root / "docs").rglob("*.html")):
            if path.with_suffix(".md").exists():
                file = path.relative_to(root / "docs")
                page = file.with_stem(f"{path.stem}_page").as_posix()
                self.contents[page] = self._link_back(path.read_text(encoding="utf-8"), page)
                self.sources[page] = path.relative_to(root).as_posix()
                self.moved.append(file.as_posix())

    def _group_results(self) -> list[Any]:
        """Return the pages of docs/results/ by group; pages without a group come last."""
        paths = {path.stem: path for path in sorted((self.root / "docs/results").glob("*.md")) if path.stem != "README"}
        groups: list[Any] = []
        for group, titles in RESULTS.items():
            there = {stem: paths.pop(stem) for stem in titles if stem in paths}
            groups.append({group: [{titles[stem]: f"results/{path.name}"} for stem, path in there.items()]})
        others = {stem: read_title(path.read_text(encoding="utf-8"), stem) for stem, path in paths.items()}
        return groups + [{title: f"results/{stem}.md"} for stem, title in others.items()]

    @staticmethod
    def _link_back(html: str, page: str) -> str:
        """Add a link to the site's home page above an HTML page that is not generated from Markdown."""
        path = posixpath.relpath("index.html", posixpath.dirname(page) or ".")
        link = f'<p><a href="{path}">The documentation of Farfield</a></p>'
        return html.replace("<body>", f"<body>\n{link}", 1)

    def _show_files(self) -> None:
        readmes = {
            f"kernels/{path.parent.name}.md": path for path in sorted(self.root.glob("megatron/kernels/*/README.md"))
        }
        shown = {"about.md": self.root / "README.md", "contributing.md": self.root / "CONTRIBUTING.md", **readmes}
        for page, path in shown.items():
            self.contents[page] = path.read_text(encoding="utf-8")
            self.sources[page] = path.relative_to(self.root).as_posix()
        links = [{read_title(path.read_text(encoding="utf-8"), page): page} for page, path in readmes.items()]
        self.folders["kernels"] = links
        lines = [f"- [{title}]({Path(page).name})" for link in links for title, page in link.items()]
        self.contents["kernels/index.md"] = "# Kernels\n\n" + "\n".join(lines) + "\n"
        self.folders["kernels"] = ["kernels/index.md", *links]

    def _add(self, folder: str, pages: Mapping[str, str | bytes]) -> None:
        self.contents |= pages
        texts = {path: text for path, text in pages.items() if path.endswith(".md") and isinstance(text, str)}
        index = f"{folder}/index.md"
        self.folders[folder] = [
            path if path == index else {read_title(text, Path(path).stem).strip("`"): path}
            for path, text in texts.items()
        ]

    def add_notebooks(self) -> None:
        """Add the pages of notebooks and their pictures, which need an additional package."""
        self.contents |= notebook_pages.write_notebook_pages(self.root)

    def expand_navigation(self, entries: list[Any]) -> list[Any]:
        """Replace `folder/` in the navigation of mkdocs.yml by the folder's pages, and remove empty sections."""
        expanded: list[Any] = []
        for entry in entries:
            ((title, value),) = entry.items() if isinstance(entry, dict) else ((None, entry),)
            if isinstance(value, list):
                value = self.expand_navigation(value)
            elif value.endswith("/"):
                value = self.folders[value.rstrip("/")]
            if value and title is None:
                expanded += value if isinstance(value, list) else [value]
            elif value:
                expanded.append({title: value})
        return expanded


def build_link_rewriter(generated: GeneratedPages, repository_url: str) -> LinkRewriter:
    """Build the link rewriter of the site. A folder is shown by its README's page or by the list of its pages.

    Args:
        generated: pages that docs/ does not contain.
        repository_url: URL of the repository's files, …/blob/main; empty if it is not published.
    """
    pages = {source: page for page, source in generated.sources.items()}
    pages |= {posixpath.dirname(path): page for path, page in pages.items() if path.endswith("/README.md")}
    neox_page = key_pages.OTHER_PAGES[key_pages.NEOX_HEADING]
    headings = re.findall(r"^## (.+)$", str(generated.contents[neox_page]), flags=re.MULTILINE)
    moved = {f"{key_pages.PAGE}#{make_anchor(heading)}": neox_page for heading in headings}
    return LinkRewriter(generated.root, {**pages, "megatron/kernels": "kernels/index.md"}, repository_url, moved)
