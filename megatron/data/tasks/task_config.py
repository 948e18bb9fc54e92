"""Tasks by name and options, and the task of a configuration with its input lengths.

Each file of `catalog/` defines a task; adding a file adds a task.
"""

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron.data.tasks.task import Task
from megatron.options.data import DataOptions
from megatron.utils.errors import UserError
from megatron.utils.field_errors import describe_requirement
from megatron.utils.formatting import format_choices


def list_tasks() -> list[str]:
    folder = Path(__file__).parent / "catalog"
    return sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")


@cache
def load_task_class(name: str) -> type[Task]:
    """Return the class of a task.

    Raises:
        UserError: the name is unknown; the message suggests similar names.
    """
    if name not in list_tasks():
        raise UserError(f"unknown task {name}; {format_choices(name, list_tasks())}", "task")
    module = importlib.import_module(f"megatron.data.tasks.catalog.{name}")
    (task_class,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Task) and value.__module__ == module.__name__
    )
    return task_class


def find_option_problems(name: str, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield problems with a task's name or options: the key, and a sentence with the values."""
    try:
        task_class = load_task_class(name)
    except UserError as error:
        yield "task", str(error)
        return
    try:
        task_class.model_validate(dict(options))
    except ValidationError as error:
        for item in error.errors(include_url=False):
            option = ".".join(str(part) for part in item["loc"])
            names = list(task_class.model_fields)
            if item["type"] == "extra_forbidden":
                accepted = format_choices(option, names) if names else "it takes no options"
                yield f"task_options.{option}", f"task {name} has no option {option!r}; {accepted}"
            elif not option:
                yield "task_options", f"task_options of {name}: {describe_requirement(item)}"
            else:
                value = "null" if item["input"] is None else repr(item["input"])
                problem = f"task_options.{option} is {value}; {describe_requirement(item)}"
                yield f"task_options.{option}", problem


def build_task(name: str, options: Mapping[str, Any] | None = None) -> Task:
    """Build a task from its name and options.

    Raises:
        UserError: the name is unknown, or an option is invalid.
    """
    for key, problem in find_option_problems(name, options or {}):
        raise UserError(problem, key)
    return load_task_class(name).model_validate(dict(options or {}))


def describe_task(name: str) -> dict[str, Any]:
    """Return the name, title, paper, and note of a task, and its options with defaults and meanings."""
    task_class = load_task_class(name)
    options = {
        option: {"default": field.default, "meaning": field.description}
        for option, field in task_class.model_fields.items()
    }
    return {
        "name": name,
        "title": task_class.title,
        "paper": task_class.paper,
        "note": task_class.note,
        "options": options,
    }


def format_task_label(name: str, task: Task) -> str:
    """Format a task in one word, with the options that differ from the defaults: `mqar(pairs=4)`."""
    changed = [
        f"{option}={value}"
        for option, value in task.model_dump().items()
        if value != type(task).model_fields[option].default
    ]
    return f"{name}({', '.join(changed)})" if changed else name


@dataclass(frozen=True)
class TaskConfig:
    """Task with the range of its input lengths in training."""

    name: str
    task: Task
    min_length: int
    max_length: int

    @property
    def label(self) -> str:
        """Task in one word, with the options that differ from the defaults."""
        return format_task_label(self.name, self.task)

    @property
    def dataset(self) -> str:
        """Dataset name in the task's records."""
        return f"task {self.label}"

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Input lengths that training draws from, ascending."""
        candidates = range(self.min_length, self.max_length + 1)
        return tuple(length for length in candidates if self.task.describe_unsupported_length(length) is None)

    @cached_property
    def length_weights(self) -> tuple[float, ...] | None:
        """Probabilities of these lengths, or None if they are uniform."""
        weights = [self.task.get_length_weight(length) for length in self.lengths]
        return None if len(set(weights)) == 1 else tuple(weight / sum(weights) for weight in weights)

    @property
    def sequence_lengths(self) -> tuple[int, ...]:
        """Length of the whole sequence for each of these input lengths."""
        return tuple(self.task.get_sequence_length(length) for length in self.lengths)


def read_task_config(data: DataOptions) -> TaskConfig:
    """Read the task of a configuration.

    Raises:
        UserError: the task or its options are invalid.
    """
    for key, problem in find_task_problems(data):
        raise UserError(problem, key)
    assert data.task is not None
    assert data.task_length is not None
    task = build_task(data.task, data.task_options)
    min_length = data.task_shortest_length or next(
        n for n in range(1, data.task_length + 1) if task.describe_unsupported_length(n) is None
    )
    return TaskConfig(data.task, task, min_length, data.task_length)


def find_task_problems(data: DataOptions) -> Iterator[tuple[str, str]]:
    """Yield problems with the keys of a task: the key, and a sentence with the values."""
    if data.task is None:
        return
    option_problems = list(find_option_problems(data.task, data.task_options))
    yield from option_problems
    if data.task_length is None and data.task in list_tasks():
        yield "task_length", f"task_length is missing (the longest input of {data.task} in training)"
    if option_problems or data.task_length is None:
        return
    task = build_task(data.task, data.task_options)
    for key in ("task_length", "task_shortest_length"):
        length: int | None = getattr(data, key)
        if length is not None and (reason := task.describe_unsupported_length(length)) is not None:
            yield key, f"{key} is {length}: {reason}"
