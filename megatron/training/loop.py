"""The training loop: steps, reports, validations, checkpoints, and every way in which a run ends.

    ready = prepare(config)           build everything, resume if there is something to resume from (setup.py)
    for each step:                    gradient accumulation, then one optimizer step (engine.py)
        every log_interval            a record to console, metrics.jsonl, TensorBoard, wandb
        every eval_interval           the loss on held-out sequences (validate.py)
        every checkpoint_factor       a checkpoint (megatron.checkpoint.save), and after each of extra_save_iters

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

from megatron.checkpoint import counters, folder
from megatron.checkpoint.progress import Progress
from megatron.checkpoint.save import Saver
from megatron.config.ranks import mesh_sizes
from megatron.config.schema import Config
from megatron.data.vocabulary import vocabulary
from megatron.distributed import seeds
from megatron.distributed.surroundings import told
from megatron.errors import FarfieldError, RunError, lacks_memory
from megatron.planning.memory_estimate import estimate_memory
from megatron.quantities import size
from megatron.stopping.signals import StopRequest
from megatron.training import outline
from megatron.training.bad_loss import MOST_ROLLBACKS, GoBack, UsualLoss
from megatron.training.console import ConsoleReporter
from megatron.training.hardware import peak_memory
from megatron.training.metrics import DivergenceRecord, EvaluationRecord, Interval, TrainRecord, perplexity
from megatron.training.records import recorded
from megatron.training.reporters import report
from megatron.training.setup import Run, prepare
from megatron.training.validate import validate
from megatron.training.watch import End, Watch


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


def train(config: Config, console: Console | None = None, end: End | None = None, *, errors: int = 2) -> TrainResult:
    """Train a model. Every process of the run calls this with the same configuration.

    Args:
        config: the run's configuration.
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
    begun = time.perf_counter()
    back: GoBack | None = None
    while True:
        try:
            outcome = _attempt(config, ConsoleReporter(console, config.training.train_iters), begun, end, back, errors)
        except (MemoryError, RuntimeError) as error:
            if not lacks_memory(error):
                raise
            raise RunError(_memory_line(config, error)) from error
        if isinstance(outcome, TrainResult):
            return outcome
        back = outcome
        config = config.replace(load=back.load, finetune=False, rollback=False)


def _memory_line(config: Config, error: BaseException) -> str:
    """What to say where memory does not suffice: what was asked for last, what was planned, and what helps."""
    asked = re.search(r"allocate ([\d.,]+ ?\w*)", str(error))
    line = f"memory does not suffice{f' (for {asked[1]} more)' if asked else ''}"
    started = told(port=config.launch.master_port)
    try:
        sizes = mesh_sizes(config, 1 if started is None else started.place.world)
        planned = estimate_memory(config, sizes, vocabulary(config.data).size).total
        line += f"; this configuration is planned to need {size(planned)} on each rank (./deepy.py plan)"
    except FarfieldError:  # an encoding of which nothing is known
        pass
    return (
        f"{line}; lower train_micro_batch_size_per_gpu or seq_length, or set checkpoint_activations: true or "
        "zero_optimization.stage"
    )


def _attempt(
    config: Config, reporter: ConsoleReporter, begun: float, end: End | None, back: GoBack | None, errors: int
) -> "TrainResult | GoBack":
    """One start of a run, to its end or to where it goes back: as if it were started anew, by the same path."""
    run = prepare(config, reporter, back)
    try:
        loop = Loop(run, begun, end, back, errors)
        try:
            return loop.until_the_end()
        finally:
            loop.close()
    except GoBack as again:
        again.__traceback__ = None  # its frames hold the engine
        return again
    finally:
        run.close()


