"""`./deepy.py sweep FILE`: prepare a corpus, train every variant with every seed, evaluate all alike, report.

    OUTPUT/results.json, .csv, .md, .png, report.html              rewritten after runs that were evaluated
    OUTPUT/log.txt                                                 what libraries had to say
    OUTPUT/VARIANT/seed_1234.yml                                   the run's whole configuration: `train` takes it too
    OUTPUT/VARIANT/seed_1234.txt                                   what its training printed
    OUTPUT/VARIANT/seed_1234/                                      the run: checkpoints, metrics, its own results
    OUTPUT/VARIANT/BENCHMARK/seed_1234…                            the same of a benchmark

A sweep that is stopped, by a person or an error, is carried on by the same command: finished runs are taken as they
are, an interrupted one resumes at its last checkpoint. A run folder whose configuration is not the one asked for is
never overwritten and never reused; the sweep refuses to start.

A member that fails does not keep the others from running. One whose training diverged has that for a result: it stands
in tables and on the page with its reason and step, and is tried again only where that is asked for (`--retry-failed`).
One that failed otherwise, as by a full disk, is tried again by the next start.

With `jobs` several members run at once on this machine (`worker_pool.py`). Results and page are rewritten as often as
takes `REPORT_SHARE` of the time, and in the end; what a member measured lies in its own folder besides.

With `launcher: slurm` what is left to do becomes a job array, a task for each member; once its tasks have ended, the
same command finds nothing left to do and writes the report.

How long it takes is estimated from the FLOPs of every training and evaluation, which are known before the first, and
the speed of those that have run or are running.
"""

import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from megatron.checkpoint.layout import list_checkpoints
from megatron.checkpoint.run_folder import LOCK, SWEEP_LOCK, RunLock, is_saved_config
from megatron.distributed.hardware import count_cores
from megatron.launch import slurm
from megatron.launch.console import log_traceback, run_console
from megatron.launch.dispatch import uses_slurm
from megatron.options.sweep import SweepCorpusOptions
from megatron.reports.comparison_table import build_comparison_tables
from megatron.reports.failures import RunFailure
from megatron.reports.leaderboard import Ablation, Leaderboard, LeaderboardReport
from megatron.reports.records import RESULTS_FILE, Record
from megatron.reports.results_output import check_no_foreign_results, print_comparison_tables, print_leaderboard
from megatron.sweeps.member_run import run_member
from megatron.sweeps.remaining_work import (
    MemberWork,
    build_failure,
    check_member_starts,
    check_sweep_disk,
    estimate_work,
    find_finished_step,
    find_member_divergence,
)
from megatron.sweeps.spec import Sweep, SweepMember, find_ablations, read_sweep
from megatron.sweeps.worker_pool import run_members
from megatron.utils.atomic_io import make_folder, refuse_foreign_files
from megatron.utils.errors import FarfieldError, RunError, UserError
from megatron.utils.formatting import format_duration, format_flops
from megatron.utils.progress import ProgressMeter, WaitAnnouncer, WorkItem
from megatron.utils.signals import StoppedBySignal, acknowledge_signals

if TYPE_CHECKING:
    from megatron.reports.paper_experiment import Experiment

# What needs torch or matplotlib is imported where it is used: a mistake in the file is reported at once.

STOPPING_MESSAGE = "stopping; a training under way saves after its step first (again to end at once)"
REPORT_FILE = "report.html"
CARRY_ON_HINT = "the same command carries on from here"
LOCKED_MESSAGE = "a sweep is running there; wait for its end, or choose another folder"
RETRY_DIVERGED_HINT = "--retry-failed trains again what diverged"
RETRY_FAILED_HINT = "the same command tries again what failed"
REPORT_SHARE = 0.05
"""Of the time of a sweep that rewriting its report may take."""
MAX_NAMED_FAILURES = 5
"""Failures that a line names."""
Log = Callable[[str], None]


