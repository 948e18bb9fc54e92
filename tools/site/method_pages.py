"""A page for each position method, and docs/positions.md with links to them in the place of its entries.

An entry of docs/positions.md (formula, parameters, options, advice, source, picture) is the page's beginning. Then come
the overlays that choose the method, the kernels that compute it, and what the leaderboard's record
(docs/results/zoo.json) has of it.
"""

import re
from dataclasses import replace
from pathlib import Path

from megatron.attention.backends.capabilities import BACKEND_CAPABILITIES, find_unsupported_method
from megatron.config.method_names import list_other_names
from megatron.config.yaml_files import parse_yaml, read_text
from megatron.position.catalog import (
    list_encodings,
    list_processors,
    list_temperatures,
    read_encoding_facts,
    read_processor_facts,
)
from megatron.reports.comparison_table import build_comparison_tables
from megatron.reports.leaderboard import Leaderboard, LeaderboardReport
from megatron.reports.records import Record, read_records
from megatron.reports.table_formats import TextTable

FOLDER = "methods"
PAGE = "positions.md"
KINDS = {"Encodings": list_encodings, "Processors": list_processors, "Temperatures": list_temperatures}
"""Parts of docs/positions.md whose entries have pages, and the methods that they are of."""
KEYS = ("pos_emb", "score_processor", "attention_temperature")
"""What an overlay chooses a method by."""
RECORD = Path("docs/results/zoo.json")
BASELINE = "rotary"
FUSED_PROCESSOR, PLAIN_BIAS = "cdape", "kerple_log"
"""What stands for a processor beside an encoding, and for an encoding under a processor."""


def write_method_pages(root: Path) -> dict[str, str | bytes]:
    """The pages by their paths in the site's docs/.

    Args:
        root: the repository's folder.
    """
    records = read_records(root / RECORD)
    tables = LeaderboardReport(Leaderboard(BASELINE), build_comparison_tables(records)).build_tables()
    overlays = _find_overlays(root)
    pages: dict[str, str | bytes] = {}
    for kind, entries in split_entries((root / "docs" / PAGE).read_text(encoding="utf-8")).items():
        for name, entry in entries.items():
            parts = [
                f"# {name}",
                _link_entry(entry),
                "## Train with it",
                _describe_use(overlays.get(name, [])),
                "## What computes it",
                _describe_backends(kind, name),
                "## In the leaderboard",
                _describe_results(tables, _list_variants(records, name)),
                f"[All methods](../{PAGE}) · [the code](../../megatron/position/{kind.lower()}/{name}.py)",
            ]
            pages[f"{FOLDER}/{name}.md"] = "\n\n".join(parts) + "\n"
    return pages


def split_entries(positions: str) -> dict[str, dict[str, str]]:
    """Kind → method → its entry in docs/positions.md, without the heading."""
    found: dict[str, dict[str, str]] = {}
    for kind in KINDS:
        part = re.split(rf"^## {kind}$", positions, flags=re.MULTILINE)[1]
        part = re.split(r"^## ", part, flags=re.MULTILINE)[0]
        pieces = re.split(r"^### (\w+)$", part, flags=re.MULTILINE)[1:]
        found[kind] = dict(zip(pieces[::2], map(str.strip, pieces[1::2]), strict=True))
    return found


def list_names(method: str) -> list[str]:
    """What a method is called, by itself first, for the search."""
    return [method, *list_other_names(method)]


def shorten_positions(positions: str) -> str:
    """docs/positions.md with the first sentence of each entry and a link to its page; headings stay."""
    for entries in split_entries(positions).values():
        for name, entry in entries.items():
            summary = entry.partition("\n\n")[0]
            positions = positions.replace(entry, f"{summary}\n\n[More]({FOLDER}/{name}.md)")
    return positions


def _link_entry(entry: str) -> str:
    """An entry for a page in a folder beside docs/positions.md."""
    return entry.replace("](images/", "](../images/").replace("](#", f"](../{PAGE}#")


