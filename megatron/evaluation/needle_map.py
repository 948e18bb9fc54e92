"""Needle maps: accuracy and loss of answers that depend on a given depth of the input, over all depths and lengths.

A cell of the map is one depth at one length. Its records contain the loss of the answer's tokens, the share of these
tokens predicted correctly, and the share of sequences with all tokens correct, each also per sequence (`block_sums`).
Everything else is computed from the cells: the mean over depths at each length with its change, and

    effective length    the largest length at which the score is at least 0.85; 0 if there is none

The threshold is absolute, as in RULER (Hsieh et al. 2024, 2404.06654), which takes the score of Llama 2 7B at 4,096
tokens, 0.856. Relative to a model's own short score, as in NoLiMa (Modarressi et al. 2025, 2502.05167), a model that
finds little anywhere would have a large effective length.

Intervals are percentile bootstraps over sequences (`reports/significance.py`). If sequence n of every cell has the
same answer, all cells use the same draws of sequences; otherwise each cell has its own draws. The interval of an
effective length is a percentile interval of the effective lengths of the draws, so its ends are evaluated lengths.

N sequences, K cells.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.data.tasks.task import TaskBatch
from megatron.evaluation.accuracy import build_mean_record, score_answers
from megatron.evaluation.eval_target import ScoringContext
from megatron.evaluation.provenance import describe_model, start_stopwatch
from megatron.reports.records import Record
from megatron.reports.uncertainty import build_interval_fields, draw_bootstrap_means
from megatron.utils.errors import RunError

if TYPE_CHECKING:
    from megatron.checkpoint.load_model import LoadedModel

DEFAULT_EFFECTIVE_SCORE = 0.85
"""Default score that a model must reach at an effective length."""

DEFAULT_NEEDLE_SEQUENCES = 64
"""Default number of sequences for each depth and length."""

SCORE_TOLERANCE = 1e-9
"""Tolerance below which two scores are equal."""

SAME_MEASUREMENT_FIELDS = (
    "protocol", "target_digest", "run", "training_digest", "step", "train_tokens", "seed", "position", "backend",
    "dtype", "device", "software",
)  # fmt: skip
"""Fields that must agree for a finished cell to be reused."""


@dataclass(frozen=True)
class NeedleMap:
    """Definition of a needle map, and the fields of its records."""

    lengths: Sequence[int]
    """Lengths, ascending. A model with limited positions is evaluated at the lengths that it supports."""
    depths: Sequence[float]
    """Depths from 0 to 1, ascending."""
    score_metric: str
    """Metric behind the effective length: accuracy or exact_match."""
    metrics: Sequence[str]
    """Metrics of the cells' records, including `score_metric`."""
    is_paired: bool
    """True if sequence n has the same answer in every cell."""
    choices: range | None
    """Ids of valid answers; the whole vocabulary if None."""
    build_batch: Callable[[int, float], TaskBatch]
    """Function that builds the N sequences of a length and a depth."""
    record_fields: Mapping[str, Any]
    """Fields common to all records, including the digest of the answers."""
    effective_score: float = DEFAULT_EFFECTIVE_SCORE


def hash_depths(digest: str, depths: Sequence[float]) -> str:
    """Return a digest of the answers and their depths, because means over other depths are not comparable."""
    return hashlib.sha256(f"{digest} {list(depths)}".encode()).hexdigest()[:16]


def score_needle_map(
    needle_map: NeedleMap, loaded: LoadedModel, flops_by_length: Mapping[int, float], scoring: ScoringContext
) -> list[Record]:
    """Score a model on a needle map, and return the records of its cells, lengths, and effective length.

    Args:
        needle_map: the map.
        loaded: the model.
        flops_by_length: FLOPs over all depths, for each supported length, ascending.
        scoring: settings and callbacks. Cells among its finished records are not scored again.

    Raises:
        RunError: a loss is not finite, or device memory is too small.
    """
    shared = {**describe_model(loaded), **scoring.record_fields, **needle_map.record_fields}
    finished = _find_finished_cells(needle_map, shared, scoring.finished_records)
    cells: dict[tuple[int, float], list[Record]] = {}
    done, total = 0.0, sum(flops_by_length.values())
    for length, length_flops in flops_by_length.items():
        flops = length_flops / len(needle_map.depths)
        for depth in needle_map.depths:
            if (length, depth) in finished:
                cells[length, depth] = finished[length, depth]
            else:
                fields = {**shared, "axis": "depth", "length": length, "place": float(depth), "flops": flops}
                cells[length, depth] = _score_cell(needle_map, loaded, length, depth, fields, scoring.batch_tokens)
                measured = {**finished, **cells}
                scoring.save_records([record for records in measured.values() for record in records])
            done += flops
            scoring.progress(length, done, total)
    return [*(record for records in cells.values() for record in records), *summarize_cells(needle_map, cells)]