def run_sweep(
    files: Sequence[str | Path],
    overrides: Sequence[str] = (),
    console: Console | None = None,
    search: Sequence[str | Path] | None = None,
    *,
    member: int | None = None,
    dry: bool = False,
    retry_failed: bool = False,
) -> list[Record]:
    """Run a sweep to its end, from wherever an earlier attempt left it.

    Args:
        files, overrides, search: as for `megatron.sweeps.spec.read_sweep`.
        console: where progress and table go. If None, the terminal; what libraries print then goes to OUTPUT/log.txt.
        member: train and evaluate only the one of this index, and write no report.
        dry: print the batch script that would be submitted, and do nothing.
        retry_failed: train members again whose training diverged.

    Returns:
        The records of all runs.

    Raises:
        UserError: the files, a run folder that holds another run, or what training or evaluation refuse.
        RunError: trainings or evaluations failed; the others ran, and what is finished is used next time.
    """
    sweep = read_sweep(files, overrides, search)
    if member is not None and member >= len(sweep.members):
        raise UserError(f"--member is {member}, but the sweep has {len(sweep.members)} members; the first is 0")
    array = _build_array_job(sweep, files, [*overrides, *(["--retry-failed"] if retry_failed else [])], search)
    if dry:
        if array is None:
            raise UserError("--dry-run shows the batch script of a sweep: it needs launcher=slurm")
        if sweep.options.corpus is None:  # else the data may be prepared only with the submission
            finished_steps = {member: find_finished_step(member) for member in sweep.members}
            check_member_starts(_list_beginning(sweep.members, finished_steps), in_queue=True)
        print(slurm.render_batch_script(array), end="")
        return []
    if member is None:  # a task of a job array: its own training looks
        diverged = _find_diverged(sweep, retry_failed)
        check_sweep_disk(sweep, [m for m in sweep.members if m not in diverged])
    make_folder("sweep.output", sweep.output_folder)
    _refuse_files_of_others(sweep)
    lock = None
    if member is None:
        lock = RunLock(sweep.output_folder, name=SWEEP_LOCK, key="sweep.output", busy=LOCKED_MESSAGE, patience=1.0)
    with _release_on_exit(lock), _open_console(console, sweep.output_folder / "log.txt") as progress_console:
        log = _build_line_printer(progress_console)
        for note in sweep.notes:
            progress_console.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)
        try:
            with acknowledge_signals(log, STOPPING_MESSAGE):
                return _run_members(sweep, progress_console, log, member, array, retry_failed)
        except (KeyboardInterrupt, StoppedBySignal):
            log(f"stopped; {CARRY_ON_HINT}")
            raise


def _find_diverged(sweep: Sweep, retry_failed: bool) -> dict[SweepMember, RunFailure]:
    """The members whose training diverged and is not to be tried again, and how."""
    if retry_failed:
        return {}
    return {m: failure for m in sweep.members if (failure := find_member_divergence(m)) is not None}


def _build_array_job(
    sweep: Sweep, files: Sequence[str | Path], overrides: Sequence[str], search: Sequence[str | Path] | None
) -> slurm.SlurmJob | None:
    """The job array of all members; None if the sweep is to run in this process.

    Args:
        sweep: as it was read from `files`, `overrides` and `search`, which each task reads again.

    Raises:
        UserError: members that want different jobs, or more than a node each.
    """
    launches = [member.config.launch for member in sweep.members]
    if not uses_slurm(launches[0]):
        return None
    slurm.check_job_environment(launches[0])
    if any(launch != launches[0] for launch in launches):
        raise UserError("launcher slurm: all variants of a sweep need the same processes, devices and slurm keys")
    if launches[0].nodes not in (None, 1):
        raise UserError(
            f"nodes is {launches[0].nodes}, but each run of a sweep has one node; train large ones by train"
        )
    folders = [word for folder in search or () for word in ("--conf-dir", str(folder))]
    return slurm.SlurmJob(
        name=sweep.output_folder.name,
        folder=sweep.output_folder,
        command=("sweep", *folders, *map(str, files), *overrides, "--member=$SLURM_ARRAY_TASK_ID"),
        launch=launches[0],
        tasks=1,  # which starts the processes of its training
        nodes=1,
        array=slurm.format_array_indices(range(len(sweep.members))),
    )


