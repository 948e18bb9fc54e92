"""What tables say together: training lengths side by side, who extrapolates, who is better beyond chance."""

from collections.abc import Sequence

from megatron.errors import UserError
from megatron.reports import across, extrapolation, significance
from megatron.reports.grids import Grid
from megatron.reports.layout import Layout
from megatron.suggest import choose_from


def judged(groups: Sequence[Layout], against: str | None = None, delta: float = extrapolation.DELTA) -> list[Grid]:
    """What tables say: models of several training lengths side by side, who extrapolates, and who differs from a
    method. Raises UserError if no table has the method."""
    grids = across.grids(groups)
    grids += [grid for layout in groups if (grid := extrapolation.grid(layout, delta)) is not None]
    if against is None:
        return grids
    measured = [(layout, {record.method for record in layout.records}) for layout in groups]
    with_it = [layout for layout, methods in measured if against in methods and len(methods) > 1]
    if not with_it:
        methods = list(dict.fromkeys(method for layout in groups for method in layout.methods))
        hint = "it is alone in its table" if against in methods else choose_from(against, methods)
        raise UserError(f"--against {against}: nothing to compare with it; {hint}")
    return grids + [significance.grid(layout, against) for layout in with_it]
