"""LongPPL and loss by position, compared with plain float64 loops; errors for unsuitable key tokens."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.evaluation.eval_target import ScoringContext
from megatron.evaluation.key_tokens import DEFAULT_ALPHA, DEFAULT_BETA, find_key_tokens, open_key_tokens
from megatron.evaluation.loss_records import check_measures, list_curve_positions, smooth_by_position
from megatron.evaluation.perplexity import evaluate_perplexity
from megatron.evaluation.protocols import plan_from_options
from megatron.evaluation.texts import EvalText
from megatron.options.evaluation import EvaluationOptions as Options
from megatron.reports.comparison_table import build_comparison_tables
from megatron.reports.plots import render_plots_png
from megatron.reports.records import Record
from megatron.reports.report_sentences import describe_measurements
from megatron.reports.uncertainty import draw_bootstrap_curves, draw_bootstrap_means
from megatron.utils.errors import RunError, UserError

from .conftest import BYTES, TRAIN_LENGTH, RunningMean, loaded, scored
from .test_perplexity import ROUNDING, STREAM, one_loss

FIELDS = {"run": "runs/a", "step": 3}
KEYS = {"lengths": [5, 9, 27], "targets": 5, "windows": 7, "measures": ["long_perplexity"]}


def test_defaults_match_the_paper() -> None:
    assert (DEFAULT_ALPHA, DEFAULT_BETA) == (2.0, -2.0)


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=1), st.floats(0, 3), st.floats(-3, 0))
def test_key_tokens_by_a_loop(pairs: list[tuple[float, float]], alpha: float, beta: float) -> None:
    short, long = (np.array(column) for column in zip(*pairs, strict=True))
    expected = [(-b) - (-a) > alpha and -b > beta for a, b in pairs]
    assert find_key_tokens(short, long, alpha, beta).tolist() == expected


def long_perplexity(
    model: RunningMean, options: Options, *, method: str = "a", stream: np.ndarray = STREAM, eod_mask_loss: bool = False
) -> list[Record]:
    text, plan = EvalText(stream, "a text", BYTES), plan_from_options(options, [TRAIN_LENGTH], len(stream))
    scoring = ScoringContext({**FIELDS, "method": method})
    key_tokens = open_key_tokens(options, text, plan)
    measures = options.measures or ()
    of_model = loaded(model, eod_mask_loss=eod_mask_loss)
    return evaluate_perplexity(of_model, text, plan, scoring, measures, key_tokens=key_tokens)  # type: ignore[arg-type]


def test_long_perplexity_is_that_of_a_loop(tmp_path: Path) -> None:
    """The reference determines key tokens from two losses of each target; another model is scored on these tokens
    only.
    """
    reference, other = RunningMean().eval(), RunningMean().eval()
    alpha, beta = 0.02, -3.2
    path = tmp_path / "keys.json"
    found = long_perplexity(
        reference,
        Options(**KEYS, key_tokens=str(path), find_key_tokens=True, key_alpha=alpha, key_beta=beta),
    )
    ends = [27 + number * 175 // 6 for number in range(7)]
    targets = [end - 4 + number for end in ends for number in range(5)]

    def loss(model: RunningMean, target: int, length: int) -> float:
        end = min(each for each in ends if each >= target)
        return one_loss(model, STREAM[end - length : target], int(STREAM[target]))

    gains = {target: loss(reference, target, 5) - loss(reference, target, 27) for target in targets}
    keys = [target for target in targets if gains[target] > alpha and -loss(reference, target, 27) > beta]
    assert 3 <= len(keys) < len(targets) - 3, "the case says something"
    content = json.loads(path.read_text())
    assert content["positions"] == sorted(keys)
    assert (content["short_length"], content["long_length"], content["num_targets"]) == (5, 27, 35)
    read = Options(**KEYS, key_tokens=str(path))
    for model, records in ((reference, found), (other, long_perplexity(other, read))):
        assert [record.length for record in records] == [5, 9, 27]
        for record in records:
            expected = sum(loss(model, key, record.length) for key in keys) / len(keys)
            assert record.nll == pytest.approx(expected, abs=ROUNDING)
            assert record.value == pytest.approx(math.exp(expected), rel=2 * ROUNDING)
            assert (record.metric, record.tokens) == ("long_perplexity", len(keys))
            assert record.low <= record.value <= record.high
            assert f"{len(keys)} key tokens" in record.remark
    (table,) = build_comparison_tables([*found, *long_perplexity(other, read, method="b")])
    assert table.methods == ("a", "b")
    assert table.title.startswith("Perplexity per key token")


def test_models_that_skip_a_key_token_are_not_compared_with_others(tmp_path: Path, running_mean: RunningMean) -> None:
    path, stream = tmp_path / "keys.json", STREAM.copy()
    stream[26] = BYTES.eod
    finding = {"find_key_tokens": True, "key_alpha": 0.0, "key_beta": -9.0}
    long_perplexity(running_mean, Options(**KEYS, key_tokens=str(path), **finding), stream=stream)
    tables = []
    for positions in ([23, 24, 27], [23, 24]):  # the token at 27 follows the end of a document
        path.write_text(json.dumps(json.loads(path.read_text()) | {"positions": positions}))
        read = Options(**KEYS, key_tokens=str(path))
        every, masked = (
            long_perplexity(running_mean, read, method=name, stream=stream, eod_mask_loss=name == "masked")
            for name in ("every", "masked")
        )
        assert [every[0].tokens, masked[0].tokens] == [len(positions), 2]
        tables.append([table.methods for table in build_comparison_tables([*every, *masked])])
    assert tables == [[("every",), ("masked",)], [("every", "masked")]]


def find_published_key_tokens(
    model: RunningMean, text: np.ndarray, trunc_len: int, sliding_window: int, alpha: float, beta: float
) -> list[int]:
    """Choose key tokens of one text like the function of longppl 0.3.0.

    Short windows start at 0, S, 2S …, contain trunc_len + S tokens and score the last S. The long context is the whole
    text before a token.
    """
    keys = []
    for start in range(0, len(text) - trunc_len, sliding_window):
        for token in range(start + trunc_len, min(start + trunc_len + sliding_window, len(text))):
            short = one_loss(model, text[start:token], int(text[token]))
            full = one_loss(model, text[:token], int(text[token]))
            if short - full > alpha and full < -beta:
                keys.append(token)
    return keys


def test_overlapping_windows_choose_the_key_tokens_of_the_published_function(tmp_path: Path) -> None:
    """Score consecutive texts of 19 tokens, each with the end of the previous one as its first context."""
    reference, trunc_len, sliding_window, num_short = RunningMean().eval(), 4, 3, 5
    short_length, num_scored = trunc_len + sliding_window - 1, sliding_window * num_short
    long_length = trunc_len + num_scored - 1
    path, alpha, beta = tmp_path / "keys.json", 0.01, -3.1
    options = Options(
        lengths=[short_length, long_length], protocol="overlapping", min_context=trunc_len, windows=6,
        measures=["long_perplexity"], key_tokens=str(path), find_key_tokens=True, key_alpha=alpha, key_beta=beta,
    )  # fmt: skip
    records = long_perplexity(reference, options)
    expected, losses = [], []
    for begin in range(0, 6 * num_scored, num_scored):
        text = STREAM[begin : begin + long_length + 1]
        keys = find_published_key_tokens(reference, text, trunc_len, sliding_window, alpha, beta)
        expected += [begin + key for key in keys]
        losses += [one_loss(reference, text[:key], int(text[key])) for key in keys]
    content = json.loads(path.read_text())
    assert 5 <= len(expected) < content["num_targets"] - 5, "the case says something"
    assert content["positions"] == expected
    assert content["num_targets"] == 6 * num_scored
    assert records[-1].nll == pytest.approx(sum(losses) / len(losses), abs=ROUNDING)
    assert (records[-1].length, records[-1].targets_per_window) == (long_length, None)
    alone = Options(
        lengths=[long_length], protocol="overlapping", min_context=trunc_len, windows=6,
        measures=["long_perplexity"], key_tokens=str(path),
    )  # fmt: skip
    assert long_perplexity(reference, alone)[0].nll == records[-1].nll
    assert f"at least {trunc_len} tokens of context" in _describe_protocol(records)


def _describe_protocol(records: list[Record]) -> str:
    return describe_measurements(build_comparison_tables(records))[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha": "two"}, "alpha is 'two'; it must be a number"),
        ({"alpha": float("nan")}, "alpha is nan; it must be a finite number"),
        ({"num_targets": 0}, "num_targets is 0; it must be at least 1"),
        ({"positions": []}, "positions is []; it must be a list of at least 1 value"),
        ({"positions": [4, "5"]}, "item 2 of positions is '5'; it must be an integer"),
        ({"positions": [-1]}, "item 1 of positions is -1; it must be at least 0"),
        ({"reference": {"method": "rotary"}}, "reference: run is missing"),
        ({"tokens": [4]}, "unknown field tokens"),
    ],
)
def test_damaged_fields_are_named(
    tmp_path: Path, running_mean: RunningMean, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "keys.json"
    finding = {"find_key_tokens": True, "key_alpha": 0.0, "key_beta": -9.0}
    long_perplexity(running_mean, Options(**KEYS, key_tokens=str(path), **finding))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError) as error:
        long_perplexity(running_mean, Options(**KEYS, key_tokens=str(path)))
    assert str(error.value) == f"key_tokens {path}: not a file of key tokens: {message}"


def test_key_tokens_fit_one_text_and_one_choice_of_windows(tmp_path: Path, running_mean: RunningMean) -> None:
    path = str(tmp_path / "keys.json")
    finding = {"find_key_tokens": True, "key_alpha": 0.0, "key_beta": -9.0}
    long_perplexity(running_mean, Options(**KEYS, key_tokens=path, **finding))
    missing = str(tmp_path / "none.json")
    damaged = tmp_path / "damaged.json"
    damaged.write_text('{"format": 1}')
    for choices, message in (
        ({"lengths": [5, 20]}, "different largest length: 27 in the file, 20 here"),
        ({"windows": 6}, r"different choice of windows and targets \(digest\)"),
        ({"targets": 4}, r"different choice of windows and targets \(digest\)"),
        ({"key_alpha": 1.0}, "only for finding key tokens"),
        ({"find_key_tokens": True}, "file exists, and other evaluations may depend on it"),
        ({"key_tokens": missing}, "no such file; set find_key_tokens to create it"),
        ({"key_tokens": str(damaged)}, "not a file of key tokens: alpha is missing"),
        ({"key_tokens": None}, "long_perplexity needs key_tokens"),
        ({"measures": ["perplexity"]}, "only for the measure long_perplexity"),
        (
            {"measures": ["perplexity"], "key_tokens": None, "key_alpha": 0.0},
            "key_alpha: only for the measure long_perplexity",
        ),
        ({"targets": [3, 5]}, "needs one set of targets"),
        ({"protocol": "nonoverlapping", "targets": None, "windows": None}, "needs one set of targets"),
        (
            {"protocol": "strided", "targets": None, "windows": None, "stride": 5},
            "different protocol: last in the file, ",
        ),
        ({"lengths": [27], "find_key_tokens": True, "key_tokens": missing}, "give two lengths"),
    ):
        with pytest.raises(UserError, match=message):
            long_perplexity(running_mean, Options(**{**KEYS, "key_tokens": path, **choices}))
    with pytest.raises(UserError, match=r"different text \(digest\)"):
        long_perplexity(running_mean, Options(**KEYS, key_tokens=path), stream=STREAM[::-1].copy())
    with pytest.raises(RunError, match="no key tokens"):
        long_perplexity(running_mean, Options(**KEYS, key_tokens=missing, **{**finding, "key_alpha": 50.0}))
    running_mean.max_length = 9
    with pytest.raises(RunError, match="does not support length 27"):
        long_perplexity(running_mean, Options(**KEYS, key_tokens=missing, **finding))
    assert not Path(missing).exists()


@given(st.integers(1, 40), st.integers(1, 12).map(lambda half: 2 * half - 1), st.integers(1, 20))
def test_smoothing_by_a_loop(length: int, width: int, train_length: int) -> None:
    values = np.random.default_rng(length).normal(size=(3, length))
    positions = list_curve_positions(train_length, length)
    assert {1, length} <= set(positions.tolist())
    assert train_length > length or train_length in positions
    for index, position in enumerate(positions.tolist()):
        before = min(width // 2, position - 1)
        seen = range(position - before, min(position + before, length) + 1)
        expected = [sum(row[at - 1] for at in seen) for row in values]
        np.testing.assert_allclose(smooth_by_position(values, positions, width)[:, index], expected, atol=1e-12)


def test_draws_of_curves_are_the_bootstrap() -> None:
    """Resampled curves match the bootstrap of single points up to sampling noise, because they use other samples."""
    generator = np.random.default_rng(5)
    counts = generator.integers(1, 5, size=(40, 3)).astype(float)
    sums = generator.normal(2, 1, size=(40, 3)) * counts
    draws = draw_bootstrap_curves(sums, counts)
    assert draws is not None
    for point in range(3):
        single = draw_bootstrap_means(sums[None, :, point], counts[:, point].astype(int))
        assert single is not None
        np.testing.assert_allclose(np.std(draws[:, point]), np.std(single[0]), rtol=0.1)
        np.testing.assert_allclose(np.mean(draws[:, point]), np.mean(single[0]), atol=0.02)
    assert draw_bootstrap_curves(sums[:1], counts[:1]) is None


def test_the_loss_at_every_position(running_mean: RunningMean) -> None:
    """Losses by position as in the Forgetting Transformer's figure: each value is the mean of its neighbors."""
    length, width = 20, 5
    measures = {"measures": ["perplexity", "token_loss"], "smoothing": width}
    options = Options(lengths=[10, length], windows=4, protocol="nonoverlapping", **measures)
    found = [each for each in scored(loaded(running_mean), STREAM, options) if each.axis == "tokens_seen"]
    assert {each.length for each in found} == {length}
    losses = [
        [one_loss(running_mean, STREAM[start : start + at], int(STREAM[start + at])) for at in range(1, length + 1)]
        for start in range(0, 4 * length, length)
    ]
    assert [each.place for each in found] == [float(at) for at in range(1, length + 1)]
    for each in found:
        at = int(each.place)
        before = min(width // 2, at - 1)
        seen = [row[place - 1] for row in losses for place in range(at - before, min(at + before, length) + 1)]
        assert each.value == pytest.approx(sum(seen) / len(seen), abs=ROUNDING)
        assert (each.tokens, each.smoothing, each.metric) == (len(seen), width, "loss")
        assert each.low <= each.value <= each.high
    far = [each.replace(method="b", value=each.value + 1) for each in found]
    (table,) = build_comparison_tables([*found, *far])
    assert table.x_values == (1.0, 2.0, 4.0, 8.0, 16.0, 20.0)
    assert "by tokens seen, windows of 20 tokens" in table.title
    assert render_plots_png(build_comparison_tables([*found, *far]))[:4] == b"\x89PNG"
    for choices, message in (
        ({"protocol": "last"}, "token_loss needs protocol nonoverlapping"),
        ({"smoothing": 4}, "odd number of positions"),
        ({"smoothing": 21}, "at most 20"),
        ({"measures": ["position"]}, "only for the measure token_loss"),
    ):
        changed = options.replace(**choices)
        with pytest.raises(UserError, match=message):
            check_measures(changed, plan_from_options(changed, [TRAIN_LENGTH], len(STREAM)))
