"""However ranks divide a model, its sequences and its batch, they train what one process trains.

A part of the table that `tools/parity.py` makes: every layout of two ranks and the products of two dimensions with
four, each with another method, so that each method meets several layouts.
"""

import json
from itertools import cycle
from pathlib import Path

import pytest
import torch
from forked import Forked

from tools.parity import RANK, Found, judged
from tools.parity_cases import METHODS, Case, Layout, layouts, possible

EVERY = [(layout, precision) for precision in ("fp32", "bf16") for layout in layouts(2)]
TWO = [
    Case(method, layout, precision)
    for (layout, precision), method in zip(EVERY, cycle(METHODS), strict=False)
    if possible(Case(method, layout, precision))
]
CDAPE = "cdape(kerple_log), window 20"
FOUR = [
    Case(CDAPE, Layout(tensor=2, context=2, stage=1)),
    Case("rotary, randomized", Layout(context=4, stage=0)),
    Case("fire", Layout(pipeline=4)),
    Case(CDAPE, Layout(tensor=2, pipeline=2, stage=1)),
    Case("kerple_log, untied", Layout(tensor=4, stage=1), "bf16"),
    Case("t5", Layout(context=2, pipeline=2, stage=1), "bf16"),
    Case("learned", Layout(data=2, pipeline=2, stage=1)),
    Case("transformer_xl", Layout(tensor=2, data=2, stage=3)),
    Case("cope", Layout(context=2, data=2, stage=2)),
]
CASES = TWO + FOUR


def trained(cases: list[Case], folder: Path) -> list[Found]:
    """What the first of as many forked ranks as the cases need found of each."""
    world = cases[0].layout.sizes.world
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps([case.as_json() for case in cases]), encoding="utf-8")
    ranks = [Forked(RANK, str(folder), str(rank), str(world), output=folder / f"{rank}.txt") for rank in range(world)]
    assert [rank.wait(300) for rank in ranks] == [0] * world, "\n".join(rank.printed() for rank in ranks)
    return json.loads((folder / "0.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Found]:
    folder = tmp_path_factory.mktemp("layouts")
    alone = list(dict.fromkeys(case.alone() for case in CASES))
    worlds = {"one": alone, "two": sorted(TWO, key=str), "four": FOUR}
    every: dict[Case, Found] = {}
    for name, cases in worlds.items():
        every |= zip(cases, trained(cases, folder / name), strict=True)
    return every


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.method}; {case.layout}; {case.precision}")
def test_every_layout_trains_as_one_process(found: dict[Case, Found], case: Case) -> None:
    excess = judged(found[case], found[case.alone()], case.precision)
    assert max(excess.values()) <= 1, excess


def test_what_is_compared_can_differ(found: dict[Case, Found]) -> None:
    """A step that is left out, and a norm that counts a tied embedding twice, are far beyond what is allowed."""
    right = found[Case(CDAPE, Layout())]
    losses = [*right["losses"][1:], right["losses"][-1]]
    assert judged({**right, "losses": losses}, right, "fp32")["losses"] > 1
    assert judged({**right, "norms": [2.26 / 2.17 * norm for norm in right["norms"]]}, right, "fp32")["norms"] > 1
    assert judged({**right, "valid": float(torch.nan)}, right, "fp32")["losses"] > 1
    assert judged({**right, "parameters": right["parameters"] + 1}, right, "fp32")["losses"] > 1
