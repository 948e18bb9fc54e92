"""`./deepy.py sweep FILE`: prepare a corpus, train every variant with every seed, evaluate all alike, report.

    OUTPUT/results.json, .csv, .md, .png, report.html              rewritten after every run that was evaluated
    OUTPUT/log.txt                                                 what libraries had to say
    OUTPUT/VARIANT/seed_1234.yml                                   the run's whole configuration: `train` takes it too
    OUTPUT/VARIANT/seed_1234.txt                                   what its training printed
    OUTPUT/VARIANT/seed_1234/                                      the run: checkpoints, metrics, its own results

A sweep that is stopped, by a person or an error, is carried on by the same command: finished runs are taken as they
are, an interrupted one resumes at its last checkpoint. A run folder whose configuration is not the one asked for is
never overwritten and never reused; the sweep refuses to start.

A member that fails does not keep the others from running. One whose training diverged has that for a result: it stands
in tables and on the page with its reason and step, and is tried again only where that is asked for (`--retry-failed`).
One that failed otherwise, as by a full disk, is tried again by the next start.

With `launcher: slurm` what is left to do becomes a job array, a task for each member; once its tasks have ended, the
same command finds nothing left to do and writes the report.

How long it takes is estimated from the FLOPs of every training and evaluation, which are known before the first, and
the speed of those that have run or are running.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from megatron.checkpoint.layout import list_checkpoints
from megatron.checkpoint.run_folder import LOCK, SWEEP_LOCK, RunLock, is_saved_config
from megatron.launch import slurm
from megatron.launch.console import log_traceback, run_console
from megatron.options.sweep import SweepCorpusOptions
from megatron.reports.failures import RunFailure
from megatron.reports.records import RESULTS_FILE, Record
from megatron.reports.results_output import check_no_foreign_results, print_comparison_tables
from megatron.sweeps import receipts, slurm_array, training_process
from megatron.sweeps.spec import Sweep, SweepMember, read_sweep
from megatron.sweeps.work_estimate import MemberWork, estimate_work
from megatron.training.records import METRICS_FILE
from megatron.utils.atomic_io import make_folder, refuse_foreign_files
from megatron.utils.errors import FarfieldError, RunError, UserError
from megatron.utils.formatting import format_duration, format_flops
from megatron.utils.progress import ProgressMeter, WorkItem, estimate_seconds_left
from megatron.utils.signals import StoppedBySignal, acknowledge_signals

if TYPE_CHECKING:
    from megatron.reports.paper_experiment import Experiment

# What needs torch or matplotlib is imported where it is used: a mistake in the file is told at once.

STOPPING = "stopping; a training under way saves after its step first (again to end at once)"
REPORT = "report.html"
CARRIES_ON = "the same command carries on from here"
BUSY = "a sweep is running there; wait for its end, or choose another folder"
RETRIES = "--retry-failed trains again what diverged"
TRIES_AGAIN = "the same command tries again what failed"
NAMED = 5
"""Failures that a line names."""


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
        files, overrides, search: as for `megatron.sweeps.spec.read`.
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
    array = slurm_array.build_array_job(
        sweep, files, [*overrides, *(["--retry-failed"] if retry_failed else [])], search
    )
    if dry:
        if array is None:
            raise UserError("--dry-run shows the batch script of a sweep: it needs launcher=slurm")
        print(slurm.render_batch_script(array), end="")
        return []
    make_folder("sweep.output", sweep.output_folder)
    _refuse_files_of_others(sweep)
    lock = None
    if member is None:
        lock = RunLock(sweep.output_folder, name=SWEEP_LOCK, key="sweep.output", busy=BUSY, patience=1.0)
    with _release_on_exit(lock), _open_console(console, sweep.output_folder / "log.txt") as shown:
        say = _build_line_printer(shown)
        for note in sweep.notes:
            shown.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)
        try:
            with acknowledge_signals(say, STOPPING):
                return _run_members(sweep, shown, say, member, array, retry_failed)
        except (KeyboardInterrupt, StoppedBySignal):
            say(f"stopped; {CARRIES_ON}")
            raise


def _refuse_files_of_others(sweep: Sweep) -> None:
    """Refuse an output that holds files by the names of a sweep's which no sweep wrote. Raises UserError."""
    from megatron.reports.html_page import is_generated_page

    key, output = "sweep.output", sweep.output_folder
    check_no_foreign_results(key, output)
    refuse_foreign_files(key, [output / REPORT], is_generated_page)
    for member in sweep.members:
        begun = (member.folder / LOCK).exists() or bool(list_checkpoints(member.folder))

        def ours(path: Path, member: SweepMember = member, begun: bool = begun) -> bool:
            return begun or is_saved_config(member.get_path_beside(".yml"))

        refuse_foreign_files(key, [member.get_path_beside(".yml"), member.get_path_beside(".txt")], ours)
    configured = any(member.get_path_beside(".yml").exists() for member in sweep.members)
    refuse_foreign_files(key, [output / RESULTS_FILE], lambda _: configured or (output / REPORT).exists())