class Loop:
    """The state of a run between two steps."""

    def __init__(
        self, run: Run, begun: float, end: End | None = None, back: GoBack | None = None, errors: int = 2
    ) -> None:
        self.run, self.begun = run, begun
        progress = run.start.progress
        self.step, self.samples, self.tokens = progress.step, progress.consumed_samples, progress.consumed_tokens
        self.bad_steps, self.back = 0, back
        self.usual = UsualLoss(progress.usual_loss)
        self.interval = Interval(run.processes.device)
        self.loss: float | None = None
        self.valid: EvaluationRecord | None = None
        save = run.config.checkpoint.save
        self.watch = Watch(
            run.processes,
            timeout=run.config.launch.hang_timeout,
            folder=None if save is None else Path(save),
            end=end,
            errors=errors,
        )
        self.saver = None if save is None else Saver(Path(save), run.config, run.processes)

    @property
    def checkpoint(self) -> Path | None:
        """The last one that is whole, of this run or what it resumed from."""
        if self.saver is not None and self.saver.last is not None:
            return self.saver.last
        return self.run.start.checkpoint if self.run.start.resumes else None

    def close(self) -> None:
        """End the threads that watch and write."""
        self.watch.close()
        if self.saver is not None:
            self.saver.close()

    def until_the_end(self) -> TrainResult:
        """All steps that are left, then the last checkpoint and the test."""
        run, train_iters = self.run, self.run.config.training.train_iters
        done, tested = self.step >= train_iters, self._tested()
        if done:
            left = "raise train_iters" if tested else "its test, which is not on record, follows"
            what = "nothing to do" if tested else "nothing to train"
            run.console.say(f"{what}: step {self.step} of {train_iters} is reached; {left}")
        run.engine.model.train()
        begun = run.start.progress
        # One rank carries what an earlier session left of the interval: shares are added over the batch's ranks.
        carried = begun.interval_loss if run.processes.mesh.batch.index == 0 else 0.0
        self.interval.clear(carried, begun.interval_steps)
        number, test = None, None
        self.watch.begin(self.step)
        with StopRequest(run.console.say) as stop:
            self._introduce()
            stopped = self._steps(stop)
            self._save()
            self._finish_saving()
            if stopped:
                number = round(run.processes.max(stop.signal or 0))  # it may have reached another process only
                saved = "nothing is saved"
                if self.checkpoint is not None:
                    saved = f"saved {self.checkpoint}; {outline.what_next(run.config, number)}"
                run.console.say(f"stopped by signal {number} at step {self.step} of {train_iters}; {saved}")
            elif not tested:
                test = self._test()
            if begun.rollbacks:
                times = "once" if begun.rollbacks == 1 else f"{begun.rollbacks} times"
                run.console.say(f"went back {times} because of its loss, over {begun.skipped_samples:,} sequences")
            if not stopped:
                now = self.saver is not None and self.saver.last is not None
                run.console.say(outline.last_line(run.config, self.checkpoint, now=now))
        return TrainResult(
            step=self.step,
            loss=self.loss,
            valid_loss=self.valid.loss if self.valid else None,
            test_loss=test.loss if test else None,
            checkpoint=self.checkpoint,
            seconds=time.perf_counter() - self.begun,
            signal=number,
        )

    def _introduce(self) -> None:
        """Say what the run is and how long it may take, and begin to count."""
        run, seconds = self.run, None
        if run.console.console is not None and self.step < run.config.training.train_iters:
            seconds = outline.seconds_ahead(run, self.step)
            run.console.say(outline.first_line(run, self.step, seconds))
            for line in outline.layout_lines(run.config, run.processes.mesh.sizes):
                run.console.say(line)
        run.console.begin(self.step, seconds)

    def _steps(self, stop: StopRequest) -> bool:
        """Train to the last step; True if the run was asked to stop before it."""
        config = self.run.config
        training = config.training
        if self.step == 0:
            self._save()
        while self.step < training.train_iters:
            if self.take_step(stop):
                return True
            last = self.step == training.train_iters
            if last or self._due(config.logging.log_interval):
                self._report()
            if training.eval_interval and (last or self._due(training.eval_interval)):
                self._validate()
            if self._due(config.checkpoint.checkpoint_factor) or self.step in config.checkpoint.extra_save_iters:
                self._save()
        return False

    def _due(self, every: int | None) -> bool:
        return bool(every) and self.step % every == 0  # type: ignore[operator]

    def take_step(self, stop: StopRequest) -> bool:
        """One optimizer step; True instead if the run was asked to stop."""
        run, engine = self.run, self.run.engine
        micro_steps = run.config.training.gradient_accumulation_steps
        if run.processes.world == 1 and stop.signal is not None:
            return True
        self.watch.at("data", self.step)
        micro = [next(run.batches) for _ in range(micro_steps)]
        here = sum(int(batch["loss_mask"].sum(dtype=torch.float64)) for batch in micro)
        held = sum(batch["tokens"].numel() for batch in micro)
        self.watch.at("reduce", self.step)
        written = int(self.saver is not None and self.saver.done)
        once = run.processes.mesh.once
        scored, read, stops, written = run.processes.sum(once(here), once(held), int(stop.signal is not None), written)
        if self.saver is not None and written == run.processes.world:
            self.saver.advance()
        if stops:
            return True
        loss = engine.accumulate(
            micro,
            max(scored, 1),  # a mask may leave nothing of a batch
            draw=seeds.seed_of_positions(run.config.training.seed, self.samples),
            progress=lambda done: self._micro_step(done, micro_steps),
        )
        self.watch.at("step", self.step)
        engine.step(run.schedule(self.step))
        self.step += 1
        self.samples += run.config.training.train_batch_size or 0
        self.tokens += read
        length = micro[0]["tokens"].shape[1] * run.processes.mesh.context.size
        self.interval.add(loss, read, read * run.flops_per_token[length], engine.grad_norm, engine.skipped)
        self._judge(loss)
        run.console.step(self.step)
        return False

    def _micro_step(self, done: int, of: int) -> None:
        self.watch.at("forward and backward", self.step)
        self.run.console.micro_step(done, of)

    def _validating(self, split: str, done: int, total: int) -> None:
        self.watch.at("validate", self.step)
        self.run.console.validating(split, done, total)

    def _over_batch(self, share: float) -> float:
        """The sum of what the ranks that divide the batch have. All must call it."""
        processes = self.run.processes
        return processes.sum(processes.mesh.once(share))[0]

    def _judge(self, share: Tensor) -> None:
        """Stop or go back when the loss is bad. `share` is this rank's part of the step's loss.

        A skipped step is bad, unless float16's loss scale was too large, which is normal and cures itself; and one
        whose loss is a spike.
        """
        engine, training = self.run.engine, self.run.config.training
        limit = 1 if training.on_bad_loss == "stop" else training.max_bad_steps
        if not engine.skipped:
            self.bad_steps = 0
            if training.loss_spike is not None:
                loss = self._over_batch(float(share))
                if self.usual.is_spike(loss, training.loss_spike):
                    usual = self.usual.mean
                    what = "" if usual is None else f" is more than loss_spike × the usual {usual:.4g}"
                    self._go_back_or_stop(f"its loss {loss:.4g}{what}")
                self.usual.add(loss)
            return
        loss = self._over_batch(float(share))
        fp16 = self.run.config.training.fp16
        scalable = engine.precision == "fp16" and fp16.loss_scale == 0 and engine.loss_scale > fp16.min_loss_scale
        if scalable and math.isfinite(loss):
            self.bad_steps = 0
            return
        self.bad_steps += 1
        what = "its gradients are not finite" if math.isfinite(loss) else f"its loss is {loss}"
        if self.bad_steps < limit:
            self.run.console.say(f"step {self.step} skipped: {what} ({self.bad_steps} in a row, stop at {limit})")
            return
        key = "on_bad_loss" if training.on_bad_loss == "stop" else "max_bad_steps"
        self._go_back_or_stop(f"{what}, for {self.bad_steps} steps in a row ({key})")

    def _go_back_or_stop(self, what: str) -> None:
        """Raises GoBack, or RunError where there is nowhere to go back to, or going back did not help."""
        problem = f"step {self.step}: {what}"
        self._finish_saving()
        if self.run.config.training.on_bad_loss == "rollback" and self.checkpoint is not None:
            run, save = self.checkpoint.parent.parent, self.run.config.checkpoint.save
            own = save is not None and run.resolve() == Path(save).resolve()
            load = str(save) if own else str(self.checkpoint)
            back = GoBack(load, folder.step_of(self.checkpoint) or 0, self.samples, self.back)
            if back.times <= MOST_ROLLBACKS:
                self.run.console.say(f"{problem}; going back to {self.checkpoint}, behind the data until here")
                raise back
            problem += f"; gone back {MOST_ROLLBACKS} times to the same checkpoint already"
        report(self.run.reporters, DivergenceRecord(self.step, what))
        last = f"the last good checkpoint is {self.checkpoint}" if self.checkpoint else "no checkpoint was saved"
        raise RunError(f"{problem}; {last}")

    def _report(self) -> None:
        self.watch.at("report", self.step)
        run, interval = self.run, self.interval
        share, norm, seconds = interval.read()
        loss = None if share is None else self._over_batch(share)
        self.loss = loss if loss is not None else self.loss
        memory = run.processes.max(peak_memory(run.processes.device))
        speed = interval.tokens / seconds
        tflops = interval.flops / seconds / run.processes.world / 1e12
        record = TrainRecord(
            step=self.step,
            loss=loss,
            perplexity=None if loss is None else perplexity(loss),
            learning_rate=run.schedule(self.step - 1),
            grad_norm=norm,
            tokens_per_second=speed,
            ms_per_step=1e3 * seconds / interval.steps,
            tflops=tflops,
            mfu=None if run.peak is None else tflops / run.peak,
            loss_scale=run.engine.loss_scale,
            skipped_steps=run.engine.deepspeed.skipped_steps,
            memory_gib=memory,
            tokens=self.tokens,
            seconds_left=seconds / interval.steps * (run.config.training.train_iters - self.step),
        )
        run.console.train(record)
        report(run.reporters, record)
        interval.clear()

    def _validate(self) -> None:
        run = self.run
        if run.datasets.valid is None:
            return
        self.interval.pause()
        self.valid = validate(
            run.engine, run.datasets.valid, run.config, run.processes, step=self.step, split="valid",
            progress=self._validating,
        )  # fmt: skip
        run.console.evaluation(self.valid)
        report(run.reporters, self.valid)
        self.interval.resume()

    def _tested(self) -> bool:
        """Is a run that reached its end done with its test too?

        The test follows the last checkpoint, so a run that is killed between the two has all its steps and no test.
        """
        run, save = self.run, self.run.config.checkpoint.save
        if self.step != run.config.training.train_iters:
            return self.step > run.config.training.train_iters  # went further than it is asked to now
        if run.datasets.test is None or save is None or self.checkpoint is None:
            return True
        if self.checkpoint.resolve().parent.parent != Path(save).resolve():
            return True  # trained elsewhere
        known = run.processes.first and recorded(save, "test", self.step)
        return run.processes.agree("recorded" if known else None) is not None

    def _test(self) -> EvaluationRecord | None:
        run = self.run
        if run.datasets.test is None:
            return None
        record = validate(
            run.engine, run.datasets.test, run.config, run.processes, step=self.step, split="test",
            progress=self._validating,
        )  # fmt: skip
        run.console.evaluation(record)
        report(run.reporters, record)
        return record

    def _save(self) -> None:
        """Begin a checkpoint of this step, unless there is one."""
        run, saver = self.run, self.saver
        there = {self.checkpoint and folder.step_of(self.checkpoint), saver and saver.pending}
        wanted = self.step > 0 or 0 in run.config.checkpoint.extra_save_iters
        if saver is None or not wanted or self.step in there:
            return
        self.watch.at("save", self.step)
        self.interval.pause()
        training, sizes = run.config.training, run.processes.mesh.sizes
        progress = Progress(
            step=self.step,
            train_samples=run.train_samples,
            consumed_samples=self.samples,
            consumed_tokens=self.tokens,
            interval_loss=self._over_batch(self.interval.loss_sum()),
            interval_steps=self.interval.counted,
            vocabulary={"size": run.vocabulary.size, "name": run.vocabulary.name},
            world=sizes.world,
            tensor=sizes.tensor,
            context=sizes.context,
            pipeline=sizes.pipeline,
            zero_stage=training.zero_optimization.stage,
            precision=training.compute_type,
            directory=os.getcwd(),
            rollbacks=run.start.progress.rollbacks,
            skipped_samples=run.start.progress.skipped_samples,
            usual_loss=self.usual.mean,
            counts=counters.capture(run.engine.deepspeed),
        )
        saver.begin(run.engine.deepspeed, progress, run.console.say)
        self.interval.resume()

    def _finish_saving(self) -> None:
        if self.saver is not None:
            self.watch.at("save", self.step)
            self.saver.finish()
