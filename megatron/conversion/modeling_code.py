"""Modeling code that is included in an export: this project's own files, flat in one folder.

transformers finds the files of a model by the text of their imports, one folder deep. The files needed from
`megatron/position` and `megatron/attention` are therefore copied with one change: every import of this project becomes
a relative import. For this reason no two of these files may have the same name. The registry, which finds methods by
their files, is replaced by one that lists the methods of this model. A user's own methods are copied like the others if
they follow the same import rules.

transformers caches the modules of a model by the name of its folder, regardless of their content. The name of each file
therefore ends in a digest of all files: exports with equal folder names never run each other's code in one process.

The files must depend only on torch, and each import of this project must be on its own line; `tests/conversion` checks
both.
"""

import ast
import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from megatron.position import registry
from megatron.position.base import PositionModule
from megatron.position.catalog import find_method_file, format_path
from megatron.position.encoding import Encoding
from megatron.position.processor import Processor
from megatron.position.temperature import Temperature
from megatron.utils.errors import UserError
from megatron.utils.project import PACKAGES_FOLDER

BUNDLED_FOLDER = Path(__file__).parent / "bundled"
MODELING_FILE, CONFIGURATION_FILE = (
    BUNDLED_FOLDER / "modeling_farfield.py",
    BUNDLED_FOLDER / "configuration_farfield.py",
)
_OUR_PACKAGES = {"megatron", "farfield"}
_SOURCE_FOLDERS = (PACKAGES_FOLDER / "megatron" / "position", PACKAGES_FOLDER / "megatron" / "attention")
_PROJECT_IMPORT = re.compile(r"^from megatron\.(?:\w+\.)*(\w+) import", re.MULTILINE)
_RELATIVE_IMPORT = re.compile(r"^from \.(\w+) import", re.MULTILINE)

_BASES: tuple[type[PositionModule], ...] = (Encoding, Processor, Temperature)

_IMPORT_ALL_TEMPLATE = """
# transformers 4 copies only the files imported here, not those that they import in turn.
{lines}
"""

_REGISTRY_TEMPLATE = '''"""Position methods of this model."""

from typing import Any

{imports}
from .facts import AttentionDims

ENCODINGS = {encodings}
PROCESSORS = {processors}
TEMPERATURES = {temperatures}


def build_encoding(name: str, dims: AttentionDims, options: dict[str, Any]) -> Encoding:
    """Build a position encoding by name."""
    return _find(ENCODINGS, name)(dims, **options)


def build_processor(name: str, dims: AttentionDims, options: dict[str, Any], *, has_bias: bool) -> Processor:
    """Build a score processor by name, for an encoding with or without a bias."""
    return _find(PROCESSORS, name)(dims, has_bias=has_bias, **options)


def build_temperature(name: str, dims: AttentionDims, options: dict[str, Any]) -> Temperature:
    """Build an attention temperature by name."""
    return _find(TEMPERATURES, name)(dims, **options)


def _find(known: dict[str, Any], name: str) -> Any:
    if name not in known:
        raise ValueError(f"{{name!r}}: unknown method; this export contains {{', '.join(known) or 'none'}}")
    return known[name]
'''


def bundle_modeling_code(
    encodings: Sequence[str], processors: Sequence[str], temperatures: Sequence[str] = ()
) -> dict[str, str]:
    """Return the code files of a model, by name.

    Args:
        encodings, processors, temperatures: methods of the model's layers; `none` for no processor or temperature.

    Raises:
        UserError: a user's own method cannot be exported; the message names its file and line.
    """
    methods: list[type[PositionModule]] = [registry.load_encoding_class(name) for name in encodings]
    methods += [registry.load_processor_class(name) for name in processors if name != "none"]
    methods += [registry.load_temperature_class(name) for name in temperatures if name != "none"]
    files = {CONFIGURATION_FILE.stem: CONFIGURATION_FILE.read_text(encoding="utf-8")}
    paths = {CONFIGURATION_FILE.stem: CONFIGURATION_FILE}
    pending = [MODELING_FILE, *(_get_source_file(method) for method in methods)]
    while pending:
        path = pending.pop()
        if (same := paths.setdefault(path.stem, path)) != path:
            own, other = sorted((path, same), key=_is_project_file)
            raise UserError(
                f"{format_path(own)}: an export has all files in one folder, but {format_path(other)} has the same name"
            )
        if path.stem in files:
            continue
        if path == Path(registry.__file__):
            files[path.stem] = _render_registry(methods)
            continue
        text = path.read_text(encoding="utf-8")
        if not _is_project_file(path):
            _check_own_imports(path, text)
        files[path.stem] = flatten_imports(text)
        pending += [target for target in list_project_imports(text) if paths.get(target.stem) != target]
    files[MODELING_FILE.stem] = _import_all_modules(
        files[MODELING_FILE.stem], sorted(set(files) - {MODELING_FILE.stem})
    )
    return {f"{name}.py": text for name, text in sorted(files.items())}


