"""Check which configuration files of other projects load in Farfield, and list the reasons for those that do not.

    python tools/docs/stock_configs.py NEOX/configs KERPLE/configs DAPE/configs --markdown docs/results/stock_configs.md

Each file is loaded alone. Keys that it leaves to other files (data, batch size, shape) are filled in, so that the
result concerns only its own keys. The tool needs neither network nor torch.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.config.load import merge_documents
from megatron.config.yaml_files import YamlDocument, read_yaml
from megatron.utils.errors import UserError
from tools.arguments import ToolParser

REQUIRED_KEYS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "seq_length": 2048,
    "train_iters": 10,
    "train_micro_batch_size_per_gpu": 1,
    "num_gpus": 8,
}
"""Keys that every run needs and that a file may leave to other files."""


class LoadOutcome(NamedTuple):
    """Result of loading one file."""

    file: str
    problems: list[str]
    """Reasons why the file does not load, one line each; empty if it loads."""


def load_file(path: Path) -> list[str]:
    """Return the problems of one file without its name; empty if it loads."""
    try:
        document = read_yaml(path)
        given = {name.replace("-", "_") for name in document.values}
        others = {name: value for name, value in REQUIRED_KEYS.items() if name not in given}
        if not given & {"data_path", "train_data_paths", "task"}:
            others["data_path"] = "data"
        if document.values.get("finetune") and not document.values.get("load"):
            others["load"] = "run"  # finetuning gets its start checkpoint on the command line
        merge_documents([YamlDocument("others", others, {}), document])
    except UserError as error:
        return [line.removeprefix(f"{path}:") for line in str(error).splitlines()]
    return []


def load_folder(folder: Path) -> Iterator[LoadOutcome]:
    """Yield the result for every configuration file in a folder, sorted by name."""
    for path in sorted(folder.rglob("*.y*ml")):
        yield LoadOutcome(path.relative_to(folder).as_posix(), load_file(path))


def render_page(folders: dict[str, list[LoadOutcome]]) -> str:
    """Render counts per folder, and the reasons for files that do not load."""
    lines = ["| folder | files | load |", "|---|--:|--:|"]
    for name, files in folders.items():
        lines.append(f"| {name} | {len(files)} | {sum(not file.problems for file in files)} |")
    reasons: dict[str, list[str]] = {}
    for name, files in folders.items():
        for file in (file for file in files if file.problems):
            text = "; ".join(
                problem.partition(": ")[2] if problem[0].isdigit() else problem for problem in file.problems
            )
            reasons.setdefault(text, []).append(f"{name}/{file.file}")
    lines += ["", "| files that do not load | why |", "|---|---|"]
    lines += [f"| {', '.join(f'`{file}`' for file in files)} | {why} |" for why, files in reasons.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = ToolParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="folders of configuration files")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the page to this file")
    arguments = parser.parse_args()
    if missing := [folder for folder in arguments.folders if not folder.is_dir()]:
        parser.error(f"{missing[0]}: no such folder")
    names = [folder.absolute().parent.name if folder.name == "configs" else folder.name for folder in arguments.folders]
    head = "# Configuration files of other projects\n\nMade by `python tools/docs/stock_configs.py`.\n\n"
    text = render_page({name: list(load_folder(folder)) for name, folder in zip(names, arguments.folders, strict=True)})
    print(text, end="")
    if arguments.markdown is not None:
        arguments.markdown.write_text(head + text, encoding="utf-8")


if __name__ == "__main__":
    main()
