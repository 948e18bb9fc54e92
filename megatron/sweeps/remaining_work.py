"""Completed and remaining work of a sweep, measured in FLOPs, which are known before the first training.

Completed training is determined from checkpoints, and completed evaluations from a marker file next to their results,
which contains their records and how they were made.

A run folder with a different configuration is neither used for a member nor overwritten.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.checkpoint import layout as checkpoints
from megatron.checkpoint.manifest import find_latest_valid, load_checkpoint_config
from megatron.checkpoint.trainer_state import TrainerState
from megatron.config.execution import build_stages
from megatron.config.load import read_config
from megatron.config.schema import CONFIG_FILE, KeyPath
from megatron.config.stages import find_writing_stage, list_stage_configs
from megatron.config.yaml_files import format_value
from megatron.data.blend import compute_sequence_range
from megatron.data.datasets import list_sequence_lengths
from megatron.data.indexed_dataset import find_changed_datasets
from megatron.data.load_tokenizer import find_vocab_size
from megatron.data.tasks.task_config import read_task_config
from megatron.launch import slurm
from megatron.options.data import DataOptions
from megatron.options.evaluation import EvaluationOptions
from megatron.options.section import list_accepted_names
from megatron.reports.records import RESULTS_FILE, Record, read_records, record_from_row
from megatron.reports.run_records import RunFailure
from megatron.sweeps.spec import Sweep, SweepMember
from megatron.training import metrics_log
from megatron.training.check_resources import check_free_space, estimate_disk_need
from megatron.training.check_start import TrainingMachines, check_start
from megatron.training.metrics_log import has_logged_record
from megatron.utils.atomic_io import parse_json, write_text_atomically
from megatron.utils.errors import FarfieldError, UserError
from megatron.utils.progress import WorkItem

if TYPE_CHECKING:
    from megatron.evaluation.run import EvalEstimate

# Modules that need torch are imported where they are used, so that mistakes in the file are reported immediately.

EVALUATION_MARKER_FILE = "evaluated{}.json"
"""Marker file of an evaluation; the placeholder is empty, or an underscore and the name of an additional evaluation."""
MARKER_FORMAT = 6
"""Format of the marker. Format 1 had no bootstrap, and 2 covered the whole results.json. Format 3 named the options
differently, 4 had effective lengths relative to the shortest length, and in 5 digests of mean accuracies did not cover
their lengths."""


def find_finished_step(member: SweepMember) -> int:
    """Return the step of the member's newest undamaged checkpoint, or 0 if there is none.

    Raises:
        UserError: its folder contains a run with another configuration or start, or with different code of a user's own
            method, or its data have changed.
        RunError: it has checkpoints, but all are damaged.
    """
    checkpoint = find_latest_valid(member.folder)
    if checkpoint is None:
        return 0
    checkpoint_config = load_checkpoint_config(checkpoint).get_training_fingerprint()
    trainer_state = TrainerState.read(checkpoint)
    step = trainer_state.step
    stages = build_stages(member.resolved_config)
    member_config = find_writing_stage(stages, step).config.get_training_fingerprint()
    differing = [key for key, value in member_config.items() if checkpoint_config.get(key) != value]
    if differing:
        changes = ", ".join(
            f"{key} {format_value(checkpoint_config.get(key))} in the run, {format_value(member_config[key])} in the "
            "sweep"
            for key in differing[:4]
        )
        raise UserError(
            f"{member.folder}: contains a run with another configuration ({changes}); {_suggest_another_folder(member)}"
        )
    if (problem := _describe_other_start(member, trainer_state.origin)) is not None:
        raise UserError(f"{member.folder}: {problem}; {_suggest_another_folder(member)}")
    for file in trainer_state.find_changed_methods(member.config.position):
        raise UserError(
            f"{member.folder}: was trained with different code of {file}; restore that code, "
            f"{_suggest_another_folder(member)}"
        )
    for prefix in find_changed_datasets(trainer_state.data_digests or {}):
        raise UserError(
            f"{member.folder}: the tokens of {prefix} have changed since its training; restore them, "
            f"{_suggest_another_folder(member)}"
        )
    return step


def _suggest_another_folder(member: SweepMember) -> str:
    key = "sweep.output" if member.results == member.folder else "sweep.runs"
    return f"remove the folder, or choose another {key}"


def _describe_other_start(member: SweepMember, origin: str | None) -> str | None:
    """Describe how the start of a run in a member's folder differs from that of the member; None if it does not.

    Args:
        member: the member.
        origin: origin of the run (`TrainerState.origin`).
    """
    expected = None
    if (checkpoint := member.origin) is not None:
        if not checkpoint.is_dir():
            return None  # it was removed after the branch had started
        from megatron.checkpoint.compatibility import StoredCheckpoint, compute_origin

        source = StoredCheckpoint(checkpoint, load_checkpoint_config(checkpoint), TrainerState.read(checkpoint))
        stage = find_writing_stage(build_stages(member.resolved_config), member.branch_step)
        expected = compute_origin(stage.config, source)
    if origin == expected:
        return None
    in_run, in_sweep = (start or "new weights" for start in (origin, expected))
    return f"contains a run with another start ({in_run} in the run, {in_sweep} in the sweep)"


def find_member_divergence(member: SweepMember) -> RunFailure | None:
    """Return how the member's training ended if it diverged; this is its result until a retry is requested.

    Runs with a different configuration or start do not count.
    """
    divergence = metrics_log.find_divergence(member.folder)
    if divergence is None:
        return None
    try:
        run_config = read_config(member.folder / CONFIG_FILE)
    except FarfieldError:
        return None
    run_keys, options = run_config.get_training_fingerprint(), run_config.checkpoint
    if any(run_keys.get(key) != value for key, value in member.resolved_config.get_training_fingerprint().items()):
        return None
    start = member.config.checkpoint
    # one of the paths may be relative
    loaded, start_folder = (None if path is None else Path(path).absolute() for path in (options.load, start.load))
    is_resumed = loaded is not None and loaded.is_relative_to(member.folder.absolute())
    if not is_resumed and (loaded, options.finetune) != (start_folder, start.finetune):
        return None
    step, reason = divergence
    return build_failure(member, reason, step)


def build_failure(member: SweepMember, reason: str, step: int | None = None) -> RunFailure:
    """Return the report entry of a member without a result."""
    config, run = member.trained_config, str(member.folder)
    if config.data.task is None:
        return RunFailure(member.variant, member.seed, reason, step, config.model.seq_length, run=run)
    task = read_task_config(config.data)
    return RunFailure(member.variant, member.seed, reason, step, task.max_length, task.dataset, run)


def lacks_test_record(member: SweepMember) -> bool:
    """Return True if a completed training was killed between its last checkpoint and the end of its test."""
    training, data = member.resolved_config.training, member.config.data
    tests = (
        data.task is not None
        or bool(data.test_data_paths)
        or (data.data_path is not None and compute_sequence_range(data.split, "test", 10**9) is not None)
    )
    if not (tests and training.eval_interval and training.eval_iters != 0):
        return False
    return not has_logged_record(member.folder, "test", training.train_iters)


def read_evaluated_records(member: SweepMember, evaluation: str | None = None) -> list[Record] | None:
    """Return the records of a member's evaluation, or None if the same evaluation was not run."""
    results, marker = member.results / RESULTS_FILE, _read_marker(_get_marker_path(member, evaluation))
    if marker.get("how") != _describe_evaluation(member, evaluation) or not results.is_file():
        return None
    rows = marker.get("records") or []
    if not all(isinstance(row, dict) for row in rows):  # earlier versions stored hashes of the records in the results
        found = {_hash_record(record): record.to_row() for record in read_records(results)}
        rows = [found[digest] for digest in rows] if found.keys() >= set(rows) else []
    try:
        return [record_from_row(row) for row in rows] or None
    except UserError:
        return None  # of a later version


