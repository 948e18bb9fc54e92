"""Task scores of runs, compared with a loop over single sequences and with an oracle model."""

import io
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from models import build_model
from pages import page_of
from rich.console import Console
from torch import Tensor, nn

from megatron.checkpoint.trained_run import TrainedRun
from megatron.config.schema import Config
from megatron.data.tasks.task_config import read_task_config
from megatron.evaluation.accuracy import score_answers
from megatron.evaluation.eval_target import ScoringContext
from megatron.evaluation.task_eval import (
    CONSTANT,
    NUM_FITTING_SEQUENCES,
    POSITION,
    TaskEval,
    build_task_eval,
    is_task_run,
)
from megatron.options.data import DataOptions
from megatron.options.evaluation import EvaluationOptions
from megatron.options.position import PositionOptions
from megatron.reports import table_formats
from megatron.reports.comparison_table import build_comparison_tables
from megatron.utils.errors import RunError, UserError


def config(task: str = "binary_addition", length: int = 6, **options: object) -> Config:
    data = {"task": task, "task_length": length, "task_options": options}
    longest = max(read_task_config(DataOptions(**data)).sequence_lengths)
    shape = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "seq_length": longest, "train_iters": 1}
    return Config.from_flat({**shape, **data})


def loaded(model: nn.Module, of: Config) -> SimpleNamespace:
    return SimpleNamespace(model=model, run=SimpleNamespace(config=of), position=of.position)


def gpt(of: Config, **position: object) -> nn.Module:
    size = read_task_config(of.data).task.vocab_size
    return build_model(of.model, PositionOptions(**{"pos_emb": "alibi", **position}), size, seed=3).eval()


class Oracle(nn.Module):
    """Model that knows the sequences in advance and answers all but the first `wrong` of them correctly."""

    max_length = None

    def __init__(self, task_eval: TaskEval, wrong: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.wrong, self.size = wrong, task_eval.task_config.task.vocab_size
        self.known = {
            tuple(tokens.tolist()): (row, labels)
            for drawn in map(task_eval.sample_batch, task_eval.lengths)
            for row, (tokens, labels) in enumerate(zip(drawn.tokens, drawn.labels, strict=True))
        }

    def forward(self, tokens: Tensor, num_logits: int) -> Tensor:
        rows = [self.known[tuple(sequence_tokens.tolist())] for sequence_tokens in tokens]
        logits = torch.zeros(*tokens.shape, self.size + 3)
        logits[:, :, self.size :] = 99.0  # padding of the vocabulary is never an answer
        for sequence, (row, labels) in enumerate(rows):
            label = torch.from_numpy(labels)
            logits[sequence].scatter_(1, label[:, None], -5.0 if row < self.wrong else 5.0)
        return logits[:, -num_logits:]

    def count_flops_per_token(self, length: int) -> float:
        return 1.0 * length

    def num_parameters(self) -> int:
        return 1


COUPLED = {"positions": "coupled", "max_digits": 30}


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("binary_addition", {}),
        ("reverse_string", {}),
        ("mqar", {"pairs": 2, "vocabulary": 20}),
        ("copy_string", {}),
        ("addition", COUPLED),
    ],
)
def test_answers_equal_a_loop_over_single_tokens(task: str, options: dict[str, object]) -> None:
    of = config(task, 8, **options)
    task_eval = build_task_eval(EvaluationOptions(lengths=[8, 12], windows=7), [of])
    model = gpt(of, pos_emb="rotary") if options is COUPLED else gpt(of)
    for length in task_eval.lengths:
        drawn, choices = task_eval.sample_batch(length), task_eval.task_config.task.answer_ids
        losses, correct = score_answers(model, drawn, choices, batch_tokens=3 * drawn.tokens.shape[1])
        for row in range(7):
            ids = None if drawn.position_ids is None else torch.from_numpy(drawn.position_ids[row : row + 1])
            tokens = torch.from_numpy(drawn.tokens[row : row + 1])
            logits = model(tokens, position_ids=ids)[0].detach().double().numpy()
            for place, label in enumerate(drawn.labels[row]):
                values = logits[place, choices.start : choices.stop]
                loss = math.log(np.exp(values).sum()) - logits[place, label] if drawn.loss_mask[row, place] else 0.0
                # float32 logits below 10 in another batch, with one rounding per choice
                assert losses[row, place] == pytest.approx(loss, abs=1e-5)
                best = choices.start + int(values.argmax())
                assert correct[row, place] == (drawn.accuracy_mask[row, place] and best == label)


