"""Needle maps: effective lengths by a plain loop, cells of known models, and results kept after an interruption."""

import math
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import build_model
from torch import nn

from megatron.data.tasks.task import Task, TaskBatch
from megatron.data.tasks.task_config import TaskConfig
from megatron.data.tokenizers import ByteTokenizer
from megatron.evaluation import accuracy
from megatron.evaluation.eval_target import ScoringContext
from megatron.evaluation.jobs import PartialRecords
from megatron.evaluation.needle_map import find_effective_lengths
from megatron.evaluation.passkey import Passkey
from megatron.evaluation.run import build_probe
from megatron.evaluation.task_eval import TaskDepthEval, build_task_eval
from megatron.options.evaluation import EvaluationOptions as Options
from megatron.options.model import ModelOptions
from megatron.options.position import PositionOptions
from megatron.reports.comparison_table import build_comparison_tables
from megatron.reports.depth_maps import split_depth_maps
from megatron.reports.plots import render_plots_png
from megatron.reports.records import Record
from megatron.utils.errors import UserError
from tools.tolerances import compute_tolerance, count_gpt_sums

from .conftest import TRAIN_LENGTH, loaded, tiny_gpt

BYTES = ByteTokenizer()
NEEDLE = list(b"The pass key is ")


class KeyReader(nn.Module):
    """Model that reads the key within `reach` tokens of the end, and otherwise answers with the requested digit plus 1.

    The last token of the first `careless` sequences of a batch is always answered wrongly.
    """

    max_length: int | None = None

    def __init__(self, reach: int, careless: int = 0) -> None:
        super().__init__()
        self.reach, self.careless, self.num_passes = reach, careless, 0
        self.none = nn.Parameter(torch.zeros(1))

    def forward(self, tokens: torch.Tensor, num_logits: int) -> torch.Tensor:
        self.num_passes += 1
        logits = torch.zeros(len(tokens), num_logits, 257)
        for row, line in enumerate(tokens.tolist()):
            start = next(at for at in range(len(line)) if line[at : at + len(NEEDLE)] == NEEDLE)
            key = [32, *line[start + len(NEEDLE) : start + len(NEEDLE) + 5]]
            for number in range(num_logits):
                is_wrong = len(line) - start > self.reach or (row < self.careless and number == num_logits - 1)
                logits[row, number, key[number] + is_wrong] = 20.0
        return logits

    def count_flops_per_token(self, length: int) -> float:
        return 3.0

    def num_parameters(self) -> int:
        return 0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.floats(0.1, 1))
def test_effective_lengths_by_a_loop(scores: list[float], threshold: float) -> None:
    lengths = [64 * 2**number for number in range(len(scores))]
    expected = 0
    for length, score in zip(lengths, scores, strict=True):
        if score >= threshold - 1e-9:
            expected = length
    assert find_effective_lengths(lengths, np.array(scores)[:, None], threshold).tolist() == [expected]


def find(records: Sequence[Record], metric: str, axis: str = "length") -> dict[tuple[int, float | None], Record]:
    return {(each.length, each.place): each for each in records if (each.metric, each.axis) == (metric, axis)}


def test_the_map_of_a_model_with_limited_reach() -> None:
    """A key of 58 characters before a question of 45 is found within 260 tokens of the end, at any length."""
    depths, lengths, careless, count = (0.0, 0.5, 1.0), (200, 400, 800), 2, 8
    probe = Passkey(lengths, count, BYTES, depths)

    def score(asked: Passkey, reach: int) -> list[Record]:
        return asked.score(loaded(KeyReader(reach, careless)), ScoringContext(batch_tokens=10**6))  # type: ignore[arg-type]

    found = score(probe, 260)
    exact, accuracy, loss = (find(found, metric, "depth") for metric in ("exact_match", "accuracy", "loss"))
    wrong_loss = math.log(math.exp(20.0) + 256)
    right_loss = wrong_loss - 20.0
    for length in lengths:
        shares = []
        for depth in depths:
            room = length + 1 - len("The pass key is 12345. Remember it. 12345 is the pass key. ") - 43
            is_seen = length - round(depth * room) <= 260
            share = (count - careless) / count if is_seen else 0.0
            shares.append(share)
            assert exact[length, depth].value == share
            assert accuracy[length, depth].value == pytest.approx((6 * count - careless) / (6 * count) * is_seen)
            expected = right_loss + (wrong_loss - right_loss) * (1 - accuracy[length, depth].value)
            assert loss[length, depth].value == pytest.approx(expected, abs=1e-6)
        mean = find(found, "exact_match")[length, None]
        assert mean.value == pytest.approx(sum(shares) / 3)
        assert mean.low <= mean.value <= mean.high
    # 0.75 at 200; one of three depths at 400 and 800: 0.25.
    (effective,) = find(found, "effective_length").values()
    assert (effective.value, effective.length, effective.tokens > 0) == (0.0, 800, True)
    for threshold, expected_length in ((0.75, 200.0), (0.25, 800.0)):
        lenient = Passkey(lengths, count, BYTES, depths, effective_score=threshold)
        (again,) = find(score(lenient, 260), "effective_length").values()
        assert again.value == expected_length
    assert again.target_digest != effective.target_digest, "other rules share no table"
    (none,) = find(score(probe, 1), "effective_length").values()
    assert (none.value, none.low, none.high) == (0.0, 0.0, 0.0), "no score at the shortest length"


