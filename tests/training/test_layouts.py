"""Any division of model, sequences and batch between ranks gives the training of a single process.

This is a part of the table of `tools/parity/compare.py`: every dimension with two ranks, pairs of dimensions with four,
each with other methods, for two steps. The second step shows whether the first was clipped by the correct norm.
"""

import json
from dataclasses import astuple, replace
from pathlib import Path

import pytest
import torch
from forked import Forked

from tools.parity.cases import BATCH, METHODS, Layout, ParityCase
from tools.parity.compare import RANK_SCRIPT, CaseResult, compute_error_ratio

STEPS = 2
CDAPE = "cdape(kerple_log), window 20"
LAYERS = "rotary, window 9 | cdape(kerple_log)"
MUP = "muP, cdape(kerple_log)"
MUON = "Muon, cdape(kerple_log), grouped"
STABLE = "rotary, normalized, capped, z-loss"
SSMAX = "ssmax, cdape(kerple_log), window 20"
SINKS = "cdape(kerple_log), sinks, headwise gates"
GATED = "rotary, sinks in windows, gates"
TWO = [
    ParityCase(SSMAX, Layout(tensor=2, stage=3), steps=STEPS),
    ParityCase(SSMAX, Layout(context=2, stage=1), "bf16", STEPS),
    ParityCase("none", Layout(tensor=2), steps=STEPS),
    ParityCase(CDAPE, Layout(tensor=2, stage=3), steps=STEPS),
    ParityCase("kerple_log, untied", Layout(tensor=2, stage=1), "bf16", STEPS),
    ParityCase("rotary, randomized", Layout(context=2), steps=STEPS),
    ParityCase("pope, grouped", Layout(context=2, stage=1), steps=STEPS),
    ParityCase("xpos | fope, documents", Layout(context=2, stage=2), steps=STEPS),
    ParityCase("cdape(selfextend)", Layout(tensor=2, stage=1), steps=STEPS),
    ParityCase("kerple_log, continuous", Layout(context=2), steps=STEPS),
    ParityCase("cdape(rotary), grouped", Layout(tensor=2, stage=1), steps=STEPS),
    ParityCase("cdape(rotary), grouped", Layout(context=2, stage=2), steps=STEPS),
    ParityCase("fire", Layout(context=2, stage=2), steps=STEPS),
    ParityCase(CDAPE, Layout(context=2, stage=1), "bf16", STEPS),
    ParityCase("kerple_log per layer", Layout(pipeline=2), steps=STEPS),
    ParityCase(STABLE, Layout(pipeline=2), steps=STEPS),
    ParityCase(STABLE, Layout(context=2, stage=1), steps=STEPS),
    ParityCase("fire", Layout(pipeline=2, stage=1), "bf16", STEPS),
    ParityCase(LAYERS, Layout(pipeline=2, stage=1), steps=STEPS),
    ParityCase(LAYERS, Layout(context=2, stage=2), steps=STEPS),
    ParityCase(MUON, Layout(tensor=2, stage=1), steps=STEPS),
    ParityCase(MUON, Layout(data=2, stage=2), "bf16", STEPS),
    ParityCase("Lion, dape(kerple_log)", Layout(data=2, stage=2), steps=STEPS),
    ParityCase(MUP, Layout(pipeline=2, stage=1), steps=STEPS),
    ParityCase(MUP, Layout(tensor=2, stage=2), steps=STEPS),
    ParityCase(SINKS, Layout(tensor=2, stage=1), steps=STEPS),
    ParityCase(SINKS, Layout(context=2, stage=2), steps=STEPS),
    ParityCase(GATED, Layout(tensor=2), steps=STEPS),
    ParityCase(GATED, Layout(data=2, stage=3), "bf16", STEPS),
    ParityCase("stick-breaking, documents", Layout(context=2, stage=1), steps=STEPS),
    ParityCase("cdape(kerple_log), documents", Layout(tensor=2), steps=STEPS),
    ParityCase("rotary, documents", Layout(context=2, stage=1), steps=STEPS),
    ParityCase("cdape(kerple_log), documents", Layout(data=2, stage=3), steps=STEPS),
    ParityCase("fox, grouped", Layout(context=2, stage=2), steps=STEPS),
    ParityCase("talking_heads(alibi), grouped", Layout(tensor=2, stage=3), steps=STEPS),
]
FOUR = [
    ParityCase("llama4, rotary, documents", Layout(tensor=2, context=2, stage=1), steps=STEPS),
    ParityCase("cope", Layout(tensor=2, context=2, stage=1), steps=STEPS),
    ParityCase("transformer_xl", Layout(tensor=2, data=2, stage=2), steps=STEPS),
    ParityCase("learned", Layout(data=2, pipeline=2, stage=1), steps=STEPS),
    ParityCase("dape(alibi), recomputed", Layout(tensor=2, pipeline=2), steps=STEPS),
    ParityCase("t5", Layout(context=2, pipeline=2, stage=1), "bf16", STEPS),
    ParityCase("rotary", Layout(context=4, stage=1), steps=STEPS),
    ParityCase(STABLE, Layout(tensor=2, pipeline=2, stage=1), steps=STEPS),
    ParityCase(CDAPE, Layout(tensor=4, stage=1), steps=STEPS),
    ParityCase(CDAPE, Layout(pipeline=4), steps=STEPS),
    ParityCase(LAYERS, Layout(tensor=2, pipeline=2, stage=1), "bf16", STEPS),
    ParityCase(MUON, Layout(tensor=2, data=2, stage=2), steps=STEPS),
    ParityCase("cdape(fire), documents", Layout(tensor=2, context=2), steps=STEPS),
    ParityCase("cdape(kerple_log), documents", Layout(context=2, pipeline=2), steps=STEPS),
    ParityCase("mta(fox), window 20", Layout(tensor=2, context=2, stage=3), steps=STEPS),
    ParityCase("selective(rotary), documents", Layout(tensor=2, context=2, stage=1), steps=STEPS),
    ParityCase("cdape(fox) per layer, documents", Layout(tensor=2, context=2, stage=1), steps=STEPS),
    ParityCase("fox, grouped", Layout(tensor=2, pipeline=2), steps=STEPS),
]


