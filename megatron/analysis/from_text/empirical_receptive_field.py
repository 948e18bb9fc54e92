"""Empirical receptive fields: where trained models look."""

from collections.abc import Iterator, Mapping, Sequence

from megatron.analysis.analysis import Analysis, AnalysisContext, Block, Figure, Table
from megatron.analysis.attention_mass import AttentionMass, measure_attention_mass
from megatron.analysis.receptive_field import PLOTTED_FRACTIONS, compute_finite_field

SHARES = (0.5, 0.1, 0.01)

EmpiricalFieldResult = dict[int, AttentionMass]
"""By length."""


class EmpiricalReceptiveField(Analysis):
    order = 60
    title = "Empirical receptive field"
    text = (
        "How many of the last keys hold all but a share ε of the attention that a trained model pays (Qin et al. 2023, "
        "section 3.3). Of each layer and head, the attention to each distance is averaged over the queries of the "
        "second half of every window, all of which have at least m keys, m being half the window's length; the "
        "receptive field is the least j for which the last j keys hold more than 1 − ε of it. It asks the softmax, so "
        "score processors and windows are part of it. The curves are the paper's finite algorithm within m, "
        "normalised."
    )

    def measure(self, context: AnalysisContext) -> EmpiricalFieldResult:
        model = context.train_length
        read = {length: windows for length, windows in context.select_readable_windows.items() if length > 1}
        works = {length: len(windows) * length**2 for length, windows in read.items()}
        found: EmpiricalFieldResult = {}
        for length, windows in read.items():
            before = sum(works[each] for each in found)

            def told(share: float, before: int = before, work: int = works[length]) -> None:
                context.progress((before + share * work) / sum(works.values()))

            found[length] = measure_attention_mass(model, windows, told)
        return found

    def render_blocks(self, results: Mapping[str, EmpiricalFieldResult], names: Sequence[str]) -> list[Block]:
        rows = []
        for name, each in results.items():
            for length, mass in each.items():
                beyond = mass.mass_beyond.mean().item()
                near = mass.shares.shape[-1]
                cells = [_format_spread(mass, share) for share in SHARES]
                rows.append([name, f"{length:,}", f"{near:,}", *cells, f"{100 * beyond:.1f}%"])
        columns = ["method", "length", "m", *(f"ε = {share:g}" for share in SHARES), "attention beyond m"]
        caption = (
            "Median over layers and heads, in keys, and in brackets the 10% and 90% quantile; > m where the last m "
            "keys hold less than that share."
        )
        medians = "; ".join(f"{row[0]} at length {row[1]}: {row[3]}" for row in rows)
        alt = (
            f"Empirical receptive field over ε, one panel per length; at ε = {SHARES[0]:g}, medians in keys: {medians}."
        )
        return [
            Figure(alt, lambda narrow: _draw(results, names, narrow)),
            "Lines are medians over layers and heads, bands 10% to 90%.",
            Table(columns, rows, caption),
        ]

    def list_rows(self, result: EmpiricalFieldResult) -> Iterator[Mapping[str, object]]:
        for length, mass in result.items():
            layers, heads, near = mass.shares.shape
            for layer in range(layers):
                for head in range(heads):
                    about = {"length": length, "m": near, "queries": mass.queries, "layer": layer, "head": head}
                    for share in SHARES:
                        keys = mass.receptive_field(layer, head, share)
                        yield {
                            **about, "quantity": "keys", "at": share, "value": f"> {near}" if keys is None else keys
                        }  # fmt: skip
                    yield {**about, "quantity": "beyond", "at": "", "value": mass.mass_beyond[layer, head].item()}
                    sums = mass.shares[layer, head].cumsum(0)
                    for keys in _space_points(near):
                        yield {**about, "quantity": "held by the last", "at": keys, "value": f"{sums[keys - 1]:.6g}"}


def _space_points(near: int) -> list[int]:
    """Numbers of keys up to m: all up to 32, then on a logarithmic scale."""
    return sorted(
        {*range(1, min(near, 32) + 1), *(round(32 * (near / 32) ** (k / 64)) for k in range(65) if near > 32)}
    )


def _format_spread(mass: AttentionMass, share: float) -> str:
    layers, heads, near = mass.shares.shape
    keys = sorted(
        near + 1 if found is None else found
        for found in (mass.receptive_field(layer, head, share) for layer in range(layers) for head in range(heads))
    )
    low, middle, high = (keys[round(place * (len(keys) - 1))] for place in (0.1, 0.5, 0.9))
    shown = [f"> {near:,}" if value > near else f"{value:,}" for value in (low, middle, high)]
    return shown[1] if len(set(shown)) == 1 else f"{shown[1]} [{shown[0]}, {shown[2]}]"


def _draw(found: Mapping[str, EmpiricalFieldResult], names: Sequence[str], narrow: bool) -> bytes:
    from megatron.analysis.drawing import add_legend, add_titles, compute_band, create_panels, save_png
    from megatron.reports.plots import get_curve_style

    lengths = sorted({length for each in found.values() for length in each})
    figure, axes = create_panels(len(lengths), narrow, width=4.0, height=3.2, below=0.18 * len(found))
    for panel, length in zip(axes, lengths, strict=True):
        near = 0
        for name, each in found.items():
            if length not in each:
                continue
            shares, look = each[length].shares, get_curve_style(names.index(name))
            near = shares.shape[-1]
            curves = [compute_finite_field(terms) for terms in shares.flatten(0, 1)]
            middle, low, high = compute_band([[keys / near for keys in curve] for curve in curves])
            panel.plot(
                PLOTTED_FRACTIONS, middle, color=look["color"], linestyle=look["linestyle"], label=name, linewidth=1.6
            )
            panel.fill_between(PLOTTED_FRACTIONS, low, high, color=look["color"], alpha=0.15, linewidth=0)
        panel.set_xlim(1, 0)
        panel.set_ylim(0, 1.02)
        add_titles(panel, f"windows of {length:,} tokens", "ε, the share that is left out", f"share of {near:,} keys")
    add_legend(figure, axes[0], narrow, 1)
    return save_png(figure)
