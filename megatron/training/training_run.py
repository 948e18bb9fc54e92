"""Construction of a run, from its configuration to its first step, in four phases.

The code that starts the run has resolved the configuration (resolve_run.py).

    begin_session          connect to the other processes, set seeds and determinism, lock the folder
    plan_start             determine and check the checkpoint and the data (start_plan.py)
    build_components       build data, model, engine
    restore_training_run   restore every state of the checkpoint, if there is one; the folder then belongs to this run
"""

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.engine_state import EngineCounters
from megatron.checkpoint.layout import get_run_of_checkpoint, prune_checkpoints
from megatron.checkpoint.resume import ResumePlan, archive_discarded_checkpoints
from megatron.checkpoint.run_folder import RunLock, save_config
from megatron.checkpoint.trainer_state import Stateful, TrainerState
from megatron.config.execution import build_stages, resolve_mesh_shape
from megatron.config.method_names import compute_user_method_digests
from megatron.config.schema import Config
from megatron.config.stages import Stage, find_stage
from megatron.data.datasets import Datasets, build_datasets
from megatron.data.document_starts import draw_document_starts
from megatron.data.indexed_dataset import compute_dataset_digest
from megatron.data.load_tokenizer import Vocabulary, save_tokenizer
from megatron.data.torch_data import Batch, build_dataloader
from megatron.distributed import rng
from megatron.distributed.launcher_environment import RankInfo
from megatron.distributed.process_groups import ProcessGroups, init_distributed
from megatron.model.backend_choice import AttentionTarget, BackendChoice
from megatron.model.build import build_model
from megatron.model.device_dtype import get_torch_dtype
from megatron.training.console import ConsoleReporter
from megatron.training.engine import Engine
from megatron.training.harness_loading import check_task_requests, load_tasks_on_all_ranks
from megatron.training.loss_guard import Rollback
from megatron.training.metrics import find_peak_tflops
from megatron.training.metrics_log import METRICS_FILE
from megatron.training.optimizer import format_parameter_groups, merge_grouped_weights
from megatron.training.profiler import begin_memory_history
from megatron.training.reporters import Reporter, RunRecord, archive_damaged_lines, build_reporters, report_to_all
from megatron.training.schedule import LearningRateSchedule, build_schedule, describe_rate_jump
from megatron.training.start_plan import (
    DataPosition,
    StartPlan,
    check_eval_lengths,
    list_eval_multiples,
    plan_start,
)
from megatron.utils.atomic_io import write_text_atomically
from megatron.utils.errors import FarfieldError, RunError
from megatron.utils.progress import WaitAnnouncer

MAX_SILENCE = 6.0
"""Maximum time without output while a run is built, in seconds."""
PARAMETER_GROUPS = "parameter_groups.txt"
"""File in the run's folder that lists the parameters of each optimizer group."""


@dataclass(frozen=True)
class TrainingSession:
    """Connection of one process to a run: its process groups, and the lock on the run's folder."""

    groups: ProcessGroups
    lock: RunLock | None
    """Lock that keeps other runs out of the folder. The first process has it, if the run saves anything."""

    def check_folder(self) -> None:
        """Raise MissingFolderError if the run's folder was moved or removed. Only the first process can detect this."""
        if self.lock is not None:
            self.lock.check_folder()

    def close(self) -> None:
        """Release the folder."""
        if self.lock is not None:
            self.lock.release()


def begin_session(config: Config, rank_info: RankInfo) -> TrainingSession:
    """Connect to the other processes, set determinism and seeds, and lock the folder. All processes must call this.

    Raises:
        UserError: if another run is writing in the folder.
        RunError: if the folder cannot be written, the device cannot be used, or the others cannot be reached.
    """
    launch, sizes = config.launch, resolve_mesh_shape(config, rank_info.world_size)
    groups = init_distributed(rank_info, sizes, device=launch.device, backend=launch.distributed_backend)
    _set_determinism(config.training.deterministic)
    rng.seed_generators(rng.derive_seed(config.training.seed, "initialization", groups.mesh))
    # Lock before anything in the folder is read, and after all processes have connected. Otherwise processes would keep
    # waiting, on their machines, for one that failed here and exited.
    return TrainingSession(groups, _take_lock(config.checkpoint.save, groups))