def test_records_of_a_perfect_model() -> None:
    of = config(length=20)  # so many inputs that none is drawn twice
    task_eval = build_task_eval(EvaluationOptions(multiples=[1, 2, 3], windows=40), [of])
    found = task_eval.score(loaded(Oracle(task_eval, wrong=10), of), ScoringContext(record_fields={"run": "runs/a"}))
    accuracy = [record for record in found if record.metric == "accuracy"]
    assert [(r.length, r.train_length, r.protocol, r.windows) for r in accuracy] == [
        (length, 20, "task", 40) for length in (20, 40, 60)
    ]
    for record in accuracy:
        drawn = task_eval.sample_batch(record.length)
        counts = drawn.accuracy_mask.sum(axis=1)
        assert record.value == counts[10:].sum() / counts.sum()
        assert record.tokens == counts.sum() < drawn.loss_mask.sum()  # the zeros after the terminator have a loss
        right_, wrong = (math.log(2 + math.exp(value)) - value for value in (5.0, -5.0))
        assert record.nll == pytest.approx(0.75 * right_ + 0.25 * wrong, rel=1e-6)
        assert record.low is not None
        assert record.low < record.value < record.high
        assert record.run == "runs/a"
    assert accuracy[2].change == accuracy[2].value - accuracy[0].value
    (mean,) = (record for record in found if record.metric == "mean_accuracy")
    assert mean.value == pytest.approx((accuracy[1].value + accuracy[2].value) / 2)
    assert mean.remark.startswith("Mean over the lengths 40, 60. Task binary_addition of Delétang et al. (2023), ")


def test_means_over_other_lengths_are_not_comparable() -> None:
    of, means = config(length=20), []
    for multiples in ([1, 2, 3], [1, 3], [2, 3]):
        task_eval = build_task_eval(EvaluationOptions(multiples=multiples, windows=4), [of])
        found = task_eval.score(loaded(Oracle(task_eval, wrong=1), of), ScoringContext())
        means += [record for record in found if record.metric == "mean_accuracy"]
    both, last, same = means
    assert both.length == last.length == 60
    assert both.target_digest == same.target_digest != last.target_digest


def test_lengths_have_independent_draws() -> None:
    """Intervals treat lengths as independent.

    The model errs in the same rows at every length, so paired draws would look certain.
    """
    of = config(length=20)
    task_eval = build_task_eval(EvaluationOptions(multiples=[1, 2, 3], windows=40), [of])
    found = task_eval.score(loaded(Oracle(task_eval, wrong=10), of), ScoringContext())
    generator = np.random.default_rng(5)
    draws = {}
    for length in task_eval.lengths:
        counts = task_eval.sample_batch(length).accuracy_mask.sum(axis=1)
        rows = generator.integers(40, size=(4000, 40))
        draws[length] = (counts * (np.arange(40) >= 10))[rows].sum(axis=1) / counts[rows].sum(axis=1)
    (last,) = (record for record in found if (record.metric, record.length) == ("accuracy", 60))
    (mean,) = (record for record in found if record.metric == "mean_accuracy")
    for ends, truth in (
        ((last.change_low, last.change_high), draws[60] - draws[20]),
        ((mean.low, mean.high), (draws[40] + draws[60]) / 2),
    ):
        low, high = np.quantile(truth, (0.025, 0.975))
        # The 2.5% quantile of n normal draws has a standard error of √(0.025·0.975 / n) / 0.058 standard deviations.
        # The interval is 3.9 wide: 1.1% of its width for these 4,000 and 0.7% for our 10,000. The tolerance is 8 times
        # both.
        assert ends == pytest.approx((low, high), abs=0.1 * (high - low))


def test_whole_answers_of_letters() -> None:
    of = config("copy_string", 5)
    task_eval = build_task_eval(EvaluationOptions(lengths=[5], windows=20), [of])
    found = {
        record.metric: record.value
        for record in task_eval.score(loaded(Oracle(task_eval, wrong=5), of), ScoringContext())
    }
    assert found == {"accuracy": 0.75, "exact_match": 0.75}


