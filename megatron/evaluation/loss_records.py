"""Records of a model's losses: each measure turns the losses of a plan's targets into records.

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


class LossSummary(NamedTuple):
    """The mean over all scored targets."""

    nll: float  # nats per token
    stderr: float | None  # of nll over blocks; None for one block
    tokens: int  # targets counted


@dataclass(frozen=True)
class TargetTokens:
    """The tokens of a target set: the same at every length."""

    loss_mask: np.ndarray
    """Which of them count, bool [blocks, targets]."""
    num_bytes: int
    """How many of them stand for a byte of text; 0 if tokens are not bytes."""
    digest: str
    """Equal digests, equal targets."""


class ScoredLength(NamedTuple):
    """The losses of one length of a target set."""

    length: int
    losses: np.ndarray  # nats, float64 [blocks, targets]
    record_fields: Mapping[str, Any]  # what the scoring took


class LengthSummary(NamedTuple):
    """One length without its losses."""

    summary: LossSummary
    sums: np.ndarray  # of the losses that count, float64 [blocks]
    record_fields: Mapping[str, Any]


def summarize_losses(sums: np.ndarray, counts: np.ndarray) -> LossSummary:
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
        return LossSummary(nll, None, tokens)
    residuals = sums - nll * counts
    return LossSummary(nll, math.sqrt(blocks / (blocks - 1) * float((residuals**2).sum())) / tokens, tokens)


def check_measures(options: EvaluationOptions, plan: ScoringPlan) -> None:
    """Refuse measures that a plan has no losses for. Raises UserError."""
    measures = options.measures or []
    if "position" in measures and plan.protocol != "nonoverlapping":
        raise UserError("measures: position needs every token of a window scored: protocol nonoverlapping")
    if "delta_perplexity" in measures:
        if plan.protocol != "last":
            raise UserError("measures: delta_perplexity needs protocol last: the same targets, with more before them")
        for target_set in plan.target_sets:
            count, lengths = target_set.targets, target_set.lengths
            if lengths[0] != count or len(lengths) < 2:
                raise UserError(
                    f"measures: delta_perplexity of the last {count} tokens compares longer contexts with those "
                    f"tokens alone: give length {count} and a longer one"
                )


class RecordBuilder:
    """Builds the records of one target set of a plan from the losses of one length after the other.

    Args:
        plan: what is scored.
        target_set: which targets of it.
        tokens: of the target set.
        train_length: of the model.
        measures: of which records are built.
        record_fields: those that are the same for all records.
    """

    def __init__(
        self,
        plan: ScoringPlan,
        target_set: TargetSet,
        tokens: TargetTokens,
        train_length: int,
        measures: Sequence[str],
        record_fields: Mapping[str, Any],
    ) -> None:
        self.plan, self.target_set, self.tokens = plan, target_set, tokens
        self.train_length, self.measures = train_length, measures
        self.record_fields = {
            "protocol": plan.protocol,
            "blocks": target_set.blocks,
            "target_digest": tokens.digest,
            **record_fields,
        }
        self.counts = tokens.loss_mask.sum(axis=1)
        self.summaries: list[LengthSummary] = []
        self.position_records: list[Record] = []

    def add(self, scored: ScoredLength) -> None:
        """Take the losses of the next length, which are not stored. Raises RunError if they have no perplexity."""
        sums = np.where(self.tokens.loss_mask, scored.losses, 0.0).sum(axis=1)
        summary = summarize_losses(sums, self.counts)
        # Such a model predicts nothing, and a table could not hold it.
        if not math.isfinite(summary.nll) or summary.nll > MAX_NLL:
            where = f"{self.record_fields['method']}: the loss at length {scored.length:,}"
            raise RunError(f"{where} is {summary.nll}, no perplexity to report")
        fields = {
            **scored.record_fields,
            "length": scored.length,
            "targets": self.target_set.num_scored[scored.length],
            "windows": self.plan.num_windows(scored.length),
        }
        self.summaries.append(LengthSummary(summary, sums, fields))
        if "position" in self.measures:
            self.position_records += self._build_position_records(scored, fields)

    def build_records(self) -> list[Record]:
        """The records in the order of the measures; none if no length was scored."""
        if not self.summaries:
            return []
        draws = draw_bootstrap_means(np.stack([length.sums for length in self.summaries]), self.counts)
        builders: dict[str, Callable[[], list[Record]]] = {
            "perplexity": lambda: list(self._build_perplexity_records(draws)),
            "delta_perplexity": lambda: list(self._build_gain_records(draws)),
            "position": lambda: self.position_records,
        }
        return [record for measure in self.measures for record in builders[measure]()]

    def _build_perplexity_records(self, draws: np.ndarray | None) -> Iterator[Record]:
        first = self.summaries[0]
        for index, (summary, sums, fields) in enumerate(self.summaries):
            optional = self._block_fields(sums)
            if draws is not None:
                optional |= _interval_fields("", map(clamped_exp, compute_percentile_interval(draws[index])))
            if index > 0:
                change = clamped_exp(summary.nll - first.summary.nll)
                optional |= {"change": change, "change_from": first.record_fields["length"]}
                if draws is not None:
                    optional |= _interval_fields(
                        "change_", map(clamped_exp, compute_percentile_interval(draws[index] - draws[0]))
                    )
            yield Record(
                **self.record_fields,
                **fields,
                metric="perplexity",
                value=math.exp(summary.nll),
                tokens=summary.tokens,
                nll=summary.nll,
                stderr=summary.stderr,
                bits_per_byte=self._bits_per_byte(summary),
                **optional,
            )

    def _block_fields(self, sums: np.ndarray) -> dict[str, Any]:
        """The fields of records on blocks, which are compared with those of other methods."""
        if not 2 <= self.target_set.blocks <= MAX_BLOCKS:
            return {}
        fields: dict[str, Any] = {"block_sums": [round(float(block_sum), 6) for block_sum in sums]}
        if np.ptp(self.counts) > 0:
            fields["block_tokens"] = self.counts.tolist()
        return fields

    def _build_gain_records(self, draws: np.ndarray | None) -> Iterator[Record]:
        """ΔP and the log-ratio, at every length but the first."""
        first = self.summaries[0].summary
        for index, (summary, _, fields) in enumerate(self.summaries[1:], start=1):
            shared = {**self.record_fields, **fields, "tokens": summary.tokens}
            values = {
                "delta_perplexity": math.exp(first.nll) - math.exp(summary.nll),
                "log_ratio": first.nll - summary.nll,
            }
            for metric, value in values.items():
                interval: dict[str, Any] = {}
                if draws is not None:
                    full, local = draws[index], draws[0]  # with the whole context, and without
                    gains = local - full if metric == "log_ratio" else np.exp(local) - np.exp(full)
                    interval = _interval_fields("", compute_percentile_interval(gains))
                yield Record(**shared, metric=metric, value=value, **interval)

    def _build_position_records(self, scored: ScoredLength, fields: Mapping[str, Any]) -> Iterator[Record]:
        losses = scored.losses.reshape(self.target_set.blocks, -1, scored.length)
        loss_mask = self.tokens.loss_mask.reshape(losses.shape)
        ends = list_position_bins(self.train_length, scored.length)
        bins = [np.s_[:, :, start:end] for start, end in zip([0, *ends], ends, strict=False)]
        for end, bin_slice in zip(ends, bins, strict=True):
            sums = np.where(loss_mask[bin_slice], losses[bin_slice], 0.0).sum(axis=(1, 2))
            counts = loss_mask[bin_slice].sum(axis=(1, 2))
            if not counts.any():
                continue
            summary, draws = summarize_losses(sums, counts), draw_bootstrap_means(sums[None], counts)
            interval: dict[str, Any] = (
                {} if draws is None else _interval_fields("", map(clamped_exp, compute_percentile_interval(draws[0])))
            )
            yield Record(
                **self.record_fields,
                **fields,
                axis="position",
                place=float(end),
                metric="perplexity",
                value=clamped_exp(summary.nll),
                tokens=summary.tokens,
                nll=summary.nll,
                stderr=summary.stderr,
                **interval,
            )

    def _bits_per_byte(self, summary: LossSummary) -> float | None:
        return summary.nll * summary.tokens / math.log(2) / self.tokens.num_bytes if self.tokens.num_bytes else None


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
    return sorted(end for end in ends if end <= length)


def _interval_fields(prefix: str, ends: Iterable[float]) -> dict[str, float]:
    low, high = ends
    return {f"{prefix}low": low, f"{prefix}high": high}
