"""Panels of the pictures of position methods, computed from the methods' own hooks.

The module names no method, so a new file in `megatron/position/` gets pictures automatically. Each hook has its own
panels. A method without hooks shows the effect of the causal mask alone.

H heads, d head dimension, T sequence, N distances, R query rows, C key columns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from megatron.attention.inputs import AttentionInputs
from megatron.attention.reference import compute_attention, compute_dense_terms, compute_row_terms
from megatron.position import registry
from megatron.position.encoding import Encoding
from megatron.position.facts import AttentionDims
from megatron.position.processor import Processor
from megatron.position.temperature import Temperature
from megatron.position.token_range import ALL_HEADS, TokenRange, build_causal_mask

SHAPE = AttentionDims(num_heads=12, head_dim=64, hidden_size=768, train_length=512, max_length=512)
"""Dimensions of the 125M model."""
SEED = 0
MAX_DISTANCE = 2048
"""Largest distance of curves, four times the training length."""
MAX_ROW = 32 * SHAPE.train_length
"""Last row of temperature curves."""
MAP_SIZE = 2 * SHAPE.train_length
"""Rows and columns of a map."""
PROCESSOR_MAP_SIZE = 64
"""Rows and columns of a processor's map."""
CURVE_HEADS = (0, 3, 7, 11)
MAP_HEADS = (0, 7)
BASE_ENCODING = "kerple_log"
"""Encoding below a processor: the one used by DAPE V2."""
EXAMPLE_TENSOR = torch.zeros(())


@dataclass(frozen=True)
class CurvePanel:
    """Panel of lines over the distance n, or over the quantity of `x_label`."""

    title: str
    lines: dict[str, Tensor]
    """Values [N] at 0, 1, …, N − 1, by label."""
    x_label: str = "distance n"
    clips_low_values: bool = False
    """True if low values may be clipped, as for a bias whose exponential is negligible there."""
    logarithmic: bool = True

    @property
    def max_x(self) -> int:
        """Largest x value of any line."""
        return max(len(values) for values in self.lines.values()) - 1


@dataclass(frozen=True)
class MapPanel:
    """Panel that shows a matrix as colors."""

    title: str
    values: Tensor
    """Values [R, C], NaN where nothing is shown."""
    scale: Literal["decades", "signed"]
    """Color scale: logarithmic for factors that span more than a decade, or linear with zero in the middle."""
    y_label: str = "query i"
    x_label: str = "key j"
    first: tuple[int, int] = (0, 0)
    """Indices of the first row and the first column."""


Panel = CurvePanel | MapPanel