def test_trivial_baselines_are_listed_with_the_models() -> None:
    of = config("bucket_sort", 10)
    task_eval = build_task_eval(EvaluationOptions(lengths=[10, 40], windows=200), [of])
    found = task_eval.build_baseline_records()
    values = {(record.method, record.metric, record.length): record.value for record in found}
    assert values[f"floor: {POSITION}", "accuracy", 40] > 0.7
    assert values[f"floor: {CONSTANT}", "accuracy", 40] == pytest.approx(0.2, abs=0.04)  # 5 standard errors of 8,000
    assert values[f"floor: {POSITION}", "mean_accuracy", 40] == values[f"floor: {POSITION}", "accuracy", 40]
    recall = build_task_eval(EvaluationOptions(lengths=[16]), [config("mqar", 16, pairs=4)])
    assert {record.value for record in recall.build_baseline_records() if "values" in record.method} == {0.25}
    model = task_eval.score(loaded(Oracle(task_eval, wrong=0), of), ScoringContext())
    (table, _) = build_comparison_tables([*model, *found])
    text = table_formats.render_comparison_markdown(table)
    assert text.count("floor: ") == 2
    assert "causal decoder" in text
    assert "encoder" in text
    page = page_of([*model, *found])
    assert "the same 200 new sequences" in page
    assert "window" not in page.split("Measurements")[1].split("Models")[0]


def test_lengths_beyond_the_positions_are_left_out() -> None:
    of = config("reverse_string", 6)
    task_eval = build_task_eval(EvaluationOptions(lengths=[6, 9, 12], windows=4), [of])
    found = task_eval.score(loaded(gpt(of, pos_emb="alibi", randomized_positions=19), of), ScoringContext())
    assert [record.length for record in found if record.metric == "accuracy"] == [6, 9]
    assert {record.max_length for record in found} == {9}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"lengths": [7]}, "lengths: 7 is not valid for the task mqar: 8 pairs"),
        ({"data": "book.txt"}, "data applies to texts only, but the runs were trained on a task"),
        ({"attention_mask": "document"}, "attention_mask applies to texts only, but the runs were trained on a task"),
        ({"protocol": "nonoverlapping"}, "protocol applies to texts only"),
        ({"targets": 3}, "targets applies to texts only"),
        ({"multiples": [0.3]}, "lengths: 0.3x is 19.2 tokens"),
    ],
)
def test_unsupported_task_options(options: dict, why: str) -> None:
    with pytest.raises(UserError, match=why):
        build_task_eval(EvaluationOptions(**options), [config("mqar", 64)])


def test_default_lengths_are_limited_to_those_of_the_task() -> None:
    of = config("addition", 6, positions="coupled", max_digits=16)
    assert build_task_eval(EvaluationOptions(), [of]).lengths == (6, 12)
    with pytest.raises(UserError, match="lengths: 24 is not valid for the task addition"):
        build_task_eval(EvaluationOptions(multiples=[1.0, 4.0]), [of])


def test_a_task_can_be_evaluated_with_other_options() -> None:
    of = config("flip_flop", 8, ignore=0.5)
    asked = build_task_eval(EvaluationOptions(lengths=[64], windows=300, task_options="ignore=0.98"), [of])
    assert asked.task_config.label == "flip_flop(ignore=0.98)"
    reads = asked.sample_batch(64).loss_mask.sum() / 300
    assert reads == pytest.approx(1 + 30 * 0.01, abs=5 * (30 * 0.01 / 300) ** 0.5)
    (record, *_) = asked.build_baseline_records()
    assert record.dataset == "task flip_flop(ignore=0.98)"
    learned = build_task_eval(EvaluationOptions(lengths=[64], windows=300), [of])
    assert asked.digest != learned.digest
    for text, why in (
        ("ignore", "'ignore': it must be OPTION=VALUE"),
        ("ignor=1.0", "has no option 'ignor'; did you mean ignore"),
        ("ignore=2.0", "task_options.ignore is 2.0"),
    ):
        with pytest.raises(UserError, match=why):
            build_task_eval(EvaluationOptions(lengths=[64], task_options=text), [of])
    recall = config("mqar", 16, pairs=4, vocabulary=64)
    with pytest.raises(UserError, match="trained with other symbols"):
        build_task_eval(EvaluationOptions(lengths=[16], task_options="vocabulary=128"), [recall])


