"""Turn the losses of a model into records. Each measure produces its own records.

    perplexity         exp of the mean loss at each length, and its ratio to that at the shortest length
    delta_perplexity   ΔP(L) = P(T) − P(L), the same T targets at the end of each window with and without the context
                       before them (2410.04798, appendix A), and log P(T) − log P(L), which is comparable across corpora
    position           perplexity by position of the target in its window (KERPLE, 2205.09921, section 5.5), in bins
                       that end at the training length and at its doubles and halves
    token_loss         loss by position at the longest length, smoothed over neighbors on both sides (Forgetting
                       Transformer, 2503.02130, section 4.2, which averages 101 positions)
    long_perplexity    perplexity of the key tokens only, with ratios as for `perplexity` (`key_tokens.py`)

Blocks of text are the independent samples of every interval (`megatron.reports.significance`).
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron.evaluation.key_tokens import KeyTokenFile
from megatron.evaluation.protocols import ScoringPlan, TargetSet
from megatron.options.evaluation import EvaluationOptions
from megatron.reports.metrics import MAX_NLL, compute_clamped_exp
from megatron.reports.records import Record
from megatron.reports.uncertainty import build_interval_fields, draw_bootstrap_curves, draw_bootstrap_means
from megatron.utils.errors import RunError, UserError

MAX_BLOCKS = 4096
"""Maximum number of blocks for which records keep the sum of each block."""


DEFAULT_SMOOTHING = 101
"""Default number of positions averaged for a value of token_loss."""
MIN_SMOOTHED_PARTS = 16
"""Minimum ratio of window length to the default smoothing width."""
MAX_CURVE_STEPS = 160
"""Number of steps between positions of token_loss. Steps have equal size, except for smaller ones at the start."""


class LossSummary(NamedTuple):
    """Mean loss over all scored targets."""

    nll: float  # nats per token
    stderr: float | None  # standard error of nll over blocks; None for a single block
    tokens: int  # number of counted targets


@dataclass(frozen=True)
class TargetTokens:
    """Tokens of a target set, identical at every length."""

    loss_mask: np.ndarray
    """True for tokens that count, bool [blocks, targets]."""
    num_bytes: int
    """Number of tokens that encode a byte of text; 0 if tokens are not bytes."""
    digest: str
    """Hash of the targets, equal for equal targets."""


class ScoredLength(NamedTuple):
    """Losses of a target set at one length."""

    length: int
    losses: np.ndarray  # in nats, float64 [blocks, targets]
    record_fields: Mapping[str, Any]  # cost of the scoring


class LengthSummary(NamedTuple):
    """Summary of one length, without the individual losses."""

    summary: LossSummary
    sums: np.ndarray  # sums of the counted losses, float64 [blocks]
    record_fields: Mapping[str, Any]


def summarize_losses(sums: np.ndarray, counts: np.ndarray) -> LossSummary:
    """Compute the mean and standard error of losses that are summed over blocks.

    The standard error treats blocks as independent samples: neighboring tokens share context and subject, distant
    blocks do not. If blocks have different counts, it is the standard error of a ratio estimate.

    Args:
        sums: sums of the counted losses, float64 [blocks].
        counts: number of counted losses, int [blocks].
    """
    tokens, blocks = int(counts.sum()), len(sums)
    nll = float(sums.sum() / tokens)
    if blocks < 2:
        return LossSummary(nll, None, tokens)
    residuals = sums - nll * counts
    return LossSummary(nll, math.sqrt(blocks / (blocks - 1) * float((residuals**2).sum())) / tokens, tokens)


def check_measures(options: EvaluationOptions, plan: ScoringPlan) -> None:
    """Check that a plan provides the losses that the measures need.

    Raises:
        UserError: a measure does not fit the plan.
    """
    measures = options.measures or []
    for name in ("position", "token_loss"):
        if name in measures and plan.protocol != "nonoverlapping":
            raise UserError(f"measures: {name} needs protocol nonoverlapping, which scores every token of a window")
    if options.smoothing is not None:
        if "token_loss" not in measures:
            raise UserError("smoothing: only for the measure token_loss; add it to measures")
        if options.smoothing % 2 == 0 or options.smoothing > plan.lengths[-1]:
            raise UserError(
                f"smoothing is {options.smoothing}; it must be an odd number of positions, at most {plan.lengths[-1]:,}"
            )
    if "delta_perplexity" in measures:
        if plan.protocol != "last":
            raise UserError("measures: delta_perplexity needs protocol last: the same targets with more context")
        for target_set in plan.target_sets:
            count, lengths = target_set.targets, target_set.lengths
            if lengths[0] != count or len(lengths) < 2:
                raise UserError(
                    f"measures: delta_perplexity of the last {count} tokens compares longer contexts with those "
                    f"tokens alone; use length {count} and a longer one"
                )


class RecordBuilder:
    """Builder of the records of one target set of a plan, from losses added length by length.

    Args:
        plan: scoring plan.
        target_set: a target set of the plan.
        tokens: tokens of the target set.
        train_length: training length of the model.
        measures: measures to build records for.
        record_fields: fields common to all records.
        smoothing: smoothing width of token_loss; the default if None.
        key_tokens: key tokens for long_perplexity.
    """

    def __init__(
        self,
        plan: ScoringPlan,
        target_set: TargetSet,
        tokens: TargetTokens,
        train_length: int,
        measures: Sequence[str],
        record_fields: Mapping[str, Any],
        *,
        smoothing: int | None = None,
        key_tokens: KeyTokenFile | None = None,
    ) -> None:
        self.smoothing, self.key_tokens = smoothing, key_tokens
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
        self.curve_records: list[Record] = []
        self.losses: dict[int, np.ndarray] = {}
        """Losses by length, kept only to choose key tokens."""

    def add(self, scored: ScoredLength) -> None:
        """Add the losses of the next length.

        Raises:
            RunError: the perplexity is not finite or too large to report.
        """
        sums = np.where(self.tokens.loss_mask, scored.losses, 0.0).sum(axis=1)
        summary = summarize_losses(sums, self.counts)
        # Tables cannot show this perplexity.
        if not math.isfinite(summary.nll) or summary.nll > MAX_NLL:
            where = f"{self.record_fields['method']}: the loss at length {scored.length:,}"
            raise RunError(f"{where} is {summary.nll}, so there is no perplexity to report")
        fields = {
            **scored.record_fields,
            "length": scored.length,
            "targets": self.target_set.num_scored[scored.length],
            "windows": self.plan.count_windows(scored.length),
        }
        self.summaries.append(LengthSummary(summary, sums, fields))
        if "position" in self.measures:
            self.position_records += self._build_position_records(scored, fields)
        if "token_loss" in self.measures:  # lengths ascend, so the longest replaces the others
            self.curve_records = list(self._build_curve_records(scored, fields))
        if "long_perplexity" in self.measures:
            self.losses[scored.length] = scored.losses

    def build_records(self) -> list[Record]:
        """Return the records in the order of the measures, or no records if no length was scored."""
        if not self.summaries:
            return []
        draws = draw_bootstrap_means(np.stack([length.sums for length in self.summaries]), self.counts)
        builders: dict[str, Callable[[], list[Record]]] = {
            "perplexity": lambda: list(
                self._build_perplexity_records("perplexity", self.summaries, self.counts, draws)
            ),
            "delta_perplexity": lambda: list(self._build_gain_records(draws)),
            "position": lambda: self.position_records,
            "token_loss": lambda: self.curve_records,
            "long_perplexity": self._build_key_records,
        }
        return [record for measure in self.measures for record in builders[measure]()]

    def _build_perplexity_records(
        self, metric: str, summaries: Sequence[LengthSummary], counts: np.ndarray, draws: np.ndarray | None
    ) -> Iterator[Record]:
        """Build a record for each length, with its change from the first length.

        Args:
            draws: bootstrap draws of the means, float64 [lengths, resamples].
        """
        first = summaries[0]
        for index, (summary, sums, fields) in enumerate(summaries):
            optional = self._build_block_fields(sums, counts)
            if draws is not None:
                optional |= build_interval_fields(draws[index], transform=compute_clamped_exp)
            if index > 0:
                change = compute_clamped_exp(summary.nll - first.summary.nll)
                optional |= {"change": change, "change_from": first.record_fields["length"]}
                if draws is not None:
                    optional |= build_interval_fields(draws[index] - draws[0], "change_", compute_clamped_exp)
            if metric == "perplexity":
                optional["bits_per_byte"] = self._compute_bits_per_byte(summary)
            yield Record(
                **{**self.record_fields, **fields},
                metric=metric,
                value=compute_clamped_exp(summary.nll),
                tokens=summary.tokens,
                nll=summary.nll,
                stderr=summary.stderr,
                **optional,
            )

    def _build_block_fields(self, sums: np.ndarray, counts: np.ndarray) -> dict[str, Any]:
        """Return the record fields on blocks, which are used to compare methods."""
        if not 2 <= self.target_set.blocks <= MAX_BLOCKS:
            return {}
        fields: dict[str, Any] = {"block_sums": [round(float(block_sum), 6) for block_sum in sums]}
        if np.ptp(counts) > 0:
            fields["block_tokens"] = counts.tolist()
        return fields

    def _build_key_records(self) -> list[Record]:
        """Build the LongPPL records of all lengths. If there are no key tokens yet, this model is their reference."""
        key_tokens, loss_mask = self.key_tokens, self.tokens.loss_mask
        assert key_tokens is not None
        if key_tokens.tokens is None:
            key_tokens.find(self.plan, self.target_set, self.losses, loss_mask, self.record_fields)
        assert key_tokens.tokens is not None
        selected = key_tokens.select(self.plan, self.target_set)
        is_key = selected & loss_mask
        counts, digest = is_key.sum(axis=1), key_tokens.tokens.digest
        if counts.sum() < selected.sum():  # eod_mask_loss excludes some, so models trained without it score others
            digest = hashlib.sha256(f"{digest} {self.tokens.digest}".encode()).hexdigest()[:16]
        fields = {"target_digest": digest, "remark": key_tokens.tokens.remark}
        if not counts.any():
            raise RunError(f"{self.record_fields['method']}: the model was not trained to predict any key token")
        summaries = []
        for scored, losses in zip(self.summaries, self.losses.values(), strict=True):
            sums = np.where(is_key, losses, 0.0).sum(axis=1)
            summaries.append(LengthSummary(summarize_losses(sums, counts), sums, {**scored.record_fields, **fields}))
        draws = draw_bootstrap_means(np.stack([summary.sums for summary in summaries]), counts)
        return list(self._build_perplexity_records("long_perplexity", summaries, counts, draws))

    def _build_curve_records(self, scored: ScoredLength, fields: Mapping[str, Any]) -> Iterator[Record]:
        """Build records of the smoothed loss by position, with bootstrap intervals over blocks."""
        length, blocks = scored.length, self.target_set.blocks
        loss_mask = self.tokens.loss_mask.reshape(blocks, -1, length)
        losses = np.where(loss_mask, scored.losses.reshape(loss_mask.shape), 0.0)
        width = self.smoothing or choose_smoothing(length)
        positions = list_curve_positions(self.train_length, length)
        sums, counts = (smooth_by_position(array.sum(axis=1), positions, width) for array in (losses, loss_mask))
        has_tokens = counts.sum(axis=0) > 0
        positions, sums, counts = positions[has_tokens], sums[:, has_tokens], counts[:, has_tokens]
        draws = draw_bootstrap_curves(sums, counts)
        remark = (
            f"Each value is the mean of {width} positions centered on it, or of fewer positions within "
            f"{width // 2} of either end of the window."
        )
        for index, position in enumerate(positions.tolist()):
            tokens = int(counts[:, index].sum())
            nll = float(sums[:, index].sum() / tokens)
            interval: dict[str, Any] = {} if draws is None else build_interval_fields(draws[:, index])
            yield Record(
                **{**self.record_fields, **fields, "flops": None, "seconds": None, "cpu_seconds": None},
                **interval,
                axis="tokens_seen",
                place=float(position),
                metric="loss",
                value=nll,
                tokens=tokens,
                nll=nll,
                smoothing=width,
                remark=remark,
            )

    def _build_gain_records(self, draws: np.ndarray | None) -> Iterator[Record]:
        """Build records of ΔP and the log-ratio, for every length but the first."""
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
                    if metric == "delta_perplexity":  # as for `compute_clamped_exp`
                        full, local = (np.exp(np.minimum(nats, MAX_NLL)) for nats in (full, local))
                    gains = local - full
                    interval = build_interval_fields(gains)
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
                {} if draws is None else build_interval_fields(draws[0], transform=compute_clamped_exp)
            )
            yield Record(
                **self.record_fields,
                **fields,
                axis="position",
                place=float(end),
                metric="perplexity",
                value=compute_clamped_exp(summary.nll),
                tokens=summary.tokens,
                nll=summary.nll,
                stderr=summary.stderr,
                **interval,
            )

    def _compute_bits_per_byte(self, summary: LossSummary) -> float | None:
        return summary.nll * summary.tokens / math.log(2) / self.tokens.num_bytes if self.tokens.num_bytes else None


def list_position_bins(train_length: int, length: int) -> list[int]:
    """Return the last position of each bin, ascending.

    These are the window's length, and the training length with its doubles and halves up to there.

    A bin contains the positions after the previous bin. One bin ends at the training length, so that no bin mixes
    trained and untrained positions.
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


