"""Contents of past training batches, from the configuration, data order and trainer states that a run has stored.

Every checkpoint records how many sequences the run had read. The batch of a step follows from the first checkpoint
after it, counted backward, because every attempt at these steps reads batches of one size without gaps. After the last
checkpoint, it follows from the position at which the run would resume (`plan_start`).

A rollback skips data (`loss_guard.py`): the checkpoint before it tells what the attempt read that was rolled back. Some
positions are not recorded, for example if these checkpoints were deleted. They raise an error instead of a guess.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from megatron.checkpoint import layout
from megatron.checkpoint.manifest import load_checkpoint_config
from megatron.checkpoint.run_folder import find_started_run, get_config_path, is_saved_config
from megatron.checkpoint.trained_run import resolve_data_paths
from megatron.checkpoint.trainer_state import TrainerState
from megatron.config.execution import build_stages
from megatron.config.load import read_config
from megatron.config.schema import Config
from megatron.config.stages import find_writing_stage
from megatron.data.blend import DatasetSlice
from megatron.data.datasets import Datasets, SampleOrder, build_datasets, open_dataset_slices
from megatron.data.load_tokenizer import Vocabulary, read_vocabulary
from megatron.data.stage_order import list_dataset_prefixes
from megatron.data.torch_data import DistributedBatchSampler
from megatron.distributed.mesh import Axis
from megatron.distributed.process_groups import ProcessGroups
from megatron.training.metrics_log import METRICS_FILE, read_metrics_log
from megatron.training.start_plan import DataPosition, plan_start
from megatron.utils.errors import RunError, UserError


@dataclass(frozen=True)
class BatchRow:
    """One sequence of a batch."""

    rank: int
    """Data-parallel rank that read it, from 0."""
    micro_batch: int
    """Micro-batch of that rank's step, from 0."""
    row: int
    """Row of the micro-batch, from 0."""
    sample: int
    """Index of the sequence in the order of the training data."""
    tokens: np.ndarray
    """Token ids, int64 [T]."""


@dataclass(frozen=True)
class DataOrder:
    """Order in which a part of a run reads its data, and the position of one of its steps."""

    config: Config
    position: DataPosition
    """Position after a step."""
    last_sample: int
    """Number of sequences that the part of the run reads, counted from the run's first step."""

    @property
    def batch_size(self) -> int:
        """Sequences per step."""
        return self.config.training.train_batch_size or 1

    @property
    def num_ranks(self) -> int:
        """Number of data-parallel ranks."""
        training = self.config.training
        return self.batch_size // (training.train_micro_batch_size_per_gpu * training.gradient_accumulation_steps)

    def count_samples_before(self, step: int) -> int:
        """Return the number of sequences that the run has read before a step, in steps without gaps."""
        return self.position.samples + (step - 1 - self.position.step) * self.batch_size

    @cached_property
    def _sample_order(self) -> SampleOrder:
        position, length = self.position, self.config.model.seq_length
        total = replace(position, samples=self.last_sample).next_sequence
        if position.order is not None:
            total = max(1, position.order.count_blocks(total, length))
        return SampleOrder(
            seed=self.config.training.seed,
            train_samples=position.ordered_samples or total,
            extend_train_to=total,
            batch_size=self.batch_size,
            consumed_samples=position.samples % self.batch_size,
            stage=position.order,
        )

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return read_vocabulary(self.config.data)

    @cached_property
    def slices(self) -> list[DatasetSlice]:
        """Datasets of the training text; empty for a task."""
        length = self.config.model.seq_length
        slices = open_dataset_slices(
            self.config.data, self._sample_order, seq_length=length, vocabulary=self.vocabulary
        )
        return slices.get("train", [])

    @cached_property
    def datasets(self) -> Datasets:
        """Samples of the training, from the run's sample index if it can be used."""
        cache = Path(self.config.data.data_cache or Path(str(self.config.checkpoint.save)) / "data_cache")
        if not cache.is_dir():
            return self._build_datasets(None)
        try:
            return self._build_datasets(cache)
        except RunError:
            if os.access(cache, os.W_OK):
                raise
            return self._build_datasets(None)  # the index is missing in a folder of someone else

    def _build_datasets(self, cache: Path | None) -> Datasets:
        return build_datasets(
            self.config.data,
            self._sample_order,
            seq_length=self.config.model.seq_length,
            cache=cache,
            groups=ProcessGroups(),
            vocabulary=self.vocabulary,
            slices={"train": self.slices} if self.slices else {},
        )

    def read_rows(self, samples: int, rank: int | None = None) -> Iterator[BatchRow]:
        """Yield the rows of the step that begins after `samples` sequences, of one data-parallel rank or of all."""
        start = replace(self.position, samples=samples).next_sequence
        if start < 0:
            raise RunError(f"sequence {samples}: unknown position; the data order began after it")
        micro_batch_size = self.config.training.train_micro_batch_size_per_gpu
        dataset = self.datasets.train
        assert dataset is not None
        for each in range(self.num_ranks) if rank is None else (rank,):
            sampler = DistributedBatchSampler(
                start + self.batch_size,
                micro_batch_size=micro_batch_size,
                data=Axis(each, self.num_ranks),
                start=start,
            )
            for micro_batch, indices in enumerate(sampler):
                for row, index in enumerate(indices):
                    yield BatchRow(each, micro_batch, row, index, dataset[index]["tokens"].numpy())


