"""KERPLE's effective length of a head: the smallest distance at which its bias is below −2 (Chi et al. 2022, A.5).

e^−2 = 0.135, so such a key has about a seventh of the weight of an adjacent key with the same score. The effective
length is defined only for biases that never increase with the distance.
"""

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron.evaluation.analysis.analysis import Analysis, AnalysisContext, Block, NotApplicable, Table
from megatron.evaluation.analysis.bias_series import compute_terms, to_float64
from megatron.position.encoding import Encoding
from megatron.reports.charts import Chart
from megatron.reports.curve_chart import ChartLine, HorizontalAxis, build_line_chart

THRESHOLD = -2.0
MAX_PLOTTED_DISTANCE = 20_480
"""Largest distance in KERPLE's figure."""
NUM_PLOTTED_DISTANCES = 200
MAX_DISTANCE = 2**53

EffectiveLengthResult = list[tuple[str, list[float | None]]]
"""For each layer: name, and effective lengths of its heads."""


@torch.no_grad()
def compute_effective_lengths(encoding: Encoding, window: int | None = None) -> list[float | None]:
    """Compute the effective length of each head.

    Args:
        encoding: encoding of the model.
        window: number of most recent keys that a token attends to, as if the bias were −∞ from this distance on.

    Returns:
        An integer; infinity if the bias stays above −2 at every distance up to 2^53; or None if it increases
        anywhere up to 20,480, or is not a function of the distance.
    """
    max_length = math.inf if window is None else window
    if not encoding.adds_bias:
        return [max_length] * encoding.dims.num_heads
    if not type(encoding).overrides_hook("table"):
        return [None] * encoding.dims.num_heads
    double = to_float64(encoding)

    def compute_bias(distances: Tensor) -> Tensor:
        bias = compute_terms(double, distances).bias
        assert bias is not None
        return bias

    near_bias = compute_bias(torch.arange(MAX_PLOTTED_DISTANCE + 1, dtype=torch.float64))
    never_rises = (near_bias.diff(dim=-1) <= 0).all(-1).tolist()
    num_heads = len(never_rises)
    low = torch.full((num_heads,), -1.0, dtype=torch.float64)  # the bias is not below −2 at this distance or before
    high = torch.full((num_heads,), float(MAX_DISTANCE), dtype=torch.float64)
    heads = torch.arange(num_heads)
    is_finite = compute_bias(high)[heads, heads] < THRESHOLD
    while bool((high - low > 1).any()):
        middle = ((low + high) / 2).floor()
        is_below = compute_bias(middle)[heads, heads] < THRESHOLD
        low, high = torch.where(is_below, low, middle), torch.where(is_below, middle, high)
    return [
        None if not is_monotone else min(length, max_length) if falls else max_length
        for is_monotone, falls, length in zip(never_rises, is_finite.tolist(), high.tolist(), strict=True)
    ]


def count_heads_within(lengths: Sequence[float], distances: Sequence[float]) -> list[int]:
    """Compute KERPLE's curve: the number of heads with effective length ≤ x, at each distance x."""
    ascending = sorted(lengths)
    return [bisect.bisect_right(ascending, distance) for distance in distances]


class EffectiveLength(Analysis):
    order = 30
    title = "Effective length"
    description = (
        "Smallest distance at which a head's bias is below −2, so that a key has less than e^−2 = 0.135 of the weight "
        f"of an adjacent key (Chi et al. 2022, KERPLE, appendix A.5), and the number of heads up to each distance, to "
        f"{MAX_PLOTTED_DISTANCE:,}. Heads of all layers are counted if each layer has its own parameters. It is "
        "defined for a bias that never increases with the distance; a window counts as a bias of −∞ outside it."
    )

    def measure(self, context: AnalysisContext) -> EffectiveLengthResult:
        context.finite_encodings  # noqa: B018 (raises if a parameter is not finite)
        layers = context.biased_encodings
        if any(type(layer.encoding).overrides_hook("dense") for layer in layers):
            raise NotApplicable("Its bias depends on the query's position, so it has no effective length.")
        result = [(layer.name, compute_effective_lengths(layer.encoding, layer.window)) for layer in layers]
        if all(length is None for _, heads in result for length in heads):
            raise NotApplicable("Its bias increases at some distance, which the definition excludes.")
        return result

    def render_blocks(self, results: Mapping[str, EffectiveLengthResult], names: Sequence[str]) -> list[Block]:
        rows = []
        for name, result in results.items():
            lengths = [length for _, heads in result for length in heads]
            defined = sorted(length for length in lengths if length is not None)
            within = sum(length <= MAX_PLOTTED_DISTANCE for length in defined)
            cells = [
                _format_length(defined[0]),
                _format_length(defined[(len(defined) - 1) // 2]),
                _format_length(defined[-1]),
            ]
            rows.append([name, f"{len(lengths):,}", *cells, f"{within:,}", f"{len(lengths) - len(defined):,}"])
        columns = [
            "method",
            "heads",
            "least",
            "median",
            "largest",
            f"heads within {MAX_PLOTTED_DISTANCE:,}",
            "heads with increasing bias",
        ]
        curves = "; ".join(f"{row[0]} {row[-2]} of {row[1]}, the first at {row[2]}" for row in rows)
        alt = f"Share of heads with an effective length up to each distance, to {MAX_PLOTTED_DISTANCE:,}: {curves}."
        return [
            _build_chart(results, names, alt),
            Table(columns, rows, "∞: the bias is above −2 at every distance up to 2^53."),
        ]

    def list_rows(self, result: EffectiveLengthResult) -> Iterator[Mapping[str, object]]:
        for layer, heads in result:
            for head, length in enumerate(heads):
                shown = "" if length is None else int(length) if math.isfinite(length) else length
                yield {"layer": layer, "head": head, "effective_length": shown}


def _format_length(length: float) -> str:
    return "∞" if math.isinf(length) else f"{int(length):,}"


def _build_chart(results: Mapping[str, EffectiveLengthResult], names: Sequence[str], alt_text: str) -> Chart:
    distances = np.unique(np.geomspace(1, MAX_PLOTTED_DISTANCE + 1, NUM_PLOTTED_DISTANCES).round() - 1).tolist()
    lines = []
    for name, result in results.items():
        lengths = [length for _, heads in result for length in heads]
        counts = count_heads_within([length for length in lengths if length is not None], distances)
        shares = [100 * count / len(lengths) for count in counts]
        lines.append(ChartLine(name, list(zip(distances, shares, strict=True)), style=names.index(name)))
    return build_line_chart(
        "effective_length_chart",
        "Heads whose bias is below −2 at that distance",
        alt_text,
        HorizontalAxis("distance", 0.0, MAX_PLOTTED_DISTANCE, "log1p"),
        "% of heads",
        lines,
        y_limits=(0.0, 100.0),
    )
