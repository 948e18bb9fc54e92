"""Compare every layout with a single process: losses and gradient norms of five steps.

    python tools/parity/compare.py --ranks 2,4 --json docs/results/parity.json      as recorded
    python tools/parity/compare.py --ranks 8 --methods kerple_log,…                 by hand

Writes a record and, next to it, a Markdown table. The exit code is 1 if any difference exceeds rounding errors.
"""

import math
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from tools.arguments import ToolParser, comma_separated, int_at_least, parse_output_path, print_interrupts_in_one_line  # noqa: E402

if __name__ == "__main__":
    print_interrupts_in_one_line()

from tools.launch_ranks import run_ranks  # noqa: E402
from tools.parity.cases import METHODS, STEPS, ParityCase, compute_layout_tolerance, is_supported_case, list_layouts  # noqa: E402
from tools.records import collect_provenance, format_provenance, write_record  # noqa: E402

CaseResult = dict[str, Any]
RANK_SCRIPT = ROOT / "tools/parity/rank.py"


def compute_error_ratio(found: CaseResult, alone: CaseResult, precision: str) -> dict[str, float]:
    """Return the relative differences of losses and norms from a single process, divided by the allowed rounding error.

    A value above 1 is an error. It is infinite for values that must be identical and are not.
    """
    allowed = compute_layout_tolerance(precision)
    of = {"losses": (*found["losses"], found["valid"]), "norms": tuple(found["norms"])}
    by = {"losses": (*alone["losses"], alone["valid"]), "norms": tuple(alone["norms"])}
    error_ratio = {
        kind: max(_compute_relative_difference(a, b) for a, b in zip(of[kind], by[kind], strict=True)) / size
        for kind, size in zip(of, allowed, strict=True)
    }
    same = found["parameters"] == alone["parameters"] and math.isclose(found["flops"], alone["flops"], rel_tol=1e-12)
    return error_ratio if same else dict.fromkeys(error_ratio, math.inf)


def _compute_relative_difference(a: float, b: float) -> float:
    return abs(a / b - 1) if math.isfinite(a) else math.inf


def train_cases(cases: Sequence[ParityCase], world_size: int, folder: Path) -> dict[ParityCase, CaseResult]:
    """Return the first rank's results of each case."""
    first, *_ = run_ranks(RANK_SCRIPT, folder, world_size, [case.to_json() for case in cases])
    return dict(zip(cases, first, strict=True))


def select_every_nth(methods: Sequence[str], every: int, turn: int) -> list[str]:
    """Return every nth method, starting at a different one each turn.

    Every method then meets every kind of layout.
    """
    return [method for number, method in enumerate(methods) if (number + turn) % every == 0]


def render_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Render the largest error of each layout over all methods, relative to its limit."""
    by_layout: dict[tuple[int, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        by_layout.setdefault((row["ranks"], row["layout"], row["precision"]), []).append(row)
    lines = ["| ranks | layout | precision | methods | loss | norm | worst method |", "|---|---|---|---|---|---|---|"]
    for (ranks, layout, precision), group in by_layout.items():
        worst = max(group, key=lambda row: max(row["losses"], row["norms"]))
        loss, norm = (max(row[kind] for row in group) for kind in ("losses", "norms"))
        lines.append(
            f"| {ranks} | {layout} | {precision} | {len(group)} | {loss:.2f} | {norm:.2f} | {worst['method']} |"
        )
    return "\n".join(lines)


def _describe_selection(record: Mapping[str, Any]) -> str:
    """Describe the methods that a row represents."""
    every = record["every"]
    if every == 1:
        return "A row is the worst of all methods that support its layout."
    return f"Each layout ran one method of {every}; consecutive layouts ran different ones."


def render_page(record: Mapping[str, Any]) -> str:
    rows = record["rows"]
    worst = max(max(row["losses"], row["norms"]) for row in rows)
    return f"""# Every layout compared with one process

Each row is one layout. Each of its methods trained for {STEPS} steps with it and with one process, using masks with
uneven token counts, clipping and a final validation.
{_describe_selection(record)}
The columns loss and norm contain the largest difference of any loss or gradient norm from one process's, relative
to the limit of rounding errors (derived in `tools/parity/cases.py`); 1 is the limit.
{len(rows)} runs were compared; the largest difference is {worst:.2f} times the limit.

TP shards layers (`model_parallel_size`), CP sequences (`context_parallel_size`), PP the stack of layers
(`pipe_parallel_size`), and DP batches.
Methods: {"; ".join(record["methods"])}.

{render_table(rows)}

{format_provenance(record["stamp"])}
"""


def main() -> None:
    """Train and compare the cases, and write the record."""
    parser = ToolParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", default="2,4", help="comma-separated numbers of ranks")
    parser.add_argument(
        "--methods", type=lambda text: text.split(";"), default=list(METHODS), help="methods separated by ;"
    )
    parser.add_argument("--precisions", type=comma_separated(("fp32", "bf16")), default=["fp32", "bf16"])
    parser.add_argument("--every", type=int_at_least(1), default=1, help="each layout runs every nth method, in turn")
    parser.add_argument("--layouts", help="only layouts whose description contains this text")
    parser.add_argument(
        "--json", type=parse_output_path, help="output file of the record; its page is written next to it"
    )
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.methods if name not in METHODS]:
        parser.error(f"--methods: {unknown[0]!r} is not one of {'; '.join(METHODS)}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        worlds = [int(each) for each in arguments.ranks.split(",")]
        every = {
            world: [
                case
                for number, layout in enumerate(list_layouts(world))
                for precision in arguments.precisions
                for method in select_every_nth(arguments.methods, arguments.every, number + (precision == "bf16"))
                if is_supported_case(case := ParityCase(method, layout, precision))
                and (arguments.layouts or "") in str(layout)
            ]
            for world in worlds
        }
        single = list(dict.fromkeys(case.to_single_process() for cases in every.values() for case in cases))
        alone = train_cases(single, 1, Path(folder) / "1")
        for world, cases in every.items():
            for case, found in train_cases(cases, world, Path(folder) / str(world)).items():
                error_ratio = compute_error_ratio(found, alone[case.to_single_process()], case.precision)
                rows.append(
                    {
                        "ranks": world,
                        "layout": str(case.layout),
                        "precision": case.precision,
                        "method": case.method,
                        **{kind: round(size, 4) for kind, size in error_ratio.items()},
                    }
                )
    record = {
        "stamp": collect_provenance(__file__, "cpu"),
        "methods": arguments.methods,
        "every": arguments.every,
        "rows": rows,
    }
    print(render_table(rows))
    if arguments.json is not None:
        write_record(arguments.json, record, render_page(record))
    if wrong := [row for row in rows if not max(row["losses"], row["norms"]) <= 1]:
        print(f"{len(wrong)} of {len(rows)} differ by more than rounding errors; the first: {wrong[0]}")
        sys.exit(1)


if __name__ == "__main__":
    main()
