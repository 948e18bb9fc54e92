"""Which tokens of a text are scored, with how much context: three protocols, as plain arithmetic on positions.

A *window* of length L is L input tokens x[s … s+L−1]; the model predicts each one's successor, so its L targets are
x[s+1 … s+L]. A protocol chooses the starts s and how many targets at the end of each window are scored. All keep one
promise that a curve over lengths stands on: **every length is scored on the same target tokens**, so the lengths
differ in nothing but context.

`last`
    The last n targets of each window (n = the training length unless said otherwise). The ends of the windows are the
    same for every length: a longer window begins earlier. At L = n there is nothing before the scored part, as in
    training; at 32 n the same tokens are predicted with 31 n more of context. This isolates what context does. Several
    n are scored in one pass, and each has a table of its own.

`nonoverlapping`
    KERPLE's evaluation (section 5.2): a span of the stream is cut into pieces of L and all L targets of each piece are
    scored. The span is a multiple of every length. Targets early in a piece have little context, so a longer
    L helps by itself; a model that extrapolates shows a falling curve.

`strided`
    The last s targets of windows that begin s tokens after each other, so that a span of the stream is scored without
    a gap and each target has at least L − s tokens before it. s = 1 encodes a window anew for every token (the sliding
    evaluation of 2307.10156, figure 1). A greater stride is usual for books (Press et al., 2108.12409; the value 256 of
    papers on long contexts is *unchecked*). It costs L / s times as much as `nonoverlapping`.

Brackets hold the L targets of a window: a letter is one that is scored, a dot one that is not. Every line of a column,
which is a length, has the same letters.

           last, n = 2                 nonoverlapping            strided, s = 2: windows 1, 2, 3
    L=2    ······[ab]  ······[cd]      [ab][cd][ef][gh]          ······[ab]  ········[cd]  ··········[ef]
    L=4    ····[··ab]  ····[··cd]      [abcd][efgh]              ····[··ab]  ······[··cd]  ········[··ef]
    L=8    [······ab]  [······cd]      [abcdefgh]                [······ab]  ··[······cd]  ····[······ef]

The stream is a split's documents in order, each with its end-of-document token: windows may cross documents, as
training sequences do. No protocol depends on chance, so two runs are always scored on the same tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from megatron.evaluation.lengths import choose_lengths
from megatron.options.evaluation import PROBES, EvaluationOptions, Protocol
from megatron.utils.errors import UserError

PROTOCOLS: tuple[str, ...] = tuple(each for each in get_args(Protocol) if each not in PROBES)

DEFAULT_WINDOWS = 64
"""Windows of `last` when none are asked for: a standard error of about 2% in perplexity on text of code or prose."""


@dataclass(frozen=True)
class TargetSet:
    """Targets that are the same tokens at each of some lengths: what one table compares.

    A block is the piece of text behind one sample of the mean: a window's targets in `last`; in the others a piece of
    the span that is a whole number of windows at every length.
    """

    lengths: tuple[int, ...]
    blocks: int
    targets: int  # per block
    scored: dict[int, int]  # length → how many targets at the end of each window are among them

    def from_rows(self, rows: np.ndarray, length: int) -> np.ndarray:
        """What belongs to them, [blocks, targets], of rows [windows, at least so many] that say something of the last
        targets of each window."""
        return rows[:, -self.scored[length] :].reshape(self.blocks, self.targets)


@dataclass(frozen=True)
class ScoringPlan:
    """What to score."""

    protocol: str
    starts: dict[int, np.ndarray]  # length → first input token of each window, int64 [windows]
    target_sets: tuple[TargetSet, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Ascending."""
        return tuple(self.starts)

    def select_windows(self, length: int) -> int:
        """Windows of that length."""
        return len(self.starts[length])

    def scored(self, length: int) -> int:
        """Targets at the end of each window of that length that are scored."""
        return max(cut.scored[length] for cut in self.target_sets if length in cut.scored)

    def target_positions(self, cut: TargetSet, length: int) -> np.ndarray:
        """Positions in the stream of a cut's targets, int64 [blocks, targets]; the same for every length."""
        ends = self.starts[length][:, None] + length
        return cut.from_rows(ends + np.arange(1 - cut.scored[length], 1), length)