def _refuse_files_of_others(sweep: Sweep) -> None:
    """Refuse an output that holds files by the names of a sweep's which no sweep wrote. Raises UserError."""
    from megatron.reports.html_page import is_generated_page

    key, output = "sweep.output", sweep.output_folder
    check_no_foreign_results(key, output)
    refuse_foreign_files(key, [output / REPORT_FILE], is_generated_page)
    for member in sweep.members:
        is_started = (member.folder / LOCK).exists() or bool(list_checkpoints(member.folder))

        def is_ours(path: Path, member: SweepMember = member, is_started: bool = is_started) -> bool:
            return is_started or is_saved_config(member.get_path_beside(".yml"))

        refuse_foreign_files(key, [member.get_path_beside(".yml"), member.get_path_beside(".txt")], is_ours)
    has_config = any(member.get_path_beside(".yml").exists() for member in sweep.members)
    refuse_foreign_files(key, [output / RESULTS_FILE], lambda _: has_config or (output / REPORT_FILE).exists())


def _run_members(
    sweep: Sweep, console: Console, log: Log, only_member: int | None, array: slurm.SlurmJob | None, retry_failed: bool
) -> list[Record]:
    """Do what is left: of one member, as a job array, or all of it in this process."""
    start_time = time.monotonic()
    finished_steps = {member: find_finished_step(member) for member in sweep.members}  # refuses foreign folders first
    diverged = _find_diverged(sweep, retry_failed)
    if sweep.options.corpus is not None:
        _prepare_corpus(sweep.options.corpus, console, log)
    works = estimate_work(sweep, finished_steps, log)
    indices = [i for i, (member, work) in enumerate(works.items()) if work.has_work and member not in diverged]
    if array is not None and indices:
        waiting = [i for i in indices if (origin := sweep.members[i].origin) is not None and not origin.is_dir()]
        indices = [i for i in indices if i not in waiting]
        if waiting:
            log(
                f"{len(waiting)} runs branch from checkpoints that are not there yet; the same command submits them "
                "once they are"
            )
        if not indices:
            return []
    if only_member is None:
        begins = _list_beginning([sweep.members[i] for i in indices], finished_steps)
        with WaitAnnouncer(log, "checking the data and what the runs start from"):
            check_member_starts(begins, in_queue=array is not None)
    if array is not None and indices:
        job = replace(array, array=slurm.format_array_indices(indices))
        for line in slurm.describe_submission(job, slurm.submit_job(job)):
            log(line)
        log(f"{len(indices)} of {len(works)} runs submitted; once they have ended, the same command writes the report")
        return []
    if only_member is not None:
        member = sweep.members[only_member]
        if member in diverged:
            raise RunError(f"{member.name}: {diverged[member]}; {RETRY_DIVERGED_HINT}")
        work = works[member]
        with ProgressMeter(console, work.items) as meter:
            return run_member(member, work, meter)
    records, failures = _run_all_members(sweep, console, works, diverged)
    if records:
        _print_results(sweep, records, failures, console)
        log(
            f"\nopen {sweep.output_folder / REPORT_FILE} in a browser; results.json, .csv, .md and .png lie beside it "
            f"({format_duration(time.monotonic() - start_time)})"
        )
        if (hint := _suggest_comparison(sweep, records, failures)) is not None:
            log(hint)
    if failures:
        num_diverged = sum(find_member_divergence(member) is not None for member in works)
        raise RunError(_describe_failures(failures, num_diverged, len(works)))
    return records


def _list_beginning(members: Sequence[SweepMember], finished_steps: Mapping[SweepMember, int]) -> list[SweepMember]:
    """Return the members that have not begun and could begin now."""
    begins = (member for member in members if finished_steps[member] <= member.first_step)
    return [member for member in begins if member.origin is None or member.origin.is_dir()]


def _run_all_members(
    sweep: Sweep, console: Console, works: dict[SweepMember, MemberWork], diverged: dict[SweepMember, RunFailure]
) -> tuple[list[Record], list[RunFailure]]:
    """Run all members, and rewrite the report now and then. One that fails keeps no other from running."""
    results = _SweepResults(sweep, {}, dict(diverged))
    pending = {member: work for member, work in works.items() if member not in diverged}
    jobs = [job for work in pending.values() for job in work.items]
    num_workers = _count_workers(sweep, sum(work.has_work for work in pending.values()))
    with ProgressMeter(
        console, jobs, forecast=lambda left: meter.log(_describe_time_left(left)), at_once=num_workers
    ) as meter:
        meter.log(_describe_plan(pending, len(works), num_workers))
        for member, failure in diverged.items():
            meter.log(f"{member.name}: {failure}; {RETRY_DIVERGED_HINT}")
        for member, outcome in run_members(pending, meter, num_workers):
            if isinstance(outcome, FarfieldError):
                results.failures[member] = find_member_divergence(member) or build_failure(member, str(outcome))
                for job in works[member].items:
                    meter.skip(job)
                meter.log(f"{member.name}: {results.failures[member]}")
            else:
                results.records[member] = outcome
            if works[member].has_work:
                results.write_if_due()
                done = len(results.records) + len(results.failures)
                if done < len(works) and (left := meter.estimate_seconds_left()) is not None:
                    meter.log(f"{done} of {len(works)} runs done, about {format_duration(left)} left in all")
    with WaitAnnouncer(meter.log, "writing the report"):
        results.write()
    return results.list_records(), results.list_failures()


