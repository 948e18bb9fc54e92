"""All functions in kernels/ are annotated except Triton kernels, so mypy checks everything else."""

import ast
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "megatron" / "kernels"


def unannotated(tree: ast.AST) -> list[str]:
    """List the functions without annotations that are not decorated with @triton.jit."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [f.name for f in functions if not _of_triton(f) and not _annotated(f)]


def _of_triton(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in function.decorator_list)


def _annotated(function: ast.FunctionDef) -> bool:
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    named = [a for a in every if a is not None and a.arg not in ("self", "cls")]
    return function.returns is not None and all(a.annotation is not None for a in named)


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.py")), ids=lambda path: str(path.relative_to(KERNELS)))
def test_only_triton_goes_without_annotations(path: Path):
    assert unannotated(ast.parse(path.read_text(encoding="utf-8"))) == []


def test_a_function_without_annotations_is_found():
    source = "@triton.jit\ndef a(x, y: tl.constexpr): pass\ndef b(x: int): pass\ndef c(x) -> None: pass\n"
    assert unannotated(ast.parse(source)) == ["b", "c"]
