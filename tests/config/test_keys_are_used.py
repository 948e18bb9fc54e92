"""No key is accepted and then ignored: code outside the configuration's own modules reads each key.

A key counts as read if its name is an attribute of its section: of `config.SECTION`, of a variable or argument of that
type, or in `getattr`. `text.split` does not read the key `split`.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from megatron.config.schema import SECTIONS, Config, list_config_keys
from megatron.options.section import ConfigSection

MEGATRON = Path(__file__).resolve().parents[2] / "megatron"
# These modules store, validate or print keys, but do not use them.
MACHINERY = {
    MEGATRON / "config" / f"{name}.py" for name in ("schema", "neox_keys", "neox_rules", "reference", "validation")
}
# Passed to DeepSpeed as a whole.
WHOLE = {"zero_optimization", "fp16"}


def _sections(kind: type[ConfigSection]) -> Iterator[type[ConfigSection]]:
    yield kind
    for field in kind.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, ConfigSection):
            yield from _sections(field.annotation)


TYPES: dict[str, type] = {"Config": Config} | {
    kind.__name__: kind for section in SECTIONS.values() for kind in _sections(section)
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
ASSIGNMENTS = (ast.Assign, ast.NamedExpr, ast.AnnAssign, ast.For, ast.comprehension)


parse = cache(ast.parse)


class Reader:
    """Analyzer of the section fields that source files read, based on the types of variables."""

    def __init__(self, sources: list[str]) -> None:
        self.read: set[tuple[type, str]] = set()
        self.attributes: dict[str, type] = {"config": Config}  # attributes of any object
        trees = [parse(source) for source in sources]
        for tree in trees:
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    for field in node.body:
                        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                            self._attribute(field.target.id, self._annotated(field.annotation))
        for _ in range(2):  # a file may read an attribute assigned in another
            for tree in trees:
                self._scope(tree, {"config": Config}, {})

    def _attribute(self, name: str, kind: type | None) -> None:
        if kind is not None and name != "config":
            self.attributes.setdefault(name, kind)

    def _annotated(self, annotation: ast.expr | None) -> type | None:
        words = re.findall(r"\w+", ast.unparse(annotation)) if annotation is not None else []
        kinds = [TYPES[word] for word in words if word in TYPES]
        return kinds[0] if len(kinds) == 1 and not {"tuple", "list", "dict", "Callable", "type"} & set(words) else None

    def _scope(self, scope: ast.AST, outer: dict[str, type], outer_texts: dict[str, list[ast.expr]]) -> None:
        """Analyze a module or a function: first the types of its variables, then its reads."""
        kinds, texts = dict(outer), {name: list(found) for name, found in outer_texts.items()}
        if isinstance(scope, FUNCTIONS):
            for argument in (*scope.args.args, *scope.args.kwonlyargs):
                kind = self._annotated(argument.annotation)
                if kind is not None:
                    kinds[argument.arg] = kind
                elif argument.annotation is not None:
                    kinds.pop(argument.arg, None)
        inside = _inside(scope)
        for _ in range(2):
            for node in inside:
                self._assign(node, kinds, texts)
        for node in inside:
            if isinstance(node, FUNCTIONS):
                self._scope(node, kinds, texts)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                self._kind(node, kinds)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
                self._getattr(node, kinds, texts)

    def _assign(self, node: ast.AST, kinds: dict[str, type], texts: dict[str, list[ast.expr]]) -> None:
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.NamedExpr | ast.AnnAssign) and node.value is not None:
            pairs = [(node.target, node.value)]
        elif isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.Tuple | ast.List):
            pairs = [(node.target, item) for item in node.iter.elts]
        for target, value in pairs:
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
                parts = list(zip(target.elts, value.elts, strict=True))
            else:
                parts = [(target, value)]
            for name, what in parts:
                kind = self._kind(what, kinds)
                if isinstance(name, ast.Attribute):
                    self._attribute(name.attr, kind)
                elif isinstance(name, ast.Name) and kind is not None:
                    kinds[name.id] = kind
                elif isinstance(name, ast.Name) and isinstance(what, ast.Constant | ast.JoinedStr):
                    texts.setdefault(name.id, []).append(what)

    def _kind(self, node: ast.expr, kinds: dict[str, type]) -> type | None:
        """Return the section (or `Config`) that an expression evaluates to, and count the fields read on the way."""
        if isinstance(node, ast.Name):
            return kinds.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        owner = self._kind(node.value, kinds)
        if owner is None or node.attr not in owner.model_fields:
            return self.attributes.get(node.attr)
        self.read.add((owner, node.attr))
        annotation = owner.model_fields[node.attr].annotation
        return annotation if annotation in TYPES.values() else None

    def _getattr(self, node: ast.Call, kinds: dict[str, type], texts: dict[str, list[ast.expr]]) -> None:
        owner = self._kind(node.args[0], kinds)
        name = node.args[1]
        for text in texts.get(name.id, []) if isinstance(name, ast.Name) else [name]:
            if owner is not None:
                self.read |= {(owner, field) for field in owner.model_fields if _pattern(text).fullmatch(field)}


def _pattern(text: ast.expr) -> re.Pattern[str]:
    if isinstance(text, ast.Constant):
        return re.compile(re.escape(str(text.value)))
    parts = text.values if isinstance(text, ast.JoinedStr) else []
    return re.compile("".join(re.escape(str(p.value)) if isinstance(p, ast.Constant) else r"\w+" for p in parts))


@cache
def _inside(scope: ast.AST) -> tuple[ast.AST, ...]:
    """Return the nodes of a scope except those of nested functions; cached because each scope is visited often."""
    found: list[ast.AST] = []
    pending = [*ast.iter_child_nodes(scope)][::-1]
    while pending:
        node = pending.pop()
        if isinstance(node, (*FUNCTIONS, *ASSIGNMENTS, ast.Attribute, ast.Call)):
            found.append(node)
        if not isinstance(node, FUNCTIONS):
            pending += [*ast.iter_child_nodes(node)][::-1]
    return tuple(found)


@cache
def sources() -> dict[Path, str]:
    """Return the sources that may use keys.

    megatron/options declares and validates keys, which does not count; other functions in it that use keys do count.
    """
    found = {path: path.read_text(encoding="utf-8") for path in MEGATRON.rglob("*.py") if path not in MACHINERY}
    for path in (path for path in found if path.parent.name == "options"):
        functions = (node for node in ast.parse(found[path]).body if isinstance(node, ast.FunctionDef))
        found[path] = "\n".join(ast.unparse(node) for node in functions if node.name != "conflicts")
    return found


@cache
def unused(texts: tuple[str, ...]) -> list[str]:
    read = Reader(list(texts)).read
    found = []
    for key in list_config_keys().values():
        kind: type[ConfigSection] = SECTIONS[key.section]
        for name in key.path[:-1]:
            kind = kind.model_fields[name].annotation  # type: ignore[assignment]
        if (kind, key.path[-1]) not in read:
            found.append(key.name)
    return found


def test_every_key_is_read_somewhere():
    assert all(path.is_file() for path in MACHINERY)
    silent = {"bf16", "bf16.enabled", "fp16.enabled", "fp16.type"}  # reported by `precision` after loading
    silent |= {"optimizer.type"}  # all its values mean the same
    silent |= {
        key.name for key in list_config_keys().values() if len(key.choices) == 1
    }  # `data_impl`: no choice to read
    left = [name for name in unused(tuple(sources().values())) if name.split(".")[0] not in WHOLE or "." not in name]
    assert [name for name in left if name not in silent] == []


def test_keys_that_are_no_longer_read_are_found():
    """Unused keys are found although `split` occurs as `text.split`, `eod_mask_loss` as a variable, and `betas` in
    dictionaries.
    """
    uses = {
        "split": r"\b(data|options|run_data)\.split\b",
        "eod_mask_loss": r"\bdata\.eod_mask_loss\b",
        "optimizer.params.betas": r"\bparams\.betas\b",
    }
    texts = tuple(sources().values())
    without = tuple(re.sub("|".join(uses.values()), "nothing", text) for text in texts)
    assert not set(uses) & set(unused(texts))
    assert set(uses) <= set(unused(without))


@pytest.mark.parametrize(
    ("source", "read"),
    [
        ("def f(text): return text.split(',')", set()),
        ("def f(data): return data.split", set()),  # unknown type
        ("def f(data: DataOptions): return data.split", {"split"}),
        ("def f(data: 'DataOptions | None'): return data.split", {"split"}),
        ("def f(run): return run.config.data.split", {"split"}),
        ("def f(run):\n own, n = run.config.data, 1\n return own.split", {"split"}),
        ("def f(c: Config):\n def g(): return c.data.split\n return g", {"split"}),
        ("class A:\n def __init__(self, d: DataOptions): self.d = d\n def g(self): return self.d.split", {"split"}),
        ("def f(d: DataOptions):\n for k in ('split', 'other'): getattr(d, k)", {"split"}),
        (
            "def f(d: DataOptions, s): return getattr(d, f'{s}_data_paths')",
            {f"{s}_data_paths" for s in ("train", "valid", "test")},
        ),
        ("def f(d: DataOptions): d.split = 3", set()),
        ("def f(texts: list[DataOptions]): return texts.split", set()),
    ],
)
def test_only_a_section_has_keys(source, read):
    assert {name for kind, name in Reader([source]).read if kind is SECTIONS["data"]} == read
