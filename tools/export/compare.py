"""Export every encoding, processor and window, and read the exports in a process that cannot import this project.

    python tools/export/compare.py --json docs/results/export.json
    python tools/export/compare.py --python ~/transformers4/bin/python       with another version of transformers

Writes a record and, next to it, a page. The exit code is 1 if any difference exceeds rounding errors.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from tools.arguments import ToolParser, parse_output_path, print_interrupts_in_one_line  # noqa: E402

if __name__ == "__main__":
    print_interrupts_in_one_line()

from megatron.conversion.export_model import export_model  # noqa: E402
from megatron.utils.imports import SAFE_PATH_VARIABLE  # noqa: E402
from tools.export.cases import (  # noqa: E402
    FAR,
    LENGTH,
    LENGTHS,
    ExportCase,
    compute_export_tolerance,
    list_architecture_cases,
    list_document_cases,
    list_method_cases,
    list_position_cases,
    list_softmax_cases,
    list_temperature_cases,
    write_case,
)
from tools.records import collect_provenance, format_provenance, write_record  # noqa: E402

READER_SCRIPT = ROOT / "tools/export/reader.py"


def list_cases() -> list[ExportCase]:
    return [
        *list_method_cases(),
        *list_position_cases(),
        *list_temperature_cases(),
        *list_softmax_cases(),
        *list_document_cases(),
        *list_architecture_cases(),
    ]


def measure_differences(
    cases: Sequence[ExportCase], folder: Path, python: str = sys.executable
) -> dict[ExportCase, dict[str, float]]:
    """Return the difference between each way to read each export and this project, relative to the largest logit.

    Args:
        python: interpreter that reads the exports, with torch and transformers.
    """
    return read_exports(write_exports(cases, folder), folder, python)


def write_exports(cases: Sequence[ExportCase], folder: Path) -> dict[ExportCase, Path]:
    """Write a run and an export of each case, and return their folders."""
    places = {}
    for number, case in enumerate(cases):
        # transformers imports identical code from folders of the same name only once.
        places[case] = place = folder / str(number) / get_export_folder_name(case)
        export_model(write_case(case, place), place / place.name, log=lambda line: None)
    return places


def read_exports(
    places: Mapping[ExportCase, Path], folder: Path, python: str = sys.executable, packages: Path | None = None
) -> dict[ExportCase, dict[str, float]]:
    """Read exports in a separate process, and return their differences from this project.

    Args:
        places: result of `write_exports`.
        folder: folder for the reading script, outside this project.
        python: interpreter to run.
        packages: folder of packages that take precedence over the interpreter's own.

    Raises:
        SystemExit: if an export cannot be read.
    """
    copy = folder / "reader.py"
    copy.write_text(READER_SCRIPT.read_text(encoding="utf-8"), encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-W", "ignore", str(copy), *map(str, places.values())],
        cwd=folder,
        env={
            **environment,
            **({} if packages is None else {"PYTHONPATH": str(packages)}),
            "HF_HOME": str(folder / "hf"),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",  # for code that is imported once
        },
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"error: an export cannot be read: {done.stderr[-3000:]}")
    return dict(zip(places, map(json.loads, done.stdout.splitlines()), strict=True))


def get_export_folder_name(case: ExportCase) -> str:
    """Return the name of an export's folder: the names of its methods, shared by cases with the same exported code."""
    position = case.build_config().position
    return "_".join(sorted({*position.encodings, *position.processors, *position.temperatures} - {"none"})) or "none"


def select_beyond_rounding(found: Mapping[ExportCase, Mapping[str, float]]) -> dict[str, Mapping[str, float]]:
    """Return the cases, by title, with a difference that exceeds rounding errors or is NaN."""
    allowed = compute_export_tolerance()
    return {case.title: apart for case, apart in found.items() if not all(each <= allowed for each in apart.values())}


def read_versions(python: str) -> dict[str, str]:
    """Return the versions of torch and transformers of an interpreter."""
    asked = ("torch", "transformers")
    script = f"from importlib.metadata import version; print(*map(version, {asked}))"
    environment = os.environ | SAFE_PATH_VARIABLE
    printed = subprocess.run([python, "-c", script], env=environment, capture_output=True, text=True, check=True).stdout
    return dict(zip(asked, printed.split(), strict=True))


def render_page(record: dict[str, Any]) -> str:
    rows = record["rows"]
    columns = list(dict.fromkeys(way for row in rows for way in row["apart"]))
    lines = [f"| model | {' | '.join(columns)} |", "|---|" + "--:|" * len(columns)]
    for row in rows:
        cells = (f"{row['apart'][way]:.1e}" if way in row["apart"] else "refused" for way in columns)
        lines.append(f"| {row['model']} | {' | '.join(cells)} |")
    worst = max(rows, key=lambda row: max(row["apart"].values()))
    return f"""# Exports compared with this project

Each row is one model with random weights, exported by `./deepy.py export` and loaded with
`AutoModelForCausalLM.from_pretrained(…, trust_remote_code=True)` in a process that cannot import this project.
A number is the largest difference of any logit from this project's, relative to the largest logit.
The training length is {LENGTH} tokens; 1x and 4x are {LENGTH} and {FAR} tokens.
`cached` reads in three chunks; `padded` is a batch of sequences of {", ".join(map(str, LENGTHS))} tokens,
left-padded, each compared with the sequence alone; `packed` is one row of all of them with restarting `position_ids`.
The largest of {sum(len(row["apart"]) for row in rows)} differences is {max(worst["apart"].values()):.1e}
({worst["model"]}); rounding allows {record["allowed"]:.1e}.

{chr(10).join(lines)}

{format_provenance(record["stamp"])}
"""


def main() -> None:
    """Export, read and compare all cases, and write the record."""
    parser = ToolParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--json", type=parse_output_path, help="output file of the record; its page is written next to it"
    )
    parser.add_argument("--python", default=sys.executable, help="Python interpreter that reads the exports")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure_differences(list_cases(), Path(folder), arguments.python)
    rows = [{"model": case.title, "apart": apart} for case, apart in found.items()]
    head = collect_provenance(__file__, "cpu")
    head["versions"] |= read_versions(arguments.python)
    record = {"stamp": head, "allowed": compute_export_tolerance(), "rows": rows}
    worst = max(max(row["apart"].values()) for row in rows)
    print(
        f"{len(rows)} exports; the largest difference is {worst:.1e}, rounding allows {compute_export_tolerance():.1e}"
    )
    if arguments.json is not None:
        write_record(arguments.json, record, render_page(record))
    if select_beyond_rounding(found):
        sys.exit(1)


if __name__ == "__main__":
    main()
