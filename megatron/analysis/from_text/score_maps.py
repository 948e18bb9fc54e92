"""Maps of scores, bias, processor and attention while a model reads."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.analysis.analysis import Analysis, AnalysisContext, Block, Figure, NotApplicable
from megatron.analysis.heads import format_triangle
from megatron.analysis.maps import KINDS, SIDE, LayerMaps, compute_layer_maps

NAMED = {"score": "score", "bias": "bias", "processor": "processor adds", "attention": "attention"}
MAX_PANELS = 5
"""Lengths that a picture puts side by side."""


@dataclass(frozen=True)
class ScoreMapResult:
    maps: dict[int, list[LayerMaps]]
    """By length."""
    heads: list[int]
    name: str
    """Of the method, for what is missing."""


class ScoreMaps(Analysis):
    order = 80
    data = "json"
    title = "Scores, bias and processor of each head"
    text = (
        "What query i makes of key j in the last of the windows of each length: the score q·k/√d with whatever the "
        "encoding does to it, the bias, what the score processor adds to both, and the attention that comes of them "
        "(Zheng et al. 2024, DAPE V2, figures 8 to 25). Maps are pooled to "
        f"{SIDE} × {SIDE} cells of means; score, bias and processor have zero in the middle of their colours, and "
        "attention is logarithmic."
    )

    def measure(self, context: AnalysisContext) -> ScoreMapResult:
        model, layers, heads = context.train_length, context.select_layers, context.select_heads
        if not layers or not heads:
            raise NotApplicable("It has none of the layers or heads that were asked for.")
        found = {
            length: compute_layer_maps(model, windows[-1], layers, heads)
            for length, windows in context.select_readable_windows.items()
        }
        return ScoreMapResult(found, heads, context.name)

    def render_blocks(self, results: Mapping[str, ScoreMapResult], names: Sequence[str]) -> list[Block]:
        blocks: list[Block] = []
        for name, each in results.items():
            first = next(iter(each.maps.values()))
            kinds = [kind for kind in KINDS if kind in first[0].cells]
            missing = {"bias": "adds no bias", "processor": "has no score processor"}
            without = [words for kind, words in missing.items() if kind not in kinds]
            if without:
                blocks.append(f"{name} {' and '.join(without)}, so there are no maps of that.")
            for place, maps in enumerate(first):
                of_layer = {length: by_layer[place] for length, by_layer in each.maps.items()}
                for row, head in enumerate(each.heads):
                    blocks.append(_build_figure(name, maps.layer, head, row, of_layer, kinds))
        return blocks

    def list_rows(self, result: ScoreMapResult) -> Iterator[Mapping[str, object]]:
        for length, by_layer in result.maps.items():
            for maps in by_layer:
                for kind, cells in maps.cells.items():
                    for row, head in enumerate(result.heads):
                        yield {
                            "length": length, "layer": maps.layer, "head": head, "map": kind,
                            "cells": format_triangle(cells[row], 3),
                        }  # fmt: skip


def _build_figure(
    name: str, layer: int, head: int, row: int, of_layer: Mapping[int, LayerMaps], kinds: list[str]
) -> Figure:
    """Lengths side by side, kinds one under the other, each kind with one scale of colours."""

    def draw(narrow: bool) -> bytes:
        from megatron.analysis.drawing import draw_map_grid

        lengths = list(of_layer)[:MAX_PANELS]
        grid = {
            NAMED[kind]: [of_layer[length].cells[kind][row].numpy() for length in lengths] for kind in kinds
        }  # fmt: skip
        title = f"{name}\nlayer {layer}, head {head}"
        return draw_map_grid(grid, lengths, title, logarithmic=(NAMED["attention"],), narrow=narrow)

    shown = list(of_layer)[:MAX_PANELS]
    what = ", ".join(NAMED[kind] for kind in kinds)
    lengths = ", ".join(f"{length:,}" for length in shown)
    return Figure(f"{what} of query i and key j: layer {layer}, head {head} of {name}, at lengths {lengths}", draw)
