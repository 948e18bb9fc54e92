"""Compare methods with their authors' published code, using the same random weights.

    python tools/methods/compare.py ~/clones --json docs/results/methods.json

~/clones contains a clone of each repository named by a file of `published/`, under the repository's name
(~/clones/BAM). `--only` selects some of these files; the record keeps its other rows. This project contains no part of
the clones. The tool writes a record and, next to it, a page. The exit code is 1 if any difference exceeds rounding
errors.

A file of `published/` defines

    REPOSITORY                "owner/name" on GitHub; None for an installed package
    NOTES                     differences of its code, for the page: one sentence per line
    list_comparisons(clone)   comparisons to run (`comparison.Comparison`)
"""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from tools.arguments import ToolParser, parse_output_path, print_interrupts_in_one_line  # noqa: E402

if __name__ == "__main__":
    print_interrupts_in_one_line()

from tools.methods.comparison import HEADS, LAYERS, WIDTH  # noqa: E402
from tools.records import collect_provenance, format_provenance, list_package_versions, write_record  # noqa: E402

LENGTHS = (2, 33, 200)
ALLOWED = 5e-5
"""Allowed difference relative to the largest logit. float32 rounds each of a layer's dozens of sums by 6e-8, and an
angle of 200 by 1e-5."""
PUBLISHED = sorted(path.stem for path in (Path(__file__).parent / "published").glob("[!_]*.py"))
"""Names of the files of `published/`."""


def load_published(name: str) -> ModuleType:
    return importlib.import_module(f"tools.methods.published.{name}")


def compare(name: str, clones: Path) -> dict[str, Any]:
    """Run the comparisons of a file of `published/`; return its repository, the commit of the clone and the rows."""
    published = load_published(name)
    clone = None if published.REPOSITORY is None else clones / published.REPOSITORY.split("/")[1]
    if clone is not None and not clone.is_dir():
        sys.exit(f"error: {clone}: no such folder; git clone https://github.com/{published.REPOSITORY} {clone}")
    rows = [
        {"title": each.title, "apart": {str(length): each.measure(length) for length in LENGTHS}}
        for each in published.list_comparisons(clone)
    ]
    for row in rows:
        print(row["title"], *(f"{apart:.1e}" for apart in row["apart"].values()), flush=True)
    command = ["git", "-C", str(clone), "rev-parse", "--short", "HEAD"]
    commit = None if clone is None else subprocess.run(command, capture_output=True, text=True, check=True)
    return {"commit": None if commit is None else commit.stdout.strip(), "rows": rows}


def render_page(record: dict[str, Any]) -> str:
    lines = [f"| model | {' | '.join(f'{length} tokens' for length in LENGTHS)} |", f"|---|{'---|' * len(LENGTHS)}"]
    notes = []
    for name, part in record["published"].items():
        for row in part["rows"]:
            cells = [f"{row['apart'][str(length)]:.1e}" for length in LENGTHS]
            lines.append(f"| {' | '.join([row['title'], *cells])} |")
        published = load_published(name)
        if published.REPOSITORY is not None:
            notes.append(f"`github.com/{published.REPOSITORY}` was at {part['commit']}.")
        notes.append(published.NOTES)
    return f"""# Methods compared with published code

Each row is one model of {LAYERS} layers, {HEADS} heads and width {WIDTH} with the same random weights in both, or one
layer's attention if only that is published.
A number is the largest difference of any logit from that of the published code, relative to the largest logit, in
float32; {record["allowed"]:.0e} is allowed.
The published code ran from clones and installed packages; this project contains none of it.

{chr(10).join(lines)}

{chr(10).join(note.rstrip() for note in notes)}

{format_provenance(record["stamp"])}
"""


def main() -> None:
    """Run the comparisons and write the record."""
    parser = ToolParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("clones", type=Path, help="folder of clones")
    parser.add_argument("--only", nargs="+", choices=PUBLISHED, help="files of published/; by default all")
    parser.add_argument(
        "--json", type=parse_output_path, help="output file of the record; its page is written next to it"
    )
    arguments = parser.parse_args()
    earlier = {}
    if arguments.only and arguments.json is not None and arguments.json.is_file():
        earlier = json.loads(arguments.json.read_text(encoding="utf-8"))["published"]
    found = {name: compare(name, arguments.clones) for name in arguments.only or PUBLISHED}
    worst = max(max(row["apart"].values()) for part in found.values() for row in part["rows"])
    print(f"the largest difference is {worst:.1e}, {ALLOWED:.0e} is allowed")
    stamp = collect_provenance(__file__, "cpu")
    stamp["command"] = "python tools/methods/compare.py CLONES --json docs/results/methods.json"
    stamp["versions"] |= list_package_versions(("transformers",))
    together = earlier | found
    record = {
        "stamp": stamp,
        "allowed": ALLOWED,
        "published": {name: together[name] for name in PUBLISHED if name in together},
    }
    if arguments.json is not None:
        write_record(arguments.json, record, render_page(record))
    if worst > ALLOWED:
        sys.exit(1)


if __name__ == "__main__":
    main()
