"""Protocols: the tokens of a text that are scored, and how much context each has, by arithmetic on positions.

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

`overlapping`
    As `nonoverlapping`, without the targets that have little context: the first c − 1 targets of a window are not
    scored, and the next window begins L − c + 1 tokens later, so that its first scored target follows the last one
    of this window. A target has at least c tokens before it at every length, and everything from the start of its
    window at most. These are the contexts of LongPPL (2410.23771): its short windows hold `trunc_len + sliding_window`
    tokens with their last target, so L = trunc_len + sliding_window − 1 and c = trunc_len, and its long context is the
    text from the start of the largest window. c = 1 is `nonoverlapping`.

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

           overlapping, c = 3: windows 1, 2, 3
    L=4    [··ab]  ··[··cd]  ····[··ef]
    L=8    [··abcdef]

The stream is a split's documents in order, each with its end-of-document token: windows may cross documents, as
training sequences do. No protocol depends on chance, so two runs are always scored on the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import numpy as np

from megatron.evaluation.lengths import choose_lengths, count_flops_by_length
from megatron.options.evaluation import PROBE_PROTOCOLS, EvaluationOptions, Protocol
from megatron.utils.errors import UserError
from megatron.utils.suggestions import format_choices

if TYPE_CHECKING:
    from megatron.model.gpt import GPT

PROTOCOLS: tuple[str, ...] = tuple(name for name in get_args(Protocol) if name not in PROBE_PROTOCOLS)

DEFAULT_WINDOWS = 64
"""Windows of `last` unless said otherwise: a standard error of about 2% in perplexity on text of code or prose."""


@dataclass(frozen=True)
class TargetSet:
    """Targets that are the same tokens at each of some lengths: what one table compares.

    A block is the piece of text behind one sample of the mean: a window's targets in `last`; in the others a piece of
    the span that is a whole number of windows at every length.
    """

    lengths: tuple[int, ...]
    blocks: int
    targets: int  # per block
    num_scored: dict[int, int]  # length → how many targets at the end of each window are among them

    def select_values(self, values: np.ndarray, length: int) -> np.ndarray:
        """The values of these targets, [blocks, targets], among those of the last targets of each window,
        [windows, at least `num_scored[length]`]."""
        return values[:, -self.num_scored[length] :].reshape(self.blocks, self.targets)


@dataclass(frozen=True)
class ScoringPlan:
    """The windows of each length, and which of their targets are scored."""

    protocol: str
    starts: dict[int, np.ndarray]  # length → first input token of each window, int64 [windows]
    target_sets: tuple[TargetSet, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Ascending."""
        return tuple(self.starts)

    def num_windows(self, length: int) -> int:
        """Windows of that length."""
        return len(self.starts[length])

    def num_scored(self, length: int) -> int:
        """Targets at the end of each window of that length that are scored."""
        return max(targets.num_scored[length] for targets in self.target_sets if length in targets.num_scored)

    def target_positions(self, target_set: TargetSet, length: int) -> np.ndarray:
        """Positions in the stream of a set's targets, int64 [blocks, targets]; the same for every length."""
        ends = self.starts[length][:, None] + length
        return target_set.select_values(ends + np.arange(1 - target_set.num_scored[length], 1), length)

    def count_flops(self, model: GPT) -> dict[int, float]:
        """FLOPs of scoring a model at each length that it has positions for. Raises UserError if there is none."""
        return count_flops_by_length(model, {length: self.num_windows(length) for length in self.lengths})


def choose_default_targets(train_length: int, lengths: Sequence[int]) -> int:
    """Targets per window of `last`: the training length, or the shortest length if that is shorter."""
    return min(train_length, min(lengths, default=train_length))


