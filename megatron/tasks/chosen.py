"""The task that a configuration trains on, and at which lengths."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megatron.options.data import DataOptions
from megatron.tasks import registry
from megatron.tasks.task import Task
from megatron.utils.errors import UserError


@dataclass(frozen=True)
class TaskConfig:
    """A task and the lengths of its inputs in training."""

    name: str
    task: Task
    min_length: int
    max_length: int

    @property
    def describe_identity(self) -> str:
        """The task in one word, with the options that differ from the default's."""
        return registry.describe_task_identity(self.name, self.task)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of inputs that training draws from, each as often, ascending."""
        span = range(self.min_length, self.max_length + 1)
        return tuple(length for length in span if self.task.unsupported_length_reason(length) is None)

    @property
    def sequence_lengths(self) -> tuple[int, ...]:
        """Tokens of the whole sequence at each of these lengths."""
        return tuple(self.task.sequence_length(length) for length in self.lengths)


def read_task_config(data: DataOptions) -> TaskConfig:
    """What a configuration with a `task` trains on. Raises UserError if it cannot."""
    for key, problem in find_task_problems(data):
        raise UserError(problem, key)
    assert data.task is not None
    assert data.task_length is not None
    task = registry.build_task(data.task, data.task_options)
    shortest = data.task_shortest_length or next(
        n for n in range(1, data.task_length + 1) if task.unsupported_length_reason(n) is None
    )
    return TaskConfig(data.task, task, shortest, data.task_length)


def find_task_problems(data: DataOptions) -> Iterator[tuple[str, str]]:
    """What is wrong with the keys of a task: the key to blame, and a sentence with the values."""
    if data.task is None:
        return
    wrong = list(registry.find_option_problems(data.task, data.task_options))
    yield from wrong
    if data.task_length is None:
        yield "task_length", f"task_length is missing (the longest input of {data.task} in training)"
    if wrong or data.task_length is None:
        return
    task = registry.build_task(data.task, data.task_options)
    for key in ("task_length", "task_shortest_length"):
        length: int | None = getattr(data, key)
        if length is not None and (why := task.unsupported_length_reason(length)) is not None:
            yield key, f"{key} is {length}: {why}"
