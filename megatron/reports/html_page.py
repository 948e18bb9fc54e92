"""Common parts of our HTML pages: self-contained files for all screen widths, with a box on how to reproduce them.

Pages are jinja2 templates that extend `templates/page.html`. Templates receive text, and jinja2 escapes it. Tables are
data here and markup in `templates/macros.html`. Row names stay visible on the left while a table scrolls.
`templates/page.js` makes tables sortable and charts interactive; pages are complete without it.

The project's citation is `CITATION.cff`, which GitHub and reference managers read. BibTeX is generated from it, so that
both agree. The paper of a method is the `source` declared in its file (`megatron/position/catalog.py`).
"""

import base64
import gzip
import json
import re
import shlex
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from megatron.position.catalog import (
    MethodFileError,
    list_encodings,
    list_processors,
    list_temperatures,
    read_encoding_facts,
    read_processor_facts,
    read_temperature_facts,
)
from megatron.utils.formatting import escape_latex
from megatron.utils.project import CITATION_FILE, IS_CHECKOUT, PACKAGES_FOLDER, PROGRAM, get_farfield_version

TEMPLATES_FOLDER = Path(__file__).parent / "templates"
_PAGE_MARKERS = (
    b'<meta name="generator" content="Farfield">',
    b":root { color-scheme: light; }\n* { box-sizing: border-box; }\n",
)
"""Markers in the head of every page, of this version and earlier ones."""


@cache
def build_environment(folder: Path) -> jinja2.Environment:
    """Build the jinja2 environment for templates in a folder.

    They may extend and import each other and the shared ones.

    Environments and compiled templates are cached, because compiling a template takes longer than rendering it.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, TEMPLATES_FOLDER]),
        autoescape=jinja2.select_autoescape(["html"], default=False),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"embed_json": embed_json, "share": format_fraction}
    return environment


def format_fraction(share: float) -> str:
    """Format a fraction as a percentage for SVG attributes."""
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"


def embed_json(value: Any) -> markupsafe.Markup:
    """Return JSON that is safe inside a script element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return markupsafe.Markup(text.replace("<", "\\u003c"))


@dataclass(frozen=True)
class Download:
    """Compressed file embedded in a page for download."""

    name: str
    text: str
    description: str
    """Description of its contents."""

    @property
    def href(self) -> str:
        """File as a data: URI. The page's script decompresses it; without scripts it is saved as NAME.gz."""
        packed = gzip.compress(self.text.encode("utf-8"), mtime=0)
        return f"data:application/gzip;base64,{base64.b64encode(packed).decode('ascii')}"


def render_template(template: Path, **context: Any) -> str:
    """Render a template.

    Args:
        template: path of the template. Text is escaped if the name ends in .html.
        context: variables of the template; an undefined variable is an error.
    """
    return build_environment(template.parent).get_template(template.name).render(context)


def is_generated_page(path: Path) -> bool:
    """Return True if a file is one of our pages, of this version or an earlier one."""
    if not path.is_file():
        return False
    head = path.read_bytes()[:4096]
    return any(marker in head for marker in _PAGE_MARKERS)


@dataclass(frozen=True)
class HtmlPicture:
    """Picture in two versions; screens up to 40rem wide show the narrow one."""

    wide: str
    """PNG as base64."""
    narrow: str
    alt_text: str
    """Description for screen readers."""


def encode_picture(draw_png: Callable[[bool], bytes], alt_text: str) -> HtmlPicture:
    """Draw a picture for a page.

    Args:
        draw_png: function that returns the PNG; its argument is True for the narrow version.
        alt_text: description in words.
    """
    wide, narrow = (base64.b64encode(draw_png(is_narrow)).decode("ascii") for is_narrow in (False, True))
    return HtmlPicture(wide, narrow, alt_text)


@dataclass(frozen=True)
class HtmlColumn:
    header: str
    subheader: str = ""
    """Small print below the header."""
    css_class: str = ""
    """CSS class of its cells; cells of class "text" are left-aligned."""

    @property
    def is_text(self) -> bool:
        return "text" in self.css_class.split()


@dataclass(frozen=True)
class HtmlCell:
    text: str
    note: str | None = None
    """Small print below the text."""
    css_class: str = ""
    """CSS class of the cell, in addition to its column's."""


@dataclass(frozen=True)
class HtmlTable:
    """Data of the macro `table`."""

    corner_header: str
    """Header of the row names."""
    columns: Sequence[HtmlColumn]
    rows: Sequence[tuple[HtmlCell, Sequence[HtmlCell]]]
    """Name and cells of each row."""
    css_class: str = ""
    caption: str = ""
    """Caption, a phrase or a sentence."""
    notes: Sequence[str] = ()
    """Notes on how to read the table, one sentence each."""
    lead: Sequence[str] = ()
    """Sentences above the table."""


