"""Perplexities, compared with a plain loop over windows and targets in ordinary Python arithmetic."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from megatron.data.load_tokenizer import Vocabulary
from megatron.evaluation.loss_records import summarize_losses
from megatron.evaluation.perplexity import compute_window_losses
from megatron.evaluation.protocols import choose_default_targets
from megatron.options.evaluation import EvaluationOptions as Options
from megatron.utils.errors import RunError, UserError
from tools.tolerances import compute_tolerance, count_gpt_sums

from .conftest import BYTES, VOCABULARY, RunningMean, loaded, scored, tiny_gpt

ROUNDING = compute_tolerance(*count_gpt_sums(16, layers=2)) * math.log(VOCABULARY)
TWENTY = Options(lengths=[8], targets=8, windows=20)
STREAM = np.random.default_rng(0).integers(0, VOCABULARY, 203).astype(np.uint16)


def one_loss(model: nn.Module, tokens: np.ndarray, label: int) -> float:
    """Return −log p(label | tokens) from a forward pass over exactly these tokens."""
    inputs = torch.tensor(tokens.astype(np.int64))[None]
    with torch.no_grad():
        if isinstance(model, RunningMean):
            logits = model.output(model.embedding(inputs).mean(1))[0]
        else:
            logits = model(inputs)[0, -1]
    logits = logits.double()
    return float(torch.logsumexp(logits, 0) - logits[label])


def by_hand(model: nn.Module, ends: list[int], length: int, targets: int) -> list[list[float]]:
    """Return losses of windows whose inputs end before position `end`; each target is predicted from the window up to
    it.
    """
    rows = []
    for end in ends:
        start = end - length
        rows.append([one_loss(model, STREAM[start:at], int(STREAM[at])) for at in range(end - targets + 1, end + 1)])
    return rows


@pytest.mark.parametrize(
    "position",
    [None, {"pos_emb": "kerple_log"}, {"pos_emb": "rotary"},
     {"pos_emb": "alibi", "score_processor": "cdape", "score_processor_options": {"width": 3}}],
    ids=["running mean", "kerple_log", "rotary", "cdape on alibi"],
)  # fmt: skip
def test_last_equals_a_plain_loop(position: dict[str, Any] | None) -> None:
    model = RunningMean() if position is None else tiny_gpt(**position)
    records = scored(loaded(model), STREAM, Options(lengths=[27, 5, 9], targets=5, windows=3))
    # Ends are spread from 27, the first possible for the longest window, to 202, the last token.
    ends = [27, 27 + 175 // 2, 202]
    assert [record.length for record in records] == [5, 9, 27]
    for record in records:
        losses = by_hand(model, ends, record.length, 5)
        nll = sum(sum(row) for row in losses) / 15
        means = [sum(row) / 5 for row in losses]
        assert record.nll == pytest.approx(nll, abs=ROUNDING)
        assert record.value == pytest.approx(math.exp(nll), rel=ROUNDING)
        assert record.stderr == pytest.approx(np.std(means, ddof=1) / math.sqrt(3), abs=ROUNDING)
        # With three blocks, the most extreme resample (one block three times) has probability 1/27, which exceeds 2.5%.
        assert record.bootstrap_interval == pytest.approx((math.exp(min(means)), math.exp(max(means))), rel=ROUNDING)
        assert record.change_from == (None if record.length == 5 else 5)
        if record.length > 5:
            assert record.change == pytest.approx(record.value / records[0].value)
            start = [sum(row) / 5 for row in by_hand(model, ends, 5, 5)]
            changes = [math.exp(at - before) for at, before in zip(means, start, strict=True)]
            assert (record.change_low, record.change_high) == pytest.approx(
                (min(changes), max(changes)), rel=2 * ROUNDING
            )
        assert (record.tokens, record.windows, record.targets, record.protocol) == (15, 3, 5, "last")
    assert len({record.target_digest for record in records}) == 1
    assert len({record.value for record in records}) == 3


def test_nonoverlapping_equals_a_plain_loop(running_mean: RunningMean) -> None:
    records = scored(loaded(running_mean), STREAM, Options(lengths=[4, 8, 24], protocol="nonoverlapping"))
    for record in records:
        # 203 tokens contain 8 spans of 24 whose last token has a successor.
        losses = [
            one_loss(running_mean, STREAM[begin:at], int(STREAM[at]))
            for begin in range(0, 192, record.length)
            for at in range(begin + 1, begin + record.length + 1)
        ]
        assert record.tokens == len(losses) == 192
        assert record.windows == 192 // record.length
        assert record.nll == pytest.approx(sum(losses) / 192, abs=ROUNDING)
    assert len({record.target_digest for record in records}) == 1


def test_a_uniform_model_has_the_vocabulary_size_as_perplexity(running_mean: RunningMean) -> None:
    for parameter in running_mean.parameters():
        parameter.data.zero_()
    (record,) = scored(loaded(running_mean), STREAM, Options(lengths=[16], targets=8))
    assert record.value == pytest.approx(VOCABULARY)
    assert record.stderr == pytest.approx(0, abs=ROUNDING)


@pytest.mark.parametrize("batch_tokens", [1, 20, 65, 10_000])
def test_batching_changes_nothing_but_the_batches(running_mean: RunningMean, batch_tokens: int) -> None:
    starts = np.arange(0, 180, 18)
    losses = compute_window_losses(running_mean, STREAM, starts, 20, 7, batch_tokens=batch_tokens)
    assert losses == pytest.approx(np.array(by_hand(running_mean, (starts + 20).tolist(), 20, 7)), abs=ROUNDING)
    assert all(count * 20 <= max(batch_tokens, 20) for count, _ in running_mean.batches)
    assert sum(count for count, _ in running_mean.batches) == 10


def test_out_of_memory_leads_to_smaller_batches(running_mean: RunningMean) -> None:
    whole = running_mean.forward

    def small_memory(tokens: torch.Tensor, **rest: Any) -> torch.Tensor:
        if len(tokens) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return whole(tokens, **rest)

    starts = np.arange(0, 180, 18)
    expected = compute_window_losses(running_mean, STREAM, starts, 20, 7)
    running_mean.forward = small_memory  # type: ignore[method-assign]
    assert np.allclose(compute_window_losses(running_mean, STREAM, starts, 20, 7), expected, rtol=0, atol=ROUNDING)

    def no_memory(tokens: torch.Tensor, **rest: Any) -> torch.Tensor:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    running_mean.forward = no_memory  # type: ignore[method-assign]
    with pytest.raises(RunError, match="length 20: one window does not fit"):
        compute_window_losses(running_mean, STREAM, starts, 20, 7)


def test_other_errors_are_not_treated_as_out_of_memory(running_mean: RunningMean) -> None:
    running_mean.output = nn.Linear(5, 3)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        compute_window_losses(running_mean, STREAM, np.array([0]), 20, 7)


def test_eod_mask_loss_excludes_tokens_after_a_document_end(running_mean: RunningMean) -> None:
    eod = BYTES.eod
    (masked,) = scored(loaded(running_mean, eod_mask_loss=True), STREAM, TWENTY)
    (whole,) = scored(loaded(running_mean), STREAM, TWENTY)
    ends = [8 + i * 194 // 19 for i in range(20)]
    losses = np.array(by_hand(running_mean, ends, 8, 8))
    before = np.array([[STREAM[at - 1] for at in range(end - 7, end + 1)] for end in ends])
    assert (before == eod).sum() > 0
    assert masked.tokens == (before != eod).sum()
    assert masked.nll == pytest.approx(losses[before != eod].mean(), abs=ROUNDING)
    assert (whole.tokens, whole.nll) == (160, pytest.approx(losses.mean(), abs=ROUNDING))
    assert masked.target_digest != whole.target_digest


def test_bits_per_byte_counts_bytes_not_document_ends(running_mean: RunningMean) -> None:
    eod = BYTES.eod
    (record,) = scored(loaded(running_mean), STREAM, TWENTY)
    ends = [8 + i * 194 // 19 for i in range(20)]
    labels = np.array([[STREAM[at] for at in range(end - 7, end + 1)] for end in ends])
    assert record.bits_per_byte == pytest.approx(record.nll * 160 / math.log(2) / (labels != eod).sum())
    other = Vocabulary(VOCABULARY, "HFTokenizer-0123", eod)
    assert scored(loaded(running_mean), STREAM, TWENTY, vocabulary=other)[0].bits_per_byte is None


def test_repeated_evaluations_are_identical() -> None:
    model = loaded(tiny_gpt(pos_emb="t5"))
    first, second = (scored(model, STREAM, Options(lengths=[8, 32])) for _ in range(2))
    changing = {"date", "seconds", "cpu_seconds", "memory_gib"}
    assert [r.model_dump(exclude=changing) for r in first] == [r.model_dump(exclude=changing) for r in second]


def test_chunked_attention_gives_the_same_perplexity() -> None:
    options = {"pos_emb": "kerple_log", "score_processor": "cdape"}
    eager, chunked = tiny_gpt(**options), tiny_gpt(**options)
    for layer in chunked.decoder.layers:
        from megatron.attention.backends.pytorch import ChunkedBackend

        layer.self_attention.core_attention.backend = ChunkedBackend(5)
    expected, found = (scored(loaded(model), STREAM, Options(lengths=[8, 64], windows=4)) for model in (eager, chunked))
    assert [r.nll for r in found] == pytest.approx([r.nll for r in expected], abs=ROUNDING)


def test_progress_ends_at_100_percent(running_mean: RunningMean) -> None:
    calls: list[tuple[int, float, float]] = []
    report = lambda *call: calls.append(call)  # noqa: E731
    scored(loaded(running_mean), STREAM, Options(lengths=[8, 16, 32], windows=5), progress=report, batch_tokens=32)
    done = [call[1] for call in calls]
    assert done == sorted(done)
    assert done[-1] == pytest.approx(calls[-1][2])
    # A forward pass is a third of forward and backward: Σ windows · T · (3 T) / 3.
    assert [call[2] for call in calls] == pytest.approx([5 * (8 * 8 + 16 * 16 + 32 * 32)] * len(calls))
    assert [call[0] for call in calls] == sorted(call[0] for call in calls)


def test_fields_of_a_record() -> None:
    model = tiny_gpt(pos_emb="kerple_log", score_processor="cdape", score_processor_options={"kernel_size": 5})
    position = {"score_processor": "cdape", "score_processor_options": {"kernel_size": 5}, "pos_emb": "kerple_log"}
    (record,) = scored(loaded(model, **position), STREAM, Options(lengths=[16]))
    assert record.method == record.position == "cdape(kernel_size=5)+kerple_log"
    assert (record.train_length, record.length, record.seed) == (8, 16, 7)
    assert record.parameters == sum(p.numel() for p in model.parameters())
    assert (record.dtype, record.device) == ("float32", "cpu")


@pytest.mark.parametrize("choices", [{}, {"protocol": "nonoverlapping", "measures": ["position"]}])
def test_a_loss_that_is_not_finite_is_an_error(running_mean: RunningMean, choices: dict[str, Any]) -> None:
    running_mean.output.bias.data[0] = math.nan
    with pytest.raises(RunError, match="rotary: the loss at length 8 is nan"):
        scored(loaded(running_mean), STREAM, Options(lengths=[8], **choices))


def test_a_limited_model_is_scored_up_to_its_maximum_on_the_same_targets() -> None:
    learned = loaded(tiny_gpt(pos_emb="learned"), pos_emb="learned")
    (found,) = scored(learned, STREAM, Options(lengths=[8, 16, 64], windows=5))
    others = scored(loaded(tiny_gpt(pos_emb="rotary")), STREAM, Options(lengths=[8, 16, 64], windows=5))
    assert (found.length, found.max_length) == (8, 8)
    assert {found.target_digest} == {other.target_digest for other in others}
    assert scored(learned, STREAM, Options(lengths=[8], windows=5))[0].target_digest != found.target_digest
    assert found.change is None
    with pytest.raises(UserError, match="the maximum length is 8, less than length 16"):
        scored(learned, STREAM, Options(lengths=[16, 32]))


def test_one_block_has_no_interval(running_mean: RunningMean) -> None:
    short, long = scored(loaded(running_mean), STREAM, Options(lengths=[8, 16], windows=1))
    assert (short.interval, long.interval, long.verdict, long.change_low) == (None, None, None, None)
    assert long.change == pytest.approx(long.value / short.value)


def test_a_summary_against_the_formula_for_equal_blocks() -> None:
    losses = np.random.default_rng(1).normal(2, 1, (11, 6))
    summary = summarize_losses(losses.sum(axis=1), np.full(11, 6))
    means = losses.mean(1)
    assert summary.nll == pytest.approx(losses.mean())
    assert summary.stderr == pytest.approx(means.std(ddof=1) / math.sqrt(11))
    assert summarize_losses(losses[:1].sum(axis=1), np.array([6])).stderr is None


def test_the_standard_error_matches_the_spread_of_repetitions() -> None:
    generator = np.random.default_rng(2)
    means, errors = [], []
    for _ in range(400):
        blocks = generator.normal(0, 1, (32, 1)) + generator.normal(0, 0.5, (32, 8))  # correlated within a block
        counted = generator.random((32, 8)) < 0.8
        summary = summarize_losses(np.where(counted, blocks, 0.0).sum(axis=1), counted.sum(axis=1))
        means.append(summary.nll)
        errors.append(summary.stderr)
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.12)


def test_default_targets() -> None:
    assert choose_default_targets(64, [64, 2048]) == 64
    assert choose_default_targets(64, [32, 2048]) == 32
