"""Page of the papers' claims: it is current, and its numbers agree with a computation by hand from the records."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy import stats

from megatron.config.schema import Config
from megatron.position import registry
from megatron.reports.records import Record, read_records
from megatron.reports.uncertainty import count_seeds_needed
from megatron.sweeps.spec import compute_run_identity, read_sweep
from tools.docs import claims_page
from tools.docs.record_configuration import (
    SECOND_TIER,
    ConfigurationChange,
    describe_changes,
    find_configuration_change,
    list_configurations,
)

ROOT = Path(__file__).resolve().parents[2]
CONTENT = yaml.safe_load((ROOT / claims_page.CLAIMS).read_text(encoding="utf-8"))
CLAIMS = [claim for paper in CONTENT["papers"] for claim in paper["claims"]]


def read_values(name: str, method: str, length: int) -> dict[int, float]:
    rows = json.loads((ROOT / "docs" / "results" / "small" / f"{name}.json").read_text(encoding="utf-8"))
    return {
        row["seed"]: row["perplexity"]
        for row in rows
        if (row["method"], row["length"], row.get("axis")) == (method, length, None) and "perplexity" in row
    }


def test_the_page_is_current() -> None:
    assert (ROOT / claims_page.PAGE).read_text(encoding="utf-8") == claims_page.render_page(), "run: make docs"


def test_a_row_by_hand() -> None:
    """CDAPE against KERPLE at 16 training lengths, which are 1,024 tokens: 17.1153 and 42.2081 in the paper."""
    cdape, kerple = (read_values("dape_t10", method, 1024) for method in ("cdape", "kerple"))
    assert sorted(cdape) == sorted(kerple)
    logs = [math.log(cdape[seed] / kerple[seed]) for seed in sorted(cdape)]
    test = stats.ttest_rel(*([math.log(values[seed]) for seed in sorted(cdape)] for values in (cdape, kerple)))
    (row,) = (line for line in claims_page.render_page().splitlines()
              if line.startswith("| CDAPE is better than KERPLE (16×) |"))  # fmt: skip
    assert f"| {17.1153 / 42.2081:.3f} |" in row
    low, high = np.exp(stats.t.interval(0.95, len(logs) - 1, np.mean(logs), stats.sem(logs)))
    assert f"| {math.exp(np.mean(logs)):.3f} [{low:.3f}, {high:.3f}]" in row
    (outcome,) = (each for outcomes in claims_page.list_outcomes(CONTENT) for each in outcomes
                  if each.claim == "CDAPE is better than KERPLE (16×)")  # fmt: skip
    assert outcome.p == pytest.approx(test.pvalue)
    assert outcome.holm_p >= outcome.p


def describe_method(config: Config) -> dict[str, Any]:
    """Return the keys that define a method, with all options."""
    position = config.position
    names = {*position.encodings, *position.processors, *position.temperatures}
    methods = {method["name"]: method for method in registry.describe_methods(names)[0]}
    keys = position.model_dump()
    for key, own in (("pos_emb_options", position.encodings), ("score_processor_options", position.processors)):
        keys[key] = {n: v for name in own if name in methods for n, v in methods[name]["options"].items()} | keys[key]
    if all(method["parameters"] == "none" for method in methods.values()):
        del keys["pos_emb_per_layer"]
    return keys


def test_the_second_tier_has_the_same_methods() -> None:
    claims = [claim for claim in CLAIMS if "second_tier" in claim]
    assert claims
    for claim in claims:
        for cell, larger in zip(claim["compare"], claim["second_tier"], strict=True):
            (method, place), (other, other_place) = (each.split("@") for each in (cell, larger))
            first = describe_method(list_configurations(claim["record"])[method])
            assert (first, place) == (describe_method(list_configurations(SECOND_TIER)[other]), other_place), claim


def test_verdicts_follow_the_corrected_test_and_its_direction() -> None:
    outcomes = [outcome for outcomes in claims_page.list_outcomes(CONTENT) for outcome in outcomes]
    tested = [outcome for outcome in outcomes if outcome.is_tested]
    assert min(outcome.holm_p for outcome in tested) == pytest.approx(len(tested) * min(each.p for each in tested))
    for outcome in tested:
        direction = claims_page.REPRODUCED if np.mean(outcome.differences) < 0 else claims_page.CONTRADICTED
        assert outcome.verdict == (direction if outcome.holm_p < 0.05 else claims_page.UNDECIDED)
    for outcome in outcomes:
        if len(outcome.differences) == 1:
            assert outcome.verdict in (claims_page.UNDECIDED, claims_page.OUTDATED)
            assert "not computable" in claims_page._format_outcome(outcome, 0.05) or (
                outcome.verdict == claims_page.OUTDATED
            )


def test_the_advice_about_kernels_agrees_with_the_records() -> None:
    """The pages say that small models contradict KERPLE's order of kernels, and reproduce CDAPE's gain."""
    verdicts = {each.claim: each.verdict for outcomes in claims_page.list_outcomes(CONTENT) for each in outcomes}
    assert verdicts["The logarithmic kernel is better than the power kernel (32×)"] == claims_page.CONTRADICTED
    assert verdicts["CDAPE is better than KERPLE (1×)"] == claims_page.REPRODUCED
    assert verdicts["CDAPE is better than KERPLE (16×)"] == claims_page.REPRODUCED
    logarithmic, power = (
        [read_values("kerple_t3", name, length) for length in (64, 128, 256, 512, 1024, 2048)]
        for name in ("log", "power")
    )
    for log, other in zip(logarithmic, power, strict=True):
        assert all(other[seed] < log[seed] for seed in log)


@pytest.mark.parametrize(
    ("experiment", "method", "run", "keys", "redefines"),
    [
        (
            "kerple_t3", "t5", "t5-a3eed43b",
            {"pos_emb_options": {"root_scale": True, "xavier_init": True}, "weight_decay": 0.0}, True,
        ),
        ("kerple_t3", "log", "kerple_log-6ed04004", {"weight_decay": 0.0}, False),
        ("dape_t10", "fire", "fire-ee78bc0c", {"pos_emb_per_layer": True, "decay_positions": True}, True),
        ("dape_t10", "cdape", "cdape+kerple_log-c1542271", {"decay_positions": True}, False),
        ("dape_t10", "rope", None, {}, False),
    ],
)  # fmt: skip
def test_a_run_proves_what_its_file_has_set_since(
    experiment: str, method: str, run: str | None, keys: dict[str, Any], redefines: bool
) -> None:
    """Runs of records before 2026-11-29, and one of a current record."""
    path = ROOT / "docs" / "results" / "small" / f"{experiment}.json"
    record = next(record for record in read_records(path) if record.method == method)
    if run is not None:
        record = record.replace(run=f"runs/small/runs/{run}/seed_1", dataset="data/python/test_text_document")
    change = find_configuration_change(experiment, record)
    assert (change.keys, change.redefines_method, change.is_known) == (keys, redefines, True)


def test_a_run_of_the_current_file_is_current_and_an_unknown_one_says_so() -> None:
    (member,) = (each for each in read_sweep(["small", "dape_t2"]).members if each.variant == "fire")
    record = Record(
        method="fire", train_length=64, length=64, protocol="last", metric="perplexity", value=5.0, tokens=64, seed=1,
        run=f"runs/{compute_run_identity(member.config)}/seed_1",
    )  # fmt: skip
    current = find_configuration_change("dape_t2", record)
    assert (current.keys, current.is_known) == ({}, True)
    unknown = [find_configuration_change("dape_t2", record.replace(run=run)) for run in ("a/fire-0123abcd/s", "a/b/s")]
    assert [change.is_known for change in unknown] == [False, False]
    assert describe_changes({"fire": current}) == "–"
    assert describe_changes({"fire": current, "other": unknown[0]}) == "unknown"


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        ("fox", {}),
        ("kerple_log", {}),
        ("t5", {}),
        ("stick_breaking", {"softmax_type": "stick-breaking-remainder"}),
        ("smollm3", {"pos_emb_options": {"base": 2000000}}),
    ],
)
def test_the_leaderboard_is_compared_with_the_files_of_methods(method: str, keys: dict[str, Any]) -> None:
    """Default options that T5's file spells out change nothing, but a remainder that no token gets does."""
    record = next(record for record in read_records(ROOT / "docs" / "results" / "zoo.json") if record.method == method)
    change = find_configuration_change("zoo", record)
    assert (change.keys, change.redefines_method, change.is_known) == (keys, bool(keys), True)


