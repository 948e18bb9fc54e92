"""A run from its configuration to its first step, in three phases.

The configuration was resolved by whoever starts the run (resolve_run.py).

    session     the folder's lock, the other processes, seeds and determinism (session.py)
    assemble    data, model, engine: first what fails cheaply (names, vocabulary), then what takes long
    restore     every state of the checkpoint to start from, if there is one; from then on the folder is this run's

What there is to start from is decided between the first and the second: all processes verify its files together, and
it must fit the configuration before anything is built.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.checkpoint.layout import prune_checkpoints
from megatron.checkpoint.resume import ResumePlan, move_superseded_aside, plan_resume
from megatron.checkpoint.run_folder import save_config
from megatron.config.schema import Config
from megatron.data.batches import Batch, build_dataloader
from megatron.data.datasets import Datasets, build_datasets
from megatron.data.run_tokenizer import save_run_tokenizer
from megatron.data.vocabulary import Vocabulary, read_vocabulary
from megatron.distributed import rng
from megatron.distributed.launcher_environment import RankInfo
from megatron.distributed.process_groups import ProcessGroups
from megatron.model.build import build_model, check_position_options
from megatron.training import session as sessions
from megatron.training.console import ConsoleReporter
from megatron.training.engine import Engine
from megatron.training.hardware import find_peak_tflops
from megatron.training.loss_spikes import RollbackRequested
from megatron.training.records import METRICS_FILE
from megatron.training.reporters import Reporter, build_reporters, set_damage_aside
from megatron.training.schedule import LearningRateSchedule, build_schedule, describe_rate_jump
from megatron.training.session import TrainingSession
from megatron.utils.progress import WaitAnnouncer


@dataclass
class TrainState:
    """A run that is ready to take its next step."""

    config: Config
    session: TrainingSession
    resume: ResumePlan
    vocabulary: Vocabulary
    datasets: Datasets
    train_samples: int
    """The number of samples that the order of the training data was built for."""
    engine: Engine
    schedule: LearningRateSchedule
    batches: Iterator[Batch]
    console: ConsoleReporter
    reporters: list[Reporter]
    flops_per_token: dict[int, float]
    """Forward and backward, at each length of a sequence that there is."""
    parameters: int
    peak: float | None
    """The device's peak TFLOP/s, if it is known."""

    @property
    def groups(self) -> ProcessGroups:
        """This process among all of the run."""
        return self.session.groups

    def close(self) -> None:
        """Close files, release the engine and the folder."""
        self.console.close()
        for reporter in self.reporters:
            reporter.close()
        self.engine.close()
        self.session.close()


def build_state(
    config: Config, rank_info: RankInfo, console: ConsoleReporter, rollback: RollbackRequested | None = None
) -> TrainState:
    """Build a run from its configuration. Every process calls this; only the first one's console is used.

    Args:
        config: resolved (`resolve_run`).
        rank_info: which of the run's processes this is.
        console: where the first process reports.
        rollback: the run went back because of its loss; the data that did it are stepped over.

    Raises:
        UserError: the configuration, the data and what is there to start from do not fit together.
        RunError: a file is damaged or cannot be written, or the processes do not find each other.
    """
    session = sessions.begin_session(config, rank_info)
    try:
        resume = plan_resume(config, session.groups)
        if rollback is not None:
            resume = replace(resume, progress=rollback.count_skipped_samples(resume.progress))
        with _announce_resume(console, session, resume):
            state = build_components(config, session, resume, console)
            load_state(state)
    except BaseException:
        session.close()
        raise
    return state


def _announce_resume(console: ConsoleReporter, session: TrainingSession, resume: ResumePlan) -> WaitAnnouncer:
    """Building a large model takes minutes: the first process says so, on a terminal sooner than in a file."""
    what = "reading its states" if resume.resumes else "its optimizer"
    shown = session.groups.is_main and console.console is not None
    first = 3.0 if console.console is not None and console.console.is_terminal else 10.0
    return WaitAnnouncer(console.log if shown else lambda line: None, f"building the model and {what}", first=first)


