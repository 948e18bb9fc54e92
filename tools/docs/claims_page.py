"""Page docs/claims.md, written by `make docs`: the claims of papers, with our records and verdicts.

A claim compares two numbers of a record in docs/results: two methods at a length, or a method at two lengths. It is
tested by a paired two-sided t-test over seeds (KERPLE, 2205.09921, table 3), of logarithms of perplexities or of
accuracies, and all tests of the page are corrected together by Holm's procedure. The published ratios are those of the
tables next to the records.
"""

import math
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from scipy import stats

from megatron.reports.axes import format_multiple
from megatron.reports.comparison_table import pair_by_seed
from megatron.reports.metrics import Metric, get_metric
from megatron.reports.paper_experiment import read_experiment
from megatron.reports.records import Record, read_records
from megatron.reports.significance import SIGNIFICANCE_LEVEL, apply_holm_correction, format_p_value
from megatron.reports.uncertainty import count_seeds_needed
from tools.docs import card_page
from tools.docs.record_configuration import (
    LEADERBOARD,
    SECOND_TIER,
    ConfigurationChange,
    describe_changes,
    find_configuration_change,
)

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path("docs/claims.md")
CLAIMS = Path("tools/docs/claims.yml")
RESULTS = ROOT / "docs" / "results"
TEST_POWER, MAX_SEEDS = 0.8, 100
"""Probability of deciding a claim with the stated number of seeds, and the largest number stated."""

REPRODUCED, CONTRADICTED, UNDECIDED = "reproduced", "contradicted", "undecided"
OUTDATED, UNTESTED = "outdated record", "not tested"
VERDICTS = (REPRODUCED, CONTRADICTED, UNDECIDED, OUTDATED, UNTESTED)

INTRODUCTION = """# Claims of the papers

<!-- Written by `make docs` from tools/docs/claims.yml and docs/results: change those, not this page. -->

Each row is a claim of a paper that compares two numbers, with the published ratio and ours. Ratios below 1 are in favor
of the claim. **Everything here is at small sizes**, which [the last table](#records) states for each record. A verdict
holds for its size, text and learning rate, and for no other. The *second tier* (`zoo_3m`) has four times the parameters
and five times the training. Claims that were not reproduced before it was trained are tested there too, if it has the
same methods.

- **reproduced**, **contradicted**: the difference is significant, in the direction of the claim or against it.
- **undecided**: it is not significant, or there is one seed.
- **outdated record**: a method was trained without keys that its experiment's file now sets (for `zoo`: its file in
  `configs/position/`) and that define it, so the record is of another method. It must be measured again before it
  decides anything.
- **not tested**: there is no record.

*Ours* is the geometric mean of the ratios of equal seeds (for accuracies the mean difference in points), with its 95% t
interval, which is not corrected. p is from a paired two-sided t-test, corrected by Holm over the {tests} tests of this
page, so a claim may be undecided although its interval excludes 1. *Seeds* is the number of seeds with which this test
would find a difference of the measured size with a probability of {power:.0%}, at the level {level} that the smallest p
of the page must reach. It is estimated from the deviation of few seeds, so it is rough; one seed gives no estimate.

*Set since* names the keys that the experiment's file sets now and that the record was trained without, except for keys
without effect on its methods. They are found by comparing hashes: a record's run is named by a hash of the keys that
decide a training (`tools/docs/record_configuration.py`). If such keys do not define the method (`weight_decay`,
`decay_positions`), the claim keeps its verdict, for the settings of the record. *unknown*: the record has no such hash,
or no keys explain it.
"""


@dataclass(frozen=True)
class Outcome:
    """Claim with its verdict, and the numbers behind it."""

    claim: str
    source: str
    record: str | None
    verdict: str
    published: str = "–"
    metric: Metric | None = None
    differences: tuple[float, ...] = ()
    """Differences of each seed, in favor of the claim if negative: of logarithms, or of accuracies."""
    p: float = math.nan
    holm_p: float = math.nan
    set_since: str = "–"
    """Keys that the experiment's file has set since the record."""

    @property
    def is_tested(self) -> bool:
        """True if the claim has a p value."""
        return not math.isnan(self.p)


@cache
def _read_record_file(name: str) -> tuple[list[Record], Path]:
    path = next(path for path in (RESULTS / "small" / f"{name}.json", RESULTS / f"{name}.json") if path.is_file())
    return read_records(path), path


