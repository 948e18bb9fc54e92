"""What values stand over: the columns of a table, and the axis that a plot runs along.

Most records say what a model scored at a length. Others say what it scored at a place inside its windows, or at a
distance from what it has to find again; these have an axis of their own, and the length is that of the window.
"""

from dataclasses import dataclass

from megatron.suggest import choose_from


@dataclass(frozen=True)
class Axis:
    """One kind of place that values have."""

    name: str
    """In records, under `axis`."""
    title: str
    """With its unit, as a plot's axis is labelled."""
    each: str
    """What a column is, after "scored": at every length."""
    tokens: bool = True
    """Are places counts of tokens, which can be told in training lengths and have a logarithmic axis? Else shares."""
    lowest: float = 1.0
    highest: float = float("inf")

    def shown(self, place: float) -> str:
        """A place at a plot's axis or over a column."""
        return f"{round(place):,}" if self.tokens else f"{place:.0%}"

    def told(self, place: float) -> str:
        """A place in a sentence: 2,048 tokens, 50%."""
        return f"{self.shown(place)} tokens" if self.tokens else self.shown(place)

    def heads(self, place: float, train_length: int) -> tuple[str, str]:
        """The two heads of a column: in training lengths if that makes sense, and as it is."""
        return multiple(place / train_length) if self.tokens else "", self.shown(place)


AXES = {
    axis.name: axis
    for axis in (
        Axis("length", "length: tokens", "at every length"),
        Axis("position", "position in the window: tokens seen, the own included", "in a bin of positions"),
        Axis("distance", "distance to the first occurrence: tokens", "at a distance"),
        Axis("depth", "depth: share of the text that stands before", "at a depth", tokens=False, lowest=0, highest=1),
    )
}
"""All axes by their names."""


def find(name: str) -> Axis:
    """The axis of that name. Raises ValueError, with the choices, if there is none."""
    if name not in AXES:
        raise ValueError(f"{name!r} is no axis; {choose_from(name, AXES)}")
    return AXES[name]


def in_one_line(above: str, below: str) -> str:
    """A column's two heads where there is one line for them: 32× (2,048)."""
    return f"{above} ({below})" if above and below else above or below


def multiple(value: float) -> str:
    """1×, 32×, 1.5×."""
    return f"{value:.3g}×" if value < 1000 else f"{value:,.0f}×"
