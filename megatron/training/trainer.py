"""The training loop: steps, reports, validations, checkpoints, and every way in which a run ends.

    state = build_state(config, …)    build everything, resume if there is something to resume from (train_state.py)
    for each step:                    gradient accumulation, then one optimizer step (engine.py)
        every log_interval            a record to console, metrics.jsonl, TensorBoard, wandb
        every eval_interval           the loss on held-out sequences (validate.py)
        every checkpoint_factor       a checkpoint (megatron.checkpoint.saver), and after each of extra_save_iters

A run ends after train_iters steps; after a signal, with a checkpoint of the last whole step; or with an error when the
loss stays non-finite, its last good checkpoint untouched.
"""

import math
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from megatron.checkpoint import layout
from megatron.checkpoint.engine_state import EngineCounters
from megatron.checkpoint.saver import Saver
from megatron.checkpoint.trainer_state import TrainerState
from megatron.config.parallelism import resolve_mesh_shape
from megatron.config.schema import Config
from megatron.data.vocabulary import read_vocabulary
from megatron.distributed import rng
from megatron.distributed.hardware import LocalHardware
from megatron.distributed.launcher_environment import RankInfo, read_launcher_environment
from megatron.planning.memory_estimate import estimate_memory
from megatron.training import summary
from megatron.training.console import ConsoleReporter
from megatron.training.hardware import get_peak_memory
from megatron.training.loss_spikes import MAX_ROLLBACKS, RollbackRequested, RunningMeanLoss
from megatron.training.metrics import DivergenceRecord, IntervalMetrics, TrainRecord, ValidationRecord, perplexity
from megatron.training.records import find_record
from megatron.training.reporters import report_to_all
from megatron.training.resolve_run import resolve_run
from megatron.training.train_state import TrainState, build_state
from megatron.training.validate import validate
from megatron.training.watchdog import EndFunction, Watchdog
from megatron.utils.errors import FarfieldError, RunError, is_out_of_memory
from megatron.utils.formatting import format_bytes
from megatron.utils.signals import GracefulStop


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    step: int
    loss: float | None
    """Mean training loss of the last interval that was reported."""
    valid_loss: float | None
    test_loss: float | None
    checkpoint: Path | None
    """The last checkpoint; None if nothing is saved."""
    seconds: float
    """From the call to the end."""
    signal: int | None = None
    """The signal that ended the run early."""

    @property
    def exit_code(self) -> int:
        """0, or 128 + n if signal n ended the run before its last step, as shells have it (143 for SIGTERM)."""
        return 0 if self.signal is None else 128 + self.signal


def train(config: Config, console: Console | None = None) -> TrainResult:
    """Train a model from Python: in this process alone, or as the rank that the environment says this process is.

    Args:
        config: the run's configuration, as it was read; it is resolved for this machine.
        console: where the first process reports; None for silence.

    Returns, Raises: as `train_resolved`.
    """
    launch_context = read_launcher_environment()
    rank_info = RankInfo()
    if launch_context is not None:
        rank_info = launch_context.rank_info
        os.environ.update(launch_context.to_environment(config.launch.master_port))  # DeepSpeed reads torchrun's names
    resolved = resolve_run(config, LocalHardware.detect(), rank_info=rank_info)
    return train_resolved(resolved.config, rank_info, console)


def train_resolved(
    config: Config,
    rank_info: RankInfo,
    console: Console | None = None,
    end: EndFunction | None = None,
    *,
    errors: int = 2,
) -> TrainResult:
    """Train a model. Every process of the run calls this with the same configuration.

    Args:
        config: the run's configuration, resolved (`resolve_run`).
        rank_info: which of the run's processes this is; torchrun's variables in the environment say the same.
        console: where the first process reports; None for silence.
        end: ends this process when a rank hangs, which its main thread may not be able to; if absent with a line on
            standard error.
        errors: the descriptor that the user reads errors from; 2 may point to a log.

    Returns:
        How the run ended: at its last step, or at a signal (`exit_code`).

    Raises:
        UserError: what the user wrote cannot be done.
        RunError: the loss stayed non-finite, a disk is full, a file is damaged: says which checkpoint is the last good.
    """
    start_time = time.perf_counter()
    rollback: RollbackRequested | None = None
    while True:
        try:
            reporter = ConsoleReporter(console, config.training.train_iters)
            outcome = _run_attempt(config, rank_info, reporter, start_time, end, rollback, errors)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise RunError(_describe_memory_error(config, rank_info.world_size, error)) from error
        if isinstance(outcome, TrainResult):
            return outcome
        rollback = outcome
        config = config.replace(load=rollback.load, finetune=False, rollback=False)


