"""Empirical receptive field: the number of most recent keys that receive most of a trained model's attention.

Exploring Transformer Extrapolation (Qin et al. 2023, section 3.3) defines for a query i: n_emp(ε) = min{j : C_ij > (1 −
ε)·C_ii}, where C_ij / C_ii is the share of the softmax on the last j keys. The paper does not specify its averages over
queries, heads, layers, and texts. Here the share a_t of the key at distance t is averaged per layer and head, over all
queries with at least m keys, including their own; a query with fewer keys would count these as the total. m is half the
window length, so the queries are those in the second half. Their attention to keys at distance m or more is the
attention beyond m.

The analysis uses the softmax itself, so it applies to every method, including score processors and windows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron.attention.inputs import AttentionInputs, iter_row_blocks
from megatron.attention.reference import compute_weights, precompute_terms
from megatron.evaluation.analysis.analysis import Analysis, AnalysisContext, Block, Table
from megatron.evaluation.analysis.bias_series import PLOTTED_EPSILONS, TIE_TOLERANCE, compute_finite_field
from megatron.evaluation.forward_passes import (
    choose_block_size,
    run_forward,
    slice_from_row,
)
from megatron.model.gpt import GPT
from megatron.reports.charts import Chart
from megatron.reports.curve_chart import HorizontalAxis, build_line_chart, build_median_line

EPSILONS = (0.5, 0.1, 0.01)


@dataclass(frozen=True)
class AttentionMass:
    """Mean attention by distance."""

    by_distance: Tensor
    """Share of the key at each distance t, float64 [layers, H, m]."""
    num_queries: int
    """Number of averaged queries."""

    @property
    def mass_beyond(self) -> Tensor:
        """Mean share of all keys at larger distances, float64 [layers, H]."""
        return (1 - self.by_distance.sum(-1)).clamp(min=0)

    def compute_receptive_field(self, layer: int, head: int, epsilon: float) -> int | None:
        """Return n_emp(ε) of the mean shares, or None if it exceeds m."""
        sums = self.by_distance[layer, head].cumsum(0)
        is_enough = sums > (1 - epsilon) * (1 + TIE_TOLERANCE)
        return int(is_enough.int().argmax()) + 1 if bool(is_enough.any()) else None


@torch.no_grad()
def measure_attention_mass(
    model: GPT, windows: Sequence[np.ndarray], progress: Callable[[float], None] = lambda fraction: None
) -> AttentionMass:
    """Measure the mean attention by distance while a model reads windows of one length.

    Args:
        model: model in evaluation mode.
        windows: tokens [L] of each window.
        progress: called with the completed fraction after each row block.
    """
    length = len(windows[0])
    num_distances = max(length // 2, 1)
    heads = model.config.num_attention_heads
    sums = torch.zeros(model.config.num_layers, heads, num_distances, dtype=torch.float64)
    num_queries = length - num_distances + 1
    num_done, num_passes = 0, len(windows) * len(sums)

    def add_layer(layer: int, inputs: AttentionInputs) -> None:
        nonlocal num_done
        late = slice_from_row(inputs, num_distances - 1)
        num_rows = 0
        # Largest block first, see `compute_attention_in_blocks`.
        for block in reversed(list(iter_row_blocks(precompute_terms(late), choose_block_size(late)))):
            attention = compute_weights(block)
            by_distance = group_by_distance(attention, block, num_distances)
            sums[layer] += by_distance.sum(dim=(0, 2), dtype=torch.float64).cpu()
            num_rows += block.query.length
            progress((num_done + num_rows / late.query.length) / num_passes)
        num_done += 1

    for window in windows:
        run_forward(model, window, add_layer)
    return AttentionMass(sums / (num_queries * len(windows)), num_queries * len(windows))


def group_by_distance(values: Tensor, block: AttentionInputs, count: int) -> Tensor:
    """Convert values [B, H, R, C] over keys to values [B, H, R, count] over distances 0 … count − 1 in tokens.

    Distances outside the block are zero.
    """
    columns = block.query.indices(values.device)[:, None] - torch.arange(count, device=values.device)
    columns = columns - block.key.start
    is_in_block = columns >= 0
    index = columns.clamp(min=0).expand(*values.shape[:3], -1)
    return values.gather(-1, index).masked_fill(~is_in_block, 0)


EmpiricalFieldResult = dict[int, AttentionMass]
"""Results by length."""


class EmpiricalReceptiveField(Analysis):
    order = 60
    title = "Empirical receptive field"
    description = (
        "Number of most recent keys with all but a share ε of a trained model's attention (Qin et al. 2023, "
        "section 3.3). For each layer and head, the attention to each distance is averaged over the queries of the "
        "second half of every window, which have at least m keys, where m is half the window's length. The "
        "receptive field is the smallest j for which the last j keys have more than 1 − ε of it. It uses the softmax, "
        "so score processors and windows are included. The curves show the paper's finite algorithm within m, "
        "normalized."
    )

    def measure(self, context: AnalysisContext) -> EmpiricalFieldResult:
        model = context.trained_model
        windows_by_length = {length: windows for length, windows in context.readable_windows.items() if length > 1}
        costs = {length: len(windows) * length**2 for length, windows in windows_by_length.items()}
        result: EmpiricalFieldResult = {}
        for length, windows in windows_by_length.items():
            before = sum(costs[measured] for measured in result)

            def report(fraction: float, before: int = before, cost: int = costs[length]) -> None:
                context.progress((before + fraction * cost) / sum(costs.values()))

            result[length] = measure_attention_mass(model, windows, report)
        return result

    def render_blocks(self, results: Mapping[str, EmpiricalFieldResult], names: Sequence[str]) -> list[Block]:
        rows = []
        for name, result in results.items():
            for length, mass in result.items():
                beyond = mass.mass_beyond.mean().item()
                num_distances = mass.by_distance.shape[-1]
                cells = [_format_spread(mass, epsilon) for epsilon in EPSILONS]
                rows.append([name, f"{length:,}", f"{num_distances:,}", *cells, f"{100 * beyond:.1f}%"])
        columns = ["method", "length", "m", *(f"ε = {epsilon:g}" for epsilon in EPSILONS), "attention beyond m"]
        caption = (
            "Median over layers and heads, in keys, with 10% and 90% quantiles in brackets; > m if the last m "
            "keys have less than that share."
        )
        medians = "; ".join(f"{row[0]} at length {row[1]}: {row[3]}" for row in rows)
        at = f"at ε = {EPSILONS[0]:g}, medians in keys: {medians}"
        alt = f"Empirical receptive field over ε; {at}."
        return [
            *_build_charts(results, names, alt),
            Table(columns, rows, caption),
        ]

    def list_rows(self, result: EmpiricalFieldResult) -> Iterator[Mapping[str, object]]:
        for length, mass in result.items():
            layers, heads, num_distances = mass.by_distance.shape
            for layer in range(layers):
                for head in range(heads):
                    shared = {
                        "length": length, "m": num_distances, "queries": mass.num_queries, "layer": layer, "head": head
                    }  # fmt: skip
                    for epsilon in EPSILONS:
                        keys = mass.compute_receptive_field(layer, head, epsilon)
                        value = f"> {num_distances}" if keys is None else keys
                        yield {**shared, "quantity": "keys", "at": epsilon, "value": value}
                    yield {**shared, "quantity": "beyond", "at": "", "value": mass.mass_beyond[layer, head].item()}
                    sums = mass.by_distance[layer, head].cumsum(0)
                    for keys in _choose_key_counts(num_distances):
                        yield {**shared, "quantity": "held by the last", "at": keys, "value": f"{sums[keys - 1]:.6g}"}


def _choose_key_counts(max_keys: int) -> list[int]:
    """Return numbers of keys up to m: all up to 32, then on a logarithmic scale."""
    counts = set(range(1, min(max_keys, 32) + 1))
    if max_keys > 32:
        counts |= {round(32 * (max_keys / 32) ** (k / 64)) for k in range(65)}
    return sorted(counts)


def _format_spread(mass: AttentionMass, epsilon: float) -> str:
    layers, heads, num_distances = mass.by_distance.shape
    fields = (mass.compute_receptive_field(layer, head, epsilon) for layer in range(layers) for head in range(heads))
    keys = sorted(num_distances + 1 if field is None else field for field in fields)
    quantiles = (keys[round(fraction * (len(keys) - 1))] for fraction in (0.1, 0.5, 0.9))
    low, middle, high = (f"> {num_distances:,}" if value > num_distances else f"{value:,}" for value in quantiles)
    return middle if low == middle == high else f"{middle} [{low}, {high}]"


def _build_charts(results: Mapping[str, EmpiricalFieldResult], names: Sequence[str], alt_text: str) -> Iterator[Chart]:
    for length in sorted({length for result in results.values() for length in result}):
        masses = {name: result[length].by_distance for name, result in results.items() if length in result}
        num_distances = next(iter(masses.values())).shape[-1]
        lines = []
        for name, mass in masses.items():
            curves = [[keys / num_distances for keys in compute_finite_field(terms)] for terms in mass.flatten(0, 1)]
            lines.append(build_median_line(name, PLOTTED_EPSILONS, curves, names.index(name)))
        yield build_line_chart(
            f"empirical_receptive_field_{length}",
            f"Windows of {length:,} tokens",
            f"Windows of {length:,} tokens. {alt_text}",
            HorizontalAxis("ε, the excluded share", 1.0, 0.0),
            f"share of {num_distances:,} keys",
            lines,
            y_limits=(0.0, 1.0),
            note="Lines are medians over layers and heads, bands 10% to 90%.",
        )