def plan_from_options(options: EvaluationOptions, train_lengths: Sequence[int], stream_length: int) -> ScoringPlan:
    """The plan that options ask for.

    Args:
        options: lengths, protocol, windows, targets, stride and min_context.
        train_lengths: training lengths of the models that are scored by it.
        stream_length: tokens in the stream.

    Raises:
        UserError: as `choose_lengths` and `build_scoring_plan`.
    """
    lengths = choose_lengths(options, train_lengths)
    for name, protocol in (("targets", "last"), ("stride", "strided"), ("min_context", "overlapping")):
        if getattr(options, name) is not None and options.protocol != protocol:
            raise UserError(f"{name} is for protocol {protocol}, and this is {options.protocol}; leave it out")
    targets = options.targets or [choose_default_targets(min(train_lengths), lengths)]
    return build_scoring_plan(
        stream_length,
        lengths,
        options.protocol,
        targets=targets,
        windows=options.windows,
        stride=options.stride,
        min_context=options.min_context,
    )


def build_scoring_plan(
    stream_length: int,
    lengths: Sequence[int],
    protocol: str = "last",
    *,
    targets: Sequence[int] = (),
    windows: int | None = None,
    stride: int | None = None,
    min_context: int | None = None,
) -> ScoringPlan:
    """Choose the windows of every length.

    Args:
        stream_length: tokens in the stream.
        lengths: window lengths, in tokens; sorted and freed of repetitions here.
        protocol: `last`, `nonoverlapping`, `overlapping` or `strided`.
        targets: of `last`: tokens scored at the end of each window, one number or several.
        windows: windows per length (in `last` 64, or as many as fit, if None; in `strided` all that fit); in
            `nonoverlapping` and `overlapping` the windows of the largest length (all that fit if None).
        stride: of `strided`: tokens scored at the end of each window, and from one window to the next.
        min_context: of `overlapping`: tokens before each scored target, at least.

    Raises:
        UserError: a protocol or length that is none, a length shorter than the targets, a stream too short.
    """
    if protocol not in PROTOCOLS:
        raise UserError(f"protocol is {protocol}; {format_choices(protocol, PROTOCOLS)}")
    if not lengths:
        raise UserError("lengths: none given")
    lengths = tuple(sorted(set(lengths)))
    if lengths[0] < 1:
        raise UserError(f"lengths: {lengths[0]} is not a length; lengths are at least 1 token")
    if windows is not None and windows < 1:
        raise UserError(f"windows is {windows}; at least 1 is needed")
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
    if protocol == "overlapping":
        if min_context is None or min_context < 1:
            raise UserError("min_context: protocol overlapping needs it, tokens before each scored token, at least 1")
        if lengths[0] < min_context:
            raise UserError(
                f"lengths: {lengths[0]} is shorter than min_context, {min_context}; no token would be scored"
            )
    return _plan_span(stream_length, lengths, protocol, min_context or 1, windows)


def _plan_last(
    stream_length: int, lengths: tuple[int, ...], targets: tuple[int, ...], windows: int | None
) -> ScoringPlan:
    if not targets or targets[0] < 1:
        raise UserError(f"targets: {', '.join(map(str, targets)) or 'none'}; at least 1 is needed")
    for num_targets, length in ((targets[0], lengths[0]), (targets[-1], lengths[-1])):
        if length < num_targets:
            raise UserError(
                f"lengths: {length} is shorter than the {num_targets} targets scored at the end of each window; "
                f"use lengths of at least {num_targets}, or fewer targets"
            )
    first, last, max_windows = _find_window_ends(stream_length, lengths, targets[-1])
    _check_windows(windows, max_windows, stream_length, lengths, targets[-1])
    count = windows if windows is not None else min(DEFAULT_WINDOWS, max_windows)
    # Spread over the whole stream; integer arithmetic, so every machine chooses the same tokens.
    ends = first + np.arange(count, dtype=np.int64) * (last - first) // max(count - 1, 1)
    target_sets = []
    for num_targets in targets:
        fitting = tuple(length for length in lengths if length >= num_targets)
        num_scored = dict.fromkeys(fitting, num_targets)
        target_sets.append(TargetSet(fitting, blocks=count, targets=num_targets, num_scored=num_scored))
    return ScoringPlan("last", {length: ends - length for length in lengths}, tuple(target_sets))