def _take_lock(save: str | None, groups: ProcessGroups) -> RunLock | None:
    """Lock the run's folder in the first process. Raise its error in all processes."""
    lock, error = None, None
    if save is not None and groups.is_main:
        try:
            lock = RunLock(save)
        except FarfieldError as failure:
            error = failure
    if (error := groups.gather_objects(error)[0]) is not None:
        raise error
    return lock


def _set_determinism(deterministic: bool) -> None:
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads this when it starts
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = deterministic


@dataclass
class TrainingRun:
    """Run that is ready to take its next step."""

    config: Config
    """Configuration of the current stage."""
    requested: Config
    """Configuration of all stages, as the run was started; stored in the run's folder."""
    session: TrainingSession
    resume: ResumePlan
    stage: Stage
    vocabulary: Vocabulary
    harness_tasks: Any
    """Loaded tasks of lm-evaluation-harness that are evaluated during training, or None."""
    datasets: Datasets
    data_digests: Mapping[str, str]
    """Digests of the training datasets (`TrainerState.data_digests`); empty for a task."""
    data_position: DataPosition
    engine: Engine
    schedule: LearningRateSchedule
    batches: Iterator[Batch]
    backend_choice: BackendChoice
    console: ConsoleReporter
    reporters: list[Reporter]
    flops_per_token: dict[int, float]
    """FLOPs per token, forward and backward, for each sequence length."""
    parameters: int
    peak_tflops: float | None
    """Peak of the device in TFLOP/s, or None if unknown."""

    @property
    def groups(self) -> ProcessGroups:
        """Process groups of the run."""
        return self.session.groups

    def _describe_vocabulary(self) -> dict[str, Any]:
        described: dict[str, Any] = {"size": self.vocabulary.size, "name": self.vocabulary.name}
        if self.config.position.attention_mask == "document":
            described["eod"] = self.vocabulary.eod
        return described

    def collect_trainer_state(self, *parts: Stateful) -> TrainerState:
        """Collect the trainer state of a checkpoint, including the state of these parts of the loop.

        All processes must call this.
        """
        training, sizes = self.config.training, self.groups.mesh.sizes
        trainer_state = TrainerState(
            vocabulary=self._describe_vocabulary(),
            world=sizes.world_size,
            tensor=sizes.tensor,
            context=sizes.context,
            pipeline=sizes.pipeline,
            zero_stage=training.zero_optimization.stage,
            precision=training.compute_dtype,
            method_digests=compute_user_method_digests(self.config.position) or None,
            data_digests=dict(self.data_digests) or None,
            directory=os.getcwd(),
            origin=self.resume.origin,
        )
        return trainer_state.collect(self.data_position, EngineCounters(self.engine.deepspeed), *parts)

    def report(self, record: RunRecord) -> None:
        """Pass a record to all reporters. Raises MissingFolderError if the run's folder no longer exists."""
        self.session.check_folder()
        report_to_all(self.reporters, record)

    def close(self) -> None:
        """Close files, and release the engine and the folder.

        Raises RunError if a record cannot be written, unless another exception is being handled.
        """
        ended_by, failure = sys.exception(), None
        self.console.close()
        for reporter in self.reporters:
            try:
                reporter.close()
            except RunError as error:
                failure = failure or error
        self.engine.close()
        self.session.close()
        if failure is not None and ended_by is None:
            raise failure


def build_training_run(
    config: Config,
    rank_info: RankInfo,
    console: ConsoleReporter,
    rollback: Rollback | None = None,
    previous_backend: str | None = None,
) -> TrainingRun:
    """Build a run from its configuration. All processes must call this; only the first process uses its console.

    Args:
        config: resolved configuration (`resolve_run`).
        rank_info: rank of this process.
        console: console of the first process.
        rollback: rollback because of a bad loss, if any; the data that caused it are skipped.
        previous_backend: attention backend chosen by an earlier process of this run (`AttentionTarget`); used with
            attention_backend `auto` if it passes the check.

    Raises:
        UserError: if the configuration, the data and the checkpoint do not match.
        RunError: if a file is damaged or cannot be written, or the processes cannot connect.
    """
    log = console.log if rank_info.rank == 0 else lambda line: None
    with WaitAnnouncer(log, "waiting for the run's other processes and its folder", first=MAX_SILENCE):
        session = begin_session(config, rank_info)
    try:
        with WaitAnnouncer(log, "reading the data and the checkpoint to start from", first=MAX_SILENCE):
            plan = plan_start(config, session.groups, rollback)
        with WaitAnnouncer(log, "reading harness.tasks, which imports lm_eval", first=MAX_SILENCE):
            tasks = load_tasks_on_all_ranks(plan.requested, session.groups, log)
        begin_memory_history(config, session.groups, plan.data_position.step)
        with _announce_resume(console, session, plan.resume):
            run = build_components(plan, session, console, tasks, previous_backend)
            restore_training_run(run)
    except BaseException:
        session.close()
        raise
    return run


