"""Names of harness tasks, checked in the text of task files without importing the harness."""

from pathlib import Path

import pytest

from megatron.evaluation.harness_names import check_task_names
from megatron.utils.errors import UserError

pytest.importorskip("lm_eval", reason="requirements-eval.txt is not installed")


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "a.yaml").write_text('task: "squares_2"\ntag:\n  - arithmetic-set\n')
    return str(tmp_path)


@pytest.mark.parametrize("name", ["squares_2", "arithmetic-set", "piqa", "lambada_openai", "mmlu", "mml*", "own.yaml"])
def test_names_in_task_files_and_patterns_are_left_to_the_harness(own: str, name: str) -> None:
    check_task_names([name], own, "harness.tasks")


@pytest.mark.parametrize(
    ("name", "hint"), [("squares_3", "squares_2"), ("squares", "squares_2"), ("arithmetic-se", ""), ("pqia", "piqa")]
)
def test_an_unknown_name_is_reported_with_similar_ones(own: str, name: str, hint: str) -> None:
    with pytest.raises(UserError, match=rf"^harness.tasks: unknown task '{name}'; .*{hint}"):
        check_task_names(["piqa", name], own, "harness.tasks")
