"""Command-line arguments of the tools, and one-line errors."""

from pathlib import Path

import pytest

from tools.arguments import ToolParser, comma_separated, int_at_least, parse_device, parse_output_path


def parser() -> ToolParser:
    made = ToolParser()
    made.add_argument("--rounds", type=int_at_least(2))
    made.add_argument("--shapes", type=comma_separated({"small": 1, "large": 2}))
    made.add_argument("--device", type=parse_device)
    made.add_argument("--json", type=parse_output_path)
    return made


def test_valid_arguments_are_accepted(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    taken = parser().parse_args(["--rounds", "2", "--shapes", "large,small", "--device", "cpu", "--json", str(file)])
    assert (taken.rounds, taken.shapes, taken.device, taken.json) == (2, ["large", "small"], "cpu", file)
    assert not file.exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rounds", "1"], "argument --rounds: it must be an integer of at least 2, not '1'"),
        (["--rounds", "2.5"], "argument --rounds: it must be an integer of at least 2, not '2.5'"),
        (["--shapes", "small,huge"], "argument --shapes: 'huge' is not one of small, large"),
        (["--device", "gpu"], "argument --device: it must be cpu or cuda, not 'gpu'"),
        (["--json", "nowhere/a.json"], "argument --json: nowhere/a.json: its folder does not exist"),
        (["--json", "/"], "argument --json: /: is a folder"),
        (["--other"], "unrecognized arguments: --other"),
    ],
)
def test_errors_are_one_line_with_exit_code_2(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parser().parse_args(words)
    assert left.value.code == 2
    assert capsys.readouterr() == ("", f"error: {says}\n")