class Guesser(KeyReader):
    """Model that is certain of the space before the key and gives each digit the same probability."""

    def __init__(self) -> None:
        super().__init__(reach=0)

    def forward(self, tokens: torch.Tensor, num_logits: int) -> torch.Tensor:
        logits = torch.full((len(tokens), num_logits, 257), -100.0)
        logits[:, 0, 32] = 100.0
        logits[:, 1:, ord("0") : ord("9") + 1] = 0.0
        return logits


def test_the_note_states_the_level_of_a_guesser() -> None:
    probe = Passkey([200], 400, BYTES, (0.5,))
    found = probe.score(loaded(Guesser()), ScoringContext(batch_tokens=10**6))  # type: ignore[arg-type]
    (loss,), (accuracy,) = (find(found, metric, "depth").values() for metric in ("loss", "accuracy"))
    assert loss.value == pytest.approx((math.log(1) + 5 * math.log(10)) / 6, abs=1e-6)
    assert f"{loss.value:.2f}" == "1.92"
    # The likeliest token is the space, and then always the same digit.
    assert accuracy.value == pytest.approx((1 + 5 * 0.1) / 6, abs=0.02)
    assert loss.remark is not None
    assert "6 tokens" in loss.remark
    assert "a loss of 5 × ln 10 / 6 = 1.92 per token and an accuracy of about 25%." in loss.remark


class PairTokenizer(ByteTokenizer):
    """Tokenizer of two bytes per token, as one that merges the space with the first digit."""

    def encode(self, text: str) -> list[int]:
        data = text.encode()
        return [int.from_bytes(data[start : start + 2], "big") for start in range(len(data) % 2, len(data), 2)]


def test_the_note_counts_merged_tokens() -> None:
    """Two bytes per token: 3 tokens for the space and five digits."""
    remark = Passkey([200], 4, PairTokenizer(), (0.5,)).remark
    assert "3 tokens" in remark
    assert "a loss of 5 × ln 10 / 3 = 3.84 per token." in remark


def test_losses_match_the_model() -> None:
    model = tiny_gpt(pos_emb="kerple_log")
    small = build_probe(Options(protocol="passkey", depths=2, windows=3), [120], BYTES)
    for name, value in (("depths", 2), ("score_threshold", 0.5)):
        with pytest.raises(UserError, match=f"{name}: protocol repeated uses distances"):
            build_probe(Options(protocol="repeated", **{name: value}), [120], BYTES)
    small.vocabulary = small.vocabulary.__class__(19, "bytes", None)
    rows = {depth: small.build_sequences(120, depth) % 19 for depth in (0.0, 1.0)}
    small.build_sequences = lambda length, depth: rows[depth]  # type: ignore[method-assign]
    found = find(small.score(loaded(model), ScoringContext()), "loss", "depth")  # type: ignore[arg-type]
    for depth, sequences in rows.items():
        tokens = torch.from_numpy(sequences)
        with torch.no_grad():
            losses = model(tokens[:, :-1], labels=tokens[:, 1:])[:, -6:].double()
        assert found[120, depth].value == pytest.approx(losses.mean().item(), abs=1e-5)
        np.testing.assert_allclose(found[120, depth].block_sums, losses.sum(1).numpy(), atol=1e-5)