def _select_records(name: str, cell: str, metric: str) -> list[Record]:
    """Return the records of a cell such as `log@4x` or `log@256`, one per seed.

    Raises:
        ValueError: there are none, or several of a seed.
    """
    method, _, place = cell.rpartition("@")
    found = []
    for record in _read_record_file(name)[0]:
        length = record.train_length * int(place[:-1]) if place.endswith("x") else int(place)
        if (record.method, record.metric, record.axis, record.length) == (method, metric, "length", length):
            found.append(record)
    if not found or max(Counter(record.seed for record in found).values()) > 1:
        raise ValueError(f"{CLAIMS}: {cell} of {name}: expected a record for each seed, found {len(found)}")
    return found


def _format_published_ratios(name: str, cells: Sequence[str], names: dict[str, str]) -> str:
    """Format the range of published ratios of two cells over the tables of an experiment; a dash if there are none."""
    experiment = read_experiment(_read_record_file(name)[1])
    ratios = []
    for table in experiment.published if experiment is not None else ():
        values = []
        for cell in cells:
            method, _, place = cell.rpartition("@")
            row = table.rows.get(names.get(method, method))
            lengths = dict(zip(table.lengths, row or (), strict=bool(row)))
            values.append(lengths.get(table.train_length * int(place[:-1])) if place.endswith("x") else None)
        if None not in values and table.metric == "perplexity":
            ratios.append(values[0] / values[1])
    if not ratios:
        return "–"
    low, high = (f"{ratio:.3f}" if ratio >= 0.01 else f"{ratio:.1g}" for ratio in (min(ratios), max(ratios)))
    return low if low == high else f"{low} to {high}"


def list_outcomes(content: dict[str, Any]) -> list[list[Outcome]]:
    """Measure all claims, and reach verdicts with one correction for the whole page.

    Args:
        content: content of claims.yml.

    Returns:
        Outcomes of each paper.
    """
    papers = [[_measure(row) for claim in paper["claims"] for row in _list_rows(claim)] for paper in content["papers"]]
    tested = [outcome for outcomes in papers for outcome in outcomes if outcome.is_tested]
    corrected = dict(zip(map(id, tested), apply_holm_correction([each.p for each in tested]), strict=True))
    return [
        [_decide(each, corrected[id(each)]) if each.is_tested else each for each in outcomes] for outcomes in papers
    ]


