"""Heat maps of exp(bias), the relative weight of a key if all scores are equal."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron.attention.reference import build_distances, compute_dense_terms
from megatron.evaluation.analysis.analysis import (
    Analysis,
    AnalysisContext,
    Block,
    Figure,
    NotApplicable,
    format_triangle,
)
from megatron.evaluation.analysis.bias_series import to_float64
from megatron.position.token_range import TokenRange, build_causal_mask

MAP_SIZE = 64
MIN_FACTOR = 1e-4
"""Smallest factor of the color scale; smaller factors have its color."""
MAX_FACTOR = 1e100
"""Largest factor of the color scale; larger and infinite factors have the color of the largest one below it.

Color scales overflow long before floats do.
"""


@dataclass(frozen=True)
class BiasMapResult:
    layer: str
    maps: dict[int, torch.Tensor]
    """Head → exp(bias), float64 [MAP_SIZE, MAP_SIZE], NaN where the key is masked."""


class BiasMaps(Analysis):
    order = 50
    data_format = "json"
    title = "exp(bias) over queries and keys"
    description = (
        "Factor by which the bias scales the attention of query i to key j (Qin et al. 2023, Exploring Transformer "
        f"Extrapolation, figures 7 and 8), for the first {MAP_SIZE} positions. Near the diagonal all methods look "
        "alike, even those that do not extrapolate; the factors at large distances make the difference. Colors are "
        f"logarithmic down to {MIN_FACTOR:g}; masked keys are gray."
    )

    @torch.no_grad()
    def measure(self, context: AnalysisContext) -> BiasMapResult:
        first = next((layer for layer in context.distance_encodings if layer.has_bias), None)
        if first is None:
            raise NotApplicable("It adds no bias: every factor is 1.")
        encoding = to_float64(first.encoding)
        span = TokenRange(0, MAP_SIZE)
        table = encoding.table(build_distances(MAP_SIZE).double()) if type(encoding).overrides_hook("table") else None
        bias = compute_dense_terms(encoding, span, span, torch.zeros((), dtype=torch.float64), table).bias
        factors = (
            torch.ones(encoding.dims.num_heads, MAP_SIZE, MAP_SIZE, dtype=torch.float64) if bias is None else bias.exp()
        )
        factors = factors.masked_fill(~build_causal_mask(span, span, window=first.window), float("nan"))
        return BiasMapResult(first.name, {head: factors[head] for head in context.drawn_heads})

    def render_blocks(self, results: Mapping[str, BiasMapResult], names: Sequence[str]) -> list[Block]:
        panels = [(name, result, head) for name, result in results.items() for head in _select_first_and_last(result)]
        notes = [
            f"The maps of {name} are for {result.layer}."
            for name, result in results.items()
            if result.layer != "all layers"
        ]
        farthest = [result.maps[head][-1, 0].nan_to_num(0, posinf=torch.inf).item() for _, result, head in panels]
        maps = "; ".join(
            f"{name}, head {head}: {factor:.2g}" for (name, _, head), factor in zip(panels, farthest, strict=True)
        )
        alt = f"exp(bias) of query i and key j, by color; at distance {MAP_SIZE - 1}: {maps}."
        return [Figure(alt, lambda narrow: _draw(panels, narrow)), *notes]

    def list_rows(self, result: BiasMapResult) -> Iterator[Mapping[str, object]]:
        for head, factors in result.maps.items():
            yield {"layer": result.layer, "head": head, "exp_bias": format_triangle(factors, 4)}


def _select_first_and_last(result: BiasMapResult) -> list[int]:
    """Return the first and the last head, or only the first if their maps are equal."""
    heads = list(result.maps)
    first, last = result.maps[heads[0]], result.maps[heads[-1]]
    return heads[:1] if torch.equal(first.nan_to_num(-1), last.nan_to_num(-1)) else [heads[0], heads[-1]]


def _draw(panels: list[tuple[str, BiasMapResult, int]], narrow: bool) -> bytes:
    from matplotlib.colors import LogNorm

    from megatron.evaluation.analysis.drawing import add_color_bar, add_titles, create_panels, draw_heatmap, save_png

    figure, axes = create_panels(len(panels), narrow, columns=4, width=2.0 if narrow else 2.5, height=2.1)
    values = torch.cat([result.maps[head].flatten() for _, result, head in panels])
    largest = torch.where(values < MAX_FACTOR, values, 1.0).max().clamp(min=1.0).item()
    for panel, (name, result, head) in zip(axes, panels, strict=True):
        image = draw_heatmap(panel, result.maps[head].numpy(), LogNorm(MIN_FACTOR, largest))
        add_titles(panel, f"head {head}\n{name}", "key j", "query i", wrap=22 if narrow else 28)
    add_color_bar(figure, image, axes)
    return save_png(figure)