@pytest.mark.parametrize(
    "position",
    [
        {"pos_emb": "rotary"},
        {"pos_emb": "kerple_log", "score_processor": "cdape"},
        {"pos_emb": "alibi", "attention_window": 30},
        {"pos_emb": "none", "attention_temperature": "logn"},
        {"pos_emb": "fox"},
        {"pos_emb": "rotary", "randomized_positions": 300},
        {"pos_emb": "rotary", "score_processor": "selective"},
        {"pos_emb": "rotary", "score_processor": "mta"},
    ],
    ids=lambda position: "+".join(map(str, position.values())),
)
def test_shared_prefixes_are_computed_once(position: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """The common beginning of all sequences is computed once, and losses equal those of whole sequences."""
    model = build_model(
        ModelOptions(num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=TRAIN_LENGTH),
        PositionOptions(**position), 257, seed=3,
    ).eval()  # fmt: skip
    num_read: list[int] = []
    hidden_states = model.compute_hidden_states

    def count_tokens(tokens: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        num_read.append(tokens.numel())
        return hidden_states(tokens, *args, **kwargs)

    monkeypatch.setattr(model, "compute_hidden_states", count_tokens)
    probe = Passkey((140, 250), 3, BYTES, (0.0, 0.5, 1.0))
    shared = probe.score(loaded(model), ScoringContext())  # type: ignore[arg-type]
    num_shared = sum(num_read)
    num_read.clear()
    monkeypatch.setattr(accuracy, "MIN_SHARED_FRACTION", 2.0)
    whole = probe.score(loaded(model), ScoringContext())  # type: ignore[arg-type]
    assert sum(num_read) == 3 * 3 * (140 + 250)
    assert num_shared < 0.8 * sum(num_read)
    tolerance = compute_tolerance(*count_gpt_sums(16, layers=2))
    for one, other in zip(shared, whole, strict=True):
        assert (one.metric, one.length, one.place) == (other.metric, other.length, other.place)
        if one.metric == "loss":
            assert one.value == pytest.approx(other.value, abs=tolerance)


def test_an_interrupted_map_resumes(tmp_path: object) -> None:
    probe, whole = Passkey((200, 400), 4, BYTES, (0.0, 0.5, 1.0)), KeyReader(260)
    fields = {"run": "runs/a", "software": "x", "training_digest": "t"}
    expected = probe.score(loaded(whole), ScoringContext(fields))  # type: ignore[arg-type]
    partial = PartialRecords.open(tmp_path)  # type: ignore[arg-type]
    assert partial.previous == ()

    class Interruption(Exception):
        pass

    def keep_two(records: Sequence[Record]) -> None:
        partial.save(records)
        if len(records) == 2 * 3:
            raise Interruption

    with pytest.raises(Interruption):
        probe.score(loaded(KeyReader(260)), ScoringContext(fields, save_records=keep_two))  # type: ignore[arg-type]
    left = PartialRecords.open(tmp_path).previous  # type: ignore[arg-type]
    assert len(left) == 6
    rest = KeyReader(260)
    found = probe.score(loaded(rest), ScoringContext(fields, finished_records=left))  # type: ignore[arg-type]
    assert (whole.num_passes, rest.num_passes) == (6, 4)
    drop = {"date", "seconds", "cpu_seconds", "software", "memory_gib"}
    for one, other in zip(found, expected, strict=True):
        assert one.model_dump(exclude=drop) == other.model_dump(exclude=drop)
    for other in ({"run": "runs/b"}, {"step": 7}, {"software": "y"}, {"training_digest": "u"}):
        again = KeyReader(260)
        probe.score(loaded(again), ScoringContext({**fields, **other}, finished_records=left))  # type: ignore[arg-type]
        assert again.num_passes == 6, "what another model, or other code, measured is not taken"
    of_another = [record.replace(run="runs/c") for record in left]
    partial.save(of_another)  # a concurrent evaluation of another run in the same folder
    partial.remove(found)
    assert [record.run for record in PartialRecords.open(tmp_path).previous] == ["runs/c"] * 6  # type: ignore[arg-type]
    partial.remove(of_another)
    assert PartialRecords.open(tmp_path).previous == ()  # type: ignore[arg-type]


class Recall(Task):
    """Task with zeros, a 1 followed by a letter from 2 to 9 at a given depth, and a final 1 that asks for the
    letter.
    """

    title, paper, has_depth = "the letter after the mark", "none", True

    @property
    def vocab_size(self) -> int:
        return 10

    @property
    def answer_ids(self) -> range:
        return range(2, 10)

    def get_sequence_length(self, length: int) -> int:
        return length

    def sample_batch(self, generator: np.random.Generator, count: int, length: int) -> TaskBatch:
        return self.sample_batch_at_depth(generator, count, length, 0.5)

    def sample_batch_at_depth(self, generator: np.random.Generator, count: int, length: int, depth: float) -> TaskBatch:
        tokens, labels = (np.zeros((count, length), dtype=np.int64) for _ in range(2))
        at = round(depth * (length - 3))
        tokens[:, at], tokens[:, at + 1], tokens[:, -1] = 1, generator.integers(2, 10, size=count), 1
        labels[:, -1] = tokens[:, at + 1]
        mask = np.zeros(tokens.shape, dtype=bool)
        mask[:, -1] = True
        return TaskBatch(tokens, labels, mask, mask)


class Near(nn.Module):
    """Model that finds the letter after the first mark within `reach` tokens."""

    max_length: int | None = None

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach, self.none = reach, nn.Parameter(torch.zeros(1))

    def forward(self, tokens: torch.Tensor, num_logits: int) -> torch.Tensor:
        logits = torch.zeros(len(tokens), num_logits, 10)
        for row, line in enumerate(tokens.tolist()):
            at = line.index(1)
            logits[row, -1, line[at + 1] if len(line) - at <= self.reach else 2] = 9.0
        return logits

    def count_flops_per_token(self, length: int) -> float:
        return 3.0

    def num_parameters(self) -> int:
        return 0


def test_a_task_that_has_a_depth() -> None:
    eval_of_task = TaskDepthEval(TaskConfig("recall", Recall(), 8, 8), (8, 16, 32), 32, (0.0, 1.0))
    context = ScoringContext({"run": "runs/a"})
    found = [*eval_of_task.score(loaded(Near(16)), context), *eval_of_task.score(loaded(Near(40)), context)]  # type: ignore[arg-type]
    found = [each.replace(method="near" if number < len(found) // 2 else "far") for number, each in enumerate(found)]
    near = [each for each in found if each.method == "near"]
    cells = find(near, "accuracy", "depth")
    for (length, depth), cell in cells.items():
        assert depth is not None
        is_seen = length - round(depth * (length - 3)) <= 16
        assert cell.value == 1.0 if is_seen else cell.value < 0.6
        assert (cell.protocol, cell.windows, cell.train_length) == ("depths", 32, 8)
    assert [each.value for each in find(near, "effective_length").values()] == [16.0]
    assert [each.value for each in find(found[len(near) :], "effective_length").values()] == [32.0]
    (mean,) = (each for each in near if each.metric == "mean_accuracy")
    beyond = [cell.value for (length, _), cell in cells.items() if length > 8]
    assert (mean.value, mean.axis, mean.length) == (pytest.approx(np.mean(beyond)), "length", 32)
    assert mean.low <= mean.value <= mean.high
    assert (mean.place, mean.change, mean.block_sums) == (None, None, None)
    assert mean.target_digest not in {cell.target_digest for cell in near if cell is not mean}
    assert {each.protocol for each in eval_of_task.build_baseline_records()} == {"depths"}
    other, (loss, accuracy) = split_depth_maps(build_comparison_tables(found))
    assert "effective_length" in {table.metric.name for table in other}
    assert (loss.lengths, loss.depths, accuracy.methods) == ([8, 16, 32], [0.0, 1.0], ["near", "far"])
    np.testing.assert_array_equal(
        accuracy.get_values("near"), [[cells[length, depth].value for length in (8, 16, 32)] for depth in (0.0, 1.0)]
    )
    text = accuracy.build_text_table().to_text()
    assert "4× (32)" in text
    assert "100.0 █" in text
    shades = [cell.css_class for _, cells_of_row in accuracy.build_html_table().rows for cell in cells_of_row]
    assert "shade9" in shades
    assert min(shade for shade in shades if shade) < "shade6"
    assert render_plots_png(build_comparison_tables(found))[:4] == b"\x89PNG"


def test_tasks_without_depth_are_rejected() -> None:
    config = SimpleNamespace(
        data=SimpleNamespace(task="copy_string", task_length=4, task_shortest_length=None, task_options={})
    )
    for choices, message in (
        ({"depths": 3}, "does not support depths"),
        ({"effective_score": 0.5}, "only for needle maps; add depths"),
    ):
        with pytest.raises(UserError, match=message):
            build_task_eval(Options(lengths=[4], **choices), [config])  # type: ignore[list-item]
