"""Protocols: which tokens of a text are scored, and with how much context, as arithmetic on positions.

A *window* of length L is L input tokens x[s … s+L−1]. The model predicts the successor of each token, so the L targets
are x[s+1 … s+L]. A protocol chooses the starts s and the number of scored targets at the end of each window. All
protocols guarantee that **every length is scored on the same target tokens**, so that lengths differ only in context.

`last`
    The last n targets of each window (n = the training length by default). Windows of all lengths have the same ends; a
    longer window begins earlier. At L = n there is nothing before the scored tokens, as in training. At 32 n the
    same tokens are predicted with 31 n more tokens of context. This isolates the effect of context. Several values
    of n are scored in one pass, and each has its own table.
`nonoverlapping`
    KERPLE's evaluation (section 5.2): a span of the stream is divided into windows of L tokens, and all L targets of
    each window are scored. The span is a multiple of every length. Targets early in a window have little context,
    so a longer L helps by itself. A model that extrapolates shows a falling curve.
`overlapping`
    As `nonoverlapping`, without the targets that have little context. The first c − 1 targets of a window are not
    scored. The next window begins L − c + 1 tokens later, so that its first scored target follows the last one of
    this window. At every length a target has at least c tokens of context, and at most all tokens from the start of
    its window. These are the contexts of LongPPL (2410.23771). Its short windows have `trunc_len + sliding_window`
    tokens including the last target, so L = trunc_len + sliding_window − 1 and c = trunc_len. Its long context is
    the text from the start of the largest window. c = 1 is `nonoverlapping`.
`strided`
    The last s targets of windows that begin s tokens apart. A span of the stream is scored without gaps: from the
    last s targets of the first window of the largest length on, in whole blocks of that length. Each target has at
    least L − s + 1 tokens of context. s = 1 encodes a new window for every token (the sliding evaluation
    of 2307.10156, figure 1). Larger strides are common for books (Press et al., 2108.12409; the value 256 of
    long-context papers is *unchecked*). It costs L / s times as much as `nonoverlapping`.

Brackets enclose the L targets of a window. A letter is a scored target, a dot is not scored. All lines of a column, one
for each length, have the same letters.

           last, n = 2                 nonoverlapping            strided, s = 2: windows 1, 2, 3
    L=2    ······[ab]  ······[cd]      [ab][cd][ef][gh]          ······[ab]  ········[cd]  ··········[ef]
    L=4    ····[··ab]  ····[··cd]      [abcd][efgh]              ····[··ab]  ······[··cd]  ········[··ef]
    L=8    [······ab]  [······cd]      [abcdefgh]                [······ab]  ··[······cd]  ····[······ef]

           overlapping, c = 3: windows 1, 2, 3
    L=4    [··ab]  ··[··cd]  ····[··ef]
    L=8    [··abcdef]

The stream consists of a split's documents in order, each with its end-of-document token. Windows may cross documents,
as training sequences do. No protocol is random, so two runs are always scored on the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import numpy as np

from megatron.evaluation.eval_target import choose_lengths, count_flops_by_length
from megatron.options.evaluation import PROBE_PROTOCOLS, EvaluationOptions, Protocol
from megatron.utils.errors import UserError
from megatron.utils.formatting import format_choices, format_quantity

if TYPE_CHECKING:
    from megatron.model.gpt import GPT

PROTOCOLS: tuple[str, ...] = tuple(name for name in get_args(Protocol) if name not in PROBE_PROTOCOLS)

DEFAULT_WINDOWS = 64
"""Default number of windows of `last`. It gives a standard error of about 2% in perplexity on code or prose."""


@dataclass(frozen=True)
class TargetSet:
    """Set of targets that several lengths share. Each target set has its own table.

    A block is the text behind one sample of the mean. In `last` it is the targets of a window. In other protocols it is
    part of the span, a whole number of windows at every length.
    """

    lengths: tuple[int, ...]
    blocks: int
    targets: int  # per block
    num_scored: dict[int, int]  # length → number of this set's targets at the end of each window

    def select_values(self, values: np.ndarray, length: int) -> np.ndarray:
        """Select the values of these targets, [blocks, targets].

        Args:
            values: values of the last targets of each window, [windows, at least `num_scored[length]`].
        """
        return values[:, -self.num_scored[length] :].reshape(self.blocks, self.targets)


@dataclass(frozen=True)
class ScoringPlan:
    """Windows of each length, and the targets to score."""

    protocol: str
    starts: dict[int, np.ndarray]  # length → first input token of each window, int64 [windows]
    target_sets: tuple[TargetSet, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths, ascending."""
        return tuple(self.starts)

    def count_windows(self, length: int) -> int:
        return len(self.starts[length])

    def count_scored(self, length: int) -> int:
        """Return the number of scored targets at the end of each window of a length."""
        return max(targets.num_scored[length] for targets in self.target_sets if length in targets.num_scored)

    def locate_targets(self, target_set: TargetSet, length: int) -> np.ndarray:
        """Return the stream positions of a target set, int64 [blocks, targets]. They are the same for every length."""
        ends = self.starts[length][:, None] + length
        return target_set.select_values(ends + np.arange(1 - target_set.num_scored[length], 1), length)

    def count_flops(self, model: GPT) -> dict[int, float]:
        """Return the FLOPs of scoring a model, for each length that it supports.

        Raises:
            UserError: the model supports none of the lengths.
        """
        return count_flops_by_length(model, {length: self.count_windows(length) for length in self.lengths})


