"""Every length scores the same targets, none twice, with exactly the context defined by the protocol."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.config.schema import parse_section
from megatron.evaluation.protocols import build_scoring_plan
from megatron.options.commands import AnalysisOptions
from megatron.options.evaluation import EvaluationOptions, LengthOptions
from megatron.utils.errors import UserError

lengths = st.lists(st.integers(min_value=1, max_value=40), min_size=1, max_size=4)


@given(lengths=lengths, stream=st.integers(2, 400), targets=st.integers(1, 12), windows=st.none() | st.integers(1, 9))
def test_last(lengths: list[int], stream: int, targets: int, windows: int | None) -> None:
    assume(targets <= min(lengths))
    assume(stream > max(lengths))
    try:
        plan = build_scoring_plan(stream, lengths, "last", targets=[targets], windows=windows)
    except UserError:
        assert windows is not None
        assert max(lengths) + (windows - 1) * targets > stream - 1  # rejected only if they do not fit
        return
    assert plan.lengths == tuple(sorted(set(lengths)))
    (cut,) = plan.target_sets
    reference = plan.locate_targets(cut, plan.lengths[0])
    assert reference.shape == (cut.blocks, targets)
    assert len(np.unique(reference)) == reference.size  # no token counts twice
    for length in plan.lengths:
        starts = plan.starts[length]
        assert starts.min() >= 0
        assert (starts + length).max() <= stream - 1  # the last label is a token of the stream
        # The window's labels are positions start + 1 … start + length; the last ones are scored.
        by_hand = [[s + length - targets + 1 + i for i in range(targets)] for s in starts.tolist()]
        assert plan.locate_targets(cut, length).tolist() == by_hand == reference.tolist()
    if windows is not None:
        assert cut.blocks == windows


@given(lengths=lengths, more=st.integers(1, 300), stride=st.integers(1, 12))
def test_strided(lengths: list[int], more: int, stride: int) -> None:
    assume(stride <= min(lengths))
    stream = max(lengths) + more
    plan = build_scoring_plan(stream, lengths, "strided", stride=stride)
    (cut,) = plan.target_sets
    scored = cut.blocks * cut.targets
    # From the first token with a full largest window, each once and in order, at every length.
    first = max(lengths) - stride + 1
    for length in plan.lengths:
        assert plan.locate_targets(cut, length).ravel().tolist() == list(range(first, first + scored))
        assert (plan.starts[length] >= 0).all()
        assert plan.count_windows(length) * stride == scored
    assert stream - 1 - (first + scored - 1) < max(cut.targets, stride)  # the remainder is shorter than a block


def test_several_targets_share_their_windows() -> None:
    plan = build_scoring_plan(1001, [10, 40, 100], "last", targets=[40, 10], windows=4)
    small, large = plan.target_sets
    assert (small.lengths, large.lengths) == ((10, 40, 100), (40, 100))
    assert [plan.count_scored(length) for length in plan.lengths] == [10, 40, 40]
    for length in large.lengths:
        assert np.array_equal(plan.locate_targets(large, length)[:, -10:], plan.locate_targets(small, length))
    rows = np.arange(4 * 40).reshape(4, 40)
    assert small.select_values(rows, 100).tolist() == rows[:, 30:].tolist()
    assert large.select_values(rows, 100).tolist() == rows.tolist()


@given(lengths=lengths, stream=st.integers(2, 2000))
def test_nonoverlapping(lengths: list[int], stream: int) -> None:
    span = math.lcm(*lengths)
    assume(stream > max(lengths))
    if stream <= span:
        with pytest.raises(UserError, match="multiples of"):
            build_scoring_plan(stream, lengths, "nonoverlapping")
        return
    plan = build_scoring_plan(stream, lengths, "nonoverlapping")
    scored = (stream - 1) // span * span
    for length in plan.lengths:
        assert plan.count_windows(length) == scored // length
        assert plan.count_scored(length) == length
        # The targets are positions 1, 2, 3, … of the stream, each once and in order, at any length.
        assert plan.locate_targets(plan.target_sets[0], length).ravel().tolist() == list(range(1, scored + 1))


@given(lengths=lengths, more=st.integers(0, 300), min_context=st.integers(1, 12))
def test_overlapping(lengths: list[int], more: int, min_context: int) -> None:
    assume(min_context <= min(lengths))
    steps = {length: length - min_context + 1 for length in lengths}
    block = math.lcm(*steps.values())
    stream = block + min_context + more
    plan = build_scoring_plan(stream, lengths, "overlapping", min_context=min_context)
    (cut,) = plan.target_sets
    scored = (stream - min_context) // block * block
    assert cut.blocks * cut.targets == scored
    for length in plan.lengths:
        # Position p has p − start earlier tokens in its window: at least min_context, and no target is missing.
        assert plan.locate_targets(cut, length).ravel().tolist() == list(range(min_context, min_context + scored))
        assert plan.starts[length].tolist() == list(range(0, scored, steps[length]))
        assert (plan.starts[length] + length).max() <= stream - 1
    if min_context == 1:
        plain = build_scoring_plan(stream, lengths, "nonoverlapping")
        assert all(np.array_equal(plain.starts[length], plan.starts[length]) for length in plan.lengths)


def test_windows_spread_over_the_whole_stream() -> None:
    plan = build_scoring_plan(1001, [10, 100], "last", targets=[10], windows=4)
    assert (plan.starts[100] + 100).tolist() == [100, 400, 700, 1000]
    assert plan.starts[10].tolist() == [90, 390, 690, 990]


def test_nonoverlapping_windows_match_the_largest_length() -> None:
    plan = build_scoring_plan(1000, [8, 32], "nonoverlapping", windows=3)
    assert (plan.count_windows(32), plan.count_windows(8), plan.target_sets[0].blocks) == (3, 12, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stream_length": 1, "lengths": [64]}, "has 1 token, too few"),
        ({"stream_length": 2048, "lengths": [64, 2048]}, r"has 2,048 tokens, too few .* 2,048 needs 2,049"),
        ({"stream_length": 999, "lengths": []}, "give at least one"),
        ({"stream_length": 999, "lengths": [0]}, "0 is not valid"),
        ({"stream_length": 999, "lengths": [32]}, "32 is shorter than the 64 targets"),
        ({"stream_length": 999, "lengths": [64], "protocol": "sliding"}, "choose from last, nonoverlapping"),
        ({"stream_length": 999, "lengths": [64], "windows": 0}, "at least 1"),
        ({"stream_length": 999, "lengths": [64], "windows": 99}, "enough for 15 windows of 64 targets"),
        ({"stream_length": 999, "lengths": [64], "targets": [0]}, "targets: 0"),
        ({"stream_length": 70, "lengths": [6, 64], "protocol": "nonoverlapping"}, "multiples of 192"),
        ({"stream_length": 999, "lengths": [64], "protocol": "nonoverlapping", "windows": 16}, "enough for 15 windows"),
        ({"stream_length": 999, "lengths": [4, 6], "protocol": "nonoverlapping", "windows": 3}, "a multiple of 2"),
        ({"stream_length": 999, "lengths": [64, 128], "targets": [64, 256]}, "128 is shorter than the 256 targets"),
        (
            {"stream_length": 99, "lengths": [6, 8], "protocol": "overlapping"},
            "min_context: protocol overlapping needs",
        ),
        (
            {"stream_length": 99, "lengths": [6], "protocol": "overlapping", "min_context": 7},
            "6 is shorter than min_co",
        ),
        ({"stream_length": 14, "lengths": [6, 8], "protocol": "overlapping", "min_context": 3}, "once 2 is subtracted"),
        ({"stream_length": 999, "lengths": [64], "protocol": "strided"}, "stride: protocol strided needs"),
        ({"stream_length": 999, "lengths": [64], "protocol": "strided", "stride": 65}, "shorter than the stride, 65"),
        (
            {"stream_length": 99, "lengths": [64], "protocol": "strided", "stride": 8, "windows": 9},
            "for 5 windows of 8",
        ),
        ({"stream_length": 999, "lengths": [64], "protocol": "strided", "stride": 8, "windows": 9}, "a multiple of 8"),
    ],
)
def test_invalid_protocols_are_reported_in_one_line(arguments: dict, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        build_scoring_plan(**{"targets": [64], **arguments})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", [EvaluationOptions, AnalysisOptions])
@pytest.mark.parametrize("length", [0, -8, 2**40, 10**30])
def test_lengths_are_bounded_however_they_are_given(options: type[LengthOptions], length: int) -> None:
    for value in ([length], str(length)):
        with pytest.raises(UserError, match=rf"lengths.*{length}"):
            parse_section(options, {"lengths": value})
