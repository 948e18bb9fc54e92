"""Exports compute what this project computes, in a process that cannot import it."""

from itertools import islice
from pathlib import Path

import pytest

from tools.export_cases import Case, methods, places, shapes, tolerance
from tools.export_matrix import differences

EVERY_METHOD = list(methods())
CASES = {
    "methods, first half": EVERY_METHOD[::2],
    "methods, second half": EVERY_METHOD[1::2],
    "places and shapes": [*islice(places(), 0, None, 5), *shapes()],
}


@pytest.mark.parametrize("cases", CASES.values(), ids=CASES)
def test_exports_equal_the_project(cases: list[Case], tmp_path: Path) -> None:
    for case, apart in differences(cases, tmp_path).items():
        assert max(apart.values()) <= tolerance(), (case.title, apart)


def test_every_method_is_among_them() -> None:
    pairs = {(case.config().position.pos_emb, case.config().position.score_processor) for case in EVERY_METHOD}
    assert len(pairs) == len(EVERY_METHOD) == 66
    assert any(case.config().position.randomized_positions for case in places())
