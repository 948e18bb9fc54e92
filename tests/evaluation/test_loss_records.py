"""Every metric, compared with a plain loop over windows and targets in ordinary Python arithmetic."""

import math
import statistics
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from megatron.evaluation.loss_records import (
    RecordBuilder,
    ScoredLength,
    TargetTokens,
    check_measures,
    list_position_bins,
)
from megatron.evaluation.protocols import build_scoring_plan, plan_from_options
from megatron.options.evaluation import EvaluationOptions as Options
from megatron.reports import context_gain
from megatron.reports.comparison_table import build_comparison_tables
from megatron.reports.metrics import MAX_NLL
from megatron.reports.records import Record, read_records, write_records
from megatron.reports.uncertainty import compute_percentile_interval, draw_bootstrap_means
from megatron.utils.errors import UserError

from .conftest import BYTES, TRAIN_LENGTH, VOCABULARY, RunningMean, loaded, scored
from .test_perplexity import ROUNDING, STREAM, by_hand, one_loss


def of(records: list[Record], metric: str, axis: str = "length") -> list[Record]:
    return [record for record in records if (record.metric, record.axis) == (metric, axis)]


def test_several_targets_in_one_pass(running_mean: RunningMean) -> None:
    found = scored(loaded(running_mean), STREAM, Options(lengths=[5, 9, 27], targets=[5, 9], windows=3))
    passes = len(running_mean.batches)
    # The windows are those with the most targets.
    ends = [27, 27 + 175 // 2, 202]
    assert [(record.targets, record.length) for record in found] == [(5, 5), (5, 9), (5, 27), (9, 9), (9, 27)]
    for record in found:
        rows = by_hand(running_mean, ends, record.length, record.targets)
        assert record.nll == pytest.approx(statistics.fmean(map(statistics.fmean, rows)), abs=ROUNDING)
        assert record.tokens == 3 * record.targets
    assert len({record.target_digest for record in found}) == 2
    assert passes == 3, "each length is computed once"


def test_delta_perplexity(running_mean: RunningMean) -> None:
    """Delta perplexity (2410.04798, appendix A): the same tokens alone and with the whole window before them."""
    options = Options(lengths=[5, 9, 27], targets=5, windows=3, measures=["delta_perplexity"])
    found = scored(loaded(running_mean), STREAM, options)
    ends = [27, 27 + 175 // 2, 202]
    alone = [statistics.fmean(row) for row in by_hand(running_mean, ends, 5, 5)]
    assert [(record.metric, record.length) for record in found] == [
        ("delta_perplexity", 9), ("log_ratio", 9), ("delta_perplexity", 27), ("log_ratio", 27),
    ]  # fmt: skip
    for record in found:
        rows = [statistics.fmean(row) for row in by_hand(running_mean, ends, record.length, 5)]
        local, full = statistics.fmean(alone), statistics.fmean(rows)
        if record.metric == "log_ratio":
            value, extremes = local - full, [a - b for a, b in zip(alone, rows, strict=True)]
        else:
            value = math.exp(local) - math.exp(full)
            extremes = [math.exp(a) - math.exp(b) for a, b in zip(alone, rows, strict=True)]
        assert record.value == pytest.approx(value, abs=2 * VOCABULARY_ROUNDING)
        # With three blocks, drawing one block three times has probability 1/27; values beyond all of them never occur.
        low, high = record.bootstrap_interval
        assert min(extremes) - 2 * VOCABULARY_ROUNDING <= low <= record.value <= high
        assert high <= max(extremes) + 2 * VOCABULARY_ROUNDING


def test_the_gain_of_a_model_with_huge_losses_is_finite() -> None:
    """The mean loss has a perplexity, but the resampled means of some blocks exceed the range of exp."""
    plan = build_scoring_plan(1000, [4, 8], targets=[4], windows=8)
    (target_set,) = plan.target_sets
    tokens = TargetTokens(np.ones((8, 4), dtype=bool), 0, "d")
    fields = {"method": "a", "seed": 1, "train_length": 4}
    builder = RecordBuilder(plan, target_set, tokens, 4, ["delta_perplexity"], fields)
    losses = np.repeat(MAX_NLL - 10 + np.array([[-60.0], [60.0]] * 4), 4, axis=1)
    builder.add(ScoredLength(4, losses, {}))
    builder.add(ScoredLength(8, losses - 1, {}))
    gain, log_ratio = builder.build_records()
    assert gain.low < gain.value < math.exp(MAX_NLL)
    assert (log_ratio.low, log_ratio.value, log_ratio.high) == pytest.approx((1, 1, 1))


VOCABULARY_ROUNDING = ROUNDING * 60
"""Rounding of a perplexity below 60 that follows from the rounding of a mean loss."""


def test_position(running_mean: RunningMean) -> None:
    options = Options(lengths=[4, 24], protocol="nonoverlapping", measures=["perplexity", "position"])
    found = scored(loaded(running_mean), STREAM, options)
    assert [record.length for record in of(found, "perplexity")] == [4, 24]
    for length, ends in ((4, [1, 2, 4]), (24, [1, 2, 4, 8, 16, 24])):
        losses: dict[int, list[float]] = {}
        for begin in range(0, 192, length):
            for at in range(begin + 1, begin + length + 1):
                end = next(end for end in ends if at - begin <= end)
                losses.setdefault(end, []).append(one_loss(running_mean, STREAM[begin:at], int(STREAM[at])))
        here = [record for record in of(found, "perplexity", "position") if record.length == length]
        assert [record.place for record in here] == ends
        for record in here:
            expected = losses[round(record.place)]
            assert record.tokens == len(expected)
            assert record.nll == pytest.approx(statistics.fmean(expected), abs=ROUNDING)
            low, high = record.bootstrap_interval
            assert low < record.value < high
        total = sum(record.nll * record.tokens for record in here)
        (whole,) = (record for record in of(found, "perplexity") if record.length == length)
        assert total == pytest.approx(whole.nll * 192)


def test_the_interval_of_a_bin_uses_all_blocks_with_its_tokens(running_mean: RunningMean) -> None:
    stream = STREAM.copy()
    stream[24] = BYTES.eod  # the second of eight windows lacks a first target, but has a last one
    options = Options(lengths=[24], protocol="nonoverlapping", measures=["position"])
    first, *_, last = scored(loaded(running_mean, eod_mask_loss=True), stream, options)
    sums, counts = np.zeros((1, 8)), np.zeros(8, dtype=int)
    for block, begin in enumerate(range(0, 192, 24)):
        for at in range(begin + 17, begin + 25):
            if stream[at - 1] != BYTES.eod:
                sums[0, block] += one_loss(running_mean, stream[begin:at], int(stream[at]))
                counts[block] += 1
    assert first.tokens < 8
    assert (last.place, last.tokens) == (24, counts.sum())
    assert last.bootstrap_interval == pytest.approx(
        np.exp(compute_percentile_interval(draw_bootstrap_means(sums, counts)[0])), rel=ROUNDING
    )


@given(st.integers(1, 4096), st.integers(1, 5000))
def test_bins_of_positions(train_length: int, length: int) -> None:
    ends = list_position_bins(train_length, length)
    assert ends == sorted(set(ends))
    assert ends[-1] == length
    assert ends[0] == 1
    if train_length <= length:
        assert train_length in ends
    assert all(later <= 2 * end + 1 for end, later in pairwise(ends)), "no bin spans more than an octave"


def test_strided_with_stride_one_is_the_sliding_window(running_mean: RunningMean) -> None:
    """Each token is predicted from a new encoding of the tokens before it (2307.10156, figure 1)."""
    found = scored(loaded(running_mean), STREAM, Options(lengths=[6, 11], protocol="strided", stride=1))
    for record in found:
        last = 11 + record.tokens
        losses = [one_loss(running_mean, STREAM[at - record.length : at], int(STREAM[at])) for at in range(11, last)]
        assert record.nll == pytest.approx(statistics.fmean(losses), abs=ROUNDING)
        assert (record.windows, record.blocks) == (record.tokens, record.tokens // 11)
    # One window of L per token costs L times as much as non-overlapping windows.
    assert found[1].flops == pytest.approx(running_mean.count_flops_per_token(11) / 3 * 11 * found[1].tokens)


class Copier(RunningMean):
    """Model that gives probability 0.9 to the token a fixed distance before the target, if its window contains it."""

    def __init__(self, distance: int) -> None:
        super().__init__()
        self.distance = distance

    def forward(self, tokens: Tensor, labels: Tensor, num_logits: int) -> Tensor:
        source = nn.functional.pad(tokens, (self.distance - 1, 0), value=-1)[:, : tokens.shape[1]]
        hit = torch.where(source == labels, 0.9, 0.1 / (VOCABULARY - 1))
        return -torch.where(source < 0, torch.tensor(1 / VOCABULARY), hit).log()[:, -num_logits:]


@pytest.mark.parametrize(
    ("distance", "gain", "verdict"),
    [
        (20, math.log(VOCABULARY * 0.9), context_gain.USED),  # the source is in windows of 32 tokens only
        (40, 0.0, context_gain.IGNORED),  # and in no window
        (19, math.log(VOCABULARY * 0.1 / (VOCABULARY - 1)), context_gain.HURT),  # it copies the wrong token
    ],
)
def test_use_of_context_of_models_that_copy(distance: int, gain: float, verdict: str) -> None:
    """The text has a period of 20 tokens, in which neighbors differ."""
    tokens = np.random.default_rng(3).permutation(VOCABULARY)
    stream = np.tile(np.append(tokens, tokens[9]), 12)
    found = scored(loaded(Copier(distance)), stream, Options(lengths=[8, 16, 32], targets=2, windows=30))
    (table,) = build_comparison_tables(found)
    measured = context_gain.measure_gain(table, "rotary", 8, 32)
    assert context_gain.find_base_length(table) == 8
    assert measured.verdict == verdict
    assert measured.gain == pytest.approx(gain, abs=1e-6)
    assert measured.interval == pytest.approx((gain, gain), abs=1e-6), "all targets gain the same"


def test_sums_of_blocks_are_kept_for_comparisons(running_mean: RunningMean, tmp_path) -> None:
    found = scored(loaded(running_mean), STREAM, Options(lengths=[9], targets=5, windows=3))
    rows = by_hand(running_mean, [9, 9 + 193 // 2, 202], 9, 5)
    (record,) = read_records(write_records(tmp_path / "results.json", found))
    assert record.block_sums == pytest.approx([sum(row) for row in rows], abs=5 * ROUNDING + 1e-6)
    assert record.block_tokens is None
    masked = loaded(running_mean, eod_mask_loss=True)
    (record,) = scored(masked, STREAM, Options(lengths=[9], targets=5, windows=30))
    assert sum(record.block_tokens) == record.tokens < 150
    assert sum(record.block_sums) / record.tokens == pytest.approx(record.nll, abs=1e-6)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"measures": ["position"]}, "protocol nonoverlapping"),
        ({"measures": ["delta_perplexity"], "protocol": "nonoverlapping"}, "needs protocol last"),
        ({"measures": ["delta_perplexity"], "targets": 4}, "use length 4 and a longer one"),
        ({"measures": ["delta_perplexity"], "lengths": [8]}, "use length 8 and a longer one"),
        ({"protocol": "nonoverlapping", "targets": 8}, "targets: only for protocol last, not nonoverlapping"),
        ({"stride": 8}, "stride: only for protocol strided, not last"),
    ],
)
def test_invalid_measurements_are_reported_in_one_line(choices: dict, message: str) -> None:
    options = Options(**{"lengths": [8, 16], **choices})
    with pytest.raises(UserError, match=message):
        check_measures(options, plan_from_options(options, [TRAIN_LENGTH], 999))


def test_lists_of_options() -> None:
    assert Options(targets="8,16").targets == [8, 16]
    assert Options(targets=8).targets == [8]
    assert Options(measures="perplexity, position").measures == ["perplexity", "position"]
    for wrong in ({"targets": "8,x"}, {"targets": 0}, {"targets": True}, {"measures": "nothing"}, {"targets": []}):
        with pytest.raises(ValueError, match=r"targets|measures"):
            Options(**wrong)


def test_only_axes_other_than_length_have_places() -> None:
    known = {"method": "a", "train_length": 8, "length": 16, "protocol": "last", "metric": "perplexity", "value": 2.0,
             "tokens": 4, "seed": 1}  # fmt: skip
    assert Record(**known).x_value == 16
    assert Record(**known, axis="position", place=4.0).x_value == 4
    for wrong in (
        {"place": 4.0},
        {"axis": "position"},
        {"axis": "depth", "place": 1.5},
        {"axis": "dept", "place": 1.0},
    ):
        with pytest.raises(ValueError, match=r"has no place|has a place|between 0 and 1|did you mean depth"):
            Record(**known, **wrong)
    assert np.isfinite(Record(**known, axis="depth", place=0.5).x_value)
