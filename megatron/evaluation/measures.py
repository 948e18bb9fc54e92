"""What is told of a model's losses: each measure turns the losses of a plan's targets into records.

    perplexity         exp of the mean loss at each length, and its ratio to that at the shortest
    delta_perplexity   ΔP(L) = P(T) − P(L), the same T targets at the end of each window with and without the context
                       before them (2410.04798, appendix A), and log P(T) − log P(L), which compares across corpora
    position           perplexity by the place of the target in its window (KERPLE, 2205.09921, section 5.5), in bins
                       that end at the training length and at its doubles and halves

Blocks of text are the independent samples of every interval (`megatron.reports.bootstrap`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron.errors import UserError
from megatron.evaluation.options import EvaluationOptions
from megatron.evaluation.protocols import Cut, Plan
from megatron.reports.bootstrap import quantiles, resampled
from megatron.reports.records import Record

LARGEST_NLL = 700.0
"""Nats per token that still have a perplexity: exp overflows at 709."""

MOST_BLOCKS = 4096
"""Records keep the sums of their blocks up to so many."""


class Summary(NamedTuple):
    """The mean over all scored targets."""

    nll: float  # nats per token
    stderr: float | None  # of nll over blocks; None for one block
    tokens: int  # targets counted


@dataclass(frozen=True)
class Targets:
    """The tokens that a cut of a plan scores: the same at every length."""

    counted: np.ndarray
    """Which of them count, bool [blocks, targets]."""
    bytes: int
    """How many of them stand for a byte of text; 0 if tokens are not bytes."""
    digest: str
    """Equal digests, equal targets."""


class Scored(NamedTuple):
    """One length of a cut, scored."""

    length: int
    losses: np.ndarray  # nats, float64 [blocks, targets]
    about: Mapping[str, Any]  # fields of records: what the scoring took


def summarize(losses: np.ndarray, counted: np.ndarray | None = None) -> Summary:
    """Mean and standard error of losses [blocks, targets].

    The standard error treats blocks as the independent samples: neighbouring tokens share their context and their
    subject, blocks far apart do not. With unequal counts per block it is that of a ratio estimate.

    Args:
        losses: float64 [blocks, targets].
        counted: bool [blocks, targets], False for targets to leave out; all count if None.
    """
    counted = np.ones(losses.shape, dtype=bool) if counted is None else counted
    sums, counts = np.where(counted, losses, 0.0).sum(axis=1), counted.sum(axis=1)
    tokens, blocks = int(counts.sum()), len(losses)
    nll = float(sums.sum() / tokens)
    if blocks < 2:
        return Summary(nll, None, tokens)
    residuals = sums - nll * counts
    return Summary(nll, math.sqrt(blocks / (blocks - 1) * float((residuals**2).sum())) / tokens, tokens)


def check_measures(options: EvaluationOptions, plan: Plan) -> None:
    """Refuse measures that a plan has no losses for. Raises UserError."""
    wanted = options.measures or []
    if "position" in wanted and plan.protocol != "nonoverlapping":
        raise UserError("measures: position needs every token of a window scored: protocol nonoverlapping")
    if "delta_perplexity" in wanted:
        if plan.protocol != "last":
            raise UserError("measures: delta_perplexity needs protocol last: the same targets, with more before them")
        for cut in plan.cuts:
            if cut.lengths[0] != cut.targets or len(cut.lengths) < 2:
                raise UserError(
                    f"measures: delta_perplexity of the last {cut.targets} tokens compares longer contexts with those "
                    f"tokens alone: give length {cut.targets} and a longer one"
                )


class Sheet:
    """All that is told of one cut of a plan: it is handed the losses of one length after the other.

    Args:
        plan: what is scored.
        cut: which targets of it.
        targets: those tokens.
        train_length: of the model.
        measures: what is to be told.
        about: fields that are the same for all records.
    """

    def __init__(
        self,
        plan: Plan,
        cut: Cut,
        targets: Targets,
        train_length: int,
        measures: Sequence[str],
        about: Mapping[str, Any],
    ) -> None:
        self.plan, self.cut, self.targets, self.train_length, self.measures = plan, cut, targets, train_length, measures
        self.about = {"protocol": plan.protocol, "blocks": cut.blocks, "target_digest": targets.digest, **about}
        self.counts = targets.counted.sum(axis=1)
        self.summaries: list[Summary] = []
        self.sums: list[np.ndarray] = []
        self.scored: list[tuple[int, Mapping[str, Any]]] = []
        self.by_position: list[Record] = []

    def add(self, scored: Scored) -> Summary:
        """Take the losses of the next length, which are not kept."""
        summary = summarize(scored.losses, self.targets.counted)
        self.summaries.append(summary)
        self.sums.append(np.where(self.targets.counted, scored.losses, 0.0).sum(axis=1))
        about = {
            **scored.about,
            "length": scored.length,
            "targets": self.cut.scored[scored.length],
            "windows": self.plan.windows(scored.length),
        }
        self.scored.append((scored.length, about))
        if "position" in self.measures:
            self.by_position += self._by_position(scored, about)
        return summary

    def records(self) -> list[Record]:
        """What is told, in the order of the measures that were asked for."""
        draws = resampled(np.stack(self.sums), self.counts)
        told: dict[str, Callable[[], list[Record]]] = {
            "perplexity": lambda: list(self._perplexity(draws)),
            "delta_perplexity": lambda: list(self._gains(draws)),
            "position": lambda: self.by_position,
        }
        return [record for measure in self.measures for record in told[measure]()]

    def _perplexity(self, draws: np.ndarray | None) -> Iterator[Record]:
        first = self.summaries[0]
        kept: dict[str, Any] = {}
        if 2 <= self.cut.blocks <= MOST_BLOCKS and len(set(self.counts.tolist())) > 1:
            kept["block_tokens"] = self.counts.tolist()
        for row, (summary, sums, (_, about)) in enumerate(zip(self.summaries, self.sums, self.scored, strict=True)):
            uncertain: dict[str, Any] = dict(kept)
            if 2 <= self.cut.blocks <= MOST_BLOCKS:
                uncertain["block_sums"] = [round(float(each), 6) for each in sums]
            if draws is not None:
                uncertain |= _interval("", map(exp, quantiles(draws[row])))
            if row > 0:
                uncertain |= {"change": exp(summary.nll - first.nll), "change_from": self.scored[0][0]}
                if draws is not None:
                    uncertain |= _interval("change_", map(exp, quantiles(draws[row] - draws[0])))
            yield Record(
                **self.about,
                **about,
                metric="perplexity",
                value=math.exp(summary.nll),
                tokens=summary.tokens,
                nll=summary.nll,
                stderr=summary.stderr,
                bits_per_byte=self._bits(summary),
                **uncertain,
            )

    def _gains(self, draws: np.ndarray | None) -> Iterator[Record]:
        """ΔP and the log-ratio, at every length but the first."""
        first = self.summaries[0]
        for row, (summary, (_, about)) in enumerate(zip(self.summaries, self.scored, strict=True)):
            if row == 0:
                continue
            shared = {**self.about, **about, "tokens": summary.tokens}
            found = {
                "delta_perplexity": exp(first.nll) - exp(summary.nll),
                "log_ratio": first.nll - summary.nll,
            }
            for metric, value in found.items():
                uncertain: dict[str, Any] = {}
                if draws is not None:
                    gains = draws[0] - draws[row] if metric == "log_ratio" else np.exp(draws[0]) - np.exp(draws[row])
                    uncertain = _interval("", quantiles(gains))
                yield Record(**shared, metric=metric, value=value, **uncertain)

    def _by_position(self, scored: Scored, about: Mapping[str, Any]) -> Iterator[Record]:
        losses = scored.losses.reshape(self.cut.blocks, -1, scored.length)
        counted = self.targets.counted.reshape(losses.shape)
        ends = position_bins(self.train_length, scored.length)
        parts = [np.s_[:, :, start:end] for start, end in zip([0, *ends], ends, strict=False)]
        draws = resampled(
            np.stack([np.where(counted[part], losses[part], 0.0).sum(axis=(1, 2)) for part in parts]),
            np.stack([counted[part].sum(axis=(1, 2)) for part in parts]),
        )
        for number, (end, part) in enumerate(zip(ends, parts, strict=True)):
            if not counted[part].any():
                continue
            blocks = self.cut.blocks
            summary = summarize(losses[part].reshape(blocks, -1), counted[part].reshape(blocks, -1))
            uncertain: dict[str, Any] = {} if draws is None else _interval("", map(exp, quantiles(draws[number])))
            yield Record(
                **self.about,
                **about,
                axis="position",
                place=float(end),
                metric="perplexity",
                value=exp(summary.nll),
                tokens=summary.tokens,
                nll=summary.nll,
                stderr=summary.stderr,
                **uncertain,
            )

    def _bits(self, summary: Summary) -> float | None:
        return summary.nll * summary.tokens / math.log(2) / self.targets.bytes if self.targets.bytes else None


def position_bins(train_length: int, length: int) -> list[int]:
    """The last position of each bin, ascending: the training length, halved and doubled, up to the window's length.

    A bin holds the positions above the bin before it. That the training length ends one keeps what was trained and
    what was not apart.
    """
    ends = {length}
    end = train_length
    while end >= 1:
        ends.add(end)
        end //= 2
    end = train_length
    while end < length:
        ends.add(end)
        end *= 2
    return sorted(each for each in ends if each <= length)


def exp(nats: float) -> float:
    """e to that power, or to the largest that floats hold."""
    return math.exp(min(nats, LARGEST_NLL))  # the upper end of an interval may lie beyond


def _interval(prefix: str, ends: Iterable[float]) -> dict[str, float]:
    low, high = ends
    return {f"{prefix}low": low, f"{prefix}high": high}
