"""Run the README's commands, or the image's steps, in a bare Debian with nothing installed, and record what they print.

    python tools/install/try_bare_roots.py 3.13 quickstart test-fast --json docs/results/bare_roots.json
    python tools/install/try_bare_roots.py 3.12 image --python ~/.pyenv/versions/3.12.1

Each Python is the one of a Debian release, except those given by `--python`, which are copied into Debian 12. Needs
root and debootstrap. The exit code is 1 if a command fails. A record keeps the results of other Pythons and steps.
With `--folder`, a later call continues in the same root: it updates the clone and keeps the packages installed there.
"""

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from tools.arguments import ToolParser, parse_output_path, print_interrupts_in_one_line  # noqa: E402
from tools.install.bare_root import BareRoot, CommandResult  # noqa: E402
from tools.records import describe_commit, write_record  # noqa: E402

RELEASES = {"3.11": "bookworm", "3.12": "bookworm", "3.13": "trixie", "3.14": "testing"}
"""Debian release for each Python. No release has 3.12: it comes from `--python`."""
NEEDED = ["make", "git"]
DEBIAN_PYTHON = ["python3", "python3-venv"]
LIBRARIES = [
    *("ca-certificates", "libbz2-1.0", "libexpat1", "libffi8", "liblzma5", "libncursesw6", "libreadline8"),
    *("libsqlite3-0", "libssl3", "libuuid1", "zlib1g"),
]
"""Debian 12's packages that a Python built elsewhere loads, as in the image python:3.12-slim-bookworm."""
MAKE_STEPS = ("setup-dev", "quickstart", "test-fast", "test")
IMAGE_STEP = "image"
DRY_RUN = (
    "train 125M cdape_kerple_log task=mqar task_length=64 device=cpu num_gpus=1 precision=bf16 "
    "train_micro_batch_size_per_gpu=1 --dry-run"
)
LINES_KEPT = 40
PROGRESS = re.compile(r"left in total|^[.sxFE]+ +\[ *\d+%\]$")
"""Lines that commands print while they run."""


def run_make_steps(
    root: BareRoot, python: str, steps: list[str], *, has_own: bool
) -> Iterator[tuple[str, CommandResult, bool]]:
    """Clone the project and run targets of its Makefile as a user.

    Yield each command's step and result, and True if the command is the last one of its step.
    """
    compiler = ["g++", "python3-dev"] if python == "3.14" else []
    yield steps[0], root.add_packages(NEEDED + (LIBRARIES if has_own else DEBIAN_PYTHON) + compiler), False
    repository = root.add_repository(ROOT)
    update = f"git -C farfield fetch --quiet {repository} HEAD && git -C farfield reset --quiet --hard FETCH_HEAD"
    clone = f"if test -d farfield; then {update}; else git clone --quiet {repository} farfield; fi"
    yield steps[0], root.run(clone), False
    for step in steps:
        yield step, root.run(f"make {step}", working_folder="/home/newcomer/farfield"), True


def run_image_steps(root: BareRoot) -> Iterator[tuple[str, CommandResult, bool]]:
    """Follow apptainer.def on top of the packages that its base image has, and run commands in the result.

    Yield as `run_make_steps` does.
    """
    sections = read_definition((ROOT / "apptainer.def").read_text(encoding="utf-8"))
    yield IMAGE_STEP, root.add_packages(LIBRARIES), False
    copy_files(sections["files"], root.folder)
    post = replace(root.run(sections["post"], as_root=True, working_folder="/"), command="%post")
    yield IMAGE_STEP, post, False
    for words in ("--help", DRY_RUN, "sweep quickstart"):
        script = f"{sections['environment']}\nset -- {words}\n{sections['runscript']}"
        yield IMAGE_STEP, replace(root.run(script), command=f"%runscript {words}"), False
    test = root.run(f"set -e\n{sections['environment']}\n{sections['test']}")
    yield IMAGE_STEP, replace(test, command="%test"), True


def read_definition(text: str) -> dict[str, str]:
    """Return the sections of an Apptainer definition by name, without the header."""
    sections = {}
    for part in text.split("\n%")[1:]:
        name, _, body = part.partition("\n")
        sections[name.strip()] = body
    return sections