def build_seeded(build: Callable[[], Encoding | Processor]) -> Encoding | Processor:
    """Build with fixed start values, without changing torch's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return build()


def build_encoding(name: str, shape: AttentionDims = SHAPE) -> Encoding:
    """Build an encoding with its start values."""
    return build_seeded(lambda: registry.build_encoding(name, shape))


def build_processor(name: str, shape: AttentionDims = SHAPE, *, has_bias: bool = True) -> Processor:
    """Build a processor with its start values."""
    return build_seeded(lambda: registry.build_processor(name, shape, has_bias=has_bias))


@torch.no_grad()
def build_drawn_processor(name: str, *, has_bias: bool = True) -> tuple[Processor, str]:
    """Build a processor for drawing, and return a note for the reader.

    Processors that start as the identity get random parameters.
    """
    processor = build_processor(name, has_bias=has_bias)
    zero = [parameter for parameter in processor.parameters() if not parameter.any()]
    generator = torch.Generator().manual_seed(SEED)
    for parameter in zero:
        parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return processor, "It starts as the identity; the pictures use parameters from N(0, 0.2²) instead." if zero else ""


@torch.no_grad()
def build_encoding_panels(encoding: Encoding) -> tuple[list[Panel], str]:
    """Return the panels of an encoding, and a note for the reader (may be empty)."""
    method = type(encoding)
    panels: list[Panel] = []
    note = ""
    if method.overrides_hook("embed"):
        panels += _build_embed_panels(encoding)
    if method.overrides_hook("rotate"):
        panels += _build_rotate_panels(encoding)
    if method.overrides_hook("table") or method.overrides_hook("dense"):
        panels += _build_term_panels(encoding)
    if method.overrides_hook("contextual"):
        note = _randomize_zero_terms(encoding)
        panels += _build_contextual_panels(encoding)
    if method.overrides_hook("gate"):
        panels += _build_gate_panels(encoding)
    return panels or _build_mask_panels(encoding), note


def _choose_length(encoding: Encoding, wanted: int) -> int:
    return min(wanted, encoding.max_length or wanted)


def _list_last_rows(encoding: Encoding) -> tuple[int, ...]:
    """List the query rows to draw: the last row of training and the last row overall."""
    return tuple(sorted({_choose_length(encoding, SHAPE.train_length) - 1, _choose_length(encoding, MAX_DISTANCE) - 1}))


def _mask_future(square: Tensor) -> Tensor:
    """Set a square [T, T] to NaN where the key is in the future."""
    size = square.shape[-1]
    return square.float().masked_fill(~build_causal_mask(TokenRange(0, size), TokenRange(0, size)), float("nan"))


def _split_heads(values: Tensor, heads: tuple[int, ...]) -> dict[str, Tensor]:
    """Return values [H, …] of some heads by label; one entry if all heads are equal within float32 rounding."""
    if all(torch.allclose(own, values[0], rtol=1e-6, atol=1e-6) for own in values[1:]):  # most heads differ at once
        return {"every head": values[0]}
    return {f"head {head + 1}": values[head] for head in heads}


def _build_embed_panels(encoding: Encoding) -> list[Panel]:
    """Build the panel of cosine similarities between added vectors.

    They are near 1 for similar positions and near 0 for unrelated ones.
    """
    vectors = encoding.embed(TokenRange(0, _choose_length(encoding, MAX_DISTANCE)), EXAMPLE_TENSOR)
    unit = vectors / vectors.norm(dim=-1, keepdim=True)
    lines = {f"from i = {row:,}": (unit[: row + 1] @ unit[row]).flip(0) for row in _list_last_rows(encoding)}
    square = unit[:MAP_SIZE] @ unit[:MAP_SIZE].T
    return [
        CurvePanel("cosine of p(i) and p(i − n)", lines),
        MapPanel("cosine of p(i) and p(j)", _mask_future(square), "signed"),
    ]


def _build_rotate_panels(encoding: Encoding) -> list[Panel]:
    """Build panels of rotated queries and keys that were all (1, …, 1), so that only positions matter."""
    ones = torch.ones(1, SHAPE.num_heads, MAX_DISTANCE, SHAPE.head_dim)

    def product(query: TokenRange, key: TokenRange) -> Tensor:
        q = encoding.rotate(ones[:, :, : query.length], query)[0]
        k = encoding.rotate_keys(ones[:, :, : key.length], key)[0]
        return normalize(q, dim=-1) @ normalize(k, dim=-1).mT

    title = "q·k/|q||k| of equal vectors"
    rows = product(TokenRange(MAX_DISTANCE - 1, 1), TokenRange(0, MAX_DISTANCE))[:, 0].flip(-1)
    squares = _split_heads(product(TokenRange(0, MAP_SIZE), TokenRange(0, MAP_SIZE)), MAP_HEADS)
    maps = [
        MapPanel(title if len(squares) == 1 else f"{title}, {label}", _mask_future(square), "signed")
        for label, square in squares.items()
    ]
    return [CurvePanel(title, _split_heads(rows, MAP_HEADS)), *maps]


def _build_term_panels(encoding: Encoding) -> list[Panel]:
    """Build panels of bias and weight over the distance, and of the factors exp(bias) and weight over (i, j)."""
    toeplitz = type(encoding).overrides_hook("table")
    far = _choose_length(encoding, MAX_DISTANCE)
    rows = (far - 1,) if toeplitz else _list_last_rows(encoding)
    heads = CURVE_HEADS if toeplitz else MAP_HEADS
    side = TokenRange(0, _choose_length(encoding, MAP_SIZE))

    def at(query: TokenRange, key: TokenRange, which: str) -> Tensor | None:
        return getattr(compute_dense_terms(encoding, query, key, EXAMPLE_TENSOR), which)

    panels: list[Panel] = []
    for which, title, factor in (("bias", "exp(bias)", torch.exp), ("weight", "weight", lambda x: x)):
        lines: dict[str, Tensor] = {}
        for row in rows:
            values = at(TokenRange(row, 1), TokenRange(0, row + 1), which)
            if values is not None:
                where = "" if toeplitz else f", i = {row:,}"
                found = _split_heads(values[:, 0].flip(-1), heads)
                lines |= {label + where: line for label, line in found.items()}
        square = at(side, side, which)
        if square is None:
            continue
        panels.append(CurvePanel(f"{which} over distance", lines, clips_low_values=which == "bias"))
        panels += [
            MapPanel(f"{title}, {label}", _mask_future(factor(values)), "decades")
            for label, values in _split_heads(square, MAP_HEADS).items()
        ]
    return panels


def _draw_qk(length: int) -> tuple[Tensor, Tensor]:
    """Return fixed queries and keys [1, H, T, d] ~ N(0, 1)."""
    generator = torch.Generator().manual_seed(SEED)
    q, k = torch.randn(2, 1, SHAPE.num_heads, length, SHAPE.head_dim, generator=generator)
    return q, k


def _compute_contextual_rows(encoding: Encoding, query: TokenRange, heads: slice) -> Tensor:
    """Compute the contextual terms [h, R, C] of rows, for all keys up to the last row."""
    q, k = _draw_qk(MAX_DISTANCE)
    key = TokenRange(0, query.stop)
    q, k = (
        encoding.rotate(q[:, heads, query.start : query.stop], query),
        encoding.rotate_keys(k[:, heads, : key.stop], key),
    )
    scores = q @ k.transpose(-1, -2) * SHAPE.head_dim**-0.5
    terms = encoding.contextual(q, k, scores, query, key, heads)
    return scores.new_zeros(scores.shape)[0] if terms is None else terms[0]


def _randomize_zero_terms(encoding: Encoding) -> str:
    """Randomize parameters if the term is zero at the start, and return a note about it."""
    last = TokenRange(SHAPE.train_length - 1, 1)
    if _compute_contextual_rows(encoding, last, ALL_HEADS).any():
        return ""
    generator = torch.Generator().manual_seed(SEED)
    for parameter in encoding.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return "Its term is zero at the start; the pictures use parameters from N(0, 1) instead."


def _build_contextual_panels(encoding: Encoding) -> list[Panel]:
    """Build panels of the contextual terms for queries and keys from N(0, 1)."""
    far = _choose_length(encoding, MAX_DISTANCE)
    lines = _split_heads(
        _compute_contextual_rows(encoding, TokenRange(far - 1, 1), ALL_HEADS)[:, 0].flip(-1), MAP_HEADS
    )
    side = TokenRange(0, _choose_length(encoding, MAP_SIZE))
    head = MAP_HEADS[0]
    square = _compute_contextual_rows(encoding, side, slice(head, head + 1))[0]
    return [
        CurvePanel(f"contextual term, i = {far - 1:,}", lines),
        MapPanel(f"contextual term, head {head + 1}", _mask_future(square), "signed"),
    ]


def _build_gate_panels(encoding: Encoding) -> list[Panel]:
    """Build panels of the bias accumulated by gates for a layer input from N(0, 1)."""
    x = torch.randn(1, MAX_DISTANCE, SHAPE.hidden_size, generator=torch.Generator().manual_seed(SEED))
    sums = encoding.gate(x, ALL_HEADS)[0].cumsum(-1)  # type: ignore[index]
    head, square = MAP_HEADS[0], sums[:, :MAP_SIZE]
    lines = _split_heads((sums[:, -1:] - sums).flip(-1), CURVE_HEADS)
    factor = (square[head, :, None] - square[head]).exp()
    return [
        CurvePanel(f"bias over distance, i = {MAX_DISTANCE - 1:,}", lines, clips_low_values=True),
        MapPanel(f"exp(bias), head {head + 1}", _mask_future(factor), "decades"),
    ]


def _build_mask_panels(encoding: Encoding) -> list[Panel]:
    """Build the panel of a method without hooks: attention with equal scores."""
    zero = torch.zeros(1, 1, MAX_DISTANCE, SHAPE.head_dim)

    def attention(query: TokenRange, key: TokenRange) -> Tensor:
        q, k = zero[:, :, : query.length], zero[:, :, : key.length]
        one_hot = torch.eye(key.length)[None, None]  # one-hot values return the attention weights
        return compute_attention(AttentionInputs(q, k, one_hot, query, key, encoding))[0, 0]

    lines = {
        f"i = {row:,}": attention(TokenRange(row, 1), TokenRange(0, row + 1))[0].flip(0)
        for row in _list_last_rows(encoding)
    }
    square = attention(TokenRange(0, MAP_SIZE), TokenRange(0, MAP_SIZE))
    return [
        CurvePanel("attention with equal scores", lines),
        MapPanel("attention with equal scores", _mask_future(square), "decades"),
    ]


@torch.no_grad()
def build_processor_panels(name: str) -> tuple[list[Panel], str]:
    """Return panels of a processor's output for random queries and keys, and of its reach.

    They come with a note, which may be empty.
    """
    processor, note = build_drawn_processor(name)
    encoding = build_encoding(BASE_ENCODING)
    q, k = _draw_qk(PROCESSOR_MAP_SIZE)
    side = TokenRange(0, PROCESSOR_MAP_SIZE)
    bias = compute_dense_terms(encoding, side, side, EXAMPLE_TENSOR).bias
    scores = q @ k.transpose(-1, -2) * SHAPE.head_dim**-0.5
    visible = build_causal_mask(side, side)[None, None]
    logits = processor(scores, bias, visible)
    if processor.overrides("row_terms"):
        terms = compute_row_terms(AttentionInputs(q, k, k, side, side, encoding, processor))
        logits = processor.apply_row_sums(logits, terms.cumsum(1) - terms)
    added = (logits - scores - bias)[0]
    head = MAP_HEADS[0]
    lines = {
        f"S + B, head {head + 1}": (scores[0] + bias)[head, -1].flip(0),
        f"processed, head {head + 1}": (scores[0] + bias + added)[head, -1].flip(0),
    }
    panels: list[Panel] = [
        CurvePanel(f"logits of row {PROCESSOR_MAP_SIZE - 1}, random q and k", lines, logarithmic=False),
        MapPanel(f"added term, head {head + 1}", _mask_future(added[head]), "signed"),
    ]
    if not processor.overrides("row_terms"):
        panels.append(_measure_response(build_drawn_processor(name, has_bias=False)[0], head))
    return panels, note


@torch.no_grad()
def build_temperature_panels(temperature: Temperature) -> list[Panel]:
    """Build panels of the temperature factors for the rows of one document.

    Each row sees all earlier keys and its own.
    """
    positions = torch.arange(MAX_ROW, dtype=torch.float32)
    factors = temperature(positions, positions + 1).expand(SHAPE.num_heads, -1)
    return [CurvePanel("factor on the query", _split_heads(factors, CURVE_HEADS), x_label="row i")]


@torch.no_grad()
def _measure_response(processor: Processor, head: int, reach: int = 8) -> MapPanel:
    """Measure the change in all heads when one score of one head rises from 0 to 1.

    There is no bias, and the result excludes that score.
    """
    scores = torch.zeros(2, SHAPE.num_heads, 1, 2 * reach + 1)
    scores[1, head, 0, reach] = 1
    visible = torch.ones(1, 1, 1, 2 * reach + 1, dtype=torch.bool)
    zero, raised = processor(scores, None, visible) - scores
    title = f"added when head {head + 1}'s score at 0 rises by 1"
    return MapPanel(title, (raised - zero)[:, 0], "signed", "head", "key, relative", (1, -reach))


def measure_context(processor: Processor) -> tuple[int, bool]:
    """Return the reach of a key's score, and whether heads affect each other.

    The reach is the largest distance over which the score changes another key's logit.
    """
    response = _measure_response(processor, MAP_HEADS[0])
    changed = response.values.any(0).nonzero().flatten() + response.first[1]
    others = [head for head in range(SHAPE.num_heads) if head != MAP_HEADS[0]]
    return int(changed.abs().max()) if len(changed) else 0, bool(response.values[others].any())
