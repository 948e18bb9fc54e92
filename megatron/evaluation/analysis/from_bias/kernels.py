"""Bias and weight of each head over the distance, learned or fixed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron.evaluation.analysis.analysis import Analysis, AnalysisContext, Block, LayerEncoding, NotApplicable, Table
from megatron.evaluation.analysis.bias_series import compute_terms, to_float64
from megatron.reports.charts import Chart
from megatron.reports.curve_chart import ChartLine, HorizontalAxis, build_line_chart
from megatron.reports.metrics import format_number

MIN_BIAS = -12.0
"""Lower limit of bias charts; lines below are clipped: e^−12 = 6e-6."""
NUM_DISTANCES = 160
"""Number of distances in the data, evenly spaced on a logarithmic scale."""
MAX_PARAMETERS = 8
"""Maximum number of parameters per head and layer in a table."""


@dataclass(frozen=True)
class LayerKernels:
    layer: str
    distances: torch.Tensor
    """Distances, float64 [N]."""
    terms: dict[str, torch.Tensor]
    """Curves `bias` and `weight`, float64 [H, N]."""
    parameters: dict[str, list[float]]
    """Parameters with one value per head, by name, if the bias is a formula over the distance, not a network."""
    train_length: int


class Kernels(Analysis):
    order = 40
    title = "Kernels per head"
    description = (
        "Bias of each head over the distance, as added after scaling by 1/√d, and the weight that multiplies the "
        "scores if there is one (Chi et al. 2022, KERPLE, figures 2 to 4). The dashed line marks the "
        f"training length. Biases below {MIN_BIAS:g}, a factor of 6e-6, are below the chart. If "
        "the bias depends on the query's position, it is shown for the last query of the longest length."
    )

    def measure(self, context: AnalysisContext) -> list[LayerKernels]:
        longest = context.lengths[-1]
        kernels = [_measure_kernel(layer, longest, context.config.model.seq_length) for layer in context.encodings]
        kernels = [kernel for kernel in kernels if kernel.terms]
        if not kernels:
            raise NotApplicable("It has neither a bias nor a weight over distances.")
        return kernels

    def render_blocks(self, results: Mapping[str, list[LayerKernels]], names: Sequence[str]) -> list[Block]:
        drawn = {name: _select_kernels(kernels) for name, kernels in results.items()}
        panels = [
            (name, kernel, term) for name, kernels in drawn.items() for kernel in kernels for term in kernel.terms
        ]
        blocks: list[Block] = [_build_chart(number, *panel) for number, panel in enumerate(panels)]
        for name, kernels in results.items():
            if table := _build_parameter_table(name, kernels):
                blocks.append(table)
        return blocks

    def list_rows(self, result: list[LayerKernels]) -> Iterator[Mapping[str, object]]:
        for kernel in result:
            for term, values in kernel.terms.items():
                for head, curve in enumerate(values.tolist()):
                    for distance, value in zip(kernel.distances.tolist(), curve, strict=True):
                        yield {
                            "layer": kernel.layer, "head": head, "term": term, "distance": int(distance),
                            "value": value,
                        }  # fmt: skip


def _describe_panel(name: str, kernel: LayerKernels, term: str) -> str:
    """Describe the ends of a panel's curves in words, with the range over heads."""
    values, last_distance = kernel.terms[term], int(kernel.distances[-1])

    def format_range(column: int) -> str:
        ends = values[:, column].min().item(), values[:, column].max().item()
        return " to ".join(dict.fromkeys(format_number(end) for end in ends))

    layer = "" if kernel.layer in ("", "all layers") else f", {kernel.layer}"
    return (
        f"{term} of {name}{layer}, from {format_range(0)} at distance 0 to {format_range(-1)} "
        f"at distance {last_distance:,}"
    )


@torch.no_grad()
def _measure_kernel(layer: LayerEncoding, longest: int, train_length: int) -> LayerKernels:
    encoding = to_float64(layer.encoding)
    distances = (
        torch.logspace(0, torch.tensor(float(longest)).log10().item(), NUM_DISTANCES, dtype=torch.float64).round() - 1
    )
    distances = distances.clamp(max=longest - 1).unique()
    score_terms = compute_terms(encoding, distances, row=longest - 1)
    terms = {term: values for term, values in score_terms._asdict().items() if values is not None}
    if type(encoding).overrides_hook("dense"):
        terms = {term: values[:, distances.long()] for term, values in terms.items()}
    heads = encoding.dims.num_heads
    parameters = {
        name.removesuffix(".value"): value.double().tolist()
        for name, value in encoding.named_parameters()
        if value.shape == (heads,) and type(encoding).overrides_hook("table")
    }
    return LayerKernels(layer.name, distances, terms, parameters, train_length)


def _select_kernels(kernels: list[LayerKernels]) -> list[LayerKernels]:
    if len(kernels) <= 3:
        return kernels
    return [kernels[0], kernels[len(kernels) // 2], kernels[-1]]


def _build_parameter_table(name: str, kernels: list[LayerKernels]) -> Table | None:
    names = list(kernels[0].parameters)
    if not names or len(names) > MAX_PARAMETERS:
        return None
    rows = [
        [f"{kernel.layer}, head {head}", *(f"{kernel.parameters[parameter][head]:.4g}" for parameter in names)]
        for kernel in kernels
        for head in range(len(kernel.parameters[names[0]]))
    ]
    return Table(["layer and head", *names], rows, f"Parameters of {name}", folded=True)


def _build_chart(number: int, name: str, kernel: LayerKernels, term: str) -> Chart:
    values, last = kernel.terms[term], float(kernel.distances[-1])
    finite = values[values.isfinite()]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
    if term == "bias":
        low = max(low, MIN_BIAS)
    layer = "" if kernel.layer == "all layers" else f", {kernel.layer}"
    return build_line_chart(
        f"kernels_{number}",
        f"{term[0].upper()}{term[1:]} of {name}{layer}",
        f"{term} over the distance, a line for each head: {_describe_panel(name, kernel, term)}.",
        HorizontalAxis("distance", 0.0, last, "log1p"),
        term,
        [
            ChartLine(f"head {head}", list(zip(kernel.distances.tolist(), curve, strict=True)), style=head)
            for head, curve in enumerate(values.tolist())
        ],
        y_limits=(low, high) if high > low else (low - 1, low + 1),
        mark=(float(kernel.train_length), "training length") if kernel.train_length <= last else None,
        series_word="heads",
    )
