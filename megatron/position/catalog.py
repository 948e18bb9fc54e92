"""Catalog of all encodings, processors and temperatures, whose files are read without importing torch.

A method is a file in `encodings/`, `processors/` or `temperatures/`, and its name is the name of the file. Its options
are the keyword arguments of the constructor, and its hooks are methods of the class. Both are read from the syntax
tree. Declarations in the class body (`facts.py`) are evaluated on their own.

Users add methods in folders outside the project, listed in `FARFIELD_METHODS` and separated as in PATH. Each folder
contains `encodings/`, `processors/` or `temperatures/`, laid out as in the project. Files of methods run when a model
is built. A checkpoint cannot cause a file to run.
"""

import ast
import difflib
import hashlib
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from megatron.position.facts import (
    HOOKS,
    MODEL_ARGUMENTS,
    ORDER_FREE_HOOKS,
    OVERRIDABLE,
    AttentionDims,
    EncodingCost,
    MethodOptions,
    ProcessorCost,
    TemperatureCost,
)

FOLDER = Path(__file__).parent
METHODS_VARIABLE = "FARFIELD_METHODS"
SCORE_HOOKS = frozenset({"table", "dense", "contextual", "gate"})
"""Hooks whose results change the attention scores."""
KINDS = ("encodings", "processors", "temperatures")
_PROJECT_FOLDERS = {kind: FOLDER / kind for kind in KINDS}
BASES = ("Encoding", "Processor", "Temperature")
_DESCRIPTIONS = {"formula", "parameters_summary", "source", "advice", "other_names"}
"""Class attributes that describe a method to readers and do not affect its results."""
_DECLARED = ("adds_bias", "multiplies_scores", "takes_positions", "has_position_table", "other_names", "cost", "source")
_NAMESPACE: dict[str, Any] = {cost.__name__: cost for cost in (EncodingCost, ProcessorCost, TemperatureCost)}


class MethodFileError(ValueError):
    """Error in the file of a method: one line with the file, and the class and hook if known."""


_OPTION_TYPES: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str, "list": list}


@dataclass(frozen=True)
class MethodFacts:
    """Declarations in the file of a method."""

    name: str
    path: Path
    defaults: Mapping[str, Any] | None
    """Options with default values, or None if they can only be determined by running the code."""
    hooks: frozenset[str]
    """Hooks that an encoding implements; empty for other kinds."""
    adds_bias: bool = False
    """True if the method adds a bias to the scores."""
    multiplies_scores: bool = False
    """True if the method multiplies the scores by a matrix [H, R, C]."""
    takes_positions: bool = True
    has_position_table: bool = False
    """True if the method has a table of `max_position_embeddings` positions and supports none beyond."""
    has_kernel_parameters: bool = False
    """True if the method has a form that kernels support (`kernel_parameters`)."""
    option_types: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Type names in the annotation of each option."""
    other_names: tuple[str, ...] = ()
    """Other names of the method in papers and code, matched regardless of case and dashes."""
    source: str = ""
    """Paper and section that define the method."""
    cost: EncodingCost | ProcessorCost | TemperatureCost | None = None

    @property
    def changes_scores(self) -> bool:
        """True if the method adds to the scores or multiplies them. If not, PyTorch's fused attention supports it."""
        return bool(self.hooks & SCORE_HOOKS)

    @property
    def takes_any_positions(self) -> bool:
        """True if positions may come in any order and repeat (`Encoding.takes_any_positions`)."""
        return self.hooks <= set(ORDER_FREE_HOOKS)

    @property
    def rotates_qk(self) -> bool:
        """True if queries and keys are rotated, and therefore copied."""
        return "rotate" in self.hooks

    @property
    def only_adds_embeddings(self) -> bool:
        """True if the method only adds to the token embeddings. It is then part of the first pipeline stage only."""
        return self.hooks == {"embed"}

    def has_parameters(self, options: Mapping[str, Any], **dims: int) -> bool:
        """Return True if an encoding or temperature with these options has trained parameters.

        Also return True if its file declares no cost.

        Args:
            options: options of the method.
            dims: the fields of `AttentionDims`.
        """
        if not isinstance(self.cost, EncodingCost | TemperatureCost):
            return True
        return self.cost.num_parameters(AttentionDims(**dims), self.fill_options(options)) > 0

    def count_rotations(self, options: Mapping[str, Any]) -> int:
        """Return the number of rotations of queries and keys with these options (`EncodingCost.num_rotations`)."""
        return self.cost.num_rotations(self.fill_options(options)) if isinstance(self.cost, EncodingCost) else 1

    def count_qk_numbers(self, options: Mapping[str, Any]) -> int:
        """Return the elements of a rotated query or key per dimension of the head."""
        return self.cost.count_qk_numbers(self.fill_options(options)) if isinstance(self.cost, EncodingCost) else 1

    def describe_wrong_type(self, option: str, value: Any) -> str | None:
        """Describe a type error of an option's value as a clause that follows the option's name.

        Returns None if the type is valid, or if the file does not declare one.
        """
        names = self.option_types.get(option, ())
        allowed = [name for name in names if name != "None"]
        if len(allowed) != 1 or allowed[0] not in _OPTION_TYPES or (value is None and "None" in names):
            return None
        expected = _OPTION_TYPES[allowed[0]]
        valid = isinstance(value, expected) or (expected is float and isinstance(value, int))
        if valid and isinstance(value, float) and not math.isfinite(value):
            return f"is {value}; it must be a finite number"
        if valid and (expected is bool or not isinstance(value, bool)):
            return None
        return f"is {'null' if value is None else repr(value)}; it must be of type {allowed[0]}"

    def fill_options(self, options: Mapping[str, Any]) -> MethodOptions:
        """Return all options: the given ones, and defaults for the others."""
        return {**(self.defaults or {}), **options}