def build_components(
    config: Config, session: TrainingSession, resume: ResumePlan, console: ConsoleReporter
) -> TrainState:
    """Data, model and engine of a run that starts from `resume`, its states still fresh. All processes must call this.

    Raises:
        UserError: the data, the model and what it starts from do not fit together.
        RunError: a file is damaged or cannot be written.
    """
    training, processes = config.training, session.groups
    resume.check_engine(config, processes.mesh.sizes)
    known = read_vocabulary(config.data)
    resume.check_vocabulary(known.size, known.name, config.data.task)
    check_position_options(config.model, config.position)  # before the data leave anything behind
    datasets, train_samples = _build_datasets(config, resume, processes)

    reporter = console if processes.is_main else ConsoleReporter(None, training.train_iters)
    for note in (*resume.notes, *datasets.notes, *_describe_rate_jump(config, resume)):
        reporter.log(note)
    if datasets.valid is None and training.eval_interval and training.eval_iters:
        reporter.log("no validation: the configuration names no validation data")

    seed = rng.derive_seed(training.seed, "initialization", processes.mesh)
    model = build_model(config.model, config.position, known.size, groups=processes, seed=seed)
    for note in resume.load_weights(config, model):
        reporter.log(note)
    # Counted before ZeRO divides the parameters among processes.
    flops_per_token = {length: model.flops_per_token(length) for length in sorted(set(datasets.lengths))}
    parameters = model.num_parameters()
    rng.seed_torch(rng.derive_seed(training.seed, "dropout", processes.mesh))
    return TrainState(
        config=config,
        session=session,
        resume=resume,
        vocabulary=known,
        datasets=datasets,
        train_samples=train_samples,
        engine=Engine(config, model, processes),
        schedule=build_schedule(config.optimizer, training.train_iters),
        batches=iter(
            build_dataloader(
                datasets.train,  # type: ignore[arg-type]
                micro_batch_size=training.train_micro_batch_size_per_gpu,
                mesh=processes.mesh,
                start=resume.progress.consumed_samples,
                num_workers=config.data.num_workers,
            )
        ),
        console=reporter,
        reporters=[],
        flops_per_token=flops_per_token,
        parameters=parameters,
        peak=find_peak_tflops(processes.device, training.compute_dtype, config.logging.peak_tflops),
    )


def load_state(state: TrainState) -> None:
    """Put the states of the checkpoint back, if there is one, and take the folder over. All processes must call this.

    Raises:
        UserError: the folder holds something else where the copy of the tokenizer belongs.
        RunError: files are missing or damaged, or the disk refuses.
    """
    config, resume, processes = state.config, state.resume, state.groups
    if resume.resumes:
        resume.restore(state.engine.deepspeed, processes)
        state.engine.restore_options()
        for note in resume.restore_rng(processes):
            state.console.log(note)
    if not processes.is_main:
        return
    if (folder := config.checkpoint.save) is not None:
        save_run_tokenizer(config.data, folder)
        # From here on the run is this one: nothing can be refused any more.
        prune_checkpoints(folder, None)
        for note in move_superseded_aside(resume, Path(folder) / METRICS_FILE):
            state.console.log(note)
        if resume.resumes:
            for note in set_damage_aside(Path(folder)):
                state.console.log(note)
        if resume.progress.step < config.training.train_iters:
            # Started again from this file, it goes on; it does not go back once more.
            again = config.replace(rollback=False, load=folder) if config.checkpoint.rollback else config
            if (kept := save_config(again, folder)) is not None:
                state.console.log(kept)
    state.reporters = build_reporters(config, resume.progress.step)


def _describe_rate_jump(config: Config, resume: ResumePlan) -> list[str]:
    """A line if the run goes on with another learning rate than the one it had come to."""
    step = resume.progress.step
    if resume.source is None or not resume.resumes or step >= config.training.train_iters:
        return []
    old, new = (build_schedule(run.optimizer, run.training.train_iters) for run in (resume.source.config, config))
    note = describe_rate_jump(old, new, step)
    return [] if note is None else [note]


def _build_datasets(config: Config, resume: ResumePlan, groups: ProcessGroups) -> tuple[Datasets, int]:
    """The datasets, and the number of samples that the order of the training data is built for."""
    training, batch = config.training, config.training.train_batch_size
    assert batch is not None
    # A resumed run keeps the order it began with, also when it is now longer, shorter or has another batch size.
    total = resume.progress.consumed_samples + max(0, training.train_iters - resume.progress.step) * batch
    first = resume.progress.train_samples or total
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
        groups=groups,
        batch=batch,
        consumed=resume.progress.consumed_samples,
    )
    return datasets, first
