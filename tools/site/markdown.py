"""Conversion of docstrings, help and key descriptions to Markdown for the site."""

import posixpath
import re
from pathlib import Path

CODE_SPAN = re.compile(r"(`+[^`]+`+)")
DOCS_PAGE = re.compile(r"(?<![\w/`])docs/([\w/]+\.md)\b")


def escape(text: str) -> str:
    """Escape Markdown and HTML in a text, except its code spans."""
    parts = CODE_SPAN.split(text)
    parts[::2] = [re.sub(r"([*_\[\]\\|])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    return "".join(parts)


def link_docs(text: str, page: str) -> str:
    """Convert mentions of docs/NAME.md in a text to links.

    Args:
        text: Markdown text.
        page: path of the page that contains the text, in the site's docs/.
    """

    def link(match: re.Match[str]) -> str:
        path = match[1].replace("\\", "")
        return f"[{Path(path).stem}]({posixpath.relpath(path, posixpath.dirname(page) or '.')})"

    return DOCS_PAGE.sub(link, text)


def read_title(markdown: str, otherwise: str) -> str:
    """Return the first heading of a page, or `otherwise` if it has none."""
    match = re.search(r"^# +(.+?) *(?:\{.*\})? *$", markdown, flags=re.MULTILINE)
    return match[1] if match else otherwise


def make_anchor(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and the site build it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