def _announce_resume(console: ConsoleReporter, session: TrainingSession, resume: ResumePlan) -> WaitAnnouncer:
    """Return an announcer for building a large model, which takes minutes; on a terminal it prints sooner."""
    work = "reading its states" if resume.resumes else "its optimizer"
    first = 3.0 if console.console is not None and console.console.is_terminal else MAX_SILENCE
    return WaitAnnouncer(
        console.log if session.groups.is_main else lambda line: None, f"building the model and {work}", first=first
    )


def build_components(
    plan: StartPlan,
    session: TrainingSession,
    console: ConsoleReporter,
    tasks: Any,
    previous_backend: str | None = None,
) -> TrainingRun:
    """Build data, model and engine of a run with fresh states. All processes must call this.

    Args:
        plan: plan of the start.
        session: connection of this process to the run.
        console: console of the first process.
        tasks: loaded tasks of lm-evaluation-harness, or None.
        previous_backend: attention backend chosen by an earlier process of this run.

    Raises:
        UserError: if the data, the model and the checkpoint do not match.
        RunError: if a file is damaged or cannot be written.
    """
    config, resume, position, groups = plan.config, plan.resume, plan.data_position, session.groups
    training, cache = config.training, config.data.data_cache
    if cache is None and config.checkpoint.save is not None:
        cache = str(Path(config.checkpoint.save) / "data_cache")
    datasets = build_datasets(
        config.data,
        plan.order,
        seq_length=config.model.seq_length,
        cache=cache,
        groups=groups,
        vocabulary=plan.vocabulary,
        separates_documents=config.position.attention_mask == "document",
        eval_multiples=list_eval_multiples(config),
        slices=plan.slices,
    )

    reporter = console if groups.is_main else ConsoleReporter(None, training.train_iters)
    reporter.train_iters = training.train_iters  # the checkpoint's, if the corpus of train_epochs has changed since
    for note in (*resume.notes, *plan.notes, *datasets.notes, *_describe_rate_jump(config, resume)):
        reporter.log(note)
    if datasets.valid is None and not datasets.extra_valid_sets and training.eval_interval and training.eval_iters != 0:
        reporter.log("no validation: the configuration has no validation data")

    seed = rng.derive_seed(training.seed, "initialization", groups.mesh)
    target = AttentionTarget(
        groups.device,
        get_torch_dtype(training.compute_dtype),
        batch=training.train_micro_batch_size_per_gpu,
        length=max(datasets.lengths),
        document_starts=_draw_documents(config, max(datasets.lengths), groups),
        resumed_run=None if resume.checkpoint is None else get_run_of_checkpoint(resume.checkpoint),
        previous_backend=previous_backend,
    )
    model = build_model(config.model, config.position, plan.vocabulary.size, groups=groups, seed=seed, target=target)
    check_eval_lengths(config, model.max_length)
    if tasks is not None:
        check_task_requests(plan.requested, tasks, plan.vocabulary, model)
    for note in (*model.backend_choice.lines, *resume.load_weights(config, model)):
        reporter.log(note)
    # Count before ZeRO divides the parameters among processes.
    lengths = {*datasets.lengths, *(stage.config.model.seq_length for stage in resume.stages[1:])}
    flops_per_token = {length: model.count_flops_per_token(length) for length in sorted(lengths)}
    parameters = model.num_parameters()
    rng.seed_generators(rng.derive_seed(training.seed, "dropout", groups.mesh))
    prefixes = [dataset_slice.dataset.prefix for dataset_slice in plan.slices.get("train", [])]
    return TrainingRun(
        config=config,
        requested=plan.requested,
        session=session,
        resume=resume,
        stage=resume.stage,
        vocabulary=plan.vocabulary,
        harness_tasks=tasks,
        datasets=datasets,
        data_digests={str(prefix): compute_dataset_digest(prefix) for prefix in prefixes},
        data_position=position,
        engine=Engine(config, model, groups),
        schedule=_build_stage_schedule(resume.stage),
        batches=iter(
            build_dataloader(
                datasets.train,  # type: ignore[arg-type]
                micro_batch_size=training.train_micro_batch_size_per_gpu,
                mesh=groups.mesh,
                start=position.next_sequence,
                num_workers=config.data.num_workers,
            )
        ),
        backend_choice=model.backend_choice,
        console=reporter,
        reporters=[],
        flops_per_token=flops_per_token,
        parameters=parameters,
        peak_tflops=find_peak_tflops(groups.device, training.compute_dtype, config.logging.peak_tflops),
    )


