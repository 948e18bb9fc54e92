"""Convergence of the bias series of each head."""

from collections.abc import Iterator, Mapping, Sequence

from megatron.evaluation.analysis.analysis import Analysis, AnalysisContext, Block, HeadRow, build_head_table
from megatron.evaluation.analysis.bias_series import NUM_TERMS, BiasSeries, sum_bias_series

REPORTED_TERMS = (1_000, NUM_TERMS)
"""Numbers of terms whose sums are reported."""

ConvergenceResult = list[tuple[str, list[BiasSeries], str]]
"""For each layer: name, series of its heads, and a remark on the theorem's limits."""


class Convergence(Analysis):
    order = 10
    title = "Convergence of the bias series"
    description = (
        "For each head, Σ exp(bias at distance t) over all t ≥ 0. If it converges, and queries, keys, and values are "
        "bounded, then the output of attention to the last j keys approaches that of attention to all keys "
        "(Qin et al. 2023, Exploring Transformer Extrapolation, theorem 3.4). This is sufficient, for one layer "
        "and head; only experiments suggest that it is necessary. The encoding's own bias is summed in float64, "
        "and its asymptotic form bounds the remainder."
    )

    def measure(self, context: AnalysisContext) -> ConvergenceResult:
        return [
            (layer.name, sum_bias_series(layer.encoding, layer.window), _describe_limits(context))
            for layer in context.finite_encodings
        ]

    def render_blocks(self, results: Mapping[str, ConvergenceResult], names: Sequence[str]) -> list[Block]:
        columns = ["verdict", *(f"sum of {count:,} terms" for count in REPORTED_TERMS), "total sum", "reason"]
        caption = "Each head's series, with heads counted from 0; consecutive heads with equal series share a row."
        heads = [head for name, result in results.items() for head in _iter_head_rows(name, result)]
        return [
            *(_format_sentence(name, result) for name, result in results.items()),
            build_head_table(columns, heads, caption),
        ]

    def list_rows(self, result: ConvergenceResult) -> Iterator[Mapping[str, object]]:
        for layer, heads, _ in result:
            for series in heads:
                low, high = series.total
                yield {
                    "layer": layer, "head": series.head, "verdict": series.verdict, "reason": series.tail.reason,
                    **{f"sum_{count}": series.sum_first(count) for count in REPORTED_TERMS},
                    "sum_low": low, "sum_high": high,
                }  # fmt: skip


def _describe_limits(context: AnalysisContext) -> str:
    """Return a sentence on features of the model that the theorem does not cover."""
    position = context.config.position
    if processors := [name for name in position.processors if name != "none"]:
        return f"The theorem covers the bias alone, not its processing by {' or '.join(processors)}."
    if any(type(layer.encoding).overrides_hook("contextual") for layer in context.encodings):
        return "The theorem covers the bias alone, not terms that depend on queries and keys."
    if position.randomized_positions is not None:
        return f"Distances are between positions drawn from {position.randomized_positions:,}."
    return ""


def _format_sentence(name: str, result: ConvergenceResult) -> str:
    verdicts = [series.verdict for _, heads, _ in result for series in heads]
    counts = {verdict: verdicts.count(verdict) for verdict in ("converges", "diverges")}
    remark = result[0][2]
    if len(set(counts.values()) - {0}) == 1 and sum(counts.values()) == len(verdicts) and 0 in counts.values():
        verdict = next(verdict for verdict, count in counts.items() if count)
        text = f"{name}: the series of every head {verdict}."
    else:
        text = f"{name}: the series of {counts['converges']} of {len(verdicts)} heads converges."
    return f"{text} {remark}".strip()


def _iter_head_rows(name: str, result: ConvergenceResult) -> Iterator[HeadRow]:
    for layer, heads, _ in result:
        for series in heads:
            low, high = series.total
            is_unknown = high == float("inf") > low
            total = "∞" if series.tail.converges is False else "not known" if is_unknown else _format_number(low)
            sums = [_format_number(series.sum_first(count)) for count in REPORTED_TERMS]
            yield name, layer, series.head, [series.verdict, *sums, total, series.tail.reason]


def _format_number(value: float) -> str:
    return f"{value:,.4g}" if value < 1e6 else f"{value:.3g}"
