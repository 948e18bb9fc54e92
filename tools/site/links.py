"""Convert links of Markdown pages from repository paths to site links.

A page links to files of the repository by their paths, as GitHub reads them. On the site such a link points to the page
that shows the file, if one exists. Otherwise it points to the file in docs/, which the site copies. Other files are
linked in the repository on the web, if mkdocs.yml sets its URL, or have a page with their text. A broken link stays
unchanged, and MkDocs rejects it.
"""

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

from tools.site.source_pages import get_source_page

CODE_OR_LINK = re.compile(
    r"^[ ]*(?P<fence>```+|~~~+).*?^[ ]*(?P=fence)[ ]*$|(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)"
    r"|\]\((?P<target>[^()\s]+)(?P<title>\s+\"[^\"]*\")?\)",
    flags=re.MULTILINE | re.DOTALL,
)
"""Code blocks and spans, which contain no links, and the targets of links and pictures."""

ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//|/|#", flags=re.IGNORECASE)
"""Prefixes of targets that are not paths relative to the page."""

ON_THE_NETWORK = re.compile(r"\s*(?:https?:)?//", flags=re.IGNORECASE)
LOADED_BY_STYLES = re.compile(r"(?:@import\s+|url\(\s*)[\"']?((?:https?:)?//[^\s\"')]+)", flags=re.IGNORECASE)
LOADED_LINKS = {"stylesheet", "manifest", "preload", "modulepreload", "prefetch", "preconnect", "dns-prefetch", "icon"}
"""Relations of <link> that make a browser load a file with the page."""
REPOSITORY_FACTS = ' data-md-component="source"'
"""Attribute of a link for which Material's script asks the API of GitHub or GitLab for stars and releases."""


@dataclass
class LinkRewriter:
    """Rewriter of the links of pages.

    Attributes:
        root: repository folder.
        pages: pages of the site by the path of the file they show: README.md → about.md.
        repository_url: URL of the repository's files, …/blob/main; empty if not published.
        moved_headings: pages of headings that the site moves to another page, as PAGE.md#HEADING → PAGE.md.
        source_files: linked files and folders that need their own page, as paths in the repository; filled by
            `rewrite`.
    """

    root: Path
    pages: Mapping[str, str]
    repository_url: str = ""
    moved_headings: Mapping[str, str] = field(default_factory=dict)
    source_files: set[str] = field(default_factory=set)

    def rewrite(self, markdown: str, source: str, page: str) -> str:
        """Return a page's text with the site's links.

        Args:
            markdown: text in the repository.
            source: path of the source file in the repository; links are relative to it.
            page: path of the page in the site's docs/.
        """

        def replace(match: re.Match[str]) -> str:
            target = match["target"]
            if target is None or ELSEWHERE.match(target):
                return match[0]
            return f"]({self.resolve(target, source, page)}{match['title'] or ''})"

        return CODE_OR_LINK.sub(replace, markdown)

    def resolve(self, target: str, source: str, page: str) -> str:
        """Return the site's link for a link target; a broken link is returned unchanged."""
        path, hash_mark, anchor = target.partition("#")
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        there = self.root / file
        if file in self.pages:
            destination = self.pages[file]
        elif file.startswith("docs/") and there.is_file():
            destination = file.removeprefix("docs/")
        elif file.startswith("..") or not there.exists():
            return target
        elif self.repository_url:
            return f"{self.repository_url}/{file}{hash_mark}{anchor}"
        else:
            self.source_files.add(file)
            destination, hash_mark, anchor = get_source_page(file, there.is_dir()), "", ""
        destination = self.moved_headings.get(f"{destination}#{anchor}", destination)
        return f"{posixpath.relpath(destination, posixpath.dirname(page) or '.')}{hash_mark}{anchor}"


class _LoadedUrls(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        names = ["src", "poster", "data"]
        names += ["href"] if values.get("data-md-component") == "source" else []
        names += ["href", "xlink:href"] if tag in ("image", "use") else []
        self.urls += [url for url in values.get("srcset", "").split() if ON_THE_NETWORK.match(url)]
        if tag == "link" and LOADED_LINKS & set(values.get("rel", "").lower().split()):
            names.append("href")
        self.urls += [values[name].strip() for name in names if ON_THE_NETWORK.match(values.get(name, ""))]
        self.urls += LOADED_BY_STYLES.findall(values.get("style", ""))
        self.in_style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self.in_style = False

    def handle_data(self, data: str) -> None:
        if self.in_style:
            self.urls += LOADED_BY_STYLES.findall(data)


def list_loaded_urls(html: str) -> list[str]:
    """Return the network URLs that a browser loads with a page: scripts, pictures, frames, styles and their imports.

    Links that a reader may follow are not included.
    """
    parser = _LoadedUrls()
    parser.feed(html)
    parser.close()
    return parser.urls
