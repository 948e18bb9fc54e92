"""Which tokens are scored, with how much context: the two protocols, as plain arithmetic on positions of a stream.

A *window* of length L is L input tokens x[s … s+L−1]; the model predicts each one's successor, so its L targets are
x[s+1 … s+L]. A protocol chooses the starts s and how many targets at the end of each window are scored. Both keep one
promise that a curve over lengths stands on: **every length is scored on the same target tokens**, so the lengths
differ in nothing but context.

`last`
    The last n targets of each window (n = the training length unless said otherwise). The ends of the windows are the
    same for every length: a longer window begins earlier. At L = n there is nothing before the scored part, as in
    training; at 32 n the same tokens are predicted with 31 n more of context. This isolates what context does.

`nonoverlapping`
    KERPLE's evaluation (section 5.2): a span of the stream is cut into pieces of L and all L targets of each piece are
    scored. The span is a multiple of every length. Targets early in a piece have little context, so a longer
    L helps by itself; a model that extrapolates shows a falling curve.

    last, n = 2                              nonoverlapping
    L=2            ··········[ab]            [··][··][··][··]
    L=4            ········[··ab]            [····][····]
    L=8            ····[······ab]            [········]

The stream is a split's documents in order, each with its end-of-document token: windows may cross documents, as
training sequences do. Neither protocol depends on chance, so two runs are always scored on the same tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from megatron.errors import UserError
from megatron.evaluation.lengths import wanted_lengths
from megatron.evaluation.options import EvaluationOptions, Protocol

PROTOCOLS: tuple[str, ...] = get_args(Protocol)

DEFAULT_WINDOWS = 64
"""Windows of `last` when none are asked for: a standard error of about 2% in perplexity on text of code or prose."""


@dataclass(frozen=True)
class Plan:
    """What to score.

    A block is the piece of text behind one sample of the mean: a window's targets in `last`, in `nonoverlapping` a
    piece of the span that is a whole number of windows at every length.
    """

    protocol: str
    lengths: tuple[int, ...]
    blocks: int
    targets: int  # targets per block
    starts: dict[int, np.ndarray]  # length → first input token of each window, int64 [windows]
    scored: dict[int, int]  # length → targets scored at the end of each window

    def windows(self, length: int) -> int:
        """Windows of that length."""
        return len(self.starts[length])

    def target_positions(self, length: int) -> np.ndarray:
        """Positions in the stream of the scored targets, int64 [blocks, targets]; the same for every length."""
        ends = self.starts[length][:, None] + length
        return (ends + np.arange(1 - self.scored[length], 1)).reshape(self.blocks, self.targets)


def default_targets(train_length: int, lengths: Sequence[int], protocol: str) -> int:
    """Targets per window of `last`: the training length, or the shortest length if that is shorter."""
    return min(train_length, min(lengths, default=train_length)) if protocol == "last" else 1


def plan_of(options: EvaluationOptions, train_lengths: Sequence[int], stream_length: int) -> Plan:
    """The plan that options ask for.

    Args:
        options: lengths, protocol, windows and targets.
        train_lengths: training lengths of the models that are scored by it.
        stream_length: tokens in the stream.

    Raises:
        UserError: as `wanted_lengths` and `make_plan`.
    """
    lengths = wanted_lengths(options, train_lengths)
    targets = options.targets
    if targets is None:
        targets = default_targets(min(train_lengths), lengths, options.protocol)
    return make_plan(stream_length, lengths, options.protocol, targets=targets, windows=options.windows)


def make_plan(
    stream_length: int,
    lengths: Sequence[int],
    protocol: str = "last",
    *,
    targets: int,
    windows: int | None = None,
) -> Plan:
    """Choose the windows of every length.

    Args:
        stream_length: tokens in the stream.
        lengths: window lengths, in tokens; sorted and freed of repetitions here.
        protocol: `last` or `nonoverlapping`.
        targets: tokens scored at the end of each window of `last`; `nonoverlapping` scores all and ignores it.
        windows: windows per length in `last` (64, or as many as fit, if None); in `nonoverlapping` the windows of the
            largest length (all that fit if None).

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
        return _last(stream_length, lengths, targets, windows)
    return _nonoverlapping(stream_length, lengths, windows)


def _last(stream_length: int, lengths: tuple[int, ...], targets: int, windows: int | None) -> Plan:
    if targets < 1:
        raise UserError(f"targets = {targets}: at least 1 is needed")
    if lengths[0] < targets:
        raise UserError(
            f"lengths: {lengths[0]} is shorter than the {targets} targets scored at the end of each window; "
            f"use lengths of at least {targets}, or fewer targets"
        )
    # Ends e: inputs x[e−L … e−1], targets x[e−n+1 … e].
    first, final = lengths[-1], stream_length - 1
    most = (final - first) // targets + 1  # more would score some token twice
    if windows is not None and windows > most:
        raise UserError(
            f"windows = {windows}: the text to score has {stream_length:,} tokens, enough for {most} windows of "
            f"{targets} targets at length {lengths[-1]:,}; use fewer windows, fewer targets or shorter lengths"
        )
    count = windows if windows is not None else min(DEFAULT_WINDOWS, most)
    # Spread over the whole stream; integer arithmetic, so every machine chooses the same tokens.
    ends = first + np.arange(count, dtype=np.int64) * (final - first) // max(count - 1, 1)
    return Plan(
        protocol="last",
        lengths=lengths,
        blocks=count,
        targets=targets,
        starts={length: ends - length for length in lengths},
        scored=dict.fromkeys(lengths, targets),
    )


def _nonoverlapping(stream_length: int, lengths: tuple[int, ...], windows: int | None) -> Plan:
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
    return Plan(
        protocol="nonoverlapping",
        lengths=lengths,
        blocks=blocks,
        targets=block,
        starts={length: np.arange(0, blocks * block, length, dtype=np.int64) for length in lengths},
        scored={length: length for length in lengths},
    )
