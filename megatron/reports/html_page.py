"""What every page of ours is: one file of HTML, with one style sheet for screens of all widths and nothing to load."""

import base64
import html
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def embed_picture(draw_png: Callable[[bool], bytes], alt_text: str) -> str:
    """A paragraph of HTML with a picture, of which screens up to 40rem wide take the narrow drawing.

    Args:
        draw_png: makes the PNG, told whether the narrow one is wanted.
        alt_text: what it shows, for those who do not see it; escaped here.
    """
    wide, narrow = (base64.b64encode(draw_png(is_narrow)).decode("ascii") for is_narrow in (False, True))
    return (
        f'<p class="plot"><picture><source media="(max-width: 40rem)" srcset="data:image/png;base64,{narrow}">'
        f'<img alt="{html.escape(alt_text)}" src="data:image/png;base64,{wide}"></picture></p>'
    )


_STYLE = """\
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff;
  max-width: 70rem; margin: 2rem auto; padding: 0 1rem; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.25; margin-bottom: 0.2rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
p, dl { max-width: 50rem; } .plot { max-width: none; } img { max-width: 100%; height: auto; }
table { border-collapse: collapse; margin: 0.8rem 0; font-variant-numeric: tabular-nums; }
caption { caption-side: bottom; text-align: left; color: #555; font-size: 0.9rem; padding-top: 0.4rem; }
th, td { padding: 0.35rem 0.6rem; border-bottom: 1px solid #ddd; text-align: right; font-weight: normal;
  vertical-align: top; }
thead th { border-bottom: 2px solid #888; vertical-align: bottom; } th[scope=row], th:first-child { text-align: left; }
.text { text-align: left; } .results td { white-space: nowrap; } .results .text { white-space: normal; }
small { display: block; color: #555; font-weight: normal; overflow-wrap: anywhere; } td.best { font-weight: bold; }
code, pre { font: 0.88em/1.4 ui-monospace, monospace; } pre { background: #f6f6f6; padding: 0.8rem; overflow-x: auto; }
summary, dd { overflow-wrap: anywhere; } dt { color: #555; } dd { margin: 0 0 0.4rem 1.2rem; }
footer { margin-top: 3rem; color: #555; font-size: 0.9rem; }
@media (max-width: 56rem) { /* a card for each row, its cells under the names of their columns */
  body { margin-top: 1rem; }
  table, caption, tbody { display: block; } thead { display: none; } table { display: flex; flex-direction: column; }
  caption { order: 1; }
  tr { display: grid; grid-template-columns: repeat(auto-fit, minmax(6.2rem, 1fr)); gap: 0.4rem 0.6rem;
    padding: 0.6rem 0; border-bottom: 1px solid #ddd; }
  th[scope=row] { font-weight: bold; overflow-wrap: anywhere; } th[scope=row], td.wide { grid-column: 1 / -1; }
  th, td { display: block; padding: 0; border: 0; text-align: left; } .results td { white-space: normal; }
  td::before { content: attr(data-label); display: block; color: #555; font-size: 0.8rem; font-weight: normal; }
}"""


_PAGE_MARKER = b":root { color-scheme: light; }\n* { box-sizing: border-box; }\n"


def is_generated_page(path: Path) -> bool:
    """Is a file a page that `document` made, of this version or an earlier one?"""
    return path.is_file() and _PAGE_MARKER in path.read_bytes()[:4096]


def render_page(title: str, sections: Sequence[str], style: str = "") -> str:
    """A whole page.

    Args:
        title: of the page, escaped here.
        sections: HTML, one under the other; empty ones are left out.
        style: rules of this page alone.
    """
    escaped_title, body = html.escape(title), "\n".join(section for section in sections if section)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escaped_title}</title>
<style>
{_STYLE}{style}
</style>
</head>
<body>
<h1>{escaped_title}</h1>
{body}
</body>
</html>
"""


def render_environment(facts: Mapping[str, str]) -> str:
    """The part of a page that says where its numbers were made: what is told, and the fact, both escaped here."""
    items = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in facts.items())
    return f"<h2>Machine and software</h2>\n<dl>{items}</dl>"
