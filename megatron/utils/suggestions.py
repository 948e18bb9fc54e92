"""Suggestions for misspelled names."""

import difflib
from collections.abc import Collection, Iterable, Mapping


def suggest_names(
    name: str,
    names: Iterable[str],
    *,
    max_suggestions: int = 1,
    cutoff: float = 0.6,
    shown: Mapping[str, str] | None = None,
) -> str:
    """Suggest known names: `did you mean rotary?` for `rotry`, or an empty string if no name is similar. Ignores case.

    Args:
        name: the name as written.
        names: known names.
        max_suggestions: maximum number of names, joined by "or".
        cutoff: minimum similarity of difflib, from 0 to 1.
        shown: how to write a known name, if different.
    """
    by_lower = {known.lower(): known for known in names}
    matches = difflib.get_close_matches(name.lower(), by_lower, max_suggestions, cutoff)
    suggested = list(dict.fromkeys(shown[by_lower[match]] if shown else by_lower[match] for match in matches))
    return f"did you mean {' or '.join(suggested)}?" if suggested else ""


def find_nearest_name(name: str, names: Iterable[str]) -> str | None:
    """Return the most similar known name, or None if no name is similar. Ignores case."""
    by_lower = {known.lower(): known for known in names}
    return next((by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, 1)), None)


def format_choices(name: str, names: Collection[str]) -> str:
    """Format the choices for an unknown name: `did you mean rotary? choose from alibi, rotary`."""
    return f"{suggest_names(name, names)} choose from {', '.join(names)}".lstrip()
