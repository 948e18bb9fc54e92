"""Receptive fields that follow from the bias alone."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from megatron.analysis.analysis import Analysis, AnalysisContext, Block, Figure
from megatron.analysis.bias import compute_bias_by_distance, mask_window
from megatron.analysis.convergence import sum_bias_series
from megatron.analysis.heads import build_head_table
from megatron.analysis.receptive_field import (
    PLOTTED_FRACTIONS,
    ReceptiveField,
    compute_finite_field,
    compute_theoretical_field,
)

SHARES = (0.5, 0.1, 0.01, 0.001)


@dataclass(frozen=True)
class HeadField:
    layer: str
    head: int
    fields: list[ReceptiveField]
    """By equation 22, at each of SHARES."""
    finite: list[int]
    """By the algorithm of the plots, at each of PLOTTED."""


@dataclass(frozen=True)
class ReceptiveFieldResult:
    heads: list[HeadField]
    length: int
    """Terms of the finite algorithm, the same for all models."""


class TheoreticalReceptiveField(Analysis):
    order = 20
    title = "Theoretical receptive field"
    text = (
        "How many of the last keys hold all but a share ε of the sum of b = exp(bias), if all scores were equal (Qin "
        "et al. 2023, equation 22): the least j with b(0) + … + b(j − 1) above (1 − ε) times the sum over all "
        "distances. It is infinite where the series diverges. The picture is made by the paper's other algorithm "
        "(appendix E): the same with ≥ in place of >, over the distances below the longest length alone, whatever "
        "comes after; for a series that diverges it grows with that length."
    )

    def measure(self, context: AnalysisContext) -> ReceptiveFieldResult:
        length = context.lengths[-1]
        heads = []
        for each in context.encodings:
            terms = mask_window(compute_bias_by_distance(each.encoding, length), context.window)
            for series in sum_bias_series(each.encoding, context.window):
                within = compute_finite_field((terms[series.head] - terms[series.head].max()).exp())
                heads.append(
                    HeadField(
                        each.name, series.head, compute_theoretical_field(series.bias, series.tail, SHARES), within
                    )
                )
        return ReceptiveFieldResult(heads, length)

    def render_blocks(self, results: Mapping[str, ReceptiveFieldResult], names: Sequence[str]) -> list[Block]:
        within = f"within {next(iter(results.values())).length:,} keys"
        heads = [
            (name, head.layer, head.head, list(map(str, head.fields)))
            for name, each in results.items()
            for head in each.heads
        ]
        columns = [f"ε = {share:g}" for share in SHARES]
        place = len(PLOTTED_FRACTIONS) // 2
        medians = "; ".join(
            f"{name} {median(head.finite[place] for head in each.heads):,.0f}" for name, each in results.items()
        )
        alt = f"Receptive field over ε {within}; at ε = {PLOTTED_FRACTIONS[place]:.2g}, medians in keys: {medians}."
        return [
            Figure(alt, lambda narrow: _draw(results, names, narrow)),
            f"Lines are medians over heads and layers, bands 10% to 90%; {within}, by the finite algorithm.",
            build_head_table(columns, heads, "By equation 22, in keys, the query's own counted."),
        ]

    def list_rows(self, result: ReceptiveFieldResult) -> Iterator[Mapping[str, object]]:
        for head in result.heads:
            for share, field in zip(SHARES, head.fields, strict=True):
                yield {
                    "layer": head.layer, "head": head.head, "definition": "equation 22", "epsilon": share,
                    "keys": field.high, "keys_low": field.low, "of": "",
                }  # fmt: skip
            for share, keys in zip(PLOTTED_FRACTIONS, head.finite, strict=True):
                yield {
                    "layer": head.layer, "head": head.head, "definition": "finite", "epsilon": share, "keys": keys,
                    "keys_low": keys, "of": result.length,
                }  # fmt: skip


def _draw(found: Mapping[str, ReceptiveFieldResult], names: Sequence[str], narrow: bool) -> bytes:
    from megatron.analysis.drawing import add_legend, add_titles, compute_band, create_panels, save_png
    from megatron.reports.plots import get_curve_style

    figure, (axes,) = create_panels(1, narrow, width=5.6, height=3.4, below=0.18 * len(found))
    for name, each in found.items():
        look = get_curve_style(names.index(name))
        middle, low, high = compute_band([[keys / each.length for keys in head.finite] for head in each.heads])
        axes.plot(
            PLOTTED_FRACTIONS, middle, color=look["color"], linestyle=look["linestyle"], label=name, linewidth=1.6
        )
        axes.fill_between(PLOTTED_FRACTIONS, low, high, color=look["color"], alpha=0.15, linewidth=0)
    axes.set_xlim(1, 0)
    axes.set_ylim(0, 1.02)
    of = f"share of {next(iter(found.values())).length:,} keys"
    add_titles(axes, "theoretical receptive field", "ε, the share of the sum that is left out", of)
    add_legend(figure, axes, narrow, 1)
    return save_png(figure)
