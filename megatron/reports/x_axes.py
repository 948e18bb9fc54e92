"""What values stand over: the columns of a table, and the axis that a plot runs along.

Most records say what a model scored at a length. Others say what it scored at a place inside its windows, or at a
distance from what it has to find again; these have an axis of their own, and the length is that of the window.
"""

from dataclasses import dataclass

from megatron.utils.suggestions import format_choices


@dataclass(frozen=True)
class XAxis:
    """One kind of place that values have."""

    name: str
    """In records, under `axis`."""
    title: str
    """With its unit, as a plot's axis is labelled."""
    column_phrase: str
    """What a column is, after "scored": at every length."""
    in_tokens: bool = True
    """Are places counts of tokens, which can be told in training lengths and have a logarithmic axis? Else shares."""
    min_value: float = 1.0
    max_value: float = float("inf")
    is_dense: bool = False
    """Are there so many places that a table names some of them?"""

    @property
    def inline_name(self) -> str:
        """In a sentence, after "by"."""
        return self.name.replace("_", " ")

    def format_value(self, x: float) -> str:
        """A place at a plot's axis or over a column."""
        return f"{round(x):,}" if self.in_tokens else f"{x:.0%}"

    def format_value_with_unit(self, x: float) -> str:
        """A place in a sentence: 2,048 tokens, 50%."""
        return f"{self.format_value(x)} tokens" if self.in_tokens else self.format_value(x)

    def get_column_headers(self, x: float, train_length: int) -> tuple[str, str]:
        """The two heads of a column: in training lengths if that makes sense, and as it is."""
        return format_multiple(x / train_length) if self.in_tokens else "", self.format_value(x)


X_AXES = {
    axis.name: axis
    for axis in (
        XAxis("length", "length: tokens", "at every length"),
        XAxis("position", "position in the window: tokens seen, the own included", "in a bin of positions"),
        XAxis("tokens_seen", "position in the window: tokens seen, the own included", "at a position", is_dense=True),
        XAxis("distance", "distance to the first occurrence: tokens", "at a distance"),
        XAxis(
            "depth",
            "depth: share of the text that stands before",
            "at a depth",
            in_tokens=False,
            min_value=0,
            max_value=1,
        ),
    )
}
"""All axes by their names."""


def get_x_axis(name: str) -> XAxis:
    """The axis of that name. Raises ValueError, with the choices, if there is none."""
    if name not in X_AXES:
        raise ValueError(f"{name!r} is no axis; {format_choices(name, X_AXES)}")
    return X_AXES[name]


def join_headers(header: str, subheader: str) -> str:
    """A column's two heads where there is one line for them: 32× (2,048)."""
    return f"{header} ({subheader})" if header and subheader else header or subheader


def format_multiple(value: float) -> str:
    """1×, 32×, 1.5×."""
    return f"{value:.3g}×" if value < 1000 else f"{value:,.0f}×"
