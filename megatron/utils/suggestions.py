"""What somebody may have meant who mistyped a name."""

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
    """`did you mean rotary?` for `rotry`; nothing if no name is near. Case does not matter.

    Args:
        name: what was written.
        names: what could have been.
        max_suggestions: at most so many names, joined by or.
        cutoff: difflib's, the least similarity, from 0 to 1.
        shown: how to write a known name, if not as it is.
    """
    by_lower = {known.lower(): known for known in names}
    matches = difflib.get_close_matches(name.lower(), by_lower, max_suggestions, cutoff)
    suggested = list(dict.fromkeys(shown[by_lower[match]] if shown else by_lower[match] for match in matches))
    return f"did you mean {' or '.join(suggested)}?" if suggested else ""


def find_nearest_name(name: str, names: Iterable[str]) -> str | None:
    """The known name that is most like a name, if one is near. Case does not matter."""
    by_lower = {known.lower(): known for known in names}
    return next((by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, 1)), None)


def format_choices(name: str, names: Collection[str]) -> str:
    """`did you mean rotary? choose from alibi, rotary` for a name that is none of them."""
    return f"{suggest_names(name, names)} choose from {', '.join(names)}".lstrip()
