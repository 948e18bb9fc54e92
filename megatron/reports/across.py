"""Models of several training lengths side by side (DAPE V2, 2410.04798, figure 3: equal tokens, other lengths).

Tables keep training lengths apart, because a column usually is a multiple of the training length. Where all lengths
score the same targets, their numbers can be compared all the same, at equal lengths of context.
"""

from collections.abc import Sequence
from dataclasses import replace

from megatron.reports.grids import Grid
from megatron.reports.layout import Layout


def grids(layouts: Sequence[Layout]) -> list[Grid]:
    """A table for all those that differ in the training length alone and score the same targets."""
    alike: dict[tuple[str, str, int | None, str, str], list[Layout]] = {}
    for layout in layouts:
        first = layout.records[0]
        if first.target_digest is not None:
            length = None if first.place is None else first.length
            kind = (layout.metric.name, layout.axis.name, length, layout.protocol, first.target_digest)
            alike.setdefault(kind, []).append(layout)
    return [_grid(same) for same in alike.values() if len(same) > 1]


def _grid(layouts: Sequence[Layout]) -> Grid:
    ordered = sorted(layouts, key=lambda layout: layout.train_length)
    metric, axis = ordered[0].metric, ordered[0].axis
    places = sorted({place for layout in ordered for place in layout.places})
    best = {
        place: metric.best(
            cell.mean
            for layout in ordered
            for (method, where), cell in layout.cells.items()
            if where == place and method not in layout.floors
        )
        for place in places
    }
    repeats = max(layout.repeats for layout in ordered)

    def shown(layout: Layout, method: str, place: float) -> str:
        cell = layout.cells.get((method, place))
        if cell is None:
            return layout.missing(method, place)
        floor = method in layout.floors
        few = cell.seeds if cell.seeds < repeats and not floor else None
        return str(replace(cell, best=cell.mean == best[place] and not floor, few=few))

    rows = tuple(
        (method, (f"{layout.train_length:,}", *(shown(layout, method, place) for place in places)))
        for layout in ordered
        for method in layout.methods
    )
    notes = [f"The same tokens are scored {axis.each}; {metric.better} is better.", "* best of its column."]
    if repeats > 1:
        notes.append(f"Cells are mean ± standard deviation of {repeats} seeds, those with an n of so many.")
    return Grid(
        title=f"{metric.heading} of models that were trained at several lengths, {ordered[0].how}",
        corner="method",
        heads=("trained at", *(axis.shown(place) for place in places)),
        rows=rows,
        notes=tuple(notes),
    )
