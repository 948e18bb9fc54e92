"""Publish the leaderboard: write docs/results/zoo.{json,md,html,png} from the files of its runs in docs/results/zoo.

The second tier, zoo_3m, is published in the same way once it has the runs of its text.

    python tools/docs/publish_leaderboard.py        or    make publish-zoo

Only complete benchmarks are published, and nothing is published before the text is complete. The page lists the methods
and seeds that the other benchmarks lack. Runs of several machines cannot be compared by duration, so CPU times are
those of zoo_costs.json, if it exists, in which tools/bench/method_costs.py measured all methods in turns. Pages that
quote the records are written again: agreement.md, card.md, claims.md.
"""

import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from tools.arguments import ToolParser, print_interrupts_in_one_line  # noqa: E402

if __name__ == "__main__":
    print_interrupts_in_one_line()

from rich.console import Console  # noqa: E402

from megatron.reports.combine import combine_results, describe_ignored_runs, read_saved_runs  # noqa: E402
from megatron.reports.leaderboard_benchmarks import TEXT_BENCHMARK, LeaderboardPlan, describe_completeness  # noqa: E402
from megatron.reports.paper_experiment import read_experiment, write_experiment  # noqa: E402
from megatron.reports.records import RESULTS_FILE, Record, write_records  # noqa: E402
from megatron.reports.run_records import RunFailure, SavedRuns, write_failures  # noqa: E402
from megatron.utils.errors import UserError  # noqa: E402

RESULTS = Path("docs/results")
COSTS_NOTE = (
    "Costs are CPU times of untrained models that took turns on one core (docs/results/{}), not of the runs, which are "
    "from several machines. Differences of a tenth mean nothing."
)
BOARDS = ("zoo", "zoo_3m")
"""Names of the leaderboard and of its second tier, which are those of the files and of the folder of runs."""


def select_complete_benchmarks(plan: LeaderboardPlan, saved: SavedRuns) -> tuple[list[Record], list[RunFailure]]:
    """Select the results of benchmarks with all their runs.

    Returns:
        Records of these benchmarks and of their trivial baselines, and the runs that diverged.

    Raises:
        UserError: the text is incomplete, which other pages quote.
    """
    records = saved.records
    missing = plan.list_missing_runs([*records, *saved.failures])
    if TEXT_BENCHMARK in missing:
        raise UserError(f"cannot be published without all runs of the text. {describe_completeness(plan, missing)}")
    kept = [record for record in records if record.run is not None and plan.get_benchmark(record) not in missing]
    datasets = {record.dataset for record in kept}
    baselines = [record for record in records if record.run is None and record.dataset in datasets]
    return [*kept, *baselines], [f for f in saved.failures if plan.get_benchmark(f) not in missing]


def replace_cpu_times(records: list[Record], costs: Path) -> list[Record]:
    """Return records with CPU times that were measured in turns on one machine, instead of those of their runs.

    Args:
        records: records of a leaderboard, of which those of the text are changed.
        costs: record of tools/bench/method_costs.py. Other evaluations of a run, such as "rotary (yarn)", keep their
            ratio to its own scoring.

    Raises:
        UserError: a method has no costs.
    """
    measured = json.loads(costs.read_text(encoding="utf-8"))
    steps, scoring = (
        {method: found["ratio"][1] * times[measured["baseline"]]["seconds"] for method, found in times.items()}
        for times in (measured["step"], measured["scoring"])
    )  # median ratios, in seconds of the baseline
    durations = {
        (record.run, record.method): record.cpu_seconds for record in records if record.length == measured["length"]
    }

    def replace_times(record: Record) -> Record:
        method = record.method.partition(" (")[0]
        record = record.replace(step_cpu_seconds=steps[method])
        own, windows = durations.get((record.run, method)), record.windows
        if record.length != measured["length"] or not (own and record.cpu_seconds and windows):
            return record
        return record.replace(cpu_seconds=scoring[method] * windows * record.cpu_seconds / own)

    try:
        return [replace_times(record) if record.protocol == "last" else record for record in records]
    except KeyError as error:
        raise UserError(f"{costs}: no costs of {error}; run tools/bench/method_costs.py again") from None


def publish(runs: Path, output: Path, console: Console, name: str = BOARDS[0]) -> None:
    """Write the record, the page in two formats, and its pictures.

    Args:
        runs: folder with the files of runs.
        output: folder of the published files.
        name: name of the published files.
        console: console for the names of the files.

    Raises:
        UserError: the folder has no plan or lacks runs of the text, or a file cannot be read or written.
    """
    experiment = read_experiment(runs / RESULTS_FILE)
    plan = None if experiment is None or experiment.leaderboard is None else experiment.leaderboard.plan
    if plan is None or experiment is None:
        raise UserError(
            f"{runs}: no plan of a leaderboard in results.experiment.json; sweeps with sweep.records write it"
        )
    saved = read_saved_runs(runs)
    for note in describe_ignored_runs({runs / RESULTS_FILE: saved}):
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    try:
        records, failures = select_complete_benchmarks(plan, saved)
    except UserError as error:
        raise UserError(f"{runs}: {error}") from None
    costs, differences = output / f"{name}_costs.json", experiment.differences
    if costs.is_file():
        records, differences = replace_cpu_times(records, costs), (*differences, COSTS_NOTE.format(costs.name))
    # Cells of needle maps are most of the records, and the runs' files contain them. Only the HTML page draws them.
    by_length = [record for record in records if record.axis == "length"]
    published = replace(
        experiment, differences=differences, published=(), own_seeds=False, num_runs=None, run_digests=None
    )
    for suffix, shown in ((".md", by_length), (".html", records)):
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder) / RESULTS_FILE
            write_records(results, shown)
            write_failures(results, failures)
            write_experiment(results, published)
            combine_results([results], Console(quiet=True), output=output / f"{name}{suffix}")
        console.print(f"written: {output / name}{suffix}", markup=False, highlight=False, soft_wrap=True)
    path = write_records(output / f"{name}.json", by_length)
    write_failures(path, failures)
    console.print(f"written: {path}", markup=False, highlight=False, soft_wrap=True)


def main() -> None:
    """Publish the leaderboard, and write the pages that quote it."""
    ToolParser(description=__doc__.partition("\n")[0]).parse_args()
    os.chdir(ROOT)
    for name in BOARDS:
        if name != BOARDS[0] and not (RESULTS / name).is_dir():
            continue
        try:
            publish(RESULTS / name, RESULTS, Console(), name)
        except UserError as error:
            if name == BOARDS[0]:
                print(f"error: {error}", file=sys.stderr)
                sys.exit(2)
            print(f"note: {error}", file=sys.stderr)
    from tools.docs.make_docs import write_pages  # imports torch

    write_pages()


if __name__ == "__main__":
    main()