def test_keys_of_both_methods_are_named_once() -> None:
    changes = {
        "a": ConfigurationChange({"weight_decay": 0.0}),
        "b": ConfigurationChange({"weight_decay": 0.0, "pos_emb_options": {"released": True}}),
    }
    assert describe_changes(changes) == "`weight_decay: 0.0`; b: `pos_emb_options: {released: true}`"


def test_every_published_table_has_a_claim() -> None:
    recorded = {claim.get("record") for claim in CLAIMS} | {claim.get("quoted") for claim in CLAIMS}
    for path in sorted((ROOT / "configs" / "experiment").glob("*.yml")):
        if "published" in yaml.safe_load(path.read_text(encoding="utf-8")).get("sweep", {}):
            assert path.stem in recorded or path.stem == "dape_t1", f"{path.stem} has no claim in {claims_page.CLAIMS}"


@pytest.mark.parametrize("cell", ["cdappe@16x", "cdape@3x", "cdape@1000"])
def test_an_unknown_cell_is_an_error(cell: str) -> None:
    claim: dict[str, Any] = {"claim": "A", "source": "B", "record": "dape_t10", "compare": [cell, "kerple@16x"]}
    with pytest.raises(ValueError, match=f"{cell} of dape_t10"):
        claims_page.list_outcomes({"papers": [{"claims": [claim]}]})


@pytest.mark.parametrize(("effect", "seeds"), [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10)])
def test_seeds_needed_agree_with_tables_of_power(effect: float, seeds: int) -> None:
    """Sizes of paired samples for a power of 80% at the 5% level (Cohen 1988, tables of chapter 2)."""
    assert count_seeds_needed(0.5, 0.5 * effect, 0.05, 0.8, 300) == seeds
    assert count_seeds_needed(0.5, 0.5 * effect, 0.05, 0.8, seeds - 1) is None