def _count_workers(sweep: Sweep, num_pending: int) -> int:
    """Members that run at once."""
    jobs = sweep.options.jobs
    return max(1, min(num_pending, count_cores() if jobs == "auto" else jobs))


@dataclass
class _SweepResults:
    """What is measured so far, and when it was last written."""

    sweep: Sweep
    records: dict[SweepMember, list[Record]]
    failures: dict[SweepMember, RunFailure]
    next_write: float = 0.0

    def list_records(self) -> list[Record]:
        """In the order of the sweep's members."""
        return sort_baselines_last([record for member in self.sweep.members for record in self.records.get(member, ())])

    def list_failures(self) -> list[RunFailure]:
        return [self.failures[member] for member in self.sweep.members if member in self.failures]

    def write_if_due(self) -> None:
        """Rewrite results and report, unless that was done so lately that it would take much of the time: of many
        methods it takes half a minute."""
        start_time = time.monotonic()
        if start_time >= self.next_write and self.records:
            self.write()
            self.next_write = time.monotonic() + (time.monotonic() - start_time) / REPORT_SHARE

    def write(self) -> None:
        if self.records:
            _write_results(self.sweep, self.list_records(), self.list_failures(), list(self.records))


def _print_results(sweep: Sweep, records: Sequence[Record], failures: Sequence[RunFailure], console: Console) -> None:
    """The tables of a sweep, on the console."""
    options, experiment = sweep.options, _build_experiment(sweep)
    if (leaderboard := experiment.get_leaderboard()) is not None:
        print_leaderboard(console, LeaderboardReport(leaderboard, build_comparison_tables(records, failures)))
        return
    print_comparison_tables(console, records, failures, own_seeds=options.has_own_seeds)
    for grid in (
        experiment.build_tables(records, failures=failures)
        if options.published or options.against or options.differences
        else ()
    ):
        console.print(f"\n{grid.to_text()}", end="", markup=False, highlight=False, soft_wrap=True)


def _suggest_comparison(sweep: Sweep, records: Sequence[Record], failures: Sequence[RunFailure]) -> str | None:
    """Return the command that compares the others with the first method, or None if the page does that or there is
    nothing to compare."""
    if failures or sweep.options.against is not None or sweep.options.leaderboard is not None:
        return None
    methods = list(dict.fromkeys(record.method for record in records if not record.is_trivial_baseline))
    if len(methods) < 2:
        return None
    command = shlex.join(["./deepy.py", "report", str(sweep.output_folder), "--against", methods[0]])
    has_seeds = len({record.seed for record in records if record.method == methods[0]}) > 1
    says = f"says which differences from {methods[0]} are significant" if has_seeds else f"compares with {methods[0]}"
    return f"next: {command} {says}"


def _describe_failures(failures: Sequence[RunFailure], num_diverged: int, num_members: int) -> str:
    """One line for all that failed: how many, and each with its reason."""
    named = failures[:MAX_NAMED_FAILURES]
    reasons = "; ".join(f"{failure.method}, seed {failure.seed}: {failure}" for failure in named)
    more = f"; and {len(failures) - len(named)} more" if len(failures) > len(named) else ""
    hints = [RETRY_FAILED_HINT] if num_diverged < len(failures) else []
    hints += [RETRY_DIVERGED_HINT] if num_diverged else []
    return f"{len(failures)} of {num_members} runs failed: {reasons}{more}; {', and '.join(hints)}"


