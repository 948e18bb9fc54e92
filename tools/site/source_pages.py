"""Pages that show files and folders of the repository, for a site without a repository URL."""

from pathlib import Path

FOLDER = "source"

LANGUAGES = {".py": "python", ".yml": "yaml", ".sh": "bash", ".json": "json", ".cff": "yaml", ".toml": "toml"}


def get_source_page(path: str, is_folder: bool) -> str:
    """Return the path of the page of a file or folder, in the site's docs/."""
    return f"{FOLDER}/{path}/index.md" if is_folder else f"{FOLDER}/{path}.md"


def render_source_page(root: Path, path: str) -> str:
    """Render the page of a file (its text) or of a folder (its file names).

    Args:
        root: repository folder.
        path: path of the file or folder in the repository.
    """
    there, title = root / path, f"# `{path}`\n\n"
    if there.is_dir():
        names = sorted(f"{each.name}/" if each.is_dir() else each.name for each in there.iterdir())
        shown = [name for name in names if not name.startswith((".", "_"))]
        return title + "".join(f"- `{name}`\n" for name in shown)
    text = there.read_text(encoding="utf-8")
    fence = "`" * 3
    while fence in text:
        fence += "`"
    return f"{title}{fence} {LANGUAGES.get(there.suffix, 'text')}\n{text.rstrip()}\n{fence}\n"
