"""Results of a sweep: records of its members, tables on the console, and the report in its folder."""

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from megatron.reports.comparison_table import build_comparison_tables
from megatron.reports.leaderboard import Ablation, Leaderboard, LeaderboardReport
from megatron.reports.records import RESULTS_FILE, Record, RunFailure
from megatron.reports.results_output import print_comparison_tables, print_leaderboard
from megatron.reports.run_records import sort_baselines_last
from megatron.sweeps.spec import Sweep, SweepMember, find_ablations
from megatron.utils.atomic_io import write_page_atomically
from megatron.utils.errors import UserError
from megatron.utils.project import PROGRAM

if TYPE_CHECKING:
    from megatron.reports.paper_experiment import Experiment

REPORT_FILE = "report.html"
REPORT_FRACTION = 0.05
"""Maximum fraction of a sweep's time spent on rewriting its report."""


@dataclass
class SweepResults:
    """Results so far, and the time of the next write."""

    sweep: Sweep
    records: dict[SweepMember, list[Record]]
    failures: dict[SweepMember, RunFailure]
    unsaved: dict[SweepMember, str] = field(default_factory=dict)
    """Members whose records could not be saved, with the reason."""
    next_write: float = 0.0

    def list_records(self) -> list[Record]:
        """Return all records, in the order of the sweep's members."""
        return sort_baselines_last([record for member in self.sweep.members for record in self.records.get(member, ())])

    def list_failures(self) -> list[RunFailure]:
        return [self.failures[member] for member in self.sweep.members if member in self.failures]

    def write_if_due(self) -> None:
        """Rewrite results and report unless this would exceed their share of the time; it can take half a minute."""
        start_time = time.monotonic()
        if start_time >= self.next_write and self.records:
            self.write()
            self.next_write = time.monotonic() + (time.monotonic() - start_time) / REPORT_FRACTION

    def write(self) -> None:
        if self.records:
            _write_results(self.sweep, self.list_records(), self.list_failures(), list(self.records))


def print_results(sweep: Sweep, records: Sequence[Record], failures: Sequence[RunFailure], console: Console) -> None:
    """Print the tables of a sweep on the console."""
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


def suggest_comparison(sweep: Sweep, records: Sequence[Record], failures: Sequence[RunFailure]) -> str | None:
    """Return a hint with the command that compares methods with the first one.

    Returns None if the report already compares methods or there is nothing to compare.
    """
    if failures or sweep.options.against is not None or sweep.options.leaderboard is not None:
        return None
    methods = list(dict.fromkeys(record.method for record in records if not record.is_trivial_baseline))
    if len(methods) < 2:
        return None
    command = shlex.join([PROGRAM, "report", str(sweep.output_folder), "--against", methods[0]])
    has_seeds = len({record.seed for record in records if record.method == methods[0]}) > 1
    says = f"adds ratios to {methods[0]} at each length"
    if has_seeds:
        says = f"shows which differences from {methods[0]} are significant"
    return f"next: {command} {says}"


def _write_results(
    sweep: Sweep, records: Sequence[Record], failures: Sequence[RunFailure], done: Sequence[SweepMember]
) -> None:
    """Rewrite results and report for the completed members."""
    from megatron.launch.live_server import TrainingMonitor
    from megatron.reports import paper_experiment, report
    from megatron.reports.html_page import format_command
    from megatron.reports.results_output import write_results

    output, experiment = sweep.output_folder, _build_experiment(sweep)
    tables = experiment.build_tables(records, failures=failures)
    missing = len(sweep.members) - len(done) - len(failures)
    section = report.ReportSection(
        sweep.options.title, records, tables, failures, experiment.own_seeds, experiment.get_leaderboard(), missing
    )
    drawn = None if section.board is None else section.shown_records
    write_results(output, records, failures, own_seeds=sweep.options.has_own_seeds, drawn=drawn)
    if experiment.has_information:  # so that results of several sweeps can be combined
        paper_experiment.write_experiment(output / RESULTS_FILE, experiment)
    texts = dict(sweep.texts)
    texts |= {str(member.get_sibling_path(".yml")): member.text for member in done}
    runs = [member.folder for member in sweep.members if member.folder.is_dir()]
    page = report.render_report(
        [section],
        configurations=texts,
        command=format_command(),
        training=TrainingMonitor().describe(runs),
    )
    write_page_atomically(output / REPORT_FILE, page)


def save_experiment(sweep: Sweep) -> None:
    """Write what reports need next to a sweep's saved records, if it saves any: title, leaderboard options, and so on.

    Machines that divide a sweep write equal files. Raises UserError if the file cannot be written.
    """
    from megatron.reports import paper_experiment

    if (folder := sweep.options.records) is not None:
        try:
            paper_experiment.write_experiment(Path(folder, RESULTS_FILE), _build_experiment(sweep))
        except OSError as error:
            raise UserError(f"sweep.records is {folder}: cannot be written ({error.strerror or error})") from error


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
        options.title,
        options.against,
        published,
        tuple(options.differences),
        options.has_own_seeds,
        leaderboard,
        len(sweep.members),
    )
