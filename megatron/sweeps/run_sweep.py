"""`./deepy.py sweep FILE`: prepare a corpus, train every variant with every seed, evaluate all, and write a report.

    OUTPUT/results.json, .csv, .md, .png, report.html              rewritten after runs were evaluated
    OUTPUT/log.txt                                                 output of libraries
    OUTPUT/VARIANT/seed_1234.yml                                   resolved configuration of the run, usable by `train`
    OUTPUT/VARIANT/seed_1234.txt                                   output of its training
    OUTPUT/VARIANT/seed_1234/                                      the run: checkpoints, metrics, its own results
    OUTPUT/VARIANT/BENCHMARK/seed_1234…                            the same for a benchmark

The same command resumes a sweep that was stopped by a user or an error: completed runs are kept, and an interrupted run
resumes from its last checkpoint. A run folder with a different configuration is never overwritten or reused; the sweep
raises an error instead.

A failed member does not stop the others. Divergence is a result: the report shows its reason and step, and the member
is retrained only with `--retry-failed`. After other failures, such as a full disk, the member is retried the next time
the sweep starts.

With `jobs`, several members run in parallel on this machine (`worker_pool.py`). Results and report are rewritten as
often as `REPORT_FRACTION` of the time allows, and at the end. Each member's records are also in its own folder.

With `launcher: slurm`, the remaining work becomes a job array with one task per member. Once its tasks have ended, the
same command writes the report.

The duration is estimated from the FLOPs of all training and evaluation jobs, which are known in advance, and from the
measured speed of completed and running jobs.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from megatron.checkpoint.run_folder import SWEEP_LOCK, RunLock
from megatron.distributed.hardware import count_cores
from megatron.launch import slurm
from megatron.launch.dispatch import uses_slurm
from megatron.options.sweep import SweepCorpusOptions
from megatron.reports.records import Record
from megatron.reports.run_records import RunFailure, RunOutcome
from megatron.sweeps.check_sweep import (
    Log,
    check_corpus_folder,
    check_no_foreign_sweep_files,
    check_sweep,
    find_diverged,
    list_startable,
    load_saved_members,
)
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
from megatron.sweeps.results import (
    REPORT_FILE,
    SweepResults,
    check_records_folder,
    list_members_of_other_parts,
    print_results,
    save_experiment,
    save_outcome,
    suggest_comparison,
)
from megatron.sweeps.spec import Sweep, SweepMember, read_sweep
from megatron.sweeps.worker_pool import run_members
from megatron.utils.atomic_io import make_folder
from megatron.utils.console import log_traceback, run_console
from megatron.utils.errors import FarfieldError, RunError, UserError
from megatron.utils.formatting import format_duration, format_quantity
from megatron.utils.progress import ProgressMeter, WaitAnnouncer, WorkItem
from megatron.utils.signals import StoppedBySignal, acknowledge_signals

# Modules that need torch or matplotlib are imported where used, so that mistakes in the file are reported at once.

STOPPING_MESSAGE = "stopping; running trainings save first; repeat to stop immediately"
RESUME_HINT = "run the same command to resume"
LOCKED_MESSAGE = "a sweep is running in this folder; wait until it ends, or choose another folder"
RETRY_DIVERGED_HINT = "use --retry-failed to retrain diverged runs"
RETRY_FAILED_HINT = "run the same command to retry failed runs"
MAX_NAMED_FAILURES = 5
"""Maximum number of failures listed in a message."""


def run_sweep(
    files: Sequence[str | Path],
    overrides: Sequence[str] = (),
    console: Console | None = None,
    search: Sequence[str | Path] | None = None,
    *,
    member: int | None = None,
    dry_run: bool = False,
    retry_failed: bool = False,
) -> list[Record]:
    """Run a sweep to its end, resuming earlier attempts.

    Args:
        files, overrides, search: as for `megatron.sweeps.spec.read_sweep`.
        console: console for progress and tables. If None, the terminal; library output then goes to OUTPUT/log.txt.
        member: train and evaluate only the member with this index, without a report.
        dry_run: print the runs, or with `launcher: slurm` the batch script, and start nothing.
        retry_failed: retrain members whose training diverged.

    Returns:
        Records of all runs.

    Raises:
        UserError: the files, a run folder with another run, or settings that training or evaluation reject.
        RunError: training or evaluation failed; other members ran, and completed work is reused next time.
    """
    sweep = read_sweep(files, overrides, search)
    if member is not None and member >= len(sweep.members):
        raise UserError(
            f"--run-index is {member}, but the sweep has {format_quantity(len(sweep.members), 'run')}, counted from 0"
        )
    array = _build_array_job(sweep, files, [*overrides, *(["--retry-failed"] if retry_failed else [])], search)
    if dry_run:
        if array is None:
            check_sweep(sweep, console, retry_failed=retry_failed)
            return []
        if sweep.options.corpus is None:  # otherwise the data may be prepared only on submission
            finished_steps = {member: find_finished_step(member) for member in sweep.members}
            begins = list_startable(sweep.members, finished_steps)
            check_member_starts(begins, in_queue=True, may_download=False)
        print(slurm.render_batch_script(array), end="")
        return []
    if member is None:  # in a task of a job array, the training checks this itself
        diverged = find_diverged(sweep, retry_failed)
        if sweep.options.records is None:  # otherwise saved records decide, once their texts exist
            check_sweep_disk(sweep, [m for m in sweep.members if m not in diverged])
    if sweep.options.corpus is not None:
        check_corpus_folder(sweep.options.corpus)
    make_folder("sweep.output", sweep.output_folder)
    check_records_folder(sweep)
    check_no_foreign_sweep_files(sweep)
    lock = None
    if member is None:
        lock = RunLock(
            sweep.output_folder, name=SWEEP_LOCK, key="sweep.output", busy_message=LOCKED_MESSAGE, lock_timeout=1.0
        )
    with _release_on_exit(lock), _open_console(console, sweep.output_folder / "log.txt") as progress_console:
        log = _build_line_printer(progress_console)
        for note in sweep.notes:
            progress_console.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)
        try:
            with acknowledge_signals(log, STOPPING_MESSAGE):
                if member is not None:
                    return _run_one_member(sweep, member, progress_console, log, retry_failed)
                return _run_members(sweep, progress_console, log, array, retry_failed)
        except (KeyboardInterrupt, StoppedBySignal) as stop:
            stop.add_note(RESUME_HINT)
            raise


def _build_array_job(
    sweep: Sweep, files: Sequence[str | Path], overrides: Sequence[str], search: Sequence[str | Path] | None
) -> slurm.SlurmJob | None:
    """Return the job array of all members, or None if the sweep runs in this process.

    Args:
        sweep: sweep read from `files`, `overrides` and `search`, which each task reads again.

    Raises:
        UserError: members need different jobs, or more than one node each.
    """
    launches = [member.config.launch for member in sweep.members]
    if not uses_slurm(launches[0]):
        return None
    slurm.check_job_environment(launches[0])
    if any(launch != launches[0] for launch in launches):
        raise UserError("launcher slurm: all variants of a sweep must have the same processes, devices and slurm keys")
    if launches[0].nodes not in (None, 1):
        raise UserError(
            f"nodes is {launches[0].nodes}, but each run of a sweep uses one node; use train for larger runs"
        )
    folders = [word for folder in search or () for word in ("--conf-dir", str(folder))]
    return slurm.SlurmJob(
        name=sweep.output_folder.name,
        folder=sweep.output_folder,
        command=("sweep", *folders, *map(str, files), *overrides, "--run-index=$SLURM_ARRAY_TASK_ID"),
        launch=launches[0],
        tasks=1,  # this task starts the processes of its training
        nodes=1,
        array=slurm.format_array_indices(range(len(sweep.members))),
    )


def _run_one_member(sweep: Sweep, index: int, console: Console, log: Log, retry_failed: bool) -> list[Record]:
    """Run the member with an index, as a task of a job array. The others may be running, or have failed."""
    sweep = replace(sweep, members=(sweep.members[index],))
    (member,) = sweep.members
    finished_steps = {member: find_finished_step(member)}  # rejects a foreign folder first
    diverged = find_diverged(sweep, retry_failed)
    if sweep.options.corpus is not None:
        _prepare_corpus(sweep.options.corpus, console, log)
    work = estimate_work(sweep, finished_steps, log)[member]
    digests, saved = load_saved_members(sweep, log, retry_failed)
    outcome = saved.get(member, RunOutcome(failure=diverged.get(member)))
    if outcome.failure is not None:
        raise RunError(f"{member.name}: {outcome.failure}; {RETRY_DIVERGED_HINT}")
    if member in saved:
        log(f"{member.name} has saved records in {sweep.options.records}")
        return outcome.records
    with ProgressMeter(console, work.items) as meter:
        records = run_member(member, work, meter)
    if member in digests:
        save_outcome(sweep, member, RunOutcome(records), digests[member])
    return records


def _run_members(
    sweep: Sweep, console: Console, log: Log, array: slurm.SlurmJob | None, retry_failed: bool
) -> list[Record]:
    """Run the remaining work of all members: as a job array, or in this process."""
    start_time = time.monotonic()
    finished_steps = {member: find_finished_step(member) for member in sweep.members}  # rejects foreign folders first
    diverged = find_diverged(sweep, retry_failed)
    if sweep.options.corpus is not None:
        _prepare_corpus(sweep.options.corpus, console, log)
    works = estimate_work(sweep, finished_steps, log)
    digests, saved = load_saved_members(sweep, log, retry_failed)
    kept = {member: outcome.records for member, outcome in saved.items() if outcome.failure is None}
    diverged |= {member: outcome.failure for member, outcome in saved.items() if outcome.failure is not None}
    elsewhere = list_members_of_other_parts(sweep) - saved.keys()
    if saved:
        log(f"{len(saved)} of {len(works)} runs have saved records in {sweep.options.records}")
    indices = [
        i
        for i, (member, work) in enumerate(works.items())
        if work.has_work and member not in diverged and member not in kept and member not in elsewhere
    ]
    if array is not None and indices:
        waiting = _list_waiting(sweep.members, indices, finished_steps)
        indices = [i for i in indices if i not in waiting]
        if waiting:
            log(
                f"{format_quantity(len(waiting), 'run')} wait{'s' * (len(waiting) == 1)} for other runs, with which "
                "they share a training or from whose checkpoints they branch; run the same command again once these "
                "have ended"
            )
        if not indices:
            return []
    if sweep.options.records is not None:
        check_sweep_disk(sweep, [sweep.members[i] for i in indices])
    begins = list_startable([sweep.members[i] for i in indices], finished_steps)
    has_tasks = any(member.config.logging.harness.tasks for member in begins)
    tasks = ", and harness.tasks, which imports lm_eval" if has_tasks else ""
    with WaitAnnouncer(log, f"checking the data and the starting points of the runs{tasks}"):
        check_member_starts(begins, in_queue=array is not None)
    if array is not None and indices:
        job = replace(array, array=slurm.format_array_indices(indices))
        for line in slurm.describe_submission(job, slurm.submit_job(job)):
            log(line)
        log(
            f"{len(indices)} of {len(works)} runs submitted; after they have ended, run the same command to write the "
            "report"
        )
        return []
    save_experiment(sweep, digests)
    pending = {member: work for member, work in works.items() if member not in elsewhere}
    unsaved = {member: digest for member, digest in digests.items() if member not in saved}
    results = _run_all_members(sweep, console, pending, diverged, kept, unsaved)
    records, failures = results.list_records(), results.list_failures()
    if records:
        print_results(sweep, records, failures, console)
        log(
            f"\nopen {sweep.output_folder / REPORT_FILE} in a browser; results.json, .csv, .md and .png are next to it "
            f"({format_duration(time.monotonic() - start_time)})"
        )
        if (hint := suggest_comparison(sweep, records, failures)) is not None:
            log(hint)
    if failures:
        raise RunError(_describe_failures(failures, results.num_diverged, len(works)))
    if results.unsaved:
        reason = next(iter(results.unsaved.values()))
        raise RunError(
            f"results of {format_quantity(len(results.unsaved), 'run')} could not be saved: {reason}; {RESUME_HINT}"
        )
    return records


def _list_waiting(
    members: Sequence[SweepMember], indices: Sequence[int], finished_steps: Mapping[SweepMember, int]
) -> set[int]:
    """Return the indices that cannot be tasks of the same job array as the others.

    These are branches from a checkpoint that does not exist yet, and all but the first of the members that share an
    unfinished training.
    """
    waiting, trained_folders = set(), set()
    for i in indices:
        member = members[i]
        is_unfinished = finished_steps[member] < member.resolved_config.training.train_iters
        if (member.origin is not None and not member.origin.is_dir()) or member.folder in trained_folders:
            waiting.add(i)
        elif is_unfinished:
            trained_folders.add(member.folder)
    return waiting


def _run_all_members(
    sweep: Sweep,
    console: Console,
    works: dict[SweepMember, MemberWork],
    diverged: dict[SweepMember, RunFailure],
    kept: dict[SweepMember, list[Record]],
    digests: dict[SweepMember, str],
) -> SweepResults:
    """Run all members and rewrite the report periodically. A failed member does not stop the others."""
    diverged = {member: failure for member, failure in diverged.items() if member in works and member not in kept}
    results = SweepResults(sweep, dict(kept), dict(diverged), num_diverged=len(diverged))

    def save_result(member: SweepMember, outcome: RunOutcome) -> None:
        try:
            if member in digests:
                save_outcome(sweep, member, outcome, digests[member])
        except (FarfieldError, OSError) as error:
            results.unsaved[member] = str(error)
            meter.log(f"{member.name}: {error}")

    pending = {member: work for member, work in works.items() if member not in diverged and member not in kept}
    jobs = [job for work in pending.values() for job in work.items]
    num_workers = _count_workers(sweep, sum(work.has_work for work in pending.values()))
    with ProgressMeter(
        console, jobs, forecast=lambda left: meter.log(_describe_time_left(left)), at_once=num_workers
    ) as meter:
        meter.log(_describe_plan(pending, len(kept), len(works), num_workers))
        for member, failure in diverged.items():
            meter.log(f"{member.name}: {failure}; {RETRY_DIVERGED_HINT}")
            save_result(member, RunOutcome(failure=failure))
        for member, outcome in run_members(pending, meter, num_workers):
            if isinstance(outcome, FarfieldError):
                if (divergence := find_member_divergence(member)) is not None:
                    results.num_diverged += 1
                    save_result(member, RunOutcome(failure=divergence))
                results.failures[member] = divergence or build_failure(member, str(outcome))
                for job in works[member].items:
                    meter.skip(job)
                meter.log(f"{member.name}: {results.failures[member]}")
            else:
                results.records[member] = outcome
                save_result(member, RunOutcome(outcome))
            if works[member].has_work:
                results.write_if_due()
                done = len(results.records) + len(results.failures)
                if done < len(works) and (left := meter.estimate_seconds_left()) is not None:
                    meter.log(f"{done} of {len(works)} runs done, about {format_duration(left)} left in total")
    with WaitAnnouncer(meter.log, "writing the report"):
        results.write()
    return results


def _count_workers(sweep: Sweep, num_pending: int) -> int:
    """Return the number of members that run in parallel."""
    jobs = sweep.options.jobs
    return max(1, min(num_pending, count_cores() if jobs == "auto" else jobs))


def _describe_failures(failures: Sequence[RunFailure], num_diverged: int, num_members: int) -> str:
    """Return one line with the number of failures and their reasons."""
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
    log(f"corpus {info.folder} {'exists' if info.reused else 'prepared'}: {sizes}")


def _describe_plan(works: dict[SweepMember, MemberWork], num_saved: int, num_members: int, num_workers: int) -> str:
    """Return a line on the amount of work, before any speed is known."""
    runs = sum(work.has_work for work in works.values())
    if not num_members:
        return "nothing to do: this part of the sweep has no runs"
    if not runs:
        return f"nothing to do: {len(works) + num_saved} of {num_members} runs are complete"
    at_once = "" if num_workers == 1 else f", {num_workers} at a time, the longest first"
    return (
        f"{runs} of {num_members} runs to train or evaluate{at_once}; the time left is estimated after the first steps"
    )


def _describe_time_left(left: float) -> str:
    return f"about {format_duration(left)} left in total, estimated from the first steps"


@contextmanager
def _release_on_exit(lock: RunLock | None) -> Iterator[None]:
    """Release the lock on the sweep's folder at the end of the block."""
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _build_line_printer(console: Console) -> Log:
    return lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _open_console(console: Console | None, log_file: Path) -> Iterator[Console]:
    """Yield the given console, or the terminal; library output then goes to the log file."""
    if console is not None:
        yield console
        return
    with run_console(log_file) as terminal, log_traceback(log_file):
        yield terminal
