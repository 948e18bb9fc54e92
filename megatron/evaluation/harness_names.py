"""Check of the names of lm-evaluation-harness tasks, before the harness is imported.

The harness reads thousands of task files to find a name, which takes most of a minute. A name that occurs in none of
these files cannot be one, and searching their text takes about a second.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron.utils.errors import UserError
from megatron.utils.formatting import suggest_names

DECLARED_NAME = re.compile(rb"^(?:task|group|tag):[ \t]*['\"]?([\w.-]+)", re.MULTILINE)
"""Pattern for the name that a task file declares, for suggestions."""
WILDCARDS = re.compile(r"[*?\[]")
"""Characters of a name that the harness matches as a pattern."""


def check_task_names(names: Iterable[str], include_path: str | None, key: str) -> None:
    """Check that each name occurs in a task file of the harness or of the user. The harness decides about the others.

    Args:
        names: names of tasks, groups or tags; patterns are not checked.
        include_path: folder with tasks of the user, or None.
        key: user's name of the option, for the message.

    Raises:
        UserError: a name occurs in no task file; the message suggests similar names.
    """
    wanted = {
        name: re.compile(rb"(?<![\w-])" + re.escape(name.encode()) + rb"(?![\w-])")
        for name in names
        if not WILDCARDS.search(name) and not name.endswith((".yaml", ".yml"))
    }
    declared: set[str] = set()
    for text in _iter_task_files(include_path):
        if not wanted:
            return
        wanted = {name: pattern for name, pattern in wanted.items() if not pattern.search(text)}
        declared.update(found.decode() for found in DECLARED_NAME.findall(text))
    if wanted and declared:
        name = next(iter(wanted))
        hint = suggest_names(name, sorted(declared), max_suggestions=3) or "`lm_eval ls tasks` lists all"
        raise UserError(f"{key}: unknown task {name!r}; {hint}", key)


def _iter_task_files(include_path: str | None) -> Iterator[bytes]:
    """Yield the texts of the user's task files, then of the harness's."""
    spec = importlib.util.find_spec("lm_eval")
    folders = [] if spec is None else [Path(each) / "tasks" for each in spec.submodule_search_locations or ()]
    for folder in [*([Path(include_path)] if include_path else []), *folders]:
        for root, _, files in os.walk(folder):
            for file in files:
                if file.endswith(".yaml"):
                    yield Path(root, file).read_bytes()
