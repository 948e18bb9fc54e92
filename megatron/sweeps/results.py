"""Results of a sweep: saved records of its finished runs, tables on the console, and the report in its folder.

`sweep.records` names a folder of saved records, one small file for each finished run, which machines can share. A run
that has a file for the same training and the same evaluations is neither trained nor evaluated: its records, or the
failure of a training that diverged, are loaded from the file. Machines can thus divide a sweep (`sweep.part`), a
repository can contain what they measured, and a run is repeated if its file is removed.

    docs/results/zoo/niah/cdape+fox/seed_1234.json.gz

Each of these files belongs to one run, so machines that divide a sweep never write the same one. It contains a digest
of what decides the records: the keys that affect training, the code of methods outside the project, the content of
corpora and texts, and the options of the evaluations. A file next to them has what a report needs (`save_experiment`).
"""

import hashlib
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from megatron.config.method_names import compute_user_method_digests
from megatron.config.stages import list_stage_configs
from megatron.data.corpus_metadata import compute_file_digest, read_corpus_metadata
from megatron.options.data import DataOptions, list_corpus_names
from megatron.options.evaluation import EvaluationOptions
from megatron.reports.comparison_table import build_comparison_tables
from megatron.reports.leaderboard import Ablation, Leaderboard, LeaderboardReport
from megatron.reports.leaderboard_benchmarks import LeaderboardPlan
from megatron.reports.records import RESULTS_FILE, Record
from megatron.reports.results_output import print_comparison_tables, print_leaderboard
from megatron.reports.run_records import (
    RunFailure,
    RunOutcome,
    get_run_file,
    read_run_file,
    sort_baselines_last,
    write_run_file,
)
from megatron.sweeps.remaining_work import list_text_files
from megatron.sweeps.spec import Sweep, SweepMember, find_ablations
from megatron.utils.atomic_io import make_folder, write_page_atomically
from megatron.utils.errors import FarfieldError, UserError
from megatron.utils.project import PROGRAM

if TYPE_CHECKING:
    from megatron.reports.paper_experiment import Experiment

SAVED_FORMAT = 2
"""Format of saved records. In format 1, digests of mean accuracies did not cover their lengths."""
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
    """Members whose results could not be saved, with the reason."""
    next_write: float = 0.0
    num_diverged: int = 0
    """Number of failures that are divergences of a training."""

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


def save_experiment(sweep: Sweep, digests: Mapping[SweepMember, str]) -> None:
    """Write what reports need next to a sweep's saved records, if it saves any: title, leaderboard options, and so on.

    Machines that divide a sweep write equal files.

    Args:
        sweep: sweep with or without a folder of saved records.
        digests: digests of all members (`compute_member_digest`).

    Raises:
        UserError: the file cannot be written.
    """
    from megatron.reports import paper_experiment

    if (folder := sweep.options.records) is not None:
        files = {get_run_file(Path(), m.benchmark, m.variant, m.seed).as_posix(): each for m, each in digests.items()}
        try:
            experiment = replace(_build_experiment(sweep), run_digests=files)
            paper_experiment.write_experiment(Path(folder, RESULTS_FILE), experiment)
        except OSError as error:
            raise UserError(f"sweep.records is {folder}: cannot be written ({error.strerror or error})") from error


def _build_plan(sweep: Sweep) -> LeaderboardPlan | None:
    """Build the plan of a leaderboard; None if its benchmarks have different methods or seeds."""
    members = sweep.members
    plan = LeaderboardPlan(
        tuple(dict.fromkeys(member.variant for member in members)),
        tuple(dict.fromkeys(member.seed for member in members)),
        tuple(dict.fromkeys(member.benchmark for member in members if member.benchmark is not None)),
    )
    return plan if len(members) == len(plan.all_benchmarks) * plan.runs_per_benchmark else None


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
        baseline = options.against or sweep.members[0].variant
        leaderboard = Leaderboard(baseline, ablations, options.leaderboard.num_shown, _build_plan(sweep))
    return Experiment(
        options.title,
        options.against,
        published,
        tuple(options.differences),
        options.has_own_seeds,
        leaderboard,
        len(sweep.members),
    )


