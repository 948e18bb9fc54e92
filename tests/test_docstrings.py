"""Docstrings stand alone: they start neither with a clause that continues the name above nor with a question.

A function that returns a boolean says when it is true: "Return True if …".
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FORBIDDEN = re.compile(r"(Of|What|Where|That|Those|How|Whose|Why|When|Is|Are|Does|Do|Has|Have|May|Can|Must|Should)\b")
ROOMS = [
    "farfield",
    "megatron/kernels",
    "megatron/attention",
    "megatron/checkpoint",
    "megatron/cli",
    "megatron/config",
    "megatron/conversion",
    "megatron/data",
    "megatron/distributed",
    "megatron/evaluation",
    "megatron/launch",
    "megatron/model",
    "megatron/options",
    "megatron/planning",
    "megatron/position",
    "megatron/rehearsal",
    "megatron/reports",
    "megatron/sweeps",
    "megatron/training",
    "megatron/utils",
    "tests",
    "tools",
]
"""Folders whose docstrings follow the rule."""


def list_docstrings(tree: ast.AST) -> list[tuple[int, str]]:
    """List line and text of every string statement: docstrings, including those of attributes."""
    return [
        (node.lineno, node.value.value.strip())
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_stand_alone(room: str) -> None:
    found = []
    for path in sorted((ROOT / room).rglob("*.py")):
        for line, text in list_docstrings(ast.parse(path.read_text(encoding="utf-8"))):
            if FORBIDDEN.match(text):
                found.append(f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0][:80]}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("room", ROOMS)
def test_booleans_say_when_they_are_true(room: str) -> None:
    found = []
    for path in sorted((ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and isinstance(node.returns, ast.Name) and node.returns.id == "bool":
                text = ast.get_docstring(node) or ""
                if re.match(r"(Return|Check|Decide|Determine|Test|Tell) (whether|if)\b", text):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {text.splitlines()[0][:80]}")
    assert not found, "\n".join(found)
