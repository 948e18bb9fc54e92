"""YAML 1.2 with line numbers, for files written by people.

YAML 1.2 reads 6e-4 as a number; YAML 1.1 (and so PyYAML) reads it as a string. JSON-like files with True, False and
trailing commas load unchanged. A repeated key is an error, since one of its values would be ignored. Only plain data is
constructed, even from a file with tags. Large files, too many or too deeply nested values, and anchors that expand to
many values (ten lines can expand to billions) are rejected during parsing.
"""

import io
import json
import re
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    CollectionStartEvent,
    Event,
    MappingEndEvent,
    NodeEvent,
    SequenceEndEvent,
)
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.parser import Parser
from ruamel.yaml.representer import SafeRepresenter
from ruamel.yaml.resolver import VersionedResolver

from megatron.utils.errors import UserError, quote_text, shorten_text

ALLOWED_TAGS = re.compile(r"[\w./]([\w./+=, -]*[\w./+=-])?", re.ASCII)
YAML_TAGS = "tag:yaml.org,2002:"
MERGE_TAG = f"{YAML_TAGS}merge"
TEXT_TAG = f"{YAML_TAGS}str"

MAX_BYTES = 1 << 20
MAX_NODES = 10_000
"""Largest number of keys, values, lists and mappings, including expanded aliases. The largest file here, zoo.yml, has
500."""
MAX_NESTING = 50
"""Largest depth of nested lists and mappings."""


