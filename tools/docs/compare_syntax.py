#!/usr/bin/env python3
"""Check that Python files of two commits differ only in docstrings, comments and strings.

    python tools/docs/compare_syntax.py BEFORE [AFTER] [PATH …]

AFTER is the working tree if it is "." or absent. The tool compares syntax trees without docstrings and with every
string emptied, including formatted strings; interpolated expressions still count. It lists each changed string other
than docstrings with its file, because tests or users' scripts may depend on it. The exit code is 1 if anything else
differs.
"""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class _TextRemover(ast.NodeTransformer):
    """Transformer that removes docstrings, empties other strings and collects their texts."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return None
        return self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        self.texts += [part.value for part in node.values if isinstance(part, ast.Constant)]
        interpolated = [self.generic_visit(part) for part in node.values if isinstance(part, ast.FormattedValue)]
        return ast.Tuple([part for part in interpolated if isinstance(part, ast.expr)], ast.Load())

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if not isinstance(node.value, str):
            return node
        self.texts.append(node.value)
        return ast.Constant("")


def read_tree(source: str) -> tuple[str, list[str]]:
    """Return a source's syntax tree without strings, as text, and the strings other than docstrings."""
    remover = _TextRemover()
    tree = remover.visit(ast.parse(source))
    for node in ast.walk(tree):
        if hasattr(node, "body") and isinstance(node.body, list) and not node.body:
            node.body = [ast.Pass()]  # a class or function with only a docstring
    return ast.dump(tree), remover.texts


def read_file(path: str, commit: str) -> str | None:
    """Return a file of a commit, or of the working tree for "."; None if it does not exist."""
    if commit == ".":
        file = ROOT / path
        return file.read_text(encoding="utf-8") if file.is_file() else None
    shown = subprocess.run(["git", "show", f"{commit}:{path}"], cwd=ROOT, capture_output=True, text=True)
    return shown.stdout if shown.returncode == 0 else None


def list_changed_files(before: str, after: str, paths: list[str]) -> list[str]:
    """List the Python files that differ between two commits."""
    command = ["git", "diff", "--name-only", before, *([] if after == "." else [after]), "--", *(paths or ["."])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\n") if name.endswith(".py")]


def main() -> None:
    before, after, *paths = [*sys.argv[1:2], *(sys.argv[2:] or ["."])]
    differing = 0
    for path in list_changed_files(before, after, paths):
        sources = read_file(path, before), read_file(path, after)
        if None in sources:
            print(f"{path}: added or removed")
            differing += 1
            continue
        (old, old_texts), (new, new_texts) = (read_tree(source or "") for source in sources)
        if old != new:
            print(f"{path}: the code differs")
            differing += 1
        for text in [text for text in old_texts if text not in new_texts]:
            print(f"{path}: text changed: {text!r}")
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
