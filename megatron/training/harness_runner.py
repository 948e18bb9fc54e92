"""Tasks of lm-evaluation-harness during training, evaluated every N steps (`harness_loading.py` loads them).

Every process builds the same prompts and computes the same metrics. Data-parallel ranks divide the forward passes;
tensor-parallel ranks compute each together. With ZeRO 3, which gathers weights on all ranks at each call, all ranks
compute all requests. The model is the one that is being trained, so an evaluation gives the values of `./deepy.py
evaluate --tasks` on a checkpoint of the step, up to the rounding of the compute type.

An evaluation has no side effects: random states are restored, and neither the optimizer nor the data is touched.
"""

import time
from collections.abc import Iterator
from typing import Any

from megatron.distributed import rng
from megatron.distributed.process_groups import ProcessGroups
from megatron.model.gpt import GPT
from megatron.training.harness_loading import get_task_length, quiet_harness
from megatron.training.metrics_log import TaskRecord
from megatron.training.training_run import TrainingRun
from megatron.training.watchdog import Watchdog

PHASE = "harness"
"""Phase of a step in which tasks are evaluated."""


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
            self._watchdog.enter_phase(PHASE, step)
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
                after=show_progress,
                division=_build_division(run.groups, model),
            )
            with quiet_harness():
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


def _build_division(groups: ProcessGroups, model: GPT) -> Any:
    """Return the division of requests among the data-parallel ranks; none with ZeRO 3, whose ranks call together."""
    from megatron.evaluation.harness import RequestDivision

    if groups.world_size == 1 or model.is_sharded_by_zero3:
        return RequestDivision()
    return RequestDivision(groups.mesh.data.index, groups.mesh.data.size, groups.gather_objects)


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
