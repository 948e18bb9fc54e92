"""Generated sentences of a report: title, summaries, alternative texts, protocols, and environment.

HTML and Markdown pages share them. Every number comes from records.
"""

from collections.abc import Sequence
from string import Template

from megatron.reports.axes import format_multiple
from megatron.reports.comparison_table import ComparisonTable, format_partial_seeds
from megatron.reports.method_rows import quote_method
from megatron.reports.records import Record

MAX_NAMED_METHODS = 4
"""Maximum number of methods that a title names; more are counted."""

MAX_DESCRIBED_CURVES = 9
"""Maximum number of curves that a summary or an alternative text describes; of more, the best and the worst."""

_PROTOCOL_DESCRIPTIONS = {
    "last": (
        "Only the last $targets tokens of each window are scored. Windows of all lengths end at the same "
        "${windows}positions of the text, so every length predicts the same $tokens tokens and differs only in "
        "context."
    ),
    "strided": (
        "Windows begin $targets tokens apart, and the last $targets tokens of each are scored: every token of a span "
        "of the text once, each with almost a full window of context."
    ),
    "nonoverlapping": (
        "One span of the text is divided into windows without overlap, and every token is scored. The span is a "
        "multiple of every length, so every length predicts the same $tokens tokens; early tokens of a window have "
        "little context."
    ),
    "overlapping": (
        "One span of the text is divided into overlapping windows, and every token with at least $min_context tokens "
        "of context is scored. The span is a multiple of the scored tokens of every length, so every length predicts "
        "the same $tokens tokens."
    ),
    "depths": (
        "At each depth and length all methods are evaluated on the same ${windows}sequences of the task, whose answer "
        "is at that depth. Intervals are percentile bootstraps over sequences; those of a length are for its mean "
        "over depths."
    ),
    "task": (
        "At each input length all methods are evaluated on the same ${windows}new sequences, drawn with a fixed seed; "
        "intervals are percentile bootstraps over sequences, drawn independently at each length. Rows that begin with "
        "floor are trivial baselines."
    ),
}


def describe_plots(tables: Sequence[ComparisonTable]) -> str:
    """Describe the plots of tables for screen readers: each panel with its curves."""
    return " ".join(_describe_plot(table) for table in tables)


def _describe_plot(table: ComparisonTable) -> str:
    """Describe each curve by its first and last value, best first; if there are many, only the best and the worst."""
    axis, metric = table.axis, table.metric
    curves = []
    for method in table.methods:
        x_values = [x for x in table.x_values if (method, x) in table.cells]
        if not x_values:
            continue
        first, last = table.cells[method, x_values[0]], table.cells[method, x_values[-1]]
        end_note = (
            ""
            if x_values[-1] == table.x_values[-1]
            else f" at {axis.format_value_with_unit(x_values[-1])}, where it ends"
        )
        start = "" if len(x_values) == 1 else f"{first.mean_text} to "
        curves.append((metric.get_sort_key(last.mean), f"{quote_method(method)} {start}{last.mean_text}{end_note}"))
    ordered = _shorten_list([text for _, text in sorted(curves)])
    x_range = axis.format_value_with_unit(table.x_values[0])
    if len(table.x_values) > 1:
        x_range = f"{axis.format_value(table.x_values[0])} to {axis.format_value_with_unit(table.x_values[-1])}"
    y_description = metric.axis_label + table.title.removeprefix(metric.title_with_unit)
    return f"Plot of {y_description}, over {axis.inline_name} {x_range}: {'; '.join(ordered)}."


def _shorten_list(texts: Sequence[str]) -> Sequence[str]:
    if len(texts) <= MAX_DESCRIBED_CURVES:
        return texts
    num_left_out = len(texts) - MAX_DESCRIBED_CURVES
    return [*texts[: MAX_DESCRIBED_CURVES - 1], f"{num_left_out} others between", texts[-1]]


def build_title(tables: Sequence[ComparisonTable]) -> str:
    """Build a title from metrics, methods, and lengths, independent of the folder's name."""
    trivial_baselines = {method for table in tables for method in table.trivial_baselines}
    methods = [name for name in dict.fromkeys(method for table in tables for method in table.methods)
               if name not in trivial_baselines] or list(trivial_baselines)  # fmt: skip
    method_text = describe_methods(methods, MAX_NAMED_METHODS)
    metric_text = join_words(list(dict.fromkeys(table.metric.title for table in tables)))
    lengths = sorted({record.length for table in tables for record in table.records})
    train_lengths = sorted({table.train_length for table in tables})
    length_range = f"{lengths[0]:,}" + (f" to {lengths[-1]:,}" if len(lengths) > 1 else "")
    return (
        f"{metric_text} of {method_text} at {length_range} tokens, trained at "
        f"{join_words([f'{length:,}' for length in train_lengths])} tokens"
    )


def describe_methods(methods: Sequence[str], max_named: int) -> str:
    """Join method names, or return their number if there are more than `max_named`."""
    return f"{len(methods)} methods" if len(methods) > max_named else join_words(methods)