def _describe_memory_error(config: Config, world_size: int, error: BaseException) -> str:
    """What to say where memory does not suffice: what was asked for last, what was planned, and what helps."""
    requested = re.search(r"allocate ([\d.,]+ ?\w*)", str(error))
    line = f"memory does not suffice{f' (for {requested[1]} more)' if requested else ''}"
    try:
        sizes = resolve_mesh_shape(config, world_size)
        planned = estimate_memory(config, sizes, read_vocabulary(config.data).size).total
        line += f"; this configuration is planned to need {format_bytes(planned)} on each rank (./deepy.py plan)"
    except FarfieldError:  # an encoding of which nothing is known
        pass
    return (
        f"{line}; lower train_micro_batch_size_per_gpu or seq_length, or set checkpoint_activations: true or "
        "zero_optimization.stage"
    )


def _run_attempt(
    config: Config,
    rank_info: RankInfo,
    reporter: ConsoleReporter,
    start_time: float,
    end: EndFunction | None,
    rollback: RollbackRequested | None,
    errors: int,
) -> "TrainResult | RollbackRequested":
    """One start of a run, to its end or to where it goes back: as if it were started anew, by the same path."""
    run = build_state(config, rank_info, reporter, rollback)
    try:
        loop = Trainer(run, start_time, end, rollback, errors)
        try:
            return loop.run()
        finally:
            loop.close()
    except RollbackRequested as again:
        again.__traceback__ = None  # its frames hold the engine
        return again
    finally:
        run.close()