def write_evaluation_marker(
    member: SweepMember, member_records: Sequence[Record], evaluation: str | None = None
) -> None:
    """Store the records of the member's evaluation, and how they were made.

    Another evaluation of the same targets, such as one at other lengths, replaces them in the member's results.
    """
    how, rows = _describe_evaluation(member, evaluation), [record.to_row() for record in member_records]
    marker = {"how": how, "records": rows}
    write_text_atomically(_get_marker_path(member, evaluation), json.dumps(marker, ensure_ascii=False) + "\n")


def _get_marker_path(member: SweepMember, evaluation: str | None) -> Path:
    return member.results / EVALUATION_MARKER_FILE.format("" if evaluation is None else f"_{evaluation}")


def _describe_evaluation(member: SweepMember, evaluation: str | None) -> dict[str, Any]:
    """Return all settings of the sweep that affect an evaluation's results."""
    checkpoint = checkpoints.resolve_checkpoint_path(member.folder)
    weights, options = (checkpoint / checkpoints.WEIGHTS).stat(), member.evaluations[evaluation]
    settings = {
        "format": MARKER_FORMAT,
        "evaluate": options.model_dump(exclude={"batch_tokens", "variants"}, by_alias=True),
        "method": member.get_method(evaluation),
        "weights": [checkpoint.name, weights.st_size, weights.st_mtime_ns],
    }
    if options.named_paths:  # a file may have other content than before
        files = [file for path in options.named_paths.values() for file in list_text_files(path) if file.exists()]
        settings["files"] = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return settings