def add_content_digest(files: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Return the files under names that are unique to their content, and the suffix added to each name."""
    content = "\0".join(f"{name}\0{text}" for name, text in sorted(files.items()))
    suffix = f"_{hashlib.sha256(content.encode()).hexdigest()[:8]}"
    renamed_files = {}
    for name, text in files.items():
        renamed = _RELATIVE_IMPORT.sub(lambda match: f"from .{match[1]}{suffix} import", text)
        renamed_files[f"{Path(name).stem}{suffix}.py"] = renamed
    return renamed_files, suffix


def remove_content_digest(files: Mapping[str, str], suffix: str) -> dict[str, str]:
    """Return the original files of `add_content_digest`, given its files and their suffix."""
    relative_import = re.compile(rf"^from \.(\w+){suffix} import", re.MULTILINE)
    return {
        f"{name.removesuffix(f'{suffix}.py')}.py": relative_import.sub(r"from .\1 import", text)
        for name, text in files.items()
    }


@cache
def list_project_imports(text: str) -> tuple[Path, ...]:
    """Return the project's files imported by a file with this text. Cached because exports share most files."""
    nodes = ast.walk(ast.parse(text))
    modules = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module is not None]
    return tuple(
        PACKAGES_FOLDER.joinpath(*module.split(".")).with_suffix(".py")
        for module in modules
        if module.startswith("megatron.")
    )


def flatten_imports(text: str) -> str:
    """Return a file's text with every import of this project as a relative import."""
    return _PROJECT_IMPORT.sub(r"from .\1 import", text)


def _get_source_file(method: type[PositionModule]) -> Path:
    kind, name = method.__module__.split(".")[-2:]
    return find_method_file(kind, name)


def _is_project_file(path: Path) -> bool:
    """Return True if a file belongs to the project; a user's own may be anywhere, including the repository."""
    folders = (*_SOURCE_FOLDERS, BUNDLED_FOLDER)
    return any(path.resolve().is_relative_to(folder.resolve()) for folder in folders)


def _check_own_imports(path: Path, text: str) -> None:
    """Check that all project files imported by a user's file are part of the export. Raises UserError."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        if {name.partition(".")[0] for name in names}.isdisjoint(_OUR_PACKAGES):
            continue
        is_rewritten = _PROJECT_IMPORT.match(lines[node.lineno - 1]) is not None
        files = list_project_imports(ast.unparse(node)) if is_rewritten else ()
        if not files or not all(file.is_file() and any(map(file.is_relative_to, _SOURCE_FOLDERS)) for file in files):
            raise UserError(
                f"{path}:{node.lineno}: {ast.unparse(node)}: an export can include only imports at the start of a "
                "line of the form `from megatron.position.MODULE import` or `from megatron.attention.MODULE import`"
            )


def _render_registry(methods: list[type[PositionModule]]) -> str:
    lines = [f"from .{_get_source_file(method).stem} import {method.__name__}" for method in methods]
    lines += [f"from .{base.__module__.rpartition('.')[2]} import {base.__name__}" for base in _BASES]
    encodings, processors, temperatures = (_render_mapping(methods, base) for base in _BASES)
    return _REGISTRY_TEMPLATE.format(
        imports="\n".join(sorted(lines)), encodings=encodings, processors=processors, temperatures=temperatures
    )


def _render_mapping(methods: list[type[PositionModule]], base: type[PositionModule]) -> str:
    entries = (f'"{_get_source_file(m).stem}": {m.__name__}' for m in methods if issubclass(m, base))
    return "{" + ", ".join(entries) + "}"


def _import_all_modules(text: str, modules: list[str]) -> str:
    """Return the modeling code with an import of each of the other files, after its own imports."""
    lines = "\n".join(f"from .{name} import __name__ as _  # noqa: F401" for name in modules)
    end = _find_end_of_imports(text)
    lines_of_code = text.splitlines(keepends=True)
    return "".join([*lines_of_code[:end], _IMPORT_ALL_TEMPLATE.format(lines=lines), *lines_of_code[end:]])


@cache
def _find_end_of_imports(text: str) -> int:
    """Return the last line of a file's imports. Cached because all exports have the same modeling code."""
    return max(node.end_lineno or 0 for node in ast.parse(text).body if isinstance(node, ast.ImportFrom))
