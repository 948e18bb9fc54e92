"""Training loop: steps, reports, validations, checkpoints, and the end of a run.

    build_training_run                build the run, and resume if there is a checkpoint (training_run.py)
    for each step:                    gradient accumulation, then one optimizer step (engine.py)
        every log_interval            a record to console, metrics.jsonl, TensorBoard, wandb
        every eval_interval           the loss on held-out sequences (evaluations.py)
        every harness.interval        tasks of lm-evaluation-harness (evaluations.py)
        every checkpoint_factor       a checkpoint (megatron.checkpoint.saver), also after each of extra_save_iters

A run ends after train_iters steps; after a signal, with a checkpoint of the last complete step; or with an error if the
loss stays bad (loss_guard.py), which leaves the last good checkpoint unchanged.

The parts of the loop save their own state in checkpoints (`megatron.checkpoint.trainer_state.Stateful`): the position
in the data, the interval not reported yet, and the loss guard.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint import layout
from megatron.checkpoint.saver import SaveHooks, Saver
from megatron.checkpoint.sharded_state import NonFiniteWeightError
from megatron.config.execution import TRIAL_PHASE
from megatron.data.torch_data import Batch
from megatron.distributed import rng
from megatron.training import summary
from megatron.training.evaluations import HarnessRunner, Validator, is_test_done
from megatron.training.graph_trial import build_graphs, plan_graph_trial
from megatron.training.loss_guard import ContinueRun, LossGuard, Rollback, StopRun
from megatron.training.metrics import IntervalMetrics
from megatron.training.metrics_log import DivergenceRecord
from megatron.training.optimizer import ParameterNorms
from megatron.training.profiler import build_profiler
from megatron.training.rank_times import ForwardTimer
from megatron.training.training_run import TrainingRun
from megatron.training.watchdog import HangHandler, PhaseListener, Watchdog
from megatron.utils.errors import RunError
from megatron.utils.signals import GracefulStop


@dataclass(frozen=True)
class TrainResult:
    """Result of a finished or stopped run."""

    step: int
    loss: float | None
    """Mean training loss of the last reported interval."""
    valid_loss: float | None
    test_loss: float | None
    checkpoint: Path | None
    """Last checkpoint, or None if nothing is saved."""
    seconds: float
    """Duration of the call, in seconds."""
    signal: int | None = None
    """Signal that ended the run early."""

    @property
    def exit_code(self) -> int:
        """Exit code: 0, or 128 + n if signal n ended the run before its last step, as in shells (143 for SIGTERM)."""
        return 0 if self.signal is None else 128 + self.signal


@dataclass(frozen=True)
class TrainingHooks:
    """Callbacks of a Python caller during training; by default none. No key or environment variable sets them."""

    on_phase: PhaseListener | None = None
    on_built: Callable[[TrainingRun], None] = lambda run: None
    """Called with the run when it is ready for its first step, and again after each rollback."""
    previous_backend: str | None = None
    """Attention backend chosen by an earlier process, see `build_training_run`."""
    save: SaveHooks = field(default_factory=SaveHooks)


@dataclass(frozen=True)
class StageEnd:
    """End of a stage; the next stage starts from its last checkpoint."""

    load: str
    """Folder of the run."""


class RollbackRequested(Exception):
    """Raised to roll the run back."""

    def __init__(self, rollback: Rollback) -> None:
        super().__init__(rollback.load)
        self.rollback = rollback


class Trainer:
    """Training loop that takes a run to its last step.

    Args:
        run: run that is ready for its next step.
        start_time: time of the call of `train`, by `time.perf_counter`.
        on_hang, stderr_fd, hooks: see `train_resolved`.
        rollback: rollback that began this start of the run, if any.
    """

    def __init__(
        self,
        run: TrainingRun,
        start_time: float,
        on_hang: HangHandler | None = None,
        rollback: Rollback | None = None,
        stderr_fd: int = 2,
        hooks: TrainingHooks | None = None,
    ) -> None:
        self.run, self.start_time = run, start_time
        hooks = hooks or TrainingHooks()
        config, groups = run.config, run.groups
        folder = None if config.checkpoint.save is None else Path(config.checkpoint.save)
        self.profiler = build_profiler(config, groups, run.data_position.step, run.console.log)
        listeners = [hooks.on_phase, None if self.profiler is None else self.profiler.enter_phase]
        self.watchdog = Watchdog(
            groups,
            timeout=config.launch.hang_timeout,
            folder=folder,
            on_hang=on_hang,
            stderr_fd=stderr_fd,
            phase_listeners=[listener for listener in listeners if listener is not None],
        )
        self.saver = Saver(
            folder,
            config,
            groups,
            last_checkpoint=run.resume.checkpoint,
            hooks=hooks.save,
            check_folder=run.session.check_folder,
        )
        self.data_position = run.data_position
        self.forward_timer = ForwardTimer(run.engine.model, groups.device)
        self.interval = IntervalMetrics(
            groups, run.peak_tflops, self.forward_timer, config.training.gradient_accumulation_steps
        )
        self.norms = (
            ParameterNorms(run.engine.deepspeed, run.engine.parameter_labels, groups)
            if config.logging.log_param_norm
            else None
        )
        self.guard = LossGuard(config, run.engine, groups, self._list_checkpoints, rollback)
        self.validator = Validator(run, self.watchdog)
        self.harness = None if run.harness_tasks is None else HarnessRunner(run, run.harness_tasks, self.watchdog)
        self.is_graph_trial_due, self._graph_note = plan_graph_trial(config, groups.device)
        """True until the trial of CUDA graphs, before this process's second step (`graph_trial.py`)."""
        self.has_stepped = False

    def close(self) -> None:
        """Stop the watchdog and writer threads."""
        self.forward_timer.close()
        if self.profiler is not None:
            self.profiler.close()
        self.watchdog.close()
        self.saver.close()

    def train(self) -> TrainResult | StageEnd:
        """Take the remaining steps of the stage and save its last checkpoint; after the last stage run the test."""
        run, train_iters = self.run, self.run.config.training.train_iters
        is_tested = is_test_done(run, self.saver.last_checkpoint)
        if self.data_position.step >= train_iters:
            run.console.log(summary.describe_finished(self.data_position.step, train_iters, is_tested=is_tested))
        run.engine.model.train()
        run.resume.trainer_state.restore(self.interval, self.guard)
        self.watchdog.begin(self.data_position.step)
        test, signum = None, None
        with GracefulStop(run.console.log) as stop:
            summary.log_start(run)
            if self._graph_note is not None:
                run.console.log(self._graph_note)
            is_stopped = self._train_steps(stop)
            self._save_checkpoint()
            checkpoint = self._finish_saving()
            run.session.check_folder()
            if not is_stopped:
                self._check_end([])
            if not is_stopped and self.data_position.step < train_iters:
                assert run.config.checkpoint.save is not None  # `resolve_run`
                return StageEnd(run.config.checkpoint.save)
            if is_stopped:
                # Another process may have received the signal.
                signum = round(run.groups.all_reduce_max(stop.signal or 0))
                run.console.log(summary.describe_stop(run.config, self.data_position.step, checkpoint, signum))
            elif not is_tested:
                test = self.validator.run_test(self.data_position.step)
            if self.guard.num_rollbacks:
                line = summary.describe_rollbacks(self.guard.num_rollbacks, self.data_position.skipped_samples)
                run.console.log(line)
            if not is_stopped:
                held_out = [record.loss for record in (self.validator.last, test) if record is not None]
                self._check_end(held_out)
                self.saver.confirm(self.data_position.step + 1)
                is_new = checkpoint != run.resume.checkpoint
                run.console.log(summary.describe_end(run.config, checkpoint, now=is_new))
        return TrainResult(
            step=self.data_position.step,
            loss=self.interval.last_loss,
            valid_loss=self.validator.last.loss if self.validator.last else None,
            test_loss=test.loss if test else None,
            checkpoint=checkpoint,
            seconds=time.perf_counter() - self.start_time,
            signal=signum,
        )

    def _check_end(self, losses: list[float]) -> None:
        """Raise RunError if a run that took all its steps ended in a bad state.

        Args:
            losses: losses at the final weights.
        """
        step = self.data_position.step
        if (stop := self.guard.check_end(step, losses)) is not None:
            self.run.report(DivergenceRecord(step, stop.reason))
            raise RunError(stop.message)

    def _train_steps(self, stop: GracefulStop) -> bool:
        """Train to the last step of the stage. Return True if the run was asked to stop before it."""
        config = self.run.config
        training, checkpoint = config.training, config.checkpoint
        if self.data_position.step == 0:
            self._save_checkpoint()
            if training.eval_interval and training.eval_at_start:
                self._evaluate(self.validator.validate)
            if self.harness is not None and config.logging.harness.at_start:
                self._evaluate(self.harness.evaluate)
        while self.data_position.step < self.run.stage.end_step:
            if self.profiler is not None:
                self.profiler.begin_step(self.data_position.step + 1)
            if not self.train_step(stop):
                return True
            step = self.data_position.step
            if self.profiler is not None:
                self.interval.pause()
                self.profiler.end_step(step)
                self.interval.resume()
            is_last = step == training.train_iters
            if self._is_reported(step):
                self._report_interval()
            if training.eval_interval and (is_last or self._is_due(training.eval_interval)):
                self._evaluate(self.validator.validate)
            if self.harness is not None and (is_last or self._is_due(config.logging.harness.interval)):
                self._evaluate(self.harness.evaluate)
            if self._is_due(checkpoint.checkpoint_factor) or step in checkpoint.extra_save_iters:
                self._save_checkpoint()
        return False

    def _evaluate(self, evaluate: Callable[[int], None]) -> None:
        """Run an evaluation after the current step. Its time does not count as training."""
        self.interval.pause()
        evaluate(self.data_position.step)
        self.interval.resume()

    def _is_reported(self, step: int) -> bool:
        """Return True if a log interval ends with this step."""
        return step == self.run.config.training.train_iters or step % self.run.config.logging.log_interval == 0

    def _is_due(self, interval: int | None) -> bool:
        return bool(interval) and self.data_position.step % interval == 0  # type: ignore[operator]

    def train_step(self, stop: GracefulStop) -> bool:
        """Take one optimizer step and return True, or return False if the run was asked to stop first."""
        run, engine, step = self.run, self.run.engine, self.data_position.step
        training, groups = run.config.training, run.groups
        num_micro_batches = training.gradient_accumulation_steps
        if groups.world_size == 1 and stop.signal is not None:
            return False
        self.watchdog.enter_phase("data", step)
        self.forward_timer.begin_step()
        data_time = time.perf_counter()
        micro_batches = [next(run.batches) for _ in range(num_micro_batches)]
        self.interval.data_wait += time.perf_counter() - data_time
        local_scored = sum(int(batch["loss_mask"].sum(dtype=torch.float64)) for batch in micro_batches)
        local_read = sum(batch["tokens"].numel() for batch in micro_batches)
        self.watchdog.enter_phase("reduce", step)
        once = groups.mesh.count_on_one_rank
        scored, read, num_stopped, num_saved = groups.all_reduce_sum(
            once(local_scored), once(local_read), int(stop.signal is not None), int(self.saver.is_done)
        )
        if num_saved == groups.world_size:
            self._guard_save(self.saver.advance)
        if num_stopped:
            return False

        if self.is_graph_trial_due and self.has_stepped:
            self._try_graphs(micro_batches[0])

        def show_progress(done: int) -> None:
            self.watchdog.enter_phase("forward and backward", step)
            run.console.report_micro_step(done, num_micro_batches)

        loss = engine.forward_backward(
            micro_batches,
            max(scored, 1),  # a mask may leave no tokens
            position_seed=rng.derive_position_seed(training.seed, self.data_position.samples),
            progress=show_progress,
        )
        self.watchdog.enter_phase("step", step)
        norms = self.norms if self._is_reported(step + 1) else None
        if norms is not None:
            norms.begin_step()
        engine.step(run.schedule(step))
        if norms is not None:
            norms.end_step()
        self.data_position.advance(training.train_batch_size or 0, read)
        length = micro_batches[0]["tokens"].shape[1] * groups.mesh.context.size
        flops = read * run.flops_per_token[length]
        # The ranks of a rehearsal exchange nothing, but must take the same branch.
        has_loss = scored > 0 or local_scored > 0
        if not has_loss:
            run.console.log(
                f"step {step + 1}: no token of its batch is scored, so it has no loss, and its gradient is zero"
            )
        self.interval.add(loss, read, flops, engine.grad_norm, engine.skipped or not has_loss, engine.z_loss)
        self.has_stepped = True
        if has_loss or engine.skipped:
            self._check_loss(loss)
        run.console.report_step(self.data_position.step)
        return True

    def _try_graphs(self, batch: Batch) -> None:
        """Try CUDA graphs on this micro-batch, and use them from now on if the trial succeeds."""
        self.is_graph_trial_due = False
        self.watchdog.enter_phase(TRIAL_PHASE, self.data_position.step)
        self.interval.pause()
        run = self.run
        graphs, line = build_graphs(run.config, run.engine.model, batch, run.groups, run.engine.loss_scale)
        run.engine.use_graphs(graphs)
        run.console.log(line)
        self.interval.resume()

    def _check_loss(self, loss: Tensor) -> None:
        """Stop or roll back if the loss is bad. `loss` is this rank's share of the step's loss."""
        position = self.data_position
        self._apply_decision(self.guard.check(position.step, position.samples, loss))
        if self.guard.last_good_step == position.step:
            self.saver.confirm(position.step)

    def _guard_save(self, save: Callable[[], None]) -> None:
        """Run a step of a save. If a weight is not finite, follow the guard's decision."""
        position = self.data_position
        try:
            save()
        except NonFiniteWeightError as error:
            self._apply_decision(self.guard.check_weights(position.step, position.samples, str(error)))

    def _apply_decision(self, decision: ContinueRun | Rollback | StopRun) -> None:
        run, position = self.run, self.data_position
        match decision:
            case ContinueRun(note):
                if note is not None:
                    run.console.log(note)
            case Rollback() as rollback:
                run.console.log(rollback.note)
                length = run.config.model.seq_length
                raise RollbackRequested(replace(rollback, data_order=position.order, seq_length=length))
            case StopRun(reason, message):
                run.report(DivergenceRecord(position.step, reason))
                raise RunError(message)

    def _report_interval(self) -> None:
        self.watchdog.enter_phase("report", self.data_position.step)
        run, step = self.run, self.data_position.step
        record = self.interval.report(
            step=step,
            train_iters=run.config.training.train_iters,
            tokens=self.data_position.tokens,
            learning_rate=run.schedule(step - 1),
            loss_scale=run.engine.loss_scale,
            skipped_steps=run.engine.deepspeed.skipped_steps,
        )
        if self.norms is not None:
            record = replace(record, param_norm=self.norms.param_norm, update_norm=self.norms.update_norm)
        run.console.report_training(record)
        run.report(record)

    def _save_checkpoint(self) -> None:
        """Start a checkpoint of this step, unless it exists."""
        run, saver, step = self.run, self.saver, self.data_position.step
        is_requested = step > 0 or 0 in run.config.checkpoint.extra_save_iters
        if saver.run is None or not is_requested or saver.has(step):
            return
        if self.guard.bad_steps:
            run.console.log(f"step {step}: no checkpoint is saved after a bad step")
            return
        self.watchdog.enter_phase("save", step)
        self.interval.pause()
        save_time = time.perf_counter()
        trainer_state = run.collect_trainer_state(self.interval, self.guard)
        self._guard_save(lambda: saver.begin(run.engine.deepspeed, trainer_state, run.console.log))
        self.interval.checkpoint_wait += time.perf_counter() - save_time
        self.interval.resume()

    def _finish_saving(self) -> Path | None:
        """Finish the pending save and return the last complete checkpoint."""
        if self.saver.run is not None:
            self.watchdog.enter_phase("save", self.data_position.step)
            self._guard_save(self.saver.finish)
        return self.saver.last_checkpoint

    def _list_checkpoints(self) -> list[Path]:
        """Return the checkpoints available for a rollback, oldest first: the starting checkpoint and the run's own."""
        saver = self.saver
        with suppress(NonFiniteWeightError):  # that save is abandoned, and earlier checkpoints remain
            saver.finish()
        own = [] if saver.run is None else self.run.groups.gather_objects(layout.list_checkpoints(saver.run))[0]
        start = self.run.resume.checkpoint
        is_foreign = start is not None and start.resolve() not in [path.resolve() for path in own]
        return [start, *own] if start is not None and is_foreign else own