def check_records_folder(sweep: Sweep) -> None:
    """Create the folder of saved records, if the sweep has one, and check that it is writable. Raises UserError."""
    if sweep.options.records is not None:
        make_folder("sweep.records", Path(sweep.options.records))


def has_saved_records(sweep: Sweep, member: SweepMember) -> bool:
    """Return True if a member has a file of saved records, which may be of another training or evaluation."""
    path = _get_path(sweep, member)
    return path is not None and path.exists()


def load_saved_outcome(sweep: Sweep, member: SweepMember, digest: str) -> RunOutcome | None:
    """Load the saved result of a member.

    Args:
        digest: digest of the member (`compute_member_digest`).

    Returns:
        The result, or None if there is none of this training and these evaluations.

    Raises:
        UserError: the file is damaged or not a file of saved records, or a text of the member cannot be read.
    """
    path = _get_path(sweep, member)
    if path is None or not path.exists():
        return None
    return read_run_file(path, digest)


def save_outcome(sweep: Sweep, member: SweepMember, outcome: RunOutcome, digest: str) -> None:
    """Save the result of a finished member, and replace that of an older definition.

    Args:
        digest: digest of the member when it began; its files may have changed since.

    Raises:
        UserError: the file cannot be written.
    """
    path = _get_path(sweep, member)
    assert path is not None
    write_run_file(path, digest, outcome)


def list_members_of_other_parts(sweep: Sweep) -> set[SweepMember]:
    """Return the members that other machines run: all but every PARTS-th, from the PART-th on (`sweep.part`)."""
    if sweep.options.part is None:
        return set()
    part, parts = map(int, sweep.options.part.split("/"))
    return {member for index, member in enumerate(sweep.members) if index % parts != part - 1}


def compute_member_digest(member: SweepMember) -> str:
    """Return a hash of what decides a member's records, except for the machine and the versions of libraries.

    Raises:
        UserError: a corpus or a text cannot be read.
    """
    config = member.resolved_config
    training = {
        key: value for key, value in config.get_training_fingerprint(defaults=False).items() if "data_path" not in key
    }
    corpora = [_describe_corpora(stage.data) for stage in (config, *list_stage_configs(config))]
    methods = sorted(compute_user_method_digests(config.position).values())
    evaluations = {str(name): _describe_options(options) for name, options in member.evaluations.items()}
    decisive = [SAVED_FORMAT, member.variant, member.branch_step, training, methods, corpora, evaluations]
    return hashlib.sha256(json.dumps(decisive, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _get_path(sweep: Sweep, member: SweepMember) -> Path | None:
    if sweep.options.records is None:
        return None
    return get_run_file(Path(sweep.options.records), member.benchmark, member.variant, member.seed)


def _describe_options(options: EvaluationOptions) -> dict[str, Any]:
    """Return the options of an evaluation, with checksums instead of paths."""
    values = options.model_dump(exclude={"batch_tokens", "variants"}, exclude_defaults=True, by_alias=True)
    return values | {name: _compute_checksums(path) for name, path in options.named_paths.items()}


def _describe_corpora(data: DataOptions) -> list[list[list[str]]]:
    """Return the checksums of all datasets, by kind and by corpus."""
    kinds = (data.train_data_paths, data.valid_data_paths, data.test_data_paths)
    corpora = [[] if data.data_path is None else [data.data_path], *(kind or [] for kind in kinds)]
    return [
        [checksum for corpus in kind for name in list_corpus_names(corpus) for checksum in [_compute_checksums(name)]]
        for kind in corpora
    ]


def _compute_checksums(path: str) -> list[str]:
    """Return the checksums of the files of a text. A corpus written by `prepare` records them."""
    files = list_text_files(path)
    try:
        recorded = read_corpus_metadata(files[0].parent).files or {}
    except (FarfieldError, IndexError):
        recorded = {}
    try:
        return [
            recorded[file.name].sha256 if file.name in recorded else _compute_checksum(file, file.stat().st_mtime_ns)
            for file in files
        ]
    except OSError as error:
        raise UserError(f"sweep.records: {error.filename}: cannot be read ({error.strerror})") from None


@cache
def _compute_checksum(file: Path, modified: int) -> str:
    """Return the checksum of a file, which is read again if its modification time changes."""
    return compute_file_digest(file).sha256