def _run_members(
    sweep: Sweep,
    console: Console,
    say: Callable[[str], None],
    only: int | None,
    array: slurm.SlurmJob | None,
    retry_failed: bool,
) -> list[Record]:
    begun = time.monotonic()
    finished = {
        member: receipts.find_finished_step(member) for member in sweep.members
    }  # refuses foreign folders first
    known = {} if retry_failed else {m: why for m in sweep.members if (why := receipts.find_divergence(m)) is not None}
    if sweep.options.corpus is not None:
        _prepare_corpus(sweep.options.corpus, console, say)
    todo = estimate_work(sweep, finished, say)
    open_ = [index for index, (member, each) in enumerate(todo.items()) if each.has_work and member not in known]
    if array is not None and open_:
        job = replace(array, array=slurm_array.format_array_indices(open_))
        for line in slurm.describe_submission(job, slurm.submit_job(job)):
            say(line)
        say(f"{len(open_)} of {len(todo)} runs submitted; once they have ended, the same command writes the report")
        return []
    if only is not None:
        member = sweep.members[only]
        if member in known:
            raise RunError(f"{member.name}: {known[member]}; {RETRIES}")
        with ProgressMeter(console, [todo[member].training, todo[member].evaluation]) as meter:
            return _run_member(member, todo[member], meter)
    found: list[Record] = []
    failed: list[RunFailure] = []
    jobs = [job for member, each in todo.items() if member not in known for job in (each.training, each.evaluation)]
    pending = {member: each for member, each in todo.items() if member not in known}
    with ProgressMeter(console, jobs, forecast=lambda left: meter.log(_describe_time_left(pending, left))) as meter:
        meter.log(_describe_plan(pending, len(todo)))
        for number, (member, each) in enumerate(todo.items(), start=1):
            worked = each.has_work and member not in known
            if member in known:
                failed.append(known[member])
                meter.log(f"{member.name}: {known[member]}; {RETRIES}")
            else:
                try:
                    found += _run_member(member, each, meter)
                except FarfieldError as error:
                    failed.append(receipts.find_divergence(member) or receipts.build_failure(member, str(error)))
                    meter.skip(each.training)
                    meter.skip(each.evaluation)
                    meter.log(f"{member.name}: {failed[-1]}")
            if found and (worked or number == len(todo)):  # pictures of what was there take longer than all else
                _write_results(sweep, found, failed)
            if worked and number < len(todo) and (left := estimate_seconds_left(meter.jobs)) is not None:
                meter.log(f"{number} of {len(todo)} runs done, about {format_duration(left)} left")
    found = sort_baselines_last(found)
    if found:
        _print_results(sweep, found, failed, console)
        names = (REPORT, *(f"results.{ending}" for ending in ("json", "csv", "md", "png")))
        files = ", ".join(str(sweep.output_folder / name) for name in names)
        say(f"{files} ({format_duration(time.monotonic() - begun)})")
    if failed:
        diverged = sum(receipts.find_divergence(member) is not None for member in todo)
        raise RunError(_describe_failures(failed, diverged, len(todo)))
    return found


def _print_results(sweep: Sweep, found: Sequence[Record], failed: Sequence[RunFailure], console: Console) -> None:
    """The tables of a sweep, on the console."""
    print_comparison_tables(console, found, failed)
    options = sweep.options
    for grid in (
        _build_experiment(sweep).build_tables(found, failures=failed)
        if options.published or options.against or options.differences
        else ()
    ):
        console.print(f"\n{grid.to_text()}", end="", markup=False, highlight=False, soft_wrap=True)


def _describe_failures(failed: Sequence[RunFailure], diverged: int, members: int) -> str:
    """One line for all that failed: how many, and each with its reason."""
    each = "; ".join(f"{one.method}, seed {one.seed}: {one}" for one in failed[:NAMED])
    more = f"; and {len(failed) - NAMED} more" if len(failed) > NAMED else ""
    again = RETRIES if diverged == len(failed) else TRIES_AGAIN if not diverged else f"{TRIES_AGAIN}, and {RETRIES}"
    return f"{len(failed)} of {members} runs failed: {each}{more}; {again}"


def _prepare_corpus(corpus: SweepCorpusOptions, console: Console, say: Callable[[str], None]) -> None:
    from megatron.data.corpus import prepare_corpus

    job = WorkItem(f"corpus {corpus.folder}", "prepare", 1.0)
    with ProgressMeter(console, [job]) as meter:
        meter.begin(job)
        made = prepare_corpus(corpus, corpus.folder, progress=meter.report_stage, log=meter.log)
    for note in made.notes:
        say(note)
    sizes = ", ".join(f"{split} {size.tokens:,} tokens" for split, size in made.splits.items())
    say(f"corpus {made.folder} {'is there' if made.reused else 'prepared'}: {sizes}")