def format_value(value: Any) -> str:
    """Format a value as in YAML for use in one line; a long one is shortened."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, dict):
        return shorten_text(f"{{{', '.join(f'{name}: {format_value(item)}' for name, item in value.items())}}}")
    return shorten_text(str(value)) or "''"


def quote_value(value: Any) -> str:
    """Format a value of the wrong type, with a string in quotes: '2' is not 2."""
    return quote_text(value) if isinstance(value, str) else format_value(value)


def describe_non_mapping(value: Any) -> str:
    """Return the end of an error about a value that must be a mapping, which begins with the key."""
    if value is None:
        return "is empty (null); give it keys, or remove it"
    return f"is {quote_value(value)}; it must be a mapping of keys to values"


@dataclass(frozen=True)
class YamlDocument:
    """Parsed file: its mapping, and the line of each key (counted from 1) by its path."""

    source: str
    values: dict[str, Any]
    lines: dict[tuple[str, ...], int]

    def locate(self, path: tuple[str, ...]) -> str:
        """Return `file:line` of a key."""
        return f"{self.source}:{self.lines[path]}" if path in self.lines else self.source


def _build_loader() -> YAML:
    return YAML(typ="safe", pure=True)


class _TextDates(VersionedResolver):
    """Resolver without dates. YAML 1.2 has none, but ruamel keeps those of YAML 1.1; they are read as strings."""

    def add_version_implicit_resolver(self, version: Any, tag: Any, regexp: Any, first: Any) -> None:
        if not tag.endswith(":timestamp"):
            super().add_version_implicit_resolver(version, tag, regexp, first)


def _create_loader(source: str, *, has_lines: bool = True) -> YAML:
    """Create a loader that rejects tags, and too many or too deeply nested values.

    source: name of the file in messages; has_lines: add the line.
    """
    loader = _build_loader()
    loader.Resolver = _TextDates
    loader.Parser = partial(_BoundedParser, source=source, has_lines=has_lines)
    return loader


@dataclass
class _OpenCollection:
    """List or mapping whose end has not been read."""

    anchor: str | None
    num_nodes_before: int
    num_levels: int = 1
    """Depth of the collections inside, counting this one and expanded aliases."""


class _BoundedParser(Parser):
    """Parser that rejects tags, and too many or too deeply nested values, before they are constructed."""

    def __init__(self, loader: YAML, source: str, has_lines: bool) -> None:
        super().__init__(loader)
        self.source, self.has_lines = source, has_lines
        self.num_nodes = 0
        self.anchors: dict[str, tuple[int, int]] = {}  # nodes and levels that each closed anchor expands to
        self.opened: list[_OpenCollection] = []

    def get_event(self) -> Any:
        event = super().get_event()
        if (tag := getattr(event, "tag", None)) is not None:
            tag = quote_text(str(tag).replace(YAML_TAGS, "!!"))
            raise self._build_error(event, f"tag {tag} is not allowed; only plain values are read")
        if isinstance(event, AliasEvent):
            if any(event.anchor == each.anchor for each in self.opened):
                raise self._build_error(event, f"alias *{event.anchor} is inside its own anchor; remove it")
            self._add(event, *self.anchors.get(event.anchor, (1, 0)))
        elif isinstance(event, CollectionStartEvent):
            self._add(event, 1, 1)
            self.opened.append(_OpenCollection(event.anchor, self.num_nodes - 1))
        elif isinstance(event, NodeEvent):
            self._add(event, 1, 0)
            self.anchors |= {event.anchor: (1, 0)} if event.anchor else {}
        elif isinstance(event, MappingEndEvent | SequenceEndEvent):
            closed = self.opened.pop()
            if closed.anchor:
                self.anchors[closed.anchor] = (self.num_nodes - closed.num_nodes_before, closed.num_levels)
            if self.opened:
                self.opened[-1].num_levels = max(self.opened[-1].num_levels, closed.num_levels + 1)
        return event

    def _add(self, event: Event, num_nodes: int, num_levels: int) -> None:
        """Count nodes and levels inside the innermost open collection."""
        self.num_nodes += num_nodes
        if self.num_nodes > MAX_NODES:
            raise self._build_error(event, f"more than {MAX_NODES:,} values, counting expanded aliases")
        if len(self.opened) + num_levels > MAX_NESTING:
            raise self._build_error(event, f"nested too deeply for a configuration: more than {MAX_NESTING} levels")
        if self.opened:
            self.opened[-1].num_levels = max(self.opened[-1].num_levels, num_levels + 1)

    def _build_error(self, event: Event, reason: str) -> UserError:
        line = f":{event.start_mark.line + 1}" if self.has_lines else ""
        return UserError(f"{self.source}{line}: {reason}")


def _format_yaml_error(source: str, error: YAMLError) -> UserError:
    """Convert a multi-line error of ruamel to one line with file and line."""
    if not isinstance(error, MarkedYAMLError) or error.problem is None:
        return UserError(f"{source}: not valid YAML: {' '.join(str(error).split())}")
    mark = error.problem_mark or error.context_mark
    where = f"{source}:{mark.line + 1}" if mark else source
    problem = " ".join(error.problem.split())
    if "duplicate key" in problem:
        name = problem.split('"')[1]
        return UserError(f"{where}: key {quote_text(name)} is given twice; remove one of the two")
    if "'\\t'" in problem:
        problem = "a tab is used instead of spaces"
    elif "expected a single document" in f"{error.context} {problem}":
        problem = "a second document starts here ('---'); a configuration is one document"
    elif error.context_mark and error.context_mark.line != mark.line:
        problem += f", in the block that begins on line {error.context_mark.line + 1}"
    return UserError(f"{where}: not valid YAML: {problem}")


def _locate_bad_scalar(node: Node | None, source: str) -> str:
    """Return `file:line` of the first scalar that cannot be converted to a value."""
    if isinstance(node, ScalarNode):
        try:
            _build_loader().constructor.construct_document(node)
        except ValueError:
            return f"{source}:{node.start_mark.line + 1}"
    elif isinstance(node, SequenceNode | MappingNode):
        parts = node.value if isinstance(node, SequenceNode) else [part for pair in node.value for part in pair]
        for part in parts:
            if (where := _locate_bad_scalar(part, source)) != source:
                return where
    return source


def _collect_lines(node: Node, path: tuple[str, ...], lines: dict[tuple[str, ...], int]) -> None:
    """Collect the line of every key."""
    if not isinstance(node, MappingNode):
        return
    for key_node, value_node in node.value:
        if key_node.tag == MERGE_TAG:  # `<<: *anchor`: keys keep the lines of the anchor
            mappings = [value_node] if isinstance(value_node, MappingNode) else value_node.value
            for mapping in mappings:
                _collect_lines(mapping, path, lines)
            continue
        key_path = (*path, str(key_node.value))
        lines[key_path] = key_node.start_mark.line + 1
        _collect_lines(value_node, key_path, lines)


def _check_keys(node: Node | None, source: str, *, has_lines: bool = True) -> None:
    """Raise UserError for a key that is not a string, before values are constructed and lose its spelling and line."""
    if isinstance(node, SequenceNode):
        for item in node.value:
            _check_keys(item, source, has_lines=has_lines)
    elif isinstance(node, MappingNode):
        for key, value in node.value:
            where = f"{source}:{key.start_mark.line + 1}" if has_lines else source
            if not isinstance(key, ScalarNode):
                kind = "list" if isinstance(key, SequenceNode) else "mapping"
                raise UserError(f"{where}: a key is a {kind}; it must be a string")
            if key.tag not in (TEXT_TAG, MERGE_TAG):
                raise UserError(f"{where}: key {shorten_text(key.value)} is not a string; put it in quotes")
            _check_keys(value, source, has_lines=has_lines)


def _check_characters(
    value: Any, source: str, line: int, lines: dict[tuple[str, ...], int], path: tuple[str, ...]
) -> None:
    """Reject null characters, which paths and environment variables cannot contain. `line` is 0 on the command line."""
    line = lines.get(path, line)
    where = f"{source}:{line}" if line else source
    name = ".".join(path) or "value"
    if isinstance(value, dict):
        for key, item in value.items():
            if "\0" in key:
                raise UserError(f"{where}: key {quote_text(key)} contains a null character; remove it")
            _check_characters(item, source, line, lines, (*path, key))
    elif isinstance(value, list):
        for inner in value:
            _check_characters(inner, source, line, lines, path)
    elif isinstance(value, str) and "\0" in value:
        raise UserError(f"{where}: {name} is {quote_text(value)}; a string cannot contain a null character")


def read_text(path: Path) -> str:
    """Read a small text file. Raises UserError if it is too large or not valid UTF-8."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise UserError(f"{path}: file is larger than {MAX_BYTES:,} bytes; not a configuration file")
        return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file (byte {error.start} is not UTF-8)") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def parse_yaml(text: str, source: str) -> YamlDocument:
    """Parse the mapping in `text`; `source` names it in messages. Empty text is an empty mapping."""
    return deepcopy(_parse_with_lines(text, source))