def test_runs_of_different_tasks_are_separate() -> None:
    def run(name: str, of: Config) -> TrainedRun:
        return SimpleNamespace(name=name, config=of)  # type: ignore[return-value]

    text = Config.from_flat({"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8})
    assert not is_task_run([run("a", text)])
    assert is_task_run([run("a", config()), run("b", config(length=9))])
    with pytest.raises(UserError, match=r"b was trained on the task mqar\(pairs=4\), a on the task mqar; evaluate"):
        is_task_run([run("a", config("mqar", 64)), run("b", config("mqar", 64, pairs=4))])
    with pytest.raises(UserError, match="b was trained on a text, a on the task binary_addition"):
        is_task_run([run("a", config()), run("b", text)])


def test_a_nonfinite_loss_is_reported() -> None:
    of = config("even_pairs", 4)
    task_eval, model = build_task_eval(EvaluationOptions(lengths=[4], windows=4), [of]), gpt(of)
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    with pytest.raises(RunError, match="the loss at length 4 is nan"):
        task_eval.score(loaded(model, of), ScoringContext())


def test_predictors_are_fitted_to_fewer_sequences_if_they_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    task_eval = build_task_eval(EvaluationOptions(lengths=[4, 40]), [config("reverse_string", 4)])
    assert [task_eval.sample_batch(length, fitting=True).tokens.shape[0] for length in task_eval.lengths] == [
        NUM_FITTING_SEQUENCES
    ] * 2
    monkeypatch.setattr("megatron.evaluation.task_eval.MAX_FITTING_TOKENS", 800)
    assert [task_eval.sample_batch(length, fitting=True).tokens.shape[0] for length in task_eval.lengths] == [100, 10]


def test_a_trained_run_from_the_command_line_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.evaluation.run import evaluate_runs
    from megatron.reports import records
    from megatron.training.train import train

    monkeypatch.chdir(tmp_path)
    more = {"train_micro_batch_size_per_gpu": 4, "device": "cpu", "num_gpus": 1, "nodes": 1, "eval_interval": 0}
    tiny = config("reverse_string", 4).replace(
        **more, save="runs/a", pos_emb="alibi", distributed_backend="gloo", use_tensorboard=False, train_batch_size=4
    )
    train(tiny)
    out = io.StringIO()
    found = evaluate_runs(["runs/a"], EvaluationOptions(windows=16), console=Console(file=out, width=200))
    assert [r.length for r in found if r.method == "alibi" and r.metric == "accuracy"] == [4, 8, 16, 32]
    assert {r.method for r in found} == {"alibi", f"floor: {CONSTANT}", f"floor: {POSITION}"}
    assert records.read_records("runs/a/results.json") == found
    assert "causal decoder" in out.getvalue()
    assert not Path("runs/a/tokenizer").exists()
    other = evaluate_runs(["runs/a"], EvaluationOptions(windows=8))
    assert records.read_records("runs/a/results.json") == other  # other sequences of the same task
    again = evaluate_runs(["runs/a"], EvaluationOptions(windows=16, multiples=[1.0, 8.0]))
    assert records.read_records("runs/a/results.json") == again  # the same evaluation replaces its results
    same = {(r.method, r.metric, r.length): r.value for r in found}
    assert all(r.value == same[r.method, r.metric, r.length] for r in again if r.metric == "accuracy")


def test_task_positions_are_trained_and_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Position ids drawn in training reach the model also beyond the training length: 43 tokens, 16 positions."""
    from megatron.data.torch_data import TaskDataset
    from megatron.evaluation.run import evaluate_runs
    from megatron.model.pass_inputs import SegmentBuilder
    from megatron.training.train import train

    reported: list[Tensor] = []
    place_tokens = SegmentBuilder._build_position_segments
    monkeypatch.setattr(
        SegmentBuilder,
        "_build_position_segments",
        lambda self, ids, device: (reported.append(ids), place_tokens(self, ids, device))[1],
    )
    monkeypatch.chdir(tmp_path)
    more = {"train_micro_batch_size_per_gpu": 4, "device": "cpu", "num_gpus": 1, "nodes": 1, "eval_interval": 0}
    tiny = config("addition", 2, positions="coupled", max_digits=13).replace(
        **more, save="runs/a", pos_emb="learned", distributed_backend="gloo", use_tensorboard=False,
        train_batch_size=4, max_position_embeddings=16, train_iters=2,
    )  # fmt: skip
    train(tiny)
    task_config = read_task_config(tiny.data)
    drawn = TaskDataset(task_config, "train", 8, seed=tiny.training.seed, batch_size=4)
    for step in range(2):
        ids = torch.stack([drawn[index]["position_ids"] for index in range(4 * step, 4 * step + 4)])
        assert torch.equal(reported[step], ids)
    found = evaluate_runs(["runs/a"], EvaluationOptions(windows=16, lengths=[2, 13]))
    assert [r.length for r in found if r.method == "learned" and r.metric == "accuracy"] == [2, 13]
    assert {r.max_length for r in found} == {None}
