"""What each head of a score processor reads of all heads' scores and biases."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from megatron.analysis.analysis import Analysis, Block, Looked, NotApplicable, Picture, Table
from megatron.analysis.taps import REACH, Taps, processor_taps

Found = list[Taps]


class ProcessorTaps(Analysis):
    order = 90
    title = "What each head of the processor reads"
    text = (
        "The derivative of head h's logit of query i and key j by head g's score (or bias) of the same query and the "
        "key δ places to the right, less what S + B alone would give (1 for g = h and δ = 0): how the processor mixes "
        "heads and neighbouring keys. A processor is not linear, so this is a mean over places of what is read; the "
        "root mean square beside it in the data says how much the derivatives differ from place to place. In the "
        "picture, rows are output heads h, and columns are input heads g with their keys from left to right."
    )

    def measure(self, looked: Looked) -> Found:
        if looked.config.position.score_processor == "none":
            raise NotApplicable("It has no score processor: every head's logit is its own score and bias.")
        windows = looked.readable
        long_enough = [length for length in windows if length >= 4 * REACH]
        if not long_enough:
            raise NotApplicable(f"The windows are too short: taps are looked at up to {REACH} keys to either side.")
        if looked.window is not None and looked.window <= 2 * REACH:
            raise NotApplicable(f"A window of {looked.window} keys hides what lies {REACH} keys to either side.")
        return processor_taps(looked.trained, windows[min(long_enough)])

    def show(self, found: Mapping[str, Found], names: Sequence[str]) -> list[Block]:
        blocks: list[Block] = []
        rows = []
        for name, taps in found.items():
            layers = sorted({each.layer for each in taps})
            shown = sorted({layers[0], layers[len(layers) // 2], layers[-1]})
            drawn = [each for each in taps if each.layer in shown]
            blocks.append(_picture(name, drawn))
            rows += [[name, f"layer {each.layer}", each.reads, *_numbers(each)] for each in taps]
        columns = ["method", "layer", "of the", "own head", "other heads", "neighbouring keys", "varies by"]
        caption = (
            "Shares of the squared derivatives' sum: own head at the key itself, other heads there, and all heads at "
            "neighbouring keys; and the part of the root mean square that the mean does not explain."
        )
        return [*blocks, Table(columns, rows, caption)]

    def rows(self, found: Found) -> Iterator[Mapping[str, object]]:
        for each in found:
            outputs, inputs, width = each.mean.shape
            for h in range(outputs):
                for g in range(inputs):
                    for place in range(width):
                        yield {
                            "layer": each.layer, "reads": each.reads, "head": h, "from_head": g,
                            "delta": place - each.reach, "mean": each.mean[h, g, place].item(),
                            "rms": each.rms[h, g, place].item(), "elsewhere": each.elsewhere,
                        }  # fmt: skip


def _numbers(taps: Taps) -> list[str]:
    squares = taps.rms.square()
    total = squares.sum().item()
    if total == 0:
        return ["–"] * 4
    here = squares[..., taps.reach]
    own = here.diagonal().sum().item()
    mean = taps.mean.square().sum().item()
    shares = [own, here.sum().item() - own, total - here.sum().item()]
    return [*(f"{100 * share / total:.0f}%" for share in shares), f"{100 * max(0.0, 1 - mean / total) ** 0.5:.0f}%"]


def _picture(name: str, drawn: list[Taps]) -> Picture:
    def draw(narrow: bool) -> bytes:
        from megatron.analysis.drawing import colour_bar, heat, panels, png, scale, titled

        figure, axes = panels(len(drawn), narrow, columns=2, width=5.0, height=1.9)
        figure.suptitle(f"{name}\nwhat the processor adds to S + B", x=0.01, ha="left", fontsize=9)
        for panel, taps in zip(axes, drawn, strict=True):
            outputs, inputs, width = taps.mean.shape
            values = taps.mean.reshape(outputs, inputs * width).numpy()
            colour_bar(figure, heat(panel, values, scale([values], signed=True)), panel)
            for edge in range(1, inputs):
                panel.axvline(edge * width - 0.5, color="0.75", linewidth=0.8)
            panel.set_xticks(np.arange(inputs) * width + taps.reach, [str(g) for g in range(inputs)])
            panel.set_yticks(range(outputs), [str(h) for h in range(outputs)])
            span = f"δ from −{taps.reach} to {taps.reach}" if taps.reach else "δ = 0"
            titled(panel, f"layer {taps.layer}, of the {taps.reads}", f"input head g, {span} within each", "head h")
        return png(figure)

    return Picture(f"Mean derivatives of the processor of {name}", draw)
