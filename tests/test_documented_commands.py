"""Every documented command is valid: its options, its merged configuration files, its keys and their values.

Commands without user files are run. `NOT_RUN` gives the reason for the others, and the tests of similar commands.
test_tutorial.py runs docs/tutorial.md as a whole, and test_guides.py the guides on small stand-ins.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import typer
from documented import list_commands

from megatron.cli.app import app
from megatron.cli.arguments import split_arguments
from megatron.config.load import find_config, load_config
from megatron.sweeps.spec import read_sweep

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    page
    for pattern in ("*.md", "docs/*.md", "megatron/kernels/**/*.md")
    for page in sorted(ROOT.glob(pattern))
    if page.name not in ("log.md", "tutorial.md")  # one describes earlier commands, the other is run as a whole
]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
CONFIGURED = ("train", "plan", "rehearse")
"""Commands whose arguments are configuration files and keys."""
RUN = ("keys", "plan", "positions", "tasks")
"""Commands that are run unchanged."""
NOT_RUN = {
    "train": "minutes on a CPU, or GPUs; tests/training, tests/launch",
    "sweep": "minutes on a CPU, or GPUs; tests/sweeps",
    "rehearse": "the CUDA build of torch; tests/cuda",
    "prepare": "texts of the reader's; tests/data",
    "evaluate": "runs of the reader's; tests/evaluation",
    "analyze": "runs of the reader's; tests/evaluation/analysis",
    "generate": "runs of the reader's; tests/evaluation/generation",
    "status": "runs of the reader's; tests/launch/test_run_status.py",
    "show-batch": "runs of the reader's; tests/training/test_batch_contents.py",
    "report": "results of the reader's; tests/reports, tests/launch",
    "export": "runs of the reader's; tests/conversion",
    "import": "models of others; tests/conversion",
}
"""Requirements of commands that are not run, and the tests that cover them."""
READERS_OVERLAYS = ("mine.yml", "corpus.yml", "kerple_log.yml", "my_local.yml", "my_model.yml")
"""Files written by the reader with a few keys; empty here."""
READERS_CONFIGURATIONS = ("my.yml", "my_neox.yml", "run.yml", "config.yml")
"""Complete configurations of the reader or of a run; replaced by the shipped 125M."""
READERS_SWEEPS = ("my_sweep.yml", "mysweep.yml")


COMMANDS = [
    pytest.param(words, id=f"{page.relative_to(ROOT)}: {' '.join(words)}"[:110])
    for page in PAGES
    for words in list_commands(page.read_text(encoding="utf-8"))
] + [
    pytest.param(words, id=f"{file.relative_to(ROOT)}: {' '.join(words)}"[:110])
    for file in sorted((ROOT / "configs").rglob("*.yml"))
    for words in list_commands(file.read_text(encoding="utf-8").replace("\n#", "\n "))
    if words[1] == "sweep"
]


@pytest.fixture
def readers_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Current folder, with replacements of a reader's files."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check_command(words: list[str], folder: Path) -> None:
    """Raise the error that the command line would raise for these words before any work."""
    program, *arguments = words
    if program == "make":
        targets = [word for word in arguments if "=" not in word]
        assert all(re.search(rf"^{target}:", MAKEFILE, flags=re.MULTILINE) for target in targets), targets
        return
    if program == ".venv/bin/python":
        paths = [word for word in arguments if "/" in word]
        assert all((ROOT / path).exists() for path in paths), paths
        return
    name, *rest = arguments
    group: Any = typer.main.get_command(app)
    command = group.get_command(None, name)
    assert command is not None, f"{name}: no such command"
    context = command.make_context(name, rest)
    files, overrides = split_arguments(context.params.get("arguments") or [])
    if name in CONFIGURED:
        for file in files:
            write_readers_file(folder / file, is_task=any(pair.startswith("task=") for pair in overrides))
        load_config([file for file in files if file != "…"], overrides)
    elif name == "sweep":
        readers = {*READERS_SWEEPS, *READERS_OVERLAYS}.intersection(files)
        for file in files:
            assert file in readers or find_config(ROOT / file if "/" in file else file)
        if not readers:
            read_sweep([ROOT / file if "/" in file else file for file in files], overrides)


def write_readers_file(path: Path, *, is_task: bool) -> None:
    """Write a replacement of a reader's file, unless its name is that of a shipped file."""
    if path.name not in (*READERS_OVERLAYS, *READERS_CONFIGURATIONS):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    model = (ROOT / "configs" / "model" / "125M.yml").read_text(encoding="utf-8")
    if is_task:  # the longest sequence of the task sets the length
        model = re.sub(r"^seq_length:.*\n", "", model, flags=re.MULTILINE)
    path.write_text(model if path.name in READERS_CONFIGURATIONS else "{}\n", encoding="utf-8")


@pytest.mark.parametrize("words", COMMANDS)
def test_documented_commands_parse(words: list[str], readers_files: Path) -> None:
    check_command(words, readers_files)


def test_each_command_runs_or_has_a_reason_not_to() -> None:
    shown = {words[1] for words in (each.values[0] for each in COMMANDS) if words[0] == "./deepy.py"}
    assert shown == {*RUN, *NOT_RUN}
    for reason in NOT_RUN.values():
        assert all((ROOT / path).exists() for path in re.findall(r"tests/[\w/.]+\w", reason)), reason


@pytest.mark.parametrize("words", [each for each in COMMANDS if each.values[0][1:2] and each.values[0][1] in RUN])
def test_a_command_that_needs_nothing_runs(
    words: list[str], readers_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not app(words[1:], standalone_mode=False)
    assert len(capsys.readouterr().out) > 50


@pytest.mark.parametrize(
    "line",
    [
        "./deepy.py trian 125M",
        "./deepy.py evaluate runs/a --lenghts 1x",
        "./deepy.py train 125M no_such_overlay",
        "./deepy.py train 125M num_layrs=3",
        "./deepy.py train 125M num_layers=three",
        "./deepy.py sweep 162M slurm_a100 paper kerple_t3 train_batch_size=30",
        "make no-such-target",
        ".venv/bin/python tools/nothing.py",
    ],
)
def test_a_command_with_a_mistake_is_found(line: str, readers_files: Path) -> None:
    (words,) = list_commands(f"```\n$ {line}   # a comment\n```\n")
    with pytest.raises(Exception):  # noqa: B017, PT011  # of typer, of ours, or an assertion
        check_command(words, readers_files)
