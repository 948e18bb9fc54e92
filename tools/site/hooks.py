"""What MkDocs calls while it builds the site (`make site`): pages that docs/ does not hold, the navigation, links.

The pages of docs/ are written for the repository and stay as they are. Here the README becomes the first page, links
are turned into the site's, and pages are added of commands, keys, methods, modules and notebooks.
"""

import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from tools.site import key_pages, method_pages, source_pages  # noqa: E402
from tools.site.generated_pages import GeneratedPages, build_link_rewriter  # noqa: E402
from tools.site.links import LOADED_BY_STYLES, LinkRewriter, list_loaded_urls  # noqa: E402


@dataclass
class Build:
    """What the events of one build share."""

    generated: GeneratedPages
    rewriter: LinkRewriter

    def rewrite_links(self, markdown: str, page: str) -> str:
        """A page's text with the site's links; a page that is made for the site links as one of docs/ does."""
        return self.rewriter.rewrite(markdown, self.generated.sources.get(page, f"docs/{page}"), page)


@cache
def get_build(repository_url: str) -> Build:
    """The build of this process: `mkdocs serve` makes the generated pages once."""
    generated = GeneratedPages(ROOT)
    generated.add_notebooks()
    branch = os.environ.get("REPOSITORY_BRANCH", "main")
    files_url = f"{repository_url.rstrip('/')}/blob/{branch}" if repository_url else ""
    return Build(generated, build_link_rewriter(generated, files_url))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the generated pages into the navigation."""
    config.nav = get_build(config.repo_url or "").generated.expand_navigation(config.nav or [])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and pages of the files that links lead to, and take out what the site has elsewhere."""
    build = get_build(config.repo_url or "")
    for path in build.generated.moved:
        if (moved := files.get_file_from_path(path)) is not None:
            files.remove(moved)
    for path, content in build.generated.contents.items():
        files.append(File.generated(config, path, content=content))
    for file in files.documentation_pages():
        build.rewrite_links(file.content_string, file.src_uri)
    for path in sorted(build.rewriter.source_files):
        page = source_pages.get_source_page(path, (ROOT / path).is_dir())
        files.append(File.generated(config, page, content=source_pages.render_source_page(ROOT, path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the repository's links into the site's, and give a page without a heading one."""
    path = page.file.src_uri
    folder = path.partition("/")[0]
    if folder == source_pages.FOLDER:
        page.meta["search"] = {"exclude": True}
        return markdown
    if folder == method_pages.FOLDER:
        page.meta.update(method_pages.describe_for_search(ROOT, Path(path).stem))
    if path == key_pages.PAGE:
        markdown = key_pages.shorten_configuration(markdown)
    elif path == method_pages.PAGE:
        markdown = method_pages.shorten_positions(markdown)
    if "\n# " not in f"\n{markdown}":
        markdown = f"# {page.title}\n\n{markdown}"
    return get_build(config.repo_url or "").rewrite_links(markdown, path)


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse pages that load anything from the network: the site is read from a disk, too."""
    for path in sorted(Path(config.site_dir).rglob("*.html")):
        if urls := list_loaded_urls(path.read_text(encoding="utf-8")):
            raise PluginError(f"{path.relative_to(config.site_dir)} loads {', '.join(urls)} from the network")
    for path in sorted(Path(config.site_dir).rglob("*.css")):
        if urls := LOADED_BY_STYLES.findall(path.read_text(encoding="utf-8")):
            raise PluginError(f"{path.relative_to(config.site_dir)} loads {', '.join(urls)} from the network")
