"""Page of a GPU visit: goals, times compared with the last record, steps, counters, memory, and evidence runs."""

from typing import Any

from tools.bench.attention_tables import render_markdown_table
from tools.gpu.goals import VISIT_GOALS, check_goals, render_step_table
from tools.records import format_provenance

KEY = ("op", "peer", "model", "dtype", "B", "H", "T", "d", "width", "kernel_size")
"""Fields that identify a measurement within a part."""

COUNTERS = {
    "ns": "ns",
    "registers": "registers",
    "issued_clocks": "issue",
    "load_store_clocks": "load/store",
    "shared_wavefronts_clocks": "shared memory",
    "l2_bytes_per_position": "L2 bytes",
    "bytes_per_position": "bytes",
}
"""Column headings by field of a kernel's counters; the last five are per causal score position."""
SHOWN_STALLS = 4
"""Number of a kernel's reasons for waiting on the page."""

Measurement = tuple[str, tuple[Any, ...]]


def list_times(result: dict[str, Any]) -> dict[Measurement, float]:
    """Return the median milliseconds of each measurement, by part and key."""
    found: dict[Measurement, float] = {}
    for part, done in result.get("parts", {}).items():
        for record in done.get("records", ()):
            times = record.get("ms")
            median = times["both"][1] if isinstance(times, dict) and "both" in times else record.get("wall_ms")
            if median is not None:
                found[part, tuple(record.get(name) for name in KEY)] = median
    return found


def list_memory_lines(result: dict[str, Any]) -> list[str]:
    """Return a table of trainings: equality with CUDA graphs, and peak memory beside the estimate of the planner."""
    rows = [
        f"| {record['case']} | {record['model']} | {record['B']} × {record['T']} | "
        f"{'yes' if record['equal'] else '**no**'} | {record['eager_peak_gb']:.2f} | "
        f"{record['planned_gb']:.2f} | {record['eager_peak_gb'] / record['planned_gb']:.3f} |"
        for done in result["parts"].values()
        for record in done.get("records", ())
        if record.get("planned_gb")
    ]
    head = [
        *("", "| training | model | tokens | equal with CUDA graphs | peak, GB | plan, GB | ratio |"),
        "|---|---|---|---|--:|--:|--:|",
    ]
    return [*head, *rows] if rows else []


def list_step_lines(result: dict[str, Any]) -> list[str]:
    """Return a table of training steps with their ratios to other methods."""
    records = [
        record
        for done in result["parts"].values()
        for record in done.get("records", ())
        if record.get("op") == "train_step" and record["ms"] is not None
    ]
    return ["", render_step_table(records)] if records else []


def list_evidence_lines(result: dict[str, Any]) -> list[str]:
    """Return a table of the evidence runs: perplexity by length, and the measured and estimated time of each run."""
    records = result["parts"].get("evidence", {}).get("records", ())
    finished = [record for record in records if record.get("perplexity")]
    lengths = sorted(
        {length for record in finished for row in record["perplexity"].values() for length in row}, key=int
    )
    cells = [
        [method, *(_format(row.get(length), ".2f") for length in lengths), format_seconds(record)]
        for record in finished
        for method, row in record["perplexity"].items()
    ]
    if not cells:
        return []
    head = ["method", *(f"{int(length):,}" for length in lengths), "seconds (estimate)"]
    text = "Perplexity of configs/evidence.yml by length, one seed:"
    return ["", text, "", render_markdown_table(head, cells)]


def format_seconds(record: dict[str, Any]) -> str:
    """Return the measured and estimated time of a run, or "earlier" if another visit ran it."""
    return f"{record['seconds']:.0f} ({record['estimated_seconds']:.0f})" if "seconds" in record else "earlier"


def list_counter_lines(result: dict[str, Any]) -> list[str]:
    """Return tables of the rates of instructions and of the kernels' counters."""
    rates: dict[str, dict[int, float]] = {}
    for record in result["parts"].get("rates", {}).get("records", ()):
        if "clocks" in record:
            rates.setdefault(record["peer"], {})[record["warps"]] = record["clocks"]
    warps = sorted({count for row in rates.values() for count in row})
    lines: list[str] = []
    if rates:
        cells = [[name, *(_format(row.get(count), ".2f") for count in warps)] for name, row in rates.items()]
        head = ["clocks of a multiprocessor per instruction", *(f"{count} warps" for count in warps)]
        lines += ["", render_markdown_table(head, cells)]
    counted = [r for r in result["parts"].get("counters", {}).get("records", ()) if "kernel" in r]
    if counted:
        cells = [
            [
                *(record["peer"], f"`{record['kernel'][:60]}`"),
                *(_format(record.get(field), "g") for field in COUNTERS),
                format_stalls(record.get("stalls", {})),
            ]
            for record in counted
        ]
        head = ["operator", "kernel", *COUNTERS.values(), "clocks between two instructions of a warp, by reason"]
        lines += ["", render_markdown_table(head, cells)]
    return lines


def format_stalls(stalls: dict[str, float]) -> str:
    """Return the main reasons for which a kernel's warps wait, with their clocks."""
    largest = sorted(stalls.items(), key=lambda item: -item[1])[:SHOWN_STALLS]
    return ", ".join(f"{reason} {clocks:.2f}" for reason, clocks in largest) or "—"


def _format(value: float | None, how: str) -> str:
    return "—" if value is None else format(value, how)


def render_visit(result: dict[str, Any], last: dict[str, Any] | None) -> str:
    """Render the page of a visit.

    It contains the goals, the parts, times and those of the last record, ratios of steps, counters, memory and its
    estimates, and the evidence runs.
    """
    lines = ["# GPU visit", "", f"{format_provenance(result)}", ""]
    lines += [render_markdown_table(["goal", "measured", "wanted", "met?"], check_goals(result, VISIT_GOALS)), ""]
    lines += ["| part | ended | seconds |", "|---|---|--:|"]
    for name, done in result["parts"].items():
        ended = f"done on {done['kept']}" if "kept" in done else "done" if done["exit"] == 0 else done["exit"]
        lines.append(f"| `{name}` | {ended} | {done['seconds']:.0f} |")
    is_comparable = last is not None and last.get("machine") == result.get("machine")
    before = list_times(last) if last is not None and is_comparable else {}
    lines += ["", "| part | measurement | ms | last record | ratio |", "|---|---|--:|--:|--:|"]
    for (part, key), median in list_times(result).items():
        named = [f"{name} {value}" for name, value in zip(KEY, key, strict=True) if value is not None]
        earlier = None if "kept" in result["parts"][part] else before.get((part, key))
        ratio = "" if earlier is None else f"{median / earlier:.3f}"
        lines.append(f"| `{part}` | {', '.join(named)} | {median:.3f} | {earlier or ''} | {ratio} |")
    lines += [*list_step_lines(result), *list_counter_lines(result)]
    lines += [*list_memory_lines(result), *list_evidence_lines(result)]
    refusals = [
        f"- `{part}`, {record.get('peer') or record.get('case') or record.get('kernel')}: {reason}"
        for part, done in result["parts"].items()
        for record in done.get("records", ())
        if (reason := record.get("refusal") or record.get("failure"))
    ]
    return "\n".join([*lines, "", *(["Not measured:", "", *refusals] if refusals else []), ""])