def choose_default_targets(train_length: int, lengths: Sequence[int]) -> int:
    """Targets per window of `last`: the training length, or the shortest length if that is shorter."""
    return min(train_length, min(lengths, default=train_length))


def plan_from_options(options: EvaluationOptions, train_lengths: Sequence[int], stream_length: int) -> ScoringPlan:
    """The plan that options ask for.

    Args:
        options: lengths, protocol, windows, targets and stride.
        train_lengths: training lengths of the models that are scored by it.
        stream_length: tokens in the stream.

    Raises:
        UserError: as `choose_lengths` and `build_scoring_plan`.
    """
    lengths = choose_lengths(options, train_lengths)
    for name, protocol in (("targets", "last"), ("stride", "strided")):
        if getattr(options, name) is not None and options.protocol != protocol:
            raise UserError(f"{name} is for protocol {protocol}, and this is {options.protocol}; leave it out")
    targets = options.targets or [choose_default_targets(min(train_lengths), lengths)]
    return build_scoring_plan(
        stream_length, lengths, options.protocol, targets=targets, windows=options.windows, stride=options.stride
    )


def build_scoring_plan(
    stream_length: int,
    lengths: Sequence[int],
    protocol: str = "last",
    *,
    targets: Sequence[int] = (),
    windows: int | None = None,
    stride: int | None = None,
) -> ScoringPlan:
    """Choose the windows of every length.

    Args:
        stream_length: tokens in the stream.
        lengths: window lengths, in tokens; sorted and freed of repetitions here.
        protocol: `last`, `nonoverlapping` or `strided`.
        targets: of `last`: tokens scored at the end of each window, one number or several.
        windows: windows per length (in `last` 64, or as many as fit, if None; in `strided` all that fit); in
            `nonoverlapping` the windows of the largest length (all that fit if None).
        stride: of `strided`: tokens scored at the end of each window, and from one window to the next.

    Raises:
        UserError: a protocol or length that is none, a length shorter than the targets, a stream too short.
    """
    if protocol not in PROTOCOLS:
        raise UserError(f"protocol = {protocol!r}: choose one of {', '.join(PROTOCOLS)}")
    if not lengths:
        raise UserError("lengths: none given")
    lengths = tuple(sorted(set(lengths)))
    if lengths[0] < 1:
        raise UserError(f"lengths: {lengths[0]} is not a length; lengths are at least 1 token")
    if windows is not None and windows < 1:
        raise UserError(f"windows = {windows}: at least 1 is needed")
    # One token more than the window, since the last input's successor is a target too.
    if stream_length < lengths[-1] + 1:
        raise UserError(
            f"the text to score has {stream_length:,} tokens, too few for the largest length: {lengths[-1]:,} needs "
            f"{lengths[-1] + 1:,}; use shorter lengths or more text"
        )
    if protocol == "last":
        return _plan_last(stream_length, lengths, tuple(sorted(set(targets))), windows)
    if protocol == "strided":
        return _plan_strided(stream_length, lengths, stride, windows)
    return _plan_nonoverlapping(stream_length, lengths, windows)


