"""Heat maps of exp(bias): how much a key would count if all scores were equal."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron.analysis.analysis import Analysis, AnalysisContext, Block, Figure, NotApplicable
from megatron.analysis.bias import to_float64
from megatron.analysis.heads import format_triangle
from megatron.attention.reference import arange_distances, compute_dense_terms
from megatron.position.token_range import TokenRange, causal_mask

SIDE = 64
LOWEST = 1e-4
"""Smaller factors have the colour of this one."""


@dataclass(frozen=True)
class BiasMapResult:
    layer: str
    maps: dict[int, torch.Tensor]
    """Head → exp(bias), float64 [SIDE, SIDE], NaN where the query may not see the key."""


class BiasMaps(Analysis):
    order = 50
    data = "json"
    title = "exp(bias) over queries and keys"
    text = (
        "The factor that the bias puts on the attention of query i to key j (Qin et al. 2023, Exploring Transformer "
        f"Extrapolation, figures 7 and 8), of the first {SIDE} positions. Near the diagonal all methods look alike, "
        "those that do not extrapolate too; what decides is how the factors end far away. Colours are logarithmic down "
        f"to {LOWEST:g}; keys that a query may not see are grey."
    )

    @torch.no_grad()
    def measure(self, context: AnalysisContext) -> BiasMapResult:
        each = context.encodings[0]
        if not each.encoding.adds_bias and context.window is None:
            raise NotApplicable("It adds no bias: every factor is 1.")
        encoding = to_float64(each.encoding)
        span = TokenRange(0, SIDE)
        table = encoding.table(arange_distances(SIDE).double()) if type(encoding).overrides_hook("table") else None
        bias = compute_dense_terms(encoding, span, span, torch.zeros((), dtype=torch.float64), table).bias
        factors = torch.ones(encoding.dims.num_heads, SIDE, SIDE, dtype=torch.float64) if bias is None else bias.exp()
        factors = factors.masked_fill(~causal_mask(span, span, window=context.window), float("nan"))
        return BiasMapResult(each.name, {head: factors[head] for head in context.select_heads})

    def render_blocks(self, results: Mapping[str, BiasMapResult], names: Sequence[str]) -> list[Block]:
        panels = [(name, each, head) for name, each in results.items() for head in _first_and_last(each)]
        note = [
            f"The maps of {name} are those of layer 0." for name, each in results.items() if each.layer == "layer 0"
        ]
        maps = "; ".join(
            f"{name}, head {head}: {each.maps[head][-1, 0].nan_to_num(0).item():.2g}" for name, each, head in panels
        )
        alt = f"exp(bias) of query i and key j, by colour; at distance {SIDE - 1}: {maps}."
        return [Figure(alt, lambda narrow: _draw(panels, narrow)), *note]

    def list_rows(self, result: BiasMapResult) -> Iterator[Mapping[str, object]]:
        for head, factors in result.maps.items():
            yield {"layer": result.layer, "head": head, "exp_bias": format_triangle(factors, 4)}


def _first_and_last(found: BiasMapResult) -> list[int]:
    """The first and the last of the heads, or one where they are alike."""
    heads = list(found.maps)
    first, last = found.maps[heads[0]], found.maps[heads[-1]]
    return heads[:1] if torch.equal(first.nan_to_num(-1), last.nan_to_num(-1)) else [heads[0], heads[-1]]


def _draw(drawn: list[tuple[str, BiasMapResult, int]], narrow: bool) -> bytes:
    from matplotlib.colors import LogNorm

    from megatron.analysis.drawing import add_colour_bar, add_titles, create_panels, draw_heatmap, save_png

    figure, axes = create_panels(len(drawn), narrow, columns=4, width=2.0 if narrow else 2.5, height=2.1)
    most = max(1.0, *(found.maps[head].nan_to_num(0).max().item() for _, found, head in drawn))
    for each, (name, found, head) in zip(axes, drawn, strict=True):
        image = draw_heatmap(each, found.maps[head].numpy(), LogNorm(LOWEST, most))
        add_titles(each, f"head {head}\n{name}", "key j", "query i", wrap=22 if narrow else 28)
    add_colour_bar(figure, image, axes)
    return save_png(figure)
