"""Receptive fields computed from the bias alone."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from megatron.evaluation.analysis.analysis import Analysis, AnalysisContext, Block, build_head_table
from megatron.evaluation.analysis.bias_series import (
    PLOTTED_EPSILONS,
    ReceptiveField,
    compute_bias_by_distance,
    compute_finite_field,
    compute_theoretical_field,
    mask_window,
    sum_bias_series,
)
from megatron.reports.charts import Chart
from megatron.reports.curve_chart import HorizontalAxis, build_line_chart, build_median_line

EPSILONS = (0.5, 0.1, 0.01, 0.001)


@dataclass(frozen=True)
class HeadReceptiveField:
    layer: str
    head: int
    fields: list[ReceptiveField]
    """Fields by equation 22, at each of EPSILONS."""
    finite: list[int]
    """Fields by the algorithm of the paper's plots, at each of PLOTTED_EPSILONS."""


@dataclass(frozen=True)
class ReceptiveFieldResult:
    heads: list[HeadReceptiveField]
    length: int
    """Number of terms of the finite algorithm, the same for all models."""


class TheoreticalReceptiveField(Analysis):
    order = 20
    title = "Theoretical receptive field"
    description = (
        "Number of most recent keys with all but a share ε of the sum of b = exp(bias), if all scores are equal (Qin "
        "et al. 2023, equation 22): the smallest j with b(0) + … + b(j − 1) above (1 − ε) times the sum over all "
        "distances. It is infinite if the series diverges. The chart uses the paper's other algorithm "
        "(appendix E): the same with ≥ instead of >, over the distances below the longest length only. "
        "For a divergent series it grows with that length."
    )

    def measure(self, context: AnalysisContext) -> ReceptiveFieldResult:
        length = context.lengths[-1]
        heads = []
        for layer in context.finite_encodings:
            bias = mask_window(compute_bias_by_distance(layer.encoding, length), layer.window)
            for series in sum_bias_series(layer.encoding, layer.window):
                finite = compute_finite_field((bias[series.head] - bias[series.head].max()).exp())
                fields = compute_theoretical_field(series.bias, series.tail, EPSILONS)
                heads.append(HeadReceptiveField(layer.name, series.head, fields, finite))
        return ReceptiveFieldResult(heads, length)

    def render_blocks(self, results: Mapping[str, ReceptiveFieldResult], names: Sequence[str]) -> list[Block]:
        length = next(iter(results.values())).length
        within = f"within {length:,} keys"
        heads = [
            (name, head.layer, head.head, list(map(str, head.fields)))
            for name, result in results.items()
            for head in result.heads
        ]
        columns = [f"ε = {epsilon:g}" for epsilon in EPSILONS]
        middle = len(PLOTTED_EPSILONS) // 2
        medians = "; ".join(
            f"{name} {median(head.finite[middle] for head in result.heads):,.0f}" for name, result in results.items()
        )
        alt = f"Receptive field over ε {within}; at ε = {PLOTTED_EPSILONS[middle]:.2g}, medians in keys: {medians}."
        return [
            _build_chart(results, names, length, alt),
            f"Lines show the finite algorithm, {within}.",
            build_head_table(columns, heads, "By equation 22, in keys, including the query's own."),
        ]

    def list_rows(self, result: ReceptiveFieldResult) -> Iterator[Mapping[str, object]]:
        for head in result.heads:
            for epsilon, field in zip(EPSILONS, head.fields, strict=True):
                yield {
                    "layer": head.layer, "head": head.head, "definition": "equation 22", "epsilon": epsilon,
                    "keys": field.high, "keys_low": field.low, "of": "",
                }  # fmt: skip
            for epsilon, keys in zip(PLOTTED_EPSILONS, head.finite, strict=True):
                yield {
                    "layer": head.layer, "head": head.head, "definition": "finite", "epsilon": epsilon, "keys": keys,
                    "keys_low": keys, "of": result.length,
                }  # fmt: skip


def _build_chart(
    results: Mapping[str, ReceptiveFieldResult], names: Sequence[str], length: int, alt_text: str
) -> Chart:
    return build_line_chart(
        "theoretical_receptive_field_chart",
        "Theoretical receptive field",
        alt_text,
        HorizontalAxis("ε, the excluded share of the sum", 1.0, 0.0),
        f"share of {length:,} keys",
        [
            build_median_line(
                name, PLOTTED_EPSILONS, [[keys / length for keys in head.finite] for head in result.heads],
                names.index(name),
            )
            for name, result in results.items()
        ],
        y_limits=(0.0, 1.0),
        note="Lines are medians over heads and layers, bands 10% to 90%.",
    )  # fmt: skip