_BIBTEX_TYPES = {"article": "article", "conference-paper": "inproceedings", "software": "software"}


@dataclass(frozen=True)
class Reproduction:
    """Contents of a page's reproduction box."""

    commands: tuple[str, ...]
    """Shell commands, in order."""
    version: str
    """Version of this project that made the page."""
    papers: Mapping[str, str]
    """Encoding, processor, or temperature → paper, for all components of the methods."""
    bibtex: str


def describe_reproduction(positions: Sequence[str], command: str | None = None) -> Reproduction:
    """Describe how to cite and reproduce a page.

    Args:
        positions: names of the page's methods, which include those of encodings, processors, and temperatures.
        command: command that made the page, or None if a program did.
    """
    commit = read_commit()
    checkout = None if commit is None else f"git checkout {commit.rstrip('+')}"
    return Reproduction(
        tuple(filter(None, (checkout, command))),
        _describe_version(commit),
        list_papers(positions),
        render_bibtex(read_citation()) if CITATION_FILE.is_file() else "",
    )


def format_command() -> str | None:
    """Return the command line of this process, or None if it is not one of the project's commands."""
    program, *arguments = sys.argv
    is_ours = Path(program).name in ("deepy.py", "farfield") or Path(program).parent.name == "farfield"
    return shlex.join([PROGRAM, *arguments]) if is_ours else None


def read_commit() -> str | None:
    """Return the git commit of the checkout, with a + if files are modified, or None without a checkout or git."""
    if not IS_CHECKOUT:
        return None
    try:
        asked = subprocess.run(
            ["git", "-C", str(PACKAGES_FOLDER), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"],
            capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout.strip() or None


def _describe_version(commit: str | None) -> str:
    if commit is None:
        return f"Farfield {get_farfield_version()}"
    changed = ", with uncommitted changes" if commit.endswith("+") else ""
    return f"Farfield {get_farfield_version()}, commit {commit.rstrip('+')}{changed}"


def list_papers(positions: Sequence[str]) -> dict[str, str]:
    """List the papers of all encodings, processors, and temperatures in method names."""
    words = dict.fromkeys(word for position in positions for word in re.findall(r"\w+", position))
    papers: dict[str, str] = {}
    for list_names, read_facts in (
        (list_encodings, read_encoding_facts),
        (list_processors, read_processor_facts),
        (list_temperatures, read_temperature_facts),
    ):
        with suppress(MethodFileError):  # a user's method file that cannot be read has no paper
            names = list_names()
            papers |= {word: source for word in words if word in names and (source := read_facts(word).source)}
    return {word: papers[word] for word in words if word in papers}


def read_citation() -> dict[str, Any]:
    """Read `CITATION.cff`: the project, and the papers to cite with it."""
    from ruamel.yaml import YAML  # imports slowly

    return YAML(typ="safe", pure=True).load(CITATION_FILE)


def render_bibtex(citation: Mapping[str, Any]) -> str:
    """Render BibTeX entries for the project and each of its references."""
    return "\n".join(_render_entry(work) for work in (citation, *citation.get("references", ())))


def _render_entry(work: Mapping[str, Any]) -> str:
    authors = [_format_author(author) for author in work["authors"]]
    fields = {
        "title": f"{{{escape_latex(work['title'])}}}",
        "author": " and ".join(authors),
        "year": str(work["year"]) if "year" in work else None,
        "booktitle": escape_latex(work["conference"]["name"]) if "conference" in work else None,
        "journal": escape_latex(work["journal"]) if "journal" in work else None,
        "doi": work.get("doi"),
        "version": str(work["version"]) if "version" in work else None,
        "note": escape_latex(work["notes"]) if "notes" in work else None,
    }
    lines = [f"  {name} = {{{text}}}," for name, text in fields.items() if text is not None]
    return "\n".join([f"@{_BIBTEX_TYPES.get(work['type'], 'misc')}{{{_choose_key(work)},", *lines, "}"]) + "\n"


def _format_author(author: Mapping[str, str]) -> str:
    if "name" in author:
        return f"{{{escape_latex(author['name'])}}}"
    return escape_latex(f"{author['family-names']}, {author['given-names']}")


def _choose_key(work: Mapping[str, Any]) -> str:
    """Build a BibTeX key from author, year, and the first word of the title, for example chi2022kerple."""
    author = work["authors"][0].get("family-names", "")
    words = re.findall(r"\w+", work["title"])
    key = f"{author}{work.get('year', '')}{words[0]}".lower()
    return unicodedata.normalize("NFKD", key).encode("ascii", "ignore").decode()
