"""Formatting for people: durations, operations, speeds with units, ranks, and suggestions for misspellings."""

import difflib
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from pathlib import Path


def format_duration(seconds: float) -> str:
    """Format a measured duration: 45 s, 3 min 05 s, 2 h 04 min, 3 days."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 2 * 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole / 86400:,.0f} days"


def format_approximate_duration(seconds: float) -> str:
    """Format an estimated duration in one unit: about 40 s, about 7 min, about 20 h, about 180 days."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"about {seconds / size:,.0f} {unit}"
    return f"about {max(1, round(seconds))} s"


def format_decimal(number: float, decimals: int) -> str:
    """Format a number with fixed decimals, or with three digits and an exponent from ten million: 2.50, 1.23e+41."""
    return f"{number:.{decimals}f}" if abs(number) < 1e7 else f"{number:.2e}"


def format_number(number: float) -> str:
    """Format a number as a user writes it: 0.05, and 969 for 969.0."""
    return str(number).removesuffix(".0")


def format_quantity(count: int, noun: str) -> str:
    """Format a count with its noun: 1 thread, 8 threads, 1,000 threads."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def format_flops(count: float) -> str:
    """Format floating-point operations: 950 FLOP, 12.3 GFLOP, 4.56 TFLOP."""
    units = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
    power = min(max(len(f"{count:.0f}") - 1, 0) // 3, len(units) - 1)
    return f"{count / 1000**power:.3g} {units[power]}FLOP"


def format_flops_per_second(tflops: float) -> str:
    """Format a speed in a suitable unit: 12.3 GFLOP/s, 1.23 TFLOP/s."""
    return f"{tflops:.3g} TFLOP/s" if tflops >= 1 else f"{1e3 * tflops:.3g} GFLOP/s"


def format_bytes(bytes_: float) -> str:
    """Format a size in memory or of a file: 950 bytes, 12.3 KiB, 4.56 GiB."""
    for unit, power in (("EiB", 60), ("PiB", 50), ("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if bytes_ >= 2**power:
            scaled = bytes_ / 2**power
            return f"{scaled:.0f} {unit}" if scaled >= 999.5 else f"{scaled:.3g} {unit}"
    return f"{bytes_:.0f} bytes"


def format_count(number: float) -> str:
    """Format a number with three digits and a unit: 950, 837k, 124M, 26.2B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            scaled = number / size
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}{unit}"
    return f"{number:.0f}"


def format_ranks(ranks: Iterable[int]) -> str:
    """Format ranks compactly in the given order: 0-3,5, or with a step 0,4,…,60."""
    numbers = list(ranks)
    if len(numbers) > 4:
        steps = {after - before for before, after in pairwise(numbers)}
        if len(steps) == 1:
            (step,) = steps
            if step == 1:
                return f"{numbers[0]}-{numbers[-1]}"
            return f"{numbers[0]},{numbers[1]},…,{numbers[-1]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


SIMILARITY = 0.63
"""Minimum similarity of a known name to a misspelled one for a suggestion, from 0 to 1, as difflib computes it."""


def suggest_names(
    name: str, names: Iterable[str], *, max_suggestions: int = 1, shown: Mapping[str, str] | None = None
) -> str:
    """Suggest known names: `did you mean rotary?` for `rotry`, or an empty string if no name is similar. Ignores case.

    Args:
        name: the name as written.
        names: known names.
        max_suggestions: maximum number of names, joined by "or"; equally similar ones are added, up to three.
        shown: how to write a known name, if different.
    """
    nearest = _find_similar(name, names, max_suggestions)
    suggested = list(dict.fromkeys(shown[match] if shown else match for match in nearest))
    return f"did you mean {' or '.join(suggested)}?" if suggested else ""


def find_nearest_name(name: str, names: Iterable[str]) -> str | None:
    """Return the most similar known name, or None if no name is similar. Ignores case."""
    return next(iter(_find_similar(name, names, 1)), None)


def suggest_path(path: Path, *, keywords: Iterable[str] = (), is_folder: bool = False) -> str:
    """Suggest an existing path for a mistyped one: `did you mean runs/kerple? `, or an empty string.

    Every part of the path may be mistyped: `rnus/kerpel`. If a part is a broken symbolic link, the text names its
    target instead: `data/pile is a broken symbolic link to /scratch/pile; `.

    Args:
        path: path that does not exist.
        keywords: names that are accepted instead of a path.
        is_folder: suggest only folders.
    """
    if near := find_nearest_name(str(path), keywords):
        return f"did you mean {near}? "
    folder = next((parent for parent in path.parents if parent.is_dir()), None)
    if folder is None:
        return ""
    parts = path.relative_to(folder).parts
    for depth, name in enumerate(parts, start=1):
        if (folder / name).is_symlink() and not (folder / name).exists():
            return f"{folder / name} is a broken symbolic link to {(folder / name).readlink()}; "
        needs_folder = is_folder or depth < len(parts)
        if not (folder / name).is_dir():
            try:
                children = [child for child in folder.iterdir() if not child.name.startswith(".")]
            except OSError:
                return ""
            near = find_nearest_name(name, [child.name for child in children if not needs_folder or child.is_dir()])
            if near is None:
                return ""
            name = near
        folder = folder / name
    return f"did you mean {folder}? "


def _find_similar(name: str, names: Iterable[str], max_names: int) -> list[str]:
    """Return the most similar known names, most similar first."""
    text = name.lower()
    matcher = difflib.SequenceMatcher(b=text)
    scores = {known: _compute_similarity(known.lower(), text, matcher) for known in names}
    ranked = sorted((known for known in scores if scores[known] >= SIMILARITY), key=lambda known: -scores[known])
    ties = [known for known in ranked if scores[known] == scores[ranked[0]]]
    return ranked[: max(max_names, min(len(ties), 3))]


def _compute_similarity(known: str, text: str, matcher: difflib.SequenceMatcher[str]) -> float:
    """Compute the similarity of a known name to a text, or an upper bound below `SIMILARITY`.

    A longer name counts half by its beginning: v100-16gb for v1000.

    Args:
        known: known name in lower case.
        text: text in lower case.
        matcher: matcher with the text as its second sequence, about which it caches facts.
    """
    similarity = 0.0
    for measure in (matcher.quick_ratio, matcher.ratio):  # the first is an upper bound, and fast
        matcher.set_seq1(known)
        whole = measure()
        matcher.set_seq1(known[: len(text)])
        similarity = max(whole, (whole + measure()) / 2)
        if similarity < SIMILARITY:
            break
    return similarity


def format_choices(name: str, names: Collection[str]) -> str:
    """Format the choices for an unknown name: `did you mean rotary? choose from alibi, rotary`."""
    return f"{suggest_names(name, names)} choose from {', '.join(names)}".lstrip()


_LATEX_SIGNS = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    **{"×": r"$\times$", "÷": r"$\div$", "±": r"$\pm$", "−": "$-$", "–": "--", "τ": r"$\tau$", "Δ": r"$\Delta$"},
    **{"∞": r"$\infty$", "≤": r"$\le$", "≥": r"$\ge$", "√": r"$\surd$", "…": r"\dots{}", "·": r"$\cdot$"},
    **{"“": "``", "”": "''", "’": "'"},
}


def escape_latex(text: str) -> str:
    """Escape all special characters for LaTeX."""
    return "".join(_LATEX_SIGNS.get(sign, sign) for sign in text)
