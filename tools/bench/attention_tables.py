"""Human-readable output of the kernel benchmark: console lines, a table and a plot."""

from pathlib import Path
from typing import Any

COLUMN_HEADERS = ["op", "T", "B", "H", "dtype", "peer", "forward ms", "backward ms", "both ms", "times ours",
    "memory MB",
            "error"]  # fmt: skip
COLUMN_WIDTHS = (16, 6, 3, 3, 8, 18, 11, 12, 10, 11, 10, 8)
PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def format_cells(record: dict[str, Any]) -> list[str]:
    """Format a record as table cells, with a dash for values that the gate rejects or that have no counterpart."""
    op = record["op"] + (f" k={record['k']}" if "k" in record else "")
    problem = [op, str(record["T"]), str(record["B"]), str(record["H"]), record["dtype"], record["peer"]]
    wrong = "" if record["error"] is None else f"{record['error']:.1e}"
    if record["ms"] is None:
        return [*problem, *["—"] * 5, wrong]
    ratio = "—" if record["ratio"] is None else f"{record['ratio']:.2f}"
    middle = [f"{record['ms'][part][1]:,.3g}" for part in ("forward", "backward", "both")]
    memory = "—" if record["peak_memory_mb"] is None else f"{record['peak_memory_mb']:,.0f}"
    return [*problem, *middle, ratio, memory, wrong]


def format_console_line(record: dict[str, Any]) -> str:
    return align_columns(format_cells(record))


def align_columns(words: list[str]) -> str:
    return " ".join(word.rjust(width) for word, width in zip(words, COLUMN_WIDTHS, strict=True))


def render_markdown_table(headings: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (headings, ["---"] * len(headings), *rows))


def format_measured_line(result: dict[str, Any]) -> str:
    """Format the date, machine, versions and command of a record in one line."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return f"{result['date']}, {result['machine']}; {versions}; `{result['command']}`."


def render_page(result: dict[str, Any]) -> str:
    """Render the records as a table, followed by their provenance."""
    table = render_markdown_table(COLUMN_HEADERS, [format_cells(record) for record in result["records"]])
    return f"{table}\n\n{format_measured_line(result)}\n"


def plot_records(records: list[dict[str, Any]], path: Path) -> None:
    """Plot time and memory over T, one curve per peer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, what, value in (
        (axes[0], "forward + backward, ms", lambda r: r["ms"]["both"][1]),
        (axes[1], "peak memory, MB", lambda r: r["peak_memory_mb"]),
    ):
        for name in dict.fromkeys(record["peer"] for record in records if record["ms"] is not None):
            points = sorted((r["T"], value(r)) for r in records if r["peer"] == name and r["ms"] is not None)
            axis.plot(*zip(*points, strict=True), marker="o", label=name)
        axis.set(xscale="log", yscale="log", xlabel="T", title=what)
        axis.legend(frameon=False)
    figure.savefig(path, dpi=110)
