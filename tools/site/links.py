"""Links of Markdown pages, which are written for the repository, as links of the site.

A page links to files of the repository by their paths, as GitHub reads them. On the site such a link leads to the page
that shows the file, where there is one; to a file of docs/, which the site has as it is; else to the file in the
repository on the web, if mkdocs.yml knows its address, and if not to a page with the file's text. A link that leads
nowhere stays as it is, and MkDocs refuses it.
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
"""Blocks and spans of code, in which nothing is a link, and the targets of links and pictures."""

ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//|/|#", flags=re.IGNORECASE)
"""How targets begin that are no paths relative to the page."""

ON_THE_NETWORK = re.compile(r"\s*(?:https?:)?//", flags=re.IGNORECASE)
LOADED_BY_STYLES = re.compile(r"(?:@import\s+|url\(\s*)[\"']?((?:https?:)?//[^\s\"')]+)", flags=re.IGNORECASE)
LOADED_LINKS = {"stylesheet", "manifest", "preload", "modulepreload", "prefetch", "preconnect", "dns-prefetch", "icon"}
"""Relations of <link> that a browser asks for as it shows a page."""


@dataclass
class LinkRewriter:
    """Rewrites the links of pages.

    Attributes:
        root: the repository's folder.
        pages: the site's pages by the paths of the files that they show: README.md → index.md.
        repository_url: the repository on the web, as far as its branch's files: …/blob/main; or nothing.
        source_files: the files and folders that links lead to and that need a page of their own, as paths in the
            repository; filled by `rewrite`.
    """

    root: Path
    pages: Mapping[str, str]
    repository_url: str = ""
    source_files: set[str] = field(default_factory=set)

    def rewrite(self, markdown: str, source: str, page: str) -> str:
        """A page's text with the site's links.

        Args:
            markdown: the text as it is in the repository.
            source: path of the file that it is from, in the repository; links are relative to it.
            page: path of the page, in the site's docs/.
        """

        def replace(match: re.Match[str]) -> str:
            target = match["target"]
            if target is None or ELSEWHERE.match(target):
                return match[0]
            return f"]({self.resolve(target, source, page)}{match['title'] or ''})"

        return CODE_OR_LINK.sub(replace, markdown)

    def resolve(self, target: str, source: str, page: str) -> str:
        """The site's link for the target of one link; what leads nowhere comes back as it is."""
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
        return f"{posixpath.relpath(destination, posixpath.dirname(page) or '.')}{hash_mark}{anchor}"


class _LoadedUrls(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        names = ["src", "poster", "data"]
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
    """The addresses on the network that a browser loads something from as it shows a page: scripts, pictures, frames,
    styles and what these load. Links that a reader may follow are none."""
    parser = _LoadedUrls()
    parser.feed(html)
    parser.close()
    return parser.urls
