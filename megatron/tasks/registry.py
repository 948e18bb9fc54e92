"""Finds tasks: the files of `catalogue/`. Adding a file adds a task."""

import importlib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron.tasks.task import Task
from megatron.utils.errors import UserError
from megatron.utils.suggestions import format_choices


def find_task_files() -> list[str]:
    """Names of all tasks, in alphabetical order."""
    folder = Path(__file__).parent / "catalogue"
    return sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")


@cache
def load_task_class(name: str) -> type[Task]:
    """The class of a named task. Raises UserError with the nearest name for an unknown one."""
    if name not in find_task_files():
        raise UserError(f"task {name} is not available; {format_choices(name, find_task_files())}", "task")
    module = importlib.import_module(f"megatron.tasks.catalogue.{name}")
    (found,) = (
        thing
        for thing in vars(module).values()
        if isinstance(thing, type) and issubclass(thing, Task) and thing.__module__ == module.__name__
    )
    return found


def find_option_problems(name: str, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What is wrong with a task's name or its options: the key to blame, and a sentence with the values."""
    try:
        kind = load_task_class(name)
    except UserError as error:
        yield "task", str(error)
        return
    try:
        kind.model_validate(dict(options))
    except ValidationError as error:
        for item in error.errors(include_url=False):
            option = ".".join(str(part) for part in item["loc"])
            known = list(kind.model_fields)
            if item["type"] == "extra_forbidden":
                takes = format_choices(option, known) if known else "it takes no options"
                yield f"task_options.{option}", f"task {name} has no option {option!r}; {takes}"
            elif not option:
                yield "task_options", f"task_options of {name}: {item['msg'].removeprefix('Value error, ')}"
            else:
                reason = item["msg"][0].lower() + item["msg"][1:]
                yield f"task_options.{option}", f"task_options.{option} is {item['input']!r}; {reason}"


def build_task(name: str, options: Mapping[str, Any] | None = None) -> Task:
    """A task by its name and options. Raises UserError if there is none, or an option is not one of its."""
    for blamed, problem in find_option_problems(name, options or {}):
        raise UserError(problem, blamed)
    return load_task_class(name).model_validate(dict(options or {}))


def describe_task_identity(name: str, task: Task) -> str:
    """A task in one word, with the options that are not the default's: `mqar(pairs=4)`."""
    changed = [
        f"{option}={value}"
        for option, value in task.model_dump().items()
        if value != type(task).model_fields[option].default
    ]
    return f"{name}({', '.join(changed)})" if changed else name