def _find_finished_cells(
    needle_map: NeedleMap, shared: Mapping[str, Any], records: Sequence[Record]
) -> dict[tuple[int, float], list[Record]]:
    """Find the cells of this map and model that an interrupted evaluation finished, by length and depth."""
    expected = {name: shared.get(name) for name in SAME_MEASUREMENT_FIELDS}
    found: dict[tuple[int, float], dict[str, Record]] = {}
    for record in records:
        if record.place is None or record.axis != "depth" or not record.block_sums:
            continue
        if all(getattr(record, name) == value for name, value in expected.items()):
            found.setdefault((record.length, record.place), {})[record.metric] = record
    return {
        cell: [by_metric[metric] for metric in needle_map.metrics]
        for cell, by_metric in found.items()
        if set(needle_map.metrics) <= by_metric.keys()
    }


def _score_cell(
    needle_map: NeedleMap,
    loaded: LoadedModel,
    length: int,
    depth: float,
    fields: Mapping[str, Any],
    batch_tokens: int | None,
) -> list[Record]:
    """Score one cell, and return a record for each metric."""
    stop_stopwatch = start_stopwatch(loaded.model)
    batch = needle_map.build_batch(length, depth)
    losses, correct = score_answers(loaded.model, batch, needle_map.choices, batch_tokens=batch_tokens)
    if not np.isfinite(losses).all():
        raise RunError(f"{fields['method']}: the loss at depth {depth:.0%} of length {length:,} is not finite")
    num_counted, num_right = batch.accuracy_mask.sum(axis=1), correct.sum(axis=1)
    values = {
        "loss": (losses.sum(axis=1), batch.loss_mask.sum(axis=1)),
        "accuracy": (num_right, num_counted),
        "exact_match": (num_right == num_counted, np.ones_like(num_counted)),
    }
    nll = float(losses.sum() / batch.loss_mask.sum())
    spent = stop_stopwatch()
    records = []
    for metric in needle_map.metrics:
        sums, counts = (array.astype(np.float64) for array in values[metric])
        optional: dict[str, Any] = {"block_sums": [round(float(block_sum), 6) for block_sum in sums]}
        if np.ptp(counts) > 0:
            optional["block_tokens"] = counts.astype(int).tolist()
        draws = draw_bootstrap_means(sums[None], counts.astype(np.int64))
        optional |= {} if draws is None else build_interval_fields(draws[0])
        records.append(
            Record(
                **fields,
                **spent,
                **optional,
                metric=metric,
                value=float(sums.sum() / counts.sum()),
                tokens=int(counts.sum()),
                nll=nll,
            )
        )
        spent = {"date": spent["date"]}  # the time of the cell is counted once
    return records


def summarize_cells(needle_map: NeedleMap, cells: Mapping[tuple[int, float], Sequence[Record]]) -> Iterator[Record]:
    """Yield the mean over depths for each length and metric, the effective length, and a task's mean accuracy.

    Args:
        needle_map: the map.
        cells: records of each metric with per-sequence sums, by length and depth, ascending.
    """
    lengths = list(dict.fromkeys(length for length, _ in cells))
    for metric in needle_map.metrics:
        by_length = {
            length: [record for (own, _), records in cells.items() if own == length for record in records
                     if record.metric == metric] for length in lengths
        }  # fmt: skip
        scores = np.array([[np.mean([record.value for record in records])] for records in by_length.values()])
        draws = _draw_length_scores(list(by_length.values()), is_paired=needle_map.is_paired)
        length_records = list(_build_length_records(by_length, scores[:, 0], draws))
        yield from length_records
        if metric == needle_map.score_metric:
            of_score = [record for records in by_length.values() for record in records]
            yield _build_effective_record(needle_map, of_score, lengths, scores, draws)
            beyond = [index for index, record in enumerate(length_records) if record.length > record.train_length]
            if metric == "accuracy" and beyond:
                mean_draws = None if draws is None else draws[beyond].mean(axis=0)
                yield build_mean_record([length_records[index] for index in beyond], mean_draws)


