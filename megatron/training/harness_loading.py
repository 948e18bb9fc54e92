"""Tasks of lm-evaluation-harness for evaluations during training: loaded and checked before the first step.

A missing package, an unknown task, missing data and requests that the model cannot answer are errors of the start, not
of a step hours later. Dry runs and submissions make the same checks (`check_start.py`), dry runs without the network.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from megatron.config.schema import Config
from megatron.config.stages import list_stage_configs
from megatron.options.evaluation import TaskOptions
from megatron.utils.errors import FarfieldError, RunError, UserError
from megatron.utils.imports import pause_garbage_collection, require_package

if TYPE_CHECKING:
    from megatron.data.load_tokenizer import Vocabulary
    from megatron.distributed.process_groups import ProcessGroups
    from megatron.model.gpt import GPT


def check_harness_names(config: Config) -> None:
    """Check that lm-evaluation-harness is installed and has the tasks of a run, if any, without importing it.

    Raises UserError.
    """
    harness = config.logging.harness
    if harness.tasks:
        from megatron.evaluation.harness_names import check_task_names

        require_package("lm_eval", "harness.tasks")
        check_task_names(harness.tasks, harness.include_path, "harness.tasks")


def load_training_tasks(
    config: Config, log: Callable[[str], None] = lambda line: None, *, allow_download: bool = True
) -> Any:
    """Load the tasks of a run, in the harness's format.

    Args:
        config: configuration of the run.
        log: called with a line for the user.
        allow_download: False to use only data on this machine, whatever `harness.download` is.

    Raises:
        UserError: if a task does not exist or is not supported.
        MissingTaskDataError: if its data are not on this machine.
        RunError: if it cannot be read.
    """
    with pause_garbage_collection():
        from megatron.evaluation.harness_tasks import load_tasks

    harness = config.logging.harness
    options = TaskOptions(
        tasks=harness.tasks,
        include_path=harness.include_path,
        limit=harness.limit,
        num_fewshot=harness.num_fewshot,
        metadata=harness.metadata,
    )
    with silence_harness():
        return load_tasks(
            options, log, name_option="harness.{}".format, allow_download=harness.download and allow_download
        )


def load_local_tasks(config: Config) -> Any:
    """Load the tasks of a run without the network.

    Return None if the run will download their data (`harness.download`). Raises the errors of `load_training_tasks`.
    """
    from megatron.evaluation.harness_tasks import MissingTaskDataError

    try:
        return load_training_tasks(config, allow_download=False)
    except MissingTaskDataError:
        if not config.logging.harness.download:
            raise
        return None


def load_tasks_on_all_ranks(config: Config, groups: ProcessGroups, log: Callable[[str], None]) -> Any:
    """Load the tasks of a run, or return None if it has none. All processes must call this.

    The first rank, which may download data, loads them before the others. All raise the first error.
    """
    if not config.logging.harness.tasks:
        return None
    tasks: Any = None
    for is_turn in (groups.is_main, not groups.is_main):
        failure: FarfieldError | None = None
        try:
            if is_turn:
                tasks = load_training_tasks(config, log)
        except FarfieldError as error:
            failure = error
        failures = [error for error in groups.gather_objects(failure) if error is not None]
        if failures:
            raise failures[0]
    return tasks


def check_task_requests(config: Config, tasks: Any, vocabulary: Vocabulary, model: GPT) -> None:
    """Check that a model can answer the requests of tasks at the lengths of all stages, without computing anything.

    Args:
        config: configuration of all stages.
        tasks: return value of `load_training_tasks`.
        vocabulary: vocabulary of the run's data.
        model: model of the run; its weights are not read.

    Raises:
        UserError: if the model has too few positions, or a request cannot be answered.
    """
    from megatron.evaluation.harness import RequestChecker

    assert vocabulary.tokenizer is not None  # `validate_config`
    harness = config.logging.harness
    for length in sorted({get_task_length(each) for each in (config, *list_stage_configs(config))}):
        if model.max_length is not None and length > model.max_length:
            raise UserError(
                f"harness.length: {length:,} tokens, but the model has {model.max_length:,} positions", "harness.length"
            )
        checker = RequestChecker(model, vocabulary.tokenizer, length)
        try:
            with silence_harness():
                checker.check(tasks["tasks"].values(), harness.limit)
        except RunError as error:
            problem = str(error).replace("--lengths", "harness.length")
            raise UserError(f"harness.tasks: {problem}", "harness.tasks") from error


def get_task_length(config: Config) -> int:
    """Return the maximum number of tokens in the context of a task in a stage."""
    return config.logging.harness.length or config.model.seq_length


@contextmanager
def silence_harness() -> Iterator[None]:
    """Silence the harness's progress bars and remarks on tasks, which each rank would print at each evaluation."""
    from lm_eval.api import task as task_module

    logger = logging.getLogger("lm_eval")
    level, usual = logger.level, task_module.tqdm
    logger.setLevel(logging.ERROR)
    task_module.tqdm = lambda documents, **_: documents
    try:
        yield
    finally:
        logger.setLevel(level)
        task_module.tqdm = usual
