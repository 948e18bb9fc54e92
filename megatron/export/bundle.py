"""The modelling code that travels with an export: this project's own files, flat in one folder.

transformers finds the files of a model by the text of their imports, one folder deep. So what an export needs of
`megatron/position` is copied with one change: every import, however far it reaches, becomes one of a file beside it.
The registry, which looks methods up by the files there are, is replaced by one that names the two of this model.

transformers keeps the modules of a model by the name of its folder, whatever is in it. So the name of each file ends in
a digest of all of them: two exports whose folders are called alike never run each other's code in one process.

The files must be torch-only and import one another relatively, by lines of their own; `tests/export` holds that.
"""

import ast
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from megatron.position import registry
from megatron.position.method import PositionModule

HERE = Path(__file__).parent / "bundled"
MODELING, CONFIGURATION = HERE / "modeling_farfield.py", HERE / "configuration_farfield.py"
_IMPORT = re.compile(r"^from \.+(?:[\w.]*\.)?(\w+) import", re.MULTILINE)

_NAMED = """
# transformers 4 copies the files that this one names, not those that they name in turn.
{lines}
"""

_REGISTRY = '''"""The position methods of this model."""

from typing import Any

{imports}
from .shape import AttentionDims

ENCODINGS = {encodings}
PROCESSORS = {processors}


def build_encoding(name: str, dims: AttentionDims, options: dict[str, Any]) -> Encoding:
    """The position encoding of that name."""
    return _find(ENCODINGS, name)(dims, **options)


def build_processor(name: str, dims: AttentionDims, options: dict[str, Any], *, has_bias: bool) -> Processor:
    """The score processor of that name, for an encoding with or without a bias."""
    return _find(PROCESSORS, name)(dims, has_bias=has_bias, **options)


def _find(known: dict[str, Any], name: str) -> Any:
    if name not in known:
        raise ValueError(f"{{name!r}}: this export has the code of {{', '.join(known) or 'no such method'}} only")
    return known[name]
'''


def bundle(encoding: str, processor: str) -> dict[str, str]:
    """The files of a model's code, by name.

    Args:
        encoding, processor: the model's; `none` for no processor.
    """
    chosen: list[type[PositionModule]] = [registry.load_encoding_class(encoding)]
    if processor != "none":
        chosen.append(registry.load_processor_class(processor))
    files = {CONFIGURATION.stem: CONFIGURATION.read_text(encoding="utf-8")}
    wanted = [MODELING, *(_file_of(method) for method in chosen)]
    while wanted:
        path = wanted.pop()
        if path.stem in files:
            continue
        if path == Path(registry.__file__):
            files[path.stem] = _registry(chosen)
            continue
        text = path.read_text(encoding="utf-8")
        files[path.stem] = flattened(text)
        wanted += [target for target in imported(path) if target.stem not in files]
    files[MODELING.stem] = _naming_all(files[MODELING.stem], sorted(set(files) - {MODELING.stem}))
    return {f"{name}.py": text for name, text in sorted(files.items())}


def name_by_content(files: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """The same files under names that no other content has, and what was put at the end of each name."""
    content = "\0".join(f"{name}\0{text}" for name, text in sorted(files.items()))
    suffix = f"_{hashlib.sha256(content.encode()).hexdigest()[:8]}"
    named = {}
    for name, text in files.items():
        renamed = _IMPORT.sub(lambda match: f"from .{match[1]}{suffix} import", text)
        named[f"{Path(name).stem}{suffix}.py"] = renamed
    return named, suffix


def imported(path: Path) -> list[Path]:
    """The files that a file imports relatively."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1]
            found.append(folder.joinpath(*(node.module or "").split(".")).with_suffix(".py"))
    return found


def flattened(text: str) -> str:
    """A file's text with every relative import reaching for a file beside it."""
    return _IMPORT.sub(r"from .\1 import", text)


def _file_of(method: type[PositionModule]) -> Path:
    return Path(registry.__file__).parent.joinpath(*method.__module__.split(".")[-2:]).with_suffix(".py")


def _registry(chosen: list[type[PositionModule]]) -> str:
    named = {method.__module__.rpartition(".")[2]: method.__name__ for method in chosen}
    encoding, *processors = named.items()
    lines = [f"from .{module} import {name}" for module, name in named.items()]
    lines += ["from .encoding import Encoding", "from .processor import Processor"]
    return _REGISTRY.format(
        imports="\n".join(sorted(lines)),
        encodings=_table([encoding]),
        processors=_table(processors),
    )


def _table(entries: list[tuple[str, str]]) -> str:
    return "{" + ", ".join(f'"{module}": {name}' for module, name in entries) + "}"


def _naming_all(text: str, others: list[str]) -> str:
    """The modelling code with a line for each of the other files, after its imports."""
    lines = "\n".join(f"from .{name} import __name__ as _  # noqa: F401" for name in others)
    end = max(node.end_lineno or 0 for node in ast.parse(text).body if isinstance(node, ast.ImportFrom))
    kept = text.splitlines(keepends=True)
    return "".join([*kept[:end], _NAMED.format(lines=lines), *kept[end:]])
