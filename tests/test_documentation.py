"""Files and folders named in documentation, docstrings and comments exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = "farfield|megatron|tools|tests|configs|docs"
PATH = re.compile(rf"(?<![\w./-])((?:{FOLDERS})/[\w./-]*)")
MODULE = re.compile(r"(?<![\w./*-])((?:\w+/)*\w+\.py)\b")
PLACEHOLDER = re.compile(r"(^|/)(?!README\b)[A-Z]+(?=[/.]|$)")

NOT_OURS = {
    "docs/results/gpu_check.json": "make gpu-check writes it",
    "docs/results/gpu_check.md": "make gpu-check writes it",
    "megatron/position/encodings/root.py": "the reader of docs/tutorial.md writes it",
    "eval.py": "GPT-NeoX's",
    "generate.py": "GPT-NeoX's",
    "preprocess_data.py": "GPT-NeoX's",
    "transformer.py": "GPT-NeoX's",
    "utils.py": "GPT-NeoX's",
    "version.py": "torch's",
}
FOREIGN_NAMES = {
    "_foreach": "prefix of torch's functions of lists",
    "DeepSpeedEngine": "DeepSpeed's",
    "attend_current": "stickbreaking-attention's",
    "create_fadd": "Triton's",
    "get_attn_mask": "GPT-NeoX's",
    "is_layer_window_attention": "megatron-core's",
    "muon_split_qkv": "megatron-core's",
    "softmax_backward_cuda_out": "torch's",
    "weights_by_num_docs": "GPT-NeoX's",
}

# docs/log.md and records refer to the files of their day; only their commands must be current.
PAGES = [
    page
    for pattern in ("*.md", "docs/*.md", "docs/results/README.md", "megatron/kernels/**/*.md")
    for page in sorted(ROOT.glob(pattern))
]
PAGES = [page for page in PAGES if page.name != "log.md"]
SOURCES = [page for part in FOLDERS.split("|") for page in sorted((ROOT / part).rglob("*.py"))]
FILES = {str(path.relative_to(ROOT)) for path in (*SOURCES, *ROOT.glob("*.py"))}
SOURCES = [path for path in SOURCES if path.relative_to(ROOT).parts[0] != "tests"]


def find_missing_paths(text: str) -> list[str]:
    """Return the paths below our folders that a text names and that do not exist; NAME and OP match any name."""
    names = {name.rstrip("./-") for name in PATH.findall(text) if not PLACEHOLDER.search(name)} - NOT_OURS.keys()
    return sorted(name for name in names if not (ROOT / name).exists() and not list(ROOT.glob(f"{name}.*")))


def find_missing_modules(text: str) -> list[str]:
    """Return the Python files that a text names by full or partial path and that do not exist."""
    names = {name for name in MODULE.findall(text) if not PLACEHOLDER.search(name)} - NOT_OURS.keys()
    return sorted(name for name in names if not any(f"/{path}".endswith(f"/{name}") for path in FILES))


TEXT = re.compile(r'"""(.*?)"""|#([^\n]*)', re.DOTALL)
NAME = re.compile(r"`(_?[a-z]+\w*_\w+|_[a-z]\w*|[A-Z][a-z0-9]+[A-Z]\w*)`")


def split_code_and_text(source: str) -> tuple[str, str]:
    """Return the code of a Python file, and its docstrings and comments."""
    return TEXT.sub("", source), "\n".join(docstring + comment for docstring, comment in TEXT.findall(source))


def find_missing_names(text: str, code: set[str]) -> list[str]:
    """Return the names in backticks that look like functions, classes or attributes and occur nowhere in the code."""
    names = {name for name in NAME.findall(text) if not re.search("_[A-Z0-9]", name)}
    return sorted(names - code - FOREIGN_NAMES.keys())


def find_missing_imports(text: str) -> list[str]:
    """Return the names that a page's Python examples import from this project and that are not defined."""
    return [
        f"{node.module}.{alias.name}"
        for block in re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("megatron.", "tools."))
        for alias in node.names
        if alias.name not in list_defined_names(ROOT / f"{str(node.module).replace('.', '/')}.py")
    ]


def list_defined_names(path: Path) -> Iterator[str]:
    """Yield the top-level functions, classes and constants of a file."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else ():
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_named_on_pages_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert find_missing_paths(text) + find_missing_modules(text) + find_missing_imports(text) == []


def test_the_commands_of_records_exist() -> None:
    commands = {
        (page.name, name)
        for page in sorted((ROOT / "docs/results").glob("*.md"))
        for name in re.findall(r"`python ([\w./]+\.py)\b", page.read_text(encoding="utf-8"))
    }
    assert len(commands) > 10
    assert {(page, name) for page, name in commands if name not in FILES} == set()


def test_files_named_in_code_exist() -> None:
    missing = {str(path.relative_to(ROOT)): find_missing_modules(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {path: names for path, names in missing.items() if names} == {}


def test_names_in_docstrings_and_comments_exist() -> None:
    sources = {path: split_code_and_text(path.read_text(encoding="utf-8")) for path in SOURCES}
    others = [path for suffix in ("c", "cu", "h", "js", "html", "yml") for path in ROOT.glob(f"[cm]*/**/*.{suffix}")]
    texts = [code for code, _ in sources.values()] + [path.read_text(encoding="utf-8") for path in others]
    stems = {path.stem for path in (*others, *(ROOT / "docs" / "results").glob("*.json"))}
    code = {word for text in texts for word in re.findall(r"\w+", text)} | stems | {Path(name).stem for name in FILES}
    missing = {str(path.relative_to(ROOT)): find_missing_names(text, code) for path, (_, text) in sources.items()}
    assert {path: names for path, names in missing.items() if names} == {}


def test_missing_names_are_detected() -> None:
    text = "see `megatron/nothing.py`, nothing.py, and megatron/position/encodings/NAME.py; encodings/rotary.py"
    assert find_missing_paths(text) == ["megatron/nothing.py"]
    assert find_missing_paths("tools/nothing/README.md, tools/OP/README.md") == ["tools/nothing/README.md"]
    assert find_missing_modules(text) == ["megatron/nothing.py", "nothing.py"]
    source = '"""Load what `write_files` and `OldWriter` wrote to `step_N`."""\nwrite_files()  # as `save_all`\n'
    code, described = split_code_and_text(source)
    assert find_missing_names(described, set(re.findall(r"\w+", code))) == ["OldWriter", "save_all"]
    block = "```python\nfrom megatron.reports.records import Record, read\nfrom megatron.nothing import Record\n```\n"
    assert find_missing_imports(block) == ["megatron.reports.records.read", "megatron.nothing.Record"]


@pytest.mark.parametrize(
    "page", [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"], ids=lambda page: page.stem
)
def test_lines_of_prose_are_at_most_120_long(page: Path) -> None:
    """Lines of prose have at most 120 characters; tables, code blocks and lines with a link may be longer."""
    parts = page.read_text(encoding="utf-8").split("```")[::2]
    lines = [line for part in parts for line in part.splitlines()]
    prose = [line for line in lines if not line.startswith(("|", "    ")) and "](" not in line]
    assert [line for line in prose if len(line) > 120] == []