@dataclass(frozen=True)
class StepAttempt:
    """One attempt at a step: the batch that it read."""

    step: int
    order: DataOrder
    samples: int
    """Number of sequences that the run had read before the step."""
    is_rolled_back: bool = False
    """True if the attempt was rolled back, so that its update is not part of the model."""
    note: str | None = None
    """Limits of what is recorded, in one line."""


class BatchHistory:
    """Batches of a run by step.

    Args:
        run: folder of the run, or one of its checkpoints.

    Raises UserError if there is no run.
    """

    def __init__(self, run: str | Path) -> None:
        self.run = find_started_run(run)
        self._checkpoints = layout.list_checkpoints(self.run)
        self._orders: dict[Path, DataOrder] = {}
        self._next: DataOrder | None = None
        records = read_metrics_log(self.run / METRICS_FILE)
        self._losses = {record["step"]: record.get("loss") for _, record in records if record["kind"] == "train"}

    def find_loss(self, step: int) -> tuple[float | None, int, int] | None:
        """Return the recorded loss of a step with the first and last step of its interval, or None without a record."""
        last = min((each for each in self._losses if each >= step), default=None)
        if last is None:
            return None
        first = max((each for each in self._losses if each < step), default=0) + 1
        return self._losses[last], first, last

    def find_attempts(self, step: int) -> list[StepAttempt]:
        """Return the attempts at a step whose batches are known; the last one belongs to the model.

        Raises:
            UserError: the run has no such step, or has not reached it.
            RunError: the position in the data is not recorded.
        """
        if step < 1:
            raise UserError(f"step {step}: steps are counted from 1")
        steps = [layout.parse_step(path) or 0 for path in self._checkpoints]
        index = next((i for i, saved in enumerate(steps) if saved >= step), None)
        if index is None:
            return [self._read_after_last_checkpoint(step)]
        return self._read_before(step, self._checkpoints[index], self._checkpoints[index - 1] if index else None)

    def _read_before(self, step: int, later: Path, earlier: Path | None) -> list[StepAttempt]:
        """Return the attempts at a step between two checkpoints. `earlier` is None if there is none before the step."""
        order, state = self._open_order(later), TrainerState.read(later)
        before = TrainerState() if earlier is None else TrainerState.read(earlier)
        stages = build_stages(order.config)
        if step <= find_writing_stage(stages, state.step).first_step:
            raise RunError(
                f"step {step}: unknown batch; the checkpoint that records the order of the data in its stage, before "
                f"{later.name}, was deleted"
            )
        sizes = [stage.config.training.train_batch_size or 1 for stage in stages]
        expected = sum(
            max(0, min(stage.end_step, state.step) - max(stage.first_step, before.step)) * size
            for stage, size in zip(stages, sizes, strict=True)
        )
        skipped = state.skipped_samples - before.skipped_samples
        since = "its start" if earlier is None else earlier.name
        if state.consumed_samples - before.consumed_samples - skipped != expected:
            raise RunError(f"step {step}: unknown batch; the batch size changed between {since} and {later.name}")
        options = order.config.checkpoint
        factor = options.checkpoint_factor
        is_spared = earlier is None or before.step in options.extra_save_iters
        may_lack = is_spared and bool(factor) and state.step - before.step > (factor or 0)
        attempt = StepAttempt(step, order, order.count_samples_before(step))
        if not skipped:
            note = f"assumes that the data did not change at checkpoints deleted between {since} and {later.name}"
            return [replace(attempt, note=note) if may_lack else attempt]
        if earlier is None or may_lack:
            raise RunError(
                f"step {step}: unknown batch; the run rolled back between {since} and {later.name}, to a checkpoint "
                "that was deleted"
            )
        attempts = state.rollbacks - before.rollbacks
        if attempts > 1:
            note = f"{attempts} attempts after {since} were rolled back; the batches of each attempt are not recorded"
            return [replace(attempt, note=note)]
        if step > before.step + skipped // order.batch_size:
            return [attempt]
        read = before.consumed_samples + (step - 1 - before.step) * order.batch_size
        return [StepAttempt(step, order, read, is_rolled_back=True), attempt]

    def _open_order(self, checkpoint: Path) -> DataOrder:
        """Return the order of the data in which a checkpoint was trained."""
        if checkpoint not in self._orders:
            state, stored = TrainerState.read(checkpoint), load_checkpoint_config(checkpoint)
            config = resolve_data_paths(stored, checkpoint, state.directory).replace(save=str(self.run))
            position = DataPosition()
            state.restore(position)
            if position.order is not None:
                prefixes = (list_dataset_prefixes(each.data) for each in (stored, config))
                position.order = position.order.rename_datasets(dict(zip(*prefixes, strict=True)))
            self._orders[checkpoint] = DataOrder(config, position, state.consumed_samples)
        return self._orders[checkpoint]

    def _read_after_last_checkpoint(self, step: int) -> StepAttempt:
        last = self._checkpoints[-1] if self._checkpoints else None
        if self._next is None:
            self._next = self._plan_next_order(last)
        order = self._next
        name = "the start" if last is None else last.name
        end = order.position.step + (order.last_sample - order.position.samples) // order.batch_size
        if step > end:
            reason = "is after the last step" if end == order.config.training.train_iters else "has not been reached"
            raise UserError(f"step {step} {reason}; batches are known up to step {end}")
        notes = []
        if step > (reached := max(self._losses, default=order.position.step)):
            notes.append(f"the last recorded step is {reached}")
        if order.config.training.on_bad_loss == "rollback" and last is not None:
            notes.append(f"assumes that the run did not roll back to {name}: only a later checkpoint would record it")
        return StepAttempt(step, order, order.count_samples_before(step), note="; ".join(notes) or None)

    def _plan_next_order(self, last: Path | None) -> DataOrder:
        """Return the order of the data from the run's newest checkpoint, or from its start, to the end of the stage."""
        path = get_config_path(self.run)
        if not is_saved_config(path):
            raise RunError(f"{path}: not a run's configuration, which determines the data after the last checkpoint")
        stored, state = read_config(path), TrainerState() if last is None else TrainerState.read(last)
        config = resolve_data_paths(stored, last or layout.get_checkpoint_path(self.run, 0), state.directory)
        if config.training.stages and config.data != stored.data:
            raise UserError(f"{self.run}: its data were moved; {_advise_on_moved_data(stored, config)}")
        folder = str(self.run)
        config = config.replace(save=folder, load=folder, finetune=False, rollback=False)
        plan = plan_start(config, ProcessGroups(), sizes=state.sizes, checksums=False)
        steps = plan.resume.stage.end_step - plan.data_position.step
        read = plan.data_position.samples + max(0, steps) * (plan.config.training.train_batch_size or 1)
        return DataOrder(plan.config, plan.data_position, read)


def _advise_on_moved_data(stored: Config, resolved: Config) -> str:
    """Return how to make the paths of a configuration and of its stages valid, if the data were found elsewhere."""
    pairs = zip(list_dataset_prefixes(stored.data), list_dataset_prefixes(resolved.data), strict=True)
    for old, new in pairs:
        if old != new:
            folder = new.removesuffix(f"{os.sep}{os.path.normpath(old)}")
            return f"run this command in {folder}" if folder != new else f"link {old}.bin and .idx to those of {new}"
    return "run this command in the working directory of its training"
