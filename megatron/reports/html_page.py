"""What every page of ours is: one file of HTML, for screens of all widths, light and dark, with nothing to load.

Pages are jinja2 templates that extend `templates/page.html`; they are handed texts, which jinja2 escapes. A table is
data here and markup in `templates/macros.html`: names of rows on the left, which stay in view where the rest is moved
sideways. `templates/page.js` makes tables sortable and charts interactive; a page says all that it says without it.
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
"""What stands at the head of every page, and what stood there before."""


@cache
def build_environment(folder: Path) -> jinja2.Environment:
    """The settings of all templates, of which those of a folder extend and import each other and the shared ones.

    They are kept, and the templates with them: compiling one takes longer than filling it in.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, TEMPLATES_FOLDER]),
        autoescape=jinja2.select_autoescape(["html"], default=False),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"embed_json": embed_json, "share": format_share}
    return environment


def format_share(share: float) -> str:
    """As a percentage, in attributes of SVG."""
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"


def embed_json(value: Any) -> markupsafe.Markup:
    """JSON that may stand in a script element: no text in it can end the element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return markupsafe.Markup(text.replace("<", "\\u003c"))


@dataclass(frozen=True)
class Download:
    """A file that a page holds, packed, and which its reader can save."""

    name: str
    text: str
    description: str
    """What is in it."""

    @property
    def href(self) -> str:
        """As a data: URI; the page's script unpacks it, and without that it is saved as NAME.gz."""
        packed = gzip.compress(self.text.encode("utf-8"), mtime=0)
        return f"data:application/gzip;base64,{base64.b64encode(packed).decode('ascii')}"


def render_template(template: Path, **context: Any) -> str:
    """A template filled in.

    Args:
        template: the file. Texts are escaped where its name ends in .html.
        context: what the template names; a name that is not given is an error.
    """
    return build_environment(template.parent).get_template(template.name).render(context)


def is_generated_page(path: Path) -> bool:
    """Is a file a page of ours, of this version or an earlier one?"""
    if not path.is_file():
        return False
    head = path.read_bytes()[:4096]
    return any(marker in head for marker in _PAGE_MARKERS)


@dataclass(frozen=True)
class HtmlPicture:
    """A picture in two drawings, of which screens up to 40rem wide take the narrow one."""

    wide: str
    """PNG as base64."""
    narrow: str
    alt_text: str
    """What it shows, for those who do not see it."""


def encode_picture(draw_png: Callable[[bool], bytes], alt_text: str) -> HtmlPicture:
    """Draw a picture for a page.

    Args:
        draw_png: makes the PNG; its argument is whether the narrow one is wanted.
        alt_text: what it shows.
    """
    wide, narrow = (base64.b64encode(draw_png(is_narrow)).decode("ascii") for is_narrow in (False, True))
    return HtmlPicture(wide, narrow, alt_text)


@dataclass(frozen=True)
class HtmlColumn:
    """Of a table."""

    header: str
    subheader: str = ""
    """In small print under the header."""
    css_class: str = ""
    """Class of its cells; those of "text" stand on the left."""

    @property
    def is_text(self) -> bool:
        return "text" in self.css_class.split()


@dataclass(frozen=True)
class HtmlCell:
    """Of a table."""

    text: str
    note: str | None = None
    """In small print under the text."""
    css_class: str = ""
    """Its class, beside its column's."""


@dataclass(frozen=True)
class HtmlTable:
    """What the macro `table` shows."""

    corner_header: str
    """Over the names of the rows."""
    columns: Sequence[HtmlColumn]
    rows: Sequence[tuple[HtmlCell, Sequence[HtmlCell]]]
    """A name, and a cell for each column."""
    css_class: str = ""
    caption: str = ""
    """What it shows, in a phrase or a sentence."""
    notes: Sequence[str] = ()
    """How to read it, a sentence each."""