def choose_smoothing(length: int) -> int:
    """Return the default smoothing width of token_loss for windows of a length: 101, or less in short windows."""
    width = min(DEFAULT_SMOOTHING, max(length // MIN_SMOOTHED_PARTS, 1))
    return width - (width % 2 == 0)


def list_curve_positions(train_length: int, length: int) -> np.ndarray:
    """Return the positions (from 1) of the token_loss records, int64, ascending.

    They are an eighth of an octave apart at first, then in equal steps. The training length and its doubles and halves
    are included.
    """
    octaves = np.arange(0, 8 * math.log2(length) + 1)
    step = max(1, -(-length // MAX_CURVE_STEPS))
    positions = {*np.rint(2 ** (octaves / 8)).astype(int).tolist(), *range(step, length + 1, step)}
    positions |= {*list_position_bins(train_length, length)}
    return np.array(sorted(position for position in positions if position <= length), dtype=np.int64)


def smooth_by_position(values: np.ndarray, positions: np.ndarray, width: int) -> np.ndarray:
    """Sum values [blocks, L] over `width` positions around each given position; returns [blocks, positions].

    Near the beginning, where the loss is steep, the window shrinks on both sides alike. Near the end it also shrinks.
    """
    length = values.shape[1]
    before = np.minimum(width // 2, positions - 1)
    after = np.minimum(before, length - positions)
    sums = np.concatenate([np.zeros((len(values), 1)), values.cumsum(axis=1, dtype=np.float64)], axis=1)
    return sums[:, positions + after] - sums[:, positions - before - 1]