def list_encodings() -> list[str]:
    """Return the names of all position encodings in alphabetical order."""
    return _list_names("encodings")


def list_processors() -> list[str]:
    """Return the names of all score processors in alphabetical order, without `none`."""
    return _list_names("processors")


def list_temperatures() -> list[str]:
    """Return the names of all attention temperatures in alphabetical order, without `none`."""
    return _list_names("temperatures")


def read_encoding_facts(name: str) -> MethodFacts:
    """Read the declarations of an encoding.

    Raises MethodFileError if the file is not valid Python, the name of a hook is misspelled, or no hook is implemented.
    """
    return _read_facts(find_method_file("encodings", name))


def read_processor_facts(name: str) -> MethodFacts:
    """Read the declarations of a processor. Raises MethodFileError if the file is not valid Python."""
    return _read_facts(find_method_file("processors", name))


def read_temperature_facts(name: str) -> MethodFacts:
    """Read the declarations of a temperature. Raises MethodFileError if the file is not valid Python."""
    return _read_facts(find_method_file("temperatures", name))


def select_encoding_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Select the options that an encoding has from options shared by several; all if its file does not declare them."""
    return _select_options(read_encoding_facts(name), options)


def select_processor_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Select the options that a processor has. `none` has no options."""
    return {} if name == "none" else _select_options(read_processor_facts(name), options)


def select_temperature_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Select the options that a temperature has. `none` has no options."""
    return {} if name == "none" else _select_options(read_temperature_facts(name), options)


def _select_options(facts: MethodFacts, options: Mapping[str, Any]) -> dict[str, Any]:
    known = facts.defaults
    return {name: value for name, value in options.items() if known is None or name in known}


def check_hook_names(class_name: str, functions: Iterable[str], hooks: Iterable[str], *, takes_positions: bool) -> None:
    """Check that no hook of an encoding is misspelled and that at least one is implemented.

    Args:
        class_name: class of the encoding, with its file.
        functions: functions that the class defines.
        hooks: hooks that the class implements or inherits.
        takes_positions: declaration of the class.

    Raises:
        MethodFileError: names the file, the class and the function.
    """
    for name in functions:
        if name in OVERRIDABLE or name.startswith("_"):
            continue
        if matches := difflib.get_close_matches(name, OVERRIDABLE, 1, cutoff=0.75):
            raise MethodFileError(f"{class_name}.{name} is not a hook of an encoding; did you mean {matches[0]}?")
    if takes_positions and not any(hooks):
        raise MethodFileError(
            f"{class_name} implements none of the hooks {', '.join(HOOKS)}; an encoding without positions sets "
            "takes_positions = False"
        )


def format_path(path: Path) -> str:
    """Format a path for messages: relative to the project if the file is part of it."""
    root = FOLDER.parent.parent
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def find_method_file(kind: str, name: str) -> Path:
    """Return the file of a method. Methods of the project take precedence over those in `FARFIELD_METHODS`.

    Args:
        kind: encodings, processors or temperatures.
        name: name of the method.
    """
    for folder in _list_folders(kind):
        if name in _read_folder(folder):
            return _build_path(folder, name)
    raise MethodFileError(
        f"{name}.py not found in {format_path(_PROJECT_FOLDERS[kind])} or in the folders of {METHODS_VARIABLE}"
    )


@cache
def _build_path(folder: Path, name: str) -> Path:
    """Return the path of a method's file. Cached, because a plan requests the same few files thousands of times."""
    return folder / f"{name}.py"


