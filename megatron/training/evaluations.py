"""Evaluations during training: loss on held-out sequences, and tasks of lm-evaluation-harness.

An evaluation has no side effects: random states are restored, and neither the optimizer nor the data is touched.

Each validation scores the same tokens: all of a text once, unless eval_iters limits them (`ValidationDataset`). They
do not depend on how they are divided among processes, so the curve changes only because the model does.

The record of the validation text at the training length is named `valid`. Records of named sets and of further lengths
are named `valid/NAME`, `valid/4x` and `valid/NAME/4x`.

For tasks (`harness_loading.py` loads them), every process builds the same prompts and computes the same metrics.
Data-parallel ranks divide the forward passes; tensor-parallel ranks compute each together. With ZeRO 3, which gathers
weights on all ranks at each call, all ranks compute all requests. An evaluation gives the values of `./deepy.py
evaluate --tasks` on a checkpoint of the step, up to the rounding of the compute type.
"""

import math
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from megatron.config.schema import Config
from megatron.data.torch_data import PaddedDataset, build_dataloader
from megatron.distributed import rng
from megatron.distributed.process_groups import ProcessGroups
from megatron.model.gpt import GPT
from megatron.training.engine import Engine
from megatron.training.harness_loading import get_task_length, silence_harness
from megatron.training.metrics_log import TaskRecord, ValidationRecord, compute_perplexity, has_logged_record
from megatron.training.training_run import TrainingRun
from megatron.training.watchdog import Watchdog

HARNESS_PHASE = "harness"
"""Phase of a step in which tasks are evaluated."""


