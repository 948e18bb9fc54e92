"""Plan of a run's start: its checkpoint and its data, determined and checked before anything is built.

Every rank of a run makes a `StartPlan` before it builds data and model. A dry run and a SLURM submission make one
without being a rank (check_start.py), so the same code rejects what the run would reject.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from megatron.checkpoint.resume import ResumePlan, plan_resume
from megatron.checkpoint.weights import check_added_processors
from megatron.config.execution import build_stages
from megatron.config.schema import Config
from megatron.config.stages import Stage, find_longest_length
from megatron.data.blend import DatasetSlice
from megatron.data.datasets import SampleOrder, open_dataset_slices
from megatron.data.indexed_dataset import find_changed_datasets
from megatron.data.load_tokenizer import Vocabulary, check_tokenizer_folder, read_vocabulary
from megatron.data.stage_order import (
    StageOrder,
    begin_order,
    continue_order,
    find_moved_datasets,
    rename_datasets,
)
from megatron.distributed.mesh import ParallelSizes
from megatron.distributed.process_groups import ProcessGroups
from megatron.model.build import check_position_options
from megatron.options.model import ModelOptions
from megatron.options.position import PositionOptions
from megatron.options.training import count_eval_multiple
from megatron.training.loss_guard import Rollback
from megatron.utils.errors import UserError

TASK_EVAL_ITERS = 100
"""Default of eval_iters for a task, whose text has no end: batches per validation."""


@dataclass
class DataPosition:
    """Progress of a run in steps and in data (`Stateful`)."""

    step: int = 0
    """Optimizer steps taken, including skipped ones."""
    samples: int = 0
    """Training sequences read."""
    tokens: int = 0
    ordered_samples: int = 0
    """Number of samples for which the order of the training data was built."""
    skipped_samples: int = 0
    """Samples read whose updates were lost, because the run rolled back."""
    order: StageOrder | None = None
    """Order in which the stage reads the text, or None without stages."""

    @property
    def next_sequence(self) -> int:
        """Index in the order of the next sequence to read."""
        return self.samples if self.order is None else self.order.find_sequence(self.samples)

    def advance(self, samples: int, tokens: int) -> None:
        """Advance by one step over the given numbers of sequences and tokens."""
        self.step += 1
        self.samples += samples
        self.tokens += tokens

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "consumed_samples": self.samples,
            "consumed_tokens": self.tokens,
            "train_samples": self.ordered_samples,
            "skipped_samples": self.skipped_samples,
            "data_order": None if self.order is None else self.order.to_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.step, self.ordered_samples = state_dict["step"], state_dict["train_samples"]
        self.samples, self.tokens = state_dict["consumed_samples"], state_dict["consumed_tokens"]
        self.skipped_samples, order = state_dict["skipped_samples"], state_dict["data_order"]
        self.order = None if order is None else StageOrder.from_dict(order)


@dataclass(frozen=True)
class StartPlan:
    """Checkpoint, vocabulary and data with which a run starts."""

    config: Config
    """Configuration of the stage in which the run starts."""
    requested: Config
    """Configuration of all stages, as the run was started; by an earlier attempt, if that saved no checkpoint."""
    resume: ResumePlan
    vocabulary: Vocabulary
    data_position: DataPosition
    order: SampleOrder
    slices: Mapping[str, list[DatasetSlice]]
    """Datasets of each split and each further validation set; empty for a task."""
    notes: tuple[str, ...] = ()
    """Lines for the user, in addition to those of `resume`."""


def plan_start(
    config: Config,
    groups: ProcessGroups,
    rollback: Rollback | None = None,
    *,
    sizes: ParallelSizes | None = None,
    checksums: bool = True,
) -> StartPlan:
    """Determine the checkpoint and the data with which a run starts, without creating anything.

    All processes must call this.

    Args:
        config: resolved configuration (`resolve_run`), with the values that its data determine (`resolve_data`).
        groups: processes that call this; they share the work of reading a checkpoint.
        rollback: rollback because of a bad loss, if any; the data that caused it are skipped.
        sizes: mesh of the run; by default that of `groups`.
        checksums: True to read every byte of the checkpoint; otherwise only names and sizes of its files are compared.

    Raises:
        UserError: if the configuration, the data and the checkpoint do not match.
        RunError: if a dataset or a checkpoint is damaged.
    """
    resume, method_notes = plan_checkpoint(config, groups, sizes=sizes, checksums=checksums)
    resume, order_notes = _enter_stage(resume)
    if rollback is not None:
        length = resume.stage.config.model.seq_length
        resume = replace(resume, trainer_state=rollback.skip_samples(resume.trainer_state, length))
    requested, config = config, resume.stage.config
    options = config.checkpoint
    requested = requested.replace(load=options.load, finetune=options.finetune, rollback=options.rollback)
    steps, found_steps = config.training.train_iters, requested.training.train_iters
    epoch_notes = []
    if found_steps != steps:  # the corpus of the epochs has changed since
        requested = requested.replace(train_iters=steps)
        epoch_notes.append(f"train_epochs: the run keeps the {steps:,} steps of its start, instead of {found_steps:,}")
    vocabulary = read_vocabulary(config.data)
    resume.check_vocabulary(vocabulary.size, vocabulary.name, config.data.task)
    if config.checkpoint.save is not None and vocabulary.tokenizer is not None:
        with suppress(OSError):  # an unreadable folder is an error when it is written
            check_tokenizer_folder(config.checkpoint.save)
    position = DataPosition()
    resume.trainer_state.restore(position)
    order = _build_sample_order(config, resume.stage, position)
    slices = open_dataset_slices(
        config.data,
        order,
        seq_length=config.model.seq_length,
        vocabulary=vocabulary,
        separates_documents=config.position.attention_mask == "document",
    )
    _check_later_data(resume, order, vocabulary)
    notes = (*method_notes, *order_notes, *epoch_notes, *_describe_changed_data(resume, slices))
    return StartPlan(config, requested, resume, vocabulary, position, order, slices, notes)


def _describe_changed_data(resume: ResumePlan, slices: Mapping[str, list[DatasetSlice]]) -> Iterator[str]:
    """Yield a note for each training dataset that was replaced after the checkpoint that a run resumes from."""
    if resume.checkpoint is not None:
        prefixes = {str(dataset_slice.dataset.prefix) for dataset_slice in slices.get("train", [])}
        for prefix in find_changed_datasets(resume.trainer_state.data_digests or {}):
            if prefix in prefixes:
                yield f"{prefix}: its tokens have changed since {resume.checkpoint} was written"


def plan_checkpoint(
    config: Config, groups: ProcessGroups, *, sizes: ParallelSizes | None = None, checksums: bool = True
) -> tuple[ResumePlan, tuple[str, ...]]:
    """Choose the checkpoint with which a run starts, and check that engine and methods of all stages suit it.

    All processes must call this. The arguments are those of `plan_start`.

    Returns:
        The plan, and notes about methods.

    Raises:
        UserError: if a method cannot be built, or the configuration and the checkpoint do not match.
        RunError: if the checkpoint is damaged.
    """
    resume = plan_resume(config, groups, sizes=sizes, checksums=checksums)
    config = resume.stage.config
    resume.check_engine(config, sizes or groups.mesh.sizes)
    notes = resume.check_methods(config.position)
    check_stage_methods(stage.config for stage in (resume.stage, *resume.stages))
    if resume.source is not None and not resume.resumes:
        check_added_processors(config, resume.source.path, resume.source.config)
    return resume, notes


def check_stage_methods(configs: Iterable[Config]) -> None:
    """Check that the methods of all stages of a run can be built, those of later stages now instead of hours later.

    Raises UserError.
    """
    checked: list[tuple[ModelOptions, PositionOptions]] = []
    for config in configs:
        if (options := (config.model, config.position)) not in checked:
            check_position_options(*options)
            checked.append(options)


def list_eval_multiples(config: Config) -> list[int]:
    """Return the further validation lengths, as multiples of seq_length."""
    return [count_eval_multiple(length, config.model.seq_length) for length in config.training.eval_lengths]


def check_eval_lengths(config: Config, max_length: int | None) -> None:
    """Check that the model has enough positions for all validation lengths. Raises UserError."""
    for multiple in list_eval_multiples(config):
        length = multiple * config.model.seq_length
        if config.data.task is not None:
            raise UserError(
                "eval_lengths: not supported for a task, which has its own lengths; remove it", "eval_lengths"
            )
        if max_length is not None and length > max_length:
            raise UserError(
                f"eval_lengths: {multiple}x is {length:,} tokens, but the model has {max_length:,} positions",
                "eval_lengths",
            )


def _check_later_data(resume: ResumePlan, order: SampleOrder, vocabulary: Vocabulary) -> None:
    """Check the different data of later stages at the start instead of hours later. Raises UserError."""
    checked = [resume.stage.config.data]
    for stage in resume.stages:
        config = stage.config
        if stage.first_step <= resume.stage.first_step or config.data.task is not None or config.data in checked:
            continue
        checked.append(config.data)
        own = read_vocabulary(config.data)
        if (own.size, own.name) != (vocabulary.size, vocabulary.name):
            raise UserError(
                f"stages: stage {stage.index + 1} reads data with the vocabulary {own.name} ({own.size} tokens), but "
                f"the run has {vocabulary.name} ({vocabulary.size} tokens)",
                "stages",
            )
        open_dataset_slices(
            config.data,
            order,
            seq_length=config.model.seq_length,
            vocabulary=own,
            separates_documents=config.position.attention_mask == "document",
        )


def _enter_stage(resume: ResumePlan) -> tuple[ResumePlan, list[str]]:
    """Return the plan with the order of the text in its stage, and lines for the user.

    The plan of a run without stages, or on a task, does not change.
    """
    state, config = resume.trainer_state, resume.stage.config
    if config.data.task is not None or not (config.training.stages or state.data_order):
        return resume, []
    length, block = config.model.seq_length, find_longest_length(config)
    num_blocks = sum((s.end_step - s.first_step) * s.tokens_per_step for s in resume.stages) // block + len(
        resume.stages
    )
    order = None if state.data_order is None else StageOrder.from_dict(state.data_order)
    notes = []
    if resume.source is None or not resume.resumes:
        order, state = begin_order(config.data, block, num_blocks), replace(state, train_samples=num_blocks)
    else:
        before = resume.source.config
        stages = zip(build_stages(before), resume.stages, strict=False)
        moved = find_moved_datasets(
            ((old.config.data, now.config.data) for old, now in stages), state.data_digests or {}
        )
        data = rename_datasets(before.data, moved)
        if order is None:
            order = begin_order(data, before.model.seq_length, state.train_samples)
        if order.block_length == block:
            order, left_out = continue_order(
                order.rename_datasets(moved),
                state.consumed_samples,
                before=(data, before.model.seq_length),
                now=(config.data, length),
                num_blocks=state.train_samples,
            )
            if left_out:
                notes.append(f"the text continues at the next {length:,}-token block: {left_out:,} tokens are skipped")
        else:
            notes.append(
                f"the text is divided into blocks of {block:,} tokens, not {order.block_length:,}, in a new order, "
                "which may repeat text that was already read"
            )
            order = begin_order(config.data, block, num_blocks, first_sample=state.consumed_samples)
            state = replace(state, train_samples=num_blocks)
    return replace(resume, trainer_state=replace(state, data_order=order.to_dict())), notes


def _build_sample_order(config: Config, stage: Stage, position: DataPosition) -> SampleOrder:
    """Return how many samples of each split the run reads, and set `position.ordered_samples`."""
    training, batch = config.training, config.training.train_batch_size
    assert batch is not None
    # A resumed run keeps its original order, even if it is now longer, shorter or has another batch size.
    total = position.next_sequence + max(0, stage.end_step - position.step) * batch
    if position.order is not None:
        total = max(1, position.order.count_blocks(total, config.model.seq_length))
    position.ordered_samples = position.ordered_samples or total
    eval_iters = training.eval_iters
    if eval_iters is None and config.data.task is not None:
        eval_iters = TASK_EVAL_ITERS
    held_out = 0 if not training.eval_interval else None if eval_iters is None else eval_iters * batch
    return SampleOrder(
        seed=training.seed,
        train_samples=position.ordered_samples,
        valid_samples=held_out,
        test_samples=held_out,
        extend_train_to=total,
        batch_size=batch,
        consumed_samples=position.samples,
        stage=position.order,
    )