def _draw_length_scores(by_length: Sequence[Sequence[Record]], *, is_paired: bool) -> np.ndarray | None:
    """Draw bootstrap means over depths, float64 [lengths, resamples], or None if there is only one sequence."""
    cells = [record for records in by_length for record in records]
    sums, counts = (
        [np.array(record.block_sums) for record in cells],
        [np.array(each.tokens_per_block) for each in cells],
    )
    if all(np.array_equal(own, counts[0]) for own in counts):
        draws = draw_bootstrap_means(np.stack(sums), counts[0])
    else:  # all cells share a seed, so they also share the drawn sequences
        rows = [draw_bootstrap_means(own_sums[None], own) for own_sums, own in zip(sums, counts, strict=True)]
        drawn = [row for row in rows if row is not None]
        draws = np.concatenate(drawn) if len(drawn) == len(rows) else None
    if draws is None:
        return None
    if not is_paired:  # unpaired cells need draws in different orders
        draws = np.stack([np.roll(row, number) for number, row in enumerate(draws)])
    return draws.reshape(len(by_length), len(by_length[0]), -1).mean(axis=1)


def _build_length_records(
    by_length: Mapping[int, Sequence[Record]], scores: np.ndarray, draws: np.ndarray | None
) -> Iterator[Record]:
    first_length = next(iter(by_length))
    for index, records in enumerate(by_length.values()):
        # Copy the record of a cell with a new value, and clear the fields that apply to cells only.
        fields: dict[str, Any] = {
            "axis": "length", "place": None, "value": float(scores[index]), "block_sums": None, "block_tokens": None,
            "tokens": sum(record.tokens for record in records), "low": None, "high": None,
            "nll": float(np.mean([record.nll for record in records])),
            "flops": sum(record.flops or 0.0 for record in records),
            "seconds": sum(record.seconds or 0.0 for record in records),
            "cpu_seconds": sum(record.cpu_seconds or 0.0 for record in records),
        }  # fmt: skip
        if draws is not None:
            fields |= build_interval_fields(draws[index])
        if index > 0:
            change = records[-1].metric_info.compute_change(float(scores[index]), float(scores[0]))
            fields |= {"change": change, "change_from": first_length}
            if draws is not None:
                fields |= build_interval_fields(draws[index] - draws[0], "change_")
        yield records[-1].replace(**fields)


def _build_effective_record(
    needle_map: NeedleMap, cells: Sequence[Record], lengths: Sequence[int], scores: np.ndarray, draws: np.ndarray | None
) -> Record:
    """Build the record of the effective length.

    Args:
        scores: scores by length, float64 [lengths, 1].
        draws: bootstrap draws of the scores, float64 [lengths, resamples].
    """
    record, num_tokens = cells[-1], sum(cell.tokens for cell in cells)
    threshold = needle_map.effective_score
    title = record.metric_info.inline_title
    value = float(find_effective_lengths(lengths, scores, threshold)[0])
    interval: dict[str, Any] = {"low": None, "high": None}
    if draws is not None:
        interval = build_interval_fields(find_effective_lengths(lengths, draws, threshold))
    below = [
        length for length, score in zip(lengths, scores[:, 0], strict=True)
        if length < value and score < threshold - SCORE_TOLERANCE
    ]  # fmt: skip
    remark = (
        f"Largest length at which the mean {title} over depths is at least {100 * threshold:g}%; 0 if there is none. "
        f"Lengths over {lengths[-1]:,} were not evaluated."
    )
    if below:
        remark += (
            f" {record.method} is below this at the shorter lengths {', '.join(f'{length:,}' for length in below)}."
        )
    fields = {
        "metric": "effective_length", "length": needle_map.lengths[-1], "axis": "length", "place": None,
        "value": value, **interval, "tokens": num_tokens, "nll": None, "flops": None,
        "seconds": None, "cpu_seconds": None,
        "target_digest": hash_depths(f"{record.target_digest} absolute {threshold:g}", needle_map.depths),
        "block_sums": None, "block_tokens": None, "remark": f"{remark} {record.remark or ''}".strip(),
    }  # fmt: skip
    return record.replace(**fields)


def find_effective_lengths(lengths: Sequence[int], scores: np.ndarray, threshold: float) -> np.ndarray:
    """Return the largest length of each column whose score is at least a threshold; 0 if there is none.

    Args:
        lengths: ascending.
        scores: float64 [lengths, columns], 0 to 1.
    """
    return np.where(scores >= threshold - SCORE_TOLERANCE, np.array(lengths)[:, None], 0).max(axis=0)