def restore_training_run(run: TrainingRun) -> None:
    """Restore the states of the checkpoint, if there is one, and take over the folder. All processes must call this.

    Raises:
        UserError: if another file has the name of the tokenizer's copy.
        RunError: if files are missing or damaged, or the disk cannot be written.
    """
    config, resume, groups = run.config, run.resume, run.groups
    if resume.resumes:
        resume.restore(run.engine.deepspeed, groups)
        run.engine.restore_options()
        for note in resume.restore_rng(groups):
            run.console.log(note)
    table = _collect_parameter_groups(run)
    if not groups.is_main:
        return
    if (folder := config.checkpoint.save) is not None:
        if run.vocabulary.tokenizer is not None:
            save_tokenizer(run.vocabulary.tokenizer, folder)
        # All checks have passed: from here on the folder belongs to this run.
        prune_checkpoints(folder, None)
        for note in archive_discarded_checkpoints(resume, Path(folder) / METRICS_FILE):
            run.console.log(note)
        if resume.resumes:
            for note in archive_damaged_lines(Path(folder)):
                run.console.log(note)
        if resume.trainer_state.step < config.training.train_iters:
            # A restart from this file must resume, not roll back again.
            asked = run.requested
            again = asked.replace(rollback=False, load=folder) if asked.checkpoint.rollback else asked
            if (line := save_config(again, folder)) is not None:
                run.console.log(line)
            write_text_atomically(Path(folder) / PARAMETER_GROUPS, table)
        run.backend_choice.write_records(Path(folder))
    run.reporters = build_reporters(config, resume.trainer_state.step, run.console.log)


def _collect_parameter_groups(run: TrainingRun) -> str:
    """Return the table of the optimizer's groups over all pipeline stages. All processes must call this."""
    mesh, own = run.groups.mesh, run.engine.grouped_weights
    if mesh.pipeline.size > 1:
        is_first = mesh.tensor.index == mesh.dp_cp.index == 0
        stages = run.groups.gather_objects(own if is_first else [])
        own = merge_grouped_weights(entry for stage in stages for entry in stage)
    return "\n".join(format_parameter_groups(own)) + "\n"


def _describe_rate_jump(config: Config, resume: ResumePlan) -> list[str]:
    """Return a line if the resumed run continues with a different learning rate."""
    step = resume.trainer_state.step
    if resume.source is None or not resume.resumes or step >= config.training.train_iters:
        return []
    if step == resume.stage.first_step:
        return []  # a stage may start with another rate
    stored = build_stages(resume.source.config)
    old, new = (_build_stage_schedule(stage) for stage in (find_stage(stored, step), resume.stage))
    note = describe_rate_jump(old, new, step)
    return [] if note is None else [note]


def _build_stage_schedule(stage: Stage) -> LearningRateSchedule:
    return build_schedule(stage.config.optimizer, stage.schedule_end, stage.schedule_first)


def _draw_documents(config: Config, length: int, groups: ProcessGroups) -> torch.Tensor | None:
    """Draw rows like the run's for the check of backends that mask documents.

    Return None if documents are not masked.
    """
    if config.position.attention_mask != "document" or config.data.task is not None or groups.device.type == "cpu":
        return None
    starts = draw_document_starts(config.data, config.training.train_micro_batch_size_per_gpu, length)
    return torch.from_numpy(starts)
