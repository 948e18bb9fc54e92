"""What each head of a score processor reads: its Jacobian at the scores that a text gives it.

A processor maps the scores S and biases B of all heads, one query row at a time, to logits. Of query i, key j and
output head h,

    tap(h, g, δ) = ∂ logit_h(i, j) / ∂ S_g(i, j + δ)

says how much of head g's score, δ keys to the right, goes into head h's logit; the same for B. Without a processor the
logit is S + B, and the tap is 1 for g = h and δ = 0 and 0 elsewhere: what is shown is the difference from that. A
processor is not linear, so the taps belong to an operating point: they are means over places (i, j) of a text, and the
root mean square beside them says how much they differ between places.

Rows are independent of each other in every processor, so the gradients of many logits of many rows come from one
backward pass over copies of these rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron.analysis.observe import list_attention_layers, run_forward
from megatron.attention.inputs import AttentionInputs
from megatron.attention.reference import compute_scores_and_bias, compute_table, compute_visibility
from megatron.model.gpt import GPT

REACH = 16
"""Largest δ that is looked at, to either side."""
ROWS = 16
"""Query rows of each window, one key in each."""


@dataclass(frozen=True)
class ProcessorJacobian:
    """Of one layer's processor, over the places looked at; the identity of S + B is subtracted."""

    layer: int
    reads: str
    """`score` or `bias`."""
    mean: Tensor
    """float64 [H out, H in, 2·reach + 1], from δ = −reach on."""
    rms: Tensor
    """The same of squares: sqrt(mean(tap²))."""
    elsewhere: float
    """Share of all squared derivatives that lies further than REACH away."""

    @property
    def reach(self) -> int:
        return self.mean.shape[-1] // 2


def measure_processor_jacobian(model: GPT, windows: Sequence[np.ndarray], seed: int = 0) -> list[ProcessorJacobian]:
    """The taps of every layer that has a processor, over windows of tokens [L] with L > 2·REACH + 1.

    Args:
        model: in evaluation mode.
        seed: of the draw of keys.
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[tuple[int, str], list[tuple[Tensor, float]]] = {}

    def see(layer: int, rows: AttentionInputs) -> None:
        if rows.processor is None:
            return
        for name, taps in _differentiate_rows(rows, generator).items():
            found.setdefault((layer, name), []).append(taps)

    if any(attention.processor is not None for attention in list_attention_layers(model)):
        for window in windows:
            run_forward(model, window, see)
    return [_summarize_jacobian(layer, name, parts) for (layer, name), parts in found.items()]


def _summarize_jacobian(layer: int, name: str, parts: list[tuple[Tensor, float]]) -> ProcessorJacobian:
    samples = torch.cat([near for near, _ in parts])  # [samples, H out, H in, 2·REACH + 1]
    squares = samples.square().sum().item()
    elsewhere = sum(far for _, far in parts)
    used = samples.abs().amax(dim=(0, 1, 2)) > 0
    reach = max((abs(int(place) - REACH) for place in used.nonzero()), default=0)
    heads = samples.shape[1]
    identity = torch.zeros_like(samples[0])
    identity[torch.arange(heads), torch.arange(heads), REACH] = 1
    samples = (samples - identity)[..., REACH - reach : REACH + reach + 1]
    rms = samples.square().mean(0).sqrt()
    return ProcessorJacobian(layer, name, samples.mean(0), rms, elsewhere / (squares + elsewhere) if elsewhere else 0.0)


def _differentiate_rows(rows: AttentionInputs, generator: torch.Generator) -> dict[str, tuple[Tensor, float]]:
    """Of some rows and one key of each: derivatives near the key [rows, H, H, 2·REACH + 1], and the squares of all
    others; by what they are taken for."""
    first, last = 2 * REACH, rows.query.stop - 1
    if rows.window is not None and rows.window <= 2 * REACH:
        raise ValueError(f"a window of {rows.window} keys hides what lies {REACH} keys to either side")
    places = torch.linspace((first + last) // 2, last, ROWS).long().unique().tolist()
    keys = []
    for place in places:
        least = 0 if rows.window is None else max(place - rows.window + 1, 0)
        keys.append(int(torch.randint(least + REACH, place - REACH + 1, (1,), generator=generator)))
    gradients = _compute_derivatives(rows, places, keys)
    return {name: _gather_near(gradient, keys) for name, gradient in gradients.items()}


@torch.enable_grad()
def _compute_derivatives(rows: AttentionInputs, places: Sequence[int], keys: Sequence[int]) -> dict[str, Tensor]:
    """Of each head's logit at a row's key by all scores and biases of the row, [H in, rows, H out, C]."""
    assert rows.processor is not None
    heads = rows.q.shape[1]
    # A copy of each row for each head whose logit is differentiated.
    scores, bias, visible = (
        None if x is None else x.repeat_interleave(heads, 1) for x in _processor_reads(rows, places)
    )
    assert scores is not None
    assert visible is not None
    inputs = {"score": scores[None].requires_grad_()}
    if bias is not None:
        inputs["bias"] = bias.requires_grad_()
    logits = rows.processor(inputs["score"], bias, visible[None])
    copies = torch.arange(len(places) * heads, device=scores.device)
    at = torch.tensor(keys, device=scores.device).repeat_interleave(heads)
    total = logits[0, copies % heads, copies, at].sum()
    gradients = torch.autograd.grad(total, list(inputs.values()))
    return {
        name: gradient.reshape(heads, len(places), heads, -1).double().cpu()
        for name, gradient in zip(inputs, gradients, strict=True)
    }


@torch.no_grad()
def _processor_reads(rows: AttentionInputs, places: Sequence[int]) -> tuple[Tensor, Tensor | None, Tensor]:
    """What it reads of the rows at some places: scores [H, rows, C], biases like them, and who is seen [1, rows, C]."""
    rows = replace(rows, table=compute_table(rows.encoding, rows.query, rows.key, rows.q.device))
    scores, biases, visible = [], [], []
    for place in places:
        at = place - rows.query.start
        row = replace(rows, q=rows.q[:, :, at : at + 1], query=replace(rows.query, start=place, length=1))
        score, bias = compute_scores_and_bias(row)
        scores.append(score[0])
        if bias is not None:
            biases.append(bias)
        visible.append(compute_visibility(row)[0])
    return torch.cat(scores, 1), torch.cat(biases, 1) if biases else None, torch.cat(visible, 1)


def _gather_near(gradient: Tensor, keys: Sequence[int]) -> tuple[Tensor, float]:
    """Of gradients [H in, rows, H out, C] those around each row's key, [rows, H out, H in, 2·REACH + 1]; and the sum of
    the squares of all others."""
    near = torch.stack(
        [gradient[:, row, :, key - REACH : key + REACH + 1].transpose(0, 1) for row, key in enumerate(keys)]
    )
    return near, max(0.0, (gradient.square().sum() - near.square().sum()).item())
