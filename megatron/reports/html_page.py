"""Common parts of our HTML pages: self-contained files for all screen widths, with light and dark colors.

Pages are jinja2 templates that extend `templates/page.html`. Templates receive text, and jinja2 escapes it. Tables are
data here and markup in `templates/macros.html`. Row names stay visible on the left while a table scrolls.
`templates/page.js` makes tables sortable and charts interactive; pages are complete without it.
"""

import base64
import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

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