def shrink(case: ParityCase) -> ParityCase:
    """Return the case at its minimum size.

    Stages need layers, and their schedule and data-parallel sums need several micro-batches; some methods differ
    between layers, and muP compares depths.
    """
    layout, is_deep = case.layout, case.method in (LAYERS, MUP)
    return replace(
        case,
        layers=case.layers if layout.pipeline > 1 or is_deep else 2,
        micro_batch=1 if layout.data * layout.pipeline > 1 else 2,
    )


def alone(case: ParityCase) -> ParityCase:
    """Return the case in one process, with the whole batch at once."""
    return replace(case.to_single_process(), micro_batch=BATCH)


TWO, FOUR = ([shrink(case) for case in cases] for cases in (TWO, FOUR))
CASES = TWO + FOUR


def trained(cases: list[ParityCase], folder: Path) -> list[CaseResult]:
    """Return the results of the first rank of each case, run with as many forked ranks as needed."""
    world = cases[0].layout.sizes.world_size
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps([case.to_json() for case in cases]), encoding="utf-8")
    ranks = [
        Forked(RANK_SCRIPT, str(folder), str(rank), str(world), output=folder / f"{rank}.txt") for rank in range(world)
    ]
    assert [rank.wait(300) for rank in ranks] == [0] * world, "\n".join(rank.printed() for rank in ranks)
    return json.loads((folder / "0.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[ParityCase, CaseResult]:
    folder = tmp_path_factory.mktemp("layouts")
    worlds = {"one": list(dict.fromkeys(map(alone, CASES))), "two": TWO, "four": FOUR}
    every: dict[ParityCase, CaseResult] = {}
    for name, group in worlds.items():
        # The ranks join once per mesh. Stages come last, because afterwards ranks have built different modules, whose
        # numbers ZeRO 3 compares.
        cases = sorted(group, key=lambda case: astuple(case.layout.sizes)[::-1])
        every |= zip(cases, trained(cases, folder / name), strict=True)
    return every


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.method}; {case.layout}; {case.precision}")
def test_every_layout_trains_as_one_process(found: dict[ParityCase, CaseResult], case: ParityCase) -> None:
    error_ratio = compute_error_ratio(found[case], found[alone(case)], case.precision)
    assert max(error_ratio.values()) <= 1, error_ratio


def test_the_comparison_can_fail(found: dict[ParityCase, CaseResult]) -> None:
    """Omitting a step, or counting a tied embedding twice in the norm, exceeds the tolerance by far."""
    right = found[alone(shrink(ParityCase(CDAPE, Layout(), steps=STEPS)))]
    losses = [*right["losses"][1:], right["losses"][-1]]
    assert compute_error_ratio({**right, "losses": losses}, right, "fp32")["losses"] > 1
    assert (
        compute_error_ratio({**right, "norms": [2.26 / 2.17 * norm for norm in right["norms"]]}, right, "fp32")["norms"]
        > 1
    )
    assert compute_error_ratio({**right, "valid": float(torch.nan)}, right, "fp32")["losses"] > 1
    assert compute_error_ratio({**right, "parameters": right["parameters"] + 1}, right, "fp32")["losses"] > 1


def test_every_method_is_among_them() -> None:
    assert {case.method for case in CASES} == set(METHODS)
