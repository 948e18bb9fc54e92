"""Receptive fields that follow from the bias alone."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.analysis.analysis import Analysis, Block, Looked, Picture, Table
from megatron.analysis.bias import bias_over_distance, windowed
from megatron.analysis.convergence import series_of
from megatron.analysis.receptive_field import Field, finite, theoretical

SHARES = (0.5, 0.1, 0.01, 0.001)
FOLDED = 12


@dataclass(frozen=True)
class Head:
    layer: str
    head: int
    fields: list[Field]
    """By equation 22, at each of SHARES."""
    shares: list[float]
    finite: list[int]
    """By the algorithm of the plots, at each of `shares`."""


@dataclass(frozen=True)
class Found:
    heads: list[Head]
    length: int
    """Terms of the finite algorithm."""


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

    def measure(self, looked: Looked) -> Found:
        length = looked.lengths[-1]
        heads = []
        for each in looked.encodings:
            terms = windowed(bias_over_distance(each.encoding, length), looked.window)
            for series in series_of(each.encoding, looked.window):
                shares, fields = finite((terms[series.head] - terms[series.head].max()).exp())
                exact = theoretical(series.bias, series.tail, SHARES)
                heads.append(Head(each.name, series.head, exact, shares.tolist(), fields.tolist()))
        return Found(heads, length)

    def show(self, found: Mapping[str, Found], names: Sequence[str]) -> list[Block]:
        lengths = sorted({each.length for each in found.values()})
        shown = " and ".join(f"{length:,}" for length in lengths)
        rows = [row for name, each in found.items() for row in _table(name, each)]
        columns = ["method", "layer", "heads", *(f"ε = {share:g}" for share in SHARES)]
        caption = "By equation 22, in keys, the query's own counted."
        return [
            Picture(
                f"Receptive field over ε, one curve per method, within {shown} keys",
                lambda narrow: _draw(found, names, narrow),
            ),
            f"Lines are medians over heads and layers, bands 10% to 90%; within {shown} keys, by the finite algorithm.",
            Table(columns, rows, caption, folded=len(rows) > FOLDED),
        ]

    def rows(self, found: Found) -> Iterator[Mapping[str, object]]:
        for head in found.heads:
            for share, field in zip(SHARES, head.fields, strict=True):
                yield {
                    "layer": head.layer, "head": head.head, "definition": "equation 22", "epsilon": share,
                    "keys": field.high, "keys_low": field.low, "of": "",
                }  # fmt: skip
            for share, keys in zip(head.shares, head.finite, strict=True):
                yield {
                    "layer": head.layer, "head": head.head, "definition": "finite", "epsilon": share, "keys": keys,
                    "keys_low": keys, "of": found.length,
                }  # fmt: skip


def _table(name: str, found: Found) -> Iterator[list[str]]:
    previous: list[str] | None = None
    first = 0
    for place, head in enumerate([*found.heads, None]):
        cells = None if head is None else [head.layer, *map(str, head.fields)]
        if previous is not None and cells != previous:
            start, stop = found.heads[first].head, found.heads[place - 1].head
            yield [name, previous[0], str(start) if start == stop else f"{start} to {stop}", *previous[1:]]
        if cells != previous:
            previous, first = cells, place


def _draw(found: Mapping[str, Found], names: Sequence[str], narrow: bool) -> bytes:
    from megatron.analysis.drawing import band, legend, panels, png, titled
    from megatron.reports.plots import style

    figure, (axes,) = panels(1, narrow, width=5.6, height=3.4, below=0.18 * len(found))
    for name, each in found.items():
        look = style(names.index(name))
        middle, low, high = band([[keys / each.length for keys in head.finite] for head in each.heads])
        shares = each.heads[0].shares
        axes.plot(shares, middle, color=look["color"], linestyle=look["linestyle"], label=name, linewidth=1.6)
        axes.fill_between(shares, low, high, color=look["color"], alpha=0.15, linewidth=0)
    axes.set_xlim(1, 0)
    axes.set_ylim(0, 1.02)
    lengths = {each.length for each in found.values()}
    of = f"share of {lengths.pop():,} keys" if len(lengths) == 1 else "share of the longest length"
    titled(axes, "theoretical receptive field", "ε, the share of the sum that is left out", of)
    legend(figure, axes, narrow, 1)
    return png(figure)
