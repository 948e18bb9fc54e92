"""KERPLE's effective length, and how many heads reach how far."""

import math
from collections.abc import Iterator, Mapping, Sequence

from megatron.analysis.analysis import Analysis, AnalysisContext, Block, Figure, NotApplicable, Table
from megatron.analysis.effective_length import FAR, accumulate_by_length, compute_effective_lengths

EffectiveLengthResult = list[tuple[str, list[float | None]]]


class EffectiveLength(Analysis):
    order = 30
    title = "Effective length"
    text = (
        "The least distance at which a head's bias is below −2, so that a key counts for less than e^−2 = 0.135 of one "
        f"at hand (Chi et al. 2022, KERPLE, appendix A.5), and the number of heads up to each distance, to {FAR:,}. "
        "Heads of all layers are counted where each layer has parameters of its own. It is defined for a bias that "
        "never rises with the distance; a window is a bias of −∞ outside it."
    )

    def measure(self, context: AnalysisContext) -> EffectiveLengthResult:
        encoding = context.encodings[0].encoding
        if not encoding.adds_bias and context.window is None:
            raise NotApplicable("It adds no bias.")
        if type(encoding).overrides_hook("dense"):
            raise NotApplicable("Its bias depends on the query's position, and so has no length of its own.")
        found = [(each.name, compute_effective_lengths(each.encoding, context.window)) for each in context.encodings]
        if all(length is None for _, heads in found for length in heads):
            raise NotApplicable("Its bias rises somewhere, and the definition asks for one that never does.")
        return found

    def render_blocks(self, results: Mapping[str, EffectiveLengthResult], names: Sequence[str]) -> list[Block]:
        rows = []
        for name, each in results.items():
            lengths = [length for _, heads in each for length in heads]
            known = sorted(length for length in lengths if length is not None)
            within = sum(length <= FAR for length in known)
            cells = [_format_length(known[0]), _format_length(known[(len(known) - 1) // 2]), _format_length(known[-1])]
            rows.append([name, f"{len(lengths):,}", *cells, f"{within:,}", f"{len(lengths) - len(known):,}"])
        columns = ["method", "heads", "least", "median", "largest", f"heads within {FAR:,}", "heads whose bias rises"]
        curves = "; ".join(f"{row[0]} {row[-2]} of {row[1]}, the first at {row[2]}" for row in rows)
        alt = f"Share of heads with an effective length up to each distance, to {FAR:,}: {curves}."
        return [
            Figure(alt, lambda narrow: _draw(results, names, narrow)),
            Table(columns, rows, "∞ stands for a bias above −2 at every distance up to 2^53."),
        ]

    def list_rows(self, result: EffectiveLengthResult) -> Iterator[Mapping[str, object]]:
        for layer, heads in result:
            for head, length in enumerate(heads):
                yield {"layer": layer, "head": head, "effective_length": "" if length is None else length}


def _format_length(length: float) -> str:
    return "∞" if math.isinf(length) else f"{int(length):,}"


def _draw(found: Mapping[str, EffectiveLengthResult], names: Sequence[str], narrow: bool) -> bytes:
    from megatron.analysis.drawing import add_legend, add_titles, create_panels, save_png
    from megatron.reports.plots import get_curve_style

    figure, (axes,) = create_panels(1, narrow, width=5.6, height=3.2, below=0.18 * len(found))
    for name, each in found.items():
        lengths = [length for _, heads in each for length in heads]
        curve = accumulate_by_length([length for length in lengths if length is not None])
        look = get_curve_style(names.index(name))
        across, up = zip(*curve, strict=True)
        axes.step(
            across, [100 * heads / len(lengths) for heads in up], where="post", color=look["color"],
            linestyle=look["linestyle"], label=name, linewidth=1.6,
        )  # fmt: skip
    axes.set_xscale("symlog", base=10, linthresh=1)
    axes.set_xlim(0, FAR)
    axes.set_ylim(0, 103)
    add_titles(axes, "heads whose bias is below −2 at that distance", "distance", "% of heads")
    add_legend(figure, axes, narrow, 1)
    return save_png(figure)
