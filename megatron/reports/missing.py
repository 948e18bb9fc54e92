"""What is not in the tables: seeds that a method lacks, lengths that a seed lacks, and why, where that is known.

A table is whole if every method has every seed of the table at every place of the table. Where no method has more than
one seed, seeds are no repeats, and each method has its own. Positions that end before a length explain themselves in
the cell, and predictors that learned nothing have no seeds.
"""

from collections.abc import Sequence

from megatron.reports.grids import Grid
from megatron.reports.layout import Layout

EVERYTHING = "everything"


def grid(groups: Sequence[Layout]) -> Grid | None:
    """A list of what tables of the same records lack, a row for all that a method lacks alike; None if all is there."""
    runs = _runs(groups)
    rows: dict[tuple[str, str, str], list[int]] = {}
    for method, seed in runs:
        why = next((str(each) for layout in groups for each in layout.failures if (each.method, each.seed)
                    == (method, seed)), "no record of it")  # fmt: skip
        for what in _lacks(groups, method, seed):
            rows.setdefault((method, what, why), []).append(seed)
    if not rows:
        return None
    return Grid(
        title="What is missing",
        corner="method",
        heads=("seed", "what", "why"),
        rows=tuple((method, (", ".join(map(str, seeds)), what, why)) for (method, what, why), seeds in rows.items()),
        notes=("Means, changes and comparisons are over the seeds that are there; where these are fewer, n says so.",)
        if any(layout.repeats > 1 for layout in groups)
        else (),
    )


def _runs(groups: Sequence[Layout]) -> list[tuple[str, int]]:
    """Every method with every seed that a table of it should have, and every run that failed."""
    wanted: dict[tuple[str, int], None] = {}
    for layout in groups:
        for method in layout.methods:
            if method not in layout.floors:
                own = [each.seed for each in layout.failures if each.method == method]
                there = [record.seed for record in layout.records if record.method == method]
                seeds = _seeds(layout) if there and layout.repeats > 1 else there
                wanted |= dict.fromkeys((method, seed) for seed in (*seeds, *own))
    return sorted(wanted, key=lambda run: list(dict.fromkeys(method for method, _ in wanted)).index(run[0]))


def _seeds(layout: Layout) -> list[int]:
    """That a table has of any method."""
    return sorted({record.seed for record in layout.records if record.method not in layout.floors})


def _lacks(groups: Sequence[Layout], method: str, seed: int) -> list[str]:
    """What tables lack of a run: the tables and places; `EVERYTHING` if they have nothing of it."""
    concerned = [layout for layout in groups if method in layout.methods]
    there = {
        number: {record.at for record in layout.records if (record.method, record.seed) == (method, seed)}
        for number, layout in enumerate(concerned)
    }
    if not any(there.values()):
        return [EVERYTHING]
    found = []
    for number, layout in enumerate(concerned):
        failed = any((each.method, each.seed) == (method, seed) for each in layout.failures)
        if seed not in _seeds(layout) and not failed:
            continue
        places = [
            place for place in layout.places if place not in there[number] and not layout.ends_before(method, place)
        ]
        if places:
            at = ", ".join(map(layout.axis.shown, places)) + (" tokens" if layout.axis.tokens else "")
            table = "" if len(concerned) == 1 else f"{layout.title}: "
            found.append(f"{table}{'all of it' if not there[number] else at}")
    return found