class Trainer:
    """The state of a run between two steps."""

    def __init__(
        self,
        state: TrainState,
        start_time: float,
        end: EndFunction | None = None,
        rollback: RollbackRequested | None = None,
        errors: int = 2,
    ) -> None:
        self.state, self.start_time = state, start_time
        progress = state.resume.progress
        self.step, self.samples, self.tokens = progress.step, progress.consumed_samples, progress.consumed_tokens
        self.bad_steps, self.rollback = 0, rollback
        self.usual = RunningMeanLoss(progress.usual_loss)
        self.interval = IntervalMetrics(state.groups.device)
        self.loss: float | None = None
        self.valid: ValidationRecord | None = None
        save = state.config.checkpoint.save
        self.watch = Watchdog(
            state.groups,
            timeout=state.config.launch.hang_timeout,
            folder=None if save is None else Path(save),
            end=end,
            errors=errors,
        )
        self.saver = None if save is None else Saver(Path(save), state.config, state.groups)

    @property
    def checkpoint(self) -> Path | None:
        """The last one that is whole, of this run or what it resumed from."""
        if self.saver is not None and self.saver.last_checkpoint is not None:
            return self.saver.last_checkpoint
        return self.state.resume.checkpoint

    def close(self) -> None:
        """End the threads that watch and write."""
        self.watch.close()
        if self.saver is not None:
            self.saver.close()

    def run(self) -> TrainResult:
        """All steps that are left, then the last checkpoint and the test."""
        run, train_iters = self.state, self.state.config.training.train_iters
        done, tested = self.step >= train_iters, self._find_test_record()
        if done:
            left = "raise train_iters" if tested else "its test, which is not on record, follows"
            what = "nothing to do" if tested else "nothing to train"
            run.console.log(f"{what}: step {self.step} of {train_iters} is reached; {left}")
        run.engine.model.train()
        begun = run.resume.progress
        # One rank carries what an earlier session left of the interval: shares are added over the batch's ranks.
        carried = begun.interval_loss if run.groups.mesh.dp_cp.index == 0 else 0.0
        self.interval.reset(carried, begun.interval_steps)
        number, test = None, None
        self.watch.begin(self.step)
        with GracefulStop(run.console.log) as stop:
            self._log_start()
            stopped = self._steps(stop)
            self._save_checkpoint()
            self._finish_saving()
            if stopped:
                number = round(run.groups.all_reduce_max(stop.signal or 0))  # it may have reached another process only
                saved = "nothing is saved"
                if self.checkpoint is not None:
                    saved = f"saved {self.checkpoint}; {summary.describe_next_action(run.config, number)}"
                run.console.log(f"stopped by signal {number} at step {self.step} of {train_iters}; {saved}")
            elif not tested:
                test = self._test()
            if begun.rollbacks:
                times = "once" if begun.rollbacks == 1 else f"{begun.rollbacks} times"
                run.console.log(f"went back {times} because of its loss, over {begun.skipped_samples:,} sequences")
            if not stopped:
                now = self.saver is not None and self.saver.last_checkpoint is not None
                run.console.log(summary.describe_end(run.config, self.checkpoint, now=now))
        return TrainResult(
            step=self.step,
            loss=self.loss,
            valid_loss=self.valid.loss if self.valid else None,
            test_loss=test.loss if test else None,
            checkpoint=self.checkpoint,
            seconds=time.perf_counter() - self.start_time,
            signal=number,
        )

    def _log_start(self) -> None:
        """Say what the run is and how long it may take, and begin to count."""
        state, seconds = self.state, None
        if state.console.console is not None and self.step < state.config.training.train_iters:
            seconds = summary.estimate_seconds(state, self.step)
            state.console.log(summary.describe_start(state, self.step, seconds))
            for line in summary.describe_layout(state.config, state.groups.mesh.sizes):
                state.console.log(line)
        state.console.begin(self.step, seconds)

    def _steps(self, stop: GracefulStop) -> bool:
        """Train to the last step; True if the run was asked to stop before it."""
        config = self.state.config
        training = config.training
        if self.step == 0:
            self._save_checkpoint()
        while self.step < training.train_iters:
            if self.train_step(stop):
                return True
            last = self.step == training.train_iters
            if last or self._is_due(config.logging.log_interval):
                self._report_interval()
            if training.eval_interval and (last or self._is_due(training.eval_interval)):
                self._validate()
            if self._is_due(config.checkpoint.checkpoint_factor) or self.step in config.checkpoint.extra_save_iters:
                self._save_checkpoint()
        return False

    def _is_due(self, every: int | None) -> bool:
        return bool(every) and self.step % every == 0  # type: ignore[operator]

    def train_step(self, stop: GracefulStop) -> bool:
        """One optimizer step; True instead if the run was asked to stop."""
        state, engine = self.state, self.state.engine
        micro_steps = state.config.training.gradient_accumulation_steps
        if state.groups.world_size == 1 and stop.signal is not None:
            return True
        self.watch.enter_phase("data", self.step)
        micro = [next(state.batches) for _ in range(micro_steps)]
        local_batch = sum(int(batch["loss_mask"].sum(dtype=torch.float64)) for batch in micro)
        num_held = sum(batch["tokens"].numel() for batch in micro)
        self.watch.enter_phase("reduce", self.step)
        written = int(self.saver is not None and self.saver.is_done)
        counted = state.groups.mesh.count_once
        scored, read, stops, written = state.groups.all_reduce_sum(
            counted(local_batch), counted(num_held), int(stop.signal is not None), written
        )
        if self.saver is not None and written == state.groups.world_size:
            self.saver.advance()
        if stops:
            return True
        loss = engine.forward_backward(
            micro,
            max(scored, 1),  # a mask may leave nothing of a batch
            position_seed=rng.derive_position_seed(state.config.training.seed, self.samples),
            progress=lambda done: self._micro_step(done, micro_steps),
        )
        self.watch.enter_phase("step", self.step)
        engine.step(state.schedule(self.step))
        self.step += 1
        self.samples += state.config.training.train_batch_size or 0
        self.tokens += read
        length = micro[0]["tokens"].shape[1] * state.groups.mesh.context.size
        self.interval.add(loss, read, read * state.flops_per_token[length], engine.grad_norm, engine.skipped)
        self._check_loss(loss)
        state.console.step(self.step)
        return False

    def _micro_step(self, done: int, of: int) -> None:
        self.watch.enter_phase("forward and backward", self.step)
        self.state.console.micro_step(done, of)

    def _show_validation(self, split: str, done: int, total: int) -> None:
        self.watch.enter_phase("validate", self.step)
        self.state.console.show_validation(split, done, total)

    def _reduce_over_batch(self, local: float) -> float:
        """The sum of what the ranks that divide the batch have. All must call it."""
        processes = self.state.groups
        return processes.all_reduce_sum(processes.mesh.count_once(local))[0]

    def _check_loss(self, local_loss: Tensor) -> None:
        """Stop or go back when the loss is bad. `local_loss` is this rank's part of the step's loss.

        A skipped step is bad, unless float16's loss scale was too large, which is normal and cures itself; and one
        whose loss is a spike.
        """
        engine, training = self.state.engine, self.state.config.training
        limit = 1 if training.on_bad_loss == "stop" else training.max_bad_steps
        if not engine.skipped:
            self.bad_steps = 0
            if training.loss_spike is not None:
                loss = self._reduce_over_batch(float(local_loss))
                if self.usual.is_spike(loss, training.loss_spike):
                    usual = self.usual.mean
                    what = "" if usual is None else f" is more than loss_spike × the usual {usual:.4g}"
                    self._roll_back_or_stop(f"its loss {loss:.4g}{what}")
                self.usual.add(loss)
            return
        loss = self._reduce_over_batch(float(local_loss))
        fp16 = self.state.config.training.fp16
        scalable = engine.precision == "fp16" and fp16.loss_scale == 0 and engine.loss_scale > fp16.min_loss_scale
        if scalable and math.isfinite(loss):
            self.bad_steps = 0
            return
        self.bad_steps += 1
        what = "its gradients are not finite" if math.isfinite(loss) else f"its loss is {loss}"
        if self.bad_steps < limit:
            self.state.console.log(f"step {self.step} skipped: {what} ({self.bad_steps} in a row, stop at {limit})")
            return
        key = "on_bad_loss" if training.on_bad_loss == "stop" else "max_bad_steps"
        self._roll_back_or_stop(f"{what}, for {self.bad_steps} steps in a row ({key})")

    def _roll_back_or_stop(self, what: str) -> None:
        """Raises GoBack, or RunError where there is nowhere to go back to, or going back did not help."""
        problem = f"step {self.step}: {what}"
        self._finish_saving()
        if self.state.config.training.on_bad_loss == "rollback" and self.checkpoint is not None:
            run, save = self.checkpoint.parent.parent, self.state.config.checkpoint.save
            own = save is not None and run.resolve() == Path(save).resolve()
            load = str(save) if own else str(self.checkpoint)
            rollback = RollbackRequested(load, layout.parse_step(self.checkpoint) or 0, self.samples, self.rollback)
            if rollback.num_rollbacks <= MAX_ROLLBACKS:
                self.state.console.log(f"{problem}; going back to {self.checkpoint}, behind the data until here")
                raise rollback
            problem += f"; gone back {MAX_ROLLBACKS} times to the same checkpoint already"
        report_to_all(self.state.reporters, DivergenceRecord(self.step, what))
        last = f"the last good checkpoint is {self.checkpoint}" if self.checkpoint else "no checkpoint was saved"
        raise RunError(f"{problem}; {last}")

    def _report_interval(self) -> None:
        self.watch.enter_phase("report", self.step)
        state, interval = self.state, self.interval
        share, norm, seconds = interval.read()
        loss = None if share is None else self._reduce_over_batch(share)
        self.loss = loss if loss is not None else self.loss
        memory = state.groups.all_reduce_max(get_peak_memory(state.groups.device))
        speed = interval.tokens / seconds
        tflops = interval.flops / seconds / state.groups.world_size / 1e12
        record = TrainRecord(
            step=self.step,
            loss=loss,
            perplexity=None if loss is None else perplexity(loss),
            learning_rate=state.schedule(self.step - 1),
            grad_norm=norm,
            tokens_per_second=speed,
            ms_per_step=1e3 * seconds / interval.steps,
            tflops=tflops,
            mfu=None if state.peak is None else tflops / state.peak,
            loss_scale=state.engine.loss_scale,
            skipped_steps=state.engine.deepspeed.skipped_steps,
            memory_gib=memory,
            tokens=self.tokens,
            seconds_left=seconds / interval.steps * (state.config.training.train_iters - self.step),
        )
        state.console.train(record)
        report_to_all(state.reporters, record)
        interval.reset()

    def _validate(self) -> None:
        state = self.state
        if state.datasets.valid is None:
            return
        self.interval.pause()
        self.valid = validate(
            state.engine, state.datasets.valid, state.config, state.groups, step=self.step, split="valid",
            progress=self._show_validation,
        )  # fmt: skip
        state.console.evaluation(self.valid)
        report_to_all(state.reporters, self.valid)
        self.interval.resume()

    def _find_test_record(self) -> bool:
        """Is a run that reached its end done with its test too?

        The test follows the last checkpoint, so a run that is killed between the two has all its steps and no test.
        """
        state, save = self.state, self.state.config.checkpoint.save
        if self.step != state.config.training.train_iters:
            return self.step > state.config.training.train_iters  # went further than it is asked to now
        if state.datasets.test is None or save is None or self.checkpoint is None:
            return True
        if self.checkpoint.resolve().parent.parent != Path(save).resolve():
            return True  # trained elsewhere
        known = state.groups.is_main and find_record(save, "test", self.step)
        return state.groups.find_first_error("recorded" if known else None) is not None

    def _test(self) -> ValidationRecord | None:
        state = self.state
        if state.datasets.test is None:
            return None
        record = validate(
            state.engine, state.datasets.test, state.config, state.groups, step=self.step, split="test",
            progress=self._show_validation,
        )  # fmt: skip
        state.console.evaluation(record)
        report_to_all(state.reporters, record)
        return record

    def _save_checkpoint(self) -> None:
        """Begin a checkpoint of this step, unless there is one."""
        state, saver = self.state, self.saver
        is_saved = {self.checkpoint and layout.parse_step(self.checkpoint), saver and saver.is_pending}
        is_requested = self.step > 0 or 0 in state.config.checkpoint.extra_save_iters
        if saver is None or not is_requested or self.step in is_saved:
            return
        self.watch.enter_phase("save", self.step)
        self.interval.pause()
        training, sizes = state.config.training, state.groups.mesh.sizes
        progress = TrainerState(
            step=self.step,
            train_samples=state.train_samples,
            consumed_samples=self.samples,
            consumed_tokens=self.tokens,
            interval_loss=self._reduce_over_batch(self.interval.loss_sum()),
            interval_steps=self.interval.counted,
            vocabulary={"size": state.vocabulary.size, "name": state.vocabulary.name},
            world=sizes.world_size,
            tensor=sizes.tensor,
            context=sizes.context,
            pipeline=sizes.pipeline,
            zero_stage=training.zero_optimization.stage,
            precision=training.compute_dtype,
            directory=os.getcwd(),
            rollbacks=state.resume.progress.rollbacks,
            skipped_samples=state.resume.progress.skipped_samples,
            usual_loss=self.usual.mean,
            **EngineCounters(state.engine.deepspeed).state_dict(),
        )
        saver.begin(state.engine.deepspeed, progress, state.console.log)
        self.interval.resume()

    def _finish_saving(self) -> None:
        if self.saver is not None:
            self.watch.enter_phase("save", self.step)
            self.saver.finish()