def _plan_strided(stream_length: int, lengths: tuple[int, ...], stride: int | None, windows: int | None) -> ScoringPlan:
    if stride is None or stride < 1:
        raise UserError("stride: protocol strided needs it, tokens from one window to the next, at least 1")
    if lengths[0] < stride:
        raise UserError(f"lengths: {lengths[0]} is shorter than the stride of {stride}; tokens would be left out")
    first, _, max_windows = _find_window_ends(stream_length, lengths, stride)
    _check_windows(windows, max_windows, stream_length, lengths, stride)
    count = max_windows if windows is None else windows
    # Targets of neighbouring windows are no independent samples: a block is as long as the largest window.
    per_block = min(-(-lengths[-1] // stride), count)
    if windows is not None and count % per_block:
        raise UserError(f"windows is {windows}; with this stride and these lengths they come in groups of {per_block}")
    count -= count % per_block
    ends = first + np.arange(count, dtype=np.int64) * stride
    targets = TargetSet(lengths, count // per_block, per_block * stride, dict.fromkeys(lengths, stride))
    return ScoringPlan("strided", {length: ends - length for length in lengths}, (targets,))


def _find_window_ends(stream_length: int, lengths: tuple[int, ...], targets: int) -> tuple[int, int, int]:
    """Of windows whose last targets are scored: the first and the last possible end, and how many windows fit."""
    # Ends e: inputs x[e−L … e−1], targets x[e−n+1 … e].
    first, last = lengths[-1], stream_length - 1
    return first, last, (last - first) // targets + 1  # more would score some token twice


def _check_windows(
    windows: int | None, max_windows: int, stream_length: int, lengths: tuple[int, ...], targets: int
) -> None:
    if windows is not None and windows > max_windows:
        raise UserError(
            f"windows is {windows}; the text to score has {stream_length:,} tokens, enough for {max_windows} windows "
            f"of {targets} targets at length {lengths[-1]:,}; use fewer windows, fewer targets or shorter lengths"
        )


def _plan_span(
    stream_length: int, lengths: tuple[int, ...], protocol: str, min_context: int, windows: int | None
) -> ScoringPlan:
    """Cover one span of the stream by windows of each length, whose targets with at least `min_context` tokens before
    them are scored; each window begins where its first such target follows the last one of the window before."""
    num_scored = {length: length - min_context + 1 for length in lengths}
    block, longest = math.lcm(*num_scored.values()), num_scored[lengths[-1]]
    max_blocks = (stream_length - min_context) // block
    per_block = block // longest
    if max_blocks == 0:
        divisors = (
            "lengths that divide each other"
            if min_context == 1
            else f"lengths that divide each other once {min_context - 1:,} is subtracted from each"
        )
        raise UserError(
            f"the text to score has {stream_length:,} tokens; {protocol} windows of {', '.join(map(str, lengths))} "
            f"share the same targets only over multiples of {block:,}; use {divisors}, or more text"
        )
    if windows is not None and windows > max_blocks * per_block:
        raise UserError(
            f"windows is {windows}; the text to score has {stream_length:,} tokens, enough for "
            f"{max_blocks * per_block} windows of {lengths[-1]:,}"
        )
    if windows is not None and windows % per_block:
        raise UserError(
            f"windows is {windows}; with these lengths, windows of {lengths[-1]:,} come in groups of {per_block} "
            f"({block:,} tokens, the smallest common multiple)"
        )
    blocks = max_blocks if windows is None else windows // per_block
    starts = {length: np.arange(0, blocks * block, step, dtype=np.int64) for length, step in num_scored.items()}
    return ScoringPlan(protocol, starts, (TargetSet(lengths, blocks, block, num_scored),))
