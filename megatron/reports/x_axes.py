"""Axes of values: the columns of a table, and the horizontal axis of a plot.

Most records are scores at a length. Others are scores at a position inside windows, or at a distance from the tokens to
copy. These have their own axes, and their length is that of the window.
"""

from dataclasses import dataclass

from megatron.utils.formatting import format_choices


@dataclass(frozen=True)
class XAxis:
    """Quantity that values are plotted over."""

    name: str
    """Name in the `axis` field of records."""
    title: str
    """Title with its unit, as an axis label."""
    column_phrase: str
    """Phrase that completes "scored" for a column: at every length."""
    in_tokens: bool = True
    """True if values are token counts, with multiples of the training length and a log axis; otherwise shares."""
    min_value: float = 1.0
    max_value: float = float("inf")
    is_dense: bool = False
    """True if there are so many values that tables show only some of them."""

    @property
    def inline_name(self) -> str:
        """Name in a sentence, after "by"."""
        return self.name.replace("_", " ")

    def format_value(self, x: float) -> str:
        """Format a value for an axis or a column header."""
        return f"{round(x):,}" if self.in_tokens else f"{x:.0%}"

    def format_value_with_unit(self, x: float) -> str:
        """Format a value in a sentence: 2,048 tokens, 50%."""
        return f"{self.format_value(x)} tokens" if self.in_tokens else self.format_value(x)

    def get_column_headers(self, x: float, train_length: int) -> tuple[str, str]:
        """Return both header lines of a column: multiple of the training length if applicable, and value."""
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
            "depth: share of the text before the answer",
            "at a depth",
            in_tokens=False,
            min_value=0,
            max_value=1,
        ),
    )
}
"""All axes by name."""


def get_x_axis(name: str) -> XAxis:
    """Return an axis by name.

    Raises:
        ValueError: the name is unknown; the message lists the choices.
    """
    if name not in X_AXES:
        raise ValueError(f"unknown axis {name!r}; {format_choices(name, X_AXES)}")
    return X_AXES[name]


def join_headers(header: str, subheader: str) -> str:
    """Join both header lines of a column in one: 32× (2,048)."""
    return f"{header} ({subheader})" if header and subheader else header or subheader


def format_multiple(value: float) -> str:
    """Format a multiple: 1×, 32×, 1.5×."""
    return f"{value:.3g}×" if value < 1000 else f"{value:,.0f}×"
