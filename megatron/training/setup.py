"""A run from its configuration to its first step, in four phases.

    preflight   what can be refused, and settled, from the configuration and the machine alone (preflight.py)
    session     the folder's lock, the other processes, seeds and determinism (session.py)
    assemble    data, model, engine: first what fails cheaply (names, vocabulary), then what takes long
    restore     every state of the checkpoint to start from, if there is one; from then on the folder is this run's

What there is to start from is decided between the second and the third: all processes verify its files together, and
it must fit the configuration before anything is built.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.checkpoint import resume
from megatron.checkpoint.folder import prune
from megatron.checkpoint.resume import Start
from megatron.checkpoint.run_files import save_config
from megatron.checkpoint.stored import config_of
from megatron.config.schema import Config
from megatron.data.batches import Batch, batches
from megatron.data.datasets import Datasets, build_datasets
from megatron.data.run_tokenizer import keep_run_tokenizer
from megatron.data.vocabulary import Vocabulary, vocabulary
from megatron.distributed import seeds
from megatron.distributed.devices import Machine
from megatron.distributed.place import Place
from megatron.distributed.processes import Processes
from megatron.distributed.surroundings import told
from megatron.meter import AnnounceWait
from megatron.model.build import build_model, check_position_options
from megatron.training import session as sessions
from megatron.training.bad_loss import GoBack
from megatron.training.console import ConsoleReporter
from megatron.training.engine import Engine
from megatron.training.hardware import peak_tflops
from megatron.training.preflight import preflight
from megatron.training.records import METRICS
from megatron.training.reporters import Reporter, build_reporters, set_damage_aside
from megatron.training.schedule import Schedule, build_schedule, rate_jump
from megatron.training.session import Session


@dataclass
class Run:
    """A run that is ready to take its next step."""

    config: Config
    session: Session
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
    flops_per_token: dict[int, float]
    """Forward and backward, at each length of a sequence that there is."""
    parameters: int
    peak: float | None
    """The device's peak TFLOP/s, if it is known."""

    @property
    def processes(self) -> Processes:
        """This process among all of the run."""
        return self.session.processes

    def close(self) -> None:
        """Close files, release the engine and the folder."""
        self.console.close()
        for reporter in self.reporters:
            reporter.close()
        self.engine.close()
        self.session.close()


def prepare(config: Config, console: ConsoleReporter, back: GoBack | None = None) -> Run:
    """Build a run from its configuration. Every process calls this; only the first one's console is used.

    back: the run went back because of its loss; the data that did it are stepped over.

    Raises:
        UserError: the configuration, the data and what is there to start from do not fit together.
        RunError: a file is damaged or cannot be written, or the processes do not find each other.
    """
    started = told(port=config.launch.master_port)
    place = Place() if started is None else started.place
    if started is not None:
        os.environ.update(started.variables())  # DeepSpeed reads torchrun's names, whoever started us
    config = preflight(config, Machine.here(), place=place).config
    session = sessions.begin(config, place)
    try:
        start = resume.find_start(config, session.processes)
        if back is not None:
            start = replace(start, progress=back.stepped_over(start.progress))
        with _announced(console, session, start):
            run = assemble(config, session, start, console)
            restore(run)
    except BaseException:
        session.close()
        raise
    return run


def _announced(console: ConsoleReporter, session: Session, start: Start) -> AnnounceWait:
    """Building a large model takes minutes: the first process says so, on a terminal sooner than in a file."""
    what = "reading its states" if start.resumes else "its optimizer"
    shown = session.processes.first and console.console is not None
    first = 3.0 if console.console is not None and console.console.is_terminal else 10.0
    return AnnounceWait(console.say if shown else lambda line: None, f"building the model and {what}", first=first)


