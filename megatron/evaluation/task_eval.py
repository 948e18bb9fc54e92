"""Evaluate models on the task that they were trained on, at input lengths beyond training: accuracy and loss.

At each length n a fixed seed draws new sequences. They are the same for every run, and independent of the seeds of the
runs. The prediction is the likeliest valid answer; `accuracy.py` builds the records. Their nll is the mean of −log
p(label) over all positions with a loss, in nats.

Trivial baselines have records of their own, next to those of the models; a model at or below them has learned nothing.
They are fitted to separate sequences and scored on those of the evaluation, so that they do not exploit chance:

    constant        the most frequent answer everywhere
    position        the most frequent answer at each position; it depends on position and length, but not on tokens

Tasks define other predictors, which read tokens but do not solve the task (`Task.compute_baseline_predictions`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.config.yaml_files import parse_scalar
from megatron.data.tasks.task import Array, Task, TaskBatch
from megatron.data.tasks.task_config import TaskConfig, build_task, read_task_config
from megatron.evaluation.accuracy import AccuracySample, aggregate_accuracies, compute_accuracies, score_answers
from megatron.evaluation.eval_target import ScoringContext, choose_lengths, count_forward_flops, limit_lengths
from megatron.evaluation.needle_map import (
    DEFAULT_EFFECTIVE_SCORE,
    DEFAULT_NEEDLE_SEQUENCES,
    NeedleMap,
    hash_depths,
    score_needle_map,
)
from megatron.evaluation.provenance import describe_model, start_stopwatch
from megatron.options.evaluation import LOSS_OPTIONS, EvaluationOptions, reject_text_options
from megatron.reports.records import TRIVIAL_BASELINE_PREFIX, Record
from megatron.utils.errors import RunError, UserError

if TYPE_CHECKING:
    from megatron.checkpoint.load_model import LoadedModel
    from megatron.checkpoint.trained_run import TrainedRun
    from megatron.config.schema import Config
    from megatron.model.gpt import GPT

# torch is imported inside functions, so that errors in the options are reported at once.

DEFAULT_NUM_SEQUENCES = 512
"""Default number of sequences at each length, as in Delétang et al. (2023)."""

DEFAULT_TASK_MULTIPLES = [1.0, 2.0, 4.0, 8.0]
"""Default lengths, as multiples of the longest training input."""

NUM_FITTING_SEQUENCES = 2048
"""Number of sequences at each length to which trivial baselines are fitted."""
MAX_FITTING_TOKENS = 1 << 26
"""Maximum number of tokens in these sequences (half a gigabyte); beyond 30,000 tokens per sequence there are fewer."""

TASK_SEED = 20_230_609

OPTIONS_UNUSED_BY_TASKS = (
    "data",
    "protocol",
    "targets",
    "stride",
    "min_context",
    "measures",
    "attention_mask",
    *LOSS_OPTIONS,
)
"""Options that do not apply to a task."""


@dataclass(frozen=True)
class TaskEval:
    """Evaluation target for runs of one task."""

    task_config: TaskConfig
    lengths: tuple[int, ...]  # input lengths, ascending
    num_sequences: int  # per length

    def _build_generator(self, *numbers: int) -> np.random.Generator:
        """Return a random generator whose seed depends only on the task and the given numbers."""
        name = hashlib.blake2b(self.task_config.label.encode(), digest_size=8).digest()
        return np.random.Generator(np.random.PCG64([TASK_SEED, int.from_bytes(name, "big"), *numbers]))

    def sample_batch(self, length: int, *, fitting: bool = False) -> TaskBatch:
        """Sample the test sequences of a length, or other sequences to which trivial baselines are fitted."""
        task = self.task_config.task
        generator = self._build_generator(length, int(fitting))
        count = self.num_sequences
        if fitting:
            count = max(1, min(NUM_FITTING_SEQUENCES, MAX_FITTING_TOKENS // task.get_sequence_length(length)))
        return task.sample_batch(generator, count, length)

    @cached_property
    def digest(self) -> str:
        """Hash of the sequences, equal if two evaluations draw the same sequences at common lengths."""
        return _hash_text(f"{TASK_SEED} {self.task_config.label} {self.num_sequences}")

    @property
    def record_fields(self) -> dict[str, Any]:
        """Record fields that describe the task and its sequences."""
        task, label = self.task_config.task, self.task_config.label
        description = f"Task {label} of {task.paper}: {task.title}. Lengths are input lengths."
        order = "The answer does not depend on the input's order († in DAPE V2's Table 6)."
        return {
            "train_length": self.task_config.max_length,
            "protocol": "task",
            "dataset": self.task_config.dataset,
            "text_digest": _hash_text(f"{TASK_SEED} {label}"),  # independent of the number of sequences
            "target_digest": self.digest,
            "windows": self.num_sequences,
            "blocks": self.num_sequences,
            "remark": " ".join(filter(None, [description, order if task.permutation_invariant else "", task.note])),
        }

    def describe_records(self, model: GPT) -> dict[str, Any]:
        """Return `record_fields`, with the longest supported input if the model has limited positions."""
        task = self.task_config.task
        if task.position_limit is not None:
            return {**self.record_fields, "max_length": None}
        if model.max_length is None:
            return self.record_fields
        longest = max(n for n in range(1, model.max_length) if task.get_sequence_length(n) <= model.max_length)
        return {**self.record_fields, "max_length": longest}

    @property
    def sequence_lengths(self) -> Sequence[int]:
        return [self.task_config.task.get_sequence_length(length) for length in self.lengths]

    def count_flops(self, model: GPT) -> dict[int, float]:
        tokens = dict(zip(self.lengths, self.sequence_lengths, strict=True))
        # A task that sets position ids has its own position limit.
        max_length = model.max_length if self.task_config.task.position_limit is None else None
        supported = limit_lengths(tokens.values(), max_length)
        return {
            length: count_forward_flops(model, tokens[length], self.num_sequences)
            for length in self.lengths
            if tokens[length] in supported
        }

    def score(self, loaded: LoadedModel, scoring: ScoringContext) -> list[Record]:
        """Compute the accuracy at each length that the model supports.

        Raises:
            UserError, RunError: as for `EvalTarget.score`.
        """
        model, task = loaded.model, self.task_config.task
        flops_by_length = self.count_flops(model)
        shared = {**describe_model(loaded), **self.describe_records(model), **scoring.record_fields}
        samples: list[AccuracySample] = []
        done, total = 0.0, sum(flops_by_length.values())
        for length, flops in flops_by_length.items():
            batch = self.sample_batch(length)

            def report_fraction(
                fraction: float, length: int = length, before: float = done, flops: float = flops
            ) -> None:
                scoring.progress(length, before + flops * fraction, total)

            stop_stopwatch = start_stopwatch(model)
            losses, correct = score_answers(
                model, batch, task.answer_ids, batch_tokens=scoring.batch_tokens, on_batch_done=report_fraction
            )
            done += flops
            nll = float(losses.sum() / batch.loss_mask.sum())
            if not math.isfinite(nll):
                raise RunError(f"{shared['method']}: the loss at length {length:,} is {nll}")
            fields = {**shared, "length": length, "nll": nll, **stop_stopwatch()}
            samples += compute_accuracies(correct, batch, fields, exact_match=task.scores_exact_match)
        return aggregate_accuracies(samples)

    def build_baseline_records(self) -> list[Record]:
        """Return records of trivial baselines on the same sequences. Names of these methods begin with floor."""
        task = self.task_config.task
        samples: dict[str, list[AccuracySample]] = {}
        for length in self.lengths:
            batch = self.sample_batch(length)
            shared: dict[str, Any] = {**self.record_fields, "length": length, "seed": 0}
            fitting_batch = self.sample_batch(length, fitting=True)
            for name, correct in measure_baseline_correctness(task, fitting_batch, batch).items():
                fields = shared | {"method": f"{TRIVIAL_BASELINE_PREFIX}{name}"}
                exact_match = task.scores_exact_match
                samples.setdefault(name, []).extend(compute_accuracies(correct, batch, fields, exact_match=exact_match))
            for name, value in task.get_baseline_accuracies(length).items():
                fields = shared | {
                    "method": f"{TRIVIAL_BASELINE_PREFIX}{name}",
                    "metric": "accuracy",
                    "tokens": int(batch.accuracy_mask.sum()),
                }
                samples.setdefault(name, []).append(AccuracySample(Record(**fields, value=value)))
        return [record for of_baseline in samples.values() for record in aggregate_accuracies(of_baseline)]


@dataclass(frozen=True)
class TaskDepthEval(TaskEval):
    """Evaluation target for a task whose answers are placed at chosen depths: a needle map (`needle_map.py`)."""

    depths: tuple[float, ...] = ()
    effective_score: float = DEFAULT_EFFECTIVE_SCORE

    @property
    def record_fields(self) -> dict[str, Any]:
        fields = super().record_fields
        remark = f"{fields['remark']} Depth is the share of the other input tokens before the answer."
        digest = hash_depths(fields["target_digest"], self.depths)
        return {**fields, "protocol": "depths", "remark": remark, "target_digest": digest}

    def count_flops(self, model: GPT) -> dict[int, float]:
        return {length: len(self.depths) * flops for length, flops in super().count_flops(model).items()}

    def score(self, loaded: LoadedModel, scoring: ScoringContext) -> list[Record]:
        """Score a model on the needle map, and return its records.

        Raises:
            UserError, RunError: as for `EvalTarget.score`.
        """
        task = self.task_config.task
        needle_map = NeedleMap(
            lengths=self.lengths,
            depths=self.depths,
            score_metric="accuracy",
            metrics=("loss", "accuracy", "exact_match") if task.scores_exact_match else ("loss", "accuracy"),
            is_paired=False,
            choices=task.answer_ids,
            build_batch=self._sample_batch_at_depth,
            record_fields=self.describe_records(loaded.model),
            effective_score=self.effective_score,
        )
        return score_needle_map(needle_map, loaded, self.count_flops(loaded.model), scoring)

    def _sample_batch_at_depth(self, length: int, depth: float) -> TaskBatch:
        generator = self._build_generator(length, 2, round(depth * 1e9))
        return self.task_config.task.sample_batch_at_depth(generator, self.num_sequences, length, depth)


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_task_run(runs: Sequence[TrainedRun]) -> bool:
    """Return True if runs were trained on a task, or False if they were trained on a text.

    Raises:
        UserError: the runs were trained on different tasks.
    """
    tasks = [None if run.config.data.task is None else read_task_config(run.config.data).label for run in runs]
    for run, task in zip(runs, tasks, strict=True):
        if task != tasks[0]:
            learned, first_learned = (f"the task {name}" if name else "a text" for name in (task, tasks[0]))
            raise UserError(
                f"{run.name} was trained on {learned}, {runs[0].name} on {first_learned}; evaluate them separately"
            )
    return tasks[0] is not None


def _change_options(task_config: TaskConfig, text: str | None) -> TaskConfig:
    """Change options of a task, given as `OPTION=VALUE,…`. The vocabulary must stay as trained."""
    if text is None:
        return task_config
    changes: dict[str, Any] = {}
    for part in text.split(","):
        option, equals, value = part.partition("=")
        if not equals:
            raise UserError(f"task_options {text}: {part!r}: it must be OPTION=VALUE")
        changes[option.strip()] = parse_scalar(value, f"task_options {text}")
    learned = task_config.task
    task = build_task(task_config.name, learned.model_dump() | changes)
    if (task.vocab_size, task.answer_ids, task.position_limit) != (
        learned.vocab_size,
        learned.answer_ids,
        learned.position_limit,
    ):
        raise UserError(f"task_options {text}: the runs were trained with other symbols or positions; train a new run")
    return replace(task_config, task=task)


def build_task_eval(options: EvaluationOptions, configs: Sequence[Config]) -> TaskEval:
    """Build the evaluation target for models of one task. By default, use the default lengths that the task supports.

    Raises:
        UserError: the task does not support a length, or an option applies to texts only.
    """
    reject_text_options(options, OPTIONS_UNUSED_BY_TASKS, "the runs were trained on a task")
    task_configs = [read_task_config(config.data) for config in configs]
    are_given = options.lengths is not None or options.multiples is not None
    if not are_given:
        options = options.replace(multiples=DEFAULT_TASK_MULTIPLES)
    lengths = choose_lengths(options, [task_config.max_length for task_config in task_configs])
    task_config, depths = _change_options(task_configs[0], options.task_options), options.depths
    if depths is not None and not task_config.task.has_depth:
        raise UserError(f"depths: the task {task_config.label} does not support depths; omit it")
    if depths is None and options.score_threshold is not None:
        raise UserError("score_threshold: only for needle maps; add depths")
    reasons = {length: task_config.task.describe_unsupported_length(length) for length in lengths}
    for length, reason in reasons.items():
        if reason is not None and (are_given or all(reasons.values())):
            raise UserError(f"lengths: {length} is not valid for the task {task_config.label}: {reason}")
    lengths = tuple(length for length, reason in reasons.items() if reason is None)
    if depths is None:
        return TaskEval(task_config, lengths, options.num_windows or DEFAULT_NUM_SEQUENCES)
    num_sequences = options.num_windows or DEFAULT_NEEDLE_SEQUENCES
    effective_score = options.score_threshold or DEFAULT_EFFECTIVE_SCORE
    return TaskDepthEval(task_config, lengths, num_sequences, tuple(depths), effective_score)


CONSTANT, POSITION = "the same answer everywhere", "the likeliest answer at each place"


def measure_baseline_correctness(task: Task, fitted: TaskBatch, scored: TaskBatch) -> dict[str, Array]:
    """Return where trivial predictors are correct, by description.

    Args:
        fitted: sequences of a length to fit the predictors to.
        scored: other sequences of the same length, [B, T].

    Returns:
        bool [B, T] each, False at positions that do not count.
    """
    frequencies = _count_answers(task, fitted)
    constant = frequencies.sum(axis=0).argmax()
    by_position = frequencies.argmax(axis=1)
    labels = scored.labels - task.answer_ids.start
    return {
        CONSTANT: (labels == constant) & scored.accuracy_mask,
        POSITION: (labels == by_position) & scored.accuracy_mask,
        **{
            name: (answers == scored.labels) & scored.accuracy_mask
            for name, answers in task.compute_baseline_predictions(scored).items()
        },
    }


def _count_answers(task: Task, batch: TaskBatch) -> Array:
    """Count how often each answer is correct at each position, int64 [T, answers]."""
    length, num_answers = batch.labels.shape[1], len(task.answer_ids)
    _, positions = np.nonzero(batch.accuracy_mask)
    flat = positions * num_answers + batch.labels[batch.accuracy_mask] - task.answer_ids.start
    return np.bincount(flat, minlength=length * num_answers).reshape(length, num_answers)
