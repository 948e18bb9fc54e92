#!/usr/bin/env python3
"""Count the distances that training sees with and without document masking, on a corpus.

    ./deepy.py prepare python -o data/python
    python tools/bench/document_distances.py data/python/train_text_document --json docs/results/document_distances.json

A row of T tokens has T − n pairs of a query and a key at distance n if attention crosses documents (`attention_mask:
causal`). With `attention_mask: document` it has the sum of max(m − n, 0) over its document segments of m tokens. Rows
contain the dataset's documents in order; in training the sampler shuffles documents first.
"""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.arguments import ToolParser, parse_output_path, print_interrupts_in_one_line  # noqa: E402
from tools.records import collect_provenance, format_provenance, write_record  # noqa: E402

if __name__ == "__main__":
    print_interrupts_in_one_line()

import numpy as np  # noqa: E402

from megatron.data.document_starts import compute_crossing_fraction  # noqa: E402
from megatron.data.indexed_dataset import open_indexed  # noqa: E402

ROW_LENGTHS = (64, 512, 2048, 8192, 32768)
FRACTIONS = (1 / 4, 1 / 2, 3 / 4)
"""Distances to report, as fractions of the row length."""
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class RowDistances:
    """Distances in rows of one length."""

    row_length: int
    crossing_share: float
    """Fraction of rows that contain more than one document."""
    lost_pairs: float
    """Fraction of query-key pairs that span two documents."""
    context: dict[str, float]
    """Average number of visible tokens including the token itself, by attention_mask."""
    remaining: dict[str, float]
    """Ratio of pairs with and without document masking at a distance, by fraction of the row length."""
    quantiles: dict[str, dict[str, int]]
    """Quantiles of the distance between query and key, by attention_mask."""


def cut_rows(lengths: np.ndarray, row_length: int) -> np.ndarray:
    """Return the lengths of the segments, in order, after cutting documents of these lengths [N] into full rows."""
    ends = np.cumsum(lengths[lengths > 0], dtype=np.int64)
    stop = int(ends[-1]) // row_length * row_length
    edges = np.unique(np.concatenate([ends[ends < stop], np.arange(0, stop + 1, row_length)]))
    return np.diff(edges)


def count_pairs(pieces: np.ndarray, row_length: int) -> np.ndarray:
    """Count the pairs at each distance 0 … T − 1 within segments of these lengths; int64 [T]."""
    histogram = np.bincount(pieces, minlength=row_length + 1)
    at_least = histogram[::-1].cumsum()[::-1]  # segments of at least m tokens
    return at_least[1:][::-1].cumsum()[::-1]  # Σ max(m − n, 0) = Σ over k > n of the segments of at least k


def measure_distances(lengths: np.ndarray, row_length: int) -> RowDistances:
    """Measure the distances for documents of these lengths [N], in tokens with end tokens.

    They must fill at least one row.
    """
    crossing_share = compute_crossing_fraction(lengths, row_length)
    assert crossing_share is not None
    pieces = cut_rows(lengths, row_length)
    num_rows = int(pieces.sum()) // row_length
    pairs = {"causal": num_rows * np.arange(row_length, 0, -1), "document": count_pairs(pieces, row_length)}
    totals = {mask: int(counts.sum()) for mask, counts in pairs.items()}
    distances = {f"{fraction:g}": int(fraction * row_length) for fraction in FRACTIONS}
    return RowDistances(
        row_length,
        crossing_share,
        1 - totals["document"] / totals["causal"],
        {mask: total / (num_rows * row_length) for mask, total in totals.items()},
        {name: float(pairs["document"][n] / pairs["causal"][n]) for name, n in distances.items()},
        {
            mask: {f"{q:g}": int(np.searchsorted(counts.cumsum(), q * totals[mask])) for q in QUANTILES}
            for mask, counts in pairs.items()
        },
    )


def format_page(lengths: np.ndarray, rows: list[RowDistances], origin: str) -> str:
    lines = [
        "# Training distances with and without document masking",
        "",
        f"Python's standard library as bytes: {len(lengths):,} documents of "
        f"{int(lengths.sum(dtype=np.int64)):,} tokens,",
        f"half of them shorter than {int(np.median(lengths)):,}.",
        "Rows are cut from the concatenated documents.",
        "Attention crosses documents with `causal`, and does not with `document`.",
        "",
        "| tokens per row | rows with several documents | pairs across documents | tokens seen on average, causal | … "
        "document | pairs left at T/4 | at T/2 | at 3T/4 | 99% of pairs within, causal | … document |",
        "|" + "---|" * 10,
    ]
    for row in rows:
        left = " | ".join(f"{row.remaining[f'{fraction:g}']:.0%}" for fraction in FRACTIONS)
        seen = " | ".join(f"{row.context[mask]:,.0f}" for mask in ("causal", "document"))
        within = " | ".join(f"{row.quantiles[mask]['0.99']:,}" for mask in ("causal", "document"))
        lines.append(
            f"| {row.row_length:,} | {row.crossing_share:.1%} | {row.lost_pairs:.1%} | {seen} | {left} | {within} |"
        )
    lines += [
        "",
        "A pair is a query and a visible key; T is the row length.",
        "`Pairs left` is the number of pairs at a distance with document masking, relative to the number without.",
        "",
        origin,
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Count the distances and write the record."""
    parser = ToolParser(description=__doc__.partition("\n")[0])
    parser.add_argument("prefix", help="dataset without the extension .bin or .idx")
    parser.add_argument(
        "--json", type=parse_output_path, help="output file of the record; its page is written next to it"
    )
    arguments = parser.parse_args()
    lengths = np.asarray(open_indexed(arguments.prefix).lengths)
    rows = [measure_distances(lengths, length) for length in ROW_LENGTHS if length <= lengths.sum(dtype=np.int64)]
    provenance = collect_provenance(__file__, "cpu")
    page = format_page(lengths, rows, format_provenance(provenance))
    print(page)
    if arguments.json is not None:
        write_record(arguments.json, {**provenance, "documents": len(lengths), "rows": [asdict(r) for r in rows]}, page)


if __name__ == "__main__":
    main()