def assemble(config: Config, session: Session, start: Start, console: ConsoleReporter) -> Run:
    """Data, model and engine of a run that starts from `start`, its states still fresh. All processes must call this.

    Raises:
        UserError: the data, the model and what it starts from do not fit together.
        RunError: a file is damaged or cannot be written.
    """
    training, processes = config.training, session.processes
    resume.check_engine(start, config, processes.mesh.sizes)
    known = vocabulary(config.data)
    resume.check_vocabulary(start, known.size, known.name, config.data.task)
    check_position_options(config.model, config.position)  # before the data leave anything behind
    datasets, train_samples = _datasets(config, start, processes)

    reporter = console if processes.first else ConsoleReporter(None, training.train_iters)
    for note in (*start.notes, *datasets.notes, *_rate_jump(config, start)):
        reporter.say(note)
    if datasets.valid is None and training.eval_interval and training.eval_iters:
        reporter.say("no validation: the configuration names no validation data")

    seed = seeds.seed_of(training.seed, "initialization", processes.mesh)
    model = build_model(config.model, config.position, known.size, groups=processes, seed=seed)
    if start.weights_only:
        for note in resume.load_weights(start, config, model):
            reporter.say(note)
    # Counted before ZeRO divides the parameters among processes.
    flops_per_token = {length: model.flops_per_token(length) for length in sorted(set(datasets.lengths))}
    parameters = model.num_parameters()
    seeds.seed_torch(seeds.seed_of(training.seed, "dropout", processes.mesh))
    return Run(
        config=config,
        session=session,
        start=start,
        vocabulary=known,
        datasets=datasets,
        train_samples=train_samples,
        engine=Engine(config, model, processes),
        schedule=build_schedule(config.optimizer, training.train_iters),
        batches=iter(
            batches(
                datasets.train,  # type: ignore[arg-type]
                micro_batch=training.train_micro_batch_size_per_gpu,
                mesh=processes.mesh,
                start=start.progress.consumed_samples,
                num_workers=config.data.num_workers,
            )
        ),
        console=reporter,
        reporters=[],
        flops_per_token=flops_per_token,
        parameters=parameters,
        peak=peak_tflops(processes.device, training.compute_type, config.logging.peak_tflops),
    )


def restore(run: Run) -> None:
    """Put the states of the checkpoint back, if there is one, and take the folder over. All processes must call this.

    Raises:
        UserError: the folder holds something else where the copy of the tokenizer belongs.
        RunError: files are missing or damaged, or the disk refuses.
    """
    config, start, processes = run.config, run.start, run.processes
    if start.resumes:
        resume.restore(start, run.engine.deepspeed, processes)
        run.engine.restore_options()
        for note in resume.restore_random(start, processes):
            run.console.say(note)
    if not processes.first:
        return
    if (folder := config.checkpoint.save) is not None:
        keep_run_tokenizer(config.data, folder)
        # From here on the run is this one: nothing can be refused any more.
        prune(folder, None)
        for note in resume.give_up(start, Path(folder) / METRICS):
            run.console.say(note)
        if start.resumes:
            for note in set_damage_aside(Path(folder)):
                run.console.say(note)
        if start.progress.step < config.training.train_iters:
            # Started again from this file, it goes on; it does not go back once more.
            again = config.replace(rollback=False, load=folder) if config.checkpoint.rollback else config
            if (kept := save_config(again, folder)) is not None:
                run.console.say(kept)
    run.reporters = build_reporters(config, start.progress.step)


def _rate_jump(config: Config, start: Start) -> list[str]:
    """A line if the run goes on with another learning rate than the one it had come to."""
    if start.checkpoint is None or not start.resumes:
        return []
    before = config_of(start.checkpoint)
    old, new = (build_schedule(each.optimizer, each.training.train_iters) for each in (before, config))
    note = rate_jump(old, new, start.progress.step) if start.progress.step < config.training.train_iters else None
    return [] if note is None else [note]


def _datasets(config: Config, start: Start, processes: Processes) -> tuple[Datasets, int]:
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
        processes=processes,
        batch=batch,
        consumed=start.progress.consumed_samples,
    )
    return datasets, first
