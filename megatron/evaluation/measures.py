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

from megatron.evaluation.protocols import ScoringPlan, TargetSet
from megatron.options.evaluation import EvaluationOptions
from megatron.reports.bootstrap import compute_percentile_interval, draw_bootstrap_means
from megatron.reports.metrics import MAX_NLL, clamped_exp
from megatron.reports.records import Record
from megatron.utils.errors import RunError, UserError

MAX_BLOCKS = 4096
"""Records keep the sums of their blocks up to so many."""


class Summary(NamedTuple):
    """The mean over all scored targets."""

    nll: float  # nats per token
    stderr: float | None  # of nll over blocks; None for one block
    tokens: int  # targets counted


@dataclass(frozen=True)
class TargetCounts:
    """The tokens that a cut of a plan scores: the same at every length."""

    counted: np.ndarray
    """Which of them count, bool [blocks, targets]."""
    bytes: int
    """How many of them stand for a byte of text; 0 if tokens are not bytes."""
    digest: str
    """Equal digests, equal targets."""


class ScoredLength(NamedTuple):
    """One length of a cut, scored."""

    length: int
    losses: np.ndarray  # nats, float64 [blocks, targets]
    about: Mapping[str, Any]  # fields of records: what the scoring took


class LengthSummary(NamedTuple):
    """What is kept of one length."""

    summary: Summary
    sums: np.ndarray  # of the losses that count, float64 [blocks]
    about: Mapping[str, Any]  # fields of its records


def summarize_losses(sums: np.ndarray, counts: np.ndarray) -> Summary:
    """Mean and standard error of losses that are summed over blocks.

    The standard error treats blocks as the independent samples: neighbouring tokens share their context and their
    subject, blocks far apart do not. With unequal counts per block it is that of a ratio estimate.

    Args:
        sums: of the losses that count, float64 [blocks].
        counts: how many those are, int [blocks].
    """
    tokens, blocks = int(counts.sum()), len(sums)
    nll = float(sums.sum() / tokens)
    if blocks < 2:
        return Summary(nll, None, tokens)
    residuals = sums - nll * counts
    return Summary(nll, math.sqrt(blocks / (blocks - 1) * float((residuals**2).sum())) / tokens, tokens)


def check_measures(options: EvaluationOptions, plan: ScoringPlan) -> None:
    """Refuse measures that a plan has no losses for. Raises UserError."""
    wanted = options.measures or []
    if "position" in wanted and plan.protocol != "nonoverlapping":
        raise UserError("measures: position needs every token of a window scored: protocol nonoverlapping")
    if "delta_perplexity" in wanted:
        if plan.protocol != "last":
            raise UserError("measures: delta_perplexity needs protocol last: the same targets, with more before them")
        for cut in plan.target_sets:
            if cut.lengths[0] != cut.targets or len(cut.lengths) < 2:
                raise UserError(
                    f"measures: delta_perplexity of the last {cut.targets} tokens compares longer contexts with those "
                    f"tokens alone: give length {cut.targets} and a longer one"
                )


