"""Jacobian of a score processor with respect to all heads' scores and biases, while a model reads a text.

A processor maps the scores S and biases B of all heads to logits, one query row at a time. For query i, key j, and
output head h,

    tap(h, g, δ) = ∂ logit_h(i, j) / ∂ S_g(i, j + δ)

is the effect of head g's score, δ keys to the right, on head h's logit; the same applies to B. Without a processor the
logit is S + B, and the tap is 1 for g = h and δ = 0, and 0 otherwise. Results are differences from this identity. A
processor is not linear, so taps depend on the operating point. They are means over pairs (i, j) of a text; their root
mean square shows how much they vary between pairs.

Rows are independent in every processor, so one backward pass over copies of many rows yields the gradients of many
logits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron.attention.inputs import AttentionInputs
from megatron.attention.reference import compute_scores_and_bias, compute_table, compute_visible_mask
from megatron.evaluation.analysis.analysis import Analysis, AnalysisContext, Block, Figure, NotApplicable, Table
from megatron.evaluation.forward_passes import list_attention_layers, run_forward
from megatron.model.gpt import GPT

MAX_OFFSET = 16
"""Largest |δ| that is measured."""
NUM_ROWS = 16
"""Number of query rows in each window, with one key in each row."""
MIN_LENGTH = 4 * MAX_OFFSET
"""Minimum window length in tokens."""


@dataclass(frozen=True)
class ProcessorJacobian:
    """Jacobian of one layer's processor over sampled pairs of query and key, minus the identity of S + B."""

    layer: int
    source: str
    """Inputs of the derivative: `score` or `bias`."""
    mean: Tensor
    """Mean taps, float64 [H out, H in, 2·max_offset + 1], starting at δ = −max_offset."""
    rms: Tensor
    """Root mean square of the taps, sqrt(mean(tap²)), in the shape of `mean`."""
    far_share: float
    """Share of the squared derivatives at offsets beyond MAX_OFFSET."""

    @property
    def max_offset(self) -> int:
        """Largest δ with a nonzero derivative."""
        return self.mean.shape[-1] // 2


def measure_processor_jacobian(model: GPT, windows: Sequence[np.ndarray], seed: int = 0) -> list[ProcessorJacobian]:
    """Measure the Jacobian of every layer with a processor, over windows of tokens [L] with L > 2·MAX_OFFSET + 1.

    Args:
        model: model in evaluation mode.
        seed: seed of the random keys.
    """
    generator = torch.Generator().manual_seed(seed)
    samples: dict[tuple[int, str], list[tuple[Tensor, float]]] = {}

    def differentiate_layer(layer: int, inputs: AttentionInputs) -> None:
        if inputs.processor is None:
            return
        for source, sample in _differentiate_rows(inputs, generator).items():
            samples.setdefault((layer, source), []).append(sample)

    if any(attention.processor is not None for attention in list_attention_layers(model)):
        for window in windows:
            run_forward(model, window, differentiate_layer)
    return [_average_samples(layer, source, of_source) for (layer, source), of_source in samples.items()]


def _average_samples(layer: int, source: str, samples: list[tuple[Tensor, float]]) -> ProcessorJacobian:
    taps = torch.cat([near for near, _ in samples])  # [samples, H out, H in, 2·MAX_OFFSET + 1]
    near_squares = taps.square().sum().item()
    far_squares = sum(far for _, far in samples)
    is_used = taps.abs().amax(dim=(0, 1, 2)) > 0
    max_offset = max((abs(int(index) - MAX_OFFSET) for index in is_used.nonzero()), default=0)
    heads = torch.arange(taps.shape[1])
    identity = torch.zeros_like(taps[0])
    identity[heads, heads, MAX_OFFSET] = 1
    taps = (taps - identity)[..., MAX_OFFSET - max_offset : MAX_OFFSET + max_offset + 1]
    rms = taps.square().mean(0).sqrt()
    far_share = far_squares / (near_squares + far_squares) if far_squares else 0.0
    return ProcessorJacobian(layer, source, taps.mean(0), rms, far_share)


