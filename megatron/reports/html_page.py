"""What every page of ours is: one file of HTML, with one style sheet for screens of all widths and nothing to load.

Pages are jinja2 templates that extend `templates/page.html`; they are handed texts, which jinja2 escapes. A table is
data here and markup in `templates/macros.html`: names of rows on the left, and cells that narrow screens show under the
names of their columns.
"""

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from megatron.reports.x_axes import join_headers

TEMPLATES_FOLDER = Path(__file__).parent / "templates"
_PAGE_MARKER = b":root { color-scheme: light; }\n* { box-sizing: border-box; }\n"
"""How the style sheet of every page begins (`templates/style.css`)."""


def build_environment(folder: Path) -> jinja2.Environment:
    """The settings of all templates, of which those of a folder extend and import each other and the shared ones."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, TEMPLATES_FOLDER]),
        autoescape=jinja2.select_autoescape(["html"], default=False),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render_template(template: Path, **context: Any) -> str:
    """A template filled in.

    Args:
        template: the file. Texts are escaped where its name ends in .html.
        context: what the template names; a name that is not given is an error.
    """
    return build_environment(template.parent).get_template(template.name).render(context)


def is_generated_page(path: Path) -> bool:
    """Is a file a page of ours, of this version or an earlier one?"""
    return path.is_file() and _PAGE_MARKER in path.read_bytes()[:4096]


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
    def label(self) -> str:
        """Its name where there is one line for it."""
        return join_headers(self.header, self.subheader)

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
