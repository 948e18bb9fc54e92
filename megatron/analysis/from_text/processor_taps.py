"""What each head of a score processor reads of all heads' scores and biases."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from megatron.analysis.analysis import Analysis, AnalysisContext, Block, Figure, NotApplicable, Table
from megatron.analysis.taps import REACH, ProcessorJacobian, measure_processor_jacobian

ProcessorJacobianResult = Mapping[int, list[ProcessorJacobian]]
"""Length of the windows, ascending → the taps of each layer."""


class ProcessorJacobians(Analysis):
    order = 90
    title = "What each head of the processor reads"
    text = (
        "The derivative of head h's logit of query i and key j by head g's score (or bias) of the same query and the "
        "key δ places to the right, less what S + B alone would give (1 for g = h and δ = 0): how the processor mixes "
        "heads and neighbouring keys. A processor is not linear, so this is a mean over places of what is read; the "
        "root mean square beside it in the data says how much the derivatives differ from place to place. Each length "
        "is looked at by itself: beyond the training length a processor meets distances that it was not trained on; "
        f"windows of fewer than {4 * REACH} tokens are left out. In the pictures, of the shortest and the longest of "
        "these windows, rows are output heads h, and columns are input heads g with their keys from left to right."
    )

    def measure(self, context: AnalysisContext) -> ProcessorJacobianResult:
        if context.config.position.score_processor == "none":
            raise NotApplicable("It has no score processor: every head's logit is its own score and bias.")
        windows = context.select_readable_windows
        long_enough = [length for length in windows if length >= 4 * REACH]
        if not long_enough:
            raise NotApplicable(f"The windows are too short: taps are looked at up to {REACH} keys to either side.")
        if context.window is not None and context.window <= 2 * REACH:
            raise NotApplicable(f"A window of {context.window} keys hides what lies {REACH} keys to either side.")
        return {
            length: measure_processor_jacobian(context.train_length, windows[length]) for length in sorted(long_enough)
        }

    def render_blocks(self, results: Mapping[str, ProcessorJacobianResult], names: Sequence[str]) -> list[Block]:
        blocks: list[Block] = []
        rows = []
        for name, of_lengths in results.items():
            for length in sorted({min(of_lengths), max(of_lengths)}):
                taps = of_lengths[length]
                layers = sorted({each.layer for each in taps})
                shown = sorted({layers[0], layers[len(layers) // 2], layers[-1]})
                blocks.append(_build_figure(name, length, [each for each in taps if each.layer in shown]))
            found_at = [(each.layer, each.reads, length, each) for length, taps in of_lengths.items() for each in taps]
            found_at.sort(key=lambda entry: (entry[0], entry[1] != "score", entry[2]))
            rows += [
                [name, f"layer {layer}", reads, f"{length:,}", *_summarize(each)]
                for layer, reads, length, each in found_at
            ]
        columns = ["method", "layer", "of the", "length", "own head", "other heads", "neighbouring keys", "varies by"]
        caption = (
            "Shares of the squared derivatives' sum: own head at the key itself, other heads there, and all heads at "
            "neighbouring keys; and the part of the root mean square that the mean does not explain."
        )
        return [*blocks, Table(columns, rows, caption)]

    def list_rows(self, result: ProcessorJacobianResult) -> Iterator[Mapping[str, object]]:
        for length, each in ((length, each) for length, taps in result.items() for each in taps):
            outputs, inputs, width = each.mean.shape
            for h in range(outputs):
                for g in range(inputs):
                    for place in range(width):
                        yield {
                            "length": length, "layer": each.layer, "reads": each.reads, "head": h, "from_head": g,
                            "delta": place - each.reach, "mean": each.mean[h, g, place].item(),
                            "rms": each.rms[h, g, place].item(), "elsewhere": each.elsewhere,
                        }  # fmt: skip


def _summarize(taps: ProcessorJacobian) -> list[str]:
    squares = taps.rms.square()
    total = squares.sum().item()
    if total == 0:
        return ["–"] * 4
    here = squares[..., taps.reach]
    own = here.diagonal().sum().item()
    mean = taps.mean.square().sum().item()
    shares = [own, here.sum().item() - own, total - here.sum().item()]
    return [*(f"{100 * share / total:.0f}%" for share in shares), f"{100 * max(0.0, 1 - mean / total) ** 0.5:.0f}%"]


def _build_figure(name: str, length: int, drawn: list[ProcessorJacobian]) -> Figure:
    def draw(narrow: bool) -> bytes:
        from megatron.analysis.drawing import (
            add_colour_bar,
            add_titles,
            choose_norm,
            create_panels,
            draw_heatmap,
            save_png,
        )

        figure, axes = create_panels(len(drawn), narrow, columns=2, width=5.0, height=1.9)
        title = f"{name}\nwhat the processor adds to S + B in windows of {length:,} tokens"
        figure.suptitle(title, x=0.01, ha="left", fontsize=9)
        for panel, taps in zip(axes, drawn, strict=True):
            outputs, inputs, width = taps.mean.shape
            values = taps.mean.reshape(outputs, inputs * width).numpy()
            add_colour_bar(figure, draw_heatmap(panel, values, choose_norm([values], signed=True)), panel)
            for edge in range(1, inputs):
                panel.axvline(edge * width - 0.5, color="0.75", linewidth=0.8)
            panel.set_xticks(np.arange(inputs) * width + taps.reach, [str(g) for g in range(inputs)])
            panel.set_yticks(range(outputs), [str(h) for h in range(outputs)])
            span = f"δ from −{taps.reach} to {taps.reach}" if taps.reach else "δ = 0"
            add_titles(panel, f"layer {taps.layer}, of the {taps.reads}", f"input head g, {span} within each", "head h")
        return save_png(figure)

    largest = max(drawn, key=lambda taps: taps.mean.abs().max().item())
    head, other, place = np.unravel_index(int(largest.mean.abs().argmax()), largest.mean.shape)
    told = (
        f"Mean derivatives of the processor of {name} in windows of {length:,} tokens. The largest is "
        f"{largest.mean[head, other, place].item():.2g}: head {head}'s logit by head {other}'s {largest.reads} at "
        f"δ = {int(place) - largest.reach} in layer {largest.layer}."
    )
    return Figure(told, draw)