def _find_overlays(root: Path) -> dict[str, list[str]]:
    """Method → the overlays of configs/position/ that choose it, by name, the one of its own name first."""
    found: dict[str, list[str]] = {}
    for path in sorted((root / "configs/position").glob("*.yml")):
        values = parse_yaml(read_text(path), str(path)).values
        for key in KEYS:
            chosen = values.get(key, [])
            for name in dict.fromkeys(chosen if isinstance(chosen, list) else [chosen]):
                found.setdefault(str(name), []).append(path.stem)
    return {name: sorted(overlays, key=lambda overlay: overlay != name) for name, overlays in found.items()}


def _describe_use(overlays: list[str]) -> str:
    if not overlays:
        return "No overlay chooses it; its name is the value of the key."
    own, others = overlays[0], [f"[`{name}`](../../configs/position/{name}.yml)" for name in overlays]
    block = f"``` console\n./deepy.py train 125M {own} local_setup\n```"
    return f"{block}\n\nOverlays that choose it: {', '.join(others)}."


def _describe_backends(kind: str, name: str) -> str:
    """Which of the fast backends compute the method, and why the others do not."""
    if kind == "Temperatures":
        return "It multiplies queries before attention, so every `attention_backend` computes it."
    if kind == "Processors":
        cases = {f"on `{PLAIN_BIAS}`": (PLAIN_BIAS, name)}
    else:
        cases = {"alone": (name, None), f"under `{FUSED_PROCESSOR}`": (name, FUSED_PROCESSOR)}
    lines = [f"| `attention_backend` | {' | '.join(cases)} |", "| --- " * (1 + len(cases)) + "|"]
    for backend in BACKEND_CAPABILITIES:
        reasons = [
            find_unsupported_method(
                backend,
                read_encoding_facts(encoding),
                processor_facts=None if processor is None else read_processor_facts(processor),
                has_softcap=False,
            )
            for encoding, processor in cases.values()
        ]
        cells = ["yes" if reason is None else f"no: {reason}" for reason in reasons]
        lines.append(f"| `{backend}` | {' | '.join(cells)} |")
    return "\n".join(lines) + (
        "\n\n`triton` and `flex` need a GPU, `native` is a kernel for CPUs. "
        "`chunked` and `eager`, in plain PyTorch, compute every combination of methods. "
        "[`auto`](../configuration.md) measures on the machine which of those that can is fastest. "
        "Tensor, context, data and pipeline parallelism divide every method ([parallel](../parallel.md))."
    )


def _list_variants(records: list[Record], name: str) -> set[str]:
    """The methods of records that have a method in their position."""
    return {
        record.method
        for record in records
        if name in re.findall(r"\w+", f"{record.position or ''} {record.method}") and not record.is_trivial_baseline
    }


def _describe_results(tables: list[TextTable], variants: set[str]) -> str:
    """The rows of the leaderboard's tables that are of some methods, beside the baseline's."""
    if not variants:
        return f"The [leaderboard](../{RECORD.relative_to('docs').with_suffix('.md')}) has not asked it."
    parts = [
        f"One small budget, a model of 0.84M parameters for the text; {BASELINE} stands beside for comparison. "
        f"How it was measured, and every other method: [the leaderboard](../results/zoo.md)."
    ]
    for table in tables:
        rows = [row for row in table.rows if row[0] in variants]
        rows += [row for row in table.rows if row[0] == BASELINE and BASELINE not in variants]
        own = replace(table, rows=tuple(rows), notes=())
        parts.append((_transpose(own) if len(rows) < len(table.column_headers) else own).to_markdown())
    return "\n\n".join(parts)


def _transpose(table: TextTable) -> TextTable:
    """A column for each method: of few methods that is narrower."""
    names = tuple(name for name, _ in table.rows)
    cells = zip(table.column_headers, *(cells for _, cells in table.rows), strict=True)
    return replace(table, corner_header="", column_headers=names, rows=tuple((row[0], row[1:]) for row in cells))
