"""Entropy and largest weight of attention over the length: a test of whether attention dilutes in long contexts.

For a query that attends to n keys with weights a_1 … a_n, whose sum is s (1, or less if a sink or the rest of
stick-breaking receives weight):

    H             −Σ p_j ln p_j, p_j = a_j / s, in nats: 0 for a single key, ln n for equal weights
    H / ln n      entropy as a share of its maximum; undefined for a query with one key
    largest       max a_j
    unspent       1 − s, weight assigned to no key

Heads that are mixed after the softmax (talking heads) may have negative weights: all quantities except `unspent` use
their absolute values.

If scores are bounded, H grows as ln n, and the largest weight falls as 1/n (Velickovic et al. 2024, softmax is not
enough for sharp out-of-distribution, 2410.01104). Temperatures that grow with n and attention sinks counteract this.
The results are therefore over the position of the query, in bins that end at the training length and at its doubles and
halves. They use the actual weights, so encodings, processors, temperatures, and windows are included.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from megatron.attention.inputs import AttentionInputs, iter_row_blocks
from megatron.attention.reference import compute_visible_mask, compute_weights, precompute_terms
from megatron.evaluation.analysis.analysis import Analysis, AnalysisContext, Block, Figure, Table
from megatron.evaluation.forward_passes import choose_block_size, run_forward
from megatron.evaluation.loss_records import list_position_bins
from megatron.model.gpt import GPT
from megatron.reports.charts import Chart
from megatron.reports.curve_chart import HorizontalAxis, build_line_chart, build_median_line

ROUNDING = 1e-5
"""Tolerance within which a sum of float32 weights counts as 1."""
QUANTITIES = ("entropy", "normalized", "largest", "unspent")
TITLES = {"normalized": "H / ln n", "largest": "largest weight"}
"""Titles of the charts."""


@dataclass(frozen=True)
class AttentionEntropy:
    """Means over windows and over the queries of a bin."""

    ends: tuple[int, ...]
    """Last position of each bin, from 1."""
    values: dict[str, Tensor]
    """Quantity → float64 [layers, H, bins]; NaN if undefined for all queries."""
    stderr: Tensor
    """Standard error of the normalized entropy over windows, float64 [layers, H, bins]; NaN for a single window."""
    train_length: int
    keys: tuple[float, ...]
    """Average number of keys that a query of each bin attends to."""


@torch.no_grad()
def measure_attention_entropy(
    model: GPT,
    windows: Sequence[np.ndarray],
    train_length: int,
    progress: Callable[[float], None] = lambda fraction: None,
) -> AttentionEntropy:
    """Measure entropy and largest weight by position while a model reads windows of one length.

    Args:
        model: model in evaluation mode.
        windows: tokens [L] of each window.
        train_length: training length, at which a bin ends.
        progress: called with the completed fraction after each layer of each window.
    """
    length, ends = len(windows[0]), list_position_bins(train_length, len(windows[0]))
    shape = (len(windows), model.config.num_layers, model.config.num_attention_heads, length)
    by_query = {quantity: torch.full(shape[1:], torch.nan, dtype=torch.float64) for quantity in QUANTITIES}
    num_keys = torch.zeros(shape[1], length, dtype=torch.float64)
    bin_means = {quantity: torch.zeros(*shape[:3], len(ends), dtype=torch.float64) for quantity in QUANTITIES}
    num_done = 0

    def add_layer(layer: int, inputs: AttentionInputs) -> None:
        nonlocal num_done
        # Largest block first, see `compute_attention_in_blocks`.
        for block in reversed(list(iter_row_blocks(precompute_terms(inputs), choose_block_size(inputs)))):
            rows = slice(block.query.start, block.query.start + block.query.length)
            visible = compute_visible_mask(block)[0, 0].sum(dim=-1).double().cpu()
            num_keys[layer, rows] = visible
            for quantity, values in measure_weights(compute_weights(block)[0], visible).items():
                by_query[quantity][layer, :, rows] = values
        num_done += 1
        progress(num_done / (len(windows) * shape[1]))

    for index, window in enumerate(windows):
        run_forward(model, window, add_layer)
        for quantity, values in by_query.items():
            for number, (first, end) in enumerate(pairwise((0, *ends))):
                bin_means[quantity][index, :, :, number] = values[:, :, first:end].nanmean(dim=-1)
    normalized = bin_means["normalized"]
    deviation = normalized.std(dim=0) if len(windows) > 1 else torch.full_like(normalized[0], torch.nan)
    stderr = deviation / len(windows) ** 0.5
    keys = tuple(num_keys[:, first:end].mean().item() for first, end in pairwise((0, *ends)))
    means = {quantity: values.mean(dim=0) for quantity, values in bin_means.items()}
    return AttentionEntropy(tuple(ends), means, stderr, train_length, keys)


def measure_weights(weights: Tensor, num_keys: Tensor) -> dict[str, Tensor]:
    """Compute all quantities from attention weights [H, R, C] of rows that attend to `num_keys` [R] keys.

    Returns:
        Quantities on the CPU, float64 [H, R].
    """
    sizes = weights.abs()
    sums = sizes.sum(dim=-1, dtype=torch.float64)
    # If p = a / s, then −Σ p ln p = ln s − Σ a ln a / s.
    spread = torch.special.entr(sizes).sum(dim=-1, dtype=torch.float64)
    entropy = ((spread / sums) + sums.log()).clamp(min=0).cpu()
    unspent = 1 - weights.sum(dim=-1, dtype=torch.float64)
    possible = num_keys.log()
    normalized = torch.where(num_keys > 1, entropy / possible.clamp(min=1e-9), torch.nan)
    largest = sizes.amax(dim=-1).double().cpu()
    return {
        "entropy": entropy,
        "normalized": normalized,
        "largest": largest,
        "unspent": torch.where(unspent.abs() < ROUNDING, 0.0, unspent).cpu(),
    }


EntropyResult = dict[int, AttentionEntropy]
"""Results by length."""


class AttentionEntropies(Analysis):
    order = 65
    data_format = "json"
    title = "Entropy and largest weight of attention"
    description = (
        "A test of whether attention dilutes in long contexts. H is the entropy of a query's attention over its n "
        "visible keys, in nats, and H / ln n its share of the maximum: 1 for equal weights, 0 if a single key has all "
        "weight. The largest weight falls as 1/n if scores are bounded (Velickovic et al. 2024, "
        "2410.01104); temperatures that grow with n and attention sinks counteract this. Means over queries in bins of "
        "positions that end at the training length, its halves, and its doubles, for each layer and head."
    )

    def measure(self, context: AnalysisContext) -> EntropyResult:
        model, train_length = context.trained_model, context.config.model.seq_length
        windows_by_length = {length: windows for length, windows in context.readable_windows.items() if length > 1}
        costs = {length: len(windows) * length**2 for length, windows in windows_by_length.items()}
        result: EntropyResult = {}
        for length, windows in windows_by_length.items():
            before = sum(costs[measured] for measured in result)

            def report(fraction: float, before: int = before, cost: int = costs[length]) -> None:
                context.progress((before + fraction * cost) / sum(costs.values()))

            result[length] = measure_attention_entropy(model, windows, train_length, report)
        return result

    def render_blocks(self, results: Mapping[str, EntropyResult], names: Sequence[str]) -> list[Block]:
        rows = []
        for name, result in results.items():
            for number, end in enumerate(result[max(result)].ends):
                entropy = result[max(result)]
                if end < MIN_TABLE_POSITION and number + 1 < len(entropy.ends):
                    continue
                cells = [_format_quantiles(entropy.values[quantity][:, :, number]) for quantity in QUANTITIES]
                rows.append([name, f"{end:,}", f"{entropy.keys[number]:,.0f}", *cells])
        columns = ["method", "to position", "keys n", "H in nats", "H / ln n", "largest weight", "unspent"]
        caption = (
            "At the largest length; medians over layers and heads, with 10% and 90% quantiles in brackets. Unspent is "
            "the weight assigned to no key, such as a sink's."
        )
        last = "; ".join(f"{row[0]} {row[4]} to position {row[1]}" for row in rows)
        alt = f"Normalized entropy and largest weight of attention by the position of the query; H / ln n: {last}."
        heads_alt = "H / ln n of each layer and head in the last bin of positions, with a map per method."
        return [
            *_build_charts(results, names, alt),
            Table(columns, rows, caption),
            Figure(heads_alt, lambda narrow: _draw_heads(results, narrow)),
        ]

    def list_rows(self, result: EntropyResult) -> Iterator[Mapping[str, object]]:
        for length, entropy in result.items():
            layers, heads, _ = entropy.stderr.shape
            for layer in range(layers):
                for head in range(heads):
                    for number, (first, end) in enumerate(pairwise((0, *entropy.ends))):
                        values = {name: entropy.values[name][layer, head, number].item() for name in QUANTITIES}
                        stderr = entropy.stderr[layer, head, number].item()
                        place = {"length": length, "layer": layer, "head": head, "from": first + 1, "to": end}
                        numbers = {"keys": entropy.keys[number], **values, "normalized_stderr": stderr}
                        yield {**place, **{name: _round(value) for name, value in numbers.items()}}


MIN_TABLE_POSITION = 16
"""First bin end in the table; earlier bins are only in the data."""


def _round(value: float) -> float | None:
    """Round to six digits; None for NaN."""
    return float(f"{value:.6g}") if value == value else None


def _format_quantiles(values: Tensor) -> str:
    known = values[~values.isnan()]
    if not len(known):
        return "–"
    low, middle, high = torch.quantile(known, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    return f"{middle:.3g} [{low:.3g}, {high:.3g}]" if f"{low:.3g}" != f"{high:.3g}" else f"{middle:.3g}"


def _build_charts(results: Mapping[str, EntropyResult], names: Sequence[str], alt_text: str) -> Iterator[Chart]:
    """Yield a chart for each of `TITLES`, at the largest length."""
    largest = {name: result[max(result)] for name, result in results.items()}
    last = max(entropy.ends[-1] for entropy in largest.values())
    train_lengths = {entropy.train_length for entropy in largest.values()}
    for quantity, title in TITLES.items():
        lines, first = [], last
        for name, entropy in largest.items():
            values = entropy.values[quantity].flatten(0, 1)
            is_known = ~values.isnan().any(dim=0)
            ends = [end for end, known in zip(entropy.ends, is_known.tolist(), strict=True) if known]
            lines.append(build_median_line(name, ends, values[:, is_known].tolist(), names.index(name)))
            first = min([first, *ends])
        is_marked = len(train_lengths) == 1 and first <= min(train_lengths) <= last
        yield build_line_chart(
            f"attention_entropy_{quantity}",
            f"{title[0].upper()}{title[1:]} by the position of the query",
            alt_text,
            HorizontalAxis("position of the query", first, last, "log"),
            title,
            lines,
            y_limits=(0.0, 1.0),
            note="Lines are medians over layers and heads, bands 10% to 90%.",
            mark=(float(min(train_lengths)), "training length") if is_marked else None,
        )


def _draw_heads(results: Mapping[str, EntropyResult], narrow: bool) -> bytes:
    from matplotlib.colors import Normalize

    from megatron.evaluation.analysis.drawing import add_color_bar, add_titles, create_panels, draw_heatmap, save_png

    figure, axes = create_panels(len(results), narrow, width=2.6, height=2.3)
    for panel, (name, result) in zip(axes, results.items(), strict=True):
        entropy = result[max(result)]
        image = draw_heatmap(panel, entropy.values["normalized"][:, :, -1].numpy(), Normalize(0, 1))
        add_titles(panel, f"{name}\nto position {entropy.ends[-1]:,}", "head", "layer", wrap=36)
    add_color_bar(figure, image, axes)
    return save_png(figure)