@lru_cache(maxsize=512)
def _parse_with_lines(text: str, source: str) -> YamlDocument:
    """Parse and cache a document. A sweep and its runs read the same files many times, at 20 ms each."""
    try:
        loader = _create_loader(source)
        node = loader.compose(io.StringIO(text))
        _check_keys(node, source)
        values = None if node is None else loader.constructor.construct_document(node)
    except YAMLError as error:
        raise _format_yaml_error(source, error) from error
    except ValueError as error:  # for example a scalar that looks like a date but is not valid
        # Cut off Python's advice to programmers.
        raise UserError(f"{_locate_bad_scalar(node, source)}: not valid YAML: {str(error).split(';')[0]}") from error
    if values is None:
        return YamlDocument(source, {}, {})
    if not isinstance(values, dict):
        kind = {list: "a list"}.get(type(values), "a single value")
        raise UserError(f"{source}: contains {kind}; it must be a mapping of keys to values")
    lines: dict[tuple[str, ...], int] = {}
    _collect_lines(node, (), lines)
    _check_characters(values, source, 1, lines, ())
    return YamlDocument(source, values, lines)


def read_yaml(path: Path) -> YamlDocument:
    """Read one configuration file. Raises UserError with file and line for any problem."""
    return parse_yaml(read_text(path), str(path))


def parse_scalar(text: str, source: str) -> Any:
    """Parse a single value as on the right of `key=value`; empty text is null.

    Examples are `1e-3`, `true`, `[0.9, 0.95]` and `rotary`.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{source}: {quote_text(text)} is not valid UTF-8; choose another name") from None
    try:
        loader = _create_loader(source, has_lines=False)
        node = loader.compose(io.StringIO(text))
        _check_keys(node, source, has_lines=False)
        value = None if node is None else loader.constructor.construct_document(node)
        _check_characters(value, source, 0, {}, ())
    except DuplicateKeyError as error:
        raise UserError(f"{source}: {quote_text(text)} gives a key twice; remove one of the two") from error
    except (YAMLError, ValueError) as error:
        raise UserError(
            f"{source}: {quote_text(text)} is not a YAML value; put it in quotes if it is meant as a string"
        ) from error
    first, end = (0, 0) if node is None else (node.start_mark.index, node.end_mark.index)
    if (text[:first] + text[end:]).strip():  # a comment, or the beginning of a document
        raise UserError(
            f"{source}: only a part of {quote_text(text)} is a YAML value; put it in quotes if it is meant as a string"
        )
    return value


class _Representer(SafeRepresenter):
    """Representer that writes a list on one line, and each key of a mapping on its own line."""

    def represent_list(self, data: list[Any]) -> SequenceNode:
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)

    def represent_str(self, data: str) -> ScalarNode:
        # Double quotes escape everything special to YAML: line breaks of all scripts, `? `, `: `, `#` …
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if ALLOWED_TAGS.fullmatch(data) else '"')


_Representer.add_representer(list, _Representer.represent_list)
_Representer.add_representer(str, _Representer.represent_str)


def dump_yaml(values: dict[str, Any]) -> str:
    """Write a mapping as plain YAML 1.2, in its order.

    It may contain only JSON values with string keys; tuples become lists.
    """
    return _convert_json_to_yaml(json.dumps(values))


@lru_cache(maxsize=512)
def _convert_json_to_yaml(text: str) -> str:
    """Convert a mapping from JSON to YAML.

    Results are cached, because a run writes the same sections with every checkpoint.
    """
    values = json.loads(text)
    writer = _build_loader()
    writer.Representer = _Representer
    writer.default_flow_style = False
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    writer.width = 10_000  # keep a value on one line
    stream = io.StringIO()
    writer.dump(values, stream)
    return stream.getvalue()