@torch.no_grad()
def validate(
    engine: Engine,
    dataset: Dataset,
    config: Config,
    groups: ProcessGroups,
    *,
    step: int,
    name: str,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> ValidationRecord:
    """Return the mean loss per scored token of a dataset, NaN if none is scored. All processes must call this.

    Args:
        engine: engine whose model accepts any sequence length.
        dataset: samples of one length; their masks may weight tokens.
        config, groups: configuration and process groups of the run.
        step, name: step and name of the record.
        progress: called with the name, the number of finished micro-batches, and their total.
    """
    training = config.training
    start_time = time.perf_counter()
    states = rng.capture_rng_state()
    engine.model.eval()
    losses = torch.zeros((), dtype=torch.float64, device=groups.device)
    weights, counted = 0.0, 0
    length, data_size = dataset[0]["tokens"].shape[0], groups.mesh.data.size
    # Longer sequences use smaller micro-batches with as many tokens.
    micro_batch = training.train_micro_batch_size_per_gpu
    if config.data.task is None:
        micro_batch = max(1, micro_batch * config.model.seq_length // length)
    steps = training.gradient_accumulation_steps
    # A pipeline needs the micro-batches of a whole step.
    batch = micro_batch * data_size * (steps if groups.mesh.pipeline.size > 1 else 1)
    padded = PaddedDataset(dataset, batch)
    order = build_dataloader(padded, micro_batch_size=micro_batch, mesh=groups.mesh)
    total = len(padded) // (micro_batch * data_size)
    for first in range(0, total, steps):

        def show_progress(index: int, first: int = first) -> None:
            progress(name, first + index, total)

        micro_batches = list(islice(order, steps))
        weights += sum(float(batch["loss_mask"].sum(dtype=torch.float64)) for batch in micro_batches)
        counted += sum(int(batch["loss_mask"].count_nonzero()) for batch in micro_batches)
        losses += engine.evaluate_loss(micro_batches, progress=show_progress)
    progress(name, total, total)
    engine.model.train()
    rng.restore_rng_state(states)
    once = groups.mesh.count_on_one_rank
    all_losses, all_weights, all_counted = groups.all_reduce_sum(once(float(losses)), once(weights), once(counted))
    loss = all_losses / all_weights if all_weights else math.nan
    return ValidationRecord(
        step=step,
        split=name,
        loss=loss,
        perplexity=compute_perplexity(loss),
        tokens=round(all_counted),
        seconds=time.perf_counter() - start_time,
    )


class Validator:
    """Validations and test of a run, with their reports."""

    def __init__(self, run: TrainingRun, watchdog: Watchdog) -> None:
        self._run, self._watchdog = run, watchdog
        self.last: ValidationRecord | None = None
        """Last validation on the validation text at the training length."""

    def validate(self, step: int) -> None:
        """Report the losses on all validation sets at all lengths. All processes must call this."""
        datasets = self._run.datasets
        if datasets.valid is not None:
            self.last = self._report("valid", datasets.valid, step) or self.last
        for name, dataset in datasets.extra_valid_sets.items():
            self._report(name, dataset, step)

    def run_test(self, step: int) -> ValidationRecord | None:
        """Report and return the loss on the test text, or None without text or scored tokens.

        All processes must call this.
        """
        dataset = self._run.datasets.test
        return None if dataset is None else self._report("test", dataset, step)

    def _report(self, name: str, dataset: Dataset, step: int) -> ValidationRecord | None:
        """Report and return the loss on a dataset. Print a note and return None if no token is scored."""
        run = self._run

        def show_progress(name: str, done: int, total: int) -> None:
            self._watchdog.enter_phase("validate", step)
            run.console.show_validation(name, done, total)

        record = validate(run.engine, dataset, run.config, run.groups, step=step, name=name, progress=show_progress)
        if record.tokens == 0:
            run.console.log(f"step {step}: no token of {name} is scored, so it has no loss")
            return None
        run.console.report_validation(record)
        run.report(record)
        return record


def is_test_done(run: TrainingRun, checkpoint: Path | None) -> bool:
    """Return True if a run that has taken all its steps has also run its test. All processes must call this.

    The test follows the last checkpoint, so a run that is killed between the two has all its steps and no test.

    Args:
        run: run before its first step.
        checkpoint: checkpoint from which it resumes, if any.
    """
    step, train_iters, save = run.data_position.step, run.config.training.train_iters, run.config.checkpoint.save
    if step != train_iters:
        return step > train_iters  # the run went further than now requested
    if run.datasets.test is None or save is None or checkpoint is None:
        return True
    if checkpoint.resolve().parent.parent != Path(save).resolve():
        return True  # trained in another run
    is_recorded = run.groups.is_main and has_logged_record(save, "test", step)
    return run.groups.find_first_error("recorded" if is_recorded else None) is not None


class HarnessRunner:
    """Runner of a run's tasks of lm-evaluation-harness, which it reports.

    Args:
        run: run that is ready for its first step.
        tasks: return value of `load_training_tasks`.
        watchdog: watchdog of this process.
    """

    def __init__(self, run: TrainingRun, tasks: Any, watchdog: Watchdog) -> None:
        self._run, self._tasks, self._watchdog = run, tasks, watchdog

    def evaluate(self, step: int) -> None:
        """Report the values of all tasks. All processes must call this."""
        from megatron.evaluation.harness import HarnessModel
        from megatron.evaluation.harness_tasks import run_tasks

        run, start_time = self._run, time.perf_counter()
        training, tokenizer, model = run.config.training, run.vocabulary.tokenizer, run.engine.model
        assert tokenizer is not None  # `validate_config`
        assert isinstance(model, GPT)

        def show_progress(done: int, total: int) -> None:
            self._watchdog.enter_phase(HARNESS_PHASE, step)
            run.console.show_validation("harness", done, total, "requests")

        show_progress(0, 1)
        states, end_of_document = rng.capture_rng_state(), model.end_of_document
        if run.config.position.attention_mask == "document":
            model.end_of_document = run.vocabulary.eod  # as in a model that is loaded for evaluation
        model.eval()
        length = get_task_length(run.config)
        try:
            adapter = HarnessModel(
                model,
                tokenizer,
                length,
                # As many tokens as a training step, whose activations take more memory.
                batch_tokens=max(length, training.train_micro_batch_size_per_gpu * run.config.model.seq_length),
                on_batch_done=show_progress,
                sharding=_build_sharding(run.groups, model),
            )
            with silence_harness():
                results = run_tasks(adapter, self._tasks, run.config.logging.harness.limit)
        finally:
            model.end_of_document = end_of_document
            model.train()
            rng.restore_rng_state(states)
        show_progress(1, 1)
        seconds = time.perf_counter() - start_time
        for record in _build_records(results, adapter.request_counts, step, seconds):
            run.console.report_validation(record)
            run.report(record)


def _build_sharding(groups: ProcessGroups, model: GPT) -> Any:
    """Return the sharding of requests among the data-parallel ranks; none with ZeRO 3, whose ranks call together."""
    from megatron.evaluation.harness import RequestSharding

    if groups.world_size == 1 or model.is_sharded_by_zero3:
        return RequestSharding()
    return RequestSharding(groups.mesh.data.index, groups.mesh.data.size, groups.gather_objects)


def _build_records(results: Any, request_counts: Any, step: int, seconds: float) -> Iterator[TaskRecord]:
    """Yield the records of all tasks, or of groups that have their own scores."""
    from megatron.evaluation.harness_tasks import iter_task_results, iter_task_values

    for task, values, counts in iter_task_results(results, request_counts):
        named = {}
        for value in iter_task_values(values):
            lengths = [] if value.text_length is None else [str(value.text_length)]
            named["/".join([value.metric, *value.filters, *lengths])] = value
        yield TaskRecord(
            step=step,
            task=task,
            values={name: value.value for name, value in named.items()},
            stderrs={name: value.stderr for name, value in named.items() if value.stderr is not None},
            tokens=sum(count.num_tokens for count in counts),
            requests=sum(count.num_requests for count in counts),
            seconds=seconds,
        )