def _plan_last(
    stream_length: int, lengths: tuple[int, ...], targets: tuple[int, ...], windows: int | None
) -> ScoringPlan:
    if not targets or targets[0] < 1:
        raise UserError(f"targets = {', '.join(map(str, targets)) or 'none'}: at least 1 is needed")
    for count, length in ((targets[0], lengths[0]), (targets[-1], lengths[-1])):
        if length < count:
            raise UserError(
                f"lengths: {length} is shorter than the {count} targets scored at the end of each window; "
                f"use lengths of at least {count}, or fewer targets"
            )
    first, final, most = _list_target_ends(stream_length, lengths, targets[-1])
    _check_windows(windows, most, stream_length, lengths, targets[-1])
    count = windows if windows is not None else min(DEFAULT_WINDOWS, most)
    # Spread over the whole stream; integer arithmetic, so every machine chooses the same tokens.
    ends = first + np.arange(count, dtype=np.int64) * (final - first) // max(count - 1, 1)
    cuts = []
    for each in targets:
        known = tuple(length for length in lengths if length >= each)
        cuts.append(TargetSet(known, blocks=count, targets=each, scored=dict.fromkeys(known, each)))
    return ScoringPlan("last", {length: ends - length for length in lengths}, tuple(cuts))


def _plan_strided(stream_length: int, lengths: tuple[int, ...], stride: int | None, windows: int | None) -> ScoringPlan:
    if stride is None or stride < 1:
        given = "" if stride is None else f" {stride}"
        raise UserError(f"stride{given}: protocol strided needs it, tokens from one window to the next, at least 1")
    if lengths[0] < stride:
        raise UserError(f"lengths: {lengths[0]} is shorter than the stride of {stride}; tokens would be left out")
    first, _, most = _list_target_ends(stream_length, lengths, stride)
    _check_windows(windows, most, stream_length, lengths, stride)
    count = most if windows is None else windows
    # Targets of neighbouring windows are no independent samples: a block is as long as the largest window.
    together = min(-(-lengths[-1] // stride), count)
    if windows is not None and count % together:
        raise UserError(f"windows = {windows}: with this stride and these lengths they come in groups of {together}")
    count -= count % together
    ends = first + np.arange(count, dtype=np.int64) * stride
    cut = TargetSet(lengths, count // together, together * stride, dict.fromkeys(lengths, stride))
    return ScoringPlan("strided", {length: ends - length for length in lengths}, (cut,))


def _list_target_ends(stream_length: int, lengths: tuple[int, ...], targets: int) -> tuple[int, int, int]:
    """Of windows whose last targets are scored: the first and the last possible end, and how many windows fit."""
    # Ends e: inputs x[e−L … e−1], targets x[e−n+1 … e].
    first, final = lengths[-1], stream_length - 1
    return first, final, (final - first) // targets + 1  # more would score some token twice


def _check_windows(windows: int | None, most: int, stream_length: int, lengths: tuple[int, ...], targets: int) -> None:
    if windows is not None and windows > most:
        raise UserError(
            f"windows = {windows}: the text to score has {stream_length:,} tokens, enough for {most} windows of "
            f"{targets} targets at length {lengths[-1]:,}; use fewer windows, fewer targets or shorter lengths"
        )


def _plan_nonoverlapping(stream_length: int, lengths: tuple[int, ...], windows: int | None) -> ScoringPlan:
    block = math.lcm(*lengths)
    most = (stream_length - 1) // block
    per_block = block // lengths[-1]
    if most == 0:
        raise UserError(
            f"the text to score has {stream_length:,} tokens; nonoverlapping windows of {', '.join(map(str, lengths))} "
            f"share the same targets only over multiples of {block:,}; use lengths that divide each other, or more text"
        )
    if windows is not None and windows > most * per_block:
        raise UserError(
            f"windows = {windows}: the text to score has {stream_length:,} tokens, enough for {most * per_block} "
            f"windows of {lengths[-1]:,}"
        )
    if windows is not None and windows % per_block:
        raise UserError(
            f"windows = {windows}: with these lengths, windows of {lengths[-1]:,} come in groups of {per_block} "
            f"({block:,} tokens, the smallest common multiple)"
        )
    blocks = most if windows is None else windows // per_block
    starts = {length: np.arange(0, blocks * block, length, dtype=np.int64) for length in lengths}
    return ScoringPlan(
        "nonoverlapping", starts, (TargetSet(lengths, blocks, block, {length: length for length in lengths}),)
    )