def _prepare_corpus(corpus: SweepCorpusOptions, console: Console, log: Log) -> None:
    from megatron.data.corpus.prepare import prepare_corpus

    job = WorkItem(f"preparing the text of the corpus {corpus.folder}", "prepare", 1.0)
    with ProgressMeter(console, [job]) as meter:
        info = prepare_corpus(corpus, corpus.folder, progress=meter.report_stage, log=meter.log)
    for note in info.notes:
        log(note)
    sizes = ", ".join(f"{split} {size.tokens:,} tokens" for split, size in info.splits.items())
    log(f"corpus {info.folder} {'is there' if info.reused else 'prepared'}: {sizes}")


def _describe_plan(works: dict[SweepMember, MemberWork], num_members: int, num_workers: int) -> str:
    """How much there is to do, before any speed is known."""
    runs = sum(work.has_work for work in works.values())
    if not runs:
        return f"nothing to do: {len(works)} of {num_members} runs are done"
    training = sum(work.training.work for work in works.values())
    evaluation = sum(job.work for work in works.values() for job in work.evaluations.values())
    at_once = "" if num_workers == 1 else f", {num_workers} at once"
    return (
        f"{runs} of {num_members} runs to do{at_once}: {format_flops(training)} of training and "
        f"{format_flops(evaluation)} of evaluation; a time estimate follows after the first steps"
    )


def _describe_time_left(left: float) -> str:
    return f"about {format_duration(left)} left in all, at the speed of the first steps"


def sort_baselines_last(records: Sequence[Record]) -> list[Record]:
    """Records of runs, then those of no run, each once: every run of a task brings the same baselines with it."""
    baselines = [record for record in records if record.run is None]
    runs = [record for record in records if record.run is not None]
    return [*runs, *(record for index, record in enumerate(baselines) if record not in baselines[:index])]


def _write_results(
    sweep: Sweep, records: Sequence[Record], failures: Sequence[RunFailure], done: Sequence[SweepMember]
) -> None:
    """Rewrite the results and the report of what is measured so far, of the members that are done."""
    from megatron.monitoring.training_curves import TrainingMonitor
    from megatron.reports import paper_experiment, report
    from megatron.reports.citation import format_command
    from megatron.reports.results_output import write_results

    output, experiment = sweep.output_folder, _build_experiment(sweep)
    tables = experiment.build_tables(records, failures=failures)
    section = report.ReportSection(
        sweep.options.title, records, tables, failures, experiment.own_seeds, experiment.get_leaderboard()
    )
    board = report.build_leaderboard_report(section)
    drawn = None if board is None else report.select_shown_records(section, board)
    write_results(output, records, failures, own_seeds=sweep.options.has_own_seeds, drawn=drawn)
    if experiment.is_worth_keeping:  # the results of other sweeps may be put together with others
        paper_experiment.write_experiment(output / RESULTS_FILE, experiment)
    texts = dict(sweep.texts)
    texts |= {str(member.get_path_beside(".yml")): member.text for member in done}
    missing = len(sweep.members) - len(done) - len(failures)
    runs = [member.folder for member in sweep.members if member.folder.is_dir()]
    report.write_report(
        output / REPORT_FILE,
        [section],
        num_pending_runs=missing,
        configurations=texts,
        command=format_command(),
        training=TrainingMonitor().describe(runs),
    )


def _build_experiment(sweep: Sweep) -> "Experiment":
    from megatron.reports.paper_experiment import Experiment, PublishedTable

    options = sweep.options
    published = tuple(
        PublishedTable(table.source, table.train_length, table.metric, tuple(table.lengths), dict(table.rows))
        for table in options.published
    )
    leaderboard = None
    if options.leaderboard is not None:
        ablations = tuple(Ablation(*ablation) for ablation in find_ablations(sweep))
        leaderboard = Leaderboard(options.against or sweep.members[0].variant, ablations, options.leaderboard.num_shown)
    return Experiment(
        options.title, options.against, published, tuple(options.differences), options.has_own_seeds, leaderboard
    )


@contextmanager
def _release_on_exit(lock: RunLock | None) -> Iterator[None]:
    """Let others have the sweep's folder in the end."""
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _build_line_printer(console: Console) -> Log:
    return lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _open_console(console: Console | None, log_file: Path) -> Iterator[Console]:
    """The console that was passed, or the terminal; what libraries print then goes to the log file."""
    if console is not None:
        yield console
        return
    with run_console(log_file) as terminal, log_traceback(log_file):
        yield terminal
