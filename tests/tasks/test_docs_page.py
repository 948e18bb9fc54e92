"""docs/tasks.md agrees with the class of each task."""

import re
from pathlib import Path

import pytest

from megatron.data.tasks import task_config
from megatron.data.tasks.task import TransductionTask
from megatron.position.catalog import list_encodings, read_encoding_facts

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tasks.md"
ROWS = {
    row[0].strip(" `†"): row
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| `")
    for row in [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]]
}
COUNTS = {"1": 1, "n": 7, "n + 1": 8, "2n": 14, "⌈n/2⌉": 4}
"""Number of answers for an input of 7 symbols."""


@pytest.mark.parametrize("name", task_config.list_tasks())
def test_every_task_has_its_row(name: str) -> None:
    task = task_config.build_task(name)
    row = ROWS[name]
    if isinstance(task, TransductionTask):
        assert ("†" in row[0]) == task.permutation_invariant
        assert row[1] == task.chomsky_level
        assert row[2] == f"{task.num_input_symbols}, {task.num_output_symbols}"
        assert COUNTS[row[3]] == task.get_output_length(7)
        assert (row[6] == "to the terminator") == task.has_terminator
    else:
        defaults = {option: field.default for option, field in type(task).model_fields.items()}
        assert row[1] == ", ".join(f"`{option}` ({default})" for option, default in defaults.items())


@pytest.mark.parametrize("name", task_config.list_tasks())
def test_every_task_has_a_description(name: str) -> None:
    kind = task_config.load_task_class(name)
    assert kind.title
    assert not kind.title.endswith(".")
    assert "(20" in kind.paper
    assert kind.__doc__


def test_encodings_with_positions_from_a_task_are_listed() -> None:
    (listed,) = re.findall(r"support this: ([^.]*)\.", PAGE.read_text(encoding="utf-8"))
    facts = {name: read_encoding_facts(name) for name in list_encodings()}
    able = {name for name, each in facts.items() if each.takes_positions and each.takes_any_positions}
    assert set(re.findall(r"`(\w+)`", listed)) == able