def _list_rows(claim: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a claim as its experiment measures it, and as the second tier does if it has the same methods."""
    if "untested" not in claim and "published" not in claim:
        names = claim.get("quoted", claim["record"]), claim["compare"], claim.get("names", {})
        claim = {**claim, "published": _format_published_ratios(*names)}
    yield claim
    if cells := claim.get("second_tier"):
        yield {**claim, "record": SECOND_TIER, "compare": cells}


def _measure(claim: dict[str, Any]) -> Outcome:
    if "untested" in claim:
        return Outcome(f"{claim['claim']} ({claim['untested']})", claim["source"], None, UNTESTED)
    record, cells, metric = claim["record"], claim["compare"], get_metric(claim.get("metric", "perplexity"))
    own, other = (_select_records(record, cell, metric.name) for cell in cells)
    pairs = pair_by_seed(own, other)
    if metric.comparison == "ratio":
        differences = tuple(math.log(left.value) - math.log(right.value) for left, right in pairs)
    else:
        differences = tuple(right.value - left.value for left, right in pairs)
    changes = {each[0].method: _find_change(record, each[0]) for each in (own, other)}
    is_outdated = any(change.redefines_method for change in changes.values())
    p = math.nan
    if len(differences) > 1 and not is_outdated:
        p = float(stats.ttest_1samp(differences, 0.0).pvalue)
    verdict = OUTDATED if is_outdated else UNDECIDED
    where = dict.fromkeys(_format_place(cell) for cell in cells)
    tier = ", second tier" if record == SECOND_TIER else ""
    text = f"{claim['claim']} ({' against '.join(where)}{tier})"
    published, set_since = claim["published"], describe_changes(changes)
    return Outcome(text, claim["source"], record, verdict, published, metric, differences, p, set_since=set_since)


def _find_change(name: str, record: Record) -> ConfigurationChange:
    """Find what has changed since a record in the files of its experiment, if it is of one or of the leaderboard.

    The methods of the second tier are those of the experiments.
    """
    if name == SECOND_TIER:
        return ConfigurationChange({})
    if name != LEADERBOARD and _read_record_file(name)[1].parent.name != "small":
        return ConfigurationChange({}, is_known=False)
    return find_configuration_change(name, record)


def _format_place(cell: str) -> str:
    place = cell.rpartition("@")[2]
    return format_multiple(int(place[:-1])) if place.endswith("x") else f"{place} tokens"


def _decide(outcome: Outcome, holm_p: float) -> Outcome:
    verdict = UNDECIDED
    if holm_p < SIGNIFICANCE_LEVEL:
        verdict = REPRODUCED if statistics.fmean(outcome.differences) < 0 else CONTRADICTED
    return replace(outcome, holm_p=holm_p, verdict=verdict)


def _format_outcome(outcome: Outcome, level: float) -> str:
    """Format the row of a claim. `level` is the p value that the smallest one of the page must reach."""
    if outcome.metric is None:
        return f"| {outcome.claim} | {outcome.source} | – | – | – | – | **{outcome.verdict}** | – |"
    num_seeds, mean = len(outcome.differences), statistics.fmean(outcome.differences)
    bounds: tuple[float, ...] = ()
    needed = "not computable"
    if num_seeds > 1:
        deviation = statistics.stdev(outcome.differences)
        half_width = float(stats.t.ppf(0.975, num_seeds - 1)) * deviation / math.sqrt(num_seeds)
        bounds = (mean - half_width, mean + half_width)
        count = count_seeds_needed(deviation, abs(mean), level, TEST_POWER, MAX_SEEDS)
        needed = f"over {MAX_SEEDS}" if count is None else str(count)
    if outcome.verdict in (REPRODUCED, CONTRADICTED, OUTDATED):
        needed = "–"
    if outcome.metric.comparison == "ratio":
        ours, interval = f"{math.exp(mean):.3f}", ", ".join(f"{math.exp(bound):.3f}" for bound in bounds)
    else:
        ours, interval = f"{-100 * mean:+.1f}", ", ".join(f"{-100 * bound:+.1f}" for bound in reversed(bounds))
    seeds = f"{num_seeds} seed{'s' * (num_seeds > 1)}"
    test = f", p {format_p_value(outcome.holm_p)}" if outcome.is_tested else ""
    ours += f" [{interval}]" if bounds else ""
    return (
        f"| {outcome.claim} | {outcome.source} | {outcome.published} | {ours}{test} | {outcome.record}, {seeds} "
        f"| {outcome.set_since} | **{outcome.verdict}** | {needed} |"
    )


def _describe_counts(outcomes: Sequence[Outcome]) -> str:
    counts = Counter(outcome.verdict for outcome in outcomes)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])


def render_page() -> str:
    """Render the page."""
    return "".join(_render_parts())


def _render_parts() -> Iterator[str]:
    content = yaml.safe_load((ROOT / CLAIMS).read_text(encoding="utf-8"))
    papers = list_outcomes(content)
    tests = sum(outcome.is_tested for outcomes in papers for outcome in outcomes)
    level = SIGNIFICANCE_LEVEL / tests
    yield INTRODUCTION.format(tests=tests, power=TEST_POWER, level=f"{level:.2g}")
    everything = [outcome for outcomes in papers for outcome in outcomes]
    yield f"\n**Of {len(everything)} comparisons: {_describe_counts(everything)}.**\n"
    for paper, outcomes in zip(content["papers"], papers, strict=True):
        yield f"\n## {paper['name']}\n\n{paper['reference']}.\nSetup: {paper['setup']}.\n"
        yield f"Of {len(outcomes)} comparisons: {_describe_counts(outcomes)}.\n"
        if "note" in paper:
            yield f"{textwrap.fill(paper['note'].strip(), 120, break_long_words=False)}\n"
        yield "\n| claim | source | published ratio | ours, p | record | set since | verdict | seeds |\n"
        yield "|---|---|---|---|---|---|---|---|\n"
        yield from (f"{_format_outcome(outcome, level)}\n" for outcome in outcomes)
    yield f"\n## Records\n\n{card_page.TABLE_HEAD}\n"
    for name in dict.fromkeys(outcome.record for outcome in everything if outcome.record is not None):
        trained = tuple(record for record in _read_record_file(name)[0] if record.parameters and record.step)
        yield f"{card_page.RecordedTrainings(name, trained).format_row()}\n"
    yield CONCLUSION


CONCLUSION = """
The text of `zoo` and `zoo_3m` is that of the [leaderboard](results/zoo.md); that of `tasks_mqar` is a task
([tasks.md](results/tasks.md)); [small.md](results/small.md) states those of the others.

To change a verdict, train the record again with more seeds, for example
`./deepy.py sweep small dape_t10 'sweep.seeds=[1, 2, 3, 4, 5]'`, replace the record, and run `make docs`.
"""