def join_words(words: Sequence[str]) -> str:
    """Join words as in: a, b and c."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def summarize_table(table: ComparisonTable) -> str:
    """Describe the ranking at the last x value, and the change of each method from the first one."""
    metric, axis, first_x, last_x = table.metric, table.axis, table.x_values[0], table.x_values[-1]
    last_cells = [(cell, method) for method in table.methods if (cell := table.cells.get((method, last_x))) is not None]
    parts = []
    for cell, method in sorted(
        last_cells, key=lambda cell_and_method: (metric.get_sort_key(cell_and_method[0].mean), cell_and_method[1])
    ):
        change = None if first_x == last_x else table.compute_change(method, first_x, last_x)
        change_text = ""
        if change is not None:
            reported_change = table.changes.get(method)
            verdict = (
                "" if reported_change is None or reported_change.verdict is None else f", {reported_change.verdict}"
            )
            size = change.format_relative(change.mean)
            change_text = f" ({size} from {axis.format_value_with_unit(first_x)}{verdict})"
        parts.append(
            f"{quote_method(method)} {cell.mean_text}{format_partial_seeds(cell.partial_num_seeds)}{change_text}"
        )
    x_text = (
        axis.format_value_with_unit(last_x)
        if axis.name == "length"
        else f"{axis.inline_name} {axis.format_value_with_unit(last_x)}"
    )
    multiple_text = f"{format_multiple(last_x / table.train_length)}, " if axis.in_tokens else ""
    at_text = "over the lengths" if metric.length_summary else f"at {x_text}"
    return (
        f"Trained at {table.train_length:,} tokens; {metric.axis_label} {at_text} "
        f"({multiple_text}{table.protocol_description}): "
        f"{', '.join(_shorten_list(parts))}."
    )


def describe_measurements(tables: Sequence[ComparisonTable]) -> list[str]:
    """Describe each protocol and everything measured with it."""
    by_protocol: dict[str, list[ComparisonTable]] = {}
    for table in tables:
        by_protocol.setdefault(table.protocol, []).append(table)
    return [_describe_protocol(protocol, measured) for protocol, measured in by_protocol.items()]


def _describe_protocol(protocol: str, tables: Sequence[ComparisonTable]) -> str:
    """Describe the scored tokens, the texts, and the meaning of bars and intervals in these tables."""
    firsts = [table.records[0] for table in tables]
    windows = _join_counts([record.windows for record in firsts])
    facts = {
        "targets": _join_counts([record.targets for record in firsts]) or "few",
        "windows": windows and f"{windows} ",
        "min_context": _join_counts([record.length - record.targets + 1 for record in firsts if record.targets]),
        # Records at positions inside windows have fewer tokens than records of lengths.
        "tokens": _join_counts([record.tokens for record in firsts if record.place is None]),
    }
    parts = [f"Protocol {protocol}.", Template(_PROTOCOL_DESCRIPTIONS.get(protocol, "")).safe_substitute(facts)]
    byte_texts = {record.dataset for record in firsts if record.bits_per_byte is not None}
    texts = list(dict.fromkeys(
        _describe_text(record.dataset, record.tokenizer, record.dataset in byte_texts)
        for record in firsts if record.dataset
    ))  # fmt: skip
    if texts:
        parts.append(f"Text{'s' * (len(texts) > 1)}: {'; '.join(texts)}.")
    several = _join_counts([table.max_seeds for table in tables if table.max_seeds > 1])
    single = [table for table in tables if table.max_seeds == 1]
    has_bars = any(entry.stderr is not None for table in single for entry in table.records)
    if several:
        where = "With several seeds, cells" if has_bars else "Cells"
        parts.append(
            f"{where} are arithmetic means over {several} seeds, or over n seeds where shown, with their standard "
            "deviation, and bars span the seeds."
        )
    if has_bars:
        where = "With one seed, bars" if several else "Bars"
        parts.append(
            f"{where} are 95% intervals over windows of text. All methods and lengths share the text, so differences "
            "between them are more certain than the bars suggest."
        )
    has_changes = any(entry.change_low is not None for table in tables for entry in table.records)
    if has_changes and protocol not in ("depths", "task"):  # these protocols mention sequences in their own sentences
        parts.append(
            "Intervals are percentile bootstraps over windows. Those of a change use the same windows at both "
            "lengths, so that the difficulty of a window cancels."
        )
    return " ".join(filter(None, parts))


def _join_counts(counts: Sequence[int | None]) -> str:
    """Join distinct counts in ascending order: 2,048 or 4,096; empty if unknown."""
    texts = [f"{count:,}" for count in sorted({count for count in counts if count is not None})]
    return " or ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))


def _describe_text(dataset: str, tokenizer: str | None, is_bytes: bool) -> str:
    """Describe the source of the tokens, and their unit."""
    notes = [f"tokenizer {tokenizer}"] if tokenizer else []
    notes += ["one token is one byte"] if is_bytes else []
    return f"{dataset} ({', '.join(notes)})" if notes else dataset


def describe_environment(records: Sequence[Record]) -> dict[str, str]:
    """Describe machine, device, software, and dates, each once."""
    columns = {
        "machine": [record.machine for record in records],
        "scored on": [record.device for record in records],
        "software": [record.software for record in records],
        "scored at (UTC)": [record.date for record in records],
    }
    facts = {}
    for name, values in columns.items():
        distinct = sorted({value for value in values if value})
        if name == "scored at (UTC)" and len(distinct) > 2:
            distinct = [f"{distinct[0]} to {distinct[-1]}"]
        facts[name] = "; ".join(distinct) if distinct else "not recorded"
    return facts