def list_text_files(path: str) -> list[Path]:
    """Return the files behind a path of a text: the file itself, those in a folder, or those of a dataset's prefix."""
    named = Path(path)
    if named.is_dir():
        return sorted(file for file in named.iterdir() if file.is_file())
    return [named] if named.is_file() else [named.with_name(named.name + suffix) for suffix in (".bin", ".idx")]


def _read_marker(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _hash_record(record: Record) -> str:
    return hashlib.sha256(json.dumps(record.to_row()).encode()).hexdigest()


@dataclass(frozen=True)
class MemberWork:
    """Remaining work of one member."""

    training: WorkItem
    flops_per_step: float
    """Mean FLOPs of all its training steps."""
    evaluations: dict[str | None, WorkItem]
    """Evaluations by name; None is the key of the main one."""

    @property
    def items(self) -> list[WorkItem]:
        return [self.training, *self.evaluations.values()]

    @property
    def has_work(self) -> bool:
        return any(item.work for item in self.items)


def estimate_work(
    sweep: Sweep, finished_steps: dict[SweepMember, int], log: Callable[[str], None]
) -> dict[SweepMember, MemberWork]:
    """Estimate the remaining work of each member.

    Members that cannot be evaluated are rejected, and limits on the evaluated lengths are logged.

    Args:
        sweep: the sweep.
        finished_steps: completed training steps of each member.
        log: receives one line per call.

    Raises:
        UserError: a member cannot be trained on this machine, or not evaluated as configured.
    """
    works: dict[SweepMember, MemberWork] = {}
    # Members of a variant differ only in their seed, which changes no shape.
    scoring: dict[tuple[str, str | None], dict[str | None, EvalEstimate]] = {}
    for member in sweep.members:
        key = member.variant, member.benchmark
        if key not in scoring:
            scoring[key] = {
                name: _build_scoring(member, options, partial(_locate_option, sweep, member.get_evaluation_path(name)))
                for name, options in member.evaluations.items()
            }
            for note in dict.fromkeys(estimate.note for estimate in scoring[key].values()):
                if note is not None:
                    log(f"{', '.join(filter(None, key))}: {note}")
        works[member] = _estimate_member(member, finished_steps[member], scoring[key])
    return works


def check_sweep_disk(sweep: Sweep, members: Sequence[SweepMember]) -> None:
    """Check that the checkpoints of all remaining runs fit on the disk together.

    Args:
        sweep: the sweep.
        members: members to train to their end, including partially trained ones.

    Raises:
        UserError: too little disk space, with the required and available bytes; or an error from resolving a member.
    """
    kept, needed, runs = 0, 0, 0
    for member in members:
        config, newest = member.machine_config, checkpoints.find_latest_checkpoint(member.folder)
        start = max(member.first_step, 0 if newest is None else checkpoints.parse_step(newest) or 0)
        if not config.launch.check_resources or 0 < config.training.train_iters <= start:
            continue
        need = estimate_disk_need(config, find_vocab_size(config.data), start)  # the corpus may be new
        needed, kept, runs = max(needed, kept + need.at_once), kept + need.at_end, runs + 1
    text = f"the {runs} remaining runs need {{}} more" if runs > 1 else "the remaining run needs {} more"
    check_free_space("sweep.output", sweep.output_folder, needed, text)


def check_member_starts(members: Iterable[SweepMember], *, in_queue: bool, may_download: bool = True) -> None:
    """Run the start checks of training for one seed of each variant.

    Args:
        members: members about to start; members that already started have passed these checks.
        in_queue: True if the runs wait in a queue; all tokens are then checked now instead of by each run.
        may_download: False to use only data on this machine, whatever `harness.download` is.

    Raises:
        FarfieldError: the error that training would raise, with the variant's name.
    """
    checked: set[tuple[str, str | None]] = set()
    read: list[DataOptions] = []
    for member in members:
        if (key := (member.variant, member.benchmark)) in checked:
            continue
        checked.add(key)
        data, launch = member.config.data, member.config.launch
        machines = slurm.check_job_environment(launch) if in_queue else TrainingMachines()
        try:
            check_start(
                member.resolved_run,
                machines,
                reads_tokens=in_queue and data not in read,
                may_download=may_download,
            )
        except FarfieldError as error:
            raise type(error)(f"sweep.variants.{member.variant}: {error}") from None
        read.append(data)


OPTION_NAME = re.compile(r"(?:--)?([a-z][\w-]*)(?=[ :])")
"""Pattern for the option at the start of an error of an evaluation."""


def _locate_option(sweep: Sweep, path: KeyPath, problem: str) -> str:
    """Return an error of an evaluation with the key of the sweep file at fault, and where it was set."""
    option = OPTION_NAME.match(problem)
    name = "" if option is None else option[1].replace("-", "_")
    if option is None or name not in list_accepted_names(EvaluationOptions):
        return f"{sweep.locate(path)}: {'.'.join(path)}: {problem}"
    key = sweep.find_written_key((*path, name))
    return f"{sweep.locate(key)}: {'.'.join(key)}{problem[option.end() :]}"


def _build_scoring(
    member: SweepMember, options: EvaluationOptions, locate_problem: Callable[[str], str]
) -> EvalEstimate:
    from megatron.evaluation.run import estimate_untrained
    from megatron.training.start_plan import check_stage_methods

    try:
        check_stage_methods((member.config, *list_stage_configs(member.config)))
    except UserError as error:
        raise UserError(f"sweep.variants.{member.variant}: {error}") from None
    try:
        return estimate_untrained(member.name, member.trained_config, options)
    except UserError as error:
        raise UserError(locate_problem(str(error))) from None


def _estimate_member(member: SweepMember, finished_steps: int, scoring: dict[str | None, EvalEstimate]) -> MemberWork:
    config, model = member.resolved_config, scoring[None].model
    training = config.training
    flops, left_flops = 0.0, 0.0
    for stage in build_stages(config):
        stage_config = stage.config
        lengths = list_sequence_lengths(stage_config.data, stage_config.model.seq_length)
        of_step = sum(model.count_flops_per_token(length) * length for length in lengths) / len(lengths)
        of_step *= stage_config.training.train_batch_size or 0
        first_step = max(stage.first_step, member.first_step)
        flops += max(0, stage.end_step - first_step) * of_step
        left_flops += max(0, stage.end_step - max(first_step, finished_steps)) * of_step
    left = max(0, training.train_iters - finished_steps)
    is_evaluated = {name: left == 0 and read_evaluated_records(member, name) is not None for name in scoring}
    kind = "" if member.benchmark is None else f" {member.benchmark}"  # small models reach fewer FLOP/s
    return MemberWork(
        training=WorkItem(f"training {member.name}", f"train{kind}", left_flops),
        flops_per_step=flops / max(1, training.train_iters - member.first_step),
        evaluations={
            name: WorkItem(
                f"evaluating {member.name}" + ("" if name is None else f" ({name})"),
                f"evaluate{kind}",
                0.0 if is_evaluated[name] else estimate.flops,
            )
            for name, estimate in scoring.items()
        },
    )