def choose_default_targets(train_length: int, lengths: Sequence[int]) -> int:
    """Return the default targets per window of `last`: the training length, or the shortest length if smaller."""
    return min(train_length, min(lengths, default=train_length))


def plan_from_options(options: EvaluationOptions, train_lengths: Sequence[int], stream_length: int) -> ScoringPlan:
    """Build the scoring plan that the options request.

    Args:
        options: lengths, protocol, windows, targets, stride, and min_context.
        train_lengths: training lengths of the models to score.
        stream_length: number of tokens in the stream.

    Raises:
        UserError: as for `choose_lengths` and `build_scoring_plan`.
    """
    lengths = choose_lengths(options, train_lengths)
    for name, protocol in (("targets", "last"), ("stride", "strided"), ("min_context", "overlapping")):
        if getattr(options, name) is not None and options.protocol != protocol:
            raise UserError(f"{name}: only for protocol {protocol}, not {options.protocol}; omit it")
    targets = options.targets or [choose_default_targets(min(train_lengths), lengths)]
    return build_scoring_plan(
        stream_length,
        lengths,
        options.protocol,
        targets=targets,
        windows=options.num_windows,
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
        stream_length: number of tokens in the stream.
        lengths: window lengths in tokens, in any order; duplicates are removed.
        protocol: `last`, `nonoverlapping`, `overlapping`, or `strided`.
        targets: for `last`: one or more numbers of tokens scored at the end of each window.
        windows: number of windows per length; in `nonoverlapping` and `overlapping`, of the largest length. If None, 64
            or as many as fit in `last`, and all that fit in other protocols.
        stride: for `strided`: tokens scored at the end of each window, and distance between windows.
        min_context: for `overlapping`: minimum number of tokens before each scored target.

    Raises:
        UserError: an unknown protocol, an invalid length, a length shorter than the targets, or a stream too short.
    """
    if protocol not in PROTOCOLS:
        raise UserError(f"unknown protocol {protocol}; {format_choices(protocol, PROTOCOLS)}")
    if not lengths:
        raise UserError("lengths: give at least one")
    lengths = tuple(sorted(set(lengths)))
    if lengths[0] < 1:
        raise UserError(f"lengths: {lengths[0]} is not valid; it must be at least 1 token")
    if windows is not None and windows < 1:
        raise UserError(f"num_windows is {windows}; it must be at least 1")
    # One token more than the window, because the successor of the last input is a target too.
    if stream_length < lengths[-1] + 1:
        raise UserError(
            f"the text to score has {format_quantity(stream_length, 'token')}, too few for the largest length; "
            f"{lengths[-1]:,} needs {lengths[-1] + 1:,}; use shorter lengths or more text"
        )
    if protocol == "last":
        return _plan_last(stream_length, lengths, tuple(sorted(set(targets))), windows)
    if protocol == "strided":
        return _plan_strided(stream_length, lengths, stride, windows)
    if protocol == "overlapping":
        if min_context is None or min_context < 1:
            raise UserError(
                "min_context: protocol overlapping needs the number of tokens before each scored token, at least 1"
            )
        if lengths[0] < min_context:
            raise UserError(
                f"lengths: {lengths[0]} is shorter than min_context, {min_context}; no token would be scored"
            )
    return _plan_span(stream_length, lengths, protocol, min_context or 1, windows)


def _plan_last(
    stream_length: int, lengths: tuple[int, ...], targets: tuple[int, ...], windows: int | None
) -> ScoringPlan:
    if not targets or targets[0] < 1:
        raise UserError(f"targets: {', '.join(map(str, targets)) or 'none'}; it must be at least 1")
    for num_targets, length in ((targets[0], lengths[0]), (targets[-1], lengths[-1])):
        if length < num_targets:
            raise UserError(
                f"lengths: {length} is shorter than the {num_targets} targets scored at the end of each window; "
                f"use lengths of at least {num_targets}, or fewer targets"
            )
    first, last, max_windows = _find_window_ends(stream_length, lengths, targets[-1])
    _check_windows(windows, max_windows, stream_length, lengths, targets[-1])
    count = windows if windows is not None else min(DEFAULT_WINDOWS, max_windows)
    # Spread over the whole stream. Integer arithmetic selects the same tokens on every machine.
    ends = first + np.arange(count, dtype=np.int64) * (last - first) // max(count - 1, 1)
    target_sets = []
    for num_targets in targets:
        fitting = tuple(length for length in lengths if length >= num_targets)
        num_scored = dict.fromkeys(fitting, num_targets)
        target_sets.append(TargetSet(fitting, blocks=count, targets=num_targets, num_scored=num_scored))
    return ScoringPlan("last", {length: ends - length for length in lengths}, tuple(target_sets))


def _plan_strided(stream_length: int, lengths: tuple[int, ...], stride: int | None, windows: int | None) -> ScoringPlan:
    if stride is None or stride < 1:
        raise UserError("stride: protocol strided needs the number of tokens between windows, at least 1")
    if lengths[0] < stride:
        raise UserError(f"lengths: {lengths[0]} is shorter than the stride, {stride}; tokens would be skipped")
    first, _, max_windows = _find_window_ends(stream_length, lengths, stride)
    _check_windows(windows, max_windows, stream_length, lengths, stride)
    count = max_windows if windows is None else windows
    # Neighboring windows are not independent samples, so a block is as long as the largest window.
    per_block = min(-(-lengths[-1] // stride), count)
    if windows is not None and count % per_block:
        raise UserError(
            f"num_windows is {windows}; it must be a multiple of {per_block} for this stride and these lengths"
        )
    count -= count % per_block
    ends = first + np.arange(count, dtype=np.int64) * stride
    targets = TargetSet(lengths, count // per_block, per_block * stride, dict.fromkeys(lengths, stride))
    return ScoringPlan("strided", {length: ends - length for length in lengths}, (targets,))


def _find_window_ends(stream_length: int, lengths: tuple[int, ...], targets: int) -> tuple[int, int, int]:
    """Return the first and the last possible window end, and the number of windows that fit."""
    # For an end e: inputs x[e−L … e−1], targets x[e−n+1 … e].
    first, last = lengths[-1], stream_length - 1
    return first, last, (last - first) // targets + 1  # more windows would score a token twice


def _check_windows(
    windows: int | None, max_windows: int, stream_length: int, lengths: tuple[int, ...], targets: int
) -> None:
    if windows is not None and windows > max_windows:
        raise UserError(
            f"num_windows is {windows}, but the text to score has {format_quantity(stream_length, 'token')}, enough "
            f"for {format_quantity(max_windows, 'window')} of {format_quantity(targets, 'target')} at length "
            f"{lengths[-1]:,}; use fewer windows, fewer targets, or shorter lengths"
        )


def _plan_span(
    stream_length: int, lengths: tuple[int, ...], protocol: str, min_context: int, windows: int | None
) -> ScoringPlan:
    """Cover one span of the stream with windows of each length.

    Targets with at least `min_context` tokens before them are scored. The first such target of each window follows the
    last one of the previous window.
    """
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
            f"num_windows is {windows}, but the text to score has {format_quantity(stream_length, 'token')}, enough "
            f"for {format_quantity(max_blocks * per_block, 'window')} of {lengths[-1]:,}"
        )
    if windows is not None and windows % per_block:
        raise UserError(
            f"num_windows is {windows}; with these lengths, windows of {lengths[-1]:,} need a multiple of {per_block} "
            f"({block:,} tokens, the smallest common multiple)"
        )
    blocks = max_blocks if windows is None else windows // per_block
    starts = {length: np.arange(0, blocks * block, step, dtype=np.int64) for length, step in num_scored.items()}
    return ScoringPlan(protocol, starts, (TargetSet(lengths, blocks, block, num_scored),))
