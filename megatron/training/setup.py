"""Everything a run needs before its first step, built in the one order that works.

Checks that need no torch come first, then what fails cheaply (data, vocabulary), then the model and the engine.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.checkpoint import resume
from megatron.checkpoint.folder import CONFIG, prune
from megatron.checkpoint.lock import RunLock
from megatron.checkpoint.resume import Start
from megatron.config.ranks import with_batch
from megatron.config.schema import Config
from megatron.data.batches import Batch, batches
from megatron.data.datasets import Datasets, Vocabulary, build_datasets, vocabulary
from megatron.errors import UserError
from megatron.model import runtime
from megatron.model.build import build_model, check_position
from megatron.training import processes as places
from megatron.training.console import ConsoleReporter
from megatron.training.engine import Engine, precision
from megatron.training.hardware import peak_tflops
from megatron.training.processes import Processes
from megatron.training.records import METRICS
from megatron.training.reporters import Reporter, build_reporters
from megatron.training.schedule import Schedule, build_schedule, rate_jump


@dataclass
class Run:
    """A run that is ready to take its next step."""

    config: Config
    processes: Processes
    start: Start
    vocabulary: Vocabulary
    datasets: Datasets
    train_samples: int
    """The number of samples that the order of the training data was built for."""
    engine: Engine
    schedule: Schedule
    batches: Iterator[Batch]
    console: ConsoleReporter
    reporters: list[Reporter]
    flops_per_token: float
    parameters: int
    peak: float | None
    """The device's peak TFLOP/s, if it is known."""
    lock: RunLock | None
    """Keeps other runs out of the folder; the first process has it, if anything is saved."""

    def close(self) -> None:
        """Close files, release the engine and the folder."""
        for reporter in (self.console, *self.reporters):
            reporter.close()
        self.engine.close()
        if self.lock is not None:
            self.lock.release()


def prepare(config: Config, console: ConsoleReporter) -> Run:
    """Build a run from its configuration. Every process calls this; only the first one's console is used.

    Raises:
        UserError: the configuration, the data and what is there to start from do not fit together.
        RunError: a file is damaged or cannot be written, or the processes do not find each other.
    """
    # Before anything is read or started: what is there must not change any more.
    saves = config.checkpoint.save is not None and os.environ.get("RANK", "0") == "0"
    lock = RunLock(config.checkpoint.save) if saves else None  # type: ignore[arg-type]
    try:
        return _prepare(config, console, lock)
    except BaseException:
        if lock is not None:
            lock.release()
        raise


def _prepare(config: Config, console: ConsoleReporter, lock: RunLock | None) -> Run:
    processes = places.start(config)
    start = resume.find_start(config, processes)
    config = with_batch(config, processes.world)
    _determinism(config)
    if precision(config) == "fp16" and processes.device.type == "cpu":
        raise UserError("precision: fp16 needs a GPU; use bf16 or fp32")
    if start.checkpoint is not None and not start.weights_only:
        resume.check_engine(start, config, world=processes.world, precision=precision(config))
    known = vocabulary(config.data)
    resume.check_vocabulary(start, known.size, known.name)
    runtime.initialize(config.training.seed)
    check_position(config.model, config.position)  # before the data leave anything behind
    datasets, train_samples = _datasets(config, start)

    reporter = console if processes.first else ConsoleReporter(None, config.training.train_iters)
    for note in (*start.notes, *datasets.notes, *_rate_jump(config, start)):
        reporter.say(note)
    if datasets.valid is None and config.training.eval_interval and config.training.eval_iters:
        reporter.say("no validation: the configuration names no validation data")

    model = build_model(config.model, config.position, known.size, seed=config.training.seed)
    if start.weights_only:
        resume.load_weights(start, config, model)
    # Counted before ZeRO divides the parameters among processes.
    flops_per_token, parameters = model.flops_per_token(config.model.seq_length), model.num_parameters()
    runtime.initialize(config.training.seed + processes.rank)  # dropout differs between ranks
    engine = Engine(config, model, processes)
    if start.checkpoint is not None and not start.weights_only:
        resume.restore(start, engine.deepspeed, processes)
        engine.restore_options()
        for note in resume.restore_random(start, processes):
            reporter.say(note)
    training, folder = config.training, config.checkpoint.save
    if processes.first and folder is not None:
        # From here on the run is this one: nothing can be refused any more.
        prune(folder, None)
        for note in resume.give_up(start, Path(folder) / METRICS):
            reporter.say(note)
        if start.progress.step < training.train_iters:
            # Started again from this file, it goes on; it does not go back once more.
            config.replace(rollback=False).save(Path(folder) / CONFIG)
    return Run(
        config=config,
        processes=processes,
        start=start,
        vocabulary=known,
        datasets=datasets,
        train_samples=train_samples,
        engine=engine,
        schedule=build_schedule(config.optimizer, training.train_iters),
        batches=iter(
            batches(
                datasets.train,  # type: ignore[arg-type]
                micro_batch=training.train_micro_batch_size_per_gpu,
                rank=processes.rank,
                world=processes.world,
                start=start.progress.consumed_samples,
                num_workers=config.data.num_workers,
            )
        ),
        console=reporter,
        reporters=build_reporters(config, start.progress.step) if processes.first else [],
        flops_per_token=flops_per_token,
        parameters=parameters,
        peak=peak_tflops(processes.device, precision(config), config.logging.peak_tflops),
        lock=lock,
    )


def _determinism(config: Config) -> None:
    deterministic = config.training.deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = deterministic


def _rate_jump(config: Config, start: Start) -> list[str]:
    """A line if the run goes on with another learning rate than the one it had come to."""
    if start.checkpoint is None or start.weights_only:
        return []
    before = Config.read(start.checkpoint / CONFIG)
    old, new = (build_schedule(each.optimizer, each.training.train_iters) for each in (before, config))
    note = rate_jump(old, new, start.progress.step) if start.progress.step < config.training.train_iters else None
    return [] if note is None else [note]


def _datasets(config: Config, start: Start) -> tuple[Datasets, int]:
    """The datasets, and the number of samples that the order of the training data is built for."""
    training, batch = config.training, config.training.train_batch_size
    assert batch is not None
    # A resumed run keeps the order it began with, also when it is now longer, shorter or has another batch size.
    total = start.progress.consumed_samples + max(0, training.train_iters - start.progress.step) * batch
    first = start.progress.train_samples or total
    held_out = training.eval_iters * batch if training.eval_interval else 0
    cache = config.data.data_cache
    if cache is None and config.checkpoint.save is not None:
        cache = str(Path(config.checkpoint.save) / "data_cache")
    datasets = build_datasets(
        config.data,
        seq_length=config.model.seq_length,
        train_samples=first,
        extend_train_to=total,
        valid_samples=held_out,
        test_samples=held_out,
        seed=training.seed,
        cache=cache,
    )
    if datasets.train is None:
        raise UserError("train_data_paths: no training data are named (or data_path's split gives them no share)")
    return datasets, first
