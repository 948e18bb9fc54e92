"""How what was found of heads is written: heads with the same numbers in one row of a table, and maps as lists."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from torch import Tensor

from megatron.analysis.analysis import Table

FOLDED = 12
"""Tables with more rows are folded."""

HeadCells = tuple[str, str, int, Sequence[str]]
"""A model, a layer, a head, and what stands in its row."""


def build_head_table(columns: Sequence[str], heads: Iterable[HeadCells], caption: str) -> Table:
    """A table in which neighbouring heads of a model's layer share a row if they have the same cells.

    Args:
        columns: names of the cells.
        heads: in the order of the table.
        caption: under it.
    """
    rows = []
    for (model, layer, cells), alike in groupby(heads, key=lambda head: (head[0], head[1], tuple(head[3]))):
        same = [head for _, _, head, _ in alike]
        which = str(same[0]) if len(same) == 1 else f"{same[0]} to {same[-1]}"
        rows.append([model, layer, which, *cells])
    return Table(["method", "layer", "heads", *columns], rows, caption, folded=len(rows) > FOLDED)


def format_triangle(values: Tensor, digits: int) -> list[list[float | None]]:
    """A map [queries, keys] up to its diagonal, so many digits of each number; None where no key is seen."""
    return [
        [float(f"{x:.{digits}g}") if x == x else None for x in line[: i + 1]] for i, line in enumerate(values.tolist())
    ]