class RecordBuilder:
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
        plan: ScoringPlan,
        cut: TargetSet,
        targets: TargetCounts,
        train_length: int,
        measures: Sequence[str],
        about: Mapping[str, Any],
    ) -> None:
        self.plan, self.cut, self.targets, self.train_length, self.measures = plan, cut, targets, train_length, measures
        self.about = {"protocol": plan.protocol, "blocks": cut.blocks, "target_digest": targets.digest, **about}
        self.counts = targets.counted.sum(axis=1)
        self.rows: list[LengthSummary] = []
        self.by_position: list[Record] = []

    def add(self, scored: ScoredLength) -> None:
        """Take the losses of the next length, which are not kept. Raises RunError if they have no perplexity."""
        sums = np.where(self.targets.counted, scored.losses, 0.0).sum(axis=1)
        summary = summarize_losses(sums, self.counts)
        # Such a model predicts nothing, and a table could not hold it.
        if not math.isfinite(summary.nll) or summary.nll > MAX_NLL:
            where = f"{self.about['method']}: the loss at length {scored.length:,}"
            raise RunError(f"{where} is {summary.nll}, no perplexity to report")
        about = {
            **scored.about,
            "length": scored.length,
            "targets": self.cut.scored[scored.length],
            "windows": self.plan.select_windows(scored.length),
        }
        self.rows.append(LengthSummary(summary, sums, about))
        if "position" in self.measures:
            self.by_position += self._build_position_records(scored, about)

    def build_records(self) -> list[Record]:
        """What is told, in the order of the measures that were asked for; nothing if no length was scored."""
        if not self.rows:
            return []
        draws = draw_bootstrap_means(np.stack([row.sums for row in self.rows]), self.counts)
        told: dict[str, Callable[[], list[Record]]] = {
            "perplexity": lambda: list(self._build_perplexity_records(draws)),
            "delta_perplexity": lambda: list(self._build_gain_records(draws)),
            "position": lambda: self.by_position,
        }
        return [record for measure in self.measures for record in told[measure]()]

    def _build_perplexity_records(self, draws: np.ndarray | None) -> Iterator[Record]:
        first = self.rows[0]
        for number, (summary, sums, about) in enumerate(self.rows):
            uncertain = self._list_blocks(sums)
            if draws is not None:
                uncertain |= _format_interval("", map(clamped_exp, compute_percentile_interval(draws[number])))
            if number > 0:
                change = clamped_exp(summary.nll - first.summary.nll)
                uncertain |= {"change": change, "change_from": first.about["length"]}
                if draws is not None:
                    uncertain |= _format_interval(
                        "change_", map(clamped_exp, compute_percentile_interval(draws[number] - draws[0]))
                    )
            yield Record(
                **self.about,
                **about,
                metric="perplexity",
                value=math.exp(summary.nll),
                tokens=summary.tokens,
                nll=summary.nll,
                stderr=summary.stderr,
                bits_per_byte=self._bits_per_byte(summary),
                **uncertain,
            )

    def _list_blocks(self, sums: np.ndarray) -> dict[str, Any]:
        """What records keep of blocks, to be compared with those of other methods."""
        if not 2 <= self.cut.blocks <= MAX_BLOCKS:
            return {}
        kept: dict[str, Any] = {"block_sums": [round(float(each), 6) for each in sums]}
        if np.ptp(self.counts) > 0:
            kept["block_tokens"] = self.counts.tolist()
        return kept

    def _build_gain_records(self, draws: np.ndarray | None) -> Iterator[Record]:
        """ΔP and the log-ratio, at every length but the first."""
        first = self.rows[0].summary
        for number, (summary, _, about) in enumerate(self.rows[1:], start=1):
            shared = {**self.about, **about, "tokens": summary.tokens}
            found = {
                "delta_perplexity": math.exp(first.nll) - math.exp(summary.nll),
                "log_ratio": first.nll - summary.nll,
            }
            for metric, value in found.items():
                uncertain: dict[str, Any] = {}
                if draws is not None:
                    ours, local = draws[number], draws[0]
                    gains = local - ours if metric == "log_ratio" else np.exp(local) - np.exp(ours)
                    uncertain = _format_interval("", compute_percentile_interval(gains))
                yield Record(**shared, metric=metric, value=value, **uncertain)

    def _build_position_records(self, scored: ScoredLength, about: Mapping[str, Any]) -> Iterator[Record]:
        losses = scored.losses.reshape(self.cut.blocks, -1, scored.length)
        counted = self.targets.counted.reshape(losses.shape)
        ends = list_position_bins(self.train_length, scored.length)
        parts = [np.s_[:, :, start:end] for start, end in zip([0, *ends], ends, strict=False)]
        for end, part in zip(ends, parts, strict=True):
            sums = np.where(counted[part], losses[part], 0.0).sum(axis=(1, 2))
            counts = counted[part].sum(axis=(1, 2))
            if not counts.any():
                continue
            summary, draws = summarize_losses(sums, counts), draw_bootstrap_means(sums[None], counts)
            uncertain: dict[str, Any] = (
                {} if draws is None else _format_interval("", map(clamped_exp, compute_percentile_interval(draws[0])))
            )
            yield Record(
                **self.about,
                **about,
                axis="position",
                place=float(end),
                metric="perplexity",
                value=clamped_exp(summary.nll),
                tokens=summary.tokens,
                nll=summary.nll,
                stderr=summary.stderr,
                **uncertain,
            )

    def _bits_per_byte(self, summary: Summary) -> float | None:
        return summary.nll * summary.tokens / math.log(2) / self.targets.bytes if self.targets.bytes else None


def list_position_bins(train_length: int, length: int) -> list[int]:
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


def _format_interval(prefix: str, ends: Iterable[float]) -> dict[str, float]:
    low, high = ends
    return {f"{prefix}low": low, f"{prefix}high": high}