def compute_method_digests(names_by_kind: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Compute digests of the code of user-defined methods, by file (encodings/fox.py).

    The project's methods are excluded. Comments, docstrings, layout and descriptions do not affect a digest.

    Args:
        names_by_kind: names of methods under encodings, processors and temperatures.
    """
    digests = {}
    for kind, names in names_by_kind.items():
        for name in names:
            path = find_method_file(kind, name)
            if path.parent != _PROJECT_FOLDERS[kind]:
                code = repr(_list_code(_parse_file(path)))
                digests[f"{kind}/{path.name}"] = hashlib.sha256(code.encode()).hexdigest()[:16]
    return digests


def _list_code(node: Any) -> Any:
    """Return a syntax tree as nested tuples, without docstrings and descriptions, equal in all Python versions."""
    if isinstance(node, list):
        return tuple(map(_list_code, node))
    if not isinstance(node, ast.AST):
        return node
    fields = {name: value for name, value in ast.iter_fields(node) if value not in (None, [])}
    if "body" in fields and isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        described = isinstance(node, ast.ClassDef)
        fields["body"] = [part for part in node.body if not (_is_text(part) or (described and _is_description(part)))]
    return (type(node).__name__, *((name, _list_code(value)) for name, value in sorted(fields.items())))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_description(node: ast.AST) -> bool:
    """Return True for an assignment to a description of the class."""
    if not isinstance(node, ast.Assign):
        return False
    names = {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return names <= _DESCRIPTIONS


def _list_names(kind: str) -> list[str]:
    project_folder, *folders = _list_folders(kind)
    names = dict.fromkeys(_read_folder(project_folder), project_folder)
    for folder in folders:
        for name in _read_folder(folder):
            if name in names:
                raise MethodFileError(
                    f"{format_path(folder / f'{name}.py')}: {format_path(names[name] / f'{name}.py')} already has "
                    "that name; rename one of the files"
                )
            names[name] = folder
    return sorted(names)


def _list_folders(kind: str) -> list[Path]:
    """Return the folders of one kind of method: the project's, then the user's."""
    folders = [_PROJECT_FOLDERS[kind]]
    for text in dict.fromkeys(filter(None, os.environ.get(METHODS_VARIABLE, "").split(os.pathsep))):
        root = Path(text).absolute()
        if not any((root / other).is_dir() for other in KINDS):
            raise MethodFileError(f"{METHODS_VARIABLE}: {text} has no folder {', '.join(KINDS[:-1])} or {KINDS[-1]}")
        if (root / kind).is_dir():
            folders.append(root / kind)
    return folders


def _read_folder(folder: Path) -> tuple[str, ...]:
    return _read_names(folder, os.stat(folder).st_mtime_ns)


@cache
def _read_names(folder: Path, changed: int) -> tuple[str, ...]:
    """Return the method names in a folder, cached by its modification time.

    A plan requests them thousands of times.
    """
    names = sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))
    for name in names:
        if not name.isidentifier() or name != name.lower():
            raise MethodFileError(
                f"{format_path(folder / f'{name}.py')}: the name may only contain lowercase letters, digits and _"
            )
    return tuple(names)


def _read_facts(path: Path) -> MethodFacts:
    return _parse_facts(path, get_change_time(path))


def get_change_time(path: Path) -> int:
    """Return the modification time of a method's file, in nanoseconds. Users may edit it while a program runs.

    Raises MethodFileError if the file cannot be read.
    """
    try:
        return os.stat(path).st_mtime_ns
    except OSError as error:
        raise MethodFileError(f"{format_path(path)}: cannot be read ({error.strerror})") from error


def _parse_file(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MethodFileError(f"{format_path(path)}: cannot be read ({error.strerror})") from error
    except SyntaxError as error:
        raise MethodFileError(f"{format_path(path)}:{error.lineno}: {error.msg}") from error
    except ValueError as error:  # not UTF-8, or a byte that is not allowed in text
        raise MethodFileError(f"{format_path(path)}: not a valid Python file: {error}") from error


@cache
def _parse_facts(path: Path, changed: int) -> MethodFacts:
    tree = _parse_file(path)
    imports = {
        alias.asname or alias.name: str(node.module)
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        for base in (base.id for base in node.bases if isinstance(base, ast.Name)):
            if base in BASES:
                return _read_class(path, node, MethodFacts(path.stem, path, {}, frozenset()))
            if imports.get(base, "").startswith("megatron.position."):  # a method derived from another
                inherited = _read_facts(FOLDER.joinpath(*imports[base].split(".")[2:]).with_suffix(".py"))
                return _read_class(path, node, inherited)
    # options and hooks are only known by running the code, so assume all hooks
    return MethodFacts(path.stem, path, None, frozenset(HOOKS))


def _read_class(path: Path, node: ast.ClassDef, inherited: MethodFacts) -> MethodFacts:
    functions = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    facts: dict[str, Any] = {**vars(inherited), "name": path.stem, "path": path}
    facts["hooks"] = inherited.hooks | functions.keys() & set(HOOKS)
    facts["has_kernel_parameters"] = inherited.has_kernel_parameters or "kernel_parameters" in functions
    facts["other_names"] = ()
    if "__init__" in functions:
        facts["defaults"] = _read_defaults(path, node.name, functions["__init__"].args)
        facts["option_types"] = _read_option_types(functions["__init__"].args)
    for item in node.body:
        targets = item.targets if isinstance(item, ast.Assign) else [getattr(item, "target", None)]
        for name in (target.id for target in targets if isinstance(target, ast.Name)):
            if name in _DECLARED and isinstance(item, ast.Assign | ast.AnnAssign) and item.value is not None:
                facts[name] = _evaluate(path, f"{node.name}.{name}", item.value)
    if path.parent.name == "encodings":
        check_hook_names(
            f"{format_path(path)}: {node.name}", functions, facts["hooks"], takes_positions=facts["takes_positions"]
        )
    return MethodFacts(**facts)


def _read_defaults(path: Path, class_name: str, arguments: ast.arguments) -> dict[str, Any] | None:
    if arguments.kwarg is not None:
        return None
    pairs = [
        *zip(reversed(arguments.args), reversed(arguments.defaults), strict=False),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    defaults = {}
    for argument, default in pairs:
        try:
            defaults[argument.arg] = ast.literal_eval(default) if default is not None else None
        except ValueError as error:
            assert default is not None
            raise MethodFileError(
                f"{format_path(path)}:{default.lineno}: {class_name}: the default of {argument.arg} must be a literal: "
                "a number, a string, True, False or None"
            ) from error
    names = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
    return {name: defaults.get(name) for name in names if name not in MODEL_ARGUMENTS}


def _read_option_types(arguments: ast.arguments) -> dict[str, tuple[str, ...]]:
    return {
        argument.arg: tuple(ast.unparse(argument.annotation).split(" | "))
        for argument in (*arguments.args, *arguments.kwonlyargs)
        if argument.annotation is not None and argument.arg not in MODEL_ARGUMENTS
    }


def _evaluate(path: Path, name: str, expression: ast.expr) -> Any:
    code = compile(ast.Expression(expression), str(path), "eval")
    try:
        return eval(code, dict(_NAMESPACE))  # only files that are imported anyway when a model is built
    except Exception as error:
        raise MethodFileError(
            f"{format_path(path)}:{expression.lineno}: {name} may only use Python's builtins and "
            f"{', '.join(_NAMESPACE)}: {error}"
        ) from error
