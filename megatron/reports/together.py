"""`./deepy.py report RESULTS…`: records of several files in one page, and what they say."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megatron.errors import UserError
from megatron.reports import across, extrapolation, records, significance, tables
from megatron.reports.grids import Grid
from megatron.reports.layout import Layout, layouts
from megatron.reports.records import RESULTS, Record
from megatron.suggest import choose_from


def together(
    results: Sequence[Path],
    console: Console,
    *,
    output: Path | None = None,
    against: str | None = None,
    delta: float = extrapolation.DELTA,
    title: str | None = None,
) -> list[Record]:
    """Show the tables of several files, and write them into a page if one is named.

    Args:
        results: results.json files, or folders that hold one.
        console: takes the tables.
        output: the page.
        against: the method that others are compared with.
        delta: the bound of the criterion of extrapolation.
        title: of the page.

    Raises:
        UserError: there is no such file, it holds no records, or no table has the method.
    """
    found = [record for path in results for record in records.read(path / RESULTS if path.is_dir() else path)]
    if not found:
        raise UserError(f"{', '.join(map(str, results))}: no results")
    grids = judged(layouts(found), against, delta)
    tables.show(console, found)
    for each in grids:
        console.print(f"\n{each.plain()}", end="", markup=False, highlight=False, soft_wrap=True)
    if output is not None:
        from megatron.reports import report  # matplotlib takes a while

        report.write(output, found, title=title, grids=grids)
        console.print(f"written: {output}", markup=False, highlight=False, soft_wrap=True)
    return found


def judged(groups: Sequence[Layout], against: str | None = None, delta: float = extrapolation.DELTA) -> list[Grid]:
    """What tables say: models of several training lengths side by side, who extrapolates, and who differs from a
    method. Raises UserError if no table has the method."""
    grids = across.grids(groups)
    grids += [grid for layout in groups if (grid := extrapolation.grid(layout, delta)) is not None]
    if against is None:
        return grids
    with_it = [layout for layout in groups if against in layout.methods and len(layout.methods) > 1]
    if not with_it:
        methods = list(dict.fromkeys(method for layout in groups for method in layout.methods))
        hint = "it is alone in its table" if against in methods else choose_from(against, methods)
        raise UserError(f"--against {against}: nothing to compare with it; {hint}")
    return grids + [significance.grid(layout, against) for layout in with_it]
