"""Words of docstrings, help and descriptions of keys as Markdown of the site."""

import posixpath
import re
from pathlib import Path

CODE_SPAN = re.compile(r"(`+[^`]+`+)")
DOCS_PAGE = re.compile(r"(?<![\w/`])docs/([\w/]+\.md)\b")


def escape(text: str) -> str:
    """Text that means itself: nothing of it is Markdown or HTML but its spans of code."""
    parts = CODE_SPAN.split(text)
    parts[::2] = [re.sub(r"([*_\[\]\\|])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    return "".join(parts)


def link_docs(text: str, page: str) -> str:
    """A text that names pages as docs/NAME.md, with links to them.

    Args:
        text: Markdown.
        page: path in the site's docs/ of the page that the text is for.
    """

    def link(match: re.Match[str]) -> str:
        path = match[1].replace("\\", "")
        return f"[{Path(path).stem}]({posixpath.relpath(path, posixpath.dirname(page) or '.')})"

    return DOCS_PAGE.sub(link, text)


def read_title(markdown: str, otherwise: str) -> str:
    """The first heading of a page, or another title if it has none."""
    match = re.search(r"^# +(.+?) *(?:\{.*\})? *$", markdown, flags=re.MULTILINE)
    return match[1] if match else otherwise