def _describe_plan(todo: dict[SweepMember, MemberWork], members: int) -> str:
    """How much there is to do, before any speed is known."""
    runs = sum(each.has_work for each in todo.values())
    if not runs:
        return f"nothing to do: {len(todo)} of {members} runs are done"
    training = sum(each.training.work for each in todo.values())
    evaluation = sum(each.evaluation.work for each in todo.values())
    return (
        f"{runs} of {members} runs to do: {format_flops(training)} of training and {format_flops(evaluation)} of "
        f"evaluation; "
        "how long that takes follows with the first steps"
    )


def _describe_time_left(todo: dict[SweepMember, MemberWork], left: float) -> str:
    runs = sum(each.has_work for each in todo.values())
    return f"about {format_duration(left)} for {runs} of {len(todo)} runs, at the speed of the first steps"


def _run_member(member: SweepMember, todo: MemberWork, meter: ProgressMeter) -> list[Record]:
    """Train and evaluate one member."""
    _train_member(member, todo, meter)
    return _evaluate_member(member, todo.evaluation, meter)


def _train_member(member: SweepMember, todo: MemberWork, meter: ProgressMeter) -> None:
    """Train a member to its end, or find it trained."""
    done, steps, job = todo.done, member.config.training.train_iters, todo.training
    if done >= steps and not receipts.lacks_test_data(member):
        meter.skip(job)
        meter.log(f"{member.name}: trained already, {done} steps in {member.folder}")
        return
    if done:
        what = f"resumes after step {done} of {steps}" if done < steps else "is trained; its test is made up for"
        meter.log(f"{member.name}: {what}")
    # With `load` naming its own folder a run resumes.
    config = member.config.replace(load=str(member.folder)) if done else member.config
    config.save(member.get_path_beside(".yml"))

    def watch(step: int | None) -> None:
        share = 0.0 if step is None else max(0, step - done) / max(1, steps - done)
        meter.update(share * job.work, f"step {done if step is None else step} of {steps}")

    meter.begin(job, f"step {done} of {steps}")
    training_process.train_in_subprocess(
        member.get_path_beside(".yml"), member.get_path_beside(".txt"), member.folder / METRICS_FILE, watch
    )
    if receipts.find_finished_step(member) < steps:
        raise RunError(f"training ended early without an error; its output is in {member.get_path_beside('.txt')}")
    meter.finish()


def _evaluate_member(member: SweepMember, job: WorkItem, meter: ProgressMeter) -> list[Record]:
    """Evaluate a trained member, or find it evaluated in the same way."""
    from megatron.evaluation.run import evaluate_runs

    known = receipts.read_evaluated_records(member)
    if known is not None:
        meter.skip(job)
        meter.log(f"{member.name}: evaluated already")
        return known
    meter.begin(job, "loading")
    found = evaluate_runs(
        [member.folder],
        member.evaluation,
        output=member.results,
        names=[member.variant],
        progress=lambda length, done, total: meter.update(done, f"length {length:,}"),
    )
    meter.finish()
    receipts.write_receipt(member, found)
    return found


def sort_baselines_last(found: Sequence[Record]) -> list[Record]:
    """Records of runs, then those of no run, each once: every run of a task brings the same floors with it."""
    floors = [each for each in found if each.run is None]
    runs = [each for each in found if each.run is not None]
    return [*runs, *(each for index, each in enumerate(floors) if each not in floors[:index])]


def _write_results(sweep: Sweep, found: Sequence[Record], failed: Sequence[RunFailure]) -> None:
    """Rewrite the results and the report of what is measured so far."""
    from megatron.reports import paper_experiment, report
    from megatron.reports.results_output import write_results

    output = sweep.output_folder
    found = sort_baselines_last(found)
    write_results(output, found, failed)
    told = _build_experiment(sweep)
    if told.has_paper_comparison:  # the results of other sweeps may be put together with others
        paper_experiment.write_experiment(output / RESULTS_FILE, told)
    measured = {(record.method, record.seed) for record in found}
    texts = dict(sweep.texts)
    done = [member for member in sweep.members if (member.variant, member.seed) in measured]
    texts |= {str(member.get_path_beside(".yml")): member.text for member in done}
    missing = len(sweep.members) - len(done) - len(failed)
    report.write_report(
        output / REPORT,
        [report.ReportSection(sweep.options.title, found, told.build_tables(found, failures=failed), failed)],
        num_pending_runs=missing,
        configurations=texts,
    )


def _build_experiment(sweep: Sweep) -> "Experiment":
    from megatron.reports.paper_experiment import Experiment, PublishedTable

    options = sweep.options
    table_formats = tuple(
        PublishedTable(each.source, each.train_length, each.metric, tuple(each.lengths), dict(each.rows))
        for each in options.published
    )
    return Experiment(options.title, options.against, table_formats, tuple(options.differences))


@contextmanager
def _release_on_exit(lock: RunLock | None) -> Iterator[None]:
    """Let others have the sweep's folder in the end."""
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _build_line_printer(console: Console) -> Callable[[str], None]:
    return lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _open_console(given: Console | None, log: Path) -> Iterator[Console]:
    if given is not None:
        yield given
        return
    with run_console(log) as console, log_traceback(log):
        yield console
