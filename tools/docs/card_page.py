"""Generated sections of docs/card.md, written by `make docs`: trained models, and their use of distant context."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.reports import context_gain
from megatron.reports.comparison_table import build_comparison_tables
from megatron.reports.records import Record, read_records
from megatron.reports.run_records import read_run_folder
from megatron.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path("docs/card.md")
RESULTS = ROOT / "docs" / "results"
LEADERBOARD = RESULTS / "zoo.json"
TABLE_HEAD = """| record | runs | parameters | training length | tokens trained on | seeds per method |
|---|--:|--:|--:|--:|--:|"""


@dataclass(frozen=True)
class RecordedTrainings:
    """Trainings of the records of a folder or file, described by their ranges."""

    name: str
    records: tuple[Record, ...]

    @property
    def num_runs(self) -> int:
        """Number of runs. One run may be evaluated in several ways, under several names."""
        return len({record.run or (record.method, record.seed, record.dataset) for record in self.records})

    def format_row(self) -> str:
        """Format the row of the table."""
        by_method: dict[tuple[str | None, ...], set[int]] = {}
        for record in self.records:
            key = (record.method, record.dataset, record.training_digest)
            by_method.setdefault(key, set()).add(record.seed)
        cells = (
            f"`{self.name}`",
            f"{self.num_runs}",
            format_range((record.parameters for record in self.records), 1e6, "M"),
            format_range(record.train_length for record in self.records),
            format_range((record.train_tokens for record in self.records), 1e6, "M"),
            format_range(len(seeds) for seeds in by_method.values()),
        )
        return f"| {' | '.join(cells)} |"


def format_range(values: Iterable[int | None], divisor: float = 1, unit: str = "") -> str:
    """Format the smallest and the largest known value, such as `0.84M to 1.10M`; a dash if none is known."""
    known = sorted({value for value in values if value is not None})
    if not known:
        return "–"
    low, high = (f"{value / divisor:.2f}{unit}" if unit else f"{value:,}" for value in (known[0], known[-1]))
    return low if low == high else f"{low} to {high}"


def list_trainings(folder: Path = RESULTS) -> Iterator[RecordedTrainings]:
    """Yield the trainings of each file of records, with one entry for all files of a subfolder.

    A folder of single runs (`sweep.records`), such as `zoo_3m`, has an entry unless its sweep is published in the file
    `zoo_3m.json`. Files of other contents and records without a trained model are skipped.
    """
    groups = {path.name: [path] for path in sorted(folder.glob("*.json"))}
    for path in sorted(folder.glob("*/*.json")):
        groups.setdefault(f"{path.parent.relative_to(folder).as_posix()}/*.json", []).append(path)
    recorded = {name: [record for path in paths for record in _read_trained(path)] for name, paths in groups.items()}
    for subfolder in sorted(path for path in folder.iterdir() if path.is_dir()):
        if f"{subfolder.name}.json" not in groups:
            recorded[f"{subfolder.name}/"] = _select_trained(read_run_folder(subfolder).records)
    for name, records in recorded.items():
        if records:
            yield RecordedTrainings(name, tuple(records))


def _read_trained(path: Path) -> list[Record]:
    try:
        return _select_trained(read_records(path))
    except UserError:
        return []


def _select_trained(records: Iterable[Record]) -> list[Record]:
    return [record for record in records if record.parameters and record.step]


def render_table(folder: Path = RESULTS) -> str:
    """Render the table, with a sentence on the largest model."""
    trainings = list(list_trainings(folder))
    records = [record for each in trainings for record in each.records]
    largest = max((record.parameters or 0 for record in records), default=0)
    tokens = max((record.train_tokens or 0 for record in records), default=0)
    lines = [
        f"The largest model has {largest / 1e6:.2f}M parameters, and the longest training {tokens / 1e6:.2f}M tokens.",
        "",
        TABLE_HEAD,
        *(each.format_row() for each in trainings),
    ]
    return "\n".join(lines) + "\n"


def describe_use_of_context(records: Sequence[Record]) -> str:
    """Describe how many methods of a leaderboard use the context beyond the training length."""
    gains = [gain for table in build_comparison_tables(records) for gain in context_gain.measure_gains(table)]
    if not gains:
        return ""
    counts = Counter(gain.verdict for gain in gains)
    first = gains[0]
    others = [gain.method for gain in gains if "(" in gain.method]  # such as rotary (yarn), an evaluation of rotary
    counted = f" (including {', '.join(others)})" if others else ""
    text = (
        f"Measured on the leaderboard's text, from {first.base_length:,} to {first.length:,} bytes of context "
        f"([definition](evaluation.md#use-of-context)): of {len(gains)} methods{counted}, "
        f"{counts[context_gain.USED]} use it, "
        f"{counts[context_gain.IGNORED]} ignore it, {counts[context_gain.HURT]} are hurt by it, and "
        f"{counts[context_gain.UNDECIDED]} are undecided. [context.md](results/context.md) has a bound from a model "
        "trained at the long length."
    )
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def describe_board(records: Sequence[Record]) -> str:
    """Describe what a published leaderboard was made of: its trainings, steps, and seeds, by text and task."""
    trained = _select_trained(records)
    by_dataset: dict[str, list[Record]] = {}
    for record in trained:
        by_dataset.setdefault((record.dataset or record.protocol).partition("(")[0], []).append(record)
    parts = [
        f"{dataset} ({format_range(record.step for record in own)} steps; seeds per method: "
        f"{format_range(map(len, list_seeds(own)))})"
        for dataset, own in by_dataset.items()
    ]
    last_date = max(record.date or "" for record in trained)[:10]
    num_runs = len({record.run for record in trained})
    text = f"The published leaderboard has {num_runs} trainings, the latest from {last_date}: {', '.join(parts)}."
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def list_seeds(records: Sequence[Record]) -> list[set[int]]:
    """Return the seeds of each method."""
    seeds: dict[str, set[int]] = {}
    for record in records:
        seeds.setdefault(record.method, set()).add(record.seed)
    return list(seeds.values())


def render_page() -> str:
    """Render the page with updated generated sections, each between two comments with its name."""
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    leaderboard = read_records(LEADERBOARD)
    parts = {
        "trainings": render_table(),
        "board": describe_board(leaderboard),
        "context": describe_use_of_context(leaderboard),
    }
    for name, text in parts.items():
        begin, end = f"<!-- {name}: make docs -->\n", f"<!-- end of {name} -->\n"
        before, rest = page.split(begin)
        page = before + begin + text + end + rest.split(end)[1]
    return page