def copy_files(lines: str, folder: Path) -> None:
    """Copy the section `files` of a definition: one source of the project and its target in the image per line."""
    for line in lines.strip().splitlines():
        source, target = line.split()
        copy = folder / target.lstrip("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, copy)


def describe(root: BareRoot, python: str, commit: str | None, results: list[CommandResult]) -> dict[str, Any]:
    """Return the record of one step. `commit` is the one that the root's files are from."""
    version = root.run("python3 --version 2>/dev/null || echo none; cat /etc/debian_version").printed
    load = f"{os.cpu_count()} cores, load {os.getloadavg()[1]:.0f}"
    commands = [{**each.to_json(), "printed": keep_last_lines(each.printed)} for each in results]
    found = {"python": version[0].removeprefix("Python "), "debian": version[1], "requested": python}
    return {
        **found,
        "date": date.today().isoformat(),
        "commit": commit,
        "machine": load,
        "commands": commands,
    }


def render_page(rows: list[dict[str, Any]]) -> str:
    """Return the page of a record: a table of commands, and what each printed."""
    table, outputs = [], []
    for row in rows:
        title = f"Python {row['python']} on Debian {row['debian']}: {row['step']}"
        commands = [each for each in row["commands"] if each["seconds"] >= 5 or each["exit_code"]]
        for each in commands:
            table.append(
                f"| {row['python']} | {row['debian']} | {row['step']} | `{shorten(each['command'])}` "
                f"| {each['seconds']:,.0f} s | {each['exit_code']} | {row['machine']} "
                f"| {row['date']}, {row['commit']} |"
            )
        printed = keep_last_lines([line for each in commands for line in each["printed"]])
        outputs.append(f"## {title}\n\n```\n" + "\n".join(printed) + "\n```\n")
    notes = [f"- Python {row['python']}, {row['step']}: {row['note']}" for row in rows if "note" in row]
    return f"""# Bare systems

Each row is a command in a bare Debian (`debootstrap --variant=minbase`) with the packages in its first row and nothing
else, as a user who is not root. `tools/install/try_bare_roots.py` builds the system, runs the commands and writes this
page. `image` runs the sections of `apptainer.def` with the Python of `--python` instead of a base image. The last lines
that each step printed follow. Other work ran on the same machine, as the load shows. `test` and `test-fast` ran in the
environment of `setup-dev`.

| Python | Debian | step | command | time | exit code | machine | recorded |
|---|---|---|---|--:|--:|---|---|
{chr(10).join([*table, *([""] if notes else []), *notes])}

{chr(10).join(outputs)}"""


def keep_last_lines(printed: list[str]) -> list[str]:
    """Return the last lines of an output without lines of progress."""
    return [line for line in printed if not PROGRESS.search(line)][-LINES_KEPT:]


def shorten(text: str, length: int = 160) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def main() -> None:
    """Build the root, run the steps and write the record."""
    parser = ToolParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("release", choices=RELEASES, metavar="PYTHON", help=", ".join(RELEASES))
    parser.add_argument(
        "steps", nargs="+", choices=(*MAKE_STEPS, IMAGE_STEP), metavar="STEP", help=", ".join((*MAKE_STEPS, IMAGE_STEP))
    )
    parser.add_argument(
        "--folder", type=Path, help="folder of the root, which is kept and used again; by default temporary"
    )
    parser.add_argument("--python", type=Path, help="folder of a Python to copy to /usr/local; needed for 3.12")
    parser.add_argument("--wheels", type=Path, help="folder of wheels that pip also looks at, such as a CPU torch")
    parser.add_argument(
        "--json", type=parse_output_path, help="record to add the results to; a page is written next to it"
    )
    arguments = parser.parse_args()
    if arguments.release == "3.12" and arguments.python is None:
        parser.error("--python FOLDER is needed for 3.12, which no release of Debian has")
    if IMAGE_STEP in arguments.steps and (arguments.python is None or len(arguments.steps) > 1):
        parser.error(f"{IMAGE_STEP} is a step of its own, and needs --python FOLDER for the base image's Python")

    commit = describe_commit()
    if commit is not None and IMAGE_STEP not in arguments.steps:  # a clone has no uncommitted changes
        commit = commit.removesuffix("-dirty")
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary) / "root"
        root = BareRoot.build(folder, RELEASES[arguments.release], arguments.wheels)
        if arguments.python is not None:
            root.add_python(arguments.python)
        if arguments.steps == [IMAGE_STEP]:
            finished = run_image_steps(root)
        else:
            finished = run_make_steps(root, arguments.release, arguments.steps, has_own=arguments.python is not None)
        results: list[CommandResult] = []
        for step, result, is_last in finished:
            results.append(result)
            # An interrupted step has no record, so that it does not replace an earlier one.
            if arguments.json is not None and (is_last or result.exit_code):
                add_to_record(arguments.json, {"step": step, **describe(root, arguments.release, commit, results)})
            if result.exit_code:
                raise SystemExit(f"error: exit code {result.exit_code} from: {shorten(result.command)}")
            if is_last:
                results = []


def add_to_record(path: Path, row: dict[str, Any]) -> None:
    """Add a step's result to a record, in place of an earlier one of the same Python and step."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    rows = [each for each in rows if (each["requested"], each["step"]) != (row["requested"], row["step"])] + [row]
    order = [*MAKE_STEPS, IMAGE_STEP]
    rows.sort(key=lambda each: (each["requested"], order.index(each["step"])))
    write_record(path, {"rows": rows}, render_page(rows))


if __name__ == "__main__":
    print_interrupts_in_one_line()
    main()