def _differentiate_rows(inputs: AttentionInputs, generator: torch.Generator) -> dict[str, tuple[Tensor, float]]:
    """Compute the derivatives of sampled rows with one key each, by source.

    Returns:
        Derivatives near the key, [rows, H, H, 2·MAX_OFFSET + 1], and the sum of squares of all others.
    """
    first, last = 2 * MAX_OFFSET, inputs.query.stop - 1
    if inputs.window is not None and inputs.window <= 2 * MAX_OFFSET:
        raise ValueError(
            f"a window of {inputs.window} keys is too small for offsets of {MAX_OFFSET} keys to either side"
        )
    rows = torch.linspace((first + last) // 2, last, NUM_ROWS).long().unique().tolist()
    keys = []
    for row in rows:
        first_key = 0 if inputs.window is None else max(row - inputs.window + 1, 0)
        keys.append(int(torch.randint(first_key + MAX_OFFSET, row - MAX_OFFSET + 1, (1,), generator=generator)))
    gradients = _compute_derivatives(inputs, rows, keys)
    return {source: _gather_near(gradient, keys) for source, gradient in gradients.items()}


@torch.enable_grad()
def _compute_derivatives(inputs: AttentionInputs, rows: Sequence[int], keys: Sequence[int]) -> dict[str, Tensor]:
    """Compute derivatives of each head's logit at a row's key by its scores and biases, [H in, rows, H out, C]."""
    assert inputs.processor is not None
    num_heads = inputs.q.shape[1]
    # One copy of each row for each head whose logit is differentiated.
    scores, bias, visible = (
        None if x is None else x.repeat_interleave(num_heads, 1) for x in _compute_processor_inputs(inputs, rows)
    )
    assert scores is not None
    assert visible is not None
    sources = {"score": scores[None].requires_grad_()}
    if bias is not None:
        sources["bias"] = bias.requires_grad_()
    logits = inputs.processor(sources["score"], bias, visible[None])
    copies = torch.arange(len(rows) * num_heads, device=scores.device)
    key_of_copy = torch.tensor(keys, device=scores.device).repeat_interleave(num_heads)
    total = logits[0, copies % num_heads, copies, key_of_copy].sum()
    gradients = torch.autograd.grad(total, list(sources.values()))
    return {
        source: gradient.reshape(num_heads, len(rows), num_heads, -1).double().cpu()
        for source, gradient in zip(sources, gradients, strict=True)
    }


@torch.no_grad()
def _compute_processor_inputs(inputs: AttentionInputs, rows: Sequence[int]) -> tuple[Tensor, Tensor | None, Tensor]:
    """Compute a processor's inputs: scores [H, rows, C], biases of the same shape, and visibility [1, rows, C]."""
    inputs = replace(inputs, table=compute_table(inputs.encoding, inputs.query, inputs.key, inputs.q.device))
    scores, biases, visible = [], [], []
    for row in rows:
        index = row - inputs.query.start
        here = slice(index, index + 1)
        one_row = replace(
            inputs,
            q=inputs.q[:, :, here],
            query=replace(inputs.query, start=row, length=1),
            row_bias=None if inputs.row_bias is None else inputs.row_bias[:, :, here],
        )
        score, bias = compute_scores_and_bias(one_row)
        scores.append(score[0])
        if bias is not None:
            biases.append(bias.expand_as(score)[0])
        visible.append(compute_visible_mask(one_row)[0])
    return torch.cat(scores, 1), torch.cat(biases, 1) if biases else None, torch.cat(visible, 1)


def _gather_near(gradient: Tensor, keys: Sequence[int]) -> tuple[Tensor, float]:
    """Select gradients [H in, rows, H out, C] around each row's key.

    Returns:
        Selected gradients, [rows, H out, H in, 2·MAX_OFFSET + 1], and the sum of squares of all others.
    """
    near = torch.stack(
        [gradient[:, row, :, key - MAX_OFFSET : key + MAX_OFFSET + 1].transpose(0, 1) for row, key in enumerate(keys)]
    )
    return near, max(0.0, (gradient.square().sum() - near.square().sum()).item())


ProcessorJacobianResult = Mapping[int, list[ProcessorJacobian]]
"""Window length, ascending → Jacobians of each layer by scores and by biases."""


class ProcessorJacobians(Analysis):
    order = 90
    title = "Inputs of each head of the processor"
    description = (
        "Derivative of head h's logit of query i and key j by head g's score (or bias) of the same query and the "
        "key δ positions to the right, minus that of S + B alone (1 for g = h and δ = 0). It shows how the processor "
        "mixes heads and adjacent keys. A processor is not linear, so this is a mean over positions of the text. The "
        "root mean square in the data shows how much the derivatives vary between positions. Each length is measured "
        "separately, because beyond the training length a processor receives distances that it was not trained on; "
        f"windows of fewer than {MIN_LENGTH} tokens are skipped. In the figures, for the shortest and the longest of "
        "these windows, rows are output heads h, and columns are input heads g with their keys from left to right."
    )

    def measure(self, context: AnalysisContext) -> ProcessorJacobianResult:
        if context.config.position.processors == ["none"]:
            raise NotApplicable("It has no score processor: every head's logit is its own score and bias.")
        windows = context.readable_windows
        lengths = sorted(length for length in windows if length >= MIN_LENGTH)
        if not lengths:
            raise NotApplicable(f"The windows are too short: taps cover up to {MAX_OFFSET} keys to either side.")
        model = context.trained_model
        processed = [each for each in list_attention_layers(model) if each.processor is not None]
        if any(each.reads_preceding_rows for each in processed):
            raise NotApplicable("Its score processor reads other rows, which is not supported here.")
        shortest = min((each.window for each in processed if each.window is not None), default=None)
        if shortest is not None and shortest <= 2 * MAX_OFFSET:
            raise NotApplicable(
                f"A window of {shortest} keys is too small for offsets of {MAX_OFFSET} keys to either side."
            )
        return {length: measure_processor_jacobian(model, windows[length]) for length in lengths}

    def render_blocks(self, results: Mapping[str, ProcessorJacobianResult], names: Sequence[str]) -> list[Block]:
        blocks: list[Block] = []
        rows = []
        for name, result in results.items():
            for length in sorted({min(result), max(result)}):
                layers = sorted({jacobian.layer for jacobian in result[length]})
                drawn_layers = {layers[0], layers[len(layers) // 2], layers[-1]}
                drawn = [jacobian for jacobian in result[length] if jacobian.layer in drawn_layers]
                blocks.append(_build_figure(name, length, drawn))
            entries = [(length, jacobian) for length, jacobians in result.items() for jacobian in jacobians]
            entries.sort(key=lambda entry: (entry[1].layer, entry[1].source != "score", entry[0]))
            rows += [
                [name, f"layer {jacobian.layer}", jacobian.source, f"{length:,}", *_format_shares(jacobian)]
                for length, jacobian in entries
            ]
        columns = ["method", "layer", "input", "length", "own head", "other heads", "other keys", "variation"]
        caption = (
            "Shares of the sum of squared derivatives: own head at the same key, other heads at the same key, and all "
            "heads at other keys; and the part of the root mean square that the mean does not explain."
        )
        return [*blocks, Table(columns, rows, caption)]

    def list_rows(self, result: ProcessorJacobianResult) -> Iterator[Mapping[str, object]]:
        for length, jacobians in result.items():
            for jacobian in jacobians:
                shared = {"length": length, "layer": jacobian.layer, "reads": jacobian.source}
                for h, g, index in np.ndindex(*jacobian.mean.shape):
                    yield {
                        **shared, "head": h, "from_head": g, "delta": index - jacobian.max_offset,
                        "mean": jacobian.mean[h, g, index].item(), "rms": jacobian.rms[h, g, index].item(),
                        "elsewhere": jacobian.far_share,
                    }  # fmt: skip


def _format_shares(jacobian: ProcessorJacobian) -> list[str]:
    squares = jacobian.rms.square()
    total = squares.sum().item()
    if total == 0:
        return ["–"] * 4
    same_key = squares[..., jacobian.max_offset]
    own_head = same_key.diagonal().sum().item()
    mean_squares = jacobian.mean.square().sum().item()
    sums = [own_head, same_key.sum().item() - own_head, total - same_key.sum().item()]
    variation = max(0.0, 1 - mean_squares / total) ** 0.5
    return [*(f"{100 * part / total:.0f}%" for part in sums), f"{100 * variation:.0f}%"]


def _build_figure(name: str, length: int, drawn: list[ProcessorJacobian]) -> Figure:
    def draw(narrow: bool) -> bytes:
        from megatron.evaluation.analysis.drawing import (
            add_color_bar,
            add_titles,
            choose_norm,
            create_panels,
            draw_heatmap,
            save_png,
        )

        figure, axes = create_panels(len(drawn), narrow, columns=2, width=5.0, height=1.9)
        title = f"{name}\ncontribution of the processor to S + B in windows of {length:,} tokens"
        figure.suptitle(title, x=0.01, ha="left", fontsize=9)
        for panel, jacobian in zip(axes, drawn, strict=True):
            num_outputs, num_inputs, width = jacobian.mean.shape
            values = jacobian.mean.reshape(num_outputs, num_inputs * width).numpy()
            add_color_bar(figure, draw_heatmap(panel, values, choose_norm([values], signed=True)), panel)
            for edge in range(1, num_inputs):
                panel.axvline(edge * width - 0.5, color="0.75", linewidth=0.8)
            offset = jacobian.max_offset
            panel.set_xticks(np.arange(num_inputs) * width + offset, [str(g) for g in range(num_inputs)])
            panel.set_yticks(range(num_outputs), [str(h) for h in range(num_outputs)])
            span = f"δ from −{offset} to {offset}" if offset else "δ = 0"
            add_titles(
                panel,
                f"layer {jacobian.layer}, by {jacobian.source}",
                f"input head g, {span} within each",
                "head h",
            )
        return save_png(figure)

    largest = max(drawn, key=lambda jacobian: jacobian.mean.abs().max().item())
    head, other, index = np.unravel_index(int(largest.mean.abs().argmax()), largest.mean.shape)
    alt = (
        f"Mean derivatives of the processor of {name} in windows of {length:,} tokens. The largest is "
        f"{largest.mean[head, other, index].item():.2g}: head {head}'s logit by head {other}'s {largest.source} at "
        f"δ = {int(index) - largest.max_offset} in layer {largest.layer}."
    )
    return Figure(alt, draw)
