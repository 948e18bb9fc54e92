"""The loss on held-out sequences, during training and at its end.

Each validation scores the same sequences, the first `eval_iters · train_batch_size` of the split's order, however they
are divided among processes, so that its curve moves only because the model does. It leaves no trace: random states
are put back, and nothing of the optimizer is touched.
"""

import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
from torch.utils.data import Dataset

from megatron.checkpoint import rng_state
from megatron.config.schema import Config
from megatron.data.dataloader import build_dataloader
from megatron.distributed.process_groups import ProcessGroups
from megatron.training.engine import Engine
from megatron.training.metrics_log import ValidationRecord, has_logged_record, perplexity
from megatron.training.reporters import report_to_all
from megatron.training.training_run import TrainingRun
from megatron.training.watchdog import Watchdog


@torch.no_grad()
def validate(
    engine: Engine,
    dataset: Dataset,
    config: Config,
    groups: ProcessGroups,
    *,
    step: int,
    split: str,
    progress: Callable[[str, int, int], None] = lambda split, done, total: None,
) -> ValidationRecord:
    """Mean loss per counted token of `eval_iters` global batches. All processes must call this.

    `progress` is called with the split, the micro-batches that are done, and all there are.
    """
    training = config.training
    start_time = time.perf_counter()
    states = rng_state.capture_rng_state()
    engine.model.eval()
    losses = torch.zeros((), dtype=torch.float64, device=groups.device)
    counted = 0.0
    order = build_dataloader(dataset, micro_batch_size=training.train_micro_batch_size_per_gpu, mesh=groups.mesh)
    steps = training.gradient_accumulation_steps
    total = training.eval_iters * steps
    for first in range(0, total, steps):

        def show_progress(index: int, first: int = first) -> None:
            progress(split, first + index, total)

        if not (micro_batches := list(islice(order, steps))):
            break
        counted += sum(float(batch["loss_mask"].sum(dtype=torch.float64)) for batch in micro_batches)
        losses += engine.evaluate_loss(micro_batches, progress=show_progress)
    progress(split, total, total)
    engine.model.train()
    rng_state.restore_rng_state(states)
    once = groups.mesh.count_once
    all_losses, all_counted = groups.all_reduce_sum(once(float(losses)), once(counted))
    loss = all_losses / max(all_counted, 1.0)
    return ValidationRecord(
        step=step,
        split=split,
        loss=loss,
        perplexity=perplexity(loss),
        tokens=round(all_counted),
        seconds=time.perf_counter() - start_time,
    )


class Validator:
    """Validates and tests a run, and reports it."""

    def __init__(self, run: TrainingRun, watchdog: Watchdog) -> None:
        self._run, self._watchdog = run, watchdog
        self.last: ValidationRecord | None = None
        """The last validation that was not the test."""

    def validate(self, split: Literal["valid", "test"], step: int) -> ValidationRecord | None:
        """The loss on a split after `step` steps; None if there are no data of it. All processes must call this."""
        run = self._run
        dataset = run.datasets.valid if split == "valid" else run.datasets.test
        if dataset is None:
            return None

        def show_progress(split: str, done: int, total: int) -> None:
            self._watchdog.enter_phase("validate", step)
            run.console.show_validation(split, done, total)

        record = validate(run.engine, dataset, run.config, run.groups, step=step, split=split, progress=show_progress)
        run.console.evaluation(record)
        report_to_all(run.reporters, record)
        if split == "valid":
            self.last = record
        return record


def is_test_done(run: TrainingRun, checkpoint: Path | None) -> bool:
    """Is a run that reached its end done with its test too? All processes must call this.

    The test follows the last checkpoint, so a run that is killed between the two has all its steps and no test.

    Args:
        run: before its first step.
        checkpoint: that it goes on from, if there is one.
    """
    step, train_iters, save = run.data_position.step, run.config.training.train_iters, run.config.checkpoint.save
    if step != train_iters:
        return step > train_iters  # went further than it is asked to now
    if run.datasets.test is None or save is None or checkpoint is None:
        return True
    if checkpoint.resolve().parent.parent != Path(save).resolve():
        return True  # trained elsewhere
    is_recorded = run.groups.is_main and has_logged_record(save, "test", step)
    return run.groups.find_first_error("recorded" if is_recorded else None) is not None
