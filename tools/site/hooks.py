"""MkDocs hooks of `make site`: generated pages, navigation and links.

The pages of docs/ are written for the repository and stay unchanged. The hooks rewrite links for the site, typeset
formulas, order the search results, and add pages for commands, keys, methods, modules and notebooks.
"""

import logging
import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from tools.site import key_pages, method_pages, search_order, source_pages  # noqa: E402
from tools.site.formulas import convert_formulas  # noqa: E402
from tools.site.generated_pages import GeneratedPages, build_link_rewriter  # noqa: E402
from tools.site.links import LOADED_BY_STYLES, REPOSITORY_FACTS, LinkRewriter, list_loaded_urls  # noqa: E402


@dataclass
class Build:
    """State shared by the events of one build.

    Attributes:
        edit_url: URL under which a file of the repository can be edited; empty if the repository is not published.
    """

    generated: GeneratedPages
    rewriter: LinkRewriter
    edit_url: str

    def rewrite_links(self, markdown: str, page: str) -> str:
        """Return a page's text with the site's links. Links of generated pages resolve like those of docs/."""
        return self.rewriter.rewrite(markdown, self.generated.sources.get(page, f"docs/{page}"), page)


@cache
def get_build(repository_url: str) -> Build:
    """Return the build of this process. `mkdocs serve` generates the pages only once."""
    generated = GeneratedPages(ROOT)
    generated.add_notebooks()
    branch = os.environ.get("REPOSITORY_BRANCH", "main")
    files_url = f"{repository_url.rstrip('/')}/blob/{branch}" if repository_url else ""
    return Build(generated, build_link_rewriter(generated, files_url), files_url.replace("/blob/", "/edit/", 1))


def on_startup(command: str, dirty: bool) -> None:
    """Print nothing but warnings and errors in a build. The option --quiet would keep --strict from seeing warnings."""
    if command == "build":
        for handler in logging.getLogger("mkdocs").handlers:
            handler.setLevel(max(handler.level, logging.WARNING))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the generated pages to the navigation, and a choice of versions if mike deploys the site."""
    if "MIKE_DOCS_VERSION" in os.environ:
        config.extra["version"] = {"provider": "mike"}
    config.nav = get_build(config.repo_url or "").generated.expand_navigation(config.nav or [])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages and pages of linked source files, and remove files that the site has moved."""
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
    """Rewrite the repository's links for the site, and add a heading to a page without one."""
    path = page.file.src_uri
    folder = path.partition("/")[0]
    if folder == source_pages.FOLDER:
        page.meta["search"] = {"exclude": True}
        return markdown
    is_method = folder == method_pages.FOLDER
    page.meta.update(
        method_pages.describe_for_search(ROOT, Path(path).stem) if is_method else search_order.describe_for_search(path)
    )
    if path == key_pages.PAGE:
        markdown = key_pages.shorten_configuration(markdown)
    elif path == method_pages.PAGE:
        markdown = method_pages.shorten_positions(markdown)
    if "\n# " not in f"\n{markdown}":
        markdown = f"# {page.title}\n\n{markdown}"
    return get_build(config.repo_url or "").rewrite_links(markdown, path)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Typeset the formulas of a page."""
    try:
        return convert_formulas(html, page.file.src_uri)
    except ValueError as error:
        raise PluginError(str(error)) from None


def on_page_context(context: dict[str, Any], page: Page, config: MkDocsConfig, nav: Navigation) -> dict[str, Any]:
    """Link a page to the file it shows, for editing. Pages generated from code have no link."""
    build, path = get_build(config.repo_url or ""), page.file.src_uri
    source = build.generated.sources.get(path, f"docs/{path}")
    page.edit_url = f"{build.edit_url}/{source}" if build.edit_url and (ROOT / source).is_file() else None
    return context


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Remove the request to the repository's host, and add the description to the title of the first page."""
    if page.file.src_uri == "index.md":
        output = output.replace(
            f"<title>{page.title} - {config.site_name}<", f"<title>{config.site_name}: {config.site_description}<"
        )
    return output.replace(REPOSITORY_FACTS, "")


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """Remove the request to the repository's host from the error page, which is not a file of docs/."""
    return output_content.replace(REPOSITORY_FACTS, "")


def on_post_build(config: MkDocsConfig) -> None:
    """Reject pages that load anything from the network, because the site must work from a local disk.

    A search that does not list the expected guide first is an error, too.
    """
    try:
        search_order.check_search_order(Path(config.site_dir))
    except ValueError as error:
        raise PluginError(str(error)) from None
    for path in sorted(Path(config.site_dir).rglob("*.html")):
        if urls := list_loaded_urls(path.read_text(encoding="utf-8")):
            raise PluginError(f"{path.relative_to(config.site_dir)} loads {', '.join(urls)} from the network")
    for path in sorted(Path(config.site_dir).rglob("*.css")):
        if urls := LOADED_BY_STYLES.findall(path.read_text(encoding="utf-8")):
            raise PluginError(f"{path.relative_to(config.site_dir)} loads {', '.join(urls)} from the network")
