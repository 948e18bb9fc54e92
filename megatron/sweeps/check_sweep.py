"""State of a sweep before it runs: its output folder, its diverged, saved and startable runs; and a dry run of all."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from megatron.checkpoint.layout import list_checkpoints
from megatron.checkpoint.run_folder import is_saved_config
from megatron.data.corpus_metadata import CORPUS_FILE
from megatron.options.sweep import SweepCorpusOptions
from megatron.reports.records import RESULTS_FILE
from megatron.reports.results_output import check_no_foreign_results
from megatron.reports.run_records import RunFailure, RunOutcome
from megatron.sweeps.member_run import read_training_cost
from megatron.sweeps.remaining_work import (
    MemberWork,
    check_member_starts,
    check_sweep_disk,
    estimate_work,
    find_finished_step,
    find_member_divergence,
)
from megatron.sweeps.results import (
    REPORT_FILE,
    compute_member_digest,
    has_saved_records,
    list_members_of_other_parts,
    load_saved_outcome,
)
from megatron.sweeps.spec import Sweep, SweepMember
from megatron.training.metrics_log import METRICS_FILE
from megatron.utils.atomic_io import LOCK, check_new_folder, check_no_foreign_files, check_writable
from megatron.utils.console import run_console, temporary_log
from megatron.utils.formatting import format_approximate_duration, format_quantity
from megatron.utils.progress import WaitAnnouncer

Log = Callable[[str], None]


def check_sweep(sweep: Sweep, console: Console | None, *, retry_failed: bool = False) -> None:
    """Check a sweep as its start does, print the state of every run, and create and start nothing.

    Data that the sweep prepares first are not checked, and saved records cannot be matched without them.

    Args:
        sweep: the sweep.
        console: console for the lines; None for the terminal.
        retry_failed: True if diverged runs are retrained.

    Raises:
        FarfieldError: the error that the start of the sweep would raise.
    """
    with temporary_log() as log_file, nullcontext(console) if console is not None else run_console(log_file) as shown:

        def log(line: str) -> None:
            shown.print(line, markup=False, highlight=False, soft_wrap=True)

        for note in sweep.notes:
            log(f"note: {note}")
        finished_steps = {member: find_finished_step(member) for member in sweep.members}
        diverged = find_diverged(sweep, retry_failed)
        check_writable("sweep.output", sweep.output_folder)
        if sweep.options.records is not None:
            check_writable("sweep.records", Path(sweep.options.records))
        check_no_foreign_sweep_files(sweep)
        works: dict[SweepMember, MemberWork] = {}
        done, unmatched = set(diverged), set[SweepMember]()
        corpus = sweep.options.corpus
        if corpus is None or (Path(corpus.folder) / CORPUS_FILE).is_file():
            with WaitAnnouncer(log, "checking the data and the starting points of the runs"):
                works = estimate_work(sweep, finished_steps, log)
                done |= load_saved_members(sweep, log, retry_failed)[1].keys()
                begins = [m for m in list_startable(sweep.members, finished_steps) if m not in done]
                check_member_starts(begins, in_queue=False, may_download=False)
        else:
            check_corpus_folder(corpus)
            log(f"note: the data are not checked, because the sweep first prepares the corpus {corpus.folder}")
            unmatched = {member for member in sweep.members if member not in done and has_saved_records(sweep, member)}
            if unmatched:
                have = "has" if len(unmatched) == 1 else "have"
                log(
                    f"note: {format_quantity(len(unmatched), 'run')} {have} saved records in {sweep.options.records}; "
                    "after preparing the corpus, the sweep does not repeat those that match it"
                )
        done |= {member for member, work in works.items() if not work.has_work}
        elsewhere = list_members_of_other_parts(sweep) - done
        done |= elsewhere
        unmatched -= done
        check_sweep_disk(sweep, [member for member in sweep.members if member not in done and member not in unmatched])
        for member in sweep.members:
            state = _describe_state(member, finished_steps[member], diverged.get(member), is_done=member in done)
            if member in elsewhere:
                state = "in another part of the sweep"
            elif member in unmatched:
                state += ", unless its saved records match"
            log(f"{member.name}: {state}")
        time = _describe_training_time(works, [work for member, work in works.items() if member not in done])
        num_remaining = len(sweep.members) - len(done)
        minimum = f"{num_remaining - len(unmatched)} to " if unmatched else ""
        counts = f"{minimum}{num_remaining} of {len(sweep.members)} runs to train or evaluate"
        log(f"{counts}{time}; nothing was started")


def _describe_training_time(works: Mapping[SweepMember, MemberWork], remaining: Iterable[MemberWork]) -> str:
    """Describe the remaining training time, at the median speed of runs of the same kind; empty if all are trained."""
    speeds: dict[str, list[float]] = defaultdict(list)
    for member, work in works.items():
        if seconds := read_training_cost(member.folder / METRICS_FILE).get("step_seconds"):
            speeds[work.training.kind].append(work.flops_per_step / seconds)
    flops: dict[str, float] = defaultdict(float)
    for work in remaining:
        flops[work.training.kind] += work.training.work
    if not any(flops.values()):
        return ""
    if not speeds.keys() & flops.keys():
        return " (training time unknown, because no run has recorded its speed yet)"
    seconds = sum(flops[kind] / statistics.median(speeds[kind]) for kind in flops.keys() & speeds.keys())
    bound = "" if flops.keys() <= speeds.keys() else "at least "
    return f" ({bound}{format_approximate_duration(seconds)} of training one after another, at recorded speeds)"


def _describe_state(member: SweepMember, step: int, failure: RunFailure | None, *, is_done: bool) -> str:
    """Describe what exists of a run."""
    if failure is not None:
        return f"{failure}; use --retry-failed to retrain it"
    if is_done:
        return "complete"
    if step > member.first_step:
        return f"has a checkpoint of step {step:,} of {member.resolved_config.training.train_iters:,}"
    if member.origin is not None and not member.origin.is_dir():
        return f"starts from {member.origin}, which does not exist yet"
    return "new"


def find_diverged(sweep: Sweep, retry_failed: bool) -> dict[SweepMember, RunFailure]:
    """Return the diverged members that are not retried, with their failure."""
    if retry_failed:
        return {}
    return {m: failure for m in sweep.members if (failure := find_member_divergence(m)) is not None}


def check_corpus_folder(corpus: SweepCorpusOptions) -> None:
    """Check that the corpus of a sweep can be prepared if there is none. Raises UserError as `check_new_folder`."""
    if not (Path(corpus.folder) / CORPUS_FILE).is_file():
        check_new_folder("sweep.corpus.folder", Path(corpus.folder))


def check_no_foreign_sweep_files(sweep: Sweep) -> None:
    """Reject an output folder with files of a sweep's names that no sweep wrote. Raises UserError."""
    from megatron.reports.html_page import is_generated_page

    key, output = "sweep.output", sweep.output_folder
    check_no_foreign_results(key, output)
    check_no_foreign_files(key, [output / REPORT_FILE], is_generated_page)
    for member in sweep.members:
        is_started = (member.folder / LOCK).exists() or bool(list_checkpoints(member.folder))

        def is_ours(path: Path, member: SweepMember = member, is_started: bool = is_started) -> bool:
            return is_started or is_saved_config(member.get_sibling_path(".yml"))

        check_no_foreign_files(key, [member.get_sibling_path(".yml"), member.get_sibling_path(".txt")], is_ours)
    has_config = any(member.get_sibling_path(".yml").exists() for member in sweep.members)
    check_no_foreign_files(key, [output / RESULTS_FILE], lambda _: has_config or (output / REPORT_FILE).exists())


def load_saved_members(
    sweep: Sweep, log: Log, retry_failed: bool
) -> tuple[dict[SweepMember, str], dict[SweepMember, RunOutcome]]:
    """Return the digests of all members, and the saved results of those that have one and are not retried.

    Without a folder of saved records both are empty.
    """
    if sweep.options.records is None:
        return {}, {}
    with WaitAnnouncer(log, "checking texts and saved records"):
        digests = {member: compute_member_digest(member) for member in sweep.members}
        loaded = {member: load_saved_outcome(sweep, member, digest) for member, digest in digests.items()}
    return digests, {
        member: outcome
        for member, outcome in loaded.items()
        if outcome is not None and not (retry_failed and outcome.failure is not None)
    }


def list_startable(members: Sequence[SweepMember], finished_steps: Mapping[SweepMember, int]) -> list[SweepMember]:
    """Return the members that have not started and can start now."""
    begins = (member for member in members if finished_steps[member] <= member.first_step)
    return [member for member in begins if member.origin is None or member.origin.is_dir()]
